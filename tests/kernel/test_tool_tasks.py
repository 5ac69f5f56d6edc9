"""Tools that are executed in processes of their own: once while their node service lives, whoever else dies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec, InvalidSpec, WorkflowContext, workflow
from understudy.actors.tools import ToolContext, describe, tool
from understudy.attachments import Image
from understudy.cluster.client.workflows import compile_workflow, definition_required
from understudy.errors import StepTimeout
from understudy.store.transaction import Transaction
from understudy.testing import LocalCluster

from .. import tiers
from . import kernel as k
from .deaths import Deaths
from .people import person
from .tool_runner import Runner

pytestmark = pytest.mark.conformance


def find_out(context: ToolContext) -> str:
    return f"found {context.arguments['name']}"


@tool(num_gpus=1)
async def once(name: str, context: ToolContext) -> str:
    """Work on a GPU."""
    return f"did {name} as {context.call_key}"


@tool(num_cpus=2, on_crash="rerun")
def again(name: str) -> list[str | Image]:
    """Work that may be repeated."""
    return [f"did {name}", Image(b"\x89PNG\r\n\x1a\n....", "a.png")]


@tool(resources={"slot": 1}, on_crash=find_out)
async def known(name: str) -> str:
    """Work that can be found out about."""
    return f"did {name}"


@tool(memory=1e9, on_crash="ask")
async def doubtful(name: str) -> str:
    """Work that a person knows about."""
    return f"did {name}"


def spec(*calls: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return k.spec(k.script(list(calls), "done"), [once, again, known, doubtful], **more)


def running(tmp_path: Path, runner: Runner, name: str = "s") -> Any:
    directory = tmp_path / name
    directory.mkdir()
    return k.running(f"sqlite:///{directory}/store.db", directory, runner=runner)


def test_what_a_tool_needs_is_in_its_specification() -> None:
    """By Ray's names; without any of it a tool is executed by the session's process."""
    assert describe(once, pickle=None)[0][0]["task"] == {"GPU": 1.0}
    assert describe(known, pickle=None)[0][0]["task"] == {"slot": 1.0}
    assert "task" not in describe(k.note, pickle=None)[0][0]
    with pytest.raises(InvalidSpec, match="positive"):
        tool(name="t", num_gpus=0)(lambda: None)


async def test_calls_are_executed_elsewhere(tmp_path: Path) -> None:
    """Sync and async functions, with their context and all kinds of results; wrong arguments begin nothing."""
    runner = Runner()
    async with running(tmp_path, runner) as runner.kernel:
        calls = [("once", {"name": "a"}), ("again", {"name": "b"}), ("again", {"nam": "c"})]
        ended = await runner.kernel.run("s", spec(*calls))
        results = await runner.kernel.results()
        types = await runner.kernel.types("s")
    assert ended["text"] == "done"
    assert results[0] == "did a as s/r/1/0"
    assert results[1][0]["text"].startswith("did b\n[attachment 1:")
    assert results[1][1]["type"] == "image_url"
    assert "don't fit the parameters" in results[2]
    assert sorted(runner.begun) == ["r/1/0", "r/1/1"]
    assert types.count("tool_started") == 1  # what may run again has no mark


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["once", "again"])
async def test_a_death_of_the_frame_anywhere_repeats_nothing(name: str, tmp_path: Path) -> None:
    """The next activation finds what is under way, or its result: each call is executed once."""

    async def run(at: int | None) -> int:
        runner = Runner()
        async with running(tmp_path, runner, str(at)) as runner.kernel:
            start = len(runner.kernel.points)
            if at is not None:
                Deaths(runner.kernel, "s", at)
            ended = await runner.kernel.run("s", spec((name, {"name": "a"})))
            runner.kernel.on_point = None
            await runner.kernel.quiet()
            points = len(runner.kernel.points) - start
            (result,) = await runner.kernel.results()
        text = result if isinstance(result, str) else result[0]["text"]
        in_doubt = not runner.begun and "unknown" in text  # between its mark and its begin
        assert ended["status"] == "completed"
        assert in_doubt or (len(runner.begun) == 1 and text.startswith("did a")), (at, runner.begun, text)
        return points

    for at in tiers.points(range(await run(None))):
        await run(at)


@pytest.mark.sweep
async def test_a_death_of_the_node_service_anywhere(tmp_path: Path) -> None:
    """What it had begun ends with it, and nobody knows of it: it is not begun again."""

    async def run(at: int | None) -> int:
        runner = Runner()
        async with running(tmp_path, runner, str(at)) as runner.kernel:
            start = len(runner.kernel.points)
            if at is not None:
                Deaths(runner.kernel, "s", at, "node")
            ended = await runner.kernel.run("s", spec(("once", {"name": "a"})))
            runner.kernel.on_point = None
            await runner.kernel.quiet()
            points = len(runner.kernel.points) - start
            (text,) = await runner.kernel.results()
        assert ended["status"] == "completed"
        assert text.startswith("did a") or "unknown" in text, (at, text)
        assert len(runner.begun) <= 1, at
        return points

    for at in tiers.points(range(await run(None))):
        await run(at)


@pytest.mark.parametrize(
    ("name", "begun", "result"),
    [("once", 1, "unknown"), ("again", 2, "did a"), ("known", 1, "found a")],
)
async def test_a_process_that_dies(name: str, begun: int, result: str, tmp_path: Path) -> None:
    """By the tool's `on_crash`, as if the session's process had died; its session goes on in its frame."""
    runner = Runner()
    runner.dies = 1
    async with running(tmp_path, runner) as runner.kernel:
        await runner.kernel.run("s", spec((name, {"name": "a"})))
        (found,) = await runner.kernel.results()
        assert (await runner.kernel.info("s"))["epoch"] == 1
        events = await runner.kernel.events("s")
    (finished,) = [event["data"] for event in events if event["type"] == "tool_finished"]
    assert finished["executions"] == 1
    if name == "once":
        assert found == "interrupted: the tool's own process died while this tool ran; its outcome is unknown"
        assert finished["started_at"] <= runner.began_at <= finished["started_at"] + finished["duration"]
    assert len(runner.begun) == begun
    assert result in (found if isinstance(found, str) else found[0]["text"])


async def test_a_person_is_asked_about_a_process_that_died(tmp_path: Path) -> None:
    """And may let it run again."""
    runner = Runner()
    runner.dies = 1
    async with running(tmp_path, runner) as runner.kernel:
        async with person(runner.kernel, "s", lambda _asked: {"decision": "rerun"}) as asked:
            await runner.kernel.run("s", spec(("doubtful", {"name": "a"})))
        assert await runner.kernel.results() == ["did a"]
        events = await runner.kernel.events("s")
    (question,) = asked
    assert question["prompt"].startswith("The tool's own process died while doubtful ran with ")
    assert [event["data"]["executions"] for event in events if event["type"] == "tool_finished"] == [2]
    assert len(runner.begun) == 2


async def test_processes_that_die_again_and_again(tmp_path: Path) -> None:
    """A call that may run again is not begun for ever."""
    runner = Runner()
    runner.dies = 9
    async with running(tmp_path, runner) as runner.kernel:
        await runner.kernel.run("s", spec(("again", {"name": "a"})))
        (found,) = await runner.kernel.results()
    assert len(runner.begun) == 3
    assert "died 3 times" in found


async def test_a_cancelled_run_ends_its_processes(tmp_path: Path) -> None:
    """At once, where its frame lives."""
    runner = Runner()
    runner.gate.clear()
    async with running(tmp_path, runner) as runner.kernel:
        await runner.kernel.spawn("s", spec(("once", {"name": "a"})))
        await runner.kernel.send("s")
        await runner.at_work.wait()
        await runner.kernel.ask("cancel", "s", None, "enough")
        ended = await runner.kernel.end("s")
        async with asyncio.timeout(k.STUCK_SECONDS):
            await runner.cancelled.wait()
    assert ended["status"] == "cancelled"


async def test_what_nobody_wants_any_more_is_found(tmp_path: Path) -> None:
    """The run ended and its frame could not say so: the service finds out by itself, and forgets what has ended."""
    runner = Runner()
    async with running(tmp_path, runner) as runner.kernel:
        await runner.kernel.run("s", spec(("once", {"name": "a"})))
        tasks = runner.kernel.service.tasks
        assert len(tasks._calls) == 1
        await tasks.look()
        assert not tasks._calls
        runner.gate.clear()
        await runner.kernel.spawn("t", spec(("once", {"name": "a"})))
        await runner.kernel.send("t")
        runner.at_work.clear()
        await runner.at_work.wait()
        await tasks.look()
        assert not runner.cancelled.is_set()
        worker = runner.kernel.holder("t")
        assert worker is not None
        worker.dead = True  # it says nothing any more, and nobody knows
        worker.task.cancel()
        await runner.kernel.ask("cancel", "t", None, "enough")
        await runner.kernel._tell_of_death(worker.frame_id)
        del runner.kernel.workers[worker.frame_id]
        await runner.kernel.end("t")
        await tasks.look()
        async with asyncio.timeout(k.STUCK_SECONDS):
            await runner.cancelled.wait()


@workflow
async def limited(ctx: WorkflowContext) -> str:
    try:
        return str(await ctx.within(0.05, ctx.tool(once, "a")))
    except StepTimeout as error:
        return error.code


async def test_what_is_out_of_time_when_a_workflow_is_restored_is_ended(tmp_path: Path) -> None:
    """Given a step that is executed elsewhere, when its frame dies and its time is over before the workflow is
    restored, then its process is ended at once, and its outcome is unknown."""
    runner = Runner()
    runner.gate.clear()
    async with running(tmp_path, runner) as runner.kernel:
        kernel = runner.kernel
        compiled = compile_workflow(definition_required(limited), model="offline", profile="offline", pickle=None)
        await kernel.spawn("w", compiled.spec)
        await kernel.send("w", "{}")
        await runner.at_work.wait()
        worker = kernel.holder("w")
        assert worker is not None
        worker.dead = True  # it says nothing any more, and nobody knows
        worker.task.cancel()
        async with asyncio.timeout(k.STUCK_SECONDS):
            while not await kernel.service.journal.submit(_results):  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        await kernel._tell_of_death(worker.frame_id)
        del kernel.workers[worker.frame_id]
        ended = await kernel.end("w")
        assert (ended["status"], ended["text"]) == ("completed", "step_timeout")
        assert runner.cancelled.is_set()
        finished = [event["data"] for event in await kernel.events("w") if event["type"] == "tool_finished"]
        assert [data["outcome"] for data in finished if data["tool"] == "once"] == ["interrupted"]


def _results(tx: Transaction) -> list[str]:
    return [item.key for item in tx.inbox(tx.session("w")) if item.is_result]


async def test_nobody_to_execute_it(tmp_path: Path) -> None:
    """A cluster without resources says so."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        await kernel.run("s", spec(("once", {"name": "a"})))
        assert "asks for resources" in (await kernel.results())[0]


def test_a_local_cluster_executes_them_itself() -> None:
    """Sync and async functions, also those that can't be imported, in a thread of this process."""
    pids: list[int] = []

    @tool(num_gpus=4)
    def local(name: str) -> str:
        """Work."""
        pids.append(os.getpid())
        return f"did {name}"

    with LocalCluster() as cluster:
        agent = AgentSpec(
            name="a", model="offline", tools=[local, again],
            instructions=k.script([("local", {"name": "a"}), ("again", {"name": "b"})], "done"),
        )  # fmt: skip
        session = cluster.spawn(agent)
        assert session.send("go").result(timeout=30).text == "done"
        results = [message.text for message in session.messages() if message.role == "tool"]
    assert pids == [os.getpid()]
    assert results[0] == "did a"
    assert results[1].startswith("did b\n[attachment 1:")
