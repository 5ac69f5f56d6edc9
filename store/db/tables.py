"""The tables. `namespace` is part of every key; times are integer microseconds UTC; `message` and `event` only grow.

The journal writes them with Core statements (`operations.py`). In a database they are made by the numbered files in
`migrations/`, which say the same in SQL; a test holds the two together.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Index, Integer, LargeBinary, Text, text
from sqlmodel import Field

from .columns import NamespaceTable, Table, json_column, key_column, number_column, text_column
from .columns import metadata as metadata


class SchemaMigration(Table, table=True):
    """Versions of the schema that were applied. A higher one than ours: the database is refused, not touched."""

    __tablename__ = "schema_migration"
    version: int = Field(primary_key=True, sa_type=Integer, sa_column_kwargs={"autoincrement": False})
    applied_at: int = number_column()


class Owner(NamespaceTable, table=True):
    """Which supervisor may act on a namespace. Every supervisor write is conditional on `generation`."""

    __tablename__ = "owner"
    generation: int = number_column()
    holder: str = text_column("")
    lease_until: int = number_column()


class Removal(NamespaceTable, table=True):
    """What is known of sessions that were removed.

    Attributes:
        incarnation: the latest of any of them; a new session's is later.
    """

    __tablename__ = "removal"
    incarnation: int = number_column()


class Drain(NamespaceTable, table=True):
    """A node whose sessions move away, and that gets no new ones; the row goes when that is taken back.

    Attributes:
        stop: 1 where they are not to go on elsewhere: they are parked, since the services are about to stop.
        deadline: whatever is left at that time is moved without waiting for it any longer.
        finished_at: when nothing was left; 0 before.
    """

    __tablename__ = "drain"
    node_id: str = key_column()
    reason: str = text_column("")
    stop: int = number_column()
    started_at: int = number_column()
    deadline: int = number_column()
    finished_at: int = number_column()


class Service(NamespaceTable, table=True):
    """A node service that was started, also one that is gone: the writer of its events, and where Prometheus finds it.

    Attributes:
        address: `host:port`; empty while it serves no metrics.
    """

    __tablename__ = "service"
    node_id: str = key_column()
    writer: str = text_column("")
    address: str = text_column("")
    started_at: int = number_column()


IN_BACKGROUND = text("background = 1")
"""Of the rows in the index of sub-agents that work in the background."""


class Session(NamespaceTable, table=True):
    """One session. The columns from `run_id` to `run_started_at` describe the current run, so that a round needs no
    other row.

    Attributes:
        incarnation: when it came into this store, took another specification on, or was handed off to another agent;
            another one of the same id, or the same imported again, has a later one.
        first_incarnation: what that was at first; 0 for those of versions that did not note it.
        aborted: 1 once open calls of the current run were given up, because its process died again and again.
        pruned_seq: events up to this `seq` may have been removed by retention; messages never are.
        start_order: among its siblings; the parent's `seq` at its spawn.
        shutdown: microseconds that a run has to end once it was asked to; None: for ever.
        restart_number: how often its task had been started before, in other sessions.
        task_open: 1 for a child whose task has not ended, 2 if its parent was not notified of the end yet, 3 if it
            was and the child goes on until its parent is closed; else 0.
        replaced_by: the session in which its task was started again.
        abandoned: its parent's run ended without it, and wants no result.
        background: 1 if its parent does not wait for it, and is notified of its end by an input.
        wait_holder: who made the model call that it waits for, or waited for last.
        answer_key: of the model call whose answer ended the last wait for a model; empty while it waits for another.
        answer_ended: 1 if the run ended with that answer.
        response_id: under which an endpoint has the response to the model call that it waits for, or waited for last;
            empty if it keeps none, or that is not known yet. `response_profile` and `response_model` are of the
            endpoint, which is a fallback's perhaps.
        cancel_as: `{"status", "code"}`, perhaps `details`: how the run ends that was asked to, if not as cancelled, or
            if its group stops it. Has `asked` if somebody else asked it to end after that.
        held: how the current run ends as soon as its children have (`Finish`).
        group_state: of the current run's children: restarts and the plan under way.
        accounts: what it is charged to: the sessions that have the accounts and how many levels above they are,
            nearest first (`c-1:0,root:2`); None if there is no budget, so that it costs nothing then.
        cost_used: of all answers, in millionths of the price table's currency.
        moved: 1 since a drained node gave it away, until its next activation.
        redone: 1 if what is done before the next model call may have been done before, since the last one, by a process
            that died or from which the session was taken.
        merged: runs whose inputs are a part of the current one: `[run_id, trace_id, parent_span_id, sampled]` of each.
        next_spec: `{"spec", "placement"}` that it goes on with as soon as its current run has ended.
        last_span: `TRACE-SPAN` of the run that its next one goes on from: its last one, or that of the sub-agent whose
            task is started again in it; empty before there is one.
        sampled: see `Run`; of the current run.
        record_seq: messages up to this `seq` are not needed to go on: of a workflow, whose record says what they said.
        ended_at, ended_as: when its last run ended, and with what status; 0 and empty before. Indexed, unlike
            `updated_at`, which changes with every commit.
        queue: in which its current run has a slot, or, without one, the run that its first input begins; empty: none.
        queued: inputs in its inbox that have a queue and no slot there.
    """

    __tablename__ = "session"
    __table_args__ = (
        Index("session_parent", "namespace", "parent_id", "created_at"),
        Index("session_root", "namespace", "root_id", "created_at"),
        Index("session_live", "namespace", "active", "node_id"),
        Index("session_created", "namespace", "created_at"),
        Index("session_task", "namespace", "parent_id", "task_open"),
        Index("session_agent", "namespace", "agent", "created_at"),
        Index("session_ended", "namespace", "ended_at"),
        Index(
            "session_background", "namespace", "parent_id", "created_at", sqlite_where=IN_BACKGROUND,
            postgresql_where=IN_BACKGROUND,
        ),
    )  # fmt: skip
    session_id: str = key_column()
    parent_id: str | None = text_column()
    root_id: str = text_column("")
    depth: int = number_column()
    call_id: str | None = text_column()
    parent_run_id: str | None = text_column()
    agent: str = text_column("")
    kind: str = text_column("agent")
    spec: dict[str, Any] | None = json_column()
    spec_hash: str = text_column("")
    placement: str = text_column("")
    metadata_json: dict[str, Any] | None = json_column()
    created_at: int = number_column()
    restart_type: str = text_column("temporary")
    on_parent_end: str = text_column("cancel")
    lifecycle: str = text_column("ephemeral")
    shutdown: int | None = number_column(None)
    start_order: int = number_column()
    restart_number: int = number_column()

    updated_at: int = number_column()
    status: str = text_column("idle")
    active: int = number_column()
    closed: int = number_column()
    error: dict[str, Any] | None = json_column()
    node_id: str = text_column("")
    frame_id: str | None = text_column()
    actor_pid: int | None = number_column(None)
    epoch: int = number_column()
    batch_no: int = number_column()
    seq: int = number_column()
    inbox_seq: int = number_column()
    inbox_count: int = number_column()
    children_open: int = number_column()
    calls_open: int = number_column()

    run_id: str | None = text_column()
    round: int = number_column()
    wait: str | None = text_column()
    wait_attempt: int = number_column()
    wait_since: int = number_column()
    wait_holder: str = text_column("")
    answer_key: str = text_column("")
    response_id: str = text_column("")
    response_profile: str = text_column("")
    response_model: str = text_column("")
    answer_ended: int = number_column()
    wait_error: dict[str, Any] | None = json_column()
    cancel_reason: str | None = text_column()
    cancel_as: dict[str, Any] | None = json_column()
    held: dict[str, Any] | None = json_column()
    group_state: dict[str, Any] | None = json_column()
    trace_id: str = text_column("")
    parent_span_id: str = text_column("")
    run_usage: list[Any] | None = json_column()
    run_started_at: int = number_column()

    deaths: list[Any] | None = json_column()
    stuck: int = number_column()
    progress: int = number_column()
    progress_at_death: int = number_column()
    restarts: int = number_column()
    task_open: int = number_column()
    replaced_by: str | None = text_column()
    abandoned: int = number_column()
    moved: int = number_column()
    next_spec: dict[str, Any] | None = json_column()
    tokens_used: int = number_column()
    tokens_redone: int = number_column()
    incarnation: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    first_incarnation: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    pruned_seq: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    aborted: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    redone: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    accounts: str | None = text_column()
    cost_used: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    last_span: str = Field(default="", sa_type=Text, sa_column_kwargs={"server_default": ""})
    merged: list[Any] | None = json_column()
    background: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    sampled: int | None = number_column(None)
    ended_at: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    ended_as: str = Field(default="", sa_type=Text, sa_column_kwargs={"server_default": ""})
    record_seq: int = number_column()
    queue: str = text_column("")
    queued: int = number_column()


IN_QUEUE = text("slot <> 0")
"""Written so that SQLite uses the index: it would take `slot > 0` for a range there, and read all that wait."""


class Run(NamespaceTable, table=True):
    """One input to a session and what became of it.

    Attributes:
        digest: tells the same input from another under one id.
        request_id: of the client's request that brought it, which may arrive again after the session is removed.
        merged_into: the run that its input is a part of; empty for none.
        sampled: 1 if the caller whose trace it is in records that, 0 if not; None for a trace of the run's own.
        queue: where it has to wait for a slot; empty: nowhere.
        queue_key, queue_rank: whose run it is there, and its priority, negative: the lowest one is first.
        slot: how it stands there (`understudy.queues.FREE`). Of a run without a queue this never changes, so that
            PostgreSQL updates it in place.
    """

    __tablename__ = "run"
    __table_args__ = (
        Index(
            "run_queued", "namespace", "queue", "slot", "queue_rank", "accepted_at", sqlite_where=IN_QUEUE,
            postgresql_where=IN_QUEUE,
        ),
    )  # fmt: skip
    session_id: str = key_column()
    run_id: str = key_column()
    digest: str = text_column("")
    content: Any = json_column()
    source: str = text_column("client")
    status: str = text_column("queued")
    text: str | None = text_column()
    output: Any = json_column()
    error: dict[str, Any] | None = json_column()
    rounds: int = number_column()
    usage: list[Any] | None = json_column()
    trace_id: str = text_column("")
    parent_span_id: str = text_column("")
    cancel_requested: str | None = text_column()
    accepted_at: int = number_column()
    started_at: int = number_column()
    finished_at: int = number_column()
    request_id: str = text_column("")
    merged_into: str = Field(default="", sa_type=Text, sa_column_kwargs={"server_default": ""})
    sampled: int | None = number_column(None)
    queue: str = text_column("")
    queue_key: str = text_column("")
    queue_rank: int = number_column()
    slot: int = number_column()


class Message(NamespaceTable, table=True):
    """One message; `seq` is shared with the session's events and has no gaps."""

    __tablename__ = "message"
    session_id: str = key_column()
    seq: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    v: int = number_column(1)
    run_id: str | None = text_column()
    round: int = number_column()
    role: str = text_column("")
    body: dict[str, Any] | None = json_column()
    created_at: int = number_column()


class Event(NamespaceTable, table=True):
    """One event. `(writer, writer_seq)` is its place in the committing journal's own log."""

    __tablename__ = "event"
    __table_args__ = (Index("event_writer", "namespace", "writer", "writer_seq", unique=True),)
    session_id: str = key_column()
    seq: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    v: int = number_column(1)
    writer: str = text_column("")
    writer_seq: int = number_column()
    type: str = text_column("")
    at: int = number_column()
    run_id: str | None = text_column()
    body: dict[str, Any] | None = json_column()


IS_OPEN = text("open = 1")


class ToolCall(NamespaceTable, table=True):
    """One tool call: requested → started → finished → done (its result is a message); `asked` while it waits for a
    person, `approved` between its approval and its start.

    Attributes:
        edited: the arguments, as JSON text, with which a person approved it; NULL for those of the model.
        open: 1 for a step of a workflow whose result is no message yet. PostgreSQL updates all other calls in place, as
            they never change it.
    """

    __tablename__ = "tool_call"
    __table_args__ = (
        Index("tool_call_open", "namespace", "session_id", sqlite_where=IS_OPEN, postgresql_where=IS_OPEN),
    )
    session_id: str = key_column()
    call_id: str = key_column()
    run_id: str = text_column("")
    round: int = number_column()
    index: int = number_column()
    tool: str = text_column("")
    arguments: str = text_column("")
    provider_id: str = text_column("")
    state: str = text_column("requested")
    epoch: int = number_column()
    executions: int = number_column()
    result: dict[str, Any] | None = json_column()
    child_id: str | None = text_column()
    updated_at: int = number_column()
    edited: str | None = text_column()
    open: int = number_column()


class Question(NamespaceTable, table=True):
    """What a tool call asked a person, and the answer; a call that asks again has another row. Rows stay.

    Attributes:
        asked: how often the call had asked by then, this time included.
        form: JSON Schema that the answer must fit; None for any text.
        elicitation: names it, if it is the question of an MCP server.
        answer: `{"decision", "text"}`, and `remember` if the session shall remember it; None while nobody has answered.
    """

    __tablename__ = "question"
    session_id: str = key_column()
    call_id: str = key_column()
    asked: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    run_id: str = text_column("")
    kind: str = text_column("")
    prompt: str = text_column("")
    options: list[Any] | None = json_column()
    form: dict[str, Any] | None = json_column()
    elicitation: str = text_column("")
    answer: dict[str, Any] | None = json_column()
    asked_at: int = number_column()
    answered_at: int = number_column()


class Request(NamespaceTable, table=True):
    """A request that was done lately, and its result: whoever repeats it gets that result again (`requests.py`).

    Attributes:
        session_id: whom it concerns; empty for the whole namespace, `schedule NAME` for a schedule, `triage ID`.
    """

    __tablename__ = "request"
    session_id: str = key_column()
    request_id: str = key_column()
    result: Any = json_column()
    created_at: int = number_column()


class Inbox(NamespaceTable, table=True):
    """What reaches a session, in order of arrival; the row goes when a batch has taken care of it."""

    __tablename__ = "inbox"
    session_id: str = key_column()
    item: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    kind: str = text_column("input")
    key: str = text_column("")
    payload: dict[str, Any] | None = json_column()
    created_at: int = number_column()


class Account(NamespaceTable, table=True):
    """One limit of a session's budget, and how far it is used up.

    Attributes:
        scope: `tree`, `session` or `run`; see `understudy.spec.Budget`.
        resource: `tokens`, `cost` (millionths), `rounds`, `children`, `depth` or `seconds` (the limit in microseconds).
        reserved: for model calls in flight; nothing of `children`, `depth` and `seconds`.
        spent: nothing of `depth` and `seconds`.
        beyond: what answers took beyond what was reserved for them; `spent + reserved <= allowed + beyond` always.
        since: when the first run of the scope began; 0 before.
    """

    __tablename__ = "account"
    session_id: str = key_column()
    scope: str = key_column()
    resource: str = key_column()
    allowed: int = number_column()
    reserved: int = number_column()
    spent: int = number_column()
    beyond: int = number_column()
    since: int = number_column()


class Reservation(NamespaceTable, table=True):
    """What is set aside for a model call in flight, in every account that its session is charged to; and one round.

    Attributes:
        output: the longest reply that was paid for, in tokens; 0 for any length.
    """

    __tablename__ = "reservation"
    session_id: str = key_column()
    wait_key: str = text_column("")
    tokens: int = number_column()
    cost: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    output: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})


class Timer(NamespaceTable, table=True):
    """Something that is due at a time, whatever dies until then; `timers.py` has the names and what each does."""

    __tablename__ = "timer"
    __table_args__ = (Index("timer_due", "namespace", "due_at"),)
    session_id: str = key_column()
    name: str = key_column()
    due_at: int = number_column()
    payload: dict[str, Any] | None = json_column()


class Note(NamespaceTable, table=True):
    """A note of a session, an agent, a project or a tree. The row with an empty key counts the writes of its owner's
    notes, and is locked by whoever writes one; it stays.

    Attributes:
        scope, owner: whose it is (`understudy.reads.Note`).
        version: of the owner's writes, the one that wrote it; in the row with an empty key, the last one.
        written_by: a session's id; empty for a client.
    """

    __tablename__ = "note"
    scope: str = key_column()
    owner: str = key_column()
    key: str = key_column()
    text: str = text_column("")
    version: int = number_column()
    pinned: int = number_column()
    created_at: int = number_column()
    updated_at: int = number_column()
    written_by: str = text_column("")


class Command(NamespaceTable, table=True):
    """A command that a session has started in the background. Rows stay.

    Attributes:
        key: names it on its machine (`understudy.commands.command_key`).
        state: see `understudy.commands.RUNNING`.
        quiet: 1 if its end is not reported to the session.
        stop_at: when it is ended by force that was asked to end; 0 if it was not.
        exit_code: negative: a signal; NULL if it is not known.
        problem: why it could not be started, or was stopped without anybody's wish.
        tail: the end of its output, once it has ended.
        ended_at: 0 while it is at work.
    """

    __tablename__ = "command"
    __table_args__ = (Index("command_at_work", "namespace", "ended_at", "node_id"),)
    session_id: str = key_column()
    job: str = key_column()
    key: str = text_column("")
    call_id: str = text_column("")
    run_id: str = text_column("")
    node_id: str = text_column("")
    name: str = text_column("")
    command: str = text_column("")
    state: str = text_column("running")
    quiet: int = number_column()
    stop_at: int = number_column()
    exit_code: int | None = Field(default=None, sa_type=BigInteger)
    problem: str = text_column("")
    tail: str = text_column("")
    started_at: int = number_column()
    ended_at: int = number_column()


class Schedule(NamespaceTable, table=True):
    """A schedule; the row stays when it has ended, until somebody deletes it.

    Attributes:
        definition: `understudy.schedules.NewSchedule`.
        anchor: what its period is counted from.
        first_at: its first due time.
        next_at: the due time that comes next; 0 once there is none any more.
        due_at: when that fires; 0 for never.
        paused: 1 while its due times pass, and nothing fires.
        fired, skipped, missed, failed: what became of the due times from `first_at` to before `next_at`.
        triggered: firings beside those.
        last_at: the due time that was looked at last; those that were missed are not.
        last_session, last_run: what the last firing has begun.
        problem: why the last due time did not fire.
        set_by: who has set it.
        queue: where its runs wait; empty for none.
    """

    __tablename__ = "schedule"
    __table_args__ = (Index("schedule_due", "namespace", "due_at"),)
    name: str = key_column()
    definition: dict[str, Any] | None = json_column()
    anchor: int = number_column()
    first_at: int = number_column()
    next_at: int = number_column()
    due_at: int = number_column()
    paused: int = number_column()
    fired: int = number_column()
    skipped: int = number_column()
    missed: int = number_column()
    failed: int = number_column()
    triggered: int = number_column()
    last_at: int = number_column()
    last_session: str = text_column("")
    last_run: str = text_column("")
    problem: str = text_column("")
    created_at: int = number_column()
    updated_at: int = number_column()
    set_by: str = text_column("")
    queue: str = text_column("")


class Triage(NamespaceTable, table=True):
    """A failure of what a schedule begins, however often it has come; `understudy.reads.TriageEntry` says what each
    column means. The row stays when its schedule is deleted."""

    __tablename__ = "triage"
    __table_args__ = (Index("triage_schedule", "namespace", "schedule"),)
    id: str = key_column()
    schedule: str = text_column("")
    code: str = text_column("")
    text: str = text_column("")
    count: int = number_column()
    first_at: int = number_column()
    last_at: int = number_column()
    last_session: str = text_column("")
    last_run: str = text_column("")
    resolved_at: int = number_column()
    resolved_by: str = text_column("")
    reopened: int = number_column()
    retry_run: str = text_column("")


class LoopMemory(NamespaceTable, table=True):
    """What a loop knows of its runs (`understudy.reads.LoopMemory`). The row stays when the loop is deleted, until
    somebody resets it."""

    __tablename__ = "loop_memory"
    name: str = key_column()
    attempted: int = number_column()
    passed: int = number_column()
    failed: int = number_column()
    cancelled: int = number_column()
    pending: list[str] | None = json_column()
    recent: list[dict[str, Any]] | None = json_column()
    updated_at: int = number_column()


class Queue(NamespaceTable, table=True):
    """A queue: how many of its runs are at work, and begin. Which those are say the rows of the runs.

    Attributes:
        concurrency, per_key: of all its runs, and of those of one key; 0 for any number.
        rate, period: so many begin within so many microseconds; 0 for any number.
        paused: 1 while none begins.
        begins: when those began that the rate counts.
        due_at: when it is looked at again for runs that may begin by then; 0 for never.
        set_by: who has set it.
    """

    __tablename__ = "queue"
    name: str = key_column()
    concurrency: int = number_column()
    per_key: int = number_column()
    rate: int = number_column()
    period: int = number_column()
    paused: int = number_column()
    begins: list[Any] | None = json_column()
    due_at: int = number_column()
    created_at: int = number_column()
    updated_at: int = number_column()
    set_by: str = text_column("")


class CodeBlob(NamespaceTable, table=True):
    """Code that travels by value (functions of a driver's `__main__`, working_dir packages), by its hash."""

    __tablename__ = "code_blob"
    digest: str = key_column()
    data: bytes = Field(sa_type=LargeBinary)
    created_at: int = number_column()


class MetricState(NamespaceTable, table=True):
    """Metric totals of a writer up to `writer_seq`; with the events after it they are exact."""

    __tablename__ = "metric_state"
    writer: str = key_column()
    writer_seq: int = number_column()
    state: dict[str, Any] | None = json_column()


class ExportCursor(NamespaceTable, table=True):
    """How far a sink has taken a writer's events; moves on success only."""

    __tablename__ = "export_cursor"
    writer: str = key_column()
    sink: str = key_column()
    writer_seq: int = number_column()
