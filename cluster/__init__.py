"""The edge: the only package that imports Ray. Services, client and command line."""

import os

if os.path.exists(os.path.expanduser("~/.ray/auth_token")):  # pathlib raises where there is no home directory
    # Ray turns token auth on for a head where this file exists, but not for a driver that has an address. Ray reads the
    # variable when it is imported; where that was earlier, `authentication.present_token` has it read again.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
