"""Workflow definitions as hypothesis draws them: every kind of step with any options, and every variable defined where
it is used."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from understudy.workflow_definition import builder as w
from understudy.workflow_definition.steps import KINDS, Definition, Retry, Step

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}\x00"), min_size=1, max_size=12)
NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,12}", fullmatch=True)
DURATIONS = st.sampled_from([1, 0.5, "5s", "1h30m", "2d"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = st.sampled_from([{"type": "string"}, {"type": "object", "properties": {"n": {"type": "integer"}}}, {}])


class Drawn:
    """Draws a definition in which every variable is defined where it is used."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self._ids = 0

    def steps(self, visible: list[str], depth: int) -> list[Step]:
        """Steps one after the other; their ids are visible behind them."""
        return [self.step(visible, depth) for _ in range(self._draw(st.integers(1, 3)))]

    def text(self, visible: list[str]) -> str:
        """A text with templates."""
        pieces = WORDS | st.sampled_from(visible).map(lambda name: f"{{{{ {name} }}}}") if visible else WORDS
        return "".join(self._draw(st.lists(pieces, min_size=1, max_size=3)))

    def condition(self, visible: list[str]) -> str:
        """A condition."""
        names = st.sampled_from([*visible, "'x'", "null", "1"])
        one, two = self._draw(names), self._draw(names)
        return self._draw(st.sampled_from([one, f"{one} == {two}", f"not ({one} in [{two}, 1]) or {one}"]))

    def step(self, visible: list[str], depth: int) -> Step:
        """A step of any kind, with any options."""
        draw = self._draw
        kind = draw(st.sampled_from(KINDS if depth else ("agent", "tool", "model", "wait", "ask")))
        options: dict[str, Any] = {}
        if draw(st.booleans()):
            options["when"] = self.condition(visible)
        if kind != "wait" and draw(st.integers(0, 2)) == 0:
            options["timeout"] = draw(DURATIONS)
        if draw(st.booleans()):
            options["retry"] = Retry(draw(st.integers(1, 9)), draw(DURATIONS))
        if depth and draw(st.integers(0, 4)) == 0:
            options["fallback"] = self.step([*visible, "error"], depth - 1)
        options["on_error"] = "fail"
        if depth and draw(st.integers(0, 4)) == 0:
            options["on_error"] = self.step([*visible, "error"], depth - 1)
        if depth and draw(st.integers(0, 9)) == 0:
            options["undo"] = self.step([*visible], 0)
        if kind in ("agent", "tool", "model") and draw(st.booleans()):
            options["output_schema"] = draw(SCHEMAS)
        if kind in ("parallel", "foreach") and draw(st.booleans()):
            options["max_concurrency"] = draw(st.integers(1, 9))
        made: list[str] = []
        step = getattr(self, kind)(visible, made, depth - 1, options)
        if draw(st.booleans()):
            self._ids += 1
            made.append(f"s{self._ids}")
            step = msgspec.structs.replace(step, id=made[-1])
        visible += made
        return step

    def agent(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        return w.agent(self._draw(NAMES), self.text(visible), **options)

    def tool(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        return w.tool("mine:tool", {self._draw(WORDS): [self._draw(JSON), self.text(visible)]}, **options)

    def model(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        return w.model(self.text(visible), model="gpt-4o", instructions=self.text(visible), **options)

    def ask(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        return w.ask(self.text(visible), *self._draw(st.sampled_from([(), ("yes", self.text(visible))])), **options)

    def wait(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        alone = [f"{{{{{name}}}}}" for name in visible]
        kind = self._draw(st.sampled_from(["seconds", "until", "event"]))
        if kind == "seconds":
            return w.wait(self._draw(DURATIONS | st.sampled_from(alone) if alone else DURATIONS), **options)
        if kind == "until":
            return w.wait(until=self._draw(st.sampled_from(["2026-12-24T18:00:00+01:00", *alone])), **options)
        return w.wait(event=self._draw(NAMES), timeout=self._draw(DURATIONS), **options)

    def sequence(self, visible: list[str], made: list[str], depth: int, options: Any) -> Step:
        inner = [*visible]
        steps = self.steps(inner, depth)
        made += inner[len(visible) :]
        return w.sequence(*steps, **options)

    def parallel(self, visible: list[str], made: list[str], depth: int, options: Any) -> Step:
        steps = []
        for _ in range(self._draw(st.integers(1, 3))):
            inner = [*visible]
            steps.append(self.step(inner, depth))
            made += inner[len(visible) :]
        return w.parallel(*steps, **options)

    def foreach(self, visible: list[str], _made: list[str], depth: int, options: Any) -> Step:
        self._ids += 1
        name = self._draw(st.sampled_from(["item", f"v{self._ids}"]))
        items = [self._draw(JSON), self.text(visible)]
        return w.foreach(items, self.step([*visible, name, "index"], depth), as_=name, **options)

    def branch(self, visible: list[str], _made: list[str], depth: int, options: Any) -> Step:
        cases = [(self.condition(visible), self.step([*visible], depth)) for _ in range(self._draw(st.integers(1, 2)))]
        otherwise = self.step([*visible], depth) if self._draw(st.booleans()) else msgspec.UNSET
        return w.branch(*cases, otherwise=otherwise, **options)

    def loop(self, visible: list[str], _made: list[str], depth: int, options: Any) -> Step:
        inner = [*visible, "index", "last"]
        step = self.step(inner, depth)
        return w.loop(step, max=self._draw(st.integers(1, 9)), until=self.condition(inner), **options)


@st.composite
def definitions(draw: Any) -> Definition:
    """Definitions as the builder makes them."""
    drawn = Drawn(draw)
    inputs = {"i1": draw(SCHEMAS), "i2": {"type": "integer", "default": 3}}
    visible = [*inputs]
    steps = drawn.steps(visible, 3)
    output = draw(st.sampled_from([msgspec.UNSET, {"all": [f"{{{{{name}}}}}" for name in visible]}]))
    return w.define(draw(NAMES), *steps, inputs=inputs, output=output, description=draw(WORDS), tools=["mine:tool"])
