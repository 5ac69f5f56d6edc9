"""What somebody may have meant by a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'files'?)`, to be put behind what names it; nothing where no known name is close."""
    from difflib import get_close_matches  # only where something is wrong

    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
