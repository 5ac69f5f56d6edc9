"""Notes in the store: retention, and two journals that write one board at once."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from understudy.actors.providers import describe_provider, memory_provider
from understudy.notes import POST_TO_BOARD, READ_BOARD, UPDATE_BOARD
from understudy.records import Ask
from understudy.store.operations import notes
from understudy.store.operations.trust import brought
from understudy.store.reads import queries
from understudy.store.transaction import Transaction
from understudy.store.upkeep import retention
from understudy.testing.offline import OfflineServer

from ..kernel import kernel as k
from .test_retention import do, export_all, violations
from .test_store import opened

pytestmark = pytest.mark.conformance

CALLS = [
    ("add_note", {"text": "mine", "key": "a", "pinned": True}),
    ("add_note", {"text": "ours", "key": "b", "scope": "agent"}),
    ("post_to_board", {"key": "c", "text": "all"}),
    ("todo", {"items": [{"text": "buy", "status": "pending"}]}),
]


async def noted(store: str, directory: Path, server: OfflineServer) -> None:
    """A session that has written in each scope."""
    async with k.running(store, directory, server=server) as kernel:
        compiled = k.spec(k.script(CALLS, "done"), ["notes", "board", "todo"])
        assert (await kernel.run("s", compiled))["status"] == "completed"
        await export_all(kernel)


def kept(store: str) -> list[tuple[str, ...]]:
    """Scope and key of each row."""
    with k.opened(store) as database, database.read() as connection:
        rows = connection.execute(text("SELECT scope, key FROM note ORDER BY scope, key")).all()
        return [tuple(row) for row in rows]


async def test_an_agents_notes_outlive_its_sessions(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """With a tree its sessions' notes and its board go; those of its agent stay."""
    await noted(store, tmp_path, server)
    await do(store, lambda tx: retention.drop_tree(tx, "s"))
    assert kept(store) == [("agent", ""), ("agent", "b")]
    assert violations(store) == []


async def test_a_note_of_a_removed_session_is_not_anothers(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """Given an id that is used again, then the new session has no notes."""
    await noted(store, tmp_path, server)
    await do(store, lambda tx: retention.drop_tree(tx, "s"))
    async with k.running(store, tmp_path, server=server) as kernel:
        await kernel.spawn("s", k.spec())
        assert await kernel.ask("read", "notes", ["session", "s"], {}) == []


def asked(kind: str, **arguments: Any) -> Ask:
    return Ask("r/1/0", kind, "", arguments=arguments)


async def test_two_journals_write_one_board(store: str) -> None:
    """Given two journals that each add one to an entry 20 times, under the version that they have read, then none of it
    is lost, and no version is used twice."""
    async with AsyncExitStack() as stack:
        journals = [await stack.enter_async_context(opened(store, writer=f"w{number}")) for number in range(2)]
        for number, one in enumerate(journals):
            await one.create(f"s{number}")

        async def ask(one: Any, session_id: str, wanted: Ask) -> tuple[str, str]:
            def operation(tx: Transaction) -> tuple[str, str]:
                row = tx.session(session_id)
                row.root_id = "s0"  # both are of one tree
                return notes.answer(tx, row, wanted)

            found: tuple[str, str] = await one.do(operation)
            return found

        await ask(journals[0], "s0", asked(POST_TO_BOARD, key="n", text="0"))

        async def add(one: Any, session_id: str) -> None:
            done = 0
            while done < 20:
                _, said = await ask(one, session_id, asked(READ_BOARD))
                version, value = map(int, re.findall(r"\d+", said))
                update = asked(UPDATE_BOARD, key="n", text=str(value + 1), expected_version=version)
                done += (await ask(one, session_id, update))[0] == "ok"

        await asyncio.gather(add(journals[0], "s0"), add(journals[1], "s1"))
        [note] = journals[0].read(queries.notes, "tree", "s0")
        assert (note.text, note.version) == ("40", 41)


def test_an_archive_says_that_it_brings_a_provider() -> None:
    """A memory provider by value is code, as a tool's is."""

    @memory_provider
    def local(_context: Any) -> str:
        return "x"

    provider, blobs = describe_provider(local, pickle=lambda _: b"code")
    row = {"session_id": "s", "spec": {"memory": {"providers": [provider]}}, "placement": ""}
    assert brought([row], blobs, lambda _: None) == {"s": ["the memory provider local by value"]}
