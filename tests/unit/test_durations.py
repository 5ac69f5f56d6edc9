"""Durations on the command line."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from understudy.cluster.cli.durations import duration
from understudy.cluster.cli.main import app

LONG = ("--timeout", "--every", "--jitter", "--window", "--trees", "--events")
"""Options that take a duration, of whichever command."""


def options() -> list[Any]:
    """All options of all commands that take a duration."""
    found, todo = [], [get_command(app)]
    while todo:
        one: Any = todo.pop()
        todo += getattr(one, "commands", {}).values()
        found += [parameter for parameter in one.params if {*parameter.opts} & {*LONG}]
    return found


def test_there_is_one_way_to_write_them() -> None:
    """Given any command's option for a duration, then it takes seconds as a number and units, and says so."""
    found = options()
    assert len(found) >= 11
    for option in found:
        read = option.type_descriptor.parameter_info.parser
        given = [read(text) for text in ("90", "90.5", "90s", "1h30m", "2d")]
        assert given == [90.0, 90.5, 90.0, 5400.0, 172800.0], option.name
        assert option.metavar == "DURATION"


@pytest.mark.parametrize("text", ["often", "5 m", "-1s", "1m1h", "", "nan", "0.5s", "0s", "99999999w"])
def test_what_is_none(text: str) -> None:
    """Given anything else, or less than there may be, then the option is used wrongly."""
    made = typer.Typer()

    @made.command()
    def wait(seconds: float = duration("So long.", least=1.0)) -> None:
        print(seconds)

    done = CliRunner().invoke(made, [f"--seconds={text}"])
    assert done.exit_code == 2, done.output
