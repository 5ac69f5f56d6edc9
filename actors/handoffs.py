"""Calls by which a model hands the session off to another agent.

Such a call is the last one of its round to be executed, when all others have their results: so one batch has its result
and the change of the agent, and the other calls end under the agent that has made them. It only says that it may be
done (`understudy.handoffs`); the store does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from understudy.handoffs import HANDOFF, LONGEST_REASON, ORIGIN
from understudy.messages import NEVER, Message
from understudy.records import CallState, Handoff

from .asking import read_arguments
from .execution import Outcome
from .tools import builtin
from .window import Window

LATER = "not executed: another handoff of the same turn comes first, and there can be one only"


def is_handoff(spec: dict[str, Any] | None) -> bool:
    """Whether a tool hands off."""
    return spec is not None and builtin(spec) == HANDOFF


def later_handoffs(calls: Iterable[CallState], specs: Mapping[str, dict[str, Any]]) -> dict[str, Outcome]:
    """The results of a round's handoffs but for the first: these are not executed, whatever becomes of that."""
    found = sorted((call for call in calls if is_handoff(specs.get(call.tool))), key=lambda call: call.index)
    return {call.call_id: Outcome("refused", LATER) for call in found[1:]}


def handed_off(spec: dict[str, Any], call: CallState) -> Outcome:
    """The result of a call that hands off."""
    data = read_arguments(call)
    if isinstance(data, str):
        return Outcome("invalid", data)
    reason = data.get("reason")
    if reason is not None and not isinstance(reason, str):
        return Outcome("invalid", 'the argument "reason" must be a text.')
    return Outcome("ok", f"handed off: {spec['source']['agent']} goes on from here")


def handoff_of(
    window: Window, calls: Sequence[CallState], outcomes: Mapping[str, Outcome]
) -> tuple[Handoff, list[Message]] | None:
    """The handoff that follows from a round whose calls have these results, and its records; None if none does."""
    for call in sorted(calls, key=lambda call: call.index):
        tool = window.tools.get(call.tool)
        if tool is None or not is_handoff(tool) or outcomes[call.call_id].outcome != "ok":
            continue
        agent = tool["source"]["agent"]
        data = read_arguments(replace(call, arguments=call.edited) if call.edited is not None else call)
        reason = str((data if isinstance(data, dict) else {}).get("reason") or "")
        extra = {"from": window.spec["name"], "to": agent, "reason": reason[:LONGEST_REASON]}
        record = Message(
            "system", f"the session goes on under the agent {agent}", origin=ORIGIN, visibility=NEVER, extra=extra
        )
        return Handoff(call.call_id, reason[:LONGEST_REASON]), [record, *_forgotten(window, agent)]
    return None


def _forgotten(window: Window, agent: str) -> list[Message]:
    """The record that what an endpoint has shown of its model, window and tokens, is not known of another one."""
    view, other = window.view(), window.spec.get("handoffs", {}).get(agent, {})
    same = all(other.get(name) == window.spec[name] for name in ("model", "profile"))
    return [replace(view, window=0, per_byte=0.0).record()] if (view.window or view.per_byte) and not same else []
