"""The manifest of a session: what of its specification must be the same for it to be the same agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

FUNCTIONS = ("tools", "hooks")

AGENTS = ("agents", "handoffs")
"""Fields with the specifications of other agents, by name."""

UNRELATED = {"v", "hash", "on_change", "packages"}
"""Fields that say nothing about the agent."""


def changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, ...]:
    """What differs between two compiled specifications, by name: `model`, `tools.lookup`, `hooks.check`,
    `skills.pdf`, `agents.scout`; sorted. `hooks`: they are called in another order.

    A field that only one of them has, other than `output`, `skills`, `mcp_servers` and `worktree`, is no difference:
    another version of Understudy compiled the other one, and what it did not know has its default. Code that travels by
    value is compared by its source, since its bytes differ from process to process.
    """
    old, new = json.loads(json.dumps(old, default=str)), json.loads(json.dumps(new, default=str))
    found = {
        name
        for name in (old.keys() & new.keys()) - UNRELATED - {*FUNCTIONS, *AGENTS, "memory", "skills", "workflow"}
        if old[name] != new[name]
    }
    found |= {name for name in ("output", "mcp_servers", "worktree") if old.get(name) != new.get(name)}
    workflows = [without_bytes(spec["workflow"]) if "workflow" in spec else None for spec in (old, new)]
    found |= {"workflow"} if workflows[0] != workflows[1] else set()
    found |= {"memory"} if _memory(old) != _memory(new) else set()
    for kind in FUNCTIONS:
        before, after = ({item["name"]: without_bytes(item) for item in spec.get(kind) or ()} for spec in (old, new))
        found |= {f"{kind}.{name}" for name in _differing(before, after)}
        if kind == "hooks" and [name for name in before if name in after] != [name for name in after if name in before]:
            found.add(kind)
    before, after = ({skill["name"]: skill for skill in spec.get("skills") or ()} for spec in (old, new))
    found |= {f"skills.{name}" for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for kind in AGENTS:
        before, after = (spec.get(kind) or {} for spec in (old, new))
        found |= {f"{kind}.{name}" for name in before.keys() ^ after.keys()}
        found |= {f"{kind}.{name}" for name in before.keys() & after.keys() if changes(before[name], after[name])}
    return tuple(sorted(found))


def _memory(spec: dict[str, Any]) -> dict[str, Any] | None:
    """What a specification says of the agent's memory; versions that did not know it had none."""
    memory: dict[str, Any] | None = spec.get("memory")
    return memory and {**memory, "providers": [without_bytes(item) for item in memory.get("providers") or ()]}


def below(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The specifications of the agents that one names: its sub-agents, and those that may be handed its session."""
    for kind in AGENTS:
        yield from (spec.get(kind) or {}).values()


def with_below(spec: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The specification with these changed."""
    fields = {kind: spec[kind] for kind in AGENTS if spec.get(kind) is not None}
    changed = {kind: {name: change(agent) for name, agent in agents.items()} for kind, agents in fields.items()}
    return {**spec, **changed}


def functions(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What of a compiled specification has code: `tool`, `hook` or `memory provider`, and its entry."""
    for kind in FUNCTIONS:
        for item in spec.get(kind) or ():
            yield kind.removesuffix("s"), item
    for item in (spec.get("memory") or {}).get("providers") or ():
        yield "memory provider", item
    if spec.get("workflow"):
        yield "workflow", spec["workflow"]


def is_guarded(spec: dict[str, Any]) -> bool:
    """Whether hooks run beside the agent's model calls."""
    return any(hook.get("parallel") for hook in spec.get("hooks") or ())


def without_bytes(item: dict[str, Any]) -> dict[str, Any]:
    """A tool, a hook or a memory provider without what differs from process to process."""
    return {**item, "source": "value" if "blob" in (item.get("source") or {}) else item.get("source")}


def _differing(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> set[str]:
    both = old.keys() & new.keys()
    return (old.keys() ^ new.keys()) | {
        name
        for name in both
        if any(old[name][field] != new[name][field] for field in old[name].keys() & new[name].keys())
    }
