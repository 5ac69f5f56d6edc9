"""Tool calls that the session delegates: to a sub-agent, a person or the store."""

from __future__ import annotations

from typing import Any

from understudy.agents import SEND_TO_AGENT, SPAWN_AGENT, START_AGENT
from understudy.records import Ask, CallState, Spawn
from understudy.workflows import CREATE_WORKFLOW, WORKFLOW_STATUS

from .agents import read_message_to_agent
from .approval import as_edited
from .asking import REQUEST_USER_INPUT, read_arguments, read_question
from .execution import presentable
from .jobs import JOBS_TOOLS, read_jobs
from .notebook import NOTEBOOK_TOOLS, read_for_notes
from .recall import RECALL_TOOLS, read_recall
from .spawning import spawn_of
from .tools import builtin
from .waking import STORE_TOOLS, read_for_store
from .window import Window
from .workflow_tools import read_status

READERS = {
    REQUEST_USER_INPUT: read_question,
    **dict.fromkeys(STORE_TOOLS, read_for_store),
    **dict.fromkeys(RECALL_TOOLS, read_recall),
    SEND_TO_AGENT: read_message_to_agent,
    **dict.fromkeys(JOBS_TOOLS, read_jobs),
    WORKFLOW_STATUS: read_status,
}
"""What the calls of built-in tools ask that others answer: a person, or the store. See `read_for_notes` for others."""

HANDED_OVER = {*READERS, *NOTEBOOK_TOOLS}

STARTING = {SPAWN_AGENT, START_AGENT, CREATE_WORKFLOW}
"""Tools whose calls create a session below this one."""


def is_delegated(call: CallState, spec: dict[str, Any] | None) -> bool:
    """Whether the session executes a call by handing it over: to a sub-agent, or (unless it has) to a person or the
    store."""
    if spec is None:
        return False
    kind = builtin(spec)
    if kind == START_AGENT:
        return call.state in ("requested", "approved")
    if kind == CREATE_WORKFLOW:
        return call.state in ("requested", "approved", "started")
    return kind == SPAWN_AGENT or (call.state in ("requested", "approved") and kind in HANDED_OVER)


def wanted_by(call: CallState, spec: dict[str, Any], window: Window) -> Spawn | Ask | str:
    """What a call that is handed over wants; a text that says what is wrong with its arguments."""
    kind = builtin(spec)
    if kind in NOTEBOOK_TOOLS:
        return read_for_notes(call, (window.spec.get("memory") or {}).get("project"), presentable)
    if kind in (SPAWN_AGENT, START_AGENT):
        return spawn_of(window, call, background=kind == START_AGENT)
    if kind == CREATE_WORKFLOW:
        from .workflow_writing import workflow_of  # which loads all that workflows are made of

        return workflow_of(window, call, background=_is_detached(call))
    return READERS[str(kind)](call)


def wait_for(missing: list[CallState], specs: dict[str, dict[str, Any]], asked: set[str]) -> str:
    """What a session waits for whose round lacks these calls: a person first, then a time, then its sub-agents.

    Args:
        asked: calls about which a person is asked.
    """
    kinds = {_kind(call, specs[call.tool]) for call in missing}
    delegated = {*STARTING, *HANDED_OVER}
    if REQUEST_USER_INPUT in kinds or kinds - delegated or any(call.call_id in asked for call in missing):
        return "input"
    return "child" if kinds == {SPAWN_AGENT} else "timer"


def _kind(call: CallState, spec: dict[str, Any]) -> str | None:
    """The built-in tool that a call waits as."""
    kind = builtin(spec)
    return SPAWN_AGENT if kind == CREATE_WORKFLOW and not _is_detached(call) else kind


def _is_detached(call: CallState) -> bool:
    """Whether a call of `create_workflow` does not wait for the workflow."""
    data = read_arguments(as_edited(call))
    return isinstance(data, dict) and data.get("detached") is True
