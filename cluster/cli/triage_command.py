"""`understudy triage`: what has failed of that which schedules and loops begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from understudy.errors import InvalidInput
from understudy.json_text import jsonable

from .command import Json, Store, command, connected, counted, errors, print_json
from .schedules_command import print_fired, spoken

if TYPE_CHECKING:
    from understudy.reads import TriageEntry

app = typer.Typer(help="What has failed of that which schedules and loops begin, the same failures as one.")

EntryId = Annotated[str, typer.Argument(metavar="ID", help="Of the entry; `understudy triage` lists them.")]
Resolved = Annotated[bool, typer.Option("--all", "-a", help="Also what was resolved.")]


@app.callback(invoke_without_command=True)
def triage(context: typer.Context, all: Resolved = False, store: Store = None, json: Json = False) -> None:
    """What has failed of that which schedules and loops begin, the same failures as one."""
    if context.invoked_subcommand is None:
        list_(all=all, store=store, json=json)


@app.command("list")
@command
def list_(all: Resolved = False, store: Store = None, json: Json = False) -> int:
    """List what is open, the last that came first."""
    with connected(store, start=False) as cluster:
        found = cluster.triage(resolved=all)
    if json:
        print_json({"triage": [jsonable(entry) for entry in found]})
        return 0
    if not found:
        errors.print("nothing in triage" if all else "nothing is open in triage; --all lists what was resolved")
        return 0
    table = Table("id", "schedule", "state", "times", "last", "what", box=None, header_style="bold", pad_edge=False)
    for one in found:
        what = f"{one.code}: {' '.join(one.text.split())}"
        cells = (one.id, one.schedule, _state(one), str(one.count), spoken(one.last_at), what)
        table.add_row(*map(escape, cells))
    Console(highlight=False).print(table)
    return 0


@app.command()
@command
def show(entry: EntryId, store: Store = None, json: Json = False) -> int:
    """Show an entry: how often it has come, and the last run that failed so."""
    with connected(store, start=False) as cluster:
        found = cluster.triage_item(entry).info()
    print_json(jsonable(found)) if json else _print(found)
    return 0


@app.command()
@command
def resolve(
    entries: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Of entries.")] = None,
    all: Annotated[bool, typer.Option("--all", "-a", help="All that are open now.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Take entries out of triage; the same failure opens its entry again."""
    if bool(entries) == all:
        raise InvalidInput("say which: understudy triage resolve ID, or --all")
    with connected(store, start=False) as cluster:
        chosen = [entry.id for entry in cluster.triage()] if all else list(entries or ())
        done = [entry for entry in chosen if cluster.triage_item(entry).resolve()]
    if json:
        print_json({"resolved": done})
    elif done:
        print(f"resolved: {', '.join(done)}")
    else:
        print("nothing was open")
    return 0


@app.command()
@command
def retry(entry: EntryId, store: Store = None, json: Json = False) -> int:
    """Fire the schedule of an entry now; if that run completes, the entry is resolved."""
    with connected(store, start=False) as cluster:
        done = cluster.triage_item(entry).retry()
    return print_fired(done, json=json)


def _state(entry: TriageEntry) -> str:
    return "open" if entry.is_open else "resolved"


def _print(entry: TriageEntry) -> None:
    console = Console(highlight=False)

    def say(what: str, text: Any) -> None:
        console.print(f"[bold]{what:<10}[/bold] {escape(str(text))}", soft_wrap=True)

    say("entry", f"{entry.id} ({_state(entry)})")
    say("schedule", entry.schedule)
    say("what", f"{entry.code}: {entry.text}")
    reopened = f", reopened {counted(entry.reopened, 'time')}" if entry.reopened else ""
    times = f"first {spoken(entry.first_at)}, last {spoken(entry.last_at)}"
    say("came", f"{counted(entry.count, 'time')}, {times}{reopened}")
    if entry.last_run:
        say("last", f"session {entry.last_session}, run {entry.last_run}")
    if entry.retry_run:
        say("retry", f"run {entry.retry_run}")
    if not entry.is_open:
        say("resolved", f"{spoken(entry.resolved_at)}{f' by {entry.resolved_by}' if entry.resolved_by else ''}")
