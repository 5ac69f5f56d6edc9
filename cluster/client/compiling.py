"""From an `AgentSpec` to what the store keeps: plain data, with its code by reference or by hash."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

from msgspec import to_builtins

from understudy.access import Sandbox, Worktree
from understudy.actors.approval import can_be_approved
from understudy.actors.delegating import offered
from understudy.actors.hooks import describe_hook
from understudy.actors.providers import describe_provider
from understudy.actors.tools import builtin, describe, handoff_spec
from understudy.actors.typed_output import FINAL_ANSWER
from understudy.actors.workflow_tools import limited
from understudy.agents import SPAWN_AGENT, START_AGENT
from understudy.config import OFFLINE_MODEL, has_credentials, is_secret_name
from understudy.errors import InvalidConfiguration, InvalidSpec, ModelProfileMissing
from understudy.identifiers import digest
from understudy.manifest import AGENTS, below, without_bytes
from understudy.mcp_servers import McpServer
from understudy.placement import DEFAULT, placement_key
from understudy.problem_texts import listed
from understudy.skills import LOAD_SKILL
from understudy.spec import AgentSpec, Budget, Delegation, WorkflowLimits, each
from understudy.windows import known_window
from understudy.workflows import CREATE_WORKFLOW
from understudy.worktrees import of_repository

from .extensions import had
from .handoff_targets import handoff_targets, named, own_handoff_problems
from .output_schema import output_of
from .packages import PY_MODULES, RAYS_OWN, addresses, package_key, within_job
from .skills import read_skills, tools_of
from .workflow_limits import workflow_limit_problems

PLAIN = (
    "max_rounds", "max_continuations", "repeat_limit", "tool_timeout", "parallel_tools", "max_depth", "deadline",
    "stall", "restart_type", "on_parent_end", "lifecycle", "shutdown",
)  # fmt: skip
"""Fields that are compiled as they are."""

UNUSUAL = {
    "follow_ups": "queue", "approve_timeout": None, "approve_default": "reject", "answer_timeout": None,
    "answer_default": None, "description": "", "priority": None,
}  # fmt: skip
"""Fields that are left out where they say what is usual, as older versions did."""

PLACING = {"isolation": "shared", "resources": {}, "labels": {}, "environment": (), "runtime_env": {}}
"""Fields that decide which processes a session runs in; left out where they say nothing, as older versions did."""

try:
    _STARTED_IN = os.getcwd()
except FileNotFoundError:  # it was removed: relative entries of `sys.path` lead nowhere
    _STARTED_IN = ""
"""Where a relative entry of `sys.path` leads: a driver may go elsewhere before its first `spawn`."""


def by_value(item: Any) -> bytes:
    """A function as its code and what that refers to."""
    from ..ray.pickling import dumps  # which loads Ray

    return dumps(item)


class Compiled:
    """A specification ready to be stored.

    Attributes:
        spec: JSON-compatible; `spec["hash"]` identifies it.
        blobs: code by hash that must be stored with it.
        uses_own_code: a tool or a hook comes from the driver's code, so frames need the driver's code path.
    """

    def __init__(self, spec: dict[str, Any], blobs: dict[str, bytes], uses_own_code: bool) -> None:
        self.spec = spec
        self.blobs = blobs
        self.uses_own_code = uses_own_code


def compile_spec(
    spec: AgentSpec, *, model: str, profile: str | None, pickle: Callable[[Any], bytes] | None = by_value
) -> Compiled:  # fmt: skip
    """Resolve a specification's defaults, tools, hooks and sub-agents.

    Args:
        model, profile: where the spec names none; `profile` is None when no credentials are known.
        pickle: serializes functions that can't be imported elsewhere; None: there may be none.

    Raises:
        InvalidSpec: a tool is unknown, is not allowed, or can't travel; a hook can't; or there is no such output.
        ModelProfileMissing: the model needs credentials, and there are none.
    """
    others, problems = handoff_targets(spec)
    found = _compiled(spec, problems, model=model, profile=profile, pickle=pickle)
    if not others:
        return found
    model, profile, table = spec.model or model, spec.profile or profile, {}
    for name, agent in others.items():
        with of_agent(f"handoffs.{name}"):
            target = _in_its_workspace(spec, within(spec, agent))
            other = _compiled(target, [], model=model, profile=profile, pickle=pickle)
        table[name] = other.spec
        found.blobs.update(other.blobs)
        found.uses_own_code = found.uses_own_code or other.uses_own_code
    del found.spec["hash"], found.spec["on_change"]
    found.spec["handoffs"] = table
    seal(found.spec, spec)
    return found


def _compiled(
    spec: AgentSpec, more: list[dict[str, str]], *, model: str, profile: str | None,
    pickle: Callable[[Any], bytes] | None,
) -> Compiled:  # fmt: skip
    """An agent without those that it may be handed off to.

    Args:
        more: what is wrong with it beside its own fields.
    """
    model = spec.model or model
    chosen = spec.profile or (OFFLINE_MODEL if model == OFFLINE_MODEL else profile)
    if chosen is None:
        raise ModelProfileMissing(f"agent {spec.name!r} uses model {model!r}, and no key is set")
    tools: list[dict[str, Any]] = []
    blobs: dict[str, bytes] = {}
    for item in tools_of(spec):
        found, code = describe(had("tools", item), pickle=pickle)
        tools += found
        blobs.update(code)
    hooks: list[dict[str, Any]] = []
    for item in spec.hooks:
        one, code = describe_hook(had("hooks", item), pickle=pickle)
        hooks.append(one)
        blobs.update(code)
    output = output_of(spec)
    memory, code = _memory(spec, pickle)
    blobs.update(code)
    providers = memory["providers"] if memory else []
    skills = read_skills(spec.skills)
    blobs.update(skills.blobs)
    problems = more + skills.problems + function_problems(spec, tools, hooks, providers)
    if problems:
        raise _refusal(problems)
    tools = _with_approval(spec, [*tools, *map(handoff_spec, named(spec))])
    agents: dict[str, Any] = {}
    own_code = any(is_own(function["source"]) for function in (*tools, *hooks, *providers))
    for agent in spec.agents:
        with of_agent(f"agents.{agent.name}"):
            child = compile_spec(within(spec, agent), model=model, profile=spec.profile or profile, pickle=pickle)
        agents[agent.name] = child.spec
        blobs.update(child.blobs)
        own_code = own_code or child.uses_own_code
    delegation, workflows = _delegation(spec.delegation), _workflows(spec.workflows)
    compiled = {
        "v": 1,
        "name": spec.name,
        "instructions": spec.instructions,
        "model": model,
        "profile": chosen,
        "tools": [limited(offered(tool, delegation, agents), workflows) for tool in tools],
        "agents": agents,
        "workspace": os.path.abspath(spec.workspace) if isinstance(spec.workspace, str) else None,
        "parameters": spec.parameters,
        "budget": _limits(spec.budgets),
        "restart": spec.restart.model_dump(),
        "context": {**spec.context.model_dump(), "window": spec.context.window or known_window(model)},
        "supervision": spec.supervision.model_dump(),
        "metadata": spec.metadata,
        **{name: getattr(spec, name) for name in PLAIN},
        **({"hooks": hooks} if hooks else {}),
        **({"output": output} if output else {}),
        **({"skills": to_builtins(skills.skills)} if skills.skills else {}),
        **({"memory": memory} if memory else {}),
        **({"delegation": delegation} if delegation else {}),
        **({"workflows": workflows} if workflows else {}),
        **({"sandbox": spec.sandbox.model_dump(exclude_defaults=True)} if spec.sandbox != Sandbox() else {}),
        **({"web": spec.web.model_dump()} if spec.web else {}),
        **({"worktree": _worktree(spec.workspace)} if isinstance(spec.workspace, Worktree) else {}),
        **({"mcp_servers": list(map(partial(_server, spec), spec.mcp_servers))} if spec.mcp_servers else {}),
        **{name: getattr(spec, name) for name, default in (UNUSUAL | PLACING).items()
           if getattr(spec, name) != default},
    }  # fmt: skip
    seal(compiled, spec)
    return Compiled(compiled, blobs, own_code)


def within(spec: AgentSpec, agent: AgentSpec) -> AgentSpec:
    """An agent that another one names, with what it has from that one."""
    return agent.model_copy(update={"priority": spec.priority}) if agent.priority is None else agent


def _in_its_workspace(spec: AgentSpec, agent: AgentSpec) -> AgentSpec:
    """An agent that another one may hand its session off to: what has a worktree is the session."""
    own, given = agent.workspace, spec.workspace
    if not isinstance(own, Worktree) or own.repository is not None or given is None:
        return agent
    found = own.model_copy(update={"repository": given}) if isinstance(given, str) else given
    return agent.model_copy(update={"workspace": found})


def _worktree(wanted: Worktree) -> dict[str, Any]:
    """The compiled form of a worktree; without a repository it is completed where a sub-agent is created."""
    directory = os.path.abspath(wanted.directory) if wanted.directory is not None else None
    if wanted.repository is not None:
        return of_repository(os.path.abspath(wanted.repository), wanted.base, wanted.on_end, directory)
    return {"repository": None, "base": wanted.base, "on_end": wanted.on_end, "directory": directory}


def require_own_workspace(spec: AgentSpec) -> None:
    """Refuse an agent for a session that no other one starts whose worktree would be of a parent's workspace."""
    if isinstance(spec.workspace, Worktree) and spec.workspace.repository is None:
        problem = "a session without a parent needs Worktree(repository=…): the top of the git repository"
        raise _refusal([{"field": "workspace", "problem": problem}])


@contextmanager
def of_agent(place: str) -> Iterator[None]:
    """Say of problems which of the agents has them that another one names."""
    try:
        yield
    except InvalidSpec as error:
        problems = error.details.get("problems")
        if not problems:
            raise InvalidSpec(f"{place}: {error.message}") from error
        problems = [{**problem, "field": f"{place}.{problem['field']}"} for problem in problems]
        raise _refusal(problems) from error


def _refusal(problems: list[dict[str, str]]) -> InvalidSpec:
    return InvalidSpec(f"{listed(problems)}.", details={"problems": problems})


def seal(compiled: dict[str, Any], spec: AgentSpec) -> None:
    """Note what identifies a compiled specification."""
    compiled["hash"] = digest(json.dumps(_identity(compiled), sort_keys=True, default=str))
    compiled["on_change"] = spec.on_change  # not a part of what the agent is


def _memory(
    spec: AgentSpec, pickle: Callable[[Any], bytes] | None
) -> tuple[dict[str, Any] | None, dict[str, bytes]]:  # fmt: skip
    """The compiled memory of a specification, and the code that its providers need."""
    if spec.memory is None:
        return None, {}
    providers: list[dict[str, Any]] = []
    blobs: dict[str, bytes] = {}
    for item in spec.memory.providers:
        one, code = describe_provider(had("memory", item), pickle=pickle)
        providers.append(one)
        blobs.update(code)
    return {**spec.memory.model_dump(exclude={"providers"}), "providers": providers}, blobs


def _limits(budgets: tuple[Budget, ...]) -> list[dict[str, Any]] | None:
    return [{"scope": budget.scope, **budget.limits()} for budget in budgets] or None


def _delegation(given: Delegation | None) -> dict[str, Any] | None:
    if given is None:
        return None
    made = {"tools": list(given.tools), "models": list(given.models), "budget": _limits(each(given.budget))}
    return {**made, "output": True} if given.output else made


def _workflows(given: WorkflowLimits | None) -> dict[str, Any] | None:
    if given is None:
        return None
    named = {name: list(getattr(given, name)) for name in ("tools", "agents", "models")}
    return {**named, "steps": given.steps, "at_once": given.at_once, "budget": _limits(each(given.budget))}


def _server(spec: AgentSpec, server: McpServer) -> dict[str, Any]:
    """The compiled form of an MCP server; its `key` is the same for all that are started in the same way."""
    fields = server.model_dump(mode="json")
    started = {name: fields[name] for name in ("command", "url", "environment", "headers")}
    return {**fields, "key": digest(json.dumps(started, sort_keys=True)), "approve": list(spec.approve)}


def is_own(source: dict[str, str]) -> bool:
    """Whether a function is of the driver's code, not of Understudy."""
    return "blob" in source or not source.get("import", "understudy.").startswith("understudy.")


def _identity(spec: dict[str, Any]) -> dict[str, Any]:
    """What makes a specification the same: pickled code differs from process to process, so its hash is left out."""
    functions: dict[str, Any] = {
        kind: [without_bytes(item) for item in spec[kind]] for kind in ("tools", "hooks") if kind in spec
    }
    if "memory" in spec:
        functions["memory"] = {**spec["memory"], "providers": list(map(without_bytes, spec["memory"]["providers"]))}
    if "workflow" in spec:
        functions["workflow"] = without_bytes(spec["workflow"])
    agents = {
        kind: {name: agent["hash"] for name, agent in spec[kind].items()} for kind in AGENTS if kind in spec
    }  # fmt: skip
    return {**spec, **functions, **agents}


def function_problems(
    spec: AgentSpec, tools: list[dict[str, Any]], hooks: list[dict[str, Any]], providers: Sequence[dict[str, Any]] = ()
) -> list[dict[str, str]]:  # fmt: skip
    """What is wrong with an agent's tools, hooks and sub-agents beside each other, as `{"field", "problem"}`.

    Args:
        tools, hooks, providers: its own, described.
    """
    names = [tool["name"] for tool in tools]
    each = {
        "tools": names, "hooks": [hook["name"] for hook in hooks], "agents": [agent.name for agent in spec.agents],
        "memory.providers": [provider["name"] for provider in providers], "handoffs": named(spec),
    }  # fmt: skip
    problems = [(field, f"{name!r} is there twice") for field, found in each.items() for name in _twice(found)]
    problems += [("handoffs", problem) for problem in own_handoff_problems(spec, names)]
    if LOAD_SKILL in names and not spec.skills:
        problems.append(("tools", f"{LOAD_SKILL} needs skills"))
    if "web_fetch" in names and spec.web is None:
        problems.append(("tools", "web_fetch needs web=WebPolicy(…), which says what it may fetch"))
    if spec.output_type is not None and FINAL_ANSWER in names:
        problems.append(("tools", f"{FINAL_ANSWER!r} is taken, by the tool that gives an answer of the output type"))
    if spec.agents and not {SPAWN_AGENT, START_AGENT, CREATE_WORKFLOW} & set(names):
        starting = f"{SPAWN_AGENT!r}, {START_AGENT!r} or {CREATE_WORKFLOW!r}"
        problems.append(("agents", f"they can only be used with the tool {starting}"))
    if spec.workspace is None:
        problems += [
            ("agents", f"{agent.name!r} needs a git worktree of this agent's workspace, and it has none")
            for agent in spec.agents
            if isinstance(agent.workspace, Worktree) and agent.workspace.repository is None
        ]
    if spec.delegation is not None:
        unknown = [name for name in spec.delegation.tools if name not in names]
        known = ", ".join(names)
        problems += [("delegation.tools", f"{name!r} is none of the agent's tools: {known}") for name in unknown]
        if spec.delegation.output and "response_format" in spec.parameters:
            problems.append(("delegation.output", "parameters have a response_format, which such a sub-agent has, too"))
        if spec.delegation.output and FINAL_ANSWER in names:
            problems.append(("delegation.output", f"{FINAL_ANSWER!r} is taken, by a tool of the agent's own"))
        if not {"spawn_agent", "start_agent"} & set(names):
            problems.append(("delegation", "it can only be used with the tool 'spawn_agent' or 'start_agent'"))
    problems += workflow_limit_problems(spec, tools)
    possible = _approvable([*tools, *map(handoff_spec, named(spec))])
    servers = tuple(f"{server.name}_" for server in spec.mcp_servers)  # what they offer is not known here
    for pattern in spec.approve:
        if not any(fnmatchcase(name, pattern) for name in possible) and not _may_match(pattern, servers):
            there = f"there are: {', '.join(possible) or 'none'}"
            problems.append(("approve", f"{pattern!r} is no tool of this agent whose calls can be approved; {there}"))
    return [{"field": field, "problem": problem} for field, problem in problems]


def _may_match(pattern: str, beginnings: Iterable[str]) -> bool:
    """Whether a pattern may match a name with one of these beginnings."""
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return any(fixed.startswith(begin) or (begin.startswith(fixed) and fixed != pattern) for begin in beginnings)


def _approvable(tools: list[dict[str, Any]]) -> list[str]:
    """The names of those whose calls a person can approve."""
    return [tool["name"] for tool in tools if can_be_approved(builtin(tool))]


def _with_approval(spec: AgentSpec, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools, with a mark on those whose calls a person must approve."""
    possible = _approvable(tools)
    needed = {name for name in possible if any(fnmatchcase(name, pattern) for pattern in spec.approve)}
    return [{**tool, "approve": True} if tool["name"] in needed else tool for tool in tools]


def _twice(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def place(compiled: dict[str, Any], driver: dict[str, Any]) -> dict[str, bytes]:
    """Note in a compiled specification, and in those of its sub-agents, which placement it has.

    Args:
        driver: `driver_placement`, if the tree has code of its own, else nothing.

    Returns:
        The definitions by their keys, to be stored with the session; so are the packages that they name.
    """
    definition = {**driver, **{name: compiled[name] for name in PLACING if name in compiled}}
    if "runtime_env" in compiled:
        inherited = driver.get("runtime_env", {})
        own = compiled["runtime_env"]
        variables = {**inherited.get("env_vars", {}), **own.get("env_vars", {})}
        definition["runtime_env"] = _harmless({**inherited, **own, "env_vars": variables})
    compiled["placement"] = placement_key(definition) if definition else DEFAULT
    packages = sorted(package_key(address) for address in addresses(definition.get("runtime_env") or {}))
    if packages:
        compiled["packages"] = packages
    found = {compiled["placement"]: json.dumps(definition, sort_keys=True).encode()} if definition else {}
    for agent in below(compiled):
        found.update(place(agent, driver))
    return found


def _harmless(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """A runtime environment without what must not be stored."""
    kept = {name: value for name, value in runtime_env.items() if not name.startswith("_") and value}
    if "env_vars" in kept:
        variables = {name: value for name, value in kept["env_vars"].items() if not is_secret_name(name)}
        kept["env_vars"] = {name: value for name, value in variables.items() if not has_credentials(value)}
    if has_credentials(json.dumps(kept, default=str)):
        raise InvalidConfiguration("the runtime_env has credentials in a URL, which would be stored")
    return kept


def driver_placement(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """The code that this driver's tools need: where it imports its own modules from, relative to its job's working_dir
    if that is in there, and its job's runtime environment."""
    kept = _harmless(runtime_env)
    before, after = own_paths()
    if kept.get("working_dir"):
        # The directory that Ray unpacks into has another name after a restart.
        before, after = ([within_job(path) or path for path in paths] for paths in (before, after))
    return {"code_path": before, **({"code_path_after": after} if after else {}), "runtime_env": kept}


def own_paths() -> tuple[list[str], list[str]]:
    """Where this process imports modules from that a plain process of its interpreter does not: the directory of its
    script (or the one it was started in, with `-m`, standard input or a notebook), `PYTHONPATH`, and what it put into
    `sys.path` itself; without what is not there. Of a job's `py_modules` Ray takes care itself.

    Returns:
        Absolute paths in the order of the search: those before the interpreter's libraries, and those after.
    """
    libraries, before, after = _library_paths(), list[str](), list[str]()
    found, entries = before, list[Any](sys.path)
    for entry in entries:
        if not isinstance(entry, str):  # Python passes over it, too
            continue
        path = os.path.normpath(os.path.join(_STARTED_IN, entry))  # an empty entry is the current directory
        if path in libraries:
            found = after
        elif os.path.isabs(path) and os.path.exists(path) and not (PY_MODULES in path or RAYS_OWN in path):
            found += [path] if path not in (*before, *after) else []
    return before, after


@cache
def _library_paths() -> frozenset[str]:
    """What each process of this interpreter searches: asked of one, as no rule about prefixes is right everywhere."""
    command = [sys.executable, "-P", "-c", "import json, sys; print(json.dumps(sys.path))"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return frozenset(map(os.path.normpath, json.loads(asked.stdout)))
