"""The events: everything that happens to a session, one immutable class each.

An event is committed with the change it tells of, so metrics and spans, which are functions of the event log,
survive any crash. The writer fills in the class's own fields; the committing transaction stamps the envelope
(`seq` to `trace_id`). Durations and times are integer microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import msgspec

from .event_wire import ENVELOPE, EventWire

ERROR_CHARACTERS = 500
"""So much of an error message is in an event."""

ERROR_UNCUT = 3 * ERROR_CHARACTERS
"""So much of it the journal is given, which takes secrets out before it cuts: a part of one is not recognized."""


def _type_of(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().removesuffix("_event")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=_type_of):
    """Base of all events, and the envelope they share.

    Attributes:
        type: the name of the class in the log: `tool_finished` for `ToolFinished`.
        seq: place in the session's log, shared with messages, without gaps; 0 until committed.
        at: commit time at the journal, microseconds since 1970 UTC. Order by `seq`, never by time.
        epoch: the activation that wrote it; 0 where no activation did.
        trace_id: trace of the run, 32 hexadecimal digits; empty outside a run.
        sampled: whether the caller whose trace that is records it; None where no caller's is.
        parent_id, root_id: the session's place in its tree.
        writer_seq: place in the committing journal's own log; its export cursors count in it.
    """

    type: ClassVar[str] = ""
    seq: int = 0
    at: int = 0
    session_id: str = ""
    run_id: str | None = None
    round: int = 0
    epoch: int = 0
    trace_id: str = ""
    sampled: bool | None = None
    agent: str = ""
    parent_id: str | None = None
    root_id: str = ""
    writer_seq: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.type = _type_of(cls.__name__)

    def body(self) -> dict[str, Any]:
        """The fields of the event's own class, without the envelope."""
        return {name: getattr(self, name) for name in _BODY[type(self)]}

    def to_wire(self) -> EventWire:
        """JSON-compatible: type, envelope and `data`."""
        envelope = {name: getattr(self, name) for name in ENVELOPE}
        return cast(EventWire, {"type": self.type, **envelope, "writer_seq": self.writer_seq, "data": self.body()})

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Event:
        """Restore any event; a type of a newer version becomes `UnknownEvent`, never an error."""
        kind = EVENT_TYPES.get(data["type"])
        envelope = {name: data[name] for name in (*ENVELOPE, "writer_seq") if data.get(name) is not None}
        body = data.get("data") or {}
        if kind is None:
            return UnknownEvent(**envelope, original_type=data["type"], data=body)
        return kind(**envelope, **{name: value for name, value in body.items() if name in _BODY[kind]})


class UnknownEvent(Event, frozen=True, kw_only=True):
    """An event written by a newer version of Understudy."""

    original_type: str = ""
    data: dict[str, Any] | None = None


class SessionCreated(Event, frozen=True, kw_only=True):
    """The session exists. `call_id`: the parent's call that spawned it; `restart`: earlier starts of its task.

    Attributes:
        forked_from: the session that its first messages are copies of, up to the `seq` of `forked_at`; empty for none.
    """

    depth: int = 0
    call_id: str | None = None
    restart: int = 0
    forked_from: str = ""
    forked_at: int = 0


class SessionActivated(Event, frozen=True, kw_only=True):
    """A frame took the session under a new epoch. `cause`: `ready`, `resume` (after a crash), `moved` (from
    another node) or `takeover`.

    Attributes:
        down: from the crash's detection to this commit; 0 unless `cause` is `resume`.
    """

    cause: str = "ready"
    frame_id: str = ""
    pid: int = 0
    node_id: str = ""
    down: int = 0


class SessionMoved(Event, frozen=True, kw_only=True):
    """It goes on at another node: the one it was on is drained, or it waited there for a frame that the other one has.
    `forced`: the drain's time to wait for its work was over."""

    from_node: str = ""
    to_node: str = ""
    forced: bool = False


class SessionMigrated(Event, frozen=True, kw_only=True):
    """From its next run on the session has another specification. `changed` names what differs (`manifest.changes`).

    Attributes:
        spec_hash: of the new one.
        last_run: `TRACE-SPAN` of the session's last run; empty without one, and in a run.
    """

    changed: list[Any] | None = None
    spec_hash: str = ""
    last_run: str = ""


class AgentHandedOff(Event, frozen=True, kw_only=True):
    """The session goes on under another agent of its specification, in the same run. The event has the name of the one
    before in its envelope as well.

    Attributes:
        call_id: the call that handed off.
        reason: the model's; empty for none.
    """

    call_id: str = ""
    from_agent: str = ""
    to_agent: str = ""
    reason: str = ""


class SessionCrashed(Event, frozen=True, kw_only=True):
    """The activation's process is gone. `waiting`: it only waited, so the death counts for nothing.

    Attributes:
        unseen: from the process's last sign of life to the detection, which no longer took than that; 0: not known.
    """

    cause: str = "process_died"
    pid: int = 0
    waiting: bool = False
    progress: bool = True
    decision: str = "resume"
    delay: int = 0
    unseen: int = 0


class SessionQuarantined(Event, frozen=True, kw_only=True):
    """The session is given up until a person looks at it. `rule`: what said so, `no_progress` or `max_restarts`;
    `last_run`: see `SessionMigrated`."""

    rule: str = ""
    reason: str = ""
    last_run: str = ""


class SessionResumed(Event, frozen=True, kw_only=True):
    """A person lets the quarantined session take input again; the deaths it had count no more.

    Attributes:
        by: who asked for it, as `Cluster.connect(identity=…)` or the console says; empty if nobody did.
        last_run: see `SessionMigrated`.
    """

    by: str = ""
    last_run: str = ""


class SessionClosed(Event, frozen=True, kw_only=True):
    """The session takes no more input. `by`, `last_run`: see `SessionResumed`."""

    reason: str = ""
    by: str = ""
    last_run: str = ""


class RunAccepted(Event, frozen=True, kw_only=True):
    """An input is durably accepted and waits for its turn. `by`: see `SessionResumed`."""

    source: str = "client"
    parent_span_id: str = ""
    by: str = ""


class RunStarted(Event, frozen=True, kw_only=True):
    """Work on the input began. `queued`: time since it was accepted."""

    queued: int = 0


class RunAdmitted(Event, frozen=True, kw_only=True):
    """The run has got its slot in its queue, and may begin. `waited`: time since it was accepted."""

    queue: str = ""
    waited: int = 0


class RunMerged(Event, frozen=True, kw_only=True):
    """The input is a part of another run, `into`, and this run ends with that one. `queued`: since it was accepted."""

    into: str = ""
    queued: int = 0


class SteerDropped(Event, frozen=True, kw_only=True):
    """The run is about to end as `status`, and the model was not sent what had been accepted to steer it.

    Attributes:
        steers: ids of the requests.
    """

    status: str = ""
    steers: list[str] | None = None


class RunFinished(Event, frozen=True, kw_only=True):
    """The run ended; nothing more happens in it.

    Attributes:
        status: one of the run statuses.
        usage: `Usage.to_wire()` of all its model calls.
        started_at: microseconds since 1970 UTC; 0 when it never began.
        links: `TRACE-SPAN` of each run that it went on from: the session's previous one, or the one of the sub-agent
            whose task was started again.
        merged_into: the run that its input was a part of, which has its rounds and its usage; empty for none.
    """

    status: str = "completed"
    rounds: int = 0
    usage: list[Any] | None = None
    started_at: int = 0
    parent_span_id: str = ""
    error_code: str = ""
    error_message: str = ""
    links: list[str] | None = None
    merged_into: str = ""


class CancelRequested(Event, frozen=True, kw_only=True):
    """Somebody asked to end the run; it ends as soon as its next commit or answer. `by`: see `SessionResumed`."""

    reason: str = ""
    by: str = ""


class ModelCallStarted(Event, frozen=True, kw_only=True):
    """A model call goes out under `request_key` = session/run/round/attempt. `purpose`: see `ModelRequest`."""

    request_key: str = ""
    model: str = ""
    profile: str = ""
    attempt: int = 1
    purpose: str = ""


class ModelCallReissued(Event, frozen=True, kw_only=True):
    """The gateway that had the call is lost: it goes out again; `started_at` is the lost attempt's.

    Attributes:
        response_id: the response that the lost attempt has at an endpoint: it is fetched, and not paid again.
        response_profile, response_model: of that endpoint, which is a fallback's perhaps.
    """

    request_key: str = ""
    lost_key: str = ""
    model: str = ""
    attempt: int = 2
    started_at: int = 0
    response_id: str = ""
    response_profile: str = ""
    response_model: str = ""


class ModelCallCompleted(Event, frozen=True, kw_only=True):
    """The answer is committed.

    Attributes:
        started_at: when the call began, microseconds since 1970 UTC.
        first_chunk: from the start to the first streamed token; 0 if not streamed.
        retries: failed tries within the call, all of `retried` together.
        waited, retried, chunk_times, currency: see `ModelAnswer`.
        redone: the tokens were paid a second time, because an earlier attempt was lost with its gateway.
        late: this attempt had been given up as lost, or its run had gone on without it.
        profile: of the fallback that gave it; empty for that of the request.
        server_address, server_port: of the endpoint that was asked.
        parameters: of the request, where it had them, under the names of chat completions: `temperature`, `top_p`,
            `top_k`, `max_tokens`, `seed`, `n`, `stop`, `frequency_penalty`, `presence_penalty`, `reasoning_effort`.
    """

    request_key: str = ""
    attempt: int = 1
    model: str = ""
    profile: str = ""
    response_model: str = ""
    response_id: str = ""
    provider: str = ""
    finish_reason: str = ""
    usage: list[Any] | None = None
    started_at: int = 0
    duration: int = 0
    first_chunk: int = 0
    retries: int = 0
    redone: bool = False
    tool_calls: int = 0
    late: bool = False
    waited: dict[str, int] | None = None
    retried: dict[str, int] | None = None
    chunk_times: list[int] | None = None
    currency: str = ""
    server_address: str = ""
    server_port: int = 0
    parameters: dict[str, Any] | None = None


class ModelCallFailed(Event, frozen=True, kw_only=True):
    """The call failed for good, or was aborted (`error_code` = `aborted`). `late`, `server_address`, `server_port` and
    `parameters`: see `ModelCallCompleted`.

    Attributes:
        usage: `Usage.to_wire()`, estimated from what had streamed; None if nothing had.
        retries, waited, retried, chunk_times, currency, redone: see `ModelCallCompleted`.
    """

    request_key: str = ""
    attempt: int = 1
    model: str = ""
    provider: str = ""
    started_at: int = 0
    duration: int = 0
    retries: int = 0
    error_code: str = ""
    error_message: str = ""
    late: bool = False
    usage: list[Any] | None = None
    redone: bool = False
    waited: dict[str, int] | None = None
    retried: dict[str, int] | None = None
    chunk_times: list[int] | None = None
    currency: str = ""
    server_address: str = ""
    server_port: int = 0
    parameters: dict[str, Any] | None = None


class ToolStarted(Event, frozen=True, kw_only=True):
    """The fenced permission to run a tool that is not `rerun` was committed."""

    call_id: str = ""
    tool: str = ""


class ToolFinished(Event, frozen=True, kw_only=True):
    """The call has its one result. `outcome`: `ok`, `error`, `timeout`, `invalid`, `unknown_tool`, `interrupted`,
    `cancelled`, `aborted` (given up after deaths, or by a person), `repeated` (not executed: its result is known) or
    `refused` (not executed: a hook or a person said no, or a hook failed).

    Attributes:
        executions: how often it was begun, as far as that was committed. Starts of `rerun` tools are not: one that died
            with its process and ran again counts once.
    """

    call_id: str = ""
    tool: str = ""
    outcome: str = "ok"
    started_at: int = 0
    duration: int = 0
    executions: int = 1
    error_message: str = ""


class ToolProgress(Event, frozen=True, kw_only=True):
    """How far a tool says that its call has come (`ToolContext.progress`); the latest of some moments.

    Attributes:
        fraction: of the work, from 0 to 1; None if the tool does not know.
    """

    call_id: str = ""
    tool: str = ""
    fraction: float | None = None
    text: str = ""


class CustomEvent(Event, frozen=True, kw_only=True):
    """An event of a tool's own (`ToolContext.emit`). `data` is JSON; `name` is the tool's choice."""

    call_id: str = ""
    tool: str = ""
    name: str = ""
    data: Any = None


class ToolInDoubt(Event, frozen=True, kw_only=True):
    """A tool had started when its activation, or the process at it, ended; `policy` says what becomes of it."""

    call_id: str = ""
    tool: str = ""
    policy: str = "report"


class InputRequested(Event, frozen=True, kw_only=True):
    """A tool call waits for a person (`Session.answer`, `approve`, `reject`).

    Attributes:
        kind: `question` (the model asks, or an MCP server), `approval` (the call may not be executed without) or
            `in_doubt` (the call had started when a process died that was at it).
        asked: how often this call has asked by now.
        options: answers that are offered; any other is taken as well.
        due_at: when the specification's default becomes the answer, microseconds since 1970 UTC; 0 for never.
    """

    call_id: str = ""
    kind: str = "question"
    asked: int = 1
    prompt: str = ""
    options: list[str] | None = None
    due_at: int = 0


class InputReceived(Event, frozen=True, kw_only=True):
    """A person's answer is durably accepted.

    Attributes:
        decision: `ok` or `error` (the text is the call's result), `rerun` (it runs again), `approve` (it may be
            executed), `reject` (it may not) or `aborted`.
        waited: from the question to the answer.
        timed_out: nobody answered in time: it is the specification's default.
        by: see `SessionResumed`.
    """

    call_id: str = ""
    kind: str = "question"
    asked: int = 1
    decision: str = "ok"
    waited: int = 0
    timed_out: bool = False
    by: str = ""


class TimerSet(Event, frozen=True, kw_only=True):
    """Something is due at a time (microseconds since 1970 UTC).

    Attributes:
        kind: `wait` (a tool call goes on) or `wakeup` (the session gets an input).
        name: the call's id, or the wakeup's name; one that was set before is replaced.
    """

    kind: str = "wait"
    name: str = ""
    due_at: int = 0


class TimerFired(Event, frozen=True, kw_only=True):
    """What was due has happened, `late` after its time. The run of a wakeup's event is the one that it began."""

    kind: str = "wait"
    name: str = ""
    late: int = 0


class TimerCancelled(Event, frozen=True, kw_only=True):
    """A wakeup was given up before it was due."""

    kind: str = "wakeup"
    name: str = ""


class CommandStarted(Event, frozen=True, kw_only=True):
    """A command was started in the background, as `job`."""

    job: str = ""
    call_id: str = ""
    name: str = ""


class CommandEnded(Event, frozen=True, kw_only=True):
    """A command in the background has ended.

    Attributes:
        state: `ended`, `stopped` or `lost`.
        exit_code: negative: a signal; None if it is not known.
        duration: microseconds since its start.
    """

    job: str = ""
    state: str = "ended"
    exit_code: int | None = None
    duration: int = 0


class TodoUpdated(Event, frozen=True, kw_only=True):
    """The agent has replaced its todo list: `items` are `{"text", "status"}`, `done` of them are done."""

    items: list[dict[str, str]] = []
    done: int = 0


class MemoryRecalled(Event, frozen=True, kw_only=True):
    """The agent is shown its memory: so many notes and texts of providers, and the bytes of the whole text."""

    notes: int = 0
    recalled: int = 0
    size: int = 0


class MemoryFailed(Event, frozen=True, kw_only=True):
    """A memory provider failed at `recall` or `remember`; the run goes on without it."""

    provider: str = ""
    what: str = ""
    error_message: str = ""


class McpServerListed(Event, frozen=True, kw_only=True):
    """The tools of an MCP server are others than the agent has had of it so far.

    Attributes:
        server: its name.
        tools: the names by which the agent has them.
        left_out: those that it can't have, and why.
    """

    server: str = ""
    tools: list[str] = []
    left_out: list[str] = []


class McpServerFailed(Event, frozen=True, kw_only=True):
    """An MCP server can't be used in this run; the run goes on without its tools, unless it is `required`."""

    server: str = ""
    error_message: str = ""


class WorktreeEnded(Event, frozen=True, kw_only=True):
    """What became of the session's git worktree at the end of a run.

    Attributes:
        outcome: `merged`, `unchanged`, `kept`, `removed`, or `conflict`: nothing of it is merged.
        branch: that it is on, or was.
        files: the first of those that were changed, or that conflict.
        commit: of the merge.
    """

    outcome: str = ""
    branch: str = ""
    files: list[str] = []
    commit: str = ""


class ChildSpawned(Event, frozen=True, kw_only=True):
    """A sub-agent was created by a tool call of this session."""

    call_id: str = ""
    child_id: str = ""
    child_agent: str = ""


class ChildFinished(Event, frozen=True, kw_only=True):
    """A sub-agent's result reached this session's inbox."""

    call_id: str = ""
    child_id: str = ""
    status: str = ""


class ChildAsked(Event, frozen=True, kw_only=True):
    """A sub-agent below this session, at whatever depth, waits for a person, and the current run for that sub-agent.

    Attributes:
        call_id: the call of this session that waits.
        asking: the session whose calls ask.
    """

    call_id: str = ""
    asking: str = ""


class ChildRestarted(Event, frozen=True, kw_only=True):
    """A sub-agent's task is started again, as `child_id`, after `delay`: the last one, `lost_id`, ended as `status`.

    Attributes:
        lost_run: `TRACE-SPAN` of its run; empty if that never began.
    """

    call_id: str = ""
    child_id: str = ""
    lost_id: str = ""
    restart: int = 0
    delay: int = 0
    status: str = ""
    lost_run: str = ""


class ShutdownForced(Event, frozen=True, kw_only=True):
    """The run was asked to end and had not after `waited`: it is ended without its agent, whose process is killed."""

    waited: int = 0
    frame_id: str = ""


class TextDelta(Event, frozen=True, kw_only=True):
    """A piece of a streamed answer, at `offset` characters. Ephemeral: sent to clients that follow, never committed."""

    request_key: str = ""
    offset: int = 0
    text: str = ""


class ReasoningDelta(Event, frozen=True, kw_only=True):
    """A piece of the model's reasoning before its answer, at `offset` characters. Ephemeral like `TextDelta`."""

    request_key: str = ""
    offset: int = 0
    text: str = ""


class ToolCallDelta(Event, frozen=True, kw_only=True):
    """A piece of the arguments of a tool call that an answer asks for. Ephemeral like `TextDelta`.

    Attributes:
        index: of the call among the answer's, from 0.
        tool: its name, in each piece.
        offset: of `arguments` in the call's, in characters. The first piece of a call may have none.
        arguments: JSON text, not complete before the answer is.
    """

    request_key: str = ""
    index: int = 0
    tool: str = ""
    offset: int = 0
    arguments: str = ""


class StreamRestarted(Event, frozen=True, kw_only=True):
    """The streamed answer starts over: text, reasoning and tool calls so far are void. Ephemeral like `TextDelta`."""

    request_key: str = ""


EVENT_TYPES: dict[str, type[Event]] = {kind.type: kind for kind in Event.__subclasses__()}
"""Every event class by its `type`."""

EPHEMERAL = frozenset({TextDelta, ReasoningDelta, ToolCallDelta, StreamRestarted})
"""Those that are sent to clients that follow, and never committed."""

_BODY = {kind: kind.__struct_fields__[len(Event.__struct_fields__) :] for kind in EVENT_TYPES.values()}
