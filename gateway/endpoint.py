"""An endpoint: a model profile with its connections."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

import httpx2
import openai

from understudy.config import ModelProfile
from understudy.json_text import from_json
from understudy.messages import storable
from understudy.profiles import DEFAULT_BASE_URLS
from understudy.records import ModelRequest

from .adapters import Adapter
from .anthropic import Messages
from .chat import ChatCompletions
from .request_facts import server_of
from .responses import Responses

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
CONNECT_TIMEOUT = 10.0
"""Seconds to connect. Everything after that is bounded by the request's deadline alone."""
KEEPALIVE = 30.0
"""Seconds that an unused connection is kept."""
MESSAGE_LIMIT = 500
ERROR_LIMIT = 1 << 20
"""Bytes of an error's body that are looked at."""

ADAPTERS: dict[str, Callable[[ModelProfile], Adapter]] = {
    "chat": lambda _profile: ChatCompletions(),
    "responses": Responses,
    "anthropic": Messages,
}
"""By `ModelProfile.protocol`."""

SHORTEST_SECRET = 8
"""Shorter keys are placeholders of local endpoints (`none`, `EMPTY`): hiding them would only garble messages."""


@lru_cache(maxsize=1)
def _trusted() -> ssl.SSLContext:
    """Whom https connections trust. Reading the certificates takes a tenth of a second, so it is done once."""
    return httpx2.create_ssl_context()


class Endpoint:
    """A profile with its connections.

    Attributes:
        server: host and port.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.base_url = profile.base_url or DEFAULT_BASE_URLS[profile.protocol]
        self.server = server_of(self.base_url)
        self.calls = 0
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
        self.adapter = ADAPTERS[profile.protocol](profile)
        # Where the package would send a request, and with which headers. Made once: it would put them together for each
        # call, walk through all messages, which have the endpoint's form already, and check them against its types, and
        # that costs more CPU than all the rest of the call.
        self._base = client.base_url
        self._url = self._under(self.adapter.path)
        own = self.adapter.headers(profile)
        # A redirect to another host loses `Authorization`, but would be given a key in any other header.
        self._follows = own is None
        given = client.default_headers.items() if own is None else own.items()
        self._headers = httpx2.Headers({name: value for name, value in given if isinstance(value, str)})
        if own is None:
            # Whatever the environment has for this one (OPENAI_CUSTOM_HEADERS).
            self._headers.update(client.auth_headers)

    async def post(self, request: ModelRequest) -> httpx2.Response:
        """The response to a request, not read yet.

        Raises:
            openai.APIStatusError: its status is that of an error.
        """
        return await self._send("POST", self._url, self.adapter.content(request))

    async def get(self, path: str) -> httpx2.Response:
        """What is kept under a path below the base URL, which may have a query; not read yet. Raises as `post`."""
        return await self._send("GET", self._under(path), None)

    async def cancel(self, path: str) -> None:
        """Cancel what is made under a path below the base URL. Raises as `post`, and httpx2's errors."""
        response = await self._send("POST", self._under(path), b"")
        await response.aclose()

    def _under(self, path: str) -> httpx2.URL:
        raw, query = self._base.raw_path.partition(b"?")[::2]
        added, _, more = path.encode().partition(b"?")
        query = b"&".join(filter(None, (query, more)))
        return self._base.copy_with(raw_path=raw + added + (b"?" + query if query else b""))

    async def _send(self, method: str, url: httpx2.URL, content: bytes | None) -> httpx2.Response:
        request = self.http.build_request(method, url, headers=self._headers, content=content)
        response = await self.http.send(request, stream=True, follow_redirects=self._follows)
        if not response.is_success:
            try:
                raise _error_of(response, (await read_within(response, ERROR_LIMIT)).decode("utf-8", "replace"))
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


async def read_within(response: httpx2.Response, limit: int) -> bytes:
    """A response's body; of one with more than `limit` bytes its beginning, and a little more."""
    chunks, received = [], 0
    async for chunk in response.aiter_bytes():
        chunks.append(chunk)
        received += len(chunk)
        if received > limit:
            break
    return b"".join(chunks)


def _error_of(response: httpx2.Response, text: str) -> openai.APIStatusError:
    """What the package makes of a response that is an error."""
    message, body = f"Error code: {response.status_code}", None
    try:
        body = from_json(text)
    except (ValueError, RecursionError):
        pass
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(body, dict) and body.get("type") == "error" and isinstance(error, dict):
        error = {**error, "code": error.get("type")}  # of Anthropic, which has no other codes
    if isinstance(error, dict) and isinstance(error.get("message"), str) and error["message"]:
        message = f"{message} - {error['message']}"
    return openai.APIStatusError(message, response=response, body=error)
