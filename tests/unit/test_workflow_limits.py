"""Limits of workflows that a model writes: what a specification may say, and what a definition may not go beyond."""

from __future__ import annotations

import json
from typing import Any

import pytest

from understudy import AgentSpec, Budget, Delegation, WorkflowLimits, tool
from understudy.cluster.client.compiling import compile_spec
from understudy.errors import InvalidSpec
from understudy.testing import LocalCluster
from understudy.workflow_definition.checking import definition_problems
from understudy.workflow_definition.limits import Limits

SCOUT = AgentSpec(name="scout")


def compiled(**fields: Any) -> dict[str, Any]:
    spec = AgentSpec(**{"name": "lead", "tools": ["glob", "workflows"], "agents": [SCOUT], **fields})
    return compile_spec(spec, model="offline", profile="offline").spec


def fields_of(**fields: Any) -> list[str]:
    """The fields that have a problem."""
    with pytest.raises(InvalidSpec) as raised:
        compiled(**fields)
    return [problem["field"] for problem in raised.value.details["problems"]]


def test_what_a_specification_says_of_them() -> None:
    """Given limits, then they are compiled with the agent, and its tool names what a workflow may use."""
    limits = WorkflowLimits(tools=("glob",), agents=("scout",), steps=7, at_once=3, budget=Budget(tokens=10))
    spec = compiled(workflows=limits)
    assert spec["workflows"] == {
        "tools": ["glob"], "agents": ["scout"], "models": [], "steps": 7, "at_once": 3,
        "budget": [{"scope": "tree", "tokens": 10}],
    }  # fmt: skip
    described = {one["name"]: one["description"] for one in spec["tools"]}
    assert "Tools: glob; agents: scout. At most 7 steps" in described["create_workflow"]


def test_limits_that_make_no_sense() -> None:
    """Given tools that are none of the agent's or no steps, agents that are none, limits without the tool or the tool
    without limits, or a sub-agent that a model writes with the tool, then all of it is refused together."""
    assert fields_of(workflows=WorkflowLimits(tools=("grep", "create_workflow"), agents=("nobody",))) == [
        "workflows.tools", "workflows.tools", "workflows.agents",
    ]  # fmt: skip
    assert fields_of(tools=["spawn_agent"], workflows=WorkflowLimits()) == ["workflows"]
    assert fields_of() == ["tools"]
    tools = ["workflows", "start_agent"]
    given_away = Delegation(tools=("create_workflow",))
    assert fields_of(tools=tools, delegation=given_away, workflows=WorkflowLimits()) == ["delegation.tools"]
    asking = AgentSpec(name="model")
    assert fields_of(agents=[asking], workflows=WorkflowLimits(agents=("model",))) == ["workflows.agents"]


TOOL = {"tool": {"name": "t"}}
LIMITS = Limits(steps=6, at_once=4, models=("small",), asks=True)


@pytest.mark.parametrize(
    ("steps", "problems"),
    [
        ([TOOL] * 6, []),
        ([TOOL] * 7, ["steps"]),
        ([{"parallel": [TOOL] * 4}], []),
        ([{"parallel": [TOOL] * 5}], ["steps[0]"]),
        ([{"parallel": [TOOL] * 5, "max_concurrency": 4}], []),
        ([{"foreach": {"items": [1], "do": TOOL}}], ["steps[0]"]),
        ([{"foreach": {"items": [1], "do": TOOL}, "max_concurrency": 4}], []),
        (
            [{"foreach": {"items": [1], "do": {"parallel": [TOOL] * 2}}, "max_concurrency": 3, "fallback": TOOL}],
            ["steps[0]"],
        ),
        ([{"loop": {"do": {"branch": {"cases": [{"when": "true", "do": {"parallel": [TOOL] * 5}}]}}, "max": 2}}],
         ["steps", "steps[0].loop.do.branch.cases[0].do"]),
        ([{"model": {"prompt": "x", "model": "small"}}, {"model": {"prompt": "x", "model": "large"}}],
         ["steps[1].model.model"]),
    ],
)  # fmt: skip
def test_what_a_definition_may_not_go_beyond(steps: list[Any], problems: list[str]) -> None:
    """Given a definition, then what goes beyond its limits is reported with its place, the innermost alone."""
    found = definition_problems({"name": "n", "steps": steps}, limits=LIMITS)
    assert [item["field"] for item in found] == problems


def test_a_written_workflow_works() -> None:
    """Given a model that writes a workflow of its agent's tool, then it is done, and the model has its result."""
    looked = []

    @tool(on_crash="rerun")
    def look(place: str) -> str:
        """Look somewhere."""
        looked.append(place)
        return f"nothing in {place}"

    agent = AgentSpec(name="lead", tools=[look, "workflows"], workflows=WorkflowLimits(tools=("look",)))
    step = {"tool": {"name": "look", "arguments": {"place": "{{item}}"}}}
    search = {"foreach": {"items": ["attic", "cellar"], "do": step}, "max_concurrency": 1}
    call = json.dumps({"definition": {"name": "search", "steps": [search]}})
    with LocalCluster() as cluster:
        result = cluster.spawn(agent).send(f"call create_workflow {call}").result(20, check=True)
    assert looked == ["attic", "cellar"]
    assert "nothing in cellar" in result.text
