"""What an activation knows of its session, and the requests built from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import structs

from understudy.approvals import APPROVAL
from understudy.errors import ContextOverflow
from understudy.handoffs import ORIGIN as HANDED_OFF
from understudy.identifiers import wait_key
from understudy.manifest import is_guarded
from understudy.messages import ALWAYS, CUT_OFF, FOLD, THIS_ROUND, Message
from understudy.protocol import Work
from understudy.rates import NORMAL
from understudy.recall import READ_MESSAGE
from understudy.records import Ack, ActivationId, CallState, InboxItem, ModelRequest
from understudy.tool_hosting import ORIGIN as MCP
from understudy.worktrees import placed

from .context import (
    FOLD_ANSWER,
    FOLD_REQUEST,
    Measure,
    Policy,
    Trouble,
    View,
)
from .conversation import Conversation
from .skills import catalogue
from .toolbox import Toolbox
from .typed_output import ORIGIN as OF_OUTPUT
from .typed_output import TypedOutput
from .web_rules import WebRules

CONTINUE = "Your last message was cut off. Continue exactly where it stopped, without repeating anything."
CONTINUATION = "continuation"
"""The origin of that message."""

REQUEST = "request"
"""The origin of a record of what is replaced in the model call of its round: `model`, `parameters`, `tools`."""

SEES_END = ("after_model", "run_end")
"""Hooks at these points see a run's last answer before the run ends."""

FOLDING = frozenset({FOLD, FOLD_REQUEST, FOLD_ANSWER})

DECIDING = frozenset({APPROVAL, HANDED_OFF})
"""Origins of the records that say what a person decided for the session, and under which agent."""

OUTPUT_TOKENS = 4096
"""How long a reply may be when the specification sets no limit of its own; used only where a budget is set."""


class Window:
    """A session as its frame sees it: messages kept from activation to activation, the rest received each time.

    Attributes:
        incarnation: of the session: with another one this window is not the session's any more.
        listed: those of the messages that say what the agent's MCP servers offer (`toolbox`).
        decisions: those of the messages that say what a person decided for the session (`understudy.approvals`).
        budgeted: its model calls are charged to accounts, so they must say what they want.
        redone: what is done next may have been done before, by a process that died or was cut off.
        interrupted: what the run is at does not go on: a steer says so that the model was not sent yet.
        typed: what answers must be; None for an agent without an output schema.
        web: what its tools may fetch of the web; None for nothing.
        workflow: the code of a workflow, where this process has it (`workflow_session.Live`).
        is_whole: no message was let go of.
    """

    def __init__(self, session_id: str, spec: dict[str, Any]) -> None:
        self.session_id = session_id
        self.spec = spec = placed(spec, session_id)
        self.messages: list[Message] = []
        self.policy = msgspec.convert(spec.get("context") or {}, Policy)
        self.recall = any(tool["source"].get("builtin") == READ_MESSAGE for tool in spec.get("tools", ()))
        self.listed: list[Message] = []
        self._toolbox = Toolbox(spec)
        self.typed = TypedOutput(spec) if "output" in spec else None
        self.web = msgspec.convert(spec["web"], WebRules) if "web" in spec else None
        self._conversation = self._begun(View(), self._toolbox)
        self._offered = self._toolbox.size
        self._appended = 0  # so many of the messages are in the conversation
        self._folds: list[Message] = []  # records, requests and answers, as they are committed
        self.decisions: list[Message] = []
        self.known_seq = 0
        self.incarnation = 0
        self.epoch = 0
        self.batch_no = 0
        self.calls: list[CallState] = []
        self.run_id: str | None = None
        self.round = 0
        self.trace_id = ""
        self.sampled: bool | None = None
        self.wait: str | None = None
        self.model_error: dict[str, Any] | None = None
        self.cancel: str | None = None
        self.inbox: list[InboxItem] = []
        self.budgeted = False
        self.depth = 0
        self.redone = False
        self.interrupted = False
        self.workflow: Any = None
        self.is_whole = True

    @property
    def tools(self) -> dict[str, dict[str, Any]]:
        """Those of the session's agent, by name."""
        return self._toolbox.by_name

    def _tools(self, drafted: Sequence[Message]) -> Toolbox:
        """The tools, once these messages are committed as well."""
        listed = [message for message in drafted if message.origin == MCP]
        return Toolbox(self.spec, [*self.listed, *listed]) if listed else self._toolbox

    @property
    def activation(self) -> ActivationId:
        """What the session has this frame for."""
        return ActivationId(self.session_id, self.incarnation, self.epoch)

    def apply(self, work: Work) -> bool:
        """Take in what the node service says; False if earlier messages are missing here."""
        if work.after_seq > max(self.known_seq, work.needless):
            return False
        new = [message for message in work.messages if message.seq > self.known_seq]
        self.messages += new
        self._folds += [message for message in new if message.origin in FOLDING]
        self.decisions += [message for message in new if message.origin in DECIDING]
        listed = [message for message in new if message.origin == MCP]
        if listed:
            self.listed += listed
            self._toolbox = Toolbox(self.spec, self.listed)
        if self.typed is not None:
            self.typed.extend(new)
        self.known_seq = max(self.known_seq, work.seq)
        self.incarnation, self.epoch, self.batch_no = work.incarnation, work.epoch, work.batch_no
        self.calls, self.inbox = list(work.calls), list(work.inbox)
        self.run_id, self.round = work.run_id, work.round
        self.trace_id, self.sampled = work.trace_id, work.sampled
        self.wait, self.model_error, self.cancel = work.wait, work.model_error, work.cancel
        self.depth, self.budgeted, self.redone = work.depth, work.budgeted, work.redone
        self.interrupted = any(item.interrupts for item in self.inbox)
        return True

    def forget_messages(self) -> None:
        """Let go of the messages, in the knowledge of what they said: what comes later is appended as before."""
        self.messages, self._appended, self.is_whole = [], 0, False

    def acknowledge(self, ack: Ack) -> None:
        """Take in what a commit returned."""
        self.cancel, self.inbox = ack.cancel, list(ack.inbox)
        self.interrupted = self.interrupted or any(item.interrupts for item in self.inbox)

    def backwards(self, drafted: Sequence[Message] = ()) -> Iterator[Message]:
        """The messages of the current run, the newest first."""
        for message in chain(reversed(drafted), reversed(self.messages)):
            if message.run_id != self.run_id:
                break
            yield message

    def reply(self) -> str:
        """The final answer: the last assistant message, with the pieces before it that were cut off by length."""
        pieces = [message.text for message in self._pieces() if message.role == "assistant"]
        return "".join(reversed(pieces))

    def continuations(self, drafted: Sequence[Message] = (), *, coming: bool = False) -> int:
        """How often in a row the reply was continued; or the one that is to come."""
        return sum(message.origin == CONTINUATION for message in self._pieces(drafted, coming=coming))

    def _pieces(self, drafted: Sequence[Message] = (), *, coming: bool = False) -> Iterator[Message]:
        """The last reply, or the one that is to come: its pieces and what had them continued, the newest first.

        What steered the run may be between them; a reply that was steered instead of being continued is another one.
        """
        belongs, found = not coming, coming
        for message in self.backwards(drafted):
            if message.origin == CONTINUATION:
                belongs = True
                yield message
            elif message.role == "assistant" and not message.origin:
                if not belongs or (found and not _is_cut_off(message)):
                    return
                belongs, found = False, True
                yield message
            elif _is_between_replies(message):
                return

    @property
    def stops(self) -> bool:
        """Whether nothing more is begun: the run shall end, or what it is at is interrupted."""
        return self.cancel is not None or self.interrupted

    @property
    def asked_model(self) -> str:
        """The model that the present round's call asked."""
        return str(self._replaced((), self.round).get("model", self.spec["model"]))

    def _replaced(self, drafted: Sequence[Message], round_number: int) -> dict[str, Any]:
        """What hooks have replaced in the model call of this round."""
        found: dict[str, Any] = {}
        for message in self.backwards(drafted):
            if message.round < round_number - 1:
                break
            if message.origin == REQUEST and message.round == round_number - 1:
                found = {**(message.extra or {}), **found}
        return found

    def rounds(self) -> int:
        """Model calls of the current run, without those that folded its history."""
        folds = sum(message.origin == FOLD_REQUEST and message.run_id == self.run_id for message in self._folds)
        return self.round - folds

    def view(self, drafted: Sequence[Message] = ()) -> View:
        """Which part of the history a model is sent, and how: the last record says so."""
        records = (message for message in chain(reversed(drafted), reversed(self._folds)) if message.origin == FOLD)
        record = next(records, None)
        if record is None:
            return View()
        view = View.of(record)
        # A record that is about to be committed will be behind all that is.
        return view if view.seq else structs.replace(view, seq=self.known_seq)

    def fold_answer(self) -> tuple[Message, Message] | None:
        """A summary that has come and of which nothing was made yet, and what was asked for it."""
        if len(self._folds) < 2 or self._folds[-1].origin != FOLD_ANSWER or self._folds[-1].run_id != self.run_id:
            return None
        return self._folds[-1], self._folds[-2]

    def asked_to_fold(self) -> bool:
        """Whether the last model call was for a summary, and has brought none so far."""
        last = self._folds[-1] if self._folds else None
        if last is None or last.origin == FOLD:
            return False
        number = last.round + (last.origin == FOLD_REQUEST)
        return (last.run_id, number) == (self.run_id, self.round)

    def trouble(self) -> Trouble:
        """What has gone wrong with the size of requests since the run last got on."""
        asked = 0
        for message in self.backwards() if self.asked_to_fold() else ():
            if message.visibility == ALWAYS:
                break
            asked += message.origin == FOLD_REQUEST
        failed = self._folds[-1] if self._folds and self._folds[-1].origin != FOLD else None
        failed = self._folds[-2] if failed is not None and failed.origin == FOLD_ANSWER else failed
        refused = self.model_error is not None and self.model_error["code"] == ContextOverflow.code
        return Trouble(refused, asked, failed)

    def measure(self, drafted: Sequence[Message]) -> Measure:
        """How large the next request would be."""
        return self._shown(drafted).measure(drafted)

    def measured_per_byte(self) -> float:
        """Tokens for each byte of text, as the endpoint's counts have shown them; 0 if they have not."""
        return self._conversation.measured_per_byte()

    def _begun(self, view: View, toolbox: Toolbox) -> Conversation:
        """A conversation in which nothing was said yet."""
        tools, prompt = toolbox.size, ""
        if self.typed is not None:
            tools, prompt = tools + self.typed.size, self.typed.prompt
        instructions = "\n\n".join(filter(None, (self.spec["instructions"], catalogue(self.spec), prompt)))
        return Conversation(instructions, self.policy, view, tools=tools, recall=self.recall)

    def _shown(self, drafted: Sequence[Message]) -> Conversation:
        """The conversation in its present view, with all that is committed."""
        view, toolbox = self.view(drafted), self._tools(drafted)
        known = self._conversation.view
        if structs.replace(view, seq=0) != structs.replace(known, seq=0) or toolbox.size != self._offered:
            self._conversation, self._offered = self._begun(view, toolbox), toolbox.size
            self._appended = 0
        self._conversation.extend(self.messages[self._appended :])
        self._appended = len(self.messages)
        return self._conversation

    def _passing(self, drafted: Sequence[Message], round_number: int) -> list[Message]:
        """The messages that are for this model call only, in order: what was added for it, and what was added since the
        last answer for the call behind that, which may have been one for a summary, or have had no answer."""
        found: list[Message] = []
        hooks = (f"hook:{hook['name']}" for hook in self.spec.get("hooks", ()) if _is_before_model(hook))
        renewed = {FOLD_REQUEST, *hooks}  # origins of what each call gets for itself
        for message in self.backwards(drafted):
            if message.role == "assistant" and not message.origin:
                break
            is_of_call = message.round == round_number - 1
            if message.visibility == THIS_ROUND and (is_of_call or message.origin not in renewed):
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
        conversation, passing = self._shown(drafted), self._passing(drafted, round_number)
        fold = next((message for message in passing if message.origin == FOLD_REQUEST), None)
        replaced = self._replaced(drafted, round_number) if fold is None else {}
        wanted = replaced.get("tools")
        tools = self._tools(drafted).functions
        tools = tools if wanted is None else [one for one in tools if one["function"]["name"] in wanted]
        parameters = dict(replaced.get("parameters", spec["parameters"]))
        model = replaced.get("model", spec["model"])
        continued = self.continuations(drafted, coming=True) > 0
        if self.typed is not None:
            more, asked = self.typed.asked(self.typed.mode(model, drafted), any_text=continued or fold is not None)
            tools, parameters = [*tools, *more], {**parameters, **asked}
        if fold is not None and tools:
            parameters["tool_choice"] = "none"
        points = {hook["point"] for hook in spec.get("hooks", ())}
        return ModelRequest(
            wait_key=wait_key(self.session_id, self.run_id, round_number),
            profile=spec["profile"],
            model=model,
            tools=tools,
            parameters=parameters,
            deadline=spec["deadline"],
            stall=spec.get("stall", 300.0),
            ends_run=fold is None and not continued and self.typed is None and not _sees_end(spec),
            purpose=FOLD_ANSWER if fold is not None else "",
            guarded=fold is None and is_guarded(spec),
            priority=spec.get("priority", NORMAL),
            **(
                conversation.beginning((fold.extra or {})["through"], fold)
                if fold is not None
                else conversation.part(drafted, passing, whole=whole or "before_model" in points)
            ),
        )


def _is_between_replies(message: Message) -> bool:
    """Whether a message asks for another reply, or is a result: what is before it is no piece of the reply after it."""
    return message.role == "tool" or not message.origin or message.origin == OF_OUTPUT


def _sees_end(spec: dict[str, Any]) -> bool:
    """Whether a hook or a memory provider of the agent's sees a run's last answer before the run ends, or the agent's
    process has a worktree to merge then."""
    providers = (spec.get("memory") or {}).get("providers", ())
    seen = any(hook["point"] in SEES_END for hook in spec.get("hooks", ()))
    if "worktree" in spec:
        return True
    return seen or any("remember" in provider["does"] for provider in providers)


def _is_before_model(hook: dict[str, Any]) -> bool:
    """Whether a hook is called for each model call: what it wanted for an earlier one counts no more."""
    return bool(hook["point"] == "before_model")


def _is_cut_off(message: Message) -> bool:
    return (message.extra or {}).get("finish_reason") == CUT_OFF


def wanted_reply(parameters: dict[str, Any]) -> int:
    """The longest reply that a request with these parameters wants, in tokens."""
    return stated_reply(parameters) or OUTPUT_TOKENS


def stated_reply(parameters: dict[str, Any]) -> int:
    """The same where the parameters say it; else 0."""
    return int(parameters.get("max_completion_tokens") or parameters.get("max_tokens") or 0)
