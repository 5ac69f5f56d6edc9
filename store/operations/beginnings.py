"""How things begin: sessions, inputs, sub-agents and their restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, func, literal_column, select

from understudy import events
from understudy.errors import RunConflict, SessionClosed, SessionConflict
from understudy.handoffs import present
from understudy.identifiers import child_identifier, digest, tool_span_identifier, trace_identifier
from understudy.messages import Message, encodable
from understudy.queues import QueuePlace
from understudy.records import LEASE_SECONDS, Spawn
from understudy.workflows import AGENT

from ..db.prepared import Row
from ..db.session_row import SessionRow
from ..db.statements import REQUEST, RUN, SESSION, TIMER, TOOL_CALL
from ..transaction import Transaction
from . import charging, copies, queues, upgrades

TASK = "task"
"""Run id of a child's one task, given by its parent."""

TASK_AT_WORK, TASK_UNREPORTED, TASK_LINKED = 1, 2, 3
"""`task_open` of a child: its task has not ended; has, and its parent was not notified; was, and it is still linked."""

PAUSE_TIMER = "pause"
"""The timer that ends a pause: before a crashed session is resumed, or a failed sub-agent is started again."""

LEASE = int(LEASE_SECONDS * 1_000_000)
"""Microseconds within which a tool may begin after its start was committed."""

REMOVED = "removed"
"""Instead of the digest of an input which a session took that had the id before (`requests.outlive`)."""

SELECT_DIGEST = select(
    func.coalesce(
        select(RUN.c.digest)
        .where(
            RUN.c.namespace == bindparam("ns"), RUN.c.session_id == bindparam("session"),
            RUN.c.run_id == bindparam("run"),
        )
        .scalar_subquery(),
        select(literal_column(f"'{REMOVED}'"))
        .where(
            REQUEST.c.namespace == bindparam("ns"), REQUEST.c.session_id == bindparam("session"),
            REQUEST.c.request_id == bindparam("request"),
        )
        .scalar_subquery(),
    ).label("digest")
)  # fmt: skip
SELECT_CLOSED = select(SESSION.c.closed).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id == bindparam("session")
)
SELECT_CREATED = select(SESSION.c.created_at).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id == bindparam("session")
)
SELECT_CHILD = select(TOOL_CALL.c.child_id).where(
    TOOL_CALL.c.namespace == bindparam("ns"), TOOL_CALL.c.session_id == bindparam("session"),
    TOOL_CALL.c.call_id == bindparam("call"),
)  # fmt: skip
SELECT_METADATA = select(SESSION.c.metadata_json).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id == bindparam("session")
)
SELECT_CONTENT = select(RUN.c.content).where(
    RUN.c.namespace == bindparam("ns"), RUN.c.session_id == bindparam("session"), RUN.c.run_id == bindparam("run")
)


def created_at(tx: Transaction, session_id: str) -> int:
    """When a session was made (microseconds since 1970): another one that had its id was made at another time."""
    found: int | None = tx.read_one(SELECT_CREATED, session_id, session=session_id)
    return found or 0


def create_session(
    tx: Transaction,
    session_id: str,
    spec: dict[str, Any],
    *,
    spec_hash: str,
    placement: str,
    node_id: str,
    metadata: dict[str, str],
    parent: SessionRow | None = None,
    call_id: str | None = None,
    replaces: SessionRow | None = None,
    forked: int = 0,
    origin: str = "",
    background: bool = False,
    agent: str = "",
) -> bool:
    """Get or create a session; True when it was created.

    Args:
        replaces: the sub-agent whose task is started again in this one.
        forked: the last `seq` of the messages that it begins with, which are another session's.
        origin: that session.
        background: no run of its parent waits for it.
        agent: of the specification's, that it is under; empty for the first.

    Raises:
        SessionConflict: it exists with another specification, and does not take this one on (`upgrades.take_on`).
    """
    existing = tx.find(session_id)
    if existing is not None:
        if existing.spec_hash != spec_hash or existing.next_spec is not None:
            upgrades.take_on(tx, existing, spec, placement)
        return False
    accounts = charging.open_accounts(tx, session_id, spec.get("budget"), parent)
    restart_number = replaces.restart_number + 1 if replaces else 0
    row = SessionRow(
        session_id,
        root_id=session_id,
        call_id=call_id,
        agent=agent if agent in (spec.get("handoffs") or {}) else spec["name"],
        kind=spec.get("kind", AGENT),
        spec_hash=spec_hash,
        placement=placement,
        node_id=node_id,
        accounts=accounts,
        wait="idle",
        restart_type=spec.get("restart_type", "temporary"),
        on_parent_end=spec.get("on_parent_end", "cancel"),
        lifecycle=spec.get("lifecycle", "ephemeral"),
        shutdown=upgrades.shutdown_of(spec),
        restart_number=restart_number,
        background=int(background),
        seq=forked and forked + 1,  # behind an answer there is its event, also where that is missing
        pruned_seq=forked and forked + 1,
    )
    if parent is not None:
        row.parent_id, row.root_id, row.depth = parent.session_id, parent.root_id, parent.depth + 1
        row.parent_run_id, row.task_open = parent.run_id, TASK_AT_WORK
        row.start_order = replaces.start_order if replaces else parent.seq
        row.last_span = replaces.last_span if replaces else ""
    tx.create(row, spec, metadata)
    event = events.SessionCreated(
        depth=row.depth, call_id=call_id, restart=restart_number, forked_from=origin, forked_at=forked
    )
    tx.append(row, event)
    return True


def accept(
    tx: Transaction, session_id: str, run_id: str, content: Any, *, trace_id: str = "", parent_span_id: str = "",
    sampled: bool | None = None, source: str = "client", request_id: str = "", child_id: str = "", command: str = "",
    place: QueuePlace | None = None, first: bool = False,
) -> bool:  # fmt: skip
    """Accept an input as a run; True when it is new, False when the same one was accepted before.

    Args:
        sampled: whether the caller whose trace it is records that; None for a trace of the run's own.
        request_id: of the client's request: also False if that was accepted by a session that had the id before.
        child_id, command: the sub-agent, or the command, whose end it tells.
        place: the queue in which the run waits.
        first: this transaction has just created the session: it has taken no input, so none is looked for, which would
            have all that is not written yet written first.

    Raises:
        UnknownSession: there is no such session.
        UnknownQueue: or no such queue.
        RunConflict: the run exists with another input.
        SessionClosed: the session takes no more input, or is linked to one that does not.
    """
    row = tx.session(session_id)
    content = encodable(content)
    fingerprint = digest(repr(content))
    stored = None
    if not first:
        stored = tx.read_one(SELECT_DIGEST, session_id, session=session_id, run=run_id, request=request_id)
    if stored == REMOVED:
        return False
    if stored is not None:
        if stored != fingerprint:
            raise RunConflict(f"run {run_id!r} exists with another input", session_id=session_id)
        return False
    require_open(tx, row)
    in_queue = queues.enter(tx, row, place)
    trace_id = trace_id or trace_identifier(session_id, run_id)
    tx.insert(
        RUN,
        {"session_id": session_id, "run_id": run_id, "digest": fingerprint, "content": content, "source": source,
         "status": "queued", "trace_id": trace_id, "parent_span_id": parent_span_id, "accepted_at": tx.now,
         "request_id": request_id, "sampled": None if sampled is None else int(sampled), **in_queue},
    )  # fmt: skip
    by = tx.by if source == "client" else ""  # a request may have ended what an agent, a timer or a command waits for
    event = events.RunAccepted(
        run_id=run_id, trace_id=trace_id, sampled=sampled, source=source, parent_span_id=parent_span_id, by=by
    )
    tx.append(row, event)
    payload = {"content": content, "trace_id": trace_id, "parent_span_id": parent_span_id, "accepted_at": tx.now}
    payload |= {} if sampled is None else {"sampled": sampled}
    payload |= {"child_id": child_id} if child_id else {"command": command} if command else {}
    payload |= {"queue": place.queue} if place is not None else {}
    tx.put_inbox(row, "input", run_id, payload)
    if row.wait == "idle" and place is not None:
        queues.wait(tx, row)
    elif row.wait == "idle":
        tx.wake(row)
    return True


def require_open(tx: Transaction, row: SessionRow) -> None:
    """Refuse what a session that takes no more input is to take. Raises `SessionClosed`."""
    session_id = row.session_id
    if row.closed or row.status == "quarantined":
        raise SessionClosed(f"the session is {'closed' if row.closed else row.status}", session_id=session_id)
    if linked_to_closed(tx, row):
        raise SessionClosed(f"the session is linked to {row.parent_id!r}, which is closed", session_id=session_id)


def linked_to_closed(tx: Transaction, row: SessionRow) -> bool:
    """Whether a sub-agent will be closed when its task ends, because its parent is, which it is linked to.

    The parent is only read: if another transaction closes it now, what this one does came before, and ends with it.
    """
    parent_id = row.parent_id
    if row.lifecycle != "linked" or parent_id is None:
        return False
    return bool(tx.read_one(SELECT_CLOSED, parent_id, session=parent_id))


def spawn(tx: Transaction, parent: SessionRow, wanted: Spawn, *, interrupted: bool) -> bool:
    """Create a child with its task, or find the one that this call created before.

    False if a budget does not allow it, its id is another session's, or the parent's run was interrupted: then the
    call's result is in the inbox, as a child's would be. That of a call which does not wait for the child is there in
    any case.
    """
    found = tx.find(wanted.child_id)
    if found is not None:
        if (found.parent_id, found.call_id) == (parent.session_id, wanted.call_id):
            _say_started(tx, parent, wanted)
            return True
        message = f"the sub-agent's id, {wanted.child_id!r}, is another session's"
        _refuse(tx, parent, wanted, "failed", SessionConflict(message, session_id=parent.session_id).to_wire())
        return False
    if interrupted:
        error = {"code": "cancelled", "message": "the run was interrupted", "session_id": parent.session_id}
        _refuse(tx, parent, wanted, "cancelled", error)
        return False
    refusal = charging.admit_child(tx, parent)
    if refusal is not None:
        _refuse(tx, parent, wanted, "budget_exceeded", refusal.error(parent.session_id))
        return False
    origin = _child_of(tx, parent, wanted.continues) if wanted.continues else None
    parent.children_open += 0 if wanted.background else 1
    _begin(
        tx, parent, wanted.call_id, wanted.child_id, wanted.spec, wanted.text, background=wanted.background,
        origin=origin,
    )  # fmt: skip
    _say_started(tx, parent, wanted)
    return True


def _child_of(tx: Transaction, parent: SessionRow, call_id: str) -> str | None:
    """The sub-agent that a call has created; the last one, where its task was started again."""
    found: str | None = tx.read_one(SELECT_CHILD, parent.session_id, session=parent.session_id, call=call_id)
    return found


def _say_started(tx: Transaction, parent: SessionRow, wanted: Spawn) -> None:
    if wanted.background:
        said = {"decision": "ok", "text": f"started sub-agent {wanted.child_id}", "since": tx.now}
        tx.put_inbox(parent, "answer", wanted.call_id, said)


def _refuse(tx: Transaction, parent: SessionRow, wanted: Spawn, status: str, error: dict[str, Any]) -> None:
    if wanted.background:
        text = f"no sub-agent was started: {error['message']}. Go on without it."
        tx.put_inbox(parent, "answer", wanted.call_id, {"decision": "error", "text": text, "since": tx.now})
        return
    payload = {
        "child_id": None, "status": status, "text": "", "output": None, "usage": None, "rounds": 0, "error": error,
    }  # fmt: skip
    tx.put_inbox(parent, "child_result", wanted.call_id, payload)


def start_again(tx: Transaction, parent: SessionRow, ended: SessionRow, delay: int) -> bool:
    """Start a sub-agent's task again, after `delay` microseconds: in another session, without what the last one knew,
    but for what that began with.

    The parent's call waits on; the result it gets will be the new session's. False if a budget does not allow it, or
    its id is another session's.
    """
    assert ended.call_id is not None
    number = ended.restart_number + 1
    child_id = child_identifier(parent.session_id, ended.call_id, number)
    if tx.find(child_id) is not None or charging.admit_child(tx, parent) is not None:
        return False
    spec = tx.specification(ended.session_id)
    task = tx.read_one(SELECT_CONTENT, ended.session_id, session=ended.session_id, run=TASK)
    mark_reported(tx, ended)
    ended.replaced_by = child_id
    event = events.ChildRestarted(
        call_id=ended.call_id, child_id=child_id, lost_id=ended.session_id, restart=number, delay=delay,
        status=ended.status, lost_run=ended.last_span,
    )  # fmt: skip
    tx.append(parent, event)
    tx.update_call(
        parent.session_id, ended.call_id, state="started", epoch=parent.epoch, executions=number + 1,
        result=None, child_id=child_id,
    )  # fmt: skip
    metadata = tx.read_one(SELECT_METADATA, ended.session_id, session=ended.session_id) or {}
    _begin(
        tx, parent, ended.call_id, child_id, spec, task, replaces=ended, delay=delay, origin=metadata.get(copies.FROM)
    )
    return True


def mark_reported(tx: Transaction, child: SessionRow) -> None:
    """The parent knows of the end of the child's task, or does not want to."""
    tx.changed(child)
    child.task_open = TASK_LINKED if child.lifecycle == "linked" and not child.closed else 0


def _begin(
    tx: Transaction, parent: SessionRow, call_id: str, child_id: str, spec: dict[str, Any], task: Any, *,
    replaces: SessionRow | None = None, delay: int = 0, background: bool = False, origin: str | None = None,
) -> None:  # fmt: skip
    begun = _copied(tx, origin) if origin is not None else _Begun()
    known = present(spec, begun.agent)
    placement: str = known.get("placement", parent.placement)
    metadata = {**(spec.get("metadata") or {}), **(copies.source(begun.origin, begun.at) if begun.at else {})}
    create_session(
        tx, child_id, spec, spec_hash=spec["hash"], placement=placement, node_id=parent.node_id,
        metadata=metadata, parent=parent, call_id=call_id, replaces=replaces, background=background,
        forked=begun.at, origin=begun.origin, agent=begun.agent,
    )  # fmt: skip
    copies.write(tx, begun.origin, child_id, begun.messages)
    tx.append(parent, events.ChildSpawned(call_id=call_id, child_id=child_id, child_agent=spec["name"]))
    if delay:
        pause(tx, tx.session(child_id), delay)
    accept(
        tx, child_id, TASK, task, trace_id=parent.trace_id, sampled=parent.recorded, source="parent",
        parent_span_id=tool_span_identifier(parent.session_id, call_id), first=True,
    )  # fmt: skip


@dataclass(frozen=True)
class _Begun:
    """What a sub-agent begins with: copies of the messages of another one, under the agent that this was then."""

    origin: str = ""
    at: int = 0
    agent: str = ""
    messages: tuple[Message, ...] = ()


def _copied(tx: Transaction, origin: str) -> _Begun:
    """The conversation of a sub-agent, as far as it has come."""
    row, messages = tx.find(origin), tx.messages(origin, 0)
    if row is None:  # it was removed since
        return _Begun()
    at = copies.whole_places(messages)[-1]
    agent = copies.agent_of(messages, at, row)
    return _Begun(origin if at else "", at, agent, tuple(message for message in messages if message.seq <= at))


def pause(tx: Transaction, row: SessionRow, delay: int, *, outlasts: bool = False) -> None:
    """Let a session wait for so many microseconds.

    Args:
        outlasts: something that its last process may begin is over only then: nothing may end the wait before.
    """
    tx.changed(row)
    row.wait, row.status = "timer", "waiting_for_timer"
    row.wait_since, row.active = tx.now, 1
    tx.set_timer(row, PAUSE_TIMER, tx.now + delay, {"outlasts": True} if outlasts else None)


def outlasting(tx: Transaction, row: SessionRow) -> int:
    """Microseconds until what the last process of a paused session may begin is over; 0 if it is known to be gone."""
    found = timer(tx, row.session_id, PAUSE_TIMER)
    return max(1, found["due_at"] - tx.now) if found is not None and (found["payload"] or {}).get("outlasts") else 0


def timer(tx: Transaction, session_id: str, name: str) -> Row | None:
    """A timer of a session: when it is `due_at`, and its `payload`; None if it is not set."""
    where = (TIMER.c.namespace == tx.namespace, TIMER.c.session_id == session_id, TIMER.c.name == name)
    row = tx.read(select(TIMER.c.due_at, TIMER.c.payload).where(*where), session_id).mappings().first()
    return dict(row) if row is not None else None
