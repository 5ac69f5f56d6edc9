"""Job control: a session lists and stops what it has going on; each stop is done once, whatever dies or ends then."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy.identifiers import child_identifier
from understudy.store.operations import timers

from .. import tiers
from . import kernel as k
from .deaths import Deaths
from .test_background import LONG, child, ends, lead, reported, start, until_reported, worker
from .test_supervision import Begun, does_not_listen
from .test_waking import due, fire

pytestmark = pytest.mark.conformance


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    Begun.number, Begun.let_go = asyncio.Semaphore(0), type(Begun.let_go)()
    async with k.running(store, tmp_path) as made:
        yield made
        Begun.let_go.set()


def boss(*replies: Any, **more: Any) -> dict[str, Any]:
    """An agent with all tools that start jobs and reach them, whose model gives these replies."""
    spec = lead(*replies, **more)
    spec["tools"] += k.spec(tools=["schedule_wakeup"])["tools"]
    return spec


def wakeup(name: str = "w", seconds: float = 3600, **more: Any) -> tuple[str, dict[str, Any]]:
    return "schedule_wakeup", {"prompt": "look again", "seconds": seconds, "name": name, **more}


def stop(job: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "stop_job", {"job": job, **more}


def pause(seconds: float) -> tuple[str, dict[str, Any]]:
    return "wait", {"seconds": seconds}


async def begun(kernel: k.Kernel, *replies: Any, **more: Any) -> None:
    """The session `s` at work under this agent."""
    await kernel.spawn("s", boss(*replies, **more))
    await kernel.send("s")


async def names(kernel: k.Kernel, event_type: str, session_id: str = "s") -> list[str]:
    """The names of the timers that the session's events of a type are about."""
    return [e["data"]["name"] for e in await kernel.events(session_id) if e["type"] == event_type]


async def busy(kernel: k.Kernel) -> None:
    """Let the session's wait be over, once its sub-agent is at its tool."""
    await Begun.number.acquire()
    await kernel.until("s", "timer_set")
    await fire(kernel, "call:r/2/0")


async def test_one_list_of_all_kinds(kernel: k.Kernel) -> None:
    """Given two sub-agents, one of which has finished, and two wakeups, then the list has what goes on first, the
    newest first, and says of each what it is, how it stands and since when."""
    agents = {"digger": worker("a bone"), "sleeper": worker(LONG)}
    starts = [("start_agent", {"agent": name, "task": f"{name}'s task"}) for name in agents]
    spec = boss(
        [starts[0]], [pause(0.5)], [starts[1]], [wakeup("a")], [wakeup("b", every=60)], [("list_jobs", {})], "ok"
    )
    await kernel.spawn(
        "s", {**spec, "agents": {name: {**agent, "name": name, "hash": name} for name, agent in agents.items()}}
    )
    await kernel.send("s")
    await kernel.end("s")
    listed = re.sub(r"[0-9.]+ seconds?", "N", (await kernel.results())[-1])
    assert listed.splitlines() == [
        "b (wakeup): due in N, then every N, started N ago: look again",
        "a (wakeup): due in N, started N ago: look again",
        f"{child(round_number=3)} (sub-agent sleeper): at work ({await status(kernel, child(round_number=3))}), "
        "started N ago: sleeper's task",
        f"{child()} (sub-agent digger): completed, ended N ago: a bone",
    ]


async def status(kernel: k.Kernel, session_id: str) -> str:
    """How the sub-agent stands while it waits for its time."""
    await kernel.until(session_id, "timer_set")
    found: str = (await kernel.info(session_id))["status"]
    return found


async def test_a_stopped_wakeup_never_fires(kernel: k.Kernel) -> None:
    """Given a recurring wakeup and another, when both are stopped before they are due, then neither fires when its time
    has come, and the log says that they were given up; what is stopped again is unknown."""
    replies = [wakeup("a", every=1), wakeup("b")], [pause(3600)], [stop("a"), stop("b")], [stop("a")], "ok"
    await begun(kernel, *replies)
    await kernel.until("s", "timer_set", 3)
    due_at = await due(kernel)
    await fire(kernel, "call:r/2/0")
    await kernel.end("s")
    assert (await kernel.results())[-3:] == [
        "wakeup a is stopped", "wakeup b is stopped", "you have no job 'a'. You have no jobs.",
    ]  # fmt: skip
    for name in ("wakeup:a", "wakeup:b"):
        await kernel.service.journal.submit(lambda tx, name=name: timers.fire(tx, "s", name, due_at["s", name]))
    assert await names(kernel, "timer_cancelled") == ["a", "b"]
    assert await names(kernel, "timer_fired") == ["r/2/0"]
    assert [run["run_id"] for run in await kernel.ask("read", "runs", ["s"], {})] == ["r"]


async def test_a_wakeup_that_has_fired_is_said_to_have(kernel: k.Kernel) -> None:
    """Given wakeups that fire while the run goes on, when they are stopped in it, then the results say that they have
    fired; the one that recurs does not fire again, and each prompt comes once."""
    await begun(kernel, [wakeup("once"), wakeup("often", every=1)], [pause(3600)], [stop("once"), stop("often")], "ok")
    await kernel.until("s", "timer_set", 3)
    for name in ("wakeup:once", "wakeup:often", "call:r/2/0"):
        await fire(kernel, name)
    await kernel.end("s")
    once, often = (await kernel.results())[-2:]
    assert re.fullmatch(r"wakeup once has fired \d+ seconds? ago: its prompt is still to come to you, once", once)
    assert often == "wakeup often is stopped, after it has fired: its prompt is still to come to you, once"
    await kernel.until("s", "run_finished", 3)
    assert sorted(await names(kernel, "timer_fired")) == ["often", "once", "r/2/0"]
    assert await kernel.ask("read", "wakeups", ["s"], {}) == []
    kernel.check()


async def test_names_of_wakeups_that_begin_alike(kernel: k.Kernel) -> None:
    """Given a wakeup `a.b` that has fired, when `a` is stopped, then there is no such job."""
    await begun(kernel, [wakeup("a.b")], [pause(3600)], [stop("a"), stop("a.b")], "ok")
    await kernel.until("s", "timer_set", 2)
    await fire(kernel, "wakeup:a.b")
    await fire(kernel, "call:r/2/0")
    await kernel.end("s")
    assert (await kernel.results())[-2].startswith("you have no job 'a'.")
    assert (await kernel.results())[-1].startswith("wakeup a.b has fired ")


async def test_the_end_of_a_stopped_sub_agent_is_reported_once(kernel: k.Kernel) -> None:
    """Given a sub-agent that waits, when it is stopped twice, then it ends in the first one's transaction, the second
    finds it not at work, and its end is reported once."""
    await begun(kernel, [start()], [pause(0.3)], [stop(child())], [stop(child())], "ok", worker=worker(LONG))
    await kernel.end("s")
    assert (await kernel.results())[2:] == [f"sub-agent {child()} is stopped", f"sub-agent {child()} is not at work"]
    await until_reported(kernel)
    assert await reported(kernel) == [child()]
    assert (await kernel.end(child(), "task"))["error"]["message"] == "its parent stopped it"
    kernel.check()


@pytest.mark.parametrize("grace", [0.3, 0])
async def test_a_grace_is_shorter(kernel: k.Kernel, grace: float) -> None:
    """Given a sub-agent whose tool does not listen, and that has an hour to end, when it is stopped with a grace, then
    it is ended by force after that."""
    helper = worker([("does_not_listen", {})], tools=[does_not_listen], shutdown=3600.0)
    await begun(kernel, [start()], [pause(3600)], [stop(child(), grace=grace)], "ok", worker=helper)
    await busy(kernel)
    await until_reported(kernel)
    assert (await kernel.end(child(), "task"))["status"] == "cancelled"
    [forced] = [e["data"] for e in await kernel.events(child()) if e["type"] == "shutdown_forced"]
    assert forced["waited"] == grace * 1_000_000
    said = (
        f"sub-agent {child()} was told to end, and has 0.3 seconds for it"
        if grace
        else f"sub-agent {child()} is stopped"
    )
    assert (await kernel.results())[2] == said
    assert await reported(kernel) == [child()]


async def test_a_second_stop_may_shorten_the_grace(kernel: k.Kernel) -> None:
    """Given a sub-agent that was told to end and has an hour for it, when it is stopped again with less, then it is
    ended by force after that; a longer one changes nothing."""
    helper = worker([("does_not_listen", {})], tools=[does_not_listen], shutdown=3600.0)
    stops = [stop(child())], [stop(child(), grace=7200)], [stop(child(), grace=0.1)]
    await begun(kernel, [start()], [pause(3600)], *stops, "ok", worker=helper)
    await busy(kernel)
    await until_reported(kernel)
    has = f"sub-agent {child()} was told to end, and has "
    first, longer, shorter = (await kernel.results())[2:5]
    assert first == f"{has}3600 seconds for it"
    assert 3500 < float(longer.removeprefix(has).split()[0]) < 3600
    assert shorter == f"{has}0.1 seconds for it"
    assert await reported(kernel) == [child()]


async def test_one_that_is_never_ended_by_force(kernel: k.Kernel) -> None:
    """Given a sub-agent whose specification says so, then no grace of its parent's does it; it ends when it can."""
    helper = worker([("does_not_listen", {})], tools=[does_not_listen], shutdown=None)
    await begun(kernel, [start()], [pause(3600)], [stop(child(), grace=0)], "ok", worker=helper)
    await busy(kernel)
    await kernel.end("s")
    assert (await kernel.results())[2] == f"sub-agent {child()} was told to end"
    assert (await kernel.info(child()))["active"]
    Begun.let_go.set()
    await until_reported(kernel)
    assert "shutdown_forced" not in await kernel.types(child())


async def test_tasks_that_wait_are_stopped_as_well(kernel: k.Kernel) -> None:
    """Given a finished sub-agent that is sent two more tasks, when it is stopped in the same turn, then neither begins,
    and the end of each is reported."""
    sends = [("send_to_agent", {"agent": child(), "message": text}) for text in ("more", "most")]
    helper = worker("dug", lifecycle="linked")
    await begun(kernel, [start()], [pause(0.5)], [*sends, stop(child())], "ok", worker=helper)
    await kernel.end("s")
    assert (await kernel.results())[-1] == f"sub-agent {child()} is stopped"
    await kernel.quiet()
    runs = await kernel.ask("read", "runs", [child()], {})
    assert sorted(run["status"] for run in runs) == ["cancelled", "cancelled", "completed"]
    assert sum(run["started_at"] > 0 for run in runs) == 1
    for run in await kernel.ask("read", "runs", ["s"], {}):
        await kernel.end("s", run["run_id"])
    assert await reported(kernel) == [child()] * 3
    kernel.check()


async def test_only_jobs_of_its_own(kernel: k.Kernel) -> None:
    """Given another session with a wakeup and a sub-agent that is waited for, when a model names what is not its own,
    or no job at all, then nothing is stopped, and the results say so."""
    await kernel.spawn("other", k.spec())
    await kernel.ask("schedule", "other", {"name": "w", "prompt": "x", "seconds": 3600, "every": None})
    calls = [stop("other"), stop("w"), stop(5), stop("x", grace=-1), stop("x", grace="1"), ("stop_job", {})]  # type: ignore[arg-type]
    await begun(kernel, calls, "ok")
    await kernel.end("s")
    other, name, number, negative, text, nothing = await kernel.results()
    assert (other, name) == tuple(f"you have no job {job!r}. You have no jobs." for job in ("other", "w"))
    assert number == nothing == 'the argument "job" must be the id of a job of yours.'
    assert negative == text == 'the argument "grace" must be a number of seconds, 0 to 86400.'
    assert len(await kernel.ask("read", "wakeups", ["other"], {})) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("tenths", range(1, 10))
async def test_a_stop_races_with_an_end(kernel: k.Kernel, tenths: int) -> None:
    """Given a wakeup that fires and a sub-agent that finishes about when they are stopped, then each result says which
    was first: a stopped wakeup has not fired, one that has fired does so once, and the sub-agent's end is reported
    once."""
    about = tenths / 20
    helper = worker([pause(about)], "dug")
    await begun(
        kernel, [wakeup("w", about), start()], [pause(0.25)], [stop("w"), stop(child(index=1))], "ok", worker=helper
    )
    await kernel.end("s")
    woken, ended = (await kernel.results())[-2:]
    await until_reported(kernel)
    await kernel.quiet()
    fired = (await names(kernel, "timer_fired")).count("w")
    cancelled = (await names(kernel, "timer_cancelled")).count("w")
    assert (fired, cancelled) == ((0, 1) if woken == "wakeup w is stopped" else (1, 0))
    assert await reported(kernel) == [child(index=1)]
    finished = (await kernel.end(child(index=1), "task"))["status"]
    assert ended.endswith("is not at work") or finished == "cancelled"
    kernel.check()


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_at_every_point(store: str, tmp_path: Path, victim: str) -> None:
    """Given a session that starts, lists and stops jobs of both kinds, when a frame or the node service dies at any
    point, then each is stopped once, and reported once, and the transcript is that without a death."""
    problems = []
    async with k.running(store, tmp_path) as kernel:
        wanted = await _stopped(kernel, "clean")
        points = len(kernel.points)
        assert wanted[1:] == ({"w": 1}, [], 1, 1)
        for at in tiers.points(range(points + 4), is_sqlite=kernel.service.database.is_sqlite):
            deaths = Deaths(kernel, f"s{at}", at, victim)
            try:
                found = await _stopped(kernel, f"s{at}")
            except k.Stuck as stuck:
                problems.append(f"{deaths.where}: {stuck}")
                continue
            finally:
                kernel.on_point = None
            await kernel.quiet()
            kernel.check(f"s{at}")
            if found != wanted:
                problems.append(f"{deaths.where}: {found}")
    assert not problems, "\n".join(problems)


async def _stopped(kernel: k.Kernel, session_id: str) -> tuple[Any, ...]:
    """What comes of a session that starts two jobs, lists them and stops them: its results without ids and times, its
    wakeups that were given up, those that fired, and how often its sub-agent was reported and cancelled."""
    job = child_identifier(session_id, "r/1/0")
    replies = [start(), wakeup()], [("list_jobs", {})], [stop(job), stop("w")], "ok"
    await kernel.spawn(session_id, boss(*replies, worker=worker(LONG)))
    await kernel.send(session_id)
    await kernel.end(session_id)
    await until_reported(kernel, session_id)
    said = [
        re.sub(r"[0-9.]+ seconds?|\(\w+\),|is stopped|was told.*", "N", text)
        for text in await kernel.results(session_id)
    ]
    cancelled = await names(kernel, "timer_cancelled", session_id)
    assert await ends(kernel, session_id) == [job]
    return (
        [text.replace(job, "JOB") for text in said],
        {name: cancelled.count(name) for name in cancelled},
        await names(kernel, "timer_fired", session_id),
        (await reported(kernel, session_id)).count(job),
        (await kernel.types(job)).count("cancel_requested"),
    )
