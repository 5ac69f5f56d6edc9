"""`understudy up` states version and settings: services that have others are ended, so that it can start its own."""

from __future__ import annotations

import asyncio
import logging

from understudy.config import Settings
from understudy.errors import ClusterUnreachable, Conflict

from ..client import background
from .connection import Connection
from .names import of_instance
from .own_ray import connect_ray, running_address
from .ray_edge import actor_names
from .versions import VERSION, check_installed, other_versions

log = logging.getLogger(__name__)


def replace_others(store: str | None, timeout: float, *, of_other_settings: bool) -> list[str]:
    """End the services of a store if they are of another version.

    Args:
        timeout: seconds that they have to answer, and again to come to an end in good order.
        of_other_settings: end those as well that have other settings than this environment says.

    Returns:
        Why they were ended; nothing if they were not, or none ran.

    Raises:
        VersionMismatch: Ray's nodes have another version than this process; nothing was ended.
        Conflict: they have other settings, and somebody keeps them; nothing was ended.
        ClusterUnreachable: the supervisor lives and gives no answer; nothing was ended.
    """
    settings = Settings.from_environment(store=store)
    address = running_address()
    if address is None:
        return []
    connection = Connection(settings, connect_ray(address))
    return background.wait(_replace(connection, timeout, of_other_settings))


def other_settings(why: str, different: list[str]) -> Conflict:
    """The error about services that have other settings and are not replaced."""
    return Conflict(
        f"running services have {', '.join(different)}; {why}, so they are left as they are",
        details={
            "hint": "One store has one `understudy up --keep`: give both the same settings, or end the other one first."
        },
    )


async def _replace(connection: Connection, timeout: float, of_other_settings: bool) -> list[str]:
    names = of_instance(await asyncio.to_thread(actor_names), connection.settings.instance)
    if not names:
        return []
    reasons = []
    answers = await connection.find_supervisor_to_end()
    try:
        if answers:
            await connection.version(timeout)
        versions = await other_versions(names)
        if answers and of_other_settings and not versions:
            reasons = await _other_settings_of(connection)
    except ClusterUnreachable:
        if await connection.is_ended():
            reasons = ["another command was ending them"]
        elif await connection.supervisor_pid():
            raise
        else:  # Ray lists it, of a former cluster perhaps, and can start it nowhere
            reasons = ["their supervisor has no process"]
        answers = False
        versions = await other_versions(names)
    if versions:
        await check_installed(timeout)
        reasons = [f"version {version} (this is {VERSION})" for version in versions]
    if reasons:
        log.warning("the services are replaced: %s", "; ".join(reasons))
        await connection.end(timeout if answers else 0.0)
    return reasons


async def _other_settings_of(connection: Connection) -> list[str]:
    """Settings of the services that differ. Raises `Conflict` if some do and somebody keeps the services."""
    await connection.hand_over()
    different = await connection.different_settings()
    keepers = await connection.keepers() if different else []
    if keepers:
        raise other_settings(f"they are kept by another `understudy up --keep` ({'; '.join(keepers)})", different)
    return different
