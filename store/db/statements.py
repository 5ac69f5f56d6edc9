"""The tables as statements use them, and the statements of the write path that never change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from msgspec import Struct
from sqlalchemy import Text, and_, bindparam, case, delete, func, literal_column, select, union_all, update

from understudy.identifiers import call_identifier

from . import tables
from .prepared import Row
from .session_row import SessionRow


def table_of(model: type) -> Any:
    """The SQLAlchemy table behind a SQLModel class."""
    return model.__table__  # type: ignore[attr-defined]


def columns_of(table: Any, record: Any) -> list[Any]:
    """The columns that a record is made from, in the order of its fields; those that no column has are filled in
    otherwise.

    Args:
        record: a class: a msgspec structure, a dataclass or a named tuple.
    """
    if is_dataclass(record):
        names = tuple(field.name for field in fields(record))
    else:
        names = record.__struct_fields__ if issubclass(record, Struct) else record._fields
    return [table.c[name] for name in names if name in table.c]


(
    SESSION, RUN, MESSAGE, EVENT, TOOL_CALL, INBOX, OWNER, ACCOUNT, RESERVATION, TIMER, QUESTION, CODE_BLOB,
    METRIC_STATE, EXPORT_CURSOR,
) = map(
    table_of,
    (
        tables.Session,
        tables.Run,
        tables.Message,
        tables.Event,
        tables.ToolCall,
        tables.Inbox,
        tables.Owner,
        tables.Account,
        tables.Reservation,
        tables.Timer,
        tables.Question,
        tables.CodeBlob,
        tables.MetricState,
        tables.ExportCursor,
    ),
)  # fmt: skip

DRAIN = table_of(tables.Drain)
SERVICE = table_of(tables.Service)
REQUEST = table_of(tables.Request)
REMOVAL = table_of(tables.Removal)
NOTE = table_of(tables.Note)
COMMAND = table_of(tables.Command)
SCHEDULE = table_of(tables.Schedule)
TRIAGE = table_of(tables.Triage)
LOOP_MEMORY = table_of(tables.LoopMemory)
QUEUE = table_of(tables.Queue)

# What never changes after a session's creation, or by retention alone, and so is not written back.
FIXED = {
    "namespace", "session_id", "parent_id", "root_id", "depth", "call_id", "parent_run_id", "agent", "kind", "spec",
    "spec_hash", "placement", "metadata_json", "created_at", "incarnation", "first_incarnation", "pruned_seq",
    "accounts", "restart_type", "on_parent_end", "lifecycle", "shutdown", "start_order", "restart_number",
    "background",
}  # fmt: skip
MUTABLE = [column.name for column in SESSION.columns if column.name not in FIXED]
# The specification is large and fixed: it is read once, not in every round.
SESSION_COLUMNS = columns_of(SESSION, SessionRow)

NAMESPACE: Any = bindparam("ns", type_=Text)
SESSION_IDS: Any = bindparam("ids", type_=Text, expanding=True)
"""As parameters of SELECTs that are prepared; the ids are a list."""

LOADED_AT_ONCE = 128


@cache
def select_sessions(count: int, lock: bool, wait: bool = True) -> Any:
    """Reads so many sessions; locked in the order of their ids, so that two journals can't deadlock on them.

    Without `wait` it fails at once if somebody else has locked one of them.
    """
    ids: list[Any] = [bindparam(f"id{number}") for number in range(count)]
    found = select(*SESSION_COLUMNS).where(SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id.in_(ids))
    return found.order_by(SESSION.c.session_id).with_for_update(nowait=not wait) if lock else found


@cache
def select_accounts(count: int, lock: bool, wait: bool = True) -> Any:
    """Reads the accounts of so many sessions; locked in one order, as the sessions are."""
    ids: list[Any] = [bindparam(f"id{number}") for number in range(count)]
    found = select(ACCOUNT).where(ACCOUNT.c.namespace == bindparam("ns"), ACCOUNT.c.session_id.in_(ids))
    found = found.order_by(ACCOUNT.c.session_id, ACCOUNT.c.scope, ACCOUNT.c.resource)
    return found.with_for_update(nowait=not wait) if lock else found


# What hardly any commit changes: where it did not, a shorter statement writes the row.
SELDOM = (
    "closed", "error", "frame_id", "actor_pid", "node_id", "cancel_reason", "wait_error", "deaths", "stuck",
    "progress_at_death", "restarts", "aborted", "tokens_redone", "cost_used", "cancel_as", "held", "group_state",
    "task_open", "replaced_by", "abandoned", "moved", "redone", "next_spec", "last_span",
    "merged", "sampled", "record_seq", "queue", "queued",
)  # fmt: skip
OFTEN = [name for name in MUTABLE if name not in SELDOM]


def _update_session(names: Iterable[str]) -> Any:
    key = (SESSION.c.namespace == bindparam("b_namespace"), SESSION.c.session_id == bindparam("b_session_id"))
    return update(SESSION).where(*key).values({name: bindparam(f"b_{name}") for name in names})


ACCOUNT_KEY = ("namespace", "session_id", "scope", "resource")
ACCOUNT_STATE = ("allowed", "reserved", "spent", "beyond", "since")
UPDATE_ACCOUNT = (
    update(ACCOUNT)
    .where(*(ACCOUNT.c[name] == bindparam(f"b_{name}") for name in ACCOUNT_KEY))
    .values({name: bindparam(f"b_{name}") for name in ACCOUNT_STATE})
)

SELECT_RESERVATION = select(RESERVATION).where(
    RESERVATION.c.namespace == bindparam("ns"), RESERVATION.c.session_id == bindparam("session")
)
DELETE_RESERVATION = delete(RESERVATION).where(
    RESERVATION.c.namespace == bindparam("b_namespace"), RESERVATION.c.session_id == bindparam("b_session_id")
)
UPDATE_SESSION = _update_session(MUTABLE)
UPDATE_SESSION_OFTEN = _update_session(OFTEN)
CALL_STATE = ("state", "epoch", "executions", "result", "child_id", "updated_at", "edited")
CALL_KEEPS = ("child_id", "edited")
"""What a later state of a call need not name again."""
DONE: Any = literal_column("'done'")
UPDATE_CALL = (
    update(TOOL_CALL)
    .where(
        TOOL_CALL.c.namespace == bindparam("b_namespace"),
        TOOL_CALL.c.session_id == bindparam("b_session_id"),
        TOOL_CALL.c.call_id == bindparam("b_call_id"),
    )
    .values(
        {
            **{name: bindparam(f"b_{name}") for name in CALL_STATE},
            "open": case((bindparam("b_state", type_=Text) == DONE, literal_column("0")), else_=TOOL_CALL.c.open),
            **{name: func.coalesce(bindparam(f"b_{name}", type_=Text), TOOL_CALL.c[name]) for name in CALL_KEEPS},
        }
    )
)
RUN_END = ("status", "text", "output", "error", "rounds", "usage", "started_at", "finished_at", "slot")
UPDATE_RUN = (
    update(RUN)
    .where(
        RUN.c.namespace == bindparam("b_namespace"),
        RUN.c.session_id == bindparam("b_session_id"),
        RUN.c.run_id == bindparam("b_run_id"),
    )
    .values({name: bindparam(f"b_{name}") for name in RUN_END})
)
SELECT_INBOX = (
    select(INBOX.c.item, INBOX.c.kind, INBOX.c.key, INBOX.c.payload)
    .where(INBOX.c.namespace == bindparam("ns"), INBOX.c.session_id == bindparam("session"))
    .order_by(INBOX.c.item)
)
SELECT_MESSAGES = (
    select(MESSAGE.c.seq, MESSAGE.c.body)
    .where(
        MESSAGE.c.namespace == bindparam("ns"),
        MESSAGE.c.session_id == bindparam("session"),
        MESSAGE.c.seq > bindparam("after"),
    )
    .order_by(MESSAGE.c.seq)
)
# By their keys, which are numbered from 0: a search by round would read every call that the session ever made.
CALLS_AT_ONCE = 16
SELECT_CALLS = select(TOOL_CALL).where(
    TOOL_CALL.c.namespace == bindparam("ns"),
    TOOL_CALL.c.session_id == bindparam("session"),
    TOOL_CALL.c.call_id.in_([bindparam(f"call{number}") for number in range(CALLS_AT_ONCE)]),
)
SELECT_STEPS = select(TOOL_CALL).where(
    TOOL_CALL.c.namespace == bindparam("ns"),
    TOOL_CALL.c.session_id == bindparam("session"),
    TOOL_CALL.c.open == literal_column("1"),
)
SELECT_SPECIFICATION = select(SESSION.c.spec).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id == bindparam("session")
)
SELECT_REMOVAL = select(REMOVAL.c.incarnation).where(REMOVAL.c.namespace == bindparam("ns"))
SELECT_OWNER = select(OWNER.c.generation).where(OWNER.c.namespace == bindparam("ns"))
# Where a journal's own log ends: its newest events may be gone by now, but not what was made of them.
_ENDS = union_all(
    *(
        select(func.max(table.c.writer_seq).label("seq")).where(
            table.c.namespace == bindparam("ns"), table.c.writer == bindparam("writer")
        )
        for table in (EVENT, METRIC_STATE, EXPORT_CURSOR)
    )
).subquery()
SELECT_END_OF_LOG = select(func.max(_ENDS.c.seq))
DELETE_INBOX = delete(INBOX).where(
    INBOX.c.namespace == bindparam("b_namespace"),
    INBOX.c.session_id == bindparam("b_session_id"),
    INBOX.c.item == bindparam("b_item"),
)
DELETE_TIMER = delete(TIMER).where(
    TIMER.c.namespace == bindparam("b_namespace"),
    TIMER.c.session_id == bindparam("b_session_id"),
    TIMER.c.name == bindparam("b_name"),
)


def calls_of_round(select_calls: Callable[[Row], list[Row]], run_id: str, round_number: int) -> list[Row]:
    """The tool calls of a round, in order; `select_calls` executes `SELECT_CALLS` with the keys that it is given."""
    found: list[Row] = []
    while len(found) % CALLS_AT_ONCE == 0:
        keys = {f"call{n}": call_identifier(run_id, round_number, len(found) + n) for n in range(CALLS_AT_ONCE)}
        more = select_calls(keys)
        if not more:
            break
        found += more
    return sorted(found, key=lambda item: int(item["index"]))


def same_session(table: Any, other: Any) -> Any:
    """The join of two tables on their session."""
    return and_(table.c.namespace == other.c.namespace, table.c.session_id == other.c.session_id)
