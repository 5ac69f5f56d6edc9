"""Running one tool call: arguments in, exactly one outcome out, whatever the tool does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from understudy.errors import ToolError, UnderstudyError
from understudy.messages import AGENT_PROCESS, Content, attached, interrupted, storable, text_of
from understudy.redaction import secret_values

from .results import Result, rendered
from .tools import LoadedTool, ToolContext

logger = logging.getLogger(__name__)

MAX_RESULT_CHARACTERS = 1_000_000
"""A longer result is cut in its middle: nobody needs 10 MB in a message. What of it a model is shown is less, and says
`AgentSpec.context`."""

CANCEL_GRACE = 2.0
"""Seconds an async tool has to end once it is cancelled; one that needs more is treated as stuck."""

MIN_SECRET_CHARACTERS = 8
"""Values of secret environment variables shorter than this are not looked for: they would match by chance."""

THREAD_PREFIX = "understudy-tool-"
"""Begins the name of every thread that runs a tool, so that a frame can find one left behind."""

MAX_PROBLEM_CHARACTERS = 500

TOO_LATE = "too_late"
"""No outcome of a call: the time until which its function might begin was over before its first instruction."""


def now() -> int:
    """Microseconds since 1970 UTC."""
    return time.time_ns() // 1000


@dataclass(frozen=True)
class Outcome:
    """How a tool call ended.

    Attributes:
        outcome: one of those that `ToolFinished` names.
        content: what the model is shown.
        attachments: images and documents that the model is shown as well, as content parts; the content has a
            placeholder for each.
        duration: microseconds; 0 for one that was not executed.
        started_at: microseconds since 1970 UTC.
        stuck_thread: code of the tool still runs in this process, which must be replaced before the session goes on.
    """

    outcome: str
    content: str
    duration: int = 0
    started_at: int = field(default_factory=now)
    stuck_thread: bool = False
    attachments: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, result: dict[str, Any]) -> Outcome:
        """Of a call's row in the store (`CallState.result`)."""
        content = result["content"]
        attachments = tuple(attached(content))
        return cls(**{**result, "content": text_of(content) if attachments else content}, attachments=attachments)

    @property
    def said(self) -> Content:
        """The content of the call's message."""
        return [{"type": "text", "text": self.content}, *self.attachments] if self.attachments else self.content


class Runnable(Protocol):
    """A function of the user's: a tool, or a hook."""

    @property
    def name(self) -> str: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def is_async(self) -> bool: ...


class _InvalidArguments(Exception):
    """The arguments can't be given to the tool; the message is for the model."""


def bind(tool: LoadedTool, arguments: str, context: ToolContext) -> dict[str, Any] | Outcome:
    """The keyword arguments of one call of `tool`, or the call's outcome if they can't be given to it.

    Args:
        arguments: JSON text as the model wrote it.
    """
    return _bound(tool, lambda: _bind(tool, arguments), context)


def bind_checked(tool: LoadedTool, values: dict[str, Any], context: ToolContext) -> dict[str, Any] | Outcome:
    """The same, of arguments that fit the schema, as `bind` has found in another process."""
    return _bound(tool, lambda: _converted(tool, values), context)


def _bound(tool: LoadedTool, find: Callable[[], dict[str, Any]], context: ToolContext) -> dict[str, Any] | Outcome:
    try:
        keywords = find()
    except _InvalidArguments as error:
        outcome, content = "invalid", str(error)
    except Exception as error:  # not the model's fault, say a parameter's type that can't be built in this process
        outcome, content = _failure(tool, error)
    else:
        return keywords if tool.context_parameter is None else {**keywords, tool.context_parameter: context}
    return Outcome(outcome, presentable(content))


def _ignore(_work: asyncio.Future[Any]) -> None:
    pass


async def execute(
    tool: LoadedTool, keywords: dict[str, Any], timeout: float, before: float = math.inf,
    begun: Callable[[asyncio.Future[Any]], None] = _ignore,
) -> Outcome | None:  # fmt: skip
    """Run one call of `tool` and return how it ended; None if it was too late to begin, and nothing was executed.

    An async function runs on this event loop, any other one in a daemon thread of its own. Nothing that the tool does
    is raised, except `CancelledError` when the caller cancels; a cancelled async tool has been given `CANCEL_GRACE` to
    clean up by then, a cancelled thread goes on.

    Args:
        timeout: seconds for the call.
        before: monotonic time; nothing that can wait stands between the comparison with it and the function.
        begun: is given what runs the function; an async one that ignores its cancellation is not done afterwards.
    """
    started_at, begin = now(), time.monotonic_ns()
    try:
        outcome, content, stuck = await run(tool, keywords, timeout, before=before, begun=begun)
    except Exception as error:
        (outcome, content), stuck = _failure(tool, error), False
    if outcome == TOO_LATE:
        return None
    duration = (time.monotonic_ns() - begin) // 1000
    return _outcome(outcome, content, duration, started_at, stuck)


def _outcome(outcome: str, content: Result | str, duration: int, started_at: int, stuck: bool) -> Outcome:
    """The outcome of a call whose function returned a result, or with the text that says what went wrong."""
    result = Result(content) if isinstance(content, str) else content
    return Outcome(outcome, presentable(result.text), duration, started_at, stuck, result.attachments)


def presentable(text: str) -> str:
    """`text` as a message may hold it: secrets replaced, storable as UTF-8 everywhere, not too long."""
    for secret in known_secrets():
        text = text.replace(secret, "***")
    text = storable(text)
    if len(text) <= MAX_RESULT_CHARACTERS:
        return text
    note = f"\n[… {len(text)} characters in all; the middle is left out …]\n"
    half = (MAX_RESULT_CHARACTERS - len(note)) // 2
    return text[:half] + note + text[-half:]


def known_secrets() -> list[str]:
    """Values of this process's environment that must not be shown, as they are and as JSON writes them; longest first,
    as one may contain another."""
    values = [value for value in secret_values(os.environ) if len(value) >= MIN_SECRET_CHARACTERS]
    found = {text for value in values for text in (value, json.dumps(value)[1:-1])}
    return sorted(found, key=len, reverse=True)


def _bind(tool: LoadedTool, arguments: str) -> dict[str, Any]:
    """The keyword arguments for the function."""
    try:
        # Endpoints send an empty text for a call without arguments.
        values = json.loads(arguments, parse_constant=_refuse_constant) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _InvalidArguments(
            f"The arguments are not valid JSON: {error}. Nothing was executed. Repeat the call with valid JSON."
        ) from None
    try:
        errors = sorted(tool.validator.iter_errors(values), key=lambda error: error.json_path)
        problems = [f"{error.json_path}: {error.message}" for error in errors]
    except Exception as error:  # a value that the schema's own arithmetic or recursion can't take
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise _misfit(tool, problems)
    return _converted(tool, values)


def _converted(tool: LoadedTool, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the function's types want them."""
    adapters, problems = tool.adapters, list[str]()
    keywords: dict[str, Any] = {}
    for name, value in values.items():
        try:
            keywords[name] = _convert(tool, adapters.get(name), name, value)
        except ValueError as error:  # pydantic's ValidationError is one
            problems.append(f"$.{name}: {error}")
    if problems:
        raise _misfit(tool, problems)
    return keywords


def _misfit(tool: LoadedTool, problems: list[str]) -> _InvalidArguments:
    lines = "\n".join(f"- {_shortened(problem)}" for problem in problems)
    return _InvalidArguments(
        f"The arguments don't fit the parameters of {tool.name}:\n{lines}\n"
        "Nothing was executed. Repeat the call with corrected arguments."
    )


def _convert(tool: LoadedTool, adapter: Any, name: str, value: Any) -> Any:
    if adapter is not None:
        return adapter.validate_json(json.dumps(value))
    # JSON has one kind of number, so 3.0 is an integer to a schema, but not to `range`.
    if isinstance(value, float) and tool.parameters["properties"].get(name, {}).get("type") == "integer":
        return int(value)
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_PROBLEM_CHARACTERS else f"{text[:MAX_PROBLEM_CHARACTERS]}…"


async def reconcile(
    tool: LoadedTool, context: ToolContext, timeout: float, before: float,
    begun: Callable[[asyncio.Future[Any]], None] = _ignore, died: str = AGENT_PROCESS,
) -> Outcome | None:  # fmt: skip
    """Ask a tool's own function what became of a call; whatever goes wrong with that is reported to the model.

    It is run as a tool is (`execute`): None if it was too late to begin.

    Args:
        died: who was at the call.
    """
    started_at, begin = now(), time.monotonic_ns()
    outcome, stuck = "interrupted", False
    content: Result | str = interrupted(died)
    if tool.reconcile is not None:
        wanted = _Wanted()
        finder = _finder(tool, tool.reconcile, context, wanted)
        try:
            outcome, content, stuck = await run(finder, {}, timeout, before=before, begun=begun)
        finally:
            wanted.end()
        if outcome == TOO_LATE:
            return None
        if outcome != "ok":
            outcome, content = "interrupted", reconcile_failed(str(content), died)
    return _outcome(outcome, content, (time.monotonic_ns() - begin) // 1000, started_at, stuck)


def reconcile_failed(problem: str, died: str) -> str:
    """What the model reads of a call in doubt about which nothing could be found out."""
    return f"{interrupted(died)}; finding out failed: {problem}"


@dataclass(frozen=True)
class _Finder:
    """A tool's function that finds out what became of a call, with its argument."""

    name: str
    function: Callable[[], Any]
    is_async: bool


class _Wanted:
    """What a thread waits for on the event loop; it is cancelled when nobody wants it any more."""

    def __init__(self) -> None:
        self._ended = False
        self._waiting: list[concurrent.futures.Future[Any]] = []

    def wait(self, answer: concurrent.futures.Future[Any]) -> Any:
        """In the thread."""
        self._waiting.append(answer)
        if self._ended:  # looked at behind the append, as `end` sets it before it looks: one of both cancels
            answer.cancel()
        return answer.result()

    def end(self) -> None:
        """On the event loop."""
        self._ended = True
        for answer in self._waiting:
            answer.cancel()


def _finder(tool: LoadedTool, function: Callable[..., Any], context: ToolContext, wanted: _Wanted) -> _Finder:
    loop = asyncio.get_running_loop()
    # Of an object what is called is its class's `__call__`.
    name, kinds = f"on_crash of {tool.name}", (function, type(function).__call__)
    is_async = any(inspect.iscoroutinefunction(kind) for kind in kinds)
    if is_async:
        return _Finder(name, partial(function, context), is_async)

    def ask() -> Any:
        found = function(context)
        if asyncio.iscoroutine(found):  # of a function that is not async itself, say a lambda; its thread waits for it
            return wanted.wait(asyncio.run_coroutine_threadsafe(found, loop))
        return found

    return _Finder(name, ask, is_async)


async def run(
    tool: Runnable, keywords: dict[str, Any], timeout: float, render: Callable[[Any], Any] = rendered, *,
    before: float = math.inf, begun: Callable[[asyncio.Future[Any]], None] = _ignore,
) -> tuple[str, Any, bool]:  # fmt: skip
    """Outcome (`ok`, `error`, `timeout` or `TOO_LATE`), what `render` made of the result (or a text that says what went
    wrong), and whether code of the function still runs."""
    work: asyncio.Future[tuple[str, Any]]
    if tool.is_async:
        work = asyncio.create_task(_run_async(tool, keywords, render, before))
    else:
        try:
            work = _start_thread(tool, keywords, render, before)
        except RuntimeError as error:  # the system has no thread left
            return "error", _error_text(error), False
    begun(work)
    try:
        done, _ = await asyncio.wait({work}, timeout=timeout)
    except asyncio.CancelledError:
        await _stop(work)
        raise
    if not done:
        stopped = await _stop(work)
        return "timeout", f"{tool.name} did not finish within {timeout:g} s and was given up.", not stopped
    if work.cancelled():  # by the tool itself
        return "error", f"{tool.name} cancelled itself.", False
    return *work.result(), False


def may_go_on(work: asyncio.Future[Any]) -> bool:
    """Whether what was begun (`execute`) may be at work still: a task that ignores its cancellation, or a thread that
    nobody waits for any more."""
    return not work.done() or (work.cancelled() and not isinstance(work, asyncio.Task))


async def _stop(work: asyncio.Future[tuple[str, Any]]) -> bool:
    """Cancel what runs and say whether it has ended. A thread can't be cancelled."""
    work.cancel()
    if isinstance(work, asyncio.Task):
        await asyncio.wait({work}, timeout=CANCEL_GRACE)
    return not may_go_on(work)


async def _run_async(
    tool: Runnable, keywords: dict[str, Any], render: Callable[[Any], Any], before: float
) -> tuple[str, Any]:
    if time.monotonic() >= before:  # a task's first step can be delayed
        return TOO_LATE, None
    try:
        return "ok", render(await tool.function(**keywords))
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit too: in a task it would end the event loop
        return _failure(tool, error)


def _start_thread(
    tool: Runnable, keywords: dict[str, Any], render: Callable[[Any], Any], before: float
) -> asyncio.Future[tuple[str, Any]]:
    """Run the function in a thread of its own: one that never ends blocks neither a pool nor the process's exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[str, Any]] = loop.create_future()

    def deliver(result: tuple[str, Any]) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        result: tuple[str, Any] = TOO_LATE, None
        try:
            if time.monotonic() < before:  # a thread's start can be delayed
                result = "ok", render(tool.function(**keywords))
        except BaseException as error:
            result = _failure(tool, error)
        try:
            loop.call_soon_threadsafe(deliver, result)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(work,), name=THREAD_PREFIX + tool.name, daemon=True
    )
    thread.start()
    return future


def _failure(tool: Runnable, error: BaseException) -> tuple[str, str]:
    if not isinstance(error, ToolError):  # that one is a tool's way to say no
        logger.warning("%s raised", tool.name, exc_info=error)
    return "error", _error_text(error)


def _error_text(error: BaseException) -> str:
    try:
        text = error.message if isinstance(error, UnderstudyError) else str(error)
    except Exception:
        text = "(its message can't be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
