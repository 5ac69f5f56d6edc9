"""One model call: its tries, what is worth another one, and what each answer or error of the endpoint means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp
import httpx2
import openai

from understudy.errors import ContextOverflow, ModelError, ModelProtocolError, ModelRefused, ModelUnavailable
from understudy.estimates import estimate_usage
from understudy.records import KeptResponse, ModelAnswer, ModelRequest
from understudy.streams import Piece
from understudy.waiting import answered_within

from .adapters import EndpointError, Malformed, Reading
from .admission import Turn
from .backoff import Backoff, retry_after_seconds
from .course import Course
from .endpoint import Endpoint, read_within
from .failures import FINAL_CODES, FINAL_REPORTS, RETRIED, Failure, Pending, RateLimited, reason_of
from .overflow import is_overflow, stated_window
from .sse import MAX_ANSWER, EventStream

TRAILER_TIMEOUT = 1.0
"""Seconds to wait for the end of a response whose answer is complete, so that the connection can be used again."""
POLL_SECONDS = 1.0
"""Between two questions for a response that the endpoint makes in the background and does not stream."""


@dataclass(frozen=True)
class Listener:
    """Who follows how a call goes; see `Gateway.call`."""

    on_delta: Callable[[Piece], None] | None
    on_restart: Callable[[], None] | None
    on_response: Callable[[KeptResponse | None], None] | None
    course: Course

    def start_over(self) -> None:
        """Another endpoint is asked: what the one before has said is void."""
        if self.on_restart is not None:
            self.on_restart()
        if self.on_response is not None:
            self.on_response(None)


class Tries:
    """One call with its tries.

    Attributes:
        endpoint, request: who is asked for what.
        course: what is measured.
        seconds: spent in its turns so far.
    """

    def __init__(
        self,
        backoff: Backoff,
        endpoint: Endpoint,
        request: ModelRequest,
        listener: Listener,
    ) -> None:
        self._backoff = backoff
        self.endpoint = endpoint
        self._on_delta = listener.on_delta
        self._on_restart = listener.on_restart
        self._on_response = listener.on_response if endpoint.adapter.keeps else None
        self.request = request
        self.course = listener.course
        self._reading = endpoint.adapter.begin(request, request.response.id if request.response is not None else "")
        self._known = self._reading.identifier  # the caller knows it
        self._turn: Turn
        self.seconds = 0.0
        self._retries = 0
        self._in_a_row = 0  # of these, since something came of a response that goes on
        self._refusals = 0
        self._refused_for = 0.0
        self._failure: Failure | None = None
        self._delivered = False
        self._started_at = time.time_ns() // 1_000
        self._start = time.monotonic_ns()
        self._first_chunk = 0
        self._heard = 0.0

    @property
    def fetches(self) -> bool:
        """Whether it begins with what the endpoint keeps of a response: a model is not asked."""
        return bool(self._reading.continuation)

    @property
    def unfinished(self) -> KeptResponse | None:
        """The response that the endpoint may be at work on still, for nobody once the call has failed."""
        reading = self._reading
        return self._kept(reading.identifier) if reading.continuation and not reading.done else None

    async def run(self, turn: Turn) -> ModelAnswer:
        """The tries in this turn, until one succeeds, fails for good, or time is up.

        Raises:
            RateLimited: run it again in another turn.
            Stopped: no retry is possible before the deadline.
        """
        self._turn = turn
        if not self._refusals:  # until now it has waited
            self._started_at, self._start = time.time_ns() // 1_000, time.monotonic_ns()
            self.course.begins(self._started_at)
        begun = time.monotonic()
        try:
            return await answered_within(self._tries(), self.request.deadline)
        except TimeoutError:
            last = f"; the last try failed: {self._failure.what}" if self._failure else ""
            self._fail(ModelUnavailable, f"had no complete answer within {self.request.deadline:g} s{last}")
        finally:
            self.seconds += time.monotonic() - begun

    async def _tries(self) -> ModelAnswer:
        while True:
            progress = self._reading.progress
            try:
                answer = self._answer(await self._try())
                self._turn.answered(answer.usage)
                return answer
            except Pending:
                self._in_a_row = 0
                await asyncio.sleep(POLL_SECONDS)
            except Failure as failure:
                self._failure = failure
                if self._reading.continuation and self._reading.progress > progress:
                    self._in_a_row = 0
                await self._before_retry(failure)

    async def _before_retry(self, failure: Failure) -> None:
        """Wait as long as backoff or the endpoint says; raise when there is no retry left."""
        if self._in_a_row >= self._backoff.retries:
            self._fail(ModelUnavailable, f"failed {self._retries + 1} times, at last: {failure.what}")
        delay = self._backoff.delay(self._in_a_row, failure.retry_after)
        if delay >= self.request.deadline:  # else that ends the wait, and does not count pauses of this process
            self._fail(ModelUnavailable, f"failed, and a retry in {delay:.1f} s is past the deadline: {failure.what}")
        self._retries += 1
        self._in_a_row += 1
        self.course.retries(failure.reason)
        await asyncio.sleep(delay)
        if not self._reading.continuation:
            await self._turn.again(self.request.deadline)
            self._restart()
            self._reading = self.endpoint.adapter.begin(self.request)

    def _restart(self) -> None:
        """What was delivered is void: the answer comes from its start."""
        if self._delivered:
            self._delivered = False
            if self._on_restart is not None:
                self._on_restart()

    async def _try(self) -> Reading:
        """One try, given up when the endpoint says nothing for too long, before its answer or in the midst of it.

        As with the deadline, only time counts in which this process runs: after a pause the answer may lie in the
        socket, and is paid for.
        """
        stall = self.request.stall
        self._heard = time.monotonic()
        self.course.begin_stream()
        try:
            return await answered_within(self._exchange(), stall, lambda: self._heard)
        except TimeoutError:
            self._reading.reroute(None)
            raise Failure(f"the endpoint said nothing for {stall:g} s", "timeout") from None

    async def _exchange(self) -> Reading:
        continuation = self._reading.continuation
        try:
            sending = self.endpoint.get(continuation) if continuation else self.endpoint.post(self.request)
            response = await sending
            if not continuation:  # limits are of requests to a model
                self._turn.heard(response.headers)
            try:
                return await self._read(response)
            finally:
                await response.aclose()
        except openai.APIStatusError as error:
            if continuation and self._reading.reroute(error.status_code):
                raise Failure(
                    self.endpoint.clean(f"the response {self._reading.identifier} can't be had so: {error.message}"),
                    "stream_refused",
                    status=error.status_code, code=error.code, retry_after=0.0,
                ) from None  # fmt: skip
            self._status_error(error)
        except aiohttp.ClientResponseError as error:
            self._not_the_protocol(error.status, "", f"It is not HTTP: {error.message}")
        except (httpx2.RequestError, aiohttp.ClientError) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            message = self.endpoint.clean(f"{type(cause).__name__}: {cause}")
            # By its cause: the transport reports every failed connection as a timeout.
            raise Failure(message, "timeout" if isinstance(cause, TimeoutError) else "connection") from None
        except EndpointError as error:
            self._reported_error(error.body)

    async def _read(self, response: httpx2.Response) -> Reading:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        reading = self._reading
        try:
            if kind == "application/json":
                await self._read_whole(response)
            elif kind in ("text/event-stream", ""):
                await self._read_stream(response)
            else:
                start = (await read_within(response, 80))[:80].decode("utf-8", "replace")
                self._not_the_protocol(response.status_code, kind, f"It begins: {start!r}")
        except Malformed as error:
            self._not_the_protocol(response.status_code, kind, str(error))
        if not reading.complete:
            raise Failure("the stream ended in the middle of the answer", "stream_ended")
        return reading

    async def _read_whole(self, response: httpx2.Response) -> None:
        pieces = self._taken((await read_within(response, MAX_ANSWER)).decode("utf-8", "replace"))
        if self._reading.pending:
            raise Pending
        if not self._reading.complete:
            raise Malformed("a response without an answer")
        self._restart()  # where a stream was given up, all of it has come again
        self._deliver(pieces)

    async def _read_stream(self, response: httpx2.Response) -> None:
        stream, received, reading = EventStream(), 0, self._reading
        chunks = response.aiter_bytes() if "content-encoding" in response.headers else response.aiter_raw()
        async for chunk in chunks:
            self._heard = time.monotonic()
            received += len(chunk)
            if received > MAX_ANSWER:  # it would take the gateway's memory, and with it all calls of this node
                raise Malformed(f"an answer of more than {MAX_ANSWER} bytes")
            for data in stream.feed(chunk):
                pieces = self._taken(data)
                self._first_chunk = self._first_chunk or self._elapsed()
                self.course.chunk(has_output=bool(pieces))
                self._deliver(pieces)
            if reading.done:
                break
        else:
            return
        try:
            async with asyncio.timeout(TRAILER_TIMEOUT):
                async for _ in chunks:
                    pass
        except (TimeoutError, httpx2.RequestError, aiohttp.ClientError):
            pass  # the answer is complete; only the connection is lost

    def _taken(self, data: str) -> list[Piece]:
        """What one event, or a whole response, adds; the id of a response that the endpoint keeps goes out at once."""
        pieces = self._reading.add(data)
        if self._on_response is not None and self._reading.identifier != self._known:
            self._known = self._reading.identifier
            self._on_response(self._kept(self._known))
        return pieces

    def _kept(self, identifier: str) -> KeptResponse:
        return KeptResponse(identifier, self.endpoint.profile.name, self.request.model)

    def _deliver(self, pieces: list[Piece]) -> None:
        if self._on_delta is not None:
            for piece in pieces:
                self._delivered = True
                self._on_delta(piece)

    def _answer(self, reading: Reading) -> ModelAnswer:
        calls, adapter = reading.tool_calls, self.endpoint.adapter
        return ModelAnswer(
            content=reading.content,
            tool_calls=calls,
            finish_reason=reading.finish_reason or ("tool_calls" if calls else "stop"),
            usage=reading.usage or estimate_usage(self.request, reading.content or "", calls),
            response_model=reading.model,
            response_id=reading.identifier,
            provider=adapter.provider,
            started_at=self._started_at,
            duration=self._elapsed(),
            first_chunk=self._first_chunk,
            extra=reading.extra,
            background=adapter.keeps,
        )

    def _elapsed(self) -> int:
        """Microseconds since the first try began."""
        return (time.monotonic_ns() - self._start) // 1_000

    def _status_error(self, error: openai.APIStatusError) -> NoReturn:
        status, headers = error.status_code, error.response.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A body that is not JSON comes from something in between (a proxy, a web server): its text is of no use.
        message = error.message if isinstance(error.body, dict) else f"Error code: {status} ({kind or 'no content'})"
        if (status in RETRIED or status >= 500) and error.code not in FINAL_CODES and error.type not in FINAL_CODES:
            after = retry_after_seconds(headers, time.time())
            if not self._reading.continuation:
                self._turn.heard(headers)
                if status == 429:
                    self._rate_limited(message, headers, after, error.code)
            reason = reason_of(status)
            raise Failure(
                self.endpoint.clean(message), reason, status=status, code=error.code, retry_after=after
            ) from None
        if error.response.is_redirect:
            place = headers.get("location", "").partition("?")[0]
            self._not_the_protocol(status, kind, f"It redirects to {place}, which is not given the key.")
        unknown = status == 404 and not (isinstance(error.body, dict) and error.body.get("message"))
        if unknown or (kind == "text/html" and status not in (401, 403)):
            self._not_the_protocol(status, kind, "")
        self._refuse(message, status, error.code)

    def _rate_limited(self, message: str, headers: Mapping[str, str], after: float | None, code: Any) -> None:
        """Refused for a rate limit: have the call wait for another turn. One that has waited so for longer than its
        deadline is given up. Where nothing is known of a limit it is a failure like any other."""
        stop = self._turn.refused(headers, after)
        if stop is None:
            return
        self._failure = Failure(self.endpoint.clean(message), "rate_limited", status=429, code=code, retry_after=after)
        if self._refused_for > self.request.deadline:
            self._fail(ModelUnavailable, f"refused {self._refusals + 1} times for its rate limit, at last: {message}")
        self._refusals += 1
        self._refused_for += stop
        self.course.retries("rate_limited")
        raise RateLimited from None

    def fail_stopped(self, seconds: float) -> NoReturn:
        """Give the call up: its endpoint has said that it takes no requests for so long."""
        last = f": {self._failure.what}" if self._failure else ""
        self._fail(
            ModelUnavailable, f"takes no requests for {seconds:.1f} s, which is past the deadline{last}", status=429
        )

    def _refuse(self, message: str, status: int | None, code: Any) -> NoReturn:
        """The endpoint said no; where it says that the request is too long, its session can do something about it."""
        if is_overflow(message, code):
            window = stated_window(message)
            details = {"window": window} if window else {}
            self._fail(ContextOverflow, f"refused the request: {message}", status=status, code=code, details=details)
        self._fail(ModelRefused, f"refused the request: {message}", status=status, code=code)

    def _reported_error(self, body: Any) -> NoReturn:
        """An error in place of an answer, under status 200: its code decides, and unknown ones are worth a retry."""
        message, code = (body.get("message"), body.get("code")) if isinstance(body, dict) else (body, None)
        what = self.endpoint.clean(f"the endpoint reported: {message or body}")
        code = code if isinstance(code, (str, int)) else None
        status = code if isinstance(code, int) else None
        if code in FINAL_REPORTS or (status is not None and 400 <= status < 500 and status not in RETRIED):
            self._refuse(what, status, code)
        raise Failure(what, "stream_error", status=status, code=code) from None

    def _not_the_protocol(self, status: int, kind: str, what: str) -> NoReturn:
        self._fail(
            ModelProtocolError,
            f"answered with status {status} and content type {kind or '(none)'}, "
            f"which is no {self.endpoint.adapter.described}. {what}",
            status=status,
        )

    def _fail(
        self,
        kind: type[ModelError],
        what: str,
        *,
        status: int | None = None,
        code: Any = None,
        details: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Raise `kind`, without the chain of causes: those can hold headers, and so the key."""
        details = {
            **(details or {}),
            "base_url": self.endpoint.shown_url,
            "retries": self._retries + self._refusals,
            "started_at": self._started_at,
            "duration": self._elapsed(),
        }
        failure = self._failure
        status = status if status is not None else failure.status if failure else None
        code = code if code is not None else failure.code if failure else None
        if status is not None:
            details["status"] = status
        if code is not None:
            details["provider_code"] = self.endpoint.clean(str(code))
        text = self.endpoint.clean(f"{self.endpoint.shown_url} {what}".strip())
        raise kind(text if text.endswith((".", "…")) else f"{text}.", details=details) from None
