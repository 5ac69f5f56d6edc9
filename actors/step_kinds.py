"""What a workflow's steps are to its session: calls of tools, sub-agents, questions and waits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from understudy.approvals import QUESTION
from understudy.approvals import result_of as answered
from understudy.errors import InvalidSpec
from understudy.identifiers import child_identifier, digest
from understudy.json_text import from_json, to_json
from understudy.messages import Message, ToolCall
from understudy.records import Ask, CallState, InboxItem, Spawn, child_text
from understudy.wakeups import WAIT, microseconds
from understudy.windows import known_window
from understudy.workflows import (
    ASK_STEP,
    CHILD_STEPS,
    EVENT_STEP,
    MODEL_AGENT,
    ORIGIN,
    SLEEP_STEP,
    TIMEOUT_STEP,
    TIMERS,
    WORKFLOW_STEP,
    step_identifier,
)
from understudy.worktrees import for_child

from .awaited import Record, Wanted
from .code import import_reference
from .execution import Outcome, now
from .output_types import output_of_type
from .tools import describe
from .window import Window
from .workflow_context import ChildWanted, StoreWanted, ToolWanted

OUTPUT_MODE, OUTPUT_RETRIES = "auto", 2
"""How a step's answer is had as a type that the step names (`AgentSpec.output_mode`, `output_retries`)."""

NOBODY = "nobody answered in time"


@dataclass(frozen=True)
class HandedOver:
    """A step that is not done here: what the next commit asks for, and the state of its call then."""

    state: CallState
    spawn: Spawn | None = None
    ask: Ask | None = None


class Steps:
    """The steps of a workflow, by the specification of its session."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._tools: dict[str, dict[str, Any]] = {}

    def asking(self, calls: list[CallState]) -> Message:
        """The message that asks for calls, as a model's answer would."""
        asked = tuple(ToolCall(call.call_id, call.tool, call.arguments) for call in calls)
        return Message("assistant", None, tool_calls=asked, origin=ORIGIN)

    def tool(self, step: ToolWanted) -> dict[str, Any] | Outcome:
        """The specification of a step's tool; the outcome of its call if there is none."""
        known = self._window.tools.get(step.tool) or self._tools.get(step.tool)
        if known is not None:
            source = known["source"].get("import")
            given = import_reference(step.item) if step.item is not None else None
            if source is None or given is None or source == given:
                return known
            return Outcome("unknown_tool", f"the workflow's tool {step.tool!r} is {source}, and this is {given}")
        if step.item is None:
            names = ", ".join(sorted(self._window.tools)) or "none"
            return Outcome("unknown_tool", f"there is no tool named {step.tool!r} in @workflow(tools=…): {names}")
        try:
            (found,), _ = describe(step.item, pickle=None)
        except InvalidSpec as error:
            return Outcome("unknown_tool", f"{error.message} Or name it in @workflow(tools=…).")
        self._tools[step.tool] = found
        return found

    def handed_over(self, call: CallState, step: Wanted, record: Record) -> HandedOver | Outcome:
        """What a step that is not done here asks for; the outcome of its call if that can't be.

        Args:
            record: of the steps before it.
        """
        if isinstance(step, ChildWanted):
            spec = self._child(step)
            if isinstance(spec, str):
                return Outcome("invalid", spec)
            child = child_identifier(self._window.session_id, call.call_id)
            started = CallState(
                call.call_id, "started", call.tool, call.arguments, index=call.index, child_id=child, executions=1
            )
            before = _before(step, record) if step.conversation else None
            continues = step_identifier(self._window.run_id or "", before) if before is not None else ""
            return HandedOver(started, spawn=Spawn(call.call_id, child, spec, step.task, continues=continues))
        assert isinstance(step, StoreWanted)
        return _asked(call, step)

    def _child(self, step: ChildWanted) -> dict[str, Any] | str:
        """The specification of the session that does a step; a text that says why there is none."""
        spec = self._window.spec
        own = step.tool == WORKFLOW_STEP and step.agent == spec["name"]
        template = spec if own else spec["agents"].get(step.agent)
        if template is None and step.agent == MODEL_AGENT:
            return "no model is known to this workflow: there was no key where it was started"
        if template is None:
            return f"{step.agent!r} is not known to the workflow: name it in @workflow(agents=…) or (workflows=…)"
        if spec["max_depth"] < 1:
            return f"no session may be created at depth {self._window.depth}: that is as deep as this tree may grow"
        changes = dict(step.changes or {})
        wanted = changes.pop("output_type", None)
        made = {**template, **changes, "max_depth": min(template["max_depth"], spec["max_depth"] - 1)}
        if wanted is not None:
            output = output_of_type(wanted, mode=OUTPUT_MODE, retries=OUTPUT_RETRIES)
            if isinstance(output, list):
                return f"the output type can't be used: {'; '.join(output)}"
            made["output"] = output
        if "model" in changes and changes["model"] != template["model"]:
            made["context"] = {**(template.get("context") or {}), "window": known_window(changes["model"])}
        if changes or wanted is not None:
            made["hash"] = digest(template["hash"], json.dumps(changes, sort_keys=True), to_json(made.get("output")))
        return for_child(made, spec, self._window.incarnation, copy=own)

    def is_rendered_elsewhere(self, tool: str) -> bool:
        """Whether what a tool returns is rendered by another process, to whom a text and JSON are one."""
        spec = self._window.tools.get(tool) or self._tools.get(tool) or {}
        return bool(spec.get("sandbox") or spec.get("task")) or "mcp" in spec.get("source", {})

    def wait_for(self, calls: Iterable[CallState]) -> str:
        """What a session waits for with these steps open: a person or a signal first, then a time, then sub-agents."""
        tools = {call.tool for call in calls} - {TIMEOUT_STEP}
        if EVENT_STEP in tools or ASK_STEP in tools or tools - CHILD_STEPS - {SLEEP_STEP}:
            return "input"
        return "timer" if SLEEP_STEP in tools else "child"


def _before(step: ChildWanted, record: Record) -> str | None:
    """The path of the step whose conversation an agent goes on with; None if there is none."""
    for path, result in reversed(record.results):
        tool, arguments = record.asked[path]
        said = from_json(arguments) if tool == step.tool and result.outcome == "ok" else {}
        if (said.get("agent"), said.get("conversation")) == (step.agent, step.conversation):
            return path
    return None


def result_of(call: CallState, item: InboxItem) -> Outcome:
    """What an inbox row makes of a step that was handed over."""
    payload = item.payload
    started = payload.get("since") or call.updated_at or now()
    duration = max(0, now() - started)
    if item.kind == "answer":
        found = answered(payload)
        outcome, text = found if found is not None else ("error", "it can't be run again")
        return Outcome(outcome, text if call.tool not in TIMERS or outcome != "ok" else "null", duration, started)
    if payload["status"] != "completed":
        return Outcome("error", child_text(payload), duration, started)
    output = payload.get("output")
    return Outcome("ok", to_json(output if output is not None else payload["text"] or ""), duration, started)


def _asked(call: CallState, step: StoreWanted) -> HandedOver:
    state = "asked" if step.tool == ASK_STEP else "waiting"
    waiting = CallState(call.call_id, state, call.tool, call.arguments, index=call.index)
    if step.tool == ASK_STEP:
        said = {"decision": "timeout", "text": NOBODY}
        if step.default is not None:
            said = {"decision": "ok", "text": step.default}
        timed: dict[str, Any] = (
            {"timeout": microseconds(step.seconds), "default": said} if step.seconds is not None else {}
        )
        return HandedOver(waiting, ask=Ask(call.call_id, QUESTION, step.prompt, step.options, **timed))
    arguments: dict[str, Any] = {"seconds": step.seconds, "until": step.due_at}
    if step.tool == EVENT_STEP:
        arguments = {"name": step.name, "seconds": step.seconds}
    kind = WAIT if step.tool in TIMERS else EVENT_STEP
    return HandedOver(waiting, ask=Ask(call.call_id, kind, "", executions=1, arguments=arguments))
