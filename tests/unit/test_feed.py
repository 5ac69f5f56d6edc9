"""The feed: what a client follows has no gap and no repetition, whatever happens between its calls."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import UnknownSession
from understudy.events import Event, RunFinished, RunStarted
from understudy.node import feed
from understudy.node.feed import RING, Feed
from understudy.protocol import Following, Watched
from understudy.reads import RunRecord
from understudy.streams import CALL, REASONING, TEXT, Parts, Piece

from ..records import run_record


class Log:
    """The store's events, and a feed that learns of each when `publish` says so."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}
        self.unpublished: list[tuple[int, Event]] = []
        self.streams: dict[str, tuple[str, Parts]] = {}
        self.reads = 0
        self.removed: set[str] = set()
        self.feed = self.restarted()

    def restarted(self) -> Feed:
        """The feed of the next life of the node service: it remembers nothing."""
        self.unpublished = []
        self.feed = Feed(self.read, self.streams.get, self.read_run)
        return self.feed

    async def read(self, session_id: str, after: int) -> list[Event]:
        self.reads += 1
        await asyncio.sleep(0)
        return [event for event in self.events.get(session_id, ()) if event.seq > after][: feed.PAGE]

    async def read_run(self, session_id: str, run_id: str) -> RunRecord:
        if session_id in self.removed:
            raise UnknownSession("it was removed")
        return run_record(session_id, run_id)

    def commit(self, session_id: str, gap: int = 1, *, ends: bool = False, foreign: bool = False) -> None:
        """Commit an event, `gap` places after the last one: messages share the numbers.

        A `foreign` one is committed by another node service, so this one never publishes it.
        """
        log = self.events.setdefault(session_id, [])
        before = log[-1].seq if log else 0
        seq = before + gap
        ended = RunFinished(session_id=session_id, seq=seq, run_id=f"r{seq}", status="completed")
        event = ended if ends else RunStarted(session_id=session_id, seq=seq)
        log.append(event)
        if not foreign:
            self.unpublished.append((before, event))

    def publish(self) -> None:
        committed, self.unpublished = self.unpublished, []
        for before, event in committed:
            self.feed.publish([event], {event.session_id: (before, event.seq)})


actions = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.sampled_from("ab"), st.integers(1, 3)),
        st.tuples(st.just("foreign"), st.sampled_from("ab"), st.integers(1, 3)),
        st.tuples(st.just("burst"), st.sampled_from("ab"), st.integers(RING - 2, RING + 40)),
        st.tuples(st.just("publish")),
        st.tuples(st.just("watch")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("turn"), st.integers(1, 4)),
    ),
    max_size=25,
)


@given(actions)
def test_no_gap_and_no_repetition(steps: list[tuple[Any, ...]]) -> None:
    """Whatever the order of commits (others' too), publication, calls, restarts, and however little the store tells at
    a time: every event comes once, in order."""
    with patch.object(feed, "PAGE", 50):
        asyncio.run(follow_through(steps))


async def follow_through(steps: list[tuple[Any, ...]]) -> None:  # noqa: C901 - a branch per action
    log, got, after = Log(), {"a": [], "b": []}, {"a": 0, "b": 0}  # type: Log, dict[str, list[int]], dict[str, int]
    pending: asyncio.Task[dict[str, Any]] | None = None

    def take(found: dict[str, Any]) -> None:
        for event in found.events:
            got[event["session_id"]].append(event["seq"])
            after[event["session_id"]] = event["seq"]

    def watch(timeout: float) -> Any:
        return log.feed.watch("client", {name: Following(seq) for name, seq in after.items()}, timeout)

    for kind, *arguments in steps:
        if kind == "commit":
            log.commit(*arguments)
        elif kind == "foreign":
            log.commit(*arguments, foreign=True)
        elif kind == "burst":
            for _ in range(arguments[1]):
                log.commit(arguments[0])
        elif kind == "publish":
            log.publish()
        elif kind == "restart":
            if pending is not None:
                pending.cancel()
                pending = None
            log.restarted()
        elif kind == "watch" and pending is None:
            pending = asyncio.create_task(watch(60))
        elif kind == "turn":
            for _ in range(arguments[0]):
                await asyncio.sleep(0)
        if pending is not None and pending.done():
            take(pending.result())
            pending = None
    log.publish()
    log.feed.forget("ab")  # the notice of what others committed
    while {name: events[-1].seq for name, events in log.events.items()}.items() - after.items():
        found = await (pending or watch(0))
        assert found.events
        take(found)
        pending = None
    if pending is not None:
        pending.cancel()
    assert got == {name: [event.seq for event in log.events.get(name, ())] for name in "ab"}


async def test_a_pending_call_ends_with_the_next_event() -> None:
    """A call without news waits, and a commit of another session does not end it."""
    log = Log()
    watching = asyncio.create_task(log.feed.watch("client", {"a": Following(0)}, 60))
    await asyncio.sleep(0.01)
    log.commit("b")
    log.publish()
    await asyncio.sleep(0.01)
    assert not watching.done()
    log.commit("a")
    log.publish()
    assert [event["seq"] for event in (await watching).events] == [1]


async def test_ends_tells_only_the_ends_of_runs() -> None:
    """A client that only waits for results is not woken by everything else, and gets their rows."""
    log = Log()
    watching = asyncio.create_task(log.feed.watch("client", {"a": Following(0, ends=True)}, 60))
    await asyncio.sleep(0)
    for ends in (False, False, True):
        log.commit("a", ends=ends)
        log.publish()
        await asyncio.sleep(0)
    found = await watching
    assert [event["type"] for event in found.events] == ["run_finished"]
    assert found.runs["a/r3"].status == "completed"


async def test_a_long_log_is_returned_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a log of more than a page that the feed does not remember, then each call returns the next page of it."""
    monkeypatch.setattr(feed, "PAGE", 10)
    log, seqs = Log(), list[int]()
    for _ in range(25):
        log.commit("a")
    log.restarted()
    while found := (await log.feed.watch("client", {"a": Following(len(seqs))}, 0)).events:
        seqs += [event["seq"] for event in found]
    assert seqs == [*range(1, 26)]


async def test_who_waits_for_an_end_gets_over_a_long_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a run whose end is not on the first page, when a client asks for ends only, then each call says how far it
    went, and one of them the end."""
    monkeypatch.setattr(feed, "PAGE", 10)
    log, seqs = Log(), [0]
    for number in range(25):
        log.commit("a", ends=number == 24)
    log.restarted()
    while found := (await log.feed.watch("client", {"a": Following(seqs[-1], ends=True)}, 0)).events:
        seqs += [event["seq"] for event in found]
    assert seqs == [0, 10, 20, 25]


async def test_a_removed_session_is_nothing_to_the_others_of_a_call() -> None:
    """Given one of two sessions whose ends are remembered was removed, then the other's is returned with its row, and
    of the removed one the event alone: who waits for it looks for the row, and learns what became of it."""
    log = Log()
    for session_id in "ab":
        log.commit(session_id, ends=True)
    log.publish()
    log.removed.add("a")
    follow = {session_id: Following(0, ends=True) for session_id in "ab"}
    found = await log.feed.watch("client", follow, 60)
    assert [event["session_id"] for event in found.events] == ["a", "b"]
    assert [*found.runs] == ["b/r1"]


async def test_a_newer_call_of_the_same_client_ends_the_older_one() -> None:
    """One pending call per client; another client's call is left alone."""
    log = Log()
    old, other, new = [
        asyncio.create_task(log.feed.watch(client, {"a": Following(0)}, 60)) for client in ("one", "two", "one")
    ]
    assert await old == Watched()
    log.commit("a")
    log.publish()
    assert (await other).events == (await new).events != []


async def test_after_its_timeout_a_call_returns_nothing() -> None:
    """No news is an answer too."""
    assert await Log().feed.watch("client", {"a": Following(0)}, 0.01) == Watched()


@pytest.mark.parametrize("heard", [False, True])
async def test_a_session_that_came_back_is_followed_here_again(heard: bool) -> None:
    """Given a session that went to another node, when it is at home here again, and that was heard of by a commit or
    found by looking, then nobody is sent elsewhere any more, and what it did there is returned."""
    log = Log()
    log.commit("a", foreign=True)
    log.feed.leave(["a"])
    assert (await log.feed.watch("c", {"a": Following(0)}, 1)).gone == ["a"]
    if heard:
        log.commit("a")
        log.publish()
    else:
        log.feed.at_home(["a", "b"], log.feed.gone)
    found = await log.feed.watch("c", {"a": Following(0)}, 1)
    assert (found.gone, len(found.events)) == ([], 1 + heard)


async def test_recent_events_need_no_store() -> None:
    """A client that keeps up is served from memory; one that lags behind the ring reads the store."""
    log = Log()
    for _ in range(RING + 10):
        log.commit("a")
        log.publish()
    assert [e["seq"] for e in (await log.feed.watch("c", {"a": Following(RING)}, 1)).events] == [
        *range(RING + 1, RING + 11)
    ]
    assert log.reads == 0
    assert len((await log.feed.watch("c", {"a": Following(3)}, 1)).events) == RING + 7
    assert log.reads == 1


async def test_what_is_written_elsewhere_during_a_read_is_not_lost() -> None:
    """Given a read of the store under way, when another service commits and says so, then the next look has it."""
    log = Log()
    log.commit("a", foreign=True)
    gate, read = asyncio.Event(), log.read

    async def slow(session_id: str, after: int) -> list[Event]:
        found = await read(session_id, after)
        await gate.wait()
        return found

    slowly = Feed(slow, log.streams.get, log.read_run)
    watching = asyncio.create_task(slowly.watch("c", {"a": Following(1)}, 60))
    await asyncio.sleep(0.01)
    log.commit("a", foreign=True)
    slowly.forget(["a"])
    gate.set()
    assert [event["seq"] for event in (await watching).events] == [2]


async def test_stream_pieces_join_to_the_answer() -> None:
    """What is new of each part carries the offset it begins at; a try that began again starts from 0 under a new key;
    who comes late gets all of the present one's."""
    log, key, have = Log(), "", Parts()
    for new_key, kind, text in (
        ("k/1", REASONING, "hm"), ("k/1", TEXT, "he"), ("k/1", TEXT, "llo"), ("k/1", CALL, "{"),
        ("k/1", REASONING, "."), ("k/2", TEXT, "bye"), ("k/2", TEXT, " now"),
    ):  # fmt: skip
        current = log.streams.get("a")
        parts = current[1] if current is not None and current[0] == new_key else Parts()
        parts.add(Piece(kind, text))
        log.streams["a"] = new_key, parts
        log.feed.delta("a")
        found = await log.feed.watch("c", {"a": Following(0, stream=(key, have.lengths))}, 5)
        [(found_key, new)] = found.streams.values()
        assert len(new) == 1
        have = have if found_key == key else Parts()
        key = found_key
        have.take(new)
        assert (key, have.after([])) == (new_key, parts.after([]))
        late = await log.feed.watch("late", {"a": Following(0, stream=("", []))}, 5)
        assert late.streams == {"a": (new_key, parts.after([]))}
