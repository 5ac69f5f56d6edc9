"""What clients, and the supervisor, read of the store: a node service answers it (`understudy.node.requests.READS`).

The store makes these from its rows; `tables.py` there says what each column means. Those that have dataclasses of their
own are public as they are. Events come in wire form (`EventWire`), messages as such.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from .event_wire import EventWire


@dataclass(frozen=True)
class PendingInput:
    """A tool call that waits for a person (`Session.answer`, `approve`, `reject`).

    Attributes:
        asked: how often this call has asked by now.
        kind: `question` (the model asks, or an MCP server), `approval` (the call may not be executed without) or
            `in_doubt` (the call had started when its process died).
        options: answers that are offered; any other is taken as well.
        asked_at: microseconds since 1970 UTC.
        session_id: whose call it is: of a run's pending inputs some may be those of sub-agents.
        form: JSON Schema that the answer must fit, which is JSON text then; None for any text.
    """

    call_id: str
    asked: int
    run_id: str
    kind: str
    prompt: str
    options: tuple[str, ...]
    asked_at: int
    session_id: str = ""
    form: dict[str, Any] | None = None


@dataclass(frozen=True)
class Wakeup:
    """An input that a session will get (`Session.schedule`).

    Attributes:
        due_at: microseconds since 1970 UTC.
        every: seconds after which it is due again; None for once.
    """

    name: str
    prompt: str
    due_at: int
    every: float | None


@dataclass(frozen=True)
class OpenStep:
    """A step of a workflow that has no result yet.

    Attributes:
        path: its place in the code; with the run's id in front it is the id of its call.
        tool: its name, or `agent`, `model`, `workflow`, `ask`, `sleep` or `event`.
        arguments: JSON text, cut off where it is long.
        state: of its call: `requested`, `started`, `asked` (a person is), `waiting` (for a time or a signal) or
            `finished` (the code has not got the result yet).
        since: microseconds since 1970 UTC: when it came to that.
        child_id: the session that does it; None without one.
    """

    path: str
    tool: str
    arguments: str
    state: str
    since: int
    child_id: str | None = None


@dataclass(frozen=True)
class StepDone:
    """A step of a workflow with its result.

    Attributes:
        outcome: `ok`, or what has become of it instead (`ToolFinished.outcome`).
        text: the result, cut off where it is long.
        at: microseconds since 1970 UTC.
    """

    path: str
    tool: str
    outcome: str
    text: str
    at: int


@dataclass(frozen=True)
class PublishedValue:
    """What a workflow has published last under a name.

    Attributes:
        text: JSON; None if it has published nothing.
    """

    text: str | None = None


@dataclass(frozen=True)
class WorkflowStatus:
    """What a workflow is at, of its current run or else of its last one.

    Attributes:
        run_id: None if it had none.
        open: steps without a result, in the order of their calls' ids.
        done: the last steps that have a result, the latest first.
        published: values by name, as they are by now.
    """

    run_id: str | None
    open: tuple[OpenStep, ...] = ()
    done: tuple[StepDone, ...] = ()
    published: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleInfo:
    """A schedule as it stands. Times are microseconds since 1970 UTC, durations seconds; 0 stands for none.

    Attributes:
        content: the input of each firing.
        session_id: the session that gets it; empty where each firing creates one.
        agent, workflow: of which agent, or which workflow it runs.
        cron, zone, every, at, start, until, jitter: see `understudy.schedules.Timing`.
        overlap, catch_up, window, max_firings: see `understudy.schedules.NewSchedule`.
        paused: due times pass, and nothing fires.
        next_at: the next due time; 0 once it has ended.
        due_at: when that fires: with its jitter, or later where it waits for the last firing's run.
        fired, skipped, missed, failed: what became of the due times that have passed: each is counted once.
        triggered: firings that were asked for beside these.
        last_at: the due time that came last.
        last_session, last_run: what the last firing has begun.
        last_status: the status of that run; empty if there is none, or it was removed.
        problem: why the last due time did not fire; empty if it did.
        memory: it is a loop: each firing learns what became of those before it.
        queue, key, priority: where its runs wait (`understudy.queues.QueuePlace`); empty for no queue.
        by: who has set it (`Cluster.connect(identity=…)`).
    """

    name: str
    content: Any
    session_id: str
    agent: str
    workflow: str
    cron: str
    zone: str
    every: float
    at: int
    start: int
    until: int
    jitter: float
    overlap: str
    catch_up: str
    window: float
    max_firings: int
    memory: bool
    queue: str
    key: str
    priority: int
    paused: bool
    next_at: int
    due_at: int
    fired: int
    skipped: int
    missed: int
    failed: int
    triggered: int
    last_at: int
    last_session: str
    last_run: str
    last_status: str
    problem: str
    created_at: int
    updated_at: int
    by: str

    @property
    def state(self) -> str:
        """`active`, `paused` or `ended`."""
        return "ended" if not self.next_at else "paused" if self.paused else "active"


class QueueInfo(Struct, frozen=True):
    """A queue as it stands. Times are microseconds since 1970 UTC; 0 stands for none, of limits for any number.

    Attributes:
        concurrency, per_key: how many runs are at work at once at most, of all and of one key.
        rate, seconds: how many begin at most within so many seconds.
        paused: none begins.
        waiting: runs that wait for a slot.
        behind: runs that wait behind another input of their session.
        at_work: runs that have a slot.
        oldest: when the one was accepted that has waited for a slot for longest.
        by: who has set it (`Cluster.connect(identity=…)`).
    """

    name: str
    concurrency: int
    per_key: int
    rate: int
    seconds: float
    paused: bool
    waiting: int
    behind: int
    at_work: int
    oldest: int
    created_at: int
    updated_at: int
    by: str


class WaitsIn(Struct, frozen=True):
    """Where a session's next run waits for a slot.

    Attributes:
        queue, key, priority: see `understudy.queues.QueuePlace`.
        place: its number among those that wait there, in the order in which they begin if no key is full; 1: the next.
        waiting: how many these are.
        accepted_at: since when it has waited; microseconds since 1970 UTC.
        paused: none of the queue begins.
    """

    queue: str
    run_id: str
    key: str
    priority: int
    place: int
    waiting: int
    accepted_at: int
    paused: bool


@dataclass(frozen=True)
class TriageEntry:
    """A failure of what a schedule begins, however often it has come (docs/loops.md).

    Attributes:
        schedule: the name of the schedule, or loop.
        code: of the error, or the run's status.
        text: of the last such failure.
        count: how often it has come.
        first_at, last_at: when; microseconds since 1970 UTC.
        last_session, last_run: the last run that failed so; empty if nothing could be begun.
        resolved_at: when it was resolved; 0 while it is open.
        resolved_by: who has done it; empty for nobody's name, or a retry that completed.
        reopened: how often it has come again after it was resolved.
        retry_run: the run that was begun to try it again; empty for none.
    """

    id: str
    schedule: str
    code: str
    text: str
    count: int
    first_at: int
    last_at: int
    last_session: str
    last_run: str
    resolved_at: int
    resolved_by: str
    reopened: int
    retry_run: str

    @property
    def is_open(self) -> bool:
        """Whether nobody has resolved it since it came last."""
        return not self.resolved_at


@dataclass(frozen=True)
class LoopRun:
    """A run of a loop that has ended: how, and what it said, or why it failed; microseconds since 1970 UTC."""

    run_id: str
    status: str
    text: str
    at: int


@dataclass(frozen=True)
class LoopMemory:
    """What became of a loop's runs since its memory was reset last (docs/loops.md).

    Attributes:
        name: of the loop.
        attempted: runs that were begun: those that `passed`, `failed`, were `cancelled`, or are `pending`.
        pending: ids of runs that have not ended.
        recent: the last ones that have, the latest first.
        updated_at: microseconds since 1970 UTC; 0 if there is no memory.
    """

    name: str
    attempted: int = 0
    passed: int = 0
    failed: int = 0
    cancelled: int = 0
    pending: tuple[str, ...] = ()
    recent: tuple[LoopRun, ...] = ()
    updated_at: int = 0


@dataclass(frozen=True)
class Note:
    """A note (`docs/memory.md`).

    Attributes:
        scope: `session`, `agent`, `project` or `tree` (an entry of a tree's board).
        owner: the session's id, the agent's name, the project's name, or the id of the tree's root.
        version: rises with each write of the owner's notes; no two writes share one.
        pinned: shown before others.
        created_at, updated_at: microseconds since 1970 UTC.
        written_by: the session that wrote it last; empty for a client.
    """

    scope: str
    owner: str
    key: str
    text: str
    version: int
    pinned: bool
    created_at: int
    updated_at: int
    written_by: str


@dataclass(frozen=True)
class BudgetUse:
    """One limit of a budget, and how far it is used up.

    Attributes:
        session_id: whose budget it is: the session's own, or one above it.
        scope, resource: see `understudy.spec.Budget`. Of `cost` the amounts are millionths of the price table's
            currency, of `seconds` microseconds.
        reserved: for model calls in flight.
        spent: nothing of `depth`; of `seconds` the time since the scope began.
    """

    session_id: str
    scope: str
    resource: str
    allowed: int
    reserved: int
    spent: int


@dataclass(frozen=True)
class AccountRecord(BudgetUse):
    """The whole row of it, as the console shows it."""

    beyond: int
    since: int


@dataclass(frozen=True)
class DrainInfo:
    """A node that is drained.

    Attributes:
        left: sessions with work that are still there.
        deadline: what is left then moves the hard way; like the other times in microseconds since 1970 UTC.
        finished_at: when nothing was left; 0 before.
    """

    node_id: str
    reason: str
    left: int
    started_at: int
    deadline: int
    finished_at: int


class OwnerRecord(Struct, frozen=True):
    """Who owns the namespace."""

    generation: int
    holder: str
    lease_until: int


class SessionRecord(Struct, frozen=True, omit_defaults=True):
    """A session.

    Attributes:
        actor_pid: the process that it is at work in; None while it has nothing to do, or waits in no process.
        pending: what it asks people; None unless its status is `waiting_for_input`.
        tools: tools it is at; None where a tree was not asked for.
        ended_at, ended_as: when its last run ended, and with what status; 0 and empty before.
    """

    session_id: str
    agent: str
    kind: str
    status: str
    parent_id: str | None
    root_id: str
    depth: int
    call_id: str | None
    epoch: int
    seq: int
    actor_pid: int | None
    frame_id: str | None
    node_id: str
    restarts: int
    tokens_used: int
    tokens_redone: int
    cost_used: int
    created_at: int
    updated_at: int
    metadata_json: dict[str, Any] | None
    error: dict[str, Any] | None
    run_id: str | None
    round: int
    closed: int
    active: int
    wait: str | None
    wait_attempt: int
    placement: str
    ended_at: int = 0
    ended_as: str = ""
    pending: list[PendingInput] | None = None
    tools: list[str] | None = None


class SessionAtWork(SessionRecord, frozen=True, kw_only=True):
    """A session with work, and since when it waits, and for what end."""

    wait_since: int
    stuck: int
    cancel_reason: str | None


class Working(Struct, frozen=True):
    """The sessions with work that want attention first, and how many have each status."""

    rows: list[SessionAtWork]
    statuses: dict[str, int]


class NodeSessions(Struct, frozen=True):
    """How many sessions with work a node has in one status.

    Attributes:
        held: 1 for those that a process has, 0 for those that wait without one.
    """

    node_id: str
    status: str
    held: int
    sessions: int


class NodeLoad(Struct, frozen=True):
    """What a node service has to do, and what it has for it.

    Attributes:
        acting, waiting, standby: its session actors that are at a session, hold one that waits, and have none.
        cap: the most session actors that it may have now, as memory allows; 0 while nobody has said so.
        ready: sessions that wait for a session actor.
        memory_free, memory_total: bytes of the node, or of its container; free is what processes could still take.
            Both are 0 while nothing was measured.
        memory_actor: bytes that a session actor takes for itself, the mean; 0 while there is none.
    """

    acting: int
    waiting: int
    standby: int
    cap: int
    ready: int
    memory_free: int = 0
    memory_total: int = 0
    memory_actor: int = 0


class Totals(Struct, frozen=True):
    """How many sessions there are, and the statuses of the newest that have nothing to do."""

    sessions: int
    latest: dict[str, int]


class Activity(Struct, frozen=True):
    """What happened since the last look.

    Attributes:
        cursors: the place in each journal's own log, for the next look.
    """

    cursors: dict[str, int]
    events: list[EventWire]


class SessionPage(Struct, frozen=True):
    """A page of sessions; `next` is the cursor of the next one, None at the end."""

    rows: list[SessionRecord]
    next: tuple[int, str] | None


class RunRecord(Struct, frozen=True, omit_defaults=True):
    """A run.

    Attributes:
        content: what went in, as it was sent.
        usage: `Usage.to_wire()`.
        merged_into: the run that its input was a part of, which has its rounds and its usage; empty for none.
        queue, queue_key, queue_rank: the queue that it had to wait in, its key there, and its priority, negative; empty
            and 0 without one.
        pending: what it waits for; None unless it is paused.
    """

    namespace: str
    session_id: str
    run_id: str
    digest: str
    content: Any
    source: str
    status: str
    text: str | None
    output: Any
    error: dict[str, Any] | None
    rounds: int
    usage: list[Any] | None
    trace_id: str
    parent_span_id: str
    cancel_requested: str | None
    accepted_at: int
    started_at: int
    finished_at: int
    request_id: str
    merged_into: str = ""
    queue: str = ""
    queue_key: str = ""
    queue_rank: int = 0
    pending: list[PendingInput] | None = None


class RunSummary(Struct, frozen=True):
    """A run without what went in and came out."""

    run_id: str
    source: str
    status: str
    error: dict[str, Any] | None
    rounds: int
    usage: list[Any]
    trace_id: str
    accepted_at: int
    started_at: int
    finished_at: int
