"""Tokens by the length of texts: before a call, when nobody can know, and after it where the endpoint does not say."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterable
from typing import Any

from .json_text import to_json
from .messages import Content, Usage, attached
from .records import ModelRequest

BYTES_PER_TOKEN = 3
"""Careful: English has about four bytes a token, code and other languages fewer."""


def estimate_tokens(request: ModelRequest) -> int:
    """A careful guess of a request's input tokens, better where its session has learned from answers."""
    if request.tokens:
        return request.tokens
    schemas = [*request.tools, *filter(None, [request.parameters.get("response_format")])]
    described = to_json(schemas).encode() if schemas else b""
    return (request.left_out + len(request.messages) + len(described)) // BYTES_PER_TOKEN + 1


def attached_excess(content: Content) -> int:
    """By how many bytes the images and documents in a message are longer than text that has as many tokens as they."""
    return sum(_excess(part) for part in attached(content))


def attachment_size(part: dict[str, Any]) -> int:
    """How many bytes of text have as many tokens as an image or a document; 0 for another part."""
    tokens = _tokens(part)
    return tokens * BYTES_PER_TOKEN if tokens is not None else 0


def _excess(part: dict[str, Any]) -> int:
    tokens = _tokens(part)
    if tokens is None:
        return 0
    address = part["image_url"]["url"] if part["type"] == "image_url" else part["file"]["file_data"]
    return len(address.encode(errors="replace")) - tokens * BYTES_PER_TOKEN


def _tokens(part: dict[str, Any]) -> int | None:
    """Tokens of a content part that is an image or a document; None for another one."""
    kind = part.get("type")
    found = part.get(kind) if kind in ("image_url", "file") else None
    if not isinstance(found, dict):
        return None
    if kind == "image_url":
        return image_tokens(found) if isinstance(found.get("url"), str) else None
    return document_tokens(found["file_data"]) if isinstance(found.get("file_data"), str) else None


def document_tokens(address: str) -> int:
    """Tokens of a PDF in a `data:` URL, which endpoints read as text and as an image of each page: 2,500 for a page.

    How many pages there are is often in compressed parts of it; then each 50 kB count as one.
    """
    _, _, data = address.partition(";base64,")
    try:
        content = base64.b64decode(data)
    except (binascii.Error, ValueError):
        return len(address) // BYTES_PER_TOKEN
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    return 2_500 * max(1, pages, len(content) // 50_000 if not pages else 0)


def image_tokens(image: dict[str, Any]) -> int:
    """Tokens of an image, by the rule that OpenAI publishes for its vision models with tiles: scaled to fit 2,048 by
    2,048 and then to a shorter side of 768, 170 for each tile of 512 by 512, and 85.

    https://platform.openai.com/docs/guides/images-vision ("Calculating costs"). One whose size is not known counts as
    the largest: eight tiles.

    Args:
        image: `image_url` of a content part.
    """
    if image.get("detail") == "low":
        return 85
    size = image_size(image["url"])
    if size is None:
        return 85 + 8 * 170
    width, height = size
    scale = min(1.0, 2048 / max(width, height))
    scale *= min(1.0, 768 / (min(width, height) * scale))
    tiles = -(-round(width * scale) // 512) * -(-round(height * scale) // 512)
    return 85 + 170 * max(1, tiles)


def image_size(url: str) -> tuple[int, int] | None:
    """Width and height of a PNG, GIF or JPEG in a `data:` URL; None if they can't be had so."""
    head, _, data = url.partition(";base64,")
    if not head.startswith("data:image/"):
        return None
    try:
        start = base64.b64decode(data[: 4 * 16_384])  # metadata comes before the size in a JPEG
    except (binascii.Error, ValueError):
        return None
    try:
        if start.startswith(b"\x89PNG"):
            found = struct.unpack(">II", start[16:24])
        elif start.startswith(b"GIF8"):
            found = struct.unpack("<HH", start[6:10])
        else:
            found = _jpeg_size(start) or (0, 0)
    except (struct.error, IndexError):
        return None
    return (int(found[0]), int(found[1])) if min(found) > 0 else None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """From the frame header (ISO/IEC 10918-1, B.2.2): markers 0xC0 to 0xCF but for 0xC4, 0xC8 and 0xCC."""
    at = 2 if data.startswith(b"\xff\xd8") else len(data)
    while at + 9 <= len(data):
        if data[at] != 0xFF:
            return None
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        at += 2 + length
    return None


def estimate_usage(request: ModelRequest, text: str, calls: Iterable[tuple[str, str, str]] = ()) -> Usage:
    """What a call took whose endpoint did not say; the reply no more than the request allowed."""
    said = len(text.encode(errors="replace"))
    said += sum(len((name + arguments).encode(errors="replace")) for _, name, arguments in calls)
    output = -(-said // BYTES_PER_TOKEN)
    cap = request.parameters.get("max_completion_tokens") or request.parameters.get("max_tokens")
    if isinstance(cap, int):
        output = min(output, cap)
    return Usage(estimate_tokens(request), output, estimated=True)
