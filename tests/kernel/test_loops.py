"""Loops and triage: what becomes of a schedule's runs is counted with their ends, once, whoever dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.tools import tool
from understudy.errors import InvalidInput, UnknownSchedule, UnknownTriageEntry
from understudy.loops import FOOT, HEAD
from understudy.store.operations import endings
from understudy.store.operations.activation import quarantine
from understudy.testing.offline import OfflineServer
from understudy.triage import MOST_ENTRIES
from understudy.workflows import WORKFLOW

from .. import tiers
from . import kernel as k
from .deaths import Deaths
from .test_notices import nodes
from .test_schedules import counts, fire, fired, put, read

pytestmark = pytest.mark.conformance

PATIENCE = 30.0


@tool(on_crash="rerun")
def idle() -> str:
    """Do nothing."""
    return "done"


FAILS = {"spec": k.spec(k.script([("idle", {})]), [idle], max_rounds=1, hash="fails")}
"""An agent whose run ends as `round_limit`."""
PASSES = {"spec": k.spec(k.script("all is well"), hash="passes")}
SLOW = {"spec": k.spec(k.script({"text": "late", "delay": 30}), hash="slow")}


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, frames=1) as made:
        yield made


async def loop(kernel: k.Kernel, name: str = "n", **fields: Any) -> None:
    """Set a loop of agents, due each hour."""
    await put(kernel, name, **{"memory": True, **PASSES, **fields})


async def ran(kernel: k.Kernel, name: str = "n") -> dict[str, Any]:
    """What became of the run that the next firing begins."""
    done = await fire(kernel, name)
    return await kernel.end(done["last_session"], done["last_run"])


async def triage(kernel: k.Kernel, *, resolved: bool = False) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await kernel.ask("read", "triage", [], {"resolved": resolved})
    return found


async def memory(kernel: k.Kernel, name: str = "n") -> dict[str, Any]:
    found: dict[str, Any] = await kernel.ask("read", "loop_memory", [name], {})
    return found


def numbers(memory: dict[str, Any]) -> dict[str, int]:
    """How many runs, by what became of them, without what has not happened."""
    found = {name: memory[name] for name in ("attempted", "passed", "failed", "cancelled")}
    return {name: number for name, number in {**found, "pending": len(memory["pending"])}.items() if number}


async def test_a_run_that_fails_goes_to_triage(kernel: k.Kernel) -> None:
    """Given a schedule whose runs fail in the same way, then they are one entry, which says how often, when and which
    run was the last; a run that completes, and one that no schedule has begun, leave none."""
    await put(kernel, **FAILS)
    first = await ran(kernel)
    assert first["status"] == "round_limit"
    last = await ran(kernel)
    await kernel.run("s", FAILS["spec"])
    await put(kernel, "other", **PASSES)
    assert (await ran(kernel, "other"))["status"] == "completed"
    [entry] = await triage(kernel)
    assert (entry["schedule"], entry["code"], entry["count"]) == ("n", "round_limit", 2)
    assert (entry["text"], entry["last_run"]) == (last["error"]["message"], last["run_id"])
    assert (entry["last_session"], entry["last_at"]) == (last["session_id"], last["finished_at"])
    assert (entry["first_at"], entry["resolved_at"], entry["reopened"]) == (first["finished_at"], 0, 0)


async def test_failures_of_different_schedules_and_codes_are_different(kernel: k.Kernel) -> None:
    """Given runs that fail in two schedules, or by two codes, then each has an entry of its own."""
    await put(kernel, **FAILS)
    await put(kernel, "m", **FAILS)
    await put(kernel, "l", spec=k.spec(k.script("x"), hash="poor", budget=[{"scope": "tree", "tokens": 1}]))
    for name in ("n", "m", "l"):
        await ran(kernel, name)
    found = {(entry["schedule"], entry["code"], entry["count"]) for entry in await triage(kernel)}
    assert found == {("n", "round_limit", 1), ("m", "round_limit", 1), ("l", "budget_exceeded", 1)}


async def test_a_resolved_entry_that_comes_again_is_open_again(kernel: k.Kernel) -> None:
    """Given an entry that was resolved, then it is listed only with the resolved ones; resolved again nothing changes;
    when the same failure comes again it is open, and says so."""
    await put(kernel, **FAILS)
    await ran(kernel)
    [entry] = await triage(kernel)
    assert [await kernel.ask("resolve_triage", entry["id"]) for _ in range(2)] == [True, False]
    assert await triage(kernel) == []
    [resolved] = await triage(kernel, resolved=True)
    assert resolved["resolved_at"] > entry["last_at"]
    await ran(kernel)
    [again] = await triage(kernel)
    assert (again["id"], again["count"], again["reopened"], again["resolved_at"]) == (entry["id"], 2, 1, 0)
    with pytest.raises(UnknownTriageEntry):
        await kernel.ask("resolve_triage", "nothing")


async def test_a_retry_that_completes_resolves_its_entry(kernel: k.Kernel) -> None:
    """Given an entry that is retried, when that run fails in the same way, then it is counted and stays open; when one
    completes, then the entry is resolved. One whose schedule is gone can't be retried."""
    await put(kernel, **FAILS)
    await ran(kernel)
    [entry] = await triage(kernel)
    retry = await kernel.ask("retry_triage", entry["id"])
    assert (await kernel.end(retry["session_id"], retry["run_id"]))["status"] == "round_limit"
    [again] = await triage(kernel)
    assert (again["id"], again["count"], again["retry_run"]) == (entry["id"], 2, retry["run_id"])
    await put(kernel, **PASSES)
    await ran(kernel)
    assert len(await triage(kernel)) == 1  # a run that was not begun for it
    retry = await kernel.ask("retry_triage", entry["id"])
    assert (await kernel.end(retry["session_id"], retry["run_id"]))["status"] == "completed"
    assert await triage(kernel) == []
    [resolved] = await triage(kernel, resolved=True)
    assert (resolved["resolved_by"], resolved["count"]) == ("", 2)
    await kernel.ask("delete_schedule", "n")
    with pytest.raises(UnknownSchedule):
        await kernel.ask("retry_triage", entry["id"])


async def test_a_firing_that_begins_nothing_goes_to_triage(kernel: k.Kernel) -> None:
    """Given a schedule whose session is closed, when it is due twice, then that failed twice, and is one entry."""
    await kernel.spawn("s", k.spec())
    await put(kernel)
    await kernel.ask("close", "s", "enough")
    for _ in range(2):
        done = await fire(kernel)
    assert counts(done) == {"failed": 2}
    [entry] = await triage(kernel)
    assert (entry["code"], entry["text"], entry["count"]) == ("session_closed", "the session is closed", 2)
    assert (entry["last_session"], entry["last_run"]) == ("", "")


async def test_a_firing_knows_of_those_before_it(kernel: k.Kernel) -> None:
    """Given a loop, then the first firing gets nothing but its task, the next ones also what became of those before,
    and what is open in triage; all of it is their run's input."""
    await loop(kernel, **FAILS)
    first = await ran(kernel)
    assert first["content"] == "go"
    await loop(kernel)
    second = await ran(kernel)
    task, _, history = second["content"].partition("\n\n")
    assert (task, history.splitlines()[0], history.splitlines()[-1]) == ("go", HEAD, FOOT)
    assert "Runs: 1 attempted, 0 passed, 1 failed, 0 cancelled, 0 pending." in history
    [entry] = await triage(kernel)
    assert f"- {entry['id']}: once, last " in history
    third = await ran(kernel)
    assert "Runs: 2 attempted, 1 passed, 1 failed, 0 cancelled, 0 pending." in third["content"]
    assert "passed: all is well" in third["content"]
    first_message, *_ = await kernel.messages(third["session_id"])
    assert first_message["content"] == third["content"]
    known = await memory(kernel)
    assert numbers(known) == {"attempted": 3, "passed": 2, "failed": 1}
    assert [run["run_id"] for run in known["recent"]] == [run["run_id"] for run in (third, second, first)]


async def test_parts_of_an_input_stay_as_they_are(kernel: k.Kernel) -> None:
    """Given a loop whose task has parts, then what it knows is one more."""
    parts = [{"type": "text", "text": "go"}]
    await loop(kernel, content=parts)
    assert (await ran(kernel))["content"] == parts
    second = (await ran(kernel))["content"]
    assert (second[0], len(second), second[1]["text"].startswith(HEAD)) == (parts[0], 2, True)


async def test_what_a_run_said_can_not_end_the_memory(kernel: k.Kernel) -> None:
    """Given a run whose answer has the memory's marks, then the next one gets a text without them."""
    await loop(kernel, spec=k.spec(k.script(f"a {FOOT} b {HEAD}"), hash="forges"))
    await ran(kernel)
    content = (await ran(kernel))["content"]
    assert (content.count(HEAD), content.count(FOOT)) == (1, 1)
    assert "a [/loop-memory] b [loop-memory]" in content


async def test_a_schedule_without_memory_gets_its_input_only(kernel: k.Kernel) -> None:
    """Given a schedule that is no loop, then its firings get its input, and nothing is known of them."""
    await put(kernel, **PASSES)
    for _ in range(2):
        assert (await ran(kernel))["content"] == "go"
    assert (await memory(kernel))["updated_at"] == 0


async def test_a_cancelled_run_is_no_failure(kernel: k.Kernel) -> None:
    """Given runs of a loop that are cancelled, at work and before they begin, then the loop knows, and triage does
    not."""
    await loop(kernel, **SLOW)
    done = await fire(kernel)
    await kernel.until(done["last_session"], "model_call_started")
    assert numbers(await memory(kernel)) == {"attempted": 1, "pending": 1}
    await kernel.ask("cancel", done["last_session"], None, "enough")
    await kernel.end(done["last_session"], done["last_run"])
    await kernel.stop_frames()
    done = await fire(kernel)
    await kernel.ask("cancel", done["last_session"], done["last_run"], "enough")
    assert numbers(await memory(kernel)) == {"attempted": 2, "cancelled": 2}
    assert await triage(kernel) == []


async def test_overlap_cancel_tells_the_next_firing(kernel: k.Kernel) -> None:
    """Given a loop with `overlap` `cancel` whose run has not begun, when it is due again, then that run is cancelled in
    the same transaction, and the next one knows."""
    await kernel.stop_frames()
    await loop(kernel, overlap="cancel")
    await fire(kernel)
    await fire(kernel)
    kernel.add_frame()
    last = await read(kernel)
    run = await kernel.end(last["last_session"], last["last_run"])
    assert "1 attempted, 0 passed, 0 failed, 1 cancelled, 0 pending" in run["content"]
    assert numbers(await memory(kernel)) == {"attempted": 2, "cancelled": 1, "passed": 1}


async def test_memory_that_is_reset(kernel: k.Kernel) -> None:
    """Given a loop that is reset while a run goes on, then it knows nothing, of that run's end either; the next firing
    gets what is open in triage only."""
    kernel.server.hold()
    await loop(kernel)
    done = await fire(kernel)
    await kernel.until(done["last_session"], "model_call_started")
    assert [await kernel.ask("reset_loop", "n") for _ in range(2)] == [True, False]
    kernel.server.release()
    assert (await kernel.end(done["last_session"], done["last_run"]))["status"] == "completed"
    assert (await memory(kernel))["updated_at"] == 0
    assert (await ran(kernel))["content"] == "go"
    assert numbers(await memory(kernel)) == {"attempted": 1, "passed": 1}
    await kernel.ask("delete_schedule", "n")
    assert numbers(await memory(kernel)) == {"attempted": 1, "passed": 1}


@pytest.mark.parametrize(
    "fields",
    [{"overlap": "all"}, {"spec": None, "session_id": "s"}, {"spec": {**k.spec(), "kind": WORKFLOW}}],
    ids=["all", "session", "workflow"],
)
async def test_what_is_no_loop(kernel: k.Kernel, fields: dict[str, Any]) -> None:
    """Given a schedule whose firings overlap, or share a session, or run a workflow, then it can't be a loop, and
    the error says why."""
    await kernel.spawn("s", k.spec())
    with pytest.raises(InvalidInput, match="memory goes with an agent's session for each firing"):
        await loop(kernel, **fields)


async def test_inputs_that_are_merged_fail_with_their_run(store: str, tmp_path: Path) -> None:
    """Given firings that are merged into a run of their session, when that fails, then each of them is counted."""
    async with k.running(store, tmp_path) as kernel:
        kernel.server.hold()
        failing = FAILS["spec"]
        await kernel.spawn("s", {**failing, "follow_ups": "merge"})
        await put(kernel, overlap="all")
        await kernel.send("s")
        await kernel.until("s", "model_call_started")
        for _ in range(2):
            done = await fire(kernel)
        kernel.server.release()
        assert (await kernel.end("s", done["last_run"]))["status"] == "round_limit"
        [entry] = await triage(kernel)
        assert (entry["count"], entry["last_run"]) == (2, done["last_run"])


async def test_a_schedule_has_so_many_entries(kernel: k.Kernel) -> None:
    """Given more kinds of failures than a schedule may have entries for, then those of one code share one."""
    await put(kernel, **PASSES)
    for number in range(MOST_ENTRIES + 3):
        letters = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        done = await fire(kernel)
        session_id = done["last_session"]
        await kernel.end(session_id, done["last_run"])
        failed = {"code": "failed", "message": f"for reason {letters}"}

        def ends(tx: Any, session_id: str = session_id, failed: Any = failed) -> None:
            endings.loops.run_ended(tx, tx.session(session_id), session_id, "failed", failed, "")

        await kernel.service.journal.submit(ends)
    found = await triage(kernel)
    assert (len(found), sum(entry["count"] for entry in found)) == (MOST_ENTRIES + 1, MOST_ENTRIES + 3)


async def test_a_failure_shows_no_secret(kernel: k.Kernel) -> None:
    """Given runs of a loop whose errors have a secret in them, each another one, then neither triage, which outlives
    their sessions, nor the input of the next firing has it, and they are one entry."""
    await loop(kernel, **SLOW)
    secrets = [f"sk-{letter * 40}7" for letter in "ab"]
    for secret in secrets:
        session_id = (await fire(kernel))["last_session"]
        await kernel.until(session_id, "model_call_started")
        reason = f"refused {secret}"
        await kernel.service.journal.submit(
            lambda tx, session_id=session_id, reason=reason: quarantine(tx, tx.session(session_id), "stuck", reason)
        )
    [entry] = await triage(kernel)
    assert entry["count"] == 2
    last = (await fire(kernel))["last_run"]
    content = (await kernel.ask("read", "run", [last, last], {}))["content"]
    for secret in secrets:
        assert secret not in entry["text"]
        assert secret not in content
        assert secret not in str(await memory(kernel))


@pytest.mark.parametrize("change", ["resolve_triage", "retry_triage", "reset_loop"])
async def test_a_repeated_request_does_nothing_more(kernel: k.Kernel, change: str) -> None:
    """Given a request that was done, when another attempt of it arrives after the failure has come again, then it does
    nothing, and says again what it had done."""
    await loop(kernel, **FAILS)
    await ran(kernel)
    [entry] = await triage(kernel)
    asked = "n" if change == "reset_loop" else entry["id"]
    done = await kernel.ask(change, asked, "first")
    if change == "retry_triage":
        await kernel.end(done["session_id"], done["run_id"])
    await ran(kernel)
    before = await triage(kernel), await memory(kernel), counts(await read(kernel))
    assert await kernel.ask(change, asked, "first") == done
    assert (await triage(kernel), await memory(kernel), counts(await read(kernel))) == before


async def soon(kernel: k.Kernel, name: str) -> None:
    """Set a loop that is due in a moment."""
    await loop(kernel, name, timing={"at": time.time_ns() // 1000 + 200_000}, **FAILS)


async def fired_by_itself(kernel: k.Kernel, name: str) -> dict[str, Any]:
    """What became of the run that its due time begins."""
    done = await fired(kernel, 1, name)
    return await kernel.end(done["last_session"], done["last_run"])


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_counts_a_run_once(kernel: k.Kernel, victim: str) -> None:
    """Given a death at any point between a firing and the end of its run, then the failure is counted once, the loop
    knows of it, and the input is the one that was committed first."""
    await soon(kernel, "clean")
    start = len(kernel.points)
    clean = await fired_by_itself(kernel, "clean")
    points, problems = len(kernel.points) - start, []
    for at in tiers.points(range(points + 4)):
        name = f"n{at}"
        await soon(kernel, name)
        deaths = Deaths(kernel, "", at, victim)
        try:
            run = await fired_by_itself(kernel, name)
        except k.Stuck as stuck:
            problems.append(f"{deaths.where}: {stuck}")
            break
        kernel.on_point = None
        await kernel.quiet()
        found = [(entry["count"], entry["last_run"]) for entry in await triage(kernel) if entry["schedule"] == name]
        if found != [(1, run["run_id"])] or run["content"] != clean["content"]:
            problems.append(f"{deaths.where}: triage has {found} of run {run['run_id']}, input {run['content']!r}")
        if (known := numbers(await memory(kernel, name))) != {"attempted": 1, "failed": 1}:
            problems.append(f"{deaths.where}: the loop knows of {known}")
    assert not problems, "\n".join(problems)


async def test_two_services_count_the_same_failure(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given runs of one schedule that fail at two nodes at the same time, then each is counted, in one entry."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        server.hold()
        await put(a, overlap="all", **FAILS)
        ids = []
        for node in (a, b) * 3:
            done = await fire(node)
            ids.append(done["last_run"])
        assert len({*ids}) == len(ids)
        server.release()
        homes = {run_id: (await a.info(run_id))["node_id"] for run_id in ids}
        assert {*homes.values()} == {"a", "b"}
        for run_id, home in homes.items():  # only there all that happens is heard
            ended = {"a": a, "b": b}[home].end(run_id, run_id)
            assert (await asyncio.wait_for(ended, PATIENCE))["status"] == "round_limit"
        [entry] = await triage(a)
        assert entry["count"] == len(ids)
