"""What clients get back, beside what the store itself makes (`understudy.reads`): plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from understudy.messages import Usage
from understudy.prices import money
from understudy.reads import PendingInput, RunRecord, SessionRecord

from .output_schema import as_type


@dataclass(frozen=True)
class RunResult:
    """How a run ended, or what it waits for.

    Attributes:
        text: the final answer; for a run that did not complete, the last thing the agent said.
        output: the answer as the agent's `output_type`, if it has one: an instance where the type is at hand (the
            session came from `spawn`), else plain data. None unless completed.
        status: `completed`, `round_limit`, `budget_exceeded`, `cancelled`, `failed` or `quarantined`; or
            `waiting_for_input`: it is paused, and goes on once `pending` is answered.
        rounds: model calls.
        error: `{"code", "message", ...}` unless completed or paused.
        pending: what it waits for.
    """

    text: str
    output: Any
    status: str
    rounds: int
    usage: Usage
    error: dict[str, Any] | None
    run_id: str
    session_id: str
    pending: tuple[PendingInput, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the run completed."""
        return self.status == "completed"

    @property
    def cost(self) -> Decimal:
        """What its model calls cost, in the price table's currency; 0 for models without a price."""
        return money(self.usage.cost)

    @classmethod
    def of(cls, run: RunRecord, output_type: Any = None) -> RunResult:
        """That of a run that has ended or is paused.

        Raises:
            OutputInvalid: the output is no instance of the type.
        """
        return cls(
            run.text or "", as_type(run.output, output_type, run.session_id), run.status, run.rounds,
            Usage.from_wire(run.usage), run.error, run.run_id, run.session_id, tuple(run.pending or ()),
        )  # fmt: skip


@dataclass(frozen=True)
class SessionInfo:
    """A session as the store knows it.

    Attributes:
        name: the agent's.
        status: one of the session statuses; see `SESSION_STATUSES` in `understudy.records`.
        epoch: number of its latest activation.
        actor_pid: the process that it is at work in; None while it has nothing to do, or waits in no process.
        restarts: crashes it came back from.
        tokens_redone: tokens of model calls that were issued again, since a gateway or a node was lost.
        cost: of all its model calls, in the price table's currency; 0 for models without a price.
        created_at, updated_at: microseconds since 1970 UTC.
        tools: tools it is at; given by `tree` only.
        pending: what it asks, while its status is `waiting_for_input`.
    """

    id: str
    name: str
    kind: str
    status: str
    parent_id: str | None
    root_id: str
    depth: int
    epoch: int
    seq: int
    actor_pid: int | None
    node_id: str
    restarts: int
    tokens_used: int
    tokens_redone: int
    created_at: int
    updated_at: int
    metadata: dict[str, str]
    error: dict[str, Any] | None
    run_id: str | None = None
    round: int = 0
    call_id: str | None = None
    cost: Decimal = Decimal(0)
    tools: tuple[str, ...] = field(default=())
    pending: tuple[PendingInput, ...] = ()

    @classmethod
    def of(cls, session: SessionRecord) -> SessionInfo:
        names = (
            "kind", "status", "parent_id", "root_id", "depth", "epoch", "seq", "actor_pid", "node_id", "restarts",
            "tokens_used", "tokens_redone", "created_at", "updated_at", "error", "run_id", "round", "call_id",
        )  # fmt: skip
        return cls(
            id=session.session_id,
            name=session.agent,
            metadata=session.metadata_json or {},
            cost=money(session.cost_used),
            tools=tuple(session.tools or ()),
            pending=tuple(session.pending or ()),
            **{name: getattr(session, name) for name in names},
        )


@dataclass(frozen=True)
class ServiceInfo:
    """A process of the cluster.

    Attributes:
        role: `supervisor`, `node`, `gateway`, `tool_host`, `frame` or `standby`.
        address: of Ray; of a node service, the URL of its metrics.
    """

    role: str
    pid: int
    node_id: str
    address: str
