"""Hooks beside the model call: what one that trips leaves, when it trips, and who may die meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from understudy import HookContext, Inject, Refuse, Stop, hook
from understudy.actors.hooks import describe_hook
from understudy.node.calls import Call
from understudy.records import ModelAnswer

from .. import tiers
from . import kernel as k
from .deaths import Deaths

SEEN: list[HookContext] = []
"""What guards received, in processes that lived on to their end."""

Then = Callable[[HookContext], Awaitable[Any]]
ACTS: dict[str, Then] = {}
"""What the guards of this test do, by name."""


def worker() -> k.Worker:
    found = k.WORKER.get()
    assert found is not None
    return found


def guard(name: str, then: Then, **options: Any) -> dict[str, Any]:
    """The description of a guard that does this."""
    ACTS[name] = then

    @hook("before_model", name=name, parallel=True, **options)
    async def watch(context: HookContext) -> Any:
        wanted = await ACTS[name](context)
        if worker().dead:
            await k.never()
        SEEN.append(context)
        return wanted

    watch.__qualname__ = name
    globals()[name] = watch
    return describe_hook(watch, pickle=None)[0]


async def passes(_context: HookContext) -> None:
    """Let it pass, at once."""


async def refuses(_context: HookContext) -> Refuse:
    """Trip at once."""
    return Refuse("not this")


async def refuses_tools(_context: HookContext) -> Refuse:
    """Trip behind the tools of a round."""
    return Refuse("not this")


def ended_by(kind: str, text: str) -> Then:
    """A guard that trips in this round, once its model has answered: the gateway has the whole answer."""

    async def trips(context: HookContext) -> Any:
        await complete(worker().kernel)
        return {"refuse": Refuse, "stop": Stop}[kind](text)

    return trips


async def happened(condition: Callable[[], bool]) -> None:
    """Wait for something in the gateway, of which nobody is notified."""
    async with asyncio.timeout(k.STUCK_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def complete(kernel: k.Kernel) -> None:
    """Wait until the gateway has the whole answer to each of its calls."""
    calls = kernel.gateway.calls._calls
    await happened(lambda: bool(calls) and all(call.answer.done() for call in calls.values()))


def guarded(path: Path, *guards: dict[str, Any], first: Any = None, **more: Any) -> dict[str, Any]:
    """An agent with these guards that leaves a note, and says so."""
    replies = (first or [("note", {"path": str(path), "text": "x"})], "done")
    return k.spec(k.script(*replies), (k.note,), hooks=list(guards), **more)


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()
    ACTS.clear()


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path) as made:
        yield made


async def data(kernel: k.Kernel, event_type: str, session_id: str = "s") -> list[dict[str, Any]]:
    return [event["data"] for event in await kernel.events(session_id) if event["type"] == event_type]


async def said(kernel: k.Kernel, session_id: str = "s") -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in await kernel.messages(session_id)]


async def test_it_runs_beside_the_call(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a guard that waits for the model's answer to be there, then that is asked meanwhile, no tool begins and
    nothing is committed before its verdict, and the run goes on as without it."""
    before: list[list[str]] = []

    async def looks(_context: HookContext) -> None:
        await complete(worker().kernel)
        before.append(await worker().kernel.types("s"))

    run = await kernel.run("s", guarded(tmp_path / "n", guard("looks", looks)))
    assert (run["status"], run["text"]) == ("completed", "done")
    assert before[0][-1] == "model_call_started"
    assert before[1].count("model_call_completed") == 1
    assert len(k.notes(tmp_path / "n")) == 1
    assert [(c.point, c.round, c.call_key, c.redone) for c in SEEN] == [
        ("before_model", 1, "s/r/1", False), ("before_model", 2, "s/r/2", False),
    ]  # fmt: skip
    assert [c.messages for c in SEEN] == [request.body["messages"] for request in kernel.server.requests]


async def test_it_trips_before_the_answer(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given an endpoint that gives no answer, when a guard trips, then the call is aborted and the run ends `failed`
    as after a refusal before it; nothing was said, nothing done, and the next run is not kept from its answer."""
    kernel.server.hold()
    ends = []

    @hook("run_end")
    async def end(context: HookContext) -> None:
        ends.append((context.outcome, context.text))

    end.__qualname__ = "end"
    globals()["end"] = end
    run = await kernel.run("s", guarded(tmp_path / "n", guard("no", refuses), describe_hook(end, pickle=None)[0]))
    assert (run["status"], run["text"], run["error"]["code"]) == ("failed", "", "refused")
    assert run["error"]["message"] == "the hook no refused: not this"
    [failed] = await data(kernel, "model_call_failed")
    assert (failed["error_code"], failed["error_message"]) == ("refused", "the hook no refused: not this")
    assert (await said(kernel), k.notes(tmp_path / "n"), ends) == ([("user", "go")], [], [("failed", "")])
    await kernel.gateway_is_empty()
    kernel.server.release()
    ACTS["no"] = passes
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"


@pytest.mark.parametrize("kind", ["refuse", "stop"])
async def test_it_trips_behind_the_answer(kernel: k.Kernel, tmp_path: Path, kind: str) -> None:
    """Given a guard that trips when the model has answered, then what that said is in no log and its tool does not run;
    it was paid, and the run ends as the guard wants."""
    run = await kernel.run("s", guarded(tmp_path / "n", guard("no", ended_by(kind, "not this"))))
    refused = kind == "refuse"
    assert (run["status"], run["text"]) == (("failed", "") if refused else ("completed", "not this"))
    [failed] = await data(kernel, "model_call_failed")
    what = "the hook no refused: not this" if refused else "the hook no stopped the run"
    assert (failed["error_code"], failed["error_message"]) == ("refused", what)
    assert (await said(kernel), k.notes(tmp_path / "n")) == ([("user", "go")], [])
    assert failed["usage"] == run["usage"]
    assert not {"model_call_completed", "tool_started"} & set(await kernel.types("s"))
    assert kernel.server.count == 1


async def test_it_trips_while_the_answer_streams(store: str, tmp_path: Path) -> None:
    """What had streamed is paid as estimated, and kept nowhere."""

    async def trips(_context: HookContext) -> Refuse:
        calls = worker().kernel.gateway.calls._calls
        await happened(lambda: any(call.parts.lengths for call in calls.values()))
        return Refuse("not this")

    async with k.running(store, tmp_path, chunk_delay=0.2) as kernel:
        agent = guarded(tmp_path / "n", guard("no", trips), first="one two three four five six seven eight")
        budget = [{"scope": "session", "tokens": 100_000}]
        run = await kernel.run("s", {**agent, "budget": budget})
        assert (run["status"], run["text"]) == ("failed", "")
        [failed] = await data(kernel, "model_call_failed")
        assert failed["usage"] == run["usage"]
        assert failed["usage"][0] > 0
        assert await said(kernel) == [("user", "go")]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (Inject("psst"), "can't be returned beside a model call: only Refuse and Stop can"),
        (ValueError("out of order"), "ValueError: out of order"),
    ],
    ids=["inject", "raises"],
)
@pytest.mark.parametrize("rule", [None, "refuse", "ignore"])
async def test_it_fails(kernel: k.Kernel, tmp_path: Path, wanted: Any, why: str, rule: str | None) -> None:
    """A guard that fails, or wants what can't be had any more, trips, unless it says otherwise."""

    async def fails(_context: HookContext) -> Any:
        if isinstance(wanted, Exception):
            raise wanted
        return wanted

    run = await kernel.run("s", guarded(tmp_path / "n", guard("broken", fails, on_failure=rule)))
    if rule == "ignore":
        assert (run["status"], run["text"]) == ("completed", "done")
    else:
        assert (run["status"], run["error"]["code"]) == ("failed", "refused")
        assert why in run["error"]["message"]


@pytest.mark.parametrize("point", ["before_model", "beside", "after_tools"])
async def test_a_refused_run_has_no_text(kernel: k.Kernel, tmp_path: Path, point: str) -> None:
    """Given a model that says something beside its first tool call, when a hook refuses behind that, then the run has
    no text, wherever it is refused: what was said is in the history."""

    async def in_the_second_round(context: HookContext) -> Refuse | None:
        return Refuse("not this") if context.round == 2 else None

    described = guard("in_the_second_round", in_the_second_round)
    if point != "beside":
        described = {name: value for name, value in described.items() if name != "parallel"}
    if point == "after_tools":
        described = describe_hook(hook("after_tools", name="in_the_second_round")(refuses_tools), pickle=None)[0]
    first = {"text": "let me see", "tool_calls": [["note", {"path": str(tmp_path / "n"), "text": "x"}]]}
    run = await kernel.run("s", guarded(tmp_path / "n", described, first=first))
    assert (run["status"], run["error"]["code"], run["text"]) == ("failed", "refused", "")
    assert ("assistant", "let me see") in await said(kernel)


@pytest.mark.parametrize("point", ["before_model", "beside"])
async def test_a_failure_has_no_secrets(
    kernel: k.Kernel, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a hook that fails with an error in which a secret variable's value is, or what no store can keep, then the
    run's error and its events have neither."""
    monkeypatch.setenv("SHOP_API_KEY", "abcdefgh12345678")

    async def fails(_context: HookContext) -> None:
        raise ValueError("no access with abcdefgh12345678\x00")

    described = guard("fails", fails)
    if point == "before_model":
        described = {name: value for name, value in described.items() if name != "parallel"}
    run = await kernel.run("s", guarded(tmp_path / "n", described))
    assert run["error"]["message"] == "the hook fails failed: ValueError: no access with ***\ufffd"
    assert "abcdefgh12345678" not in str(await kernel.events("s"))


async def test_it_takes_too_long(kernel: k.Kernel, tmp_path: Path) -> None:
    """A synchronous guard that outlives its timeout trips; the session's next run is in another process."""
    leave = threading.Event()

    @hook("before_model", parallel=True)
    def blocks(context: HookContext) -> None:
        if len(SEEN) == 0:
            SEEN.append(context)
            leave.wait(20)

    blocks.__qualname__ = "blocks"
    globals()["blocks"] = blocks
    known = set(kernel.workers)
    run = await kernel.run("s", guarded(tmp_path / "n", describe_hook(blocks, pickle=None)[0], tool_timeout=0.1))
    assert (run["status"], run["error"]["code"]) == ("failed", "refused")
    assert "did not finish within" in run["error"]["message"]
    kernel.add_frame()
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"
    assert len(known & set(kernel.service.frames.paging.slots)) == 1
    leave.set()


async def test_several_guards(kernel: k.Kernel, tmp_path: Path) -> None:
    """They run beside each other. The first to trip decides, whichever it is, and the others are ended; of two that
    trip at once the first of the list does."""
    ended = []

    async def hangs(_context: HookContext) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("hangs")
            raise

    run = await kernel.run("s", guarded(tmp_path / "n", guard("hangs", hangs), guard("no", refuses)))
    assert run["error"]["message"] == "the hook no refused: not this"
    assert ended == ["hangs"]
    both = guarded(tmp_path / "n", guard("first", refuses), guard("second", refuses))
    assert (await kernel.run("t", both))["error"]["message"] == "the hook first refused: not this"


async def test_others_have_the_frame_meanwhile(store: str, tmp_path: Path) -> None:
    """Given one frame and a slow model, then a session whose guard is at work keeps the frame, and leaves it to another
    one once that has let it pass; nothing is repeated."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def waits(context: HookContext) -> None:
        if context.session_id == "s":
            reached.set()
            await go.wait()

    async with k.running(store, tmp_path, frames=1) as kernel:
        kernel.server.hold()
        agent = guarded(tmp_path / "n", guard("waits", waits))
        await kernel.spawn("s", agent)
        await kernel.spawn("t", agent)
        await kernel.send("s")
        await reached.wait()
        await kernel.send("t")
        [slot] = kernel.service.frames.paging.slots.values()
        assert (slot.session_id, slot.state, list(kernel.service.frames.paging.ready)) == ("s", "acting", ["t"])
        go.set()
        await kernel.until("t", "model_call_started")
        kernel.server.release()
        assert [(await kernel.end(name))["status"] for name in ("s", "t")] == ["completed"] * 2
        assert sorted(c.call_key for c in SEEN) == ["s/r/1", "s/r/2", "t/r/1", "t/r/2"]
        assert not any(c.redone for c in SEEN)
        assert kernel.server.count == 4
        assert len(kernel.service.verdicts) == 0


async def test_a_cancel_does_not_wait_for_a_guard(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a whole answer whose guard is still at work, when the run is cancelled, then it ends, and nothing of that
    answer is kept: nobody vouched for it."""
    ready = asyncio.Event()

    async def hangs(_context: HookContext) -> None:
        await complete(worker().kernel)
        ready.set()
        await asyncio.Event().wait()

    await kernel.spawn("s", guarded(tmp_path / "n", guard("hangs", hangs), first="a secret"))
    await kernel.send("s")
    await ready.wait()
    await kernel.ask("cancel", "s", "r", "enough")
    run = await kernel.end("s")
    assert (run["status"], run["text"], await said(kernel)) == ("cancelled", "", [("user", "go")])
    [failed] = await data(kernel, "model_call_failed")
    assert failed["usage"] == run["usage"]


@pytest.mark.parametrize("whole", [True, False], ids=["answered", "unanswered"])
async def test_a_cancel_ends_the_guard_and_frees_the_frame(store: str, tmp_path: Path, whole: bool) -> None:
    """Given one frame, whose session's run is cancelled while its guard hangs, then the guard is ended, and the frame
    has the next session."""
    ready, over = asyncio.Event(), asyncio.Event()

    async def hangs(context: HookContext) -> None:
        if context.session_id == "s":
            if whole:
                await complete(worker().kernel)
            ready.set()
            try:
                await asyncio.Event().wait()
            finally:
                over.set()

    async with k.running(store, tmp_path, frames=1) as kernel:
        if not whole:
            kernel.server.hold()
        agent = guarded(tmp_path / "n", guard("hangs", hangs))
        await kernel.spawn("s", agent)
        await kernel.spawn("t", agent)
        await kernel.send("s")
        await ready.wait()
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        await over.wait()
        kernel.server.release()
        await kernel.send("t")
        assert (await kernel.end("t"))["status"] == "completed"


async def test_a_steer_does_not_wait_for_a_guard(kernel: k.Kernel, tmp_path: Path) -> None:
    """A steer that interrupts ends the call and its guard; the next call has guards of its own."""
    ready = asyncio.Event()

    async def hangs_once(context: HookContext) -> None:
        if context.round == 1:
            ready.set()
            await asyncio.Event().wait()

    kernel.server.hold()
    await kernel.spawn("s", guarded(tmp_path / "n", guard("hangs_once", hangs_once)))
    await kernel.send("s")
    await ready.wait()
    await kernel.ask("steer", "s", {"content": "rather this", "interrupt": True})
    kernel.server.release()
    assert (await kernel.end("s"))["status"] == "completed"
    assert [c.round for c in SEEN] == [2, 3]


async def test_a_guard_that_kills_its_process(kernel: k.Kernel, tmp_path: Path) -> None:
    """Its deaths count, though the session only waits for its model: it is given up, not resumed for ever."""

    async def crashes(_context: HookContext) -> None:
        me = worker()
        me.kernel.kill(me)
        await k.never()

    run = await kernel.run("s", guarded(tmp_path / "n", guard("crashes", crashes)))
    assert run["status"] == "quarantined"
    crashed = await data(kernel, "session_crashed")
    assert [one["waiting"] for one in crashed] == [False] * 3


async def test_a_verdict_that_is_lost_with_everything(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a guard trips, and its frame and its service die before that is committed, when it lets the call pass the
    next time, then the aborted answer is none, and the model is asked in another round."""

    def die(_number: int, label: str, _worker: k.Worker | None) -> None:
        if label == "before judge":
            kernel.on_point = None
            ACTS["fickle"] = passes

    async def trips(_context: HookContext) -> Refuse:
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        return Refuse("not this")

    aborted = asyncio.Event()
    original = kernel.gateway.calls.abort

    async def abort(number: str, key: str) -> None:
        await original(number, key)
        me = kernel.holder("s")
        assert me is not None
        kernel.kill(me)
        kernel.kill_node()
        aborted.set()
        await k.never()

    kernel.gateway.calls.abort = abort  # type: ignore[method-assign]
    kernel.on_point = die
    kernel.server.hold()
    await kernel.spawn("s", guarded(tmp_path / "n", guard("fickle", trips)))
    await kernel.send("s")
    await aborted.wait()
    kernel.server.release()
    assert (await kernel.end("s"))["status"] == "completed"
    assert [failed["error_code"] for failed in await data(kernel, "model_call_failed")] == ["aborted"]


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
@pytest.mark.parametrize("trips_in", [0, 1, 2], ids=["passes", "first", "second"])
async def test_a_death_anywhere(victim: str, trips_in: int, tmp_path: Path) -> None:
    """Frame or node service killed at each call, commit and tool: the run ends as without a death, its model is not
    asked again, its tool runs once at most, and a guard learns that it may have been asked before."""

    async def trips(context: HookContext) -> Refuse | None:
        await worker().kernel.point("guard", worker())
        return Refuse("not this") if context.round == trips_in else None

    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        agent = guarded(tmp_path / "none", guard("guard_of_all", trips))
        await kernel.run("s", agent)
        points, wanted, outcome = len(kernel.points), await said(kernel), await kernel.end("s")
        assert not any(c.redone for c in SEEN)
        problems = []
        for at in tiers.points(range(points + 4)):
            session_id, path = f"s{at}", tmp_path / "none"
            path.unlink(missing_ok=True)
            SEEN.clear()
            deaths = Deaths(kernel, session_id, at, victim)
            run = await kernel.run(session_id, agent, session_id)
            kernel.on_point = None
            await kernel.quiet()
            found = (await said(kernel, session_id))[1:]
            if "interrupted" in str(found):  # the tool was in doubt
                found = wanted[1:]
            if (run["status"], run["text"], found) != (outcome["status"], outcome["text"], wanted[1:]):
                problems.append(f"{deaths.where}: {run['status']}, {run['error']}, {found}")
            asked = [one for one in kernel.server.requests if one.body["messages"][1]["content"] == session_id]
            if len(asked) > (1 if trips_in == 1 else 2) or len(k.notes(path)) > (trips_in != 1):
                problems.append(f"{deaths.where}: asked {len(asked)} times, {k.notes(path)}")
            known: set[str] = set()
            for context in SEEN:
                if context.call_key in known and not context.redone:
                    problems.append(f"{deaths.where}: called again for {context.call_key}, and not marked as redone")
                known.add(context.call_key)
            left = len(kernel.service.verdicts), len(kernel.service.calls), len(kernel.service.interrupts)
            if any(left):
                problems.append(f"{deaths.where}: {left} are left")
        assert not problems, "\n".join(problems)


async def test_the_gateway_dies(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a call that its guard has not let pass, when the gateway dies, then it is made again as any that is lost
    with it, and guarded again."""
    deaths = iter([True])

    async def waits(_context: HookContext) -> None:
        if next(deaths, False):
            await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
            kernel.gateway.kill()
            kernel.server.release()
            await asyncio.Event().wait()

    kernel.server.hold()
    run = await kernel.run("s", guarded(tmp_path / "n", guard("waits", waits)))
    assert (run["status"], len(k.notes(tmp_path / "n"))) == ("completed", 1)
    assert (await kernel.types("s")).count("model_call_reissued") == 1
    assert [c.redone for c in SEEN] == [True, False]


async def test_the_gateway_dies_behind_its_answer(kernel: k.Kernel, tmp_path: Path) -> None:
    """An answer that waits for its guard is not lost with the gateway: the node service has it."""
    arrived, judged = asyncio.Event(), kernel.service.calls._judged

    async def waits(_context: HookContext) -> None:
        await arrived.wait()
        arrived.clear()
        kernel.gateway.kill()

    async def noted(call: Call, answer: ModelAnswer) -> ModelAnswer:
        arrived.set()
        return await judged(call, answer)

    with patch.object(kernel.service.calls, "_judged", noted):
        run = await kernel.run("s", guarded(tmp_path / "n", guard("waits", waits)))
    assert (run["status"], kernel.server.count) == ("completed", 2)
