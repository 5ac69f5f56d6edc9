"""A run's trace from committed events: whole across sub-agents, crashes and services, while it goes on and after."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import EventsPruned, UnknownRun, UnknownSession
from understudy.events import Event
from understudy.observability.traces import TraceSpan, trace_of
from understudy.store import progress, retention, traces
from understudy.store.transaction import Transaction

from . import kernel as k

SPAWN = [("spawn_agent", {"agent": "child", "task": f"look {number}"}) for number in range(3)]


async def trace(kernel: k.Kernel, session_id: str, run_id: str | None = None) -> list[TraceSpan]:
    """What `Session.trace` does."""
    events: list[Event] = []
    after = ("", 0)
    while wires := await kernel.ask("read", "trace", [session_id, run_id, after], {}):
        events += map(Event.from_wire, wires)
        after = (wires[-1]["session_id"], wires[-1]["seq"])
    return trace_of(events)


def names_of(spans: list[TraceSpan]) -> Counter[str]:
    return Counter(span.name for span in spans)


def assert_connected(spans: list[TraceSpan], root: str = "") -> None:
    """One root, and the parent of every other span is there."""
    known = {span.span_id for span in spans}
    assert len(known) == len(spans)
    assert [span.operation for span in spans if span.parent_span_id == root] == ["invoke_agent"]
    assert {span.parent_span_id for span in spans} - {root} <= known
    assert len({span.trace_id for span in spans}) == 1


def lead(tmp_path: Path, **child: Any) -> dict[str, Any]:
    """An agent with three sub-agents, each of which notes something."""
    note = [("note", {"path": str(tmp_path / "notes"), "text": "x"})]
    worker = k.spec(k.script(note, "seen"), [k.note], name="child", **child)
    return k.spec(k.script(SPAWN, "all seen"), ["spawn_agent"], agents={"child": worker}, name="lead")


async def test_a_run_with_sub_agents_and_crashes_is_one_connected_trace(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two SIGKILLs and three sub-agents: one root, every parent present, the crashes beside their recoveries."""
    monkeypatch.setattr(traces, "TRACE_PAGE", 7)
    async with k.running(store, tmp_path / "spans") as kernel:
        kills = 2

        def on_point(_number: int, label: str, worker: k.Worker | None) -> None:
            nonlocal kills
            if label == "tool has had its effect" and worker is not None and kills:
                kills -= 1
                kernel.kill(worker)

        kernel.on_point = on_point
        row = await kernel.run("s", lead(tmp_path))
        assert row["status"] == "completed"
        spans = await trace(kernel, "s")
    assert_connected(spans)
    found = names_of(spans)
    assert found["invoke_agent lead"] == 1
    assert found["invoke_agent child"] == 3
    assert found["execute_tool spawn_agent"] == 3
    assert found["execute_tool note"] == 3
    assert found["crash child"] == found["recover child"] == 2
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.status in ("ok", "error")
        assert 0 < span.start <= span.end
        if span.name == "invoke_agent child":
            assert by_id[span.parent_span_id].name == "execute_tool spawn_agent"
        if span.operation == "recover":
            assert [by_id[link].name for link in span.links] == ["crash child"]
    assert [span.start for span in spans] == sorted(span.start for span in spans)


async def test_what_goes_on_is_shown_open(tmp_path: Path) -> None:
    """A tool that runs, a sub-agent and its parent's call are open spans; once they end the same ids are closed."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans", frames=4) as kernel:

        async def hold(worker: k.Worker) -> None:
            begun.set()
            await go_on.wait()

        point = kernel.point

        async def held(label: str, worker: k.Worker | None) -> None:
            await point(label, worker)
            if label == "tool begins" and worker is not None:
                await hold(worker)

        kernel.point = held  # type: ignore[method-assign]
        await kernel.spawn("s", lead(tmp_path))
        await kernel.send("s")
        async with asyncio.timeout(10):
            await begun.wait()
        during = await trace(kernel, "s", "r")
        go_on.set()
        await kernel.end("s")
        after = await trace(kernel, "s", "r")
    assert_connected(during)
    going_on = {span.name for span in during if span.status == "open"}
    assert going_on >= {"invoke_agent lead", "execute_tool spawn_agent", "invoke_agent child", "execute_tool note"}
    assert all(span.end == 0 for span in during if span.status == "open")
    ended = {span.span_id: span for span in after}
    assert all(ended[span.span_id].end for span in during)
    assert all(ended[span.span_id].start == span.start for span in during if span.operation == "invoke_agent")


async def test_a_question_and_a_crashed_session_are_open(tmp_path: Path) -> None:
    """Who waits for a person, and who is down, shows as such."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans", frames=1) as kernel:
        ask = k.script([("request_user_input", {"prompt": "which?"})], "done")
        await kernel.spawn("s", k.spec(ask, ["request_user_input"]))
        await kernel.send("s")
        (question,) = await kernel.paused("s")
        spans = await trace(kernel, "s")
        await kernel.ask("answer", "s", question["call_id"], "ok", "that one", 1)
        await kernel.end("s")
        answered = await trace(kernel, "s")
    assert {span.name for span in spans if span.status == "open"} == {
        "invoke_agent agent", "execute_tool request_user_input", "wait_for_input question",
    }  # fmt: skip
    (wait,) = [span for span in answered if span.operation == "wait_for_input"]
    (call,) = [span for span in answered if span.name == "execute_tool request_user_input"]
    assert wait.parent_span_id == call.span_id
    assert call.start <= wait.start < wait.end <= call.end
    assert {span.span_id for span in spans} <= {span.span_id for span in answered}


async def test_what_there_is_no_trace_of(tmp_path: Path) -> None:
    """An unknown session or run, a session without runs, and pruned events are errors that say what to do next."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        with pytest.raises(UnknownSession):
            await trace(kernel, "nobody")
        await kernel.spawn("s", k.spec(k.script("done")))
        with pytest.raises(UnknownRun, match="understudy send SESSION"):
            await trace(kernel, "s")
        await kernel.send("s")
        await kernel.end("s")
        with pytest.raises(UnknownRun, match="lists its runs"):
            await trace(kernel, "s", "other")

        def prune(tx: Transaction) -> retention.Removed:
            writer = kernel.service.config.writer
            progress.save_metrics(tx, writer, 1_000, None)
            progress.save_cursor(tx, writer, progress.SPANS, 1_000)
            return retention.drop_events(tx, "s", tx.now + 1)

        removed = await kernel.service.journal.submit(prune)
        assert removed.events
        with pytest.raises(EventsPruned, match="understudy show"):
            await trace(kernel, "s")
