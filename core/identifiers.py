"""Identifiers: what they look like and how they are derived. The only place that knows."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable

from .errors import InvalidInput

COPIED = "fork:"
"""How the ids of runs and tool calls begin that a fork has copies of."""

IDENTITY_CHARACTERS = 200

IDENTIFIER = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_identifier(value: str, what: str) -> str:
    """Return `value` if it may be an id that a caller chooses.

    Raises:
        InvalidInput: it is not 1 to 128 letters, digits, dots, underscores or hyphens.
    """
    problem = identifier_problem(value, what)
    if problem is not None:
        raise InvalidInput(problem)
    return value


def identifier_problem(value: str, what: str) -> str | None:
    """What is wrong with an id that a caller chose; None if nothing is."""
    if isinstance(value, str) and IDENTIFIER.fullmatch(value):
        return None
    return f"{what} {value!r} must be 1 to 128 characters of A-Z a-z 0-9 . _ -"


def check_identity(value: str) -> str:
    """Return `value` if events may say that somebody of this name asked for something; empty for nobody.

    Raises:
        InvalidInput: it is no text of at most `IDENTITY_CHARACTERS` characters that can be printed.
    """
    if isinstance(value, str) and len(value) <= IDENTITY_CHARACTERS and value.isprintable():
        return value
    raise InvalidInput(f"an identity is at most {IDENTITY_CHARACTERS} characters that can be printed")


def new_identifier() -> str:
    """A UUIDv7 (RFC 9562 §5.7): sorts by creation time in milliseconds."""
    value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def digest(*parts: str, size: int = 16) -> str:
    """A stable hexadecimal hash of `parts`, `size` bytes wide; parts can't run into each other."""
    state = hashlib.blake2b(digest_size=size)
    for part in parts:
        data = part.encode(errors="surrogateescape")  # as variables and paths that are no UTF-8 are read
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.hexdigest()


def call_identifier(run_id: str, round_number: int, index: int) -> str:
    """Our id of a tool call. The provider's id is only an attribute: endpoints repeat theirs."""
    return f"{run_id}/{round_number}/{index}"


def child_identifier(parent_id: str, call_id: str, restart: int = 0) -> str:
    """The id of the session that a `spawn_agent` call creates, or its n-th restart: the same one never makes two."""
    return f"c-{digest(parent_id, call_id)}" + (f".{restart}" if restart else "")


def wait_key(session_id: str, run_id: str, round_number: int) -> str:
    """What a session waits for when it waits for a model; an attempt number makes it a request key."""
    return f"{session_id}/{run_id}/{round_number}"


def home_of(root_id: str, nodes: Iterable[str]) -> str:
    """Which of these nodes a tree of sessions belongs to: the same for its every session, whoever asks.

    A node that comes or goes changes the home of no more trees than it must (rendezvous hashing).
    """
    return max(nodes, key=lambda node_id: (digest(root_id, node_id), node_id))


def trace_identifier(session_id: str, run_id: str) -> str:
    """The trace id (32 hexadecimal digits) of a run that no caller put into a trace of its own."""
    return digest("trace", session_id, run_id, size=16)


def happening_trace_identifier(session_id: str, seq: int) -> str:
    """The trace id of what happened to a session that was at no run."""
    return digest("trace", session_id, "happening", str(seq), size=16)


TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def read_traceparent(value: str) -> tuple[str, str, bool]:
    """Trace id and span id of a W3C `traceparent`, and whether it says that the trace is recorded.

    Raises:
        InvalidInput: it is none.
    """
    found = TRACEPARENT.fullmatch(value) if isinstance(value, str) else None
    if found is None or (found[1] == "00" and found[5]):
        raise InvalidInput(f"traceparent {value!r} is not what W3C Trace Context calls one: 00-TRACE-SPAN-01")
    return found[2], found[3], bool(int(found[4], 16) & 1)


def traceparent(trace_id: str, span_id: str, sampled: bool | None) -> str:
    """A W3C `traceparent`. It says that the trace is recorded, unless the caller does not (`sampled`)."""
    return f"00-{trace_id}-{span_id}-{'00' if sampled is False else '01'}"


def span_identifier(*parts: str) -> str:
    """A span id (16 hexadecimal digits): the same operation always has the same one."""
    return digest("span", *parts, size=8)


def run_span_identifier(session_id: str, run_id: str) -> str:
    """The span of a whole run (`invoke_agent`)."""
    return span_identifier(session_id, run_id, "invoke_agent")


def run_link(trace_id: str, session_id: str, run_id: str) -> str:
    """`TRACE-SPAN` of a run, for runs that go on from it in other traces."""
    return f"{trace_id}-{run_span_identifier(session_id, run_id)}"


def tool_span_identifier(session_id: str, call_id: str) -> str:
    """The span of one tool call (`execute_tool`)."""
    return span_identifier(session_id, call_id, "execute_tool")
