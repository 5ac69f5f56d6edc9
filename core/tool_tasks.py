"""Tool calls that are executed in processes of their own, wherever the cluster has what they need.

A session actor imports this module, which must stay light.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from .events import CustomEvent, ToolProgress

Report = ToolProgress | CustomEvent
"""What a tool reports while it runs."""

Reporting = Callable[[list[Report]], None]
"""Is given what a tool reports, in order."""

ReadBlob = Callable[[str], Awaitable[bytes]]
"""Reads code, and the definitions of placements, by their hash."""


class ToolTask(msgspec.Struct, frozen=True):
    """A tool call as such a process is given it.

    Attributes:
        attempt: names one start of it: a call that arrives twice starts it once. Empty to start nothing, but to have
            the result of what was started before.
        tool: its specification; `tool["task"]` has the resources, by Ray's names.
        arguments: JSON text.
        timeout: seconds, from when the function begins.
        placement: of its session, whose code and packages it has.
        web: what it may fetch of the web, compiled; None for nothing.
    """

    session_id: str
    run_id: str
    round: int
    call_id: str
    epoch: int
    agent: str
    attempt: str
    tool: dict[str, Any]
    arguments: str
    timeout: float
    placement: str = ""
    workspace: str | None = None
    traceparent: str = ""
    web: dict[str, Any] | None = None


class TaskResult(msgspec.Struct, frozen=True):
    """How a tool call ended there: see `understudy.actors.execution.Outcome`."""

    outcome: str
    content: str
    duration: int = 0
    started_at: int = 0
    attachments: list[dict[str, Any]] = []


class TaskNews(msgspec.Struct, frozen=True):
    """What is new of such a call.

    Attributes:
        reports: in order.
        result: how it ended; None while it goes on.
        last: number of the last report, as the node service counts the call's; 0 if it has none.
    """

    reports: list[Report] = []
    result: TaskResult | None = None
    last: int = 0
