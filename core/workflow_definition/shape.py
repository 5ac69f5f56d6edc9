"""Whether data has the fields and types of a definition: every mistake at once, where `msgspec.convert` tells the
first one. The fields are those of `steps`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from msgspec import inspect

from ..places import Place
from .problems import Problems, listing, meant, quoted
from .reference import meanings
from .steps import SAID, Definition, Part, Step


@cache
def described(kind: type[Part]) -> inspect.StructType:
    """The fields of a part."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return found


def _part(kind: inspect.StructType) -> type[Part]:
    assert issubclass(kind.cls, Part)
    return kind.cls


def look(data: Any, problems: Problems) -> None:
    """Gather what is wrong with the fields and types of a definition."""
    _look(data, described(Definition), (), problems)


def _look(value: Any, kind: inspect.Type, place: Place, problems: Problems) -> None:
    types = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    found = next((one for one in types if _is_of(value, one)), None)
    if found is None:
        problems.add(place, f"must be {_wanted(kind)}, not {_what(value)}")
    else:
        _look_within(value, found, place, problems)


def _look_within(value: Any, kind: inspect.Type, place: Place, problems: Problems) -> None:
    """Look at a value that has its type."""
    match kind:
        case inspect.StructType():
            _look_at_part(value, kind, place, problems)
        case inspect.ListType():
            if len(value) < (kind.min_length or 0):
                problems.add(place, "must not be empty")
            for index, item in enumerate(value):
                _look(item, kind.item_type, (*place, index), problems)
        case inspect.DictType():
            for name, item in value.items():
                _look(item, kind.value_type, (*place, name), problems)
        case inspect.LiteralType(values) if value not in values:
            close = meant(value, map(str, values))
            problems.add(place, f"must be {_wanted(kind)}, not {quoted(value)}{close}")
        case inspect.StrType():
            _look_at_text(value, kind, place, problems)
        case inspect.IntType():
            if not (kind.ge or value) <= value <= (value if kind.le is None else kind.le):
                limits = str(kind.ge) if kind.ge == kind.le else f"{kind.ge} to {kind.le}"
                problems.add(place, f"is {value}, and must be {limits}")


def _look_at_text(value: str, kind: inspect.StrType, place: Place, problems: Problems) -> None:
    if kind.pattern is not None and re.search(kind.pattern, value) is None:
        problems.add(place, f"is {quoted(value)}, and must be {SAID[kind.pattern]}")
    elif len(value) < (kind.min_length or 0):
        problems.add(place, "must not be empty")
    elif kind.max_length is not None and len(value) > kind.max_length:
        problems.add(place, f"has {len(value)} characters, and may have {kind.max_length}")


def _look_at_part(value: dict[str, Any], kind: inspect.StructType, place: Place, problems: Problems) -> None:
    fields = {field.encode_name: field for field in kind.fields}
    part = _part(kind)
    guessed = False
    for name, item in value.items():
        if name in fields:
            _look(item, fields[name].type, (*place, name), problems)
            continue
        close = meant(name, fields)
        guessed |= any(f"{one!r}" in close for one in part.ONE_OF)
        problems.add((*place, name), f"there is no such field{close or _elsewhere(name, part, value)}")
    for name, field in fields.items():
        if field.required and name not in value:
            problems.add((*place, name), f"is missing: {meanings(part)[name].partition('. ')[0].rstrip('.')}")
    given = [name for name in part.ONE_OF if name in value]
    if len(given) != 1 and part.ONE_OF and not (guessed and not given):
        missing = f"must have one of {', '.join(part.ONE_OF)}"
        problems.add(place, f"has {' and '.join(given)}: it can have one of them" if given else missing)
    for name, others in part.ONLY_WITH.items():
        if name in value and len(given) == 1 and given[0] not in others:
            problems.add((*place, name), f"is for {', '.join(others)} only, and not for {given[0]}")


def _elsewhere(name: str, part: type[Part], value: dict[str, Any]) -> str:
    """That a field belongs into another one that is here, or the other way round."""
    for field in described(part).fields:
        inner = field.type
        inner_fields = inner.fields if isinstance(inner, inspect.StructType) else ()
        if field.encode_name in value and name in {one.encode_name for one in inner_fields}:
            return f" here: it belongs into {field.encode_name}"
    of_a_step = name in {one.encode_name for one in described(Step).fields}
    return " here: it belongs into the step" if of_a_step and part not in (Definition, Step) else ""


def _is_of(value: Any, kind: inspect.Type) -> bool:
    match kind:
        case inspect.AnyType():
            return True
        case inspect.StructType() | inspect.DictType():
            return isinstance(value, dict)
        case inspect.ListType():
            return isinstance(value, list)
        case inspect.StrType() | inspect.LiteralType():
            return isinstance(value, str)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool)
        case inspect.FloatType():
            return isinstance(value, int | float) and not isinstance(value, bool)
    return False


def _wanted(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types):
            return " or ".join(_wanted(one) for one in types)
        case inspect.StructType(fields=fields):
            needed = [field.encode_name for field in fields if field.required]
            part = _part(kind)
            return f"an object with {listing(needed) if needed else 'one of ' + ', '.join(part.ONE_OF)}"
        case inspect.LiteralType(values):
            return " or ".join(map(repr, values))
        case inspect.ListType():
            return "a list"
        case inspect.DictType():
            return "an object"
        case inspect.IntType():
            return "a whole number"
        case inspect.FloatType():
            return "a number"
    return "a text"


def _what(value: Any) -> str:
    if value is None:
        return "null (leave out what is not needed)"
    if isinstance(value, bool):
        return str(value).lower()
    kinds = ((str, "the text "), (list, "a list"), (dict, "an object"), (int | float, "the number "))
    for kind, name in kinds:
        if isinstance(value, kind):
            return f"{name}{quoted(value)}" if name.endswith(" ") else name
    return type(value).__name__
