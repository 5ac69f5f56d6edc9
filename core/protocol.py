"""The messages between clients, session actors, node services and gateways, as they are on the way.

Neither a socket nor Ray carries our classes: a process of another version has others. `packed` makes what they carry of
a message, and `unpacked` makes the message again, or refuses what is none.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .config import ModelProfile
from .errors import InvalidInput
from .event_wire import EventWire
from .identifiers import identifier_problem, wait_key
from .messages import Message
from .notes import key_problem, text_problem
from .queues import QueuePlace
from .reads import RunRecord
from .records import (
    ActivationId,
    Batch,
    CallState,
    Cancelled,
    InboxItem,
    Interrupted,
    KeptResponse,
    ModelAnswer,
    ModelRequest,
    Unwanted,
)
from .streams import Part
from .wakeups import wakeup_problem

COMPILED = ("name", "hash", "model", "profile")
"""What each compiled specification has, and node services look at before anything is stored."""


REMEMBER = ("tool", "arguments")
"""For what a decision can be remembered (`Decision`)."""


class FrameIdentity(msgspec.Struct, frozen=True):
    """A session actor's process."""

    frame_id: str
    pid: int
    node_id: str
    placement: str


class StepCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a frame has done, and that it wants more work.

    Attributes:
        number: of this frame's calls.
        activation: which it was at; None if it was at none: then all that follows is empty too.
        root_id: the tree of its session.
        known_seq: the frame has the session's messages up to here.
        batch: to be committed; None to receive the answer to a model call that is on its way.
        request: the model call that the session waits for from now on.
        leave: the process ends after this call.
    """

    frame: FrameIdentity
    number: int = 0
    activation: ActivationId | None = None
    root_id: str = ""
    known_seq: int = 0
    batch: Batch | None = None
    request: ModelRequest | None = None
    leave: bool = False


class Work(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="work"):
    """All that an activation must know to go on, from its beginning or after a wait.

    Attributes:
        batch_no: of the last batch that was committed.
        after_seq, seq: `messages` are those after the one and up to the other.
        calls: tool calls of the current round whose results are no messages yet.
        wait: `model` if the answer to the current round's request is on its way.
        model_error: why that request has none.
        cancel: reason, when somebody asked to end the current run.
        budgeted: model calls are charged to accounts, and must say what they want.
        redone: what is done until the next model call may have been done before, by a process that died.
        spec: the compiled specification, where it is known that the frame does not have it.
        needless: the frame can go on without messages up to here.
    """

    session_id: str
    incarnation: int
    epoch: int
    batch_no: int
    after_seq: int
    seq: int
    root_id: str
    depth: int = 0
    run_id: str | None = None
    round: int = 0
    trace_id: str = ""
    sampled: bool | None = None
    wait: str | None = None
    model_error: dict[str, Any] | None = None
    cancel: str | None = None
    messages: tuple[Message, ...] = ()
    calls: tuple[CallState, ...] = ()
    inbox: tuple[InboxItem, ...] = ()
    budgeted: bool = False
    redone: bool = False
    spec: dict[str, Any] | None = None
    needless: int = 0

    @property
    def activation(self) -> ActivationId:
        """Whose work it is."""
        return ActivationId(self.session_id, self.incarnation, self.epoch)


class Exit(msgspec.Struct, frozen=True, tag="exit"):
    """The frame's process is not needed any more."""


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node service did to sessions that are at home on another node: tells that node's service.

    Attributes:
        sessions: that were written.
        cancelled: their runs that were asked to end, by session.
        killed: activations that were ended by force, by frame.
        interrupted: their runs that were interrupted by a steer, by session.
        unwanted: responses that an endpoint makes in background mode for their runs that have ended, by session.
    """

    sessions: list[str] = []
    cancelled: dict[str, Cancelled] = {}
    killed: dict[str, ActivationId] = {}
    interrupted: dict[str, Interrupted] = {}
    unwanted: dict[str, Unwanted] = {}


class CallOrigin(msgspec.Struct, frozen=True):
    """What a model call is for: all that a node service must know to commit its answer, also one that has not asked
    itself.

    Attributes:
        model, profile: that the request names.
        ends_run, purpose, guarded, response: see `ModelRequest`.
    """

    session_id: str
    incarnation: int
    run_id: str
    round: int
    attempt: int
    placement: str
    root_id: str
    profile: str
    model: str
    ends_run: bool = False
    purpose: str = ""
    guarded: bool = False
    response: KeptResponse | None = None

    def is_fetched(self, answer: ModelAnswer) -> bool:
        """Whether an answer to it is the response that an earlier attempt had, which is paid once."""
        known = self.response
        if known is None:
            return False
        return (answer.response_id, answer.profile or self.profile) == (known.id, known.profile)

    @property
    def wait_key(self) -> str:
        """`session/run/round`: what the session waits for."""
        return wait_key(self.session_id, self.run_id, self.round)

    @property
    def request_key(self) -> str:
        """`session/run/round/attempt`: this try to have it answered, in events."""
        return f"{self.wait_key}/{self.attempt}"

    @property
    def key(self) -> str:
        """What a gateway knows the call by: a session that is made again under a removed one's id has the same
        request keys."""
        return f"{self.incarnation}/{self.request_key}"


class Judged(msgspec.Struct, frozen=True, omit_defaults=True):
    """The verdict of the hooks that run beside a model call.

    Attributes:
        number: of the frame's `StepCall` that asked for the call.
        wait_key: of the call.
        error: why its answer is for nobody, as the call's error; None if they let it pass.
    """

    number: int
    activation: ActivationId
    wait_key: str
    error: dict[str, Any] | None = None


class Attached(msgspec.Struct, frozen=True):
    """A gateway has a new node service to work for.

    Attributes:
        gateway: which gateway it is; one that takes its place is another one, and has none of its calls.
        number: names this attachment: each call of the service has it, so that the late ones of a service that died
            are refused.
        pid: of its process.
        held: calls that are in flight, or whose answers nobody has released.
        profiles: that it has received: a service that was restarted, while its supervisor was too, has lost them.
    """

    gateway: str
    number: str
    pid: int
    held: list[CallOrigin] = []
    profiles: list[ModelProfile] = []


class Growth(msgspec.Struct, frozen=True):
    """How an answer that is being streamed has grown.

    Attributes:
        restarts: how often it started over, after a try that failed.
        parts: what is new; all of it, if it started over.
        ended: nothing more comes.
    """

    restarts: int
    parts: list[Part]
    ended: bool = False


class NewSession(msgspec.Struct, frozen=True):
    """A session that a client wants, or finds if it is there.

    Attributes:
        spec: its compiled specification.
        placement: what its process must have.
    """

    session_id: str
    spec: dict[str, Any]
    placement: str = ""
    metadata: dict[str, str] = {}

    def __post_init__(self) -> None:
        _require(identifier_problem(self.session_id, "session_id"))
        missing = [name for name in COMPILED if name not in self.spec]
        _require(f"spec is not compiled: it has no {', '.join(missing)}." if missing else None)


class Spawned(msgspec.Struct, frozen=True):
    """What became of it.

    Attributes:
        created: False if it was there.
        node_id: the node that looks after it.
    """

    created: bool
    node_id: str


class Input(msgspec.Struct, frozen=True, omit_defaults=True):
    """An input to a session, of which a run is made.

    Attributes:
        content: a text, or content parts as the model's protocol has them.
        trace_id, parent_span_id: of the caller's span; empty for a trace of the run's own.
        sampled: whether the caller records that trace; None without one.
        place: the queue in which the run waits until it may begin; None: it begins as soon as its session can.
    """

    run_id: str
    content: Any
    trace_id: str = ""
    parent_span_id: str = ""
    sampled: bool | None = None
    place: QueuePlace | None = None

    def __post_init__(self) -> None:
        _require(identifier_problem(self.run_id, "run_id") or content_problem(self.content))


class Accepted(msgspec.Struct, frozen=True):
    """An input is durable.

    Attributes:
        created: False if it had been accepted before.
        after: the session's `seq` before it.
    """

    created: bool
    after: int


class Steer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message for the run that a session is at.

    Attributes:
        content: a text, or content parts as the model's protocol has them.
        interrupt: what the run is at does not go on: its model call and its tools.
    """

    content: Any
    interrupt: bool = False

    def __post_init__(self) -> None:
        _require(content_problem(self.content))


class Signal(msgspec.Struct, frozen=True):
    """An event that a workflow waits for, or will.

    Attributes:
        payload: what the step returns that waits for it; JSON data.
    """

    name: str
    payload: Any = None

    def __post_init__(self) -> None:
        _require(identifier_problem(self.name, "name"))


class Steered(msgspec.Struct, frozen=True):
    """A steer is durable.

    Attributes:
        run_id: the run that it is for.
        after: the session's `seq` before it.
    """

    run_id: str
    after: int


class SteerAnswer(msgspec.Struct, frozen=True):
    """What became of a request to steer, as it is remembered.

    Attributes:
        steered: None if it was refused.
        refusal: why.
    """

    steered: Steered | None = None
    refusal: str = ""


class Fork(msgspec.Struct, frozen=True):
    """A session that is wanted with the messages of another one.

    Attributes:
        session_id: its id.
        at: `seq` of the last of these messages; 0 for none.
    """

    session_id: str
    at: int

    def __post_init__(self) -> None:
        _require(identifier_problem(self.session_id, "session_id"))
        _require("at must be the seq of a message, or 0." if self.at < 0 else None)


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a person says of a call that waits for one.

    Attributes:
        asked: which time the call asked.
        decision: `ok` or `error` (the text is its result), `rerun`, `approve` (the text is the arguments to execute it
            with, as JSON; empty for the model's) or `reject` (the text is the reason).
        remember: whether the session shall do the same without asking, of an `approve` or a `reject`: for all calls of
            the `tool`, for those with the same `arguments`, or (empty) not.
    """

    call_id: str
    asked: int
    decision: str
    text: str = ""
    remember: str = ""

    def __post_init__(self) -> None:
        _require(None if self.remember in ("", *REMEMBER) else f"remember is {' or '.join(REMEMBER)}.")
        may = not self.remember or (self.decision in ("approve", "reject"))
        _require(None if may else f"{self.decision!r} can't be remembered.")
        edits = self.decision == "approve" and self.text
        _require("Arguments that a person edited can't be remembered." if edits and self.remember else None)


class NewWakeup(msgspec.Struct, frozen=True):
    """An input that a session shall get so many seconds from now, and `every` so many seconds again."""

    name: str
    prompt: str
    seconds: float
    every: float | None = None

    def __post_init__(self) -> None:
        _require(wakeup_problem(self.prompt, self.seconds, self.every, self.name))


class NewNote(msgspec.Struct, frozen=True):
    """A note that a client sets for a session."""

    key: str
    text: str
    pinned: bool = False

    def __post_init__(self) -> None:
        _require(key_problem(self.key) or text_problem(self.text))


class Scheduled(msgspec.Struct, frozen=True):
    """What became of a wakeup.

    Attributes:
        outcome: `scheduled`, `unchanged` (there is one of the same content: it stays due when it was), or `replaced`
            (there was another of the name).
        due_at: microseconds since 1970 UTC.
    """

    outcome: str
    due_at: int


class Following(msgspec.Struct, omit_defaults=True):
    """What a client wants to hear of a session.

    Attributes:
        after: it has the session's events up to this `seq`.
        ends: it wants only the ends and pauses of runs.
        stream: `(key, lengths)` of the streamed answer that it has, the characters of each part; None if it wants none.
    """

    after: int
    ends: bool = False
    stream: tuple[str, list[int]] | None = None


class Watched(msgspec.Struct):
    """What is new for a client.

    Attributes:
        events: of a long log the first page, also for whom only ends are reported: its last event then.
        streams: `(key, parts)` by session: what is new of the answer of a try; all of it, if that is another try's.
        runs: those that have ended or paused, by `session/run`, of sessions of which only the ends are reported.
        gone: sessions that are at home elsewhere.
    """

    events: list[EventWire] = []
    streams: dict[str, tuple[str, list[Part]]] = {}
    runs: dict[str, RunRecord] = {}
    gone: list[str] = []


def content_problem(content: Any) -> str | None:
    """What is wrong with an input; None if nothing is."""
    empty = not content.strip() if isinstance(content, str) else not content
    if empty or not isinstance(content, (str, list)):
        return "An input must be a text or a list of content parts, and must not be empty."
    return None


def _require(problem: str | None) -> None:
    """Refuse a message: `unpacked` names the place where it is."""
    if problem is not None:
        raise ValueError(problem)


class ServiceProcess(msgspec.Struct, frozen=True):
    """The process of a node's service."""

    node_id: str
    pid: int


class ServiceDirectory(msgspec.Struct, frozen=True):
    """Who runs where, as the supervisor says.

    Attributes:
        generation, state: its own.
        problems: placements that no frame can be started for, and why.
        pid, node_id: of its process.
    """

    generation: int
    state: str
    nodes: list[ServiceProcess]
    frames: list[FrameIdentity]
    problems: dict[str, str] = {}
    pid: int = 0
    node_id: str = ""


def packed(value: Any) -> Any:
    """A message, or anything in which there are some, as data of Python's own types (`bytes` among them)."""
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=plain)


def unpacked(data: Any, kind: Any, what: str) -> Any:
    """What `packed` was given. Fields that are not known are left out.

    Args:
        kind: the class, or any other type that has such classes in it.
        what: names it in the error.

    Raises:
        InvalidInput: it is no such thing; the text says where it is not.
    """
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidInput(f"{what} is not understood: {error}") from None


def plain(value: Any) -> Any:
    """What a value of a subclass of `str`, `int` or `float` is at bottom: HTML libraries have texts of their own.

    Raises:
        TypeError: it is of no such class.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"{type(value).__name__} is no data")
