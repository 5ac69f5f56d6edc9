"""The port of model protocols: what a protocol has to say about a call, so that retries, deadlines and errors of all
protocols are in one place (`tries`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from understudy.config import ModelProfile
from understudy.json_text import from_json
from understudy.messages import Usage, storable
from understudy.records import ModelRequest
from understudy.streams import Piece

MOST_TOKENS = 10**12
"""In one answer: what counts more does not count tokens. Sums of such numbers fit every store."""


class Malformed(Exception):
    """What arrived is not the protocol; the message says why."""


class EndpointError(Exception):
    """The endpoint reported an error where an answer was due. `body` is the value of its `error` field."""

    def __init__(self, body: Any) -> None:
        super().__init__("the endpoint reported an error")
        self.body = body


class Reading(Protocol):
    """An answer as it arrives: what the events of a stream, or one whole response, add up to.

    Attributes:
        identifier: the endpoint's id of the response; empty while it is not known.
        usage: None until the endpoint has reported it.
        done: the endpoint said that the answer is complete.
        extra: what must go back to the endpoint with the answer, and is no part of its text and tool calls.
        progress: grows with what arrives of a response that can be continued.
        pending: the endpoint works on the response, and has to be asked again for it.
    """

    identifier: str
    model: str
    finish_reason: str
    usage: Usage | None
    done: bool
    progress: int
    pending: bool

    def add(self, data: str) -> list[Piece]:
        """Take the data of one event, or a whole response; returns what it adds.

        Raises:
            Malformed: it is not the protocol.
            EndpointError: it is an error report.
        """

    @property
    def complete(self) -> bool:
        """Whether the answer may end here; otherwise the stream was cut."""

    @property
    def content(self) -> str | None:
        """The answer's text."""

    @property
    def tool_calls(self) -> tuple[tuple[str, str, str], ...]:
        """`(provider id, name, arguments)`, in order of appearance."""

    @property
    def extra(self) -> dict[str, Any] | None: ...

    @property
    def continuation(self) -> str:
        """Where the rest of the answer can be had, below the base URL; empty if the model must be asked again."""

    def reroute(self, status: int | None) -> bool:
        """Take another way to the rest, since the present one was refused with this status, or said nothing (None).

        Returns:
            False if there is no other way: the status then means what it means for any request.
        """


class Adapter(Protocol):
    """A model protocol, for one profile.

    Attributes:
        provider: the value of `gen_ai.provider.name`.
        described: what an answer is called in error messages.
        path: of the requests, below the base URL.
        keeps: the endpoint keeps responses under their ids, so that a call whose connection is lost can be continued.
    """

    provider: str
    described: str
    path: str
    keeps: bool

    def headers(self, profile: ModelProfile) -> Mapping[str, str] | None:
        """With which headers requests are sent; None for those of the `openai` package."""

    def content(self, request: ModelRequest) -> bytes:
        """The body of a request: the same bytes for the same request."""

    def begin(self, request: ModelRequest, response_id: str = "") -> Reading:
        """The answer to a request, of which nothing has come.

        Args:
            response_id: of a response to it that the endpoint keeps.
        """


def object_of(data: str) -> dict[str, Any]:
    """The JSON object that the data of an event, or a whole response, is. Raises `Malformed` for what is none."""
    try:
        found = from_json(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Malformed("not a JSON object")
    return found


def text_of(data: dict[str, Any], name: str) -> str:
    """A field that is text, as it can be stored; empty where it is left out. Raises `Malformed` for what is none."""
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise Malformed(f"{name} is no text: {value!r:.80}")
    return storable(value or "")


def count_of(data: dict[str, Any], name: str) -> int:
    """A field that is a number of tokens; 0 where it is left out. Raises `Malformed` for what is none."""
    value = data.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        raise Malformed(f"{name} is no number of tokens: {value!r:.80}")
    return value
