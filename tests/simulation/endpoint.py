"""The endpoint: the offline model behind a transport that the seed makes slow, silent or wrong."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx2

from understudy.actors.window import CONTINUE
from understudy.identifiers import digest
from understudy.messages import CUT_OFF
from understudy.testing.policies import Refusal, Reply, content_text, default_policy
from understudy.testing.protocol import Completion, check_body, error_body
from understudy.testing.rate_limit import MINUTE, RateLimit
from understudy.testing.responses import chat_body

from . import commands, goals, typed
from .background import named, unheard
from .folding import summary, unfolded
from .handoffs import to_one_of
from .plan import STEER
from .responses import Responses


class Endpoint(httpx2.AsyncBaseTransport):
    """Answers chat completions, or requests for responses in the background, streamed, in virtual time.

    Attributes:
        calls: how often each model call was made, by its wait key: one that is made again is paid again.
        refused: what was not acceptable to a real endpoint; must stay empty.
        storms: minutes with far more requests than its limit; must stay empty.
        takes_formats: it knows response formats.
        kept: the responses that it makes in the background; None: it speaks chat completions.
    """

    kept: Responses | None = None

    def __init__(
        self, chosen: random.Random, odd: random.Random, lengths: random.Random, note: Callable[[str], None],
        trouble: float, stuck: float, forms: random.Random, limit: int = 0,
    ) -> None:  # fmt: skip
        self.takes_formats = forms.random() < 0.7
        self._forms = forms
        self._chosen = chosen
        self._odd = odd
        self._lengths = lengths
        self._stuck = stuck
        self._met: set[str] = set()
        self._note = note
        self.trouble = trouble
        self.calls: Counter[str] = Counter()
        self.refused: list[str] = []
        self.storms: list[str] = []
        self._limit = RateLimit(limit) if limit else None
        self._arrived: deque[float] = deque()

    def _limited(self) -> httpx2.Response | None:
        """The response to a request beyond the limit. All that arrive are counted: their number is bounded, too."""
        if self._limit is None:
            return None
        now = time.monotonic()
        self._arrived.append(now)
        while now - self._arrived[0] >= MINUTE:
            self._arrived.popleft()
        bound = STORM * self._limit.per_minute + STARTS
        if len(self._arrived) > bound:
            self.storms.append(f"{len(self._arrived)} requests within a minute, of {self._limit.per_minute}")
        accepted, headers = self._limit.accept()
        if accepted:
            return None
        self._note("the endpoint refuses a request beyond its limit")
        stated = dict(line.split(": ", 1) for line in headers.split("\r\n") if line)
        return httpx2.Response(429, content=error_body(429, "rate limit"), headers={**JSON, **stated})

    def count(self, wait_key: str) -> None:
        """A model call is made."""
        self.calls[wait_key] += 1
        if self.calls[wait_key] > 1:
            self._note(f"model call {wait_key} is made again")

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        kept = self.kept
        if kept is not None and "/responses/" in request.url.path:
            await asyncio.sleep(0.005 + self._chosen.random() * 0.05)
            return kept.answer(request)
        given = json.loads(request.content)
        body = given if kept is None else chat_body(given)
        key = digest(json.dumps(body["messages"], sort_keys=True))
        if request.url.host != "spare" and (limited := self._limited()) is not None:
            return limited
        fault = self._chosen.random() < self.trouble
        kind = self._chosen.choice(("500", "429", "connect", "cut", "slow")) if fault else ""
        try:
            messages = check_body(body)
            longest = body.get("max_completion_tokens") or body.get("max_tokens")
            reply = summary(unfolded(messages), longest) or self._reply(body, unfolded(messages))
        except Refusal as error:
            self.refused.append(error.message)
            return httpx2.Response(error.status, content=error_body(error.status, error.message), headers=JSON)
        if "response_format" in body and not self.takes_formats:
            self._note("the endpoint refuses a response format")
            return httpx2.Response(400, content=error_body(400, "response_format is unknown"), headers=JSON)
        if kept is not None and (refusal := kept.refusal(request.url.host)) is not None:
            return refusal
        await asyncio.sleep(reply.delay + 0.005 + self._chosen.random() * 0.05)
        if key not in self._met:
            self._met.add(key)
            if self._stuck and self._chosen.random() < self._stuck:
                await asyncio.sleep(self._chosen.uniform(10.0, 50.0))
        if kind == "connect":
            raise httpx2.ConnectError("connection refused")
        if kind in ("500", "429"):
            self._note(f"the endpoint answers {kind}")
            return httpx2.Response(int(kind), content=error_body(int(kind), "trouble"), headers=JSON)
        if kind == "slow":
            await asyncio.sleep(self._chosen.uniform(5.0, 40.0))
        characters = sum(len(json.dumps(message)) for message in messages)
        completion = Completion.of(reply, body, f"chatcmpl-{key[:12]}", characters)
        if kept is not None:
            return kept.make(completion, given, key[:12], self._chosen.random() * 0.3, request.url.host)
        events = completion.events(include_usage=True)
        # Of an answer that was cut off the rest would not fit; one that is empty, as a summary may be, stays so.
        if self._odd.random() < ODD and reply.finish_reason != CUT_OFF and (reply.text or reply.tool_calls):
            odd = self._odd.choice(ODDITIES)
            events[-3:-3] = [odd]  # before what ends the answer
            self._note(f"the endpoint sends {odd[:120]!r}")
        stream = Stream(events, self._chosen, cut=kind == "cut")
        return httpx2.Response(200, stream=stream, headers={"content-type": "text/event-stream"})

    def _reply(self, body: dict[str, Any], messages: list[dict[str, Any]]) -> Reply:
        """The model's reply, or the rest of one that was cut off; some are cut off again."""
        verdict = goals.verdict(messages)
        messages = commands.unheard(unheard(goals.plain(messages)))
        messages = [message for message in messages if not content_text(message).startswith(f"{STEER} ")]
        said, heard = "", list[dict[str, Any]]()
        while messages[-1]["content"] == CONTINUE:
            messages.pop()
            if messages[-1]["role"] == "assistant":  # an empty one is no item of a request for a response
                said = messages.pop()["content"] + said
        for message in messages:  # the same before a tool call that came with the rest of a reply
            if message["content"] != CONTINUE:
                heard.append(message)
            elif heard[-1]["role"] == "assistant":
                heard.pop()
        reply = named(default_policy({**body, "messages": typed.without_rejected(heard)}), heard)
        reply = to_one_of(commands.named(reply, heard), body)
        if not reply.tool_calls and typed.is_wanted(body, said):
            reply = typed.answer(reply, body, self._forms, well=bool(said), text=verdict)
        if reply.tool_calls or not reply.text:
            return reply
        text = reply.text.removeprefix(said)
        if len(text) > 1 and self._lengths.random() < CUT_SHORT:
            return replace(reply, text=text[: self._lengths.randrange(1, len(text))], finish_reason=CUT_OFF)
        return replace(reply, text=text)

    async def aclose(self) -> None:
        pass


STORM, STARTS = 1.5, 10
"""No minute has more requests than so many times the limit, and so many for gateways that are started: a node that is
cut off has an equal part beside the others, and a gateway's first request goes at once."""

CUT_SHORT = 0.1
"""How many replies reach their longest length."""

ODD = 0.05
"""How many answers have something in them that is not as it should be."""


def _chunk(delta: str, more: str = "") -> bytes:
    return f'data: {{"choices": [{{"index": 0, "delta": {delta}}}]{more}}}\n\n'.encode()


ODDITIES = (
    _chunk('{"reasoning_content": "half \\ud83d", "score": NaN}'),
    _chunk('{"reasoning_content": "half \\ud83d"}') + _chunk('{"reasoning_content": "\\ude00 of it"}'),
    _chunk('{"content": "\\ud83d"}'),
    _chunk(
        '{"tool_calls": [{"index": 90, "id": "deep", "function": {"name": "look", "arguments": "%s"}}]}' % ("[" * 5000)
    ),
    _chunk('{"tool_calls": [{"index": 90, "id": 5, "function": {"name": "look", "arguments": "{}"}}]}'),
    _chunk("{}", ', "usage": {"prompt_tokens": "10"}'),
    _chunk("{}", ', "usage": {"prompt_tokens": 100000000000000000000}'),
)
"""What can be kept or put right, and what is no answer: a run then fails, and the next one goes on."""

JSON = {"content-type": "application/json"}


class Stream(httpx2.AsyncByteStream):
    """A streamed answer, in two pieces with a pause between them."""

    def __init__(self, events: list[bytes], chosen: random.Random, *, cut: bool) -> None:
        half = len(events) // 2
        self._pieces = [b"".join(events[:half]), b"".join(events[half:])]
        self._pause = chosen.random() * 0.02
        self._cut = cut

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number, piece in enumerate(self._pieces):
            if number and self._cut:
                raise httpx2.ReadError("connection lost")
            yield piece
            await asyncio.sleep(self._pause)

    async def aclose(self) -> None:
        pass


def client_of(endpoint: Endpoint) -> Callable[..., Any]:
    """What `openai.DefaultAioHttpClient` is in the simulation."""

    def make(**_options: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=endpoint)

    return make
