"""Responses in background mode at the simulated endpoint: it makes them whoever listens, and keeps them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import httpx2

from understudy.config import Fallback, ModelProfile
from understudy.testing.protocol import Completion, error_body
from understudy.testing.responses import Rendered, response_identifier
from understudy.testing.stored import StoredResponse

if TYPE_CHECKING:
    from .world import World

SPARE = ModelProfile("spare", "key", "http://spare/v1", protocol="responses", background=True)
"""The fallback, which always answers. It is another endpoint only by its host's name."""

PROFILE = ModelProfile(
    "offline",
    "key",
    "http://endpoint/v1",
    protocol="responses",
    background=True,
    fallbacks=(Fallback("spare", on=("unavailable", "refused")),),
)

REFUSED = 0.2
"""How many model calls the first endpoint refuses, however often they are made."""

JSON = {"content-type": "application/json"}

WAIT_KEY: ContextVar[str] = ContextVar("wait_key", default="")
"""Of the model call that a gateway makes: the endpoint itself would not know."""

PAUSE = 0.004
"""Seconds between two events of a response."""

LOST = 0.03
"""How many responses the endpoint forgets."""

TROUBLE = 0.2
"""How many streams of a response end in its midst, and how many fetches fail, if the endpoint has trouble at all."""


class Responses:
    """What the endpoint keeps.

    Attributes:
        made: how often a response to a call was made, by its wait key.
        unwanted: responses that a gateway has asked to cancel.
    """

    def __init__(self, world: World, chosen: random.Random, seed: int) -> None:
        self._world = world
        self._chosen = chosen
        self._seed = seed
        self._host: dict[str, str] = {}
        self.unwanted: set[str] = set()
        self._kept: dict[str, StoredResponse] = {}
        self._times: Counter[str] = Counter()
        self.made: Counter[str] = Counter()

    def refusal(self, host: str) -> httpx2.Response | None:
        """What the first endpoint answers to a call for which its fallback is there."""
        if host == "spare" or random.Random(f"{self._seed}/{WAIT_KEY.get()}/refused").random() >= REFUSED:
            return None
        return httpx2.Response(400, content=error_body(400, "this one is for the fallback"), headers=JSON)

    def make(
        self, completion: Completion, body: dict[str, Any], digest: str, delay: float, host: str
    ) -> httpx2.Response:
        """Begin with a response, and send what comes of it."""
        wait_key = WAIT_KEY.get()
        identifier = response_identifier(digest, self._times[digest])
        self._times[digest] += 1
        rendered = Rendered(completion, body, identifier)
        stored = StoredResponse(rendered, delay=delay, pause=PAUSE, lost=self._chosen.random() < LOST)
        self._check_new(wait_key, identifier)
        self._kept[identifier] = stored
        self._host[identifier] = host
        self._world.counts["responses of the fallback"] += host == "spare"
        self.made[wait_key] += 1
        self._world.counts["responses"] += 1
        stored.begin(_now())
        return self._stream(stored, 0)

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        """What is asked about a response that was made before."""
        _, _, rest = request.url.path.partition("/responses/")
        identifier, _, verb = rest.partition("/")
        stored = self._kept.get(identifier)
        if stored is not None and self._host[identifier] != request.url.host:
            self._world.invariants.violated(f"response {identifier} is asked for at {request.url.host}")
        if stored is None or stored.lost:
            return httpx2.Response(404, content=error_body(404, f"no response {identifier}"), headers=JSON)
        if verb == "cancel":
            stored.cancel(_now())
            self._world.counts["responses cancelled"] += 1
            return httpx2.Response(200, content=stored.whole(_now()), headers=JSON)
        self._world.counts["responses fetched"] += 1
        if self._world.endpoint.trouble and self._chosen.random() < TROUBLE:
            self._world.note("the endpoint answers 500 to a fetch")
            return httpx2.Response(500, content=error_body(500, "trouble"), headers=JSON)
        query = parse_qs(request.url.query.decode())
        if query.get("stream") != ["true"]:
            return httpx2.Response(200, content=stored.whole(_now()), headers=JSON)
        return self._stream(stored, int((query.get("starting_after") or ["-1"])[0]) + 1)

    def _stream(self, stored: StoredResponse, position: int) -> httpx2.Response:
        cut = bool(self._world.endpoint.trouble) and self._chosen.random() < TROUBLE
        last = self._chosen.randrange(position, len(stored.events) + 1) if cut else -1
        return httpx2.Response(200, stream=Growing(stored, position, last), headers={"content-type": EVENTS})

    def _check_new(self, wait_key: str, identifier: str) -> None:
        """Nobody pays for a response while the store knows another one to the same call, which the endpoint has."""
        session_id, run_id, round_number = wait_key.split("/")
        found = self._world.committed(
            f"SELECT response_id FROM session WHERE session_id = '{session_id}' AND run_id = '{run_id}'"
            f" AND round = {round_number} AND wait = 'model'"
        )
        for (known,) in found:
            stored = self._kept.get(known)
            gone = stored is None or stored.lost or stored.is_cancelled or known in self.unwanted
            if not gone:
                text = (
                    f"response {identifier} to {wait_key} is paid for, and the endpoint has {known}, as the store knows"
                )
                self._world.invariants.violated(text)


EVENTS = "text/event-stream"


def _now() -> float:
    return asyncio.get_running_loop().time()


class Growing(httpx2.AsyncByteStream):
    """The events of a response as they come; the connection is lost at the event `last`, if there is one."""

    def __init__(self, stored: StoredResponse, position: int, last: int) -> None:
        self._stored = stored
        self._position = position
        self._last = last

    async def __aiter__(self) -> AsyncIterator[bytes]:
        stored = self._stored
        while True:
            available = stored.available(_now())
            if 0 <= self._last <= available:
                yield b"".join(stored.events[self._position : self._last])
                raise httpx2.ReadError("connection lost")
            if self._position < available:
                yield b"".join(stored.events[self._position : available])
                self._position = available
            if stored.is_over(_now()):
                return
            due = stored.due(self._position)
            await asyncio.sleep(PAUSE if due is None else max(PAUSE, due - _now()))

    async def aclose(self) -> None:
        pass


class Counted:
    """Which responses the log has counted: each is paid once, so it is counted once."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        self._seen: set[str] = set()

    def completed(self, response_id: str, request_key: str) -> None:
        """The log has an answer."""
        if response_id in self._seen:
            self._violated(f"response {response_id} is counted once more, as the answer to {request_key}")
        self._seen.add(response_id)
