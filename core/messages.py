"""Messages of a conversation, as stored and as sent to a model.

A session actor imports this module, which must stay light.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

WIRE_VERSION = 1
"""Version of stored messages and events."""

Content = str | list[dict[str, Any]] | None
"""Text, or a list of typed parts as in the OpenAI protocol (`{"type": "text", "text": ...}`)."""

AGENT_PROCESS = "the agent's process"


def interrupted(died: str) -> str:
    """What a model reads as the result of a call whose outcome nobody knows, as somebody died who was at it."""
    return f"interrupted: {died} died while this tool ran; its outcome is unknown"


INTERRUPTED = interrupted(AGENT_PROCESS)
"""What a model reads as the result of a call in doubt."""

GIVEN_UP = "interrupted: this call was given up while the MCP server was at it; its outcome is unknown"
"""The same of a call of a server's whose run ends first, or is steered away from it."""

CUT_OFF = "length"
"""The `finish_reason` of a reply that reached its longest length: it has to be continued."""

FOLD = "fold"
"""The origin of records that say which part of the log a model is sent, and how."""

MEMORY = "memory"
"""The origin of the messages that show an agent its memory."""

MEMORY_MARK = "<memory>"
"""How their texts begin."""

ATTACHMENTS_MARK = "<attachments>"
"""How the text begins of what a model is sent behind results of tools that have attachments."""
PROVIDER_DATA = "provider_data"
"""The field of an assistant message with what its provider wants back, and nobody else may be sent."""

ALWAYS, THIS_ROUND, NEVER = "always", "this_round", "never"
"""In which model calls a message is (`Message.visibility`)."""


def text_of(content: Content) -> str:
    """The text of a message's content, parts joined; other parts are left out."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [] if part.get("type") == "text")


def attached(content: Content) -> list[dict[str, Any]]:
    """The parts of a message's content that are no text."""
    return [part for part in content if part.get("type") != "text"] if isinstance(content, list) else []


def storable(text: str) -> str:
    """The text as every store can keep it: NUL becomes U+FFFD, and see `encodable`."""
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    return _encodable_text(text)


def encodable(content: Any) -> Any:
    """Data as JSON and UTF-8 can have it, with all that is in it: the two halves of a character that came in two pieces
    become one, a half without the other `?`, and a number that JSON does not have null."""
    if isinstance(content, str):
        return _encodable_text(content)
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, list):
        return [encodable(item) for item in content]
    if isinstance(content, dict):
        return {encodable(key): encodable(value) for key, value in content.items()}
    return content


def _encodable_text(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return paired.encode("utf-8", "replace").decode()
    return text


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one or more model calls, and what they cost.

    Attributes:
        cached_tokens: of the input, found in the endpoint's cache; `cache_write_tokens` of it were taken into that.
        reasoning_tokens: of the output.
        estimated: an endpoint did not say how many; counted by the length of the texts.
        cost: in millionths of the price table's currency; 0 for a model without a price.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    estimated: bool = False
    cost: int = 0
    cache_write_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Input and output together; cached and reasoning tokens are parts of these."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.estimated or other.estimated,
            self.cost + other.cost,
            self.cache_write_tokens + other.cache_write_tokens,
        )

    def to_wire(self) -> list[Any]:
        wire = [self.input_tokens, self.output_tokens, self.cached_tokens, self.reasoning_tokens, self.estimated]
        if self.cache_write_tokens:
            return [*wire, self.cost, self.cache_write_tokens]
        return [*wire, self.cost] if self.cost else wire

    @classmethod
    def from_wire(cls, data: list[Any] | None) -> Usage:
        return cls(*data) if data else cls()


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """A tool call as the model asked for it.

    Attributes:
        call_id: ours, `run/round/index`, unique within the session.
        provider_id: the endpoint's id, sent back to it with the result.
        arguments: JSON text exactly as received; it may be unreadable.
    """

    call_id: str
    name: str
    arguments: str
    provider_id: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="message"):
    """One message of a session; `seq` is its place in the session's log (0 until committed).

    Attributes:
        extra: opaque provider data (reasoning items, signatures) that must go back unchanged.
        origin: who added the message, if it is no input, answer or result: `continuation`, `steer`, `hook:NAME`, ….
        visibility: in which model calls it is: in all that follow (`always`), in the next one only, behind all others
            (`this_round`), or in none (`never`): then it is a record for the session itself.
        created_at: microseconds since 1970 UTC, set by the committing journal.
    """

    role: str
    content: Content = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    run_id: str | None = None
    round: int = 0
    seq: int = 0
    created_at: int = 0
    extra: dict[str, Any] | None = None
    origin: str = ""
    visibility: str = ALWAYS

    @property
    def text(self) -> str:
        """The text of the message, parts joined; other parts are left out."""
        return text_of(self.content)

    def to_wire(self) -> dict[str, Any]:
        """As the store has it."""
        data: dict[str, Any] = {"role": self.role, "content": self.content, "run_id": self.run_id, "round": self.round}
        if self.tool_calls:
            data["tool_calls"] = [msgspec.to_builtins(call) for call in self.tool_calls]
        for field in ("tool_call_id", "name", "seq", "created_at", "extra", "origin"):
            value = getattr(self, field)
            if value:
                data[field] = value
        if self.visibility != ALWAYS:
            data["visibility"] = self.visibility
        return data

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Message:
        """Restore a message; what a newer version added is left out."""
        return msgspec.convert(data, cls)
