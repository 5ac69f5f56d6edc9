"""How long Ray's head has not answered (`understudy.ports.ClusterHead`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

ASK_SECONDS = 5.0
"""From one answer to the next question, and the time that an answer may take."""


class HeadWatch:
    """Asks the head all the time, from a thread of its own: without a head Ray's calls block, and some for minutes.

    Args:
        ask: asks the head something small; raises when it has not answered within so many seconds.
    """

    def __init__(self, ask: Callable[[float], None], period: float = ASK_SECONDS) -> None:
        self._ask = ask
        self._period = period
        self._unanswered_since: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="understudy-head", daemon=True).start()

    def silence(self) -> float:
        """See `ClusterHead.silence`."""
        since = self._unanswered_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Ask no more. What is being asked is not waited for."""
        self._closed.set()

    def _watch(self) -> None:
        warned = False
        while not self._closed.is_set():
            if self._unanswered_since is None:
                self._unanswered_since = time.monotonic()
            try:
                self._ask(self._period)
            except Exception as error:  # whatever it is: there was no answer
                if not warned:
                    log.warning("Ray's head does not answer: %s", error)
                warned = True
            else:
                if warned:
                    log.warning("Ray's head answers again after %.0f s", self.silence())
                warned, self._unanswered_since = False, None
            self._closed.wait(self._period)
