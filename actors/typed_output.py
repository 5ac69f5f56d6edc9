"""Agents with an output schema (`AgentSpec.output_type`): how a model is asked for it, and what becomes of its answers.

What is asked is a function of what is committed: where an endpoint has refused a response format, a record in the log
says that the session goes on in tool mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from understudy.errors import OutputInvalid
from understudy.handoffs import ORIGIN as HANDED_OFF
from understudy.json_text import to_json
from understudy.messages import CUT_OFF, NEVER, Message, ToolCall
from understudy.records import CallState, Finish

from .execution import Outcome
from .output import AMBIGUOUS, REFUSED, Reader, Rejected

FINAL_ANSWER = "final_answer"
"""The tool by which a model gives its answer, in tool mode; the session loop executes it itself."""

NATIVE, TOOL, PROMPT, AUTO = "native", "tool", "prompt", "auto"

ORIGIN = "output"
"""The origin of messages that say what is wrong with an answer."""

MODE_ORIGIN = "output_mode"
"""That of the record of an endpoint that takes no response format."""

ACCEPTED = "accepted"
RUN_ENDED = "not executed: the final answer was given beside it"

DESCRIPTION = (
    "Give your final answer, as the arguments of this call. Call it once, alone, when you are done: it ends your work."
)
PROMPTED = (
    "Your final answer must be one JSON object that fits this JSON Schema, and nothing else: no text before or after "
    "it, and no code fence.\n"
)


class TypedOutput:
    """The output schema of a session's agent.

    Attributes:
        reader: reads answers.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._output: dict[str, Any] = spec["output"]
        self._profile: str = spec["profile"]
        self._refused: set[str] = set()  # models of this profile that take no response format
        self.reader = Reader(self._output["schema"], wrapped=self._output["wrapped"])

    @property
    def prompt(self) -> str:
        """What is added to the instructions."""
        return PROMPTED + to_json(self._output["schema"]) if self._output["mode"] == PROMPT else ""

    def extend(self, messages: Iterable[Message]) -> None:
        """Take in what was committed."""
        self._refused |= self._recorded(messages)

    def mode(self, model: str, drafted: Iterable[Message] = ()) -> str:
        """How a model is asked: `native`, `tool` or `prompt`.

        Args:
            drafted: messages that are committed with the next call.
        """
        if self._output["mode"] != AUTO:
            return str(self._output["mode"])
        return TOOL if model in self._refused | self._recorded(drafted) else NATIVE

    @property
    def size(self) -> int:
        """Bytes of the schema, where it is in each request beside the messages."""
        return len(to_json(self._output["schema"]).encode()) if self._output["mode"] != PROMPT else 0

    def asked(self, mode: str, *, any_text: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What a request has besides: tools, and parameters.

        Args:
            any_text: it asks for a summary, or for the rest of a reply, which fits no schema by itself: a model that is
                held to one would start over.
        """
        schema = self._output["schema"]
        if mode == TOOL:
            function = {"name": FINAL_ANSWER, "description": DESCRIPTION, "parameters": schema}
            return [{"type": "function", "function": function}], {}
        if mode == PROMPT or any_text:
            return [], {}
        described = {"name": self._output["name"], "schema": schema, "strict": self._output["strict"]}
        return [], {"response_format": {"type": "json_schema", "json_schema": described}}

    def takes_no_format(self, error: dict[str, Any], model: str) -> bool:
        """Whether a call of a model failed since the endpoint refuses response formats, or this one, and another mode
        may be used instead."""
        refused = error["code"] == "model_refused" and (error.get("details") or {}).get("status") in (400, 422)
        message = error["message"].lower()
        named = any(word in message for word in ("response_format", "response format", "json_schema"))
        return refused and named and self.mode(model) == NATIVE and self._output["mode"] == AUTO

    def record(self, model: str) -> Message:
        """The decision to go on in tool mode; it holds for this profile and model."""
        said = {"mode": TOOL, "profile": self._profile, "model": model}
        return Message("system", to_json(said), origin=MODE_ORIGIN, visibility=NEVER)

    def _recorded(self, messages: Iterable[Message]) -> set[str]:
        """The models of this profile of which these messages say that they are asked in tool mode."""
        said = [json.loads(message.text) for message in messages if message.origin == MODE_ORIGIN]
        return {one["model"] for one in said if (one["mode"], one["profile"]) == (TOOL, self._profile)}

    def given(self, calls: Sequence[CallState], model: str) -> list[CallState]:
        """Those of a round's calls that give the final answer, if this model was asked for it so."""
        return [call for call in calls if call.tool == FINAL_ANSWER] if self.mode(model) == TOOL else []

    def of_calls(self, given: Sequence[CallState | ToolCall], reply: Message) -> Any:
        """The answer that calls give. Raises `Rejected`."""
        if len(given) > 1:
            raise Rejected(AMBIGUOUS, f"{FINAL_ANSWER} was called {len(given)} times: call it once")
        return self.reader.read(given[0].arguments, cut=_finish_reason(reply) == CUT_OFF)

    def of_text(self, text: str, reply: Message) -> Any:
        """The answer in a final text. Raises `Rejected`.

        Args:
            reply: the message that the text ends with.
        """
        refusal = ((reply.extra or {}).get("provider") or {}).get("refusal")
        if refusal:
            raise Rejected(REFUSED, f"the model refused: {refusal}")
        if _finish_reason(reply) == "content_filter":
            raise Rejected(REFUSED, "the endpoint's content filter withheld the answer")
        return self.reader.read(text, cut=_finish_reason(reply) == CUT_OFF)

    def checked(self, ended: Finish, session_id: str) -> Finish:
        """A completed run's end with the output in its text, whoever wrote that; a failed one if there is none."""
        try:
            return replace(ended, output=self.reader.read(ended.text))
        except Rejected as rejected:
            return Finish("failed", ended.text, error=self.failed(rejected, session_id))

    def may_ask_again(self, rejected: Rejected, run: Iterable[Message]) -> bool:
        """Whether the model is asked once more. A refusal is an answer: it is not.

        Args:
            run: the messages of the run so far, the newest first; what was said under another agent does not count.
        """
        messages = list(takewhile(lambda message: message.origin != HANDED_OFF, run))
        rounds = {
            message.round for message in messages
            if message.origin == ORIGIN or (message.role == "tool" and message.name == FINAL_ANSWER)
        }  # fmt: skip
        rounds -= {message.round for message in messages if self._is_accepted(message)}  # and the run went on
        return rejected.reason != REFUSED and len(rounds) < self._output["retries"]

    def _is_accepted(self, reply: Message) -> bool:
        """Whether a reply has a call that gives an acceptable answer."""
        given = [call for call in reply.tool_calls if call.name == FINAL_ANSWER]
        try:
            self.of_calls(given, reply) if given else None
        except Rejected:
            return False
        return bool(given)

    def again(self, rejected: Rejected, model: str) -> Message:
        """What the model reads of a text that was not accepted."""
        mode = self.mode(model)
        wanted = "Reply with one JSON object that fits the JSON Schema, and nothing else."
        if mode == TOOL:
            wanted = f"Give your final answer by calling the tool {FINAL_ANSWER}."
        elif mode == NATIVE:  # endpoints that know no response formats may ignore them
            wanted = f"{wanted} The JSON Schema:\n{to_json(self._output['schema'])}"
        return Message("user", f"{_rejection_text(rejected)}\n{wanted}", origin=ORIGIN)

    def outcomes(self, given: Sequence[CallState], rejected: Rejected) -> dict[str, Outcome]:
        """The results of calls that gave no acceptable answer."""
        outcome = Outcome("invalid", f"{_rejection_text(rejected)}\nCall {FINAL_ANSWER} again.")
        return {call.call_id: outcome for call in given}

    def last_outcomes(
        self, calls: Sequence[CallState], given: Sequence[CallState], rejected: Rejected | None = None
    ) -> dict[str, Outcome]:
        """The results of a round's calls with which the run ends."""
        ending = Outcome("ok", ACCEPTED) if rejected is None else Outcome("invalid", _rejection_text(rejected))
        return {call.call_id: ending if call in given else Outcome("refused", RUN_ENDED) for call in calls}

    def failed(self, rejected: Rejected, session_id: str) -> dict[str, Any]:
        """The error of a run that ends without an acceptable answer."""
        return OutputInvalid(
            f"the answer does not fit the agent's output type ({rejected.reason}): {'; '.join(rejected.problems)}",
            session_id=session_id,
            details={"reason": rejected.reason, "problems": rejected.problems},
        ).to_wire()


def _finish_reason(reply: Message) -> str:
    return str((reply.extra or {}).get("finish_reason", ""))


def _rejection_text(rejected: Rejected) -> str:
    problems = "\n".join(f"- {problem}" for problem in rejected.problems)
    return f"This is not accepted as your final answer ({rejected.reason}):\n{problems}"
