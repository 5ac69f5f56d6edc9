"""`understudy steer` and `understudy fork`: change the course of a run, or go on from an earlier message."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .command import Json, Store, command, connected, print_json

SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="Session id; `understudy ps --all` lists them.")]


@command
def steer(
    session: SessionId,
    text: Annotated[str, typer.Argument(help="The message; `-` reads it from stdin.")],
    interrupt: Annotated[bool, typer.Option("--interrupt", help="End what the run is at first.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Send a message to a session's current run: the model gets it in the next round."""
    content = sys.stdin.read() if text == "-" else text
    with connected(store, start=False) as cluster:
        run = cluster.session(session).steer(content, interrupt=interrupt)
    print_json({"session_id": session, "run_id": run.run_id}) if json else print(f"run {run.run_id} is steered")
    return 0


@command
def fork(
    session: SessionId,
    at: Annotated[int, typer.Option("--at", help="The seq of the last message to keep; 0 for none.", min=0)],
    new: Annotated[str | None, typer.Option("--session", help="Its id; the same one is made once.")] = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Make a new session that begins with a copy of another one's messages."""
    with connected(store, start=False) as cluster:
        made = cluster.session(session).fork(at, session_id=new)
    print_json({"session_id": made.id, "forked_from": session, "forked_at": at}) if json else print(made.id)
    return 0
