"""What a round costs by the length of the session's history, beside one whose model takes as long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness import Bench, Limit, Row, median
from rounds import rounds_taken
from sqlalchemy import insert, update
from workload import agent, call

from understudy import AgentSpec, Cluster
from understudy.messages import Message
from understudy.store.db.engine import Database
from understudy.store.db.statements import MESSAGE, SESSION
from understudy.store.entries import message_row

ROUNDS = 30
LENGTHS = (10, 100, 1_000, 10_000)
TEXT = "One of the messages of a long conversation, about as long as people and agents write them to each other. " * 2


def history(bench: Bench) -> list[Row]:
    """A round beyond its model call and its tool, with 10 to 10,000 messages before it."""
    lengths, repetitions = LENGTHS[: bench.some(4, 2)], bench.some(5, 1)
    found: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
    slow: list[tuple[float, float]] = []
    with bench.cluster() as cluster:
        cluster.spawn(_agent()).send("warm up").result(120, check=True)
        for repetition in range(repetitions):
            for length in lengths:
                found[length] += _rounds(bench, cluster, f"h{length}-{repetition}", length, _agent())
            # The endpoint reads a long history for long, and all processes have been idle before its answer comes.
            pause = median([outside for _, outside in found[lengths[-1]]]) / 1e3
            slow += _rounds(bench, cluster, f"slow-{repetition}", lengths[0], _agent(pause))
    shortest = _beyond(found[lengths[0]])
    rows = [
        Row("history", f"a round behind {length:,} messages, beyond model and tool, p50", _beyond(rounds), "ms",
            shortest, f"behind {lengths[0]}",
            note=f"model and tool take {median([outside for _, outside in rounds]):.1f} ms")
        for length, rounds in found.items()
    ]  # fmt: skip
    text = f"behind {lengths[0]}, the model as slow"
    return [*rows, replace(rows[-1], baseline=_beyond(slow), against=text, limit=Limit(1.2, of_ratio=True), note="")]


def _beyond(rounds: list[tuple[float, float]]) -> float:
    """What a round takes beyond what is outside."""
    return median([wall - outside for wall, outside in rounds])


def _agent(pause: float = 0.0) -> AgentSpec:
    """One that asks its model, which pauses before it answers, and looks something up, in turn."""
    script = [*([{**call("lookup", city="Oslo"), "delay": pause}] * ROUNDS), {"text": "done"}]
    return agent("history", script, max_rounds=ROUNDS + 2, repeat_limit=0)


def _rounds(bench: Bench, cluster: Cluster, name: str, length: int, spec: AgentSpec) -> list[tuple[float, float]]:
    """See `rounds_taken`: of a session with a history, without the first round, which reads it."""
    session = cluster.spawn(spec, session_id=name)
    _fill(bench.store, bench.namespace, session.id, length)
    session.send("go").result(300, check=True)
    return rounds_taken(session.events())[2:]


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
