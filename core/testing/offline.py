"""The offline model: a deterministic HTTP server that speaks chat completions, OpenAI's Responses and Anthropic's
Messages.

It serves tests, demos and benchmarks, so it starts fast and costs little: asyncio protocols, nothing but the standard
library. Answers are made by a `Policy` (see `policies`), a pure function of the request body.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Any

from .http import CALLS, Answer, Connection
from .messages_api import RenderedMessage
from .messages_api import chat_body as chat_body_of_message
from .messages_api import error_body as message_error
from .policies import Policy, Refusal, Reply, default_policy, policy_from_script, register_policy
from .prefixes import Prefixes
from .protocol import Completion, check_body, compact, error_body
from .rate_limit import RateLimit
from .responses import Rendered, response_identifier
from .responses import chat_body as chat_body_of_response
from .stored import StoredResponse

__all__ = [
    "Faults",
    "OfflineServer",
    "Policy",
    "RateLimit",
    "RecordedRequest",
    "Refusal",
    "Reply",
    "Stats",
    "default_policy",
    "policy_from_script",
    "register_policy",
]

CHAT, RESPONSES, MESSAGES = CALLS

RECORDED = 4_096
"""How many of the last requests a server remembers."""
GOLDEN = (math.sqrt(5) - 1) / 2

READ_BY: dict[str, Callable[[Any], Any]] = {
    CHAT: lambda body: body,
    RESPONSES: chat_body_of_response,
    MESSAGES: chat_body_of_message,
}
"""What makes a request of chat completions of one under each path: policies know no other."""

EVENT_STREAM = "text/event-stream"

MALFORMED = b'data: {"half": \n\n'

HTML = b"<!doctype html><html><body><h1>It works!</h1></body></html>"


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how often: fractions of the model calls, spread evenly by their number.

    Attributes:
        status_429, status_500, status_529: fractions answered with these statuses.
        cut_stream: fraction whose connection is closed in the middle of the answer; of fetched responses as well.
        stall: fraction of which nothing more comes from the middle of the answer on; of fetched responses as well.
        malformed: fraction with something in the middle of the stream that is no JSON.
        lost_ids: fraction of the responses in background mode that can't be fetched.
        cut_at: cuts and stalls come after so many events of a connection, not after half of them.
        retry_after: seconds, sent with every 429, 500 and 529.
        html: every chat request gets a web page with status 200.
        fail_first: that many requests are answered with `fail_status` before anything else.
    """

    status_429: float = 0.0
    status_500: float = 0.0
    cut_stream: float = 0.0
    retry_after: float | None = None
    html: bool = False
    fail_first: int = 0
    fail_status: int = 500
    status_529: float = 0.0
    stall: float = 0.0
    malformed: float = 0.0
    lost_ids: float = 0.0
    cut_at: int = 0

    def of(self, number: int) -> str | int | None:
        """What goes wrong with the model call of this number (from 1): a status, `cut`, `stall`, `malformed`, `html` or
        None."""
        if number <= self.fail_first:
            return self.fail_status
        if self.html:
            return "html"
        return _spread(
            number,
            {429: self.status_429, 500: self.status_500, "cut": self.cut_stream, 529: self.status_529,
             "stall": self.stall, "malformed": self.malformed},
        )  # fmt: skip

    def of_fetch(self, number: int) -> str | int | None:
        """The fault of the fetch with this number: `cut`, `stall` or None."""
        return _spread(number, {"cut": self.cut_stream, "stall": self.stall})

    def is_lost(self, number: int) -> bool:
        """Whether the response to the model call with this number can't be fetched."""
        return _spread(number, {"lost": self.lost_ids}) is not None


def _spread(number: int, shares: dict[str | int, float]) -> str | int | None:
    """Which of the faults something with this number has, by their shares."""
    place = number * GOLDEN % 1.0  # a low-discrepancy sequence: even at every length, unlike a random one
    for fault, share in shares.items():
        if place < share:
            return fault
        place -= share
    return None


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A model call as received; header names are in lower case. `body` is None if it was not JSON."""

    body: Any
    headers: dict[str, str]
    path: str = CHAT


@dataclass(slots=True)
class Stats:
    """Counters of model calls: `requests` = `completed` + `failed` + `aborted` + `in_flight`.

    Attributes:
        completed: answered in full.
        failed: answered with an error, a web page, or half an answer, as a fault or a policy demanded.
        aborted: given up by the client before the end of the answer.
        repeats: requests whose messages were seen before in a request that was not answered with an error.
        refused: of the failed ones, those beyond the rate limit.
        prompt_tokens, completion_tokens: of all answers begun; `cached_tokens` of the former were found again.
        fetches: requests for responses that are kept, which are not counted otherwise; `missed` of them found none.
        cancelled: responses in background mode that were cancelled before their end.
    """

    requests: int = 0
    completed: int = 0
    failed: int = 0
    aborted: int = 0
    in_flight: int = 0
    repeats: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    fetches: int = 0
    missed: int = 0
    cancelled: int = 0
    refused: int = 0

    def to_json(self) -> bytes:
        return compact({name: getattr(self, name) for name in Stats.__slots__}).encode()


class OfflineServer:
    """The offline model at `url`, in a thread of its own between `start()` and `stop()` (or in a `with` block).

    Args:
        policy: what to answer; None for `default_policy`.
        latency: seconds until the first byte of an answer.
        chunk_delay: seconds between the events of a streamed answer; 0 sends them all at once.
        port: 0 for a free one.
        window: tokens of its models' context windows: longer requests are refused as OpenAI does; None for no limit.
        prefix_cache: `cached_tokens` says what of a prompt (tools, then messages) is the beginning of an earlier one of
            the same model, in whole units of 128 tokens, as endpoints with prefix caching do; otherwise it is 0.
        rate_limit: requests beyond it are refused with status 429; None for no limit.

    Attributes:
        requests: the last `RECORDED` chat requests.
        stats: counters; also served at `GET /stats`.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        latency: float = 0.0,
        chunk_delay: float = 0.0,
        faults: Faults | None = None,
        port: int = 0,
        window: int | None = None,
        prefix_cache: bool = False,
        rate_limit: RateLimit | None = None,
    ) -> None:
        self.policy = policy or default_policy
        self.window = window
        self.latency = latency
        self.chunk_delay = chunk_delay
        self.faults = faults or Faults()
        self.port = port
        self.rate_limit = rate_limit
        self.requests: deque[RecordedRequest] = deque(maxlen=RECORDED)
        self.stats = Stats()
        self._seen: dict[str, int] = {}
        self._stored: dict[str, StoredResponse] = {}
        self._prefixes = Prefixes() if prefix_cache else None
        self.connections: set[Connection] = set()
        self.held: list[Connection] | None = None
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """What to use as `OPENAI_BASE_URL`."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def count(self) -> int:
        """Chat requests received."""
        return self.stats.requests

    @property
    def in_flight(self) -> int:
        """Chat requests being answered."""
        return self.stats.in_flight

    def start(self) -> OfflineServer:
        """Serve in a new thread; returns when connections are accepted.

        Raises:
            OSError: the port is taken.
        """
        ready = threading.Event()
        failure: list[BaseException] = []

        async def run() -> None:
            async with self.serving():
                self._stopping = asyncio.Event()
                ready.set()
                await self._stopping.wait()

        def main() -> None:
            try:
                asyncio.run(run())
            except BaseException as error:
                failure.append(error)
                ready.set()

        self._thread = threading.Thread(target=main, name="offline-model", daemon=True)
        self._thread.start()
        ready.wait()
        if failure:
            raise failure[0]
        return self

    def stop(self) -> None:
        """Close all connections and end the thread. Does nothing if it isn't running."""
        if self._thread is None or self._loop is None or self._stopping is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._thread = None

    def __enter__(self) -> OfflineServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[OfflineServer]:
        """Serve on the running loop while the block runs."""
        self._loop = asyncio.get_running_loop()
        server = await self._loop.create_server(
            lambda: Connection(self), "127.0.0.1", self.port, backlog=4_096, reuse_address=True
        )
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for connection in list(self.connections):
                connection.transport.abort()
            await server.wait_closed()
            while self.connections:  # noqa: ASYNC110 - their connection_lost is already scheduled
                await asyncio.sleep(0)

    def hold(self) -> None:
        """Answer nothing from now on until `release()`; requests are accepted and counted as in flight. Responses in
        background mode say their ids, and nothing else."""
        self._run(lambda: setattr(self, "held", [] if self.held is None else self.held))

    def release(self) -> None:
        """Answer all requests held back, and go on."""

        def release() -> None:
            held, self.held = self.held, None
            for connection in held or ():
                connection.send()
            for stored in self._stored.values():
                stored.begin(asyncio.get_running_loop().time())

        self._run(release)

    def wait(self, condition: Callable[[Stats], bool], timeout: float = 30.0) -> None:
        """Block until the counters satisfy `condition`; called from another thread than the server's.

        Raises:
            TimeoutError: naming the counters, when they did not within `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self.stats), timeout):
                raise TimeoutError(f"the offline model did not get there within {timeout} s: {self.stats}")

    def _run(self, action: Callable[[], None]) -> None:
        """Run `action` on the server's loop and wait for it."""
        if self._loop is None:
            raise RuntimeError("the server is not running: call start() first")
        done = threading.Event()

        def act() -> None:
            try:
                action()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(act)
        done.wait()

    def change(self, **changes: int) -> None:
        """Add to the counters, and wake those who wait for them."""
        with self._changed:
            for name, change in changes.items():
                setattr(self.stats, name, getattr(self.stats, name) + change)
            self._changed.notify_all()

    def counted(self) -> bytes:
        """The counters as JSON."""
        return self.stats.to_json()

    def answer(self, raw: bytes, headers: dict[str, str], path: str) -> Answer:
        """Decide on the answer to a model call. Called once per request, in order of arrival."""
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        self.requests.append(RecordedRequest(body, headers, path))
        if self.rate_limit is None:
            return self._answered(body, path)
        accepted, stated = self.rate_limit.accept(anthropic=path == MESSAGES)
        if accepted:
            answer = self._answered(body, path)
        else:
            self.change(refused=1)
            text = "Rate limit reached for requests per min (RPM). Please try again later."
            answer = Answer(429, "application/json", [_report(path, 429, text, "rate_limit_exceeded")])
        answer.extra += stated
        return answer

    def _answered(self, body: Any, path: str) -> Answer:
        number = self.stats.requests + 1
        fault = self.faults.of(number)
        if isinstance(fault, int):
            code = "rate_limit_exceeded" if fault == 429 else None
            return self._error(fault, f"the offline model fails with {fault} as it was told to", code, path)
        if fault == "html":
            return Answer(200, "text/html; charset=utf-8", [HTML])
        try:
            chat = READ_BY[path](body)
            messages = check_body(chat)
            reply = self.policy(chat)
        except Refusal as error:
            return self._error(error.status, error.message, error.code, path)
        except Exception as error:
            traceback.print_exc()
            return self._error(400, f"the offline policy failed: {type(error).__name__}: {error}", None, path)
        dump = compact(messages)
        key = blake2b(dump.encode(), digest_size=12).hexdigest()
        prompt = (compact(chat["tools"]) if chat.get("tools") else "") + dump
        cached = self._prefixes.found(chat["model"], prompt) if self._prefixes is not None else 0
        completion = Completion.of(reply, chat, f"chatcmpl-{key}", len(prompt), cached)
        usage = completion.usage
        if self.window is not None and usage["prompt_tokens"] > self.window:
            text = (
                f"This model's maximum context length is {self.window} tokens. However, your messages resulted in "
                f"{usage['prompt_tokens']} tokens. Please reduce the length of the messages."
            )
            return self._error(400, text, "context_length_exceeded", path)
        times = self._seen.get(key, 0)
        self._seen[key] = times + 1
        self.change(
            repeats=times > 0,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )
        delay = self.latency + reply.delay
        streams = bool(body.get("stream"))
        if path == RESPONSES:
            rendered = Rendered(completion, body, response_identifier(key, times))
            if body.get("background"):
                return self._in_background(rendered, body, delay, fault, lost=self.faults.is_lost(number))
            parts = rendered.events() if streams else [rendered.whole()]
        elif path == MESSAGES:
            message = RenderedMessage(completion, f"msg_{key}")
            parts = message.events() if streams else [message.whole()]
        else:
            include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            parts = completion.events(include_usage) if streams else [completion.whole()]
        if fault == "malformed" and streams:
            parts.insert(len(parts) // 2, MALFORMED)
        kind = EVENT_STREAM if streams else "application/json"
        return self._sent(fault, Answer(200, kind, parts, streamed=streams, delay=delay))

    def _sent(self, fault: str | int | None, answer: Answer) -> Answer:
        """An answer to a model call, with what goes wrong about it."""
        answer.cut, answer.stall, answer.parts_sent = fault == "cut", fault == "stall", self.faults.cut_at
        answer.success = not answer.is_partial
        return answer

    def _in_background(
        self, rendered: Rendered, body: dict[str, Any], delay: float, fault: str | int | None, *, lost: bool
    ) -> Answer:
        """A response that is made whoever listens, and its stream, or what there is of it."""
        stored = StoredResponse(rendered, delay=delay, pause=self.chunk_delay, lost=lost)
        self._stored[rendered.identifier] = stored
        now = asyncio.get_running_loop().time()
        if self.held is None:
            stored.begin(now)
        if not body.get("stream"):
            return Answer(200, "application/json", [stored.whole(now)], success=True)
        return self._sent(fault, Answer(200, EVENT_STREAM, [], stored=stored))

    def fetched(self, identifier: str, query: dict[str, list[str]]) -> Answer:
        """What is kept of a response, or a stream of its events after the one of a number."""
        stored = self._found(identifier)
        if stored is None:
            return self._missing(identifier)
        self.change(fetches=1)
        if query.get("stream") != ["true"]:
            return Answer(200, "application/json", [stored.whole(asyncio.get_running_loop().time())], success=None)
        after = int((query.get("starting_after") or ["-1"])[0])
        answer = Answer(200, EVENT_STREAM, [], stored=stored, position=after + 1)
        answer = self._sent(self.faults.of_fetch(self.stats.fetches), answer)
        answer.success = None
        return answer

    def cancelled(self, identifier: str) -> Answer:
        """A response that shall end."""
        stored, now = self._found(identifier), asyncio.get_running_loop().time()
        if stored is None:
            return self._missing(identifier)
        stored.cancel(now)
        self.change(cancelled=stored.is_cancelled)
        return Answer(200, "application/json", [stored.whole(now)], success=None)

    def _found(self, identifier: str) -> StoredResponse | None:
        stored = self._stored.get(identifier)
        return None if stored is None or stored.lost else stored

    def _missing(self, identifier: str) -> Answer:
        self.change(fetches=1, missed=1)
        answer = self._error(404, f"Response with id '{identifier}' not found.", "not_found")
        answer.success = None
        return answer

    def forget(self) -> None:
        """Lose all responses that are kept, as an endpoint does with those that are too old."""
        self._run(self._stored.clear)

    def _error(self, status: int, message: str, code: str | None = None, path: str = CHAT) -> Answer:
        extra = ""
        if self.faults.retry_after is not None and status in (429, 500, 529):
            seconds = self.faults.retry_after
            extra = f"retry-after: {math.ceil(seconds)}\r\nretry-after-ms: {round(seconds * 1000)}\r\n"
        return Answer(status, "application/json", [_report(path, status, message, code)], extra=extra)


def _report(path: str, status: int, message: str, code: str | None) -> bytes:
    """The body of an error, in the protocol of the path."""
    return message_error(status, message) if path == MESSAGES else error_body(status, message, code)
