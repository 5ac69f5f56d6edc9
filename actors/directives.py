"""What a hook receives, and what it may want: the vocabulary of `hooks.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from understudy.messages import ALWAYS, THIS_ROUND


@dataclass(frozen=True, kw_only=True)
class HookContext:
    """What a hook receives: a copy of its own, so that changing it changes nothing else.

    Attributes:
        round: of the model call or tool call; 0 at the start of a run.
        call_id: of the tool call; empty elsewhere.
        call_key: of the tool call, the model call or the run: the same in every activation, however often a hook is
            called. Together with the point it is an idempotency key.
        arguments: of the tool call, by name, as the model wrote them, or a person who approved it (in `before_tool`: as
            the hooks before this one left them); None where that is no JSON object.
        outcome: of the tool call (`ToolFinished` names them), or the status with which the run ends.
        text: the input (`session_start`, `run_start`), the model's reply (`after_model`), the result that the model is
            about to receive (`after_tool`, `tool_error`), what the model is asked in order to fold its history
            (`before_fold`), its summary (`after_fold`), what was recalled (`memory_recalled`), or the run's answer
            (`run_end`).
        messages: what the model is asked, in the OpenAI chat completions form (`before_model`).
        calls: `(call id, tool)` of the round (`before_tools`), and how each ended (`after_tools`).
        redone: this may be a repetition: a process that died, was cut off or drained may have called the hook before;
            or it is one, since a person was asked about the call meanwhile.
    """

    point: str
    session_id: str
    run_id: str
    round: int
    agent: str
    call_key: str
    call_id: str = ""
    tool: str = ""
    arguments: dict[str, Any] | None = None
    outcome: str = ""
    text: str = ""
    messages: list[dict[str, Any]] | None = None
    calls: tuple[tuple[str, ...], ...] = ()
    redone: bool = False


@dataclass(frozen=True)
class Refuse:
    """The tool call is not executed (`before_tool`), or the run ends as failed with the code `refused`.

    Attributes:
        reason: for the model, or for whoever reads how the run ended.
    """

    reason: str


@dataclass(frozen=True)
class Ask:
    """A person must approve the tool call before it is executed (`before_tool`).

    Attributes:
        reason: for the person.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class Replace:
    """Something else takes its place.

    Attributes:
        arguments: that the tool is called with (`before_tool`).
        text: the input (`run_start`), the result that the model receives (`after_tool`), what the model is asked in
            order to fold its history (`before_fold`), the summary (`after_fold`), what was recalled
            (`memory_recalled`), or the run's answer (`run_end`).
        model: that this model call asks, of the same profile (`before_model`).
        parameters: of this model call, instead of all of the specification's (`before_model`).
        tools: names of those of the agent's tools that this model call has (`before_model`).
    """

    arguments: dict[str, Any] | None = None
    text: str | None = None
    model: str | None = None
    parameters: dict[str, Any] | None = None
    tools: tuple[str, ...] | list[str] | None = None

    def given(self) -> set[str]:
        """The fields that say something."""
        names = ("arguments", "text", "model", "parameters", "tools")
        return {name for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class Inject:
    """A message is added for the model.

    Attributes:
        visibility: `always`: it stays in the conversation; `this_round`: only the next model call has it, behind all
            others.
    """

    text: str
    role: Literal["user", "system"] = "user"
    visibility: Literal["always", "this_round"] = "always"


@dataclass(frozen=True)
class Continue:
    """The run does not end with this answer (`run_end`, when it is about to complete): the model reads why, and goes
    on."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """The run ends here as completed, with this text, without another model call."""

    text: str = ""


Directive = Refuse | Ask | Replace | Inject | Continue | Stop

ALLOWED: dict[str, tuple[type, ...]] = {
    "session_start": (Inject, Refuse, Stop),
    "run_start": (Inject, Replace, Refuse, Stop),
    "before_model": (Inject, Replace, Refuse, Stop),
    "after_model": (),
    "before_tools": (),
    "before_tool": (Replace, Refuse, Ask),
    "after_tool": (Replace,),
    "tool_error": (),
    "after_tools": (Inject, Refuse, Stop),
    "before_fold": (Replace,),
    "after_fold": (Replace,),
    "memory_recalled": (Replace,),
    "run_end": (Replace, Refuse, Continue),
}
"""Where a hook can be called, in the order of a run, and what it may want there."""

REPLACEABLE = {"before_tool": {"arguments"}, "before_model": {"model", "parameters", "tools"}}
"""What can be replaced at a point; at others a text."""

FAIL_CLOSED = frozenset({"before_tool", "before_model"})
"""Points at which a hook that fails is taken for one that refuses, unless it says otherwise."""


BESIDE_MODEL = (Refuse, Stop)
"""What a hook may want that runs beside the model call: the request is on its way."""


def problem_of(point: str, wanted: Any, status: str = "", *, parallel: bool = False) -> str | None:
    """What is wrong with what a hook returned at a point; None if nothing is."""
    if parallel and not isinstance(wanted, BESIDE_MODEL):
        return f"{wanted!r} can't be returned beside a model call: only Refuse and Stop can"
    if not isinstance(wanted, ALLOWED[point]):
        return f"{wanted!r} means nothing as the result of {point}"
    if isinstance(wanted, Replace):
        given = wanted.given()
        if not given or not given <= REPLACEABLE.get(point, {"text"}) or not _typed(wanted):
            return f"{wanted!r} means nothing as the result of {point}"
    said: Any = wanted.reason if isinstance(wanted, (Refuse, Continue, Ask)) else getattr(wanted, "text", None) or ""
    if not isinstance(said, str):
        return f"{wanted!r} has no text"
    if isinstance(wanted, Continue) and status != "completed":
        return f"a run that ends as {status} can't go on"
    if isinstance(wanted, Inject) and (wanted.visibility not in (ALWAYS, THIS_ROUND) or wanted.role not in ROLES):
        return f"{wanted!r} has a visibility or a role that there is not"
    return None


ROLES = ("user", "system")


def _typed(wanted: Replace) -> bool:
    tools = wanted.tools if wanted.tools is not None else ()
    return (
        isinstance(wanted.arguments, (dict, type(None)))
        and isinstance(wanted.text, (str, type(None)))
        and isinstance(wanted.model, (str, type(None)))
        and isinstance(wanted.parameters, (dict, type(None)))
        and isinstance(tools, (list, tuple))
        and all(isinstance(name, str) for name in tools)
    )
