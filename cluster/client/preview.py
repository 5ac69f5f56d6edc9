"""What a new session would ask the model first, without a session: no Ray, no store, no network."""

from __future__ import annotations

from typing import Any

from understudy.actors.window import Window
from understudy.identifiers import new_identifier
from understudy.json_text import from_json
from understudy.messages import Message
from understudy.spec import AgentSpec

from .compiling import compile_spec

NO_PROFILE = "none"
"""In place of credentials, which are not part of a request."""


def first_request(spec: AgentSpec, content: str, *, model: str) -> dict[str, Any]:
    """The first model call of a run with this input, as a session actor makes it. Hooks are not called, and what they
    would add is not in it; nor is the length of reply that a budget allows.

    Args:
        model: where the agent names none.

    Raises:
        InvalidSpec: see `compile_spec`.
    """
    window = Window(new_identifier(), compile_spec(spec, model=model, profile=NO_PROFILE).spec)
    window.run_id = new_identifier()
    request = window.request(1, [Message("user", content, run_id=window.run_id)])
    return {
        "model": request.model,
        "messages": from_json(request.messages.decode()),
        "tools": request.tools,
        "parameters": request.parameters,
    }
