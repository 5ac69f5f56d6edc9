"""A server that is spoken to by HTTP (streamable HTTP), within bounds."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from .limits import LONGEST_MESSAGE

CONNECT_SECONDS = 30.0


class _Bounded(httpx2.AsyncByteStream):
    """A body of at most `LONGEST_MESSAGE` bytes."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > LONGEST_MESSAGE:
                raise httpx2.ReadError(f"the answer was longer than {LONGEST_MESSAGE} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


AWAY = (502, 503, 504)
"""Statuses of those that stand before a server: what became of the request there, they don't know."""


async def _bound(response: httpx2.Response) -> None:
    """Streams of events are bounded by event, by the `mcp` package. Nothing is unpacked: a few bytes could become any
    number of them."""
    packed = response.headers.get("content-encoding", "identity")
    if packed != "identity":
        raise httpx2.ReadError(f"the answer is packed ({packed[:40]!r}), which was not asked for")
    if response.status_code in AWAY:
        raise httpx2.ReadError(f"the server is not reached: status {response.status_code}")
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream)


@contextlib.asynccontextmanager
async def by_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """A transport of the `mcp` package."""
    # A server may be silent for as long as a call may take, and a person may think: whoever asks ends that. One request
    # that the transport itself ended would end the connection, and all other calls.
    timeout = httpx2.Timeout(CONNECT_SECONDS, read=None, pool=None)
    client = httpx2.AsyncClient(
        headers={**headers, "accept-encoding": "identity"}, timeout=timeout, event_hooks={"response": [_bound]}
    )
    async with client, streamable_http_client(url, http_client=client, max_sse_event_size=LONGEST_MESSAGE) as streams:
        yield streams
