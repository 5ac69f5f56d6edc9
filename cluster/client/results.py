"""What clients get back: plain frozen data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any

from understudy.messages import Usage
from understudy.prices import money


@dataclass(frozen=True)
class PendingInput:
    """A tool call that waits for a person (`Session.answer`).

    Attributes:
        asked: how often this call has asked by now.
        kind: `question` (the model asks) or `in_doubt` (the call had started when its process died).
        options: answers that are offered; any other is taken as well.
        asked_at: microseconds since 1970 UTC.
    """

    call_id: str
    asked: int
    run_id: str
    kind: str
    prompt: str
    options: tuple[str, ...]
    asked_at: int

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> PendingInput:
        return cls(**{**row, "options": tuple(row["options"] or ())})


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
class RunResult:
    """How a run ended, or what it waits for.

    Attributes:
        text: the final answer; for a run that did not complete, the last thing the agent said.
        output: structured output, when one was asked for.
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
    def from_row(cls, row: dict[str, Any]) -> RunResult:
        usage = Usage.from_wire(row["usage"])
        return cls(
            row["text"] or "", row["output"], row["status"], row["rounds"], usage, row["error"], row["run_id"],
            row["session_id"], _pending(row),
        )  # fmt: skip


@dataclass(frozen=True)
class SessionInfo:
    """A session as the store knows it.

    Attributes:
        name: the agent's.
        status: one of the session statuses; see `SESSION_STATUSES` in `understudy.records`.
        epoch: number of its latest activation.
        actor_pid: the process that holds it; None while it is passive.
        restarts: crashes it came back from.
        tokens_redone: tokens that were paid again because a node service was lost.
        cost: of all its model calls, in the price table's currency; 0 for models without a price.
        created_at, updated_at: microseconds since 1970 UTC.
        tools: tools it is at; told by `tree` only.
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
    def from_row(cls, row: dict[str, Any]) -> SessionInfo:
        names = (
            "kind", "status", "parent_id", "root_id", "depth", "epoch", "seq", "actor_pid", "node_id", "restarts",
            "tokens_used", "tokens_redone", "created_at", "updated_at", "error", "run_id", "round", "call_id",
        )  # fmt: skip
        return cls(
            id=row["session_id"],
            name=row["agent"],
            metadata=row["metadata_json"] or {},
            cost=money(row.get("cost_used", 0)),
            tools=tuple(row.get("tools", ())),
            pending=_pending(row),
            **{name: row[name] for name in names},
        )


def _pending(row: dict[str, Any]) -> tuple[PendingInput, ...]:
    return tuple(PendingInput.from_row(item) for item in row.get("pending", ()))


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

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> BudgetUse:
        return cls(**{field.name: row[field.name] for field in fields(cls)})


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

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> DrainInfo:
        return cls(**{field.name: row[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class ServiceInfo:
    """A process of the cluster.

    Attributes:
        role: `supervisor`, `node`, `gateway`, `frame` or `standby`.
        address: of Ray; of a node service, the URL of its metrics.
    """

    role: str
    pid: int
    node_id: str
    address: str


def to_json(value: Any) -> str:
    """One line of JSON for scripts."""
    return json.dumps(value, ensure_ascii=False, default=str, sort_keys=True)
