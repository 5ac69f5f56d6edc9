"""Whether the parts of a definition fit together: ids, variables, conditions, templates, lists, limits, names.

It takes data of whatever shape, and looks at what has the right one: so what is wrong with the shape of one step hides
nothing of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from ..durations import seconds_of, time_of
from ..identifiers import identifier_problem
from ..places import Place
from .expressions import IDENTIFIER, WORDS, BadExpression, Expression, Path, parse, paths
from .kinds import ANY, ERROR, NAMES, NOTHING, TEXT, WHOLE_NUMBER, Kind, NoSuchPart, of_expression, of_schema
from .problems import Problems, listing, meant
from .schemas import default_problem, schema_problem
from .steps import DEEPEST_STEP, KINDS, MOST_STEPS, NAME, TOOL_NAME
from .templates import parse_template, scan, templates_in
from .variables import Scope, Uses, steps_in

RESERVED = ("item", "index", "last", "error", *WORDS)
"""Names that no step and no input can have."""

NAMES_OF = {"agent": NAME, "tool": TOOL_NAME}


class Meaning:
    """Looks at a definition.

    Args:
        agents, tools: the names that there are; None where that is not known.
    """

    def __init__(self, problems: Problems, *, agents: Collection[str] | None, tools: Collection[str] | None) -> None:
        self._problems = problems
        self._names = {"agent": agents, "tool": tools}
        self._uses = Uses()
        self._unseen: list[tuple[Path, Place, Scope]] = []

    def look(self, data: Any) -> None:
        """Gather what is wrong."""
        if not isinstance(data, dict):
            return
        scope = Scope()
        inputs = data.get("inputs")
        for name, schema in inputs.items() if isinstance(inputs, dict) else ():
            self._input(name, schema, scope)
        self._register(data.get("steps"), {*scope.names})
        self._sequence(data.get("steps"), ("steps",), scope, 1)
        if "output" in data:
            self._templates(data["output"], ("output",), scope)
        for path, place, seen in self._unseen:
            if not self._problems.full:
                why = self._uses.why_not(path.name, place)
                why = f": {why}" if why else meant(path.name, seen.visible())
                self._problems.add(place, f"column {path.column}: {path.name!r} is not defined here{why}")

    def _input(self, name: str, schema: Any, scope: Scope) -> None:
        place: Place = ("inputs", name)
        self._add(place, _name_problem(name))
        if isinstance(schema, dict):
            problem = schema_problem(schema)
            self._add(place, problem or default_problem(schema))
            scope.names[name] = ANY if problem else of_schema(schema)
        else:
            scope.names[name] = ANY

    def _register(self, steps: Any, inputs: set[str]) -> None:
        """Take note of the ids of all steps, and where they are."""
        number = 0
        for place, step in steps_in(steps, ("steps",)):
            number += 1
            name = step.get("id")
            if not isinstance(name, str):
                continue
            if name in RESERVED:
                self._add((*place, "id"), _name_problem(name))
            elif name in inputs:
                self._add((*place, "id"), f"{name!r} is the name of an input: a step needs another one")
            elif name in self._uses.places:
                self._add((*place, "id"), f"{name!r} is the id of {self._uses.shown(name)}, too")
            else:
                self._uses.add_step(name, place)
        if number > MOST_STEPS:
            self._problems.add(("steps",), f"there are {number} steps, and there may be {MOST_STEPS}")

    def _step(self, step: Any, place: Place, scope: Scope, depth: int) -> Kind:
        """A step; what is known of its result, which is in the scope afterwards."""
        if not isinstance(step, dict):
            return ANY
        if depth > DEEPEST_STEP:
            self._problems.add(place, f"steps are nested more than {DEEPEST_STEP} deep")
            return ANY
        self._condition(step.get("when"), (*place, "when"), scope)
        kind = ANY
        for name in KINDS:
            if name in step:
                look: Callable[..., Kind] = getattr(self, f"_{name}")
                kind = look(step[name], (*place, name), scope, depth + 1)
        schema = step.get("output_schema")
        if isinstance(schema, dict):
            problem = schema_problem(schema)
            self._add((*place, "output_schema"), problem)
            kind = ANY if problem else of_schema(schema)
        self._duration(step.get("timeout"), (*place, "timeout"))
        wait = step.get("wait")
        if "timeout" in step and isinstance(wait, dict) and wait.keys() & {"seconds", "until"}:
            self._problems.add((*place, "timeout"), "is not for a wait for a time: this one ends by itself")
        retry = step.get("retry")
        retry = retry if isinstance(retry, dict) else {}
        for name in ("backoff", "backoff_max"):
            self._duration(retry.get(name), (*place, "retry", name))
        for name in ("fallback", "on_error"):
            self._step(step.get(name), (*place, name), Scope(scope, {"error": ERROR}), depth + 1)
        if "fallback" in step:
            kind = ANY
        if isinstance(step.get("id"), str):
            scope.names[step["id"]] = kind
        if "undo" in step and "undo" in place:
            self._problems.add((*place, "undo"), "is within an undo: what is done to undo something is not undone")
        self._step(step.get("undo"), (*place, "undo"), Scope(scope), depth + 1)
        return kind

    # Each kind of a step, by the name of its field.

    def _agent(self, body: Any, place: Place, scope: Scope, _depth: int) -> Kind:
        self._named(body, place, "agent")
        self._templates_of(body, place, ("task",), scope)
        return ANY  # the agent may have an output type of its own

    def _tool(self, body: Any, place: Place, scope: Scope, _depth: int) -> Kind:
        self._named(body, place, "tool")
        self._templates_of(body, place, ("arguments",), scope)
        return ANY

    def _model(self, body: Any, place: Place, scope: Scope, _depth: int) -> Kind:
        self._templates_of(body, place, ("prompt", "instructions"), scope)
        return TEXT

    def _ask(self, body: Any, place: Place, scope: Scope, _depth: int) -> Kind:
        self._templates_of(body, place, ("question", "options"), scope)
        return TEXT

    def _sequence(self, steps: Any, place: Place, scope: Scope, depth: int) -> Kind:
        """Steps one after the other, each of which sees those before it."""
        last = ANY
        for index, step in enumerate(steps if isinstance(steps, list) else ()):
            last = self._step(step, (*place, index), scope, depth)
        return last

    def _parallel(self, steps: Any, place: Place, scope: Scope, depth: int) -> Kind:
        """None of them sees another one; what comes behind them sees all."""
        made: dict[str, Kind] = {}
        for index, step in enumerate(steps if isinstance(steps, list) else ()):
            own = Scope(scope)
            self._step(step, (*place, index), own, depth)
            made |= own.names
        scope.names |= made
        return Kind(items=ANY)

    def _foreach(self, body: Any, place: Place, scope: Scope, depth: int) -> Kind:
        if not isinstance(body, dict):
            return Kind(items=ANY)
        item = self._items(body.get("items"), (*place, "items"), scope)
        name = body.get("as", "item")
        inner = Scope(scope, {"index": WHOLE_NUMBER})
        if isinstance(name, str):
            inner.names[name] = item
            if name in RESERVED and name != "item":
                self._add((*place, "as"), _name_problem(name))
            elif name != "item" and (scope.get(name) is not None or name in self._uses.places):
                self._problems.add((*place, "as"), f"{name!r} is another variable already: choose another name")
        return Kind(items=self._step(body.get("do"), (*place, "do"), inner, depth))

    def _items(self, items: Any, place: Place, scope: Scope) -> Kind:
        """What is known of the items of a list."""
        self._templates(items, place, scope)
        if not isinstance(items, str):
            return ANY
        with suppress(BadExpression, NoSuchPart):  # reported with the templates
            whole = parse_template(items).whole
            if whole is None:
                self._problems.add(place, "is a text, and must be a list, or one {{…}} that is a list")
                return ANY
            kind = of_expression(whole, scope.get)
            if kind.type not in (None, "array"):
                self._problems.add(place, f"{items} is {NAMES[kind.type]}, and must be a list")
                return ANY
            return kind.items or of_schema((kind.schema or {}).get("items"), kind.root)
        return ANY

    def _branch(self, body: Any, place: Place, scope: Scope, depth: int) -> Kind:
        body = body if isinstance(body, dict) else {}
        cases = body.get("cases")
        for index, case in enumerate(cases if isinstance(cases, list) else ()):
            if isinstance(case, dict):
                at: Place = (*place, "cases", index)
                self._condition(case.get("when"), (*at, "when"), scope)
                self._step(case.get("do"), (*at, "do"), Scope(scope), depth)
        self._step(body.get("else"), (*place, "else"), Scope(scope), depth)
        return ANY

    def _loop(self, body: Any, place: Place, scope: Scope, depth: int) -> Kind:
        body = body if isinstance(body, dict) else {}
        inner = Scope(scope, {"index": WHOLE_NUMBER, "last": ANY})
        kind = self._step(body.get("do"), (*place, "do"), inner, depth)
        inner.names["last"] = kind
        self._condition(body.get("until"), (*place, "until"), inner)
        return kind

    def _wait(self, body: Any, place: Place, scope: Scope, _depth: int) -> Kind:
        body = body if isinstance(body, dict) else {}
        self._templates_of(body, place, ("seconds", "until", "event"), scope)
        for name, read in (("seconds", seconds_of), ("until", time_of), ("event", _event_of)):
            value = body.get(name)
            if not isinstance(value, str) or "{{" not in value:
                self._read(value, (*place, name), read)
            elif name != "event":
                self._alone(value, (*place, name))
        return ANY if "event" in body else NOTHING

    # What several kinds have.

    def _add(self, place: Place, problem: str | None) -> None:
        if problem:
            self._problems.add(place, problem)

    def _named(self, body: Any, place: Place, what: str) -> None:
        known, name = self._names[what], body.get("name") if isinstance(body, dict) else None
        if known is None or not isinstance(name, str) or re.search(NAMES_OF[what], name) is None:
            return
        if name not in known:
            there = f"; there are: {listing(sorted(known))}" if known else "; there is none"
            self._problems.add((*place, "name"), f"no {what} is named {name[:80]!r}{meant(name, known)}{there}")

    def _duration(self, value: Any, place: Place) -> None:
        if isinstance(value, str) and "{{" in value:
            self._problems.add(place, "must be written out: no variables can be used here")
        else:
            self._read(value, place, seconds_of)

    def _read(self, value: Any, place: Place, read: Callable[[Any], Any]) -> None:
        """Read a value, if it has a type that can be read; that it has another one is reported already."""
        if isinstance(value, str) or (read is seconds_of and type(value) in (int, float)):
            try:
                read(value)
            except ValueError as error:
                self._problems.add(place, str(error))

    def _alone(self, text: str, place: Place) -> None:
        with suppress(BadExpression):  # reported with the templates
            if parse_template(text).whole is None:
                self._problems.add(place, "must be one {{…}} and nothing else, where it has a variable")

    def _condition(self, text: Any, place: Place, scope: Scope) -> None:
        if isinstance(text, str) and text:
            try:
                self._expression(parse(text), place, scope)
            except BadExpression as error:
                self._problems.add(place, str(error))

    def _templates_of(self, body: Any, place: Place, fields: tuple[str, ...], scope: Scope) -> None:
        for name in fields if isinstance(body, dict) else ():
            self._templates(body.get(name), (*place, name), scope)

    def _templates(self, value: Any, place: Place, scope: Scope) -> None:
        for at, text in templates_in(value, place):
            for part in scan(text):
                if isinstance(part, BadExpression):
                    self._problems.add(at, str(part))
                elif not isinstance(part, str):
                    self._expression(part, at, scope)

    def _expression(self, expression: Expression, place: Place, scope: Scope) -> None:
        for path in paths(expression):
            self._uses.add(path.name, place)
            if scope.get(path.name) is None:
                self._unseen.append((path, place, scope))
                continue
            try:
                of_expression(path, scope.get)
            except NoSuchPart as error:
                self._problems.add(place, f"column {path.column}: {error}")


def _event_of(name: str) -> None:
    problem = identifier_problem(name, "the name of an event")
    if problem is not None:
        raise ValueError(problem)


def _name_problem(name: str) -> str | None:
    if name in RESERVED:
        return f"{name!r} means something else: choose another name"
    if re.fullmatch(IDENTIFIER, name) is None:
        return "its name must be letters, digits and underscores, must not begin with a digit, and has at most 64"
    return None
