"""What a request's answer shall fit, and the smallest instance of a JSON Schema."""

from __future__ import annotations

from typing import Any

FINAL_ANSWER = "final_answer"
"""The tool by which an answer is given where there is no response format."""

SHORTEST = {"date": "2000-01-01", "time": "00:00:00", "date-time": "2000-01-01T00:00:00Z", "email": "a@b.c",
            "uuid": "00000000-0000-4000-8000-000000000000", "ipv4": "0.0.0.0", "ipv6": "::"}  # fmt: skip
"""A text of each format."""

MAX_DEPTH = 20


def wanted_schema(body: dict[str, Any]) -> dict[str, Any] | None:
    """The schema that the answer to a request shall fit, whether it is asked for as a response format or as a tool's
    arguments; None for any text."""
    described: dict[str, Any] | None = (body.get("response_format") or {}).get("json_schema")
    if described is not None:
        return described.get("schema")
    if body.get("tool_choice") == "none":
        return None
    functions = [tool["function"] for tool in body.get("tools") or ()]
    return next((one["parameters"] for one in functions if one["name"] == FINAL_ANSWER), None)


def smallest(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """A small instance of a schema: what is required and no more. Patterns, `not` and the like are not looked at."""
    root = schema if root is None else root
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part.replace("~1", "/").replace("~0", "~")]
        return smallest(target, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            choices = schema[keyword]
            null = next((choice for choice in choices if choice == {"type": "null"}), None)
            return smallest(null or choices[0], root, depth + 1)
    if "allOf" in schema:
        parts = [smallest(part, root, depth + 1) for part in (*schema["allOf"], {**schema, "allOf": None})]
        objects = [part for part in parts if isinstance(part, dict)]
        return {name: value for part in objects for name, value in part.items()} if objects else parts[0]
    kind = schema.get("type", "object" if "properties" in schema else None)
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: smallest(properties.get(name, {}), root, depth + 1) for name in schema.get("required", ())}
    if kind == "array":
        items = [smallest(item, root, depth + 1) for item in schema.get("prefixItems", ())]
        missing = schema.get("minItems", 0) - len(items)
        return [*items, *(smallest(schema.get("items", {}), root, depth + 1) for _ in range(missing))]
    if kind == "string":
        return SHORTEST.get(schema.get("format", ""), "x" * schema.get("minLength", 0))
    if kind in ("integer", "number"):
        return _number(schema)
    return False if kind == "boolean" else None


def _number(schema: dict[str, Any]) -> Any:
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    least += "exclusiveMinimum" in schema
    most = schema.get("maximum", schema.get("exclusiveMaximum", least) - ("exclusiveMaximum" in schema))
    number = max(least, min(0, most)) if "minimum" in schema or "exclusiveMinimum" in schema else min(0, most)
    step = schema.get("multipleOf")
    return -(-number // step) * step if step else number
