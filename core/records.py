"""What session actors, the node service and the store say of a session to each other (`protocol`: in which calls)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from .errors import UnderstudyError
from .events import (
    CustomEvent,
    McpServerFailed,
    McpServerListed,
    MemoryFailed,
    MemoryRecalled,
    ToolFinished,
    ToolInDoubt,
    ToolProgress,
    ToolStarted,
    WorktreeEnded,
)
from .json_text import to_json
from .messages import CUT_OFF, Message, Usage
from .rates import NORMAL
from .worktrees import worktree_text

CACHED_WINDOWS = 64
"""Windows that a frame keeps of sessions that left it; the node service counts them in the same way."""

PAGE = 10_000
"""So many messages or events of a session are returned at a time."""

LEASE_SECONDS = 4.0
"""How long after sending a commit an activation may start a tool on the strength of its Ack."""

NO_USAGE = Usage()

STEER = "steer"
"""The kind of an inbox row that changes a run's course, and the origin of the message that it becomes."""

INTERRUPTED_BY_STEER = ""
"""What a session's process receives instead of a reason to end: the run goes on, and what it is at does not."""

RUN_STATUSES = (
    "completed",
    "round_limit",
    "budget_exceeded",
    "cancelled",
    "waiting_for_input",
    "failed",
    "quarantined",
)
"""How a run can end (`waiting_for_input`: how it can pause); before it is `queued`, then `running`."""

FAILED_STATUSES = frozenset({"failed", "quarantined", "round_limit", "budget_exceeded"})
"""Those of runs that did not do what they were asked to; a cancelled run did."""

SESSION_STATUSES = (
    "idle",
    "running",
    "waiting_for_model",
    "waiting_for_child",
    "waiting_for_input",
    "waiting_for_timer",
    "waiting_for_queue",
    "completed",
    "failed",
    "cancelled",
    "quarantined",
)


class KeptResponse(msgspec.Struct, frozen=True):
    """A response that an endpoint makes in background mode, and keeps.

    Attributes:
        id: at the endpoint.
        profile, model: of the endpoint that makes it, which is a fallback's perhaps.
    """

    id: str
    profile: str
    model: str


class ModelRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model call, complete: the gateway needs nothing else.

    Attributes:
        wait_key: `session/run/round`; with `/attempt` it is the request key.
        profile: name of the model profile (endpoint and credentials) at the gateway.
        messages: a JSON array in the OpenAI chat completions form: as text, since nobody but the endpoint needs more of
            it than its length, and to read and write a long one would take longer than all else about a call. The end
            of it, if `left_out`.
        tools: in the same form.
        parameters: temperature, max_tokens, … passed through to the endpoint.
        deadline: seconds for the whole call, retries included.
        stall: seconds without a byte from the endpoint after which a try is given up.
        ends_run: a final answer (`ModelAnswer.is_final`) is the run's: nothing in the agent's process has to see it.
        text: names the text that the messages are of, which only grows, from request to request: no other has the name.
        lasting: so many bytes of the text, from its beginning, are in the next request as well. 0: nobody shall keep
            them.
        left_out: so many of them are not in `messages`: the gateway has them from a request before, or asks for all.
        tokens: its input as estimated by who asks, who knows what the endpoint counted before; 0 if nobody did.
        purpose: what the answer is for: empty for the run to go on with, `fold_answer` for a summary of its history.
        guarded: hooks run beside the call, and its answer counts only with their verdict (`protocol.Judged`).
        response: that an earlier attempt has at an endpoint: it is fetched, not asked for again.
        priority: `high`, `normal` or `low`, where requests wait for a rate limit (`rates.WEIGHTS`).
    """

    wait_key: str
    profile: str
    model: str
    messages: bytes
    tools: list[dict[str, Any]] = []
    parameters: dict[str, Any] = {}
    deadline: float = 600.0
    stall: float = 300.0
    ends_run: bool = False
    text: str = ""
    lasting: int = 0
    left_out: int = 0
    tokens: int = 0
    purpose: str = ""
    guarded: bool = False
    response: KeptResponse | None = None
    priority: str = NORMAL

    def limited_to(self, tokens: int) -> ModelRequest:
        """The same with the reply that is paid for; 0 for any length."""
        if not tokens:
            return self
        parameters = {name: value for name, value in self.parameters.items() if name != "max_tokens"}
        return msgspec.structs.replace(self, parameters={**parameters, "max_completion_tokens": tokens})

    def completed(self, beginning: bytes) -> ModelRequest:
        """The same with all of its messages.

        Args:
            beginning: of the text: what was left out of it, and perhaps more.
        """
        messages = b"".join((memoryview(beginning)[: self.left_out], self.messages))
        return msgspec.structs.replace(self, messages=messages, left_out=0)


RetryReason = Literal[
    "rate_limited",
    "timeout",
    "server_error",
    "connection",
    "conflict",
    "stream_error",
    "stream_ended",
    "stream_refused",
]
"""Why a try of a model call failed that was followed by another one: status 429; status 408, no connection in time, or
silence for too long; status 500 and above; the connection failed; status 409; an error in place of an answer, under
status 200; the stream ended in the midst of the answer; a kept response can't be had in this way."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What a model call returned.

    Attributes:
        tool_calls: `(provider id, name, arguments as JSON text)`, in order.
        started_at: microseconds since 1970 UTC; `duration`, `first_chunk`: microseconds.
        waited: microseconds that the call waited for its turns, by the profile of the endpoint: for a place, or for its
            rate limit. Those after a refusal (429) are part of `duration`, too.
        retried: failed tries that were followed by another one, by what was wrong.
        chunk_times: the sum of the times from one streamed chunk to the next in microseconds, then how many there were
            in each range of `CHUNK_BOUNDS`, up to the last one that has any; empty without any.
        currency: of the usage's cost; empty if the price table says none.
        error: set when the call failed for good; `content` then holds partial text, if any.
        background: the endpoint made the response in background mode, and keeps it under `response_id`: another answer
            with that id is the same one, which was paid once.
        profile, model: who gave it, or what came of it, if that was a fallback; empty for those of the request.
        server_address, server_port: of the endpoint that was asked; empty if none was.
        parameters: of the request, as events tell them (`ModelCallCompleted`).
    """

    content: str | None = None
    tool_calls: tuple[tuple[str, str, str], ...] = ()
    finish_reason: str = "stop"
    usage: Usage = NO_USAGE
    response_model: str = ""
    response_id: str = ""
    provider: str = ""
    started_at: int = 0
    duration: int = 0
    first_chunk: int = 0
    waited: Mapping[str, int] = field(default_factory=dict)
    retried: Mapping[str, int] = field(default_factory=dict)
    chunk_times: tuple[int, ...] = ()
    currency: str = ""
    extra: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    background: bool = False
    profile: str = ""
    model: str = ""
    server_address: str = ""
    server_port: int = 0
    parameters: dict[str, Any] | None = None

    @property
    def retries(self) -> int:
        """Failed tries before this answer."""
        return sum(self.retried.values())

    @property
    def is_final(self) -> bool:
        """Whether nothing follows from it: it asks for no tool, and is not cut off."""
        return self.error is None and not self.tool_calls and self.finish_reason != CUT_OFF

    @classmethod
    def aborted(cls, session_id: str) -> ModelAnswer:
        """That of a call that was aborted before anything came of it."""
        return cls(error={"code": "aborted", "message": "the call was aborted", "session_id": session_id})

    @classmethod
    def failed(cls, error: Exception, session_id: str, content: str | None = None) -> ModelAnswer:
        """That of a call that failed for good, with the text that had come."""
        return cls(content, error=UnderstudyError.of(error, session_id=session_id).to_wire())


CALL_ENDED = ("finished", "done")
"""The states of a call that has its result."""


class CallState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call's state: requested → started → finished → done. `result` is kept until it becomes a message.

    A call that waits for a person is `asked`: after `requested` (a question of the model's, or the call needs approval)
    or `started` (in doubt). A call that was approved is `approved` until it starts.
    One that the store answers (a wait, when its time is over) is `waiting` until then: after `requested`.

    Attributes:
        edited: the arguments, as JSON text, with which a person approved the call; None for those of the model.
        question: the kind of what it asks, while it is `asked` (`Ask`).
    """

    call_id: str
    state: str
    tool: str = ""
    arguments: str = ""
    provider_id: str = ""
    index: int = 0
    result: dict[str, Any] | None = None
    child_id: str | None = None
    epoch: int = 0
    executions: int = 0
    updated_at: int = 0
    edited: str | None = None
    question: str = ""


class Spawn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sub-agent to create in the spawning call's batch.

    Attributes:
        background: nobody waits for it: the call has its result at once.
        continues: the call whose sub-agent has ended, with a copy of whose conversation this one begins; empty: with
            nothing.
    """

    call_id: str
    child_id: str
    spec: dict[str, Any]
    text: str
    background: bool = False
    continues: str = ""


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call that waits for an answer from this batch on: a person's, or the store's.

    Attributes:
        kind: `question` (the model asks, or an MCP server), `approval` (the call may not be executed without) or
            `in_doubt` (the call had started when its process died), for a person; the tool's name, for the store.
        options: answers that are offered; any other is taken as well.
        executions: how often the call was executed.
        arguments: what the store is asked.
        form: JSON Schema that the answer must fit, which is JSON text then; None for any text.
        elicitation: names the question of an MCP server that this is.
        timeout: microseconds after which `default` (`{"decision", "text"}`) is a person's answer; 0 for never.
    """

    call_id: str
    kind: str
    prompt: str
    options: tuple[str, ...] = ()
    executions: int = 0
    arguments: dict[str, Any] | None = None
    timeout: int = 0
    default: dict[str, Any] | None = None
    form: dict[str, Any] | None = None
    elicitation: str = ""


class InboxItem(msgspec.Struct, frozen=True):
    """Something that reached a session.

    Attributes:
        kind: `input`, `child_result`, `answer`, `steer`, of a workflow also `approved`.
        key: of what it is: the input's run, the spawning call, the call that was answered, the request that steers.
        payload: as `kind` has it.
    """

    id: int
    kind: str
    key: str
    payload: dict[str, Any]

    @property
    def is_result(self) -> bool:
        """Whether it is the result of a tool call."""
        return self.kind in ("child_result", "answer")

    @property
    def interrupts(self) -> bool:
        """Whether it is a steer that does not wait for what the run is at."""
        return self.kind == STEER and bool(self.payload.get("interrupt"))


def answered_by(inbox: Iterable[InboxItem]) -> set[str]:
    """The calls that have their answer, or their sub-agent's result, in an inbox."""
    return {item.key for item in inbox if item.is_result}


class Handoff(msgspec.Struct, frozen=True):
    """The session goes on under another agent from a batch on, in which a call that hands off has its result.

    Attributes:
        reason: the model's.
    """

    call_id: str
    reason: str = ""


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the current run ends.

    Attributes:
        stopped: a hook has it end, not the model's answer: there is none that a steer could come before.
        worktree: what became of the session's worktree: `outcome`, `branch`, `path`, `files`. None: it has none.
    """

    status: str
    text: str = ""
    output: Any = None
    error: dict[str, Any] | None = None
    stopped: bool = False
    worktree: dict[str, Any] | None = None


class ActivationId(NamedTuple):
    """Names one activation. Epochs start over with a session that is made again under a removed one's id, which has
    another incarnation. So has one that has taken another specification on, or was handed off to another agent."""

    session_id: str
    incarnation: int
    epoch: int


class Interrupted(NamedTuple):
    """A run that was interrupted by a steer, and goes on.

    Attributes:
        round: at which it was then: another one does not concern it.
    """

    run_id: str
    incarnation: int
    epoch: int
    round: int


class Cancelled(NamedTuple):
    """A run that was asked to end. The row of its session may be another run's by the time this is acted upon."""

    run_id: str
    incarnation: int
    epoch: int
    reason: str


class Unwanted(NamedTuple):
    """A response that an endpoint makes in background mode for a run that has ended."""

    run_id: str
    incarnation: int
    response: KeptResponse


LogEntry = (
    Message
    | ToolStarted
    | ToolProgress
    | CustomEvent
    | ToolFinished
    | ToolInDoubt
    | MemoryRecalled
    | MemoryFailed
    | McpServerListed
    | McpServerFailed
    | WorktreeEnded
)
"""What a session's own process may add to its log. All else is written by the store's operations."""


class Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one activation commits at once: all of it or nothing.

    Attributes:
        entries: messages and events in log order.
        calls: new states of tool calls.
        asks: tool calls that wait for an answer from now on.
        inbox_done: ids of inbox rows that this batch takes care of.
        start_run: id of the run that begins with this batch.
        merge_runs: ids of the runs whose inputs are a part of it.
        finish: how the current run ends with this batch.
        wait: None to go on; `model`, `child`, `input` (a person), `timer` (a wait's time) or `idle` to wait for that.
        request_round, request_model, request_profile: of the model call, when `wait` is `model`.
        request_tokens, request_output: its input as estimated, and the longest reply it wants; 0 without a budget.
        request_purpose: see `ModelRequest`.
        request_entries: so many of the last entries are committed only if the call is made.
        handoff: ends the activation: the session goes on under another agent. Then `wait` is None, or `idle` at a run's
            end.
        steps: calls that a workflow's code asks for; a message among the entries asks for them as well.
        given_up: calls that others are at and nobody wants any more: whoever is at them is to give them a result.
    """

    session_id: str
    incarnation: int
    epoch: int
    batch_no: int
    entries: tuple[LogEntry, ...] = ()
    calls: tuple[CallState, ...] = ()
    spawns: tuple[Spawn, ...] = ()
    inbox_done: tuple[int, ...] = ()
    start_run: str | None = None
    finish: Finish | None = None
    wait: str | None = None
    request_round: int = 0
    request_model: str = ""
    request_profile: str = ""
    request_tokens: int = 0
    asks: tuple[Ask, ...] = ()
    request_output: int = 0
    request_purpose: str = ""
    merge_runs: tuple[str, ...] = ()
    request_entries: int = 0
    handoff: Handoff | None = None
    steps: tuple[CallState, ...] = ()
    given_up: tuple[str, ...] = ()

    @property
    def activation(self) -> ActivationId:
        """Whose batch it is."""
        return ActivationId(self.session_id, self.incarnation, self.epoch)


class Ack(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a commit returns: all that an activation must know to go on.

    Attributes:
        first_seq: `seq` of the batch's first entry; the others follow without gaps. 0 for a replay.
        inbox: what is not yet taken care of, oldest first.
        cancel: reason, when somebody asked to end the current run.
        replayed: the batch had been committed before.
    """

    seq: int
    first_seq: int = 0
    inbox: tuple[InboxItem, ...] = ()
    cancel: str | None = None
    replayed: bool = False


def child_text(payload: dict[str, Any]) -> str:
    """What the parent's model reads of a child's result: its answer (JSON, if it has an output schema), or how it ended
    and what it had by then."""
    worktree = worktree_text(payload["worktree"]) if "worktree" in payload else ""
    if payload["status"] == "completed":
        output = payload.get("output")
        return (to_json(output) if output is not None else payload["text"] or "") + worktree
    error = (payload["error"] or {}).get("message", "")
    if payload["child_id"] is None:
        return f"no sub-agent was started: {error}. Go on without it."
    tools = ", ".join(f"{name} ({count} times)" if count > 1 else name for name, count in payload.get("tools") or ())
    done = f"\nIt had used: {tools}." if tools else ""
    said = f"\nIts last words: {payload['text']}" if payload["text"] else ""
    return f"the sub-agent ended as {payload['status']}: {error}{done}{said}{worktree}"
