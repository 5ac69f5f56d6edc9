"""The packages that Ray's head has: taken for the store, and given back from it (`client/packages.py`)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray._private.runtime_env import packaging
from ray.experimental.internal_kv import _internal_kv_get

from understudy.errors import UnderstudyError
from understudy.tool_tasks import ReadBlob

from ..client import packages

log = logging.getLogger(__name__)

LARGEST = 32 << 20
"""Bytes of a package that is stored. Data does not belong into a working_dir; larger ones are kept by Ray alone."""


def fetch(address: str) -> bytes | None:
    """A package as Ray's head has it now; None if it is too large to be stored, or not there."""
    data: bytes | None = _internal_kv_get(address)
    if data is not None and len(data) > LARGEST:
        log.warning(
            "the job's package of %d MiB is too large to be stored: its sessions go on while Ray has it, and after a "
            "restart of Ray only when the job is submitted again. Keep data out of it (.rayignore).", len(data) >> 20
        )  # fmt: skip
        return None
    return data


def is_there(address: str) -> bool:
    """Whether Ray's head has a package; it keeps it for ten minutes from now, so that who needs it can begin."""
    packaging.pin_runtime_env_uri(address)
    return bool(packaging.package_exists(address))


def give_back(address: str, data: bytes) -> None:
    """Put a package into Ray's head."""
    packaging.upload_package_to_gcs(address, data)


async def provide(runtime_env: dict[str, Any], read_blob: ReadBlob) -> None:
    """Give Ray back what it has deleted of a job's code. What the store does not have either, Ray reports."""
    for address in packages.addresses(runtime_env):
        if not await asyncio.to_thread(is_there, address):
            try:
                data = await read_blob(packages.package_key(address))
            except UnderstudyError as error:
                log.warning("package %s is neither in Ray nor in the store: %s", address, error)
            else:
                await asyncio.to_thread(give_back, address, data)
