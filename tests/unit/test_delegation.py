"""Sub-agents that a model writes itself: what it is offered, what it may write, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from understudy import AgentSpec, Budget, Delegation, tool
from understudy.actors.delegating import written
from understudy.cluster.client.compiling import compile_spec
from understudy.errors import InvalidSpec
from understudy.testing import LocalCluster

LIMITS = Delegation(tools=("wait", "spawn_agent"), models=("small", "offline"), budget=Budget(tokens=1000))


def compiled(delegation: Delegation | None = LIMITS, **more: Any) -> dict[str, Any]:
    spec = AgentSpec(name="lead", tools=["spawn_agent", "wait", "glob"], delegation=delegation, **more)
    return compile_spec(spec, model="big", profile="p").spec


def schema(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(t for t in spec["tools"] if t["name"] == "spawn_agent")["parameters"]["properties"]
    return found


def test_what_a_model_is_offered() -> None:
    """Given limits, the tools that start sub-agents take instructions, tools and a model, within these limits."""
    assert set(schema(compiled(None))) == {"agent", "task"}
    offered = schema(compiled())
    assert set(offered) == {"agent", "task", "instructions", "tools", "model"}
    assert offered["tools"]["items"]["enum"] == ["wait", "spawn_agent"]
    assert offered["model"]["enum"] == ["small", "offline"]


def test_what_it_writes() -> None:
    """Given instructions, tools and a model, the sub-agent has just these, the budget of the limits, and may not write
    any itself; all else is the caller's."""
    spec = compiled(max_rounds=7, agents=(AgentSpec(name="scout"),))
    made = written({"instructions": "Dig.", "tools": ["wait"], "model": "small"}, spec)
    assert isinstance(made, dict)
    assert (made["instructions"], made["model"], made["agents"], made["max_rounds"]) == ("Dig.", "small", {}, 7)
    assert [one["name"] for one in made["tools"]] == ["wait"]
    assert made["budget"] == [{"scope": "tree", "tokens": 1000}]
    assert "delegation" not in made
    assert made["hash"] != spec["hash"]
    every = written({"instructions": "Dig."}, spec)
    assert isinstance(every, dict)
    assert [one["name"] for one in every["tools"]] == ["spawn_agent", "wait"]
    assert (every["model"], set(schema(every))) == ("big", {"agent", "task"})


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"instructions": " "}, '"instructions" must be a text'),
        ({"tools": ["wait"]}, "leave out tools and model"),
        ({"instructions": "Dig.", "tools": ["glob"]}, '"tools" may have only: wait, spawn_agent'),
        ({"instructions": "Dig.", "tools": "wait"}, '"tools" may have only'),
        ({"instructions": "Dig.", "tools": [["wait"]]}, '"tools" may have only'),
        ({"instructions": "Dig.", "model": "big"}, '"model" must be one of: small, offline'),
        ({"instructions": "Dig.", "agent": "scout"}, "not both"),
        ({"instructions": "x" * 100_001}, "at most 100000 characters"),
    ],
)
def test_what_is_refused(data: dict[str, Any], told: str) -> None:
    """What is beyond the limits has a text that says so."""
    assert told in str(written(data, compiled()))


def test_without_limits_nothing_may_be_written() -> None:
    """An agent without `delegation` may not write sub-agents; its other calls are as ever."""
    assert "may not write sub-agents" in str(written({"instructions": "Dig."}, compiled(None)))
    assert written({"task": "t"}, compiled(None)) is None


def test_limits_that_make_no_sense() -> None:
    """A tool that the agent does not have, and limits without a tool that starts sub-agents, are refused together."""
    with pytest.raises(InvalidSpec) as raised:
        compile_spec(
            AgentSpec(name="a", tools=["wait"], delegation=Delegation(tools=("glob",))), model="m", profile="p"
        )
    assert [problem["field"] for problem in raised.value.details["problems"]] == ["delegation.tools", "delegation"]


def test_a_written_sub_agent_works() -> None:
    """Given a model that writes a sub-agent, then that has its instructions and works with its tools."""
    looked = []

    @tool(on_crash="rerun")
    def look(place: str) -> str:
        """Look somewhere."""
        looked.append(place)
        return f"nothing in {place}"

    agent = AgentSpec(name="lead", tools=[look, "spawn_agent"], delegation=Delegation(tools=("look",)))
    call = '{"task": "call look {\\"place\\": \\"attic\\"}", "instructions": "You look.", "tools": ["look"]}'
    with LocalCluster() as cluster:
        session = cluster.spawn(agent)
        result = session.send(f"call spawn_agent {call}").result(20, check=True)
        asked = [request.body["messages"][0]["content"] for request in cluster.model_server.requests]
        assert (looked, result.text) == (["attic"], "offline: offline: nothing in attic")
        assert "You look." in asked
