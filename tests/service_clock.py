"""The time that a service takes to have passed since its node service was heard of, as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from understudy.transport import one_service


def looks(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[float]:
    """Put seconds there: they pass, and the service looks whether it is abandoned. `join` returns when it has looked,
    and goes on."""
    now, found = 0.0, asyncio.Queue[float]()

    async def ticks(_seconds: float) -> AsyncIterator[bool]:
        nonlocal now
        while True:
            now += await found.get()
            yield False
            found.task_done()

    monkeypatch.setattr(one_service, "ticks", ticks)
    monkeypatch.setattr(one_service, "time", SimpleNamespace(monotonic=lambda: now))
    return found
