"""Images and documents in inputs and in results of tools.

A session actor imports this module, which must stay light.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InvalidInput

MAX_BYTES = 3_750_000
"""Of one image or document: 5 MB as base64, which is the smallest limit among the common endpoints."""

MAX_COUNT, MAX_TOTAL_BYTES = 8, 7_500_000
"""Of one input, or of one result of a tool: so many, and so many bytes in all. The store keeps them."""

MAX_NAME = 200

SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF87a": "image/gif", b"GIF89a": "image/gif",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Image:
    """An image for a model, in an input or as the result of a tool: PNG, JPEG, GIF or WebP, 3.75 MB at most.

    Attributes:
        data: the file's content; its first bytes say which of these it is.
        name: shown to the model.

    Raises:
        InvalidInput: it is something else, empty or too large. An endpoint would refuse it in every later request.
    """

    data: bytes
    name: str = ""

    def __post_init__(self) -> None:
        _check(self.data, self.name)
        if not self.media_type:
            raise InvalidInput(f"{self.name or 'this'} is no PNG, JPEG, GIF or WebP: convert it into one of them.")

    @property
    def media_type(self) -> str:
        """Such as `image/png`; empty if it is none of the four."""
        if self.data[:4] == b"RIFF" and self.data[8:12] == b"WEBP":
            return "image/webp"
        return next((kind for start, kind in SIGNATURES.items() if self.data.startswith(start)), "")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Image:
        """The image in a file. Raises `OSError`, and `InvalidInput` as above."""
        return cls(_content(path), Path(path).name)

    def part(self) -> dict[str, Any]:
        """As chat completions have it."""
        return {"type": "image_url", "image_url": {"url": _address(self.media_type, self.data)}}


@dataclass(frozen=True, slots=True)
class File:
    """A document for a model, in an input or as the result of a tool: a PDF, 3.75 MB at most.

    Other files are given as text. Attributes and errors are those of `Image`.
    """

    data: bytes
    name: str = ""

    def __post_init__(self) -> None:
        _check(self.data, self.name)
        if not self.data.startswith(b"%PDF-"):
            raise InvalidInput(f"{self.name or 'this'} is no PDF: give the text of other files as text.")

    @property
    def media_type(self) -> str:
        """`application/pdf`."""
        return "application/pdf"

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> File:
        """The document in a file. Raises `OSError`, and `InvalidInput` as above."""
        return cls(_content(path), Path(path).name)

    def part(self) -> dict[str, Any]:
        """As chat completions have it."""
        return {
            "type": "file",
            "file": {"filename": self.name or "document.pdf", "file_data": _address(self.media_type, self.data)},
        }


Given = str | Image | File | Sequence[str | Image | File | dict[str, Any]]
"""What an input may be: a text, an attachment, or a list of these and of content parts of chat completions."""


def as_content(given: Any) -> Any:
    """An input as messages have it: a text stays one, what is attached becomes content parts.

    Raises:
        InvalidInput: there are too many attachments, or they are too large together.
    """
    if isinstance(given, (Image, File)):
        given = [given]
    if not isinstance(given, (list, tuple)):
        return given
    attached = [item for item in given if isinstance(item, (Image, File))]
    problem = too_much(attached)
    if problem is not None:
        raise InvalidInput(f"an input {problem}.")
    return [
        item.part() if isinstance(item, (Image, File)) else {"type": "text", "text": item} if isinstance(item, str)
        else item
        for item in given
    ]  # fmt: skip


def too_much(attached: Sequence[Image | File]) -> str | None:
    """What is wrong with so many attachments together; None if nothing is."""
    size = sum(len(item.data) for item in attached)
    if len(attached) > MAX_COUNT or size > MAX_TOTAL_BYTES:
        return f"may have {MAX_COUNT} attachments with {MAX_TOTAL_BYTES} bytes in all; it has {len(attached)} of {size}"
    return None


def placeholder(number: int, item: Image | File) -> str:
    """What stands for an attachment in the text of a tool's result. It differs where the content does."""
    kind = "image" if isinstance(item, Image) else "document"
    known = hashlib.sha256(item.data).hexdigest()[:12]
    name = f" {item.name}" if item.name else ""
    return f"{begins(number)} {kind}{name}, {item.media_type}, {len(item.data)} bytes, {known}]"


def begins(number: int) -> str:
    """How the text begins that stands for an attachment."""
    return f"[attachment {number}:"


def _address(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _content(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(MAX_BYTES + 1)


def _check(data: Any, name: Any) -> None:
    if not isinstance(data, bytes):
        raise InvalidInput(f"the data of an attachment must be bytes, not {type(data).__name__}; `read` takes a path.")
    if not 0 < len(data) <= MAX_BYTES:
        size = f"more than {MAX_BYTES}" if data else "no"
        raise InvalidInput(f"an attachment has {size} bytes; at most {MAX_BYTES} are possible: make it smaller.")
    if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidInput(f"the name of an attachment must be a printable text of at most {MAX_NAME} characters.")
