"""How a survey is shown: a live tree while it runs; the report and a table at the end."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.table import Table
from rich.tree import Tree

from understudy.cluster.cli.rendering import escape, styled
from understudy.cluster.client.results import SessionInfo

from .job import SurveyOutcome

GLYPHS = {
    "running": "▶",
    "waiting_for_model": "…",
    "waiting_for_child": "⧗",
    "waiting_for_timer": "⧗",
    "idle": "✓",
    "completed": "✓",
    "failed": "✗",
    "cancelled": "✗",
    "quarantined": "✗",
}


class SurveyView:
    """Shows a survey. Where stdout is no terminal, or `quiet`, progress goes to stderr, one line a change.

    Args:
        quiet: write nothing to stdout, for `--json`.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(highlight=False)
        self._live: Live | None = None
        if not quiet and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8)
        self._shown: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> SurveyView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, tree: list[SessionInfo], labels: dict[str, str]) -> None:
        """Show the tree as it is now."""
        if self._live is not None:
            self._live.update(render_tree(tree, labels))
            return
        for info in tree:
            stage = (_stage(info), info.restarts)
            if self._shown.get(info.id) != stage:
                self._shown[info.id] = stage
                crashed = f", restored {_times(info.restarts)}" if info.restarts else ""
                name = " ".join(filter(None, [info.name, labels.get(info.id)]))
                print(f"{name}: {stage[0]}{crashed}", file=sys.stderr, flush=True)

    def finish(self, outcome: SurveyOutcome) -> None:
        """Print the report and the table. Without a terminal the report is printed as it is, byte for byte."""
        if self._console.is_terminal:
            self._console.print(Markdown(outcome.report))
        else:
            sys.stdout.write(outcome.report)
            sys.stdout.flush()
        self._console.print()
        self._console.print(render_table(outcome))
        self._console.print("[dim]The services go on: `understudy ps` shows them, `understudy down` ends them.[/dim]")


def _stage(info: SessionInfo) -> str:
    """What changes rarely enough to be worth a line."""
    if info.status in ("running", "waiting_for_model", "waiting_for_child"):
        return "at work"
    return "done" if info.status in ("idle", "completed") else info.status


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def render_tree(tree: list[SessionInfo], labels: dict[str, str]) -> Tree:
    """Who is doing what: status, round, tool, tokens; after a crash also which activation it is."""
    nodes: dict[str, Tree] = {}
    root: Tree | None = None
    for info in tree:
        name = f"[bold]{escape(info.name)}[/bold] {escape(labels.get(info.id, ''))}".rstrip()
        facts = [
            styled(info.status),
            f"round {info.round}" if info.round else "",
            escape(", ".join(sorted(set(info.tools)))),
        ]
        facts.append(
            f"[magenta]epoch {info.epoch}, restored {_times(info.restarts)}[/magenta]" if info.restarts else ""
        )
        facts.append(f"[dim]{info.tokens_used:,} tokens[/dim]" if info.tokens_used else "")
        text = f"{GLYPHS.get(info.status, '·')} {name}  {' · '.join(filter(None, facts))}"
        above = nodes.get(info.parent_id or "")
        nodes[info.id] = above.add(text) if above is not None else Tree(text)
        root = root or nodes[info.id]
    return root or Tree("starting")


def render_table(outcome: SurveyOutcome) -> Table:
    """What the crashes cost."""
    table = Table(show_header=False, title=f"{outcome.status} in {outcome.seconds:.1f} s", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, value in table_rows(outcome):
        table.add_row(name, value)
    return table


def table_rows(outcome: SurveyOutcome) -> list[tuple[str, str]]:
    """The table's names and values."""
    times = outcome.restore_ms
    restored = "none: nobody was at work" if outcome.crashes else "–"  # who only waited goes on when the wait ends
    if times:
        restored = f"{statistics.median(times):.0f} ms median, {max(times):.0f} ms longest"
    killed = f"{len(outcome.chaos_pids):,}"
    if len(outcome.chaos_pids) < outcome.chaos:
        killed += f" of {outcome.chaos:,}: the work ended first"
    return [
        ("sessions", f"{len(outcome.sessions):,}"),
        ("actors killed on purpose", killed),
        ("crashes", f"{outcome.crashes:,}"),
        ("restore times", restored),
        ("tokens", f"{outcome.tokens:,}"),
        ("tokens re-billed", f"{outcome.tokens_redone:,}"),
        ("tool calls", f"{outcome.tool_calls:,}"),
        ("tool calls repeated", f"{outcome.tool_calls_repeated:,}"),
        ("messages lost", f"{outcome.messages_lost:,}"),
    ]


def outcome_to_json(outcome: SurveyOutcome) -> dict[str, Any]:
    """The outcome as plain data, for `--json`."""
    return dataclasses.asdict(outcome)
