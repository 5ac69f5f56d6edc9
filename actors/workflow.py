"""Workflows: functions whose steps are durable. `@workflow` marks one; `load_workflow` has it again in a frame."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from understudy.errors import InvalidSpec, ToolError
from understudy.workflow_definition.steps import Definition

from .code import had_from, unloadable
from .workflow_inputs import checked_inputs

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class WorkflowDefinition:
    """What `@workflow` knows about a function.

    Attributes:
        tools, agents, workflows: what its steps use, beside what its code names.
        options: other fields of the specification of its sessions (`AgentSpec`): `budget`, `restart`, `workspace`, ….
        definition: what the function does, if that is data.
    """

    name: str
    function: Callable[..., Any] = field(repr=False)
    tools: tuple[Any, ...] = ()
    agents: tuple[Any, ...] = ()
    workflows: tuple[Callable[..., Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    definition: Definition | None = field(default=None, repr=False)


OPTIONS = frozenset({
    "model", "profile", "budget", "restart", "workspace", "sandbox", "metadata", "max_depth", "tool_timeout",
    "parallel_tools", "shutdown", "runtime_env", "resources", "labels", "environment", "isolation", "on_change", "web",
    "mcp_servers", "priority", "approve_timeout", "approve_default", "restart_type", "on_parent_end", "description",
})  # fmt: skip
"""Fields of an `AgentSpec` that a workflow has as well."""


@overload
def workflow(function: Function, /) -> Function: ...


@overload
def workflow(
    *, name: str | None = None, tools: tuple[Any, ...] | list[Any] = (), agents: tuple[Any, ...] | list[Any] = (),
    workflows: tuple[Any, ...] | list[Any] = (), **options: Any,
) -> Callable[[Function], Function]: ...  # fmt: skip


def workflow(
    function: Function | None = None, /, *, name: str | None = None, tools: Any = (), agents: Any = (),
    workflows: Any = (), **options: Any,
) -> Any:  # fmt: skip
    """Mark an async function as a workflow: its first parameter is the `WorkflowContext`, the others are its input.

    After a crash the code is run again, up to where it was: each step that is done returns its recorded result. So it
    must be deterministic: time, random numbers and all effects go through the context (docs/workflows.md).

    Args:
        name: of the workflow; the function's by default.
        tools, agents, workflows: what its steps use. What its code names is found without this.
        options: fields of `AgentSpec` that a workflow has as well: `OPTIONS`.

    Raises:
        InvalidSpec: it is no async function, has no parameter for its context, or there is no such option.
    """

    def mark(target: Function) -> Function:
        chosen = str(getattr(target, "__name__", "")) if name is None else name
        problem = _problem(target, chosen, options)
        if problem is not None:
            raise InvalidSpec(f"workflow {chosen!r} {problem}.")
        target.__understudy_workflow__ = WorkflowDefinition(  # type: ignore[attr-defined]
            chosen, target, tuple(tools), tuple(agents), tuple(workflows), options
        )
        return target

    return mark if function is None else mark(function)


def _problem(target: Any, name: str, options: Mapping[str, Any]) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        return "must have a name of 1 to 64 letters, digits, underscores or hyphens"
    if not inspect.iscoroutinefunction(target):
        return "must be an async function"
    parameters = list(inspect.signature(target).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return "must take its context as the first parameter"
    for parameter in parameters[1:]:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            return f"has the parameter {parameter}, which can't be given by name"
    return options_problem(options)


def options_problem(options: Mapping[str, Any]) -> str | None:
    """What is wrong with a workflow's options, behind its name; None if nothing is."""
    unknown = sorted(options.keys() - OPTIONS)
    return f"has no option {unknown[0]!r}; there are: {', '.join(sorted(OPTIONS))}" if unknown else None


def definition_of(item: Any) -> WorkflowDefinition | None:
    """What is known of a workflow; None for anything else."""
    found = getattr(item, "__understudy_workflow__", None)
    return found if isinstance(found, WorkflowDefinition) else None


@dataclass(frozen=True, eq=False)
class LoadedWorkflow:
    """A workflow's function in a frame."""

    name: str
    function: Callable[..., Any]


def load_workflow(
    spec: dict[str, Any], read_blob: Callable[[str], bytes], unpickle: Callable[[bytes], Any] | None
) -> LoadedWorkflow:
    """Have a workflow's function in this process.

    Raises:
        ToolError: the code can't be imported or read, or is no workflow any more; the message says which and why.
    """
    name, source = spec["name"], spec["source"]
    try:
        function = had_from(source, read_blob, unpickle)
        if "definition" in spec:  # as it was when the session began: the function does what that says
            function = function(spec["definition"], spec.get("most_steps"))
    except Exception as error:
        raise unloadable(f"workflow {name!r}", source, error) from error
    if definition_of(function) is None:
        raise ToolError(f"workflow {name!r} can't be loaded here: the function is no longer decorated with @workflow.")
    return LoadedWorkflow(name, function)


def arguments_of(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The input of a workflow, by the names of its parameters.

    Args:
        arguments: of a definition at most one: its inputs, beside those in `keywords`, or instead of them.

    Raises:
        InvalidSpec: it does not take these.
        InvalidInput: the same of a definition, with every problem in `details["problems"]`.
    """
    known = definition_of(function)
    if known is not None and known.definition is not None:
        if len(arguments) > 1 or not all(isinstance(given, Mapping) for given in arguments):
            raise InvalidSpec(f"workflow {known.name!r} is a definition: its inputs are given by name, or as one dict.")
        return checked_inputs(known.definition, dict(*arguments, **keywords))
    try:
        bound = inspect.signature(function).bind(None, *arguments, **keywords)
    except TypeError as error:
        raise InvalidSpec(f"workflow {getattr(function, '__name__', function)!r}: {error}.") from None
    return dict(list(bound.arguments.items())[1:])
