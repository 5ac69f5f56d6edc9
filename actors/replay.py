"""The execution of a workflow's code: what it asks for, what that returns, and the same again from what is recorded.

No event loop: the code's coroutines are advanced here, one at a time, in an order that depends on nothing but the order
in which results are delivered. That order is the log's, so the code does the same whenever it is run from the log.

A step is known by its path: the number of the step in its branch, behind the paths of the branches that it is in. So
branches may overtake each other without any step being taken for another one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from understudy.errors import UnderstudyError, WorkflowDiverged, WorkflowError

SHOWN_ARGUMENTS = 300
"""Characters of a step's arguments that an error shows."""


@dataclass(eq=False)
class Wanted:
    """A step that the code awaits. The subclasses of the context say what is done about it.

    Attributes:
        tool: the tool of its call.
        arguments: of it, as JSON text: by these a step is told from another one.
        read: makes of the result's text what the code gets. May raise whatever the code shall get instead.
    """

    tool: str
    arguments: str
    read: Callable[[Result], Any] = field(repr=False)

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


@dataclass(eq=False)
class Taken:
    """A value that the code takes once: it is recorded, and taken from there afterwards.

    Attributes:
        name: what it is.
        take: has the value, which is JSON data. It is given whether the code is being run from the log.
        key: names it instead of its place in the code.
    """

    name: str
    take: Callable[[bool], Any] = field(repr=False)
    key: str = ""

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


@dataclass(eq=False)
class Branches:
    """Coroutines that the code wants to be run beside each other.

    Attributes:
        items: one for each branch.
        begin: makes of an item what its branch awaits; None where that is the item.
        limit: so many at a time; None for all.
        keeps_errors: an error is a result among others.
    """

    items: list[Any]
    begin: Callable[[Any], Any] | None
    limit: int | None
    keeps_errors: bool

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


class ContinueAsNew(BaseException):
    """The code wants to begin again, with another input. No `Exception`, so that code does not catch it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


@dataclass(frozen=True)
class Result:
    """What a step has led to.

    Attributes:
        outcome: as `ToolFinished` names it.
        text: JSON of the value where that is `ok`, else what is said of it.
        status: of the run that did it, where that was a session's.
    """

    outcome: str
    text: str
    status: str = ""


@dataclass
class Record:
    """What the log has of a run's steps.

    Attributes:
        asked: tool and arguments by path.
        results: in the order in which they came.
        taken: name and value by key.
        kept: so many of the results are in the last snapshot of this.
    """

    asked: dict[str, tuple[str, str]] = field(default_factory=dict)
    results: list[tuple[str, Result]] = field(default_factory=list)
    taken: dict[str, tuple[str, Any]] = field(default_factory=dict)
    kept: int = 0


@dataclass(eq=False)
class _Join:
    """Branches under way, and who waits for them."""

    waiting: _Branch
    wanted: Branches
    results: list[Any]
    begun: int = 0
    open: int = 0
    error: BaseException | None = None

    def close(self) -> None:
        """Let go of what has not begun: a coroutine that nobody awaits would be warned of."""
        for item in self.wanted.items[self.begun :]:
            if asyncio.iscoroutine(item):
                item.close()


@dataclass(eq=False)
class _Branch:
    coroutine: Coroutine[Any, Any, Any]
    path: str
    steps: int = 0
    join: _Join | None = None
    index: int = 0

    def next_path(self) -> str:
        self.steps += 1
        return f"{self.path}{self.steps - 1}"


class Execution:
    """The code of a run, as far as it has come.

    Args:
        prefix: of all paths: of a run that was continued as new.

    Attributes:
        waiting: steps that the code awaits, by path, in the order in which it came to them.
        record: what it has been run from, and all that came since.
        is_over: the code has returned (`value`), or failed (`error`).
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], record: Record, prefix: str = "") -> None:
        self.record = record
        self._main = _Branch(coroutine, prefix)
        self._ready: deque[tuple[_Branch, Any, BaseException | None]] = deque([(self._main, None, None)])
        self._open: dict[str, _Branch] = {}
        self._branches: dict[int, _Branch] = {id(self._main): self._main}
        self._joins: dict[int, _Join] = {}
        self.waiting: dict[str, Wanted] = {}
        self._new: list[str] = []
        self._taken: list[tuple[str, str, Any]] = []
        self._replayed = 0
        self.is_over = False
        self.value: Any = None
        self.error: BaseException | None = None

    @property
    def replays(self) -> bool:
        """Whether the log has more than what the code has come to."""
        record = self.record
        awaited = len(self.waiting) - len(self._new)  # of those that the log has
        return self._replayed < len(record.results) or awaited < len(record.asked) - len(record.results)

    def replay(self) -> None:
        """Run the code up to where the log ends.

        Raises:
            WorkflowDiverged: it asks for other steps than the log has.
        """
        self._run()
        while self._replayed < len(self.record.results):
            path, result = self.record.results[self._replayed]
            if path not in self.waiting:
                tool, arguments = self.record.asked[path]
                asked = ", ".join(f"{name} ({step.tool})" for name, step in self.waiting.items()) or "nothing"
                raise WorkflowDiverged(
                    f"by the log step {path} is {shown(tool, arguments)}, and the code does not ask for it; "
                    f"what it awaits there: {asked}",
                    details={"path": path},
                )
            self._replayed += 1
            self._resume(path, result)
        done = {path for path, _ in self.record.results}
        forgotten = next((path for path in self.record.asked if path not in done and path not in self.waiting), None)
        if forgotten is not None:
            raise WorkflowDiverged(
                f"by the log step {forgotten} is {shown(*self.record.asked[forgotten])}, which is under way, and the "
                "code does not ask for it",
                details={"path": forgotten},
            )

    def deliver(self, path: str, result: Result) -> None:
        """Give the code a result that is new, and run it until it waits again."""
        self.record.results.append((path, result))
        self._replayed += 1
        self._resume(path, result)

    def new(self) -> list[tuple[str, Wanted]]:
        """The steps that the code has come to since this was asked last, and the log does not have."""
        found = [(path, self.waiting[path]) for path in self._new]
        self._new = []
        self.record.asked.update({path: (step.tool, step.arguments) for path, step in found})
        return found

    def taken(self) -> list[tuple[str, str, Any]]:
        """The values that it has taken since: key, name, value."""
        found, self._taken = self._taken, []
        return found

    def close(self) -> None:
        """Let go of the code."""
        for join in self._joins.values():
            join.close()
        for branch in self._branches.values():
            with suppress(BaseException):  # what the code does about it is its own affair
                branch.coroutine.close()
        self._branches, self._joins = {}, {}

    def __del__(self) -> None:
        self.close()

    def _resume(self, path: str, result: Result) -> None:
        wanted, branch = self.waiting.pop(path), self._open.pop(path)
        try:
            value, error = wanted.read(result), None
        except UnderstudyError as failed:
            failed.details.update(path=path, step=wanted.tool, outcome=result.outcome, status=result.status)
            value, error = None, failed
        except Exception as failed:
            value, error = None, WorkflowError(f"the result of step {path} ({wanted.tool}) can't be used: {failed}")
        self._ready.append((branch, value, error))
        self._run()

    def _run(self) -> None:
        """Advance the code until all of it waits."""
        while self._ready:
            branch, value, error = self._ready.popleft()
            self._advance(branch, value, error)

    def _advance(self, branch: _Branch, value: Any, error: BaseException | None) -> None:
        while True:
            try:
                wanted = branch.coroutine.send(value) if error is None else branch.coroutine.throw(error)
            except StopIteration as end:
                return self._ended(branch, end.value, None)
            except WorkflowDiverged:
                raise
            except (Exception, ContinueAsNew, asyncio.CancelledError) as failed:
                return self._ended(branch, None, failed)
            value, error = None, None
            if isinstance(wanted, Taken):
                value = self._take(branch, wanted)
            elif isinstance(wanted, Wanted):
                return self._ask(branch, wanted)
            elif isinstance(wanted, Branches):
                return self._split(branch, wanted)
            else:
                error = WorkflowError(
                    "a workflow may await the steps of its context only, and not asyncio's: use ctx.sleep for a time, "
                    "ctx.gather for what shall go on at once, and a tool for anything else"
                )

    def _take(self, branch: _Branch, wanted: Taken) -> Any:
        key = wanted.key or branch.next_path()
        known = self.record.taken.get(key)
        if known is None:
            value = wanted.take(self.replays)
            self.record.taken[key] = wanted.name, value
            self._taken.append((key, wanted.name, value))
            return value
        name, value = known
        if name != wanted.name:
            raise WorkflowDiverged(
                f"by the log {name} was taken at {key}, and the code takes {wanted.name}", details={"path": key}
            )
        return value

    def _ask(self, branch: _Branch, wanted: Wanted) -> None:
        path = branch.next_path()
        known = self.record.asked.get(path)
        if known is None:
            self._new.append(path)
        elif known != (wanted.tool, wanted.arguments):
            raise WorkflowDiverged(
                f"by the log step {path} is {shown(*known)}, and the code asks for "
                f"{shown(wanted.tool, wanted.arguments)}",
                details={"path": path},
            )
        self.waiting[path], self._open[path] = wanted, branch

    def _split(self, branch: _Branch, wanted: Branches) -> None:
        join = _Join(branch, wanted, [None] * len(wanted.items))
        path = branch.next_path()
        if not wanted.items:
            self._ready.append((branch, [], None))
            return
        self._joins[id(join)] = join
        for _ in range(min(len(wanted.items), wanted.limit or len(wanted.items))):
            self._begin(join, path)

    def _begin(self, join: _Join, path: str) -> None:
        index = join.begun
        join.begun, join.open = index + 1, join.open + 1
        item, join.wanted.items[index] = join.wanted.items[index], None  # which is not needed any more
        branch = _Branch(_awaiting(join.wanted.begin, item), f"{path}.{index}.", join=join, index=index)
        self._branches[id(branch)] = branch
        self._ready.append((branch, None, None))

    def _ended(self, branch: _Branch, value: Any, error: BaseException | None) -> None:
        self._branches.pop(id(branch), None)
        join = branch.join
        if join is None:
            self.is_over, self.value, self.error = True, value, error
            return
        join.open -= 1
        kept = error is not None and join.wanted.keeps_errors and isinstance(error, Exception)
        join.results[branch.index] = error if kept else value
        if error is not None and not kept:
            join.error = join.error or error
        if join.error is None and join.begun < len(join.results):
            self._begin(join, branch.path.rsplit(".", 2)[0])
        elif join.open == 0:
            join.close()
            del self._joins[id(join)]
            self._ready.append((join.waiting, join.results if join.error is None else None, join.error))


def shown(tool: str, arguments: str) -> str:
    """A step, for an error."""
    cut = arguments if len(arguments) <= SHOWN_ARGUMENTS else f"{arguments[:SHOWN_ARGUMENTS]}…"
    return f"{tool} with {cut}"


async def _awaiting(begin: Callable[[Any], Any] | None, item: Any) -> Any:
    return await (item if begin is None else begin(item))
