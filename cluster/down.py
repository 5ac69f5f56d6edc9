"""`understudy down`: end what was started, and nothing else."""

from __future__ import annotations

from typing import Any

import ray

from understudy.config import Settings

from . import background
from .connection import Connection
from .ray_edge import connect_ray, running_address, stop_ray
from .services import supervisor_handle


def bring_down(store: str | None, *, keep_ray: bool) -> dict[str, Any]:
    """End the services of a store; then Ray, if `Cluster.connect` started it on this machine."""
    settings = Settings.from_environment(store=store)
    services = "none ran"
    address = running_address()
    if address is not None:
        connect_ray(address)
        if supervisor_handle(settings) is not None:
            connection = Connection(settings, address)
            background.wait(connection.open_existing())
            background.wait(connection.shutdown())
            services = "ended"
        ray.shutdown()
    if keep_ray:
        return {"services": services, "ray": "kept"}
    ended = stop_ray()
    return {"services": services, "ray": f"{ended} processes ended" if ended else "not started by Understudy"}
