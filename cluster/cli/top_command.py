"""`understudy top`: the cluster, live."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from .command import Json, Store, command, connected, print_json

DRAW_SECONDS = 0.25
ALL_COLUMNS = 160
"""The width where stdout is no terminal: all columns are shown, ids whole."""

KEYS = {"[A": "up", "[B": "down", "[5~": "pageup", "[6~": "pagedown", "[H": "home", "OA": "up", "OB": "down"}


@command
def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once, as where stdout is no terminal.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Watch the cluster: processes, rates, what went wrong, and the sessions at work. `q` ends it.

    It only looks. `--json` prints one snapshot; without a terminal, so does the plain form.
    """
    from ..client import background
    from ..client.cluster_source import ClusterSource
    from ..client.fleet import Fleet

    with connected(store, start=False) as cluster:
        fleet = Fleet(ClusterSource(cluster._connection))
        if not (once or json) and sys.stdout.isatty() and sys.stdin.isatty():
            _watch(fleet)
            return 0
        snapshot = background.wait(fleet.once())
    if json:
        print_json(snapshot)
    else:
        print_once(snapshot)
    return 1 if snapshot["problem"] is not None else 0


def print_once(snapshot: dict[str, Any]) -> None:
    """One look at the cluster. Where stdout is no terminal nothing is cut or wrapped to fit one."""
    from rich.console import Console

    from .top import View, draw

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, ALL_COLUMNS)
    console.print(draw(snapshot, View(), console.width, None), soft_wrap=not console.is_terminal)


def _watch(fleet: Any) -> None:
    """Until `q`. However it ends, the terminal is as it was."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from ..client import background
    from .top import View, draw

    console, view = Console(highlight=False), View()
    refreshing = background.submit(fleet.run())
    try:
        with _keys_at_once(), Live(Text("looking …"), console=console, screen=True, auto_refresh=False) as live:
            while not view.done:
                if refreshing.done():
                    refreshing.result()
                if fleet.snapshot is not None:
                    snapshot = {**fleet.snapshot, "at": time.time_ns() // 1_000}  # the clocks of what waits go on
                    live.update(draw(snapshot, view, console.width, console.height), refresh=True)
                for key in _pressed(DRAW_SECONDS):
                    view.key(key)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted") from None
    finally:
        refreshing.cancel()


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys come without Enter, and are not echoed; Ctrl-C interrupts as ever."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(seconds: float) -> list[str]:
    """The keys pressed by then, arrows by their names; returns with the first ones."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return []
    data = os.read(sys.stdin.fileno(), 1024)
    if not data:
        return ["q"]  # the terminal is gone
    first, *sequences = data.decode(errors="replace").split("\x1b")
    keys = [*first]
    for sequence in sequences:
        name = next((name for name in KEYS if sequence.startswith(name)), None)
        keys += [KEYS[name], *sequence[len(name) :]] if name is not None else ["\x1b", *sequence]
    return keys
