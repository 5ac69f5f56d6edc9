"""`understudy agents`: what can be said of agents' files. Needs neither Ray nor a store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from understudy.errors import InvalidInput
from understudy.json_text import jsonable

from .command import Json, command, counted, errors, print_json
from .rendering import escape, tell_checked

app = typer.Typer(help="Check and list agent files.", no_args_is_help=True)


@app.callback()
def agents() -> None:
    """Check and list agent files."""


@app.command("list")
@command
def list_(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where the files are.", exists=True, file_okay=False)
    ] = Path(),
    json: Json = False,
) -> int:
    """List the agents' files of a directory, as they are written: no code is imported, and nothing is checked.

    \b
    understudy agents list agents/
    """
    from ..client.agent_listing import list_agents

    found = list_agents(directory)
    if json:
        print_json({"agents": [jsonable(agent) for agent in found]})
        return 0
    if not found:
        errors.print(f"no agents in {escape(str(directory))}", soft_wrap=True)
        return 0
    table = Table("file", "name", "model", "tools", "what it is for", box=None, header_style="bold", pad_edge=False)
    for agent in found:
        what = f"[red]{escape(agent.problem)}[/red]" if agent.problem else escape(agent.description)
        table.add_row(*map(escape, (agent.file, agent.name, agent.model or "", ", ".join(agent.tools))), what)
    Console(highlight=False).print(table)
    return 0


@app.command()
@command
def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="agent.md, .toml or .json, or a directory of such files.")
    ],
    json: Json = False,
) -> int:
    """Check agents' files: every problem of every file, with its field, and in markdown with its line.

    The modules of their tools and hooks are imported, which runs their code.

    \b
    understudy agents check agent.toml
    understudy agents check agents/
    understudy agents check agent.toml --json

    Exit codes: 0 all can be used, 1 one can't, 2 wrong usage.
    """
    from ..client.agent_listing import list_agents

    checked = []
    for file in files:
        found = [file / agent.file for agent in list_agents(file)] if file.is_dir() else [file]
        if not found:
            raise InvalidInput(f"there are no agents in {file}")
        checked += [_checked(each) for each in found]
    return tell_checked(checked, json=json)


def _checked(file: Path) -> dict[str, Any]:
    from ..client.agent_file import read_agent
    from ..client.checking import git_for, sandbox_for, servers_missing

    try:
        with _alone(file.resolve().parent):
            spec = read_agent(file).spec
    except InvalidInput as error:
        problems = error.details.get("problems") or [{"field": "(file)", "problem": error.message}]
        return {"file": str(file), "name": None, "summary": "", "problems": problems}
    has = [(spec.tools, "tool"), (spec.skills, "skill folder"), (spec.hooks, "hook"), (spec.agents, "sub-agent")]
    has += [(spec.handoffs, "handoff"), (spec.mcp_servers, "MCP server")]
    parts = ", ".join([spec.name, *(counted(len(found), noun) for found, noun in has if found)])
    # Other machines may have them: these are no problems of the file.
    here = {"sandbox": sandbox_for(spec), "git": git_for(spec), "missing_servers": servers_missing(spec)}
    found = {"file": str(file), "name": spec.name, "summary": parts, "problems": []}
    return {**found, **{name: value for name, value in here.items() if value}}


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
