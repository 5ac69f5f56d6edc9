"""`understudy up`: start the services without a program that uses them, as a Kubernetes pod does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.config import Settings, kept_settings

from .command import Json, Store, command, connected, connecting, counted, errors, print_json
from .durations import duration
from .rendering import escape

if TYPE_CHECKING:
    from ..client.client_connection import ClientConnection

UP_SECONDS = 120.0
"""So long services may take to answer, unless `--timeout` says otherwise."""

KEEP_SECONDS = 10.0
"""A model call waits 30 s for credentials that are missing: they must be back before."""

GONE_SECONDS, GONE_LOOKS = 1.0, 15
"""Services that are not found so often in a row were ended, and not only replaced."""


@command
def up(
    keep: Annotated[
        bool, typer.Option("--keep", help="Stay, and hand the model's key to services that have lost it.")
    ] = False,
    timeout: Annotated[
        float, duration("Until then the services must answer.", least=1.0, default=UP_SECONDS)
    ] = UP_SECONDS,
    store: Store = None,
    json: Json = False,
) -> int:
    """Start the services unless they run, wait until they serve, and give them this environment's model key.

    Services of another version are replaced: in good order, unless that takes longer than --timeout. With --keep, so
    are services that were started with other settings than this environment has, unless another `up --keep` keeps
    them; without it, the difference is printed. Only services are ended that ran when this began. Unfinished runs go
    on from then on. With --keep it stays until somebody ends the services (`understudy down`, `understudy drain
    --stop`; exit code 0), and fails when they or Ray can't be reached: whoever started it starts it again.
    """
    from ..client import background
    from ..ray.replacing import other_settings, replace_others

    with connecting(start=True):
        _check_store(Settings.from_environment(store=store))
        replaced = replace_others(store, timeout, of_other_settings=keep)
    with connected(store, timeout=timeout) as cluster:
        services = cluster.services()
        different = background.wait(cluster._connection.different_settings())
        if different and keep:
            raise other_settings("somebody has started them meanwhile", different)
        if different:
            errors.print(f"[yellow]note[/yellow] {escape(kept_settings(different))}", soft_wrap=True)
        if json:
            print_json({"services": services, "different_settings": different, "replaced": replaced})
        else:
            if replaced:
                errors.print(
                    f"[yellow]note[/yellow] services were replaced: {escape('; '.join(replaced))}", soft_wrap=True
                )
            nodes = [service for service in services if service.role == "node"]
            print(f"the services run: a supervisor, {counted(len(nodes), 'node service')}", flush=True)
        if keep:
            _keep(cluster._connection, timeout)
    return 0


def _keep(connection: ClientConnection, timeout: float) -> None:
    """Say every `KEEP_SECONDS` that this process keeps the services, until somebody ends them."""
    from ..client import background

    gone = 0
    try:
        while gone < GONE_LOOKS:  # who replaces them ends them first
            gone = 0 if background.wait(connection.renew(timeout)) else gone + 1
            time.sleep(GONE_SECONDS if gone else KEEP_SECONDS)
    finally:
        background.wait(connection.let_go())


def _check_store(settings: Settings) -> None:
    """Find out whether services of this environment could work with the store: with a wrong password, or a store that
    a newer version has made, no services that work are ended.

    Raises:
        StoreUnreachable: it does not let this environment in, or gives no answer.
        StoreVersion: it is newer than this code.
        StoreSchema: it has tables that are not ours; or it lacks something, and the schema policy is `verify`.
    """
    from understudy.store.db import schema
    from understudy.store.db.engine import Database

    if settings.store.startswith("sqlite") and not Path(settings.store.removeprefix("sqlite:///")).exists():
        return  # it is made by the services
    store = Database(settings.store)
    try:
        with store.read() as connection:
            if settings.schema_policy == "verify":
                schema.require(connection, store.schema)
            else:
                schema.check_not_newer(connection)
    finally:
        store.close()
