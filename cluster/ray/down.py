"""`understudy down`: end what was started, and nothing else."""

from __future__ import annotations

from typing import Any

import ray

from understudy.config import Settings

from ..client import background
from .connection import Connection
from .own_ray import connect_ray, own_address, running_address, stop_ray
from .services import other_supervisors, supervisor_handle


def bring_down(store: str | None, *, keep_ray: bool) -> dict[str, Any]:
    """End the services of a store; then Ray, if `Cluster.connect` started it here and it serves no other store."""
    settings = Settings.from_environment(store=store)
    services = "none ran"
    own = own_address()
    address, others = running_address(), []
    if address is not None:
        connect_ray(address)
        connected = str(ray.get_runtime_context().gcs_address)
        if supervisor_handle(settings) is not None:
            connection = Connection(settings, address)
            background.wait(connection.open_existing())
            background.wait(connection.shutdown())
            services = "ended"
        others = other_supervisors(settings)
        ray.shutdown()
        if own is not None and connected != own:
            return {"services": services, "ray": f"{own} is left alone, since {connected} was asked"}
    if keep_ray:
        return {"services": services, "ray": "kept"}
    if others:
        return {"services": services, "ray": f"kept, since it serves other stores: {', '.join(others)}"}
    ended = stop_ray()
    return {"services": services, "ray": f"{ended} processes ended" if ended else "not started by Understudy"}
