"""Whether the arguments of a call fit the schema of its tool, which may be a program's of other people's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from understudy.json_schemas import EXPENSIVE, FOREIGN, MOST_SCHEMAS, is_bounded, schemas


def argument_validator(schema: dict[str, Any], *, from_server: bool) -> Any:
    """The compiled schema; `iter_errors(arguments)` yields every mistake. References that lead out of the schema are
    not followed: they could name any file of this node, or any address that it reaches.

    Args:
        from_server: an MCP server wrote it. What could take for ever is not looked at then: the server checks its
            arguments itself.
    """
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.validators import extend  # type: ignore[import-untyped]
    from referencing import Registry

    usual = Draft202012Validator.VALIDATORS["additionalProperties"]

    def additional(validator: Any, value: Any, instance: Any, within: dict[str, Any]) -> Iterator[Any]:
        if "patternProperties" not in within:  # patterns say there which properties are additional
            yield from usual(validator, value, instance, within) or ()

    kind = Draft202012Validator
    if from_server:
        kind = extend(kind, {**dict.fromkeys(EXPENSIVE, _anything), "additionalProperties": additional})
        schema = schema if _is_bounded(schema) else {"type": "object"}
    return kind(schema, registry=Registry())


def _anything(*_: Any) -> tuple[()]:
    return ()


def _is_bounded(schema: dict[str, Any]) -> bool:
    try:
        own_meaning = any(name in found for _, found in schemas(schema) for name in FOREIGN)
        return not own_meaning and is_bounded(schema, MOST_SCHEMAS)
    except (TypeError, AttributeError, RecursionError):  # it is no schema
        return False
