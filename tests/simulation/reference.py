"""What a program comes to by what is recorded of its steps: read from the program, without running a workflow.

Where something happens is said by the number of results that the log has before: the code that follows a result is done
at once, so what it asks for is known, and so is which of several branches came first.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from understudy.workflows import TIMEOUT_STEP

from .workflows import BACKOFF, NOTED, Node, call_name, task_of

Asked = tuple[str, dict[str, Any]]


@dataclass
class Known:
    """What the log has of the steps of a run, since it began or began again.

    Attributes:
        asked: tool and arguments by path.
        results: path, outcome and text, in order.
        taken: name and value by key.
        begins: how all paths begin.
        ended: the code came to an end: what it asks for is recorded then.
    """

    begins: str = ""
    asked: dict[str, Asked] = field(default_factory=dict)
    results: list[tuple[str, str, str]] = field(default_factory=list)
    taken: dict[str, tuple[str, Any]] = field(default_factory=dict)
    ended: bool = False


class Failed(Exception):
    """A step failed, and the code does not catch it."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.text, self.code, self.at = text, code, -1


class Open(Exception):
    """What comes next is not known: a step has no result."""


class Again(Exception):
    """The code begins again."""


@dataclass
class Branch:
    """Where in the code something is.

    Attributes:
        at: the number of the last result before it.
        until: that of the result with which the time is over that it has.
    """

    begins: str
    at: int
    until: float = math.inf
    steps: int = 0

    def next_path(self) -> str:
        self.steps += 1
        return f"{self.begins}{self.steps - 1}"


class Reference:
    """A program by its record.

    Attributes:
        problems: what the log has that the program does not ask for, or the other way round.
        visited: the steps that it asks for.
    """

    def __init__(self, known: Known, program: Node, times: int) -> None:
        self._known, self._program, self._times = known, program, times
        self._places = {path: number for number, (path, _, _) in enumerate(known.results)}
        self._registered: list[tuple[int, Node]] = []
        self.problems: list[str] = []
        self.visited: set[str] = set()

    def outcome(self) -> tuple[str, Any]:
        """`completed` with a value, `failed` with code and text, `again`, or `open`."""
        main = Branch(self._known.begins, -1)
        try:
            found = "completed", self._value(self._program, None, main)
        except Again:
            found = "again", None
        except Open:
            found = "open", None
        except Failed as failed:
            found = "failed", (failed.code, failed.text)
            try:
                self._undone(main)
            except Open:
                found = "open", None
        if not self.problems:
            others = sorted(self._known.asked.keys() - self.visited)
            self.problems += [f"step {path} is recorded, and the program has none" for path in others]
        return found

    def _undone(self, main: Branch) -> None:
        for _, node in sorted(self._registered, key=lambda item: item[0])[::-1]:
            try:
                self._step(main, node["tool"], node["with"])
            except Failed as failed:
                kind = "StepTimeout" if failed.code == "step_timeout" else "StepFailed"
                if (value := self._taken(main, "undo_failed")) != f"{kind}: {failed.text}":
                    self.problems.append(f"{failed.text} of an undo is recorded as {value}")

    def _value(self, node: Node, given: Any, branch: Branch) -> Any:
        try:
            return getattr(self, f"_{node['do']}")(node, given, branch)
        except Failed as failed:
            if not node.get("catch"):
                raise
            return {"failed": failed.text}

    def _step(self, branch: Branch, tool: str, arguments: dict[str, Any] | None) -> str:
        """The text of a step's result.

        Args:
            arguments: None where they need not be compared.
        """
        path, known = branch.next_path(), self._known
        if path not in known.asked:
            if known.ended and branch.until == math.inf:  # else it was asked for as its time was over
                self.problems.append(f"the program asks for {tool} as {path}, and that is not recorded")
            raise Open
        self.visited.add(path)
        recorded = known.asked[path]
        if recorded[0] != tool or (arguments is not None and recorded[1] != json.loads(json.dumps(arguments))):
            self.problems.append(f"step {path} is recorded as {recorded}, and the program asks for {tool} {arguments}")
        place = self._places.get(path)
        if place is None or place > branch.until:
            raise Open
        if place <= branch.at:
            self.problems.append(f"the result of {path} is number {place}, and it was asked for after {branch.at}")
        branch.at = place
        _, outcome, text = known.results[place]
        if outcome == "ok":
            return text
        failed = Failed(text, "step_timeout" if outcome == "timeout" else "step_failed")
        failed.at = place
        raise failed

    def _taken(self, branch: Branch, name: str, key: str = "") -> Any:
        key = key or branch.next_path()
        if key not in self._known.taken:
            if self._known.ended:
                self.problems.append(f"the program takes {name} at {key}, and that is not recorded")
            raise Open
        if self._known.taken[key][0] != name:
            self.problems.append(f"{key} was recorded as {self._known.taken[key][0]}, and is {name}")
        return self._known.taken[key][1]

    def _retried(self, node: Node, branch: Branch, step: Callable[[], str]) -> Any:
        attempts = node.get("attempts") or 1
        for attempt in range(1, attempts + 1):
            try:
                return json.loads(step())
            except Failed:
                if attempt == attempts:
                    raise
            self._step(branch, "sleep", {"seconds": BACKOFF * 2.0 ** (attempt - 1)})
        raise AssertionError

    def _done(self, at: int) -> list[str]:
        """The noted calls that were done by then, in order."""
        names = (self._known.asked[path][1].get("name", "") for path, _, _ in self._known.results[: at + 1])
        return [name for name in names if isinstance(name, str) and name.startswith(NOTED)]

    def _tool(self, node: Node, given: Any, branch: Branch) -> Any:
        name = call_name(node["with"]["name"], self._done(branch.at), given)
        return self._retried(node, branch, lambda: self._step(branch, node["tool"], {**node["with"], "name": name}))

    def _agent(self, node: Node, given: Any, branch: Branch) -> Any:
        said = {"agent": node["agent"], "task": task_of(node, self._done(branch.at), given)}
        return self._retried(node, branch, lambda: self._step(branch, "agent", said))

    def _model(self, node: Node, given: Any, branch: Branch) -> Any:
        said = {"agent": "model", "task": task_of(node, self._done(branch.at), given)}
        return self._retried(node, branch, lambda: self._step(branch, "model", said))

    def _child(self, node: Node, _given: Any, branch: Branch) -> Any:
        return self._retried(node, branch, lambda: self._step(branch, "workflow", None))

    def _sleep(self, node: Node, _given: Any, branch: Branch) -> None:
        self._step(branch, "sleep", {"seconds": node["seconds"]})

    def _until(self, node: Node, _given: Any, branch: Branch) -> None:
        now = datetime.fromtimestamp(self._taken(branch, "now"), UTC)
        self._step(branch, "sleep", {"until": (now + timedelta(seconds=node["seconds"])).isoformat()})

    def _ask(self, node: Node, _given: Any, branch: Branch) -> str:
        said = {"prompt": node["prompt"], "options": [], "timeout": node["timeout"], "default": node["default"]}
        return self._step(branch, "ask", said)

    def _event(self, node: Node, _given: Any, branch: Branch) -> Any:
        return json.loads(self._step(branch, "event", {"name": node["name"], "seconds": node["timeout"]}))

    def _now(self, _node: Node, _given: Any, branch: Branch) -> Any:
        return datetime.fromtimestamp(self._taken(branch, "now"), UTC).timestamp()

    def _random(self, _node: Node, _given: Any, branch: Branch) -> Any:
        return self._taken(branch, "random")

    def _patched(self, node: Node, _given: Any, branch: Branch) -> Any:
        value = self._taken(branch, "patched", f"patched:{node['name']}")
        if value is not True:
            self.problems.append(f"patched {node['name']} is {value}, and the code was never changed")
        return value

    def _publish(self, node: Node, given: Any, branch: Branch) -> Any:
        value = self._taken(branch, f"publish:{node['name']}")
        if value != json.loads(json.dumps(given)):
            self.problems.append(f"{value} was published as {node['name']}, and is {given}")
        return given

    def _sequence(self, node: Node, given: Any, branch: Branch) -> Any:
        for part in node["parts"]:
            given = self._value(part, given, branch)
        return given

    def _gather(self, node: Node, given: Any, branch: Branch) -> Any:
        return self._at_once([(part, given) for part in node["parts"]], node, branch)

    def _foreach(self, node: Node, _given: Any, branch: Branch) -> Any:
        return self._at_once([(node["part"], item) for item in range(node["count"])], node, branch)

    def _within(self, node: Node, given: Any, branch: Branch) -> Any:
        """A part that is done in time; or its time is over, and all that it was at has ended."""
        path, timer = branch.next_path(), math.inf
        timer_path, begins = f"{path}.0.0", f"{path}.1."
        if timer_path in self._known.asked:
            self.visited.add(timer_path)
            due = TIMEOUT_STEP, {"seconds": node["seconds"]}
            if self._known.asked[timer_path] != due:
                self.problems.append(f"{timer_path} is {self._known.asked[timer_path]}, and the program has {due}")
            timer = float(self._places.get(timer_path, math.inf))
            if timer < math.inf and self._known.results[int(timer)][1] != "ok":  # it was given up
                timer = math.inf
        inner = Branch(begins, branch.at, min(timer, branch.until))
        try:
            value = self._value(node["part"], given, inner)
        except Failed:
            branch.at = inner.at
            raise
        except Open:
            branch.at = self._ended_late(timer, begins, branch)
            late = Failed(f"it was not done in {node['seconds']:g} seconds", "step_timeout")
            late.at = branch.at
            raise late from None
        branch.at = inner.at
        return value

    def _ended_late(self, timer: float, begins: str, branch: Branch) -> int:
        """The number of the last result of a part whose time was over."""
        places = [self._places.get(path, math.inf) for path in self._known.asked if path.startswith(begins)]
        last = max([timer, *places])
        if timer > branch.until or last > branch.until or last == math.inf:
            raise Open
        return int(last)

    def _undo(self, node: Node, given: Any, branch: Branch) -> Any:
        self._registered.append((branch.at, node))
        return given

    def _again(self, node: Node, given: Any, _branch: Branch) -> Any:
        if self._times < node["most"]:
            raise Again
        return given

    def _at_once(self, parts: list[tuple[Node, Any]], node: Node, branch: Branch) -> Any:
        """Parts that are done beside each other: so many at a time, and no more is begun when one has failed."""
        path, ends, values = branch.next_path(), list[float](), list[Any]()
        errors, last, is_open = list[Failed](), float(branch.at), False
        for number, (part, given) in enumerate(parts):
            begins = float(branch.at)
            if number >= (node["limit"] or len(parts)):
                begins = heapq.heappop(ends)
            if begins == math.inf or any(error.at <= begins for error in errors):
                break
            inner, end = Branch(f"{path}.{number}.", int(begins), branch.until), math.inf
            try:
                values.append(self._value(part, given, inner))
            except Failed as failed:
                failed.at = end = inner.at
                values.append({"raised": failed.text})
                errors += [] if node["keeps"] else [failed]
            except Open:
                is_open = True
            else:
                end = inner.at
            last = max(last, end)
            heapq.heappush(ends, end)
        if is_open:
            raise Open
        branch.at = int(last)
        if errors:
            raise min(errors, key=lambda error: error.at)
        return values
