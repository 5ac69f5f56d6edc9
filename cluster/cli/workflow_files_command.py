"""`understudy workflow check` and `schema`: what can be said of workflows' files. Needs neither Ray nor a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from understudy.errors import InvalidInput

from .command import Json, command, counted, print_json
from .rendering import tell_checked


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
    return tell_checked(checked, json=json)


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
