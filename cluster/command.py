"""What the commands share: their common options, and how errors end them. Needs no Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from understudy.errors import InvalidInput, UnderstudyError

errors = Console(stderr=True, highlight=False)

Store = Annotated[
    str | None,
    typer.Option("--store", help="sqlite:///PATH or postgresql://…", envvar="UNDERSTUDY_STORE", show_envvar=True),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn our errors into a clear line on stderr, the next step below it (JSON with `--json`), and an exit code.

    0 done, 1 the run or check failed, 2 wrong usage or configuration, 130 interrupted.
    """

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            code = function(*arguments, **options)
        except UnderstudyError as error:
            if options.get("json"):
                print_json({"error": error.to_wire()})
            told = str(error).removesuffix(f" {error.hint}") if error.hint else str(error)
            errors.print(f"[red]error[/red] {escape(told)}", soft_wrap=True)
            if error.hint:
                errors.print(f"      {escape(error.hint)}", soft_wrap=True)
            raise typer.Exit(2 if isinstance(error, InvalidInput) else 1) from None
        except KeyboardInterrupt:
            errors.print("interrupted; what was accepted goes on")
            raise typer.Exit(130) from None
        raise typer.Exit(code or 0)

    return run
