"""An agent as a file: the fields of `AgentSpec` in TOML or JSON, its tools by name or import path, its hooks and output
type by import path."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.actors.tools import tool_name_problem
from understudy.errors import InvalidInput, InvalidSpec
from understudy.manifest import AGENTS
from understudy.spec import AgentSpec
from understudy.strict import described

from .checking import agent_problems

PLACEHOLDER = "agent"
"""The name of an agent without one, while its other fields are checked."""


@dataclass(frozen=True)
class AgentFile:
    """What a file says.

    Attributes:
        directory: the file's: import paths and a relative `workspace` are found from there. It is in `sys.path`.
        input: the file's `input`, a text to send to the agent where nobody gives another.
    """

    spec: AgentSpec
    directory: Path
    input: str | None


def read_agent(path: Path) -> AgentFile:
    """Read an agent. A tool is a name (`files`) or `module:function`, a hook is `module:function`, an output type a
    table with a JSON Schema or `module:Class`; the module is found from the file's directory.

    Its modules are imported, so this runs code of the file's owner.

    Raises:
        InvalidInput: the file can't be read, or is neither TOML nor JSON.
        InvalidSpec: with every problem in `details["problems"]`.
    """
    data = _parsed(path)
    directory = path.resolve().parent
    import_from(directory)
    problems: list[dict[str, str]] = []
    given = data.pop("input", None)
    if given is not None and not (isinstance(given, str) and given):
        problems.append({"field": "input", "problem": "must be a text"})
    resolved = _resolved(data, directory, "", problems)
    spec: AgentSpec | None = None
    try:
        spec = AgentSpec.parse(resolved)
        problems += _new(agent_problems(spec), problems)
    except InvalidSpec as error:
        problems += error.details.get("problems") or [{"field": "(whole)", "problem": error.message}]
        problems += _new(_beyond(resolved, problems), problems)
    if problems or spec is None:
        raise InvalidSpec(described(str(path), problems), details={"problems": problems})
    return AgentFile(spec, directory, given)


def import_from(directory: Path) -> None:
    """Let modules be found from a directory."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    importlib.invalidate_caches()


def _new(found: Iterable[dict[str, str]], told: list[dict[str, str]]) -> list[dict[str, str]]:
    """Those that don't follow from what is told already: a sub-agent may need a tool whose name is misspelt."""
    places = {item["field"].rpartition("tools")[0] for item in told if "tools" in item["field"].split(".")}
    follows = {f"{place}agents" for place in places}
    return [item for item in found if item not in told and item["field"] not in follows]


def _beyond(resolved: dict[str, Any], told: list[dict[str, str]]) -> list[dict[str, str]]:
    """What else is wrong with an agent: that without the fields which can't be used."""
    for item in told:
        _drop(resolved, item["field"].split("."))
    try:
        return agent_problems(AgentSpec.parse(_named(resolved)))
    except InvalidSpec:  # a list or table that is not one: what is in it can't be looked at
        return []


def _drop(agent: Any, place: list[str]) -> None:
    """Leave out the field of an agent, or of one below it, that this place is in. Tools and hooks that can't be found
    are left out already."""
    while place[0] in AGENTS and len(place) > 2 and isinstance(agent, dict) and isinstance(agent[place[0]], list):
        agent, place = agent[place[0]][int(place[1])], place[2:]
    if isinstance(agent, dict) and not (place[0] in ("tools", "hooks") and len(place) > 1):
        agent.pop(place[0], None)


def _named(table: dict[str, Any], name: str = PLACEHOLDER) -> dict[str, Any]:
    """The table with a name, and those of the agents in it: each with another."""
    for kind in AGENTS:
        agents = table.get(kind)
        if isinstance(agents, list):
            named = [
                _named(agent, f"{name}.{kind[0]}{index}") if isinstance(agent, dict) else agent
                for index, agent in enumerate(agents)
            ]
            table = {**table, kind: named}
    return {"name": name, **table}


def _parsed(path: Path) -> dict[str, Any]:
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:  # that of UTF-8, TOML and JSON alike
        raise InvalidInput(f"{path} is not {kind}: {error}") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} must hold an object of fields, not {type(data).__name__}")
    return data


def _resolved(table: dict[str, Any], directory: Path, place: str, problems: list[dict[str, str]]) -> dict[str, Any]:
    """The table with functions for import paths and absolute directories, and those of the agents in it."""
    found = dict(table)
    workspace = found.get("workspace")
    if isinstance(workspace, str):
        location = directory / Path(workspace).expanduser()
        found["workspace"] = str(location)
        if not location.is_dir():
            problems.append({"field": f"{place}workspace", "problem": f"{location} is not a directory"})
    for kind, find in (("tools", find_tool), ("hooks", _find_hook)):
        if not isinstance(table.get(kind), list):
            continue
        found[kind] = []
        for index, item in enumerate(table[kind]):
            try:
                found[kind].append(find(item) if isinstance(item, str) else item)
            except InvalidInput as error:
                problems.append({"field": f"{place}{kind}.{index}", "problem": error.message})
    if isinstance(found.get("output_type"), str):
        try:
            found["output_type"] = _imported(found["output_type"])
        except InvalidInput as error:
            problems.append({"field": f"{place}output_type", "problem": error.message})
    memory = found.get("memory")
    if isinstance(memory, dict) and isinstance(memory.get("providers"), list):
        found["memory"] = {**memory, "providers": []}
        for index, item in enumerate(memory["providers"]):
            try:
                provider = _function(item, kind="memory") if isinstance(item, str) else item
                found["memory"]["providers"].append(provider)
            except InvalidInput as error:
                problems.append({"field": f"{place}memory.providers.{index}", "problem": error.message})
    for kind in AGENTS:
        if isinstance(found.get(kind), list):
            found[kind] = [
                _resolved(agent, directory, f"{place}{kind}.{index}.", problems) if isinstance(agent, dict) else agent
                for index, agent in enumerate(found[kind])
            ]
    return found


def find_tool(name: str) -> Any:
    """The function at an import path; the name of a tool that comes with Understudy, or of a group, as it is.

    Raises:
        InvalidInput: there is none, or the function is no tool.
    """
    if ":" in name:
        return _function(name, kind="tool")
    problem = tool_name_problem(name)
    if problem is not None:
        raise InvalidInput(f"{problem}; your own: module:function")
    return name


def _find_hook(name: str) -> Any:
    return _function(name, kind="hook")


def _imported(name: str) -> Any:
    """What is at an import path."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        raise InvalidInput(f"{name!r} can't be imported: {type(error).__name__}: {error}") from None
    return found


def _function(name: str, *, kind: str) -> Any:
    """The tool or hook at an import path."""
    found = _imported(name)
    if not hasattr(found, f"__understudy_{kind}__"):
        raise InvalidInput(f"{name!r} is no function decorated with @{kind}")
    return found
