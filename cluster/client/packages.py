"""The code of a job: packages (`working_dir`, `py_modules`), which Ray keeps while a process needs them.

Ray deletes a package when the last process that has it ends, and loses all of them with its head. A session outlives
both, so the packages of its runtime environment are stored with it, and given back to Ray before a process is started
that needs them. Ray names packages by their content; so does the store.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from understudy.errors import InvalidConfiguration
from understudy.identifiers import digest

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
