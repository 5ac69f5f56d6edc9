"""Archives: a session in one file, the same in any backend, and refused where it is damaged."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import select, text

from understudy import AgentSpec, HookContext, Memory, MemoryContext, hook, memory_provider, tool
from understudy.cluster.client.compiling import compile_spec, place
from understudy.errors import (
    ArchiveVersion,
    InvalidArchive,
    SessionActive,
    SessionConflict,
    StoreError,
    UnderstudyError,
    UnknownSession,
    UntrustedCode,
)
from understudy.placement import placement_key
from understudy.protocol import packed
from understudy.store import budgets
from understudy.store.check.check import check
from understudy.store.db.engine import now
from understudy.store.db.statements import ACCOUNT, SESSION
from understudy.store.journal import Journal
from understudy.store.operations import trust, upgrades
from understudy.store.reads import queries
from understudy.store.transaction import Transaction
from understudy.store.upkeep import archive, retention
from understudy.testing.offline import OfflineServer

from ..kernel import kernel as k
from ..kernel.kernel import opened

pytestmark = pytest.mark.conformance

CHILD = k.spec(
    k.script([("look", {"path": "/dev/null", "text": "x"})], "seen"),
    [k.look],
    name="child",
    budget=[{"scope": "session", "rounds": 5}],
)
SOON = 2.0
"""Seconds after which something is due: later than its export, however slow the machine is."""

LIMITS = [{"scope": "tree", "tokens": 100_000, "rounds": 12, "children": 9}, {"scope": "run", "children": 2}]
SPAWN = [("spawn_agent", {"agent": "child", "task": f"look {number}"}) for number in range(2)]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with a finished tree, which tests only read: `lead` and the two children it spawned."""
    directory = tmp_path_factory.mktemp("tree")

    async def work(dsn: str) -> None:
        compiled = k.spec(k.script(SPAWN, "both seen"), ["spawn_agent"], agents={"child": CHILD}, budget=LIMITS)
        async with k.running(dsn, directory) as kernel:
            assert (await kernel.run("lead", compiled))["status"] == "completed"

    if request.param == "sqlite":
        dsn = f"sqlite:///{directory}/store.db"
        asyncio.run(work(dsn))
        yield dsn
        return
    with request.getfixturevalue("new_postgres")() as dsn:
        asyncio.run(work(dsn))
        yield dsn


def the_other(request: pytest.FixtureRequest, dsn: str, directory: Path) -> str:
    if dsn.startswith("sqlite"):
        found: str = request.getfixturevalue("postgres")
        return found
    return f"sqlite:///{directory}/other.db"


@pytest.fixture
def other(request: pytest.FixtureRequest, tree: str, tmp_path: Path) -> str:
    """An empty store of the other backend than the tree's."""
    return the_other(request, tree, tmp_path)


@pytest.fixture
def beside(request: pytest.FixtureRequest, store: str, tmp_path: Path) -> str:
    """An empty store of the other backend than `store`."""
    return the_other(request, store, tmp_path)


def export(dsn: str, session_id: str, *, tree: bool = True) -> bytes:
    with opened(dsn) as database, database.snapshot() as connection:
        return "".join(archive.export(connection, "tests", session_id, tree=tree)).encode()


async def load(
    dsn: str, data: bytes, *, resume: bool = False, trust_code: bool = False, namespace: str = "tests"
) -> bool:
    with opened(dsn) as database:
        journal = Journal(database, namespace, "import", lambda committed: None)
        journal.start()
        try:
            read = archive.read(data, "file")
            return await journal.submit(lambda tx: archive.load(tx, read, resume=resume, trust_code=trust_code))
        finally:
            await journal.close()


def content(dsn: str, session_id: str, namespace: str = "tests") -> dict[str, Any]:
    """All that a session is, but for where it was written."""
    with opened(dsn) as database, database.read() as connection:
        events = [event.to_wire() for event in queries.session_events(connection, namespace, session_id)]
        info = queries.session_info(connection, namespace, session_id)
        return {
            "messages": [message.to_wire() for message in queries.messages(connection, namespace, session_id)],
            "runs": [replace(run, namespace="") for run in queries.runs(connection, namespace, session_id)],
            "events": [{**event, "writer_seq": 0} for event in events],
            "info": replace(info, frame_id=None, actor_pid=None, node_id="", updated_at=0),
        }


def rows(dsn: str) -> dict[str, list[str]]:
    with opened(dsn) as database, database.read() as connection:
        names = ("session", "run", "message", "event", "tool_call", "inbox", "account", "code_blob", "metric_state")
        return {name: sorted(map(str, connection.execute(text(f"SELECT * FROM {name}")))) for name in names}


def children(dsn: str) -> list[str]:
    with opened(dsn) as database, database.read() as connection:
        return [row.session_id for row in queries.tree(connection, "tests", "lead")][1:]


def sealed(document: dict[str, Any]) -> bytes:
    """An archive with this content and the right checksum, as whoever edits one by hand could make it."""
    document = {name: value for name, value in document.items() if name != "sha256"}
    body = json.dumps(document, separators=(",", ":"))[:-1].encode() + b","
    return body + b'"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


@pytest.mark.thorough
async def test_a_tree_is_the_same_in_the_other_backend(tree: str, other: str) -> None:
    """Messages, runs, events and states of every session of the tree are identical after export and import."""
    assert await load(other, export(tree, "lead")) is True
    for session_id in ("lead", *children(tree)):
        assert content(other, session_id) == content(tree, session_id)
    with opened(other) as database, database.snapshot() as connection:
        assert check(connection, "tests") == []


async def test_an_import_goes_on_with_the_next_input(
    tree: str, other: str, tmp_path: Path, server: OfflineServer
) -> None:
    """Given a tree from another backend, the next input continues the conversation on the messages it had."""
    await load(other, export(tree, "lead"))
    before = content(other, "lead")["messages"]
    async with k.running(other, tmp_path, server=server) as kernel:
        await kernel.send("lead", "and now?", "second")
        ended = await kernel.end("lead", "second")
        messages = await kernel.messages("lead")
    assert ended["status"] == "completed"
    assert messages[: len(before)] == before
    assert [message["role"] for message in messages[len(before) :]][:2] == ["user", "assistant"]
    asked = [message["content"] for message in server.requests[-1].body["messages"]]
    assert asked[1 : len(before) + 1] == [message["content"] for message in before]


async def test_exporting_again_gives_the_same_rows(tree: str, other: str) -> None:
    """An export of an import has the same content."""
    data = export(tree, "lead")
    await load(other, data)
    first, second = json.loads(data), json.loads(export(other, "lead"))
    for document in (first, second):
        for session in document["sessions"]:
            own = ("frame_id", "actor_pid", "node_id", "wait_holder", "updated_at", "incarnation")
            for name in (*own, "first_incarnation", "redone"):
                session["session"].pop(name)
            for event in session["event"]:
                del event["writer"], event["writer_seq"]
        del document["exported_at"], document["sha256"]
    assert first == second


async def test_importing_twice_changes_nothing(tree: str, other: str) -> None:
    """The second import of the same archive finds it there."""
    data = export(tree, "lead")
    assert await load(other, data) is True
    before = rows(other)
    assert await load(other, data) is False
    assert rows(other) == before


async def test_a_session_without_its_tree(tree: str, other: str) -> None:
    """A child that is exported alone becomes a root; its transcript stays."""
    child = children(tree)[0]
    assert await load(other, export(tree, child, tree=False)) is True
    found, wanted = content(other, child), content(tree, child)
    assert (found["messages"], found["runs"]) == (wanted["messages"], wanted["runs"])
    info = found["info"]
    assert (info.parent_id, info.root_id, info.depth, info.call_id) == (None, child, 0, None)
    with opened(other) as database, database.snapshot() as connection:
        assert check(connection, "tests") == []


def accounts(dsn: str, session_id: str) -> dict[str, tuple[int, int]]:
    """What is allowed and what is left, by scope and resource."""
    statement = select(ACCOUNT).where(ACCOUNT.c.session_id == session_id)
    with opened(dsn) as database, database.read() as connection:
        found = [dict(row) for row in connection.execute(statement).mappings()]
    return {f"{row['scope']} {row['resource']}": (row["allowed"], budgets.left(row)) for row in found}


async def test_what_is_left_of_a_budget_stays(tree: str, other: str) -> None:
    """Given a session that is imported without those below it, what they had used is taken off its limits; a
    sub-agent that is imported alone has its own budget left, and none of those above."""
    await load(other, export(tree, "lead", tree=False))
    before, after = accounts(tree, "lead"), accounts(other, "lead")
    assert {name: left for name, (_, left) in before.items()} == {name: left for name, (_, left) in after.items()}
    assert (before["tree rounds"], after["tree rounds"]) == ((12, 6), (8, 6))
    assert (before["tree children"], after["tree children"]) == ((9, 7), (7, 7))
    child = children(tree)[0]
    await load(other, export(tree, child, tree=False))
    assert accounts(other, child) == accounts(tree, child) == {"session rounds": (5, 3)}


async def test_an_upgrade_gives_back_nothing_that_an_import_took_off(tree: str, other: str) -> None:
    """Given a session that was imported without those below it, when it goes on under another specification with the
    same limits, then what is left of its budget is what it was."""
    await load(other, export(tree, "lead", tree=False))
    before = accounts(other, "lead")

    def upgrade(tx: Transaction) -> None:
        row, spec = tx.session("lead"), tx.specification("lead")
        row.next_spec = {"spec": {**spec, "instructions": "other", "hash": "other"}, "placement": row.placement}
        upgrades.migrate(tx, row)

    with opened(other) as database:
        journal = Journal(database, "tests", "upgrade", lambda committed: None)
        journal.start()
        await journal.submit(upgrade)
        await journal.close()
    assert accounts(other, "lead") == before


async def test_the_budget_of_an_older_archive(tree: str, other: str) -> None:
    """Given an archive of before there were accounts, then the tree's token budget is what it was."""
    document = json.loads(export(tree, "lead"))
    document["schema"] = 2
    used = sum(item["session"]["tokens_used"] for item in document["sessions"])
    for item in document["sessions"]:
        row = item["session"]
        del row["accounts"], row["cost_used"], item["account"]
        is_root = row["session_id"] == "lead"
        row.update(budget_tokens=5_000 if is_root else None, budget_reserved=0, budget_spent=used if is_root else 0)
    assert await load(other, sealed(document)) is True
    assert accounts(other, "lead") == {"tree tokens": (5_000, 5_000 - used)}
    with opened(other) as database, database.read() as connection:
        charged = connection.execute(select(SESSION.c.accounts).order_by(SESSION.c.depth)).scalars().all()
    assert charged == ["lead:0", "lead:1", "lead:1"]


async def test_another_session_of_the_same_id_is_kept(
    tree: str, other: str, tmp_path: Path, server: OfflineServer
) -> None:
    """Where the store has a session of one of the ids, nothing of the archive is imported."""
    child = children(tree)[1]
    async with k.running(other, tmp_path, server=server) as kernel:
        await kernel.run(child, k.spec(k.script("mine")))
    before = rows(other)
    with pytest.raises(SessionConflict):
        await load(other, export(tree, "lead"))
    assert rows(other) == before


async def test_imports_leave_one_writer(tree: str, other: str) -> None:
    """However many archives are taken in, at once or after each other: their events are in the log of one writer, each
    at a place of its own, all measured and exported; so the tables of progress don't grow."""
    first, second = children(tree)
    taken = await asyncio.gather(*(load(other, export(tree, name, tree=False)) for name in (first, second)))
    assert taken == [True, True]
    assert await load(other, export(tree, "lead", tree=False)) is True
    with opened(other) as database, database.snapshot() as connection:
        places = connection.execute(text("SELECT writer, writer_seq FROM event ORDER BY writer_seq")).all()
        assert [tuple(place) for place in places] == [("import", number + 1) for number in range(len(places))]
        for table in ("metric_state", "export_cursor"):
            found = connection.execute(text(f"SELECT writer, writer_seq FROM {table}")).all()
            assert [tuple(row) for row in found] == [("import", len(places))]
        assert check(connection, "tests") == []


async def test_unfinished_work_goes_on_only_where_somebody_says_so(
    store: str, beside: str, tmp_path: Path, server: OfflineServer
) -> None:
    """An archive of a session with work to do is refused; with `resume` the work goes on here, side effects once."""
    path = tmp_path / "notes"
    compiled = k.spec(k.script([("note", {"path": str(path), "text": "x"})], "done"), [k.note])
    async with k.running(store, tmp_path, server=server, frames=0) as kernel:
        await kernel.spawn("s", compiled)
        await kernel.send("s")
    data = export(store, "s")
    before = rows(beside)
    with pytest.raises(SessionActive, match="--resume"):
        await load(beside, data)
    assert rows(beside) == before
    assert await load(beside, data, resume=True) is True
    async with k.running(beside, tmp_path, server=server) as kernel:
        assert (await kernel.end("s"))["status"] == "completed"
        assert len(k.notes(path)) == 1


async def with_code(kernel: k.Kernel, session_id: str, path: Path, *replies: Any, **fields: Any) -> None:
    """Create a session whose tool and hook travel by value; the tool leaves a mark in the file."""
    marked = str(path)

    @tool(on_crash="rerun")
    def mark() -> str:
        """Leave a mark."""
        with open(marked, "a") as file:
            file.write("ran\n")
        return "marked"

    @hook("before_tool")
    def watch(context: HookContext) -> None:
        """Look on."""

    @memory_provider
    def customers(context: MemoryContext) -> str | None:
        """Know nobody."""

    agents = [AgentSpec(name="helper", tools=[mark])]
    spec = AgentSpec(
        name="a", model="offline", tools=[mark, "spawn_agent"], hooks=[watch], agents=agents,
        memory=Memory(providers=[customers]),
        instructions=k.script(*replies), **fields,
    )  # fmt: skip
    compiled = compile_spec(spec, model="offline", profile=None)
    placements = place(compiled.spec, {})
    session = {"session_id": session_id, "placement": compiled.spec["placement"], "metadata": {}, "spec": compiled.spec}
    await kernel.ask("spawn", session, {**compiled.blobs, **placements})


async def test_code_comes_in_only_where_somebody_trusts_it(
    store: str, beside: str, tmp_path: Path, server: OfflineServer
) -> None:
    """Given an archive that has code by value, then it is refused with the names of what would run, and nothing is
    imported; for who trusts it, it is taken in and its tools run."""
    path = tmp_path / "marks"
    async with k.running(store, tmp_path, server=server) as kernel:
        await with_code(kernel, "s", path, [("mark", {})], "done", [("mark", {})], "done")
        await kernel.send("s")
        assert (await kernel.end("s"))["status"] == "completed"
    data, before = export(store, "s"), rows(beside)
    with pytest.raises(UntrustedCode, match=r"session s: .*--trust-code") as caught:
        await load(beside, data)
    assert caught.value.details["code"] == {
        "s": ["the hook watch by value", "the memory provider customers by value", "the tool mark by value"]
    }
    assert rows(beside) == before
    path.unlink()
    assert await load(beside, data, trust_code=True) is True
    assert await load(beside, data) is False
    async with k.running(beside, tmp_path, server=server) as kernel:
        await kernel.send("s", "again", "second")
        assert (await kernel.end("s", "second"))["status"] == "completed"
    assert path.read_text() == "ran\n"


PLACEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "resources": ({"resources": {"GPU": 1}, "labels": {"zone": "a"}, "isolation": "process"}, ""),
    "no code of its own": ({"code_path": [], "runtime_env": {}}, ""),
    "a directory": ({"code_path": ["/work/job"], "runtime_env": {}}, "code in /work/job"),
    "packages": ({"runtime_env": {"pip": ["x"], "env_vars": {"A": "1"}}}, "a runtime environment (env_vars, pip)"),
    "secrets": ({"environment": ["DB_PASS", "LEDGER"]}, "tools that see DB_PASS, LEDGER"),
}


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("whose", ["its own", "a sub-agent's", "the next", "the store's"])
def test_where_a_session_would_run_is_a_matter_of_trust(kind: str, whose: str) -> None:
    """What its processes need of machines is not; what they run, find code in, and see of the node's variables is: its
    own, a sub-agent's, that of a specification that waits, or one that the store has already."""
    definition, reported = PLACEMENTS[kind]
    key, data = placement_key(definition), json.dumps(definition).encode()
    agent = {"agents": {}, "placement": key}
    row = {"session_id": "s", "spec": {"agents": {"a": agent}} if whose == "a sub-agent's" else {"agents": {}},
           "placement": key if whose in ("its own", "the store's") else "",
           "next_spec": {"spec": agent, "placement": key} if whose == "the next" else None}  # fmt: skip
    own = {} if whose == "the store's" else {key: data}
    assert trust.brought([row], own, {key: data}.get) == ({"s": [reported]} if reported else {})


def test_code_that_nobody_needs_is_not_taken_in() -> None:
    """Nor a definition under the key of another, which the store's own sessions would then be placed by."""
    row = {"session_id": "s", "spec": {"agents": {}}, "placement": "", "next_spec": None}
    assert trust.brought([row], {"x": b"y"}, {}.get) == {"": ["code that no session needs (1)"]}
    row["placement"] = "another"
    assert trust.brought([row], {"another": b"{}"}, {"another": b"{}"}.get) == {
        "s": ["a placement under the key of another"]
    }


@pytest.mark.thorough
async def test_a_question_can_be_answered_elsewhere(
    store: str, beside: str, tmp_path: Path, server: OfflineServer
) -> None:
    """An archive of a session that waits for a person has what it asks; it is answered where the work goes on. An
    archive of a version that had no questions is taken in as it is."""
    question = ("request_user_input", {"prompt": "Well?", "options": ["yes"]})
    async with k.running(store, tmp_path, server=server) as kernel:
        await kernel.spawn("s", k.spec(k.script([question], "done"), ["request_user_input"]))
        await kernel.send("s")
        asked = await kernel.paused("s")
        await kernel.run("old", k.spec())
    old = json.loads(export(store, "old"))
    del old["sessions"][0]["question"], old["sessions"][0]["session"]["aborted"]
    assert await load(beside, sealed(old)) is True
    assert await load(beside, export(store, "s"), resume=True) is True
    async with k.running(beside, tmp_path, server=server) as kernel:
        assert await kernel.ask("read", "questions", ["s"], {}) == asked
        assert await kernel.ask("answer", "s", "r/1/0", "ok", "yes", 1)
        assert (await kernel.end("s"))["status"] == "completed"


async def test_notes_come_along(store: str, beside: str, tmp_path: Path, server: OfflineServer) -> None:
    """An archive has a session's notes, its todo list and its board; its agent's notes stay where they are."""
    calls = [
        ("add_note", {"text": "mine", "key": "a", "pinned": True}),
        ("add_note", {"text": "ours", "key": "b", "scope": "agent"}),
        ("post_to_board", {"key": "c", "text": "all"}),
        ("todo", {"items": [{"text": "buy", "status": "pending"}]}),
    ]
    async with k.running(store, tmp_path, server=server) as kernel:
        compiled = k.spec(k.script(calls, "done"), ["notes", "board", "todo"])
        assert (await kernel.run("s", compiled))["status"] == "completed"
    assert await load(beside, export(store, "s")) is True
    with opened(beside) as there, there.read() as imported, opened(store) as here, here.read() as original:
        for scope in ("session", "tree"):
            found = queries.notes(imported, "tests", scope, "s")
            assert found == queries.notes(original, "tests", scope, "s") != []
        kept = imported.execute(text("SELECT scope, key FROM note ORDER BY scope, key")).all()
    assert [tuple(row) for row in kept] == [
        ("session", ""), ("session", "a"), ("session", "~todo"), ("tree", ""), ("tree", "c")
    ]  # fmt: skip


@pytest.mark.thorough
async def test_waits_and_wakeups_go_on_elsewhere(
    store: str, beside: str, tmp_path: Path, server: OfflineServer
) -> None:
    """An archive of an idle session has its wakeups, one of a session that waits its timer; what became due meanwhile
    happens at once where it is imported, also on another node."""
    tools = ["wait", "schedule_wakeup"]
    async with k.running(store, tmp_path, server=server) as kernel:
        await kernel.spawn("waits", k.spec(k.script([("wait", {"seconds": SOON})], "done"), tools))
        await kernel.send("waits")
        await kernel.until("waits", "timer_set")
        await kernel.spawn("sleeps", k.spec("", tools))
        for name, seconds in (("soon", SOON), ("later", 3600)):
            wakeup = {"name": name, "prompt": name, "seconds": seconds, "every": 1000}
            await kernel.ask("schedule", "sleeps", wakeup)
        before = await kernel.ask("read", "wakeups", ["sleeps"], {})
        waits, sleeps = export(store, "waits"), export(store, "sleeps")
    await asyncio.sleep(max(0.0, before[0]["due_at"] / 1e6 - time.time()))
    assert await load(beside, waits, resume=True) is True
    assert await load(beside, sleeps) is True
    with opened(beside) as database, database.read() as connection:
        assert packed(queries.wakeups(connection, "tests", "sleeps")) == before
    async with k.running(beside, tmp_path, server=server) as kernel:
        assert (await kernel.end("waits"))["status"] == "completed"
        await kernel.until("sleeps", "run_finished")
        assert (await kernel.end("sleeps", f"wakeup.soon.{before[0]['due_at']}"))["text"] == "offline: soon"
        assert [row["name"] for row in await kernel.ask("read", "wakeups", ["sleeps"], {})] == ["soon", "later"]


@pytest.mark.parametrize("made", ["before", "while services run", "later"])
async def test_who_waits_in_a_queue_begins_elsewhere(
    store: str, beside: str, tmp_path: Path, server: OfflineServer, made: str
) -> None:
    """An archive of a session whose input waits in a queue is taken in, before services run or while they do; it begins
    where there is room in the queue of that name, and otherwise once somebody makes that."""
    async with k.running(store, tmp_path, server=server) as kernel:
        await kernel.ask("set_queue", {"name": "q", "concurrency": 1})
        await kernel.ask("pause_queue", "q", True)
        await kernel.spawn("s", k.spec())
        for run_id in ("r", "r2"):
            await kernel.ask("send", "s", {"run_id": run_id, "content": "go", "place": {"queue": "q"}})
        waits = export(store, "s")
    if made == "before":
        async with k.running(beside, tmp_path, server=server) as kernel:
            await kernel.ask("set_queue", {"name": "q", "concurrency": 1})
    if made != "while services run":
        assert await load(beside, waits, resume=True) is True
    async with k.running(beside, tmp_path, server=server) as kernel:
        if made == "later":
            assert (await kernel.info("s"))["status"] == "waiting_for_queue"
        if made != "before":
            await kernel.ask("set_queue", {"name": "q", "concurrency": 1})
        if made == "while services run":
            assert await load(beside, waits, resume=True) is True
            await kernel.service.sweep.run(0)
        assert [(await kernel.end("s", run_id))["status"] for run_id in ("r", "r2")] == ["completed"] * 2
        kernel.check()


@pytest.mark.thorough
@pytest.mark.parametrize("lifecycle", ["ephemeral", "linked", "detached"])
async def test_a_sub_agent_at_work_goes_on_alone(
    store: str, beside: str, tmp_path: Path, server: OfflineServer, lifecycle: str
) -> None:
    """A sub-agent that is imported without its parent while it is at work is a session of its own: its run ends."""
    child = {**CHILD, "lifecycle": lifecycle}
    compiled = k.spec(k.script(SPAWN, "both seen"), ["spawn_agent"], agents={"child": child})
    async with k.running(store, tmp_path, server=server, frames=1) as kernel:
        await kernel.spawn("lead", compiled)
        await kernel.send("lead")
        await kernel.until("lead", "child_spawned", 1)
        await kernel.stop_frames()
        kids = [row for row in await kernel.ask("read", "tree", ["lead"], {}) if row["session_id"] != "lead"]
        kid = next(row["session_id"] for row in kids)
    assert await load(beside, export(store, kid, tree=False), resume=True) is True
    async with k.running(beside, tmp_path, server=server) as kernel:
        assert (await kernel.end(kid, "task"))["status"] == "completed"
        kernel.check()


@pytest.mark.thorough
async def test_a_parent_that_waits_needs_its_children(
    store: str, beside: str, tmp_path: Path, server: OfflineServer
) -> None:
    """A session that waits for sub-agents can't be imported without them; with them it ends right."""
    compiled = k.spec(k.script(SPAWN, "both seen"), ["spawn_agent"], agents={"child": CHILD})
    async with k.running(store, tmp_path, server=server, frames=1) as kernel:
        points: list[int] = []

        def stop(number: int, label: str, worker: k.Worker | None) -> None:
            points.append(number)
            if label == "after the commit" and kernel.service.frames.paging.ready and len(points) > 4:
                for other_worker in list(kernel.workers.values()):
                    kernel.kill(other_worker, replace=False)

        kernel.on_point = stop
        await kernel.spawn("lead", compiled)
        await kernel.send("lead")
        await kernel.until("lead", "child_spawned", 2)
    with pytest.raises(InvalidArchive, match="--tree"):
        await load(beside, export(store, "lead", tree=False), resume=True)
    assert await load(beside, export(store, "lead"), resume=True) is True
    async with k.running(beside, tmp_path, server=server) as kernel:
        ended = await kernel.end("lead")
        assert (ended["status"], ended["text"]) == ("completed", "both seen")


async def test_what_was_measured_is_not_measured_again(
    tree: str, other: str, tmp_path: Path, server: OfflineServer
) -> None:
    """Events of an import neither count in the metrics nor become spans where they are imported."""
    await load(other, export(tree, "lead"))
    async with k.running(other, tmp_path, server=server) as kernel:
        assert kernel.service.projection.metrics.writer_seq == 0


@pytest.mark.parametrize("cut", [0.0, 0.1, 0.5, 0.99])
async def test_a_file_that_was_cut_off(tree: str, other: str, cut: float) -> None:
    """However much is missing, the archive is refused and nothing is imported."""
    data, before = export(tree, "lead"), rows(other)
    with pytest.raises(InvalidArchive):
        await load(other, data[: int(len(data) * cut)])
    assert rows(other) == before


async def test_a_file_that_was_changed(tree: str, other: str) -> None:
    """One other byte, anywhere, is noticed."""
    data = export(tree, "lead")
    for position in range(30, len(data) - 3, 97):
        changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        with pytest.raises(InvalidArchive):
            archive.read(changed, "file")


def test_other_files_are_no_archives() -> None:
    """Texts, other JSON and nothing at all are refused with the name of the file."""
    for data in (b"", b"my notes", b"{}", b'{"format":"other"}', b"\xff\xfe", b"[1]"):
        with pytest.raises(InvalidArchive, match=r"notes\.txt"):
            archive.read(data, "notes.txt")


@pytest.mark.parametrize("field", ["version", "schema"])
async def test_an_archive_of_a_newer_version(tree: str, other: str, field: str) -> None:
    """It is refused as such, and says what to do."""
    document = json.loads(export(tree, "lead"))
    document[field] += 1
    before = rows(other)
    with pytest.raises(ArchiveVersion, match="Upgrade"):
        await load(other, sealed(document))
    assert rows(other) == before


MISTAKES: dict[str, Any] = {
    "no sessions": lambda d: d.update(sessions=[]),
    "sessions is no list": lambda d: d.update(sessions=7),
    "a session without rows": lambda d: d["sessions"][0].pop("message"),
    "an unknown column": lambda d: d["sessions"][0]["session"].update(evil=1),
    "a row of another session": lambda d: d["sessions"][0]["message"][0].update(session_id="x"),
    "an id that is none": lambda d: d["sessions"][0]["session"].update(session_id="a b"),
    "a child before its parent": lambda d: d["sessions"].reverse(),
    "a session twice": lambda d: d["sessions"].append(d["sessions"][0]),
    "code that is no base64": lambda d: d["code"].update(x="!"),
    "a message less": lambda d: d["sessions"][0]["message"].pop(),
    "a message twice": lambda d: d["sessions"][0]["message"].append(d["sessions"][0]["message"][0]),
    "a budget made up": lambda d: d["sessions"][0]["account"][-1].update(spent=-5),
    "tokens made up": lambda d: d["sessions"][0]["session"].update(tokens_used=10**9),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_an_archive_that_was_edited(tree: str, tmp_path: Path, mistake: str) -> None:
    """Also with the right checksum: rows that don't fit together are refused, and nothing is imported."""
    document, other = json.loads(export(tree, "lead")), f"sqlite:///{tmp_path}/other.db"
    MISTAKES[mistake](document)
    before = rows(other)
    with pytest.raises((InvalidArchive, StoreError)):
        await load(other, sealed(document))
    assert rows(other) == before


def test_a_session_that_is_not_there(store: str) -> None:
    """There is nothing to export."""
    with pytest.raises(UnknownSession):
        export(store, "nobody")


async def test_a_namespace_of_its_own(tree: str, other: str) -> None:
    """An archive has no namespace: it goes where it is imported."""
    data = export(tree, "lead")
    for namespace in ("a", "b"):
        assert await load(other, data, namespace=namespace) is True
        assert content(other, "lead", namespace)["messages"] == content(tree, "lead")["messages"]


def test_errors_are_of_one_tree() -> None:
    """Scripts can rely on the codes."""
    codes = [kind.code for kind in (InvalidArchive, ArchiveVersion, SessionActive, UntrustedCode)]
    assert codes == ["invalid_archive", "archive_version", "session_active", "untrusted_code"]
    assert issubclass(InvalidArchive, UnderstudyError)


async def test_a_parent_without_its_children_is_imported_too(tree: str, other: str) -> None:
    """A session whose sub-agents have ended goes alone: without `--tree` its transcript is complete."""
    assert await load(other, export(tree, "lead", tree=False)) is True
    assert content(other, "lead")["messages"] == content(tree, "lead")["messages"]
    with opened(other) as database, database.snapshot() as connection:
        assert check(connection, "tests") == []


@pytest.mark.thorough
async def test_an_archive_that_is_ahead_of_the_store(
    store: str, beside: str, tmp_path: Path, server: OfflineServer
) -> None:
    """Given an import whose original went on, then a later archive of it is a conflict, and not passed over."""
    async with k.running(store, tmp_path, server=server) as kernel:
        await kernel.run("s", k.spec(k.script("one", "two")))
        await load(beside, export(store, "s"))
        await kernel.send("s", "more", "second")
        await kernel.end("s", "second")
    before = rows(beside)
    with pytest.raises(SessionConflict, match="ahead"):
        await load(beside, export(store, "s"))
    assert rows(beside) == before


async def test_any_text_can_be_archived(store: str, beside: str, tmp_path: Path, server: OfflineServer) -> None:
    """An input with NUL and unpaired surrogates, as a shell can pass it, is run, exported and imported."""
    async with k.running(store, tmp_path, server=server) as kernel:
        await kernel.spawn("s", k.spec(k.script("fine")))
        await kernel.send("s", "caf\udce9 \x00 \U0001f600")
        assert (await kernel.end("s"))["status"] == "completed"
    assert await load(beside, export(store, "s")) is True
    assert content(beside, "s")["messages"] == content(store, "s")["messages"]


async def test_an_import_is_young(tree: str, other: str) -> None:
    """Retention by age counts from the import, not from the last change at the source."""
    began = now()
    await load(other, export(tree, "lead"))
    assert content(tree, "lead")["messages"][-1]["created_at"] < began
    with opened(other) as database, database.read() as connection:
        assert retention.finished_trees(connection, "tests", began) == []
