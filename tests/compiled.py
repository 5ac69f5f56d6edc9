"""What SQLAlchemy compiles is kept for all stores of a test session. Each of its engines would compile it again, and
tests open thousands of stores: that took two fifths of the time of those that use a store."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.util import LRUCache

DECIDES = ("server_version_info", "paramstyle", "_json_serializer", "_json_deserializer", "default_schema_name")
"""What may differ between two dialects of one class, as far as a compiled statement depends on it."""


def share() -> None:
    """From now on. A cache's keys begin with the dialect, of which each engine has its own: those that are alike are
    equal."""
    kept: Any = LRUCache(4_000)
    original = Engine.__init__

    def made(engine: Engine, *arguments: Any, **options: Any) -> None:
        original(engine, *arguments, **options)
        engine._compiled_cache = kept

    Engine.__init__ = made  # type: ignore[method-assign]
    Dialect.__hash__ = lambda dialect: hash(type(dialect))  # type: ignore[method-assign]
    Dialect.__eq__ = _alike  # type: ignore[method-assign]


def _alike(dialect: Dialect, other: object) -> bool:
    return dialect is other or (
        type(dialect) is type(other)
        and all(getattr(dialect, name, None) == getattr(other, name, None) for name in DECIDES)
    )
