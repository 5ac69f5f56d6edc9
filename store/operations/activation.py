"""Operations of placement: who owns the store, which frame holds a session, what becomes of it when a frame dies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import and_, insert, select, update

from understudy import events
from understudy.errors import Fenced, SessionClosed, StaleGeneration, StoreOwned
from understudy.identifiers import home_of
from understudy.messages import Message
from understudy.ports import Death, Decide, Verdict
from understudy.protocol import Work
from understudy.records import ActivationId, CallState, answered_by
from understudy.workflows import STEPS, WORKFLOW

from ..db.session_row import SessionRow
from ..db.statements import OWNER, SESSION, TIMER
from ..transaction import Transaction
from . import questions, steps, timers
from .beginnings import LEASE, PAUSE_TIMER, pause
from .draining import drains, end_stops
from .endings import end_queued, end_without_agent

EXECUTED = ("requested", "approved", "started")
"""States of calls that are a frame's to execute."""

SOON = 60_000_000
"""A session without work whose timer is due within this time (microseconds) needs a home."""


@dataclass(frozen=True)
class FrameRef:
    """A frame as the store knows it."""

    frame_id: str
    pid: int
    node_id: str


def acquire(tx: Transaction, holder: str, lease: int, *, may_take: Callable[[str], bool]) -> int:
    """Become the owner of the namespace; returns the new generation.

    Raises:
        StoreOwned: another holder's lease runs, and `may_take(holder)` does not know it to be dead.
    """
    statement = tx.locking(select(OWNER).where(OWNER.c.namespace == tx.namespace))
    row = tx.connection.execute(statement).mappings().first()
    if row is None:
        tx.writes += 1
        tx.connection.execute(
            insert(OWNER).values(namespace=tx.namespace, generation=1, holder=holder, lease_until=tx.now + lease)
        )
        return 1
    if row["lease_until"] > tx.now and not may_take(row["holder"]):
        seconds = (row["lease_until"] - tx.now) / 1e6
        raise StoreOwned(
            f"namespace {tx.namespace!r} is owned by {row['holder']} for another {seconds:.0f} s",
            details={"holder": row["holder"], "seconds": seconds},
        )
    if row["holder"] != holder:
        end_stops(tx)
    generation: int = row["generation"] + 1
    _own(tx, row["generation"], generation=generation, holder=holder, lease_until=tx.now + lease)
    return generation


def renew(tx: Transaction, generation: int, holder: str, lease: int) -> None:
    """Keep owning. `lease` of 0 gives the store up.

    Raises:
        StaleGeneration: another supervisor took over.
    """
    if not _own(tx, generation, holder=holder, lease_until=tx.now + lease):
        current = tx.connection.execute(select(OWNER.c.generation).where(OWNER.c.namespace == tx.namespace)).scalar()
        raise StaleGeneration(f"generation {generation} no longer owns the store: {current} does")


def _own(tx: Transaction, before: int, **values: Any) -> bool:
    """Write the owner's row, if it still has this generation."""
    where = (OWNER.c.namespace == tx.namespace, OWNER.c.generation == before)
    written = tx.connection.execute(update(OWNER).where(*where).values(**values)).rowcount
    tx.writes += written
    return bool(written)


def activate(
    tx: Transaction,
    session_id: str,
    frame: FrameRef,
    *,
    after_seq: int = 0,
    cause: str = "ready",
    down_since: int = 0,
    parked: ActivationId | None = None,
) -> Work:
    """Give a session to a frame under the next epoch, which fences the one before; returns what the frame must know.

    In it `redone` says whether what the frame does until the next model call may have been done before: since the last
    one the session has not always left its frames of itself, with a commit.

    Attributes:
        after_seq: the frame has the session's messages up to here.
        parked: what leaves the frame for this one.

    Raises:
        StaleGeneration: the supervisor of this journal no longer owns the store.
        Fenced: the session has nothing to do any more.
    """
    row = tx.session(session_id)
    tx.require_generation()
    if not row.active:
        raise Fenced(f"the session is {row.status}: there is nothing to activate", session_id=session_id)
    if parked is not None:
        park(tx, parked)
    tx.changed(row)
    if row.moved == 1 and cause != "resume":
        cause = "moved"
    if row.moved or row.frame_id is not None:
        row.redone = 1
    row.epoch += 1
    row.batch_no = row.moved = 0
    row.frame_id, row.actor_pid, row.node_id = frame.frame_id, frame.pid, frame.node_id
    if row.wait is None:
        row.status, row.wait_since = "running", 0  # a pause after a crash is over: it was resumed
    down = tx.now - down_since if down_since else 0
    event = events.SessionActivated(
        cause=cause, frame_id=frame.frame_id, pid=frame.pid, node_id=frame.node_id, down=down
    )
    tx.append(row, event)
    return work(tx, row, after_seq)


def park(tx: Transaction, activation: ActivationId) -> None:
    """Note that a waiting session left its frame; nothing if it is active elsewhere by now."""
    row = tx.find(activation.session_id)
    if row is not None and row.activation == activation and row.frame_id is not None:
        tx.changed(row)
        row.frame_id = row.actor_pid = None


def work(tx: Transaction, row: SessionRow, after_seq: int) -> Work:
    """All that an activation must know, messages after `after_seq` only: earlier ones never change, or are not
    needed."""
    after_seq = max(after_seq, row.record_seq)
    return work_with(tx, row, after_seq, tx.messages(row.session_id, after_seq), open_calls(tx, row))


def work_with(
    tx: Transaction, row: SessionRow, after_seq: int, messages: Iterable[Message], calls: Iterable[CallState]
) -> Work:
    """The same, where messages and open calls are known: they are not read."""
    return Work(
        session_id=row.session_id, incarnation=row.incarnation, epoch=row.epoch, batch_no=row.batch_no,
        after_seq=after_seq, seq=row.seq, root_id=row.root_id, depth=row.depth, run_id=row.run_id,
        round=row.round, trace_id=row.trace_id, sampled=row.recorded, wait=row.wait,
        model_error=row.wait_error,
        cancel=row.cancel_reason, messages=tuple(messages), calls=tuple(calls), inbox=steps.inbox(tx, row),
        budgeted=row.accounts is not None, redone=bool(row.redone), needless=row.record_seq,
    )  # fmt: skip


def open_calls(tx: Transaction, row: SessionRow) -> list[CallState]:
    """Tool calls of the current round whose results are not messages yet."""
    found = tx.current_calls(row) if row.calls_open else ()
    names = [name for name in CallState.__struct_fields__ if name != "question"]
    kinds = questions.kinds(tx, row) if any(item["state"] == "asked" for item in found) else {}
    return [
        CallState(**{name: item[name] for name in names}, question=kinds.get(item["call_id"], ""))
        for item in found
        if item["state"] != "done"
    ]


def crash(
    tx: Transaction, activation: ActivationId, decide: Decide, *, cause: str, pid: int, policy: dict[str, Any],
    unseen: int = 0, may_live: bool = False, guarding: bool = False,
) -> Verdict | None:  # fmt: skip
    """Note that an activation's process is gone and decide what follows; None if the session had moved on.

    On `resume` without delay the session is ready (or still waits, in no frame); with one it waits for a timer; on
    `abort` its open calls have a result as well; on `quarantine` its run is over and its parent has a result.

    Args:
        may_live: nobody knows whether the process is gone, as that of a lost node (`outlast`).
        guarding: hooks ran beside the model call that the session waits for: they may have been the cause.
    """
    row = tx.find(activation.session_id)
    tx.require_generation()
    if row is None or row.activation != activation:
        return None
    if not row.active or row.wait == "queue":  # it only rested there
        park(tx, activation)
        return None
    if row.frame_id is None:  # reported before, by a commit whose outcome was not known; or it had parked
        return Verdict("resume", delay=timers.left(tx, row, PAUSE_TIMER) if row.wait == "timer" else 0)
    waiting = row.wait is not None and not (guarding and row.wait == "model")
    progress = row.progress > row.progress_at_death
    deaths = tuple(row.deaths or ())
    stuck_in = [] if waiting else _executing(tx, row)
    death = Death(
        tx.now, deaths, row.stuck, waiting, progress, policy, open_calls=len(stuck_in), aborted=row.aborted > 0,
        session_id=row.session_id, number=row.restarts,
    )  # fmt: skip
    verdict = decide(death)
    if row.wait is not None:
        verdict = replace(verdict, delay=0)  # it goes on with its wait
    outlasts = may_live and verdict.action in ("resume", "abort") and _may_begin(tx, row)
    if outlasts:
        verdict = replace(verdict, delay=max(verdict.delay, LEASE))
    tx.changed(row)
    row.frame_id = row.actor_pid = None
    row.restarts, row.progress_at_death, row.redone = row.restarts + 1, row.progress, 1
    row.deaths, row.stuck = list(verdict.deaths), verdict.stuck
    event = events.SessionCrashed(
        cause=cause, pid=pid, waiting=waiting, progress=progress, decision=verdict.action, delay=verdict.delay,
        unseen=unseen,
    )  # fmt: skip
    tx.append(row, event)
    if may_live and verdict.action != "quarantine":  # which fences by itself
        row.epoch += 1  # from now on what lives there can commit nothing, and so begin nothing new
    if verdict.action == "abort":
        abort(tx, row, stuck_in, verdict.reason)
    if verdict.action == "quarantine":
        quarantine(tx, row, verdict.rule, verdict.reason)
    elif verdict.delay and row.wait is None:
        pause(tx, row, verdict.delay, outlasts=outlasts)
    return verdict


def outlast(tx: Transaction, row: SessionRow, *, at_work: bool = False) -> None:
    """Let a session whose last process may live, and was fenced in this transaction, go on only when that can begin
    nothing any more: the lease of a tool call that was marked as started is over by then, whatever its process does.

    Args:
        at_work: processes other than that one execute calls of the session, and are ended after this transaction.
    """
    if row.active and row.wait is None and (at_work or _may_begin(tx, row)):
        pause(tx, row, LEASE, outlasts=True)


def _may_begin(tx: Transaction, row: SessionRow) -> bool:
    """Whether the session's process was allowed to begin a tool call, and nobody knows whether it has."""
    return any(call.state == "started" and call.child_id is None for call in open_calls(tx, row))


def _executing(tx: Transaction, row: SessionRow) -> list[CallState]:
    """Calls that a frame has to execute, or did when its process died; not those that are a child's or a person's, nor
    those whose results are in the inbox: a sub-agent that a budget refused has no session. A workflow's steps that are
    no tools are never executed in a frame: those that have not been handed over yet are as innocent as the others."""
    innocent = STEPS if row.kind == WORKFLOW else frozenset()
    calls = [
        call for call in open_calls(tx, row)
        if call.state in EXECUTED and call.child_id is None and call.tool not in innocent
    ]  # fmt: skip
    answered = answered_by(tx.inbox(row)) if calls else ()
    return [call for call in calls if call.call_id not in answered]


def abort(tx: Transaction, row: SessionRow, calls: list[CallState], text: str) -> None:
    """Give tool calls up: each gets its result here, since no process survives them. Once in a run."""
    row.aborted = 1
    for call in calls:
        result = {"outcome": "aborted", "content": text, "duration": 0, "started_at": tx.now}
        tx.update_call(
            row.session_id, call.call_id, state="finished", epoch=row.epoch, executions=call.executions,
            result=result, child_id=None,
        )  # fmt: skip
        since = tx.now if call.state == "requested" else call.updated_at
        event = events.ToolFinished(
            call_id=call.call_id, tool=call.tool, outcome="aborted", started_at=since,
            duration=max(0, tx.now - since), executions=call.executions,
            error_message=text,
        )  # fmt: skip
        tx.append(row, event)


def resume(tx: Transaction, session_id: str) -> bool:
    """Let a quarantined session take input again; its runs stay ended. True if it was quarantined.

    Raises:
        UnknownSession: there is no such session.
        SessionClosed: it was a sub-agent, or was closed: it takes no more input anyway.
    """
    row = tx.session(session_id)
    if row.status != "quarantined":
        return False
    if row.closed:
        raise SessionClosed("the session is quarantined, and closed", session_id=session_id)
    tx.changed(row)
    row.status, row.error, row.deaths, row.stuck = "idle", None, [], 0
    row.progress_at_death = row.progress
    tx.append(row, events.SessionResumed(by=tx.by, last_run=row.span_before))
    return True


def quarantine(tx: Transaction, row: SessionRow, rule: str, reason: str) -> None:
    """Give a session up: its run ends, its parent gets a typed result, its siblings go on."""
    tx.append(row, events.SessionQuarantined(rule=rule, reason=reason, last_run=row.span_before))
    error = {"code": "quarantined", "message": reason, "session_id": row.session_id}
    end_without_agent(tx, row, "quarantined", error, hold=False)
    end_queued(tx, row, "quarantined", reason)
    row.error = error  # also where no run had begun
    row.epoch += 1  # whoever still holds it may write nothing more
    row.status, row.active, row.wait = "quarantined", 0, "idle"


def adopt(tx: Transaction, node_id: str, nodes: list[str]) -> list[str]:
    """Make a node the home of its share of the sessions with work that have none any more, or not yet; returns them.

    One with a timer that is due soon has work as well: its home fires it.

    Every node service is given the same nodes, and takes a share of its own. A tree is in one share: it stays together.

    A node that is drained has no share, but keeps what it has: it knows when that can be moved.

    A session at work in a frame stays there, without a pid: whoever notes that frame's death, be it after one more
    restart, knows by this that its process may live (`crash`).

    Args:
        nodes: those that have a node service.

    Raises:
        StaleGeneration: the supervisor of this journal no longer owns the store.
    """
    statement = select(SESSION.c.session_id, SESSION.c.root_id).where(
        SESSION.c.namespace == tx.namespace, SESSION.c.active == 1, SESSION.c.node_id.not_in(nodes)
    )
    of_timer = and_(SESSION.c.namespace == TIMER.c.namespace, SESSION.c.session_id == TIMER.c.session_id)
    due = (
        select(SESSION.c.session_id, SESSION.c.root_id)
        .join_from(TIMER, SESSION, of_timer)
        .where(TIMER.c.namespace == tx.namespace, TIMER.c.due_at <= tx.now + SOON, SESSION.c.node_id.not_in(nodes))
    )
    homeless = {*tx.read(statement), *tx.read(due)}
    homes = set(nodes) - drains(tx).keys() if homeless else set()
    share = sorted(session for session, root in homeless if node_id in homes and home_of(root, homes) == node_id)
    tx.load(share)
    tx.require_generation()
    for row in map(tx.session, share):
        if row.node_id not in nodes:
            tx.changed(row)
            row.node_id, row.actor_pid = node_id, None
            if not row.active:
                row.frame_id = None  # it did nothing there
    return share
