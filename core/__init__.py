"""LLM agents as supervised Ray actors.

This facade is the public API. It loads a name's home when the name is first asked for, so that `import understudy`
costs nothing, and a tool module that a session actor imports brings in neither pydantic nor Ray. It and
`understudy.testing` are the only modules of `core/` that name other folders. Errors that are not here are in
`understudy.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.actors.directives import Ask, Continue, HookContext, Inject, Refuse, Replace, Stop
    from understudy.actors.hooks import hook
    from understudy.actors.providers import MemoryContext, memory_provider
    from understudy.actors.tools import ToolContext, tool
    from understudy.actors.workflow import workflow
    from understudy.actors.workflow_context import Retry, WorkflowContext
    from understudy.cluster.client.client import Cluster
    from understudy.cluster.client.queue_handle import Queue
    from understudy.cluster.client.results import RunResult, ServiceInfo, SessionInfo
    from understudy.cluster.client.run_handle import Run
    from understudy.cluster.client.schedule_handle import Schedule
    from understudy.cluster.client.session_handle import Session
    from understudy.cluster.client.triage_handle import TriageItem
    from understudy.observability.traces import TraceSpan

    from .access import CommandRule, Sandbox, WebPolicy, Worktree
    from .attachments import File, Image
    from .config import Capabilities, Fallback, ModelProfile
    from .errors import (
        ClusterError,
        Conflict,
        DeadlineExceeded,
        InvalidConfiguration,
        InvalidInput,
        InvalidSpec,
        ModelError,
        OutputInvalid,
        RunFailed,
        SessionClosed,
        StepFailed,
        StepTimeout,
        StoreError,
        ToolError,
        UnderstudyError,
        UnknownQueue,
        UnknownRun,
        UnknownSchedule,
        UnknownSession,
        UnknownTriageEntry,
        WorkflowError,
    )
    from .events import Event
    from .mcp_servers import McpServer
    from .messages import Message, ToolCall, Usage
    from .prices import price_table
    from .queues import QueuePlace, Rate
    from .reads import LoopMemory, Note, PendingInput, QueueInfo, RunRecord, ScheduleInfo, TriageEntry, Wakeup
    from .spec import AgentSpec, Budget, Context, Delegation, Memory, RestartPolicy, Supervision, WorkflowLimits

    __version__: str

__all__ = [
    "AgentSpec",
    "Ask",
    "Budget",
    "Capabilities",
    "Cluster",
    "ClusterError",
    "CommandRule",
    "Conflict",
    "Context",
    "Continue",
    "DeadlineExceeded",
    "Delegation",
    "Event",
    "Fallback",
    "File",
    "HookContext",
    "Image",
    "Inject",
    "InvalidConfiguration",
    "InvalidInput",
    "InvalidSpec",
    "LoopMemory",
    "McpServer",
    "Memory",
    "MemoryContext",
    "Message",
    "ModelError",
    "ModelProfile",
    "Note",
    "OutputInvalid",
    "PendingInput",
    "Queue",
    "QueueInfo",
    "QueuePlace",
    "Rate",
    "Refuse",
    "Replace",
    "RestartPolicy",
    "Retry",
    "Run",
    "RunFailed",
    "RunRecord",
    "RunResult",
    "Sandbox",
    "Schedule",
    "ScheduleInfo",
    "ServiceInfo",
    "Session",
    "SessionClosed",
    "SessionInfo",
    "StepFailed",
    "StepTimeout",
    "Stop",
    "StoreError",
    "Supervision",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "TraceSpan",
    "TriageEntry",
    "TriageItem",
    "UnderstudyError",
    "UnknownQueue",
    "UnknownRun",
    "UnknownSchedule",
    "UnknownSession",
    "UnknownTriageEntry",
    "Usage",
    "Wakeup",
    "WebPolicy",
    "WorkflowContext",
    "WorkflowError",
    "WorkflowLimits",
    "Worktree",
    "__version__",
    "hook",
    "memory_provider",
    "price_table",
    "tool",
    "workflow",
]

_HOMES = {
    "AgentSpec": "spec",
    "Ask": "actors.directives",
    "Budget": "spec",
    "Cluster": "cluster.client.client",
    "CommandRule": "access",
    "Context": "spec",
    "Delegation": "spec",
    "Continue": "actors.directives",
    "Event": "events",
    "File": "attachments",
    "HookContext": "actors.directives",
    "Image": "attachments",
    "Inject": "actors.directives",
    "Memory": "spec",
    "MemoryContext": "actors.providers",
    "McpServer": "mcp_servers",
    "Message": "messages",
    "ModelProfile": "config",
    "Capabilities": "config",
    "Fallback": "config",
    "LoopMemory": "reads",
    "Note": "reads",
    "PendingInput": "reads",
    "Queue": "cluster.client.queue_handle",
    "QueueInfo": "reads",
    "QueuePlace": "queues",
    "Rate": "queues",
    "Refuse": "actors.directives",
    "Replace": "actors.directives",
    "RestartPolicy": "spec",
    "Retry": "actors.workflow_context",
    "Supervision": "spec",
    "Run": "cluster.client.run_handle",
    "RunRecord": "reads",
    "RunResult": "cluster.client.results",
    "Sandbox": "access",
    "ServiceInfo": "cluster.client.results",
    "Schedule": "cluster.client.schedule_handle",
    "ScheduleInfo": "reads",
    "Session": "cluster.client.session_handle",
    "Stop": "actors.directives",
    "SessionInfo": "cluster.client.results",
    "ToolCall": "messages",
    "ToolContext": "actors.tools",
    "TraceSpan": "observability.traces",
    "TriageEntry": "reads",
    "TriageItem": "cluster.client.triage_handle",
    "Usage": "messages",
    "Wakeup": "reads",
    "WebPolicy": "access",
    "WorkflowContext": "actors.workflow_context",
    "WorkflowLimits": "spec",
    "Worktree": "access",
    "hook": "actors.hooks",
    "memory_provider": "actors.providers",
    "price_table": "prices",
    "tool": "actors.tools",
    "workflow": "actors.workflow",
}
"""The module each name comes from; names of `__all__` that are not here are errors."""

if not TYPE_CHECKING:  # a module `__getattr__` that type checkers see would let them accept any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: Any
        if name == "__version__":
            from importlib.metadata import version

            value = version("understudy")
        else:
            from importlib import import_module

            value = getattr(import_module(f"understudy.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
