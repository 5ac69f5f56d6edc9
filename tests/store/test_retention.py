"""Retention: what is old and over may go; what is at work, or not exported yet, stays; and ids may be used again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from understudy.errors import Conflict, SessionActive, UnknownSession
from understudy.store.check.check import check
from understudy.store.db.engine import now
from understudy.store.journal import Journal
from understudy.store.operations import progress, wakeups
from understudy.store.reads import queries
from understudy.store.transaction import Transaction
from understudy.store.upkeep import archive, retention
from understudy.store.upkeep.retention import Removed
from understudy.testing.offline import OfflineServer

from ..kernel import kernel as k
from ..kernel.kernel import opened

pytestmark = pytest.mark.conformance

CHILD = k.spec(k.script("seen"), name="child")
SPAWN = [("spawn_agent", {"agent": "child", "task": "look"})]
TABLES = ("session", "run", "message", "event", "tool_call", "inbox", "account", "reservation", "timer", "note")
LATER = 1 << 62


async def do(dsn: str, operation: Callable[[Transaction], Any]) -> Any:
    with opened(dsn) as database:
        journal = Journal(database, "tests", "command", lambda committed: None)
        journal.start()
        try:
            return await journal.submit(operation)
        finally:
            await journal.close()


def read(dsn: str, query: Callable[..., Any], *arguments: Any) -> Any:
    with opened(dsn) as database, database.read() as connection:
        return query(connection, "tests", *arguments)


def rows(dsn: str, *tables: str) -> dict[str, list[str]]:
    with opened(dsn) as database, database.read() as connection:
        found = tables or TABLES
        return {name: sorted(map(str, connection.execute(text(f"SELECT * FROM {name}")))) for name in found}


def violations(dsn: str) -> list[Any]:
    with opened(dsn) as database, database.snapshot() as connection:
        return list(check(connection, "tests"))


async def export_all(kernel: k.Kernel) -> None:
    """Have all sinks take what was committed."""
    service, deadline = kernel.service, time.monotonic() + 30
    while service.projection.metrics.writer_seq < service.journal.writer_seq:  # who saw a commit may be ahead of them
        await service.journal.submit(lambda _: None)
        assert time.monotonic() < deadline
    await service.projection._checkpoint()
    writer, cursor = service.config.writer, 0
    while cursor < service.journal.writer_seq:
        cursor = await service.reading.query(queries.export_cursor, writer, progress.SPANS)
        assert time.monotonic() < deadline
        await service.projection.save_cursor(progress.SPANS, service.journal.writer_seq)


@pytest.fixture
async def worked(store: str, tmp_path: Path, server: OfflineServer) -> str:
    """A store with two trees that are over and exported, `old` and `new`, and `busy`, whose run stays queued."""
    lead = k.spec(k.script(SPAWN, "both seen"), ["spawn_agent"], agents={"child": CHILD}, budget={"tokens": 100_000})
    async with k.running(store, tmp_path, server=server) as kernel:
        for session_id in ("old", "new"):
            assert (await kernel.run(session_id, lead))["status"] == "completed"
            await kernel.ask("set_note", session_id, {"key": "plan", "text": "go on"})
        await export_all(kernel)
    async with k.running(store, tmp_path, server=server, frames=0) as kernel:
        await kernel.spawn("busy", lead)
        await kernel.send("busy")
        await export_all(kernel)
    return store


def last_change(dsn: str, root_id: str) -> int:
    return int(max(row.updated_at for row in read(dsn, queries.tree, root_id)))


async def test_a_tree_goes_with_everything(worked: str) -> None:
    """Of a pruned tree no row of any table is left; others are untouched."""
    ids = [row.session_id for row in read(worked, queries.tree, "old")]
    before = rows(worked)
    removed = await do(worked, lambda tx: retention.drop_tree(tx, "old"))
    assert (removed.sessions, removed.kept) == (2, "")
    after = rows(worked)
    for name, found in before.items():
        assert after[name] == [row for row in found if not any(f"'{session_id}'" in row for session_id in ids)]
    with pytest.raises(UnknownSession):
        read(worked, queries.session_info, "old")
    assert violations(worked) == []


async def test_only_trees_that_are_old_enough(worked: str) -> None:
    """The rule finds roots of trees in which nothing happened since, oldest first; never one with work to do."""
    between = last_change(worked, "old") + 1
    assert read(worked, retention.finished_trees, between) == ["old"]
    assert read(worked, retention.finished_trees, LATER) == ["old", "new"]
    before = rows(worked)
    assert (await do(worked, lambda tx: retention.drop_tree(tx, "new", between))).kept == "at work"
    assert rows(worked) == before


async def test_a_tree_at_work_is_never_removed(worked: str) -> None:
    """Asked for by name it is an error, by age it is kept; nothing changes either way."""
    before = rows(worked)
    with pytest.raises(SessionActive):
        await do(worked, lambda tx: retention.drop_tree(tx, "busy"))
    assert (await do(worked, lambda tx: retention.drop_tree(tx, "busy", LATER))).kept == "at work"
    assert rows(worked) == before


async def test_a_tree_goes_as_a_whole(worked: str) -> None:
    """A child can't be removed without its parent; an unknown session is an error."""
    child = read(worked, queries.tree, "old")[1].session_id
    before = rows(worked)
    with pytest.raises(Conflict, match="old"):
        await do(worked, lambda tx: retention.drop_tree(tx, child))
    with pytest.raises(UnknownSession):
        await do(worked, lambda tx: retention.drop_tree(tx, "nobody"))
    assert rows(worked) == before


async def test_what_no_sink_has_taken_stays(worked: str) -> None:
    """While the metrics' checkpoint or the span exporter is behind, neither trees nor events go."""
    for table in ("metric_state", "export_cursor"):
        before = rows(worked)
        with opened(worked) as database, database.writer.begin() as connection:
            kept = connection.execute(text(f"SELECT writer_seq FROM {table}")).scalar()
            connection.execute(text(f"UPDATE {table} SET writer_seq = 3"))
        assert (await do(worked, lambda tx: retention.drop_tree(tx, "old"))).kept == "not exported yet"
        first = await do(worked, lambda tx: retention.drop_events(tx, "old", LATER))
        again = await do(worked, lambda tx: retention.drop_events(tx, "old", LATER))
        assert first.events <= 3
        assert again == Removed(kept="not exported yet")
        with opened(worked) as database, database.writer.begin() as connection:
            connection.execute(text(f"UPDATE {table} SET writer_seq = {kept}"))
        assert {name: found for name, found in rows(worked).items() if name not in ("event", "session")} == {
            name: found for name, found in before.items() if name not in ("event", "session")
        }
    assert (await do(worked, lambda tx: retention.drop_tree(tx, "old"))).sessions == 2


async def test_old_events_go_and_messages_stay(worked: str) -> None:
    """After events were removed the transcript, the results and the proof are as before; the log begins later."""
    before = rows(worked, "message", "run", "tool_call", "inbox")
    events = read(worked, queries.session_events, "old")
    middle = events[len(events) // 2]
    removed = await do(worked, lambda tx: retention.drop_events(tx, "old", middle.at))
    assert 0 < removed.events == sum(event.at < middle.at for event in events)
    assert rows(worked, "message", "run", "tool_call", "inbox") == before
    assert read(worked, queries.session_events, "old")[0].at >= middle.at
    assert violations(worked) == []
    await do(worked, lambda tx: retention.drop_events(tx, "old", LATER))
    assert read(worked, queries.session_events, "old") == []
    assert violations(worked) == []


async def test_events_of_a_run_that_is_not_over_stay(worked: str) -> None:
    """However old: the trace of the run is still to be finished."""
    before = [event.type for event in read(worked, queries.session_events, "busy")]
    removed = await do(worked, lambda tx: retention.drop_events(tx, "busy", LATER))
    assert removed.events <= 1
    after = [event.type for event in read(worked, queries.session_events, "busy")]
    assert after == before[removed.events :]
    assert "run_accepted" in after
    assert violations(worked) == []


async def test_a_session_goes_on_after_its_events_went(worked: str, tmp_path: Path, server: OfflineServer) -> None:
    """A session whose old events were removed takes the next input as any other."""
    await do(worked, lambda tx: retention.drop_events(tx, "old", LATER))
    async with k.running(worked, tmp_path, server=server) as kernel:
        await kernel.send("old", "go on", "second")
        assert (await kernel.end("old", "second"))["status"] == "completed"
    assert violations(worked) == []


async def test_code_goes_when_nobody_needs_it(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """Code that no session has needed for a day is removed; what a session needs, or was put lately, is not."""
    async with k.running(store, tmp_path, server=server) as kernel:
        for session_id in ("a", "b", "c"):
            session = {"session_id": session_id, "spec": k.spec(), "placement": f"code-{session_id}", "metadata": {}}
            await kernel.ask("spawn", session, {f"code-{session_id}": b"x"})
        await export_all(kernel)
        for session_id in ("a", "c"):
            assert (await do(store, lambda tx, s=session_id: retention.drop_tree(tx, s))).sessions == 1  # type: ignore[misc]
        assert await do(store, retention.drop_code) == 0
        with opened(store) as database, database.writer.begin() as connection:
            connection.execute(text("UPDATE code_blob SET created_at = 1"))
        await kernel.ask("spawn", {**session, "session_id": "d", "placement": ""}, {"code-c": b"x"})
        assert await do(store, retention.drop_code) == 1
    assert [read(store, queries.blob, f"code-{name}") for name in "abc"] == [None, b"x", b"x"]


async def test_a_jobs_package_stays_while_a_session_needs_it(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """A package that a session's specification names is kept; asking which ones are lacking keeps the others a day."""
    async with k.running(store, tmp_path, server=server) as kernel:
        session = {"session_id": "a", "spec": {**k.spec(), "packages": ["mine"]}, "placement": "", "metadata": {}}
        await kernel.ask("spawn", session, {"mine": b"x", "another": b"y", "asked": b"z"})
        with opened(store) as database, database.writer.begin() as connection:
            connection.execute(text("UPDATE code_blob SET created_at = 1"))
        assert await kernel.ask("lacking", ["asked", "never"]) == ["never"]
        assert await do(store, retention.drop_code) == 1
    assert [read(store, queries.blob, name) for name in ("mine", "another", "asked")] == [b"x", None, b"z"]


async def test_an_id_may_be_used_again(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """Given a removed session that a frame still holds idle, a new one of the same id has nothing of the old one:
    neither its specification nor its messages."""
    async with k.running(store, tmp_path, server=server, frames=1) as kernel:
        for answer in ("first", "second", "third"):
            ended = await kernel.run("s", k.spec(k.script(answer), hash=answer))
            assert (ended["status"], ended["text"]) == ("completed", answer)
            assert [message["role"] for message in await kernel.messages("s")] == ["user", "assistant"]
            assert [message["role"] for message in server.requests[-1].body["messages"]] == ["system", "user"]
            await export_all(kernel)
            assert (await do(store, lambda tx: retention.drop_tree(tx, "s"))).sessions == 1
    assert violations(store) == []


async def test_trees_and_events_by_age(worked: str) -> None:
    """The times of the rules are those of the last change, and of the event."""
    assert read(worked, retention.finished_trees, 1) == []
    assert read(worked, retention.sessions_with_events, 1) == []
    assert set(read(worked, retention.sessions_with_events, now())) >= {"old", "new", "busy"}


async def test_the_journals_own_log_goes_on_after_retention(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """Given a writer whose newest events were removed, when its service starts again, then its next events have later
    numbers: they are measured and exported as any others, and stay until then."""
    async with k.running(store, tmp_path, server=server) as kernel:
        await kernel.run("one", k.spec(k.script("answer")))
        await export_all(kernel)
        last = kernel.service.journal.writer_seq
    assert (await do(store, lambda tx: retention.drop_tree(tx, "one"))).sessions == 1
    async with k.running(store, tmp_path, server=server) as kernel:
        assert kernel.service.journal.writer_seq == last
        await kernel.run("two", k.spec(k.script("answer")))
        events = await kernel.service.projection.read_events(last, 100)
        assert [event.session_id for event in events] == ["two"] * len(events) != []
        assert kernel.service.projection.metrics.writer_seq == last + len(events)


@pytest.mark.parametrize("other", [False, True])
async def test_a_session_that_is_imported_again_is_not_the_one_that_was_removed(
    store: str, tmp_path: Path, server: OfflineServer, other: bool
) -> None:
    """Given an idle session in a frame of a running cluster, when it is removed and an archive comes in its place (its
    own of earlier, or another session of the same id), then the next input continues what was imported."""
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    async with k.running(store, tmp_path, server=server, frames=1) as kernel:
        await kernel.run("s", k.spec(k.script("first", "second", "third"), hash="mine"))
        archived = exported(store, "s")
        if other:
            async with k.running(elsewhere, tmp_path, server=server) as there:
                await there.run("s", k.spec("be another\n" + k.script("other", "again"), hash="other"))
            archived = exported(elsewhere, "s")
        await kernel.send("s", "forget this", "second")
        await kernel.end("s", "second")
        await export_all(kernel)
        assert (await do(store, lambda tx: retention.drop_tree(tx, "s"))).sessions == 1
        assert await do(store, lambda tx: archive.load(tx, archive.read(archived, "file")))
        await kernel.send("s", "and now?", "third")
        ended = await kernel.end("s", "third")
        assert ended["status"] == "completed"
        asked = [str(message["content"]) for message in server.requests[-1].body["messages"]]
        assert asked[0].startswith("be another") == other
        assert asked[-1] == "and now?"
        assert "forget this" not in asked


def exported(dsn: str, session_id: str) -> bytes:
    with opened(dsn) as database, database.snapshot() as connection:
        return "".join(archive.export(connection, "tests", session_id, tree=True)).encode()


async def test_an_imported_session_that_waits_for_a_timer_goes_on_in_a_running_cluster(
    store: str, tmp_path: Path, server: OfflineServer
) -> None:
    """Its timer fires where it is imported, without anything else happening."""
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    policy = {**k.POLICY, "backoff": 1.0, "backoff_max": 1.0}
    async with k.running(elsewhere, tmp_path, server=server, frames=1) as there:

        def die(_number: int, label: str, worker: k.Worker | None) -> None:
            if label == "before step" and worker is not None and worker.frame.activation is None:
                return
            if label == "reply to step" and worker is not None:
                there.on_point = None
                there.kill(worker, replace=False)

        there.on_point = die
        await there.spawn("s", k.spec(k.script("done"), restart=policy))
        await there.send("s")
        await there.until("s", "session_crashed")
        assert (await there.info("s"))["status"] == "waiting_for_timer"
        archived = exported(elsewhere, "s")
    async with k.running(store, tmp_path, server=server) as kernel:
        assert await do(store, lambda tx: archive.load(tx, archive.read(archived, "file"), resume=True))
        await kernel.service.sweep.run(0)
        await kernel.until("s", "run_finished")


async def test_a_session_that_will_be_woken_stays(worked: str) -> None:
    """However old, its tree is neither found nor removed by age, unless it is named; without its wakeup it may go."""
    await do(worked, lambda tx: wakeups.schedule(tx, "old", "w", "x", 3600, None))
    await do(worked, lambda tx: progress.take(tx, "command", 1, runs=(0, 0)))  # what that committed was exported
    assert read(worked, retention.finished_trees, LATER) == ["new"]
    assert read(worked, retention.tree_to_drop, "old", LATER).kept == "at work"
    assert (await do(worked, lambda tx: retention.drop_tree(tx, "old", LATER))).kept == "at work"
    assert read(worked, retention.tree_to_drop, "old").sessions == 2
    await do(worked, lambda tx: wakeups.cancel(tx, "old", "w"))
    assert set(read(worked, retention.finished_trees, LATER)) == {"old", "new"}
    await do(worked, lambda tx: wakeups.schedule(tx, "old", "w", "x", 3600, None))
    await do(worked, lambda tx: progress.take(tx, "command", 3, runs=(0, 0)))
    assert (await do(worked, lambda tx: retention.drop_tree(tx, "old"))).sessions == 2
    assert rows(worked, "timer") == {"timer": []}
    assert violations(worked) == []


async def test_a_tree_that_is_gone_is_no_error(store: str) -> None:
    """Two prunes at once take the same trees: the second finds them gone; asked for by name it is an error."""
    assert await do(store, lambda tx: retention.drop_tree(tx, "gone", LATER)) == Removed(kept="gone")
    with pytest.raises(UnknownSession):
        await do(store, lambda tx: retention.drop_tree(tx, "gone"))
