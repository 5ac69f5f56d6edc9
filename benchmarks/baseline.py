"""What everything is compared with: an asynchronous Ray actor that does nothing. Imports nothing of ours."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import ray
from ray.exceptions import RayActorError


@ray.remote
class Bare:
    """The smallest asynchronous actor."""

    async def ping(self) -> int:
        """Its pid."""
        return os.getpid()


def create() -> tuple[Any, int, float]:
    """A new actor, its pid, and the seconds from its creation to its first reply."""
    began = time.perf_counter()
    actor = Bare.remote()  # type: ignore[attr-defined]
    pid = ray.get(actor.ping.remote())
    return actor, pid, time.perf_counter() - began


def create_many(count: int) -> tuple[list[Any], float]:
    """Actors created at once, and the seconds until the last one replied."""
    began = time.perf_counter()
    actors = [Bare.remote() for _ in range(count)]  # type: ignore[attr-defined]
    ray.get([actor.ping.remote() for actor in actors])
    return actors, time.perf_counter() - began


def end(actors: list[Any]) -> None:
    """Kill actors."""
    for actor in actors:
        ray.kill(actor)


def call_seconds(actor: Any) -> float:
    """One call, there and back."""
    began = time.perf_counter()
    ray.get(actor.ping.remote())
    return time.perf_counter() - began


def restart_seconds(count: int) -> float:
    """SIGKILL of `count` actors at once, until Ray has restarted all of them and each replied."""
    actors = [Bare.options(max_restarts=-1).remote() for _ in range(count)]  # type: ignore[attr-defined]
    try:
        pids = ray.get([actor.ping.remote() for actor in actors])
        began = time.perf_counter()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for actor, pid in zip(actors, pids, strict=True):
            while _pid(actor) in (None, pid):
                time.sleep(0.002)
        return time.perf_counter() - began
    finally:
        end(actors)


def _pid(actor: Any) -> int | None:
    try:
        pid: int = ray.get(actor.ping.remote())
        return pid
    except RayActorError:
        return None
