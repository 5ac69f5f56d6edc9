"""How activations at work learn that their run shall end or is interrupted, or that they are over themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from understudy.errors import Fenced
from understudy.records import INTERRUPTED_BY_STEER, ActivationId


class Interrupts:
    """The pending calls of activations that wait for the end of their runs; at most one each.

    What is told may be over: by the name of its run, nobody is interrupted for another.
    """

    def __init__(self) -> None:
        self._watches: dict[ActivationId, tuple[str, asyncio.Future[str]]] = {}

    def __len__(self) -> int:
        return len(self._watches)

    @contextmanager
    def watching(self, activation: ActivationId, run_id: str) -> Iterator[asyncio.Future[str]]:
        """The reason why the run shall end, once it shall. It replaces what the activation waited for before."""
        self.drop(activation)
        watch = self._watches[activation] = run_id, asyncio.get_running_loop().create_future()
        try:
            yield watch[1]
        finally:
            if self._watches.get(activation) is watch:
                del self._watches[activation]

    def watched(self) -> dict[ActivationId, str]:
        """Who waits, and for the end of which run."""
        return {activation: run_id for activation, (run_id, _) in self._watches.items()}

    def drop(self, activation: ActivationId) -> None:
        """Nobody waits for it any more, or asks anew. The call would last as long as the service, which can have only
        so many."""
        watch = self._watches.pop(activation, None)
        if watch is not None:
            watch[1].cancel()

    def cancel(self, activation: ActivationId, run_id: str, reason: str) -> None:
        """The run shall end."""
        watch = self._watches.get(activation)
        if watch is not None and watch[0] == run_id:
            del self._watches[activation]
            if not watch[1].done():
                watch[1].set_result(reason)

    def interrupt(self, activation: ActivationId, run_id: str) -> None:
        """The run goes on, and what it is at does not."""
        self.cancel(activation, run_id, INTERRUPTED_BY_STEER)

    def fence(self, activation: ActivationId, reason: str) -> None:
        """The activation is over itself."""
        watch = self._watches.pop(activation, None)
        if watch is not None and not watch[1].done():
            watch[1].set_exception(Fenced(reason, session_id=activation.session_id))
            watch[1].exception()  # nobody may be waiting
