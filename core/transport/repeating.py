"""Calls of a service that may die, hang or be cut off, which the caller repeats. No Ray.

Every call is idempotent: one that is repeated after it ended is done again, and finds it done. The attempts of a call
share an id, so that a service which is still busy with one attempt does not begin again with the next.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ServiceGone, StoreUnreachable
from ..identifiers import new_identifier
from ..waiting import retrieve_error

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5

Result = TypeVar("Result")
Attempt = Callable[[str], Awaitable[Result]]
"""Makes one attempt, under the id of its call. Raises `ServiceGone` when the service can't be reached."""


@dataclass(frozen=True)
class Patience:
    """How long a caller waits.

    Attributes:
        attempt: seconds that the first attempt is given; None for no limit.
        growth: each further one is given so many times as long.
        longest: but no longer than this.
        gone: seconds after which a service that is gone is given up; one that only gives no answer is not gone.
        whole: seconds after which the call is given up whatever the reason; None for no end.
        store: whether a service that can't reach its store is waited for.
    """

    attempt: float | None
    growth: float = 1.0
    longest: float = 120.0
    gone: float = 60.0
    whole: float | None = None
    store: bool = False


FRAME_PATIENCE = Patience(attempt=15.0, gone=300.0, store=True)
"""A frame repeats a call that has no answer: one that was pending when its service was killed is now and then not
reported for minutes, and repeating is free. A service that was restarted while its store is away can't even wait for
it."""

SUPERVISOR_PATIENCE = Patience(attempt=8.0, growth=2.0, whole=60.0)
"""An attempt is given more than `demand` takes."""

REPEAT_SECONDS = 5.0
"""A client's request without an answer for so long is repeated: its service may be cut off, and repeating is free."""

RETRY_SECONDS = 60.0
"""A client looks so long for services that are gone."""

CLIENT_PATIENCE = Patience(attempt=REPEAT_SECONDS, growth=2.0, longest=120.0, gone=RETRY_SECONDS)
"""A service without an answer may be cut off; but a request that takes long must not be repeated for ever."""


async def _anybody(_number: int) -> None:
    """The choice where there is one service only."""


class Repeating:
    """Repeats calls until they are answered.

    Attributes:
        gone_since: when the service was found to be gone (the event loop's time), by any call; None while it is not.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.gone_since: float | None = None

    async def call(
        self,
        attempt: Attempt[Result],
        *,
        call_id: str = "",
        choose: Callable[[int], Awaitable[None]] = _anybody,
    ) -> Result:
        """The answer to a call.

        Args:
            call_id: calls of one id are one call; empty: this is a new one.
            choose: awaited before each attempt, with its number from 0 on, where there are several services to ask.

        Raises:
            UnderstudyError: what the service raised.
            ServiceGone: the call was given up (`Patience`); it may or may not have had its effect.
        """
        time = asyncio.get_running_loop().time
        patience, call_id = self._patience, call_id or new_identifier()
        began, number, pause, given = time(), 0, FIRST_PAUSE, patience.attempt
        while True:
            await choose(number)
            number += 1
            try:
                async with asyncio.timeout(given):
                    result = await attempt(call_id)
            except TimeoutError:  # it takes long, or got lost with a service that was killed
                self.gone_since, wait = None, 0.0  # an answer that comes while nobody waits is lost
                error = ServiceGone(f"no answer within {time() - began:.0f} s")
                given = given and min(patience.longest, patience.growth * given)
            except ServiceGone as gone:
                error, wait = gone, pause
                self.gone_since = time() if self.gone_since is None else self.gone_since
                if time() - self.gone_since >= patience.gone:
                    raise
            except StoreUnreachable as away:
                if not patience.store:
                    raise
                error, wait, self.gone_since = ServiceGone(f"it waits for its store: {away.message}"), pause, None
                log.info("a service waits for its store: %s", away)
            else:
                self.gone_since = None
                return result
            if patience.whole is not None and time() - began > patience.whole:
                raise error
            await asyncio.sleep(wait)
            pause = min(LONGEST_PAUSE, pause + wait)


class Joining:
    """The side of a caller that may ask for the same thing twice at a time: equal calls under way are one call.

    One that was given up, and is made again, has the same id: it may still be under way at the service.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._caller = new_identifier()  # another process's equal call is another call: each would end the other's
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._waiting: Counter[str] = Counter()

    async def call(self, attempt: Attempt[Result], method: str, arguments: tuple[Any, ...]) -> Result:
        """Make a call, or wait for the equal one that is under way. Raises what `Repeating.call` raises."""
        asked = hashlib.sha256(pickle.dumps((method, arguments))).hexdigest()
        work = self._under_way.get(asked)
        if work is None or work.done():
            call = Repeating(self._patience).call(attempt, call_id=f"{self._caller}/{asked}")
            work = self._under_way[asked] = asyncio.get_running_loop().create_task(call)
            work.add_done_callback(retrieve_error)
        self._waiting[asked] += 1
        try:
            return await asyncio.shield(work)
        finally:
            self._waiting[asked] -= 1
            if not self._waiting[asked]:
                work.cancel()  # nobody waits any more, if it has not ended
                del self._waiting[asked]
                if self._under_way.get(asked) is work:
                    del self._under_way[asked]


class Answering:
    """The service's side: a repetition takes the place of the attempt that it repeats.

    What a call asks for is not begun a second time while it is under way. Whoever repeats it waits for that, and the
    attempt before ends. So an outage leaves one call of each caller, with one operation in the journal.
    """

    def __init__(self) -> None:
        self._work: dict[str, asyncio.Task[Any]] = {}
        self._latest: dict[str, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        """How many calls are not answered yet."""
        return len(self._work)

    async def answer(self, call_id: str, begin: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Do what a call asks for, or wait for it if that is under way.

        Raises:
            ServiceGone: the call was repeated since; nobody waits for this attempt.
        """
        loop = asyncio.get_running_loop()
        work = self._work.get(call_id)
        if work is None:
            work = self._work[call_id] = loop.create_task(begin())
            work.add_done_callback(lambda done: self._ended(call_id, done))
        earlier = self._latest.get(call_id)
        if earlier is not None and not earlier.done():
            earlier.set_result(None)
        over = self._latest[call_id] = loop.create_future()  # when the work is done, or the call is repeated
        try:
            await over
        finally:
            if self._latest.get(call_id) is over:
                del self._latest[call_id]
        if not work.done():
            raise ServiceGone("the call was repeated")
        return work.result()  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Give up what is under way."""
        work = list(self._work.values())
        for task in work:
            task.cancel()
        if work:
            await asyncio.wait(work)

    def _ended(self, call_id: str, work: asyncio.Task[Any]) -> None:
        del self._work[call_id]
        retrieve_error(work)
        latest = self._latest.get(call_id)
        if latest is not None and not latest.done():
            latest.set_result(None)
