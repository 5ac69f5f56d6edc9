"""A run's trace from committed events: whole across sub-agents, crashes and services, while it goes on and after."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from understudy.cluster.cli.rendering import escape
from understudy.cluster.cli.waterfall import depth_first, duration, summary, waterfall
from understudy.errors import EventsPruned, UnknownRun, UnknownSession
from understudy.events import Event
from understudy.messages import Usage
from understudy.observability.traces import TraceSpan, trace_of
from understudy.records import ModelAnswer
from understudy.store.operations import model_calls, progress
from understudy.store.reads import traces
from understudy.store.transaction import Transaction
from understudy.store.upkeep import retention

from .. import traced
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
            assert all(spans.index(by_id[link]) < spans.index(span) for link in span.links)
    timed = [span.start for span in spans if span.operation != "recover"]  # these come behind their crashes
    assert timed == sorted(timed)


@pytest.mark.thorough
async def test_exported_spans_are_one_connected_trace_though_the_collector_refuses(tmp_path: Path) -> None:
    """A session actor and the node service are killed, three sub-agents work, the collector refuses: one root, every
    parent is there, nothing is lost, and another export from the log gives the same bytes."""
    shown = await traced.show(tmp_path, 1.5)
    assert shown.problems() == []
    assert shown.status == "completed"
    assert shown.refusals


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


AT = 1_750_000_000_000_000


def span(number: int, parent: int, name: str, start: int, end: int, status: str = "ok", **more: Any) -> TraceSpan:
    operation = name.partition(" ")[0]
    parent_id = f"{parent:016x}" if parent else ""
    return TraceSpan(
        "a" * 32, f"{number:016x}", parent_id, name, operation, "s", "lead", "r", AT + start, AT + end if end else 0,
        status, **more,
    )  # fmt: skip


DRAWN = [
    span(1, 99, "invoke_agent lead", 0, 0, "open"),
    span(2, 1, "chat m", 0, 1_000_000, attributes={"gen_ai.usage.input_tokens": 90, "gen_ai.usage.output_tokens": 10}),
    span(3, 1, "crash lead", 5_000_000, 5_000_000, "error", error="process_died"),
    span(4, 1, "recover lead", 5_000_000, 6_000_000, links=(f"{3:016x}",)),
    span(5, 1, "execute_tool [bold]odd[/bold]", 6_000_000, 0, "open"),
    span(6, 5, "wait_for_input question", 7_000_000, 0, "open"),
]


def drawn(width: int, *, ascii_only: bool = False) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(waterfall(DRAWN, AT + 10_000_000, width, ascii_only=ascii_only))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [30, 47, 48, 71, 72, 80, 200])
def test_a_waterfall_fits_any_terminal(width: int) -> None:
    """A line per span, none wider than the terminal; what failed and what goes on is marked at each width."""
    lines = drawn(width)
    assert len(lines) == 1 + len(DRAWN)
    assert all(cell_len(line) <= width for line in lines)
    assert [line[0] for line in lines[1:]] == ["▸", " ", "✗", " ", "▸", "▸"]


async def test_a_terminal_obeys_no_model(tmp_path: Path) -> None:
    """Given a model that makes up a tool's name, when the trace is drawn, and the session shown, then the terminal gets
    it without its control characters."""
    evil = "x\x1b]0;pwned\x07\r\x9b2J"
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        await kernel.run("s", k.spec(k.script([(evil, {})], evil), [k.note], name=evil))
        spans = await trace(kernel, "s")
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(waterfall(spans, AT, 100))
        console.print(escape(f"{evil}\tnon\u00a0breaking\n[bold]"))
    assert "pwned" in capture.get()
    assert "non\u00a0breaking" in capture.get()
    assert not set("\x1b\x07\r\x9b") & set(capture.get())


def test_bars_share_one_axis() -> None:
    """Bars begin and end where their times are; what goes on reaches the right edge, without colours too."""
    lines = drawn(120)
    edge = lines[0].index("0 … 10.00 s")
    bars = [line[edge:].rstrip() for line in lines[1:]]
    width = len(bars[0])
    assert bars[0] == "╍" * (width - 1) + "▶"
    assert bars[1] == "━" * -(-width // 10)
    assert bars[2] == " " * (width // 2) + "✗"
    assert set(bars[3].strip()) == {"░"}
    assert len(bars[4]) == len(bars[5]) == width
    assert "100" in lines[2]
    assert "process_died" in lines[3]
    assert "goes on" in lines[5]
    assert "[bold]odd[/bold]" in lines[5]
    assert "\x1b" not in "".join(lines)
    assert "".join(drawn(120, ascii_only=True)[1:]).isascii()


def test_the_tree_is_drawn_in_order_under_its_parents() -> None:
    """Depth first, siblings by start; a span whose parent is not there is a root."""
    order = [(entry.name, len(levels)) for entry, levels in depth_first(DRAWN)]
    assert [level for _, level in order] == [1, 2, 2, 2, 2, 3]
    assert [name for name, _ in order] == [entry.name for entry in DRAWN]
    assert [entry.name for entry, _ in depth_first([DRAWN[5], DRAWN[0]])] == [DRAWN[5].name, DRAWN[0].name]


def test_the_summary_counts_what_happened() -> None:
    """One line says how long it takes and what was in it."""
    assert summary(DRAWN, AT + 10_000_000) == (
        f"trace {'a' * 32} · 10.00 s · 1 session · 1 model call · 1 tool call · 100 tokens · 1 crash · 3 going on"
    )
    assert summary([], AT) == "no spans yet"


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0 µs"), (999, "999 µs"), (12_400, "12 ms"), (999_499, "999 ms"), (999_500, "1.00 s"),
        (59_990_000, "59.99 s"), (59_999_999, "1 m 00 s"), (3_599_000_000, "59 m 59 s"), (3_900_000_000, "1 h 05 m"),
    ],
)  # fmt: skip
def test_durations_are_short(microseconds: int, text: str) -> None:
    """Three digits are enough, and none is rounded to sixty seconds."""
    assert duration(microseconds) == text


async def test_a_run_that_never_began_is_below_its_caller(tmp_path: Path) -> None:
    """Closed with its session while it was queued, it is a span of the caller's trace all the same."""
    caller = ("a" * 32, "b" * 16)
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        await kernel.spawn("s", k.spec(k.script({"text": "late", "delay": 5.0})))
        await kernel.send("s")
        run = {"run_id": "queued", "content": "go", "trace_id": caller[0], "parent_span_id": caller[1]}
        await kernel.ask("send", "s", run)
        (waiting,) = await trace(kernel, "s", "queued")
        await kernel.ask("close", "s", "enough")
        await kernel.end("s", "queued")
        (ended,) = await trace(kernel, "s", "queued")
        await kernel.end("s")
    assert (waiting.status, waiting.parent_span_id, waiting.span_id) == ("open", caller[1], ended.span_id)
    assert (ended.parent_span_id, ended.trace_id) == (caller[1], caller[0])
    assert ended.attributes["understudy.run.status"] == "cancelled"


async def test_a_late_answer_is_in_its_runs_trace(tmp_path: Path) -> None:
    """Given a call that was issued again, when both are answered, then three spans tell of it, none twice, all in the
    caller's trace: the lost attempt, its late answer, and the one that counts."""
    caller = ("a" * 32, "b" * 16)
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        await kernel.spawn("s", k.spec(k.script({"text": "said", "delay": 0.3})))
        run = {"run_id": "r", "content": "go", "trace_id": caller[0], "parent_span_id": caller[1]}
        await kernel.ask("send", "s", run)
        await kernel.until("s", "model_call_started")
        [row] = await kernel.service.reading.active(None, session_ids=["s"])
        held = row.activation
        await kernel.service.journal.submit(
            lambda tx: model_calls.reissue(tx, held, row.frame_id, "elsewhere", "offline")
        )
        await kernel.end("s")
        late = ModelAnswer(content="late", usage=Usage(1, 1))
        answered = {"model": "offline", "got": late, "incarnation": held.incarnation}
        await kernel.service.journal.submit(lambda tx: model_calls.answer(tx, "s", "r", 1, 2, **answered))
        spans = await trace(kernel, "s")
    calls = [span for span in spans if span.operation == "chat"]
    assert len({span.span_id for span in calls}) == len(calls) == 3
    assert {span.trace_id for span in spans} == {caller[0]}
    assert [span.error for span in calls].count("gateway_lost") == 1
    assert sum(span.attributes.get("understudy.model.late", False) for span in calls) == 2
