"""A session of a lost node whose process may live: what that was allowed to begin is over before anybody else acts."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from understudy.errors import Fenced
from understudy.events import ToolStarted
from understudy.identifiers import call_identifier
from understudy.ports import Verdict
from understudy.records import LEASE_SECONDS, ActivationId, Batch, CallState, Finish, ModelAnswer
from understudy.store.check.check import check
from understudy.store.operations import activation, batches, endings, model_calls, timers, wakeups
from understudy.store.transaction import Transaction

from .test_store import FRAME, Store, opened

pytestmark = pytest.mark.conformance

LEASE = int(LEASE_SECONDS * 1e6)
CRASH: dict[str, Any] = {"cause": "process_died", "pid": 1, "policy": {}}


async def acting(db: Store, *, started: bool) -> ActivationId:
    """A session whose model asked for a tool, and whose process was allowed to begin it if `started`."""
    await db.asking()
    answer = ModelAnswer(tool_calls=(("p", "act", "{}"),))
    held = db.held("s", 1)
    await db.do(model_calls.answer, "s", "r", 1, 1, "m", answer, incarnation=held.incarnation)
    if started:
        call_id = call_identifier("r", 1, 0)
        entries = (ToolStarted(call_id=call_id, tool="act"),)
        await db.do(
            batches.commit, Batch(*held, 2, entries=entries, calls=(CallState(call_id, "started"),)), FRAME.frame_id
        )
    return held


async def test_a_call_that_may_begin_is_waited_for(store: str) -> None:
    """Given a call that was marked as started on a lost node, when its session is taken over, then its old process is
    fenced at once, and the session goes on when the lease of that mark is over."""
    async with opened(store) as db:
        held = await acting(db, started=True)
        verdict = await db.do(activation.crash, held, lambda _: Verdict("resume"), **CRASH, may_live=True)
        assert verdict is not None
        assert verdict.delay == LEASE
        row = db.session()
        assert (row["epoch"], row["wait"], row["status"]) == (held.epoch + 1, "timer", "waiting_for_timer")
        with pytest.raises(Fenced):
            await db.do(batches.commit, Batch(*held, 3), FRAME.frame_id)


@pytest.mark.parametrize(("started", "may_live"), [(False, True), (True, False)])
async def test_nothing_else_is_waited_for(store: str, started: bool, may_live: bool) -> None:
    """Given a session that had started nothing, or whose process is known to be gone, then it goes on at once."""
    async with opened(store) as db:
        held = await acting(db, started=started)
        verdict = await db.do(activation.crash, held, lambda _: Verdict("resume"), **CRASH, may_live=may_live)
        assert verdict == Verdict("resume")
        assert db.session()["wait"] is None


async def test_a_waiting_session_is_fenced_too(store: str) -> None:
    """Given a session that waits for a model on a lost node, when it is taken over, then what its process may commit
    with the answer is refused, though the answer itself counts."""
    async with opened(store) as db:
        await db.asking()
        held = db.held("s", 1)
        verdict = await db.do(activation.crash, held, lambda _: Verdict("resume"), **CRASH, may_live=True)
        assert verdict == Verdict("resume")
        answer = ModelAnswer(tool_calls=(("p", "act", "{}"),))
        assert (await db.do(model_calls.answer, "s", "r", 1, 1, "m", answer, incarnation=held.incarnation)).won
        call = CallState(call_identifier("r", 1, 0), "started")
        with pytest.raises(Fenced):
            await db.do(batches.commit, Batch(*held, 2, calls=(call,)), FRAME.frame_id)


@pytest.mark.parametrize("started", [True, False])
async def test_an_abort_is_fenced_too(store: str, started: bool) -> None:
    """Given a session of a lost node that died too often in its tool, when the call is given up, then its old process
    is fenced, and the session goes on when what that may begin is over."""
    async with opened(store) as db:
        held = await acting(db, started=started)
        await db.do(activation.crash, held, lambda _: Verdict("abort", reason="too often"), **CRASH, may_live=True)
        row = db.session()
        assert (row["epoch"], row["wait"]) == (held.epoch + 1, "timer" if started else None)
        with pytest.raises(Fenced):
            await db.do(batches.commit, Batch(*held, 3), FRAME.frame_id)
        with db.database.read() as connection:
            assert check(connection, db.namespace) == []


async def test_a_shutdown_waits_for_what_may_begin(store: str) -> None:
    """Given a cancelled run whose process may live on a lost node, when its time to end is over before what that may
    begin is, then the run is ended by force only then: the next one does not begin beside it."""
    async with opened(store) as db:
        held = await acting(db, started=True)
        await db.do(lambda tx: setattr(tx.session("s"), "shutdown", 1_000_000))
        await db.do(lambda tx: endings.request_cancel(tx, tx.session("s"), "enough"))
        await db.do(activation.crash, held, lambda _: Verdict("resume"), **CRASH, may_live=True)
        with db.database.read() as connection:
            due = {name: at for name, at in connection.execute(text("SELECT name, due_at FROM timer"))}
        await db.do(timers.fire, "s", "shutdown", due["shutdown"])
        row = db.session()
        assert (row["run_id"], row["wait"]) == ("r", "timer")
        with db.database.read() as connection:
            again = {name: at for name, at in connection.execute(text("SELECT name, due_at FROM timer"))}
        assert again["shutdown"] >= due["pause"] == again["pause"]


@pytest.mark.parametrize("known_gone", [False, True])
async def test_a_cancel_waits_for_what_may_begin(store: str, known_gone: bool) -> None:
    """Given a paused session, when its run is cancelled, then it ends at once if its last process is gone; else only
    when what that may begin is over, and an input that waits goes on only then."""
    async with opened(store) as db:
        held = await acting(db, started=True)
        verdict = Verdict("resume", delay=10 * LEASE)
        await db.do(activation.crash, held, lambda _: verdict, **CRASH, may_live=not known_gone)
        await db.accept("s", "next", "more")
        await db.do(lambda tx: endings.request_cancel(tx, tx.session("s"), "enough"))
        row = db.session()
        if known_gone:
            assert (row["run_id"], row["wait"]) == (None, None)
            return
        assert (row["run_id"], row["wait"], row["cancel_reason"]) == ("r", "timer", "enough")
        with db.database.read() as connection:
            [due_at] = connection.execute(text("SELECT due_at FROM timer WHERE name = 'pause'")).scalars()
        assert due_at - row["wait_since"] == LEASE
        with db.database.read() as connection:
            assert check(connection, db.namespace) == []


async def test_an_idle_session_of_a_lost_node_is_in_no_frame(store: str) -> None:
    """Given an idle session of a lost node whose wakeup is due soon, when it gets a new home, then it is in no frame:
    nobody's death is noted when it is woken."""
    async with opened(store) as db:
        await db.own()
        await db.create("s")
        await db.accept("s")
        await db.activate("s")
        await db.commit("s", 1, 1, start_run="r", finish=Finish("completed", "done"))
        await db.commit("s", 1, 2, wait="idle")
        await db.do(wakeups.schedule, "s", "w", "go on", 1.0, None)
        assert db.session()["frame_id"] is not None
        await db.do(activation.adopt, "other", ["other"])
        row = db.session()
        assert (row["node_id"], row["frame_id"], row["active"]) == ("other", None, 0)


async def test_a_session_at_work_on_a_lost_node_has_no_pid_at_its_new_home(store: str) -> None:
    """Given a session at work on a lost node, when it gets a new home, then it is in its frame still, but without a
    pid: whoever notes that frame's death knows by this that its process may live."""
    async with opened(store) as db:
        await acting(db, started=True)
        before = db.session()
        assert before["actor_pid"] is not None
        await db.do(activation.adopt, "other", ["other"])
        row = db.session()
        assert (row["node_id"], row["frame_id"], row["actor_pid"]) == ("other", before["frame_id"], None)


async def test_the_time_to_end_is_not_given_again_at_once(store: str) -> None:
    """Given a run that was cancelled while it waits for what its lost process may begin, when its time is over and
    that wait's too, but nobody has noticed it yet, then it is looked at again later, not without end."""
    async with opened(store) as db:
        held = await acting(db, started=True)
        await db.do(activation.crash, held, lambda _: Verdict("resume"), **CRASH, may_live=True)
        await db.journal.submit(lambda tx: endings.request_cancel(tx, tx.session("s"), "enough"))

        def look(tx: Transaction) -> int:
            tx.now += LEASE + 1
            timers.shut_down(tx, tx.session("s"), "r", 10_000_000)
            return min(due - tx.now for (_, name), due in tx.timers.items() if name == "shutdown")

        assert await db.journal.submit(look) >= 1_000_000
