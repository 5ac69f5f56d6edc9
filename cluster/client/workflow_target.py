"""Workflows as the command line names them, with their agents and tools, and their inputs as it has them: texts."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from understudy.actors.workflow import definition_of
from understudy.actors.workflow_interpreter import as_workflow
from understudy.actors.workflow_record import input_values, parameter_types, read_input
from understudy.errors import InvalidInput, InvalidSpec, UnderstudyError
from understudy.json_text import from_json, to_json
from understudy.problem_texts import listed
from understudy.workflow_definition.text import FORMS as SUFFIXES

from .agent_file import read_agent
from .agent_options import IN_WORKSPACE
from .agent_resolving import import_from
from .extensions import find_tool
from .workflow_file import agent_files
from .workflows import of_file

FORMS = (
    f"name a workflow as MODULE:FUNCTION or FILE.py:FUNCTION, or one that is data by its file ({', '.join(SUFFIXES)})"
)


def find_workflow(
    target: str, directory: Path, agents: Sequence[Path] = (), tools: Sequence[str] = ()
) -> Callable[..., Any]:
    """The function that a target names. Its module is imported, which runs its code, as are those of its tools.

    Args:
        target: `MODULE:FUNCTION`, found from the directory as well, or `FILE.py:FUNCTION`, a path from there; or the
            path of a definition's file.
        agents: of a definition: their files, and directories of these.
        tools: of a definition, by name; import paths are found from the directory as well.

    Raises:
        InvalidInput: there is no such workflow, agent or tool.
        InvalidSpec: the definition, or an agent, can't be used.
    """
    if Path(target).suffix in SUFFIXES:
        return _defined(directory / Path(target).expanduser(), directory, agents, tools)
    if agents or tools:
        raise InvalidInput("--agents and --tool are for a workflow's file: of a function, @workflow names them")
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InvalidInput(f"{target!r} has no function: {FORMS}")
    module = _file(directory / Path(place).expanduser()) if place.endswith(".py") else _module(place, directory)
    found: Any = getattr(module, name, None)
    if definition_of(found) is None:
        marked = [key for key, value in vars(module).items() if definition_of(value) is not None]
        there = f"there are: {', '.join(marked)}" if marked else "there is none"
        raise InvalidInput(f"{place} has no function {name!r} that is decorated with @workflow; {there}")
    assert found is not None
    return found  # type: ignore[no-any-return]


def arguments_from(function: Callable[..., Any], values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `Cluster.workflow` from those of `input_of`: by position as far as they can be, since a parameter
    may have the name of one of the method's own.

    Raises:
        InvalidInput: one that has such a name can't be given by position.
    """
    known = definition_of(function)
    if known is not None and known.definition is not None:
        return (values,), {}
    bound = inspect.signature(function).bind(None, **values)
    if both := sorted(bound.kwargs.keys() & {"session_id", "run_id", "queue"}):
        raise InvalidInput(f"{', '.join(both)} can't be given on the command line: give what comes before as well")
    return bound.args[1:], bound.kwargs


def _defined(path: Path, directory: Path, agents: Sequence[Path], tools: Sequence[str]) -> Callable[..., Any]:
    """What does the definition of a file. Tools that need a workspace have the directory."""
    if any(":" in name for name in tools):
        import_from(directory)
    problems, found = [], []
    for name in dict.fromkeys(tools):
        try:
            found.append(find_tool(name))
        except InvalidInput as error:
            problems.append({"field": "--tool", "problem": error.message})
    if problems:
        raise InvalidInput(listed(problems), details={"problems": problems})
    specs = [read_agent(file).spec for given in agents for file in agent_files(directory / given.expanduser())]
    try:
        definition = of_file(path, specs, found)
    except InvalidSpec as error:
        error.hint = "Correct the fields named above; agents are given with --agents PATH, tools with --tool NAME."
        raise
    workspace: dict[str, Any] = {"workspace": str(directory)} if IN_WORKSPACE.intersection(tools) else {}
    return as_workflow(definition, specs, found, **workspace)


def _module(name: str, directory: Path) -> ModuleType:
    import_from(directory)
    return _imported(name, name)


def _file(path: Path) -> ModuleType:
    """A file as the module that other processes will import: by its name, from its directory."""
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}: {FORMS}")
    if not path.stem.isidentifier():
        raise InvalidInput(f"{path.name} can't be imported: a module's name has letters, digits and underscores only")
    import_from(path.resolve().parent)
    module = _imported(path.stem, str(path))
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path.resolve():
        raise InvalidInput(f"another module is named {path.stem} ({found}): give {path.name} another name")
    return module


def _imported(name: str, shown: str) -> ModuleType:
    try:
        return importlib.import_module(name) if name not in sys.modules else sys.modules[name]
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        raise InvalidInput(f"{shown} can't be imported: {type(error).__name__}: {error}") from None


def input_of(function: Callable[..., Any], given: str | None, pairs: Sequence[str]) -> dict[str, Any]:
    """The arguments of a workflow's function, as JSON data, checked against what it takes.

    Args:
        given: a JSON object, or a text for the only parameter; None for nothing.
        pairs: `NAME=VALUE`, which go over that. A value is JSON, or a text: where the parameter is a text, and where it
            is no JSON.

    Raises:
        InvalidInput: the function does not take these.
    """
    types = parameter_types(function)
    values = input_values(function, given, "") if given is not None else {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InvalidInput(f"{pair!r} is no NAME=VALUE: the parameters are {', '.join(types) or 'none'}")
        value = text if types.get(name) is str else _json(text)
        values[name] = text if value is None and text != "null" else value
    try:
        read_input(function, to_json(values), "")
    except UnderstudyError as error:
        raise InvalidInput(error.message) from None
    return values


def _json(text: str) -> Any:
    """What a text is as JSON; None if it is none."""
    try:
        return from_json(text)
    except (ValueError, RecursionError):
        return None
