"""The store: each operation's key and condition, on SQLite and PostgreSQL, one at a time and merged into groups."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from understudy.errors import (
    Fenced,
    RunConflict,
    SessionClosed,
    SessionConflict,
    StaleGeneration,
    StoreError,
    StoreOwned,
    StoreUnreachable,
    UnderstudyError,
    UnknownSession,
)
from understudy.events import ToolStarted
from understudy.messages import Message, Usage
from understudy.ports import Death, Verdict
from understudy.protocol import Work
from understudy.records import ActivationId, Batch, CallState, Finish, ModelAnswer, Spawn
from understudy.spec import Supervision
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.store.db.failures import StoreRace
from understudy.store.db.statements import MESSAGE, calls_of_round
from understudy.store.journal import Journal
from understudy.store.operations import activation, batches, beginnings, draining, endings, model_calls
from understudy.store.operations.activation import FrameRef
from understudy.store.reads import queries
from understudy.store.transaction import Transaction
from understudy.supervisor.groups import decide_end

pytestmark = pytest.mark.conformance

MINUTE = 60_000_000
SUPERVISION = Supervision().model_dump()
NAN = float("nan")
FRAME = FrameRef("frame-1", 1, "node-1")


def spec(name: str = "agent", **more: Any) -> dict[str, Any]:
    return {"name": name, "hash": f"hash-{name}", "budget": None, "supervision": SUPERVISION, **more}


class Store:
    """A journal on a store, and the operations as tests say them."""

    def __init__(self, dsn: str, namespace: str = "tests", writer: str = "w") -> None:
        self.namespace = namespace
        self.database = Database(dsn)
        self.commits: list[Any] = []
        self.journal = Journal(self.database, namespace, writer, self.commits.append, decide_end=decide_end)

    async def do(self, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return await self.journal.submit(lambda tx: operation(tx, *arguments, **options))

    async def own(self, holder: str = "me") -> int:
        self.journal.generation = await self.do(activation.acquire, holder, MINUTE, may_take=lambda _: False)
        return self.journal.generation

    async def create(self, session_id: str, compiled: dict[str, Any] | None = None) -> bool:
        compiled = compiled or spec()
        options = {"spec_hash": compiled["hash"], "placement": "", "node_id": "node-1", "metadata": {}}
        return await self.do(beginnings.create_session, session_id, compiled, **options)

    async def accept(self, session_id: str, run_id: str = "r", content: Any = "go") -> bool:
        return await self.do(beginnings.accept, session_id, run_id, content)

    async def activate(self, session_id: str, frame: FrameRef = FRAME) -> Work:
        return await self.do(activation.activate, session_id, frame)

    def held(self, session_id: str, epoch: int) -> ActivationId:
        """The activation of a session that the store has now."""
        return ActivationId(session_id, self.session(session_id)["incarnation"], epoch)

    async def commit(self, session_id: str, epoch: int, number: int, **fields: Any) -> batches.CommitResult:
        frame_id = self.session(session_id)["frame_id"] or FRAME.frame_id
        batch = Batch(*self.held(session_id, epoch), number, **fields)
        return await self.do(batches.commit, batch, frame_id, holder="h")

    async def answer(self, session_id: str, round_number: int = 1, attempt: int = 1, **fields: Any) -> Any:
        got = ModelAnswer(**{"content": "hi", "usage": Usage(10, 5), **fields})
        key = (session_id, "r", round_number, attempt, "m", got)
        return await self.do(model_calls.answer, *key, incarnation=self.held(session_id, 0).incarnation)

    async def ask(self, session_id: str, epoch: int = 1, number: int = 1, round_number: int = 1, **fields: Any) -> Any:
        """The batch that ends in a model call."""
        fields = {"start_run": "r" if round_number == 1 else None, "wait": "model", "request_model": "m", **fields}
        return await self.commit(session_id, epoch, number, request_round=round_number, **fields)

    async def asking(self, session_id: str = "s", compiled: dict[str, Any] | None = None, tokens: int = 0) -> None:
        """A session that waits for its first model call."""
        if not self.journal.generation:
            await self.own()
        await self.create(session_id, compiled)
        await self.accept(session_id)
        await self.activate(session_id)
        await self.ask(session_id, entries=(Message("user", "go", run_id="r"),), request_tokens=tokens)

    def read(self, query: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self.database.read() as connection:
            return query(connection, self.namespace, *arguments, **options)

    def session(self, session_id: str = "s") -> dict[str, Any]:
        statement = text("SELECT * FROM session WHERE namespace = :n AND session_id = :s")
        with self.database.read() as connection:
            row = connection.execute(statement, {"n": self.namespace, "s": session_id}).mappings().one()
        return dict(row)

    def accounts(self, session_id: str = "s") -> dict[str, tuple[int, int, int]]:
        """What is allowed, reserved and spent, by scope and resource."""
        statement = text("SELECT * FROM account WHERE namespace = :n AND session_id = :s")
        with self.database.read() as connection:
            found = connection.execute(statement, {"n": self.namespace, "s": session_id}).mappings().all()
        return {f"{row['scope']} {row['resource']}": (row["allowed"], row["reserved"], row["spent"]) for row in found}

    def log(self, session_id: str = "s") -> list[tuple[int, str]]:
        """`(seq, role or type)` of all that the session's log holds, in order."""
        messages = [(m.seq, m.role) for m in self.read(queries.messages, session_id)]
        return sorted(messages + [(e.seq, e.type) for e in self.read(queries.session_events, session_id)])

    def dump(self) -> list[Any]:
        """Every row of every table."""
        tables = (
            "session", "run", "message", "event", "tool_call", "inbox", "account", "reservation", "timer", "question",
        )  # fmt: skip
        with self.database.read() as connection:
            return [sorted(map(str, connection.execute(text(f"SELECT * FROM {table}")))) for table in tables]


@asynccontextmanager
async def opened(dsn: str, **options: Any) -> AsyncIterator[Store]:
    made = Store(dsn, **options)
    made.database.prepare()
    made.journal.start()
    try:
        yield made
    finally:
        await made.journal.close()


@pytest.fixture
async def db(store: str) -> AsyncIterator[Store]:
    """A store that this test owns."""
    async with opened(store) as made:
        yield made


# Sessions and inputs.


async def test_spawn_is_get_or_create(db: Store) -> None:
    """The same specification finds the session; another one is a conflict that changes nothing."""
    assert [await db.create("s"), await db.create("s")] == [True, False]
    before = db.dump()
    with pytest.raises(SessionConflict):
        await db.create("s", spec("other"))
    assert db.dump() == before
    assert db.log() == [(1, "session_created")]


async def test_ten_at_once_create_one_session(db: Store) -> None:
    """Spawning is idempotent within one group commit too."""
    assert sorted(await asyncio.gather(*(db.create("s") for _ in range(10)))) == [False] * 9 + [True]


async def test_accept_is_idempotent_by_run_id(db: Store) -> None:
    """Ten senders of one run_id at once, and one after them, make one run with one inbox row."""
    await db.create("s")
    results = await asyncio.gather(*(db.accept("s") for _ in range(10)))
    assert [sorted(results), await db.accept("s")] == [[False] * 9 + [True], False]
    assert [event for _, event in db.log()] == ["session_created", "run_accepted"]
    assert len(db.read(queries.runs, "s")) == db.session()["inbox_count"] == 1


async def test_a_run_id_names_one_text(db: Store) -> None:
    """Another text under the same run_id is refused, alone and in a group, and changes nothing."""
    await db.create("s")
    await db.accept("s", content="go")
    before = db.dump()
    with pytest.raises(RunConflict):
        await db.accept("s", content="stop")
    assert db.dump() == before
    results = await asyncio.gather(db.accept("s", "n", "a"), db.accept("s", "n", "b"), return_exceptions=True)
    assert [type(result) for result in results] == [bool, RunConflict]


async def test_unknown_and_closed_sessions_accept_nothing(db: Store) -> None:
    """Each refusal has its error; a run accepted before the close is still found."""
    with pytest.raises(UnknownSession):
        await db.accept("s")
    await db.create("s")
    await db.accept("s", "old")
    await db.do(endings.close, "s", "enough")
    with pytest.raises(SessionClosed):
        await db.accept("s", "new")
    assert await db.accept("s", "old") is False
    assert db.read(queries.run_info, "s", "old").status == "cancelled"


@pytest.mark.parametrize("content", ["a\0b", "\U0001f9d1‍\U0001f680 �", "x" * 10_000_000], ids=["nul", "emoji", "10MB"])
async def test_any_content_comes_back_as_it_was(db: Store, content: str) -> None:
    """NUL, characters beyond the basic plane and megabytes survive the inbox and the transcript."""
    await db.own()
    await db.create("s")
    await db.accept("s", content=content)
    work = await db.activate("s")
    assert work.inbox[0].payload["content"] == content
    parts = [{"type": "text", "text": content}]
    await db.ask("s", entries=(Message("user", content, run_id="r"), Message("user", parts, run_id="r")))
    assert [message.content for message in db.read(queries.messages, "s")] == [content, parts]


# Batches.


async def test_a_stale_epoch_is_fenced_and_writes_nothing(db: Store) -> None:
    """After a newer activation, the older one's batch is refused."""
    await db.own()
    await db.create("s")
    await db.accept("s")
    assert [(await db.activate("s")).epoch, (await db.activate("s")).epoch] == [1, 2]
    before = db.dump()
    with pytest.raises(Fenced):
        await db.commit("s", 1, 1, entries=(Message("user", "ghost"),), start_run="r")
    assert db.dump() == before


async def test_a_replayed_batch_returns_a_fresh_ack_and_changes_nothing(db: Store) -> None:
    """The ack says that it is a replay, with the inbox as it is now; a batch older than the last one is fenced."""
    await db.own()
    await db.create("s")
    await db.accept("s")
    await db.activate("s")
    batch = {"entries": (Message("user", "go", run_id="r"),), "start_run": "r"}
    first = (await db.commit("s", 1, 1, **batch)).ack
    await db.accept("s", "later")
    before = db.dump()
    again = (await db.commit("s", 1, 1, **batch)).ack
    assert (first.replayed, again.replayed) == (False, True)
    assert [item.key for item in again.inbox] == ["later"]
    assert db.dump() == before
    await db.commit("s", 1, 2)
    with pytest.raises(Fenced):
        await db.commit("s", 1, 1, **batch)


async def test_a_frame_that_its_session_left_commits_nothing(db: Store) -> None:
    """Given a session that left its frame with the batch it waits for a model with, and has its answer, then neither
    that batch nor the next one is taken from the frame: another one will have the session."""
    await db.asking()
    await db.do(activation.park, db.held("s", 1))
    assert (await db.ask("s", entries=(Message("user", "go", run_id="r"),))).ack.replayed  # it waits still
    await db.answer("s")
    before = db.session()
    for number in (1, 2):
        with pytest.raises(Fenced, match="left its frame"):
            await db.commit("s", 1, number)
    assert db.session() == before


steps = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.integers(0, 3)),
        st.tuples(st.just("activate")),
        st.tuples(st.just("commit"), st.integers(0, 4)),
        st.tuples(st.just("replay")),
        st.tuples(st.just("ask")),
        st.tuples(st.just("answer"), st.integers(0, 2)),
        st.tuples(st.just("finish")),
        st.tuples(st.just("cancel")),
        st.tuples(st.just("together"), st.integers(2, 4)),
    ),
    max_size=30,
)


async def test_an_operation_that_is_to_be_alone_is_in_no_others_transaction(db: Store) -> None:
    """Given operations that are submitted at once, one of them alone, then they are done in order, and that one in a
    transaction of its own."""
    seen: list[Transaction] = []
    await asyncio.gather(*(db.journal.submit(seen.append, alone=number == 2) for number in range(5)))
    assert len(seen) == 5
    assert sum(tx is seen[2] for tx in seen) == 1


@given(steps)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_log_has_no_gaps(store: str, steps: list[tuple[Any, ...]]) -> None:
    """Messages and events of a session share one sequence without gaps or repetitions, whatever was refused between."""
    asyncio.run(check_log(store, steps))


async def check_log(dsn: str, steps: list[tuple[Any, ...]]) -> None:
    async with opened(dsn, namespace=f"n{uuid.uuid4().hex}") as db:
        await db.own()
        await db.create("s")
        epoch, number, round_number, waiting = 0, 0, 0, []  # type: int, int, int, list[Any]

        def operation(kind: str, *arguments: Any) -> Any:
            nonlocal epoch, number, round_number
            row = db.session()
            epoch, number = row["epoch"], row["batch_no"]
            start = None
            if row["run_id"] is None and kind in ("commit", "ask"):
                queued = [item["key"] for item in db.read(_inbox, "s")]
                start = queued[0] if queued else None
                if start is None and kind == "ask":
                    kind = "activate"
            if kind == "accept":
                return db.accept("s", f"r{arguments[0]}", "go" if arguments[0] else str(len(waiting)))
            if kind == "activate":
                return db.activate("s")
            if kind == "commit":
                entries = [Message("user", "x"), ToolStarted(call_id="c", tool="t")] * arguments[0]
                return db.commit("s", epoch, number + 1, entries=tuple(entries), start_run=start)
            if kind == "replay":
                return db.commit("s", epoch, number, entries=(Message("user", "again"),))
            if kind == "ask":
                round_number = row["round"] + 1
                return db.commit(
                    "s", epoch, number + 1, start_run=start, wait="model", request_round=round_number, request_model="m"
                )
            if kind == "answer":
                calls = tuple((f"p{index}", "t", "{}") for index in range(arguments[0]))
                got = ModelAnswer("hi", calls, usage=Usage(1, 1))
                key = ("s", row["run_id"] or "r0", row["round"], 1, "m", got)
                return db.do(model_calls.answer, *key, incarnation=row["incarnation"])
            if kind == "finish":
                return db.commit("s", epoch, number + 1, finish=Finish("completed", "x"), wait="idle")
            return db.journal.submit(lambda tx: endings.request_cancel(tx, tx.session("s"), "why"))

        for kind, *arguments in steps:
            if kind == "together":
                waiting = [operation("accept", index) for index in range(arguments[0])]
                waiting += [operation("replay"), operation("cancel"), operation("activate")]
            else:
                waiting = [operation(kind, *arguments)]
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert not isinstance(result, BaseException) or isinstance(result, UnderstudyError), result
        assert [seq for seq, _ in db.log()] == list(range(1, db.session()["seq"] + 1))


def _inbox(connection: Any, namespace: str, session_id: str) -> list[Any]:
    statement = text("SELECT key FROM inbox WHERE namespace = :n AND session_id = :s ORDER BY item")
    return list(connection.execute(statement, {"n": namespace, "s": session_id}).mappings())


async def test_a_refused_operation_does_not_disturb_its_group(db: Store) -> None:
    """Operations of one transaction: those refused have their error, the others are committed."""
    await db.own()
    await db.create("a")
    await db.create("b")

    def broken(_tx: Any) -> None:
        raise UnderstudyError("refused")

    results = await db.journal.submit_all(
        [
            lambda tx: beginnings.accept(tx, "a", "r", "go"),
            broken,
            lambda tx: beginnings.accept(tx, "missing", "r", "go"),
            lambda tx: beginnings.accept(tx, "b", "r", "go"),
        ]
    )
    assert [type(result) for result in results] == [bool, UnderstudyError, UnknownSession, bool]
    assert (db.session("a")["inbox_count"], db.session("b")["inbox_count"]) == (1, 1)


async def test_a_bug_in_one_operation_fails_that_one_only(db: Store, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception rolls its group back; the others are then committed without it."""
    await db.create("s")

    def bug(_tx: Any) -> None:
        raise ZeroDivisionError

    waiting = [db.accept("s", f"r{number}") for number in range(5)] + [db.journal.submit(bug)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [bool] * 5 + [ZeroDivisionError]
    assert db.session()["inbox_count"] == 5


# Children.


async def spawned(db: Store) -> None:
    """A parent that waits for its one child `kid`, which has started its task."""
    await db.asking()
    await db.answer("s", tool_calls=(("p0", "spawn_agent", "{}"),))
    spawn = Spawn("r/1/0", "kid", spec("kid"), "your task")
    call = CallState("r/1/0", "started", child_id="kid", executions=1)
    await db.commit("s", 1, 2, spawns=(spawn,), calls=(call,))
    await db.activate("s")
    await db.commit("s", 2, 1, spawns=(spawn,), wait="child")
    await db.activate("kid", FrameRef("frame-2", 2, "node-1"))
    await db.commit("kid", 1, 1, start_run="task")


async def test_a_child_is_created_once_and_its_result_delivered_once(db: Store) -> None:
    """A restored parent that spawns again finds its child; the child's end is one inbox row and wakes the parent."""
    await spawned(db)
    assert [kind for _, kind in db.log()].count("child_spawned") == 1
    assert [kind for _, kind in db.log("kid")].count("run_accepted") == 1
    assert (db.session()["wait"], db.session()["children_open"]) == ("child", 1)
    finish = {"finish": Finish("completed", "done"), "wait": "idle"}
    await db.commit("kid", 1, 2, **finish)
    await db.commit("kid", 1, 2, **finish)
    work = await db.activate("s")
    assert [(item.kind, item.key, item.payload["text"]) for item in work.inbox] == [("child_result", "r/1/0", "done")]
    assert (db.session()["wait"], db.session()["children_open"]) == (None, 0)
    assert db.session("kid")["status"] == "completed"


async def test_a_fenced_parent_cannot_spawn(db: Store) -> None:
    """The spawn is part of the batch: no batch, no child."""
    await spawned(db)
    with pytest.raises(Fenced):
        await db.commit("s", 1, 3, spawns=(Spawn("r/1/1", "ghost", spec("kid"), "x"),))
    with pytest.raises(UnknownSession):
        db.read(queries.session_info, "ghost")


async def test_no_child_appears_behind_a_cancellation(db: Store) -> None:
    """A cancel reaches the running children; a spawn committed after it creates none, and its Ack says why."""
    await spawned(db)
    await db.journal.submit(lambda tx: endings.request_cancel(tx, tx.session("s"), "stop"))
    assert db.read(queries.run_info, "kid", "task").cancel_requested == "stop"
    ack = (await db.commit("s", 2, 2, spawns=(Spawn("r/1/1", "late", spec("kid"), "x"),))).ack
    assert ack.cancel == "stop"
    with pytest.raises(UnknownSession):
        db.read(queries.session_info, "late")


async def test_a_batch_of_a_run_that_was_ended_without_its_agent(db: Store) -> None:
    """Given a session that was activated while it waited for a sub-agent, when it is cancelled, and its run has ended,
    before the frame's first batch comes, then that is fenced, and the session takes the next input."""
    await spawned(db)
    epoch = (await db.activate("s")).epoch
    await db.journal.submit(lambda tx: endings.request_cancel(tx, tx.session("s"), "stop"))
    await db.commit("kid", 1, 2, finish=Finish("cancelled", ""), wait="idle")
    assert db.read(queries.run_info, "s", "r").status == "cancelled"
    before = db.dump()
    for batch in ({"wait": "child"}, {"wait": "input"}, {"finish": Finish("cancelled", ""), "wait": "idle"}):
        with pytest.raises(Fenced):
            await db.commit("s", epoch, 1, **batch)
    assert db.dump() == before
    assert await db.accept("s", "r2")
    assert (db.session()["wait"], db.session()["active"]) == (None, 1)


async def test_a_quarantined_child_leaves_its_parent_a_result(db: Store) -> None:
    """The parent always gets one, with how it ended."""
    await spawned(db)

    def decide(_death: Death) -> Verdict:
        return Verdict("quarantine", reason="hopeless")

    await db.do(activation.crash, db.held("kid", 1), decide, cause="process_died", pid=2, policy={})
    work = await db.activate("s")
    [item] = work.inbox
    assert (item.payload["status"], item.payload["error"]["message"]) == ("quarantined", "hopeless")
    assert db.session("kid")["status"] == "quarantined"


@pytest.mark.parametrize("end", ["close", "cancel"])
async def test_what_moved_and_has_nothing_to_do_any_more_is_not_expected(db: Store, end: str) -> None:
    """Given a session that a drained node gave away between two runs, when its queue is ended, then it rests, and the
    books balance."""
    await db.own()
    await db.create("s")
    await db.accept("s")
    await db.do(lambda tx: draining.leave(tx, tx.session("s"), "node-1", ["node-2"]))
    assert db.session()["moved"] == 1
    if end == "close":
        await db.do(endings.close, "s", "enough")
    else:
        await db.do(lambda tx: endings.request_cancel(tx, tx.session("s"), "enough", "r"))
    assert (db.session()["moved"], db.session()["active"]) == (0, 0)
    with db.database.read() as connection:
        assert check(connection, db.namespace) == []


# Answers.


async def test_the_first_answer_wins(db: Store) -> None:
    """A late one, of whatever attempt, leaves an event and its tokens, and no message."""
    await db.asking()
    first, late = await db.answer("s", content="one"), await db.answer("s", attempt=2, content="two")
    assert (first.won, late.won) == (True, False)
    assert [m.content for m in db.read(queries.messages, "s")] == ["go", "one"]
    row = db.session()
    assert (row["tokens_used"], row["tokens_redone"]) == (30, 15)
    assert [kind for _, kind in db.log()].count("model_call_completed") == 2


async def test_a_late_answer_that_is_committed_again_is_counted_once(db: Store) -> None:
    """Given a commit whose outcome was not known, and other answers since, when it is tried again, then nothing is
    added."""
    await db.asking()
    await db.answer("s", content="one")
    await db.answer("s", attempt=2, content="two")
    await db.answer("s", attempt=3, content="three")
    before = db.dump()
    again = await db.answer("s", attempt=2, content="two")
    assert (again.won, again.repeated) == (False, True)
    assert db.dump() == before


async def test_two_answers_in_one_group(db: Store) -> None:
    """The first one wins there too."""
    await db.asking()
    results = await asyncio.gather(db.answer("s", content="one"), db.answer("s", attempt=2, content="two"))
    assert [result.won for result in results] == [True, False]


async def test_a_call_that_was_answered_is_not_made_again(db: Store) -> None:
    """Given a call whose answer was committed by a service that then died, when the next one wants to make it again,
    then nobody waits for it."""
    await db.asking()
    await db.answer("s")
    before = db.dump()
    assert await db.do(model_calls.reissue, db.held("s", 1), FRAME.frame_id, "another", "m") is None
    assert db.dump() == before


async def test_what_is_closed_before_it_begins_is_in_no_frame(db: Store) -> None:
    """Given a session in a frame that has not begun, and may never hear of it, when the session is closed, then it is
    in no frame, and what the frame says is fenced; one that rests in its frame stays there."""
    await db.own()
    for name in ("s", "resting"):
        await db.create(name)
        await db.accept(name)
        await db.activate(name)
    await db.commit("resting", 1, 1, start_run="r")
    await db.commit("resting", 1, 2, finish=Finish("completed", "done"), wait="idle")
    for name in ("s", "resting"):
        await db.do(endings.close, name, "enough")
    rows = [db.session(name) for name in ("s", "resting")]
    assert [(row["status"], row["active"], row["frame_id"]) for row in rows] == [
        ("completed", 0, None), ("completed", 0, FRAME.frame_id),
    ]  # fmt: skip
    with pytest.raises(Fenced):
        await db.commit("s", 1, 1, start_run="r")


async def test_an_answer_is_taken_whatever_the_epoch(db: Store) -> None:
    """The call outlives the activation that asked."""
    await db.asking()
    await db.activate("s")
    await db.activate("s")
    assert (await db.answer("s")).won


async def test_a_cancelled_run_keeps_the_text_of_a_late_answer_but_not_its_calls(db: Store) -> None:
    """The tool calls would never be answered; text and usage were paid for."""
    await db.asking()
    await db.journal.submit(lambda tx: endings.request_cancel(tx, tx.session("s"), "stop"))
    result = await db.answer("s", content="so far", tool_calls=(("p", "t", "{}"),))
    assert (result.won, result.calls, result.message.content) == (True, (), "so far")
    assert result.ended, "no process is needed for that"
    run = db.read(queries.run_info, "s", "r")
    assert (run.status, run.text) == ("cancelled", "so far")


async def test_a_final_commit_before_the_cancellation_wins(db: Store) -> None:
    """A run that has ended cannot be cancelled."""
    await db.asking()
    await db.answer("s")
    await db.commit("s", 1, 2, finish=Finish("completed", "hi"), wait="idle")
    assert not await db.journal.submit(lambda tx: endings.request_cancel(tx, tx.session("s"), "stop"))
    assert db.read(queries.run_info, "s", "r").status == "completed"


async def test_an_activation_in_the_answers_transaction_has_its_tool_calls(db: Store) -> None:
    """What one transaction writes, another operation in it sees."""
    await db.asking()
    got = ModelAnswer(tool_calls=(("p", "t", "{}"),), usage=Usage(1, 1))
    _, work = await db.journal.submit_all(
        [
            lambda tx: model_calls.answer(tx, "s", "r", 1, 1, "m", got, incarnation=tx.session("s").incarnation),
            lambda tx: activation.activate(tx, "s", FRAME),
        ]
    )
    assert [message.role for message in work.messages] == ["user", "assistant"]
    assert [(call.call_id, call.tool, call.state) for call in work.calls] == [("r/1/0", "t", "requested")]


async def test_an_activation_after_a_commit_in_one_transaction_sees_its_results(db: Store) -> None:
    """A call finished in the same group is not in doubt."""
    await db.asking()
    await db.answer("s", tool_calls=(("p", "t", "{}"),))
    await db.commit("s", 1, 2, calls=(CallState("r/1/0", "started"),))
    batch = Batch(*db.held("s", 1), 3, calls=(CallState("r/1/0", "finished", executions=1, result={"content": "x"}),))
    _, work = await db.journal.submit_all(
        [lambda tx: batches.commit(tx, batch, FRAME.frame_id), lambda tx: activation.activate(tx, "s", FRAME)]
    )
    assert [(call.state, call.result) for call in work.calls] == [("finished", {"content": "x"})]


# Budgets.


async def test_tokens_are_reserved_before_and_charged_after_a_call(db: Store) -> None:
    """What is reserved is not left for others; what was not used comes back."""
    await db.asking(compiled=spec(budget={"tokens": 100}), tokens=60)
    assert db.accounts() == {"tree tokens": (100, 60, 0)}
    await db.answer("s")
    assert db.accounts() == {"tree tokens": (100, 0, 15)}
    result = await db.ask("s", number=2, round_number=2, request_tokens=90)
    assert (result.wait, db.session()["status"]) == (None, "running")
    error = db.session()["wait_error"]
    assert (json.loads(error) if isinstance(error, str) else error)["details"]["resource"] == "tokens"
    result = await db.ask("s", number=3, round_number=2, request_tokens=65, request_output=4096)
    assert (result.wait, result.issued.longest_reply, db.session()["wait_error"]) == ("model", 20, None)
    assert db.accounts() == {"tree tokens": (100, 85, 15)}


async def test_a_tree_shares_its_roots_budget(db: Store) -> None:
    """A child reserves from the root; a late answer is booked as spent."""
    await db.asking(compiled=spec(budget={"tokens": 100}), tokens=40)
    await db.answer("s", tool_calls=(("p0", "spawn_agent", "{}"),))
    await db.commit("s", 1, 2, spawns=(Spawn("r/1/0", "kid", spec("kid"), "x"),), wait="child")
    await db.activate("kid")
    await db.commit("kid", 1, 1, start_run="task", wait="model", request_round=1, request_model="m", request_tokens=50)
    assert db.accounts() == {"tree tokens": (100, 50, 15)}
    got = ModelAnswer("x", usage=Usage(20, 10))
    for attempt in (1, 2):
        incarnation = db.held("kid", 1).incarnation
        await db.do(model_calls.answer, "kid", "task", 1, attempt, "m", got, incarnation=incarnation)
    assert db.accounts() == {"tree tokens": (100, 0, 15 + 30 + 30)}


# Owners.


async def test_ownership_is_exclusive_while_its_lease_runs(db: Store) -> None:
    """Another holder learns who owns it and for how long; a dead owner's, or one given up, can be taken at once."""
    assert await db.own("me") == 1
    with pytest.raises(StoreOwned, match="owned by me") as refused:
        await db.do(activation.acquire, "you", MINUTE, may_take=lambda _: False)
    assert 50 < refused.value.details["seconds"] <= 60
    await db.do(activation.renew, 1, "me", MINUTE)
    assert await db.do(activation.acquire, "you", MINUTE, may_take=lambda holder: holder == "me") == 2
    with pytest.raises(StaleGeneration):
        await db.do(activation.renew, 1, "me", MINUTE)
    await db.do(activation.renew, 2, "you", 0)
    assert await db.do(activation.acquire, "me", MINUTE, may_take=lambda _: False) == 3


async def test_a_stale_generation_activates_nothing(db: Store) -> None:
    """Neither it nor one that never owned the store; nothing changes."""
    await db.create("s")
    await db.accept("s")
    with pytest.raises(StaleGeneration):
        await db.activate("s")
    await db.own()
    await db.do(activation.acquire, "you", MINUTE, may_take=lambda _: True)
    before = db.dump()
    with pytest.raises(StaleGeneration):
        await db.activate("s")
    assert db.dump() == before


async def test_a_session_without_work_is_not_activated(db: Store) -> None:
    """An idle one needs no frame."""
    await db.own()
    await db.create("s")
    with pytest.raises(Fenced):
        await db.activate("s")


# Trouble.


async def test_a_death_that_is_reported_twice_counts_once(db: Store) -> None:
    """Given a death with a pause after it, when its commit is repeated, then it is one death, and the pause goes on."""
    await db.own()
    await db.create("s")
    await db.accept("s")
    await db.activate("s")

    def decide(death: Death) -> Verdict:
        return Verdict("resume", delay=MINUTE, deaths=(*death.deaths, death.at))

    crash = (activation.crash, db.held("s", 1), decide)
    first = await db.do(*crash, cause="process_died", pid=1, policy={})
    before = db.dump()
    again = await db.do(*crash, cause="process_died", pid=1, policy={})
    assert first.delay == MINUTE
    assert 0 < again.delay <= MINUTE
    assert (db.session()["restarts"], db.session()["wait"]) == (1, "timer")
    assert db.dump() == before


async def test_closing_commits_all_that_was_submitted(store: str) -> None:
    """However much waits to be committed, it is when the journal is closed."""
    async with opened(store) as db:
        waiting = [asyncio.create_task(db.create(f"s{number}")) for number in range(300)]
        await asyncio.sleep(0)
    assert all(await asyncio.gather(*waiting))


@pytest.mark.thorough
async def test_a_transaction_that_was_left_open_does_not_hold_up_others(postgres: str) -> None:
    """Given a journal that stops in the middle of a transaction, when another one writes to the same session, then
    PostgreSQL ends the first one's transaction within seconds."""
    async with opened(postgres) as db:
        await db.create("s")
        stopped = Database(postgres)
        with stopped.writer.connect() as connection:
            connection.execute(text("SELECT * FROM session FOR UPDATE"))
            assert await asyncio.wait_for(db.accept("s"), 30) is True
            with pytest.raises(StoreUnreachable), stopped.errors():
                connection.execute(text("SELECT 1"))
        stopped.close()


async def test_while_the_store_is_unreachable_nothing_is_acknowledged(db: Store) -> None:
    """Commits wait, are repeated when the store is back, and happen once; a lock of another process is no outage."""
    await db.create("s")
    with outage(db.database):
        accepted = asyncio.create_task(db.accept("s"))
        while db.journal.outage.unreachable_since is None and db.journal.outage.busy_since is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (db.journal.outage.unreachable_since is None) == db.database.is_sqlite
        assert not accepted.done()
    assert await accepted is True
    assert db.journal.outage.unreachable_since is db.journal.outage.busy_since is None
    assert db.session()["inbox_count"] == 1


@contextmanager
def outage(database: Database) -> Iterator[None]:
    """Another process has the write lock (SQLite); all connections are cut and none is let in (PostgreSQL)."""
    if database.is_sqlite:
        other = sqlite3.connect(database.dsn.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        yield
        other.close()
        return
    with psycopg.connect(database.dsn) as connection:
        name = connection.info.dbname
    with psycopg.connect(database.dsn, dbname="postgres", autocommit=True) as admin:
        admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        yield
        admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


def test_a_host_that_is_not_there() -> None:
    """The message names the address and not the password."""
    database = Database("postgresql://user:hunter22@127.0.0.1:9/db")
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1") as refused:
        database.prepare()
    assert "hunter22" not in str(refused.value)
    database.close()


def test_a_database_that_is_not_there(postgres: str) -> None:
    """The message says so, without the password."""
    base, _, query = postgres.partition("?")
    dsn = f"{base}-missing" + (f"?{query}&password=hunter22" if query else "?password=hunter22")
    database = Database(dsn)
    with pytest.raises(StoreUnreachable, match="does not exist") as refused:
        database.prepare()
    assert "hunter22" not in str(refused.value)
    database.close()


def test_a_role_that_is_not_there(postgres: str) -> None:
    """Wrong credentials are a clear error, without them."""
    _, _, query = postgres.partition("?")
    name = postgres.partition("?")[0].rsplit("/", 1)[1]
    database = Database(f"postgresql://nobody:hunter22@/{name}" + (f"?{query}" if query else ""))
    with pytest.raises(StoreUnreachable, match="nobody") as refused:
        database.prepare()
    assert "hunter22" not in str(refused.value)
    database.close()


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    """It is refused and not overwritten."""
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n" * 200)
    database = Database(f"sqlite:///{path}")
    with pytest.raises(StoreError, match="not a database"):
        database.prepare()
    database.close()
    assert path.read_text() == "my notes\n" * 200


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    """A path below a file can't be a database; the error says where."""
    (tmp_path / "file").write_text("x")
    with pytest.raises((StoreError, OSError)) as refused:
        Database(f"sqlite:///{tmp_path}/file/store.db").prepare()
    assert isinstance(refused.value, StoreError), f"an error of ours, not {refused.value!r}"


BOOT = """
import asyncio, sys
from understudy.store.operations import beginnings
from understudy.store.db.engine import Database
from understudy.store.journal import Journal

async def main(dsn, name):
    sys.stdin.readline()
    database = Database(dsn)
    database.prepare()
    journal = Journal(database, "tests", name, lambda committed: None)
    journal.start()
    options = dict(spec_hash="h", placement="", node_id="n", metadata={})
    for session_id in ("shared", name):
        await journal.submit(lambda tx: beginnings.create_session(tx, session_id, {"name": "a"}, **options))
    await journal.submit(lambda tx: beginnings.accept(tx, "shared", name, "go"))
    await journal.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.thorough
def test_several_processes_may_boot_at_once(store: str) -> None:
    """The first boot creates the schema once; nobody fails, and all their writes are there."""
    names = [f"p{number}" for number in range(4)]
    processes = [
        subprocess.Popen([sys.executable, "-c", BOOT, store, name], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in names
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    errors = [process.communicate()[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, errors
    database = Database(store)
    with database.read() as connection:
        found = {row.session_id for row in queries.session_list(connection, "tests")}
        runs = {row.run_id for row in queries.runs(connection, "tests", "shared")}
    database.close()
    assert (found, runs) == ({"shared", *names}, set(names))


async def test_events_are_stored_as_data(db: Store) -> None:
    """An event comes back as it was committed, and its body is plain JSON."""
    await db.asking()
    await db.answer("s")
    committed = [event for commit in db.commits for event in commit.events]
    assert db.read(queries.writer_events, "w", 0, 1000) == committed
    assert [event.writer_seq for event in committed] == list(range(1, len(committed) + 1))
    json.dumps([event.to_wire() for event in committed])


async def test_data_is_written_as_json_that_everybody_reads(db: Store) -> None:
    """Given a number that JSON does not have, then null is stored, whatever the store is."""
    await db.own()
    options = {"spec_hash": "hash", "placement": "", "node_id": "node-1", "metadata": {"half": "\u00e9", "score": NAN}}
    await db.do(beginnings.create_session, "s", spec(), **options)
    with db.database.read() as connection:
        stored = connection.execute(text("SELECT CAST(metadata_json AS TEXT) FROM session")).scalar_one()
    assert stored == '{"half":"é","score":null}'


async def test_a_death_right_after_the_input_was_cancelled(db: Store) -> None:
    """Given an input that is cancelled while a frame takes it up, when the frame dies of looking again, then the
    session is resumed, and takes the next input."""
    await db.own()
    await db.create("s")
    await db.accept("s", "first")
    await db.activate("s")
    assert await db.journal.submit(lambda tx: endings.request_cancel(tx, tx.session("s"), "no", "first"))
    result = await db.commit("s", 1, 1, start_run="first", wait="model", request_round=1)
    assert (result.wait, result.ack.inbox) == (None, ())
    await db.do(activation.crash, db.held("s", 1), lambda _: Verdict("resume"), cause="process_died", pid=1, policy={})
    await db.accept("s", "second")
    assert [item.key for item in (await db.activate("s")).inbox] == ["second"]


async def test_a_closed_session_goes_on_saying_how_it_ended(db: Store) -> None:
    """Given a session that is closed while its run ends, when its frame finds nothing more to do, then the session's
    status is still a final one."""
    await db.own()
    await db.create("s")
    await db.accept("s")
    await db.activate("s")
    await db.commit("s", 1, 1, start_run="r")
    await db.do(endings.close, "s", "enough")
    await db.commit("s", 1, 2, finish=Finish("completed", "done"))
    await db.commit("s", 1, 3, wait="idle")
    row = db.session()
    assert (row["status"], row["active"], row["wait"]) == ("completed", 0, "idle")


async def test_an_input_that_is_cancelled_in_the_transaction_that_accepted_it_stays_cancelled(db: Store) -> None:
    """Given an input accepted and cancelled in one group, when the next one is accepted, then only that is in the
    inbox."""
    await db.own()
    await db.create("s")
    await db.journal.submit_all(
        [
            lambda tx: beginnings.accept(tx, "s", "first", "go"),
            lambda tx: endings.request_cancel(tx, tx.session("s"), "no", "first"),
        ]
    )
    await db.accept("s", "second")
    assert [item.key for item in (await db.activate("s")).inbox] == ["second"]


async def test_a_tool_call_keeps_its_child(db: Store) -> None:
    """Given a call that made a child, when a later state does not name it, alone or in one transaction, then the
    call's row still does."""
    await spawned(db)
    await db.commit("s", 2, 2, calls=(CallState("r/1/0", "finished", result={"content": "x"}),))
    assert (await db.activate("s")).calls[0].child_id == "kid"
    batch = Batch(*db.held("s", 3), 1, calls=(CallState("r/1/0", "finished", result={"content": "y"}),))
    _, work = await db.journal.submit_all(
        [lambda tx: batches.commit(tx, batch, FRAME.frame_id), lambda tx: activation.activate(tx, "s", FRAME)]
    )
    assert [(call.child_id, call.result and call.result["content"]) for call in work.calls] == [("kid", "y")]


@pytest.mark.thorough
async def test_a_write_that_fails_among_many_is_known_before_anything_is_acknowledged(db: Store) -> None:
    """Given a row that exists, written in the midst of others and sent without waiting for each, then its operation
    gets that error and no other, nothing of it is kept, and the operation beside it is committed."""
    await db.asking()
    before, [(seq, _)] = db.dump(), [entry for entry in db.log() if entry[1] == "user"]

    def collide(tx: Transaction) -> None:
        row = tx.session("s")
        for number in (seq, *range(1_000, 4_000)):
            tx.insert(MESSAGE, {"session_id": "s", "seq": number, "role": "user", "body": {}})
        for _ in range(500):
            tx.append(row, ToolStarted(call_id="c", tool="t"))

    for number in range(3):
        colliding = asyncio.create_task(db.do(collide))
        beside = asyncio.create_task(db.create(f"beside-{number}"))
        with pytest.raises(StoreRace):
            await colliding
        assert await beside
    await db.journal.submit(lambda tx: tx.read(text("DELETE FROM session WHERE session_id <> 's'")))
    await db.journal.submit(lambda tx: tx.read(text("DELETE FROM event WHERE session_id <> 's'")))
    assert db.dump() == before


def test_the_calls_of_a_round_are_read_by_their_keys() -> None:
    """However many there are, and in the order of their numbers."""
    for count in (0, 1, 15, 16, 17, 32, 40):
        stored = {f"run/3/{index}": {"call_id": f"run/3/{index}", "index": index} for index in range(count)}
        stored["run/30/0"] = {"call_id": "run/30/0", "index": 0}
        found = calls_of_round(lambda keys, s=stored: [s[key] for key in keys.values() if key in s], "run", 3)  # type: ignore[misc]
        assert [call["call_id"] for call in found] == [f"run/3/{index}" for index in range(count)]


async def test_a_child_that_is_cancelled_before_it_began_leaves_no_input_behind(db: Store) -> None:
    """Given a child with its task and another input queued, when its parent is cancelled, then both runs end."""
    await db.asking()
    await db.answer("s", tool_calls=(("p0", "spawn_agent", "{}"),))
    call = CallState("r/1/0", "started", child_id="kid", executions=1)
    await db.commit("s", 1, 2, spawns=(Spawn("r/1/0", "kid", spec("kid"), "x"),), calls=(call,), wait="child")
    await db.accept("kid", "more")
    await db.journal.submit(lambda tx: endings.request_cancel(tx, tx.session("s"), "stop"))
    assert [run.status for run in db.read(queries.runs, "kid")] == ["cancelled", "cancelled"]
    row = db.session("kid")
    assert (row["inbox_count"], row["active"], row["closed"]) == (0, 0, 1)


def test_a_connection_in_use_when_the_store_is_closed_is_closed_after_its_use(store: str) -> None:
    """Given a reader at work, when the store is closed, then the reader ends its work and leaves no connection."""
    database = Database(store)
    database.prepare()
    with database.read() as connection:
        driver: Any = connection.connection.driver_connection
        database.close()
        assert connection.execute(text("SELECT 1")).scalar() == 1
    if database.is_sqlite:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            driver.execute("SELECT 1")
    else:
        assert driver.closed
    with database.read() as connection:
        assert connection.execute(text("SELECT 1")).scalar() == 1
    database.close()


async def test_what_is_read_together_is_of_one_state(db: Store) -> None:
    """Given a reader between two statements, when something is committed, then its next one does not see it."""
    await db.create("s")
    with db.database.read() as connection:
        before = queries.session_info(connection, db.namespace, "s")
        await db.accept("s")
        assert queries.session_info(connection, db.namespace, "s") == before
        assert queries.runs(connection, db.namespace, "s") == []
    assert db.read(queries.session_info, "s") != before
