"""A session's messages as a model is sent them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from understudy.attachments import begins
from understudy.estimates import BYTES_PER_TOKEN, attached_excess
from understudy.handoffs import ORIGIN as HANDED_OFF
from understudy.identifiers import COPIED, digest, new_identifier
from understudy.json_text import to_json
from understudy.messages import ALWAYS, ATTACHMENTS_MARK, INTERRUPTED, Message

from .context import DEFAULT, WHOLE, Measure, Place, Policy, View, attachments, saved, shortened_arguments, shown

WORTH_KEEPING = 32 * 1024
"""In bytes: what is shorter goes to the gateway whole, each time, which costs a tenth of a millisecond."""

CAREFUL = 1.1
"""By so much a guess is raised that rests on what an endpoint counted of other texts."""


class Conversation:
    """The messages in the OpenAI chat completions form, as JSON text that grows with them: what was written once is not
    written again in the next round, nor sent to the gateway again, so a round does not cost more the longer the history
    is.

    Endpoints repeat their tool call ids and refuse a call without a result: a repeated id is made unique, and a call
    that never got a result gets one that says so. History therefore never makes a session unusable.

    The result of a tool is text in that form. What is attached to the results of a round follows them, as one message
    of the user's role.

    Args:
        view: what of the history is shown, and how; another one needs another conversation.
        tools: so many bytes of each request are its tools.
        recall: the agent has a tool that reads messages in full.
    """

    def __init__(
        self, instructions: str, policy: Policy = DEFAULT, view: View = WHOLE, *, tools: int = 0, recall: bool = False
    ) -> None:
        self.view = view
        self._policy = policy
        self._recall = recall
        self._text = bytearray(b"[")
        self._seen: set[str] = set()
        self._open: dict[str, str] = {}
        self._attached: tuple[dict[str, Any], ...] = ()  # to results that no other message follows yet
        self._name = new_identifier()
        self._sent = 0  # so much of the text, which lasts, was in a request
        self._excess = -tools  # by how much the text is longer than it counts
        self._last = view.through
        self._number = 0  # of the last message that was added or passed over, among all of the log
        self._saved = 0
        self._counted = (0, 0)  # tokens of the last request that the endpoint counted, and its size
        if instructions:
            self._add({"role": "system", "content": instructions})
        note = view.note(recall=recall)
        if note:
            self._add({"role": "user", "content": note})
        self._ends = [self._here()]

    def extend(self, messages: Iterable[Message]) -> None:
        """Add what was committed, in order."""
        for message in messages:
            self._number += 1
            if message.origin == HANDED_OFF:  # what was counted had other instructions and tools, perhaps another model
                self._counted = (0, 0)
            if message.visibility != ALWAYS or 0 < message.seq <= self.view.through:
                continue
            if message.role == "tool":
                provider_id = self._open.pop(message.tool_call_id or "", None)
                if provider_id is not None:
                    content = self._shown(message) or ""
                    self._add({"role": "tool", "tool_call_id": provider_id, "content": content})
                    self._last = message.seq
                    self._saved += saved(message, self._policy) if message.seq > self.view.elided else 0
                    self._attach(message, provider_id)
                continue
            self._close()
            self._note_end()
            if message.role == "assistant":
                tokens = (message.extra or {}).get("input_tokens", 0)
                if tokens and message.seq > self.view.seq:  # it was asked for in this view
                    self._counted = (tokens, self._size())
                self._add(self._answer(message))
            else:
                self._add({"role": message.role, "content": self._shown(message)})
                self._excess += attached_excess(message.content)
            self._last = message.seq

    def part(
        self, drafted: Iterable[Message] = (), passing: Iterable[Message] = (), *, whole: bool = True
    ) -> dict[str, Any]:  # fmt: skip
        """What a `ModelRequest` says of its messages: all of them, and those behind them that will be committed with
        the call, inputs and results of tools.

        Args:
            passing: messages for this request only. They come last, so that what comes before them is the beginning of
                the next request, too: endpoints keep what they made of it.
            whole: leave nothing out.
        """
        length = len(self._text)
        left_out, self._sent = 0 if whole else self._sent, length if length >= WORTH_KEEPING else 0
        before = self._state()
        try:
            self.extend(drafted)
            self._close()
            for message in passing:
                self._add({"role": message.role, "content": message.content})
            with memoryview(self._text) as text:
                messages = b"".join((text[left_out:], b"]"))
            tokens = self._tokens()
        finally:
            self._restore(before)
        return {
            "messages": messages,
            "left_out": left_out,
            "lasting": self._sent,
            "text": self._name if self._sent else "",
            "tokens": tokens,
        }  # fmt: skip

    def beginning(self, through: int, message: Message) -> dict[str, Any]:
        """What a `ModelRequest` says of its messages that asks something about the history up to a place where it can
        be cut, and nothing else."""
        before = self._state()
        try:
            self._complete()
            end = next(end for end in reversed([*self._ends, self._here()]) if end.seq <= through)
            question = to_json({"role": message.role, "content": message.content}).encode()
            with memoryview(self._text) as text:
                messages = b"".join((text[: end.length], b"," if end.length > 1 else b"", question, b"]"))
        finally:
            self._restore(before)
        self._sent = 0  # the gateway does not keep the text behind such a request
        return {"messages": messages, "tokens": round((end.size + len(question)) * self._per_byte()) + 1}

    def measure(self, drafted: Iterable[Message] = ()) -> Measure:
        """How large the next request would be, with these messages."""
        before, ends, answered = self._state(), list(self._ends), not self._open
        self._complete()
        here, drafted = self._here(), [message for message in drafted if message.visibility == ALWAYS]
        if drafted and answered and here.seq > ends[-1].seq:  # what no model has seen yet stays in any case
            ends.append(here)
        try:
            self.extend(drafted)
            self._close()
            size, tokens = self._size(), self._tokens()
        finally:
            self._restore(before)
        return Measure(tokens, self._per_byte(), size, ends)

    def measured_per_byte(self) -> float:
        """Tokens for each byte of text, as the endpoint's counts have shown them; 0 if they have not."""
        return self._per_byte() if self._counted[1] else self.view.per_byte

    def _here(self) -> Place:
        return Place(self._last, self._size(), self._saved, len(self._text))

    def _note_end(self) -> None:
        if self._ends[-1].seq < self._last:
            self._ends.append(self._here())

    def _size(self) -> int:
        return len(self._text) - self._excess

    def _per_byte(self) -> float:
        """Tokens for each byte, as the endpoint counts them: careful where it has not said, or says what can't be."""
        tokens, size = self._counted
        return min(max(tokens / size, 1 / 8), 1.0) if size else self.view.per_byte or 1 / BYTES_PER_TOKEN

    def _tokens(self) -> int:
        """Of a request with this text: what the endpoint counted before, and a careful guess for what is new."""
        tokens, size = self._counted
        if not size and self.view.per_byte:
            return round(self._size() * self.view.per_byte * CAREFUL) + 1
        return tokens + max(0, self._size() - size) // BYTES_PER_TOKEN + 1

    def _state(self) -> tuple[Any, ...]:
        kept = (self._excess, self._last, self._counted, self._number, self._saved, self._attached)
        return len(self._text), dict(self._open), len(self._ends), kept

    def _restore(self, state: tuple[Any, ...]) -> None:
        length, self._open, ends, kept = state
        self._excess, self._last, self._counted, self._number, self._saved, self._attached = kept
        del self._text[length:]
        del self._ends[ends:]

    def _shown(self, message: Message) -> Any:
        return shown(message, self._policy, self.view, self._number if self._recall else 0)

    def _add(self, message: dict[str, Any]) -> None:
        if len(self._text) > 1:
            self._text += b","
        self._text += to_json(message).encode()

    def _close(self) -> None:
        """Nobody answers the calls any more that have no result."""
        for provider_id in self._open.values():
            self._add({"role": "tool", "tool_call_id": provider_id, "content": INTERRUPTED})
        self._open.clear()
        if self._attached:
            content = [{"type": "text", "text": f"{ATTACHMENTS_MARK}\nOf the results above:"}, *self._attached]
            self._add({"role": "user", "content": content})
            self._excess += attached_excess(content)
            self._attached = ()

    def _complete(self) -> None:
        """Have all that belongs to a round whose calls have their results in the text."""
        if not self._open:
            self._close()

    def _attach(self, message: Message, provider_id: str) -> None:
        """Note what is attached to a result. Its label has the number that its placeholder in the result's text has."""
        for number, part in enumerate(attachments(message, self.view), start=1):
            label = {"type": "text", "text": f"{begins(number)} of {message.name} ({provider_id})]"}
            self._attached += (label, part)

    def _answer(self, message: Message) -> dict[str, Any]:
        wire: dict[str, Any] = {"role": "assistant", "content": self._shown(message)}
        provider = dict((message.extra or {}).get("provider") or {})
        call_extras = provider.pop("tool_calls", None) or [{}] * len(message.tool_calls)
        wire.update(provider)
        calls: list[dict[str, Any]] = []
        for call, call_extra in zip(message.tool_calls, call_extras, strict=False):
            provider_id = said = call.provider_id or call.call_id
            own = call.call_id.rpartition(COPIED)[2]  # the same without deaths and with them, and in a fork
            while provider_id in self._seen:  # copies of several sessions may have the same of this, too
                own = digest(own, size=4)
                provider_id = f"{said}_{own}"
            self._seen.add(provider_id)
            self._open[call.call_id] = provider_id
            arguments = shortened_arguments(readable(call.arguments), self.view.longest)
            function = {"name": call.name, "arguments": arguments}
            calls.append({**call_extra, "id": provider_id, "type": "function", "function": function})
        if calls:
            wire["tool_calls"] = calls
        elif not wire["content"]:
            wire["content"] = ""
        return wire


def readable(arguments: str) -> str:
    """The arguments if they are JSON, else a JSON object that quotes them: endpoints refuse unreadable history."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return json.dumps({"unreadable": arguments})
    return arguments
