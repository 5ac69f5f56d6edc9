"""Drains without Ray: real node services on one PostgreSQL store, with kills. Sessions move, nothing is paid twice."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy import HookContext, Inject, McpServer, hook, tool
from understudy.actors.context import FOLD_ANSWER, FOLD_REQUEST
from understudy.actors.hooks import describe_hook
from understudy.cluster.ray import connection as connecting
from understudy.cluster.ray.connection import Connection
from understudy.config import Settings
from understudy.errors import CannotDrain
from understudy.identifiers import home_of
from understudy.node.answers import Answers
from understudy.node.calls import Call
from understudy.node.departures import Departure, leaving
from understudy.protocol import ServiceDirectory, ServiceProcess, packed
from understudy.reads import DrainInfo
from understudy.records import ModelAnswer
from understudy.store.db.engine import now
from understudy.store.operations import draining
from understudy.store.operations.draining import check_drain
from understudy.supervisor.drains import seconds_for
from understudy.testing.offline import OfflineServer

from ..mcp_calls import calls, command, until, until_called
from . import kernel as k
from .test_context import Stepping, compiled
from .test_mcp import agent
from .tool_runner import Runner

PATIENCE = 30.0
LONG = 60.0


@pytest.fixture
def server() -> Iterator[OfflineServer]:
    """The model that all nodes ask."""
    with OfflineServer() as found:
        yield found


class Nodes:
    """The nodes of one cluster, and what its supervisor sends them."""

    def __init__(self, kernels: list[k.Kernel]) -> None:
        self.kernels = kernels
        self.names = [kernel.node_id for kernel in kernels]

    async def tell(self) -> None:
        """What a supervisor sends when something about the nodes has changed."""
        generation = max(kernel.generation for kernel in self.kernels)
        for kernel in self.kernels:
            await kernel.take_over(generation, self.names)

    async def drain(self, kernel: k.Kernel, seconds: float = LONG, *, stop: bool = False) -> None:
        """Begin to drain a node."""
        deadline = now() + int(seconds * 1e6)
        await self.kernels[0].service.journal.submit(
            lambda tx: draining.begin(tx, kernel.node_id, deadline, reason="test", stop=stop)
        )
        await self.tell()

    async def undo(self, kernel: k.Kernel) -> None:
        """Take it back."""
        await self.kernels[0].service.journal.submit(lambda tx: draining.end(tx, [kernel.node_id]))
        await self.tell()

    async def end(self, session_id: str, run_id: str = "r") -> dict[str, Any]:
        """The run's row once it has ended, followed wherever the session is."""
        async with asyncio.timeout(PATIENCE):
            while True:
                info = await self.kernels[0].info(session_id)
                row: dict[str, Any] = await self.kernels[0].ask("read", "run", [session_id, run_id], {})
                if row["finished_at"]:
                    return row
                home = next(kernel for kernel in self.kernels if kernel.node_id == info["node_id"])
                await home.ask("watch", f"end/{session_id}", {session_id: {"after": info["seq"]}}, 1.0)

    async def drained(self, kernel: k.Kernel) -> None:
        """Wait until a node says that nothing is left there."""
        async with asyncio.timeout(PATIENCE):
            await kernel.service.draining.until_finished()


@asynccontextmanager
async def cluster(
    dsn: str, server: OfflineServer, directory: Path, *names: str, frames: int = 1, runner: Runner | None = None
) -> AsyncIterator[Nodes]:
    """Nodes of these names with some frames each."""
    kernels = [k.Kernel(dsn, server, directory, node_id=name, runner=runner) for name in names]
    nodes = Nodes(kernels)
    try:
        for kernel in kernels:
            await kernel.start(frames)
            kernel.peers = {other.node_id: other for other in kernels if other is not kernel}
        await nodes.tell()
        yield nodes
    finally:
        await asyncio.gather(*(kernel.stop() for kernel in kernels))


def activations(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Where and why the session was activated."""
    found = [event["data"] for event in events if event["type"] == "session_activated"]
    return [(data["node_id"], data["cause"]) for data in found]


@pytest.mark.thorough
async def test_a_session_at_a_tool_finishes_it_and_goes_on_elsewhere(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a tool at work on `b`, when `b` is drained, then the tool ends there, and the next round is `a`'s."""
    notes = tmp_path / "notes"
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        begun, drained = asyncio.Event(), asyncio.Event()
        point = b.point

        async def held(label: str, worker: k.Worker | None) -> None:
            await point(label, worker)
            if label == "tool begins":
                begun.set()
                await drained.wait()

        b.point = held  # type: ignore[method-assign]
        await b.spawn("s", k.spec(k.script([("note", {"path": str(notes), "text": "x"})], "done"), [k.note]))
        await b.send("s")
        await asyncio.wait_for(begun.wait(), PATIENCE)
        await nodes.drain(b)
        assert (await a.info("s"))["node_id"] == "b"
        drained.set()
        assert (await nodes.end("s"))["status"] == "completed"
        await nodes.drained(b)
        events = await a.events("s")
        assert activations(events) == [("b", "ready"), ("a", "moved")]
        assert k.notes(notes) == ["s/r/1/0"]
        types = [event["type"] for event in events]
        assert not {"session_crashed", "tool_in_doubt", "model_call_reissued"} & set(types)
        assert server.stats.requests == 2
        assert (await a.info("s"))["restarts"] == 0


@pytest.mark.thorough
async def test_a_model_call_in_flight_is_not_repeated(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a call of `b` in flight, when `b` is drained, then its answer is committed there, and used at `a`."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        server.hold()
        await b.spawn("s", k.spec(k.script([("look", {"path": str(tmp_path / "n"), "text": "x"})], "done"), [k.look]))
        await b.send("s")
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
        await nodes.drain(b)
        await asyncio.sleep(0.5)  # that nothing happens can't be awaited
        assert (await a.info("s"))["node_id"] == "b"
        server.release()
        assert (await nodes.end("s"))["status"] == "completed"
        await nodes.drained(b)
        assert activations(await a.events("s")) == [("b", "ready"), ("a", "moved")]
        assert server.stats.requests == 2
        assert (await a.info("s"))["tokens_redone"] == 0


@pytest.mark.thorough
async def test_a_late_answer_moves_nobody_who_waits_for_a_later_call(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a session of `b` that waits for its second call while `b` is drained, when its first answer comes once
    more, then it stays until the second one is there, and that call is not repeated."""
    answered, calls = Answers.answered, list[tuple[Call, ModelAnswer]]()

    async def noted(answers: Answers, call: Call, answer: ModelAnswer) -> None:
        calls.append((call, answer))
        if len(calls) == 1:
            server.hold()
        await answered(answers, call, answer)

    with patch.object(Answers, "answered", noted):
        async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
            a, b = nodes.kernels
            rounds = [("look", {"path": str(tmp_path / "n"), "text": "x"})], "done"
            await b.spawn("s", k.spec(k.script(*rounds), [k.look]))
            await b.send("s")
            await asyncio.to_thread(server.wait, lambda stats: stats.requests == 2 and stats.in_flight == 1)
            await nodes.drain(b)
            await answered(b.service.answers, *calls[0])
            assert (await a.info("s"))["node_id"] == "b"
            server.release()
            assert (await nodes.end("s"))["status"] == "completed"
            await nodes.drained(b)
            assert server.stats.requests == 2
            assert (await a.info("s"))["tokens_redone"] == 0


@pytest.mark.thorough
async def test_what_is_left_at_the_deadline_moves_the_hard_way(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a tool and a call that don't end, when the time is over, then both go on at `a`, which is no death."""
    notes = tmp_path / "notes"
    async with cluster(postgres, server, tmp_path, "a", "b", frames=2) as nodes:
        a, b = nodes.kernels
        begun = asyncio.Event()
        point = b.point

        async def held(label: str, worker: k.Worker | None) -> None:
            await point(label, worker)
            if label == "tool begins":
                begun.set()
                await asyncio.Event().wait()

        b.point = held  # type: ignore[method-assign]
        await b.spawn("tool", k.spec(k.script([("note", {"path": str(notes), "text": "x"})], "done"), [k.note]))
        await b.send("tool")
        await asyncio.wait_for(begun.wait(), PATIENCE)
        server.hold()
        await b.spawn("call", k.spec())
        await b.send("call")
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
        await nodes.drain(b, 0.3)
        await nodes.drained(b)
        server.release()
        ended = [await nodes.end(name) for name in ("tool", "call")]
        assert [row["status"] for row in ended] == ["completed"] * 2
        for name in ("tool", "call"):
            events = await a.events(name)
            assert activations(events) == [("b", "ready"), ("a", "moved")]
            assert [e["data"]["forced"] for e in events if e["type"] == "session_moved"] == [True]
            assert "session_crashed" not in {event["type"] for event in events}
        assert "tool_in_doubt" in await a.types("tool")
        assert "model_call_reissued" in await a.types("call")


@tool(num_cpus=1, on_crash="rerun")
def again() -> str:
    """Work in a process of its own that may be repeated."""
    return "did it"


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [LONG, 0.3], ids=["its frame dies", "the deadline"])
async def test_what_a_tool_does_in_a_process_of_its_own_ends_when_its_session_leaves(
    postgres: str, server: OfflineServer, tmp_path: Path, seconds: float
) -> None:
    """Given a tool at work in a process of its own, when its session goes on elsewhere, then that process is ended
    before the tool begins again: the two are never at work at once."""
    runner = Runner()
    runner.gate.clear()
    async with cluster(postgres, server, tmp_path, "a", "b", runner=runner) as nodes:
        a, b = nodes.kernels
        runner.kernel = b
        await b.spawn("s", k.spec(k.script([("again", {})], "done"), [again]))
        await b.send("s")
        await asyncio.wait_for(runner.at_work.wait(), PATIENCE)
        runner.at_work.clear()
        await nodes.drain(b, seconds)
        if seconds == LONG:
            worker = b.holder("s")
            assert worker is not None
            b.kill(worker)
        await a.until("s", "session_moved", 1)
        assert (await a.info("s"))["status"] == "waiting_for_timer"  # its process may take a while to end
        await asyncio.wait_for(runner.at_work.wait(), PATIENCE)
        assert runner.cancelled.is_set()
        runner.gate.set()
        assert (await nodes.end("s"))["status"] == "completed"
        assert [event["type"] for event in await a.events("s")].count("session_moved") == 1
        assert (len(runner.begun), len(runner.ended)) == (2, 1)


@pytest.mark.thorough
async def test_the_call_of_an_mcp_server_ends_when_its_session_leaves(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a call that may be repeated, and whose session's process has died on a node that is drained, then the host
    there ends it, and the call is made again where the session goes on."""
    spec = agent([("test_look", {"word": "x"})], "done", servers=[McpServer("test", command=command(tmp_path))])
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        await b.spawn("s", spec)
        await b.send("s")
        await until_called(tmp_path, "look x")
        await nodes.drain(b)
        worker = b.holder("s")
        assert worker is not None
        b.kill(worker)
        await a.until("s", "session_moved", 1)
        assert (await a.info("s"))["status"] == "waiting_for_timer"
        await until(lambda: not b.tool_host.servers.held)
        (tmp_path / "go").touch()
        assert (await nodes.end("s"))["status"] == "completed"
        assert calls(tmp_path) == ["start", "look x"] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("share", ["session", "node"])
async def test_the_call_of_an_mcp_server_ends_though_the_service_knows_nothing_of_it(
    share: str, postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a call that may be repeated, whose session's process has died, when the node service was restarted and the
    node is drained, then the call ends there before it is made where the session goes on."""
    servers = [McpServer("test", command=command(tmp_path), share=share)]
    spec = agent([("test_look", {"word": "x"})], "done", servers=servers)
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        await b.spawn("s", spec)
        await b.send("s")
        await until_called(tmp_path, "look x")
        worker = b.holder("s")
        assert worker is not None
        b.kill(worker, replace=False)
        await b.until("s", "session_crashed")
        b.kill_node()
        await b.quiet()
        await nodes.drain(b)
        await a.until("s", "session_moved", 1)
        moved = (await a.info("s"))["status"]
        await until_called(tmp_path, "look x", 2)
        held = b.tool_host.servers.held
        (tmp_path / "go").touch()
        assert (await nodes.end("s"))["status"] == "completed"
        assert (moved, held) == ("waiting_for_timer", 0)
        assert calls(tmp_path) == ["start", "look x"] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_question_of_an_mcp_server_ends_when_its_session_leaves(
    restarted: bool, postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a server of all sessions of a node, and a question of it, when its session leaves the node, then the
    question is given up there, at the latest when the next session needs the server, which can ask that one; also if
    the node service was another one meanwhile."""
    servers = [McpServer("test", command=command(tmp_path), share="node")]
    spec = agent([("test_order", {"questions": 1})], "done", servers=servers)
    (tmp_path / "go1").touch()
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        await b.spawn("s", spec)
        await b.send("s")
        [asked] = await b.paused("s")
        if restarted:
            b.kill_node()
            await b.quiet()
        await nodes.drain(b)
        await nodes.drained(b)
        said = {"call_id": asked["call_id"], "asked": asked["asked"], "decision": "ok", "text": '{"count": 3}'}
        await a.ask("decide", "s", [said])
        assert (await nodes.end("s"))["status"] == "completed"
        if not restarted:
            await until(lambda: not b.tool_host.servers.held)
        await nodes.undo(b)
        b.add_frame()
        await b.spawn("t", spec)
        await b.send("t")
        [asked] = await b.paused("t")
        await until(lambda: b.tool_host.servers.held == 1)
        await b.ask("decide", "t", [{**said, "call_id": asked["call_id"], "asked": asked["asked"]}])
        assert (await nodes.end("t"))["status"] == "completed"


@pytest.mark.thorough
async def test_a_tree_stays_together(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a parent that waits for children whose calls are in flight, when their node is drained, then all of the
    tree goes to one of two other nodes, and no call is repeated."""
    async with cluster(postgres, server, tmp_path, "a", "b", "c", frames=3) as nodes:
        a, b, _ = nodes.kernels
        child = k.spec("", name="child", hash="child")
        lead = k.spec(
            k.script([("spawn_agent", {"task": "one"}), ("spawn_agent", {"task": "two"})], "done"),
            ["spawn_agent"], agents={"child": child},
        )  # fmt: skip
        answers = iter(range(9))

        def hold(_number: int, label: str, _worker: k.Worker | None) -> None:
            if label == "reply to step" and next(answers) == 1:  # the first was the lead's input, this is its answer
                server.hold()

        b.on_point = hold
        await b.spawn("lead", lead)
        await b.send("lead")
        await b.until("lead", "child_spawned", 2)
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 2)
        await nodes.drain(b)
        server.release()
        assert (await nodes.end("lead"))["status"] == "completed"
        await nodes.drained(b)
        tree = await a.ask("read", "tree", ["lead"], {})
        assert len(tree) == 3
        assert "b" not in {row["node_id"] for row in tree if row["session_id"] == "lead"}
        assert len({event["data"]["to_node"] for row in tree for event in await a.events(row["session_id"])
                    if event["type"] == "session_moved"}) == 1  # fmt: skip
        assert server.stats.requests == 4


@pytest.mark.thorough
async def test_nothing_new_comes_to_a_drained_node(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given `b` is drained, when it is asked for a session, or for a run of a passive one of its own, `a` has them."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        await b.spawn("old", k.spec())
        await b.send("old", "one", "r1")
        await nodes.end("old", "r1")
        await nodes.drain(b)
        await nodes.drained(b)
        assert (await b.spawn("new", k.spec())) == {"created": True, "node_id": "a"}  # type: ignore[comparison-overlap]
        for name in ("old", "new"):
            await b.send(name, "two", "r2")
            assert (await nodes.end(name, "r2"))["status"] == "completed"
            assert activations(await a.events(name))[-1][0] == "a"
        assert not b.service.frames.paging.slots


async def test_a_drain_is_taken_back(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given `b` was drained, when that is taken back, then it accepts sessions again, and nothing moves back."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        await nodes.drain(b)
        await nodes.drained(b)
        await nodes.undo(b)
        b.add_frame()
        await b.spawn("s", k.spec())
        await b.send("s")
        assert (await nodes.end("s"))["status"] == "completed"
        assert activations(await a.events("s")) == [("b", "ready")]


@asynccontextmanager
async def taken_back_at_its_deadline(nodes: Nodes, drained: k.Kernel) -> AsyncIterator[None]:
    """A drain whose time is over, and that is taken back before what is at work on the node is given away."""
    submit, taken_back = drained.service.journal.submit, asyncio.Event()

    async def late(operation: Any, *touches: str, **options: Any) -> Any:
        if "_send_off" in operation.__qualname__ and not taken_back.is_set():
            await nodes.undo(drained)
            taken_back.set()
        return await submit(operation, *touches, **options)

    with patch.object(drained.service.journal, "submit", late):
        await nodes.drain(drained, 0.0)
        await asyncio.wait_for(taken_back.wait(), PATIENCE)
        yield


async def test_a_call_goes_on_if_the_drain_is_taken_back_at_its_deadline(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a call of `b` in flight when the time of a drain is over, when the drain is taken back before the session
    is given away, then it stays, and its call is not made again."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        server.hold()
        await b.spawn("s", k.spec(k.script("done")))
        await b.send("s")
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
        async with taken_back_at_its_deadline(nodes, b):
            b.add_frame()
            server.release()
            assert (await nodes.end("s"))["status"] == "completed"
        assert server.stats.requests == 1
        assert "model_call_reissued" not in await a.types("s")


async def test_a_tool_goes_on_if_the_drain_is_taken_back_at_its_deadline(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a tool at work at `b` when the time of a drain is over, when the drain is taken back before the session is
    given away, then its process keeps it: the tool acts once, and nothing is in doubt."""
    notes = tmp_path / "notes"
    async with cluster(postgres, server, tmp_path, "a", "b", frames=2) as nodes:
        a, b = nodes.kernels
        begun, may_end = k.held_at_effect(b)
        await b.spawn("s", k.spec(k.script([("note", {"path": str(notes), "text": "x"})], "done"), [k.note]))
        await b.send("s")
        await asyncio.wait_for(begun.wait(), PATIENCE)
        async with taken_back_at_its_deadline(nodes, b):
            assert not b.service.frames.known.condemned
            may_end.set()
            assert (await nodes.end("s"))["status"] == "completed"
        assert len(k.notes(notes)) == 1
        assert activations(await a.events("s")) == [("b", "ready")]


async def test_a_drain_that_ends_while_another_begins(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a drain of `b` whose end is being noted, when it is taken back and `b` is drained again, then the second
    drain is finished as well, and nobody took the first one's end for its own."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        held, go_on = asyncio.Event(), asyncio.Event()
        submit = b.service.journal.submit

        async def late(operation: Any, *touches: str, **options: Any) -> Any:
            if "_finish" in operation.__qualname__ and not held.is_set():
                held.set()
                await go_on.wait()
            return await submit(operation, *touches, **options)

        b.service.journal.submit = late  # type: ignore[method-assign]
        await nodes.drain(b)
        await asyncio.wait_for(held.wait(), PATIENCE)
        await nodes.undo(b)
        await nodes.drain(b)
        go_on.set()
        await nodes.drained(b)
        [row] = await a.ask("read", "drains", [], {})
        assert row["finished_at"]


async def test_a_follower_learns_that_its_session_has_moved(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a client that follows at `b`, when the session moves, then its pending call ends and says so."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        _, b = nodes.kernels
        server.hold()
        await b.spawn("s", k.spec(k.script([("look", {"path": str(tmp_path / "n"), "text": "x"})], "done"), [k.look]))
        await b.send("s")
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
        after = (await b.info("s"))["seq"]
        follow = {"s": {"after": after + 100, "ends": True}}
        watching = asyncio.create_task(b.ask("watch", "c", follow, PATIENCE))
        await nodes.drain(b)
        server.release()
        assert (await asyncio.wait_for(watching, PATIENCE))["gone"] == ["s"]


async def test_services_that_stop_park_everything(store: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given the only node, when it is drained to stop, then its call is answered, nothing goes on; later all does."""
    async with cluster(store, server, tmp_path, "a") as nodes:
        [a] = nodes.kernels
        server.hold()
        await a.spawn("s", k.spec(k.script([("look", {"path": str(tmp_path / "n"), "text": "x"})], "done"), [k.look]))
        await a.send("s")
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
        await nodes.drain(a, stop=True)
        server.release()
        await nodes.drained(a)
        info = await a.info("s")
        assert (info["status"], info["frame_id"], info["node_id"]) == ("running", None, "a")
        assert server.stats.requests == 1
        await nodes.undo(a)
        a.add_frame()
        assert (await nodes.end("s"))["status"] == "completed"
        assert server.stats.requests == 2


def held_before_step(kernel: k.Kernel, when: Callable[[], bool]) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold steps for which `when` is true: set when one is about to be made, and what has it made when it is set."""
    prepared, drained = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        if when():
            prepared.set()
            await drained.wait()

    k.before_step(kernel, hold)
    return prepared, drained


async def drained_and_back(nodes: Nodes, kernel: k.Kernel, drained: asyncio.Event) -> None:
    """Drain the node while a step is held, and take that back behind it; the session's run goes on to its end."""
    await nodes.drain(kernel, stop=True)
    drained.set()
    await nodes.drained(kernel)
    await nodes.undo(kernel)
    kernel.add_frame()
    assert (await nodes.end("s"))["status"] == "completed"


ADDED: list[bool] = []
"""Whether what the hook did might have been done before, each time it was called."""

FOLDS: list[bool] = []
"""The same of the other hook."""


@hook("before_model")
def adds(context: HookContext) -> list[Inject]:
    """Add a message that stays, and one for the call only."""
    ADDED.append(context.redone)
    stays, only = (Inject(f"{what} {len(ADDED)}", role="system") for what in ("stays", "only"))
    return [stays, dataclasses.replace(only, visibility="this_round")]


async def test_what_a_hook_adds_to_a_call_that_is_made_elsewhere_is_added_once(
    store: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a hook that adds to each model call, when the node is drained before the commit that asks for one, then the
    hook is called again by whoever makes the call, and only what it adds then is in the log."""
    ADDED.clear()
    async with cluster(store, server, tmp_path, "a") as nodes:
        [a] = nodes.kernels
        prepared, drained = held_before_step(a, lambda: len(ADDED) == 2)
        script = k.script([("look", {"path": str(tmp_path / "n"), "text": "x"})], "done")
        await a.spawn("s", k.spec(script, [k.look], hooks=[describe_hook(adds, pickle=None)[0]]))
        await a.send("s")
        await asyncio.wait_for(prepared.wait(), PATIENCE)
        await drained_and_back(nodes, a, drained)
        messages = await a.ask("read", "messages", ["s"], {})
        added = [message["content"] for message in messages if message.get("origin") == "hook:adds"]
        assert added == ["stays 1", "only 1", "stays 3", "only 3"]
        assert ADDED == [False, False, True]
        a.check("s")


@hook("before_fold")
def sees_folds(context: HookContext) -> None:
    """Note that a summary is about to be asked for."""
    FOLDS.append(context.redone)


async def test_a_summary_that_was_not_asked_for_is_asked_for_elsewhere(tmp_path: Path) -> None:
    """Given a session whose history is full, when its node is drained before the commit that asks for a summary, then
    whoever goes on asks for it at once, and the log has one request for each answer."""
    FOLDS.clear()
    with OfflineServer(Stepping(20), window=2_000) as server:
        async with cluster(f"sqlite:///{tmp_path}/store.db", server, tmp_path, "a") as nodes:
            [a] = nodes.kernels
            prepared, drained = held_before_step(a, lambda: len(FOLDS) == 1)
            await a.spawn("s", {**compiled(window=2_000), "hooks": [describe_hook(sees_folds, pickle=None)[0]]})
            await a.send("s")
            await asyncio.wait_for(prepared.wait(), PATIENCE)
            before = server.stats.requests
            await drained_and_back(nodes, a, drained)
            origins = [message.get("origin") for message in await a.ask("read", "messages", ["s"], {})]
            asked = list(server.requests)[before].body
            a.check("s")
    assert FOLDS[:2] == [False, True]
    assert origins.count(FOLD_REQUEST) == origins.count(FOLD_ANSWER)
    assert "Summarise" in str(asked["messages"][-1]["content"])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
async def test_a_drain_under_load_with_kills(postgres: str, server: OfflineServer, tmp_path: Path, seed: int) -> None:
    """Given many sessions and children at work, when their node is drained while frames and its service are killed,
    then all runs end, each activation is at one place, and side effects happen once."""
    chance = random.Random(seed)
    async with cluster(postgres, server, tmp_path, "a", "b", "c", frames=2) as nodes:
        a, b, _ = nodes.kernels
        names = [f"s{number}" for number in range(8)]
        files = {name: tmp_path / f"{name}.notes" for name in names}
        for name in names:
            child = k.spec("", name="child", hash="child")
            replies = [[("note", {"path": str(files[name]), "text": "x"})], [("spawn_agent", {"task": "it"})], "done"]
            await b.spawn(name, k.spec(k.script(*replies), [k.note, "spawn_agent"], agents={"child": child}))

        def strike(_number: int, label: str, worker: k.Worker | None) -> None:
            if worker is not None and not label.startswith("tool") and chance.random() < 0.06:
                b.kill(worker)

        b.on_point = strike
        for name in names:
            await b.send(name)
        await b.until(names[chance.randrange(8)], "model_call_completed")
        await nodes.drain(b)
        if seed % 2:
            b.kill_node()
        if seed > 1:  # another supervisor knows of the drain by what the store says
            await b.quiet()
            a.generation = await a.ask("acquire", "successor", k.LEASE, "tests")
            await nodes.tell()
        for name in names:
            row = await nodes.end(name)
            assert row["status"] == "completed", row
        await b.quiet()
        await nodes.drained(b)
        for name in names:
            assert len(k.notes(files[name])) <= 1
            for session in await a.ask("read", "tree", [name], {}):
                places = [node_id for node_id, _ in activations(await a.events(session["session_id"]))]
                moves = [e for e in await a.events(session["session_id"]) if e["type"] == "session_moved"]
                assert len(moves) <= 1
                left = [p for p in places if p != "b"]
                assert places == ["b"] * (len(places) - len(left)) + left


async def test_a_client_whose_clock_is_ahead_waits_for_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a deadline that is long over by the client's clock, when it drains a node, then it waits by its own measure
    until the drain is done."""
    connection = Connection(Settings("sqlite:///s.db", "tests"), "")
    ends = iter([0, 0, 2])

    async def supervise(method: str, *_arguments: Any) -> Any:
        return packed(ServiceDirectory(1, "supervising", [ServiceProcess("b", 1)], [])) if method == "ready" else None

    async def read(_kind: Any, _what: str) -> list[DrainInfo]:
        return [DrainInfo("b", "", left=0, started_at=1, deadline=1, finished_at=next(ends))]

    monkeypatch.setattr(connection, "_supervise", supervise)
    monkeypatch.setattr(connection, "read", read)
    monkeypatch.setattr(connecting, "DRAIN_LOOK_SECONDS", 0.0)
    [drain] = await connection.drain("b", LONG, wait=True, stop=False)
    assert drain.finished_at


@pytest.mark.parametrize(("identity", "reason"), [("ann", "asked for by ann"), ("", "asked for")])
async def test_a_drain_says_who_asked_for_it(monkeypatch: pytest.MonkeyPatch, identity: str, reason: str) -> None:
    """Its reason, which `understudy drain` shows, names whoever is connected as somebody."""
    connection = Connection(Settings("sqlite:///s.db", "tests"), "")
    connection.identity, asked = identity, list[Any]()

    async def supervise(method: str, *arguments: Any) -> Any:
        if method == "ready":
            return packed(ServiceDirectory(1, "supervising", [ServiceProcess("b", 1)], []))
        asked.append((method, arguments[2]))

    async def read(_kind: Any, _what: str) -> list[DrainInfo]:
        return []

    monkeypatch.setattr(connection, "_supervise", supervise)
    monkeypatch.setattr(connection, "read", read)
    await connection.drain("b", LONG, wait=False, stop=False)
    assert asked == [("drain", reason)]


# Decisions.

DEPARTURES = st.lists(
    st.builds(Departure, st.uuids().map(str), st.integers(0, 10**6), st.booleans(), st.booleans()), max_size=40
)


@given(sessions=DEPARTURES, over=st.booleans())
def test_the_most_expensive_to_redo_leave_first(sessions: list[Departure], over: bool) -> None:
    """Whatever there is: nobody at work leaves before the time is over, then all but those whose commit is under way
    do, and nobody leaves before somebody more expensive."""
    order = leaving(sessions, over=over)
    assert {one.session_id for one in order} == {
        one.session_id for one in sessions if not one.held and (over or not one.busy)
    }
    tokens = [one.tokens for one in order]
    assert tokens == sorted(tokens, reverse=True)


NAMES = st.sets(st.sampled_from("abcdef"), max_size=6)


@given(node=st.sampled_from("abcdefg"), nodes=NAMES, drained=NAMES, stop=st.booleans())
def test_a_drain_is_refused_where_nobody_could_go_on(node: str, nodes: set[str], drained: set[str], stop: bool) -> None:
    """A node that is known can be drained if another one that is not drained is left, or if the services stop."""
    possible = node in nodes and (stop or bool(nodes - drained - {node}))
    with contextlib.nullcontext() if possible else pytest.raises(CannotDrain):
        check_drain(node, nodes, drained, stop=stop)


@given(left=st.none() | st.floats(0, 10_000))
def test_some_of_a_notice_is_left_for_the_hard_way(left: float | None) -> None:
    """The wait ends before the node does, unless nobody says when that is, and never takes more than the notice."""
    seconds = seconds_for(left)
    assert seconds == 600.0 if left is None else 0 <= seconds <= left and left - seconds <= 10.0 + 1e-6


@given(root=st.text(), nodes=st.sets(st.text(min_size=1), min_size=2))
def test_a_tree_moves_only_if_its_home_goes(root: str, nodes: set[str]) -> None:
    """Whatever the nodes: the order in which they are listed is no matter, and if one goes only its own trees move."""
    home = home_of(root, nodes)
    assert home_of(root, sorted(nodes)) == home
    for gone in nodes:
        assert (home_of(root, nodes - {gone}) == home) == (gone != home)


def test_homes_are_shared_out_evenly_and_stay() -> None:
    """Given a thousand trees, each of three nodes has about a third; without one node only its own trees move."""
    roots = [f"root{number}" for number in range(1_000)]
    before = {root: home_of(root, ["a", "b", "c"]) for root in roots}
    after = {root: home_of(root, ["c", "a"]) for root in roots}
    assert all(250 < list(before.values()).count(name) < 420 for name in "abc")
    assert all(after[root] == before[root] for root in roots if before[root] != "b")
