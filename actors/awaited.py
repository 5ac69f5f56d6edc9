"""What a workflow's code awaits, and what a log has of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from understudy.errors import StepTimeout


@dataclass(eq=False)
class Wanted:
    """A step that the code awaits. The subclasses of the context say what is done about it.

    Attributes:
        tool: the tool of its call.
        arguments: of it, as JSON text: these distinguish a step from another one.
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
        limit: so many at a time.
        keeps_errors: an error is a result among others.
    """

    items: list[Any]
    begin: Callable[[Any], Any] | None
    limit: int
    keeps_errors: bool

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


@dataclass(eq=False)
class Limited:
    """What the code wants to have done within a time.

    Attributes:
        item: what is awaited.
        timer: whose result says that the time is over.
        late: has the error that the code gets then.
    """

    item: Any
    timer: Wanted
    late: Callable[[], StepTimeout] = field(repr=False)

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
