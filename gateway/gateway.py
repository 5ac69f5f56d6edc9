"""The gateway: all model calls of a node go through here.

It calls the endpoint, retries what is worth it, and returns the whole answer or one of the `Model*` errors. It knows
no sessions and writes nothing: its caller keeps the waits and the journal.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import httpx2
import openai

from understudy.config import ModelProfile
from understudy.errors import (
    InvalidConfiguration,
    ModelError,
    ModelProfileMissing,
    ModelProtocolError,
    ModelRefused,
    ModelUnavailable,
)
from understudy.estimates import estimate_usage
from understudy.messages import storable
from understudy.prices import Price
from understudy.records import ModelAnswer, ModelRequest
from understudy.waiting import answered_within

from .sse import Completion, EndpointError, EventStream, Malformed

PROVIDER = "openai"
"""Value of `gen_ai.provider.name`: the protocol's, whoever speaks it."""

DEFAULT_BASE_URL = "https://api.openai.com/v1"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
CONNECT_TIMEOUT = 10.0
"""Seconds to connect. Everything after that is bounded by the request's deadline alone."""
KEEPALIVE = 30.0
"""Seconds that an unused connection is kept."""
TRAILER_TIMEOUT = 1.0
"""Seconds to wait for the end of a response whose answer is complete, so that the connection can be used again."""
RETRIED = frozenset({408, 409, 429})
"""Statuses below 500 that are worth another try."""
FINAL_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
"""Error codes that waiting doesn't cure, whatever the status."""
MESSAGE_LIMIT = 500
SHORTEST_SECRET = 8
"""Shorter keys are placeholders of local endpoints (`none`, `EMPTY`): hiding them would only garble messages."""


class Gateway:
    """Makes model calls with the client of the `openai` package, streaming.

    Args:
        retries: how often a call that failed in a way worth retrying is tried again, after the first try.
        backoff: seconds before the first retry; doubles up to `backoff_max`, less a random quarter. `Retry-After`
            from the endpoint takes precedence.
        prices: of models, for profiles that have none of their own for them.
    """

    def __init__(
        self,
        *,
        retries: int = 3,
        backoff: float = 0.5,
        backoff_max: float = 8.0,
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        self._prices = dict(prices or {})
        self._backoff = _Backoff(retries, backoff, backoff_max)
        self._endpoints: dict[str, _Endpoint] = {}
        self._retired: set[_Endpoint] = set()

    def register(self, profile: ModelProfile) -> None:
        """Make a profile known, in place of one of the same name; calls under way keep the old one.

        Raises:
            InvalidConfiguration: its key can't be sent in a header, or its base URL is none, or holds credentials.
        """
        _check_profile(profile)
        known = self._endpoints.get(profile.name)
        if known is not None:
            profile = profile.after(known.profile)
            if known.profile == profile:
                return
            self._retired.add(known)
        self._endpoints[profile.name] = _Endpoint(profile)

    def profiles(self) -> list[ModelProfile]:
        """The profiles registered, with their keys."""
        return [endpoint.profile for endpoint in self._endpoints.values()]

    def knows(self, name: str) -> bool:
        """Whether a profile of this name is registered."""
        return name in self._endpoints

    def price(self, profile: str, model: str) -> Price | None:
        """What a model costs under a profile; None if nobody has said."""
        endpoint = self._endpoints.get(profile)
        own = endpoint.profile.prices.get(model) if endpoint is not None else None
        return own or self._prices.get(model)

    async def call(
        self,
        request: ModelRequest,
        on_delta: Callable[[str], None] | None = None,
        on_restart: Callable[[], None] | None = None,
    ) -> ModelAnswer:
        """Make one model call; cancelling it closes the connection.

        Args:
            on_delta: gets the text as it arrives.
            on_restart: called when a try failed after text was delivered: what follows starts anew.

        Raises:
            ModelProfileMissing: the request's profile was never registered.
            ModelRefused: the endpoint refused the request (4xx); not retried.
            ModelProtocolError: the endpoint does not speak the protocol; not retried.
            ModelUnavailable: every try failed, or the deadline passed. The deadline begins when the call's turn has
                come: waiting for `max_concurrency` and `requests_per_minute` does not use it up.

        Errors of an endpoint have in `details`: `base_url`, `retries`, `started_at` and `duration` (microseconds), and,
        where known, `status` and `provider_code`. No message has the key.
        """
        endpoint = self._endpoints.get(request.profile)
        if endpoint is None:
            raise ModelProfileMissing(
                f"no model profile {request.profile!r} is registered on this node", details={"profile": request.profile}
            )
        endpoint.calls += 1
        try:
            async with endpoint.turn:
                await endpoint.pace()
                return await _Call(self._backoff, endpoint, request, on_delta, on_restart).run()
        finally:
            endpoint.calls -= 1
            if self._retired:
                await self._close_retired()

    async def close(self) -> None:
        """Close all connections. Calls under way fail; cancel them first."""
        for endpoint in [*self._endpoints.values(), *self._retired]:
            await endpoint.http.aclose()
        self._endpoints.clear()
        self._retired.clear()

    async def _close_retired(self) -> None:
        for endpoint in [endpoint for endpoint in self._retired if endpoint.calls == 0]:
            self._retired.discard(endpoint)
            await endpoint.http.aclose()


def _check_profile(profile: ModelProfile) -> None:
    if not profile.api_key.isascii() or not profile.api_key.isprintable() or not profile.api_key.strip():
        raise InvalidConfiguration(
            f"the key of model profile {profile.name!r} is empty or has characters that no header may have. "
            "Set OPENAI_API_KEY to the bare key",
            details={"setting": "OPENAI_API_KEY"},
        )
    try:
        parts = urlsplit(profile.base_url or DEFAULT_BASE_URL)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or "@" in parts.netloc:
        raise InvalidConfiguration(
            f"the base URL of model profile {profile.name!r} can't be used. "
            "Set OPENAI_BASE_URL to http(s)://HOST[:PORT]/PATH, without user and password",
            details={"setting": "OPENAI_BASE_URL"},
        )


@dataclass(frozen=True, slots=True)
class _Backoff:
    """How often and when to try again; see `Gateway`."""

    retries: int
    first: float
    longest: float

    def delay(self, retries: int, retry_after: float | None) -> float:
        """Seconds to wait after so many failed retries."""
        if retry_after is not None:
            return retry_after * (1 + 0.1 * random.random())  # never earlier than asked for, and not all at once
        return min(self.first * 2.0**retries, self.longest) * (1 - 0.25 * random.random())


@lru_cache(maxsize=1)
def _trusted() -> ssl.SSLContext:
    """Whom https connections trust. Reading the certificates takes a tenth of a second, so it is done once."""
    return httpx2.create_ssl_context()


class _Endpoint:
    """A profile with its connections, its places and its pace."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.base_url = profile.base_url or DEFAULT_BASE_URL
        self.calls = 0
        self.turn = asyncio.Semaphore(profile.max_concurrency)
        self._pace = asyncio.Lock()
        self._next = 0.0
        # aiohttp under the package's httpx: half the CPU per call, and no search through all connections.
        http_client = openai.DefaultAioHttpClient(
            trust_env=urlsplit(self.base_url).hostname not in LOOPBACK,  # a proxy could not reach it
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),
            limits=httpx2.Limits(max_connections=profile.max_concurrency, keepalive_expiry=KEEPALIVE),
            verify=_trusted(),
        )
        client = openai.AsyncOpenAI(
            api_key=profile.api_key, base_url=self.base_url, max_retries=0, http_client=http_client
        )
        # The services' environment is not the profile's: a stranger's organization would be refused, or pay.
        client.organization = client.project = None
        self.http = http_client
        # Where the package would send a chat completion, and with which headers. Made once: it would put them together
        # for each call, walk through all messages, which have the endpoint's form already, and check them against its
        # types, and that costs more CPU than all the rest of the call.
        self._url = client.base_url.copy_with(raw_path=client.base_url.raw_path + b"chat/completions")
        given = client.default_headers.items()
        self._headers = httpx2.Headers({name: value for name, value in given if isinstance(value, str)})
        self._headers.update(client.auth_headers)  # whatever the environment has for this one (OPENAI_CUSTOM_HEADERS)

    async def post(self, body: dict[str, Any]) -> httpx2.Response:
        """The response to a request, not read yet.

        Raises:
            openai.APIStatusError: its status is that of an error.
        """
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        request = self.http.build_request("POST", self._url, headers=self._headers, content=content)
        response = await self.http.send(request, stream=True)
        if not response.is_success:
            try:
                raise _error_of(response, (await response.aread()).decode("utf-8", "replace"))
            finally:
                await response.aclose()
        return response

    @property
    def shown_url(self) -> str:
        """The base URL for messages: without a query, which can hold a key."""
        return self.base_url.partition("?")[0]

    def clean(self, text: str) -> str:
        """`text` for messages: shortened, without the key, should the endpoint echo it."""
        key = self.profile.api_key.strip()
        if len(key) >= SHORTEST_SECRET:
            text = text.replace(key, "***")
        text = storable(text)
        return text if len(text) <= MESSAGE_LIMIT else f"{text[:MESSAGE_LIMIT]}…"

    async def pace(self) -> None:
        """Wait until `requests_per_minute` allows one more request; first come, first served."""
        rate = self.profile.requests_per_minute
        if rate is None:
            return
        async with self._pace:
            await asyncio.sleep(self._next - time.monotonic())
            self._next = time.monotonic() + 60 / rate


def _error_of(response: httpx2.Response, text: str) -> openai.APIStatusError:
    """What the package makes of a response that is an error."""
    message, body = f"Error code: {response.status_code}", None
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        pass
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict) and isinstance(error.get("message"), str) and error["message"]:
        message = f"{message} - {error['message']}"
    return openai.APIStatusError(message, response=response, body=error)


class _Failure(Exception):
    """A try failed in a way worth retrying."""

    def __init__(
        self, what: str, *, status: int | None = None, code: Any = None, retry_after: float | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.status = status
        self.code = code
        self.retry_after = retry_after


class _Call:
    """One call with its tries."""

    def __init__(
        self,
        backoff: _Backoff,
        endpoint: _Endpoint,
        request: ModelRequest,
        on_delta: Callable[[str], None] | None,
        on_restart: Callable[[], None] | None,
    ) -> None:
        self._backoff = backoff
        self._endpoint = endpoint
        self._on_delta = on_delta
        self._on_restart = on_restart
        self._request = request
        self._body: dict[str, Any] = {
            **request.parameters,
            "model": request.model,
            "messages": request.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            self._body["tools"] = request.tools
        self._retries = 0
        self._failure: _Failure | None = None
        self._delivered = False
        self._started_at = time.time_ns() // 1_000
        self._start = time.monotonic_ns()
        self._first_chunk = 0
        self._heard = 0.0

    async def run(self) -> ModelAnswer:
        """The tries, until one succeeds, fails for good, or time is up."""
        try:
            return await answered_within(self._tries(), self._request.deadline)
        except TimeoutError:
            last = f"; the last try failed: {self._failure.what}" if self._failure else ""
            self._fail(ModelUnavailable, f"had no complete answer within {self._request.deadline:g} s{last}")

    async def _tries(self) -> ModelAnswer:
        while True:
            try:
                return self._answer(await self._try())
            except _Failure as failure:
                self._failure = failure
            await self._before_retry(self._failure)

    async def _before_retry(self, failure: _Failure) -> None:
        """Wait as long as backoff or the endpoint says; raise when there is no retry left."""
        if self._retries >= self._backoff.retries:
            self._fail(ModelUnavailable, f"failed {self._retries + 1} times, at last: {failure.what}")
        delay = self._backoff.delay(self._retries, failure.retry_after)
        if delay >= self._request.deadline:  # else that ends the wait, and does not count pauses of this process
            self._fail(ModelUnavailable, f"failed, and a retry in {delay:.1f} s is past the deadline: {failure.what}")
        self._retries += 1
        await asyncio.sleep(delay)
        await self._endpoint.pace()
        if self._delivered:
            self._delivered = False
            if self._on_restart is not None:
                self._on_restart()

    async def _try(self) -> Completion:
        """One try, given up when the endpoint says nothing for too long, before its answer or in the midst of it.

        As with the deadline, only time counts in which this process runs: after a pause the answer may lie in the
        socket, and is paid for.
        """
        stall = self._request.stall
        self._heard = time.monotonic()
        try:
            return await answered_within(self._exchange(), stall, lambda: self._heard)
        except TimeoutError:
            raise _Failure(f"the endpoint said nothing for {stall:g} s") from None

    async def _exchange(self) -> Completion:
        try:
            response = await self._endpoint.post(self._body)
            try:
                return await self._read(response)
            finally:
                await response.aclose()
        except openai.APIStatusError as error:
            self._status_error(error)
        except aiohttp.ClientResponseError as error:
            self._not_the_protocol(error.status, "", f"It is not HTTP: {error.message}")
        except (httpx2.RequestError, aiohttp.ClientError) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise _Failure(self._endpoint.clean(f"{type(cause).__name__}: {cause}")) from None
        except EndpointError as error:
            self._reported_error(error.body)

    async def _read(self, response: httpx2.Response) -> Completion:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        completion = Completion()
        try:
            if kind == "application/json":
                self._deliver(completion.add((await response.aread()).decode("utf-8", "replace")))
                if not completion.complete:
                    raise Malformed("a response without choices")
            elif kind in ("text/event-stream", ""):
                await self._read_stream(response, completion)
            else:
                start = (await response.aread())[:80].decode("utf-8", "replace")
                self._not_the_protocol(response.status_code, kind, f"It begins: {start!r}")
        except Malformed as error:
            self._not_the_protocol(response.status_code, kind, str(error))
        if not completion.complete:
            raise _Failure("the stream ended in the middle of the answer")
        return completion

    async def _read_stream(self, response: httpx2.Response, completion: Completion) -> None:
        stream = EventStream()
        chunks = response.aiter_bytes() if "content-encoding" in response.headers else response.aiter_raw()
        async for chunk in chunks:
            self._heard = time.monotonic()
            for event in stream.feed(chunk):
                self._deliver(completion.add(event.data))
            if completion.done:
                break
        else:
            return
        try:
            async with asyncio.timeout(TRAILER_TIMEOUT):
                async for _ in chunks:
                    pass
        except (TimeoutError, httpx2.RequestError, aiohttp.ClientError):
            pass  # the answer is complete; only the connection is lost

    def _deliver(self, text: str) -> None:
        if not self._first_chunk:
            self._first_chunk = self._elapsed()
        if text and self._on_delta is not None:
            self._delivered = True
            self._on_delta(text)

    def _answer(self, completion: Completion) -> ModelAnswer:
        calls = completion.tool_calls
        return ModelAnswer(
            content=completion.content,
            tool_calls=calls,
            finish_reason=completion.finish_reason or ("tool_calls" if calls else "stop"),
            usage=completion.usage or estimate_usage(self._request, completion.content or "", calls),
            response_model=completion.model,
            response_id=completion.identifier,
            provider=PROVIDER,
            started_at=self._started_at,
            duration=self._elapsed(),
            first_chunk=self._first_chunk,
            retries=self._retries,
            extra=completion.extra,
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
            raise _Failure(self._endpoint.clean(message), status=status, code=error.code, retry_after=after) from None
        if kind == "text/html" and status not in (401, 403):
            self._not_the_protocol(status, kind, "")
        self._fail(ModelRefused, f"refused the request: {message}", status=status, code=error.code)

    def _reported_error(self, body: Any) -> NoReturn:
        """An error in place of an answer, under status 200: its code decides, and unknown ones are worth a retry."""
        message, code = (body.get("message"), body.get("code")) if isinstance(body, dict) else (body, None)
        what = self._endpoint.clean(f"the endpoint reported: {message or body}")
        status = code if isinstance(code, int) else None
        if code in FINAL_CODES or (status is not None and 400 <= status < 500 and status not in RETRIED):
            self._fail(ModelRefused, f"refused the request: {what}", status=status, code=code)
        raise _Failure(what, status=status, code=code) from None

    def _not_the_protocol(self, status: int, kind: str, what: str) -> NoReturn:
        self._fail(
            ModelProtocolError,
            f"answered with status {status} and content type {kind or '(none)'}, which is no chat completion. {what}",
            status=status,
        )

    def _fail(self, kind: type[ModelError], what: str, *, status: int | None = None, code: Any = None) -> NoReturn:
        """Raise `kind`, without the chain of causes: those can hold headers, and so the key."""
        details: dict[str, Any] = {
            "base_url": self._endpoint.shown_url,
            "retries": self._retries,
            "started_at": self._started_at,
            "duration": self._elapsed(),
        }
        failure = self._failure
        status = status if status is not None else failure.status if failure else None
        code = code if code is not None else failure.code if failure else None
        if status is not None:
            details["status"] = status
        if code is not None:
            details["provider_code"] = self._endpoint.clean(str(code))
        text = self._endpoint.clean(f"{self._endpoint.shown_url} {what}".strip())
        raise kind(text if text.endswith((".", "…")) else f"{text}.", details=details) from None


def retry_after_seconds(headers: Any, now: float) -> float | None:
    """What `Retry-After-Ms` or `Retry-After` (seconds or an HTTP date) ask for; None without a readable one.

    Args:
        headers: a mapping with lower-case names.
        now: seconds since 1970, for dates.
    """
    for name, unit in (("retry-after-ms", 1_000), ("retry-after", 1)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) / unit
        except ValueError:
            try:
                seconds = parsedate_to_datetime(text).timestamp() - now
            except (ValueError, OverflowError):
                continue
        if 0 <= seconds < float("inf"):
            return seconds
    return None
