"""An agent as a file: the fields of `AgentSpec` in TOML or JSON, its tools by name or import path, its hooks and output
type by import path."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from understudy.actors.tools import BUILTIN_TOOLS, SPAWN_AGENT, TOOL_GROUPS
from understudy.errors import InvalidInput, InvalidSpec
from understudy.spec import AgentSpec


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
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    problems: list[dict[str, str]] = []
    given = data.pop("input", None)
    if given is not None and not (isinstance(given, str) and given):
        problems.append({"field": "input", "problem": "must be a text"})
    resolved = _resolved(data, directory, "", problems)
    spec: AgentSpec | None = None
    try:
        spec = AgentSpec.parse(resolved)
    except InvalidSpec as error:
        problems += error.details.get("problems") or [{"field": "(whole)", "problem": error.message}]
    if problems or spec is None:
        lines = "; ".join(f"{item['field']}: {item['problem']}" for item in problems)
        number = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        raise InvalidSpec(f"{path} has {number}: {lines}.", details={"problems": problems})
    return AgentFile(spec, directory, given)


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
    """The table with functions for import paths and absolute directories, and that of its sub-agents."""
    found = dict(table)
    workspace = found.get("workspace")
    if isinstance(workspace, str):
        location = directory / Path(workspace).expanduser()
        found["workspace"] = str(location)
        if not location.is_dir():
            problems.append({"field": f"{place}workspace", "problem": f"{location} is not a directory"})
    for kind, find in (("tools", _tool), ("hooks", partial(_function, kind="hook"))):
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
    if isinstance(found.get("agents"), list):
        found["agents"] = [
            _resolved(agent, directory, f"{place}agents.{index}.", problems) if isinstance(agent, dict) else agent
            for index, agent in enumerate(found["agents"])
        ]
    return found


def _tool(name: str) -> Any:
    """The function at an import path; the name of a tool that comes with Understudy as it is."""
    if ":" not in name:
        if name not in (*TOOL_GROUPS, *BUILTIN_TOOLS, SPAWN_AGENT):
            known = ", ".join([*TOOL_GROUPS, *BUILTIN_TOOLS, SPAWN_AGENT])
            raise InvalidInput(f"no tool is named {name!r}; known: {known}; your own: module:function")
        return name
    return _function(name, kind="tool")


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
