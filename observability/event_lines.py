"""Committed events as log lines: what went wrong, and what somebody asked for; the rest for debugging."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from understudy.events import (
    CancelRequested,
    ChildRestarted,
    Event,
    ModelCallReissued,
    SessionActivated,
    SessionCrashed,
    SessionMoved,
    SessionQuarantined,
    ShutdownForced,
)
from understudy.identifiers import run_span_identifier

log = logging.getLogger("understudy.events")

LOUD = (
    CancelRequested,
    ChildRestarted,
    ModelCallReissued,
    SessionCrashed,
    SessionMoved,
    SessionQuarantined,
    ShutdownForced,
)
CONTENT = frozenset({"error_message", "prompt", "options", "reason"})
"""Fields that may quote what was said."""


def log_events(events: Sequence[Event]) -> None:
    """A line for each event: INFO for `LOUD` ones and for what recovers, DEBUG for all others; no content."""
    quiet = log.isEnabledFor(logging.DEBUG)
    for event in events:
        loud = isinstance(event, LOUD) or (isinstance(event, SessionActivated) and event.cause not in ("ready", ""))
        if loud or quiet:
            facts = " ".join(f"{name}={value}" for name, value in event.body().items() if name not in CONTENT)
            ids = {"session_id": event.session_id, "run_id": event.run_id or "", "trace_id": event.trace_id}
            if event.run_id and event.trace_id:
                ids["span_id"] = run_span_identifier(event.session_id, event.run_id)
            log.log(logging.INFO if loud else logging.DEBUG, "%s %s %s", event.type, event.agent, facts, extra=ids)
