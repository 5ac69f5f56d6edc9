"""What a client that waits for a run learns of its pauses: the real `Session`, `Run` and follower, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from understudy.actors.tools import tool
from understudy.cluster.cli.rendering import print_pending, print_session, print_wakeups
from understudy.cluster.client.follower import Follower
from understudy.cluster.client.results import SessionInfo
from understudy.cluster.client.session_handle import Session
from understudy.errors import AnswerConflict, DeadlineExceeded, InvalidInput, NotAsked, RunFailed
from understudy.events import InputReceived, InputRequested
from understudy.protocol import packed, unpacked
from understudy.reads import PendingInput, SessionRecord

from . import kernel as k


@tool(on_crash="rerun", approve=True)
def look_up() -> str:
    """Look something up, once a person approves it."""
    return "found"


QUESTION = ("request_user_input", {"prompt": "Which colour?", "options": ["red", "blue"]})


class Nodes:
    """A directory of the one node service of a kernel, which runs on another event loop than the client."""

    def __init__(self, kernel: k.Kernel) -> None:
        self._kernel = kernel
        self._loop = asyncio.get_running_loop()

    async def home(self, _session_id: str) -> str:
        return "node1"

    async def homes(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        found: dict[str, tuple[str, int]] = await self.request(None, "read", "homes", [session_ids], {})
        return found

    async def learn(self) -> None:
        """There is nobody else."""

    async def call(self, _node_id: str, _request: str, method: str, *arguments: Any, timeout: float) -> Any:
        return await asyncio.wait_for(self.request(None, method, *arguments), timeout)

    async def request(self, _session_id: str | None, method: str, *arguments: Any, turn: int = 0) -> Any:
        asked = asyncio.run_coroutine_threadsafe(self._kernel.ask(method, *arguments), self._loop)
        return await asyncio.wrap_future(asked)


class Connection:
    """What a client uses of its connection."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.follower = Follower(nodes)  # type: ignore[arg-type]

    async def change(self, kind: Any, method: str, session_id: str, *arguments: Any) -> Any:
        done = await self._nodes.request(session_id, method, session_id, *map(packed, arguments))
        return unpacked(done, kind, method)

    async def read(self, kind: Any, what: str, *arguments: Any, **options: Any) -> Any:
        return unpacked(await self._nodes.request(None, "read", what, list(arguments), options), kind, what)


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as made:
        yield made


@pytest.fixture
async def session(kernel: k.Kernel) -> AsyncIterator[Session]:
    """A session that asks twice, one after the other, as a client sees it."""
    from understudy.cluster.client import background

    connection = Connection(Nodes(kernel))
    await kernel.spawn("s", k.spec(k.script([QUESTION], [QUESTION], "done"), ["request_user_input"]))
    yield Session(connection, "s")  # type: ignore[arg-type]
    await asyncio.wrap_future(background.submit(connection.follower.close()))


async def test_result_returns_at_each_pause_and_waits_on_after_the_answer(session: Session) -> None:
    """`result` tells what is asked; after the answer the same call waits for the next pause, then for the end. Whoever
    attaches to a paused run learns of it at once."""
    run = await session.send.aio("go", run_id="r")
    for number in (1, 2):
        paused = await run.result.aio(20)
        assert (paused.status, paused.text, paused.error, paused.ok) == ("waiting_for_input", "", None, False)
        [question] = paused.pending
        assert question == PendingInput(
            f"r/{number}/0", 1, "r", "question", "Which colour?", ("red", "blue"), question.asked_at, "s"
        )
        assert await session.pending.aio() == [question]
        again = await session.run("r").result.aio(20)
        assert again.pending == paused.pending
        assert await session.answer.aio(question.call_id, "red") is True
        assert await session.answer.aio(question.call_id, "red") is False
        with pytest.raises(AnswerConflict):
            await session.answer.aio(question.call_id, "blue")
    ended = await run.result.aio(20)
    assert (ended.status, ended.text, ended.pending) == ("completed", "done", ())
    assert (await run).status == "completed"


async def test_events_go_on_over_a_pause(session: Session) -> None:
    """Who iterates gets the question as an event, and what follows from the answer."""

    def follow() -> list[str]:
        seen = []
        for event in session.send("go", run_id="r"):
            seen.append(event.type)
            if isinstance(event, InputRequested):
                session.answer(event.call_id, "red")
        return seen

    seen = await asyncio.wait_for(asyncio.to_thread(follow), 20)
    assert [kind for kind in seen if kind.startswith("input_")] == [InputRequested.type, InputReceived.type] * 2
    assert seen[-1] == "run_finished"


async def test_what_is_no_answer(session: Session) -> None:
    """Neither text nor `rerun`, both of them, or a call that asks nothing; a question can't run again."""
    run = await session.send.aio("go", run_id="r")
    assert (await run.result.aio(20)).pending
    wrong: list[dict[str, Any]] = [{}, {"text": "x", "rerun": True}, {"rerun": True, "failed": True}, {"rerun": True}]
    for options in wrong:
        with pytest.raises(InvalidInput):
            await session.answer.aio("r/1/0", **options)
    with pytest.raises(NotAsked):
        await session.answer.aio("r/7/0", "x")
    with pytest.raises(RunFailed, match="Which colour"):
        await run.result.aio(20, check=True)
    assert await session.abort_pending.aio() == ["r/1/0"]
    assert (await run.result.aio(20)).pending[0].call_id == "r/2/0"
    assert await session.resume.aio() is False
    assert await session.cancel.aio()
    assert (await run.result.aio(20)).status == "cancelled"


async def test_a_queued_run_behind_a_paused_one(session: Session) -> None:
    """It waits for its turn: neither its own `result` nor its events take the other's pause for theirs."""
    first = await session.send.aio("go", run_id="r")
    assert (await first.result.aio(20)).pending
    second = await session.send.aio("later", run_id="r2")
    with pytest.raises(DeadlineExceeded):
        await second.result.aio(0.3)


async def test_wakeups_of_a_client(kernel: k.Kernel, session: Session) -> None:
    """Scheduled, listed, shown, replaced by name and cancelled; what can't be is refused at once."""
    first = await session.schedule.aio("again [x]", 3600, 60, "w")
    assert (first.name, first.prompt, first.every) == ("w", "again [x]", 60)
    assert await session.schedule.aio("again [x]", 3600, 60, "w") == first
    other = await session.schedule.aio("once", 5000.5)
    assert await session.wakeups.aio() == [first, other]
    shown = StringIO()
    print_wakeups([first, other], Console(file=shown, width=200))
    lines = shown.getvalue().splitlines()
    assert lines[0].startswith("wakeup w due ")
    assert lines[0].endswith(", then every 60 s: again [x]")
    assert lines[1].startswith(f"wakeup {other.name} due ")
    assert lines[1].endswith(": once")
    changed = await session.schedule.aio("again", 3600, None, "w")
    assert await session.wakeups.aio() == [changed, other]
    assert await session.cancel_wakeup.aio("w") is True
    assert await session.cancel_wakeup.aio("w") is False
    wrong: list[tuple[Any, ...]] = [("", 5), ("x", 0), ("x", 5, 0.1), ("x", 5, None, "a/b")]
    for arguments in wrong:
        with pytest.raises(InvalidInput):
            await session.schedule.aio(*arguments)
    with pytest.raises(InvalidInput):
        await session.cancel_wakeup.aio("")
    soon = await session.schedule.aio("now", 0.05)
    run = session.run(f"wakeup.{soon.name}.{soon.due_at}")
    await kernel.until("s", "timer_fired")
    assert (await run.result.aio(20)).pending


async def test_how_it_is_shown(kernel: k.Kernel, session: Session) -> None:
    """`ps` and `show` say what a session waits for, and how to answer."""
    run = await session.send.aio("go", run_id="r")
    assert (await run.result.aio(20)).pending
    await kernel.paused("s")
    info = SessionInfo.of(unpacked(await kernel.info("s"), SessionRecord, "info"))
    shown = StringIO()
    print_pending(info.id, info.pending, Console(file=shown, width=200))
    assert all(part in shown.getvalue() for part in ("Which colour?", "red, blue", "understudy answer s r/1/0 TEXT"))


async def test_a_session_shows_what_those_below_it_ask(kernel: k.Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    """The page of a root says which sub-agent asks, and how to answer; the root's run itself goes on waiting."""
    child = k.spec(k.script([QUESTION], "done"), ["request_user_input"], name="child")
    spawn = [("spawn_agent", {"agent": "child", "task": "t"})]
    await kernel.spawn("s", k.spec(k.script(spawn, "done"), ["spawn_agent"], agents={"child": child}))
    await kernel.send("s")
    kid = (await kernel.until("s", "child_spawned"))[-1]["data"]["child_id"]
    await kernel.paused(kid)
    tree = unpacked(await kernel.ask("read", "tree", ["s"], {}), list[SessionRecord], "tree")
    root, *below = map(SessionInfo.of, tree)
    assert (root.status, root.pending) == ("waiting_for_child", ())
    print_session(root, [], [], {info.id: info.pending for info in below})
    shown = " ".join(capsys.readouterr().out.split())
    assert all(part in shown for part in ("Which colour?", f"understudy answer {kid} task/1/0 TEXT"))


async def test_a_sub_agents_question_pauses_the_root(kernel: k.Kernel, session: Session) -> None:
    """Given a question two levels below, then `result` of the root's run returns at once with it and says whose it is;
    answered by what is pending, the run goes on, and its result is waited for."""
    leaf = k.spec(k.script([QUESTION], "leaf done"), ["request_user_input"], name="leaf", hash="leaf")
    middle = k.spec(
        k.script([("spawn_agent", {"agent": "leaf", "task": "t"})], "middle done"), ["spawn_agent"], name="middle",
        hash="middle", agents={"leaf": leaf},
    )  # fmt: skip
    spawns = [("spawn_agent", {"agent": "middle", "task": "t"})]
    await kernel.spawn("root", k.spec(k.script(spawns, "all done"), ["spawn_agent"], agents={"middle": middle}))
    root = Session(session._connection, "root")
    run = await root.send.aio("go", run_id="r")
    paused = await run.result.aio(10)
    assert (paused.status, paused.ok) == ("waiting_for_input", False)
    [question] = paused.pending
    tree = unpacked(await kernel.ask("read", "tree", ["root"], {}), list[SessionRecord], "tree")
    assert [row.session_id for row in tree if row.agent == "leaf"] == [question.session_id]
    assert await root.pending.aio() == []
    assert await root.pending.aio(below=True) == [question]
    assert (await Session(session._connection, "root").run("r").result.aio(10)).pending == (question,)
    assert await root.answer.aio(question, "blue") is True
    assert await root.answer.aio(question, "blue") is False
    ended = await run.result.aio(20)
    assert (ended.status, ended.text) == ("completed", "all done")
    for session_id in ("root", tree[1].session_id):
        assert (await kernel.types(session_id)).count("child_asked") == 1


@pytest.mark.parametrize("who", ["itself", "a sub-agent"])
async def test_an_input_that_was_merged_pauses_with_its_run(kernel: k.Kernel, session: Session, who: str) -> None:
    """Given two inputs that were merged into one run, when that run, or a sub-agent that it waits for, asks a person,
    then `result` of both returns with the question, for who waits and for who comes later; after the answer both wait
    on, and end alike."""
    task = 'call request_user_input {"prompt": "Which?"}'
    if who != "itself":
        task = f"call spawn_agent {json.dumps({'agent': 'child', 'task': task})}"
    child = k.spec(tools=["request_user_input"], name="child", hash="child")
    tools = ["request_user_input", "spawn_agent"]
    await kernel.spawn("m", k.spec(tools=tools, agents={"child": child}, follow_ups="merge"))
    merging = Session(session._connection, "m")
    kernel.server.hold()
    first = await merging.send.aio("first", run_id="first")
    await kernel.until("m", "model_call_started")
    runs = [await merging.send.aio(text, run_id=name) for name, text in (("a", "look"), ("b", task))]
    kernel.server.release()
    assert (await first.result.aio(10)).ok
    paused = [await run.result.aio(10) for run in runs]
    later = [await merging.run(run.run_id).result.aio(10) for run in runs]
    assert {result.status for result in paused + later} == {"waiting_for_input"}
    [question] = paused[0].pending
    assert [result.pending for result in paused + later] == [(question,)] * 4
    assert await merging.answer.aio(question, "blue") is True
    assert [((await run.result.aio(20)).status, (await run.result.aio(20)).text) for run in runs] == [
        ("completed", "offline: offline: blue" if who != "itself" else "offline: blue")
    ] * 2


async def test_approvals_of_sub_agents_from_the_root(kernel: k.Kernel, session: Session) -> None:
    """`approve` without calls approves all that wait in a session and below it; another session's run is not paused by
    them."""
    child = k.spec(k.script([("look_up", {})], "done"), [look_up], name="child", hash="child")
    spawns = [("spawn_agent", {"agent": "child", "task": "t"})] * 2
    script = k.script([*spawns, ("look_up", {})], "all done")
    await kernel.spawn("root", k.spec(script, ["spawn_agent", look_up], agents={"child": child}))
    root = Session(session._connection, "root")
    run = await root.send.aio("go", run_id="r")
    await kernel.until("root", "child_asked", 2)
    await kernel.until("root", "input_requested")
    pending = (await run.result.aio(10)).pending
    assert sorted(item.call_id for item in pending) == ["r/1/2", "task/1/0", "task/1/0"]
    with pytest.raises(InvalidInput):
        await root.approve.aio(pending, arguments={})
    with pytest.raises(InvalidInput):
        await root.approve.aio(pending[0], arguments={"more": 1})
    with pytest.raises(InvalidInput):
        await root.approve.aio(pending[0], arguments={}, remember=True)
    assert await root.reject.aio("r/1/2", "not here") == ["r/1/2"]
    assert await root.approve.aio() == ["task/1/0", "task/1/0"]
    assert await root.approve.aio() == []
    assert (await run.result.aio(20)).text == "all done"
