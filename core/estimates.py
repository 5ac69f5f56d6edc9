"""Tokens by the length of texts: before a call, when nobody can know, and after it where the endpoint does not say."""

from __future__ import annotations

from collections.abc import Iterable

from .json_text import to_json
from .messages import Usage
from .records import ModelRequest

BYTES_PER_TOKEN = 3
"""Careful: English has about four bytes a token, code and other languages fewer."""


def estimate_tokens(request: ModelRequest) -> int:
    """A careful guess of a request's input tokens."""
    tools = to_json(request.tools).encode() if request.tools else b""
    return (request.left_out + len(request.messages) + len(tools)) // BYTES_PER_TOKEN + 1


def estimate_usage(request: ModelRequest, text: str, calls: Iterable[tuple[str, str, str]] = ()) -> Usage:
    """What a call took whose endpoint did not say; the reply no more than the request allowed."""
    said = len(text.encode(errors="replace"))
    said += sum(len((name + arguments).encode(errors="replace")) for _, name, arguments in calls)
    output = -(-said // BYTES_PER_TOKEN)
    cap = request.parameters.get("max_completion_tokens") or request.parameters.get("max_tokens")
    if isinstance(cap, int):
        output = min(output, cap)
    return Usage(estimate_tokens(request), output, estimated=True)
