"""The manifest of a session: what of its specification must be the same for it to be the same agent."""

from __future__ import annotations

import json
from typing import Any

UNRELATED = {"v", "hash", "on_change", "packages"}
"""Fields that say nothing about the agent."""


def changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, ...]:
    """What differs between two compiled specifications, by name: `model`, `tools.lookup`, `hooks.check`,
    `agents.scout`; sorted. `hooks`: they are called in another order.

    A field that only one of them has, other than `output`, is no difference: another version of Understudy compiled the
    other one, and what it did not know has its default. Code that travels by value is compared by its source, since its
    bytes differ from process to process.
    """
    old, new = json.loads(json.dumps(old, default=str)), json.loads(json.dumps(new, default=str))
    found = {
        name for name in (old.keys() & new.keys()) - UNRELATED - {"tools", "hooks", "agents"} if old[name] != new[name]
    }
    if old.get("output") != new.get("output"):
        found.add("output")
    for kind in ("tools", "hooks"):
        before, after = ({item["name"]: _function(item) for item in spec.get(kind) or ()} for spec in (old, new))
        found |= {f"{kind}.{name}" for name in _differing(before, after)}
        if kind == "hooks" and [name for name in before if name in after] != [name for name in after if name in before]:
            found.add(kind)
    agents = [spec.get("agents") or {} for spec in (old, new)]
    found |= {f"agents.{name}" for name in agents[0].keys() ^ agents[1].keys()}
    found |= {
        f"agents.{name}" for name in agents[0].keys() & agents[1].keys() if changes(agents[0][name], agents[1][name])
    }
    return tuple(sorted(found))


def _function(item: dict[str, Any]) -> dict[str, Any]:
    """A tool or a hook without what differs from process to process."""
    return {**item, "source": "value" if "blob" in (item.get("source") or {}) else item.get("source")}


def _differing(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> set[str]:
    both = old.keys() & new.keys()
    return (old.keys() ^ new.keys()) | {
        name
        for name in both
        if any(old[name][field] != new[name][field] for field in old[name].keys() & new[name].keys())
    }
