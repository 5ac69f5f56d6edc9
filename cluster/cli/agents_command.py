"""`understudy agents`: what can be said of agents' files. Needs neither Ray nor a store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from understudy.errors import InvalidInput

from .command import Json, command, counted, print_json
from .rendering import escape

if TYPE_CHECKING:
    from understudy.spec import AgentSpec

app = typer.Typer(help="Look after files of agents.", no_args_is_help=True)


@app.callback()
def agents() -> None:
    """Look after files of agents."""


@app.command()
@command
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="agent.toml or .json, one or several.")],
    json: Json = False,
) -> int:
    """Check agents' files: every problem of every file, with its field.

    The modules of their tools and hooks are imported, which runs their code.

    \b
    understudy agents check agent.toml
    understudy agents check agents/*.toml
    understudy agents check agent.toml --json

    Exit codes: 0 all can be used, 1 one can't, 2 wrong usage.
    """
    checked = [_checked(file) for file in files]
    ok = not any(item["problems"] for item in checked)
    if json:
        print_json({"ok": ok, "files": checked})
        return 0 if ok else 1
    console = Console(highlight=False)
    for item in checked:
        problems = item["problems"]
        state = f"[red]{counted(len(problems), 'problem')}[/red]" if problems else "[green]ok[/green]"
        console.print(f"{escape(item['file'])}: {state} {escape(item['summary'])}".rstrip(), soft_wrap=True)
        if item["sandbox"]:
            console.print(f"  sandbox here: {escape(item['sandbox'])}", soft_wrap=True)
        for problem in problems:
            console.print(f"  [bold]{escape(problem['field'])}[/bold]: {escape(problem['problem'])}", soft_wrap=True)
    return 0 if ok else 1


def _checked(file: Path) -> dict[str, Any]:
    from ..client.agent_file import read_agent

    try:
        with _alone(file.resolve().parent):
            spec = read_agent(file).spec
    except InvalidInput as error:
        problems = error.details.get("problems") or [{"field": "(file)", "problem": error.message}]
        return {"file": str(file), "name": None, "summary": "", "problems": problems, "sandbox": None}
    has = [(spec.tools, "tool"), (spec.hooks, "hook"), (spec.agents, "sub-agent"), (spec.handoffs, "handoff")]
    parts = ", ".join([spec.name, *(counted(len(found), noun) for found, noun in has if found)])
    return {"file": str(file), "name": spec.name, "summary": parts, "problems": [], "sandbox": _sandbox(spec)}


def _sandbox(spec: AgentSpec) -> str | None:
    """Whether the sandbox that an agent needs, or one that it names, works on this machine; None if none needs one."""
    from understudy.actors.sandbox import sandbox_here

    needed = spec.sandbox.backend != "none" and any(
        tool == "bash" or getattr(getattr(tool, "__understudy_tool__", None), "sandbox", False) for tool in spec.tools
    )
    others = (_sandbox(other) for other in (*spec.agents, *spec.handoffs) if not isinstance(other, str))
    return sandbox_here() if needed else next((found for found in others if found), None)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """The modules beside one file are not taken for those of the same names beside the next."""
    path, before = [*sys.path], {*sys.modules}
    try:
        yield
    finally:
        sys.path[:] = path
        for name in {*sys.modules} - before:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin is not None and directory in Path(origin).resolve().parents:
                del sys.modules[name]
