"""Hooks: functions of the user's that see what an agent is about to do or has done, and may change or refuse it.

`@hook` marks a function. It travels to the frame as tools do (`code.py`), and is called there, before the commit that
holds what it is about. A death in between calls it again: at least once, never after the fact. `docs/hooks.md`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from msgspec import structs

from understudy.attachments import begins
from understudy.errors import InvalidSpec, ToolError
from understudy.json_text import from_json
from understudy.messages import INTERRUPTED, NEVER, Message, encodable
from understudy.records import CallState, ModelRequest

from .approval import Permitted
from .argument_schemas import argument_validator
from .code import fingerprint, had_from, sourced, unloadable
from .directives import (
    ALLOWED,
    FAIL_CLOSED,
    Ask,
    Directive,
    HookContext,
    Inject,
    Refuse,
    Replace,
    Stop,
    problem_of,
)
from .execution import Outcome, may_go_on, presentable, run
from .guards import first_tripped, refusal
from .window import REQUEST, Window

logger = logging.getLogger(__name__)

POINTS = tuple(ALLOWED)
"""Where a hook can be called."""

PARALLEL = "before_model"
"""Where a hook can be called beside what it is about."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class HookDefinition:
    """What `@hook` knows about a function.

    Attributes:
        on_failure: `refuse` or `ignore`; None for what is usual at its point.
        parallel: it runs beside the model call, not before it.
    """

    name: str
    point: str
    function: Callable[..., Any] = field(repr=False)
    on_failure: str | None = None
    parallel: bool = False


@dataclass(frozen=True, eq=False)
class LoadedHook:
    """A hook in a frame, ready to be called."""

    name: str
    function: Callable[..., Any]
    is_async: bool


def hook(
    point: str,
    /,
    *,
    name: str | None = None,
    on_failure: Literal["refuse", "ignore"] | None = None,
    parallel: bool = False,
) -> Callable[[Function], Function]:
    """Mark a function, plain or async, as a hook. It takes a `HookContext` and stays what it is.

    Args:
        point: one of `POINTS`.
        name: the function's name by default.
        on_failure: what follows if it raises, takes too long or can't be loaded: `refuse`, as if it had returned that
            (only where it could), or `ignore`. None: `refuse` before a tool call or a model call, else `ignore`.
        parallel: at `before_model`: the hook runs beside the model call, whose answer counts only if it lets it pass.
            It may return `Refuse` or `Stop`.

    Raises:
        InvalidSpec: there is no such point, the function can't be marked, nothing can be refused at the point, or
            nothing runs beside what it is about.
    """
    if point not in POINTS:
        raise InvalidSpec(f"there is no hook {point!r}; there are: {', '.join(POINTS)}.")

    if on_failure not in (None, "ignore") and (on_failure != "refuse" or Refuse not in ALLOWED[point]):
        raise InvalidSpec(f"a hook at {point} can't have on_failure={on_failure!r}: nothing can be refused there.")

    if parallel and point != PARALLEL:
        raise InvalidSpec(f"a hook at {point} can't be parallel: only one at {PARALLEL} can run beside the model call.")

    def mark(target: Function) -> Function:
        chosen = name or str(getattr(target, "__name__", "")) or type(target).__name__
        try:
            target.__understudy_hook__ = HookDefinition(chosen, point, target, on_failure, parallel)  # type: ignore[attr-defined]
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
    source, blobs = sourced(f"hook {definition.name!r}", item, pickle)
    described: dict[str, Any] = {"name": definition.name, "point": definition.point, "source": source}
    if definition.on_failure is not None:
        described["on_failure"] = definition.on_failure
    if definition.parallel:
        described["parallel"] = True
    return described | fingerprint(item), blobs


def load_hook(
    spec: dict[str, Any], read_blob: Callable[[str], bytes], unpickle: Callable[[bytes], Any] | None
) -> LoadedHook:
    """Make a specified hook callable in this process.

    Raises:
        ToolError: the code can't be imported or read, or is no hook of this point any more.
    """
    source = spec["source"]
    try:
        function = had_from(source, read_blob, unpickle)
    except Exception as error:
        raise unloadable(f"hook {spec['name']!r}", source, error) from error
    definition = getattr(function, "__understudy_hook__", None)
    if not isinstance(definition, HookDefinition) or definition.point != spec["point"]:
        raise ToolError(f"hook {spec['name']!r} can't be loaded here: it is no {spec['point']} hook any more.")
    return LoadedHook(spec["name"], function, inspect.iscoroutinefunction(function))


@dataclass
class Wanted:
    """What the hooks of a point want together.

    Attributes:
        text: as they left it.
        messages: to be added, in order; among them records of what is replaced in the next model call.
        refused: why the run does not go on; None if it does.
        stopped: the answer with which the run ends; None if it does not.
        goes_on: why the run does not end; None if it does.
    """

    text: str
    messages: list[Message] = field(default_factory=list)
    refused: str | None = None
    stopped: str | None = None
    goes_on: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether no other hook is called."""
        return (self.refused, self.stopped, self.goes_on) != (None, None, None)

    def note(self, name: str, directive: Directive) -> None:
        """Take in what a hook of this name wants."""
        if isinstance(directive, Inject):
            text, visible = presentable(directive.text), directive.visibility
            self.messages.append(Message(directive.role, text, origin=f"hook:{name}", visibility=visible))
        elif isinstance(directive, Replace):
            changed = {what: getattr(directive, what) for what in directive.given() - {"text", "arguments"}}
            if changed:
                self.messages.append(Message("user", origin=REQUEST, visibility=NEVER, extra=encodable(changed)))
            self.text = self.text if directive.text is None else presentable(directive.text)
        elif isinstance(directive, Refuse):
            self.refused = presentable(f"the hook {name} refused: {directive.reason}")
        elif isinstance(directive, Stop):
            self.stopped = presentable(directive.text)
        else:
            self.goes_on = presentable(directive.reason)
            self.messages.append(Message("user", self.goes_on, origin=f"hook:{name}"))


class HookFailed(Exception):
    """A hook raised, did not return in time, can't be loaded, or returned what means nothing; the text says which, and
    may be the run's error: it has no secrets."""

    def __init__(self, text: str) -> None:
        super().__init__(presentable(text))


class Hooks:
    """The hooks of a session's agent, as its activation calls them.

    Without hooks at a point nothing is done there, nothing awaited.
    """

    def __init__(
        self,
        window: Window,
        load: Callable[[dict[str, Any]], Awaitable[LoadedHook]],
        expect: Callable[[float], None],
    ) -> None:
        """`expect` gets the monotonic time until which code of the user's may run."""
        self._window = window
        self._load = load
        self._expect = expect
        self._at: dict[str, list[dict[str, Any]]] = {}
        self._beside: list[dict[str, Any]] = []
        for spec in window.spec.get("hooks", ()):
            (self._beside if spec.get("parallel") else self._at.setdefault(spec["point"], [])).append(spec)
        self._begun: list[asyncio.Future[Any]] = []
        self._shown: set[str] = set()

    @property
    def stuck(self) -> bool:
        """Whether a synchronous hook may go on that outlived its timeout, or that nobody waits for any more: this
        process must be replaced."""
        return any(map(may_go_on, self._begun))

    def has(self, point: str) -> bool:
        """Whether somebody is to be called at a point."""
        return point in self._at

    async def see(self, point: str, *, text: str = "", outcome: str = "") -> None:
        """Call the hooks of a point that is only seen."""
        for spec in self._at.get(point, ()):
            await self._observe(spec, self._context(point, text=text, outcome=outcome))

    async def ask(
        self, point: str, *, text: str = "", outcome: str = "", calls: tuple[tuple[str, ...], ...] = ()
    ) -> Wanted:  # fmt: skip
        """Call the hooks of a point, each with the text as those before it left it, until one ends it."""
        wanted = Wanted(text)
        for spec in self._at.get(point, ()):
            context = self._context(point, text=wanted.text, outcome=outcome, calls=calls)
            if await self._add(wanted, spec, context):
                break
        return wanted

    async def before_model(self, round_number: int, request: Callable[[list[Message]], ModelRequest]) -> Wanted:
        """Call the hooks before a model call, each with the messages as those before it left them.

        Args:
            request: what the model is asked with these messages behind the others.
        """
        wanted = Wanted("")
        for spec in self._at.get("before_model", ()):
            asked = from_json(request(wanted.messages).messages)
            context = self._context("before_model", round_number=round_number, messages=asked)
            if await self._add(wanted, spec, context):
                break
        return wanted

    async def beside_model(self, request: ModelRequest, *, redone: bool) -> dict[str, Any] | None:
        """Call the hooks that run beside a model call, all at once. The first that trips ends the others; of several
        that do at the same time, the first in the specification's order.

        Returns:
            Why the call's answer is for nobody, as its error; None if they let it pass.
        """
        number = int(request.wait_key.rpartition("/")[2])
        contexts = [
            self._context(PARALLEL, round_number=number, messages=from_json(request.messages), redone=redone)
            for _ in self._beside
        ]
        return await first_tripped([self._guard(*each) for each in zip(self._beside, contexts, strict=True)])

    async def _guard(self, spec: dict[str, Any], context: HookContext) -> dict[str, Any] | None:
        """Call a hook beside a model call; what it trips with, if it does."""
        wanted = Wanted("")
        await self._add(wanted, spec, context)
        return refusal(spec["name"], wanted.refused, wanted.stopped, context.session_id)

    async def _add(self, wanted: Wanted, spec: dict[str, Any], context: HookContext) -> bool:
        """Call a hook and note what it wants; True if no other is called after that."""
        try:
            found = await self._call(spec, context)
        except HookFailed as failed:
            if not _fails_closed(spec):
                logger.warning("session %s goes on: %s", context.session_id, failed)
                return False
            wanted.refused = str(failed)
            return True
        for directive in found:
            wanted.note(spec["name"], directive)
        return wanted.is_over

    async def before_tool(self, call: CallState, tool: dict[str, Any]) -> Permitted | Outcome:
        """Call the hooks before a tool call is executed.

        Returns:
            The call as it shall be executed, and whether a person must approve it first; or its outcome if it shall
            not be.
        """
        reasons: tuple[str, ...] = ()
        for spec in self._at.get("before_tool", ()):
            # Approved or asked about, the hook was called before, perhaps by a process that died.
            context = self._of_call("before_tool", call, redone=self._window.redone or call.state != "requested")
            try:
                wanted = await self._call(spec, context)
                for replaced in (one for one in wanted if isinstance(one, Replace)):
                    call = structs.replace(call, arguments=_fitting(spec, tool, replaced))
                asks = [one.reason for one in wanted if isinstance(one, Ask)]
                reasons += tuple(presentable(f"The hook {spec['name']} asks: {reason}") for reason in asks)
                refusal = next((one for one in wanted if isinstance(one, Refuse)), None)
                if refusal is None:
                    continue
                reason = f"the hook {spec['name']} refused it: {refusal.reason}"
            except HookFailed as failed:
                if not _fails_closed(spec):
                    logger.warning("session %s goes on: %s", context.session_id, failed)
                    continue
                reason = str(failed)
            if call.state in ("requested", "approved"):
                return Outcome("refused", presentable(f"not executed: {reason}"))
            return Outcome("interrupted", presentable(f"{INTERRUPTED}; not executed again: {reason}"))
        return Permitted(call, reasons)

    async def after_tool(self, call: CallState, outcome: Outcome) -> Outcome:
        """Call the hooks after a tool call, whatever its outcome; returns it with the text that the model gets."""
        # What a finished call's result is was known before; so it may be for one that a person was asked about.
        redone = self._window.redone or call.state in ("finished", "asked") or call.call_id in self._shown
        self._shown.add(call.call_id)  # if a cancel ends this, it is shown once more
        for spec in self._at.get("after_tool", ()):
            context = self._of_call("after_tool", call, outcome, redone=redone)
            for wanted in await self._observe(spec, context):
                if outcome.outcome == "repeated":  # its text stays, since repetitions are counted by it
                    logger.warning("session %s: the text of a repeated call stays", context.session_id)
                else:
                    outcome = _replaced(outcome, presentable(wanted.text))
        for spec in self._at.get("tool_error", ()) if outcome.outcome != "ok" else ():
            await self._observe(spec, self._of_call("tool_error", call, outcome, redone=redone))
        return outcome

    async def _observe(self, spec: dict[str, Any], context: HookContext) -> Sequence[Any]:
        """Call a hook whose failure holds nobody up."""
        try:
            return await self._call(spec, context)
        except HookFailed as failed:
            logger.warning("session %s goes on: %s", context.session_id, failed)
            return ()

    async def _call(self, spec: dict[str, Any], context: HookContext) -> Sequence[Any]:
        """What the hook wants: nothing, or directives that it may return at its point.

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
        self._expect(time.monotonic() + timeout)  # to have its code may have taken long
        outcome, found, _ = await run(bound, {}, timeout, render=_same, begun=self._begun.append)
        if outcome != "ok":
            raise HookFailed(f"the hook {name} failed: {found}")
        wanted = () if found is None else found if isinstance(found, (list, tuple)) else (found,)
        parallel = spec.get("parallel", False)
        problems = (problem_of(context.point, one, context.outcome, parallel=parallel) for one in wanted)
        problem = next((text for text in problems if text is not None), None)
        if problem is not None:
            raise HookFailed(f"the hook {name} failed: {problem}")
        return wanted

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
            arguments=arguments_of(call.arguments), outcome=outcome.outcome if outcome else "",
            text=outcome.content if outcome else "",
        )  # fmt: skip


def _replaced(outcome: Outcome, text: str) -> Outcome:
    """The outcome with a hook's text; what the text has no placeholder of is not attached any more."""
    numbered = enumerate(outcome.attachments, start=1)
    kept = tuple(part for number, part in numbered if begins(number) in text)
    return replace(outcome, content=text, attachments=kept)


def arguments_of(text: str) -> dict[str, Any] | None:
    """A call's arguments, as JSON gives them; None where they are no JSON object."""
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _fitting(spec: dict[str, Any], tool: dict[str, Any], wanted: Replace) -> str:
    """The arguments that a hook gave, as JSON text. Raises `HookFailed` where the tool does not take such."""
    try:
        text = json.dumps(wanted.arguments, allow_nan=False)
        validator = argument_validator(tool["parameters"], from_server="mcp" in tool["source"])
        problem = next(validator.iter_errors(json.loads(text)), None)
    except Exception as error:  # what JSON can't say, or the schema's own recursion
        raise HookFailed(f"the hook {spec['name']} failed: its arguments can't be used: {error}") from error
    if problem is not None:
        where = f"{problem.json_path}: {problem.message}"
        raise HookFailed(f"the hook {spec['name']} failed: its arguments don't fit {tool['name']}: {where}")
    return text


def _fails_closed(spec: dict[str, Any]) -> bool:
    """Whether a failure of this hook is a refusal."""
    usual = "refuse" if spec["point"] in FAIL_CLOSED else "ignore"
    return bool(spec.get("on_failure", usual) == "refuse")


def _same(result: Any) -> Any:
    return result
