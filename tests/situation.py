"""Why nothing happens: what each session that has work waits for, in the store and in the memory of a node service."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from understudy.node.node_service import NodeService
from understudy.store.db.engine import Database, now
from understudy.store.db.statements import INBOX, QUESTION, SESSION, TIMER

SESSION_FACTS = (
    "status", "wait", "wait_holder", "wait_attempt", "answer_key", "epoch", "batch_no", "frame_id", "node_id", "run_id",
    "round", "calls_open", "children_open", "cancel_reason", "held", "group_state", "task_open",
)  # fmt: skip


def describe(dsn: str, namespace: str, service: NodeService, alive: list[str]) -> str:
    """Everything that a session with work may wait for, a line for each thing.

    Args:
        alive: frames that are.
    """
    database = Database(dsn)
    try:
        with database.snapshot() as connection:
            stored = list(_stored(connection, namespace))
    finally:
        database.close()
    return "\n".join([*stored, *_in_memory(service), f"frames that live: {alive}"])


def _stored(connection: Connection, namespace: str) -> list[str]:
    lines = []
    of = SESSION.c.namespace == namespace
    for row in connection.execute(select(SESSION).where(of, SESSION.c.active == 1)).mappings():
        facts = {name: row[name] for name in SESSION_FACTS if row[name] not in (None, "", 0)}
        lines.append(f"session {row['session_id']}, {_ago(row['updated_at'])}: {facts}")
    for row in connection.execute(select(INBOX).where(INBOX.c.namespace == namespace)).mappings():
        lines.append(f"inbox of {row['session_id']}: {row['kind']} {row['key']}")
    for row in connection.execute(select(TIMER).where(TIMER.c.namespace == namespace)).mappings():
        lines.append(f"timer of {row['session_id']}: {row['name']}, due {_ago(row['due_at'])}")
    unanswered = select(QUESTION).where(QUESTION.c.namespace == namespace, QUESTION.c.answered_at == 0)
    for row in connection.execute(unanswered).mappings():
        lines.append(f"question of {row['session_id']}: {row['call_id']}")
    return lines


def _in_memory(service: NodeService) -> list[str]:
    frames, known, journal = service.frames, service.frames.known, service.journal
    slots = [(s.frame_id, s.session_id, s.epoch, s.wait, s.resting) for s in frames.paging.slots.values()]
    facts: dict[str, Any] = {
        "generation": service.generation, "takeover": known.all_read, "ready": list(frames.paging.ready),
        "placing": frames.assignments.under_way, "own": service.claims, "expected": known.expected,
        "condemned": known.condemned,
        "calls": [call.key for call in service.calls.in_flight()], "timers": len(service.timers._order),
        "swept": service.sweep.swept,
        "journal away": journal.outage.unreachable_since or journal.outage.busy_since,
        "operations": journal._submitted.qsize() + len(journal._groups),
    }  # fmt: skip
    lines = [f"{name}: {value}" for name, value in facts.items() if value]
    return [*lines, "slots (frame, session, epoch, wait, resting):", *(f"  {slot}" for slot in slots)]


def _ago(at: int) -> str:
    return f"{(now() - at) / 1e6:.1f} s ago"
