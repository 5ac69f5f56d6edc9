"""From a workflow, a function that is marked with `@workflow` or a definition, to the specification of its sessions."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from os import PathLike
from pathlib import Path
from typing import Any

from understudy.actors.code import fingerprint, sourced
from understudy.actors.results import rendered
from understudy.actors.tools import TOOL_GROUPS, ToolDefinition
from understudy.actors.workflow import WorkflowDefinition, arguments_of, definition_of
from understudy.actors.workflow_interpreter import as_workflow, loaded
from understudy.actors.workflow_record import parameter_types, read_input
from understudy.config import OFFLINE_MODEL
from understudy.errors import InvalidInput, InvalidSpec, ModelProfileMissing, UnderstudyError
from understudy.spec import AgentSpec
from understudy.workflow_definition.checking import read_definition, to_data
from understudy.workflow_definition.steps import Definition
from understudy.workflows import MODEL_AGENT, STEPS, WORKFLOW

from .compiling import Compiled, by_value, compile_spec, is_own, of_agent, seal, within
from .extensions import had
from .workflow_file import read_workflow

MOST_FUNCTIONS = 500
"""Functions of a workflow's that are looked through for what they name."""

DEPTH = 8
"""How deep the tree below a workflow may grow, unless it says."""


def definition_required(item: Any) -> WorkflowDefinition:
    """What is known of a workflow. Raises `InvalidInput` where it is none."""
    found = definition_of(item)
    if found is None:
        raise InvalidInput(f"{item!r} is no workflow: decorate an async function with @workflow")
    return found


def workflow_function(
    item: Callable[..., Any] | Definition | str | PathLike[str], arguments: Sequence[Any], keywords: dict[str, Any],
    options: Mapping[str, Any],
) -> Callable[..., Any]:  # fmt: skip
    """A workflow's function; of a definition, or of the path of its file, one that does it.

    Args:
        keywords: `agents` and `tools` of a definition are taken out of these.
        arguments: the inputs of a definition as one dict; none if they are keywords.
        options: what else may be given by name, None where it was not.

    Raises:
        InvalidInput: a file can't be read, or an input has such a name, so nobody knows what was meant.
        InvalidSpec: its definition can't be used, with every problem in `details["problems"]`.
    """
    given = {name for name, value in {**options, **keywords}.items() if value is not None}
    if not isinstance(item, Definition | str | PathLike):
        known = definition_of(item)
        if known is not None and not (known.definition is not None and arguments):  # else as one dict
            by_name = list(parameter_types(item))[len(arguments) :]
            _refuse_both(given & options.keys(), by_name, "its arguments by position")
        return item
    agents, tools = keywords.pop("agents", ()), keywords.pop("tools", ())
    definition = item if isinstance(item, Definition) else of_file(Path(item), agents, tools)
    if not arguments:
        _refuse_both(given & {"agents", "tools", *options}, definition.inputs, "its inputs as one dict")
    return as_workflow(definition, agents, tools)


def _refuse_both(options: Set[str], parameters: Collection[str], instead: str) -> None:
    """Refuse names that may mean the method's own parameter, and the workflow's."""
    if both := sorted(options & set(parameters)):
        raise InvalidInput(f"{', '.join(both)} is a parameter of this workflow as well: give {instead}")


def scheduled_workflow(
    item: Callable[..., Any] | Definition | str | PathLike[str], agents: Sequence[AgentSpec], tools: Sequence[Any]
) -> Callable[..., Any]:
    """The same, with the agents and tools of a definition. Raises as `workflow_function`."""
    if (agents or tools) and not isinstance(item, Definition | str | PathLike):
        raise InvalidInput("agents and tools are those of a definition: of a function, @workflow names them")
    return workflow_function(item, (), {"agents": agents, "tools": tools}, {})


def scheduled_input(function: Callable[..., Any], given: Mapping[str, Any] | None) -> str:
    """The input of a workflow that runs later, as JSON: also what a run would find only then is looked at now.

    Raises:
        InvalidInput: the workflow does not take it.
    """
    definition_required(function)
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(f"input must be a dict, by the names of the parameters, not {type(given).__name__}")
    try:
        content = rendered(arguments_of(function, (), dict(given or {}))).text
        read_input(function, content, "")
    except InvalidInput:
        raise
    except UnderstudyError as error:
        raise InvalidInput(error.message) from None
    return content


def of_file(path: Path, agents: Sequence[AgentSpec], tools: Sequence[Any]) -> Definition:
    """The definition of a file whose steps name these. Raises as `read_workflow`."""
    return read_workflow(path, agents=[agent.name for agent in agents], tools=_tool_names(tools))


def compile_workflow(
    workflow: WorkflowDefinition, *, model: str, profile: str | None,
    pickle: Callable[[Any], bytes] | None = by_value, above: tuple[str, ...] = (),
) -> Compiled:  # fmt: skip
    """The specification of a workflow's sessions: with the tools, agents and workflows that its code names.

    Args:
        model, profile: where it names none; without a profile it may ask no model.
        above: workflows that this one is a step of.

    Raises:
        InvalidSpec: it, or one of these, can't be used.
    """
    if workflow.definition is not None:
        known = [agent.name for agent in workflow.agents]
        read_definition(to_data(workflow.definition), agents=known, tools=_tool_names(workflow.tools))
    named = [] if workflow.definition is not None else list(_named(workflow.function))
    tools = _once([*workflow.tools, *(item for item in named if _is_tool(item))])
    agents = _once([*workflow.agents, *(item for item in named if isinstance(item, AgentSpec))])
    others = _once([*map(definition_required, workflow.workflows), *filter(None, map(definition_of, named))])
    taken = sorted(STEPS & {item.__understudy_tool__.name for item in tools if _is_tool(item)})
    if taken:
        raise InvalidSpec(f"workflow {workflow.name!r}: no tool may have the name of a step, {taken[0]!r}.")
    spec = AgentSpec(**{"max_depth": DEPTH, **workflow.options, "name": workflow.name, "tools": tools})
    host = {"model": model, "profile": profile} if profile else {"model": OFFLINE_MODEL, "profile": OFFLINE_MODEL}
    found = compile_spec(spec, pickle=pickle, **host)
    inner: list[Compiled] = []
    for agent in agents:
        with of_agent(f"agents.{agent.name}"):
            compiled = compile_spec(
                within(spec, agent), model=spec.model or model, profile=spec.profile or profile, pickle=pickle
            )  # fmt: skip
        inner.append(compiled)
    for other in others:
        if other.name in above:
            circle = " → ".join((*above, workflow.name, other.name))
            raise InvalidSpec(f"workflows run each other in a circle: {circle}.")
        if other.name == workflow.name and other.function is not workflow.function:
            raise InvalidSpec(f"another workflow is named {workflow.name!r}, which it runs: rename one of them.")
        if other.function is not workflow.function:  # a step that runs the workflow itself has its specification
            names = (*above, workflow.name)
            inner.append(compile_workflow(other, model=model, profile=profile, pickle=pickle, above=names))
    asking = AgentSpec(name=MODEL_AGENT, model=spec.model, profile=spec.profile)
    try:
        inner.append(compile_spec(asking, model=model, profile=profile, pickle=pickle))
    except ModelProfileMissing:  # a step that asks a model says so
        pass
    below: dict[str, Any] = found.spec["agents"]
    for compiled in inner:
        name = compiled.spec["name"]
        if name in below:
            raise InvalidSpec(f"workflow {workflow.name!r} has two agents or workflows named {name!r}.")
        below[name] = compiled.spec
        found.blobs.update(compiled.blobs)
        found.uses_own_code = found.uses_own_code or compiled.uses_own_code
    function, blobs = _code(workflow, pickle)
    found.spec |= {"kind": WORKFLOW, "workflow": function}
    found.blobs.update(blobs)
    found.uses_own_code = found.uses_own_code or is_own(function["source"])
    del found.spec["hash"], found.spec["on_change"]
    seal(found.spec, spec)
    return found


def _code(
    workflow: WorkflowDefinition, pickle: Callable[[Any], bytes] | None
) -> tuple[dict[str, Any], dict[str, bytes]]:  # fmt: skip
    """What a workflow's sessions do, in their specification, and the code it needs by its SHA-256."""
    if workflow.definition is not None:
        source, blobs = sourced("definitions", loaded, pickle)
        return {"name": workflow.name, "source": source, "definition": to_data(workflow.definition)}, blobs
    source, blobs = sourced(f"workflow {workflow.name!r}", workflow.function, pickle)
    return {"name": workflow.name, "source": source, **fingerprint(workflow.function)}, blobs


def _tool_names(tools: Sequence[Any]) -> list[str]:
    """What a step may call these tools; what is none is reported when they are compiled."""
    found: list[str] = []
    for item in tools:
        tool = had("tools", item)
        if _is_tool(tool):
            found.append(tool.__understudy_tool__.name)
        elif isinstance(tool, str):
            found += TOOL_GROUPS.get(tool, (tool,))
    return found


def _is_tool(item: Any) -> bool:
    return isinstance(getattr(item, "__understudy_tool__", None), ToolDefinition)


def _once(items: list[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if all(item is not other for other in found):
            found.append(item)
    return found


def _named(function: Callable[..., Any]) -> Iterator[Any]:
    """Tools, agents and workflows that a function's code names, or a function that it calls."""
    seen: set[int] = set()
    todo: list[Any] = [function]
    while todo and len(seen) < MOST_FUNCTIONS:
        item = todo.pop()
        if not isinstance(item, types.FunctionType) or id(item) in seen:
            continue
        seen.add(id(item))
        for found in _values(item):
            if _is_tool(found) or isinstance(found, AgentSpec) or definition_of(found) is not None:
                if found is not function:
                    yield found
            elif isinstance(found, types.FunctionType) and found.__module__ == function.__module__:
                todo.append(found)


def _values(function: types.FunctionType) -> Iterator[Any]:
    """What the names in a function's code stand for, those of the functions within it included."""
    outer = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in (*code.co_names, *code.co_freevars):
            if name in outer:
                try:
                    yield outer[name].cell_contents
                except ValueError:  # it has no value yet
                    continue
            elif name in function.__globals__:
                found = function.__globals__[name]
                yield found
                if isinstance(found, types.ModuleType):
                    yield from (getattr(found, other) for other in code.co_names if hasattr(found, other))
