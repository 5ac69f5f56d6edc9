"""What clients of the Model Context Protocol receive while a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.events import (
    AgentHandedOff,
    ChildFinished,
    ChildSpawned,
    Event,
    InputRequested,
    ModelCallCompleted,
    ModelCallFailed,
    RunStarted,
    SessionActivated,
    SessionCrashed,
    ToolFinished,
    ToolProgress,
)

TEXTS: dict[type[Event], Callable[[Any], str | None]] = {
    RunStarted: lambda _: "the run has begun",
    ModelCallCompleted: lambda event: f"the model calls tools: {event.tool_calls}" if event.tool_calls else None,
    ModelCallFailed: lambda event: f"a model call failed: {event.error_message or event.error_code}",
    ToolProgress: lambda event: " ".join(
        filter(None, (f"{event.tool}:", "" if event.fraction is None else f"{event.fraction:.0%}", event.text))
    ),
    ToolFinished: lambda event: f"{event.tool}: {event.outcome}",
    ChildSpawned: lambda event: f"the sub-agent {event.child_agent} has begun",
    ChildFinished: lambda event: f"a sub-agent has ended: {event.status}",
    AgentHandedOff: lambda event: f"{event.from_agent} hands off to {event.to_agent}",
    InputRequested: lambda _: "it asks a person",
    SessionCrashed: lambda event: f"the agent's process is gone ({event.cause})",
    SessionActivated: lambda event: "the session was restored" if event.cause == "resume" else None,
}


def described(event: Event) -> str | None:
    """What is said of an event; None for nothing."""
    tell = TEXTS.get(type(event))
    return tell(event) if tell is not None else None
