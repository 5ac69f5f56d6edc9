"""`understudy notes`: what a session has noted, its agent's notes, and the board of its tree."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .command import Json, Store, command, connected, print_json


@command
def notes(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Session id; `understudy ps --all` lists them.")],
    store: Store = None,
    json: Json = False,
) -> int:
    """Show the notes of a session and of its agent, and the board of its tree."""
    with connected(store, start=False) as cluster:
        handle = cluster.session(session)
        found = [note for scope in ("session", "agent", "tree") for note in handle.notes(scope)]
    if json:
        print_json(found)
        return 0
    console = Console(highlight=False)
    for note in found:
        at = datetime.fromtimestamp(note.updated_at / 1e6, UTC).astimezone().isoformat(" ", "seconds")
        where = "board" if note.scope == "tree" else note.scope
        pinned = ", pinned" if note.pinned else ""
        head = f"[bold]{where}[/bold] {note.key} [dim]version {note.version}{pinned}, {at}[/dim]"
        console.print(f"{head}: {escape(note.text)}", soft_wrap=True)
    if not found:
        console.print("no notes")
    return 0
