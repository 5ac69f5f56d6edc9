"""What the commands share: their common options, and how errors end them. Needs no Ray."""

from __future__ import annotations

import json
import os
import pwd
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from understudy.errors import (
    InvalidArchive,
    InvalidInput,
    UnderstudyError,
    UnknownQueue,
    UnknownRun,
    UnknownSchedule,
    UnknownSession,
    UnknownTriageEntry,
)
from understudy.json_text import jsonable

from .durations import duration
from .output import to_stdout

errors = Console(stderr=True, highlight=False)

FOUND_OUT = (UnknownSession, UnknownRun, UnknownSchedule, UnknownQueue, UnknownTriageEntry, InvalidArchive)
"""Input of the right form that the store, or the file, refused: the command failed, it was not used wrongly."""

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""Wrong options and arguments: Typer has it, and does not name it."""

Store = Annotated[
    str | None,
    typer.Option("--store", help="sqlite:///PATH or postgresql://…", envvar="UNDERSTUDY_STORE", show_envvar=True),
]
SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="Session id; `understudy ps --all` lists them.")]
AgentFile = Annotated[
    Path | None,
    typer.Option("--agent", "-a", metavar="FILE", help="agent.md, .toml or .json.", exists=True, dir_okay=False),
]
RunId = Annotated[str | None, typer.Option("--run-id", help="Idempotency key: the same one is not run twice.")]
Timeout = Annotated[float | None, duration("How long to wait: 30s, 10m; the run goes on.")]
Queue = Annotated[str | None, typer.Option("--queue", help="The run waits in this queue until it may begin.")]
Key = Annotated[str, typer.Option("--key", help="Whose run it is, for the queue's limit per key.")]
Priority = Annotated[int, typer.Option("--priority", help="In the queue; higher ones begin first.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]


def print_json(value: Any) -> None:
    """One JSON document on stdout, records among it, at once: the command may go on for long."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=jsonable), flush=True)


def counted(number: int, noun: str) -> str:
    """`1 session`, `2 sessions`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


TERMINATED = "ended by SIGTERM"


class Terminated(KeyboardInterrupt):
    """The process was asked to end: its command ends as at Ctrl-C."""


def _described(error: UnderstudyError) -> dict[str, Any]:
    """An error for scripts, with the next step."""
    return {"error": {**error.to_wire(), "hint": error.hint}}


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn our errors into a clear line on stderr, the next step below it (JSON with `--json`), and an exit code.

    0 done, 1 the run or check failed or the store refused it, 2 wrong usage or configuration, 3 the run waits for a
    person's answer, 130 interrupted, 143 ended by SIGTERM. An interruption's own text says what became of the work.
    """

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            with to_stdout():
                code = function(*arguments, **options)
        except UnderstudyError as error:
            if options.get("json"):  # where stdout takes no more, this goes nowhere
                print_json(_described(error))
            message = str(error).removesuffix(f" {error.hint}") if error.hint else str(error)
            errors.print(f"[red]error[/red] {escape(message)}", soft_wrap=True)
            if error.hint:
                errors.print(f"      {escape(error.hint)}", soft_wrap=True)
            wrong_usage = isinstance(error, InvalidInput) and not isinstance(error, FOUND_OUT)
            raise typer.Exit(2 if wrong_usage else 1) from None
        except (KeyboardInterrupt, typer.Abort) as interruption:
            errors.print(str(interruption) or "interrupted", soft_wrap=True)
            raise typer.Exit(143 if isinstance(interruption, Terminated) else 130) from None
        raise typer.Exit(code or 0)

    return run


class Commands(TyperGroup):
    """All commands. With `--json`, wrong usage is reported as JSON too."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        self.as_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().main(args, *others, **options)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with self._reporting_wrong_usage():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with self._reporting_wrong_usage():
            return super().invoke(ctx)

    @contextmanager
    def _reporting_wrong_usage(self) -> Iterator[None]:
        try:
            yield
        except USAGE_ERROR as error:
            if self.as_json:
                print_json(_described(InvalidInput(error.format_message())))
            if getattr(error, "option_name", "") == "--json":  # the one that all commands have
                error.possibilities = []
                error.message = "--json comes after the command: understudy COMMAND --json"
            raise


@contextmanager
def connecting(*, start: bool) -> Iterator[None]:
    """Somebody at a terminal sees what is waited for."""
    what = "starting Ray and the services, unless they run: some 15 seconds" if start else "connecting"
    with errors.status(f"[dim]{what}…[/dim]") if errors.is_terminal else nullcontext():
        yield


def _user() -> str:
    """The name of this process's user, whatever its environment says; empty in a container that has none for it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


@contextmanager
def connected(store: str | None, **options: Any) -> Iterator[Any]:
    """A cluster for one command."""
    from ..client.client import Cluster

    with connecting(start=options.get("start", True)):
        cluster = Cluster.connect(store, identity=_user(), **options)
    # Ray has a handler of its own by now, which ends the process with the state of all its threads.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield cluster
    except Terminated:
        raise Terminated(f"{TERMINATED}; what was accepted goes on") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; what was accepted goes on") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        cluster.close()


def _terminate(_number: int, _frame: Any) -> None:
    raise Terminated(TERMINATED)
