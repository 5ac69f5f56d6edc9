"""What the rules of the accounting identity look at, and how those that SQL can prove are executed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from sqlalchemy import Connection, and_, true

from ..db.prepared import Row, read, stream
from ..db.statements import NAMESPACE, RUN, SESSION_IDS, same_session

Found = tuple[str, str]
"""A session, and what is wrong with it."""

Wrong = tuple[Any, Callable[[Row], str | None]]
"""A SELECT of what may break a rule, with `session_id`; and what is wrong with a row of it, None if nothing is."""


@dataclass(frozen=True)
class Scope:
    """Which rows are checked: all of a namespace, or those of some sessions; which ones, the parameters say."""

    some: bool

    def of(self, table: Any) -> Any:
        """The condition that a row of this table is checked."""
        chosen = table.c.session_id.in_(SESSION_IDS) if self.some else true()
        return and_(table.c.namespace == NAMESPACE, chosen)


@dataclass(frozen=True)
class Books:
    """What is checked: a namespace, or some of its sessions, as one transaction sees them."""

    connection: Connection
    namespace: str
    session_ids: Sequence[str] | None = None

    @property
    def scope(self) -> Scope:
        """As statements know it."""
        return Scope(self.session_ids is not None)

    def read(self, statement: Any, **values: Any) -> list[Row]:
        """The rows of a SELECT that is a constant."""
        return read(self.connection, statement, ns=self.namespace, ids=self.session_ids, **values)

    def stream(self, statement: Any, **values: Any) -> Iterator[Row]:
        """The same, a thousand at a time."""
        return stream(self.connection, statement, ns=self.namespace, ids=self.session_ids, **values)


def selected(rule: Callable[[Scope], Iterable[Wrong]]) -> Callable[[Books], Iterator[Found]]:
    """A rule that SELECTs prove.

    They are made once in a process, for all sessions and for some: to make and to compile one takes far longer than to
    execute it. What is said of a row is said after the rule has made all of its SELECTs: in a loop, a text's
    `format_map` keeps what a lambda would look up too late.
    """
    selects = cache(lambda scope: tuple(rule(scope)))

    @wraps(rule)
    def find(books: Books) -> Iterator[Found]:
        for statement, tell in selects(books.scope):
            # There may be many rows of all sessions, and few of some: to stream takes PostgreSQL four messages.
            for row in books.read(statement) if books.scope.some else books.stream(statement):
                if (what := tell(row)) is not None:
                    yield row["session_id"], what

    return find


def same_run(table: Any) -> Any:
    """The join of a table with its run."""
    return and_(same_session(RUN, table), RUN.c.run_id == table.c.run_id)
