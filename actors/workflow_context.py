"""What a workflow's code may do: each step is recorded, and has the same result each time the code is run again."""

from __future__ import annotations

import inspect
import itertools
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from understudy.errors import InvalidInput, StepFailed, StepTimeout, UnderstudyError, WorkflowError
from understudy.identifiers import identifier_problem
from understudy.json_text import from_json, to_json
from understudy.messages import storable
from understudy.workflows import (
    AGENT_STEP,
    ASK_STEP,
    EVENT_STEP,
    MODEL_AGENT,
    MODEL_STEP,
    PUBLISHED,
    SLEEP_STEP,
    TIMEOUT_STEP,
    WORKFLOW_STEP,
)

from .awaited import Branches, ContinueAsNew, Limited, Result, Taken, Wanted
from .execution import MAX_RESULT_CHARACTERS
from .parameters import context_parameter
from .results import rendered
from .step_values import result_type, typed
from .tools import ToolDefinition
from .workflow import arguments_of, definition_of

LONGEST_SLEEP = 10 * 366 * 86_400.0
"""Seconds: ten years."""

MOST_BRANCHES = 2_000
"""So many branches are at work at once: the steps that they begin with are one transaction, at up to 0.6 ms each, and a
node service that is busy with one thing for 10 s counts as hung."""


@dataclass(frozen=True)
class Retry:
    """How often a step that failed is done again.

    Attributes:
        attempts: in all.
        backoff: seconds before the second attempt; `factor` times as long before each that follows, at most `longest`.
    """

    attempts: int = 3
    backoff: float = 1.0
    factor: float = 2.0
    longest: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or min(self.backoff, self.factor, self.longest) < 0:
            raise InvalidInput("a retry needs at least one attempt, and pauses that are not negative")

    def pause(self, attempt: int) -> float:
        """Seconds after so many attempts."""
        return min(self.longest, self.backoff * self.factor ** (attempt - 1))


@dataclass(eq=False)
class ToolWanted(Wanted):
    """A call of a tool. `item`: the tool's function; None for one that the specification has by its name."""

    item: Any = None


@dataclass(eq=False)
class ChildWanted(Wanted):
    """What a session of its own does.

    Attributes:
        agent: of the workflow's specification.
        task: the session's input.
        changes: of the agent's specification.
        output_type: what its answer is made to.
        conversation: the name of one that it goes on with; empty: it begins with nothing.
    """

    agent: str = ""
    task: str = ""
    changes: dict[str, Any] | None = None
    output_type: Any = None
    conversation: str = ""


@dataclass(eq=False)
class StoreWanted(Wanted):
    """What the store answers, or a person. `due_at`: microseconds since 1970, of a `sleep`; None for `seconds`."""

    seconds: float | None = None
    due_at: int | None = None
    prompt: str = ""
    options: tuple[str, ...] = ()
    default: str | None = None
    name: str = ""


class WorkflowContext:
    """The steps that a workflow's code may take. Each is awaited; what is not awaited does not happen.

    Attributes:
        session_id, run_id: of the workflow.
    """

    def __init__(self, session_id: str, run_id: str) -> None:
        self.session_id, self.run_id = session_id, run_id
        self._undo: list[Callable[[], Awaitable[Any]]] = []

    def tool(self, tool: Any, *arguments: Any, retry: Retry | None = None, **keywords: Any) -> Awaitable[Any]:
        """Call a tool, a function that is marked with `@tool` or the name of one in `@workflow(tools=…)`; its value.

        The tool's own rules apply: `on_crash`, `timeout`, `approve`, `sandbox`, resources. Values are JSON; if the
        function has a return annotation, the value is converted to that type.

        Raises:
            StepTimeout: it timed out.
            StepFailed: it raised, was refused, or its outcome is not known (`details["outcome"]`).
        """
        definition = getattr(tool, "__understudy_tool__", None)
        if isinstance(tool, str):
            if arguments:
                raise InvalidInput(f"tool {tool!r} takes its arguments by name")
            name, given, kind = tool, keywords, None
        elif isinstance(definition, ToolDefinition):
            name, given, kind = definition.name, _bound(tool, arguments, keywords), result_type(tool)
        else:
            raise InvalidInput(f"{tool!r} is neither the name of a tool nor a function decorated with @tool")
        item = None if isinstance(tool, str) else tool
        return self._again(lambda: ToolWanted(name, _json(given), partial(_value_of, kind=kind), item), retry)

    def agent(
        self, agent: Any, task: str, *, output_type: Any = None, instructions: str | None = None,
        model: str | None = None, conversation: str = "", retry: Retry | None = None,
    ) -> Awaitable[Any]:  # fmt: skip
        """Have an agent do a task in a session of its own; its answer: a text, or the agent's output.

        Args:
            agent: an `AgentSpec`, or the name of one in `@workflow(agents=…)`.
            output_type, instructions, model: instead of the agent's own.
            conversation: a name: the session begins with a copy of the messages of the step with this agent and this
                name that completed last, so the agent continues from there.

        Raises:
            StepFailed: its run did not complete (`details["status"]`).
        """
        name = agent if isinstance(agent, str) else getattr(agent, "name", None)
        if not isinstance(name, str):
            raise InvalidInput(f"{agent!r} is neither an AgentSpec nor the name of an agent")
        if not isinstance(task, str) or not task.strip():
            raise InvalidInput(f"the task for agent {name!r} must be a text")
        own = getattr(agent, "output_type", None)
        changes = {"output_type": output_type, "instructions": instructions, "model": model}
        kind = output_type if output_type is not None else own
        return self._child(AGENT_STEP, name, task, changes, kind, retry, conversation)

    def model(
        self, model: str | None, prompt: str, *, output_type: Any = None, instructions: str = "",
        parameters: dict[str, Any] | None = None, retry: Retry | None = None,
    ) -> Awaitable[Any]:  # fmt: skip
        """Ask a model once, in a session of its own that has no tools; its answer, as `output_type` if one is given.

        Args:
            model: None for the one that the workflow's specification, or the cluster, has.

        Raises:
            StepFailed: the call failed, or no answer fits the type.
        """
        if not isinstance(prompt, str) or not prompt.strip():
            raise InvalidInput("the prompt for a model must be a text")
        changes = {
            "output_type": output_type, "instructions": instructions or None, "model": model, "parameters": parameters,
        }  # fmt: skip
        return self._child(MODEL_STEP, MODEL_AGENT, prompt, changes, output_type, retry)

    def workflow(self, workflow: Any, *arguments: Any, retry: Retry | None = None, **keywords: Any) -> Awaitable[Any]:
        """Run another workflow in a session of its own; what it returns.

        Raises:
            StepFailed: its run did not complete.
        """
        definition = definition_of(workflow)
        if definition is None:
            raise InvalidInput(f"{workflow!r} is no function decorated with @workflow")
        task = _json(arguments_of(workflow, arguments, keywords))
        return self._child(WORKFLOW_STEP, definition.name, task, {}, result_type(workflow), retry)

    def _child(
        self, step: str, agent: str, task: str, changes: dict[str, Any], kind: Any, retry: Retry | None,
        conversation: str = "",
    ) -> Awaitable[Any]:  # fmt: skip
        given = {name: value for name, value in changes.items() if value is not None}
        said: dict[str, Any] = {"agent": agent, "task": task}
        said |= {"conversation": conversation} if conversation else {}
        said |= {name: value for name, value in given.items() if name != "output_type"}
        read = partial(_value_of, kind=kind)
        return self._again(lambda: ChildWanted(step, _json(said), read, agent, task, given, kind, conversation), retry)

    def sleep(self, seconds: float) -> Awaitable[None]:
        """Wait so many seconds; no process is held meanwhile. At least 0, at most ten years."""
        if not 0 <= seconds <= LONGEST_SLEEP:
            raise InvalidInput(f"a workflow can't sleep for {seconds} seconds: at least 0, at most {LONGEST_SLEEP:.0f}")
        return StoreWanted(SLEEP_STEP, _json({"seconds": seconds}), _nothing_of, seconds=seconds)

    def until(self, moment: datetime) -> Awaitable[None]:
        """Wait until a time; do not wait if it has passed. It must have a time zone."""
        if not isinstance(moment, datetime) or moment.tzinfo is None:
            raise InvalidInput("until takes a datetime with a time zone")
        due_at = round(moment.timestamp() * 1_000_000)
        said = {"until": moment.astimezone(UTC).isoformat()}
        return StoreWanted(SLEEP_STEP, _json(said), _nothing_of, due_at=due_at)

    def ask(
        self, prompt: str, *, options: Sequence[str] = (), timeout: float | None = None, default: str | None = None
    ) -> Awaitable[str]:
        """Ask a person (`Session.answer`, `understudy answer`, the console); the answer's text.

        Args:
            options: answers that are offered.
            timeout: seconds; None for no limit.
            default: the answer if nobody answers in time.

        Raises:
            StepTimeout: nobody answered in time, and there is no default.
            StepFailed: the question was withdrawn, or answered as failed.
        """
        if not isinstance(prompt, str) or not prompt.strip():
            raise InvalidInput("a question must be a text")
        if not all(isinstance(text, str) for text in (*options, default or "")):
            raise InvalidInput("the options and the default of a question must be texts")
        _check_timeout(timeout)
        said = {"prompt": prompt, "options": list(options), "timeout": timeout, "default": default}
        return StoreWanted(
            ASK_STEP, _json(said), _text_of, seconds=timeout, prompt=prompt, options=tuple(options), default=default
        )

    def event(self, name: str, *, timeout: float | None = None) -> Awaitable[Any]:
        """Wait for a signal of this name (`Session.signal`); its payload. One that has already come is taken at once.

        Raises:
            StepTimeout: none came in so many seconds.
        """
        problem = identifier_problem(name, "the name of an event")
        if problem is not None:
            raise InvalidInput(problem)
        _check_timeout(timeout)
        said = {"name": name, "seconds": timeout}
        return StoreWanted(EVENT_STEP, _json(said), _value_of, seconds=timeout, name=name)

    def gather(self, *steps: Awaitable[Any], limit: int | None = None, return_exceptions: bool = False) -> Any:
        """Do steps, or async functions of several steps, concurrently; their results in the given order.

        If one fails, no more are started, those under way are awaited, and the first error is raised.

        Args:
            limit: how many at a time: 1 to 2,000; None for 2,000.
            return_exceptions: errors are results, and are not raised.
        """
        return _branches(list(steps), None, limit, return_exceptions)

    def foreach(
        self, items: Iterable[Any], function: Callable[[Any], Awaitable[Any]], *, limit: int = 16,
        return_exceptions: bool = False,
    ) -> Any:  # fmt: skip
        """Do the same for each item, at most `limit` at a time; the results in the items' order. See `gather`."""
        return _branches(list(items), function, limit, return_exceptions)

    def within(self, seconds: float, step: Awaitable[Any]) -> Awaitable[Any]:
        """Do a step, or an async function of several steps, within so many seconds; what it returns.

        When the time is over, the function goes no further, and its open steps are ended: sub-agents are cancelled,
        questions withdrawn, tools stopped. When all have ended, the error is raised.

        Raises:
            StepTimeout: it was not done in time.
        """
        _check_timeout(seconds)
        timer = StoreWanted(TIMEOUT_STEP, _json({"seconds": seconds}), _nothing_of, seconds=seconds)
        return Limited(step, timer, lambda: StepTimeout(f"it was not done in {seconds:g} seconds"))

    async def now(self) -> datetime:
        """The time, in UTC."""
        found: float = await Taken("now", lambda _replays: time.time())
        return datetime.fromtimestamp(found, UTC)

    async def random(self) -> float:
        """A random number, from 0 to 1."""
        return float(await Taken("random", lambda _replays: random.random()))

    async def uuid(self) -> str:
        """A random UUID."""
        return str(await Taken("uuid", lambda _replays: str(uuid.uuid4())))

    async def patched(self, name: str) -> bool:
        """Whether this run uses the changed code: True for runs that reach this call for the first time after the
        change, False for those whose log already continues beyond it without the change. It stays the same for a run.

        Keep the old branch as long as there are runs that need it (`understudy ps`).
        """
        return bool(await Taken("patched", lambda replays: not replays, key=f"patched:{name}"))

    async def publish(self, name: str, value: Any) -> None:
        """Let others see a value (`Session.query`), until another one of this name is published."""
        problem = identifier_problem(name, "the name of a value")
        if problem is not None:
            raise InvalidInput(problem)
        data = from_json(_json(value))
        await Taken(PUBLISHED + name, lambda _replays: data)

    def on_failure(self, function: Callable[..., Awaitable[Any]], *arguments: Any, **keywords: Any) -> None:
        """Register a compensation: it is done if the workflow fails after this, the one that was registered last first.

        If one fails itself, that is recorded, and the others are done. A workflow that is cancelled undoes nothing.

        Args:
            function: async, with steps of this context.
        """
        self._undo.append(partial(function, *arguments, **keywords))

    def continue_as_new(self, **arguments: Any) -> Awaitable[Any]:
        """Begin again with another input and an empty record, in the same run: for workflows that run indefinitely."""
        if self._undo:
            raise WorkflowError("what on_failure would undo can't be carried over: undo it, or finish it, before")
        raise ContinueAsNew(arguments)

    async def whole(self, function: Callable[..., Awaitable[Any]], arguments: dict[str, Any]) -> Any:
        """The code with all that follows from it."""
        try:
            value = await function(self, **arguments)
            size = len(_json(value))
            if size > MAX_RESULT_CHARACTERS:
                limit = f"has {size} characters as JSON, and may have {MAX_RESULT_CHARACTERS}"
                raise WorkflowError(f"what the workflow returns {limit}")
            return value
        except Exception:
            while self._undo:
                undo = self._undo.pop()
                try:
                    await undo()
                except Exception as error:
                    await Taken("undo_failed", partial(_said_of, error))
            raise

    def _again(self, begin: Callable[[], Wanted], retry: Retry | None) -> Awaitable[Any]:
        return begin() if retry is None or retry.attempts == 1 else _Again(self, begin, retry)


@dataclass(frozen=True, eq=False)
class _Again:
    """A step that is done again if it fails."""

    context: WorkflowContext
    begin: Callable[[], Wanted]
    retry: Retry

    def __await__(self) -> Generator[Any, None, Any]:
        return self._done().__await__()

    async def _done(self) -> Any:
        for attempt in itertools.count(1):
            try:
                return await self.begin()
            except StepFailed:
                if attempt >= self.retry.attempts:
                    raise
            await self.context.sleep(self.retry.pause(attempt))


def _said_of(error: Exception, _replays: bool) -> str:
    return f"{type(error).__name__}: {error.message if isinstance(error, UnderstudyError) else error}"


def _branches(items: list[Any], begin: Callable[[Any], Any] | None, limit: int | None, keeps_errors: bool) -> Branches:
    if limit is not None and not 1 <= limit <= MOST_BRANCHES:
        raise InvalidInput(f"limit must be 1 to {MOST_BRANCHES}")
    return Branches(items, begin, limit or MOST_BRANCHES, keeps_errors)


@cache
def _signature(tool: Any) -> inspect.Signature:
    """What a tool's function takes, but for its context."""
    context, signature = context_parameter(tool), inspect.signature(tool)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != context]
    return signature.replace(parameters=kept)


def _bound(tool: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a tool's function by name."""
    try:
        return dict(_signature(tool).bind(*arguments, **keywords).arguments)
    except TypeError as error:
        raise InvalidInput(f"tool {getattr(tool, '__name__', tool)!r}: {error}") from None


def _check_timeout(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds <= LONGEST_SLEEP:  # so written, it is also true of a NaN
        raise InvalidInput(f"a timeout must be more than 0 and at most {LONGEST_SLEEP:.0f} seconds, not {seconds}")


def _json(value: Any) -> str:
    """Data as JSON text, always the same for the same data."""
    return storable(to_json(value) if isinstance(value, str) else rendered(value).text)


def _value_of(result: Result, kind: Any = None) -> Any:
    return typed(from_json(_text_of(result)), kind)


def _text_of(result: Result) -> str:
    if result.outcome != "ok":
        raise (StepTimeout if result.outcome == "timeout" else StepFailed)(result.text)
    return result.text


def _nothing_of(result: Result) -> None:
    if result.outcome != "ok":
        raise WorkflowError(result.text)
