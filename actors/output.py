"""The final answer of an agent with an output schema, as a model wrote it: read, repaired, checked.

Pure functions of the reply and the schema: a reply has the same verdict in every activation. What is repaired, and what
never is, says docs/output.md.
"""

from __future__ import annotations

import json
import math
import re
from datetime import date, time
from functools import cached_property, partial
from typing import Any

from understudy.json_schemas import resolve
from understudy.messages import storable

NOT_JSON, AMBIGUOUS, CUT_OFF, INEXACT, SCHEMA, REFUSED = REASONS = (
    "not_json", "ambiguous", "cut_off", "inexact", "schema", "refused",
)  # fmt: skip
"""Why a reply is not accepted."""

WRAPPED = "value"
"""The property that has the answer where the schema is not that of an object: endpoints take objects only."""

MAX_DEPTH = 50
"""So deep may arrays and objects be nested."""

MAX_PROBLEMS, MAX_PROBLEM_CHARACTERS = 10, 300
"""So much is reported of what is wrong."""

SPACE = " \t\r\n\ufeff"
OPENING, CLOSING = "{[", {"{": "}", "[": "]"}
STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
COMBINED = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "prefixItems", "dependentSchemas")
"""Keywords with which a schema does not say by itself that an object or an array can have no more in it."""


DATE = r"(?P<date>\d{4}-\d\d-\d\d)"
TIME = r"(?P<time>\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?:Z|[+-]\d\d:\d\d)?)"
TIMES = {"date": DATE, "time": TIME, "date-time": f"{DATE}[Tt]{TIME}"}
"""How the formats of times are written."""


class Rejected(Exception):
    """A reply is not accepted.

    Attributes:
        reason: one of `REASONS`.
        problems: what is wrong, for the model and for people.
    """

    def __init__(self, reason: str, *problems: str) -> None:
        super().__init__(reason, *problems)
        self.reason = reason
        more = len(problems) - MAX_PROBLEMS
        shown = [_short(problem) for problem in problems[:MAX_PROBLEMS]]
        self.problems = [*shown, f"and {more} more"] if more > 0 else shown


class Reader:
    """Reads answers that must fit a schema.

    Args:
        schema: JSON Schema (2020-12) of an object.
        wrapped: the answer itself is the object's only property, `WRAPPED`.
    """

    def __init__(self, schema: dict[str, Any], *, wrapped: bool) -> None:
        self._schema = schema
        self._wrapped = wrapped

    def read(self, text: str, *, cut: bool = False) -> Any:
        """The answer in a reply.

        Args:
            cut: the reply was ended by its longest length.

        Raises:
            Rejected: there is none, or it can't be accepted.
        """
        try:
            value = self._parsed(text.strip(SPACE), cut)
            _check_exact(value)
            problems = sorted(
                (error.json_path, error.message) for error in self._validator.iter_errors(value)
            )  # fmt: skip
        except RecursionError:
            raise Rejected(INEXACT, "it is nested too deeply") from None
        if problems:
            raise Rejected(SCHEMA, *(f"{path}: {message}" for path, message in problems))
        return value[WRAPPED] if self._wrapped else value

    @cached_property
    def _validator(self) -> Any:
        return validator_of(self._schema)

    def _parsed(self, text: str, cut: bool) -> Any:
        if not text:
            raise Rejected(CUT_OFF if cut else NOT_JSON, "the reply is empty")
        try:
            return _whole(text)
        except ValueError:
            pass
        start = next((index for index, character in enumerate(text) if character in OPENING), None)
        if start is None:
            raise Rejected(CUT_OFF if cut else NOT_JSON, "there is no JSON object in the reply")
        before = text[:start].rstrip(SPACE)
        try:
            value, end = _DECODER.raw_decode(text, start)
        except ValueError as error:
            opened = _opened(text[start:])
            if opened and not _belongs(before, ""):
                return self._closed(text[start:], opened)
            raise Rejected(CUT_OFF if cut or opened else NOT_JSON, f"it is no JSON: {error}") from None
        _check_characters(text[start:end])
        after = text[end:].strip(SPACE)
        if _belongs(before, after):
            raise Rejected(AMBIGUOUS, "it is not clear which part of the reply is the answer: give it alone")
        if cut and after:
            raise Rejected(CUT_OFF, "the reply was cut off behind its JSON object: give that alone")
        return value

    def _closed(self, text: str, opened: str) -> Any:
        """The value of a text that lacks closing brackets only, where the schema lets nothing else be missing."""
        cut_off = Rejected(CUT_OFF, "the reply ends before its JSON object does")
        if text[-1] not in '"]}' and not text.endswith(("true", "false", "null")):
            raise cut_off  # in the midst of a value: a number may go on, too
        try:
            value = _whole(text + "".join(CLOSING[bracket] for bracket in reversed(opened)))
        except ValueError:
            raise cut_off from None
        schema, part = self._schema, value
        for bracket in opened:
            schema = self._resolved(schema)
            if any(keyword in schema for keyword in COMBINED):
                raise cut_off
            if bracket == "{":
                properties = schema.get("properties", {})
                if schema.get("additionalProperties") is not False or properties.keys() != part.keys():
                    raise cut_off
                last = next(reversed(part), None)
                schema, part = (properties[last], part[last]) if last is not None else ({}, None)
            else:
                if schema.get("maxItems") != len(part):
                    raise cut_off
                schema, part = schema.get("items", {}), part[-1] if part else None
        return value

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """A schema without references at its root; one that says nothing where they lead nowhere."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = resolve(self._schema, schema["$ref"])
        return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def validator_of(schema: dict[str, Any]) -> Any:
    """The compiled schema. Stricter than JSON Schema in two things: `3.0` is no integer, and formats that Python's own
    types have are checked."""
    from jsonschema import Draft202012Validator, FormatChecker  # type: ignore[import-untyped]
    from jsonschema.validators import extend  # type: ignore[import-untyped]

    formats = FormatChecker(formats=("email", "ipv4", "ipv6", "uuid"))
    for name, written in TIMES.items():
        formats.checks(name, raises=ValueError)(partial(_is_time, written))
    types = Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _checker, value: isinstance(value, int) and not isinstance(value, bool)
    )
    return extend(Draft202012Validator, type_checker=types)(schema, format_checker=formats)


def _is_time(written: str, text: Any) -> bool:
    """Whether a text is written like this, and is a time that there is; what is no text is none of this format's."""
    if not isinstance(text, str):
        return True
    found = re.fullmatch(written, text)
    for name, part in found.groupdict().items() if found else ():
        (date if name == "date" else time).fromisoformat(part)
    return found is not None


def _whole(text: str) -> Any:
    """The value of a text that is JSON from its beginning to its end. Raises `ValueError` where it is not."""
    value = _DECODER.decode(text)
    _check_characters(text)
    return value


def _check_characters(text: str) -> None:
    """U+FFFD stands for what could not be read, on the way here, or in the store: something is lost."""
    if "\ufffd" in text:
        raise Rejected(INEXACT, "a character got lost on the way (U+FFFD)")


def _belongs(before: str, after: str) -> bool:
    """Whether what is around a JSON value may belong to the answer: other brackets, or a part of an object or list."""
    brackets = any(bracket in around for around in (before, after) for bracket in "{}[]")
    return brackets or before.endswith(('":', ",")) or after.startswith((",", ":"))


def _opened(text: str) -> str:
    """The brackets that a beginning of JSON leaves open; none if it can't be one, or ends within a text."""
    opened, position = "", 0
    while position < len(text):
        character = text[position]
        position += 1
        if character == '"':
            ended = STRING.match(text, position - 1)
            if ended is None:
                return ""
            position = ended.end()
        elif character in OPENING:
            opened += character
        elif character in "]}":
            if not opened or CLOSING[opened[-1]] != character:
                return ""
            opened = opened[:-1]
            if not opened:
                return ""
    return opened


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise Rejected(AMBIGUOUS, *(f"the key {name!r} is there more than once" for name in twice))
    return found


def _integer(text: str) -> int:
    value = int(text) if len(text) <= 20 else 1 << 64
    if not -(1 << 63) <= value < 1 << 64:
        raise Rejected(INEXACT, f"the number {text} has more than 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value) or (value == 0 and any(digit in text.lower().partition("e")[0] for digit in "123456789")):
        raise Rejected(INEXACT, f"the number {text} is too large or too small")
    return value


def _constant(name: str) -> Any:
    raise Rejected(INEXACT, f"JSON has no {name}")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
)  # fmt: skip


def _check_exact(value: Any, depth: int = 0) -> None:
    """Refuse what can't be passed on as it is."""
    if depth > MAX_DEPTH:
        raise Rejected(INEXACT, f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Rejected(INEXACT, "a text has half of a character (a surrogate) in it") from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_exact(name, depth + 1)
            _check_exact(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_exact(item, depth + 1)


def _short(text: str) -> str:
    text = storable(text)
    return text if len(text) <= MAX_PROBLEM_CHARACTERS else f"{text[:MAX_PROBLEM_CHARACTERS]}…"
