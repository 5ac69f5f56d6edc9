"""Ray's token authentication: showing the token that this process has, and telling early that it is refused."""

from __future__ import annotations

import os
from typing import Any

from ray import _raylet
from ray.exceptions import RayError

from understudy.errors import InvalidAuthToken

raylet: Any = _raylet
"""Ray's public API has no word of tokens; before 2.52 this has none either."""


def present_token() -> None:
    """Have Ray use the token there is: in `RAY_AUTH_TOKEN`, in `RAY_AUTH_TOKEN_PATH`'s file, or in ~/.ray/auth_token.

    By itself Ray does so only for a cluster that it finds on this machine, not for one whose address is given. A
    cluster without authentication takes no notice of a token. `RAY_AUTH_MODE` says otherwise.

    Raises:
        InvalidAuthToken: `RAY_AUTH_TOKEN_PATH` names a file that has none.
    """
    if not hasattr(raylet, "AuthenticationTokenLoader") or _shown():
        return
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode.lower() == "token" if mode is not None else _there():
        os.environ["RAY_AUTH_MODE"] = "token"
        raylet.Config.initialize("")  # Ray has read the variable when it was imported


def check_token(address: str) -> None:
    """Ask a head that listens whether it lets this process in: `ray.init` would try a refused token for 20 s.

    Raises:
        InvalidAuthToken: it does not, or RAY_AUTH_MODE wants a token that is not there.
    """
    if not hasattr(raylet, "AuthenticationTokenLoader"):
        return
    if _shown() and not _there():  # Ray would end the process
        raise InvalidAuthToken(f"RAY_AUTH_MODE is token, and there is none to show to Ray at {address}.")
    try:
        raylet.GcsClient(address)
    except RayError as error:
        if type(error).__name__ != "AuthenticationError":
            return  # `ray.init` says more of it
        problem = "there is none" if not _there() else "RAY_AUTH_MODE says that none is shown"
        problem = "does not accept this token" if _shown() else f"wants a token, and {problem}"
        raise InvalidAuthToken(f"Ray at {address} {problem}.") from None


def _there() -> bool:
    try:
        return bool(raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))
    except RayError:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
        raise InvalidAuthToken(f"RAY_AUTH_TOKEN_PATH={path!r} can't be read, or is empty.") from None


def _shown() -> bool:
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)
