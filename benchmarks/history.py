"""What a round costs by the length of the session's history."""

from __future__ import annotations

from collections.abc import Iterator

from harness import Bench, Row, median
from rounds import rounds_taken
from sqlalchemy import insert, update
from workload import agent, call

from understudy.messages import Message
from understudy.store.engine import Database
from understudy.store.entries import message_row
from understudy.store.statements import MESSAGE, SESSION

ROUNDS = 30
LENGTHS = (10, 100, 1_000, 10_000)
TEXT = "One of the messages of a long conversation, about as long as people and agents write them to each other. " * 2


def history(bench: Bench) -> list[Row]:
    """A round beyond its model call and its tool, with 10 to 10,000 messages before it."""
    script = [*([call("lookup", city="Oslo")] * ROUNDS), {"text": "done"}]
    spec = agent("history", script, max_rounds=ROUNDS + 2, repeat_limit=0)
    found: dict[int, list[float]] = {length: [] for length in LENGTHS[: bench.some(4, 2)]}
    with bench.cluster() as cluster:
        cluster.spawn(spec).send("warm up").result(120, check=True)
        for repetition in range(bench.some(5, 1)):
            for length in found:
                session = cluster.spawn(spec, session_id=f"h{length}-{repetition}")
                _fill(bench.store, bench.namespace, session.id, length)
                session.send("go").result(300, check=True)
                # The first round of an activation reads the history.
                found[length] += [wall - outside for wall, outside in rounds_taken(session.events())[2:]]
    shortest = median(found[LENGTHS[0]])
    return [
        Row("history", f"a round behind {length:,} messages, beyond model and tool, p50", median(costs), "ms", shortest,
            f"behind {LENGTHS[0]}")
        for length, costs in found.items()
    ]  # fmt: skip


def _fill(store: str, namespace: str, session_id: str, length: int) -> None:
    """Give a session that has not begun a history: messages of an earlier run."""
    database = Database(store)
    try:
        with database.write() as connection:
            here = SESSION.c.namespace == namespace, SESSION.c.session_id == session_id
            connection.execute(insert(MESSAGE), [*_rows(namespace, session_id, length)])
            connection.execute(update(SESSION).where(*here).values(seq=length + 1))
    finally:
        database.close()


def _rows(namespace: str, session_id: str, length: int) -> Iterator[dict[str, object]]:
    for number in range(length):
        message = Message("assistant" if number % 2 else "user", TEXT, run_id="earlier", round=number // 2)
        yield {"namespace": namespace, **message_row(session_id, number + 2, message, 1)}
