"""`understudy tools`: which tools there are, and single calls of them. Needs neither Ray nor a store."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from understudy.errors import InvalidInput, ToolError
from understudy.json_text import jsonable

from .command import Json, command, errors, print_json
from .rendering import escape

if TYPE_CHECKING:
    from ..client.tool_catalogue import ToolInfo

app = typer.Typer(help="List the tools that agents may have, and try them.", invoke_without_command=True)

USAGE_OUTCOME = "invalid"
"""The outcome of a call whose arguments don't fit."""


def known_tools(incomplete: str) -> list[str]:
    """Names of tools, for the shell's completion."""
    from ..client.agent_options import known_tools as known

    return [name for name in known() if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A built-in tool, DISTRIBUTION:NAME or module:function.", autocompletion=known_tools
    ),
]


@app.callback()
def tools(context: typer.Context, json: Json = False) -> None:
    """List groups, built-in tools and those of installed packages, which are imported.

    \b
    understudy tools
    understudy tools show read_file
    understudy tools try grep '{"pattern": "TODO"}' --workspace .
    """
    if context.invoked_subcommand is None:
        list_(json=json)


@app.command("list")
@command
def list_(json: Json = False) -> int:
    """List groups, built-in tools and those of installed packages, as `understudy tools` does."""
    from ..client.tool_catalogue import list_tools

    found = list_tools()
    if json:
        print_json({"tools": [jsonable(tool) for tool in found]})
        return 0
    table = Table("name", "origin", "on crash", "what it does", box=None, header_style="bold", pad_edge=False)
    for tool in found:
        what = f"group: {', '.join(tool.members)}" if tool.members else _first_line(tool.description)
        what = f"[red]{escape(tool.problem)}[/red]" if tool.problem else escape(what)
        crash = f"{tool.on_crash}{', approve' if tool.approve else ''}"
        table.add_row(escape(tool.name), escape(tool.origin), crash, what)
    Console(highlight=False).print(table)
    return 0


@app.command()
@command
def show(name: Name, json: Json = False) -> int:
    """Show a tool as the model is offered it, and how its calls are treated."""
    from ..client.agent_options import import_here
    from ..client.tool_catalogue import show_tool

    import_here(name)
    tool = show_tool(name)
    print_json(jsonable(tool)) if json else _print(tool)
    return 0


def _print(tool: ToolInfo) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(tool.called or tool.name)}[/bold]  [dim]{escape(tool.origin)}[/dim]", soft_wrap=True)
    if tool.members:
        console.print(f"group: {', '.join(tool.members)}", soft_wrap=True)
        return
    console.print(escape(tool.description), soft_wrap=True)
    facts = [f"on_crash={tool.on_crash}", *(["approve"] if tool.approve else [])]
    facts += [f"timeout={tool.timeout:g} s"] if tool.timeout is not None else []
    facts += ["executed by its session"] if tool.in_session else []
    facts += ["in the sandbox"] if tool.sandbox else []
    needs = " ".join(f"{name}={amount:g}" for name, amount in tool.resources.items())
    facts += [f"a Ray task with {needs}"] if needs else []
    console.print(f"[dim]{', '.join(facts)}[/dim]", soft_wrap=True)
    required = set(tool.parameters.get("required", ()))
    for name, schema in tool.parameters.get("properties", {}).items():
        kind = schema.get("type") or ("one of several" if "anyOf" in schema else "any")
        optional = "" if name in required else ", optional"
        said = f"  {name} ({kind}{optional}) {schema.get('description', '')}"
        console.print(escape(said.rstrip()), soft_wrap=True)


@app.command("try")
@command
def try_(
    name: Name,
    arguments: Annotated[str, typer.Argument(metavar="JSON", help="The arguments, as a model writes them.")] = "{}",
    workspace: Annotated[
        Path | None, typer.Option(help="Directory of files and commands; default: the agent's.", file_okay=False)
    ] = None,
    agent: Annotated[
        Path | None,
        typer.Option("--agent", "-a", metavar="FILE", help="An agent that has the tool.", exists=True, dir_okay=False),
    ] = None,
    json: Json = False,
) -> int:
    """Execute one call of a tool in this process, as a session would: the same checks, limits and texts.

    There is no session: hooks are not called, nobody is asked for approval, and nothing is kept. What the tool reports
    while it runs goes to stderr.

    \b
    understudy tools try grep '{"pattern": "TODO"}' --workspace .
    understudy tools try my_tools:lookup '{"city": "Bern"}'
    understudy tools try load_skill '{"name": "pdf"}' --agent clerk.md

    Exit codes: 0 it returned a result, 1 it failed or took too long, 2 the tool or its arguments can't be used.
    """
    from ..client.agent_file import read_agent
    from ..client.agent_options import import_here
    from ..client.tool_catalogue import try_tool

    import_here(name)
    spec = read_agent(agent).spec if agent is not None else None
    if workspace is not None and not workspace.is_dir():
        raise InvalidInput(f"--workspace: {workspace} is not a directory")
    try:
        directory = workspace.resolve() if workspace is not None else None
        outcome = try_tool(name, arguments, workspace=directory, agent=spec, reporting=_Reports())
    except ToolError as error:
        raise InvalidInput(error.message) from None
    if json:
        print_json({"outcome": outcome.outcome, "content": outcome.content, "microseconds": outcome.duration})
    elif outcome.outcome == "ok":
        print(outcome.content)
    else:
        errors.print(f"[red]{outcome.outcome}[/red] {escape(outcome.content)}", soft_wrap=True)
    return 0 if outcome.outcome == "ok" else 2 if outcome.outcome == USAGE_OUTCOME else 1


class _Reports:
    """Shows what a tool reports while it runs."""

    def progress(self, fraction: float | None, text: str) -> None:
        """See `ToolContext.progress`."""
        share = "" if fraction is None else f"{fraction:.0%} "
        errors.print(f"[dim]{share}{escape(text)}[/dim]", soft_wrap=True)

    def emit(self, name: str, data: Any) -> None:
        """See `ToolContext.emit`."""
        errors.print(f"[dim]{escape(name)}: {escape(dumps(data, ensure_ascii=False, default=str))}[/dim]")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
