"""Sessions that are given away meanwhile: what arrives, what dies and what is repeated, on real nodes without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from understudy import McpServer, tool
from understudy.node import sharing
from understudy.node.paging import Ready
from understudy.node.sharing import Sharing
from understudy.placement import ISOLATED
from understudy.testing.offline import OfflineServer

from ..mcp_calls import calls, command, until_called
from . import kernel as k
from .test_drain import PATIENCE, Nodes, activations, cluster
from .test_handoffs import agent, session, to
from .test_mcp import agent as agent_with_servers
from .test_sharing import give, occupied
from .tool_runner import Runner

QUESTION = ("request_user_input", {"prompt": "Which?"})

MOVED = "session_moved"


@pytest.fixture
def server() -> Iterator[OfflineServer]:
    """The model that all nodes ask."""
    with OfflineServer() as found:
        yield found


async def asked(node: k.Kernel, session_id: str, spec: dict[str, Any]) -> None:
    """Have a new session ask a person; it is in no frame then."""
    await node.spawn(session_id, spec)
    await node.send(session_id)
    await node.paused(session_id)


async def answered(node: k.Kernel, session_id: str, text: str = "this") -> None:
    """Answer what the session asks."""
    [question] = await node.ask("read", "questions", [session_id], {})
    said = {"call_id": question["call_id"], "asked": question["asked"], "decision": "ok", "text": text}
    await node.ask("decide", session_id, [said])


async def moves(node: k.Kernel, session_id: str) -> int:
    """How often the session has moved."""
    return (await node.types(session_id)).count(MOVED)


def held_commit(node: k.Kernel) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold the next commit that gives sessions of a node away: set when it is about to be made, and what has it made
    when it is set."""
    held, let_go = asyncio.Event(), asyncio.Event()
    point, send = node.point, node.service.sharing._send
    giving = False

    async def sent(chosen: list[Ready], node_id: str, count: int) -> int:
        nonlocal giving
        giving = True
        return await send(chosen, node_id, count)

    async def holding(label: str, worker: k.Worker | None) -> None:
        nonlocal giving
        if label == "before the commit" and giving:
            giving = False
            held.set()
            await let_go.wait()
        await point(label, worker)

    node.service.sharing._send = sent  # type: ignore[method-assign]
    node.point = holding  # type: ignore[method-assign]
    return held, let_go


async def ended_with_answers(nodes: Nodes, run_id: str) -> dict[str, Any]:
    """The run's row once it has ended; what `s` asks until then is answered: a script starts over with each message."""
    end = asyncio.create_task(nodes.end("s", run_id))
    while not (await asyncio.wait([end], timeout=0.05))[0]:
        node = nodes.kernels[0]
        if await node.ask("read", "questions", ["s"], {}):
            await answered(node, "s")
    return await end


CHANGES: dict[str, Callable[[k.Kernel], Awaitable[Any]]] = {
    "steer": lambda node: node.ask("steer", "s", {"content": "in French", "interrupt": False}),
    "interrupt": lambda node: node.ask("steer", "s", {"content": "in French", "interrupt": True}),
    "cancel": lambda node: node.ask("cancel", "s", None, "enough"),
    "close": lambda node: node.ask("close", "s", "enough"),
    "input": lambda node: node.send("s", run_id="second"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("through", ["giver", "taker"])
@pytest.mark.parametrize("change", CHANGES)
async def test_what_arrives_while_a_session_is_given_away_counts(
    postgres: str, server: OfflineServer, tmp_path: Path, change: str, through: str
) -> None:
    """Given a session in the middle of a run, about to be given away, when something is asked of it before that is
    committed, then it is done, wherever it was asked, and the session goes on at one place."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        held, let_go = held_commit(b)
        await asked(b, "s", k.spec(k.script([QUESTION], "done", "done"), ["request_user_input"]))
        async with occupied(b, tmp_path):
            await answered(b, "s")
            given = asyncio.create_task(give(nodes))
            await asyncio.wait_for(held.wait(), PATIENCE)
            await asyncio.wait_for(CHANGES[change](b if through == "giver" else a), PATIENCE)
            let_go.set()
            assert await given <= 1
            ended = await ended_with_answers(nodes, "r")
            if change == "input":
                assert (await ended_with_answers(nodes, "second"))["status"] == "completed"
        await nodes.end("busy")
        assert ended["status"] == ("cancelled" if change in ("cancel", "close") else "completed"), ended
        assert await moves(a, "s") <= 1
        if change in ("steer", "interrupt"):
            said = [message["content"] for message in await a.messages("s") if message["role"] == "user"]
            assert said == ["go", "in French"]


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["before the commit", "after the commit"])
async def test_a_giver_that_dies_has_given_away_or_not(
    postgres: str, server: OfflineServer, tmp_path: Path, label: str
) -> None:
    """Given a session that is being given away, when the service that does it is killed around the commit, then the
    session is activated at one place, and runs once."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        async with occupied(b, tmp_path):
            await b.spawn("s", k.spec())
            await b.send("s")
            point, killed = b.point, asyncio.Event()

            async def deadly(at: str, worker: k.Worker | None) -> None:
                if at == label and not killed.is_set():
                    killed.set()
                    b.kill_node()
                await point(at, worker)

            b.point = deadly  # type: ignore[method-assign]
            given = asyncio.create_task(give(nodes))
            await asyncio.wait_for(killed.wait(), PATIENCE)
            await b.quiet()
            await asyncio.wait([given], timeout=PATIENCE)
            if label == "after the commit":
                assert (await nodes.end("s"))["status"] == "completed"
        assert (await nodes.end("s"))["status"] == "completed"
        await nodes.end("busy")
        assert await moves(a, "s") == (label == "after the commit" or (await a.info("s"))["node_id"] == "a")
        assert len(activations(await a.events("s"))) == 1
        assert server.stats.requests == 3


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["killed", "drained", "lost", "giver drained"])
async def test_what_happens_to_a_node_right_after_a_session_went_there(
    postgres: str, server: OfflineServer, tmp_path: Path, how: str
) -> None:
    """Given a session that was given to a node, when that one's service dies, or the node is drained or lost before
    the session begins there, then the session runs once, on a node that is there."""
    async with cluster(postgres, server, tmp_path, "a", "b", "c") as nodes:
        a, b, c = nodes.kernels
        async with occupied(b, tmp_path):
            await a.stop_frames()  # nothing begins there
            await b.spawn("s", k.spec())
            await b.send("s")
            assert await give(nodes) == 1
            if how == "killed":
                a.kill_node()
                await a.quiet()
                a.add_frame()
            elif how == "drained":
                await nodes.drain(a)
            elif how == "giver drained":
                await nodes.drain(b)
                a.add_frame()
            else:
                await a.lose()
                nodes.kernels = [c, b]
                nodes.names = ["b", "c"]
                generation = await c.ask("acquire", "successor", k.LEASE, "tests")
                b.generation = c.generation = generation
                for kernel in (b, c):
                    await kernel.take_over(generation, nodes.names)
            if how in ("killed", "giver drained"):
                assert (await nodes.end("s"))["status"] == "completed"
        assert (await nodes.end("s"))["status"] == "completed"
        await nodes.end("busy")
        assert len(activations(await c.events("s"))) == 1
        assert server.stats.requests == 3
        if how == "lost":
            nodes.kernels = [b, c]


@tool(num_cpus=1, on_crash="rerun")
def again() -> str:
    """Work in a process of its own that may be repeated."""
    return "did it"


@pytest.mark.thorough
async def test_a_tool_in_a_process_of_its_own_keeps_its_session(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a session that was chosen to be given away in a later transaction, when it meanwhile gets a frame, begins a
    tool in a process of its own, and loses the frame, then it stays: the tool is at work once."""
    runner = Runner()
    runner.gate.clear()
    send, held, let_go = Sharing._send, asyncio.Event(), asyncio.Event()

    async def sent(self: Sharing, chosen: list[Ready], node_id: str, count: int) -> int:
        if chosen[0].session_id == "s":
            held.set()
            await let_go.wait()
        return await send(self, chosen, node_id, count)

    with patch.object(sharing, "AT_ONCE", 1), patch.object(Sharing, "_send", sent):
        async with cluster(postgres, server, tmp_path, "a", "b", runner=runner) as nodes:
            a, b = nodes.kernels
            runner.kernel = b
            async with occupied(b, tmp_path):
                await b.spawn("one", k.spec())
                await b.send("one")
                await b.spawn("s", k.spec(k.script([("again", {})], "done"), [again]))
                await b.send("s")
                given = asyncio.create_task(give(nodes))
                await asyncio.wait_for(held.wait(), PATIENCE)
            await asyncio.wait_for(runner.at_work.wait(), PATIENCE)
            worker = b.holder("s")
            assert worker is not None
            b.kill(worker, replace=False)
            async with asyncio.timeout(PATIENCE):
                while "s" not in b.service.frames.paging.ready:  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.01)
            runner.at_work.clear()
            let_go.set()
            count = await given
            b.add_frame()
            moved = await moves(a, "s")
            if moved:
                await asyncio.wait_for(runner.at_work.wait(), PATIENCE)
            twice = len(runner.begun) > 1 and not runner.cancelled.is_set()
            runner.gate.set()
            assert (await nodes.end("s"))["status"] == "completed"
            assert (count, moved, twice) == (1, 0, False)
            assert runner.begun == ["s/r/1/0"] or len(runner.begun) == 1


@pytest.mark.thorough
async def test_a_fork_stays_with_its_workspace(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a session that has worked in its workspace at a node, when a fork of it waits there, then the fork stays:
    what its messages tell of is in that workspace."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        await b.run("old", k.spec(workspace=str(tmp_path)))
        async with occupied(b, tmp_path):
            last = (await b.messages("old"))[-1]["seq"]
            await b.ask("fork", "old", {"session_id": "fork", "at": last})
            await b.send("fork")
            assert await give(nodes) == 0
        assert (await nodes.end("fork"))["status"] == "completed"
        assert activations(await a.events("fork")) == [("b", "ready")]


@pytest.mark.thorough
async def test_a_session_stays_with_the_workspace_of_an_agent_that_it_was_under(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given an agent that has worked in its workspace, and handed off to one that has none but may hand back, when the
    session waits, then it stays: it has files there."""
    second = agent("second", "-", [QUESTION], "done", targets=("first",), tools=["request_user_input"])
    first = agent("first", [to("second", reason="why")], targets=("second",), workspace=str(tmp_path))
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        _, b = nodes.kernels
        await asked(b, "s", session(first, second))
        async with occupied(b, tmp_path):
            await answered(b, "s")
            assert await give(nodes) == 0
        assert (await nodes.end("s"))["status"] == "completed"


@pytest.mark.thorough
async def test_a_session_stays_with_its_mcp_server(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a session with an MCP server of its own that it has used, when it waits again, then it goes on with that
    server and what it remembers."""
    spec = agent_with_servers(
        [("test_look", {"word": "x"}), QUESTION], [("test_look", {"word": "y"})], "done",
        servers=[McpServer("test", command=command(tmp_path))], tools=["request_user_input"],
    )  # fmt: skip
    (tmp_path / "go").touch()
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        _, b = nodes.kernels
        await asked(b, "s", spec)
        async with occupied(b, tmp_path):
            await answered(b, "s")
            await give(nodes)
            if (await b.info("s"))["node_id"] == "a":
                assert (await nodes.end("s"))["status"] == "completed"
        assert (await nodes.end("s"))["status"] == "completed"
        assert calls(tmp_path) == ["start", "look x", "look y"]


@pytest.mark.thorough
async def test_a_session_stays_with_the_files_of_its_sub_agents(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given an agent without a workspace whose sub-agent has worked in one, when it waits again, then it stays: the
    next sub-agent begins where it is."""
    child = k.spec("", name="child", hash="child", workspace=str(tmp_path))
    replies = [("spawn_agent", {"task": "one"})], [QUESTION], "done"
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        _, b = nodes.kernels
        await asked(b, "s", k.spec(k.script(*replies), ["spawn_agent", "request_user_input"], agents={"child": child}))
        async with occupied(b, tmp_path):
            await answered(b, "s")
            assert await give(nodes) == 0
        assert (await nodes.end("s"))["status"] == "completed"


@pytest.mark.thorough
async def test_a_call_of_a_server_keeps_its_session_when_the_service_knows_nothing_of_it(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a call of a server of all sessions of a node, whose session's process has died and that was written to
    since, when the node service was restarted as well, then the session stays: the call is made once."""
    servers = [McpServer("test", command=command(tmp_path), share="node")]
    spec = agent_with_servers([("test_look", {"word": "x"})], "done", servers=servers)
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        await b.spawn("s", spec)
        await b.send("s")
        await until_called(tmp_path, "look x")
        worker = b.holder("s")
        assert worker is not None
        b.kill(worker, replace=False)
        await b.until("s", "session_crashed")
        async with asyncio.timeout(PATIENCE):
            while (await b.info("s"))["status"] != "running":  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        await a.send("s", run_id="second")
        b.kill_node()
        await b.quiet()
        count = await give(nodes)
        if count:
            await until_called(tmp_path, "look x", 2)
        (tmp_path / "go").touch()
        b.add_frame()
        assert (await nodes.end("s"))["status"] == "completed"
        assert (count, calls(tmp_path)) == (0, ["start", "look x"])
        assert (await nodes.end("s", "second"))["status"] == "completed"


@pytest.mark.thorough
async def test_the_children_of_a_budgeted_tree_are_on_two_nodes(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a parent that waits for two sub-agents, when one of them is given away, then both results reach the parent,
    and the tree's account has what all three have used."""
    child = k.spec(k.script([QUESTION], "found"), ["request_user_input"], name="child", hash="child")
    replies = [("spawn_agent", {"task": "one"}), ("spawn_agent", {"task": "two"})], "done"
    budget = [{"scope": "tree", "tokens": 1_000_000, "rounds": 5}]
    parent = k.spec(k.script(*replies), ["spawn_agent"], agents={"child": child}, budget=budget)
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        await b.spawn("s", parent)
        await b.send("s")
        await b.until("s", "child_spawned", 2)
        tree = await b.ask("read", "tree", ["s"], {})
        one, two = [row["session_id"] for row in tree if row["session_id"] != "s"]
        for name in (one, two):
            await b.paused(name)
        async with occupied(b, tmp_path):
            await answered(b, one)
            await answered(b, two)
            assert await give(nodes, 1) == 1
            async with asyncio.timeout(PATIENCE):
                while all([(await a.info(name))["active"] for name in (one, two)]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        ended = await nodes.end("s")
        assert ended["status"] in ("completed", "budget_exceeded"), ended
        places = {activations(await a.events(name))[-1][0] for name in (one, two)}
        assert places == {"a", "b"}
        assert len(await a.results("s")) == 2
        await nodes.end("busy")
        assert server.stats.requests <= 5 + 2
        a.check()


@pytest.mark.thorough
async def test_a_session_in_a_process_of_its_own_is_given_away(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given sessions with `isolation="process"`, for which a node has no process, then they go to one that has, each
    activation in its own."""
    placement = f"own{ISOLATED}"
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        for name in ("one", "two"):
            await b.spawn(name, k.spec(placement=placement))
            await b.send(name)
        assert await give(nodes) == 2
        for _ in range(2):
            a.add_frame(placement)
        for name in ("one", "two"):
            assert (await nodes.end(name))["status"] == "completed"
            assert activations(await a.events(name)) == [("a", "moved")]
        assert server.stats.requests == 2


@pytest.mark.thorough
async def test_a_session_that_comes_back_finds_all_that_it_has_done(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a session whose beginning a frame remembers, when it goes on elsewhere and comes back to that frame, then
    its model is asked with each message once."""
    spec = k.spec(k.script([QUESTION], [QUESTION], "done"), ["request_user_input"])
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        await asked(b, "s", spec)
        async with occupied(b, tmp_path):
            await answered(b, "s", "first")
            assert await give(nodes) == 1
            await a.until("s", "input_requested", 2)
            await a.paused("s")
        await nodes.end("busy")
        (tmp_path / "more").mkdir()
        await a.stop_frames()
        await answered(a, "s", "second")
        assert await give(nodes, giver=0, taker="b") == 1
        assert (await nodes.end("s"))["status"] == "completed"
        asked_last = next(
            request.body for request in reversed(list(server.requests)) if "second" in str(request.body["messages"])
        )
        roles = [message["role"] for message in asked_last["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant", "tool", "assistant", "tool"]
        assert [place for place, _ in activations(await a.events("s"))] == ["b", "a", "b"]
