"""Events in JSON."""

from __future__ import annotations

from typing import Any, TypedDict

ENVELOPE = (
    "seq", "at", "session_id", "run_id", "round", "epoch", "trace_id", "agent", "parent_id", "root_id", "sampled",
)  # fmt: skip
"""What all events have, beside type, place in the writer's log, and the data of their own."""


class EventWire(TypedDict):
    """An event as `Event.to_wire` makes it: in JSON, between processes, and where it is only passed on."""

    type: str
    seq: int
    at: int
    session_id: str
    run_id: str | None
    round: int
    epoch: int
    trace_id: str
    agent: str
    parent_id: str | None
    root_id: str
    sampled: bool | None
    writer_seq: int
    data: dict[str, Any]
