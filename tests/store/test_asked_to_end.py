"""Sub-agents that somebody asks to end, that are linked to a closed session, and whose ids others have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text

from understudy.errors import SessionClosed
from understudy.messages import Message
from understudy.records import CallState, Finish, Spawn
from understudy.spec import Supervision
from understudy.store.check.check import check
from understudy.store.operations import activation, beginnings, endings, wakeups
from understudy.store.operations.activation import FrameRef

from .test_store import Store, opened, spec

ESCALATED = {"status": "failed", "code": "restart_intensity"}


@pytest.fixture
async def db(store: str) -> AsyncIterator[Store]:
    async with opened(store) as made:
        yield made


async def parent(db: Store, children: list[dict[str, Any]], **rules: Any) -> None:
    """A parent `s` that waits for these sub-agents, whose ids are their names."""
    supervision = Supervision(**{"backoff": 0.0, "jitter": 0.0, "strategy": "one_for_all", **rules}).model_dump()
    await db.asking("s", spec(supervision=supervision))
    await db.answer("s", tool_calls=tuple((f"p{number}", "spawn_agent", "{}") for number in range(len(children))))
    spawns = tuple(Spawn(f"r/1/{number}", child["name"], child, "task") for number, child in enumerate(children))
    calls = tuple(CallState(spawn.call_id, "started", child_id=spawn.child_id, executions=1) for spawn in spawns)
    await db.activate("s")
    await db.commit("s", db.session()["epoch"], 1, spawns=spawns, calls=calls, wait="child")


async def group(db: Store, **kinds: Any) -> None:
    """A parent `s` that waits for its transient sub-agents `a` and `b`, each at work in a tool."""
    await parent(db, [spec("a", restart_type="transient"), spec("b", restart_type="transient", **kinds)])
    for name in ("a", "b"):
        await db.activate(name, FrameRef(f"frame-{name}", 2, "node-1"))
        began = (Message("user", "task", run_id="task"),)
        await db.commit(name, 1, 1, start_run="task", entries=began)


async def ends(db: Store, name: str, status: str = "failed") -> None:
    row = db.session(name)
    finish = Finish(status, "", error={"code": status, "message": status})
    await db.commit(name, row["epoch"], row["batch_no"] + 1, finish=finish, wait="idle")


async def cancel(db: Store, name: str, **how: Any) -> bool:
    done: bool = await db.do(lambda tx: endings.request_cancel(tx, tx.session(name), "enough", **how))
    return done


async def quarantine(db: Store, name: str) -> None:
    await db.do(lambda tx: activation.quarantine(tx, tx.session(name), "stuck", "it dies"))


def started_again(db: Store) -> dict[str, bool]:
    return {name: db.session(name)["replaced_by"] is not None for name in ("a", "b")}


def books_balance(db: Store) -> None:
    with db.database.read() as connection:
        assert check(connection, db.namespace) == []


@pytest.mark.parametrize("request_first", [True, False])
@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_its_group_restarts(db: Store, how: str, request_first: bool) -> None:
    """Given a sub-agent that somebody cancels or closes before or while its group stops it, when the group is started
    again, then it is not."""
    await group(db)
    if not request_first:
        await ends(db, "a")
    if how == "cancel":
        assert await cancel(db, "b")
    else:
        assert await db.do(endings.close, "b", "enough")
    if request_first:
        await ends(db, "a")
    await ends(db, "b", "cancelled")
    assert started_again(db) == {"a": True, "b": False}
    books_balance(db)


async def test_its_group_only(db: Store) -> None:
    """Given one that only its group stops, then it is started again."""
    await group(db)
    await ends(db, "a")
    await ends(db, "b", "cancelled")
    assert started_again(db) == {"a": True, "b": True}
    books_balance(db)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_it_dies_while_it_ends(db: Store, how: str) -> None:
    """Given one that somebody asked to end, when it is quarantined before it has, then it is not started again."""
    await group(db)
    await (cancel(db, "b") if how == "cancel" else db.do(endings.close, "b", "enough"))
    await quarantine(db, "b")
    await ends(db, "a", "completed")
    assert started_again(db) == {"a": False, "b": False}
    books_balance(db)


async def test_it_is_given_up_before_it_has_begun(db: Store) -> None:
    """Given one that is quarantined before its task has begun, which nobody asked to end, then it is started again."""
    await parent(db, [spec("a", restart_type="transient")])
    await quarantine(db, "a")
    assert db.session("a")["replaced_by"] is not None
    books_balance(db)


@pytest.mark.thorough
@pytest.mark.parametrize("exceeded", [False, True])
async def test_a_large_group_is_stopped(db: Store, exceeded: bool) -> None:
    """Given a group of more sub-agents than Python may have calls in calls, none but one at work, when that fails, then
    all are stopped and start again, or the parent's run fails."""
    children = [spec(f"kid{number}", restart_type="transient") for number in range(400)]
    await parent(db, children, max_restarts=0 if exceeded else 3)
    await db.activate("kid0", FrameRef("frame-0", 2, "node-1"))
    await db.commit("kid0", 1, 1, start_run="task", entries=(Message("user", "task", run_id="task"),))
    await ends(db, "kid0")
    with db.database.read() as connection:
        again = connection.execute(text("SELECT count(*) FROM session WHERE replaced_by IS NOT NULL")).scalar()
    assert again == (0 if exceeded else 400)
    assert bool(db.session()["cancel_reason"]) == exceeded or db.session()["status"] == "failed"
    books_balance(db)


async def test_it_was_ending_already(db: Store) -> None:
    """Given one that must end for another reason, when somebody asks it to end as well, then it ends for the first
    reason, and is not started again."""
    await group(db)
    await cancel(db, "b", ending=ESCALATED)
    assert await cancel(db, "b")
    await ends(db, "b", "cancelled")
    await ends(db, "a", "completed")
    assert started_again(db) == {"a": False, "b": False}
    assert db.session("b")["status"] == "failed"
    books_balance(db)


@pytest.mark.parametrize("lifecycle", ["ephemeral", "linked"])
@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_it_waits_for_its_restart(db: Store, how: str, lifecycle: str) -> None:
    """Given one that has failed and waits for its group to stop, when somebody cancels or closes it, then its end is
    its result, and the others are started again."""
    await group(db, lifecycle=lifecycle)
    await ends(db, "b")
    if how == "cancel":
        assert await cancel(db, "b")
    else:
        assert await db.do(endings.close, "b", "enough")
    books_balance(db)
    await ends(db, "a", "cancelled")
    assert started_again(db) == {"a": True, "b": False}
    books_balance(db)


@pytest.mark.parametrize("how", ["input", "wakeup"])
async def test_a_linked_one_is_at_work(db: Store, how: str) -> None:
    """Given a sub-agent that is linked to a closed session, and goes on with its task, when an input or a wakeup comes,
    then that is refused, and changes nothing; what was to wake it later does not."""
    await group(db, lifecycle="linked", on_parent_end="abandon")
    await db.do(wakeups.schedule, "b", "early", "look", 0.0, None)
    await db.do(endings.close, "s", "enough")
    before = db.dump()
    asked = db.accept("b", "more") if how == "input" else db.do(wakeups.schedule, "b", "later", "look", 1.0, None)
    with pytest.raises(SessionClosed, match="is linked to 's', which is closed"):
        await asked
    assert db.dump() == before
    await db.do(lambda tx: wakeups.fire(tx, tx.session("b"), "early", {"due_at": tx.now, "run_id": None}))
    assert db.session("b")["inbox_count"] == 0


async def test_a_strangers_id(db: Store) -> None:
    """Given a session that has a sub-agent's id, when that is to be spawned, then the call's result says so."""
    await db.create("kid")
    await db.asking()
    await db.answer("s", tool_calls=(("p0", "spawn_agent", "{}"),))
    await db.activate("s")
    spawns = (Spawn("r/1/0", "kid", spec("kid"), "task"),)
    calls = (CallState("r/1/0", "started", child_id="kid", executions=1),)
    result = await db.commit("s", db.session()["epoch"], 1, spawns=spawns, calls=calls, wait="child")
    [item] = result.ack.inbox
    assert (item.key, item.payload["status"]) == ("r/1/0", "failed")
    assert item.payload["error"]["code"] == "session_conflict"
    assert db.session()["children_open"] == 0
    books_balance(db)


async def test_a_strangers_id_at_a_restart(db: Store) -> None:
    """Given a session that has the id which a restart of a sub-agent would have, when that fails, then its failure is
    the result."""
    await group(db)
    row = db.session("a")
    await db.create(beginnings.child_identifier("s", row["call_id"], 1))
    await ends(db, "a")
    await ends(db, "b", "cancelled")
    assert started_again(db) == {"a": False, "b": True}
    books_balance(db)
