"""What is read of a store, for tests that have none."""

from __future__ import annotations

from typing import Any

from understudy.reads import RunRecord, SessionAtWork


def session_record(session_id: str = "s", **more: Any) -> SessionAtWork:
    """A session at work, alone in its tree."""
    row: dict[str, Any] = {
        "session_id": session_id, "agent": "agent", "kind": "agent", "status": "running", "parent_id": None,
        "root_id": session_id, "depth": 0, "call_id": None, "epoch": 1, "seq": 0, "actor_pid": 17, "frame_id": "f",
        "node_id": "node" * 8, "restarts": 0, "tokens_used": 0, "tokens_redone": 0, "cost_used": 0, "created_at": 1,
        "updated_at": 1_000_000, "metadata_json": None, "error": None, "run_id": None, "round": 1, "closed": 0,
        "active": 1, "wait": None, "wait_attempt": 0, "placement": "", "wait_since": 0, "stuck": 0,
        "cancel_reason": None,
    }  # fmt: skip
    return SessionAtWork(**{**row, **more})


def run_record(session_id: str = "s", run_id: str = "r", **more: Any) -> RunRecord:
    """A run that has completed."""
    row: dict[str, Any] = {
        "namespace": "tests", "session_id": session_id, "run_id": run_id, "digest": "", "content": "go",
        "source": "client", "status": "completed", "text": "done", "output": None, "error": None, "rounds": 1,
        "usage": None, "trace_id": "", "parent_span_id": "", "cancel_requested": None, "accepted_at": 1,
        "started_at": 2, "finished_at": 3, "request_id": "",
    }  # fmt: skip
    return RunRecord(**{**row, **more})
