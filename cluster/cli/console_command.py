"""`understudy console`: the web page of a running cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from understudy.errors import InvalidConfiguration, ServiceGone

from .command import Json, Store, command, connected, print_json

TOKEN_VARIABLE = "UNDERSTUDY_CONSOLE_TOKEN"
PROXY_VARIABLE = "UNDERSTUDY_CONSOLE_PROXY_SECRET"


@command
def console(
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.", min=0, max=65_535)] = 8484,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"A file with the token that lets its holder act, not only read. Or {TOKEN_VARIABLE}.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    users_file: Annotated[
        Path | None,
        typer.Option(
            help="Several people: a line each of a name, `act` or `read`, and the SHA-256 of their token (or `-`: the "
            "proxy knows them).",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    identity_header: Annotated[str, typer.Option(help="Header in which a proxy passes on who has logged in.")] = "",
    proxy_secret_file: Annotated[
        Path | None,
        typer.Option(
            help=f"What the proxy sends as X-Understudy-Proxy-Secret, so that its headers count. Or {PROXY_VARIABLE}.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    path_prefix: Annotated[str, typer.Option(help="At which a proxy has the page: /understudy.")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running; `understudy down` ends it too.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the one that was left running at this port.")] = False,
    open: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Serve a page that shows the cluster: sessions, trees, events, traces, budgets, live; until Ctrl-C.

    It only reads, for this machine, unless a token is given: who logs in with it can cancel, answer, resume and close.
    """
    from ..client import background
    from ..console.access import Binding, Person, token_digest
    from ..console.users import read_users
    from ..ray import console_actor as serving

    token, secret = _token(token_file, TOKEN_VARIABLE), _token(proxy_secret_file, PROXY_VARIABLE)
    tokens, readers = read_users(users_file) if users_file else ({}, frozenset())
    if token:
        tokens = {**tokens, token_digest(token): Person("console")}
    proxy = token_digest(secret) if secret else None
    binding = Binding(host, port, tokens, readers, proxy, identity_header, path_prefix.rstrip("/"))
    binding.check()
    with connected(store, start=False) as cluster:
        settings = cluster._connection.settings
        if stop:
            done = background.wait(serving.end_at(settings, port))
            print_json({"stopped": done}) if json else print("ended" if done else f"no console serves port {port}")
            return 0 if done else 1
        handle, found = background.wait(serving.start(settings, binding, detached=detach))
        shown = {**found, "acts": binding.knows_people}
        print_json(shown) if json else print(
            f"{found['url']}  ({'with a token, it acts' if shown['acts'] else 'read-only'})", flush=True
        )
        if open:
            typer.launch(found["url"])
        if not detach:
            _serve(handle)
    return 0


def _serve(handle: Any) -> None:
    """Until Ctrl-C, or until something else ended it."""
    from understudy.errors import ClusterError

    from ..client import background
    from ..ray import console_actor as serving
    from ..ray.ray_edge import result_of

    try:
        background.wait(result_of(handle.watch.remote()))
    except KeyboardInterrupt:
        background.wait(serving.end(handle))
        raise
    except ServiceGone as error:
        raise ClusterError(f"the console has ended: {error.message}") from None


def _token(file: Path | None, variable: str) -> str | None:
    from ..console.access import LEAST_TOKEN

    try:
        token = file.read_text(encoding="utf-8") if file is not None else os.environ.get(variable, "")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidConfiguration(f"the token in {file} can't be read: {reason}") from None
    token = token.strip()
    if not token and file is None:
        return None
    if len(token) < LEAST_TOKEN:
        where = str(file) if file is not None else variable
        raise InvalidConfiguration(f"the token in {where} has fewer than {LEAST_TOKEN} characters: take a random one")
    return token
