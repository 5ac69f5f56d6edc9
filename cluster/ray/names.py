"""What our actors are called in Ray. An instance is the namespace and the hash of a store (`Settings.instance`)."""

from __future__ import annotations

from typing import NamedTuple

SUPERVISOR, NODE, GATEWAY, TOOL_HOST, FRAME = "supervisor", "node", "gateway", "tools", "frame"


def supervisor_name(instance: str) -> str:
    """Name of a store's supervisor."""
    return f"{SUPERVISOR}/{instance}"


def node_name(instance: str, node_id: str) -> str:
    """Name of a node service."""
    return f"{NODE}/{instance}/{node_id}"


def gateway_name(instance: str, node_id: str) -> str:
    """Name of a node's gateway."""
    return f"{GATEWAY}/{instance}/{node_id}"


def tool_host_name(instance: str, node_id: str) -> str:
    """Name of a node's tool host."""
    return f"{TOOL_HOST}/{instance}/{node_id}"


class FrameName(NamedTuple):
    """What the name of a frame says: all that a new supervisor must know of it."""

    frame_id: str
    node_id: str
    placement: str

    def of(self, instance: str) -> str:
        """The name."""
        return f"{FRAME}/{instance}/{self.frame_id}/{self.node_id}/{self.placement or '-'}"


def frames_among(names: list[str], instance: str) -> list[FrameName]:
    """The frames of one store among the names of actors."""
    prefix = f"{FRAME}/{instance}/"
    found = [FrameName(*name.removeprefix(prefix).split("/")) for name in names if name.startswith(prefix)]
    return [name._replace(placement="" if name.placement == "-" else name.placement) for name in found]


def supervised(names: list[str]) -> set[str]:
    """The instances that have a supervisor, among the names of actors."""
    prefix = supervisor_name("")
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def keepers_among(names: list[str], instance: str) -> set[str]:
    """Those of one store's services that may know its secrets, among the names of actors."""
    return {name for name in of_instance(names, instance) if name.split("/")[0] in (SUPERVISOR, NODE, GATEWAY)}


def of_instance(names: list[str], instance: str) -> list[str]:
    """All that belong to one store, its console included, among the names of actors."""
    return [name for name in names if name.split("/")[1:2] == [instance]]


def served_on(names: list[str], node_id: str) -> list[str]:
    """The instances that have a node service on a node, among the names of actors, in order."""
    split = [name.split("/") for name in names]
    return sorted(parts[1] for parts in split if parts[0] == NODE and parts[2] == node_id)
