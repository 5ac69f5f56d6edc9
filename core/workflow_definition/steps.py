"""What a workflow's definition is made of. The one place where its fields, their types and their limits are written:
the checker, the JSON Schema and the builder follow from it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from .expressions import IDENTIFIER

MOST_STEPS = 5_000
"""Steps of a definition, those within others among them."""

DEEPEST_STEP = 50
"""Levels of steps within steps."""

MOST_ROUNDS = 10_000
"""Of a loop."""

MOST_ATTEMPTS = 100

MOST_AT_ONCE = 1_000

AT_ONCE = 16
"""Steps of a `foreach`, where nothing is said."""

END = r"$(?!\n)"
"""The end of a text in a pattern, in the dialects of Python and of JSON Schema alike."""

ID = f"^{IDENTIFIER}{END}"
NAME = f"^[A-Za-z0-9._-]{{1,64}}{END}"
TOOL_NAME = rf"^[^\s{{}}]{{1,256}}{END}"

SAID = {
    ID: "a name of letters, digits and underscores that does not begin with a digit, at most 64",
    NAME: "a name of 1 to 64 characters of A-Z a-z 0-9 . _ -",
    TOOL_NAME: "a name without spaces and braces, at most 256 characters",
}
"""What a pattern asks for, in words."""

Identifier = Annotated[str, Meta(pattern=ID)]
Name = Annotated[str, Meta(pattern=NAME)]
ToolName = Annotated[str, Meta(pattern=TOOL_NAME)]
Condition = Annotated[str, Meta(min_length=1)]
Text = Annotated[str, Meta(min_length=1)]
Duration = float | str
JsonSchema = dict[str, Any]


class Part(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a definition.

    Attributes:
        ONE_OF: fields of which it must have exactly one.
        ONLY_WITH: fields that it may have only together with one of others.
    """

    ONE_OF: ClassVar[tuple[str, ...]] = ()
    ONLY_WITH: ClassVar[dict[str, tuple[str, ...]]] = {}


class AgentTask(Part, frozen=True):
    """A task that a sub-agent works on.

    Attributes:
        name: the agent's name, one of those that the workflow has.
        task: what the agent has to do: a text with templates.
    """

    name: Name
    task: Text


class ToolUse(Part, frozen=True):
    """A call of a tool.

    Attributes:
        name: the tool's name, one of those that the workflow has.
        arguments: by their names; texts in them may have templates.
    """

    name: ToolName
    arguments: dict[str, Any] = {}


class ModelCall(Part, frozen=True):
    """One call of a model, without tools.

    Attributes:
        prompt: what the model is sent: a text with templates.
        model: the model's name; left out: the workflow's.
        instructions: the system prompt; a text with templates.
    """

    prompt: Text
    model: Annotated[str, Meta(min_length=1, max_length=256)] | UnsetType = UNSET
    instructions: Text | UnsetType = UNSET


class Foreach(Part, frozen=True):
    """A step for each item of a list. Its result has theirs, in the order of the list.

    Attributes:
        items: a list, in which texts may have templates, or a template that is a list.
        do: the step that is done for each item. It sees the item as `item`, or by the name `as`, and its index, from 0
            on, as `index`.
        as_: the name of the variable that has the item.
    """

    items: list[Any] | str
    do: Step
    as_: Identifier = field(default="item", name="as")


class Case(Part, frozen=True):
    """A case of a branch.

    Attributes:
        when: the condition of the case.
        do: the step that is done if the condition holds, and none of the cases before it does.
    """

    when: Condition
    do: Step


class Branch(Part, frozen=True):
    """The first case whose condition holds. Its result is that of the step that was done; null if none was.

    Attributes:
        cases: the cases, in the order in which they are tried.
        otherwise: the step that is done if no condition holds.
    """

    cases: Annotated[list[Case], Meta(min_length=1)]
    otherwise: Step | UnsetType = field(default=UNSET, name="else")


class Loop(Part, frozen=True):
    """A step that is done again and again. Its result is that of the last round.

    Attributes:
        do: the step that is done in each round. It sees the number of the round, from 0 on, as `index`, and the result
            of the round before as `last`, which is null in the first one.
        until: a condition that is looked at after each round, and ends the loop if it holds. It sees the results of
            the steps within the loop, and `last`, the round's result.
        max: rounds after which the loop ends in any case.
    """

    do: Step
    max: Annotated[int, Meta(ge=1, le=MOST_ROUNDS)]
    until: Condition | UnsetType = UNSET


class Wait(Part, frozen=True):
    """A wait, which needs no process. It has one of the fields.

    Attributes:
        seconds: how long: a number, a text as `5m`, or a template that is one of these.
        until: a moment in ISO 8601 with its zone (`2026-12-24T18:00:00+01:00`), or a template that is one.
        event: the name of an event that somebody sends; its data is the result.
    """

    ONE_OF = ("seconds", "until", "event")

    seconds: Duration | UnsetType = UNSET
    until: Text | UnsetType = UNSET
    event: Text | UnsetType = UNSET


class Question(Part, frozen=True):
    """A question to a person, whose answer, a text, is the result.

    Attributes:
        question: what is asked: a text with templates.
        options: answers that are offered, with templates; the person may answer otherwise.
    """

    question: Text
    options: list[Text] = []


class Retry(Part, frozen=True):
    """How often a step that fails is tried again.

    Attributes:
        max_attempts: tries altogether, the first one among them.
        backoff: how long is waited before the second one; twice as long before each further one.
        backoff_max: the longest of these waits.
    """

    max_attempts: Annotated[int, Meta(ge=1, le=MOST_ATTEMPTS)]
    backoff: Duration = 1.0
    backoff_max: Duration = 60.0


KINDS = ("agent", "tool", "model", "sequence", "parallel", "foreach", "branch", "loop", "wait", "ask")
"""What a step can be: the field that it must have exactly one of."""


class Step(Part, frozen=True):
    """A step: one of the kinds of steps, and what holds for it.

    Attributes:
        id: by which later steps see its result.
        when: a condition; the step is left out if it does not hold, and its result is null.
        agent: a sub-agent works on a task; its answer is the result.
        tool: a tool is called.
        model: a model is called once; its answer is the result.
        sequence: steps one after the other; the result is that of the last one.
        parallel: steps at the same time; the result is the list of theirs.
        foreach: a step for each item of a list.
        branch: the first case whose condition holds.
        loop: a step again and again.
        wait: for a time, or for an event.
        ask: a person is asked.
        output_schema: a JSON Schema (2020-12) that the result must fit; a model receives it.
        retry: how often it is tried again when it fails; left out: never.
        timeout: how long one try may take; then what it is at is ended, and it has failed. Not of a `wait` for a time.
        fallback: a step that is done instead when it has failed for good, and whose result is its own. It sees the
            failure as `error.code` and `error.message`.
        on_error: what is done when it has failed, and its `fallback` too: the workflow fails (`fail`), or goes on with
            null as the result (`continue`), after the step that is given here, if one is. That step sees `error`
            as well.
        undo: a step that is done if the workflow fails after this one was done, those of later steps before it. It sees
            what this step sees, and this step's result.
        max_concurrency: of `parallel` and `foreach`: how many steps are done at once; left out: all, and of `foreach`
            16.
    """

    ONE_OF = KINDS
    ONLY_WITH: ClassVar[dict[str, tuple[str, ...]]] = {
        "output_schema": ("agent", "tool", "model"),
        "max_concurrency": ("parallel", "foreach"),
    }

    id: Identifier | UnsetType = UNSET
    when: Condition | UnsetType = UNSET
    agent: AgentTask | UnsetType = UNSET
    tool: ToolUse | UnsetType = UNSET
    model: ModelCall | UnsetType = UNSET
    sequence: Annotated[list[Step], Meta(min_length=1)] | UnsetType = UNSET
    parallel: Annotated[list[Step], Meta(min_length=1)] | UnsetType = UNSET
    foreach: Foreach | UnsetType = UNSET
    branch: Branch | UnsetType = UNSET
    loop: Loop | UnsetType = UNSET
    wait: Wait | UnsetType = UNSET
    ask: Question | UnsetType = UNSET
    output_schema: JsonSchema | UnsetType = UNSET
    retry: Retry | UnsetType = UNSET
    timeout: Duration | UnsetType = UNSET
    fallback: Step | UnsetType = UNSET
    on_error: Literal["fail", "continue"] | Step = "fail"
    undo: Step | UnsetType = UNSET
    max_concurrency: Annotated[int, Meta(ge=1, le=MOST_AT_ONCE)] | UnsetType = UNSET

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(name for name in KINDS if getattr(self, name) is not UNSET)


class Definition(Part, frozen=True):
    """A workflow.

    Attributes:
        name: what it is called: a label of metrics and spans.
        steps: the steps, which are done one after the other.
        description: what it is for, for whoever may use it.
        inputs: what it is given, by name: a JSON Schema for each, with `default` for one that may be left out.
        output: data with templates that is its result; left out: that of its last step.
        format: of the definition itself: 1.
    """

    name: Name
    steps: Annotated[list[Step], Meta(min_length=1)]
    description: Annotated[str, Meta(max_length=4_000)] = ""
    inputs: dict[str, JsonSchema] = {}
    output: Any = UNSET
    format: Annotated[int, Meta(ge=1, le=1)] = 1
