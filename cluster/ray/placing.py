"""What a placement's definition means to Ray, and whether any node of the cluster could ever have it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

RAY_NAMES = {"num_cpus": "CPU"}

CPU_SLIVER = 0.01
"""Frames and services ask for a sliver of CPU, never zero: the autoscaler reaps nodes whose actors ask for nothing."""


def actor_options(definition: dict[str, Any]) -> dict[str, Any]:
    """Ray's options for a frame of this placement, beside those that every frame has."""
    options: dict[str, Any] = {}
    custom = dict(definition.get("resources") or {})
    for name, option in (("num_cpus", "num_cpus"), ("GPU", "num_gpus"), ("memory", "memory")):
        if name in custom:
            options[option] = custom.pop(name)
    if custom:
        options["resources"] = custom
    if definition.get("labels"):
        options["label_selector"] = definition["labels"]
    if definition.get("runtime_env"):
        options["runtime_env"] = definition["runtime_env"]
    return options


def variables(definition: dict[str, Any]) -> list[str]:
    """What a frame's tools get of its environment beside what any program needs: what was named or set for them."""
    own = (definition.get("runtime_env") or {}).get("env_vars") or {}
    return sorted({*(definition.get("environment") or ()), *own})


def obstacle(definition: dict[str, Any], nodes: Iterable[dict[str, Any]]) -> str:
    """Why no node could have a frame of this placement, even if it were empty but for its node service; nothing if one
    could.

    Args:
        nodes: as `ray.nodes()` tells them.
    """
    wanted = {RAY_NAMES.get(name, name): amount for name, amount in (definition.get("resources") or {}).items()}
    labels = definition.get("labels") or {}
    alive = [node for node in nodes if node["Alive"]]
    suitable = [_usable(node["Resources"]) for node in alive if _matches(labels, node.get("Labels") or {})]
    if not suitable:
        return f"none of {len(alive)} nodes has the labels {labels}"
    if any(all(usable.get(name, 0) >= amount for name, amount in wanted.items()) for usable in suitable):
        return ""
    most = {name: max(usable.get(name, 0) for usable in suitable) for name in wanted}
    short = [
        f"{name} {amount:g} (most there is: {most[name]:g})" for name, amount in wanted.items() if most[name] < amount
    ]
    return f"no node has {', '.join(short) or 'all of ' + ', '.join(wanted)}"


def _usable(resources: dict[str, float]) -> dict[str, float]:
    """What of a node's resources its node service and gateway leave."""
    return {**resources, "CPU": resources.get("CPU", 0) - 2 * CPU_SLIVER}


def _matches(selectors: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether a node's labels satisfy selectors in Ray's notation: `value`, `!value`, `in(a,b)`, `!in(a,b)`."""
    for name, selector in selectors.items():
        negated = selector.startswith("!")
        text = selector.removeprefix("!")
        several = re.fullmatch(r"in\((.*)\)", text)
        values = [value.strip() for value in several.group(1).split(",")] if several else [text]
        if (labels.get(name) in values) is negated:
            return False
    return True
