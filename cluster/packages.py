"""The code of a job: packages (`working_dir`, `py_modules`), which Ray keeps while a process needs them.

Ray deletes a package when the last process that has it ends, and loses all of them with its head. A session outlives
both, so the packages of its runtime environment are stored with it, and given back to Ray before a process is started
that needs them. Ray names packages by their content; so does the store.
"""

from __future__ import annotations

import logging
from pathlib import PurePosixPath
from typing import Any

from understudy.errors import InvalidConfiguration
from understudy.identifiers import digest

log = logging.getLogger(__name__)

LARGEST = 32 << 20
"""Bytes of a package that is stored. Data does not belong into a working_dir; larger ones are kept by Ray alone."""

UNPACKED = "/runtime_resources/working_dir_files/"
"""Where Ray unpacks a working_dir, on each node; a directory is deleted when Ray needs the room."""

PY_MODULES = "/runtime_resources/py_modules_files/"
"""The same for `py_modules`; Ray puts them into the `sys.path` of each process that has the runtime environment."""

RAYS_OWN = "-packages/ray/"
"""Ray puts libraries that it brings along into the `sys.path` of whoever imports it."""


def addresses(runtime_env: dict[str, Any]) -> list[str]:
    """The packages of a runtime environment that are in Ray's head, by the address that Ray has for them."""
    modules = runtime_env.get("py_modules") or []
    found = [runtime_env.get("working_dir"), *(modules if isinstance(modules, list) else [])]
    return [address for address in found if isinstance(address, str) and address.startswith("gcs://")]


def package_key(address: str) -> str:
    """What the store knows a package by."""
    return digest("package", address)


def fetch(address: str) -> bytes | None:
    """A package as Ray's head has it now; None if it is too large to be stored, or not there."""
    from ray.experimental.internal_kv import _internal_kv_get  # here: `understudy certify` needs no Ray

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
    from ray._private.runtime_env import packaging

    packaging.pin_runtime_env_uri(address)
    return bool(packaging.package_exists(address))


def give_back(address: str, data: bytes) -> None:
    """Put a package into Ray's head."""
    from ray._private.runtime_env.packaging import upload_package_to_gcs

    upload_package_to_gcs(address, data)


def refuse_temporary(store: str) -> None:
    """Raise `InvalidConfiguration` if a store is a file in a job's unpacked working_dir."""
    if store.startswith("sqlite") and UNPACKED in store:
        raise InvalidConfiguration(
            "the store is a file in the job's working_dir, which Ray deletes: UNDERSTUDY_STORE needs another path",
            details={"setting": "UNDERSTUDY_STORE"},
        )


def within_job(path: str) -> str | None:
    """A path below a job's unpacked working_dir, relative to that; None for other paths."""
    _, inside, rest = path.partition(UNPACKED)
    return str(PurePosixPath(*PurePosixPath(rest).parts[1:])) if inside else None
