"""Calls that need a person's approval: which they are, what is asked, and what was decided before for the session.

A tool needs it by its specification (`approve`), a call because a hook says so (`Ask`). An approval is in the call's
state (`approved`): such a call is executed, by whichever process, and asked about no more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from dataclasses import replace as replace_record
from typing import Any

from msgspec.structs import replace

from understudy.approvals import (
    APPROVAL,
    APPROVE,
    REJECT,
    Remembered,
    arguments_problem,
    rejection,
    remembered,
)
from understudy.commands import START_COMMAND
from understudy.confinement import confinement_of
from understudy.records import Ask, CallState
from understudy.wakeups import microseconds

from .asking import REQUEST_USER_INPUT, shown
from .command_rules import judge
from .execution import Outcome
from .window import Window

SHELL_TOOLS = ("bash", START_COMMAND)
"""The built-in tools whose commands have rules."""


@dataclass(frozen=True)
class Permitted:
    """A call that no hook refuses.

    Attributes:
        call: as it shall be executed.
        reasons: why hooks want a person to approve it.
    """

    call: CallState
    reasons: tuple[str, ...] = ()


def decided(window: Window, call: CallState) -> Remembered | None:
    """What a person said earlier of such calls, for the whole session."""
    return remembered(window.decisions, call.tool, call.arguments)


def is_asked_first(window: Window, call: CallState, spec: dict[str, Any]) -> bool:
    """Whether a call's tool needs an approval that it does not have: nothing of it is executed in this activation."""
    if call.state != "requested" or not spec.get("approve") or _is_malformed(call.arguments):
        return False
    found = decided(window, call)
    return found is None or found.decision != APPROVE


def by_rules(window: Window, spec: dict[str, Any], permitted: Permitted) -> Permitted | Outcome:
    """What the agent's rules for commands say of a call that hooks permit; its outcome if it is refused."""
    rules = confinement_of(window.spec).rules if spec["source"].get("builtin") in SHELL_TOOLS else ()
    rule = judge(_command(permitted.call.arguments), rules)
    if rule is None:
        return permitted
    if rule.action == "ask":
        return replace_record(permitted, reasons=(*permitted.reasons, f"The rule for {rule.command!r} asks"))
    return Outcome("refused", f"not executed: the agent's rules deny commands like {rule.command!r}")


def _command(arguments: str) -> str:
    """The command that a call is to execute; empty if there is none, and the call will not be executed."""
    try:
        found = json.loads(arguments)["command"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def permit(window: Window, call: CallState, spec: dict[str, Any], permitted: Permitted) -> CallState | Outcome | Ask:
    """The call as it shall be executed, the outcome of one that a person rejects, or what a person is asked.

    Args:
        call: as the model wrote it.
        permitted: as the hooks left it.
    """
    if call.state != "requested" or not (spec.get("approve") or permitted.reasons):
        return permitted.call
    if _is_malformed(permitted.call.arguments):
        return permitted.call
    found = decided(window, call)
    if found is not None and found.decision == APPROVE:
        return permitted.call
    if found is not None:
        return Outcome("refused", rejection(found.text))
    because = f" {'; '.join(permitted.reasons)}." if permitted.reasons else ""
    prompt = f"The agent wants to execute {call.tool} with {shown(permitted.call.arguments)}.{because} May it?"
    return with_time_out(window, Ask(call.call_id, APPROVAL, prompt, (), call.executions))


def _is_malformed(arguments: str) -> bool:
    """Whether these arguments are no JSON: the call will not be executed, and nobody is asked about it."""
    try:
        json.loads(arguments or "{}")
    except RecursionError:  # how deep is too deep is not the same everywhere
        return False
    except ValueError:
        return bool(arguments.strip())
    return False


def with_time_out(window: Window, asked: Ask) -> Ask:
    """The question with what is its answer if nobody gives one in time."""
    of_approval = asked.kind == APPROVAL
    seconds = window.spec.get("approve_timeout" if of_approval else "answer_timeout")
    if seconds is None:
        return asked
    nobody = f"nobody answered within {seconds:g} s"
    text = window.spec.get("answer_default")
    if of_approval:
        approves = window.spec.get("approve_default") == APPROVE
        default = {"decision": APPROVE, "text": ""} if approves else {"decision": REJECT, "text": nobody}
    elif asked.form is not None and (text is None or arguments_problem(text, asked.form) is not None):
        default = {"decision": "aborted", "text": nobody}  # nobody has declined it
    else:
        default = {"decision": "error", "text": nobody} if text is None else {"decision": "ok", "text": text}
    return replace(asked, timeout=microseconds(seconds), default=default)


def can_be_approved(tool: str | None) -> bool:
    """Whether a built-in tool's calls can need approval: not those by which a person is asked anyway."""
    return tool != REQUEST_USER_INPUT


def as_edited(call: CallState) -> CallState:
    """The call with the arguments that a person gave it."""
    return replace(call, arguments=call.edited) if call.edited is not None else call


def with_edit(edited: str, content: str) -> str:
    """The result of a call whose model wrote other arguments than those that it was executed with."""
    return f"[a person approved this call with other arguments: {shown(edited)}]\n{content}"
