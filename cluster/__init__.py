"""The edge: the only package that imports Ray. Services, client and command line."""

import os
import sys
from pathlib import Path

UNREAD_AUTH_MODE = False
"""Ray was imported first, by somebody else, and so has not read what is set below."""

if (Path.home() / ".ray" / "auth_token").exists():
    # Ray turns token auth on for a head where this file exists, but not for a driver that has an address. It reads the
    # variable when it is imported, so this must come before any module of this package.
    UNREAD_AUTH_MODE = "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ
    os.environ.setdefault("RAY_AUTH_MODE", "token")
