"""Which version of Understudy the services run: those of another one are neither talked to nor joined.

What Ray keeps of an actor outlives the code that it was started with. So each says of itself what its process has
loaded; names and arguments could only say what once was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import ray

from understudy.errors import ClusterUnreachable, UnderstudyError, VersionMismatch
from understudy.waiting import answered_within

from .placing import CPU_SLIVER
from .ray_edge import find_actor, result_of, submitted

VERSION = version("understudy")
"""Of this process: a package that is installed over it later is another one."""

OLDER = "an older one"
ANSWER_SECONDS = 5.0


class Versioned:
    """Any of our actors."""

    async def version(self) -> str:
        """The version that this process has loaded."""
        return VERSION


async def version_of(actor: Any) -> str:
    """The version that an actor runs. Raises what `result_of` and `submitted` raise."""
    if not hasattr(actor, "version"):
        return OLDER
    return str(await result_of(submitted(actor.version.remote)))


def mismatch(found: str) -> VersionMismatch:
    """The error about services of this version."""
    return VersionMismatch(
        f"the services that run are of version {found}, and this is {VERSION}",
        details={"running": found, "here": VERSION},
    )


async def other_versions(names: Iterable[str]) -> list[str]:
    """The other versions that are run by these actors, as far as they answer."""

    async def ask(name: str) -> str:
        try:
            actor = await asyncio.to_thread(find_actor, name)
            return await answered_within(version_of(actor), ANSWER_SECONDS) if actor is not None else VERSION
        except (TimeoutError, UnderstudyError):  # it is dead, or hangs, or has nowhere to run
            return VERSION

    return sorted(set(await asyncio.gather(*map(ask, names))) - {VERSION})


async def check_installed(seconds: float) -> None:
    """Find out whether services that are started now would be of this version.

    Raises:
        VersionMismatch: Ray's nodes have another one.
        ClusterUnreachable: nothing can be started on them.
    """

    def installed() -> str:  # by value: older versions have no such function
        from importlib.metadata import version

        return version("understudy")

    asked = ray.remote(installed).options(num_cpus=CPU_SLIVER, max_retries=0)
    try:
        found = await asyncio.wait_for(result_of(submitted(asked.remote)), seconds)
    except TimeoutError:
        raise ClusterUnreachable(f"Ray started no task within {seconds:.0f} s (see `ray status`)") from None
    if found != VERSION:
        raise VersionMismatch(
            f"Ray's nodes have version {found} of Understudy, and this is {VERSION}",
            details={"hint": "Install this version on them first; what runs was left as it is."},
        )
