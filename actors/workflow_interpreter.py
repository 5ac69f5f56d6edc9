"""A workflow's definition as a workflow's code: the steps of the definition are those of the context, and everything
else in it (conditions, templates, retries) follows from their results. So it does the same whenever it is run again."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from understudy.durations import seconds_of, time_of
from understudy.errors import InvalidInput, InvalidSpec, StepFailed, StepLimit, WorkflowDiverged, WorkflowError
from understudy.places import Place, shown
from understudy.workflow_definition.checking import converted
from understudy.workflow_definition.evaluation import NoValue, is_true
from understudy.workflow_definition.expressions import parse
from understudy.workflow_definition.steps import AT_ONCE, Branch, Definition, Foreach, Loop, Step, Wait
from understudy.workflow_definition.steps import Retry as RetryOptions
from understudy.workflow_definition.templates import rendered, text_of

from .workflow import WorkflowDefinition, options_problem
from .workflow_context import Retry, WorkflowContext
from .workflow_inputs import checked_inputs, misfits

Variables = dict[str, Any]

NOT_ARGUMENTS = frozenset({"self", "tool", "retry"})
"""Names that mean something else where a step calls a tool."""


TIMED = ("ask", "wait")
"""Kinds of steps that know how long they may take."""

FINAL = (WorkflowDiverged, StepLimit)
"""Errors about which no step can do anything."""


def as_workflow(
    definition: Definition, agents: Sequence[Any] = (), tools: Sequence[Any] = (), *, most_steps: int | None = None,
    **options: Any,
) -> Callable[..., Any]:  # fmt: skip
    """A definition as a function that is marked with `@workflow`: its keywords are the inputs.

    Args:
        agents, tools: those that its steps name.
        most_steps: that a run may come to; None for any number.
        options: see `@workflow`.

    Raises:
        InvalidSpec: there is no such option. What is wrong with the definition is reported when it is run.
    """

    async def done(context: WorkflowContext, /, **inputs: Any) -> Any:
        return await interpret(context, definition, inputs, most_steps)

    problem = options_problem(options)
    if problem is not None:
        raise InvalidSpec(f"workflow {definition.name!r} {problem}.")
    options = {"description": definition.description, **options}
    done.__understudy_workflow__ = WorkflowDefinition(  # type: ignore[attr-defined]
        definition.name, done, tuple(tools), tuple(agents), options=options, definition=definition
    )
    return done


def loaded(data: dict[str, Any], most_steps: int | None = None) -> Callable[..., Any]:
    """The same of a definition that was checked, in the specification of a session."""
    return as_workflow(converted(data), most_steps=most_steps)


async def interpret(
    context: WorkflowContext, definition: Definition, inputs: dict[str, Any], most_steps: int | None = None
) -> Any:
    """Do the steps of a definition; the workflow's result.

    Args:
        definition: one that has been checked.
        inputs: see `checked_inputs`.

    Raises:
        InvalidInput: the inputs are not those of the definition.
        StepFailed: a step failed for good.
        StepLimit: it comes to more steps than it may.
        WorkflowError: a condition or a template has no value.
    """
    variables = checked_inputs(definition, inputs)
    result = await _Interpreter(context, most_steps).steps(definition.steps, variables, ("steps",))
    return result if definition.output is UNSET else _rendered(definition.output, variables, ("output",))


class _Interpreter:
    def __init__(self, context: WorkflowContext, most_steps: int | None) -> None:
        self._context = context
        self._most_steps, self._steps, self._undoes = most_steps, 0, False

    def _count(self) -> None:
        """Come to a step, or to another try of one: also what asks for nothing has an end then."""
        self._steps += 1
        if self._most_steps is not None and self._steps > self._most_steps:
            raise StepLimit(f"it may come to {self._most_steps} steps in a run, and would come to more")

    async def steps(self, steps: list[Step], variables: Variables, place: Place) -> Any:
        """Steps one after the other; the result of the last one. Their results become variables."""
        result = None
        for index, step in enumerate(steps):
            result = await self._step(step, variables, (*place, index))
        return result

    async def _step(self, step: Step, variables: Variables, place: Place) -> Any:
        result, is_done = None, False
        self._count()
        try:
            if step.when is UNSET or _holds(step.when, variables, (*place, "when")):
                result, is_done = await self._tried(step, variables, place), True
        except WorkflowError as error:
            result = await self._failed(step, error, variables, place)
        for name in _visible(step):  # what was left out, or not come to, is null to what follows
            variables.setdefault(name, None)
        if step.id is not UNSET:
            variables[step.id] = result
        if is_done and step.undo is not UNSET:
            self._context.on_failure(self._undone, step.undo, {**variables}, (*place, "undo"))
        return result

    async def _undone(self, step: Step, variables: Variables, place: Place) -> None:
        if not self._undoes:  # also where the workflow has failed of too many; all of it together has a limit as well
            self._undoes, self._steps = True, 0
        await self._step(step, variables, place)

    async def _tried(self, step: Step, variables: Variables, place: Place) -> Any:
        options = step.retry if step.retry is not UNSET else RetryOptions(max_attempts=1)
        retry = Retry(options.max_attempts, seconds_of(options.backoff), longest=seconds_of(options.backoff_max))
        for attempt in itertools.count(1):
            try:
                done = getattr(self, f"_{step.kind}")(step, variables, (*place, step.kind))
                return await (done if step.kind in TIMED else self._within(step, done))
            except InvalidInput as error:  # what a template has become can't be asked for: an empty text, say
                raise WorkflowError(f"{shown(place)}: {error.message}") from None
            except StepFailed:
                if attempt >= retry.attempts:
                    raise
            self._count()
            await self._context.sleep(retry.pause(attempt))

    def _within(self, step: Step, done: Awaitable[Any]) -> Awaitable[Any]:
        """A try of a step, in the time that it may take."""
        seconds = _timeout(step)
        return done if seconds is None else self._context.within(seconds, done)

    async def _failed(self, step: Step, error: WorkflowError, variables: Variables, place: Place) -> Any:
        """What a step that failed for good has as its result instead."""
        if isinstance(error, FINAL):
            raise error
        if step.fallback is not UNSET:
            try:
                return await self._step(step.fallback, _with_error(variables, error), (*place, "fallback"))
            except WorkflowError as other:
                error = other
        if isinstance(error, FINAL) or step.on_error == "fail":
            raise error
        if isinstance(step.on_error, Step):
            await self._step(step.on_error, _with_error(variables, error), (*place, "on_error"))
        return None

    # Each kind of a step, by the name of its field.

    async def _agent(self, step: Step, variables: Variables, place: Place) -> Any:
        body = _given(step.agent)
        task = _text(body.task, variables, (*place, "task"))
        return await self._context.agent(body.name, task, output_type=_or_none(step.output_schema))

    async def _model(self, step: Step, variables: Variables, place: Place) -> Any:
        body = _given(step.model)
        prompt = _text(body.prompt, variables, (*place, "prompt"))
        instructions = "" if body.instructions is UNSET else body.instructions
        return await self._context.model(
            _or_none(body.model), prompt, output_type=_or_none(step.output_schema),
            instructions=_text(instructions, variables, (*place, "instructions")),
        )  # fmt: skip

    async def _tool(self, step: Step, variables: Variables, place: Place) -> Any:
        body = _given(step.tool)
        arguments = _rendered(body.arguments, variables, (*place, "arguments"))
        taken = arguments.keys() & NOT_ARGUMENTS
        if taken:
            raise WorkflowError(f"{shown(place)}: a workflow can't give the argument {min(taken)!r} to a tool")
        result = await self._context.tool(body.name, **arguments)
        if step.output_schema is not UNSET:
            for problem in misfits(result, step.output_schema):
                raise StepFailed(
                    f"the result of {body.name} does not fit the output_schema at {shown(place)}: {problem}"
                )
        return result

    async def _ask(self, step: Step, variables: Variables, place: Place) -> Any:
        body = _given(step.ask)
        question = _text(body.question, variables, (*place, "question"))
        options = [_text(option, variables, (*place, "options")) for option in body.options]
        return await self._context.ask(question, options=options, timeout=_timeout(step))

    async def _wait(self, step: Step, variables: Variables, place: Place) -> Any:
        body: Wait = _given(step.wait)
        if body.event is not UNSET:
            name = _text(body.event, variables, (*place, "event"))
            return await self._context.event(name, timeout=_timeout(step))
        if body.until is not UNSET:
            moment = _text(body.until, variables, (*place, "until"))
            return await self._context.until(_read(time_of, moment, (*place, "until")))
        seconds = _rendered(body.seconds, variables, (*place, "seconds"))
        return await self._context.sleep(_read(seconds_of, seconds, (*place, "seconds")))

    async def _sequence(self, step: Step, variables: Variables, place: Place) -> Any:
        return await self.steps(_given(step.sequence), variables, place)

    async def _parallel(self, step: Step, variables: Variables, place: Place) -> Any:
        steps = enumerate(_given(step.parallel))  # none of them reads what another one writes: so says the checker
        return await self._context.gather(
            *(self._step(one, variables, (*place, index)) for index, one in steps), limit=_or_none(step.max_concurrency)
        )

    async def _foreach(self, step: Step, variables: Variables, place: Place) -> Any:
        body: Foreach = _given(step.foreach)
        items = _rendered(body.items, variables, (*place, "items"))
        if not isinstance(items, list):
            raise WorkflowError(f"{shown(place)}.items is no list, but {str(items)[:80]!r}")

        async def one(pair: tuple[int, Any]) -> Any:
            inner = {**variables, body.as_: pair[1], "index": pair[0]}
            return await self._step(body.do, inner, (*place, "do"))

        at_once = AT_ONCE if step.max_concurrency is UNSET else step.max_concurrency
        return await self._context.foreach(enumerate(items), one, limit=at_once)

    async def _branch(self, step: Step, variables: Variables, place: Place) -> Any:
        body: Branch = _given(step.branch)
        for index, case in enumerate(body.cases):
            at: Place = (*place, "cases", index)
            if _holds(case.when, variables, (*at, "when")):
                return await self._step(case.do, {**variables}, (*at, "do"))
        if body.otherwise is UNSET:
            return None
        return await self._step(body.otherwise, {**variables}, (*place, "else"))

    async def _loop(self, step: Step, variables: Variables, place: Place) -> Any:
        body: Loop = _given(step.loop)
        last = None
        for index in range(body.max):
            inner = {**variables, "index": index, "last": last}
            last = inner["last"] = await self._step(body.do, inner, (*place, "do"))
            if body.until is not UNSET and _holds(body.until, inner, (*place, "until")):
                break
        return last


def _given(body: Any) -> Any:
    """The field that makes the step's kind."""
    assert body is not UNSET
    return body


def _or_none(value: Any) -> Any:
    return None if value is UNSET else value


def _timeout(step: Step) -> float | None:
    return None if isinstance(step.timeout, UnsetType) else seconds_of(step.timeout)


def _visible(step: Step) -> Iterator[str]:
    """The ids of a step, and of the steps in it whose results are seen behind it."""
    if step.id is not UNSET:
        yield step.id
    for steps in (step.sequence, step.parallel):
        for inner in steps if steps is not UNSET else ():
            yield from _visible(inner)


def _with_error(variables: Variables, error: WorkflowError) -> Variables:
    return {**variables, "error": {"code": error.code, "message": error.message}}


def _holds(condition: str, variables: Variables, place: Place) -> bool:
    try:
        return is_true(parse(condition), variables)
    except NoValue as error:
        raise WorkflowError(f"{shown(place)}: {error}") from None


def _rendered(value: Any, variables: Variables, place: Place) -> Any:
    try:
        return rendered(value, variables)
    except NoValue as error:
        raise WorkflowError(f"{shown(place)}: {error}") from None


def _text(text: str, variables: Variables, place: Place) -> str:
    """A template where a text is needed: what it is, as a text."""
    return text_of(_rendered(text, variables, place))


def _read(read: Any, value: Any, place: Place) -> Any:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise WorkflowError(f"{shown(place)} is {str(value)[:80]!r}, which is no time")
    try:
        return read(value)
    except ValueError as error:
        raise WorkflowError(f"{shown(place)}: {error}") from None
