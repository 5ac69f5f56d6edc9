"""What an archive brings that would run where it is imported, or decides what may run there and with which secrets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from understudy.manifest import below, functions
from understudy.placement import placement_key

from . import code

Definition = Callable[[str], bytes | None]
"""The definition of a placement by its key: the archive's, or else the store's own."""


def brought(
    sessions: Iterable[Mapping[str, Any]], blobs: Mapping[str, bytes], definition: Definition
) -> dict[str, list[str]]:
    """For each session what it brings, in words; what no session refers to is that of session "".

    Args:
        sessions: rows as an archive has them.
        blobs: the archive's code, by hash.
    """
    found: dict[str, list[str]] = {}
    needed: set[str] = set()
    for row in sessions:
        waiting = row.get("next_spec")
        specs = [(row["spec"] or {}, row["placement"])]
        specs += [(waiting["spec"], waiting["placement"])] if waiting else []
        items: set[str] = set()
        for spec, placement in specs:
            needed |= code.digests(spec, placement)
            items |= _of_spec(spec, placement, blobs, definition)
        if items:
            found[row["session_id"]] = sorted(items)
    spare = len(blobs.keys() - needed)
    return {**found, "": [f"code that no session needs ({spare})"]} if spare else found


def _of_spec(spec: dict[str, Any], placement: str, blobs: Mapping[str, bytes], definition: Definition) -> set[str]:
    """What a specification brings; what the agents that it names bring as well."""
    found = {
        f"the {kind} {function['name']} by value"
        for kind, function in functions(spec)
        if function["source"].get("blob") in blobs
    }
    found |= {f"the files of the skill {skill['name']}" for skill in spec.get("skills") or () if skill["blob"] in blobs}
    if blobs.keys() & set(spec.get("packages") or ()):
        found.add("packages of its job")
    for key in {placement, spec.get("placement") or ""} - {""}:  # that of copies of the agent is in its specification
        found |= _of_placement(key, definition(key))
    for agent in below(spec):
        found |= _of_spec(agent, agent.get("placement", ""), blobs, definition)
    return found


def _of_placement(key: str, data: bytes | None) -> set[str]:
    """What the processes of a placement run before any tool does, find code in, and know of the node's environment."""
    if data is None:
        return set()  # no process can be started for it
    definition = json.loads(data)
    if placement_key(definition) != key:
        return {"a placement under the key of another"}
    found = {f"code in {path}" for name in ("code_path", "code_path_after") for path in definition.get(name) or ()}
    if definition.get("runtime_env"):
        found.add(f"a runtime environment ({', '.join(sorted(definition['runtime_env']))})")
    if definition.get("environment"):
        found.add(f"tools that see {', '.join(definition['environment'])}")
    return found
