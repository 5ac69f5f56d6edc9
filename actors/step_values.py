"""Values of a workflow's steps: JSON in the log, what a function says that it returns in the code."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import typing
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

from understudy.errors import ToolError, WorkflowError
from understudy.json_text import from_json, to_json

from .execution import MAX_RESULT_CHARACTERS
from .results import Result, rendered
from .tools import LoadedTool, ToolContext

JSON_TYPES: dict[Any, Any] = {
    str: str, int: int, float: (float, int), bool: bool, dict: dict, list: list, type(None): type(None),
}  # fmt: skip
"""Types that JSON's values are of already: nobody has to build them."""

SHOWN_VALUE = 100
"""Characters of a value that an error shows."""


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function says of its parameters, and of what it returns (`return`); nothing where that can't be found."""
    try:
        return typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # a name that only type checkers know
        return {}


@cache
def result_type(function: Callable[..., Any]) -> Any:
    """What a function says that it returns; None if it says nothing, or nothing that can be found."""
    return hints_of(function).get("return")


def typed(value: Any, kind: Any) -> Any:
    """JSON data as a value of a type; as it is if there is none, or that is a JSON Schema.

    Raises:
        WorkflowError: it is none of that type.
    """
    if isinstance(kind, dict) or kind is None or kind is Any:
        return value
    if kind in JSON_TYPES:
        if not isinstance(value, JSON_TYPES[kind]) or (isinstance(value, bool) and kind is not bool):
            raise WorkflowError(f"{_shortened(value)} is no {kind.__name__}")
        return value
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(kind).validate_json(to_json(value))
    except Exception as error:  # also of a type that pydantic can't build, and what the type's own code does
        raise WorkflowError(f"{_shortened(value)} is no {getattr(kind, '__name__', kind)}: {error}") from None


def _shortened(value: Any) -> str:
    """A value, for an error."""
    text = to_json(value)
    return text if len(text) <= SHOWN_VALUE else f"{text[:SHOWN_VALUE]}…"


def of_step(loaded: LoadedTool) -> LoadedTool:
    """A tool whose results are JSON, also where they are texts."""
    function = loaded.function

    def called(*arguments: Any, **keywords: Any) -> Result:
        return _as_json(loaded.name, function(*arguments, **keywords))

    async def awaited(*arguments: Any, **keywords: Any) -> Result:
        return _as_json(loaded.name, await function(*arguments, **keywords))

    reconcile = loaded.reconcile

    def found(context: ToolContext) -> Any:
        value = reconcile(context) if reconcile is not None else None
        return _awaited(loaded.name, value) if asyncio.iscoroutine(value) else _as_json(loaded.name, value)

    async def found_later(context: ToolContext) -> Result:
        assert reconcile is not None
        return _as_json(loaded.name, await reconcile(context))

    finder = found_later if inspect.iscoroutinefunction(reconcile) else found
    return dataclasses.replace(
        loaded, function=awaited if loaded.is_async else called, reconcile=None if reconcile is None else finder
    )


def as_value(content: str, kind: Any) -> str:
    """JSON of a result that a person has written, or another process, to whom a text and JSON are one."""
    return content if kind is not str and _is_json(content) else to_json(content)


def _is_json(text: str) -> bool:
    try:
        from_json(text)
    except (ValueError, RecursionError):
        return False
    return True


async def _awaited(name: str, value: Coroutine[Any, Any, Any]) -> Result:
    return _as_json(name, await value)


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
