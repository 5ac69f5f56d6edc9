"""Tool calls that the session hands over: to a sub-agent, a person or the store."""

from __future__ import annotations

from typing import Any

from understudy.records import Ask, CallState, Spawn

from .asking import REQUEST_USER_INPUT, read_question
from .spawning import spawn_of
from .tools import SPAWN_AGENT, builtin
from .waking import STORE_TOOLS, read_for_store
from .window import Window

READERS = {REQUEST_USER_INPUT: read_question, **dict.fromkeys(STORE_TOOLS, read_for_store)}
"""What the calls of built-in tools ask that others answer: a person, or the store."""


def is_delegated(call: CallState, spec: dict[str, Any] | None) -> bool:
    """Whether the session executes a call by handing it over: to a sub-agent, or (unless it has) to a person or the
    store."""
    if spec is None:
        return False
    return call.tool == SPAWN_AGENT or (call.state == "requested" and builtin(spec) in READERS)


def wanted_by(call: CallState, window: Window) -> Spawn | Ask | str:
    """What a call that is handed over wants; a text that says what is wrong with its arguments."""
    return spawn_of(window, call) if call.tool == SPAWN_AGENT else READERS[call.tool](call)


def wait_for(missing: list[CallState], specs: dict[str, dict[str, Any]]) -> str:
    """What a session waits for whose round lacks these calls: a person first, then a time, then its sub-agents."""
    if any(call.tool != SPAWN_AGENT and builtin(specs[call.tool]) not in STORE_TOOLS for call in missing):
        return "input"
    return "child" if all(call.tool == SPAWN_AGENT for call in missing) else "timer"
