"""The accounting identity: what the tables of a store must say after every commit, proved from the tables alone.

Each rule is one small function or class whose docstring states it (`check_rows.py`, `check_tree.py` and
`check_budgets.py`: SQL; `check_log.py`: what takes reading the log). A violation is a bug of ours, or somebody else's
hand in the database.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, and_, bindparam, case, cast, func, literal_column, null, select, union_all

from ..db.columns import Json
from ..db.prepared import Row
from ..db.statements import EVENT, MESSAGE, RUN, SESSION, TOOL_CALL, same_session
from .check_budgets import BUDGET_RULES
from .check_commands import COMMAND_RULES
from .check_log import LOG_RULES as ENTRY_RULES
from .check_log import Entry
from .check_notes import NOTE_RULES
from .check_queues import QUEUE_RULES
from .check_records import RECORD_LOG_RULES, RECORD_ROW_RULES
from .check_rows import ROW_RULES
from .check_schedules import SCHEDULE_RULES
from .check_scope import Books, Found, Scope, same_run
from .check_tree import TREE_RULES
from .check_triage import TRIAGE_RULES

MOST_OF_ONE_RULE = 100
"""Violations of one rule that are reported: where something is broken everywhere, these will do."""

PAGE = 200
"""Sessions whose rows are held at the same time."""

EVENTS_READ = (
    "session_activated", "model_call_completed", "model_call_failed", "tool_finished", "run_finished",
    "agent_handed_off", "session_created", "input_requested", "input_received",
)  # fmt: skip

SQL_RULES = {
    **ROW_RULES, **TREE_RULES, **BUDGET_RULES, **NOTE_RULES, **RECORD_ROW_RULES, **COMMAND_RULES, **SCHEDULE_RULES,
    **TRIAGE_RULES, **QUEUE_RULES,
}  # fmt: skip
LOG_RULES = {**ENTRY_RULES, **RECORD_LOG_RULES}

RULES: dict[str, str] = {name: inspect.getdoc(rule) or "" for name, rule in {**SQL_RULES, **LOG_RULES}.items()}
"""What each rule demands, by its name."""


@dataclass(frozen=True)
class Violation:
    """A rule that a session breaks; `text` says what is wrong, and where."""

    session_id: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.session_id}: {self.rule}: {self.text}"


def check(connection: Connection, namespace: str, session_ids: Collection[str] | None = None) -> list[Violation]:
    """Everything that is wrong in a namespace, or with some of its sessions; empty when the books balance.

    It holds up nobody, and needs memory for the longest run, not for the store.

    Args:
        connection: of `Database.snapshot`, or in a transaction that holds these sessions.
        session_ids: at most a few thousand; only these are read, and what others say of them.
    """
    books = Books(connection, namespace, None if session_ids is None else sorted(session_ids))
    counts: Counter[str] = Counter()
    violations = []
    for rule, (session_id, what) in _findings(books):
        counts[rule] += 1
        if counts[rule] <= MOST_OF_ONE_RULE:
            violations.append(Violation(session_id, rule, what))
    return violations


def _findings(books: Books) -> Iterator[tuple[str, Found]]:
    for name, rule in SQL_RULES.items():
        for found in rule(books):
            yield name, found
    yield from _read_logs(books)


def _read_logs(books: Books) -> Iterator[tuple[str, Found]]:
    """Follow every session's log by every rule; yields what they find, with the rule's name."""
    last = ""
    while page := books.read(_sessions(books.scope), after=last):
        first, last = page[0]["session_id"], page[-1]["session_id"]
        rows = books.stream(_logs(books.scope), first=first, last=last)
        entries = groupby((Entry(**row) for row in rows), lambda entry: entry.session_id)
        logs = {session["session_id"]: session for session in page}
        for session_id, log in entries:
            yield from _follow(books, logs.pop(session_id), log)
        for session in logs.values():
            yield from _follow(books, session, ())


def _follow(books: Books, session: Row, log: Iterable[Entry]) -> Iterator[tuple[str, Found]]:
    rules = {name: rule(books, session) for name, rule in LOG_RULES.items()}
    for entry in log:
        for name, rule in rules.items():
            if rule.types is not None and entry.type not in rule.types:
                continue
            for what in rule.read(entry):
                yield name, (session["session_id"], what)
    for name, rule in rules.items():
        for what in rule.end():
            yield name, (session["session_id"], what)


@cache
def _sessions(scope: Scope) -> Any:
    """The next sessions, in the database's own order of ids."""
    names = (
        "session_id", "seq", "pruned_seq", "run_id", "round", "run_usage", "tokens_used", "tokens_redone", "cost_used",
        "epoch", "cancel_reason", "agent",
    )  # fmt: skip
    calls = select(func.count()).select_from(TOOL_CALL).where(same_session(TOOL_CALL, SESSION)).scalar_subquery()
    statement = select(*(SESSION.c[name] for name in names), calls.label("tool_calls"))
    statement = statement.where(scope.of(SESSION), SESSION.c.session_id > bindparam("after"))
    return statement.order_by(SESSION.c.session_id).limit(PAGE)


@cache
def _logs(scope: Scope) -> Any:
    """The logs of the sessions from one to another, one after the other, as `Entry` has them."""

    def within(table: Any) -> Any:
        between = table.c.session_id.between(bindparam("first"), bindparam("last"))
        exists = select(SESSION.c.session_id).where(same_session(SESSION, table)).exists()
        return and_(scope.of(table), between, exists)

    messages = select(
        MESSAGE.c.session_id, MESSAGE.c.seq, literal_column("0").label("is_event"), MESSAGE.c.role.label("type"),
        MESSAGE.c.run_id, MESSAGE.c.round, MESSAGE.c.body.label("body"),
        cast(null(), Json).label("run_usage"),
    ).where(within(MESSAGE))  # fmt: skip
    ended = and_(same_run(EVENT), EVENT.c.type == "run_finished")
    events = (
        select(
            EVENT.c.session_id, EVENT.c.seq, literal_column("1").label("is_event"), EVENT.c.type, EVENT.c.run_id,
            literal_column("0").label("round"), case((EVENT.c.type.in_(EVENTS_READ), EVENT.c.body)).label("body"),
            RUN.c.usage.label("run_usage"),
        )
        .outerjoin(RUN, ended)
        .where(within(EVENT))
    )  # fmt: skip
    return union_all(messages, events).order_by("session_id", "seq")
