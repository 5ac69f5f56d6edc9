"""What a workflow's log says of a run: the input of its code, and the steps that it has taken. Pure."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Any

from understudy.errors import InvalidInput
from understudy.json_text import from_json
from understudy.messages import NEVER, Message
from understudy.workflows import ORIGIN, step_path

from .replay import Record, Result
from .step_values import typed
from .workflow import arguments_of

CONTINUED = "continued"
"""The name under which a new input is taken, with which the code begins again."""

DIVERGED = "diverged"
"""The tool of the question about code that asks for other steps than the log has."""


def taking(key: str, name: str, value: Any) -> Message:
    """The record of a value that the code has taken."""
    extra = {"key": key, "name": name, "value": value}
    return Message("system", None, origin=ORIGIN, visibility=NEVER, extra=extra)


def recorded(messages: Iterable[Message], run_id: str) -> tuple[Record, str | dict[str, Any], str]:
    """The record of a run, the input of its code, and how the paths of its steps begin.

    Args:
        messages: of the run, in the log's order.
    """
    record, times = Record(), 0
    arguments: str | dict[str, Any] = ""
    for message in messages:
        if message.role == "user" and not message.origin:
            arguments = message.text
        elif message.origin == ORIGIN and message.role == "assistant":
            for call in message.tool_calls:
                if call.name != DIVERGED:
                    record.asked[step_path(run_id, call.call_id)] = call.name, call.arguments
        elif message.origin == ORIGIN:
            extra = message.extra or {}
            if extra["name"] == CONTINUED:
                record, arguments, times = Record(), extra["value"], times + 1
            else:
                record.taken[extra["key"]] = extra["name"], extra["value"]
        elif message.role == "tool" and message.name != DIVERGED:
            extra = message.extra or {}
            path = step_path(run_id, message.tool_call_id or "")
            result = Result(extra.get("outcome", "ok"), message.text, extra.get("status", ""))
            record.results.append((path, result))
    return record, arguments, f"n{times}." if times else ""


def read_input(function: Callable[..., Any], given: str | dict[str, Any], session_id: str) -> dict[str, Any]:
    """The arguments of a workflow's function, by name, as the types that it says.

    Args:
        given: the run's input, JSON of an object with an entry for each parameter; a text for the only parameter.

    Raises:
        InvalidInput: the function does not take it.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]
    values: Any = given
    if isinstance(given, str):
        try:
            values = from_json(given)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            if len(parameters) != 1:
                names = ", ".join(parameter.name for parameter in parameters) or "none"
                raise InvalidInput(
                    f"the input must be a JSON object with the parameters: {names}", session_id=session_id
                )
            values = {parameters[0].name: given}
    try:
        types = typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # a name that only type checkers know
        types = {}
    bound = arguments_of(function, (), dict(values))
    return {name: typed(value, types.get(name)) for name, value in bound.items()}
