"""The execution of a workflow's code: what it asks for, what that returns, and the same again from what is recorded.

No event loop: the code's coroutines are advanced here, one at a time, in an order that depends on nothing but the order
in which results are delivered. That order is the log's, so the code does the same whenever it is run from the log.

A step is known by its path: the number of the step in its branch, behind the paths of the branches that it is in. So
branches may overtake each other without any step being taken for another one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from understudy.errors import UnderstudyError, WorkflowDiverged, WorkflowError

from .awaited import Branches, ContinueAsNew, Limited, Record, Result, Taken, Wanted

SHOWN_ARGUMENTS = 300
"""Characters of a step's arguments that an error shows."""


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
class _Limit:
    """Work that is to be done within a time, and who waits for it.

    Attributes:
        path: of the place in the code; the timer and the work are its branches.
    """

    waiting: _Branch
    wanted: Limited
    path: str

    @property
    def timer(self) -> str:
        """The timer's path."""
        return f"{self.path}.0.0"

    @property
    def work(self) -> str:
        """How the paths of the work's steps begin."""
        return f"{self.path}.1."


@dataclass(eq=False)
class _Branch:
    coroutine: Coroutine[Any, Any, Any]
    path: str
    steps: int = 0
    join: _Join | None = None
    index: int = 0
    limit: _Limit | None = None

    def next_path(self) -> str:
        self.steps += 1
        return f"{self.path}{self.steps - 1}"


class Execution:
    """The code of a run, as far as it has come.

    Args:
        prefix: of all paths: of a run that was continued as new.

    Attributes:
        waiting: steps that the code awaits, by path, in the order in which it came to them.
        dropped: steps that it awaits no more and that have no result yet, by path.
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
        self._limits: dict[str, _Limit] = {}  # by the paths of their timers
        self.waiting: dict[str, Wanted] = {}
        self.dropped: dict[str, _Limit | None] = {}  # whose time was over: it goes on when its last step has a result
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
        awaited = len(self.waiting) + len(self.dropped) - len(self._new)  # of those that the log has
        return self._replayed < len(record.results) or awaited < len(record.asked) - len(record.results)

    def replay(self) -> None:
        """Run the code up to where the log ends.

        Raises:
            WorkflowDiverged: it asks for other steps than the log has.
        """
        self._run()
        while self._replayed < len(self.record.results):
            path, result = self.record.results[self._replayed]
            if path not in self.waiting and path not in self.dropped:
                tool, arguments = self.record.asked[path]
                asked = ", ".join(f"{name} ({step.tool})" for name, step in self.waiting.items()) or "nothing"
                raise WorkflowDiverged(
                    f"by the log step {path} is {shown(tool, arguments)}, and the code does not ask for it; "
                    f"what it awaits there: {asked}",
                    details={"path": path},
                )
            self._replayed += 1
            self._resume(path, result)
        known = {path for path, _ in self.record.results} | self.waiting.keys() | self.dropped.keys()
        forgotten = next((path for path in self.record.asked if path not in known), None)
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
        self._branches, self._joins, self._limits = {}, {}, {}

    def __del__(self) -> None:
        self.close()

    def _resume(self, path: str, result: Result) -> None:
        limit = self._limits.pop(path, None)
        if limit is not None:
            del self.waiting[path]
            self._time_out(limit)
        elif path in self.dropped:
            self._go_on_after(self.dropped.pop(path))
        else:
            self._give(path, result)
        self._run()

    def _give(self, path: str, result: Result) -> None:
        wanted, branch = self.waiting.pop(path), self._open.pop(path)
        try:
            value, error = wanted.read(result), None
        except UnderstudyError as failed:
            failed.details.update(path=path, step=wanted.tool, outcome=result.outcome, status=result.status)
            value, error = None, failed
        except Exception as failed:
            value, error = None, WorkflowError(f"the result of step {path} ({wanted.tool}) can't be used: {failed}")
        self._ready.append((branch, value, error))

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
            elif isinstance(wanted, Limited):
                return self._limit(branch, wanted)
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
        self._await(path, wanted)
        self._open[path] = branch

    def _await(self, path: str, wanted: Wanted) -> None:
        known = self.record.asked.get(path)
        if known is None:
            self._new.append(path)
        elif known != (wanted.tool, wanted.arguments):
            raise WorkflowDiverged(
                f"by the log step {path} is {shown(*known)}, and the code asks for "
                f"{shown(wanted.tool, wanted.arguments)}",
                details={"path": path},
            )
        self.waiting[path] = wanted

    def _limit(self, branch: _Branch, wanted: Limited) -> None:
        limit = _Limit(branch, wanted, branch.next_path())
        self._await(limit.timer, wanted.timer)
        self._limits[limit.timer] = limit
        work = _Branch(_awaiting(None, wanted.item), limit.work, limit=limit)
        self._branches[id(work)] = work
        self._ready.append((work, None, None))

    def _time_out(self, limit: _Limit) -> None:
        """The time is over: the code within goes no further, and what goes on outside it does so when the last of the
        steps within has its result."""
        for branch in [branch for branch in self._branches.values() if branch.path.startswith(limit.work)]:
            del self._branches[id(branch)]
            with suppress(BaseException):  # as in `close`
                branch.coroutine.close()
        for join in [join for join in self._joins.values() if join.waiting.path.startswith(limit.work)]:
            del self._joins[id(join)]
            join.close()
        self._limits = {timer: one for timer, one in self._limits.items() if not timer.startswith(limit.work)}
        self.dropped.update({path: limit for path in self.dropped if path.startswith(limit.work)})
        for path in [path for path in self.waiting if path.startswith(limit.work)]:
            self._drop(path, limit)
        self._go_on_after(limit)

    def _drop(self, path: str, limit: _Limit | None) -> None:
        """Nobody awaits a step any more; one that was not asked for yet won't be."""
        del self.waiting[path]
        self._open.pop(path, None)
        if path in self._new:
            self._new.remove(path)
        else:
            self.dropped[path] = limit

    def _go_on_after(self, limit: _Limit | None) -> None:
        """Go on behind a limit whose time was over, if nothing within it is open."""
        if limit is not None and limit not in self.dropped.values():
            error = limit.wanted.late()
            error.details.update(path=limit.path, step=limit.wanted.timer.tool, outcome="timeout", status="")
            self._ready.append((limit.waiting, None, error))

    def _split(self, branch: _Branch, wanted: Branches) -> None:
        join = _Join(branch, wanted, [None] * len(wanted.items))
        path = branch.next_path()
        if not wanted.items:
            self._ready.append((branch, [], None))
            return
        self._joins[id(join)] = join
        for _ in range(min(len(wanted.items), wanted.limit)):
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
        join, limit = branch.join, branch.limit
        if limit is not None:
            del self._limits[limit.timer]
            self._drop(limit.timer, None)
            self._ready.append((limit.waiting, value, error))
            return
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
