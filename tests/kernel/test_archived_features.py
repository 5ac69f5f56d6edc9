"""A session tree with everything in it goes from one store to another, and on to the same end by the same requests."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from understudy import AgentSpec, Budget, Context, Memory, ToolContext, tool
from understudy.cluster.client.compiling import compile_spec
from understudy.errors import InvalidArchive, SessionActive
from understudy.store.check.check import check
from understudy.store.journal import Journal
from understudy.store.reads import queries
from understudy.store.upkeep import retention
from understudy.testing.offline import OfflineServer, Reply, default_policy
from understudy.testing.policies import content_text

from ..store.test_archive import beside as beside
from ..store.test_archive import export, load
from . import kernel as k
from .test_context import INSTRUCTED

pytestmark = pytest.mark.conformance

SECRET = "4711-open-sesame-0815"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@tool(on_crash="rerun")
async def big(number: int) -> str:
    """A long result, with something that nobody may see."""
    return f"STEP {number} {SECRET} " + "lorem ipsum dolor " * 4_000


@tool(approve=True)
async def pay(order: str, context: ToolContext) -> str:
    """Needs approval."""
    return f"paid {order}"


def done(body: dict[str, Any]) -> int:
    """How far the agent is, by what it is sent."""
    return max((int(found) for found in re.findall(r"STEP[ -](\d+)", json.dumps(body["messages"]))), default=0)


def everything(body: dict[str, Any]) -> Reply:
    """The model of all these agents."""
    system, last = content_text(body["messages"][0]), body["messages"][-1]
    if "You scout" in system:
        return Reply(text="found", delay=600.0 if "held" in json.dumps(body["messages"]) and everything.holds else 0.0)
    if last["role"] == "user" and content_text(last).startswith(INSTRUCTED):
        return Reply(text=f"So far STEP {done(body)}")
    if (number := done(body)) < 3:
        return Reply(tool_calls=(("big", {"number": number + 1}),))
    calls: dict[int, list[tuple[str, dict[str, Any]]]] = {
        3: [("add_note", {"key": "STEP-4", "text": "pinned", "pinned": True}),
            ("add_note", {"key": "shared", "text": "of all", "scope": "agent"}),
            ("add_note", {"key": "ours", "text": "of the project", "scope": "project"}),
            ("post_to_board", {"key": "plan", "text": "of the tree"}),
            ("todo", {"items": [{"text": "pay", "status": "pending"}]}),
            ("schedule_wakeup", {"prompt": "look again", "seconds": 86_400, "name": "later"})],
        4: [("start_agent", {"task": "STEP 5", "agent": "scout"}),
            ("start_agent", {"task": "STEP 5, held", "agent": "scout"})],
        5: [("pay", {"order": "STEP 6"})],
        6: [("pay", {"order": "STEP 7"})],
    }  # fmt: skip
    return Reply(tool_calls=tuple(calls[number])) if number in calls else Reply(text='{"n": 7}')


everything.holds = False  # type: ignore[attr-defined]

FRAMES = itertools.count(10)

LEAD = AgentSpec(
    name="lead", model="offline", instructions="You lead.", follow_ups="merge", output_type=SCHEMA, max_rounds=60,
    tools=[big, pay, "notes", "board", "todo", "agents", "history", "wait", "schedule_wakeup"],
    agents=[AgentSpec(name="scout", instructions="You scout.", lifecycle="linked")],
    memory=Memory(project="shop", scopes=("session",)), context=Context(window=25_000, keep=0.1),
    budget=Budget(tokens=10_000_000, rounds=100),
)  # fmt: skip


@asynccontextmanager
async def work(dsn: str, directory: Path, *, holds: bool = False) -> AsyncIterator[tuple[k.Kernel, OfflineServer]]:
    everything.holds = holds  # type: ignore[attr-defined]
    with OfflineServer(everything) as server:
        async with k.running(dsn, directory, server=server, frames=0) as kernel:
            kernel.numbers = FRAMES  # those of the kernel before it are dead
            for _ in range(2):
                kernel.add_frame()
            yield kernel, server


async def decide(kernel: k.Kernel, **said: Any) -> None:
    (question,) = await kernel.paused("lead")
    decision = {"call_id": question["call_id"], "asked": 1, "decision": "approve", "text": "", **said}
    await kernel.ask("decide", "lead", [decision])


async def prepare(dsn: str, directory: Path) -> None:
    """A lead that waits for a person, with everything around it."""
    compiled = compile_spec(LEAD, model="offline", profile=None).spec
    async with work(dsn, directory, holds=True) as (kernel, _):
        await kernel.spawn("lead", compiled)
        await kernel.send("lead", "begin")
        await kernel.until("lead", "child_finished")
        await decide(kernel, remember="arguments")
        await kernel.until("lead", "input_requested", 2)
        await kernel.paused("lead")
        messages = await kernel.messages("lead")
        assert {message.get("origin") for message in messages} >= {"fold", "approval", "memory"}
        results = [m["seq"] for m in messages if m["role"] == "tool"]
        await kernel.ask("fork", "lead", {"session_id": "forked", "at": results[2]})
        await kernel.ask("steer", "lead", {"content": "in French", "interrupt": False})
        await kernel.ask("set_note", "lead", {"key": "by-hand", "text": "from a client"})
        for number in range(2):
            await kernel.send("lead", f"more {number}", f"f{number}")


def documents(dsn: str) -> list[Any]:
    """What the archives of all say, but for where and when it was written."""
    found = []
    for session_id in ("lead", "forked"):
        document = json.loads(export(dsn, session_id))
        for session in document["sessions"]:
            for name in (
                "frame_id", "actor_pid", "node_id", "wait_holder", "updated_at", "incarnation", "first_incarnation",
                "redone",
            ):  # fmt: skip
                session["session"].pop(name)
            for event in session["event"]:
                del event["writer"], event["writer_seq"]
            for name, rows in session.items():
                if isinstance(rows, list):
                    session[name] = sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))
        found.append((document["sessions"], document["code"]))
    return found


async def to_the_end(dsn: str, directory: Path) -> tuple[list[str], list[Any]]:
    """Go on to the end; what the model was asked, and what became of the sessions."""
    async with work(dsn, directory) as (kernel, server):
        await kernel.until("lead", "child_finished", 2)
        await decide(kernel)
        ended = [await kernel.end("lead", run_id) for run_id in ("r", "f0", "f1")]
        await kernel.send("forked", "go on")
        await kernel.until("forked", "input_requested")
        await kernel.ask("cancel", "forked", None, "enough")
        await kernel.end("forked")
        tree = await kernel.ask("read", "tree", ["lead"], {})
        for row in tree[1:]:
            await kernel.send(row["session_id"], "once more", "again")
            ended.append(await kernel.end(row["session_id"], "again"))
        while any(row["active"] for row in await kernel.ask("read", "tree", ["forked"], {})):
            await kernel.until("forked", "child_finished")
        said = [await kernel.transcript(name) for name in ("lead", *(row["session_id"] for row in tree[1:]))]
        asked = [json.dumps(request.body, sort_keys=True) for request in server.requests]
    runs = [(row["status"], row["text"], row["output"], row.get("merged_into", "")) for row in ended]
    return sorted(text for text in asked if '"You lead.' in text and "go on" not in text), [runs, said]


@pytest.mark.thorough
async def test_everything_goes_elsewhere_and_on_to_the_same_end(
    store: str, beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a tree with notes, a board, folds, long results, a decision that is remembered, a call that waits for an
    approval, a message that steers and was not heard, inputs that wait to be merged, a sub-agent in the background at
    work and one that has ended, and a fork of it: when they are exported and imported, then every row is the same, and
    both stores' sessions end alike, byte for byte by the same requests. What belongs to agents and projects stays, and
    no secret is in any of it."""
    monkeypatch.setenv("TILL_API_KEY", SECRET)
    await prepare(store, tmp_path)
    archives = [export(store, name) for name in ("lead", "forked")]
    assert not any(SECRET.encode() in data for data in archives)
    with pytest.raises(SessionActive):
        await load(beside, archives[0])
    for data in archives:
        assert await load(beside, data, resume=True) is True
        assert await load(beside, data, resume=True) is False
    assert documents(beside) == documents(store)
    with k.opened(beside) as there, there.snapshot() as imported:
        assert check(imported, "tests") == []
        for owner in (("agent", "lead"), ("project", "shop")):
            assert queries.notes(imported, "tests", *owner) == []
        assert [note.text for note in queries.notes(imported, "tests", "tree", "lead")] == ["of the tree"]
    here, elsewhere = await to_the_end(store, tmp_path), await to_the_end(beside, tmp_path)
    assert elsewhere == here
    assert here[1][0][:3] == [("completed", '{"n": 7}', {"n": 7}, into) for into in ("", "", "f0")]


@pytest.mark.thorough
async def test_everything_is_put_away_and_brought_back(store: str, tmp_path: Path) -> None:
    """Given such a tree: while it has work to do it is not removed. When it has ended it is exported, removed and
    imported again in the same store: nothing of it was left there, every row is the same, and it goes on."""
    await prepare(store, tmp_path)

    async def remove() -> Any:
        with k.opened(store) as database:
            journal = Journal(database, "tests", "prune", lambda committed: None)
            journal.start()
            try:
                return await journal.submit(lambda tx: retention.drop_tree(tx, "lead"))
            finally:
                await journal.close()

    with pytest.raises(SessionActive):
        await remove()
    await to_the_end(store, tmp_path)
    before, data = documents(store), export(store, "lead")
    removed = await remove()
    assert (removed.kept, removed.sessions) == ("", 3)
    with k.opened(store) as database, database.snapshot() as connection:
        assert queries.notes(connection, "tests", "tree", "lead") == []
        assert len(queries.notes(connection, "tests", "agent", "lead")) == 1
        for table in ("session", "message", "event", "run", "tool_call", "question", "inbox", "timer", "account"):
            left = connection.execute(text(f"SELECT DISTINCT session_id FROM {table}")).scalars().all()
            assert set(left) <= {"forked", *(name for name in left if name not in removed.session_ids)}
            assert not {*left} & {*removed.session_ids}
    assert await load(store, data) is True
    assert documents(store) == before
    async with work(store, tmp_path) as (kernel, _):
        await kernel.send("lead", "and now?", "last")
        assert (await kernel.end("lead", "last"))["output"] == {"n": 7}


@pytest.mark.parametrize("lifecycle", ["ephemeral", "linked", "detached"])
async def test_a_sub_agent_of_the_background_goes_on_alone(
    store: str, beside: str, tmp_path: Path, lifecycle: Any
) -> None:
    """A sub-agent in the background that is imported without its parent is a root like any other: its task ends, it
    accepts inputs, and nobody is notified of their ends. Its parent is not imported without it; the error says how."""
    scout = AgentSpec(name="scout", instructions="You scout.", lifecycle=lifecycle)
    spec = AgentSpec(
        name="lead", model="offline", tools=["agents"], agents=[scout],
        instructions=k.script([("start_agent", {"task": "held", "agent": "scout"})], "on my way"),
    )  # fmt: skip
    everything.holds = True  # type: ignore[attr-defined]

    def policy(body: dict[str, Any]) -> Reply:
        return everything(body) if "You scout" in content_text(body["messages"][0]) else default_policy(body)

    with OfflineServer(policy) as server:
        async with k.running(store, tmp_path, server=server) as kernel:
            compiled = compile_spec(spec, model="offline", profile=None).spec
            assert (await kernel.run("lead", compiled))["text"] == "on my way"
            (kid,) = [row["session_id"] for row in await kernel.ask("read", "tree", ["lead"], {}) if row["depth"]]
            await kernel.until(kid, "model_call_started")
    with pytest.raises(InvalidArchive, match="--tree"):
        await load(beside, export(store, "lead", tree=False), resume=True)
    assert await load(beside, export(store, kid, tree=False), resume=True) is True
    async with work(beside, tmp_path) as (kernel, _):
        assert (await kernel.end(kid, "task"))["text"] == "found"
        await kernel.send(kid, "more", "more")
        assert (await kernel.end(kid, "more"))["status"] == "completed"
        kernel.check()
