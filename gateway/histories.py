"""The beginnings of what models are asked: a session's history is sent to the gateway once."""

from __future__ import annotations

from collections import OrderedDict

from understudy.protocol import CallOrigin
from understudy.records import ModelRequest

KEPT_BYTES = 64 * 1024 * 1024
"""So much text is kept, of the sessions that asked last. Of one that asks again after it was forgotten all is sent."""


class Histories:
    """The messages of each session's latest request: the next one needs to bring what is new only.

    Nothing depends on what is kept: whoever lacks the beginning of a request says so, and is sent all of it. Only a
    session's own requests go on from what is kept of it, and of its texts only the one they name.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], ModelRequest] = OrderedDict()
        self._size = 0

    def completed(self, origin: CallOrigin, request: ModelRequest) -> ModelRequest | None:
        """The request with all of its messages, which are kept for the next one; None if what it leaves out is not
        here.

        Args:
            origin: whose request it is, as the node service knows.
        """
        session = origin.session_id, origin.incarnation
        kept = self._forget(session)
        if request.left_out:
            if kept is None or kept.text != request.text or kept.lasting < request.left_out:
                return None
            request = request.completed(kept.messages)
        if request.lasting:
            self._keep(session, request)
        return request

    def _keep(self, session: tuple[str, int], request: ModelRequest) -> None:
        self._kept[session] = request
        self._size += len(request.messages)
        while self._size > KEPT_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, session: tuple[str, int]) -> ModelRequest | None:
        kept = self._kept.pop(session, None)
        self._size -= len(kept.messages) if kept is not None else 0
        return kept
