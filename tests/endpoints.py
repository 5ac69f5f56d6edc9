"""What tests of the gateway have in common: requests, endpoints that send raw bytes, and errors without the key."""

from __future__ import annotations

import asyncio
import json
import pickle
import traceback
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from understudy.config import ModelProfile
from understudy.errors import ModelError
from understudy.gateway.gateway import Gateway
from understudy.json_text import to_json
from understudy.records import ModelRequest
from understudy.streams import Parts, Piece

KEY = "sk-secret-0123456789"


def request(text: str = "hi", **more: Any) -> ModelRequest:
    messages = to_json(more.pop("messages", [{"role": "user", "content": text}])).encode()
    return ModelRequest(**{"wait_key": "s/r/1", "profile": "p", "model": "offline", "messages": messages, **more})


@asynccontextmanager
async def gateway(url: str, **profile: Any) -> AsyncIterator[Gateway]:
    """A gateway with the profile `p` for `url`, and with next to no backoff."""
    made = Gateway(backoff=0.001, backoff_max=0.002)
    made.register(ModelProfile("p", KEY, url, **profile))
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def endpoint(
    *answers: bytes, on_close: asyncio.Event | None = None, heads: list[str] | None = None
) -> AsyncIterator[str]:
    """A server that sends these raw answers, one per connection (the last one repeats), then closes it.

    With `on_close` it keeps the connections open, and sets the event when a client closes one. `heads` gets the first
    line of each request.
    """
    left, served = list(answers), list[Any]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        if heads is not None:
            heads.append(head.partition(b"\r\n")[0].decode())
        lengths = [
            line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        ]
        await reader.readexactly(int(lengths[0]) if lengths else 0)  # else closing it would reset the connection
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()
        if on_close is not None:
            while await reader.read(65_536):
                pass
            on_close.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        await asyncio.gather(*served, return_exceptions=True)


def http_answer(body: bytes | str, content_type: str = "text/event-stream", status: str = "200 OK") -> bytes:
    data = body if isinstance(body, bytes) else body.encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + data


async def failure_of(awaitable: Awaitable[Any], kind: type[ModelError]) -> ModelError:
    """The error; it must be of this kind, survive pickling, and hold the key nowhere."""
    with pytest.raises(kind) as caught:
        await awaitable
    error = caught.value
    assert type(error) is kind
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert KEY not in "".join(traceback.format_exception(error)) + json.dumps(error.to_wire())
    return error


def added_up(pieces: list[Piece]) -> Parts:
    """What pieces make up."""
    parts = Parts()
    for piece in pieces:
        parts.add(piece)
    return parts
