"""`understudy workflow check` and `schema`: what can be said of workflows' files. Needs neither Ray nor a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from understudy.errors import InvalidInput

from .command import Json, command, counted, print_json
from .rendering import escape


@command
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="review.yaml, .yml or .json.")],
    agents: Annotated[
        list[Path] | None,
        typer.Option("--agents", help="A file, or a directory of files, of agents that steps may name; repeatable."),
    ] = None,
    tool: Annotated[
        list[str] | None, typer.Option("--tool", "-t", help="A tool that steps may name; repeatable.")
    ] = None,
    json: Json = False,
) -> int:
    """Check workflows' files: every problem of every file, with its place, and in YAML with its line.

    Names of agents and tools are looked at where it is said which there are.

    \b
    understudy workflow check review.yaml
    understudy workflow check review.yaml --agents agents/ --tool split
    understudy workflow check review.yaml --json

    Exit codes: 0 all can be used, 1 one can't, 2 wrong usage.
    """
    from ..client.workflow_file import agent_names

    known = None if agents is None else [name for path in agents for name in agent_names(path)]
    checked = [_checked(file, known, tool) for file in files]
    ok = not any(item["problems"] for item in checked)
    if json:
        print_json({"ok": ok, "files": checked})
        return 0 if ok else 1
    console = Console(highlight=False)
    for item in checked:
        problems = item["problems"]
        state = f"[red]{counted(len(problems), 'problem')}[/red]" if problems else "[green]ok[/green]"
        console.print(f"{escape(item['file'])}: {state} {escape(item['summary'])}".rstrip(), soft_wrap=True)
        for problem in problems:
            console.print(f"  [bold]{escape(problem['field'])}[/bold]: {escape(problem['problem'])}", soft_wrap=True)
    return 0 if ok else 1


@command
def schema(json: Json = True) -> int:
    """Print the JSON Schema of workflows' files, for editors; always as JSON.

    \b
    understudy workflow schema > workflow.schema.json
    """
    from understudy.workflow_definition.json_schema import json_schema

    print_json(json_schema())
    return 0


def _checked(file: Path, agents: list[str] | None, tools: list[str] | None) -> dict[str, Any]:
    from understudy.workflow_definition.checking import to_data
    from understudy.workflow_definition.variables import steps_in

    from ..client.workflow_file import read_workflow

    try:
        found = read_workflow(file, agents=agents, tools=tools)
    except InvalidInput as error:
        problems = error.details.get("problems") or [{"field": "(file)", "problem": error.message}]
        return {"file": str(file), "name": None, "summary": "", "problems": problems}
    steps = sum(1 for _ in steps_in(to_data(found)["steps"], ()))
    summary = ", ".join([found.name, counted(steps, "step")])
    return {"file": str(file), "name": found.name, "summary": summary, "problems": []}
