"""Reading queues."""

from __future__ import annotations

from sqlalchemy import Connection, and_, bindparam, case, func, literal_column, select, tuple_

from understudy.errors import UnknownQueue
from understudy.queues import BEGUN, BEHIND, WAITS
from understudy.reads import QueueInfo, WaitsIn

from ..db.prepared import Row, first, read
from ..db.statements import INBOX, QUEUE, RUN, same_session
from ..db.tables import IN_QUEUE
from ..operations.queues import FIRST

MINE = QUEUE.c.namespace == bindparam("ns")

SELECT_QUEUES = select(QUEUE).where(MINE).order_by(QUEUE.c.name)
SELECT_QUEUE = select(QUEUE).where(MINE, QUEUE.c.name == bindparam("name"))
SELECT_DUE = (
    select(QUEUE.c.name, QUEUE.c.due_at)
    .where(MINE, QUEUE.c.due_at > 0, QUEUE.c.due_at <= bindparam("until"))
    .order_by(QUEUE.c.due_at, QUEUE.c.name)
)
_NUMBERS = (
    select(
        RUN.c.queue,
        *(func.sum(case((RUN.c.slot == slot, 1), else_=0)).label(f"at_{slot}") for slot in (BEHIND, WAITS, BEGUN)),
        func.min(case((RUN.c.slot == WAITS, RUN.c.accepted_at))).label("oldest"),
    )
    .where(RUN.c.namespace == bindparam("ns"), IN_QUEUE)
    .group_by(RUN.c.queue)
)
SELECT_NUMBERS = _NUMBERS
SELECT_NUMBERS_OF = _NUMBERS.where(RUN.c.queue == bindparam("name"))

WAITING = RUN.c.slot == literal_column(str(WAITS))
SELECT_NEXT = (
    select(*FIRST, RUN.c.queue, RUN.c.queue_key, QUEUE.c.paused)
    .select_from(INBOX)
    .join(RUN, and_(same_session(RUN, INBOX), RUN.c.run_id == INBOX.c.key))
    .outerjoin(QUEUE, and_(QUEUE.c.namespace == RUN.c.namespace, QUEUE.c.name == RUN.c.queue))
    .where(
        INBOX.c.namespace == bindparam("ns"), INBOX.c.session_id == bindparam("session"), INBOX.c.kind == "input",
        WAITING,
    )
)  # fmt: skip
_not_behind = tuple_(*FIRST) <= tuple_(*(bindparam(column.name) for column in FIRST))
SELECT_PLACE = select(func.count().label("waiting"), func.sum(case((_not_behind, 1), else_=0)).label("place")).where(
    RUN.c.namespace == bindparam("ns"), RUN.c.queue == bindparam("queue"), IN_QUEUE, WAITING
)


def queues(connection: Connection, namespace: str) -> list[QueueInfo]:
    """All of them, by their names."""
    numbers = {row["queue"]: row for row in read(connection, SELECT_NUMBERS, ns=namespace)}
    found = [_info(row, numbers.get(row["name"])) for row in read(connection, SELECT_QUEUES, ns=namespace)]
    return sorted(found, key=lambda queue: queue.name)  # whatever the database's order of texts is


def queue(connection: Connection, namespace: str, name: str) -> QueueInfo:
    """One of them. Raises `UnknownQueue`."""
    row = first(connection, SELECT_QUEUE, ns=namespace, name=name)
    if row is None:
        raise UnknownQueue(f"there is no queue {name!r} in this store")
    return _info(row, first(connection, SELECT_NUMBERS_OF, ns=namespace, name=name))


def waits_in(connection: Connection, namespace: str, session_id: str) -> list[WaitsIn]:
    """Where a session's next run waits; nothing if it has a slot, or needs none."""
    row = first(connection, SELECT_NEXT, ns=namespace, session=session_id)
    if row is None:
        return []
    mine = {column.name: row[column.name] for column in FIRST}
    [counted] = read(connection, SELECT_PLACE, ns=namespace, queue=row["queue"], **mine)
    if not counted["waiting"]:
        return []  # it has just begun
    found = WaitsIn(
        queue=row["queue"], run_id=row["run_id"], key=row["queue_key"], priority=-row["queue_rank"],
        place=max(1, int(counted["place"])), waiting=int(counted["waiting"]), accepted_at=row["accepted_at"],
        paused=bool(row["paused"]),
    )  # fmt: skip
    return [found]


def due_queues(connection: Connection, namespace: str, until: int) -> list[tuple[str, int]]:
    """Name and time of those that are to be looked at until a time (microseconds), the first one first."""
    return [(row["name"], row["due_at"]) for row in read(connection, SELECT_DUE, ns=namespace, until=until)]


def _info(row: Row, numbers: Row | None) -> QueueInfo:
    behind, waiting, at_work = (int(numbers[f"at_{slot}"]) if numbers else 0 for slot in (BEHIND, WAITS, BEGUN))
    return QueueInfo(
        name=row["name"], concurrency=row["concurrency"], per_key=row["per_key"], rate=row["rate"],
        seconds=row["period"] / 1e6, paused=bool(row["paused"]), waiting=waiting, behind=behind, at_work=at_work,
        oldest=(numbers["oldest"] if numbers else None) or 0, created_at=row["created_at"],
        updated_at=row["updated_at"], by=row["set_by"],
    )  # fmt: skip
