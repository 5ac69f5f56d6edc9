"""Which call of a server a question of it belongs to, and the time that a call has while a person is asked. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar

from mcp_types import ElicitRequestFormParams, ElicitRequestParams, ElicitResult

from understudy.identifiers import new_identifier
from understudy.messages import encodable
from understudy.tool_hosting import Elicitation, ElicitationAnswer, ServerCall

from .limits import LONGEST_DESCRIPTION, LONGEST_SCHEMA, MOST_QUESTIONS

Ask = Callable[[Elicitation], Awaitable[ElicitationAnswer]]


class CallAtWork:
    """A call that a server is at.

    Attributes:
        session_id: whose call it is.
        ask: asks a person about it.
        open: its questions that have no answer.
        asked: how many it has had.
    """

    def __init__(self, call: ServerCall, ask: Ask, limit: asyncio.Timeout) -> None:
        self.session_id = call.key.partition("/")[0]
        self.ask = ask
        self.open = self.asked = 0
        self._limit = limit
        self._stopped = 0
        self._left = 0.0

    def stop(self) -> None:
        """Have its time stand still, until `go_on` was called as often."""
        due = self._limit.when()
        self._stopped += 1
        if self._stopped == 1 and due is not None and not self._limit.expired():
            self._left = max(0.0, due - asyncio.get_running_loop().time())
            self._limit.reschedule(None)

    def go_on(self) -> None:
        """See `stop`."""
        self._stopped -= 1
        if not self._stopped and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left)


_CURRENT: ContextVar[CallAtWork | None] = ContextVar("call", default=None)
"""The call for which a request is on its way: a question in the answer to it is a question of this call."""


class Eliciting:
    """The questions of one server.

    A question names no call. One that comes over standard input and output may be of any call that the server is at.
    It is then taken for one of the session whose calls these are, and put to a person with the oldest call that asks
    nothing yet; where these are of several sessions nobody is asked.
    """

    def __init__(self) -> None:
        self._at: list[CallAtWork] = []

    @contextlib.asynccontextmanager
    async def at(self, call: ServerCall, ask: Ask) -> AsyncIterator[None]:
        """A call is made, within its time. Raises `TimeoutError` after that."""
        async with asyncio.timeout(call.timeout) as limit:
            one = CallAtWork(call, ask, limit)
            self._at.append(one)
            token = _CURRENT.set(one)
            try:
                yield
            finally:
                _CURRENT.reset(token)
                self._at.remove(one)

    async def answer(self, asked: ElicitRequestParams, shown: Callable[[str], str]) -> ElicitResult:
        """What a person says to a question.

        Args:
            shown: a text of the server as others may see it.
        """
        if not isinstance(asked, ElicitRequestFormParams):
            return ElicitResult(action="decline")
        call = _CURRENT.get()
        call = call if call in self._at else self._whose()
        schema = json.dumps(asked.requested_schema)
        too_large = len(asked.message) > LONGEST_DESCRIPTION or len(schema) > LONGEST_SCHEMA
        if call is None or too_large or call.asked >= MOST_QUESTIONS:
            return ElicitResult(action="cancel")
        call.asked += 1
        with self._waiting(call):
            form = encodable(json.loads(shown(schema)))
            said = await call.ask(Elicitation(new_identifier(), shown(asked.message), form))
        return ElicitResult.model_validate({"action": said.action, "content": said.content})

    def _whose(self) -> CallAtWork | None:
        if len({call.session_id for call in self._at}) != 1:
            return None
        return min(self._at, key=lambda call: call.open)

    @contextlib.contextmanager
    def _waiting(self, call: CallAtWork) -> Iterator[None]:
        """Time stands still for the session's calls: it may be any of them that asks."""
        stopped = [one for one in self._at if one.session_id == call.session_id]
        call.open += 1
        for one in stopped:
            one.stop()
        try:
            yield
        finally:
            call.open -= 1
            for one in stopped:
                if one in self._at:
                    one.go_on()
