"""The schemas of tools: what one that an MCP server wrote can't do to the process that checks arguments by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy.actors.argument_schemas import argument_validator
from understudy.actors.execution import Outcome, bind
from understudy.actors.tools import LoadedTool, ToolContext

CONTEXT = ToolContext(session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a")

BACKTRACKING = "(a+)+$"
"""Takes 2^n steps for n times `a` and another character."""

DOUBLED = {f"D{n}": {"allOf": [{"$ref": f"#/$defs/D{n + 1}"}, {"$ref": f"#/$defs/D{n + 1}"}]} for n in range(60)}
"""Each definition refers to the next one twice: 2^60 schemas for one value."""


def object_of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, **more}


def problems(schema: dict[str, Any], arguments: Any) -> list[str]:
    return [error.message for error in argument_validator(schema, from_server=True).iter_errors(arguments)]


@pytest.mark.filterwarnings("ignore:Automatically retrieving")  # else the warning, as an error, would hide the deed
@pytest.mark.parametrize("from_server", [True, False])
def test_no_reference_leads_to_a_file(from_server: bool, tmp_path: Path) -> None:
    """Given a schema that refers to a file of the node, then the call is refused, and nothing of the file is shown."""
    (tmp_path / "key.json").write_text('{"enum": ["the key"]}')
    schema = object_of({"$ref": (tmp_path / "key.json").as_uri()})
    tool = LoadedTool("t", lambda a: a, False, schema, from_server=from_server)
    refused = bind(tool, '{"a": "x"}', CONTEXT)
    assert isinstance(refused, Outcome)
    assert refused.outcome == "invalid"
    assert "the key" not in refused.content


@pytest.mark.parametrize(
    "schema",
    [
        object_of({"type": "string", "pattern": BACKTRACKING}),
        {"type": "object", "patternProperties": {BACKTRACKING: {}}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"pattern": BACKTRACKING}},
        object_of({"$ref": "#/$defs/D0"}, **{"$defs": {**DOUBLED, "D60": {}}}),
        object_of({"$dynamicRef": "#x"}, **{"$defs": {"X": {"$dynamicAnchor": "x"}}}),
        object_of({"allOf": 5}),
    ],
)
def test_what_could_take_for_ever_is_the_servers_to_check(schema: dict[str, Any]) -> None:
    """Patterns, and schemas that are looked at without an end, are not looked at."""
    assert not problems(schema, {"a": "a" * 60 + "!", "a" * 60 + "!": 1})


def test_everything_else_is_checked() -> None:
    """Types, required arguments, additional ones and references within the schema."""
    schema = object_of(
        {"$ref": "#/$defs/N"}, required=["a"], additionalProperties=False, **{"$defs": {"N": {"type": "integer"}}}
    )
    assert not problems(schema, {"a": 1})
    assert problems(schema, {"a": "x"}) == ["'x' is not of type 'integer'"]
    assert problems(schema, {}) == ["'a' is a required property"]
    assert "Additional properties" in problems(schema, {"a": 1, "b": 2})[0]
