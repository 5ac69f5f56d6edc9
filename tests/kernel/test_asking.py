"""Tool calls that wait for people: a model's questions, and calls in doubt of `on_crash="ask"` tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.tools import ToolContext, tool
from understudy.cluster.client.session_handle import Session
from understudy.errors import AnswerConflict, InvalidInput, NotAsked, UnknownSession
from understudy.messages import INTERRUPTED
from understudy.node.node_service import NodeService
from understudy.protocol import Exit, StepCall, Work, unpacked
from understudy.supervisor.pool import Demand
from understudy.testing.offline import OfflineServer

from .. import tiers
from . import kernel as k
from .deaths import Deaths
from .people import Question, person

QUESTION = ("request_user_input", {"prompt": "Which colour?", "options": ["red", "blue"]})


@tool(on_crash="ask")
async def pay(path: str, text: str, context: ToolContext) -> str:
    """Have an effect that must not happen twice unless a person says so."""
    await k.effect(path, context)
    return f"noted {text}"


@tool(on_crash="ask")
async def hang() -> str:
    """Be at work until the process dies."""
    await asyncio.Event().wait()
    return ""


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, frames=1) as made:
        yield made


async def begin(kernel: k.Kernel, *replies: Any, tools: Any = (), session_id: str = "s", **more: Any) -> None:
    """A session whose model gives these replies, at work on an input."""
    await kernel.spawn(session_id, k.spec(k.script(*replies), ["request_user_input", *tools], **more))
    await kernel.send(session_id)


def die_of_the_effect(kernel: k.Kernel, times: int = 1) -> None:
    """Kill the process of a tool that has just had its effect, so many times."""
    left = iter(range(times))

    def die(_number: int, label: str, worker: k.Worker | None) -> None:
        if label == "tool has had its effect" and worker is not None and next(left, None) is not None:
            kernel.kill(worker)

    kernel.on_point = die


# Questions.


async def test_a_question_pauses_the_run_and_holds_no_process(kernel: k.Kernel) -> None:
    """Given the only frame's session asks, then it has left the frame, another session works there, and the answer
    lets it go on."""
    await begin(kernel, [QUESTION], "done")
    [question] = await kernel.paused("s")
    assert (question["call_id"], question["kind"], question["prompt"], question["options"]) == (
        "r/1/0", "question", "Which colour?", ("red", "blue"),
    )  # fmt: skip
    paused = await kernel.ask("read", "run", ["s", "r"], {})
    assert (paused["status"], paused["pending"], paused["finished_at"]) == ("waiting_for_input", [question], 0)
    assert (await kernel.run("other", k.spec()))["status"] == "completed"
    assert kernel.service.frames.paging.demand()[""] == Demand(standby=1)
    [row] = await kernel.ask("read", "sessions", [], {"live_only": True})
    assert (row["session_id"], row["pending"]) == ("s", [question])
    kernel.check()

    assert await kernel.ask("answer", "s", "r/1/0", "ok", "blue", 1) is True
    run = await kernel.end("s")
    assert (run["status"], run["text"], await kernel.results()) == ("completed", "done", ["blue"])
    events = [event for event in await kernel.events("s") if event["type"].startswith("input_")]
    assert [(event["type"], event["data"]["call_id"]) for event in events] == [
        ("input_requested", "r/1/0"), ("input_received", "r/1/0"),
    ]  # fmt: skip
    assert (await kernel.info("s"))["restarts"] == 0


async def test_other_calls_of_the_round_go_on(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a round with a question and other calls, then these have their results while it waits; the question can be
    answered before they have."""
    notes = tmp_path / "notes"
    answered = asyncio.Event()

    def answer(_number: int, label: str, _worker: k.Worker | None) -> None:
        if label == "tool begins":
            answered.set()

    kernel.on_point = answer
    await begin(kernel, [QUESTION, ("look", {"path": str(notes), "text": "x"})], "done", tools=[k.look])
    await kernel.until("s", "input_requested")
    await answered.wait()
    assert await kernel.ask("answer", "s", "r/1/0", "ok", "red", 1)
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.results() == ["red", "noted x"]


async def test_two_questions_at_once(kernel: k.Kernel) -> None:
    """Each has its own answer, in any order; the run is paused until it has both."""
    await begin(kernel, [QUESTION, ("request_user_input", {"prompt": "Why?"})], "done")
    assert [question["call_id"] for question in await kernel.paused("s")] == ["r/1/0", "r/1/1"]
    await kernel.ask("answer", "s", "r/1/1", "ok", "because", 1)
    await kernel.until("s", "tool_finished")
    assert [question["call_id"] for question in await kernel.paused("s")] == ["r/1/0"]
    assert (await kernel.ask("read", "run", ["s", "r"], {}))["status"] == "waiting_for_input"
    await kernel.ask("answer", "s", "r/1/0", "error", "colour-blind", 1)
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.results() == ["colour-blind", "because"]
    finished = [event["data"]["outcome"] for event in await kernel.events("s") if event["type"] == "tool_finished"]
    assert finished == ["ok", "error"]


@pytest.mark.parametrize("arguments", ["{broken", {}, {"prompt": " "}, {"prompt": "x", "options": "y"}, [1]])
async def test_a_question_that_makes_no_sense(kernel: k.Kernel, arguments: Any) -> None:
    """The model reads what is wrong with it, and nobody is asked."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    await begin(kernel, [("request_user_input", text)], "done")
    assert (await kernel.end("s"))["status"] == "completed"
    assert "input_requested" not in await kernel.types("s")


async def test_a_question_beside_a_child(kernel: k.Kernel) -> None:
    """A session that asks while its child works gets the child's result when it comes, and goes on waiting."""
    child = k.spec(name="worker", hash="worker")
    spawn = ("spawn_agent", {"agent": "worker", "task": "dig"})
    await begin(kernel, [QUESTION, spawn], "done", tools=["spawn_agent"], agents={"worker": child})
    await kernel.until("s", "tool_finished")
    assert [question["call_id"] for question in await kernel.paused("s")] == ["r/1/0"]
    await kernel.ask("answer", "s", "r/1/0", "ok", "red", 1)
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.results() == ["red", "offline: dig"]


# Calls in doubt.


@pytest.mark.parametrize(
    ("decision", "text", "result", "executed"),
    [("ok", "it was paid", "it was paid", 1), ("error", "refused", "refused", 1), ("rerun", "", "noted x", 2)],
)
async def test_a_person_decides_about_a_call_in_doubt(
    kernel: k.Kernel, tmp_path: Path, decision: str, text: str, result: str, executed: int
) -> None:
    """Given the process dies after the effect, then the call waits, and becomes what a person says."""
    notes = tmp_path / "notes"
    die_of_the_effect(kernel)
    await begin(kernel, [("pay", {"path": str(notes), "text": "x"})], "done", tools=[pay])
    [question] = await kernel.paused("s")
    assert (question["kind"], question["options"]) == ("in_doubt", ())
    assert all(part in question["prompt"] for part in ("pay", str(notes)))
    assert await kernel.ask("answer", "s", "r/1/0", decision, text, 1)
    assert (await kernel.end("s"))["status"] == "completed"
    assert (await kernel.results(), len(k.notes(notes))) == ([result], executed)
    in_doubt = [event["data"]["policy"] for event in await kernel.events("s") if event["type"] == "tool_in_doubt"]
    assert in_doubt == ["ask"]


async def test_a_call_that_dies_again_asks_again(kernel: k.Kernel, tmp_path: Path) -> None:
    """A rerun that dies is in doubt once more, however often: each time is a question of its own, and an answer to an
    earlier one, sent again, changes nothing."""
    notes = tmp_path / "notes"
    die_of_the_effect(kernel, times=5)
    await begin(kernel, [("pay", {"path": str(notes), "text": "x"})], "done", tools=[pay])
    for time in range(1, 6):
        [question] = await kernel.paused("s")
        assert question["asked"] == time
        assert await kernel.ask("answer", "s", "r/1/0", "rerun", "", time) is True
        for earlier in range(1, time + 1):
            assert await kernel.ask("answer", "s", "r/1/0", "rerun", "", earlier) is False
        if time < 5:
            await kernel.until("s", "input_requested", time + 1)
    assert (await kernel.end("s"))["status"] == "completed"
    assert len(k.notes(notes)) == 6


async def test_a_call_that_runs_again_can_be_interrupted(kernel: k.Kernel) -> None:
    """Given a call in doubt that a person lets run again, when a steer interrupts it, then it has a result and the run
    goes on: nobody is asked about it any more."""
    await kernel.spawn("s", k.spec(tools=[hang]))
    await kernel.send("s", "call hang {}")
    for _ in ("dies", "is interrupted"):
        await kernel.until_watched()
        holder = kernel.holder("s")
        if "input_received" not in await kernel.types("s"):
            assert holder is not None
            kernel.kill(holder)
            await kernel.paused("s")
            await kernel.ask("answer", "s", "r/1/0", "rerun", "", 1)
    await kernel.ask("steer", "s", {"content": "go on without it", "interrupt": True})
    run = await kernel.end("s")
    assert (run["status"], await kernel.results()) == ("completed", [INTERRUPTED])


# Answers.


async def test_ten_answers_at_once(kernel: k.Kernel) -> None:
    """Ten clients with one answer: one of them brings it, it is the call's result once; another answer is refused."""
    await begin(kernel, [QUESTION], "done")
    await kernel.paused("s")
    new = await asyncio.gather(*(kernel.ask("answer", "s", "r/1/0", "ok", "blue", 1) for _ in range(10)))
    assert sorted(new) == [False] * 9 + [True]
    with pytest.raises(AnswerConflict):
        await kernel.ask("answer", "s", "r/1/0", "ok", "red", 1)
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.ask("answer", "s", "r/1/0", "ok", "blue", 1) is False
    with pytest.raises(AnswerConflict):
        await kernel.ask("answer", "s", "r/1/0", "error", "blue", 1)
    assert (await kernel.results(), (await kernel.types("s")).count("input_received")) == (["blue"], 1)


class Connection:
    """A program's connection to a kernel. A program is in another thread: only that of the test knows the kernel.

    Attributes:
        on_the_way: what happens between a program's request and its arrival.
    """

    def __init__(self, kernel: k.Kernel, on_the_way: Callable[[], Awaitable[Any]]) -> None:
        self._kernel = kernel
        self._loop = asyncio.get_running_loop()
        self._on_the_way = on_the_way

    async def read(self, kind: Any, what: str, *arguments: Any, **options: Any) -> Any:
        return unpacked(await self._there(self._kernel.ask("read", what, list(arguments), options)), kind, what)

    async def change(self, _kind: Any, method: str, *arguments: Any) -> Any:
        await self._there(self._on_the_way())
        return await self._there(self._kernel.ask(method, *arguments))

    async def _there(self, coroutine: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


def program(kernel: k.Kernel, on_the_way: Callable[[], Awaitable[Any]], session_id: str = "s") -> Session:
    connection: Any = Connection(kernel, on_the_way)
    return Session(connection, session_id)


@pytest.mark.parametrize("same", [True, False])
async def test_an_answer_is_for_no_question_that_was_asked_after_it(kernel: k.Kernel, same: bool) -> None:
    """Given a call in doubt that another person has let run again, when somebody who saw that question answers it too,
    and the call asks again before that arrives, then it counts as an answer to the first question: the same
    or another."""

    async def dies(asked: int) -> None:
        holder = kernel.holder("s")
        assert holder is not None
        kernel.kill(holder)
        await kernel.until("s", "input_requested", asked)

    await begin(kernel, [("hang", {})], "done", tools=[hang])
    await kernel.until("s", "tool_started")
    await dies(1)
    await kernel.ask("answer", "s", "r/1/0", "rerun", "", 1)
    await kernel.until("s", "tool_started", 2)
    session = program(kernel, lambda: dies(2))
    if same:
        assert await asyncio.to_thread(session.answer, "r/1/0", rerun=True) is False
    else:
        with pytest.raises(AnswerConflict):
            await asyncio.to_thread(session.answer, "r/1/0", "it was paid")
    assert [question["asked"] for question in await kernel.paused("s")] == [2]
    await kernel.ask("cancel", "s", None, "enough")
    await kernel.end("s")


async def test_ten_different_answers_at_once(kernel: k.Kernel) -> None:
    """The first one counts, for the call and for everybody who asks."""
    await begin(kernel, [QUESTION], "done")
    await kernel.paused("s")
    sent = [kernel.ask("answer", "s", "r/1/0", "ok", f"colour {number}", 1) for number in range(10)]
    found = await asyncio.gather(*sent, return_exceptions=True)
    [first] = [number for number, result in enumerate(found) if result is True]
    assert sum(isinstance(result, AnswerConflict) for result in found) == 9
    await kernel.end("s")
    assert await kernel.results() == [f"colour {first}"]


async def test_answers_that_nobody_asked_for(kernel: k.Kernel) -> None:
    """A call that asks nothing, a run that has ended, a session that is not there: each is a typed error."""
    await begin(kernel, [QUESTION], "done")
    await kernel.paused("s")
    with pytest.raises(NotAsked):
        await kernel.ask("answer", "s", "r/9/0", "ok", "x", 1)
    with pytest.raises(NotAsked):
        await kernel.ask("answer", "s", "r/1/0", "ok", "x", 2)
    with pytest.raises(UnknownSession):
        await kernel.ask("answer", "nobody", "r/1/0", "ok", "x", 1)
    for decision in ("rerun", "aborted", "perhaps"):
        with pytest.raises(InvalidInput):
            await kernel.ask("answer", "s", "r/1/0", decision, "", 1)
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    with pytest.raises(NotAsked):
        await kernel.ask("answer", "s", "r/1/0", "ok", "x", 1)
    kernel.check()


@pytest.mark.parametrize("text", ["nul \x00", "emoji \N{SNOWMAN}\U0001f600", "lone \udcff", "a" * 100_000])
async def test_any_text_is_an_answer(kernel: k.Kernel, text: str) -> None:
    """What a store or the wire can't keep is replaced; nothing else changes."""
    await begin(kernel, [("request_user_input", {"prompt": text[:1000]})], "done")
    await kernel.paused("s")
    await kernel.ask("answer", "s", "r/1/0", "ok", text, 1)
    assert await kernel.ask("answer", "s", "r/1/0", "ok", text, 1) is False
    await kernel.end("s")
    assert await kernel.results() == [text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()]


# Ends.


@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("answered", [False, True])
async def test_the_wait_is_ended(kernel: k.Kernel, how: str, answered: bool) -> None:
    """Cancel and close end a run that waits for a person, also right behind an answer, and leave no question open."""
    await begin(kernel, [QUESTION], "done")
    await kernel.paused("s")
    if answered:
        await asyncio.gather(
            kernel.ask("answer", "s", "r/1/0", "ok", "red", 1),
            kernel.ask(how, "s", *([None] if how == "cancel" else []), "enough"),
        )
    else:
        await kernel.ask(how, "s", *([None] if how == "cancel" else []), "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert await kernel.ask("read", "questions", ["s"], {}) == []
    kernel.check()
    if how == "cancel":
        await kernel.send("s", "again", "r2")
        assert [question["call_id"] for question in await kernel.paused("s")] == ["r2/1/0"]
        await kernel.ask("answer", "s", "r2/1/0", "ok", "red", 1)
        assert (await kernel.end("s", "r2"))["status"] == "completed"


async def test_an_answer_is_kept_although_the_run_is_cancelled_behind_it(
    kernel: k.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an answer that was accepted, when the run is cancelled and the process dies that had begun with it, then
    the next one ends the run, and the call's result is the answer."""
    step, cut = NodeService.step, list[str]()

    async def cut_off(service: NodeService, call: StepCall) -> Work | Exit:
        if call.batch is not None and not cut and (await kernel.info("s"))["epoch"] == 2:
            cut.append(call.frame.frame_id)
            await kernel.ask("cancel", "s", "r", "enough")
            kernel.kill(kernel.workers[call.frame.frame_id])
            kernel.add_frame()
            return await k.never()
        return await step(service, call)

    monkeypatch.setattr(NodeService, "step", cut_off)
    await begin(kernel, [QUESTION], "done")
    await kernel.paused("s")
    await kernel.ask("answer", "s", "r/1/0", "ok", "red", 1)
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert (cut != [], await kernel.results()) == (True, ["red"])


async def test_a_parents_cancel_reaches_a_child_that_waits(kernel: k.Kernel) -> None:
    """A child's question waits in the child; when its parent is cancelled the child ends too."""
    child = k.spec(k.script([QUESTION], "done"), ["request_user_input"], name="worker", hash="worker")
    spawn = ("spawn_agent", {"agent": "worker", "task": "dig"})
    await begin(kernel, [spawn], "done", tools=["spawn_agent"], agents={"worker": child})
    await kernel.until("s", "child_spawned")
    [below] = [row for row in await kernel.ask("read", "tree", ["s"], {}) if row["parent_id"]]
    await kernel.paused(below["session_id"])
    tree = {row["session_id"]: row for row in await kernel.ask("read", "tree", ["s"], {})}
    assert len(tree[below["session_id"]]["pending"]) == 1
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert (await kernel.info(below["session_id"]))["status"] == "cancelled"


async def test_what_is_pending_can_be_given_up(kernel: k.Kernel) -> None:
    """`abort_pending` gives one call, or all that wait, an `aborted` result; the run goes on, and a repetition finds
    nothing."""
    await begin(kernel, [QUESTION, QUESTION, QUESTION], "done")
    await kernel.paused("s")
    assert await kernel.ask("abort_pending", "s", "r/1/1") == ["r/1/1"]
    await kernel.until("s", "tool_finished")
    await kernel.paused("s")
    await kernel.ask("answer", "s", "r/1/0", "ok", "red", 1)
    assert await kernel.ask("abort_pending", "s", None) == ["r/1/2"]
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.ask("abort_pending", "s", None) == []
    with pytest.raises(AnswerConflict):
        await kernel.ask("answer", "s", "r/1/1", "ok", "late", 1)
    finished = [event["data"] for event in await kernel.events("s") if event["type"] == "tool_finished"]
    outcomes = {data["call_id"]: data["outcome"] for data in finished}
    assert outcomes == {"r/1/0": "ok", "r/1/1": "aborted", "r/1/2": "aborted"}


async def test_what_nobody_does_while_it_waits(kernel: k.Kernel) -> None:
    """Neither the node service's death nor that of the frame it was in counts, activates it, or asks again."""
    await begin(kernel, [QUESTION], "done")
    await kernel.paused("s")
    before = await kernel.info("s")
    kernel.kill_node()
    await kernel.quiet()
    for worker in list(kernel.workers.values()):
        kernel.kill(worker)
    await kernel.quiet()
    await kernel.service.sweep.run(0)
    after = await kernel.info("s")
    assert {name: after[name] for name in ("epoch", "restarts", "seq", "status")} == {
        name: before[name] for name in ("epoch", "restarts", "seq", "status")
    }
    await kernel.ask("answer", "s", "r/1/0", "ok", "red", 1)
    assert (await kernel.end("s"))["status"] == "completed"


# Deaths.


CALLS = [QUESTION, ("pay", {"path": "PATH", "text": "0"}), ("look", {"path": "PATH", "text": "1"})]


def compiled(path: Path) -> dict[str, Any]:
    """A round with a question, a call that may become one, and one that is repeated after a death; then the answer."""
    calls = json.loads(json.dumps(CALLS).replace("PATH", str(path)))
    return k.spec(k.script([tuple(call) for call in calls], "all done"), ["request_user_input", pay, k.look])


def answer_to(asked: Question) -> dict[str, Any]:
    """What a person says to each question of these sessions."""
    return {"decision": "ok", "text": "blue" if asked["kind"] == "question" else "noted 0"}


@pytest.mark.sweep
@pytest.mark.conformance
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_asks_nobody_twice(tmp_path: Path, victim: str) -> None:
    """Frame or node service killed at each call, commit, tool and answer: the transcript is that of a run without
    deaths, nothing that must not be repeated is, and each question is asked once."""
    problems = []
    with OfflineServer() as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            async with person(kernel, "clean", answer_to):
                start = len(kernel.points)
                await kernel.run("clean", compiled(tmp_path / "clean"))
            wanted = await kernel.transcript("clean")
            points = kernel.points[start:]
            assert [entry[1] for entry in wanted if entry[0] == "tool"] == ["blue", "noted 0", "noted 1"]
            for at in tiers.points(range(len(points) + 6)):
                problems += await one_death(kernel, tmp_path, at, victim, wanted)
    assert not problems, "\n".join(problems)


def paths(entry: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """The entry of the clean session with the name of another one's file."""
    calls = entry[2] and [[c, tool_name, text.replace("/clean", f"/{name}"), p] for c, tool_name, text, p in entry[2]]
    return (*entry[:2], calls, *entry[3:])


async def one_death(kernel: k.Kernel, directory: Path, at: int, victim: str, wanted: list[Any]) -> list[str]:
    """A session with one death at a point; what is not as it must be."""
    session_id, path = f"s{at}", directory / f"notes-{at}"
    deaths = Deaths(kernel, session_id, at, victim)
    async with person(kernel, session_id, answer_to) as seen:
        try:
            ended = await kernel.run(session_id, compiled(path))
        except k.Stuck as stuck:
            return [f"{deaths.where}: {stuck}"]
        finally:
            kernel.on_point = None
        await kernel.quiet()
    kernel.check(session_id)
    found = []
    if ended["status"] != "completed":
        found.append(f"{deaths.where}: ended as {ended['status']}: {ended['error']}")
    expected = [paths(entry, path.name) for entry in wanted]
    if (transcript := await kernel.transcript(session_id)) != expected:
        found.append(f"{deaths.where}: {transcript}")
    paid = [line for line in k.notes(path) if line.endswith("r/1/1")]
    kinds = sorted((data["kind"], data["asked"]) for data in seen)
    if kinds not in ([("question", 1)], [("in_doubt", 1), ("question", 1)]) or len(paid) > 1:
        found.append(f"{deaths.where}: paid {len(paid)} times, asked {kinds}")
    if not paid and ("in_doubt", 1) not in kinds:
        found.append(f"{deaths.where}: never paid")
    return found
