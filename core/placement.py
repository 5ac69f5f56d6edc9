"""Placements: what a session asks of the process that it runs in. Frames are pooled by it.

A placement is known by a key: the hash of its definition, and what must be known of it without reading that. The
definition is stored under its key, as code is.
"""

from __future__ import annotations

import json
from typing import Any

from .identifiers import digest

DEFAULT = ""
"""The placement of sessions that ask for nothing and have no code of their own."""

ISOLATED, SCARCE = "-process", "-resources"


def placement_key(definition: dict[str, Any]) -> str:
    """The key of a definition: the same for the same definition."""
    text = json.dumps(definition, sort_keys=True)
    tags = [ISOLATED] if definition.get("isolation") == "process" else []
    tags += [SCARCE] if definition.get("resources") or definition.get("labels") else []
    return digest(text) + "".join(tags)


def is_isolated(placement: str) -> bool:
    """Whether each activation has a process of its own, which ends with it."""
    return ISOLATED in placement


def is_scarce(placement: str) -> bool:
    """Whether its frames hold resources that others may need, wherever the cluster has them."""
    return SCARCE in placement
