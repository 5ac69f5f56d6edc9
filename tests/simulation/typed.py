"""Agents with an output schema, as they are simulated: what their model answers, and what must become of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

from jsonschema import Draft202012Validator

from understudy.actors.typed_output import FINAL_ANSWER, PROMPTED
from understudy.messages import ATTACHMENTS_MARK
from understudy.testing.instances import wanted_schema
from understudy.testing.malformed import FORMS
from understudy.testing.policies import Reply, content_text

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["answer", "count"],
    "additionalProperties": False,
}
REJECTED = "This is not accepted"
MALFORMED = 0.3
"""How many answers are not just what was asked for."""


def output(chosen: random.Random) -> dict[str, Any]:
    """What a compiled specification says of it."""
    mode = chosen.choice(("auto", "auto", "tool", "prompt"))
    schema = {"name": "answer", "schema": SCHEMA, "wrapped": False, "strict": True}
    return {**schema, "mode": mode, "retries": chosen.choice((1, 2, 4))}


def is_wanted(body: dict[str, Any], said: str) -> bool:
    """Whether a request wants an answer that fits the schema, or the rest of one that was cut off.

    Args:
        said: the pieces before, of a reply that is continued.
    """
    instructions = content_text(body["messages"][0])
    return wanted_schema(body) is not None or PROMPTED in instructions or said.startswith("{")


def without_rejected(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a model has heard, without its answers that were not accepted."""
    heard = list[dict[str, Any]]()
    for message in messages:
        if message["role"] in ("user", "tool") and content_text(message).startswith(REJECTED):
            # Of other calls in the same round, and what is attached to these.
            while heard[-1]["role"] == "tool" or content_text(heard[-1]).startswith(ATTACHMENTS_MARK):
                heard.pop()
            if heard[-1]["role"] == "assistant":  # an empty one is not sent
                heard.pop()
        else:
            heard.append(message)
    return heard


def answer(
    reply: Reply, body: dict[str, Any], forms: random.Random, *, well: bool, text: str | None = None
) -> Reply:  # fmt: skip
    """A model's final text as an answer that fits, or in one of the forms that may not.

    Args:
        well: it is what was asked for in any case.
        text: which fits another schema; None for this one's.
    """
    text = text or json.dumps({"answer": reply.text, "count": len(reply.text or "")})
    by_tool = "response_format" not in body and wanted_schema(body) is not None
    form = None if well or forms.random() >= MALFORMED else forms.choice(sorted(FORMS))
    if form == "refused" and forms.random() < 0.7:  # which ends the run
        form = None
    made = FORMS[form](text) if form is not None else Reply(text=text)
    if by_tool and made.refusal is None and forms.random() < 0.8:  # else as text, though there is a tool
        return Reply(tool_calls=((FINAL_ANSWER, made.text or ""),), finish_reason=made.finish_reason, delay=reply.delay)
    return replace(made, delay=reply.delay)


def problem(spec: dict[str, Any], task: str, said: str, found: Any) -> str:
    """What is wrong with the output of a completed run; empty if nothing is.

    Args:
        said: the last answer as the model gave it.
    """
    if not Draft202012Validator(spec["output"]["schema"]).is_valid(found):
        return f"has the output {found!r}, which does not fit its schema"
    if not found["answer"].startswith(f"{task}: "):
        return f"was asked {task}, and has the output {found!r}"
    if not all(json.dumps(value) in said for value in found.values()):
        return f"has the output {found!r}, and its model said {said!r}"
    return ""
