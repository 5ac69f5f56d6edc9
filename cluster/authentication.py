"""Ray's token authentication: showing the token that this process has, and telling early that it is not the right one."""

from __future__ import annotations

import os

from ray.exceptions import RayError

from understudy.errors import InvalidAuthToken

try:
    from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, Config, GcsClient, get_authentication_mode
    from ray.exceptions import AuthenticationError
except ImportError:  # Ray before 2.52 knows no tokens
    AuthenticationError = None


def present_token() -> None:
    """Have Ray use the token there is: in `RAY_AUTH_TOKEN`, in `RAY_AUTH_TOKEN_PATH`'s file, or in ~/.ray/auth_token.

    By itself Ray does so only for a cluster that it finds on this machine, not for one whose address is given. A
    cluster without authentication takes no notice of a token. `RAY_AUTH_MODE` says otherwise.
    """
    if AuthenticationError is None or get_authentication_mode() == AuthenticationMode.TOKEN:
        return
    there = AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    if os.environ.get("RAY_AUTH_MODE", "token" if there else "").lower() == "token":
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # Ray has read the variable when it was imported


def check_token(address: str) -> None:
    """Ask a head that listens whether it lets this process in: `ray.init` would try a refused token for 20 s.

    Raises:
        InvalidAuthToken: it does not, or RAY_AUTH_MODE wants a token that is not there.
    """
    if AuthenticationError is None:
        return
    there = AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    shown = get_authentication_mode() == AuthenticationMode.TOKEN
    if shown and not there:  # Ray would end the process
        raise InvalidAuthToken(f"RAY_AUTH_MODE is token, and there is none to show to Ray at {address}.")
    try:
        GcsClient(address)
    except AuthenticationError:
        problem = "does not accept this token" if shown else "wants a token, and "
        problem += "" if shown else "RAY_AUTH_MODE says that none is shown" if there else "there is none"
        raise InvalidAuthToken(f"Ray at {address} {problem}.") from None
    except RayError:
        pass  # of anything else, `ray.init` says more
