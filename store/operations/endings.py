"""How things end: runs, children, cancels, sessions. What ends tells whoever waits for it, in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import select, update

from understudy import events
from understudy.identifiers import run_link
from understudy.messages import storable
from understudy.records import Cancelled, Finish, InboxItem, Unwanted, answered_by
from understudy.workflows import WORKFLOW

from ..db.session_row import SessionRow
from ..db.statements import RUN, SESSION
from ..transaction import Transaction
from . import background, commands, follow_ups, groups, loops, questions, queues, steering, wakeups
from .beginnings import (
    LEASE,
    TASK,
    TASK_AT_WORK,
    TASK_LINKED,
    TASK_UNREPORTED,
    mark_reported,
    outlasting,
    pause,
    start_again,
    timer,
)
from .charging import book, deadline
from .partial import CANCELLED, finish_calls, last_text, of_worktree, tools_used
from .upgrades import migrate
from .waiting import CALL_TIMER, hand_in

TERMINAL = ("completed", "failed", "cancelled", "quarantined")

SHUTDOWN_TIMER = "shutdown"
"""The timer of a run that was asked to end."""

DEADLINE_TIMER = "deadline"
"""The timer of a run under a budget of seconds."""

STOPPED_WITH_GROUP = {"status": "cancelled", "code": "cancelled"}
"""`cancel_as` of a sub-agent that its group stops: unlike one that somebody asked to end, it may be started again."""

OUT_OF_TIME = "its workflow waits for it no longer: the time that it had is over"

ENDED, PARENT_ENDED = "its parent's run ended", "its parent ended"


def finish_run(tx: Transaction, row: SessionRow, finish: Finish, *, hold: bool = True) -> None:
    """End the current run: its row, its event, the parent's inbox, and what the session does next.

    Children first: where some are still at work the run is only held, and ends with the last of them.

    Args:
        hold: False does not wait for children; those that shall end with their parent are asked to.
    """
    run_id = row.run_id
    if run_id is None:
        return
    tx.changed(row)
    if row.wait == "model" and row.response is not None:  # perhaps no gateway has the call, which could abort it
        tx.unwanted[row.session_id] = Unwanted(run_id, row.incarnation, row.response)
    steering.drop(tx, row, _ending(row, finish)[0])
    if hold and row.children_open > 0:
        row.held, row.wait, row.status = asdict(finish), "child", "waiting_for_child"
        row.wait_since, row.active = tx.now, 1
        _drop_news(tx, row)
        return
    status, error = _ending(row, finish)
    book(tx, row)
    tx.update_run(
        row.session_id, run_id, status=status, text=storable(finish.text), output=finish.output, error=error,
        rounds=row.round, usage=row.run_usage, started_at=row.run_started_at, finished_at=tx.now,
    )  # fmt: skip
    tx.append(
        row,
        events.RunFinished(
            status=status, rounds=row.round, usage=row.run_usage, started_at=row.run_started_at,
            parent_span_id=row.parent_span_id, error_code=(error or {}).get("code", ""),
            error_message=(error or {}).get("message", "")[: events.ERROR_UNCUT],
            links=[row.last_span] if row.last_span else None,
        ),
    )  # fmt: skip
    loops.run_ended(tx, row, run_id, status, error, finish.text)
    merged = follow_ups.end(tx, row, status, finish, error) if row.merged else []
    queues.give_back(tx, row)
    row.last_span = run_link(row.trace_id, row.session_id, run_id)
    if row.cancel_reason is not None:
        tx.drop_timer(row, SHUTDOWN_TIMER)
    if deadline(tx, row) is not None:
        tx.drop_timer(row, DEADLINE_TIMER)
    had_children = groups.at_work(tx, row) if row.children_open > 0 else []
    for child in map(tx.session, groups.drop_plan(tx, row)):  # nobody starts them again, or hears of their end
        child.abandoned = 1
        mark_reported(tx, child)
    row.status = "quarantined" if status == "quarantined" else "completed" if row.closed else "idle"
    if row.task_open == TASK_AT_WORK and run_id == TASK:
        _end_task(tx, row, status)
        _task_ended(tx, row, status, finish, error, asked=groups.asked_to_end(row))
    elif row.background:
        for ended in (run_id, *merged):
            background.run_ended(tx, groups.parent_of(tx, row), row, ended, status, finish, error)
    row.error = error if status in ("failed", "quarantined") else None
    row.ended_at, row.ended_as = tx.now, status
    row.run_id = row.run_usage = row.wait_error = None
    row.cancel_reason = row.cancel_as = row.held = row.group_state = None
    row.round = row.children_open = row.calls_open = row.aborted = 0
    row.trace_id = row.parent_span_id = ""
    row.sampled = None
    _rest(row)
    for child in reversed(had_children):  # after the run is gone from the row, so that what they still say is dropped
        _leave(tx, child, ENDED)
    if status != "completed":
        _leave_background(tx, row, ENDED, None if status == "quarantined" else run_id)
    _drop_news(tx, row)
    migrate(tx, row)
    if row.closed or status == "quarantined":
        end_queued(tx, row, status if status == "quarantined" else "cancelled", "the session ended")
    elif run_id == TASK and row.task_open == TASK_LINKED and groups.parent_of(tx, row).closed:
        close(tx, row.session_id, PARENT_ENDED)
    elif row.inbox_count > 0:
        queues.begin_next(tx, row)


def _drop_news(tx: Transaction, row: SessionRow) -> None:
    """Drop what a run has received and not taken in: nobody waits for it any more."""
    tx.take_inbox(row, [item.id for item in tx.inbox(row) if item.kind != "input"])


def _ending(row: SessionRow, finish: Finish) -> tuple[str, dict[str, Any] | None]:
    """Status and error of a run that ends: whoever asked it to may have said as what."""
    if row.cancel_reason is None or finish.status == "quarantined":
        return finish.status, finish.error
    said = row.cancel_as or {"status": "cancelled", "code": "cancelled"}
    message = row.cancel_reason or said["code"]
    details = {"details": said["details"]} if "details" in said else {}
    return said["status"], {"code": said["code"], "message": message, "session_id": row.session_id, **details}


def _end_task(tx: Transaction, child: SessionRow, status: str) -> None:
    """A child's task is over; what becomes of the session says its lifecycle."""
    tx.changed(child)
    child.task_open = TASK_UNREPORTED
    alone = child.lifecycle == "linked" and groups.parent_of(tx, child).closed
    if child.lifecycle == "ephemeral" or alone or status == "quarantined":
        child.closed = 1
        if child.lifecycle != "ephemeral":  # it could schedule nothing
            wakeups.drop_all(tx, child)
        child.status = status if status in TERMINAL else "completed"
        _leave_background(tx, child, PARENT_ENDED)
        _close_linked(tx, child.session_id, PARENT_ENDED)


def _task_ended(
    tx: Transaction, child: SessionRow, status: str, finish: Finish, error: dict[str, Any] | None, *, asked: bool
) -> None:  # fmt: skip
    """Do what the parent's rules say about the end of a child's task: deliver the result, or start it again."""
    if child.background:
        background.task_ended(tx, groups.parent_of(tx, child), child, status, finish, error)
        return
    parent = groups.waits_for(tx, child)
    if parent is None:
        mark_reported(tx, child)
        return
    decision = groups.decide(tx, parent, child, status, asked=asked)
    for child_id in decision.deliver:
        if child_id == child.session_id:
            _deliver(tx, parent, child, status, finish, error, child.run_usage, child.round)
        else:
            _deliver_late(tx, parent, tx.session(child_id))
    if parent.run_id != child.parent_run_id:  # it waited for just these results in order to end
        return
    for child_id in decision.start:
        if not start_again(tx, parent, tx.session(child_id), decision.delay):
            _deliver_late(tx, parent, tx.session(child_id))
    if decision.escalate:
        request_cancel(tx, parent, decision.escalate, ending={"status": "failed", "code": "restart_intensity"})
    elif decision.stop:
        _stop(tx, decision.stop)


def _stop(tx: Transaction, child_id: str) -> None:
    """Ask a sub-agent to end, and, if it has with that, those that are stopped after it: in a loop, since a group may
    have more members than Python has frames."""
    tx.stopping.append(child_id)
    if len(tx.stopping) > 1:  # it is the end of one before it that asks for it
        return
    try:
        while tx.stopping:
            child = tx.session(tx.stopping[0])
            request_cancel(tx, child, "it is stopped with its group", ending=STOPPED_WITH_GROUP)
            del tx.stopping[0]
    finally:
        tx.stopping.clear()


def _deliver(
    tx: Transaction, parent: SessionRow, child: SessionRow, status: str, finish: Finish, error: dict[str, Any] | None,
    usage: list[Any] | None, rounds: int,
) -> None:  # fmt: skip
    """Put a child's result into its parent's inbox; the parent goes on when it has them all."""
    assert child.call_id is not None
    mark_reported(tx, child)
    tx.append(parent, events.ChildFinished(call_id=child.call_id, child_id=child.session_id, status=status))
    parent.children_open -= 1
    if parent.held is None:
        payload = {
            "child_id": child.session_id, "status": status, "text": finish.text, "output": finish.output,
            "error": error, "usage": usage, "rounds": rounds,
            "tools": [] if status == "completed" else tools_used(tx, child, TASK, rounds),
            **of_worktree(tx, child, status, finish),
        }  # fmt: skip
        tx.put_inbox(parent, "child_result", child.call_id, payload)
    goes_on = parent.kind == WORKFLOW and parent.held is None and parent.cancel_reason is None  # with each result
    if parent.wait not in ("child", "input") or (parent.children_open > 0 and not goes_on):
        return
    if parent.held is not None:
        finish_run(tx, parent, Finish(**parent.held))
    elif parent.cancel_reason is not None:
        end_without_agent(tx, parent)
    else:
        tx.wake(parent)


def _deliver_late(tx: Transaction, parent: SessionRow, child: SessionRow) -> None:
    """The same for a child that ended before, and was to be started again."""
    where = (RUN.c.namespace == tx.namespace, RUN.c.session_id == child.session_id, RUN.c.run_id == TASK)
    run = tx.read(select(RUN).where(*where), child.session_id).mappings().one()
    finish = Finish(run["status"], run["text"] or "", run["output"])
    _deliver(tx, parent, child, run["status"], finish, run["error"], run["usage"], run["rounds"])


def request_cancel(
    tx: Transaction, row: SessionRow, reason: str, run_id: str | None = None, *, ending: dict[str, Any] | None = None,
    grace: int | None = None,
) -> bool:  # fmt: skip
    """Ask the current run (or the queued one named) to end, and all that it spawned; True if there was one.

    From this commit on the run can neither spawn nor call a model, so no child appears behind the walk. A run that
    nothing runs of ends here and now; another one has the session's `shutdown` time to end.

    Args:
        ending: `{"status", "code"}` of the run, and its error's `details`, if it shall not end as cancelled.
        grace: microseconds that the session has for it, if less than its `shutdown`; also where it was asked before.
    """
    queued = next((i for i in tx.inbox(row) if i.kind == "input" and i.key == (run_id or i.key)), None)
    if row.run_id is None or (run_id is not None and run_id != row.run_id):
        if queued is None:
            return run_id in (None, TASK) and _give_restart_up(tx, row)
        _end_queued_run(tx, row, queued, "cancelled", reason, asked=ending is None)
        if row.closed:  # it was a child's task: whatever else was sent to the child would wait for ever
            end_queued(tx, row, "cancelled", reason)
        return True
    if row.cancel_reason is not None:
        if ending is None and not groups.asked_to_end(row):
            tx.changed(row)
            row.cancel_as = {**(row.cancel_as or {}), groups.ASKED: True}
        _shorten(tx, row, grace)
        return True
    tx.changed(row)
    row.cancel_reason = reason = storable(reason)
    row.cancel_as = ending
    tx.append(row, events.CancelRequested(reason=reason, by=tx.by))
    where = (RUN.c.namespace == tx.namespace, RUN.c.session_id == row.session_id, RUN.c.run_id == row.run_id)
    # Nobody's answer is waited for any more.
    tx.read(update(RUN).where(*where).values(cancel_requested=reason, status="running"), row.session_id)
    tx.cancelled[row.session_id] = Cancelled(row.run_id, row.incarnation, row.epoch, reason)
    run_id = row.run_id
    for child_id in groups.drop_plan(tx, row):
        _deliver_late(tx, row, tx.session(child_id))
    for child in reversed(groups.at_work(tx, row)):
        _leave(tx, child, reason)
    _leave_background(tx, row, reason, run_id)
    if row.run_id != run_id:  # the last of its children has ended, and it with them
        return True
    if row.wait == "timer" and (left := outlasting(tx, row)):
        pause(tx, row, min(left, LEASE), outlasts=True)  # then it is activated, and ends
    elif row.wait in ("timer", "input") or (row.wait is None and row.frame_id is None):
        end_without_agent(tx, row)
    elif (longest := _time_to_end(row, grace)) == 0:
        end_by_force(tx, row, 0)
    elif longest is not None:
        tx.set_timer(row, SHUTDOWN_TIMER, tx.now + longest, {"run_id": run_id, "grace": longest})
    return True


def give_up(tx: Transaction, row: SessionRow, call_ids: Sequence[str]) -> None:
    """Have calls of a workflow's that others are at come to an end, as its code does not wait for them any more. Each
    has its result by the way that it would have had anyhow; one that has it already keeps it, also where the same batch
    says that it is done."""
    answered = answered_by(tx.inbox(row))
    calls = {call["call_id"]: call for call in tx.current_calls(row) if call["call_id"] not in answered}
    for call_id in [call_id for call_id in call_ids if call_id in calls]:
        child = calls[call_id]["child_id"]
        if child is not None:
            request_cancel(tx, tx.session(child), OUT_OF_TIME)
        elif not questions.abort(tx, row.session_id, call_id):
            tx.drop_timer(row, CALL_TIMER + call_id)
            said = {"decision": CANCELLED, "text": CANCELLED, "since": calls[call_id]["updated_at"]}
            hand_in(tx, row, call_id, said)


def _time_to_end(row: SessionRow, grace: int | None) -> int | None:
    """Microseconds that a run has to end; None for as long as it takes, which no grace changes."""
    return row.shutdown if row.shutdown is None or grace is None else min(row.shutdown, grace)


def _shorten(tx: Transaction, row: SessionRow, grace: int | None) -> None:
    """Let the time be over sooner that a run was given to end, where it was given one: its timer does the rest."""
    found = timer(tx, row.session_id, SHUTDOWN_TIMER) if grace is not None else None
    longest = _time_to_end(row, grace)
    if found is not None and longest is not None and tx.now + longest < found["due_at"]:
        tx.set_timer(row, SHUTDOWN_TIMER, tx.now + longest, {"run_id": row.run_id, "grace": longest})


def _give_restart_up(tx: Transaction, child: SessionRow) -> bool:
    """Somebody wants a sub-agent to end that has, and that its group was to start again: its end is its result."""
    parent = groups.waits_for(tx, child) if child.task_open == TASK_UNREPORTED else None
    if parent is None or not groups.leave_plan(tx, parent, child.session_id):
        return False
    _deliver_late(tx, parent, child)
    return True


def _leave(tx: Transaction, child: SessionRow, reason: str) -> None:
    """A parent's run ends, or shall: what that means for one of its children says the child's specification."""
    parent = groups.waits_for(tx, child)
    if child.on_parent_end == "cancel":
        request_cancel(tx, child, reason)
    elif child.on_parent_end == "abandon" or parent is None:
        tx.changed(child)
        child.abandoned = 1
        if parent is not None:
            tx.changed(parent)
            parent.children_open -= 1
            if parent.wait in ("child", "input") and parent.children_open == 0:
                end_without_agent(tx, parent)


def _leave_background(tx: Transaction, row: SessionRow, reason: str, run_id: str | None = None) -> None:
    """The same for sub-agents in the background, and for commands, which are stopped. A sub-agent whose specification
    says `wait` goes on, and its end is reported.

    Args:
        run_id: the run that ends, and with it those that it has started; None if the session takes no more input: then
            nobody can be notified of an end.
    """
    for child in reversed(background.at_work(tx, row, run_id)):
        if run_id is None or child.on_parent_end != "wait":
            tx.changed(child)
            child.abandoned = 1
        if child.on_parent_end == "cancel":
            request_cancel(tx, child, reason)
    commands.stop_all(tx, row, run_id)
    untaken = [*background.news(tx, row, run_id), *commands.news(tx, row, run_id)] if run_id is not None else []
    _end_queued_runs(tx, row, untaken, "cancelled", reason, asked=False)


def end_without_agent(
    tx: Transaction,
    row: SessionRow,
    status: str = "cancelled",
    error: dict[str, Any] | None = None,
    *,
    hold: bool = True,
) -> None:
    """End the current run without its agent: its open calls get results, and its last words are its text.

    Args:
        hold: see `finish_run`.
    """
    finish_calls(tx, row)
    finish_run(tx, row, Finish(status, last_text(tx, row), error=error), hold=hold)


def end_by_force(tx: Transaction, row: SessionRow, waited: int) -> None:
    """End the current run without its agent, whose process must be killed: it may write nothing more.

    Args:
        waited: microseconds that it was given to end by itself.
    """
    frame_id = row.frame_id if row.wait is None else None
    tx.append(row, events.ShutdownForced(waited=waited, frame_id=frame_id or ""))
    if frame_id is not None:
        tx.killed[frame_id] = row.activation
    row.epoch += 1
    row.batch_no = 0
    row.frame_id = row.actor_pid = None
    end_without_agent(tx, row, hold=False)


def end_queued(tx: Transaction, row: SessionRow, status: str, reason: str) -> None:
    """End every run that has not begun."""
    inputs = [item for item in tx.inbox(row) if item.kind == "input"]
    _end_queued_runs(tx, row, inputs, status, reason, asked=status != "quarantined")


def _end_queued_runs(
    tx: Transaction, row: SessionRow, items: Sequence[InboxItem], status: str, reason: str, *, asked: bool
) -> None:  # fmt: skip
    for number, item in enumerate(items, 1):
        _end_queued_run(tx, row, item, status, reason, asked=asked, last=number == len(items))


def _end_queued_run(
    tx: Transaction, row: SessionRow, item: InboxItem, status: str, reason: str, *, asked: bool, last: bool = True
) -> None:  # fmt: skip
    """End a run that has not begun.

    Args:
        last: False if the caller ends another one right after it: what the session does next is looked for only then,
            since that reads its whole inbox.
    """
    error = {"code": status, "message": reason, "session_id": row.session_id}
    tx.changed(row)
    tx.take_inbox(row, [item.id])
    queues.leave(tx, row, item)
    tx.update_run(
        row.session_id, item.key, status=status, text="", output=None, error=error, rounds=0, usage=None,
        started_at=0, finished_at=tx.now,
    )  # fmt: skip
    tx.append(
        row,
        events.RunFinished(
            run_id=item.key, trace_id=item.payload["trace_id"], sampled=item.payload.get("sampled"), status=status,
            error_code=status, error_message=reason[: events.ERROR_UNCUT],
            parent_span_id=item.payload["parent_span_id"],
        ),
    )  # fmt: skip
    loops.run_ended(tx, row, item.key, status, error, "")
    if last:
        _go_on_without(tx, row)
    if row.task_open == TASK_AT_WORK and item.key == TASK:
        _end_task(tx, row, status)
        if row.closed:
            _rest_for_good(row)
        _task_ended(tx, row, status, Finish(status), error, asked=asked)
    elif row.background:
        background.run_ended(tx, groups.parent_of(tx, row), row, item.key, status, Finish(status), error)


def _go_on_without(tx: Transaction, row: SessionRow) -> None:
    """What a session does next some of whose queued runs have ended."""
    if row.run_id is None and all(other.kind != "input" for other in tx.inbox(row)):
        _drop_news(tx, row)  # signals to a workflow whose run was to begin
    # One that is in a frame has begun with what is cancelled here, and rests when it finds that out (`commit`).
    at_rest = row.wait == "queue" or (row.frame_id is None and row.status in ("running", "waiting_for_timer"))
    if row.run_id is None and row.inbox_count == 0 and at_rest:
        row.status = "idle"
        _rest(row)
    elif row.wait == "queue" and not row.closed:
        queues.begin_next(tx, row)


def _rest(row: SessionRow) -> None:
    """The session has nothing to do; wherever a drained node gave it to, it is not expected there."""
    row.active = row.moved = row.redone = 0
    row.wait = "idle"


def _rest_for_good(row: SessionRow) -> None:
    """A session that takes no input any more has nothing to do. Where it was in a frame and had not begun, its frame is
    fenced: it may never hear of it (the answer that gave it the session was lost with its node service, say), and then
    nobody would take the session from it."""
    if row.wait is None:
        row.frame_id = row.actor_pid = None
    _rest(row)


def close(tx: Transaction, session_id: str, reason: str) -> bool:
    """Take no more input; cancel what runs, children included; close those linked to it. True if it was open."""
    row = tx.session(session_id)
    if row.closed:
        return _give_restart_up(tx, row)
    tx.changed(row)
    row.closed = 1
    row.task_open = 0 if row.task_open == TASK_LINKED else row.task_open
    wakeups.drop_all(tx, row)
    tx.append(row, events.SessionClosed(reason=reason, by=tx.by, last_run=row.span_before))
    end_queued(tx, row, "cancelled", reason)
    _leave_background(tx, row, reason)
    request_cancel(tx, row, reason)
    if row.run_id is None:
        row.status = "completed"
        _rest_for_good(row)
    _close_linked(tx, session_id, reason)
    return True


def _close_linked(tx: Transaction, session_id: str, reason: str) -> None:
    """Close the sub-agents of a session that is closed, of those that are linked to it and whose tasks have ended."""
    linked = select(SESSION.c.session_id).where(
        SESSION.c.namespace == tx.namespace, SESSION.c.parent_id == session_id, SESSION.c.task_open == TASK_LINKED
    )  # fmt: skip
    for child_id in list(tx.read(linked).scalars()):
        if tx.session(child_id).run_id != TASK:  # else its task is ending, which has ended its parent (`finish_run`)
            close(tx, child_id, reason)
