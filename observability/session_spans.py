"""What happens to a session, as spans: crashes, recoveries, moves, and what people and rules decide about it.

Most are points in time. They are spans of their own, not events of the run's span: that is a function of the one event
that ends the run, and is exported when the run is over.
"""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link

from understudy.events import (
    ChildRestarted,
    Event,
    SessionActivated,
    SessionClosed,
    SessionCrashed,
    SessionMigrated,
    SessionMoved,
    SessionQuarantined,
    SessionResumed,
    ShutdownForced,
)
from understudy.identifiers import span_identifier

from . import conventions as names
from .span_building import Attributes, context, elsewhere, make_span


def crash_span_identifier(session_id: str, epoch: int) -> str:
    """The span of the crash that ended activation `epoch`."""
    return span_identifier(session_id, str(epoch), names.CRASH)


def recover_span_identifier(session_id: str, epoch: int) -> str:
    """The span of what went by until activation `epoch` took over from one that had crashed."""
    return span_identifier(session_id, str(epoch), names.RECOVER)


def crashed(event: SessionCrashed) -> ReadableSpan:
    """A process died: always an error."""
    return make_span(
        event,
        names.CRASH,
        event.agent,
        crash_span_identifier(event.session_id, event.epoch),
        start=event.at,
        end=event.at,
        attributes={
            names.CRASH_PID: event.pid,
            names.CRASH_WAITING: event.waiting,
            names.CRASH_PROGRESS: event.progress,
            names.CRASH_DECISION: event.decision,
        },
        error=event.cause or "process_died",
    )


def activated(event: SessionActivated) -> ReadableSpan | None:
    """From a crash's detection to the next activation; nothing for other activations."""
    if event.cause != "resume":
        return None
    crash = context(event, crash_span_identifier(event.session_id, event.epoch - 1))
    return make_span(
        event,
        names.RECOVER,
        event.agent,
        recover_span_identifier(event.session_id, event.epoch),
        start=event.at - event.down,
        end=event.at,
        attributes={names.NODE_ID: event.node_id, names.PID: event.pid},
        links=(Link(crash),),
    )


def _happening(
    event: Event, operation: str, attributes: Attributes, *, error: str = "", since: int = 0, link: str = ""
) -> ReadableSpan:
    """A point in time, or what went by `since` one.

    Args:
        link: `TRACE-SPAN` of a run that it is about.
    """
    return make_span(
        event,
        operation,
        event.agent,
        span_identifier(event.session_id, str(event.seq), operation),
        start=since or event.at,
        end=event.at,
        attributes=attributes,
        error=error,
        links=(elsewhere(link),) if link else (),
    )


def moved(event: SessionMoved) -> ReadableSpan:
    """It goes on at another node."""
    attributes = {names.MOVE_FROM: event.from_node, names.NODE_ID: event.to_node, names.MOVE_FORCED: event.forced}
    return _happening(event, names.MOVE, attributes)


def quarantined(event: SessionQuarantined) -> ReadableSpan:
    """It is given up: always an error, of the rule that said so."""
    return _happening(event, names.QUARANTINE, {}, error=event.rule or "quarantined", link=event.last_run)


def resumed(event: SessionResumed) -> ReadableSpan:
    """A person lets it take input again."""
    return _happening(event, names.RESUME, {}, link=event.last_run)


def migrated(event: SessionMigrated) -> ReadableSpan:
    """It took on another specification."""
    attributes = {names.MIGRATE_CHANGED: tuple(map(str, event.changed or ())), names.SPEC_HASH: event.spec_hash}
    return _happening(event, names.MIGRATE, attributes, link=event.last_run)


def closed(event: SessionClosed) -> ReadableSpan:
    """It takes no more input."""
    return _happening(event, names.CLOSE, {}, link=event.last_run)


def shutdown_forced(event: ShutdownForced) -> ReadableSpan:
    """A run was asked to end and did not: from then to the kill of its process. Always an error."""
    return _happening(event, names.FORCE_SHUTDOWN, {}, error="shutdown_timeout", since=event.at - event.waited)


def child_restarted(event: ChildRestarted) -> ReadableSpan:
    """A sub-agent's task starts again, in another session."""
    attributes = {
        names.RESTART_CHILD: event.child_id,
        names.RESTART_LOST: event.lost_id,
        names.RESTART_NUMBER: event.restart,
        names.RESTART_DELAY: event.delay / 1_000_000,
        names.TOOL_CALL_ID: event.call_id,
    }
    return _happening(event, names.RESTART, attributes, link=event.lost_run)
