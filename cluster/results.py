"""What clients get back: plain frozen data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from understudy.messages import Usage


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        text: the final answer; for a run that did not complete, the last thing the agent said.
        output: structured output, when one was asked for.
        status: `completed`, `round_limit`, `budget_exceeded`, `cancelled`, `failed` or `quarantined`.
        rounds: model calls.
        error: `{"code", "message", ...}` unless completed.
    """

    text: str
    output: Any
    status: str
    rounds: int
    usage: Usage
    error: dict[str, Any] | None
    run_id: str
    session_id: str

    @property
    def ok(self) -> bool:
        """Whether the run completed."""
        return self.status == "completed"

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> RunResult:
        usage = Usage.from_wire(row["usage"])
        return cls(
            row["text"] or "", row["output"], row["status"], row["rounds"], usage, row["error"], row["run_id"],
            row["session_id"],
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
        created_at, updated_at: microseconds since 1970 UTC.
        tools: tools it is at; told by `tree` only.
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
    tools: tuple[str, ...] = field(default=())

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
            tools=tuple(row.get("tools", ())),
            **{name: row[name] for name in names},
        )


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
        role: `supervisor`, `node`, `frame` or `standby`.
        address: of Ray; of a node service, the URL of its metrics.
    """

    role: str
    pid: int
    node_id: str
    address: str


def to_json(value: Any) -> str:
    """One line of JSON for scripts."""
    return json.dumps(value, ensure_ascii=False, default=str, sort_keys=True)
