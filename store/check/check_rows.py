"""Rules of the accounting identity that SQL can prove: each selects the rows that break it, and says what is wrong.

They hold after every commit, not only at rest. `check.py` runs them; `check_log.py` has those that read the log itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import and_, case, exists, false, func, not_, or_, select, true

from understudy.approvals import APPROVAL, APPROVE
from understudy.identifiers import COPIED
from understudy.records import RUN_STATUSES, STEER
from understudy.wakeups import MOST_WAKEUPS
from understudy.workflows import APPROVED, EVENT_STEP, SIGNAL, WORKFLOW

from ..db.prepared import Row
from ..db.statements import (
    ACCOUNT,
    COMMAND,
    EVENT,
    INBOX,
    MESSAGE,
    NAMESPACE,
    QUESTION,
    RESERVATION,
    RUN,
    SESSION,
    TIMER,
    TOOL_CALL,
    same_session,
)
from ..operations.beginnings import PAUSE_TIMER
from ..operations.endings import TERMINAL
from ..operations.waiting import CALL_TIMER, QUESTION_TIMER
from ..operations.wakeups import WAKEUP_TIMER
from .check_scope import Books, Found, Scope, Wrong, same_run, selected

ENDED = [name for name in RUN_STATUSES if name != "waiting_for_input"]


@selected
def own_session(scope: Scope) -> Iterator[Wrong]:
    """Every row belongs to a session that exists."""
    for table in (MESSAGE, EVENT, RUN, TOOL_CALL, INBOX, ACCOUNT, RESERVATION, TIMER, QUESTION, COMMAND):
        orphans = select(table.c.session_id, func.count().label("rows")).where(
            scope.of(table), ~exists().where(same_session(SESSION, table))
        )
        yield orphans.group_by(table.c.session_id), f"{{rows}} rows of {table.name} belong to no session".format_map


@selected
def run_events(scope: Scope) -> Iterator[Wrong]:
    """Every run has one `run_accepted` event, one `run_started` if it began, one `run_finished` if it ended."""
    types = ("run_accepted", "run_started", "run_finished")
    counts = [func.sum(case((EVENT.c.type == name, 1), else_=0)).label(name) for name in types]
    logged = (
        select(EVENT.c.session_id, EVENT.c.run_id, *counts)
        .where(scope.of(EVENT), EVENT.c.type.in_(types))
        .group_by(EVENT.c.session_id, EVENT.c.run_id)
        .subquery()
    )
    of_run = and_(logged.c.session_id == RUN.c.session_id, logged.c.run_id == RUN.c.run_id)
    happened = {
        "run_accepted": 1,
        "run_started": case((RUN.c.started_at > 0, 1), else_=0),
        "run_finished": case((RUN.c.finished_at > 0, 1), else_=0),
    }
    wrong = []
    for name, wanted in happened.items():
        count = func.coalesce(logged.c[name], 0)
        # Retention may have removed an event that there was; it never adds one.
        wrong.append(or_(count > wanted, and_(count < wanted, SESSION.c.pruned_seq == 0)))
    statement = (
        select(RUN.c.session_id, RUN.c.run_id, RUN.c.status, *(logged.c[name] for name in types))
        .join(SESSION, same_session(SESSION, RUN))
        .outerjoin(logged, of_run)
        .where(scope.of(RUN), or_(*wrong))
    )

    def tell(row: Row) -> str:
        found = ", ".join(f"{row[name] or 0} {name}" for name in types)
        return f"run {row['run_id']!r} is {row['status']} and has these events: {found}"

    yield statement, tell
    unknown = select(logged.c.session_id, logged.c.run_id).outerjoin(RUN, and_(of_run, RUN.c.namespace == NAMESPACE))
    yield (
        unknown.where(RUN.c.run_id.is_(None)),
        lambda row: f"events tell of run {row['run_id']!r}, which does not exist",
    )


@selected
def run_state(scope: Scope) -> Iterator[Wrong]:
    """A queued run's input is in the inbox; a running or paused one is its session's current run; an ended one is
    neither. One that was merged is running while the run is that it is a part of, and did not begin by itself.
    """
    in_inbox = exists().where(same_session(INBOX, RUN), INBOX.c.kind == "input", INBOX.c.key == RUN.c.run_id)
    is_current = func.coalesce(SESSION.c.run_id == RUN.c.run_id, false())
    began, ended = RUN.c.started_at > 0, RUN.c.finished_at > 0
    is_part = and_(RUN.c.merged_into != "", func.coalesce(SESSION.c.run_id == RUN.c.merged_into, false()))
    right = or_(
        and_(RUN.c.status == "queued", not_(began), not_(ended), in_inbox, not_(is_current)),
        and_(RUN.c.status.in_(("running", "waiting_for_input")), began, not_(ended), not_(in_inbox), is_current),
        and_(RUN.c.status == "running", is_part, not_(began), not_(ended), not_(in_inbox), not_(is_current)),
        and_(RUN.c.status.in_(ENDED), ended, not_(in_inbox), not_(is_current)),
    )
    columns = (RUN.c.session_id, RUN.c.run_id, RUN.c.status, RUN.c.started_at, RUN.c.finished_at)
    statement = (
        select(*columns, in_inbox.label("in_inbox"), is_current.label("is_current"))
        .join(SESSION, same_session(SESSION, RUN))
        .where(scope.of(RUN), not_(right))
    )
    yield (
        statement,
        lambda row: (
            f"run {row['run_id']!r} is {row['status']}, began at {row['started_at']}, ended at {row['finished_at']}, "
            f"its input is {'in' if row['in_inbox'] else 'not in'} the inbox, and it is "
            f"{'the' if row['is_current'] else 'not the'} current run"
        ),
    )


@selected
def current_run(scope: Scope) -> Iterator[Wrong]:
    """What a session's row says of its current run is what the run's row says; without a run it says nothing."""
    differs = or_(
        RUN.c.run_id.is_(None),
        RUN.c.cancel_requested.is_distinct_from(SESSION.c.cancel_reason),
        RUN.c.started_at != SESSION.c.run_started_at,
        RUN.c.trace_id != SESSION.c.trace_id,
        RUN.c.parent_span_id != SESSION.c.parent_span_id,
        RUN.c.sampled.is_distinct_from(SESSION.c.sampled),
    )
    left = or_(
        SESSION.c.round != 0, SESSION.c.calls_open != 0, SESSION.c.children_open != 0, SESSION.c.trace_id != "",
        SESSION.c.cancel_reason.is_not(None), SESSION.c.run_usage.is_not(None), SESSION.c.held.is_not(None),
        SESSION.c.group_state.is_not(None), SESSION.c.aborted != 0, SESSION.c.merged.is_not(None),
        SESSION.c.sampled.is_not(None),
    )  # fmt: skip
    statement = (
        select(SESSION.c.session_id, SESSION.c.run_id, RUN.c.run_id.label("found"))
        .outerjoin(RUN, same_run(SESSION))
        .where(scope.of(SESSION), case((SESSION.c.run_id.is_(None), left), else_=differs))
    )

    def tell(row: Row) -> str:
        if row["run_id"] is None:
            return "there is no current run, but the session's row still describes one"
        fault = "does not exist" if row["found"] is None else "is described otherwise by its own row"
        return f"the current run {row['run_id']!r} {fault}"

    yield statement, tell


@selected
def inbox(scope: Scope) -> Iterator[Wrong]:
    """An inbox is empty or owned: its rows are counted, and belong to a session at work that will handle them."""
    rows = select(func.count()).select_from(INBOX).where(same_session(INBOX, SESSION)).scalar_subquery()
    last = select(func.max(INBOX.c.item)).where(same_session(INBOX, SESSION)).scalar_subquery()
    names = ("session_id", "inbox_count", "inbox_seq", "active", "status")
    counted = select(*(SESSION.c[name] for name in names), rows.label("rows"), last.label("last")).where(
        scope.of(SESSION)
    )
    counts = counted.subquery()
    wrong = or_(
        counts.c.rows != counts.c.inbox_count,
        counts.c.last > counts.c.inbox_seq,
        and_(counts.c.rows > 0, counts.c.active == 0),
    )
    yield (
        select(counts).where(wrong),
        lambda row: (
            f"the inbox has {row['rows']} rows, the last is {row['last'] or 0}; the session counts "
            f"{row['inbox_count']} up to {row['inbox_seq']}, is {row['status']}, and its active is {row['active']}"
        ),
    )


@selected
def inbox_items(scope: Scope) -> Iterator[Wrong]:
    """Each inbox row is an input of an open session, or a child's result or an answer for an open call of the current
    run, or says that one was approved, or is to steer that run.
    """
    run = exists().where(same_session(RUN, INBOX), RUN.c.run_id == INBOX.c.key)
    call = (
        select(TOOL_CALL.c.state)
        .where(
            same_session(TOOL_CALL, INBOX), TOOL_CALL.c.call_id == INBOX.c.key, TOOL_CALL.c.run_id == SESSION.c.run_id
        )
        .scalar_subquery()
    )
    right = or_(
        and_(INBOX.c.kind == "input", SESSION.c.closed == 0, run),
        and_(INBOX.c.kind == "child_result", func.coalesce(call, "").in_(("requested", "started"))),
        and_(INBOX.c.kind == "answer", func.coalesce(call, "").in_(("asked", "waiting"))),
        and_(INBOX.c.kind == APPROVED, func.coalesce(call, "").in_(("approved", "finished"))),
        and_(INBOX.c.kind == STEER, SESSION.c.run_id.is_not(None), SESSION.c.held.is_(None)),
        and_(INBOX.c.kind == SIGNAL, SESSION.c.kind == WORKFLOW, SESSION.c.held.is_(None)),
    )
    statement = (
        select(INBOX.c.session_id, INBOX.c.item, INBOX.c.kind, INBOX.c.key)
        .join(SESSION, same_session(SESSION, INBOX))
        .where(scope.of(INBOX), not_(right))
    )
    yield statement, lambda row: f"nobody waits for inbox row {row['item']} ({row['kind']} {row['key']!r})"


@selected
def open_calls(scope: Scope) -> Iterator[Wrong]:
    """Tool calls without a result are of the current run and round, and `calls_open` counts them."""
    pending = and_(
        same_session(TOOL_CALL, SESSION), TOOL_CALL.c.run_id == SESSION.c.run_id,
        TOOL_CALL.c.round == SESSION.c.round, TOOL_CALL.c.state != "done",
        (TOOL_CALL.c.open == 1) == (SESSION.c.kind == WORKFLOW),
    )  # fmt: skip
    count = select(func.count()).select_from(TOOL_CALL).where(pending).scalar_subquery()
    counts = select(SESSION.c.session_id, SESSION.c.calls_open, count.label("pending")).where(
        scope.of(SESSION), SESSION.c.run_id.is_not(None)
    )
    found = counts.subquery()
    yield (
        select(found).where(found.c.pending != found.c.calls_open),
        lambda row: f"calls_open is {row['calls_open']}, and {row['pending']} calls have no result",
    )
    forgotten = (
        select(TOOL_CALL.c.session_id, TOOL_CALL.c.call_id, TOOL_CALL.c.state)
        .join(SESSION, same_session(SESSION, TOOL_CALL))
        .where(scope.of(TOOL_CALL), TOOL_CALL.c.state != "done", not_(func.coalesce(pending, false())))
    )
    yield forgotten, lambda row: f"call {row['call_id']} is {row['state']}, and its round is over"


@selected
def questions(scope: Scope) -> Iterator[Wrong]:
    """A call waits for a person exactly if its last question has no answer, or has one that is in the inbox; a run is
    paused exactly if it has a question without an answer, and nobody asked it to end.
    """
    later = QUESTION.alias("later")
    is_last = ~exists().where(
        same_session(later, QUESTION), later.c.call_id == QUESTION.c.call_id, later.c.asked > QUESTION.c.asked
    )
    of_call = and_(same_session(QUESTION, TOOL_CALL), QUESTION.c.call_id == TOOL_CALL.c.call_id)
    in_inbox = exists().where(
        same_session(INBOX, QUESTION), INBOX.c.kind == "answer", INBOX.c.key == QUESTION.c.call_id
    )
    open_question = and_(QUESTION.c.answered_at == 0, is_last)
    has_question = exists().where(of_call, or_(open_question, and_(is_last, in_inbox)))
    # A quarantined run ends where it was; its calls stay as they are.
    at_work = and_(same_session(SESSION, TOOL_CALL), SESSION.c.run_id == TOOL_CALL.c.run_id)
    calls = (
        select(TOOL_CALL.c.session_id, TOOL_CALL.c.call_id)
        .join(SESSION, at_work)
        .where(scope.of(TOOL_CALL), TOOL_CALL.c.state == "asked", not_(has_question))
    )
    yield calls, lambda row: f"call {row['call_id']} waits for a person, and asks nothing that has no answer"
    # When a run ends before its question is answered, the question stays without an answer; also while the run, asked
    # to end, is held by its children.
    waits = exists().where(of_call, TOOL_CALL.c.state == "asked")
    of_current = and_(same_session(SESSION, QUESTION), SESSION.c.run_id == QUESTION.c.run_id)
    left = (
        select(QUESTION.c.session_id, QUESTION.c.call_id)
        .join(SESSION, of_current)
        .where(
            scope.of(QUESTION),
            QUESTION.c.answered_at == 0,
            or_(not_(waits), not_(is_last)),
            SESSION.c.cancel_reason.is_(None),
        )
    )
    yield (
        left,
        lambda row: f"a question of call {row['call_id']} has no answer, and the call does not wait for one",
    )
    paused = exists().where(same_run(QUESTION), QUESTION.c.answered_at == 0)
    waiting = and_(paused, RUN.c.cancel_requested.is_(None))
    runs = select(RUN.c.session_id, RUN.c.run_id, RUN.c.status).where(
        scope.of(RUN), RUN.c.finished_at == 0, RUN.c.started_at > 0, (RUN.c.status == "waiting_for_input") != waiting
    )
    yield runs, lambda row: f"run {row['run_id']!r} is {row['status']}, and its questions say otherwise"


@selected
def approvals(scope: Scope) -> Iterator[Wrong]:
    """A call is approved, or has other arguments than the model's, only if somebody approved it, with these. The timer
    of a question is there only while it has no answer.
    """
    of_call = and_(same_session(QUESTION, TOOL_CALL), QUESTION.c.call_id == TOOL_CALL.c.call_id)
    calls = (
        select(TOOL_CALL.c.session_id, TOOL_CALL.c.call_id, TOOL_CALL.c.edited, QUESTION.c.answer)
        .outerjoin(QUESTION, and_(of_call, QUESTION.c.kind == APPROVAL))  # nobody is asked for it twice
        .where(
            scope.of(TOOL_CALL),
            or_(TOOL_CALL.c.state == "approved", TOOL_CALL.c.edited.is_not(None)),
            not_(TOOL_CALL.c.call_id.startswith(COPIED)),  # it was approved where it was copied from
        )
    )

    def tell(row: Row) -> str | None:
        answer = row["answer"] or {}
        if answer.get("decision") != APPROVE:
            return f"nobody has approved call {row['call_id']}"
        same = (answer.get("text") or None) == row["edited"]
        return None if same else f"call {row['call_id']} has other arguments than it was approved with"

    yield calls, tell
    of_question = and_(same_session(TIMER, QUESTION), TIMER.c.name == QUESTION_TIMER + QUESTION.c.call_id)
    is_open = exists().where(of_question, QUESTION.c.answered_at == 0)
    timers = select(TIMER.c.session_id, TIMER.c.name).where(
        scope.of(TIMER), TIMER.c.name.startswith(QUESTION_TIMER), not_(is_open)
    )
    yield timers, lambda row: f"nobody is asked any more what timer {row['name']} would answer"


@selected
def question_events(scope: Scope) -> Iterator[Wrong]:
    """Every question has one `input_requested` event, and one `input_received` if it was answered."""
    types = {"input_requested": true(), "input_received": QUESTION.c.answered_at > 0}
    for name, counted in types.items():
        logged = (
            select(func.count()).select_from(EVENT).where(same_session(EVENT, SESSION), EVENT.c.type == name)
        ).scalar_subquery()
        asked = (
            select(func.count()).select_from(QUESTION).where(same_session(QUESTION, SESSION), counted)
        ).scalar_subquery()
        found = select(SESSION.c.session_id, SESSION.c.pruned_seq, logged.label("logged"), asked.label("asked")).where(
            scope.of(SESSION)
        )
        counts = found.subquery()
        wrong = or_(counts.c.logged > counts.c.asked, and_(counts.c.logged < counts.c.asked, counts.c.pruned_seq == 0))
        yield (
            select(counts).where(wrong),
            f"{{logged}} {name} events, and {{asked}} questions that have one".format_map,
        )


@selected
def waits(scope: Scope) -> Iterator[Wrong]:
    """A call waits for its time exactly if it has a timer, or its answer is in the inbox; only such a call has one."""
    of_call = and_(same_session(TIMER, TOOL_CALL), TIMER.c.name == CALL_TIMER + TOOL_CALL.c.call_id)
    has_timer = exists().where(of_call)
    in_inbox = exists().where(
        same_session(INBOX, TOOL_CALL), INBOX.c.kind == "answer", INBOX.c.key == TOOL_CALL.c.call_id
    )
    right = or_(
        and_(has_timer, not_(in_inbox)), and_(in_inbox, not_(has_timer)),
        and_(TOOL_CALL.c.tool == EVENT_STEP, TOOL_CALL.c.open == 1, not_(in_inbox)),
    )  # fmt: skip
    calls = select(TOOL_CALL.c.session_id, TOOL_CALL.c.call_id).where(
        scope.of(TOOL_CALL), TOOL_CALL.c.state == "waiting", not_(right)
    )
    yield calls, lambda row: f"call {row['call_id']} waits, and has neither a timer nor an answer, or has both"
    waiting = exists().where(of_call, TOOL_CALL.c.state == "waiting")
    timers = select(TIMER.c.session_id, TIMER.c.name).where(
        scope.of(TIMER), TIMER.c.name.startswith(CALL_TIMER), not_(waiting)
    )
    yield timers, lambda row: f"nobody waits for timer {row['name']}"


@selected
def wakeups(scope: Scope) -> Iterator[Wrong]:
    """Only a session that is open, and is no ephemeral sub-agent, has wakeups, and not more than it may have."""
    wakeup = and_(same_session(TIMER, SESSION), TIMER.c.name.startswith(WAKEUP_TIMER))
    may_have = case(
        (or_(SESSION.c.closed == 1, and_(SESSION.c.parent_id.is_not(None), SESSION.c.lifecycle == "ephemeral")), 0),
        else_=MOST_WAKEUPS,
    )
    number = func.count().label("number")
    counted = (
        select(SESSION.c.session_id, number)
        .join_from(TIMER, SESSION, wakeup)
        .where(scope.of(TIMER))
        .group_by(SESSION.c.session_id, may_have)
    )
    yield counted.having(func.count() > may_have), lambda row: f"it may not have {row['number']} wakeups"


@selected
def timer(scope: Scope) -> Iterator[Wrong]:
    """A session that pauses has the timer that ends its pause."""
    # Not the other way round: a cancel cuts the wait short, and the timer fires later without effect.
    due = exists().where(same_session(TIMER, SESSION), TIMER.c.name == PAUSE_TIMER)
    statement = select(SESSION.c.session_id).where(scope.of(SESSION), SESSION.c.wait == "timer", not_(due))
    yield statement, lambda row: "the timer that ends its pause does not exist"


@selected
def status(scope: Scope) -> Iterator[Wrong]:
    """`status`, `active`, `wait`, `closed`, the run and the frame of a session say the same."""
    columns = SESSION.c
    ended = case((columns.closed == 1, columns.status.in_(TERMINAL)), else_=columns.status.in_(("idle", "quarantined")))
    asked, timed = (
        exists().where(same_session(TOOL_CALL, SESSION), TOOL_CALL.c.state == state) for state in ("asked", "waiting")
    )
    waiting = {
        "model": columns.run_id.is_not(None), "child": columns.children_open > 0, "timer": true(),
        "input": and_(columns.run_id.is_not(None), asked), "queue": columns.run_id.is_(None),
    }  # fmt: skip
    for_answers = and_(columns.active == 1, columns.wait == "input", columns.run_id.is_not(None))
    right = or_(
        and_(columns.active == 0, columns.wait == "idle", columns.run_id.is_(None), ended),
        and_(columns.active == 1, columns.wait.is_(None), columns.status == "running"),
        and_(for_answers, columns.status == "waiting_for_timer", timed, not_(asked)),
        and_(for_answers, columns.kind == WORKFLOW, columns.status == "waiting_for_child", columns.children_open > 0),
        and_(for_answers, columns.kind == WORKFLOW, columns.status == "waiting_for_input", timed),
        *(
            and_(columns.active == 1, columns.wait == wait, columns.status == f"waiting_for_{wait}", more)
            for wait, more in waiting.items()
        ),
    )
    frame = or_(columns.frame_id.is_not(None), columns.actor_pid.is_(None))  # without a pid: another node's, as it was
    idle_when_closed = or_(columns.closed == 0, columns.run_id.is_not(None), columns.active == 0)
    names = ("session_id", "status", "active", "wait", "closed", "run_id", "frame_id", "actor_pid")
    statement = select(*(columns[name] for name in names)).where(
        scope.of(SESSION), not_(and_(func.coalesce(right, false()), frame, idle_when_closed))
    )
    yield statement, lambda row: ", ".join(f"{name} is {row[name]!r}" for name in names[1:])


@selected
def moved(scope: Scope) -> Iterator[Wrong]:
    """A session that was taken from its frame is in no frame, and has something to do, until its next activation."""
    columns = SESSION.c
    wrong = and_(columns.moved > 0, or_(columns.frame_id.is_not(None), columns.active == 0))
    statement = select(columns.session_id, columns.frame_id, columns.status).where(scope.of(SESSION), wrong)
    yield statement, lambda row: f"it was given away, is {row['status']}, and in frame {row['frame_id']}"


@selected
def next_spec(scope: Scope) -> Iterator[Wrong]:
    """Another specification waits for a session only as long as its current run lasts, and never for a sub-agent."""
    columns = SESSION.c
    wrong = and_(columns.next_spec.is_not(None), or_(columns.run_id.is_(None), columns.parent_id.is_not(None)))
    yield (
        select(columns.session_id).where(scope.of(SESSION), wrong),
        lambda row: "a specification waits for it, and no run of its own has to end first",
    )


ROW_RULES: dict[str, Callable[[Books], Iterable[Found]]] = {
    rule.__name__: rule
    for rule in (
        own_session, run_events, run_state, current_run, inbox, inbox_items, open_calls, questions, approvals,
        question_events, waits, wakeups, timer, status, moved, next_spec,
    )
}  # fmt: skip
