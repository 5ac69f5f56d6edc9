"""What an expression is in the values of variables. Pure, and bounded by the size of the values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .expressions import Comparison, Every, Expression, Items, Literal, Logic, Not, Path


class NoValue(ValueError):
    """An expression has no value: it compares what can't be compared, or leads to nothing."""


class _Nothing:
    """What a path leads to where there is nothing."""


_NOTHING = _Nothing()


def is_true(expression: Expression, variables: Mapping[str, Any]) -> bool:
    """Whether a condition holds. A path that leads to nothing is null; null, false, 0, and what is empty, is not true.

    Raises:
        NoValue: it has no value.
    """
    return bool(_bounded(lambda: _value(expression, variables, strict=False)))


def value_of(expression: Expression, variables: Mapping[str, Any]) -> Any:
    """The value of a template's expression.

    Raises:
        NoValue: it has none, or a path in it leads to nothing.
    """
    return _bounded(lambda: _value(expression, variables, strict=True))


def _bounded(work: Any) -> Any:
    try:
        return work()
    except RecursionError:
        raise NoValue("a value is nested too deeply") from None


def _value(expression: Expression, variables: Mapping[str, Any], *, strict: bool) -> Any:
    match expression:
        case Literal(value):
            return value
        case Items(items):
            return [_value(item, variables, strict=strict) for item in items]
        case Path():
            found = _follow(variables.get(expression.name, _NOTHING), expression.parts)
            if isinstance(found, _Nothing):
                if strict:
                    raise NoValue(f"{written(expression)} leads to nothing")
                return None
            return found
        case Not(inner):
            return not _value(inner, variables, strict=strict)
        case Logic(word, inner):
            values = (bool(_value(item, variables, strict=strict)) for item in inner)
            return all(values) if word == "and" else any(values)
        case Comparison(sign, left, right):
            return _compared(
                sign, _value(left, variables, strict=strict), _value(right, variables, strict=strict)
            )  # fmt: skip


def _follow(value: Any, parts: tuple[str | int | Every, ...]) -> Any:
    for index, part in enumerate(parts):
        if isinstance(part, Every):
            if not isinstance(value, list):
                return _NOTHING
            found = [_follow(item, parts[index + 1 :]) for item in value]
            return [None if isinstance(item, _Nothing) else item for item in found]
        if isinstance(value, dict):
            value = value.get(str(part), _NOTHING)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return _NOTHING
    return value


def _compared(sign: str, left: Any, right: Any) -> bool:
    if sign in ("==", "!="):
        return same(left, right) == (sign == "==")
    if sign in ("in", "not in"):
        return _contains(right, left) == (sign == "in")
    if not (_is_number(left) and _is_number(right)) and not (isinstance(left, str) and isinstance(right, str)):
        raise NoValue(f"{_kind(left)} {sign} {_kind(right)}: only two numbers or two texts have an order")
    if sign in ("<", ">"):
        return bool(left < right) if sign == "<" else bool(left > right)
    return bool(left <= right) if sign == "<=" else bool(left >= right)


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(whole, list):
        return any(same(item, part) for item in whole)
    if isinstance(whole, str | dict):
        return isinstance(part, str) and part in whole
    raise NoValue(f"{_kind(part)} in {_kind(whole)}: only a list, a text or an object has something in it")


def same(left: Any, right: Any) -> bool:
    """Whether two values are the same as JSON has them: true is not 1, and 1.0 is 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return bool(left == right)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    kinds: Iterable[tuple[Any, str]] = ((str, "a text"), (list, "a list"), (dict, "an object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "a number")


def written(path: Path) -> str:
    """A path as it is written."""
    found = path.name
    for part in path.parts:
        plain = isinstance(part, Every | int) or part.isidentifier()
        found += f".{part}" if plain else f"[{part!r}]"
    return found
