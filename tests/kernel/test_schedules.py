"""Schedules: what fires at due times, once, whoever finds them due and whatever dies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from understudy import WorkflowContext, workflow
from understudy.cluster.client.workflows import compile_workflow, definition_required
from understudy.errors import Conflict, InvalidInput, SessionClosed, UnknownQueue, UnknownSchedule, UnknownSession
from understudy.store.db.statements import SCHEDULE
from understudy.store.operations import code, schedules
from understudy.store.reads import schedules as schedule_reads
from understudy.testing.offline import OfflineServer

from . import kernel as k
from .test_notices import nodes

HOUR = 3_600_000_000
PATIENCE = 30.0


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, frames=1) as made:
        yield made


async def put(kernel: k.Kernel, name: str = "n", *, timing: Any = None, **fields: Any) -> str:
    """Set a schedule of a session `s`, due each hour; its outcome."""
    wanted = {"name": name, "content": "go", "timing": timing or {"every": 3600}, **fields}
    wanted |= {} if "spec" in fields else {"session_id": "s", **fields}
    done = await kernel.ask("set_schedule", wanted, {})
    return str(done["outcome"])


async def read(kernel: k.Kernel, name: str = "n") -> dict[str, Any]:
    """The schedule as it stands."""
    found: dict[str, Any] = await kernel.ask("read", "schedule", [name], {})
    return found


async def fire(kernel: k.Kernel, name: str = "n", *, times: int = 1, due_at: int | None = None) -> dict[str, Any]:
    """What happens when it is due, so many times at once; the schedule afterwards."""
    due_at = (await read(kernel, name))["due_at"] if due_at is None else due_at
    service = kernel.service
    submit = (lambda tx: schedules.fire(tx, name, due_at, service.homes) for _ in range(times))
    await asyncio.gather(*(service.journal.submit(operation) for operation in submit))
    return await read(kernel, name)


def counts(schedule: dict[str, Any]) -> dict[str, int]:
    """What became of its due times, without what has not happened."""
    return {name: schedule[name] for name in schedules.COUNTS if schedule[name]}


async def runs(kernel: k.Kernel, session_id: str = "s") -> list[dict[str, Any]]:
    """The runs of a session, the first one first."""
    found: list[dict[str, Any]] = await kernel.ask("read", "runs", [session_id], {})
    return found


async def fired(kernel: k.Kernel, number: int, name: str = "n") -> dict[str, Any]:
    """The schedule, once it has fired so often by itself."""
    async with asyncio.timeout(PATIENCE):
        while (found := await read(kernel, name))["fired"] < number:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)
    return found


async def test_it_fires_by_itself(kernel: k.Kernel) -> None:
    """Given a schedule of one time, when that comes, then its session gets the input, in a run that is known by the
    schedule and the time; the schedule has ended."""
    await kernel.spawn("s", k.spec())
    at = time.time_ns() // 1000 + 200_000
    assert await put(kernel, timing={"at": at}) == "created"
    done = await fired(kernel, 1)
    run = await kernel.end("s", f"schedule.n.{at}")
    assert (run["status"], run["text"]) == ("completed", "offline: go")
    [accepted] = [event["data"] for event in await kernel.events("s") if event["type"] == "run_accepted"]
    assert accepted["source"] == "schedule"
    assert counts(done) == {"fired": 1}
    assert (done["next_at"], done["due_at"]) == (0, 0)
    assert (done["last_session"], done["last_run"], done["last_at"]) == ("s", f"schedule.n.{at}", at)


async def test_each_firing_has_a_session(kernel: k.Kernel) -> None:
    """Given a schedule with a specification, when it fires twice, then there are two sessions of that agent, with its
    metadata, and a run each."""
    await put(kernel, spec=k.spec(name="clerk"), placement="", metadata={"for": "night"})
    for _ in range(2):
        done = await fire(kernel)
        run = await kernel.end(done["last_session"], done["last_run"])
        assert run["status"] == "completed"
        info = await kernel.info(done["last_session"])
        assert (info["agent"], info["metadata_json"]) == ("clerk", {"for": "night"})
    found = await kernel.ask("read", "sessions", [], {})
    assert len({row["session_id"] for row in found}) == 2


async def test_firings_wait_in_a_queue(kernel: k.Kernel) -> None:
    """Given schedules, of a session and of sessions of their own, that name a queue, when they fire, then their runs
    wait there, by their keys and priorities, and nowhere else; the schedule says which queue it is."""
    await kernel.ask("set_queue", {"name": "q", "concurrency": 1})
    await kernel.spawn("s", k.spec())
    await kernel.ask("pause_queue", "q", True)
    await put(kernel, "plain", place={"queue": "q"})
    await put(kernel, "first", place={"queue": "q", "key": "acme", "priority": 3}, spec=k.spec(), placement="")
    own = (await fire(kernel, "plain"))["last_run"], (await fire(kernel, "first"))["last_run"]
    found = await read(kernel, "first")
    assert (found["queue"], found["key"], found["priority"]) == ("q", "acme", 3)
    assert [(await kernel.info(session_id))["status"] for session_id in ("s", own[1])] == ["waiting_for_queue"] * 2
    await kernel.ask("pause_queue", "q", False)
    ended = [await kernel.end("s", own[0]), await kernel.end(own[1], own[1])]
    assert [run["status"] for run in ended] == ["completed"] * 2
    [later], [earlier] = [
        [event["at"] for event in await kernel.events(session_id) if event["type"] == "run_admitted"]
        for session_id in ("s", own[1])
    ]
    assert earlier < later


async def test_a_schedule_keeps_its_queue(kernel: k.Kernel) -> None:
    """Given no queue of that name, then no schedule is set for it; given one, then it is not removed while a schedule
    names it, also one that has ended, and is once that is deleted or names another."""
    await kernel.spawn("s", k.spec())
    with pytest.raises(UnknownQueue, match="there is no queue 'q'"):
        await put(kernel, place={"queue": "q"})
    assert await kernel.ask("read", "schedules", [], {}) == []
    await kernel.ask("set_queue", {"name": "q", "concurrency": 1})
    await put(kernel, place={"queue": "q"})
    await put(kernel, "ended", place={"queue": "q"}, max_firings=1)
    done = await fire(kernel, "ended")
    await kernel.end("s", done["last_run"])
    for name in ("ended", "n"):
        with pytest.raises(Conflict, match="names queue 'q'"):
            await kernel.ask("remove_queue", "q")
        await (kernel.ask("delete_schedule", name) if name == "ended" else put(kernel, name))
    assert await kernel.ask("remove_queue", "q")


@workflow
async def naps(ctx: WorkflowContext, seconds: float) -> str:
    """Sleep."""
    await ctx.sleep(seconds)
    return "rested"


def of_workflow(function: Any = naps, **given: Any) -> dict[str, Any]:
    """What a schedule says of a workflow that is to run with this input."""
    spec = compile_workflow(definition_required(function), model="offline", profile="offline", pickle=None).spec
    return {"spec": spec, "placement": "", "content": json.dumps(given)}


async def test_a_workflow_runs_once_for_each_due_time(kernel: k.Kernel) -> None:
    """Given a schedule of a workflow, when several fire each due time at once, then each has one session, in which the
    workflow has run once; while it sleeps the next due time is skipped."""
    await put(kernel, **of_workflow(seconds=0.05))
    for _ in range(2):
        done = await fire(kernel, times=3)
        run = await kernel.end(done["last_session"], done["last_run"])
        assert (run["status"], run["text"], run["source"]) == ("completed", "rested", "schedule")
    found = await kernel.ask("read", "sessions", [], {})
    assert [row["kind"] for row in found] == ["workflow"] * 2
    assert (counts(done), done["workflow"], done["agent"]) == ({"fired": 2}, "naps", "")
    assert await put(kernel, **of_workflow(seconds=3600)) == "replaced"
    napping = await fire(kernel)
    await kernel.until(napping["last_session"], "timer_set")
    assert counts(await fire(kernel)) == {"fired": 1, "skipped": 1}


async def test_who_fires_twice_changes_nothing(kernel: k.Kernel) -> None:
    """Given a due time, when several fire it at once, and one more once it is over, then there is one run."""
    await kernel.spawn("s", k.spec())
    await put(kernel)
    due_at = (await read(kernel))["due_at"]
    done = await fire(kernel, times=3)
    assert counts(await fire(kernel, due_at=due_at)) == counts(done) == {"fired": 1}
    assert [run["run_id"] for run in await runs(kernel)] == [f"schedule.n.{due_at}"]
    assert done["next_at"] == due_at + HOUR


async def at_work(kernel: k.Kernel, **fields: Any) -> str:
    """A schedule whose first firing's run waits for its model; its id."""
    kernel.server.hold()
    await kernel.spawn("s", k.spec())
    await put(kernel, **fields)
    done = await fire(kernel)
    await kernel.until("s", "model_call_started")
    return str(done["last_run"])


async def test_a_due_time_is_skipped_while_the_last_run_goes_on(kernel: k.Kernel) -> None:
    """Given a run that has not ended, when its schedule is due, then nothing fires, and the schedule says why; when it
    has ended the next one does."""
    run_id = await at_work(kernel)
    done = await fire(kernel)
    assert counts(done) == {"fired": 1, "skipped": 1}
    assert done["problem"] == f"run {run_id} of session s has not ended"
    kernel.server.release()
    await kernel.end("s", run_id)
    done = await fire(kernel)
    assert (counts(done), done["problem"]) == ({"fired": 2, "skipped": 1}, "")


async def test_a_due_time_waits_for_the_last_run(kernel: k.Kernel) -> None:
    """Given `queue`, when it is due while the last run goes on, then it is put off and nothing is counted; when that
    run has ended it fires, with the due time's own id."""
    run_id = await at_work(kernel, overlap="queue")
    before = await read(kernel)
    put_off = await fire(kernel)
    assert (counts(put_off), put_off["next_at"]) == ({"fired": 1}, before["next_at"])
    assert put_off["due_at"] != before["due_at"]
    kernel.server.release()
    await kernel.end("s", run_id)
    done = await fire(kernel)
    assert (counts(done), done["last_run"]) == ({"fired": 2}, f"schedule.n.{before['next_at']}")


async def test_a_due_time_cancels_the_last_run(kernel: k.Kernel) -> None:
    """Given `cancel`, when it is due while the last run goes on, then that is cancelled, and the next one comes."""
    run_id = await at_work(kernel, overlap="cancel")
    done = await fire(kernel)
    kernel.server.release()
    assert (await kernel.end("s", run_id))["status"] == "cancelled"
    assert (await kernel.end("s", done["last_run"]))["status"] == "completed"
    assert counts(done) == {"fired": 2}


async def test_due_times_that_do_not_look_at_each_other(kernel: k.Kernel) -> None:
    """Given `all`, when it is due while the last run goes on, then its session has one more input."""
    run_id = await at_work(kernel, overlap="all")
    done = await fire(kernel)
    kernel.server.release()
    assert [(await kernel.end("s", run))["status"] for run in (run_id, done["last_run"])] == ["completed"] * 2


@pytest.mark.parametrize(("catch_up", "fires"), [("latest", 1), ("all", 3)])
async def test_due_while_everything_was_down(
    store: str, tmp_path: Path, server: OfflineServer, catch_up: str, fires: int
) -> None:
    """Given due times that passed while nothing ran, when the services start again, then the latest of them fires at
    once, or all of them if that was wanted; each is counted."""
    async with k.running(store, tmp_path, server=server) as kernel:
        await kernel.spawn("s", k.spec())
        await put(kernel, timing={"every": 3600, "until": time.time_ns() // 1000 + 4 * HOUR}, catch_up=catch_up,
                  overlap="all")  # fmt: skip
        first = await set_back(kernel, "n", 3 * HOUR + HOUR // 2)
    async with k.running(store, tmp_path, server=server) as kernel:
        done = await fired(kernel, fires)
        ids = [f"schedule.n.{first + number * HOUR}" for number in range(3)][-fires:]
        assert [(await kernel.end("s", run_id))["status"] for run_id in ids] == ["completed"] * fires
        assert len(await runs(kernel)) == fires
        assert counts(done) == {"fired": fires} | ({"missed": 2} if fires == 1 else {})


async def set_back(kernel: k.Kernel, name: str, by: int) -> int:
    """Have a schedule look as if it had been set so much earlier, and nobody know; its first due time then."""
    names = ("first_at", "next_at", "due_at", "anchor")
    values = {column: SCHEDULE.c[column] - by for column in names}
    await kernel.service.journal.submit(lambda tx: tx.connection.execute(update(SCHEDULE).values(**values)))
    return int((await read(kernel, name))["next_at"])


@pytest.mark.parametrize(
    ("begin", "times"),
    [
        ("2099-03-28T00:00+01:00", ["2099-03-28T02:30+01:00", "2099-03-29T03:00+02:00", "2099-03-30T02:30+02:00"]),
        ("2099-10-24T00:00+02:00", ["2099-10-24T02:30+02:00", "2099-10-25T02:30+02:00", "2099-10-26T02:30+01:00"]),
    ],
)
async def test_a_cron_fires_once_a_day_over_a_change_of_the_clock(
    kernel: k.Kernel, begin: str, times: list[str]
) -> None:
    """Given a cron of a time that one day does not have, or has twice, then it fires once on each day."""
    await kernel.spawn("s", k.spec())
    start, *dues = (round(datetime.fromisoformat(time).timestamp() * 1e6) for time in (begin, *times))
    timing = {"cron": "30 2 * * *", "zone": "Europe/Berlin", "start": start}
    await put(kernel, timing=timing, overlap="all", max_firings=3)
    done = [await fire(kernel) for _ in dues]
    assert (counts(done[-1]), done[-1]["next_at"]) == ({"fired": 3}, 0)
    assert [run["run_id"] for run in await runs(kernel)] == [f"schedule.n.{due}" for due in dues]


class MovedClock:
    """The clock of this machine, set to other times.

    Attributes:
        ahead: nanoseconds.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self._real = time.time_ns

    def __call__(self) -> int:
        return self._real() + self.ahead

    def set(self, moment: str, *, early: float) -> None:
        """Have it show a time, from so many seconds on."""
        self.ahead = round((datetime.fromisoformat(moment).timestamp() - early) * 1e9) - self._real()


@pytest.mark.parametrize(
    ("hours", "moments"),
    [
        pytest.param(
            "2",
            {"2099-03-28T02:30+01:00": True, "2099-03-29T01:58+01:00": False, "2099-03-29T03:00+02:00": True,
             "2099-03-29T03:30+02:00": False, "2099-03-30T02:30+02:00": True},
            id="spring",
        ),
        pytest.param(
            "2",
            {"2099-10-24T02:30+02:00": True, "2099-10-25T02:30+02:00": True, "2099-10-25T02:30+01:00": False,
             "2099-10-26T02:30+01:00": True},
            id="autumn",
        ),
        pytest.param(
            "*",
            {"2099-10-25T01:30+02:00": True, "2099-10-25T02:30+02:00": True, "2099-10-25T02:00+01:00": False,
             "2099-10-25T02:30+01:00": True, "2099-10-25T03:30+01:00": True},
            id="hourly",
        ),
    ],
)  # fmt: skip
async def test_a_cron_fires_by_the_clock_over_its_changes(
    kernel: k.Kernel, monkeypatch: pytest.MonkeyPatch, hours: str, moments: dict[str, bool]
) -> None:
    """Given a cron of a workflow, when the machine's clock goes over a change of the zone's, then the service fires it
    at each of its times by itself, once: also where an hour is left out or comes twice; and never between them."""
    clock, timers, dues = MovedClock(), kernel.service.timers, list[str]()
    monkeypatch.setattr(time, "time_ns", clock)
    clock.set(next(iter(moments)), early=60.0)
    await put(kernel, timing={"cron": f"30 {hours} * * *", "zone": "Europe/Berlin"}, **of_workflow(seconds=0))
    for moment, is_due in moments.items():
        clock.set(moment, early=0.1 if is_due else 0.0)
        await timers.look_at_schedules()
        assert (await read(kernel))["fired"] == len(dues)
        if not is_due:
            assert not [key for key, _ in timers._noted if key[0] == schedules.OF_SCHEDULES]
            continue
        dues.append(f"schedule.n.{round(datetime.fromisoformat(moment).timestamp() * 1e6)}")
        done = await fired(kernel, len(dues))
        assert (await kernel.end(done["last_session"], done["last_run"]))["status"] == "completed"
        assert done["last_run"] == dues[-1]
    assert counts(done) == {"fired": len(dues)}
    found = await kernel.ask("read", "sessions", [], {})
    assert sorted(row["session_id"] for row in found) == sorted(dues)


async def test_it_is_paused_resumed_triggered_and_deleted(kernel: k.Kernel) -> None:
    """Given a paused schedule, when it is due, then that is skipped; triggered it fires all the same, and resumed
    again at its times. Deleted it is unknown."""
    await kernel.spawn("s", k.spec())
    await put(kernel)
    assert [await kernel.ask("pause_schedule", "n", True) for _ in range(2)] == [True, False]
    done = await fire(kernel)
    assert (counts(done), done["problem"], done["paused"]) == ({"skipped": 1}, "it is paused", True)
    triggered = await kernel.ask("trigger_schedule", "n")
    assert (triggered["outcome"], triggered["session_id"]) == ("fired", "s")
    assert (await kernel.end("s", triggered["run_id"]))["status"] == "completed"
    assert counts(await read(kernel)) == {"skipped": 1, "triggered": 1}
    assert await kernel.ask("pause_schedule", "n", False)
    assert counts(await fire(kernel)) == {"skipped": 1, "triggered": 1, "fired": 1}
    assert [await kernel.ask("delete_schedule", "n") for _ in range(2)] == [True, False]
    for asked in (("pause_schedule", "n", True), ("trigger_schedule", "n"), ("read", "schedule", ["n"], {})):
        with pytest.raises(UnknownSchedule):
            await kernel.ask(*asked)
    assert await kernel.ask("read", "schedules", [], {}) == []


async def test_what_is_triggered_overlaps_as_well(kernel: k.Kernel) -> None:
    """Given a run that has not ended, when its schedule is triggered, then that is skipped, also if due times wait."""
    run_id = await at_work(kernel, overlap="queue")
    triggered = await kernel.ask("trigger_schedule", "n")
    assert (triggered["outcome"], triggered["problem"]) == ("skipped", f"run {run_id} of session s has not ended")
    kernel.server.release()
    await kernel.end("s", run_id)


async def test_the_same_again_changes_nothing(kernel: k.Kernel) -> None:
    """Given a schedule that has fired, when the same is set again, then nothing changes; another definition of its name
    takes its place, and its counts begin at zero."""
    await kernel.spawn("s", k.spec())
    await put(kernel)
    fired = await fire(kernel)
    await kernel.end("s", fired["last_run"])
    before = await read(kernel)
    assert await put(kernel) == "unchanged"
    assert await read(kernel) == before
    assert await put(kernel, overlap="all") == "replaced"
    after = await read(kernel)
    assert (counts(after), after["last_run"]) == ({}, before["last_run"])
    assert after["next_at"] > before["last_at"]


async def test_its_code_is_kept(kernel: k.Kernel) -> None:
    """Given a schedule whose agent has code, when nobody has needed that for long, then it is kept until the schedule
    is deleted."""
    spec = {**k.spec(), "packages": ["package"]}
    wanted = {"name": "n", "content": "go", "timing": {"every": 3600}, "spec": spec}
    await kernel.ask("set_schedule", wanted, {"package": b"code"})

    async def unused() -> set[str]:
        found: set[str] = await kernel.service.reading.query(code.unused, 1 << 60)
        return found

    assert await unused() == set()
    await kernel.ask("delete_schedule", "n")
    assert await unused() == {"package"}


async def test_it_ends(kernel: k.Kernel) -> None:
    """Given a number of firings, or a time, then behind it nothing is due any more."""
    await kernel.spawn("s", k.spec())
    await put(kernel, overlap="all", max_firings=2)
    assert (await fire(kernel))["next_at"]
    assert (await fire(kernel))["next_at"] == 0
    now = time.time_ns() // 1000
    await put(kernel, "m", timing={"every": 3600, "until": now + HOUR + HOUR // 2}, overlap="all")
    assert (await fire(kernel, "m"))["next_at"] == 0


async def test_a_session_that_takes_no_input(kernel: k.Kernel) -> None:
    """Given a schedule whose session is closed, when it is due, then it has failed, says why, and goes on; none can be
    set for such a session, or for one that is not there."""
    await kernel.spawn("s", k.spec())
    await put(kernel)
    await kernel.ask("close", "s", "enough")
    done = await fire(kernel)
    assert (counts(done), done["problem"]) == ({"failed": 1}, "the session is closed")
    assert done["next_at"]
    with pytest.raises(SessionClosed):
        await put(kernel, "m")
    with pytest.raises(UnknownSession):
        await put(kernel, "m", session_id="nobody")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"timing": {"cron": "61 * * * *"}}, "bad minute"),
        ({"timing": {"at": 1}}, "would never be due"),
        ({"name": "a b"}, "must be 1 to 64 characters"),
        ({"overlap": "wait"}, "must be one of skip, queue, cancel, all"),
        ({"session_id": ""}, "one of the two"),
    ],
)
async def test_what_is_no_schedule(kernel: k.Kernel, fields: dict[str, Any], said: str) -> None:
    """Given a request with a mistake, then it is refused, and the text says what is wrong."""
    await kernel.spawn("s", k.spec())
    with pytest.raises(InvalidInput, match=said):
        await put(kernel, **fields)
    assert await kernel.ask("read", "schedules", [], {}) == []


@pytest.mark.parametrize("change", ["set_schedule", "pause_schedule", "trigger_schedule", "delete_schedule"])
async def test_a_repeated_request_does_nothing_more(kernel: k.Kernel, change: str) -> None:
    """Given a request that was done, when another attempt of it arrives, whatever happened since, then it does
    nothing, and says again what it had done."""
    await kernel.spawn("s", k.spec())
    await put(kernel)
    wanted = {"name": "n", "content": "other", "timing": {"every": 60}, "session_id": "s"}
    arguments = {"set_schedule": (wanted, {}), "pause_schedule": ("n", True)}.get(change, ("n",))
    done = await kernel.ask(change, *arguments, "first")
    await put(kernel)
    await kernel.ask("pause_schedule", "n", False)
    if change == "trigger_schedule":
        await kernel.end("s", done["run_id"])  # how it stands is shown with the schedule as well
    before = await read(kernel)
    assert await kernel.ask(change, *arguments, "first") == done
    assert await read(kernel) == before


@pytest.mark.parametrize("overlap", ["all", "cancel"])
async def test_triggers_at_the_same_time_are_different(kernel: k.Kernel, overlap: str) -> None:
    """Given a schedule that is triggered twice in one transaction, then two runs begin; by its overlap, the second one
    is at work instead of the first."""
    await put(kernel, spec=k.spec(), placement="", overlap=overlap)
    first, second = await asyncio.gather(*(kernel.ask("trigger_schedule", "n") for _ in range(2)))
    assert [first["outcome"], second["outcome"]] == ["fired", "fired"]
    ended = [(await kernel.end(one["session_id"], one["run_id"]))["status"] for one in (first, second)]
    assert ended == ["completed" if overlap == "all" else "cancelled", "completed"]
    assert first["run_id"] != second["run_id"]


async def test_two_services_fire_once(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given two node services that both find a schedule due, when its time comes, then there is one run of each due
    time, and all are counted."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        await a.spawn("s", k.spec())
        await put(b, timing={"every": 1}, overlap="all", max_firings=2)
        for node in (a, b):
            found = await node.service.reading.query(schedule_reads.due_schedules, 1 << 60)
            node.service.timers.note(((schedules.OF_SCHEDULES, name), due_at) for name, due_at in found)
        done = await fired(a, 2)
        assert counts(done) == {"fired": 2}
        assert len(await runs(a)) == 2
        for run in await runs(a):
            await asyncio.wait_for(a.end("s", run["run_id"]), PATIENCE)


async def test_another_service_fires_what_is_late(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a schedule that `a` looks after, when it is late, then `b` notes it as well, and not before."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        await a.spawn("s", k.spec())
        names = [f"n{number}" for number in range(20)]
        name = next(name for name in names if a.service.timers._is_mine(name))
        assert not b.service.timers._is_mine(name)
        await put(a, name, timing={"every": 20}, max_firings=1)
        noted = b.service.timers._noted
        await b.service.timers.look_at_schedules()
        assert not noted
        late = await set_back(a, name, 30_000_000)
        await b.service.timers.look_at_schedules()
        await fired(b, 1, name)
        await asyncio.wait_for(a.end("s", f"schedule.{name}.{late}"), PATIENCE)
