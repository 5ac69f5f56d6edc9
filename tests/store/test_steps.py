"""Steps of workflows that others do: what becomes of them when a process dies, and what many of them cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import event

from understudy.approvals import QUESTION
from understudy.events import SessionCrashed
from understudy.messages import Message
from understudy.protocol import Signal
from understudy.records import Ask, CallState
from understudy.spec import RestartPolicy
from understudy.store.db.prepared import Prepared
from understudy.store.operations import activation, steps
from understudy.store.reads import queries
from understudy.supervisor.restarts import decide
from understudy.wakeups import WAIT
from understudy.workflows import ASK_STEP, EVENT_STEP, SLEEP_STEP

from .test_store import Store, opened, spec

pytestmark = pytest.mark.conformance

DEATHS = 3
ARGUMENTS = {SLEEP_STEP: '{"seconds": 1}', ASK_STEP: '{"prompt": "?"}', EVENT_STEP: '{"name": "e", "seconds": null}'}


@pytest.fixture
async def db(store: str) -> AsyncIterator[Store]:
    async with opened(store) as made:
        await made.own()
        await made.create("w", spec(kind="workflow"))
        await made.accept("w", content="{}")
        yield made


def wanted(count: int, tool: str = EVENT_STEP) -> tuple[CallState, ...]:
    """So many steps of a kind."""
    return tuple(
        CallState(f"r/{number}", "requested", tool, f'{{"name": "e{number}", "seconds": null}}', index=number)
        for number in range(count)
    )


@pytest.mark.parametrize("tool", [SLEEP_STEP, ASK_STEP, EVENT_STEP])
async def test_what_no_process_executes_is_not_given_up(db: Store, tool: str) -> None:
    """Given a step that the code has asked for and that was not handed over yet, when its process dies again and again
    without progress, then the step is not given up: no process was at it. The tool beside it is, once."""
    policy = RestartPolicy(stuck_after=DEATHS, max_restarts=100, backoff=0.0).model_dump()
    beside = CallState("r/1", "requested", "pay", "{}", index=1)
    await db.activate("w")
    asked = (CallState("r/0", "requested", tool, ARGUMENTS[tool]), beside)
    await db.commit("w", 1, 1, start_run="r", entries=(Message("user", "{}", run_id="r"),), steps=asked)
    for number in range(DEATHS):
        held = db.held("w", number + 1)
        await db.do(activation.crash, held, decide, cause="process_died", pid=1, policy=policy)
        await db.activate("w")
    ended = [found for found in db.read(_events) if isinstance(found, SessionCrashed)]
    assert [found.decision for found in ended] == ["resume", "resume", "abort"]
    states = await db.do(lambda tx: {call["call_id"]: call["state"] for call in tx.current_calls(tx.session("w"))})
    assert states == {"r/0": "requested", "r/1": "finished"}


def _events(connection: Any, namespace: str) -> list[Any]:
    return list(queries.session_events(connection, namespace, "w"))


@pytest.mark.parametrize("kind", [EVENT_STEP, WAIT, QUESTION])
async def test_many_steps_are_handed_over_in_as_many_statements_as_few(db: Store, kind: str) -> None:
    """The commit that hands over steps reads as often for a hundred of them as for two: not once for each."""
    tool = {EVENT_STEP: EVENT_STEP, WAIT: SLEEP_STEP, QUESTION: ASK_STEP}[kind]
    await db.activate("w")
    message = (Message("user", "{}", run_id="r"),)
    await db.commit("w", 1, 1, start_run="r", entries=message, steps=wanted(104, tool))
    counts = []
    for number, some in enumerate((range(2), range(2, 4), range(4, 104))):  # the first also prepares statements
        arguments = {"name": "e", "seconds": 60.0, "until": None}
        asks = tuple(Ask(f"r/{step}", kind, "?", executions=1, arguments=arguments) for step in some)
        with Counted(db) as counted:
            await db.commit("w", 1, number + 2, asks=asks)
        counts.append(counted.selects)
    assert counts[2] <= counts[1], counts
    states = await db.do(lambda tx: {call["state"] for call in tx.current_calls(tx.session("w"))})
    assert states == {"asked" if kind == QUESTION else "waiting"}


async def test_a_signal_finds_its_step_among_many(db: Store) -> None:
    """Given many steps that wait for events, a signal goes to the one that waits for its name, and to none that has
    come to its event already."""
    await db.activate("w")
    message = (Message("user", "{}", run_id="r"),)
    await db.commit("w", 1, 1, start_run="r", entries=message, steps=wanted(50))
    asks = tuple(
        Ask(f"r/{step}", EVENT_STEP, "", executions=1, arguments={"name": f"e{step}", "seconds": None})
        for step in range(50)
    )
    await db.commit("w", 1, 2, asks=asks, wait="input")
    assert await db.do(steps.signal, "w", Signal("e7", "it"))
    assert not await db.do(steps.signal, "w", Signal("e7", "the next"))
    assert await db.do(lambda tx: [(i.kind, i.key) for i in tx.inbox(tx.session("w"))]) == [
        ("answer", "r/7"), ("signal", "e7"),
    ]  # fmt: skip


async def test_what_is_given_up_and_done_in_one_batch_keeps_its_result(db: Store) -> None:
    """Given a batch that gives two steps up, and says of one of them that it is done, then the other one comes to an
    end, and the batch is committed."""
    await db.activate("w")
    message = (Message("user", "{}", run_id="r"),)
    await db.commit("w", 1, 1, start_run="r", entries=message, steps=wanted(2))
    arguments = {"name": "e", "seconds": None}
    asks = tuple(Ask(f"r/{step}", EVENT_STEP, "", executions=1, arguments=arguments) for step in range(2))
    await db.commit("w", 1, 2, asks=asks)
    done = (CallState("r/0", "done", executions=1),)
    committed = await db.commit("w", 1, 3, calls=done, given_up=("r/0", "r/1"), wait="input")
    assert committed.wait is None
    assert await db.do(lambda tx: [(i.kind, i.key) for i in tx.inbox(tx.session("w"))]) == [("answer", "r/1")]
    assert await db.do(lambda tx: [call["call_id"] for call in tx.current_calls(tx.session("w"))]) == ["r/1"]


class Counted:
    """Counts the statements that read in the transactions of a store: those that are prepared, and the others."""

    def __init__(self, db: Store) -> None:
        self.selects = 0
        self._engine = db.database.writer
        self._spied: Any = None

    def __enter__(self) -> Counted:
        rows = Prepared.rows

        def counted(prepared: Prepared, cursor: Any, values: Any) -> Any:
            self.selects += 1
            return rows(prepared, cursor, values)

        self._spied = patch.object(Prepared, "rows", counted)
        self._spied.start()
        event.listen(self._engine, "before_cursor_execute", self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        self._spied.stop()
        event.remove(self._engine, "before_cursor_execute", self._note)

    def _note(self, _connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        self.selects += statement.lstrip().upper().startswith("SELECT")
