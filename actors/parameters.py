"""What a tool's function takes: parameters that a model fills, with their JSON schema, and the one that tells it of its
call. Only the schema needs pydantic."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol

from understudy.confinement import Confinement
from understudy.errors import InvalidSpec
from understudy.skills import SkillFolder

from .code import import_reference
from .web_rules import WebRules


class Reporting(Protocol):
    """Takes what a tool reports while it runs; from any thread."""

    def progress(self, fraction: float | None, text: str) -> None:
        """See `ToolContext.progress`."""

    def emit(self, name: str, data: Any) -> None:
        """See `ToolContext.emit`."""


class SkillFiles(Protocol):
    """The skills of an agent (`skills.Skills`)."""

    async def folder(self, name: str) -> SkillFolder:
        """The files of a skill. Raises `ToolError`: there is none of this name."""

    async def directory(self) -> str | None:
        """See `ToolContext.skills_directory`."""


@dataclass(frozen=True, kw_only=True)
class ToolContext:
    """What a tool may know about its call; injected into the parameter annotated with this class.

    Attributes:
        call_id: unique within the session.
        call_key: `session_id/call_id`, the same in every activation: use it as an idempotency key.
        epoch: number of the activation that runs the call.
        workspace: directory of the agent's files; None without one.
        confinement: in what the agent's commands run (`AgentSpec.sandbox`).
        traceparent: of the call's span, as W3C Trace Context writes it, for requests that the tool makes; empty without
            a trace.
        skill_files: the agent's skills; None outside a session.
        web: what the agent may fetch of the web (`AgentSpec.web`); None for nothing.
        arguments: of the call, as JSON gives them: for a function that finds out what became of it (`on_crash`), which
            is given nothing else. A hook's `Replace` is not in them there.
    """

    session_id: str
    run_id: str
    round: int
    call_id: str
    call_key: str = ""
    epoch: int
    agent: str
    workspace: str | None = None
    confinement: Confinement = field(default=Confinement(), repr=False)
    traceparent: str = ""
    skill_files: SkillFiles | None = field(default=None, repr=False, compare=False)
    web: WebRules | None = None
    arguments: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _reporting: Reporting | None = field(default=None, repr=False, compare=False)
    _commands: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.call_key:
            object.__setattr__(self, "call_key", f"{self.session_id}/{self.call_id}")

    async def skills_directory(self) -> str | None:
        """A directory on this node with a folder for each of the agent's skills, by its name, with the skill's files,
        for reading only; None if the agent has no skills. `bash` tells it to commands as `$UNDERSTUDY_SKILLS`.

        It is written where it is not there yet, and repaired where something in it was changed.

        Raises:
            ToolError: it can't be written, or a skill can't be read.
        """
        return await self.skill_files.directory() if self.skill_files is not None else None

    def progress(self, fraction: float | None = None, text: str = "") -> None:
        """Say how far the call has come: as `tool_progress` in the session's events, the latest every half a second.

        It returns at once, and commits nothing itself; what is said after the call has its result is ignored. May be
        called from threads. Outside a session (a tool called by a test) nothing is done.

        Args:
            fraction: of the work, from 0 to 1; None if that is not known.
            text: for people; at most 500 characters of it are kept.

        Raises:
            ToolError: `fraction` is no number.
        """
        if self._reporting is not None:
            self._reporting.progress(fraction, text)

    def emit(self, name: str, data: Any = None) -> None:
        """Add an event of the tool's own to the session's events, as `custom`. None of them is dropped, and they keep
        their order; one that is not committed when the process dies is lost, and a call that runs again emits again.

        It returns at once; else like `progress`.

        Args:
            name: 1 to 100 characters.
            data: what JSON can have.

        Raises:
            ToolError: it is not JSON, the call has its result, or has 1,000 events or 1 MiB of data in them already.
        """
        if self._reporting is not None:
            self._reporting.emit(name, data)


def _is_context(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return re.fullmatch(r"(\w+\.)*ToolContext( *\| *None)?", annotation) is not None
    return annotation is ToolContext or annotation == ToolContext | None


def context_parameter(function: Callable[..., Any]) -> str | None:
    """The parameter that takes the `ToolContext`, if there is one."""
    for parameter in inspect.signature(function).parameters.values():
        if _is_context(parameter.annotation):
            return parameter.name
    return None


def _parameters(tool_name: str, function: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, Any]]:
    """The parameters a model fills, each with its resolved type."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidSpec(f"tool {tool_name!r} is a generator: a tool returns its result at once.")
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidSpec(f"tool {tool_name!r}: parameter {parameter} can't be filled by name.")
        if _is_context(parameter.annotation):
            continue
        if parameter.annotation is parameter.empty:
            yield parameter, Any
            continue
        # One at a time: a name that exists only for type checkers (a return type, say) must not spoil the others.
        holder = types.SimpleNamespace(__annotations__={"type": parameter.annotation})
        try:
            yield parameter, typing.get_type_hints(holder, globalns=scope, include_extras=True)["type"]
        except Exception as error:
            raise InvalidSpec(
                f"tool {tool_name!r}: the annotation {parameter.annotation!r} of {parameter.name!r} can't be resolved "
                f"({error}): define the type at the top level of the module."
            ) from error


def parameters_schema(tool_name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of the parameters that a model fills, from the signature and the docstring's `Args:` section.

    Raises:
        InvalidSpec: one can't be filled by name, or its annotation can't be resolved or described.
    """
    from pydantic import TypeAdapter
    from pydantic_core import to_jsonable_python

    parameters = list(_parameters(tool_name, function))
    try:
        schemas, shared = TypeAdapter.json_schemas(
            [(parameter.name, "validation", TypeAdapter(kind)) for parameter, kind in parameters]
        )
    except Exception as error:
        raise InvalidSpec(f"tool {tool_name!r}: its parameters have no JSON schema: {error}") from error
    texts = parse_docstring(function)[1]
    properties: dict[str, Any] = {}
    for parameter, _ in parameters:
        schema = dict(schemas[parameter.name, "validation"])
        if parameter.name in texts:
            schema.setdefault("description", texts[parameter.name])
        if parameter.default is not parameter.empty:
            try:
                schema["default"] = to_jsonable_python(parameter.default)
            except Exception:
                pass  # a default that JSON can't show still applies
        properties[parameter.name] = schema
    required = [parameter.name for parameter, _ in parameters if parameter.default is parameter.empty]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **shared,
    }


def convertible_types(tool_name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters whose values JSON can't give as they are, with their types."""
    return {parameter.name: kind for parameter, kind in _parameters(tool_name, function) if not _is_plain(kind)}


def has_local_dataclass(kind: Any) -> bool:
    """Whether a dataclass that can't be imported elsewhere is part of the type; a copy by value loses its defaults."""
    if isinstance(kind, type) and is_dataclass(kind):
        return import_reference(kind) is None
    return any(has_local_dataclass(argument) for argument in typing.get_args(kind))


def _is_plain(kind: Any) -> bool:
    """Whether parsed JSON that fits the schema already is a value of this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return all(type(value) in (str, int, bool, type(None)) for value in arguments)
    if origin in (typing.Union, types.UnionType, list):
        return all(_is_plain(argument) for argument in arguments)
    if origin is dict:
        return arguments[0] is str and _is_plain(arguments[1])
    return any(kind is known for known in (str, int, float, bool, None, type(None), Any, object, list, dict))


_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?|Attributes|Warnings?|See Also|Todo):\s*"
)


def parse_docstring(function: Any) -> tuple[str, dict[str, str]]:
    """A Google style docstring's text before its first section, and the descriptions in its `Args:` section."""
    summary: list[str] = []
    texts: dict[str, list[str]] = {}
    section, current, indent = "", "", 0
    for line in (inspect.getdoc(function) or "").splitlines():
        if found := _SECTION.fullmatch(line):
            section = found[1]
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            entry = re.match(r"\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
            if entry and (not texts or depth <= indent):
                current, indent = entry[1], depth
                texts[current] = [entry[2]]
            elif current:
                texts[current].append(line.strip())
    return "\n".join(summary).strip(), {name: " ".join(part for part in text if part) for name, text in texts.items()}
