"""`understudy queues`: how many runs are at work, and begin."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from understudy.durations import written
from understudy.errors import InvalidInput

from .command import Json, Store, command, connected, errors, print_json
from .durations import given_seconds
from .rendering import when

if TYPE_CHECKING:
    from understudy.queues import Rate
    from understudy.reads import QueueInfo

app = typer.Typer(help="Limit how many runs are at work at once, and begin.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The queue's name; `understudy queues list` lists them.")]


@app.callback()
def queues() -> None:
    """Limit how many runs are at work at once, and begin."""


@app.command("list")
@command
def list_(store: Store = None, json: Json = False) -> int:
    """List the queues, with what waits in them and is at work."""
    with connected(store, start=False) as cluster:
        found = cluster.queues()
    if json:
        print_json({"queues": found})
        return 0
    if not found:
        errors.print("no queues; the first one: understudy queues set NAME --concurrency 4")
        return 0
    table = Table("name", "limits", "at work", "waiting", "behind", "oldest", box=None, header_style="bold",
                  pad_edge=False)  # fmt: skip
    for one in found:
        name = f"{one.name} (paused)" if one.paused else one.name
        oldest = when(one.oldest) if one.oldest else ""
        table.add_row(*map(escape, (name, _limits(one), *map(str, (one.at_work, one.waiting, one.behind)), oldest)))
    Console(highlight=False).print(table)
    return 0


@app.command()
@command
def show(name: Name, store: Store = None, json: Json = False) -> int:
    """Show a queue: its limits, and how many runs wait and are at work."""
    with connected(store, start=False) as cluster:
        found = cluster.queue(name).info()
    print_json(found) if json else _print(found)
    return 0


@app.command("set")
@command
def set_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the queue.")],
    concurrency: Annotated[int, typer.Option(help="So many runs at work at once; 0: any number.", min=0)] = 0,
    per_key: Annotated[int, typer.Option(help="So many of those with the same key; 0: any number.", min=0)] = 0,
    rate: Annotated[str | None, typer.Option(help="So many begin within a time: 10/1m, 100/1h.")] = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Create a queue, or give it other limits; runs that are at work go on.

    \b
    understudy queues set crawl --concurrency 8 --per-key 1
    understudy queues set mail --rate 10/1m
    """
    limit = _rate(rate)
    with connected(store) as cluster:
        found = cluster.queue(name, concurrency=concurrency, per_key=per_key, rate=limit).info()
    print_json(found) if json else _print(found)
    return 0


@app.command()
@command
def pause(name: Name, store: Store = None, json: Json = False) -> int:
    """Have no run of a queue begin; those at work go on."""
    with connected(store, start=False) as cluster:
        done = cluster.queue(name).pause()
    print_json({"paused": done}) if json else print("paused" if done else "it was paused already")
    return 0


@app.command()
@command
def resume(name: Name, store: Store = None, json: Json = False) -> int:
    """Have the runs of a paused queue begin again."""
    with connected(store, start=False) as cluster:
        done = cluster.queue(name).resume()
    print_json({"resumed": done}) if json else print("resumed" if done else "it was not paused")
    return 0


@app.command()
@command
def remove(name: Name, store: Store = None, json: Json = False) -> int:
    """Remove a queue of which no run waits or is at work."""
    with connected(store, start=False) as cluster:
        done = cluster.queue(name).remove()
    print_json({"removed": done}) if json else print("removed" if done else "there was none")
    return 0


def _rate(given: str | None) -> Rate | None:
    """`10/1m`: ten within a minute."""
    from understudy.queues import Rate

    if given is None:
        return None
    number, slash, time = given.partition("/")
    if not slash or not re.fullmatch(r"\d{1,9}", number.strip(), re.ASCII):
        raise InvalidInput(f"--rate is {given!r}, and must be a number and a time: 10/1m, 100/1h")
    return Rate(int(number), given_seconds(time))


def _limits(found: QueueInfo) -> str:
    said = [f"{found.concurrency} at once"] if found.concurrency else []
    said += [f"{found.per_key} per key"] if found.per_key else []
    said += [f"{found.rate} within {written(found.seconds)}"] if found.rate else []
    return ", ".join(said) or "none"


def _print(found: QueueInfo) -> None:
    console = Console(highlight=False)
    rows = {
        "queue": f"{found.name}{' (paused)' if found.paused else ''}",
        "limits": _limits(found),
        "at work": str(found.at_work),
        "waiting": f"{found.waiting}, and {found.behind} behind others of their sessions",
    }
    if found.oldest:
        rows["oldest"] = when(found.oldest)
    for what, text in rows.items():
        console.print(f"[bold]{what:<10}[/bold] {escape(text)}", soft_wrap=True)
