"""Durations on the command line: one way to write them, for all commands."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import typer

from understudy.durations import read_duration, written

NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)

LONGEST_SECONDS = 100 * 366 * 86_400


def duration(help: str, *, least: float = 0.0, default: float | None = None) -> Any:
    """An option that takes a duration: a number of seconds, or `30s`, `5m`, `1h30m`, `2d`.

    Args:
        least: seconds.
        default: what is said to be the default.
    """
    shown: Any = written(default) if default is not None else None
    parser = partial(given_seconds, least=least)
    return typer.Option(parser=parser, metavar="DURATION", help=help, show_default=shown)


def given_seconds(given: object, least: float = 0.0) -> float:
    """The seconds of a duration that was given in a command.

    Raises:
        typer.BadParameter: it is none, or out of the limits.
    """
    text = str(given).strip()
    try:
        found = float(text) if NUMBER.fullmatch(text) else read_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not least <= found <= LONGEST_SECONDS:
        raise typer.BadParameter(f"{given} must be {written(least)} to {written(LONGEST_SECONDS)}")
    return found
