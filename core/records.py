"""What session actors, the node service and the store say to each other.

Plain dataclasses with a versioned wire form (dictionaries of JSON-compatible values): never pickles of our classes, so
a frame and a node service of neighbouring versions understand each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .events import Event
from .messages import WIRE_VERSION, Message, ToolCall, Usage

CACHED_WINDOWS = 64
"""Windows that a frame keeps of sessions that left it; the node service counts them in the same way."""

PAGE = 10_000
"""So many messages or events of a session are told at a time."""

LEASE_SECONDS = 4.0
"""How long after sending a commit an activation may start a tool on the strength of its Ack."""

NO_USAGE = Usage()

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

SESSION_STATUSES = (
    "idle",
    "running",
    "waiting_for_model",
    "waiting_for_child",
    "waiting_for_input",
    "waiting_for_timer",
    "completed",
    "failed",
    "cancelled",
    "quarantined",
)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call, complete: the gateway needs nothing else.

    Attributes:
        wait_key: `session/run/round`; with `/attempt` it is the request key.
        profile: name of the model profile (endpoint and credentials) at the gateway.
        messages, tools: in the OpenAI chat completions form.
        parameters: temperature, max_tokens, … passed through to the endpoint.
        deadline: seconds for the whole call, retries included.
        stall: seconds without a byte from the endpoint after which a try is given up.
    """

    wait_key: str
    profile: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    deadline: float = 600.0
    stall: float = 300.0

    def to_wire(self) -> dict[str, Any]:
        return {
            "v": WIRE_VERSION,
            "wait_key": self.wait_key,
            "profile": self.profile,
            "model": self.model,
            "messages": self.messages,
            "tools": self.tools,
            "parameters": self.parameters,
            "deadline": self.deadline,
            "stall": self.stall,
        }

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> ModelRequest:
        return cls(**{key: value for key, value in data.items() if key != "v"})


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What a model call returned.

    Attributes:
        tool_calls: `(provider id, name, arguments as JSON text)`, in order.
        started_at: microseconds since 1970 UTC; `duration`, `first_chunk`: microseconds.
        retries: failed tries before this answer.
        error: set when the call failed for good; `content` then holds partial text, if any.
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
    retries: int = 0
    extra: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CallState:
    """A tool call's state: requested → started → finished → done. `result` is kept until it becomes a message.

    A call that waits for a person is `asked`: after `requested` (a question of the model's) or `started` (in doubt).
    One that the store answers (a wait, when its time is over) is `waiting` until then: after `requested`.
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

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CallState.__slots__}

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> CallState:
        return cls(**data)

    def call(self) -> ToolCall:
        """The call as the model asked for it."""
        return ToolCall(self.call_id, self.tool, self.arguments, self.provider_id)


@dataclass(frozen=True, slots=True)
class Spawn:
    """A sub-agent to create in the spawning call's batch."""

    call_id: str
    child_id: str
    spec: dict[str, Any]
    text: str

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Spawn.__slots__}


@dataclass(frozen=True, slots=True)
class Ask:
    """A tool call that waits for an answer from this batch on: a person's, or the store's.

    Attributes:
        kind: `question` (the model asks) or `in_doubt` (the call had started when its process died), for a person; the
            tool's name (`understudy.wakeups`), for the store.
        options: answers that are offered; any other is taken as well.
        executions: how often the call was executed.
        arguments: what the store is asked.
    """

    call_id: str
    kind: str
    prompt: str
    options: tuple[str, ...] = ()
    executions: int = 0
    arguments: dict[str, Any] | None = None

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Ask.__slots__}

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Ask:
        return cls(**{**data, "options": tuple(data["options"])})


@dataclass(frozen=True, slots=True)
class Finish:
    """How the current run ends."""

    status: str
    text: str = ""
    output: Any = None
    error: dict[str, Any] | None = None

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Finish.__slots__}


class ActivationId(NamedTuple):
    """Names one activation. Epochs begin anew with a session that is made again under a removed one's id, which has
    another incarnation."""

    session_id: str
    incarnation: int
    epoch: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> ActivationId:
        """The last one of the session that has this row."""
        return cls(row["session_id"], row["incarnation"], row["epoch"])


@dataclass(frozen=True, slots=True)
class Batch:
    """What one activation commits at once: all of it or nothing.

    Attributes:
        entries: messages and events in log order.
        calls: new states of tool calls.
        asks: tool calls that wait for an answer from now on.
        inbox_done: ids of inbox rows that this batch takes care of.
        start_run: id of the run that begins with this batch.
        finish: how the current run ends with this batch.
        wait: None to go on; `model`, `child`, `input` (a person), `timer` (a wait's time) or `idle` to wait for that.
        request_round, request_model, request_profile: of the model call, when `wait` is `model`.
        request_tokens, request_output: its input as estimated, and the longest reply it wants; 0 without a budget.
    """

    session_id: str
    incarnation: int
    epoch: int
    batch_no: int
    entries: tuple[Message | Event, ...] = ()
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

    @property
    def activation(self) -> ActivationId:
        """Whose batch it is."""
        return ActivationId(self.session_id, self.incarnation, self.epoch)

    def to_wire(self) -> dict[str, Any]:
        return {
            "v": WIRE_VERSION,
            "session_id": self.session_id,
            "incarnation": self.incarnation,
            "epoch": self.epoch,
            "batch_no": self.batch_no,
            "entries": [
                ["m", entry.to_wire()] if isinstance(entry, Message) else ["e", entry.to_wire()]
                for entry in self.entries
            ],
            "calls": [call.to_wire() for call in self.calls],
            "spawns": [spawn.to_wire() for spawn in self.spawns],
            "inbox_done": list(self.inbox_done),
            "start_run": self.start_run,
            "finish": self.finish.to_wire() if self.finish else None,
            "wait": self.wait,
            "request_round": self.request_round,
            "request_model": self.request_model,
            "request_profile": self.request_profile,
            "request_tokens": self.request_tokens,
            "asks": [ask.to_wire() for ask in self.asks],
            "request_output": self.request_output,
        }

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Batch:
        return cls(
            session_id=data["session_id"],
            incarnation=data["incarnation"],
            epoch=data["epoch"],
            batch_no=data["batch_no"],
            entries=tuple(
                Message.from_wire(entry) if kind == "m" else Event.from_wire(entry) for kind, entry in data["entries"]
            ),
            calls=tuple(CallState.from_wire(call) for call in data["calls"]),
            spawns=tuple(Spawn(**spawn) for spawn in data["spawns"]),
            inbox_done=tuple(data["inbox_done"]),
            start_run=data["start_run"],
            finish=Finish(**data["finish"]) if data["finish"] else None,
            wait=data["wait"],
            request_round=data["request_round"],
            request_model=data["request_model"],
            request_profile=data["request_profile"],
            request_tokens=data["request_tokens"],
            asks=tuple(Ask.from_wire(ask) for ask in data.get("asks", ())),
            request_output=data["request_output"],
        )


@dataclass(frozen=True, slots=True)
class Ack:
    """What a commit returns: all that an activation must know to go on.

    Attributes:
        first_seq: `seq` of the batch's first entry; the others follow without gaps. 0 for a replay.
        inbox: rows not yet taken care of, oldest first: `{"id", "kind", "key", "payload"}`.
        cancel: reason, when somebody asked to end the current run.
        replayed: the batch had been committed before.
    """

    seq: int
    first_seq: int = 0
    inbox: tuple[dict[str, Any], ...] = ()
    cancel: str | None = None
    replayed: bool = False

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Ack.__slots__}

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Ack:
        return cls(**{**data, "inbox": tuple(data["inbox"])})


def child_text(payload: dict[str, Any]) -> str:
    """What the parent's model reads of a child's result: its answer, or how it ended and what it had by then."""
    if payload["status"] == "completed":
        return payload["text"] or ""
    error = (payload["error"] or {}).get("message", "")
    if payload["child_id"] is None:
        return f"no sub-agent was started: {error}. Go on without it."
    tools = ", ".join(f"{name} ({count} times)" if count > 1 else name for name, count in payload.get("tools") or ())
    done = f"\nIt had used: {tools}." if tools else ""
    said = f"\nIts last words: {payload['text']}" if payload["text"] else ""
    return f"the sub-agent ended as {payload['status']}: {error}{done}{said}"
