"""`understudy up`: start the services without a program that uses them, as a Kubernetes pod does."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from understudy.config import Settings, kept_settings

from .command import Json, Store, command, connecting, counted, errors, print_json
from .rendering import escape

KEEP_SECONDS = 10.0
"""A model call waits 30 s for credentials that are missing: they must be back before."""

GONE_SECONDS, GONE_LOOKS = 1.0, 15
"""Services that are not found so often in a row were ended, and not only replaced."""


@command
def up(
    keep: Annotated[
        bool, typer.Option("--keep", help="Stay, and hand the model's key to services that have lost it.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds until the services must answer.", min=1.0)] = 120.0,
    store: Store = None,
    json: Json = False,
) -> int:
    """Start the services unless they run, wait until they serve, and give them this environment's model key.

    Services of another version are replaced: in good order, unless that takes longer than --timeout. With --keep, so
    are services that were started with other settings than this environment has; without it, the difference is
    printed. Unfinished runs go on from then on. With --keep it stays until somebody ends the services
    (`understudy down`, `understudy drain --stop`; exit code 0), and fails when they or Ray can't be reached: whoever
    started it starts it again.
    """
    from ..client import background
    from ..client.client import Cluster
    from ..ray.replacing import replace_others

    with connecting(start=True):
        _open_store(Settings.from_environment(store=store).store)
        replaced = replace_others(store, timeout, of_other_settings=keep)
        cluster = Cluster.connect(store, timeout=timeout)
    try:
        services = cluster.services()
        different = background.wait(cluster._connection.different_settings())
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
        gone = 0
        while keep and gone < GONE_LOOKS:  # who replaces them ends them first
            gone = 0 if background.wait(cluster._connection.renew(timeout)) else gone + 1
            time.sleep(GONE_SECONDS if gone else KEEP_SECONDS)
    finally:
        cluster.close()
    return 0


def _open_store(dsn: str) -> None:
    """Find out whether the store lets this environment in: with a wrong password no services that work are ended.

    Raises:
        StoreUnreachable: it does not, or gives no answer.
    """
    if dsn.startswith("sqlite"):  # a file, which may not be there yet
        return
    from sqlalchemy import text

    from understudy.store.db.engine import Database

    store = Database(dsn)
    try:
        with store.read() as connection:
            connection.execute(text("SELECT 1"))
    finally:
        store.close()
