"""The metric table: what every metric is called, and what each type of event adds to it.

No label ever names a session or a run: the number of series does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from understudy.events import (
    EPHEMERAL,
    EVENT_TYPES,
    CancelRequested,
    ChildRestarted,
    ChildSpawned,
    Event,
    InputReceived,
    InputRequested,
    MemoryFailed,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    RunAccepted,
    RunAdmitted,
    RunFinished,
    RunStarted,
    SessionActivated,
    SessionCrashed,
    SessionCreated,
    SessionMigrated,
    SessionMoved,
    SessionQuarantined,
    TimerFired,
    TimerSet,
    ToolFinished,
    ToolInDoubt,
)
from understudy.messages import Usage
from understudy.prices import MILLION
from understudy.records import FAILED_STATUSES, RUN_STATUSES
from understudy.streams import CHUNK_BOUNDS

from . import conventions as names

NOT_EXECUTED = ("unknown_tool", "invalid", "aborted", "repeated", "refused")
"""Outcomes whose duration tells nothing."""

COMMITTED = tuple(kind for kind in EVENT_TYPES.values() if kind not in EPHEMERAL)
"""The types of events that are in the log; `unknown` are those of a newer version."""

Labels = tuple[str, ...]
Amounts = Iterable[tuple[Labels, int, Sequence[int]]]
"""Label values, an amount (a time in microseconds), and, where an event has many of a histogram's values together, how
many of them are in each bucket; the amount is their sum then."""

Measure = Callable[[Any], Amounts]
"""What one event adds to a metric."""

NOTHING: Amounts = ()


@dataclass(frozen=True)
class MetricRow:
    """One line of the metric table: a histogram if it has buckets, else a counter.

    Attributes:
        measures: what each type of event adds; without any, the metric is local to the process and not in checkpoints.
        initial: label values that exist from the start with 0, so that a rate sees the first increment.
        buckets: upper bounds of a histogram, in the unit shown.
        unit: `seconds` for times, which are measured in microseconds and shown in seconds; else empty.
        millionths: it is measured in millionths of what is shown, as money is.
    """

    name: str
    help: str
    labels: Labels = ()
    measures: Mapping[type[Event], Measure] = field(default_factory=dict)
    initial: tuple[Labels, ...] = ()
    buckets: tuple[float, ...] = ()
    unit: str = ""
    millionths: bool = False

    @property
    def scale(self) -> int:
        """How many of what is measured make one of what is shown."""
        return MILLION if self.millionths or self.unit == "seconds" else 1

    @property
    def kind(self) -> str:
        """`counter` or `histogram`."""
        return "histogram" if self.buckets else "counter"


def _once(*labels: str) -> Amounts:
    return ((labels, 1, ()),)


def _of(amount: int, *labels: str) -> Amounts:
    return ((labels, amount, ()),)


def _labels(*attributes: str) -> Labels:
    """Attributes of the conventions as labels."""
    return tuple(map(names.prometheus_name, attributes))


ModelCallEnded = ModelCallCompleted | ModelCallFailed

INFERENCE = _labels(names.OPERATION_NAME, names.PROVIDER_NAME, names.REQUEST_MODEL, names.RESPONSE_MODEL)
USAGE = (*_labels(names.AGENT_NAME), *INFERENCE, *_labels(names.TOKEN_MODALITY))
AGENT_RUN = _labels(names.AGENT_NAME, names.RUN_STATUS, names.ERROR_TYPE)
TOOL_CALL = _labels(names.TOOL_NAME, names.TOOL_TYPE, names.ERROR_TYPE)

MODALITY = "unknown"
"""Endpoints' counts of audio, image and text tokens are not distinguished."""


def _inference(event: ModelCallEnded) -> Labels:
    response_model = event.response_model if isinstance(event, ModelCallCompleted) else ""
    return names.CHAT, event.provider or names.PROVIDER, event.model, response_model


def _tokens(index: int) -> Mapping[type[Event], Measure]:
    """Measures the tokens at `index` of the usage of an answer, or of one that broke off; 0 where there are none, as
    the conventions ask."""

    def measure(event: ModelCallEnded) -> Amounts:
        usage = event.usage or ()
        amount = usage[index] if index < len(usage) else 0
        return _of(amount, event.agent, *_inference(event), MODALITY)

    return {ModelCallCompleted: measure, ModelCallFailed: measure}


def _cost(event: ModelCallEnded) -> Amounts:
    cost = Usage.from_wire(event.usage).cost
    return _of(cost, event.agent, event.model, event.currency) if cost else NOTHING


def _call_duration(event: ModelCallEnded) -> Amounts:
    error = (event.error_code or "error") if isinstance(event, ModelCallFailed) else ""
    return _of(event.duration, *_inference(event), error)


def _first_chunk(event: ModelCallCompleted) -> Amounts:
    return _of(event.first_chunk, *_inference(event)) if event.first_chunk else NOTHING


def _per_chunk(event: ModelCallEnded) -> Amounts:
    if not event.chunk_times:
        return NOTHING
    total, *counts = event.chunk_times
    return ((_inference(event), total, counts),)


def _call_wait(event: ModelCallEnded) -> Amounts:
    return [((profile,), waited, ()) for profile, waited in (event.waited or {}).items()]


def _tokens_redone(event: ModelCallEnded) -> Amounts:
    return _of(event.usage[0] + event.usage[1]) if event.redone and event.usage else NOTHING


def _retries(event: ModelCallEnded) -> Amounts:
    return [((event.model, reason), number, ()) for reason, number in (event.retried or {}).items()]


def _run_duration(event: RunFinished) -> Amounts:
    if not event.started_at:
        return NOTHING
    error = (event.error_code or event.status) if event.status in FAILED_STATUSES else ""
    return _of(event.at - event.started_at, event.agent, event.status, error)


def _detection(event: SessionCrashed) -> Amounts:
    return _of(event.unseen) if event.unseen else NOTHING


def _restore(event: SessionActivated) -> Amounts:
    return _of(event.down) if event.cause == "resume" else NOTHING


def _tool(event: ToolFinished) -> str:
    # A model may make up any number of names; they must not use up the label's values.
    return "unknown" if event.outcome == "unknown_tool" else event.tool


def _tool_duration(event: ToolFinished) -> Amounts:
    if event.outcome in NOT_EXECUTED:
        return NOTHING
    return _of(event.duration, event.tool, names.FUNCTION, "" if event.outcome == "ok" else event.outcome)


def _failure(event: ModelCallFailed) -> str:
    return event.error_code if event.error_code in ("aborted", "refused") else "error"


TABLE: tuple[MetricRow, ...] = (
    MetricRow(
        names.INFERENCE_DURATION,
        "Time of a model call from its first request to its end, retries included; error_type is empty for an answer.",
        (*INFERENCE, *_labels(names.ERROR_TYPE)),
        {ModelCallCompleted: _call_duration, ModelCallFailed: _call_duration},
        buckets=names.CALL_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.INFERENCE_FIRST_CHUNK,
        "Time from the first request of a model call to its first streamed chunk.",
        INFERENCE,
        {ModelCallCompleted: _first_chunk},
        buckets=names.CALL_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.INFERENCE_PER_CHUNK,
        "Time from one streamed chunk with output to the next.",
        INFERENCE,
        {ModelCallCompleted: _per_chunk, ModelCallFailed: _per_chunk},
        buckets=tuple(bound / MILLION for bound in CHUNK_BOUNDS),
        unit="seconds",
    ),
    MetricRow(names.INFERENCE_INPUT_TOKENS, "Input tokens, cached ones included.", USAGE, _tokens(0)),
    MetricRow(names.INFERENCE_OUTPUT_TOKENS, "Output tokens, reasoning included.", USAGE, _tokens(1)),
    MetricRow(names.INFERENCE_CACHED_TOKENS, "Input tokens read from the provider's cache.", USAGE, _tokens(2)),
    MetricRow(names.INFERENCE_CACHE_WRITE_TOKENS, "Input tokens written to the provider's cache.", USAGE, _tokens(6)),
    MetricRow(names.INFERENCE_REASONING_TOKENS, "Output tokens spent on reasoning.", USAGE, _tokens(3)),
    MetricRow(
        names.MODEL_COST,
        "What model calls cost, in the price table's currency.",
        ("agent", "model", "currency"),
        {ModelCallCompleted: _cost, ModelCallFailed: _cost},
        millionths=True,
    ),
    MetricRow(
        names.MODEL_CALL_WAIT,
        "Time that a model call waited for its turn: for one of the profile's places, and for its rate limit.",
        ("profile",),
        {ModelCallCompleted: _call_wait, ModelCallFailed: _call_wait},
        buckets=names.CALL_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.INVOKE_AGENT_DURATION,
        "Time of a run from its start to its end; error_type is empty unless it failed.",
        AGENT_RUN,
        {RunFinished: _run_duration},
        buckets=names.INVOKE_AGENT_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.EXECUTE_TOOL_DURATION,
        "Time of a tool call; error_type is empty if its outcome is ok.",
        TOOL_CALL,
        {ToolFinished: _tool_duration},
        buckets=names.CALL_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.EVENTS,
        "Events committed, whatever happened.",
        ("type",),
        dict.fromkeys(COMMITTED, lambda event: _once(event.type)),
        initial=tuple((kind.type,) for kind in COMMITTED),
    ),
    MetricRow(
        names.SESSIONS_CREATED, "Sessions created.", ("agent",), {SessionCreated: lambda event: _once(event.agent)}
    ),
    MetricRow(
        names.RUNS_ACCEPTED, "Inputs durably accepted.", ("agent",), {RunAccepted: lambda event: _once(event.agent)}
    ),
    MetricRow(
        names.RUNS_FINISHED,
        "Runs that ended.",
        ("status",),
        {RunFinished: lambda event: _once(event.status)},
        initial=tuple((status,) for status in RUN_STATUSES),
    ),
    MetricRow(
        names.RUN_QUEUED,
        "Time from accepting an input to the start of its run.",
        measures={RunStarted: lambda event: _of(event.queued)},
        initial=((),),
        buckets=names.CALL_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.QUEUE_WAITED,
        "Time from accepting a run of a queue until it got its slot; their number is that of the runs that began.",
        ("queue",),
        {RunAdmitted: lambda event: _of(event.waited, event.queue)},
        buckets=names.CALL_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.ACTIVATIONS,
        "Activations of sessions in a frame.",
        ("cause",),
        {SessionActivated: lambda event: _once(event.cause)},
        initial=(("ready",), ("resume",), ("takeover",), ("moved",)),
    ),
    MetricRow(
        names.SESSION_CRASHES,
        "Activations whose process died; waiting: while only waiting for a call in flight.",
        ("cause", "waiting"),
        {SessionCrashed: lambda event: _once(event.cause, "true" if event.waiting else "false")},
        initial=tuple(product(("process_died", "out_of_memory"), ("false", "true"))),
    ),
    MetricRow(
        names.CRASH_DETECTION,
        "At most so long passed between a process's death and its detection: the time since its last sign of life.",
        measures={SessionCrashed: _detection},
        initial=((),),
        buckets=names.DETECTION_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.RESTORE_DURATION,
        "Time from the detection of a crash to the session's next activation.",
        measures={SessionActivated: _restore},
        initial=((),),
        buckets=names.RESTORE_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.TOKENS_REDONE,
        "Tokens paid a second time because an answer was lost with its gateway.",
        measures={ModelCallCompleted: _tokens_redone, ModelCallFailed: _tokens_redone},
        initial=((),),
    ),
    MetricRow(
        names.MODEL_CALLS,
        "Model calls that ended.",
        ("outcome",),
        {ModelCallCompleted: lambda event: _once("ok"), ModelCallFailed: lambda event: _once(_failure(event))},
        initial=(("ok",), ("error",), ("aborted",), ("refused",)),
    ),
    MetricRow(
        names.MODEL_RETRY_COUNT,
        "Failed tries within model calls that were followed by another one, by what was wrong.",
        ("model", "reason"),
        {ModelCallCompleted: _retries, ModelCallFailed: _retries},
    ),
    MetricRow(
        names.MODEL_CALLS_REISSUED,
        "Model calls sent again because their gateway died.",
        measures={ModelCallReissued: lambda event: _once()},
        initial=((),),
    ),
    MetricRow(
        names.TOOL_CALLS,
        "Tool calls that have their result.",
        ("tool", "outcome"),
        {ToolFinished: lambda event: _once(_tool(event), event.outcome)},
    ),
    MetricRow(
        names.TOOLS_IN_DOUBT,
        "Tool calls whose activation ended after they had started.",
        ("tool", "policy"),
        {ToolInDoubt: lambda event: _once(event.tool, event.policy)},
    ),
    MetricRow(
        names.INPUTS_REQUESTED,
        "Tool calls that began to wait for a person.",
        ("kind",),
        {InputRequested: lambda event: _once(event.kind)},
        initial=(("question",), ("approval",), ("in_doubt",)),
    ),
    MetricRow(
        names.INPUTS_RECEIVED,
        "People's answers to tool calls.",
        ("kind", "decision"),
        {InputReceived: lambda event: _once(event.kind, event.decision)},
    ),
    MetricRow(
        names.TIMERS_SET,
        "Waits and wakeups that agents and clients asked for.",
        ("kind",),
        {TimerSet: lambda event: _once(event.kind)},
        initial=(("wait",), ("wakeup",)),
    ),
    MetricRow(
        names.TIMERS_FIRED,
        "Waits that were over and wakeups that were due.",
        ("kind",),
        {TimerFired: lambda event: _once(event.kind)},
        initial=(("wait",), ("wakeup",)),
    ),
    MetricRow(
        names.TIMER_LATENESS,
        "Time from when a wait was over or a wakeup was due to when it fired.",
        ("kind",),
        {TimerFired: lambda event: _of(event.late, event.kind)},
        initial=(("wait",), ("wakeup",)),
        buckets=names.LATENESS_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.MEMORY_FAILURES,
        "Calls of memory providers that failed; the runs went on without them.",
        ("what",),
        {MemoryFailed: lambda event: _once(event.what)},
        initial=(("recall",), ("remember",)),
    ),
    MetricRow(
        names.CHILDREN_SPAWNED,
        "Sub-agents created, by the agent that spawned them.",
        ("agent",),
        {ChildSpawned: lambda event: _once(event.agent)},
    ),
    MetricRow(
        names.CHILD_RESTARTS,
        "Tasks of sub-agents that were started again, in another session.",
        measures={ChildRestarted: lambda event: _once()},
        initial=((),),
    ),
    MetricRow(
        names.SESSIONS_MOVED,
        "Sessions that went to another node; forced: a drain's time to wait for their work was over.",
        ("forced",),
        {SessionMoved: lambda event: _once("true" if event.forced else "false")},
        initial=(("false",), ("true",)),
    ),
    MetricRow(
        names.SESSIONS_MIGRATED,
        "Sessions that took on another specification.",
        measures={SessionMigrated: lambda event: _once()},
        initial=((),),
    ),
    MetricRow(
        names.SESSIONS_QUARANTINED,
        "Sessions given up until a person looks at them.",
        ("reason",),
        {SessionQuarantined: lambda event: _once(event.rule or "max_restarts")},
        initial=(("no_progress",), ("max_restarts",)),
    ),
    MetricRow(
        names.CANCEL_REQUESTS,
        "Requests to end a run.",
        measures={CancelRequested: lambda event: _once()},
        initial=((),),
    ),
    MetricRow(
        names.COMMIT_DURATION,
        "Time of a transaction of the journal.",
        initial=((),),
        buckets=names.COMMIT_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.COMMIT_OPERATIONS,
        "Operations merged into one transaction of the journal.",
        initial=((),),
        buckets=names.BATCH_BUCKETS,
    ),
    MetricRow(names.FENCED_WRITES, "Writes refused because a newer activation exists.", initial=((),)),
)
