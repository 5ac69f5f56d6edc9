"""How activations at work learn that their run shall end or is interrupted, or that they are over themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from understudy.errors import Fenced
from understudy.records import INTERRUPTED_BY_STEER, ActivationId


class _Watch(NamedTuple):
    """A pending call, and what its process is at."""

    run_id: str
    round: int
    reason: asyncio.Future[str]


class Interrupts:
    """The pending calls of activations that wait for the end of their runs; at most one each.

    What a notice is about may be over: the name of its run and the number of its round keep others from being
    interrupted for it.
    """

    def __init__(self) -> None:
        self._watches: dict[ActivationId, _Watch] = {}

    def __len__(self) -> int:
        return len(self._watches)

    @contextmanager
    def watching(self, activation: ActivationId, run_id: str, round_number: int) -> Iterator[asyncio.Future[str]]:
        """The reason why the run shall end, once it shall, or its round. It replaces what the activation waited for
        before. Raises `Fenced` if that is at a later round: this call was on the way for long."""
        later = self._watches.get(activation)
        if later is not None and later.run_id == run_id and later.round > round_number:
            raise Fenced(f"round {round_number} of run {run_id} is over", session_id=activation.session_id)
        self.drop(activation)
        watch = self._watches[activation] = _Watch(run_id, round_number, asyncio.get_running_loop().create_future())
        try:
            yield watch.reason
        finally:
            if self._watches.get(activation) is watch:
                del self._watches[activation]

    def watched(self) -> dict[ActivationId, str]:
        """Who waits, and for the end of which run."""
        return {activation: watch.run_id for activation, watch in self._watches.items()}

    def drop(self, activation: ActivationId) -> None:
        """Nobody waits for it any more, or asks again. The call would last as long as the service, which can have only
        so many."""
        watch = self._watches.pop(activation, None)
        if watch is not None:
            watch.reason.cancel()

    def cancel(self, activation: ActivationId, run_id: str, reason: str) -> None:
        """The run shall end."""
        watch = self._watches.get(activation)
        if watch is not None and watch.run_id == run_id:
            del self._watches[activation]
            if not watch.reason.done():
                watch.reason.set_result(reason)

    def interrupt(self, activation: ActivationId, run_id: str, round_number: int) -> None:
        """The run goes on, and what it is at in this round does not."""
        watch = self._watches.get(activation)
        if watch is not None and watch.round == round_number:
            self.cancel(activation, run_id, INTERRUPTED_BY_STEER)

    def fence(self, activation: ActivationId, reason: str) -> None:
        """The activation is over itself."""
        watch = self._watches.pop(activation, None)
        if watch is not None and not watch.reason.done():
            watch.reason.set_exception(Fenced(reason, session_id=activation.session_id))
            watch.reason.exception()  # nobody may be waiting
