"""Sub-agents that a model writes itself: what it is offered, what it may write, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from understudy import AgentSpec, Budget, Delegation, McpServer, tool
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
    any itself; it has no MCP servers, all else is the caller's."""
    spec = compiled(
        max_rounds=7, agents=(AgentSpec(name="scout"),), mcp_servers=(McpServer("git", command=("git-server",)),)
    )  # fmt: skip
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
    assert "mcp_servers" not in every
    assert (every["model"], set(schema(every))) == ("big", {"agent", "task"})


def test_what_its_agents_are_for() -> None:
    """The model reads which agents it may name where one of them says what it is for; a sub-agent that it writes, which
    has none of them, does not."""
    spec = compiled(agents=(AgentSpec(name="scout", description="Looks around."), AgentSpec(name="clerk")))
    assert schema(spec)["agent"]["description"].splitlines()[1:] == ["- scout: Looks around.", "- clerk"]
    made = written({"instructions": "Dig."}, spec)
    assert isinstance(made, dict)
    assert schema(made) == {name: schema(compiled(None))[name] for name in ("agent", "task")}
    plain = compiled(None, agents=(AgentSpec(name="scout"),))
    assert schema(plain) == schema(compiled(None))


@pytest.mark.parametrize(
    ("data", "problem"),
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
def test_what_is_refused(data: dict[str, Any], problem: str) -> None:
    """What is beyond the limits has a text that says so."""
    assert problem in str(written(data, compiled()))


PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WITH_OUTPUT = Delegation(tools=("wait",), output=True)


def test_an_output_schema_is_offered_where_the_limits_allow_it() -> None:
    """Given limits that allow it, the tools take an output schema, and what is written has it in the sub-agent's
    specification, as an output type would be; without it, the answer is any text."""
    assert "output_schema" not in schema(compiled())
    spec = compiled(WITH_OUTPUT)
    assert schema(spec)["output_schema"]["type"] == "object"
    made = written({"instructions": "Dig.", "output_schema": PLACE}, spec)
    assert isinstance(made, dict)
    typed = compile_spec(AgentSpec(name="a", output_type=PLACE), model="m", profile="p").spec
    assert made["output"] == typed["output"]
    assert set(schema_of(made)) == set()
    plain = written({"instructions": "Dig."}, spec)
    assert isinstance(plain, dict)
    assert "output" not in plain
    assert plain["hash"] != made["hash"]


def schema_of(made: dict[str, Any]) -> set[str]:
    """The names of the written sub-agent's tools that could write another."""
    return {tool["name"] for tool in made["tools"]} & {"spawn_agent", "start_agent"}


DEEP: dict[str, Any] = {}
for _ in range(400):
    DEEP = {"not": DEEP}
TWICE = {
    f"a{number}": {"allOf": [{"$ref": f"#/$defs/a{number + 1}"}, {"$ref": f"#/$defs/a{number + 1}"}]}
    for number in range(60)
}


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("object", "must be a JSON Schema: an object"),
        ([], "must be a JSON Schema: an object"),
        ({"type": "thing"}, "$.type: 'thing' is not valid"),
        ({"$schema": 5}, "$schema: only"),
        ({"pattern": "a{99999999999}"}, "is no regular expression of Python's"),
        ({"pattern": "(" * 9_000}, "the pattern '((("),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}}, "leads to nothing"),
        ({"$ref": "https://example.com/s.json"}, "leads to nothing"),
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, "pattern, patternProperties, "),
        ({"allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties are not supported"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refers to itself without an end"),
        ({"type": "object", "allOf": [{"$ref": "#"}]}, "refers to itself without an end"),
        ({"$ref": "#/$defs/a0", "$defs": {**TWICE, "a60": {}}}, "too much"),
        ({"type": "object", "anyOf": [{"properties": {"x": {"$ref": "#"}}}] * 2}, "too much"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}, "contains": {"$ref": "#/$defs/a"}}}},
            "too much",
        ),
        ({"title": "x" * 20_001}, "at most 20000 characters"),
        ({"title": "half \ud83d"}, "can't be stored"),
        ({"title": "nul \x00"}, "can't be stored"),
        ({"minimum": float("nan")}, "not JSON compliant"),
        (DEEP, "nested too deeply"),
    ],
)
def test_a_schema_that_cannot_be_used_starts_nothing(wanted: Any, problem: str) -> None:
    """What is no schema, leads out of it, or could keep a process busy for ever has a text that says what is wrong."""
    assert problem in str(written({"instructions": "Dig.", "output_schema": wanted}, compiled(WITH_OUTPUT)))


def test_a_schema_needs_the_permission_and_instructions() -> None:
    """Without `output` in the limits no schema is taken, and with it only beside instructions."""
    assert "may not say" in str(written({"instructions": "Dig.", "output_schema": PLACE}, compiled()))
    assert '"instructions" must be a text' in str(written({"output_schema": PLACE}, compiled(WITH_OUTPUT)))


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"type": "object", "properties": {"top": {"$ref": "#"}}, "additionalProperties": {"$ref": "#"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    ],
)
def test_a_schema_may_refer_to_itself_for_parts(wanted: dict[str, Any]) -> None:
    """Trees and lists are taken: each part of a value is looked at once."""
    assert isinstance(written({"instructions": "Dig.", "output_schema": wanted}, compiled(WITH_OUTPUT)), dict)


@pytest.mark.parametrize(("name", "heard"), [("spawn_agent", '{"place":""}'), ("start_agent", '{"place":""}')])
def test_the_parent_gets_json(name: str, heard: str) -> None:
    """Given a model that writes a sub-agent with an output schema, then that is held to it, and its parent reads the
    answer as JSON, whether it waits for it or not. A schema that can't be used starts none."""
    agent = AgentSpec(name="lead", tools=["spawn_agent", "start_agent"], delegation=Delegation(output=True))
    asked = {"task": "look", "instructions": "You look.", "output_schema": PLACE}
    with LocalCluster() as cluster:
        session = cluster.spawn(agent)
        bad = session.send(f"call {name} {json.dumps({**asked, 'output_schema': {'type': 7}})}").result(20, check=True)
        assert "can't be used" in bad.text
        assert session.children() == []
        run = session.send(f"call {name} {json.dumps(asked)}")
        run.result(20, check=True)
        [child] = session.children()
        assert cluster.session(child.id).run("task").result(20).output == {"place": ""}
        if name == "start_agent":
            session.run(f"news.{child.id}").result(20, check=True)
        assert any(heard in str(message.content) for message in session.messages())


def test_a_schema_and_a_response_format_do_not_go_together() -> None:
    """Limits that allow schemas, beside parameters that have a response format, are refused at the gate."""
    with pytest.raises(InvalidSpec, match="response_format"):
        compiled(WITH_OUTPUT, parameters={"response_format": {"type": "json_object"}})


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
