"""Two node services on one PostgreSQL store, without Ray: sessions have a home, and either service may be asked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from understudy.actors.tools import tool
from understudy.errors import StaleGeneration, StoreUnreachable
from understudy.node import sweep
from understudy.protocol import News
from understudy.records import LEASE_SECONDS
from understudy.store.operations import activation, beginnings
from understudy.testing.offline import OfflineServer

from . import kernel as k

PATIENCE = 30.0


@asynccontextmanager
async def nodes(
    dsn: str, server: OfflineServer, directory: Path, **profile: Any
) -> AsyncIterator[tuple[k.Kernel, k.Kernel]]:
    """Nodes `a` and `b` of one cluster, with a frame each."""
    names = ["a", "b"]
    a, b = (k.Kernel(dsn, server, directory, node_id=name, profile=profile) for name in names)
    b.numbers = itertools.count(100)  # no frame of one has the id of one of the other
    try:
        await a.start(1)
        await b.start(1)
        a.peers, b.peers = {"b": b}, {"a": a}
        for node in (a, b):
            await node.take_over(b.generation, names)
        yield a, b
    finally:
        await asyncio.gather(a.stop(), b.stop())


def activated_at(events: list[dict[str, Any]]) -> set[str]:
    """The nodes that the session was active on."""
    return {event["data"]["node_id"] for event in events if event["type"] == "session_activated"}


async def test_an_input_accepted_elsewhere_runs_at_home(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a session at home on `a`, when `b` accepts an input for it, then `a` runs it and its feed has it all."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        await a.spawn("s", k.spec())
        assert await b.send("s", "hello")
        row = await asyncio.wait_for(a.end("s"), PATIENCE)
        assert row["text"] == "offline: hello"
        events = await b.events("s")
        assert activated_at(events) == {"a"}
        watched = await a.ask("watch", "c", {"s": {"after": 0}}, 1.0)
        assert watched["events"] == events
        assert (await a.info("s"))["node_id"] == "a"
        assert a.service.sweep.swept == 0


async def test_a_response_of_a_run_that_is_ended_elsewhere(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a response in background mode for a session at home on `a`, when `b` ends its run by force, then it is
    cancelled, and no other one is made."""
    async with nodes(postgres, server, tmp_path, protocol="responses", background=True) as (a, b):
        cancelled: list[str] = []
        for node in (a, b):
            node.service.calls.cancel = lambda _, name=node.node_id: cancelled.append(name)  # type: ignore[method-assign]
        server.hold()
        await a.spawn("s", k.spec(shutdown=0))
        await a.send("s")
        async with asyncio.timeout(PATIENCE):
            while not await a.service.journal.submit(lambda tx: tx.session("s").response_id):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.005)
        await b.ask("cancel", "s", "r", "enough")
        assert (await b.end("s"))["status"] == "cancelled"
        await asyncio.to_thread(server.wait, lambda stats: stats.cancelled == 1)  # its call is aborted
        server.release()
        assert (cancelled, server.count) == (["a"], 1)


async def test_what_a_service_accepts_before_it_knows_the_nodes_runs_at_home(
    postgres: str, server: OfflineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a session at home on `a`, when `b`, which was restarted and does not know yet which nodes there are,
    accepts an input for it, then `a` hears of it when `b` learns that: it need not be swept for."""
    monkeypatch.setattr(sweep, "SWEEP_SECONDS", 3_600.0)
    async with nodes(postgres, server, tmp_path) as (a, b):
        await a.spawn("s", k.spec())
        with patch.object(k.Kernel, "take_over", AsyncMock()):
            b.kill_node()
            await b.quiet()
        assert await b.send("s", "hello")
        assert "s" in b.service.frames.paging.ready
        await b.take_over(a.generation, ["a", "b"])
        assert "s" not in b.service.frames.paging.ready
        assert (await asyncio.wait_for(a.end("s"), PATIENCE))["text"] == "offline: hello"
        assert activated_at(await b.events("s")) == {"a"}
        assert (a.service.sweep.swept, b.service.sweep.swept) == (0, 0)


async def test_a_follower_at_home_sees_what_was_committed_elsewhere(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a client that follows at the home, when another service writes, then its pending call ends with that."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        await a.spawn("s", k.spec())
        watching = asyncio.create_task(a.ask("watch", "c", {"s": {"after": 1}}, PATIENCE))
        await asyncio.sleep(0)
        await b.ask("close", "s", "enough")
        assert [event["type"] for event in (await asyncio.wait_for(watching, PATIENCE))["events"]] == ["session_closed"]


async def test_who_follows_a_root_hears_at_once_of_a_question_elsewhere(
    postgres: str, server: OfflineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a root at home on `a` whose sub-agent is at home on `b`, and asks there, then who follows the root on `a`
    learns so at once, with the run as paused; answered through `a`, the sub-agent goes on."""
    monkeypatch.setattr(sweep, "SWEEP_SECONDS", 3_600.0)
    create_session = beginnings.create_session

    def elsewhere(*given: Any, **more: Any) -> bool:
        return create_session(*given, **{**more, "node_id": "b" if more.get("parent") else more["node_id"]})

    monkeypatch.setattr(beginnings, "create_session", elsewhere)
    question = [("request_user_input", {"prompt": "Which?"})]
    child = k.spec(k.script(question, "dug"), ["request_user_input"], name="worker", hash="worker")
    spawn = [("spawn_agent", {"agent": "worker", "task": "dig"})]
    async with nodes(postgres, server, tmp_path) as (a, b):
        await a.spawn("s", k.spec(k.script(spawn, "done"), ["spawn_agent"], agents={"worker": child}))
        await a.send("s")
        watched = await a.ask("watch", "c", {"s": {"after": 0, "ends": True}}, PATIENCE)
        assert [event["type"] for event in watched["events"]] == ["child_asked"]
        [asked] = watched["runs"]["s/r"]["pending"]
        assert (watched["runs"]["s/r"]["status"], asked["prompt"]) == ("waiting_for_input", "Which?")
        assert activated_at(await a.events(asked["session_id"])) == {"b"}
        assert await a.ask("answer", asked["session_id"], asked["call_id"], "ok", "red", 1)
        assert (await asyncio.wait_for(a.end("s"), PATIENCE))["text"] == "done"
        assert (a.service.sweep.swept, b.service.sweep.swept) == (0, 0)


async def test_a_cancel_elsewhere_aborts_the_call_at_home(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a session of `a` that waits for a model, when `b` commits the cancel, then `a` closes the connection."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        server.hold()
        await a.spawn("s", k.spec())
        await a.send("s")
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
        assert await b.ask("cancel", "s", None, "no more")
        assert (await asyncio.wait_for(a.end("s"), PATIENCE))["status"] == "cancelled"
        assert server.stats.requests == 1
        server.release()


async def test_an_interruption_elsewhere_aborts_the_call_at_home(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a session of `a` that waits for a model, when `b` accepts a steer that interrupts it, then `a` closes the
    connection, and the run goes on there with the message."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        server.hold()
        await a.spawn("s", k.spec())
        await a.send("s")
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
        await b.ask("steer", "s", {"content": "left", "interrupt": True})
        await asyncio.to_thread(server.wait, lambda stats: stats.aborted == 1)
        server.release()
        assert (await asyncio.wait_for(a.end("s"), PATIENCE))["text"] == "offline: left"
        assert activated_at(await b.events("s")) == {"a"}


class Gate:
    """Where a tool is: it has begun, and may end."""

    begun, opened = asyncio.Event(), asyncio.Event()


@tool(on_crash="rerun")
async def gated() -> str:
    """Go on until the gate is opened."""
    begun, opened = Gate.begun, Gate.opened
    begun.set()
    await opened.wait()
    return "ended by itself"


async def watched_tool(node: k.Kernel) -> asyncio.Event:
    """Wait until the tool is at work and its frame has asked to be notified of an interruption; what lets it end."""
    await asyncio.wait_for(Gate.begun.wait(), PATIENCE)
    async with asyncio.timeout(PATIENCE):
        while not node.service.interrupts:  # noqa: ASYNC110 - asked by a clock of the frame's
            await asyncio.sleep(0.01)
    await node.ask("cancel_wakeup", "s", "none")  # behind what the frame asked the store
    may_end = Gate.opened
    Gate.begun, Gate.opened = asyncio.Event(), asyncio.Event()
    return may_end


class LateNotices:
    """Stands for a node: keeps what it receives until it is let through."""

    def __init__(self, node: k.Kernel) -> None:
        self._node = node
        self._kept: list[tuple[Any, ...]] = []
        self._come = asyncio.Event()

    async def call(self, *call: Any) -> None:
        self._kept.append(call)
        self._come.set()

    async def deliver(self) -> None:
        await asyncio.wait_for(self._come.wait(), PATIENCE)
        for call in self._kept:
            await self._node.call(*call)


async def test_a_late_notice_of_an_interruption_leaves_the_next_round_alone(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a tool at `a`, and a steer that interrupts it, accepted by `b`, of which `a` hears only when the tool has
    ended and the tool of the next round is at work, then that one goes on: its model has been sent the message."""
    Gate.begun, Gate.opened = asyncio.Event(), asyncio.Event()
    async with nodes(postgres, server, tmp_path) as (a, b):
        late = LateNotices(a)
        b.peers = {"a": late}  # type: ignore[dict-item]
        await a.spawn("s", k.spec(tools=[gated]))
        await a.send("s", "call gated {}")
        first = await watched_tool(a)
        await b.ask("steer", "s", {"content": "call gated {}", "interrupt": True})
        first.set()
        second = await watched_tool(a)
        await late.deliver()
        second.set()
        assert (await asyncio.wait_for(a.end("s"), PATIENCE))["status"] == "completed"
        found = [message["content"] for message in await a.messages("s") if message["role"] != "assistant"]
        assert found == ["call gated {}", "ended by itself"] * 2


@pytest.mark.parametrize("what", ["input", "cancel"])
async def test_a_lost_notice_is_swept(
    postgres: str, server: OfflineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Given services that can't tell each other anything, when one writes for the other, then the sweep finds it."""
    monkeypatch.setattr(sweep, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(sweep, "SWEEP_AGE", 0)
    async with nodes(postgres, server, tmp_path) as (a, b):
        b.peers = {}
        await a.spawn("s", k.spec())
        if what == "cancel":
            server.hold()
            await a.send("s")
            await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
            await b.ask("cancel", "s", None, "no more")
        else:
            await b.send("s")
        row = await asyncio.wait_for(a.end("s"), PATIENCE)
        assert row["status"] == {"cancel": "cancelled", "input": "completed"}[what]
        assert activated_at(await a.events("s")) == {"a"}
        server.release()


@tool(on_crash="rerun")
async def stubborn() -> str:
    """Go on, cancelled or not, until its process is killed."""
    worker = k.WORKER.get()
    assert worker is not None
    await worker.kernel.point("tool begins", worker)
    while not worker.dead:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
    return "killed"


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["notice", "sweep"])
async def test_a_run_that_is_ended_by_force_elsewhere_is_ended_at_home(
    postgres: str, server: OfflineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Given a tool that runs at `a`, when `b` ends its run by force, then `a` has the tool's process killed, also where
    the notice is lost."""
    monkeypatch.setattr(sweep, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(sweep, "SWEEP_AGE", 0)
    async with nodes(postgres, server, tmp_path) as (a, b):
        if way == "sweep":
            b.peers = {}
        begun = asyncio.Event()
        a.on_point = lambda _number, label, _worker: begun.set() if label == "tool begins" else None
        await a.spawn("s", k.spec(k.script([("stubborn", {})], "done"), [stubborn], shutdown=0))
        await a.send("s")
        await asyncio.wait_for(begun.wait(), PATIENCE)
        worker = a.holder("s")
        assert worker is not None
        while not a.service.interrupts:  # noqa: ASYNC110 - asked by a clock of the frame's
            await asyncio.sleep(0.01)
        await a.ask("cancel_wakeup", "s", "none")  # behind what the frame asked the store
        await b.ask("cancel", "s", None, "no more")
        assert (await asyncio.wait_for(a.end("s"), PATIENCE))["status"] == "cancelled"
        async with asyncio.timeout(PATIENCE):
            while not a.service.frames.known.condemned:
                await a.service.frames.supply.demand(1.0)
        assert a.service.frames.known.condemned == {worker.frame_id}
        a.kill(worker)
        await a.quiet()
        await a.send("s", "again", "r2")
        begun.clear()
        await asyncio.wait_for(begun.wait(), PATIENCE)


@pytest.mark.parametrize("way", ["notice", "sweep"])
async def test_a_call_of_a_run_that_is_ended_by_force_elsewhere_is_aborted(
    postgres: str, server: OfflineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Given a model call at `a`, when `b` ends its run by force, then `a` closes the connection, also where the notice
    is lost."""
    monkeypatch.setattr(sweep, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(sweep, "SWEEP_AGE", 0)
    async with nodes(postgres, server, tmp_path) as (a, b):
        if way == "sweep":
            b.peers = {}
        server.hold()
        await a.spawn("s", k.spec(shutdown=0))
        await a.send("s")
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
        await b.ask("cancel", "s", None, "no more")
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 0)
        server.release()
        assert (await a.end("s"))["status"] == "cancelled"


@pytest.mark.thorough
async def test_sessions_of_a_lost_node_run_elsewhere(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given `b` dies with a call in flight and a tool running, then `a` re-issues its call, and no tool runs twice."""
    notes = tmp_path / "notes"
    async with nodes(postgres, server, tmp_path) as (a, b):
        b.add_frame()
        tool = k.script([("note", {"path": str(notes), "text": "x"})], "done")
        await b.spawn("tool", k.spec(tool, [k.note]))
        begun = asyncio.Event()
        b.on_point = lambda _number, label, _worker: begun.set() if label == "tool has had its effect" else None
        await b.send("tool")
        await asyncio.wait_for(begun.wait(), PATIENCE)
        for worker in b.workers.values():
            worker.dead = True
        server.hold()
        await a.spawn("mine", k.spec())
        await a.send("mine")
        await b.spawn("call", k.spec())
        await b.service.journal.submit(lambda tx: beginnings.accept(tx, "call", "r", "hello"))
        await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
        await b.lose()
        await a.take_over(await a.ask("acquire", "tests", k.LEASE, "tests"), ["a"])
        server.release()
        ended = [await asyncio.wait_for(a.end(name), PATIENCE) for name in ("tool", "call", "mine")]
        assert [row["status"] for row in ended] == ["completed"] * 3
        assert len(k.notes(notes)) == 1
        assert "tool_in_doubt" in await a.types("tool")
        assert "model_call_reissued" not in await a.types("mine")
        assert {(await a.info(name))["node_id"] for name in ("tool", "call")} == {"a"}


async def test_a_service_that_was_cut_off_activates_nothing(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given `b` was given up but lives, when it commits an input for its old session, then `a` alone runs it."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        await b.spawn("s", k.spec())
        await b.send("s", "one", "r1")
        await asyncio.wait_for(b.end("s", "r1"), PATIENCE)
        generation = await a.ask("acquire", "tests", k.LEASE, "tests")
        await a.take_over(generation, ["a"])
        await a.send("s", "two", "r2")
        assert (await asyncio.wait_for(a.end("s", "r2"), PATIENCE))["status"] == "completed"
        with pytest.raises(StaleGeneration):
            await b.take_over(generation, ["a"])
        await b.send("s", "three", "r3")
        await a.service.notices.notice(News(["s"]))
        assert (await asyncio.wait_for(a.end("s", "r3"), PATIENCE))["status"] == "completed"
        places = [e["data"]["node_id"] for e in await a.events("s") if e["type"] == "session_activated"]
        assert places == sorted(places, reverse=True)


async def test_what_a_given_up_node_accepts_is_run(
    postgres: str, server: OfflineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given `b` was given up but reaches the store, when it accepts an input and then dies, then `a` runs it."""
    monkeypatch.setattr(sweep, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(sweep, "SWEEP_AGE", 0)
    async with nodes(postgres, server, tmp_path) as (a, b):
        await b.spawn("old", k.spec())
        await a.take_over(await a.ask("acquire", "tests", k.LEASE, "tests"), ["a"])
        await b.send("old")
        await b.spawn("new", k.spec())
        await b.send("new")
        await b.lose()
        for name in ("old", "new"):
            assert (await asyncio.wait_for(a.end(name), PATIENCE))["status"] == "completed"


@pytest.mark.thorough
async def test_nodes_share_the_sessions_of_a_lost_one(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given many sessions whose node is gone, when both other nodes adopt them, then each has its own share and none is
    left."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        names = [f"s{number}" for number in range(12)]

        def create(tx: Any) -> None:
            for name in names:
                beginnings.create_session(
                    tx, name, k.spec(), spec_hash="hash", placement="", node_id="lost", metadata={}
                )
                beginnings.accept(tx, name, "r", "hello")

        await a.service.journal.submit(create)
        shares = [
            await node.service.journal.submit(lambda tx, n=node: activation.adopt(tx, n.node_id, ["a", "b"]))  # type: ignore[misc]
            for node in (a, b)
        ]
        assert set(shares[0]).isdisjoint(shares[1])
        homes = await a.ask("read", "homes", [names], {})
        assert {name: node_id in ("a", "b") for name, (node_id, _) in homes.items()} == dict.fromkeys(names, True)


async def at_work(node: k.Kernel, session_id: str, notes: Path) -> asyncio.Event:
    """Have a session of the node begin a tool; that goes on when the event is set."""
    begun, may_end = k.held_at_effect(node)
    await node.spawn(session_id, k.spec(k.script([("note", {"path": str(notes), "text": "x"})], "done"), [k.note]))
    await node.send(session_id)
    await asyncio.wait_for(begun.wait(), PATIENCE)
    return may_end


async def test_a_node_that_has_not_heard_of_another_takes_nothing_from_it(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a session at work at `b`, which has just joined, and `a` has not heard of it, when a client sends it an
    input through `a`, and `a` looks for sessions of nodes that are gone, then it stays where it is at work."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        await a.take_over(a.generation, ["a"])
        await b.take_over(await b.ask("acquire", "tests", k.LEASE, "tests"), ["a", "b"])  # as a join does
        may_end = await at_work(b, "s", tmp_path / "notes")
        await a.send("s", "more", "r2")
        await a.service.sweep.run(0)
        assert (await a.info("s"))["node_id"] == "b"
        may_end.set()
        assert (await asyncio.wait_for(b.end("s", "r2"), PATIENCE))["status"] == "completed"
        assert activated_at(await b.events("s")) == {"b"}
        assert "tool_in_doubt" not in await b.types("s")
        await a.take_over(b.generation, ["a", "b"])


@pytest.mark.thorough
async def test_a_process_that_may_live_is_not_forgotten_by_a_restart(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a session at work at `b`, which is lost, when `a` makes itself its home and then can't go on, and is
    notified again by somebody who knows of no lost node, then the session waits until what its process may begin
    is over."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        may_end = await at_work(b, "s", tmp_path / "notes")
        generation = await a.ask("acquire", "tests", k.LEASE, "tests")
        with (
            patch.object(a.service.reading, "active", AsyncMock(side_effect=StoreUnreachable("away"))),
            pytest.raises(StoreUnreachable),
        ):
            await a.take_over(generation, ["a"])
        await a.take_over(generation, ["a"])
        assert (await a.info("s"))["status"] == "waiting_for_timer"
        [crash] = [event for event in await a.events("s") if event["type"] == "session_crashed"]
        assert crash["data"]["delay"] == LEASE_SECONDS * 1e6
        await a.ask("cancel", "s", None, "enough")
        assert (await asyncio.wait_for(a.end("s"), PATIENCE))["status"] == "cancelled"
        may_end.set()
        await b.lose()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_session_that_begins_a_run_is_taken_from_nobody(
    postgres: str, server: OfflineServer, tmp_path: Path, cancelled: bool
) -> None:
    """Given a session whose frame at `b` begins a run, of which the store has heard nothing, or which was cancelled
    since, when `b` is drained and `a` accepts another input for it, then it stays in its frame."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        point, begun, may_go_on = b.point, asyncio.Event(), asyncio.Event()

        async def held(label: str, worker: k.Worker | None) -> None:
            if label == "before step" and worker is not None and b.holder("s") is worker:
                begun.set()
                await may_go_on.wait()
            await point(label, worker)

        await b.spawn("s", k.spec())
        b.point = held  # type: ignore[method-assign]
        await b.send("s")
        await asyncio.wait_for(begun.wait(), PATIENCE)
        if cancelled:
            await b.ask("cancel", "s", "r", "enough")
        a.service.draining.learn({"b": {}})
        await a.send("s", "more", "r2")
        assert (await a.info("s"))["node_id"] == "b"
        a.service.draining.learn({})
        may_go_on.set()
        assert (await asyncio.wait_for(b.end("s", "r2"), PATIENCE))["status"] == "completed"
        assert (await b.types("s")).count("session_activated") == 1


async def test_a_drain_parks_nobody_who_has_another_home(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a session at work at `b`, whose drain is over, when `a` has made itself its home in the meantime, then `b`
    leaves it in its frame: the frame's death is for `a` to note, which knows that its process may live."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        may_end = await at_work(b, "s", tmp_path / "notes")
        rows = await b.service.reading.active(["b"])
        a.service.journal.generation = await a.ask("acquire", "tests", k.LEASE, "tests")
        await a.service.journal.submit(lambda tx: activation.adopt(tx, "a", ["a"]))
        with patch.object(b.service.homes, "drain", {"deadline": 0, "finished_at": 0}):
            await b.service.draining._send_off(rows, True)
        [row] = await a.service.reading.active(["a"])
        assert (row.frame_id, row.actor_pid) == (rows[0].frame_id, None)
        await a.take_over(a.service.generation, ["a"])
        assert (await a.info("s"))["status"] == "waiting_for_timer"
        may_end.set()
        await a.ask("cancel", "s", None, "enough")
        await b.lose()
