"""Tools: functions that a model may call.

`@tool` marks a function. In the driver, `describe` turns it into a specification: a plain dictionary, stored with the
session. In a frame, `load` turns the specification back into something callable. Only `describe` needs pydantic; a
frame imports it when a parameter's type can't be had from JSON otherwise (an Enum, a dataclass, a model).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, overload

from understudy.agents import SEND_TO_AGENT, SPAWN_AGENT, START_AGENT
from understudy.commands import COMMAND_TOOLS, READ_COMMAND, START_COMMAND
from understudy.errors import InvalidSpec, ToolError
from understudy.handoffs import HANDOFF, tool_name
from understudy.skills import LOAD_SKILL
from understudy.suggestions import did_you_mean
from understudy.workflows import CREATE_WORKFLOW, WORKFLOW_STATUS

from .agents import SEND_TO_AGENT_SPEC, START_AGENT_SPEC
from .asking import REQUEST_USER_INPUT, REQUEST_USER_INPUT_SPEC
from .code import fingerprint, import_reference, packed, resolve, unloadable, unpacked
from .jobs import JOBS_GROUP, JOBS_TOOLS
from .notebook import NOTEBOOK_GROUPS, NOTEBOOK_TOOLS
from .parameters import ToolContext as ToolContext
from .parameters import context_parameter, convertible_types, has_local_dataclass, parameters_schema, parse_docstring
from .recall import RECALL_TOOLS
from .sandboxed import CONTEXT, in_sandbox
from .waking import STORE_TOOLS
from .workflow_tools import CREATE_WORKFLOW_SPEC, WORKFLOW_STATUS_SPEC, WORKFLOWS_GROUP

BUILTIN_TOOLS: dict[str, str] = {
    "read_file": "understudy.actors.files:read_file",
    "write_file": "understudy.actors.files:write_file",
    "edit_file": "understudy.actors.files:edit_file",
    "apply_patch": "understudy.actors.patch_tool:apply_patch",
    "view_image": "understudy.actors.viewing:view_image",
    "glob": "understudy.actors.files:glob",
    "grep": "understudy.actors.files:grep",
    "bash": "understudy.actors.shell:bash",
    LOAD_SKILL: "understudy.actors.skills:load_skill",
    "web_fetch": "understudy.actors.web_tool:web_fetch",
    START_COMMAND: "understudy.actors.commands:start_command",
    READ_COMMAND: "understudy.actors.commands:read_command",
}
"""Where each built-in function is; looked up by name so that a frame imports only what it uses."""

_FILES = ("read_file", "write_file", "edit_file", "apply_patch", "glob", "grep")
_CORE = (*_FILES, "bash", "todo", "current_time", REQUEST_USER_INPUT)
_HISTORY = ("recall", "read_message")
_AGENTS = (START_AGENT, SEND_TO_AGENT)

TOOL_GROUPS: dict[str, tuple[str, ...]] = {
    "core": _CORE,
    "explore": ("read_file", "glob", "grep"),
    "full": (
        *_CORE, *NOTEBOOK_GROUPS["notes"], *_HISTORY, "wait", "schedule_wakeup", SPAWN_AGENT, *_AGENTS,
        *COMMAND_TOOLS, *JOBS_GROUP["jobs"],
    ),
    "files": _FILES,
    "history": _HISTORY,
    **NOTEBOOK_GROUPS,
    "agents": _AGENTS,
    "commands": (*COMMAND_TOOLS, *JOBS_GROUP["jobs"]),
    **JOBS_GROUP,
    **WORKFLOWS_GROUP,
}  # fmt: skip
"""Names that stand for several tools. The presets are `core` (work on files), `explore` (read only) and `full`: all but
what needs more than a name to be used (`web_fetch` its hosts, workflows their limits, `view_image` a model that sees, a
board somebody to share it)."""

Function = TypeVar("Function", bound=Callable[..., Any])
OnCrash = str | Callable[..., Any]


@dataclass(frozen=True)
class ToolDefinition:
    """What `@tool` knows about a function.

    Attributes:
        on_crash: what happens to a call that had started when its process died. `report`: the model reads that the
            outcome is unknown. `rerun`: it runs again. `ask`: a person decides (`Session.answer`). A function: it is
            called with the call's `ToolContext` to find out what happened, and its result is the call's.
        timeout: seconds for one call; None for the agent's `tool_timeout`.
        approve: a person must approve each call before it is executed (`Session.approve`).
        sandbox: it runs in a process of its own in the agent's sandbox (`AgentSpec.sandbox`, docs/sandbox.md), where
            `ToolContext.progress` and `emit` do nothing. A function for `on_crash` runs in the session's process.
        resources: what a process of its own needs that executes a call, by Ray's names; empty: the session's process
            does.
    """

    name: str
    description: str
    on_crash: OnCrash
    timeout: float | None
    function: Callable[..., Any] = field(repr=False)
    approve: bool = False
    sandbox: bool = False
    resources: dict[str, float] = field(default_factory=dict, hash=False)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the parameters; see `parameters_schema`. Imports pydantic."""
        return parameters_schema(self.name, self.function)

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached schema: the same function must serialize to the same blob before and after it was read.
        return {name: value for name, value in self.__dict__.items() if name != "schema"}


@overload
def tool(function: Function, /) -> Function: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    on_crash: OnCrash = "report",
    timeout: float | None = None,
    approve: bool = False,
    sandbox: bool = False,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: float | None = None,
    resources: Mapping[str, float] | None = None,
) -> Callable[[Function], Function]: ...


def tool(
    function: Function | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    on_crash: OnCrash = "report",
    timeout: float | None = None,
    approve: bool = False,
    sandbox: bool = False,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: float | None = None,
    resources: Mapping[str, float] | None = None,
) -> Any:
    """Mark a function, plain or async, as a tool. It stays what it is and can be called directly.

    Args:
        name: what the model calls it; the function's name by default.
        description: the docstring without its sections by default.
        on_crash: `report`, `rerun`, `ask` or a function that finds out; see `ToolDefinition`.
        timeout: seconds for one call.
        approve: a person must approve each call before it is executed.
        sandbox: it runs in the agent's sandbox; the function must be importable, at the top level of a module.
        num_cpus, num_gpus, memory, resources: what a call needs; `memory` in bytes, `resources` by names of your own.
            With any of them each call is a Ray task: a process of its own, wherever the cluster has these, which waits
            for them and ends with the call (docs/tools.md).

    Raises:
        InvalidSpec: one of these is not possible, or the function can't be marked.
    """

    def mark(target: Function) -> Function:
        chosen = str(getattr(target, "__name__", "")) if name is None else name
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", chosen):
            raise InvalidSpec(f"tool name {chosen!r} must be 1 to 64 letters, digits, underscores or hyphens.")
        if not callable(on_crash) and on_crash not in ("report", "rerun", "ask"):
            raise InvalidSpec(f"tool {chosen!r}: on_crash={on_crash!r} must be 'report', 'rerun', 'ask' or a function.")
        if timeout is not None and not 0 < timeout < float("inf"):
            raise InvalidSpec(f"tool {chosen!r}: timeout={timeout!r} must be a positive number of seconds.")
        text = description if description is not None else parse_docstring(target)[0]
        wanted = {"num_cpus": num_cpus, "GPU": num_gpus, "memory": memory, **(resources or {})}
        needed = {resource: float(amount) for resource, amount in wanted.items() if amount is not None}
        if not all(resource and 0 < amount < float("inf") for resource, amount in needed.items()):
            raise InvalidSpec(f"tool {chosen!r}: what it needs must be positive numbers; it is {needed!r}.")
        if needed and sandbox:
            raise InvalidSpec(f"tool {chosen!r}: what is executed in the sandbox can't ask for resources.")
        definition = ToolDefinition(chosen, text, on_crash, timeout, target, approve, sandbox, needed)
        try:
            target.__understudy_tool__ = definition  # type: ignore[attr-defined]
        except AttributeError:
            raise InvalidSpec(f"{target!r} can't be a tool itself: wrap it in a function of your own.") from None
        return target

    return mark if function is None else mark(function)


def describe(
    item: Callable[..., Any] | str, *, pickle: Callable[[Any], bytes] | None
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Turn one entry of `AgentSpec.tools` into tool specifications, and the code they need by its SHA-256.

    A function that can be imported is referred to; one that can't (of `__main__`, a local one, a lambda, a bound
    method) travels by value, serialized with `pickle`.

    Raises:
        InvalidSpec: the name is unknown, the entry is no tool, or it must travel by value and `pickle` is None.
    """
    if isinstance(item, str):
        problem = tool_name_problem(item)
        if problem is not None:
            raise InvalidSpec(f"{problem}.")
        return [_describe_builtin(name) for name in TOOL_GROUPS.get(item, (item,))], {}
    definition = getattr(item, "__understudy_tool__", None)
    if not isinstance(definition, ToolDefinition):
        raise InvalidSpec(f"{item!r} is neither the name of a tool nor a function decorated with @tool.")
    # A method, or a function that another decorator wrapped around the marked one, is called as it was given.
    definition = definition if definition.function is item else replace(definition, function=item)
    reference = import_reference(item)
    if reference is not None:
        return [_spec(definition, {"import": reference}) | fingerprint(item)], {}
    if definition.sandbox:
        raise InvalidSpec(
            f"tool {definition.name!r} is for the sandbox, which imports it: define it at the top level of a module."
        )
    types_by_name = convertible_types(definition.name, item)
    if any(has_local_dataclass(kind) for kind in types_by_name.values()):
        raise InvalidSpec(
            f"tool {definition.name!r} takes a dataclass that other processes can't import, and dataclasses can't be "
            "sent by value: define it in a module, or make it a pydantic model."
        )
    source, blobs = packed(f"tool {definition.name!r}", item, (item, types_by_name), pickle)
    return [_spec(definition, source) | fingerprint(item)], blobs


def _describe_builtin(name: str) -> dict[str, Any]:
    if name in _LOOP_TOOLS:
        return dict(_LOOP_TOOLS[name])
    return _spec(resolve(BUILTIN_TOOLS[name]).__understudy_tool__, {"builtin": name})


_SPAWN_AGENT_SPEC: dict[str, Any] = {
    "name": SPAWN_AGENT,
    "description": "Give a task to a sub-agent that works on it alone, and wait for its final answer. "
    "Several calls in one turn run at the same time.",
    "parameters": {
        "type": "object",
        "properties": {
            "agent": {"type": "string", "description": "Name of the agent to create; leave out for the default one."},
            "task": {
                "type": "string",
                "minLength": 1,
                "description": "The whole task: the sub-agent sees nothing of this conversation.",
            },
        },
        "required": ["task"],
        "additionalProperties": False,
    },
    "on_crash": "rerun",
    "timeout": None,
    "source": {"builtin": SPAWN_AGENT},
}


def handoff_spec(agent: str) -> dict[str, Any]:
    """The specification of the tool by which a model hands the session off to an agent."""
    return {
        "name": tool_name(agent),
        "description": f"Hand this conversation off to the agent {agent}, which sees all of it and goes on instead of "
        "you: your part ends with this turn. Call it once in a turn.",
        "parameters": {
            "type": "object",
            "properties": {
                "reason": {"type": "string", "description": "Why, in a few words; it is kept in the log."},
            },
            "additionalProperties": False,
        },
        "on_crash": "rerun",
        "timeout": None,
        "source": {"builtin": HANDOFF, "agent": agent},
    }


_LOOP_TOOLS = {
    SPAWN_AGENT: _SPAWN_AGENT_SPEC,
    REQUEST_USER_INPUT: REQUEST_USER_INPUT_SPEC,
    **STORE_TOOLS,
    **RECALL_TOOLS,
    **NOTEBOOK_TOOLS,
    START_AGENT: START_AGENT_SPEC,
    SEND_TO_AGENT: SEND_TO_AGENT_SPEC,
    **JOBS_TOOLS,
    CREATE_WORKFLOW: CREATE_WORKFLOW_SPEC,
    WORKFLOW_STATUS: WORKFLOW_STATUS_SPEC,
}
"""Tools that the session loop executes itself."""


def tool_names() -> list[str]:
    """The names that `AgentSpec.tools` may have: groups, and tools that come with Understudy."""
    return [*TOOL_GROUPS, *BUILTIN_TOOLS, *_LOOP_TOOLS]


def tool_name_problem(name: str) -> str | None:
    """What is wrong with the name of a tool or a group; None if nothing is."""
    known = tool_names()
    if name in known:
        return None
    meant = did_you_mean(name, known)
    others = "`understudy tools` lists all" if meant else f"known: {', '.join(known)}"
    return f"no tool is named {name!r}{meant}; {others}"


def builtin(spec: dict[str, Any]) -> str | None:
    """The built-in tool that this specification is of: tools of other people may have its name."""
    name: str | None = spec["source"].get("builtin")
    return name


def _spec(definition: ToolDefinition, source: dict[str, str]) -> dict[str, Any]:
    return {
        "name": definition.name,
        "description": definition.description,
        "parameters": definition.schema,
        "on_crash": "reconcile" if callable(definition.on_crash) else definition.on_crash,
        "timeout": definition.timeout,
        "source": source,
        **({"approve": True} if definition.approve else {}),
        **({"sandbox": True} if definition.sandbox else {}),
        **({"task": definition.resources} if definition.resources else {}),
    }


@dataclass(frozen=True, eq=False)
class LoadedTool:
    """A tool in a frame, ready to be executed.

    Attributes:
        parameters: JSON schema that arguments must satisfy.
        context_parameter: name of the parameter that takes the `ToolContext`.
        reconcile: finds out what became of a call; None where the specification does not say so, or the function that
            did is gone: nobody knows then, and that is what the model reads.
        converted: parameters whose values pydantic builds, with their types.
        from_server: the schema is an MCP server's.
    """

    name: str
    function: Callable[..., Any]
    is_async: bool
    parameters: dict[str, Any]
    context_parameter: str | None = None
    reconcile: Callable[..., Any] | None = None
    converted: dict[str, Any] = field(default_factory=dict)
    from_server: bool = False

    @cached_property
    def validator(self) -> Any:
        """See `argument_validator`."""
        from .argument_schemas import argument_validator

        return argument_validator(self.parameters, from_server=self.from_server)

    @cached_property
    def adapters(self) -> dict[str, Any]:
        """A pydantic `TypeAdapter` for each converted parameter."""
        if not self.converted:
            return {}
        from pydantic import TypeAdapter

        return {name: TypeAdapter(kind) for name, kind in self.converted.items()}


def load(
    spec: dict[str, Any], read_blob: Callable[[str], bytes], unpickle: Callable[[bytes], Any] | None
) -> LoadedTool:
    """Make a specified tool callable in this process.

    Schema, timeout and crash policy are the specification's: code that changed since can't widen what a call may do.

    Raises:
        ToolError: the code can't be imported or read, or is no tool any more; the message says which and why.
    """
    name, source = spec["name"], spec["source"]
    try:
        if "blob" in source:
            function, converted = unpacked(source["blob"], read_blob, unpickle)
        else:
            function = resolve(source["import"] if "import" in source else BUILTIN_TOOLS[source["builtin"]])
            converted = convertible_types(name, function)
    except Exception as error:
        raise unloadable(f"tool {name!r}", source, error) from error
    definition = getattr(function, "__understudy_tool__", None)
    if not isinstance(definition, ToolDefinition):
        raise ToolError(f"tool {name!r} can't be loaded here: the function is no longer decorated with @tool.")
    sandbox = spec.get("sandbox", False)
    reconcile = definition.on_crash if spec["on_crash"] == "reconcile" and callable(definition.on_crash) else None
    return LoadedTool(
        name=name,
        function=in_sandbox(spec) if sandbox else function,
        is_async=sandbox or inspect.iscoroutinefunction(function),
        parameters=spec["parameters"],
        context_parameter=CONTEXT if sandbox else context_parameter(function),
        reconcile=reconcile,
        converted={} if sandbox else converted,
    )
