"""A client's request that is repeated, at whatever time, is the same request: it has one effect, and one answer."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text, update

from understudy.cluster.ray.connection import Connection
from understudy.config import ModelProfile, Settings
from understudy.errors import CannotDrain, StoreOwned
from understudy.store.db.statements import REQUEST, RUN
from understudy.store.operations import activation, beginnings, endings, requests
from understudy.store.upkeep import retention
from understudy.supervisor.drains import Drains

from ..kernel import kernel as k
from .test_retention import export_all
from .test_store import Store, opened

QUESTION = ("request_user_input", {"prompt": "Which colour?"})


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as made:
        yield made


async def test_a_repeated_cancel_of_whatever_runs_spares_the_next_run(kernel: k.Kernel) -> None:
    """The request is about the run that was current when it came first."""
    kernel.server.hold()
    await kernel.spawn("s", k.spec())
    await kernel.send("s", "one", "r1")
    await kernel.until("s", "model_call_started")
    assert await kernel.ask("cancel", "s", None, "enough", "first")
    assert (await kernel.end("s", "r1"))["status"] == "cancelled"
    await kernel.send("s", "two", "r2")
    await kernel.until("s", "model_call_started", 2)
    assert await kernel.ask("cancel", "s", None, "enough", "first")
    kernel.server.release()
    assert (await kernel.end("s", "r2"))["status"] == "completed"


async def test_a_repeated_cancel_that_found_no_run_finds_none_later(kernel: k.Kernel) -> None:
    """What a request did not find it is not about."""
    kernel.server.hold()
    await kernel.spawn("s", k.spec())
    assert not await kernel.ask("cancel", "s", None, "enough", "early")
    await kernel.send("s")
    assert not await kernel.ask("cancel", "s", None, "enough", "early")
    kernel.server.release()
    assert (await kernel.end("s"))["status"] == "completed"


async def test_a_repeated_abort_spares_the_next_question(kernel: k.Kernel) -> None:
    """It says again which calls it gave up."""
    await kernel.spawn("s", k.spec(k.script([QUESTION], [QUESTION], "done"), ["request_user_input"]))
    await kernel.send("s")
    await kernel.paused("s")
    assert await kernel.ask("abort_pending", "s", None, "first") == ["r/1/0"]
    await kernel.until("s", "input_requested", 2)
    assert await kernel.ask("abort_pending", "s", None, "first") == ["r/1/0"]
    assert [item["call_id"] for item in await kernel.paused("s")] == ["r/2/0"]


async def test_a_repeated_schedule_sets_nothing_again(kernel: k.Kernel) -> None:
    """Also not after its wakeup has fired for the last time: what it brought is one input."""
    await kernel.spawn("s", k.spec())
    wakeup = {"name": "w", "prompt": "go", "seconds": 0.02, "every": None}
    done = await kernel.ask("schedule", "s", wakeup, "first")
    await kernel.until("s", "run_finished")
    assert await kernel.ask("schedule", "s", wakeup, "first") == done
    assert await kernel.ask("read", "wakeups", ["s"], {}) == []


async def test_a_repeated_cancel_of_a_wakeup_spares_the_next_of_its_name(kernel: k.Kernel) -> None:
    """The request is about the wakeup that had the name when it came first."""
    await kernel.spawn("s", k.spec())
    wakeup = {"name": "w", "prompt": "go", "seconds": 3600, "every": None}
    await kernel.ask("schedule", "s", wakeup, "first")
    assert await kernel.ask("cancel_wakeup", "s", "w", "second")
    await kernel.ask("schedule", "s", wakeup, "third")
    assert await kernel.ask("cancel_wakeup", "s", "w", "second")
    assert [row["name"] for row in await kernel.ask("read", "wakeups", ["s"], {})] == ["w"]


async def test_a_repeated_resume_does_not_undo_a_second_quarantine(kernel: k.Kernel) -> None:
    """The second one is for a person to see."""
    await kernel.spawn("s", k.spec())
    for _ in range(2):
        await kernel.service.journal.submit(lambda tx: activation.quarantine(tx, tx.session("s"), "no_progress", "why"))
        assert await kernel.ask("resume", "s", "first")
    assert (await kernel.info("s"))["status"] == "quarantined"


async def test_a_repeated_close_and_answer_say_the_same_again(kernel: k.Kernel) -> None:
    """Who repeats a request hears what it did, not what another one would do now."""
    await kernel.spawn("s", k.spec(k.script([QUESTION], "done"), ["request_user_input"]))
    await kernel.send("s")
    await kernel.paused("s")
    for _ in range(2):
        assert await kernel.ask("answer", "s", "r/1/0", "ok", "red", 1, "first") is True
    await kernel.end("s")
    for _ in range(2):
        assert await kernel.ask("close", "s", "enough", "second") is True


async def test_a_late_input_to_a_removed_session_is_not_for_the_next_of_its_id(kernel: k.Kernel) -> None:
    """Given a run that has ended, whose session retention removed, and another session of its id, when an attempt of
    `send` arrives that was given up, then the second session does nothing; another request with that run's id counts.
    """
    late = ("send", "s", {"run_id": "r", "content": "transfer 100"}, "first")
    await kernel.spawn("s", k.spec())
    assert (await kernel.ask(*late))["created"]
    await kernel.end("s")
    await export_all(kernel)
    removed = await kernel.service.journal.submit(lambda tx: retention.drop_tree(tx, "s"))
    assert removed.session_ids == ("s",), removed
    await kernel.spawn("s", k.spec())
    assert not (await kernel.ask(*late))["created"]
    assert await kernel.messages("s") == []
    assert (await kernel.ask("read", "runs", ["s"], {})) == []
    assert await kernel.send("s", "transfer 100")
    assert (await kernel.end("s"))["status"] == "completed"


async def test_repeated_requests_of_drains(kernel: k.Kernel) -> None:
    """A repeated drain does not undo that it was taken back, nor a repeated undrain the next drain."""
    begin = (["elsewhere"], 1 << 60, "why", False, ["elsewhere", "node1"])
    await kernel.ask("begin_drains", *begin, "first")
    assert await kernel.ask("end_drains", ["elsewhere"], "second") == 1
    await kernel.ask("begin_drains", *begin, "first")
    assert await kernel.ask("read", "drains", [], {}) == []
    await kernel.ask("begin_drains", *begin, "third")
    assert await kernel.ask("end_drains", ["elsewhere"], "second") == 1
    assert [row["node_id"] for row in await kernel.ask("read", "drains", [], {})] == ["elsewhere"]


async def test_a_repeated_drain_is_not_refused(kernel: k.Kernel) -> None:
    """Given a drain that was done, and its node gone, or others drained since, when it is repeated, then it is
    answered as done; another request for the same is refused."""
    nodes = ["elsewhere", "node1"]

    async def ask(_method: str, *request: Any) -> Any:
        return await kernel.ask(*request)

    async def tell() -> None:
        """Nobody has to know."""

    drains = Drains(ask, tell, lambda: nodes)
    await drains.begin(["elsewhere"], 60, "first", reason="why")
    nodes.remove("elsewhere")
    await drains.begin(["elsewhere"], 60, "first", reason="why")
    with pytest.raises(CannotDrain, match="no service"):
        await drains.begin(["elsewhere"], 60, "second", reason="why")
    nodes.append("elsewhere")
    await drains.undo("elsewhere", "third")
    await drains.begin(["node1"], 60, "fourth", reason="why")
    await drains.begin(["elsewhere"], 60, "first", reason="why")
    with pytest.raises(CannotDrain, match="the only one"):
        await drains.begin(["elsewhere"], 60, "fifth", reason="why")


async def test_a_repeated_acquire_takes_no_further_generation(kernel: k.Kernel) -> None:
    """A supervisor whose request arrives twice keeps the generation that it was given."""
    taken = await kernel.ask("acquire", "tests", k.LEASE, "tests", "first")
    assert await kernel.ask("acquire", "tests", k.LEASE, "tests", "first") == taken
    assert await kernel.ask("acquire", "tests", k.LEASE, "tests", "second") == taken + 1


async def test_each_call_of_a_client_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts of a call carry one id and who asks, and two calls carry two ids."""
    connection = Connection(Settings("sqlite:///s.db", "tests"), "")
    connection.identity = "ann"
    sent: list[tuple[Any, ...]] = []
    ids: list[str] = []

    async def call(*request: Any, call_id: str, timeout: float) -> bool:
        sent.append(request)
        ids.append(call_id)
        if len(sent) == 1:
            raise TimeoutError
        return True

    async def learn() -> None:
        """Nobody has come or gone."""

    monkeypatch.setattr(connection.nodes, "_handles", {"node1": None})
    monkeypatch.setattr(connection.nodes, "call", call)
    monkeypatch.setattr(connection.nodes, "learn", learn)
    for _ in range(2):
        assert await connection.change(bool, "cancel", "s", None, "enough")
    first, again, other = sent
    assert first == again
    assert first[:-2] == other[:-2] == ("node1", "request", "cancel", "s", None, "enough")
    assert first[-2] != other[-2]
    assert first[-1] == other[-1] == "ann"
    assert ids[0] == ids[1] != ids[2]


# The store's side.


@pytest.mark.conformance
async def test_two_services_have_the_same_request_at_once(store: str) -> None:
    """One of them does it, and both say the same."""
    done: list[int] = []

    def operation(_tx: Any) -> int:
        done.append(len(done))
        return len(done)

    async with opened(store) as db, opened(store, namespace=db.namespace, writer="other") as other:
        await db.own()
        await db.create("s")
        for session_id in ("s", ""):
            done.clear()
            found = [one.do(requests.once, session_id, "first", operation) for one in (db, other) * 3]
            assert await asyncio.gather(*found) == [1] * 6


@pytest.mark.conformance
async def test_a_clock_that_is_ahead_forgets_no_request(store: str) -> None:
    """Given a request that was done, when a node whose clock is hours ahead does others, then a repetition of the first
    still does nothing, for a session as for the namespace; behind enough newer ones it is forgotten."""

    def ahead(tx: Any, session_id: str, request_id: str) -> str:
        tx.now += 2 * requests.KEPT
        return requests.once(tx, session_id, request_id, lambda _tx: request_id)

    async with opened(store) as db:
        await db.own()
        await db.create("s")
        for session_id in ("s", ""):
            await db.do(requests.once, session_id, "first", lambda _tx: "done")
            for number in range(requests.NEWEST):
                await db.do(ahead, session_id, f"other {number}")
                assert await db.do(requests.once, session_id, "first", lambda _tx: "again") == "done"
            await db.do(ahead, session_id, "one too many")
            assert await db.do(requests.once, session_id, "first", lambda _tx: "again") == "again"


async def test_requests_are_remembered_for_an_hour(tmp_path: Path) -> None:
    """The next one of the session removes those that are older, but for the newest, so there are never many."""

    def age(tx: Any) -> None:
        tx.read(update(REQUEST).values(created_at=REQUEST.c.created_at - requests.KEPT))

    def count(tx: Any) -> int:
        return int(tx.read(select(func.count()).select_from(REQUEST)).scalar())

    async with opened(f"sqlite:///{tmp_path}/rows.db") as db:
        await db.own()
        await db.create("s")
        asked = requests.NEWEST + 3
        for number in range(asked):
            await db.do(requests.once, "s", f"request {number}", lambda _tx: True)
        assert await db.do(count) == asked
        await db.do(age)
        await db.do(requests.once, "s", "the next", lambda _tx: True)
        assert await db.do(count) == requests.NEWEST + 1


async def test_a_request_outlives_its_session(store: str) -> None:
    """Given a session that was removed, and another of its id, when a request to the first is repeated, then nothing
    is done to the second; after an hour the request is forgotten with the next removal."""
    async with opened(store) as db:
        await db.own()
        await db.create("s")

        def close(tx: Any) -> bool:
            return requests.once(tx, "s", "a client's", lambda tx: endings.close(tx, "s", "enough"))

        def age(tx: Any) -> None:
            tx.read(update(REQUEST).values(created_at=REQUEST.c.created_at - requests.KEPT - 1))

        def count(tx: Any) -> int:
            return int(tx.read(select(func.count()).select_from(REQUEST)).scalar())

        assert await db.do(close)
        await db.do(lambda tx: tx.drop(["s"]))
        await db.create("s")
        assert await db.do(close)
        assert not db.session()["closed"]
        await db.do(age)
        await db.do(lambda tx: tx.drop(["s"]))
        await db.do(requests.forget_old)
        assert await db.do(count) == 0


async def test_old_requests_of_many_that_live(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given more living sessions with old requests than are looked at together, then those of removed ones are
    forgotten all the same."""
    monkeypatch.setattr(requests, "AT_ONCE", 2)
    async with opened(store) as db:
        await db.own()
        for name in ("a", "b", "c", "gone"):
            await db.create(name)
            await db.do(requests.once, name, "old", lambda _tx: True)
        await db.do(lambda tx: tx.read(update(REQUEST).values(created_at=REQUEST.c.created_at - requests.KEPT - 1)))
        await db.do(lambda tx: tx.drop(["gone"]))
        await db.do(requests.forget_old)
        left = await db.do(lambda tx: sorted(tx.read(select(REQUEST.c.session_id)).scalars()))
        assert left == ["a", "b", "c"]


async def test_an_input_outlives_its_session(store: str) -> None:
    """Given a session that took an input and was removed, and another of its id, when another attempt of that request
    arrives, then it finds the input accepted, and the second session has none; a new request may use the run's id."""
    async with opened(store) as db:
        await db.own()
        await db.create("s")
        run = {"request_id": "first", "source": "client"}

        def remove(tx: Any) -> None:
            requests.outlive(tx, ["s"])
            tx.drop(["s"])

        assert await db.do(beginnings.accept, "s", "r", "go", **run)
        assert not await db.do(beginnings.accept, "s", "r", "go", **run)
        for _ in range(2):
            await db.do(remove)
            await db.create("s")
            assert not await db.do(beginnings.accept, "s", "r", "go", **run)
            assert not db.session()["active"]
        assert await db.do(beginnings.accept, "s", "r", "go", **{**run, "request_id": "second"})


async def test_what_was_accepted_long_ago_is_not_remembered(db: Store) -> None:
    """Given an input of two hours ago, when its session is removed, then nothing is kept of it."""

    def remove(tx: Any) -> int:
        tx.read(update(RUN).values(accepted_at=tx.now - 2 * requests.KEPT))
        requests.outlive(tx, ["s"])
        tx.drop(["s"])
        return int(tx.read(select(func.count()).select_from(REQUEST)).scalar())

    await db.do(beginnings.accept, "s", "r", "go", request_id="first")
    assert await db.do(remove) == 0


async def test_a_refused_request_leaves_nothing(db: Store) -> None:
    """An operation that is refused is not remembered: it has changed nothing."""
    with pytest.raises(ValueError, match="refused"):
        await db.do(requests.once, "s", "first", _refuse)
    assert await db.do(requests.once, "s", "first", lambda _tx: "done") == "done"


def _refuse(_tx: Any) -> None:
    raise ValueError("refused")


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(f"sqlite:///{tmp_path}/rows.db") as made:
        await made.own()
        await made.create("s")
        yield made


async def test_a_repeated_note_undoes_no_later_one(kernel: k.Kernel) -> None:
    """Given a note that was set, changed and removed by later requests, when the earlier ones are repeated, then each
    gets its answer again and the note stays as the last one left it."""
    await kernel.spawn("s", k.spec())
    notes = ("read", "notes", ["session", "s"], {})
    first, second = {"key": "n", "text": "first"}, {"key": "n", "text": "second"}
    version = await kernel.ask("set_note", "s", first, "one")
    await kernel.ask("set_note", "s", second, "two")
    assert await kernel.ask("set_note", "s", first, "one") == version
    assert [note["text"] for note in await kernel.ask(*notes)] == ["second"]
    assert await kernel.ask("delete_note", "s", "n", "three") is True
    await kernel.ask("set_note", "s", second, "four")
    assert await kernel.ask("delete_note", "s", "n", "three") is True
    assert [note["text"] for note in await kernel.ask(*notes)] == ["second"]


async def test_a_late_renewal_holds_the_store_for_a_lease_at_most(tmp_path: Path) -> None:
    """Given a store that its owner gave up, when a late attempt of its last renewal arrives, then the next owner waits
    for that lease, and not for longer."""
    lease = 200_000
    async with opened(f"sqlite:///{tmp_path}/store.db") as db:
        generation = await db.own("me")
        await db.do(activation.renew, generation, "me", 0)
        await db.do(activation.renew, generation, "me", lease)
        with pytest.raises(StoreOwned) as refused:
            await db.do(activation.acquire, "you", lease, may_take=lambda _: False)
        assert refused.value.details["seconds"] <= lease / 1e6


async def test_a_repeated_registration_brings_the_same_credentials(kernel: k.Kernel) -> None:
    """Given a profile that was registered, when that is repeated, then the service knows it once, as it was."""
    profile = ModelProfile("again", "key", kernel.server.url)
    for _ in range(2):
        await kernel.service.register(profile)
    assert [known for known in kernel.service.profiles.all() if known.name == "again"] == [profile]


async def test_reads_change_nothing(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a session that has had a run, when it is read and followed, repeatedly, then no row of it changes."""
    await kernel.spawn("s", k.spec())
    await kernel.send("s")
    await kernel.end("s")

    def rows() -> dict[str, list[Any]]:
        with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
            tables = "session", "run", "message", "event", "tool_call", "inbox", "timer", "note", "request"
            return {table: connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3").fetchall() for table in tables}

    before = rows()
    for _ in range(2):
        for what in ("info", "tree", "messages", "runs", "wakeups"):
            await kernel.ask("read", what, ["s"], {})
        assert (await kernel.ask("watch", "client", {"s": {"after": 0}}, 1.0))["events"]
    assert rows() == before


@pytest.mark.conformance
async def test_only_a_clients_input_names_who_asked(store: str) -> None:
    """Given a person's request from which an input of a timer follows in the same transaction, then that names nobody;
    the input that the person sends names them."""

    def operation(tx: Any, source: str) -> None:
        tx.by = "anna"
        beginnings.accept(tx, "s", source, "go", source=source)

    async with opened(store) as db:
        await db.own()
        await db.create("s")
        for source in ("client", "timer"):
            await db.do(operation, source)
        statement = text("SELECT body FROM event WHERE type = 'run_accepted' ORDER BY seq")
        with db.database.read() as connection:
            bodies = list(connection.execute(statement).scalars())
    accepted = [json.loads(body) if isinstance(body, str) else body for body in bodies]
    assert [(data["source"], data["by"]) for data in accepted] == [("client", "anna"), ("timer", "")]
