"""A store that an earlier version left behind is brought up to date, and every session in it goes on.

`tests/store/data/schema_13.json` has the rows of a store of schema 13, the last one before long histories, memory,
approvals, steering and sub-agents in the background, and the model calls that were in flight in it. That version's own
kernel wrote it: its node was lost while sessions were at work, waited and rested.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from understudy import AgentSpec, Context, Memory
from understudy.cluster.client.compiling import compile_spec
from understudy.errors import SessionClosed
from understudy.identifiers import child_identifier
from understudy.messages import INTERRUPTED
from understudy.store.check.check import check
from understudy.store.db import schema
from understudy.store.db.engine import Database
from understudy.store.journal import Journal
from understudy.store.reads import queries
from understudy.store.upkeep import archive
from understudy.testing.offline import OfflineServer, Reply, default_policy
from understudy.testing.policies import content_text

from ..store.test_schema import at_version
from . import kernel as k

pytestmark = pytest.mark.conformance

WRITTEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "store" / "data" / "schema_13.json").read_text())
FINISHED_KID, KID_AT_WORK = (child_identifier("lead", f"r/1/{index}") for index in range(2))
LINKED_KID = child_identifier("parent", "r/1/0")


def insert(connection: Connection) -> None:
    """The rows as they were written."""
    for table, found in WRITTEN["rows"].items():
        names = ["namespace", *found["columns"]]
        marks = ", ".join(f":{name}" for name in names)
        columns = ", ".join(f'"{name}"' for name in names)
        statement = text(f"INSERT INTO {table} ({columns}) VALUES ({marks})")
        for row in found["rows"]:
            connection.execute(statement, dict(zip(names, ["tests", *row], strict=True)))


@pytest.fixture
def earlier(bare_store: str) -> str:
    """The store as the earlier version left it."""
    database = Database(bare_store)
    at_version(database, WRITTEN["schema"])
    with database.writer.begin() as connection:
        insert(connection)
    database.close()
    return bare_store


def of(table: str, session_id: str) -> list[dict[str, Any]]:
    """A session's rows as they were written, with their JSON read."""
    found = WRITTEN["rows"].get(table, {"columns": [], "rows": []})
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    return [row for row in rows if row.get("session_id") == session_id]


def test_what_was_written_has_nothing_of_where_it_was_written() -> None:
    """No path but those of tests, no process, no variable of a machine."""
    written = json.dumps(WRITTEN)
    assert not any(place in written for place in ("/home/", "/root/", "/tmp/", "/Users/", "@"))
    columns = WRITTEN["rows"]["session"]["columns"]
    places = [columns.index(name) for name in ("frame_id", "actor_pid")]
    assert {row[place] for row in WRITTEN["rows"]["session"]["rows"] for place in places} == {None}


def test_the_migration_keeps_the_books(earlier: str) -> None:
    """All that is missing is applied at once, and the store that it makes breaks no rule of the check."""
    with k.opened(earlier) as database, database.snapshot() as connection:
        versions = connection.execute(text("SELECT version FROM schema_migration ORDER BY version")).scalars().all()
        assert versions == list(range(1, schema.newest() + 1))
        assert check(connection, "tests") == []
        assert len(queries.messages(connection, "tests", "rested")) == len(of("message", "rested"))


async def test_every_session_goes_on(earlier: str, tmp_path: Path, server: OfflineServer) -> None:
    """Those at work end, byte for byte by the model calls that were in flight; those that wait are answered or find
    their time over; those at rest begin with their next input."""
    async with k.running(earlier, tmp_path, server=server) as kernel:
        assert (await kernel.ask("read", "questions", ["asking"], {}))[0]["prompt"] == "Well?"
        await kernel.ask("answer", "asking", "r/1/0", "ok", "yes", 1)
        ended = {name: await kernel.end(name) for name in ("calling", "tooling", "waiting", "asking", "lead")}
        queued = [await kernel.end("queued", run_id) for run_id in ("r1", "r2")]
        await kernel.until("sleeper", "run_finished")
        results = {name: [m["content"] for m in await kernel.messages(name) if m["role"] == "tool"] for name in ended}
        for name in ("rested", "failed", "parent", FINISHED_KID, LINKED_KID):
            await kernel.send(name, "and now?", "next")
        after = {name: await kernel.end(name, "next") for name in ("rested", "parent", FINISHED_KID, LINKED_KID)}
        assert (await kernel.end("failed", "next"))["error"]["code"] == "round_limit"
        with pytest.raises(SessionClosed):
            await kernel.send("closed", "anybody?", "next")
    assert {name: (row["status"], row["text"]) for name, row in ended.items()} == {
        "calling": ("completed", "called"),
        "tooling": ("completed", "told"),
        "waiting": ("completed", "waited"),
        "asking": ("completed", "thanks"),
        "lead": ("completed", "both heard"),
    }
    assert results["tooling"] == [INTERRUPTED]
    assert [row["status"] for row in (*queued, *after.values())] == ["completed"] * 6
    asked = [json.dumps(request.body, sort_keys=True) for request in server.requests]
    for wanted in WRITTEN["in_flight"]:
        assert asked.count(json.dumps(wanted, sort_keys=True)) == 1


def acknowledge(body: dict[str, Any]) -> Reply:
    """Plays the agent's script for what a person says; news of a sub-agent are acknowledged."""
    last = next(content_text(m) for m in reversed(body["messages"]) if m["role"] == "user")
    return Reply(text="noted") if "scout" in last else default_policy(body)


async def test_its_sessions_have_what_is_new(earlier: str, tmp_path: Path) -> None:
    """Given a session of the earlier version, then it can be forked, have notes, ask for approvals, merge inputs and
    start sub-agents in the background, once it goes on under a specification that says so."""
    calls = [("start_agent", {"task": "look", "agent": "scout"}), ("add_note", {"text": "seen"})]
    newer = AgentSpec(
        name="agent", model="offline", tools=["agents", "notes"], approve=("add_note",), follow_ups="merge",
        on_change="migrate", memory=Memory(scopes=("session",)), context=Context(window=8_000),
        agents=[AgentSpec(name="scout", instructions=k.script("found"))], instructions=k.script(calls, "started"),
    )  # fmt: skip
    with OfflineServer(acknowledge) as server:
        async with k.running(earlier, tmp_path, server=server, frames=0) as kernel:
            await kernel.ask("set_note", "rested", {"key": "plan", "text": "go on", "pinned": True})
            last = (await kernel.messages("rested"))[-1]["seq"]
            await kernel.ask("fork", "rested", {"session_id": "forked", "at": last})
            await kernel.spawn("rested", compile_spec(newer, model="offline", profile=None).spec)
            for number in range(2):
                await kernel.send("rested", f"more {number}", f"next{number}")
            await kernel.send("forked")
            for _ in range(2):
                kernel.add_frame()
            (question,) = await kernel.paused("rested")
            said = {"call_id": "next0/1/1", "asked": 1, "decision": "approve", "text": "", "remember": "tool"}
            await kernel.ask("decide", "rested", [said])
            ended = [await kernel.end("rested", run_id) for run_id in ("next0", "next1")]
            await kernel.until("rested", "child_finished")
            assert (await kernel.end("forked"))["status"] == "completed"
            shown = [message for message in await kernel.messages("rested") if message.get("origin") == "memory"]
    assert (question["kind"], question["call_id"]) == ("approval", "next0/1/1")
    assert [(row["status"], row.get("merged_into", "")) for row in ended] == [("completed", ""), ("completed", "next0")]
    assert "go on" in shown[0]["content"]


async def test_its_archives_are_taken_in(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """An archive that the earlier version made of a tree at work has what its tables had; it goes on here, by the very
    requests."""
    ids = ["lead", FINISHED_KID, KID_AT_WORK]
    json_columns = {"spec", "metadata_json", "error", "content", "body", "payload", "usage", "run_usage", "result",
                    "output", "options", "answer", "deaths", "cancel_as", "held", "group_state", "wait_error",
                    "next_spec"}  # fmt: skip

    def read(row: dict[str, Any]) -> dict[str, Any]:
        return {
            name: json.loads(value) if name in json_columns and isinstance(value, str) else value
            for name, value in row.items()
        }

    parts = ("run", "message", "event", "tool_call", "inbox", "account", "reservation", "timer", "question")
    sessions = [
        {"session": read(of("session", name)[0]), **{part: [read(row) for row in of(part, name)] for part in parts}}
        for name in ids
    ]
    document = {"format": "understudy-archive", "version": 1, "schema": WRITTEN["schema"], "exported_at": 1}
    body = json.dumps({**document, "sessions": sessions, "code": {}}, separators=(",", ":"))[:-1].encode() + b","
    data = body + b'"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    with k.opened(store) as database:
        journal = Journal(database, "tests", "import", lambda committed: None)
        journal.start()
        read_archive = archive.read(data, "file")
        assert await journal.submit(lambda tx: archive.load(tx, read_archive, resume=True)) is True
        await journal.close()
    async with k.running(store, tmp_path, server=server) as kernel:
        ended = await kernel.end("lead")
    assert (ended["status"], ended["text"]) == ("completed", "both heard")
    asked = [json.dumps(request.body, sort_keys=True) for request in server.requests]
    assert sum(asked.count(json.dumps(wanted, sort_keys=True)) for wanted in WRITTEN["in_flight"]) == 1
