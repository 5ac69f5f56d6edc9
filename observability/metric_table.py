"""The metric table: what every metric is called, and what each type of event adds to it.

No label ever names a session or a run: the number of series does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from understudy.events import (
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
from understudy.records import RUN_STATUSES

from . import conventions as names

NOT_EXECUTED = ("unknown_tool", "invalid", "aborted", "repeated", "refused")
"""Outcomes whose duration tells nothing."""

Labels = tuple[str, ...]
Measure = Callable[[Any], tuple[Labels, int] | None]
"""What one event adds to a metric: label values and an amount (a time in microseconds), or None for nothing."""


@dataclass(frozen=True)
class MetricRow:
    """One line of the metric table: a histogram if it has buckets, else a counter.

    Attributes:
        measures: what each type of event adds; without any, the metric is local to the process and not in checkpoints.
        initial: label values that exist from the start with 0, so that a rate sees the first increment.
        buckets: upper bounds of a histogram, in the unit shown.
        unit: `seconds` for times, which are measured in microseconds and shown in seconds; else empty.
    """

    name: str
    help: str
    labels: Labels = ()
    measures: Mapping[type[Event], Measure] = field(default_factory=dict)
    initial: tuple[Labels, ...] = ()
    buckets: tuple[float, ...] = ()
    unit: str = ""

    @property
    def kind(self) -> str:
        """`counter` or `histogram`."""
        return "histogram" if self.buckets else "counter"


def _tokens(index: int) -> Mapping[type[Event], Measure]:
    """Measures the tokens at `index` of the usage of an answer, or of one that broke off."""

    def measure(event: ModelCallCompleted | ModelCallFailed) -> tuple[Labels, int] | None:
        usage = event.usage
        return ((event.agent, event.model), usage[index]) if usage and usage[index] else None

    return {ModelCallCompleted: measure, ModelCallFailed: measure}


def _cost(event: ModelCallCompleted | ModelCallFailed) -> tuple[Labels, int] | None:
    cost = Usage.from_wire(event.usage).cost
    return ((event.agent, event.model), cost) if cost else None


def _first_chunk(event: ModelCallCompleted) -> tuple[Labels, int] | None:
    return ((event.model,), event.first_chunk) if event.first_chunk else None


def _tokens_redone(event: ModelCallCompleted | ModelCallFailed) -> tuple[Labels, int] | None:
    return ((), event.usage[0] + event.usage[1]) if event.redone and event.usage else None


def _retries(event: ModelCallCompleted | ModelCallFailed) -> tuple[Labels, int] | None:
    return ((event.model,), event.retries) if event.retries else None


def _run_duration(event: RunFinished) -> tuple[Labels, int] | None:
    return ((event.agent, event.status), event.at - event.started_at) if event.started_at else None


def _detection(event: SessionCrashed) -> tuple[Labels, int] | None:
    return ((), event.unseen) if event.unseen else None


def _restore(event: SessionActivated) -> tuple[Labels, int] | None:
    return ((), event.down) if event.cause == "resume" else None


def _tool(event: ToolFinished) -> str:
    # A model may make up any number of names; they must not use up the label's values.
    return "unknown" if event.outcome == "unknown_tool" else event.tool


def _tool_duration(event: ToolFinished) -> tuple[Labels, int] | None:
    return None if event.outcome in NOT_EXECUTED else ((event.tool, event.outcome), event.duration)


def _failure(event: ModelCallFailed) -> str:
    return event.error_code if event.error_code in ("aborted", "refused") else "error"


TABLE: tuple[MetricRow, ...] = (
    MetricRow(
        names.INFERENCE_DURATION,
        "Time of a model call, retries included; error_type is empty for an answer.",
        ("model", "error_type"),
        {
            ModelCallCompleted: lambda event: ((event.model, ""), event.duration),
            ModelCallFailed: lambda event: ((event.model, event.error_code or "error"), event.duration),
        },
        buckets=names.INFERENCE_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.INFERENCE_FIRST_CHUNK,
        "Time from the start of a model call to its first streamed token.",
        ("model",),
        {ModelCallCompleted: _first_chunk},
        buckets=names.INFERENCE_BUCKETS,
        unit="seconds",
    ),
    MetricRow(names.INFERENCE_INPUT_TOKENS, "Input tokens, cached ones included.", ("agent", "model"), _tokens(0)),
    MetricRow(names.INFERENCE_OUTPUT_TOKENS, "Output tokens, reasoning included.", ("agent", "model"), _tokens(1)),
    MetricRow(
        names.INFERENCE_CACHED_TOKENS, "Input tokens read from the provider's cache.", ("agent", "model"), _tokens(2)
    ),
    MetricRow(names.INFERENCE_REASONING_TOKENS, "Output tokens spent on reasoning.", ("agent", "model"), _tokens(3)),
    MetricRow(
        names.MODEL_COST,
        "What model calls cost, in millionths of the price table's currency.",
        ("agent", "model"),
        {ModelCallCompleted: _cost, ModelCallFailed: _cost},
    ),
    MetricRow(
        names.INVOKE_AGENT_DURATION,
        "Time of a run from its start to its end.",
        ("agent", "status"),
        {RunFinished: _run_duration},
        buckets=names.INVOKE_AGENT_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.EXECUTE_TOOL_DURATION,
        "Time of a tool call.",
        ("tool", "outcome"),
        {ToolFinished: _tool_duration},
        buckets=names.INFERENCE_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.SESSIONS_CREATED, "Sessions created.", ("agent",), {SessionCreated: lambda event: ((event.agent,), 1)}
    ),
    MetricRow(
        names.RUNS_ACCEPTED, "Inputs durably accepted.", ("agent",), {RunAccepted: lambda event: ((event.agent,), 1)}
    ),
    MetricRow(
        names.RUNS_FINISHED,
        "Runs that ended.",
        ("status",),
        {RunFinished: lambda event: ((event.status,), 1)},
        initial=tuple((status,) for status in RUN_STATUSES),
    ),
    MetricRow(
        names.RUN_QUEUED,
        "Time from accepting an input to the start of its run.",
        measures={RunStarted: lambda event: ((), event.queued)},
        initial=((),),
        buckets=names.INFERENCE_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.ACTIVATIONS,
        "Activations of sessions in a frame.",
        ("cause",),
        {SessionActivated: lambda event: ((event.cause,), 1)},
        initial=(("ready",), ("resume",), ("takeover",), ("moved",)),
    ),
    MetricRow(
        names.SESSION_CRASHES,
        "Activations whose process died; waiting: while only waiting for a call in flight.",
        ("cause", "waiting"),
        {SessionCrashed: lambda event: ((event.cause, "true" if event.waiting else "false"), 1)},
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
        {ModelCallCompleted: lambda event: (("ok",), 1), ModelCallFailed: lambda event: ((_failure(event),), 1)},
        initial=(("ok",), ("error",), ("aborted",), ("refused",)),
    ),
    MetricRow(
        names.MODEL_RETRY_COUNT,
        "Failed tries within model calls.",
        ("model",),
        {ModelCallCompleted: _retries, ModelCallFailed: _retries},
    ),
    MetricRow(
        names.MODEL_CALLS_REISSUED,
        "Model calls sent again because their gateway died.",
        measures={ModelCallReissued: lambda event: ((), 1)},
        initial=((),),
    ),
    MetricRow(
        names.TOOL_CALLS,
        "Tool calls that have their result.",
        ("tool", "outcome"),
        {ToolFinished: lambda event: ((_tool(event), event.outcome), 1)},
    ),
    MetricRow(
        names.TOOLS_IN_DOUBT,
        "Tool calls whose activation ended after they had started.",
        ("tool", "policy"),
        {ToolInDoubt: lambda event: ((event.tool, event.policy), 1)},
    ),
    MetricRow(
        names.INPUTS_REQUESTED,
        "Tool calls that began to wait for a person.",
        ("kind",),
        {InputRequested: lambda event: ((event.kind,), 1)},
        initial=(("question",), ("approval",), ("in_doubt",)),
    ),
    MetricRow(
        names.INPUTS_RECEIVED,
        "People's answers to tool calls.",
        ("kind", "decision"),
        {InputReceived: lambda event: ((event.kind, event.decision), 1)},
    ),
    MetricRow(
        names.TIMERS_SET,
        "Waits and wakeups that agents and clients asked for.",
        ("kind",),
        {TimerSet: lambda event: ((event.kind,), 1)},
        initial=(("wait",), ("wakeup",)),
    ),
    MetricRow(
        names.TIMERS_FIRED,
        "Waits that were over and wakeups that were due.",
        ("kind",),
        {TimerFired: lambda event: ((event.kind,), 1)},
        initial=(("wait",), ("wakeup",)),
    ),
    MetricRow(
        names.TIMER_LATENESS,
        "Time from when a wait was over or a wakeup was due to when it fired.",
        ("kind",),
        {TimerFired: lambda event: ((event.kind,), event.late)},
        initial=(("wait",), ("wakeup",)),
        buckets=names.LATENESS_BUCKETS,
        unit="seconds",
    ),
    MetricRow(
        names.MEMORY_FAILURES,
        "Calls of memory providers that failed; the runs went on without them.",
        ("what",),
        {MemoryFailed: lambda event: ((event.what,), 1)},
        initial=(("recall",), ("remember",)),
    ),
    MetricRow(
        names.CHILDREN_SPAWNED,
        "Sub-agents created, by the agent that spawned them.",
        ("agent",),
        {ChildSpawned: lambda event: ((event.agent,), 1)},
    ),
    MetricRow(
        names.CHILD_RESTARTS,
        "Tasks of sub-agents that were started again, in another session.",
        measures={ChildRestarted: lambda event: ((), 1)},
        initial=((),),
    ),
    MetricRow(
        names.SESSIONS_MOVED,
        "Sessions that went to another node; forced: a drain's time to wait for their work was over.",
        ("forced",),
        {SessionMoved: lambda event: (("true" if event.forced else "false",), 1)},
        initial=(("false",), ("true",)),
    ),
    MetricRow(
        names.SESSIONS_MIGRATED,
        "Sessions that took on another specification.",
        measures={SessionMigrated: lambda event: ((), 1)},
        initial=((),),
    ),
    MetricRow(
        names.SESSIONS_QUARANTINED,
        "Sessions given up until a person looks at them.",
        ("reason",),
        {SessionQuarantined: lambda event: ((event.rule or "max_restarts",), 1)},
        initial=(("no_progress",), ("max_restarts",)),
    ),
    MetricRow(
        names.CANCEL_REQUESTS,
        "Requests to end a run.",
        measures={CancelRequested: lambda event: ((), 1)},
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
