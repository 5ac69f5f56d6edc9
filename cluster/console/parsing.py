"""What requests to the console are made of, and its answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from understudy.errors import InvalidInput, UnknownSession
from understudy.identifiers import check_identifier
from understudy.json_text import jsonable

from ..client.fleet import Wire

BODY_BYTES = 1 << 20
PAGE_LIMIT = 500

Handler = Callable[[Request], Awaitable[Response]]


def session_of(request: Request) -> str:
    """The session's id from the path. Raises `UnknownSession` for what can't be one."""
    try:
        return check_identifier(request.path_params["session"], "session")
    except InvalidInput as error:
        raise UnknownSession(error.message) from None


def json_answer(data: Any, status: int = 200) -> Response:
    """An answer."""
    return Response(json.dumps(data, default=jsonable), status, media_type="application/json")


async def json_body(request: Request) -> Wire:
    """What was sent. Raises `InvalidInput` unless it is a JSON object of at most `BODY_BYTES`."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES:
            raise InvalidInput(f"more than {BODY_BYTES} bytes")
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise InvalidInput("this is no JSON") from None
    if not isinstance(found, dict):
        raise InvalidInput("send a JSON object")
    return found


def number(text: str | None, default: int, most: int = PAGE_LIMIT) -> int:
    """A number of the query. Raises `InvalidInput`."""
    if text is None or text == "":
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) > most:
        raise InvalidInput(f"{text[:40]!r} is no number from 0 to {most}")
    return int(text)
