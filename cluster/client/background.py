"""Event loops in threads of their own; the client has one, so that one API serves synchronous and asynchronous
programs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """An event loop that turns in its own thread until `stop`, or the end of the process."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and wait for its result; Ctrl-C cancels it.

        Raises:
            RuntimeError: called on the loop, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(f"{self._thread.name} can't wait for itself")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, seconds: float) -> None:
        """End what runs on the loop, then its thread; one that blocks for so long is left alone."""
        ended = self.submit(_end_others())
        ended.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self.loop.close()


async def _end_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_lock = threading.Lock()
_client: LoopThread | None = None


def _thread() -> LoopThread:
    global _client
    with _lock:
        if _client is None or _client.loop.is_closed():
            _client = LoopThread("understudy-client")
        return _client


def loop() -> asyncio.AbstractEventLoop:
    """The client's loop, started when first asked for; its thread ends with the process."""
    return _thread().loop


def submit(coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Run a coroutine on the client's loop."""
    return _thread().submit(coroutine)


def wait(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on the client's loop and wait for its result; see `LoopThread.wait`."""
    return _thread().wait(coroutine)
