"""How `understudy certify` tells people what it found."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .runs import Certificate
from .verdict import (
    DIFFERENT,
    ENDED,
    NOT_CALLED,
    NOT_INTERRUPTED,
    NOT_SAFE,
    RECONCILED,
    REPORTED,
    SAFE,
    Comparison,
    PointReport,
    ToolReport,
)

STYLE = {
    SAFE: "green",
    RECONCILED: "green",
    REPORTED: "green",
    NOT_SAFE: "red",
    NOT_INTERRUPTED: "yellow",
    NOT_CALLED: "yellow",
}

SHOWN_ALIKE = 3
"""So many findings of one kind about one tool are shown in full; `--json` has all."""

LIMITS = (
    "Seen were results, transcripts and the workspace. What tools do elsewhere was not seen, nor what a death in the "
    "middle of a tool leaves."
)


def show(found: Certificate) -> None:
    """Print a certificate."""
    console = Console(soft_wrap=True, highlight=False)
    rounds, sessions = _counted(found.rounds, "round"), _counted(len(found.sessions), "session")
    console.print(
        f"{found.agent}: {rounds}, {sessions}, ended as {found.status}; recorded once ({found.tokens} tokens), "
        f"then run {_counted(found.runs, 'time')} from the recording",
        markup=False,
    )
    if found.verdict.tools:
        console.print()
        _show_tools(console, found.verdict.tools)
    _show_points(console, found.verdict.points)
    _show_findings(console, found)
    console.print()
    for note in found.verdict.notes:
        console.print(f"note: {note}", markup=False)
    if not found.has_workspace:
        console.print("note: the agent has no workspace, so only results were compared", markup=False)
    console.print(LIMITS, markup=False, style="dim")
    findings = len(found.verdict.findings)
    console.print(Text("nothing found", "green") if found.ok else Text(_counted(findings, "finding"), "bold red"))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _show_tools(console: Console, tools: tuple[ToolReport, ...]) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("TOOL", "ON_CRASH", "CALLS", "INTERRUPTED", "EXECUTED", "VERDICT"):
        table.add_column(column, justify="right" if column in ("CALLS", "INTERRUPTED", "EXECUTED") else "left")
    for tool in tools:
        executed = f"up to {tool.executions}×" if tool.interrupted else "–"
        interrupted = _counted(tool.interrupted, "run") if tool.interrupted else "–"
        verdict = Text(tool.verdict, STYLE[tool.verdict])
        table.add_row(Text(tool.name), tool.on_crash, str(tool.calls), interrupted, executed, verdict)
    console.print(table)
    for tool in tools:
        if tool.hint:
            console.print(f"  {tool.name}: {tool.hint}", markup=False)


def _show_points(console: Console, points: tuple[PointReport, ...]) -> None:
    """How each run with a death ended."""
    real = [point for point in points if not point.forced]
    states = Counter(point.comparison.state for point in real)
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    console.print()
    console.print(f"{_counted(len(real), 'death')}: {counts or 'none'}", markup=False)
    for point in real:
        style = "red" if point.comparison.state in (DIFFERENT, ENDED) else ""
        console.print(Text(f"  {point.point}: {point.comparison.state}", style))


def _show_findings(console: Console, found: Certificate) -> None:
    alike: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for finding in found.verdict.findings:
        key = (finding.kind, finding.tools)
        alike[key] += 1
        if alike[key] > SHOWN_ALIKE:
            continue
        console.print()
        console.print(Text.assemble((finding.kind.replace("_", " "), "bold red"), f": {finding.text}"))
        if finding.point:
            console.print(f"  killed at {finding.point}", markup=False)
        _show_comparison(console, finding.comparison)
    left_out = sum(number - SHOWN_ALIKE for number in alike.values() if number > SHOWN_ALIKE)
    if left_out:
        console.print()
        console.print(f"{_counted(left_out, 'finding')} more like these; --json has all of them", markup=False)


def _show_comparison(console: Console, comparison: Comparison) -> None:
    if comparison.requests:
        console.print(f"  the request differs: {', '.join(comparison.requests)}", markup=False)
    if comparison.diff:
        _show_diff(console, comparison.diff)
    elif comparison.request_diff:
        _show_diff(console, comparison.request_diff)
    for change in comparison.files:
        console.print(f"  {change.change} in the workspace: {change.path}", markup=False)
        _show_diff(console, change.diff)


def _show_diff(console: Console, diff: str) -> None:
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in diff.splitlines():
        console.print(Text(f"    {line}", styles.get(line[:1], "")))
