"""Values of a workflow's steps: JSON in the log, what a function says that it returns in the code."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

from understudy.errors import ToolError, WorkflowError
from understudy.json_text import to_json

from .execution import MAX_RESULT_CHARACTERS
from .parameters import ToolContext
from .results import Result, rendered
from .tools import LoadedTool

JSON_TYPES: dict[Any, Any] = {
    str: str, int: int, float: (float, int), bool: bool, dict: dict, list: list, type(None): type(None),
}  # fmt: skip
"""Types that JSON's values are of already: nobody has to build them."""

SHOWN_VALUE = 100
"""Characters of a value that an error shows."""


@cache
def result_type(function: Callable[..., Any]) -> Any:
    """What a function says that it returns; None if it says nothing, or nothing that can be found."""
    try:
        return typing.get_type_hints(inspect.unwrap(function)).get("return")
    except Exception:  # a name that only type checkers know
        return None


def typed(value: Any, kind: Any) -> Any:
    """JSON data as a value of a type; as it is if there is none, or that is a JSON Schema.

    Raises:
        WorkflowError: it is none of that type.
    """
    if isinstance(kind, dict) or kind is None or kind is Any:
        return value
    if kind in JSON_TYPES:
        if not isinstance(value, JSON_TYPES[kind]) or (isinstance(value, bool) and kind is not bool):
            raise WorkflowError(f"{shown(value)} is no {kind.__name__}")
        return value
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(to_json(value))
    except ValidationError as error:
        raise WorkflowError(f"{shown(value)} is no {getattr(kind, '__name__', kind)}: {error}") from None


def shown(value: Any) -> str:
    """A value, for an error."""
    text = to_json(value)
    return text if len(text) <= SHOWN_VALUE else f"{text[:SHOWN_VALUE]}…"


def of_step(loaded: LoadedTool) -> LoadedTool:
    """A tool whose results are JSON, also where they are texts; so is what it finds out about a call."""
    function, reconcile = loaded.function, loaded.reconcile

    def called(*arguments: Any, **keywords: Any) -> Result:
        return _as_json(loaded.name, function(*arguments, **keywords))

    async def awaited(*arguments: Any, **keywords: Any) -> Result:
        return _as_json(loaded.name, await function(*arguments, **keywords))

    def found_out(context: ToolContext) -> Any:
        assert reconcile is not None
        found = reconcile(context)
        return _later(loaded.name, found) if inspect.iscoroutine(found) else _as_json(loaded.name, found)

    return dataclasses.replace(
        loaded,
        function=awaited if loaded.is_async else called,
        reconcile=found_out if reconcile is not None else None,
    )


async def _later(name: str, found: Coroutine[Any, Any, Any]) -> Result:
    return _as_json(name, await found)


def _as_json(name: str, value: Any) -> Result:
    shown = rendered(value)
    is_text = isinstance(value, (str, Result)) or bool(shown.attachments)
    text = to_json(shown.text) if is_text else shown.text
    if len(text) > MAX_RESULT_CHARACTERS:
        raise ToolError(
            f"{name} was executed, but its result has {len(text)} characters as JSON, and a step's may have "
            f"{MAX_RESULT_CHARACTERS}: write it to a file, and return where"
        )
    return Result(text, shown.attachments)
