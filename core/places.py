"""Where something is in data: names of fields, and indices of lists."""

from __future__ import annotations

import re

Place = tuple[str | int, ...]

WHOLE = "(whole)"
"""The place of all of it, as users see it."""

_PLAIN = re.compile(r"[A-Za-z0-9_$-]{1,80}")


def shown(place: Place) -> str:
    """A place as users see it: `steps[2].foreach.do`."""
    found = ""
    for part in place:
        if isinstance(part, int):
            found += f"[{part}]"
        elif _PLAIN.fullmatch(part):
            found += f".{part}" if found else part
        else:
            found += f"[{part[:80]!r}]"
    return found or WHOLE
