"""Definitions made in Python: a function for each kind of step. `define` checks the whole.

```python
from understudy.workflow_definition import builder as w

review = w.define(
    "review",
    w.tool("split", {"path": "{{path}}"}, id="parts", output_schema={"type": "array"}),
    w.foreach("{{parts}}", w.agent("reviewer", "Review {{item}}"), id="found", max_concurrency=8),
    w.model("Sum up: {{found}}", id="summary"),
    inputs={"path": {"type": "string"}},
)
```
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypedDict, Unpack

from msgspec import UNSET, UnsetType

from .checking import read_definition, to_data
from .steps import (
    AgentTask,
    Branch,
    Case,
    Definition,
    Duration,
    Foreach,
    JsonSchema,
    Loop,
    ModelCall,
    Question,
    Retry,
    Step,
    ToolUse,
    Wait,
)


class Options(TypedDict, total=False):
    """What every step may have: see `Step`."""

    id: str
    when: str
    output_schema: JsonSchema
    retry: Retry
    timeout: Duration
    fallback: Step
    on_error: Any
    undo: Step
    max_concurrency: int


def agent(name: str, task: str, **options: Unpack[Options]) -> Step:
    """A sub-agent works on a task (`AgentTask`)."""
    return Step(agent=AgentTask(name, task), **options)


def tool(name: str, arguments: dict[str, Any] | None = None, **options: Unpack[Options]) -> Step:
    """A tool is called (`ToolUse`)."""
    return Step(tool=ToolUse(name, arguments or {}), **options)


def model(
    prompt: str, *, model: str | UnsetType = UNSET, instructions: str | UnsetType = UNSET, **options: Unpack[Options]
) -> Step:
    """A model is called once (`ModelCall`)."""
    return Step(model=ModelCall(prompt, model, instructions), **options)


def sequence(*steps: Step, **options: Unpack[Options]) -> Step:
    """Steps one after the other."""
    return Step(sequence=[*steps], **options)


def parallel(*steps: Step, **options: Unpack[Options]) -> Step:
    """Steps at the same time."""
    return Step(parallel=[*steps], **options)


def foreach(items: list[Any] | str, do: Step, *, as_: str = "item", **options: Unpack[Options]) -> Step:
    """A step for each item of a list (`Foreach`)."""
    return Step(foreach=Foreach(items, do, as_), **options)


def branch(*cases: tuple[str, Step], otherwise: Step | UnsetType = UNSET, **options: Unpack[Options]) -> Step:
    """The first case whose condition holds (`Branch`); a case is a condition and a step."""
    return Step(branch=Branch([Case(when, do) for when, do in cases], otherwise), **options)


def loop(do: Step, *, max: int, until: str | UnsetType = UNSET, **options: Unpack[Options]) -> Step:
    """A step again and again, at most `max` times (`Loop`)."""
    return Step(loop=Loop(do, max, until), **options)


def wait(
    seconds: Duration | UnsetType = UNSET,
    *,
    until: str | UnsetType = UNSET,
    event: str | UnsetType = UNSET,
    **options: Unpack[Options],
) -> Step:
    """A wait for one of the three (`Wait`)."""
    return Step(wait=Wait(seconds, until, event), **options)


def ask(question: str, *answers: str, **options: Unpack[Options]) -> Step:
    """A person is asked (`Question`), who is offered these answers."""
    return Step(ask=Question(question, [*answers]), **options)


def define(
    name: str,
    *steps: Step,
    inputs: dict[str, JsonSchema] | None = None,
    output: Any = UNSET,
    description: str = "",
    agents: Collection[str] | None = None,
    tools: Collection[str] | None = None,
) -> Definition:
    """A definition of these steps, one after the other (`Definition`).

    Args:
        agents, tools: the names that a step may have; None: they are not looked at.

    Raises:
        InvalidSpec: with every problem in `details["problems"]`.
    """
    made = Definition(name, [*steps], description, inputs or {}, output)
    return read_definition(to_data(made), agents=agents, tools=tools)
