"""Workflow definitions in the cluster of one process: done by a function, on the steps that functions have."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec, RunFailed, WorkflowContext, tool, workflow
from understudy.actors.workflow_interpreter import interpret
from understudy.testing import LocalCluster
from understudy.workflow_definition.checking import read_definition
from understudy.workflow_definition.text import read_text

PATIENCE = 30.0

TEXT = """
name: review
inputs: {path: {type: string}}
steps:
  - id: parts
    tool: {name: split, arguments: {path: "{{path}}"}}
    output_schema: {type: array, items: {type: string}}
  - id: found
    foreach:
      items: "{{parts}}"
      do: {agent: {name: helper, task: "Review {{item}}, number {{index}}"}}
    max_concurrency: 2
  - wait: {seconds: 0.01}
  - id: held
    tool: {name: hold}
  - tool: {name: fails}
    on_error: {tool: {name: note, arguments: {text: "{{error.code}}"}}}
  - id: summary
    model: {prompt: "Sum up {{held}}"}
output: {found: "{{found}}", summary: "{{summary}}"}
"""

DEFINITION = read_definition(read_text(TEXT, "YAML").data)

done: Counter[str] = Counter()
begun, released = threading.Event(), threading.Event()


@tool
def split(path: str) -> list[str]:
    """Parts of a path."""
    done["split"] += 1
    return [f"{path}1", f"{path}2", f"{path}3"]


@tool(on_crash="rerun")
def hold() -> str:
    """Lasts until the test lets it go."""
    begun.set()
    released.wait(PATIENCE)
    return "held"


@tool
def fails() -> None:
    """Always fails."""
    raise ValueError("no")


@tool
def note(text: str) -> None:
    """Something that must be done once."""
    done[text] += 1


@workflow(agents=[AgentSpec(name="helper")], tools=[split, hold, fails, note])
async def review(ctx: WorkflowContext, path: Any) -> Any:
    """The definition above."""
    return await interpret(ctx, DEFINITION, {"path": path})


def test_a_definition_survives_the_death_of_its_actor(tmp_path: Path) -> None:
    """Given a definition whose actor is killed while it is at a step, then it goes on there, and what was done is not
    done again; with inputs that do not fit, nothing is done."""
    with LocalCluster(f"sqlite:///{tmp_path}/store.db") as cluster:
        run = cluster.workflow(review, "src", session_id="w")
        assert begun.wait(PATIENCE)
        assert cluster.kill("w")
        released.set()
        assert run.result(PATIENCE, check=True).output == {
            "found": [f"offline: Review src{number + 1}, number {number}" for number in range(3)],
            "summary": "offline: Sum up held",
        }
        assert done == {"split": 1, "step_failed": 1}
        with pytest.raises(RunFailed, match=r"path: .*is not of type 'string'"):
            cluster.workflow(review, 7, session_id="v").result(PATIENCE, check=True)
        assert done == {"split": 1, "step_failed": 1}
