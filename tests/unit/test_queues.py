"""Queues: the pure rules, the Python API and the command line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from understudy import AgentSpec, Conflict, InvalidInput, QueuePlace, Rate, UnknownQueue, tool, workflow
from understudy.cluster.cli import queues_command
from understudy.cluster.cli.main import app
from understudy.queues import AT_ONCE, Limits, NewQueue, Waiting, choose, full_keys, looks_again, recent, room
from understudy.testing import LocalCluster

Command = Callable[..., Any]
SECOND = 1_000_000


def limits(**given: Any) -> Limits:
    """A queue without limits, but for these."""
    return Limits(**{"concurrency": 0, "per_key": 0, "rate": 0, "period": 0, "paused": False, "begins": [], **given})


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(identity="ann") as made:
        yield made


@pytest.fixture
def command(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`understudy queues …`, connected to that cluster."""

    @contextlib.contextmanager
    def connected(_store: str | None, **_options: Any) -> Iterator[LocalCluster]:
        yield cluster

    monkeypatch.setattr(queues_command, "connected", connected)
    runner = CliRunner(env={"COLUMNS": "200"})
    return lambda *words: runner.invoke(app, ["queues", *words], catch_exceptions=False)


@given(
    st.integers(1, 5), st.integers(0, 2), st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=12),
    st.dictionaries(st.sampled_from(["", "a", "b"]), st.integers(0, 3)),
)  # fmt: skip
def test_who_begins(concurrency: int, per_key: int, keys: list[str], at_work: dict[str, int]) -> None:
    """Whatever waits: no limit is exceeded by what begins, the order is kept, and nobody is left who could begin."""
    queue = limits(concurrency=concurrency, per_key=per_key)
    waiting = [Waiting("s", str(number), key) for number, key in enumerate(keys)]
    most = room(queue, sum(at_work.values()), 0)
    after = dict(at_work)
    chosen = choose(queue, after, waiting, most)
    assert chosen == sorted(chosen, key=waiting.index)
    assert len(chosen) <= most
    assert sum(after.values()) == sum(at_work.values()) + len(chosen)
    if per_key:
        begun = {run.key for run in chosen if run.key}
        assert all(after[key] <= per_key for key in begun)
    if len(chosen) < most:
        left = [run.key for run in waiting if run not in chosen]
        assert set(left) <= set(full_keys(queue, after))


@given(
    st.integers(1, 4), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=20)
)  # fmt: skip
def test_within_no_period_more_begin(rate: int, seconds: int, tries: list[tuple[int, int]]) -> None:
    """Given any tries to begin runs, at times that go on, then within no period more begin than the rate says; when
    none may, it is known when the next one may, and not later than it could."""
    period, now, begun = seconds * SECOND, 0, list[int]()
    queue = limits(rate=rate, period=period)
    for wait, wanted in tries:
        now += wait * SECOND
        queue = queue._replace(begins=recent(queue, now))
        number = min(room(queue, 0, now), wanted)
        begun += [now] * number
        queue = queue._replace(begins=queue.begins + [now] * number)
        if room(queue, 0, now) == 0:
            again = looks_again(queue, 0, now)
            assert room(queue, 0, again) > 0
            assert room(queue, 0, again - 1) == 0
    assert all(later - earlier >= period for earlier, later in zip(begun, begun[rate:], strict=False))


def test_many_begin_in_several_transactions() -> None:
    """Given room for any number, then only so many begin at once, and the queue is looked at again now."""
    queue = limits()
    assert room(queue, 5_000, 7) == AT_ONCE
    assert looks_again(queue, 5_000, 7) == 7
    assert looks_again(limits(concurrency=3), 3, 7) == looks_again(limits(paused=True), 0, 7) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"}, {"concurrency": -1}, {"concurrency": 10_001}, {"per_key": -1}, {"rate": Rate(0)},
        {"rate": Rate(1_001)}, {"rate": Rate(1, 0.0)}, {"rate": Rate(1, float("nan"))}, {"rate": Rate(1, 86_401)},
    ],
)  # fmt: skip
def test_limits_that_cannot_be(wrong: dict[str, Any]) -> None:
    """Given a name or a limit that can't be, then it is refused with what it must be."""
    with pytest.raises(ValueError, match=r"must be|is 1 to"):
        NewQueue(**{"name": "q", **wrong})


@pytest.mark.parametrize("wrong", [("a b",), ("q", "\n"), ("q", "k" * 257), ("q", "", 1_001), ("q", "", -1_001)])
def test_places_that_cannot_be(wrong: tuple[Any, ...]) -> None:
    """Given a queue, a key or a priority that can't be, then it is refused with what it must be."""
    with pytest.raises(ValueError, match=r"must be|is 1 to"):
        QueuePlace(*wrong)


def test_runs_in_a_queue(cluster: LocalCluster) -> None:
    """A queue is set with its limits, runs are sent to it with key and priority, and it says how it stands."""
    queue = cluster.queue("crawl", concurrency=2, per_key=1, rate=Rate(10, seconds=60))
    cluster.queue("crawl", concurrency=2, per_key=1, rate=Rate(10, seconds=60))
    info = queue.info()
    assert (info.concurrency, info.per_key, info.rate, info.seconds, info.by) == (2, 1, 10, 60.0, "ann")
    queue.pause()
    run = cluster.spawn(AgentSpec(name="a"), session_id="s").send("go", queue="crawl", key="acme", priority=5)
    assert cluster.session("s").info().status == "waiting_for_queue"
    assert cluster.sessions(live_only=True)[0].id == "s"
    [record] = cluster.session("s").runs()
    assert (record.status, record.queue, record.queue_key, record.queue_rank) == ("queued", "crawl", "acme", -5)
    assert (queue.info().waiting, queue.info().at_work, queue.info().paused) == (1, 0, True)
    with pytest.raises(Conflict):
        queue.remove()
    assert queue.resume()
    assert run.result(timeout=60).ok
    assert [one.name for one in cluster.queues()] == ["crawl"]
    assert queue.remove()


@workflow
async def doubled(ctx: Any, number: int) -> int:
    """Twice as much."""
    return number * 2


def test_a_workflow_in_a_queue(cluster: LocalCluster) -> None:
    """A workflow's run waits in a queue as an agent's does; with a queue that is not there, no session is made."""
    cluster.queue("q", concurrency=1)
    assert cluster.workflow(doubled, 4, queue=QueuePlace("q", key="k")).result(timeout=60).output == 8
    with pytest.raises(UnknownQueue):
        cluster.workflow(doubled, 4, session_id="none", queue="gone")
    assert "none" not in [session.id for session in cluster.sessions()]


@tool(on_crash="rerun")
def look() -> str:
    """Look."""
    return "seen"


def test_a_run_that_is_done_again_waits_again(cluster: LocalCluster) -> None:
    """Given a run of a queue that did not complete, when it is run again, then in the same queue."""
    cluster.queue("q", concurrency=1)
    script = 'offline-script: [{"tool_calls": [["look", {}]]}, {"text": "done"}]'
    session = cluster.spawn(AgentSpec(name="a", instructions=script, tools=[look], max_rounds=1))
    first = session.send("go", queue="q", key="k", priority=2)
    assert first.result(timeout=60).status == "round_limit"
    again = session.run_again()
    assert again is not None
    again.result(timeout=60)
    records = session.runs()
    assert [(one.queue, one.queue_key, one.queue_rank) for one in records] == [("q", "k", -2)] * 2


def test_keys_and_priorities_are_of_queues(cluster: LocalCluster) -> None:
    """Given a key or a priority without a queue, or wrong ones, then the client refuses them."""
    session = cluster.spawn(AgentSpec(name="a"))
    for wrong in ({"key": "k"}, {"priority": 1}, {"queue": "q", "priority": 5_000}, {"queue": "a b"}):
        with pytest.raises(InvalidInput):
            session.send("go", **wrong)
    with pytest.raises(InvalidInput, match="rate must be a Rate"):
        cluster.queue("q", rate=3)  # type: ignore[arg-type]


def test_the_command_line(cluster: LocalCluster, command: Command) -> None:
    """Queues are set, listed, shown, paused, resumed and removed at the command line, with JSON for scripts."""
    done = command("set", "crawl", "--concurrency", "8", "--rate", "10/1m", "--json")
    assert done.exit_code == 0, done.output
    assert (json.loads(done.stdout)["rate"], json.loads(done.stdout)["seconds"]) == (10, 60.0)
    assert "8 at once, 10 within 1m" in command("list").stdout
    assert json.loads(command("list", "--json").stdout)["queues"][0]["name"] == "crawl"
    assert json.loads(command("pause", "crawl", "--json").stdout) == {"paused": True}
    cluster.spawn(AgentSpec(name="a"), session_id="s").send("go", queue="crawl")
    shown = command("show", "crawl").stdout
    assert "crawl (paused)" in shown
    assert "1, and 0 behind" in shown
    refused = command("remove", "crawl")
    assert refused.exit_code == 1
    assert command("resume", "crawl").stdout == "resumed\n"
    cluster.session("s").runs()
    assert command("show", "gone").exit_code == 1
    assert json.loads(command("set", "x", "--rate", "10/1h30m", "--json").stdout)["seconds"] == 5_400.0
    for wrong in ("often", "10", "10/", "/1m", "10/1.5m", "-1/1m"):
        refused = command("set", "x", f"--rate={wrong}")
        assert refused.exit_code == 2, wrong


def test_a_clock_that_is_set_back_holds_nothing_up() -> None:
    """Given a rate that is used up, when the clock is set back by far, then the next run begins after the rate's time,
    and not when the clock has come to where it was; another clock's small lead counts as it is."""
    hour, period = 3_600_000_000, 60_000_000
    queue = limits(rate=2, period=period, begins=[hour, hour + 1])
    queue = queue._replace(begins=recent(queue, 1_000))
    assert room(queue, 0, 1_000) == 0
    assert looks_again(queue, 0, 1_000) == 1_000 + period
    assert room(queue, 0, 1_000 + period) == 2
    ahead = limits(rate=1, period=period, begins=[1_500])
    assert looks_again(ahead, 0, 1_000) == 1_500 + period
