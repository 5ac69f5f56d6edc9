"""`understudy state`: what loops know of their runs."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape

from understudy.loops import outcome_of

from .command import Json, Store, command, connected, print_json
from .schedules_command import Name, spoken

app = typer.Typer(help="What a loop knows of its runs: each firing receives it.", no_args_is_help=True)


@app.callback()
def state() -> None:
    """What a loop knows of its runs: each firing receives it."""


@app.command()
@command
def show(name: Name, store: Store = None, json: Json = False) -> int:
    """Show what a loop knows: what it attempted, what passed, what is pending, and what is open in triage."""
    with connected(store, start=False) as cluster:
        memory = cluster.schedule(name).memory()
        entries = [entry for entry in cluster.triage() if entry.schedule == name]
    if json:
        print_json({"memory": memory, "triage": entries})
        return 0
    console = Console(highlight=False)
    counts = ", ".join(
        f"{getattr(memory, what)} {what}" for what in ("attempted", "passed", "failed", "cancelled")
    )  # fmt: skip
    console.print(f"{counts}, {len(memory.pending)} pending")
    for run_id in memory.pending:
        console.print(f"[bold]pending[/bold] run {escape(run_id)}", soft_wrap=True)
    for run in memory.recent:
        said = " ".join(run.text.split())
        console.print(f"[bold]{outcome_of(run.status)}[/bold] {spoken(run.at)} {escape(said)}", soft_wrap=True)
    for entry in entries:
        text = f"{entry.id} {entry.count} times, {entry.code}: {' '.join(entry.text.split())}"
        console.print(f"[bold]triage[/bold] {escape(text)}", soft_wrap=True)
    return 0


@app.command()
@command
def reset(name: Name, store: Store = None, json: Json = False) -> int:
    """Have a loop forget what it knows; triage stays as it is."""
    with connected(store, start=False) as cluster:
        done = cluster.schedule(name).reset()
    print_json({"reset": done}) if json else print("reset" if done else "it knew nothing")
    return 0
