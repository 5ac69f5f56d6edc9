"""A session's row, as transactions and node services hold it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from understudy.records import ActivationId, KeptResponse


class ActiveSession(Struct):
    """What a node service must know of a session that it takes over, or gives away. `tables.Session` says what each
    column means."""

    session_id: str
    root_id: str = ""
    placement: str = ""
    incarnation: int = 0
    epoch: int = 0
    node_id: str = ""
    frame_id: str | None = None
    actor_pid: int | None = None
    run_id: str | None = None
    round: int = 0
    wait: str | None = None
    wait_since: int = 0
    wait_holder: str = ""
    cancel_reason: str | None = None
    run_usage: list[Any] | None = None
    deaths: list[Any] | None = None
    updated_at: int = 0

    @property
    def activation(self) -> ActivationId:
        """The one that the session has, or had last."""
        return ActivationId(self.session_id, self.incarnation, self.epoch)


class SessionRow(ActiveSession):
    """All columns of a session but `namespace`, and its specification and metadata: those are large, and seldom
    change."""

    parent_id: str | None = None
    depth: int = 0
    call_id: str | None = None
    parent_run_id: str | None = None
    agent: str = ""
    kind: str = "agent"
    spec_hash: str = ""
    created_at: int = 0
    restart_type: str = "temporary"
    on_parent_end: str = "cancel"
    lifecycle: str = "ephemeral"
    shutdown: int | None = None
    start_order: int = 0
    restart_number: int = 0
    background: int = 0

    status: str = "idle"
    active: int = 0
    closed: int = 0
    error: dict[str, Any] | None = None
    batch_no: int = 0
    seq: int = 0
    inbox_seq: int = 0
    inbox_count: int = 0
    children_open: int = 0
    calls_open: int = 0

    wait_attempt: int = 0
    wait_error: dict[str, Any] | None = None
    answer_key: str = ""
    response_id: str = ""
    response_profile: str = ""
    response_model: str = ""
    answer_ended: int = 0
    cancel_as: dict[str, Any] | None = None
    held: dict[str, Any] | None = None
    group_state: dict[str, Any] | None = None
    trace_id: str = ""
    parent_span_id: str = ""
    run_started_at: int = 0

    stuck: int = 0
    progress: int = 0
    progress_at_death: int = 0
    restarts: int = 0
    task_open: int = 0
    replaced_by: str | None = None
    abandoned: int = 0
    moved: int = 0
    next_spec: dict[str, Any] | None = None
    tokens_used: int = 0
    tokens_redone: int = 0
    first_incarnation: int = 0
    pruned_seq: int = 0
    aborted: int = 0
    redone: int = 0
    accounts: str | None = None
    cost_used: int = 0
    last_span: str = ""
    merged: list[Any] | None = None
    sampled: int | None = None
    ended_at: int = 0
    ended_as: str = ""
    record_seq: int = 0
    queue: str = ""
    queued: int = 0

    @property
    def span_before(self) -> str:
        """`TRACE-SPAN` of its last run, while it is at none."""
        return "" if self.run_id else self.last_span

    @property
    def recorded(self) -> bool | None:
        """Whether the caller whose trace the current run is in records that; None in a trace of the run's own."""
        return None if self.sampled is None else bool(self.sampled)

    @recorded.setter
    def recorded(self, sampled: bool | None) -> None:
        self.sampled = None if sampled is None else int(sampled)

    @property
    def response(self) -> KeptResponse | None:
        """That to the model call that it waits for, or waited for last, if an endpoint is known to keep it."""
        if not self.response_id:
            return None
        return KeptResponse(self.response_id, self.response_profile, self.response_model)

    @response.setter
    def response(self, response: KeptResponse | None) -> None:
        of = response or KeptResponse("", "", "")
        self.response_id, self.response_profile, self.response_model = of.id, of.profile, of.model
