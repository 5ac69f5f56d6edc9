"""An agent as a file: what is read, what is found from its directory, and that all mistakes are told at once."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.cluster.client.agent_file import read_agent
from understudy.errors import InvalidInput, InvalidSpec
from understudy.spec import Budget

TOOLS = """
from understudy import tool

@tool(on_crash="rerun")
def look(name: str) -> str:
    return name

class Desk:
    @staticmethod
    @tool
    def ring() -> str:
        return "rang"

def plain() -> str:
    return "no tool"
"""

NUMBERS = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module beside the agent's file, of a name that no other test imports."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"agent_file_tools_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(TOOLS)
    return name


def write(directory: Path, data: dict[str, Any]) -> Path:
    path = directory / "agent.json"
    path.write_text(json.dumps(data))
    return path


def test_toml_with_tools_and_sub_agents(tmp_path: Path, module: str) -> None:
    """Fields, nested tables, tools by name and import path, workspaces relative to the file: all are found."""
    (tmp_path / "desk").mkdir()
    (tmp_path / "agent.toml").write_text(
        f"""
        name = "lead"
        input = "go"
        tools = ["files", "spawn_agent", "{module}:look"]
        workspace = "desk"
        budget = {{ tokens = 1000 }}
        environment = ["DATABASE_URL"]

        [[agents]]
        name = "clerk"
        tools = ["{module}:Desk.ring"]
        """
    )
    found = read_agent(tmp_path / "agent.toml")
    look, ring = found.spec.tools[2], found.spec.agents[0].tools[0]
    assert (found.input, found.directory, found.spec.workspace) == ("go", tmp_path, str(tmp_path / "desk"))
    assert (found.spec.name, found.spec.budget) == ("lead", Budget(tokens=1000))
    assert (found.spec.environment, found.spec.agents[0].environment) == (("DATABASE_URL",), ())
    assert found.spec.tools[:2] == ("files", "spawn_agent")
    assert (look("x"), ring()) == ("x", "rang")


def test_every_problem_is_told_at_once(tmp_path: Path, module: str) -> None:
    """Unknown fields and tools, functions that are none or can't be imported, at any depth: one error names them."""
    tools = [f"{module}:plain", f"{module}:missing", "no_such_tool", "no_such_module:tool", 3]
    child = {"name": "child", "tools": ["nothing"], "max_rounds": 0, "workspace": "nowhere", "environment": ["A=1"]}
    path = write(tmp_path, {"name": "a", "colour": "red", "tools": tools, "agents": [child], "input": ["go"]})
    with pytest.raises(InvalidSpec) as raised:
        read_agent(path)
    told = {item["field"]: item["problem"] for item in raised.value.details["problems"]}
    assert set(told) == {
        "input", "tools.0", "tools.1", "tools.2", "tools.3", "tools", "colour", "agents.0.tools.0",
        "agents.0.workspace", "agents.0.max_rounds", "agents.0.environment.0",
    }  # fmt: skip
    assert "is no function decorated with @tool" in told["tools.0"]
    assert "AttributeError" in told["tools.1"]
    assert "known: files" in told["tools.2"]
    assert "ModuleNotFoundError" in told["tools.3"]
    assert all(field in str(raised.value) for field in told)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("agent.toml", 'name = "a', "is not TOML"),
        ("agent.json", "{", "is not JSON"),
        ("agent.toml", b'name = "\xff"', "is not TOML"),
        ("agent.json", "[1]", "must hold an object"),
        ("missing.toml", None, "can't be read"),
    ],
)
def test_what_is_no_agent_at_all(tmp_path: Path, name: str, text: str | bytes | None, told: str) -> None:
    """A file that can't be read or parsed is refused by name."""
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidInput, match=told) as raised:
        read_agent(tmp_path / name)
    assert name in str(raised.value)


def test_a_module_that_fails_is_told(tmp_path: Path, module: str) -> None:
    """A module that exits or raises when it is imported is a problem of that tool, not the end of the program."""
    (tmp_path / f"{module}.py").write_text("raise SystemExit(3)")
    with pytest.raises(InvalidSpec, match="SystemExit: 3"):
        read_agent(write(tmp_path, {"name": "a", "tools": [f"{module}:look"]}))
