"""Hooks: functions of the user's that see what an agent is about to do or has done, and may change or refuse it.

`@hook` marks a function. It travels to the frame as tools do (`code.py`), and is called there, before the commit that
holds what it is about. A death in between calls it again: at least once, never after the fact. `docs/hooks.md`.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from understudy.errors import InvalidSpec, Refused, ToolError
from understudy.json_text import from_json
from understudy.messages import INTERRUPTED
from understudy.records import CallState, ModelRequest

from .code import fingerprint, import_reference, packed, resolve, unloadable, unpacked
from .execution import Outcome, presentable, run
from .window import Window

logger = logging.getLogger(__name__)

POINTS = ("run_start", "before_model", "after_model", "before_tool", "after_tool", "tool_error", "run_end")
"""Where a hook can be called."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class HookContext:
    """What a hook is told: a copy of its own, so that changing it changes nothing else.

    Attributes:
        round: of the model call or tool call; 0 at the start of a run.
        call_id: of the tool call; empty elsewhere.
        call_key: of the tool call, the model call or the run: the same in every activation, however often a hook is
            called. Together with the point it is an idempotency key.
        arguments: of the tool call, by name, as the model wrote them (in `before_tool`: as the hooks before this one
            left them); None where that is no JSON object.
        outcome: of the tool call (`ToolFinished` names them), or the status with which the run ends.
        text: the input (`run_start`), the model's reply (`after_model`), the result that the model is about to be told
            (`after_tool`, `tool_error`), or the run's answer (`run_end`).
        messages: what the model is asked, in the OpenAI chat completions form (`before_model`).
        redone: this may be a repetition: a process that died or was cut off may have called the hook before.
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
    redone: bool = False


@dataclass(frozen=True)
class Refuse:
    """The tool call is not executed (`before_tool`), or the run ends without another model call (`before_model`).

    Attributes:
        reason: for the model, or for whoever reads how the run ended.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class Replace:
    """The tool is called with other arguments (`before_tool`), or the model is told another text (`after_tool`)."""

    arguments: dict[str, Any] | None = None
    text: str | None = None


@dataclass(frozen=True)
class HookDefinition:
    """What `@hook` knows about a function."""

    name: str
    point: str
    function: Callable[..., Any] = field(repr=False)


@dataclass(frozen=True, eq=False)
class LoadedHook:
    """A hook in a frame, ready to be called."""

    name: str
    function: Callable[..., Any]
    is_async: bool


def hook(point: str, /, *, name: str | None = None) -> Callable[[Function], Function]:
    """Mark a function, plain or async, as a hook. It takes a `HookContext` and stays what it is.

    Args:
        point: one of `POINTS`.
        name: the function's name by default.

    Raises:
        InvalidSpec: there is no such point, or the function can't be marked.
    """
    if point not in POINTS:
        raise InvalidSpec(f"there is no hook {point!r}; there are: {', '.join(POINTS)}.")

    def mark(target: Function) -> Function:
        chosen = name or str(getattr(target, "__name__", "")) or type(target).__name__
        try:
            target.__understudy_hook__ = HookDefinition(chosen, point, target)  # type: ignore[attr-defined]
        except AttributeError:
            raise InvalidSpec(f"{target!r} can't be a hook itself: wrap it in a function of your own.") from None
        return target

    return mark


def describe_hook(
    item: Callable[..., Any], *, pickle: Callable[[Any], bytes] | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Turn one entry of `AgentSpec.hooks` into its specification, and the code it needs by its SHA-256.

    Raises:
        InvalidSpec: the entry is no hook, or it must travel by value and can't.
    """
    definition = getattr(item, "__understudy_hook__", None)
    if not isinstance(definition, HookDefinition):
        raise InvalidSpec(f"{item!r} is not a function decorated with @hook.")
    reference = import_reference(item)
    source, blobs = {"import": reference or ""}, dict[str, bytes]()
    if reference is None:
        source, blobs = packed(f"hook {definition.name!r}", item, item, pickle)
    return {"name": definition.name, "point": definition.point, "source": source} | fingerprint(item), blobs


def load_hook(
    spec: dict[str, Any], read_blob: Callable[[str], bytes], unpickle: Callable[[bytes], Any] | None
) -> LoadedHook:
    """Make a specified hook callable in this process.

    Raises:
        ToolError: the code can't be imported or read, or is no hook of this point any more.
    """
    source = spec["source"]
    try:
        function = unpacked(source["blob"], read_blob, unpickle) if "blob" in source else resolve(source["import"])
    except Exception as error:
        raise unloadable(f"hook {spec['name']!r}", source, error) from error
    definition = getattr(function, "__understudy_hook__", None)
    if not isinstance(definition, HookDefinition) or definition.point != spec["point"]:
        raise ToolError(f"hook {spec['name']!r} can't be loaded here: it is no {spec['point']} hook any more.")
    return LoadedHook(spec["name"], function, inspect.iscoroutinefunction(function))


class HookFailed(Exception):
    """A hook raised, did not return in time, can't be loaded, or returned what means nothing; the text says which."""


class Hooks:
    """The hooks of a session's agent, as its activation calls them.

    Without hooks at a point nothing is done there, nothing awaited.

    Attributes:
        stuck: a synchronous hook outlived its timeout and still runs: this process must be replaced.
    """

    def __init__(
        self,
        window: Window,
        load: Callable[[dict[str, Any]], Awaitable[LoadedHook]],
        expect: Callable[[float], None],
    ) -> None:
        """`expect` is told until which monotonic time code of the user's may run."""
        self._window = window
        self._load = load
        self._expect = expect
        self._at: dict[str, list[dict[str, Any]]] = {}
        for spec in window.spec.get("hooks", ()):
            self._at.setdefault(spec["point"], []).append(spec)
        self.stuck = False
        self._shown: set[str] = set()

    async def see(self, point: str, *, text: str, outcome: str = "") -> None:
        """Call the hooks of a point that is only seen."""
        for spec in self._at.get(point, ()):
            await self._observe(spec, self._context(point, text=text, outcome=outcome))

    async def before_model(self, request: ModelRequest, round_number: int) -> dict[str, Any] | None:
        """Call the hooks before a model call; the error with which the run ends if one refuses it, or fails."""
        for spec in self._at.get("before_model", ()):
            context = self._context("before_model", round_number=round_number, messages=from_json(request.messages))
            try:
                wanted = await self._call(spec, context, Refuse)
            except HookFailed as failed:
                message = f"the model was not asked: {failed}"
            else:
                if wanted is None:
                    continue
                message = f"the hook {spec['name']} refused to ask the model: {wanted.reason}"
            return Refused(presentable(message), session_id=self._window.session_id).to_wire()
        return None

    async def before_tool(self, call: CallState, tool: dict[str, Any]) -> CallState | Outcome:
        """Call the hooks before a tool call is executed.

        Returns:
            The call as it shall be executed, or its outcome if it shall not.
        """
        for spec in self._at.get("before_tool", ()):
            # Asked about, it had been started before, by a process that died.
            context = self._of_call("before_tool", call, redone=self._window.redone or call.state != "requested")
            try:
                wanted = await self._call(spec, context, Refuse, Replace)
                if isinstance(wanted, Replace):
                    call = structs.replace(call, arguments=_fitting(spec, tool, wanted))
                    continue
                if wanted is None:
                    continue
                reason = f"the hook {spec['name']} refused it: {wanted.reason}"
            except HookFailed as failed:
                reason = str(failed)
            if call.state == "requested":
                return Outcome("refused", presentable(f"not executed: {reason}"))
            return Outcome("interrupted", presentable(f"{INTERRUPTED}; not executed again: {reason}"))
        return call

    async def after_tool(self, call: CallState, outcome: Outcome) -> Outcome:
        """Call the hooks after a tool call, whatever its outcome; returns it with the text that the model is told."""
        # What a finished call's result is was known before; so it may be for one that a person was asked about.
        redone = self._window.redone or call.state in ("finished", "asked") or call.call_id in self._shown
        self._shown.add(call.call_id)  # if a cancel ends this, it is shown once more
        for spec in self._at.get("after_tool", ()):
            context = self._of_call("after_tool", call, outcome, redone=redone)
            # A repeated call's text stays, since repetitions are counted by it.
            allowed = () if outcome.outcome == "repeated" else (Replace,)
            wanted = await self._observe(spec, context, *allowed)
            if wanted is not None:
                outcome = replace(outcome, content=presentable(wanted.text))
        for spec in self._at.get("tool_error", ()) if outcome.outcome != "ok" else ():
            await self._observe(spec, self._of_call("tool_error", call, outcome, redone=redone))
        return outcome

    async def _observe(self, spec: dict[str, Any], context: HookContext, *allowed: type) -> Any:
        """Call a hook whose failure holds nobody up."""
        try:
            return await self._call(spec, context, *allowed)
        except HookFailed as failed:
            logger.warning("session %s goes on: %s", context.session_id, failed)
            return None

    async def _call(self, spec: dict[str, Any], context: HookContext, *allowed: type) -> Any:
        """What the hook returns: None, or one of the allowed.

        Raises:
            HookFailed: for whatever reason.
        """
        name, timeout = spec["name"], self._window.spec["tool_timeout"]
        self._expect(time.monotonic() + timeout)
        try:
            loaded = await self._load(spec)
        except Exception as error:
            raise HookFailed(f"the hook {name} failed: {error}") from error
        bound = replace(loaded, function=partial(loaded.function, context))
        outcome, found, stuck = await run(bound, {}, timeout, render=_same)
        self.stuck = self.stuck or stuck
        if outcome != "ok":
            raise HookFailed(f"the hook {name} failed: {found}")
        if found is not None and not (isinstance(found, allowed) and _means_something(context.point, found)):
            raise HookFailed(f"the hook {name} failed: {found!r} means nothing as the result of {context.point}")
        return found

    def _context(self, point: str, *, round_number: int | None = None, **facts: Any) -> HookContext:
        window = self._window
        number = window.round if round_number is None else round_number
        key = f"{window.session_id}/{window.run_id}"
        return HookContext(
            point=point, session_id=window.session_id, run_id=window.run_id or "", round=number,
            agent=window.spec["name"], call_key=f"{key}/{number}" if point.endswith("_model") else key,
            **{"redone": window.redone, **facts},
        )  # fmt: skip

    def _of_call(self, point: str, call: CallState, outcome: Outcome | None = None, *, redone: bool) -> HookContext:
        context = self._context(point, redone=redone)
        return replace(
            context, call_id=call.call_id, call_key=f"{context.session_id}/{call.call_id}", tool=call.tool,
            arguments=_arguments(call.arguments), outcome=outcome.outcome if outcome else "",
            text=outcome.content if outcome else "",
        )  # fmt: skip


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _fitting(spec: dict[str, Any], tool: dict[str, Any], wanted: Replace) -> str:
    """The arguments that a hook gave, as JSON text. Raises `HookFailed` where the tool does not take such."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    try:
        text = json.dumps(wanted.arguments, allow_nan=False)
        problem = next(Draft202012Validator(tool["parameters"]).iter_errors(json.loads(text)), None)
    except Exception as error:  # what JSON can't say, or the schema's own recursion
        raise HookFailed(f"the hook {spec['name']} failed: its arguments can't be used: {error}") from error
    if problem is not None:
        where = f"{problem.json_path}: {problem.message}"
        raise HookFailed(f"the hook {spec['name']} failed: its arguments don't fit {tool['name']}: {where}")
    return text


def _means_something(point: str, found: Any) -> bool:
    """Whether this directive says something at this point."""
    if isinstance(found, Refuse):
        return isinstance(found.reason, str)
    given, other = (found.text, found.arguments) if point == "after_tool" else (found.arguments, found.text)
    return isinstance(given, str if point == "after_tool" else dict) and other is None


def _same(result: Any) -> Any:
    return result
