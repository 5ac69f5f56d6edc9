"""What an activation knows of its session, and the requests built from it."""

from __future__ import annotations

import json
from typing import Any

from understudy.identifiers import wait_key
from understudy.messages import CUT_OFF, INTERRUPTED, Message
from understudy.protocol import Work
from understudy.records import Ack, ActivationId, CallState, InboxItem, ModelRequest

CONTINUE = "Your last message was cut off. Continue exactly where it stopped, without repeating anything."
SEES_END = ("after_model", "run_end")
"""Hooks at these points see a run's last answer before the run ends."""

OUTPUT_TOKENS = 4096
"""How long a reply may be when the specification sets no limit of its own; used only where a budget is set."""


class Window:
    """A session as its frame sees it: messages kept from activation to activation, the rest told afresh each time.

    Attributes:
        incarnation: of the session: another one of the same id has nothing to do with it.
        budgeted: its model calls are charged to accounts, so they must say what they want.
        redone: what is done next may have been done before, by a process that died or was cut off.
    """

    def __init__(self, session_id: str, spec: dict[str, Any]) -> None:
        self.session_id = session_id
        self.spec = spec
        self.messages: list[Message] = []
        self.known_seq = 0
        self.incarnation = 0
        self.epoch = 0
        self.batch_no = 0
        self.calls: list[CallState] = []
        self.run_id: str | None = None
        self.round = 0
        self.trace_id = ""
        self.wait: str | None = None
        self.model_error: dict[str, Any] | None = None
        self.cancel: str | None = None
        self.inbox: list[InboxItem] = []
        self.budgeted = False
        self.depth = 0
        self.redone = False

    @property
    def activation(self) -> ActivationId:
        """What the session has this frame for."""
        return ActivationId(self.session_id, self.incarnation, self.epoch)

    def apply(self, work: Work) -> bool:
        """Take in what the node service says; False if earlier messages are missing here."""
        if work.after_seq > self.known_seq:
            return False
        self.messages += [message for message in work.messages if message.seq > self.known_seq]
        self.known_seq = max(self.known_seq, work.seq)
        self.incarnation, self.epoch, self.batch_no = work.incarnation, work.epoch, work.batch_no
        self.calls, self.inbox = list(work.calls), list(work.inbox)
        self.run_id, self.round, self.trace_id = work.run_id, work.round, work.trace_id
        self.wait, self.model_error, self.cancel = work.wait, work.model_error, work.cancel
        self.depth, self.budgeted, self.redone = work.depth, work.budgeted, work.redone
        return True

    def acknowledge(self, ack: Ack) -> None:
        """Take in what a commit returned."""
        self.cancel, self.inbox = ack.cancel, list(ack.inbox)

    def run_messages(self) -> list[Message]:
        """The messages of the current run, oldest first."""
        found = []
        for message in reversed(self.messages):
            if message.run_id != self.run_id:
                break
            found.append(message)
        return found[::-1]

    def reply(self) -> str:
        """The final answer: the last assistant message, with the pieces before it that were cut off by length."""
        pieces: list[str] = []
        for message in reversed(self.run_messages()):
            if message.role == "assistant":
                if pieces and (message.extra or {}).get("finish_reason") != CUT_OFF:
                    break
                pieces.append(message.text)
            elif message.name != "continuation":
                break
        return "".join(reversed(pieces))

    def continuations(self) -> int:
        """How often in a row the reply was continued."""
        count = 0
        for message in reversed(self.run_messages()):
            if message.name == "continuation":
                count += 1
            elif message.role != "assistant":
                break
        return count

    def request(self, round_number: int) -> ModelRequest:
        """The model call of a round. A pure function of the window: the same after any crash."""
        spec = self.spec
        messages = to_protocol(spec["instructions"], self.messages)
        tools = [
            {"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters")}}
            for tool in spec["tools"]
        ]
        assert self.run_id is not None
        return ModelRequest(
            wait_key=wait_key(self.session_id, self.run_id, round_number),
            profile=spec["profile"],
            model=spec["model"],
            messages=messages,
            tools=tools,
            parameters=dict(spec["parameters"]),
            deadline=spec["deadline"],
            stall=spec.get("stall", 300.0),
            ends_run=not self.continuations() and all(hook["point"] not in SEES_END for hook in spec.get("hooks", ())),
        )


def wanted_reply(request: ModelRequest) -> int:
    """The longest reply that a request wants, in tokens."""
    parameters = request.parameters
    return int(parameters.get("max_completion_tokens") or parameters.get("max_tokens") or OUTPUT_TOKENS)


def to_protocol(instructions: str, messages: list[Message]) -> list[dict[str, Any]]:
    """The conversation in the OpenAI chat completions form.

    Endpoints repeat their tool call ids and refuse a call without a result: a repeated id is made unique, and a call
    that never got a result gets one that says so. History therefore never makes a session unusable.
    """
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    seen: set[str] = set()
    open_calls: dict[str, str] = {}

    def settle() -> None:
        for provider_id in open_calls.values():
            found.append({"role": "tool", "tool_call_id": provider_id, "content": INTERRUPTED})
        open_calls.clear()

    for message in messages:
        if message.role == "tool":
            provider_id = open_calls.pop(message.tool_call_id or "", None)
            if provider_id is not None:
                found.append({"role": "tool", "tool_call_id": provider_id, "content": message.content or ""})
            continue
        settle()
        if message.role != "assistant":
            found.append({"role": message.role, "content": message.content})
            continue
        wire: dict[str, Any] = {"role": "assistant", "content": message.content}
        provider = dict((message.extra or {}).get("provider") or {})
        call_extras = provider.pop("tool_calls", None) or [{}] * len(message.tool_calls)
        wire.update(provider)
        calls: list[dict[str, Any]] = []
        for call, call_extra in zip(message.tool_calls, call_extras, strict=False):
            provider_id = call.provider_id or call.call_id
            if provider_id in seen:
                provider_id = f"{provider_id}_{message.seq}_{len(calls)}"
            seen.add(provider_id)
            open_calls[call.call_id] = provider_id
            function = {"name": call.name, "arguments": readable(call.arguments)}
            calls.append({**call_extra, "id": provider_id, "type": "function", "function": function})
        if calls:
            wire["tool_calls"] = calls
        elif not wire["content"]:
            wire["content"] = ""
        found.append(wire)
    settle()
    return found


def readable(arguments: str) -> str:
    """The arguments if they are JSON, else a JSON object that quotes them: endpoints refuse unreadable history."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return json.dumps({"unreadable": arguments})
    return arguments
