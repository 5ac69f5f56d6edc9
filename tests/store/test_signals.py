"""Signals to workflows: what becomes of those that no step has taken."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import select

from understudy.approvals import QUESTION
from understudy.errors import NotAsked, NotRunning
from understudy.messages import Message
from understudy.protocol import Signal
from understudy.records import Ask, CallState
from understudy.store.check.check import check
from understudy.store.db.statements import TIMER
from understudy.store.operations import endings, questions, steps, timers
from understudy.wakeups import WAIT
from understudy.workflows import ASK_STEP, EVENT_STEP, TIMEOUT_STEP

from .test_store import Store, opened, spec

pytestmark = pytest.mark.conformance


@pytest.fixture
async def db(store: str) -> AsyncIterator[Store]:
    async with opened(store) as made:
        yield made


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_signals_go_with_the_run_that_was_to_begin(db: Store, how: str) -> None:
    """A signal that came before a workflow's run has begun is dropped when that is cancelled: nobody will take it, and
    no later run may."""
    await db.own()
    await db.create("w", spec(kind="workflow"))
    await db.accept("w", content="{}")
    assert not await db.do(steps.signal, "w", Signal("go", 1))
    if how == "cancel":
        assert await db.do(lambda tx: endings.request_cancel(tx, tx.session("w"), "enough"))
    else:
        assert await db.do(endings.close, "w", "enough")
    assert await db.do(lambda tx: len(tx.inbox(tx.session("w")))) == 0
    with db.database.snapshot() as connection:
        assert list(map(str, check(connection, db.namespace))) == []
    with pytest.raises(NotRunning):
        await db.do(steps.signal, "w", Signal("go", 2))


@pytest.mark.parametrize("noted", [False, True])
async def test_what_comes_when_the_time_is_over_is_not_lost(db: Store, noted: bool) -> None:
    """Given steps within a time, one for an event and one for a person, when that is over and the workflow's process
    has not heard of it, or has noted it and not given the steps up yet, then a signal is kept for the next step, and an
    answer is refused; a step that begins then is given nothing that is kept. Those under no limit have theirs."""
    await db.own()
    await db.create("w", spec(kind="workflow"))
    await db.accept("w", content="{}")
    await db.activate("w")
    kinds = {"0.0.0": (TIMEOUT_STEP, WAIT), "1.1.0": (EVENT_STEP, EVENT_STEP), "1.1.1": (ASK_STEP, QUESTION)}
    kinds |= {path.replace("1.", "0.1.", 1): kind for path, kind in kinds.items() if path != "0.0.0"}
    event = {"name": "go", "seconds": None}
    given = {TIMEOUT_STEP: {"seconds": 60.0}, EVENT_STEP: event, ASK_STEP: {"prompt": "?"}}
    wanted = tuple(
        CallState(f"r/{path}", "requested", tool, json.dumps(given[tool]), index=number)
        for number, (path, (tool, _)) in enumerate(kinds.items())
    )
    message = (Message("user", "{}", run_id="r"),)
    await db.commit("w", 1, 1, start_run="r", entries=message, steps=wanted)
    asks = tuple(
        Ask(f"r/{path}", kind, "?", executions=1, arguments=given[tool]) for path, (tool, kind) in kinds.items()
    )
    await db.commit("w", 1, 2, asks=asks)
    timer = "call:r/0.0.0"
    [due_at] = [row.due_at for row in db.read(_timers) if row.name == timer]
    await db.do(timers.fire, "w", timer, due_at)
    if noted:
        [item] = await db.do(lambda tx: tx.inbox(tx.session("w")))
        over = CallState("r/0.0.0", "finished", epoch=1, result={"text": "null"})
        await db.commit("w", 1, 3, calls=(over,), inbox_done=(item.id,))
    assert await db.do(steps.signal, "w", Signal("go", 1))
    assert not await db.do(steps.signal, "w", Signal("go", 2))
    with pytest.raises(NotAsked, match="time"):
        await db.do(lambda tx: questions.answer(tx, "w", "r/0.1.1.1", "ok", "yes", asked=1))
    assert await db.do(lambda tx: questions.answer(tx, "w", "r/1.1.1", "ok", "yes", asked=1))
    found = await db.do(lambda tx: {(item.kind, item.key) for item in tx.inbox(tx.session("w"))})
    assert found - {("answer", "r/0.0.0")} == {("answer", "r/1.1.0"), ("signal", "go"), ("answer", "r/1.1.1")}
    later = ["r/0.1.2.0", "r/1.1.2"]
    more = tuple(CallState(call_id, "requested", EVENT_STEP, json.dumps(event)) for call_id in later)
    await db.commit("w", 1, 4 if noted else 3, steps=more, entries=message)
    asks = tuple(Ask(call_id, EVENT_STEP, "", executions=1, arguments=event) for call_id in later)
    await db.commit("w", 1, 5 if noted else 4, asks=asks)
    found = await db.do(lambda tx: {(item.kind, item.key) for item in tx.inbox(tx.session("w"))})
    assert ("answer", "r/1.1.2") in found
    assert not found & {("answer", "r/0.1.2.0"), ("signal", "go")}


def _timers(connection: Any, namespace: str) -> list[Any]:
    return list(connection.execute(select(TIMER.c.name, TIMER.c.due_at).where(TIMER.c.namespace == namespace)))
