"""What a workflow's log says of a run: the input of its code, and the steps that it has taken. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from understudy.errors import InvalidInput, WorkflowError
from understudy.json_text import from_json, to_json
from understudy.messages import NEVER, Message
from understudy.workflows import CONTINUED, DIVERGED, ORIGIN, SNAPSHOT, step_path

from .awaited import Record, Result
from .step_values import hints_of, typed
from .workflow import arguments_of, definition_of

SNAPSHOT_STEPS = 500
"""Results after which a snapshot is due, or as many as the one before has: so all of them together stay small."""

LARGEST_SNAPSHOT = 8_000_000
"""Characters: of a record that is larger no snapshot is made."""


def taking(key: str, name: str, value: Any) -> Message:
    """The record of a value that the code has taken."""
    extra = {"key": key, "name": name, "value": value}
    return Message("system", None, origin=ORIGIN, visibility=NEVER, extra=extra)


@dataclass(frozen=True)
class Recorded:
    """What a log says of a run.

    Attributes:
        given: the input of its code.
        times: how often it was continued as new.
    """

    record: Record
    given: str | dict[str, Any]
    times: int

    @property
    def prefix(self) -> str:
        """How the paths of its steps begin."""
        return f"n{self.times}." if self.times else ""

    def snapshot(self) -> Message | None:
        """The record as one message, in which nothing is missing; None where none is due."""
        record = self.record
        if len(record.results) - record.kept < max(SNAPSHOT_STEPS, record.kept):
            return None
        record.kept = len(record.results)
        results = [[path, found.outcome, found.text, found.status] for path, found in record.results]
        # As the log has it, and of its own: the record grows before the message is sent.
        asked, taken = ({key: list(said) for key, said in known.items()} for known in (record.asked, record.taken))
        value = {"given": self.given, "times": self.times, "asked": asked, "results": results, "taken": taken}
        return taking(SNAPSHOT, SNAPSHOT, value) if len(to_json(value)) <= LARGEST_SNAPSHOT else None


def recorded(messages: Iterable[Message], run_id: str) -> Recorded:
    """What the log has of a run.

    Args:
        messages: of the run, in the log's order: from its beginning, or from a record that makes others needless.
    """
    record, times = Record(), 0
    given: str | dict[str, Any] = ""
    for message in messages:
        if message.role == "user" and not message.origin:
            given = message.text
        elif message.origin == ORIGIN and message.role == "assistant":
            for call in message.tool_calls:
                if call.name != DIVERGED:
                    record.asked[step_path(run_id, call.call_id)] = call.name, call.arguments
        elif message.origin == ORIGIN:
            extra = message.extra or {}
            if extra["name"] == CONTINUED:
                record, given, times = Record(), extra["value"]["given"], extra["value"]["times"]
            elif extra["name"] == SNAPSHOT:
                value = extra["value"]
                record, given, times = _of_snapshot(value), value["given"], value["times"]
            else:
                record.taken[extra["key"]] = extra["name"], extra["value"]
        elif message.role == "tool" and message.name != DIVERGED:
            extra = message.extra or {}
            path = step_path(run_id, message.tool_call_id or "")
            result = Result(extra.get("outcome", "ok"), message.text, extra.get("status", ""))
            record.results.append((path, result))
    return Recorded(record, given, times)


def _of_snapshot(value: dict[str, Any]) -> Record:
    asked = {path: (tool, arguments) for path, (tool, arguments) in value["asked"].items()}
    results = [(path, Result(outcome, text, status)) for path, outcome, text, status in value["results"]]
    return Record(asked, results, {key: (name, taken) for key, (name, taken) in value["taken"].items()}, len(results))


def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """What a workflow's function takes behind its context: types by name, None where it says none."""
    known = definition_of(function)
    if known is not None and known.definition is not None:  # which looks at their schemas itself
        inputs = known.definition.inputs
        return {name: str if schema.get("type") == "string" else None for name, schema in inputs.items()}
    types = hints_of(function)
    return {name: types.get(name) for name in [*inspect.signature(function).parameters][1:]}


def input_values(function: Callable[..., Any], given: str | dict[str, Any], session_id: str) -> dict[str, Any]:
    """An input as JSON data by the names of the function's parameters.

    Args:
        given: the run's input, JSON of an object with an entry for each parameter; a text for the only parameter.

    Raises:
        InvalidInput: it is none of these.
    """
    if not isinstance(given, str):
        return dict(given)
    try:
        values = from_json(given)
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        return values
    names = [*parameter_types(function)]
    if len(names) == 1:
        return {names[0]: given}
    expected = ", ".join(names) or "none"
    raise InvalidInput(f"the input must be a JSON object with the parameters: {expected}", session_id=session_id)


def read_input(function: Callable[..., Any], given: str | dict[str, Any], session_id: str) -> dict[str, Any]:
    """The arguments of a workflow's function, by name, as the types that it says. See `input_values`.

    Raises:
        InvalidInput: the function does not take it.
    """
    bound = arguments_of(function, (), input_values(function, given, session_id))
    types, found = parameter_types(function), dict[str, Any]()
    for name, value in bound.items():
        try:
            found[name] = typed(value, types.get(name))
        except WorkflowError as error:
            raise InvalidInput(f"{name}: {error.message}", session_id=session_id) from None
    return found
