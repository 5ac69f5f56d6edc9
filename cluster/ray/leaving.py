"""The drain of a node by what runs on it, as a pod's `preStop` hook does: it knows of no store, and has no secret."""

from __future__ import annotations

import asyncio
import time

import ray

from understudy.errors import ServiceGone, UnderstudyError
from understudy.identifiers import new_identifier
from understudy.protocol import unpacked
from understudy.reads import DrainInfo

from ..client import background
from .connection import DRAIN_LOOK_SECONDS, DRAIN_SPARE_SECONDS
from .names import node_name, served_on, supervisor_name
from .own_ray import connect_ray
from .ray_edge import actor_names, find_actor, result_of, submitted

REASON = "asked for there"


def drain_here(seconds: float, *, wait: bool) -> list[DrainInfo]:
    """Drain the Ray node that this process is at, of the sessions of every store; returns how that stands.

    Raises:
        ClusterUnreachable: there is no Ray here.
        CannotDrain: for a store there would be nobody to go on; the others are drained.
    """
    connect_ray(None, start=False)
    try:
        return background.wait(drain_node(str(ray.get_runtime_context().get_node_id()), seconds, wait=wait))
    finally:
        ray.shutdown()


async def drain_node(node_id: str, seconds: float, *, wait: bool) -> list[DrainInfo]:
    """Drain a node of the sessions of every store; see `drain_here`."""
    instances = served_on(await asyncio.to_thread(actor_names), node_id)
    drains = [_drain(instance, node_id, seconds, wait=wait) for instance in instances]
    found = await asyncio.gather(*drains, return_exceptions=True)
    errors = [one for one in found if isinstance(one, BaseException)]
    if errors:
        raise errors[0]
    return [one for one in found if isinstance(one, DrainInfo)]


async def _drain(instance: str, node_id: str, seconds: float, *, wait: bool) -> DrainInfo | None:
    """Drain a node of one store's sessions; None if somebody took that back."""
    supervisor, node = find_actor(supervisor_name(instance)), find_actor(node_name(instance, node_id))
    late = time.monotonic() + seconds + DRAIN_SPARE_SECONDS
    if supervisor is None or node is None:
        raise ServiceGone(f"the services of {instance} are being ended")
    await result_of(submitted(lambda: supervisor.drain.remote([node_id], seconds, REASON, False, new_identifier())))
    found: DrainInfo | None = None
    while True:
        try:
            done = await result_of(submitted(lambda: node.request.remote("read", "drains", [], {})))
            drains = unpacked(done, list[DrainInfo], "what was read of drains")
            found = next((drain for drain in drains if drain.node_id == node_id), None)
            if found is None or found.finished_at or not wait:
                return found
        except UnderstudyError:  # the service or its store is just being restarted
            pass
        if time.monotonic() > late:
            return found
        await asyncio.sleep(DRAIN_LOOK_SECONDS)
