"""The client's own event loop, in a thread: so that one API serves synchronous and asynchronous programs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def loop() -> asyncio.AbstractEventLoop:
    """The loop, started when first asked for; its thread ends with the process."""
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="understudy-client", daemon=True).start()
        return _loop


def submit(coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Run a coroutine on the loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop())


def wait(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on the loop and wait for its result; Ctrl-C cancels it."""
    future = submit(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
