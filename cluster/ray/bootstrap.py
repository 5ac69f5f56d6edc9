"""Starts the services from a process of its own.

Actors inherit the code and the environment of the job that created them. This process is a job without either, so
nothing of the first driver (its working_dir, its keys) reaches the services or what they create for others.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from understudy.config import Settings
from understudy.errors import UnderstudyError
from understudy.prices import Price
from understudy.scaling import Scaling

from .names import supervisor_name
from .own_ray import connect_ray
from .ray_edge import RAY_NAMESPACE
from .services import SupervisorActor


def main() -> int:
    """Read settings from stdin (they hold the DSN), create the supervisor, print `{"pid"}` or an error as JSON."""
    parser = argparse.ArgumentParser(prog="python -m understudy.cluster.ray.bootstrap")
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args()
    settings, span_directory = read(sys.stdin.read())
    try:
        connect_ray(arguments.address)
        # A SQLite file is on one node: elsewhere the same path would be another, empty store. With PostgreSQL any node
        # will do; this one is the head's where a job's driver or the user's own program starts the services.
        own = ray.get_runtime_context().get_node_id()
        bound = NodeAffinitySchedulingStrategy(own, soft=not settings.store.startswith("sqlite"))
        handle = SupervisorActor.options(  # type: ignore[attr-defined]
            name=supervisor_name(settings.instance),
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=bound,
        ).remote(settings, span_directory)
        pid = ray.get(handle.start.remote(), timeout=60)
    except UnderstudyError as error:
        print(json.dumps({"error": error.to_wire()}))
        return 1
    print(json.dumps({"pid": pid}))
    return 0


def request(settings: Settings, span_directory: str) -> str:
    """What `main` reads from stdin."""
    return json.dumps({"settings": asdict(settings), "span_directory": span_directory})


def read(text: str) -> tuple[Settings, str]:
    """What `request` wrote."""
    given = json.loads(text)
    prices = {model: Price(**price) for model, price in given["settings"].pop("prices").items()}
    scaling = given["settings"].pop("scaling")
    settings = Settings(**given["settings"], prices=prices, scaling=Scaling(**scaling) if scaling else None)
    return settings, given["span_directory"]


if __name__ == "__main__":
    sys.exit(main())
