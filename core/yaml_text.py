"""YAML that people and models write, read as what JSON can hold, and nothing else: the core schema of YAML 1.2.

So `no`, `on` and `2026-12-24` are texts and `1:30` is no number of seconds, as they are in YAML 1.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml  # type: ignore[import-untyped]

from .places import Place

_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, tuple[str, list[str | None]]] = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
}
"""How a value that is no text is written without quotes, and with what it begins."""


class NotYaml(ValueError):
    """A text is not YAML, or YAML that can't be used here; the message says where and why."""


@dataclass(frozen=True)
class YamlText:
    """What a text says.

    Attributes:
        data: None, true, false, numbers, texts, lists, and objects by name; a name may also be a number there.
        lines: of each part of it.
        twice: fields that their object has more than once; the last one counts.
    """

    data: Any
    lines: dict[Place, int] = field(default_factory=dict)
    twice: tuple[tuple[Place, int], ...] = ()


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Without aliases: by these a few lines stand for any amount of data."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as in its base class
    yaml_constructors: dict[str | None, Any] = {}  # noqa: RUF012

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            problem = "aliases (`*name`) can't be used: write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def text(self, node: Any) -> str:
        # `"\\ud83d\\ude00"`, as JSON writes what is one character, comes as two halves.
        return str(self.construct_scalar(node)).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def scalar(self, node: Any) -> Any:
        text = self.construct_scalar(node)
        kind = node.tag.removeprefix(_TAG)
        if re.fullmatch(_SCALARS[kind][0], text) is None:
            raise yaml.MarkedYAMLError(problem=f"{text[:80]!r} is no {node.tag}", problem_mark=node.start_mark)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        number = math.nan if "n" in text.lower() else float(text)
        if not math.isfinite(number):
            raise yaml.MarkedYAMLError(problem=f"JSON has no number {text[:80]}", problem_mark=node.start_mark)
        return number


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts in quotes wherever readers of YAML 1.1 or 1.2 would take them for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, text: str) -> Any:
        style = "|" if "\n" in text else None
        if any(character in text for character in "\x85\u2028\u2029\ufeff"):  # line breaks, for some readers
            style = '"'
        return self.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _Dumper.text)
for _kind, (_written, _first) in _SCALARS.items():
    _Dumper.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_written})\Z"), _first)
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_written})\Z"), _first)
    _Loader.add_constructor(f"{_TAG}{_kind}", _Loader.scalar)
_Loader.add_constructor(f"{_TAG}str", _Loader.text)
_Loader.add_constructor(f"{_TAG}seq", yaml.SafeLoader.construct_yaml_seq)
_Loader.add_constructor(f"{_TAG}map", yaml.SafeLoader.construct_yaml_map)
_Loader.add_constructor(None, yaml.SafeLoader.construct_undefined)


def read_yaml(text: str, first_line: int = 1) -> YamlText:
    """Read a text of one document. Tags for objects and aliases are refused.

    Args:
        first_line: the number of its first line, in the file that it is from.

    Raises:
        NotYaml: it can't be read; with the line.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlText(None)
        found = [*_places(node, (), first_line)]
        lines = {place: line for place, line, _ in found}
        twice = tuple((place, line) for place, line, again in found if again)
        return YamlText(loader.construct_document(node), lines, twice)
    except yaml.YAMLError as error:
        raise NotYaml(_described(error, first_line)) from None
    except RecursionError:
        raise NotYaml("it is nested too deeply") from None
    except ValueError as error:  # a number with too many digits
        raise NotYaml(str(error)) from None
    finally:
        if loader is not None:
            loader.dispose()


def write_yaml(data: Any) -> str:
    """Data that JSON can hold as YAML, of which `read_yaml` makes the same data."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _places(node: Any, place: Place, first_line: int) -> Iterator[tuple[Place, int, bool]]:
    """Each part below a node with its line, and whether its object has a field of that name already."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            yield (*place, name), key.start_mark.line + first_line, name in seen
            seen.add(name)
            yield from _places(value, (*place, name), first_line)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*place, index), value.start_mark.line + first_line, False
            yield from _places(value, (*place, index), first_line)


def _described(error: yaml.YAMLError, first_line: int) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it can't be parsed"
    if problem == "but found another document":
        problem = "a second document begins here, and there can be only one"
    where = f"line {mark.line + first_line}: " if mark is not None else ""
    hint = "; a text with a colon in it must be quoted" if "mapping values are not allowed" in problem else ""
    return f"{where}{problem}{hint}"
