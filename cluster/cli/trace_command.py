"""`understudy trace`: a run's trace as a waterfall in the terminal."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from .command import Json, Store, command, connected, print_json


@command
def trace(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Session id; `understudy ps --all` lists them.")],
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run id; default: the session's last run.")] = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Draw a run's trace: its model calls, tools, sub-agents, crashes and recoveries, and what still goes on.

    It is computed from the store, so it needs no collector; exported spans have the same ids.
    """
    from .waterfall import summary, waterfall

    with connected(store, start=False) as cluster:
        spans = cluster.session(session).trace(run)
    if json:
        print_json(spans)
        return 0
    now = time.time_ns() // 1000
    console = Console(highlight=False)
    console.print(summary(spans, now), soft_wrap=True)
    console.print(waterfall(spans, now, console.width, ascii_only=console.options.ascii_only))
    return 0
