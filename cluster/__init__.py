"""The edge: the only package that imports Ray. Services, client and command line."""

import os
from pathlib import Path

if (Path.home() / ".ray" / "auth_token").exists():
    # Ray turns token auth on for a head where this file exists, but not for a driver that has an address. It reads the
    # variable when it is imported, so this must come before any module of this package.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
