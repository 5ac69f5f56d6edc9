"""What an endpoint with prefix caching has of earlier prompts: the longest common beginning, in whole units."""

from __future__ import annotations

from hashlib import blake2b

from .protocol import CACHE_UNIT

BLOCK = CACHE_UNIT * 4
"""Characters of a unit, at four a token."""

KEPT = 1 << 18
"""Units that are remembered; then all are forgotten."""


class Prefixes:
    """The prompts that came so far, by the hashes of their beginnings."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def found(self, model: str, prompt: str) -> int:
        """So many characters of the prompt are the beginning of an earlier one of the same model; it is remembered."""
        if len(self._known) > KEPT:
            self._known.clear()
        digest = blake2b(model.encode(), digest_size=16)
        found, missed = 0, False
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            digest.update(prompt[end - BLOCK : end].encode())
            key = digest.digest()
            missed = missed or key not in self._known
            found = found if missed else end
            self._known.add(key)
        return found
