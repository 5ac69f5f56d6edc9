"""What a tool returns, as a model is shown it: a text, and what is attached to it."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from understudy.attachments import File, Image, placeholder, too_much
from understudy.errors import InvalidInput, ToolError
from understudy.messages import encodable


@dataclass(frozen=True)
class Result:
    """What a tool has returned.

    Attributes:
        attachments: as content parts; the text has a placeholder for each.
    """

    text: str
    attachments: tuple[dict[str, Any], ...] = ()


def rendered(value: Any) -> Result:
    """What a model is shown of a value: a `Result` and a text as they are, an `Image` or `File` as an attachment, a
    list with one of these item by item, anything else as JSON.

    Dataclasses, pydantic models, typed dictionaries, named tuples, enumerations, times, UUIDs, decimals and sets are
    written by their type, wherever they are in the value; other objects by their `str`, if they have one of their own.

    Raises:
        ToolError: the value can't be shown; the message says which type, and that the tool was executed.
    """
    if isinstance(value, Result):
        return value
    if isinstance(value, (Image, File)) or (isinstance(value, (list, tuple)) and any(map(_is_attachment, value))):
        return _with_attachments([value] if isinstance(value, (Image, File)) else list(value))
    return Result(_text(value))


def received(text: str, attachments: Any) -> Result:
    """A result that another process has rendered, which may write what it wants.

    Raises:
        ToolError: what is attached is no image and no document, or too much.
    """
    try:
        items = [_item(part) for part in attachments]
    except (InvalidInput, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolError(f"it was executed, but what its result has attached can't be used: {error}") from None
    problem = too_much(items)
    if problem is not None:
        raise ToolError(f"it was executed, but its result {problem}: return fewer or smaller ones")
    return Result(text, tuple(item.part() for item in items))


def _item(part: dict[str, Any]) -> Image | File:
    """The attachment of a content part."""
    is_file = part["type"] == "file"
    address = part["file"]["file_data"] if is_file else part["image_url"]["url"]
    data = base64.b64decode(address.partition(";base64,")[2], validate=True)
    return File(data, part["file"]["filename"]) if is_file else Image(data)


def _is_attachment(value: Any) -> bool:
    return isinstance(value, (Image, File))


def _with_attachments(items: list[Any]) -> Result:
    attached = [item for item in items if isinstance(item, (Image, File))]
    problem = too_much(attached)
    if problem is not None:
        raise ToolError(f"it was executed, but its result {problem}: return fewer or smaller ones")
    numbers = iter(range(1, len(attached) + 1))
    texts = [placeholder(next(numbers), item) if _is_attachment(item) else _text(item) for item in items]
    return Result("\n".join(texts), tuple(item.part() for item in attached))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        try:
            return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False)
        except ValueError:  # a number that JSON does not have, or a circle
            data = msgspec.to_builtins(value, enc_hook=_plain, str_keys=True)
            return json.dumps(encodable(data), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(
            f"it was executed, but its result, of type {type(value).__name__}, can't be written as JSON: {error}"
        ) from error


def _plain(value: Any) -> Any:
    """Data that JSON has, for a value that it has nothing for."""
    try:
        data = msgspec.to_builtins(value, enc_hook=_unknown, str_keys=True)
    except UnicodeEncodeError:  # half a character, which is replaced later
        return str(value)
    if isinstance(value, (set, frozenset)):  # in one order, whatever process it is
        data.sort(key=lambda item: json.dumps(item, sort_keys=True))
    return data


def _unknown(value: Any) -> Any:
    if hasattr(type(value), "model_dump"):  # a pydantic model: this process need not have pydantic otherwise
        return value.model_dump(mode="json")
    kind = type(value)
    has_no_text = not any("__str__" in base.__dict__ or "__repr__" in base.__dict__ for base in kind.__mro__[:-1])
    if has_no_text or isinstance(value, Iterator) or callable(value) or inspect.isawaitable(value):
        raise TypeError(f"JSON has nothing for {kind.__name__}; return text, data, a dataclass or a pydantic model")
    return str(value)
