"""A trace as a waterfall: the tree of its spans, each with a bar on one time axis. Colours only add to what is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from understudy.observability import conventions as names
from understudy.observability.traces import TraceSpan

from .command import counted
from .rendering import clean

NARROW, NO_BARS = 72, 48
"""Columns below which tokens, and below which bars, are left out."""

LABEL_SHARE = 0.5
"""Of the width, at most, for the tree; the bars have the rest."""

BAR = {"ok": "━", "error": "━", "open": "╍", "crash": "✗", "recover": "░", "wait_for_input": "┄"}
ASCII_BAR = {"ok": "=", "error": "=", "open": "-", "crash": "x", "recover": ":", "wait_for_input": "."}
MARK, ASCII_MARK = {"error": "✗", "open": "▸"}, {"error": "x", "open": ">"}
STYLE = {"error": "red", "open": "yellow", "crash": "bold red", "recover": "magenta", "wait_for_input": "blue"}
OPERATION_STYLE = {names.INVOKE_AGENT: "cyan", names.CHAT: "green", names.EXECUTE_TOOL: "blue"}


def depth_first(spans: Sequence[TraceSpan]) -> Iterator[tuple[TraceSpan, tuple[bool, ...]]]:
    """Each span behind its parent, by start; with it, for each level, whether it is the last one there.

    One whose parent is not in the list (a caller's) is a root.
    """
    known = {span.span_id for span in spans}
    below: dict[str, list[TraceSpan]] = {}
    for span in spans:
        below.setdefault(span.parent_span_id if span.parent_span_id in known else "", []).append(span)
    pending: list[tuple[TraceSpan, tuple[bool, ...]]] = [
        (span, (number == 0,)) for number, span in enumerate(reversed(below.get("", [])))
    ]
    while pending:
        span, last = pending.pop()
        yield span, last
        children = reversed(below.get(span.span_id, []))
        pending += [(child, (*last, number == 0)) for number, child in enumerate(children)]


def duration(microseconds: int) -> str:
    """For people: `840 µs`, `12 ms`, `1.25 s`, `2 m 03 s`, `1 h 05 m`."""
    if microseconds < 1_000:
        return f"{microseconds} µs"
    if microseconds < 999_500:
        return f"{microseconds / 1_000:.0f} ms"
    seconds = microseconds / 1_000_000
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} m"


def tokens(span: TraceSpan) -> int:
    """Input and output tokens of a model call or of a whole run."""
    used = (span.attributes.get(key, 0) for key in (names.USAGE_INPUT_TOKENS, names.USAGE_OUTPUT_TOKENS))
    return sum(int(number) for number in used)


@dataclass(frozen=True)
class Bar:
    """A span's place on the axis from `first` to `last` (microseconds), as wide as its column is."""

    span: TraceSpan
    first: int
    last: int
    ascii_only: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, axis = options.max_width, max(1, self.last - self.first)
        begin = min(width - 1, (self.span.start - self.first) * width // axis)
        until = self.span.end or self.last
        length = min(width - begin, max(1, -(-(until - self.span.start) * width // axis)))
        look = self.look
        line = (ASCII_BAR if self.ascii_only else BAR)[look] * length
        if look == "open" and length > 1:
            line = line[:-1] + (">" if self.ascii_only else "▶")
        style = STYLE.get(look) or OPERATION_STYLE.get(self.span.operation, "")
        yield Segment(" " * begin)
        yield Segment(line, Style.parse(style) if style else None)
        yield Segment(" " * (width - begin - length))

    @property
    def look(self) -> str:
        """Which of `BAR`: what it is comes before how it ended."""
        if self.span.operation in ("crash", "recover", "wait_for_input"):
            return "open" if self.span.status == "open" else self.span.operation
        return self.span.status


def _label(span: TraceSpan, last: tuple[bool, ...], ascii_only: bool) -> Text:
    through, corner, tee = ("|  ", "`- ", "|- ") if ascii_only else ("│  ", "└─ ", "├─ ")
    guides = "".join("   " if done else through for done in last[1:-1])
    own = (corner if last[-1] else tee) if len(last) > 1 else ""
    style = STYLE.get(span.operation, "bold" if span.operation == names.INVOKE_AGENT else "")
    return Text.assemble((guides + own, "dim"), (clean(span.name), style))


def _note(span: TraceSpan) -> Text:
    attempt = span.attributes.get(names.MODEL_ATTEMPT, 1)
    parts = [(f"attempt {attempt}", "yellow")] if attempt > 1 else []
    if span.status == "error":
        parts.append((clean(span.error or "error"), "red"))
    if span.status == "open":
        parts.append(("down" if span.operation == names.RECOVER else "goes on", "yellow"))
    if span.operation == names.INVOKE_AGENT and span.attributes.get(names.RUN_STATUS) in ("queued", "cancelled"):
        parts.append((str(span.attributes[names.RUN_STATUS]), "yellow"))
    return Text(", ").join(Text(text, style) for text, style in parts)


def summary(spans: Sequence[TraceSpan], now: int) -> str:
    """One line: the trace, how long it took or takes, and what happened in it."""
    if not spans:
        return "no spans yet"
    first, last = spans[0].start, max(span.end or now for span in spans)
    calls = [span for span in spans if span.operation == names.CHAT]
    crashes, failed = sum(span.operation == names.CRASH for span in spans), [s for s in spans if s.status == "error"]
    parts = [
        counted(len({span.session_id for span in spans}), "session"),
        counted(len(calls), "model call"),
        counted(sum(span.operation == names.EXECUTE_TOOL for span in spans), "tool call"),
        counted(sum(map(tokens, calls)), "token"),
    ]
    parts += [f"{crashes} crash{'es' if crashes != 1 else ''}"] if crashes else []
    parts += [counted(len(failed) - crashes, "error")] if len(failed) > crashes else []
    parts += [f"{going_on} going on"] if (going_on := sum(span.status == "open" for span in spans)) else []
    return f"trace {spans[0].trace_id} · {duration(last - first)} · {' · '.join(parts)}"


def waterfall(spans: Sequence[TraceSpan], now: int, width: int, *, ascii_only: bool = False) -> Table:
    """The spans for a terminal of so many columns.

    Args:
        now: microseconds since 1970 UTC; what goes on is drawn up to here.
    """
    first = spans[0].start if spans else now
    last = max([first + 1, *(span.end or now for span in spans)])
    table = Table(box=None, header_style="bold", expand=width >= NO_BARS, pad_edge=False)
    table.add_column("", width=1, no_wrap=True)  # what must not be cut off on any terminal
    table.add_column(
        "SPAN", no_wrap=True, overflow="crop" if ascii_only else "ellipsis", max_width=max(16, int(width * LABEL_SHARE))
    )
    table.add_column("TIME", justify="right", no_wrap=True)
    if width >= NARROW:
        table.add_column("TOKENS", justify="right", no_wrap=True)
    if width >= NO_BARS:
        table.add_column(f"0 … {duration(last - first)}", ratio=1, no_wrap=True, min_width=8)
    for span, levels in depth_first(spans):
        label, note = _label(span, levels, ascii_only), _note(span)
        mark = (ASCII_MARK if ascii_only else MARK).get(span.status, "")
        cells: list[Text | Bar | str] = [Text(mark, STYLE.get(span.status, ""))]
        cells.append(Text.assemble(label, "  ", note) if note else label)
        took = duration((span.end or max(now, span.start)) - span.start)
        cells.append(took.replace("µ", "u") if ascii_only else took)
        if width >= NARROW:
            cells.append(str(tokens(span) or ""))
        if width >= NO_BARS:
            cells.append(Bar(span, first, last, ascii_only))
        table.add_row(*cells)
    return table
