"""The session's loop: real node service, real store, the offline model over HTTP, frames in process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors.call_outcomes import GOES_ON
from understudy.actors.conversation import Conversation
from understudy.actors.tools import ToolContext, tool
from understudy.errors import ToolError
from understudy.messages import INTERRUPTED, Message, ToolCall
from understudy.testing.offline import Faults, Reply
from understudy.testing.protocol import check_body

from . import kernel as k


@tool(on_crash="rerun")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
async def refuse() -> str:
    """Raise."""
    raise ToolError("not today")


@tool(timeout=0.05)
async def dawdle() -> str:
    """Never end."""
    return await k.never()


class Meeting:
    """Where tools wait for each other, or for the test."""

    barrier = asyncio.Barrier(2)
    began = asyncio.Event()
    cancelled = asyncio.Event()
    thread = threading.Event()
    entered = threading.Event()

    @classmethod
    def reset(cls) -> None:
        cls.barrier, cls.began, cls.cancelled = asyncio.Barrier(2), asyncio.Event(), asyncio.Event()
        cls.thread, cls.entered = threading.Event(), threading.Event()


@tool(on_crash="rerun")
async def meet() -> str:
    """Return once another call is here too."""
    async with asyncio.timeout(10):
        await Meeting.barrier.wait()
    return "met"


@tool(on_crash="rerun")
async def linger() -> str:
    """Wait until cancelled, once."""
    if Meeting.cancelled.is_set():
        return "gone on"
    Meeting.began.set()
    try:
        return await k.never()
    except asyncio.CancelledError:
        Meeting.cancelled.set()
        raise


@tool
def blocked() -> str:
    """Block a thread until the test ends."""
    Meeting.entered.set()
    Meeting.thread.wait(20)
    return "late"


@tool(timeout=0.05)
def stubborn() -> str:
    """Block a thread beyond the timeout."""
    Meeting.thread.wait(20)
    return "late"


@tool(on_crash="rerun")
async def crash() -> str:
    """Kill the process that runs it."""
    worker = k.WORKER.get()
    assert worker is not None
    worker.kernel.kill(worker)
    return await k.never()


def find_out_in_vain(_context: ToolContext) -> str:
    """Block a thread beyond the timeout."""
    Meeting.thread.wait(20)
    return "late"


@tool(timeout=0.05, on_crash=find_out_in_vain)
async def doubtful() -> str:
    """Die, and leave it to a function to find out."""
    worker = k.WORKER.get()
    assert worker is not None
    worker.kernel.kill(worker)
    return await k.never()


@pytest.fixture(autouse=True)
async def _meeting() -> None:
    Meeting.reset()


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=3) as made:
        yield made


# Rounds and tools.


async def test_rounds(kernel: k.Kernel) -> None:
    """Tool results lead to the next model call until there is an answer; rounds and tokens are counted."""
    compiled = k.spec(k.script([("add", {"a": 1, "b": 2})], [("add", {"a": 3, "b": 4})], "ten"), [add])
    run = await kernel.run("s", compiled)
    assert (run["status"], run["text"], run["rounds"], run["error"]) == ("completed", "ten", 3, None)
    assert await kernel.results() == ["3", "7"]
    stats = kernel.server.stats
    assert run["usage"][:2] == [stats.prompt_tokens, stats.completion_tokens]
    info = await kernel.info("s")
    assert (info["status"], info["tokens_used"]) == ("idle", sum(run["usage"][:2]))


async def test_no_reload_in_a_round(kernel: k.Kernel) -> None:
    """A frame keeps the window from round to round: each round is one call and no reading again."""
    await kernel.run("s", k.spec(k.script(*[[("add", {"a": 1, "b": n})] for n in range(4)], "done"), [add]))
    assert "before reload" not in kernel.points
    assert kernel.points.count("before commit") == 0


async def test_runs_queue(kernel: k.Kernel) -> None:
    """Inputs are worked on one after the other, each with what came before in its window."""
    await kernel.spawn("s", k.spec())
    for number in range(3):
        await kernel.send("s", f"input {number}", f"r{number}")
    ends = [await kernel.end("s", f"r{number}") for number in range(3)]
    assert [run["status"] for run in ends] == ["completed"] * 3
    assert [m["role"] for m in kernel.server.requests[-1].body["messages"]] == ["user", "assistant"] * 2 + ["user"]


async def test_tools_of_a_round_run_at_once(kernel: k.Kernel) -> None:
    """Two calls that wait for each other both end; their results are in the order of the calls."""
    await kernel.run(
        "s", k.spec(k.script([("meet", {}), ("add", {"a": 1, "b": 1}), ("meet", {})], "done"), [meet, add])
    )
    assert await kernel.results() == ["met", "2", "met"]


async def test_parallel_tools_is_a_limit(kernel: k.Kernel) -> None:
    """With a limit of one, calls run one after the other."""
    compiled = k.spec(k.script([("dawdle", {}), ("add", {"a": 1, "b": 1})], "done"), [dawdle, add], parallel_tools=1)
    await kernel.run("s", compiled)
    finished = [e["data"]["call_id"] for e in await kernel.events("s") if e["type"] == "tool_finished"]
    assert finished == ["r/1/0", "r/1/1"]


@pytest.mark.parametrize(
    ("call", "outcome", "said"),
    [
        (("missing", {}), "unknown_tool", "no tool named 'missing'"),
        (("add", '{"a": 1, "b"'), "invalid", "not valid JSON"),
        (("add", "[" * 5_000), "invalid", "not valid JSON"),
        (("add", {"a": "x", "b": 1}), "invalid", "don't fit"),
        (("refuse", {}), "error", "not today"),
        (("dawdle", {}), "timeout", "0.05 s"),
    ],
    ids=["unknown", "unreadable", "too deep", "unfitting", "raises", "timeout"],
)
async def test_the_model_reads_what_went_wrong(kernel: k.Kernel, call: Any, outcome: str, said: str) -> None:
    """A call that fails in any way has a result that says how, and the run goes on."""
    run = await kernel.run("s", k.spec(k.script([call, ("add", {"a": 1, "b": 1})], "done"), [add, refuse, dawdle]))
    assert run["status"] == "completed"
    first, second = await kernel.results()
    assert (said in first, second) == (True, "2")
    finished = {
        e["data"]["call_id"]: e["data"]["outcome"] for e in await kernel.events("s") if e["type"] == "tool_finished"
    }
    assert finished == {"r/1/0": outcome, "r/1/1": "ok"}


async def test_a_stuck_thread_ends_its_process(kernel: k.Kernel) -> None:
    """A sync tool that outlives its timeout can't be stopped: the session goes on in another frame."""
    try:
        run = await kernel.run("s", k.spec(k.script([("stubborn", {})], "done"), [stubborn]))
        assert (run["status"], (await kernel.info("s"))["epoch"]) == ("completed", 2)
        assert [worker.task.done() for worker in kernel.workers.values()].count(True) == 1
        assert "timeout" in str(await kernel.events("s"))
    finally:
        Meeting.thread.set()


async def test_a_function_that_finds_out_and_is_stuck_ends_its_process(kernel: k.Kernel) -> None:
    """Given an `on_crash` function, not async, that outlives its timeout, then its process is replaced before the round
    goes on, as a tool's is, and the model reads that nothing was found out."""
    try:
        run = await kernel.run("s", k.spec(k.script([("doubtful", {})], "done"), [doubtful]))
        assert (run["status"], (await kernel.info("s"))["epoch"]) == ("completed", 3)
        assert [worker.task.done() for worker in kernel.workers.values()].count(True) == 1
        [said] = await kernel.results()
        assert said.startswith(f"{INTERRUPTED}; finding out failed: on_crash of doubtful did not finish within 0.05 s")
    finally:
        Meeting.thread.set()


# Limits.


async def test_a_reply_cut_by_length_is_continued(tmp_path: Path) -> None:
    """The pieces make up the answer; nothing of the partial text is lost."""
    pieces = ["The first half, ", "the second half, ", "the end."]

    def policy(body: dict[str, Any]) -> Reply:
        said = sum(message["role"] == "assistant" for message in body["messages"])
        return Reply(pieces[said], finish_reason="length" if said < 2 else None)

    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, policy=policy) as kernel:
        run = await kernel.run("s", k.spec())
        assert (run["status"], run["text"], run["rounds"]) == ("completed", "".join(pieces), 3)
        short = await kernel.run("t", k.spec(max_continuations=1))
        assert (short["status"], short["text"], short["rounds"]) == ("completed", "".join(pieces[:2]), 2)


async def test_the_round_limit(kernel: k.Kernel) -> None:
    """After `max_rounds` model calls without an answer the run ends, its calls answered, and says so."""
    calls = [[("add", {"a": 1, "b": number})] for number in range(5)]
    run = await kernel.run("s", k.spec(k.script(*calls), [add], max_rounds=2))
    assert (run["status"], run["rounds"], run["error"]["code"]) == ("round_limit", 2, "round_limit")
    assert (kernel.server.count, await kernel.results()) == (2, ["1", "2"])


async def test_the_budget(kernel: k.Kernel) -> None:
    """A call that the tree's budget does not allow is not made."""
    run = await kernel.run("s", k.spec(budget={"tokens": 25}))
    assert (run["status"], run["error"]["code"], kernel.server.count) == ("budget_exceeded", "budget_exceeded", 0)
    calls = [[("add", {"a": 1, "b": number})] for number in range(50)]
    run = await kernel.run("t", k.spec(k.script(*calls), [add], budget={"tokens": 3_000}, max_rounds=50))
    assert run["status"] == "budget_exceeded"
    assert 0 < sum(run["usage"][:2]) <= 3_000


async def test_a_model_error_fails_the_run_and_not_the_session(tmp_path: Path) -> None:
    """The run has the error; the next one works."""
    faults = Faults(fail_first=1, fail_status=400)
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, faults=faults) as kernel:
        run = await kernel.run("s", k.spec())
        assert (run["status"], run["error"]["code"]) == ("failed", "model_refused")
        assert "model_call_failed" in await kernel.types("s")
        await kernel.send("s", "again", "r2")
        assert (await kernel.end("s", "r2"))["status"] == "completed"
        assert (await kernel.info("s"))["status"] == "idle"


# Cancellation.


async def test_cancel_while_waiting_for_the_model(kernel: k.Kernel) -> None:
    """The call is aborted, the run ends cancelled, and the session takes the next input."""
    kernel.server.hold()
    await kernel.spawn("s", k.spec())
    await kernel.send("s")
    await kernel.until("s", "model_call_started")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
    assert await kernel.ask("cancel", "s", None, "enough")
    run = await kernel.end("s")
    assert (run["status"], run["error"]["message"]) == ("cancelled", "enough")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.aborted == 1)
    kernel.server.release()
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"


async def test_cancel_during_a_tool(kernel: k.Kernel) -> None:
    """The tool is cancelled, its call gets a result, and no further model call is made."""
    await kernel.spawn("s", k.spec(k.script([("linger", {})], "done"), [linger]))
    await kernel.send("s")
    await Meeting.began.wait()
    assert await kernel.ask("cancel", "s", "r", "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert Meeting.cancelled.is_set()
    assert (await kernel.results(), kernel.server.count) == (["cancelled"], 1)
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"


async def test_cancel_during_a_tool_that_can_not_be_stopped(kernel: k.Kernel) -> None:
    """Given a tool in a thread, when the run is cancelled, then nobody claims to know what becomes of the call."""
    try:
        await kernel.spawn("s", k.spec(k.script([("blocked", {})], "done"), [blocked]))
        await kernel.send("s")
        await asyncio.to_thread(Meeting.entered.wait, k.STUCK_SECONDS)
        assert await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        assert await kernel.results() == [GOES_ON]
    finally:
        Meeting.thread.set()


async def test_cancel_a_queued_run(kernel: k.Kernel) -> None:
    """It never starts; the running one goes on."""
    kernel.server.hold()
    await kernel.spawn("s", k.spec())
    await kernel.send("s", "one", "r1")
    await kernel.send("s", "two", "r2")
    await kernel.until("s", "model_call_started")
    assert await kernel.ask("cancel", "s", "r2", "enough")
    assert (await kernel.end("s", "r2"))["status"] == "cancelled"
    kernel.server.release()
    assert (await kernel.end("s", "r1"))["status"] == "completed"
    assert kernel.server.count == 1


# Children.


def lead(*replies: Any, child: dict[str, Any], **more: Any) -> dict[str, Any]:
    return k.spec(k.script(*replies), ["spawn_agent"], agents={"worker": child}, **more)


def children_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["data"]["child_id"] for event in events if event["type"] == "child_spawned"]


async def test_children_work_in_parallel(kernel: k.Kernel) -> None:
    """Six children on three frames are at the model at once; their answers come back in the order of the calls."""
    names = [f"worker{number}" for number in range(6)]
    agents = {
        name: k.spec(k.script({"text": f"answer of {name}", "delay": 1.0}), name=name, hash=name) for name in names
    }
    spawns = [("spawn_agent", {"agent": name, "task": "go"}) for name in names]
    await kernel.spawn("s", k.spec(k.script(spawns, "done"), ["spawn_agent"], agents=agents))
    await kernel.send("s")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 6)
    run = await kernel.end("s")
    assert (run["status"], run["text"]) == ("completed", "done")
    assert await kernel.results() == [f"answer of {name}" for name in names]
    tree = await kernel.ask("read", "tree", ["s"], {})
    assert [(row["depth"], row["status"]) for row in tree] == [(0, "idle")] + [(1, "completed")] * 6


async def test_cancel_reaches_the_children(kernel: k.Kernel) -> None:
    """Parent and children all end cancelled; nobody calls the model again."""
    child = k.spec(k.script({"text": "late", "delay": 30}), name="worker", hash="worker")
    await kernel.spawn("s", lead([("spawn_agent", {"task": "t"})] * 2, "done", child=child))
    await kernel.send("s")
    kids = children_of(await kernel.until("s", "child_spawned", 2))
    for kid in kids:
        await kernel.until(kid, "model_call_started")
    assert await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert [(await kernel.end(kid, "task"))["status"] for kid in kids] == ["cancelled"] * 2
    assert kernel.server.count == 3


async def test_the_depth_limit(kernel: k.Kernel) -> None:
    """An agent at the limit reads that it can't have sub-agents."""
    inner = k.script([("spawn_agent", {"task": "deeper"})], "back")
    compiled = k.spec(inner, ["spawn_agent"], max_depth=2)
    assert (await kernel.run("s", compiled))["status"] == "completed"
    tree = await kernel.ask("read", "tree", ["s"], {})
    assert [row["depth"] for row in tree] == [0, 1, 2]
    assert "as deep as this tree may grow" in (await kernel.results(tree[-1]["session_id"]))[0]


@pytest.mark.parametrize("arguments", ["{", {}, {"task": " "}, {"task": "x", "agent": "nobody"}])
async def test_a_spawn_that_makes_no_sense(kernel: k.Kernel, arguments: Any) -> None:
    """It has a result that says what is wrong, and creates nothing."""
    compiled = lead([("spawn_agent", arguments)], "done", child=k.spec(name="worker", hash="worker"))
    assert (await kernel.run("s", compiled))["status"] == "completed"
    assert len(await kernel.results()) == 1
    assert len(await kernel.ask("read", "tree", ["s"], {})) == 1


async def test_a_hopeless_child_leaves_a_result(kernel: k.Kernel) -> None:
    """A child that dies again and again without progress is quarantined; its sibling and its parent go on."""
    child = k.spec(k.script([("crash", {})], [("crash", {})], "never"), [crash], name="worker", hash="worker")
    sane = k.spec(name="sane", hash="sane")
    spawns = [("spawn_agent", {"agent": name, "task": f"for {name}"}) for name in ("worker", "sane")]
    compiled = k.spec(k.script(spawns, "done"), ["spawn_agent"], agents={"worker": child, "sane": sane})
    assert (await kernel.run("s", compiled))["status"] == "completed"
    first, second = await kernel.results()
    assert ("quarantined" in first, "for sane" in second) == (True, True)
    tree = await kernel.ask("read", "tree", ["s"], {})
    assert {row["agent"]: (row["status"], row["restarts"]) for row in tree[1:]} == {
        "worker": ("quarantined", 8),
        "sane": ("completed", 0),
    }


@pytest.mark.parametrize(
    ("used", "said"),
    [(k.note, INTERRUPTED), (k.look, "noted x"), (k.careful, "found out about r/1/0")],
    ids=["report", "rerun", "reconcile"],
)
async def test_a_death_in_a_tool(kernel: k.Kernel, tmp_path: Path, used: Any, said: str) -> None:
    """What the model reads of a call in doubt follows the tool's `on_crash`."""

    def die(_number: int, label: str, worker: k.Worker | None) -> None:
        if label == "tool has had its effect" and worker is not None:
            kernel.on_point = None
            kernel.kill(worker)

    kernel.on_point = die
    path = tmp_path / "notes"
    run = await kernel.run("s", k.spec(k.script([(used.__name__, {"path": str(path), "text": "x"})], "done"), [used]))
    assert (run["status"], await kernel.results()) == ("completed", [said])
    assert len(k.notes(path)) == (2 if used is k.look else 1)
    in_doubt = [event["data"]["policy"] for event in await kernel.events("s") if event["type"] == "tool_in_doubt"]
    assert in_doubt == {k.note: ["report"], k.look: [], k.careful: ["reconcile"]}[used]


# History.

calls = st.lists(st.tuples(st.sampled_from(["p0", "p1", ""]), st.sampled_from(["{}", "{broken", "[1]"])), max_size=3)
entries = st.lists(
    st.one_of(
        st.tuples(st.just("user"), st.none()),
        st.tuples(st.just("assistant"), calls),
        st.tuples(st.just("tool"), st.integers(0, 5)),
    ),
    max_size=20,
)


def request_messages(instructions: str, messages: list[Message]) -> list[dict[str, Any]]:
    """What a model is sent of a history."""
    conversation = Conversation(instructions)
    conversation.extend(messages)
    return json.loads(conversation.part()["messages"])  # type: ignore[no-any-return]


@given(entries)
def test_any_history_can_be_sent(history: list[tuple[str, Any]]) -> None:
    """Lost results, repeated ids and unreadable arguments are repaired: an endpoint accepts every history."""
    messages: list[Message] = [Message("user", "go", seq=1)]
    known: list[str] = []
    for seq, (role, extra) in enumerate(history, 2):
        if role == "assistant":
            made = tuple(ToolCall(f"r/{seq}/{i}", "t", text, p) for i, (p, text) in enumerate(extra))
            known += [call.call_id for call in made]
            messages.append(Message("assistant", None if made else "hm", made, seq=seq))
        elif role == "tool" and known:
            messages.append(Message("tool", "x", tool_call_id=known[-1 - extra % len(known)], seq=seq))
        else:
            messages.append(Message("user", "and", seq=seq))
    sent = request_messages("be kind", messages)
    check_body({"model": "m", "messages": sent})
    # Whatever was sent in between, and was not committed: the text is that of the messages.
    grown = Conversation("be kind")
    for number, message in enumerate(messages):
        grown.part([Message("user", "not committed")])
        grown.part([later for later in messages[number : number + 3] if later.role != "assistant"])
        grown.extend([message])
    assert json.loads(grown.part()["messages"]) == sent
    ids = [call["id"] for message in sent for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    for message in sent:
        for call in message.get("tool_calls", ()):
            json.loads(call["function"]["arguments"])


def test_a_call_without_a_result_says_so() -> None:
    """The model learns that the outcome is unknown."""
    sent = request_messages(
        "", [Message("assistant", None, (ToolCall("r/1/0", "t", "{}", "p"),)), Message("user", "go on")]
    )
    assert sent[1] == {"role": "tool", "tool_call_id": "p", "content": INTERRUPTED}


async def test_a_session_that_a_frame_turned_to_is_held_at_once(tmp_path: Path) -> None:
    """Given a frame that turns to another session with a commit whose result is not heard of yet, when the store is
    swept for sessions that nobody holds, then the other is not taken from it."""
    path = tmp_path / "notes"
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=0) as kernel:
        service, sending, sent = kernel.service, asyncio.Event(), asyncio.Event()
        commit_step = service.rounds._commit_step

        async def slow(slot: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
            result = await commit_step(slot, batch, *arguments, **options)
            if batch.session_id == "first":
                sending.set()
                await sent.wait()
            return result

        service.rounds._commit_step = slow  # type: ignore[method-assign]
        compiled = k.spec(k.script([("note", {"path": str(path), "text": "x"})], "done"), [k.note])
        for name in ("first", "second"):
            await kernel.spawn(name, compiled)
            await kernel.send(name)
        kernel.add_frame()
        await asyncio.wait_for(sending.wait(), 10)
        await service.sweep.run(0)
        assert (list(service.frames.paging.ready), service.sweep.swept) == ([], 0)
        holder = kernel.holder("second")
        assert holder is not None
        sent.set()
        for name in ("first", "second"):
            assert (await kernel.end(name))["status"] == "completed"
        assert len(k.notes(path)) == 2
        assert "tool_in_doubt" not in await kernel.types("second")
