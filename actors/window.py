"""What an activation knows of its session, and the requests built from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from understudy.identifiers import wait_key
from understudy.messages import CUT_OFF, THIS_ROUND, Message
from understudy.protocol import Work
from understudy.records import Ack, ActivationId, CallState, InboxItem, ModelRequest

from .conversation import Conversation

CONTINUE = "Your last message was cut off. Continue exactly where it stopped, without repeating anything."
CONTINUATION = "continuation"
"""The origin of that message."""

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
        self._conversation = Conversation(spec["instructions"])
        self._told = 0  # so many of the messages are in the conversation
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

    def backwards(self, drafted: Sequence[Message] = ()) -> Iterator[Message]:
        """The messages of the current run, the newest first."""
        for message in chain(reversed(drafted), reversed(self.messages)):
            if message.run_id != self.run_id:
                break
            yield message

    def reply(self) -> str:
        """The final answer: the last assistant message, with the pieces before it that were cut off by length."""
        pieces: list[str] = []
        for message in self.backwards():
            if message.role == "assistant":
                if pieces and (message.extra or {}).get("finish_reason") != CUT_OFF:
                    break
                pieces.append(message.text)
            elif message.origin != CONTINUATION:
                break
        return "".join(reversed(pieces))

    def continuations(self, drafted: Sequence[Message] = ()) -> int:
        """How often in a row the reply was continued."""
        count = 0
        for message in self.backwards(drafted):
            if message.origin == CONTINUATION:
                count += 1
            elif message.role != "assistant":
                break
        return count

    def _passing(self, drafted: Sequence[Message], round_number: int) -> list[Message]:
        """The messages that are for the model call of this round only, in order."""
        found: list[Message] = []
        for message in self.backwards(drafted):
            if message.round < round_number - 1:
                break
            if message.visibility == THIS_ROUND and message.round == round_number - 1:
                found.append(message)
        return found[::-1]

    def request(
        self, round_number: int, drafted: Sequence[Message] = (), *, whole: bool = False
    ) -> ModelRequest:  # fmt: skip
        """The model call of a round. What the model is sent is a pure function of the window: the same after any crash.

        Args:
            drafted: messages that are committed with the call.
            whole: with all messages, also those that the gateway was sent before.
        """
        spec = self.spec
        assert self.run_id is not None
        self._conversation.extend(self.messages[self._told :])
        self._told = len(self.messages)
        tools = [
            {"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters")}}
            for tool in spec["tools"]
        ]
        points = {hook["point"] for hook in spec.get("hooks", ())}
        return ModelRequest(
            wait_key=wait_key(self.session_id, self.run_id, round_number),
            profile=spec["profile"],
            model=spec["model"],
            tools=tools,
            parameters=dict(spec["parameters"]),
            deadline=spec["deadline"],
            stall=spec.get("stall", 300.0),
            ends_run=not self.continuations(drafted) and points.isdisjoint(SEES_END),
            **self._conversation.part(
                drafted, self._passing(drafted, round_number), whole=whole or "before_model" in points
            ),
        )


def wanted_reply(request: ModelRequest) -> int:
    """The longest reply that a request wants, in tokens."""
    parameters = request.parameters
    return int(parameters.get("max_completion_tokens") or parameters.get("max_tokens") or OUTPUT_TOKENS)
