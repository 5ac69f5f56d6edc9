"""Inputs that wait when a run begins: runs of their own, or parts of that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy import HookContext, hook
from understudy.actors.hooks import describe_hook
from understudy.store.operations.endings import request_cancel

from .. import tiers
from . import kernel as k
from .deaths import Deaths

pytestmark = pytest.mark.conformance

RUNS = ("a", "b", "c")


async def queued(kernel: k.Kernel, session_id: str, **more: Any) -> None:
    """A run at work, and three inputs behind it."""
    kernel.server.hold()
    await kernel.spawn(session_id, k.spec(**more))
    await kernel.send(session_id, "first", run_id="first")
    await kernel.until(session_id, "model_call_started")
    for name in RUNS:
        await kernel.send(session_id, f"input {name}", run_id=name)


async def rows(kernel: k.Kernel, session_id: str) -> list[dict[str, Any]]:
    """How the three inputs ended."""
    return [await kernel.end(session_id, name) for name in RUNS]


async def test_inputs_are_runs_of_their_own_by_default(store: str, tmp_path: Path) -> None:
    """Given three inputs behind a run, when that has ended, then each is a run with its own answer."""
    async with k.running(store, tmp_path) as kernel:
        await queued(kernel, "s")
        kernel.server.release()
        found = await rows(kernel, "s")
        assert [row["text"] for row in found] == [f"offline: input {name}" for name in RUNS]
        assert [row.get("merged_into", "") for row in found] == ["", "", ""]


async def test_inputs_that_wait_are_merged_into_one_run(store: str, tmp_path: Path) -> None:
    """Given an agent that merges, when three inputs wait as its run ends, then they are the messages of one run; each
    run id has its result, and only the first has its rounds and its usage."""
    async with k.running(store, tmp_path) as kernel:
        await queued(kernel, "s", follow_ups="merge")
        kernel.server.release()
        found = await rows(kernel, "s")
        assert {(row["status"], row["text"]) for row in found} == {("completed", "offline: input c")}
        assert [row.get("merged_into", "") for row in found] == ["", "a", "a"]
        assert [row["rounds"] for row in found] == [1, 0, 0]
        assert [row["usage"] is not None for row in found] == [True, False, False]
        said = [(message["role"], message["run_id"]) for message in (await kernel.messages("s"))[2:]]
        assert said == [("user", "a")] * 3 + [("assistant", "a")]
        merged = [e for e in await kernel.events("s") if e["type"] == "run_merged"]
        assert [(event["run_id"], event["data"]["into"]) for event in merged] == [("b", "a"), ("c", "a")]


async def test_a_merged_run_ends_as_the_run_that_it_is_a_part_of(store: str, tmp_path: Path) -> None:
    """Given inputs that were merged, when one of them is cancelled, then nothing happens; when the run is, all end."""
    async with k.running(store, tmp_path) as kernel:
        await queued(kernel, "s", follow_ups="merge")
        kernel.server.release()
        kernel.server.hold()
        await kernel.until("s", "run_merged", 2)
        assert await kernel.ask("cancel", "s", "b", "not this one") is False
        assert await kernel.ask("cancel", "s", "a", "enough") is True
        kernel.server.release()
        found = await rows(kernel, "s")
        assert {(row["status"], row["error"]["message"]) for row in found} == {("cancelled", "enough")}


async def test_an_input_can_be_cancelled_until_it_is_merged(store: str, tmp_path: Path) -> None:
    """Given three inputs that wait, when one is cancelled, then the others are merged without it."""
    async with k.running(store, tmp_path) as kernel:
        await queued(kernel, "s", follow_ups="merge")
        assert await kernel.ask("cancel", "s", "b", "not this one")
        kernel.server.release()
        found = await rows(kernel, "s")
        assert [row["status"] for row in found] == ["completed", "cancelled", "completed"]
        assert [m["content"] for m in (await kernel.messages("s"))[2:4]] == ["input a", "input c"]


async def cancel_b(kernel: k.Kernel) -> None:
    """Cancel the input `b` in a transaction of its own."""
    journal = kernel.service.journal
    await type(journal).submit_all(journal, [lambda tx: request_cancel(tx, tx.session("s"), "no", "b")], "s")


async def test_a_cancel_that_meets_the_merge_leaves_no_text_of_its_input(store: str, tmp_path: Path) -> None:
    """Given a process that is about to begin with three inputs, when one of them is cancelled before that commit, then
    the model is not sent it, and the others are merged."""
    async with k.running(store, tmp_path) as kernel:
        await queued(kernel, "s", follow_ups="merge")
        done: list[bool] = []

        async def cancel_first() -> None:
            if not done and "run_finished" in await kernel.types("s"):
                done.append(True)
                await cancel_b(kernel)

        k.before_step(kernel, cancel_first)
        kernel.server.release()
        found = await rows(kernel, "s")
        assert [row["status"] for row in found] == ["completed", "cancelled", "completed"]
        assert done
        assert [m["content"] for m in (await kernel.messages("s"))[2:4]] == ["input a", "input c"]


BEGUN: list[tuple[str, bool]] = []
"""The texts that runs begin with, and whether their hooks may have been called before."""


@hook("run_start")
def sees_starts(context: HookContext) -> None:
    """Note them."""
    BEGUN.append((context.text, context.redone))


async def test_hooks_learn_that_a_run_begins_again(store: str, tmp_path: Path) -> None:
    """Given a process whose hooks have seen a run begin with three inputs, when one of these is cancelled before that
    commit, then the hooks are called again for the run, and learn that they may have been called before."""
    BEGUN.clear()
    async with k.running(store, tmp_path) as kernel:
        await queued(kernel, "s", follow_ups="merge", hooks=[describe_hook(sees_starts, pickle=None)[0]])

        async def cancel_first() -> None:
            if len(BEGUN) == 2 and "run_merged" not in await kernel.types("s"):
                await cancel_b(kernel)

        k.before_step(kernel, cancel_first)
        kernel.server.release()
        found = await rows(kernel, "s")
        await kernel.send("s", "last", run_id="last")
        await kernel.end("s", "last")
    assert [row["status"] for row in found] == ["completed", "cancelled", "completed"]
    texts = ["\n\n".join(f"input {name}" for name in names) for names in ("abc", "ac")]
    assert list(BEGUN) == [("first", False), (texts[0], False), (texts[1], True), ("last", False)]


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_merges_each_input_once(store: str, tmp_path: Path, victim: str) -> None:
    """Given a death of the frame or the node service at any point, then each input is answered once, in one run or in
    another, and the messages are in the order of the inputs."""
    async with k.running(store, tmp_path) as kernel:
        for at in tiers.points(range(24), is_sqlite=kernel.service.database.is_sqlite):
            session_id = f"s{at}"
            await queued(kernel, session_id, follow_ups="merge")
            Deaths(kernel, session_id, at, victim)
            kernel.server.release()
            found = await rows(kernel, session_id)
            kernel.on_point = None
            await kernel.quiet()
            assert {row["status"] for row in found} == {"completed"}
            texts = [m["content"] for m in await kernel.messages(session_id) if m["role"] == "user"]
            assert texts == ["first", *(f"input {name}" for name in RUNS)], at
            kernel.check(session_id)
