"""Forks: sessions of their own that begin with copies of another one's messages."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from understudy.errors import InvalidInput, SessionConflict, UnknownSession
from understudy.store.db.engine import Database
from understudy.store.db.statements import ACCOUNT
from understudy.store.journal import Journal
from understudy.store.operations import activation
from understudy.store.upkeep import archive

from . import kernel as k

pytestmark = pytest.mark.conformance

BUDGET = [{"scope": "session", "tokens": 50_000, "rounds": 3}, {"scope": "run", "rounds": 3}]


def compiled(path: Path, **more: Any) -> dict[str, Any]:
    """A round with two calls, and an answer."""
    calls = [("look", {"path": str(path), "text": text}) for text in ("one", "two")]
    return k.spec(k.script(calls, "all done"), [k.look], **more)


async def fork(kernel: k.Kernel, at: int, fork_id: str = "f", session_id: str = "s") -> bool:
    """True if it was made."""
    found = await kernel.ask("fork", session_id, {"session_id": fork_id, "at": at})
    return bool(found["created"])


async def places(kernel: k.Kernel, session_id: str = "s") -> list[int]:
    """The `seq` of each message."""
    return [message["seq"] for message in await kernel.messages(session_id)]


def plain(messages: list[dict[str, Any]]) -> list[Any]:
    """What of messages is the same in a copy."""
    return [(m["seq"], m["role"], m["content"], m["created_at"], m["round"]) for m in messages]


async def test_a_fork_begins_with_the_messages_and_goes_on_by_itself(store: str, tmp_path: Path) -> None:
    """Given a session that has had a run, when it is forked at its end and both get an input, then the fork's model is
    sent the very bytes that the original's is, and each goes on alone; the books balance."""
    async with k.running(store, tmp_path) as kernel:
        await kernel.run("s", compiled(tmp_path / "notes"))
        seqs = await places(kernel)
        assert await fork(kernel, seqs[-1])
        assert plain(await kernel.messages("f")) == plain(await kernel.messages("s"))
        kernel.check()
        for session_id in ("s", "f"):
            await kernel.send(session_id, "and now?", run_id="q")
            assert (await kernel.end(session_id, "q"))["status"] == "completed"
        first, second = [json.dumps(request.body["messages"]) for request in kernel.server.requests][-4::2]
        assert first == second
        assert len(await kernel.messages("s")) == len(await kernel.messages("f")) == len(seqs) + 5
        [created] = [e["data"] for e in await kernel.events("f") if e["type"] == "session_created"]
        assert (created["forked_from"], created["forked_at"]) == ("s", seqs[-1])
        info = await kernel.info("f")
        assert info["metadata_json"] == {"forked_from": "s", "forked_at": str(seqs[-1])}
        assert (info["parent_id"], info["root_id"], info["restarts"]) == (None, "f", 0)


async def test_an_input_is_edited_by_a_fork_before_it(store: str, tmp_path: Path) -> None:
    """Given two runs, when the session is forked before the second input, or before the first, and another one is sent,
    then the fork has that instead; run ids of the original are free in it."""
    async with k.running(store, tmp_path) as kernel:
        await kernel.run("s", k.spec(), "one")
        await kernel.send("s", "two", run_id="q")
        await kernel.end("s", "q")
        seqs = await places(kernel)
        for at, fork_id, before in ((seqs[1], "f", ["one", "offline: one"]), (0, "g", [])):
            await fork(kernel, at, fork_id)
            assert await kernel.send(fork_id, "three", run_id="q")
            await kernel.end(fork_id, "q")
            assert [m["content"] for m in await kernel.messages(fork_id)] == [*before, "three", "offline: three"]
        assert await kernel.send("f", "four", run_id="r")
        assert (await kernel.end("f", "r"))["status"] == "completed"


async def test_a_round_is_not_split(store: str, tmp_path: Path) -> None:
    """Given a round with two calls, when the session is to be forked within it, or where no message is, then that is
    refused with the nearest places, and nothing is made."""
    async with k.running(store, tmp_path) as kernel:
        await kernel.run("s", compiled(tmp_path / "notes"))
        user, asked, one, two, answer = await places(kernel)
        for at, near in ((asked, [user, two]), (one, [user, two]), (user - 1, [0, user]), (answer + 9, [answer])):
            with pytest.raises(InvalidInput) as refused:
                await fork(kernel, at)
            assert refused.value.details["allowed"] == near, at
        for at in (user, two, answer):
            assert await fork(kernel, at, f"f{at}")
        with pytest.raises(UnknownSession):
            await kernel.info("f")
        with pytest.raises(UnknownSession):
            await fork(kernel, 0, "f", "nobody")


async def test_the_same_fork_is_made_once(store: str, tmp_path: Path) -> None:
    """Given a fork, when it is asked for again, then it is found; the same id for another origin or another place, or
    that of a session that is no fork, is a conflict."""
    async with k.running(store, tmp_path) as kernel:
        await kernel.run("s", k.spec())
        await kernel.run("t", k.spec())
        user, answer = await places(kernel)
        assert await fork(kernel, answer)
        assert not await fork(kernel, answer)
        for at, fork_id, session_id in ((user, "f", "s"), (answer, "f", "t"), (answer, "t", "s"), (answer, "s", "s")):
            with pytest.raises(SessionConflict):
                await fork(kernel, at, fork_id, session_id)
        assert len(await kernel.messages("f")) == 2


async def test_a_session_is_forked_whatever_it_is_at(store: str, tmp_path: Path) -> None:
    """Given a session that is at work, closed, or given up, then it can be forked, and the fork accepts input."""
    async with k.running(store, tmp_path) as kernel:
        begun, may_end = k.held_at_effect(kernel)
        await kernel.spawn("s", compiled(tmp_path / "notes"))
        await kernel.send("s")
        await begun.wait()
        [user, _asked] = await places(kernel)
        await fork(kernel, user, "at-work")
        may_end.set()
        await kernel.end("s")
        await kernel.ask("close", "s", "enough")
        await fork(kernel, user, "closed")
        await kernel.run("t", k.spec())
        given_up = kernel.service.journal
        await Journal.submit_all(
            given_up, [lambda tx: activation.quarantine(tx, tx.session("t"), "no_progress", "said so")], "t"
        )
        await fork(kernel, (await places(kernel, "t"))[-1], "given-up", "t")
        for fork_id in ("at-work", "closed", "given-up"):
            await kernel.send(fork_id, "on", run_id="on")
            assert (await kernel.end(fork_id, "on"))["status"] == "completed"


async def test_what_was_used_is_not_charged_to_a_fork(store: str, tmp_path: Path) -> None:
    """Given a session under budgets that has used them up, when it is forked, then the fork's accounts begin at
    nothing: it has as many rounds and tokens as the original had."""
    async with k.running(store, tmp_path) as kernel:
        await kernel.run("s", compiled(tmp_path / "notes", budget=BUDGET))
        await kernel.send("s", "go", run_id="q")
        assert (await kernel.end("s", "q"))["status"] == "budget_exceeded"
        await fork(kernel, (await places(kernel))[3])
        kernel.check()
        with closing(Database(store)) as database, database.read() as connection:
            spent = select(ACCOUNT.c.spent).where(ACCOUNT.c.session_id == "f")
            assert set(connection.execute(spent).scalars()) == {0}
        await kernel.send("f", "go", run_id="q")
        run = await kernel.end("f", "q")
        assert (run["status"], run["rounds"]) == ("completed", 2)
        assert (await kernel.info("f"))["tokens_used"] == sum(run["usage"][:2])


async def test_a_fork_of_a_fork_and_its_archive(store: str, tmp_path: Path) -> None:
    """Given a fork that has had a run, when it is forked, exported, removed and imported, then what comes back is what
    was there, and goes on."""
    async with k.running(store, tmp_path) as kernel:
        await kernel.run("s", compiled(tmp_path / "notes"))
        await fork(kernel, (await places(kernel))[-1])
        await kernel.send("f", "on")
        await kernel.end("f")
        await fork(kernel, (await places(kernel, "f"))[-1], "g", "f")
        before = await kernel.messages("g")
        assert plain(before) == plain(await kernel.messages("f"))
        with closing(Database(store)) as database, database.snapshot() as connection:
            data = "".join(archive.export(connection, kernel.namespace, "g")).encode()
        journal, read = kernel.service.journal, archive.read(data, "g")
        await Journal.submit_all(journal, [lambda tx: tx.drop(["g"])], "g")
        await journal.submit(lambda tx: archive.load(tx, read, trust_code=True))
        assert await kernel.messages("g") == before
        await kernel.send("g", "on", run_id="again")
        assert (await kernel.end("g", "again"))["status"] == "completed"
