"""Commands in the background: real processes, each started once, its end reported once, none left, whatever dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from understudy.commands import COMMAND, MOST_COMMANDS, job_identifier
from understudy.node import command_processes
from understudy.node import commands as commands_of_nodes
from understudy.node.command_runner import start_time
from understudy.store.operations import commands
from understudy.testing.offline import OfflineServer

from .. import tiers
from ..mcp_calls import until
from . import kernel as k
from .deaths import Deaths
from .test_background import lead

pytestmark = pytest.mark.conformance

TOOLS = ["commands", "wait"]
SLEEPER = "echo begun; exec sleep 1000"


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path) as made:
        yield made
        for session_id in {row["session_id"] for row in await made.ask("read", "sessions", [], {})}:
            await made.ask("close", session_id, "the test is over")
        await nothing_left(made)


async def nothing_left(kernel: k.Kernel) -> None:
    """Wait until no command of the kernel's node is at work."""
    processes = kernel.service.commands._processes
    assert processes is not None
    async with asyncio.timeout(k.STUCK_SECONDS):
        for key in processes.known():
            await processes.ended(key)


def agent(directory: Path, *replies: Any, **more: Any) -> dict[str, Any]:
    """An agent with commands, whose model gives these replies, and then says what it heard."""
    spec = lead(*replies, workspace=str(directory), **more)
    spec["tools"] = k.spec(tools=TOOLS)["tools"]
    return spec


def start(command: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "start_command", {"command": command, **more}


def read(job: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "read_command", {"job": job, **more}


def job(index: int = 0, round_number: int = 1, run_id: str = "r") -> str:
    return job_identifier(f"{run_id}/{round_number}/{index}")


def pause(seconds: float) -> tuple[str, dict[str, Any]]:
    return "wait", {"seconds": seconds}


async def reports(kernel: k.Kernel, session_id: str = "s") -> list[str]:
    """The messages that reported the ends of commands to the session's model, in order."""
    return [m["content"] for m in await kernel.messages(session_id) if m.get("origin") == COMMAND]


async def states(kernel: k.Kernel, session_id: str = "s") -> dict[str, str]:
    """How the session's commands stand, as its log says: `started`, or how each has ended."""
    found = dict[str, str]()
    for event in await kernel.events(session_id):
        if event["type"] in ("command_started", "command_ended"):
            assert event["type"] == "command_started" or found[event["data"]["job"]] == "started"
            found[event["data"]["job"]] = event["data"].get("state", "started")
    return found


async def heard(kernel: k.Kernel, job: str, session_id: str = "s") -> dict[str, Any]:
    """The run that reports the end of a command to the session, once it has ended."""
    count = 1
    while (await states(kernel, session_id)).get(job, "started") == "started":
        await kernel.until(session_id, "command_ended", count)
        count += 1
    return await kernel.end(session_id, f"news.{job}")


async def begin(kernel: k.Kernel, directory: Path, *replies: Any, **more: Any) -> None:
    await kernel.spawn("s", agent(directory, *replies, **more))
    await kernel.send("s")


def runner(kernel: k.Kernel) -> dict[str, int]:
    """The pid and start time of the one command's runner, as its directory has them."""
    [path] = (kernel.directory / f"commands-{kernel.machine}").glob("*/runner")
    found: dict[str, int] = json.loads(path.read_text())
    return found


async def test_a_command_outlives_its_run_and_its_end_is_reported(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a command that goes on, when it was started, then the call has its result at once and the run ends; the
    command's end begins another run, with the exit code and the end of the output."""
    os.mkfifo(tmp_path / "go")
    await begin(kernel, tmp_path, [start("echo hello; read _ < go; exit 3", name="waiter")], "it works")
    assert (await kernel.end("s"))["text"] == "it works"
    assert await kernel.results() == [f"started command {job()}"]
    assert await states(kernel) == {job(): "started"}
    (tmp_path / "go").write_text("\n")
    news = await heard(kernel, job())
    assert (news["status"], news["source"]) == ("completed", COMMAND)
    [text] = await reports(kernel)
    assert text == (
        f"Command {job()} has ended (exit code 3): waiter: echo hello; read _ < go; exit 3\n"
        "The end of its output:\nhello\n"
    )
    kernel.check()


async def test_output_is_read_on_and_waited_for(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a command that writes twice, when a model reads, waits and reads on, then it has each part once; the list
    of jobs has the command, and a stopped one ends with its group and is reported."""
    command = "echo one; read _ < go; echo two; sleep 1000 & sleep 1000"
    os.mkfifo(tmp_path / "go")
    calls = [read(job(), wait=20)], [read(job(), after=4, wait=0)], [read(job(), after=4, wait=20)], [("list_jobs", {})]
    await begin(kernel, tmp_path, [start(command)], *calls, [("stop_job", {"job": job()})], [pause(3600)], "ok")
    await kernel.until("s", "tool_finished", 3)
    (tmp_path / "go").write_text("\n")
    await kernel.until("s", "command_ended")
    await kernel.until("s", "timer_set")
    _, first, none, second, listed, stopped = await kernel.results()
    assert first == "one\n\n[running; bytes 0 to 4 of 4]"
    assert none == "[running; bytes 4 to 4 of 4]"
    assert second == "two\n\n[running; bytes 4 to 8 of 8]"
    assert re.fullmatch(rf"{job()} \(command\): at work, started \d+ seconds? ago: {re.escape(command)}", listed)
    assert re.fullmatch(rf"command {job()} was told to end, and has 5 seconds for it", stopped)
    assert await states(kernel) == {job(): "stopped"}


async def test_a_command_that_does_not_listen_is_ended_by_force(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a command that ignores SIGTERM, when it is stopped with a grace, then it is killed after that."""
    deaf = "trap '' TERM; echo begun; while true; do sleep 1; done"
    stops = [("stop_job", {"job": job(), "grace": 0.2})], [("stop_job", {"job": job()})]
    await begin(kernel, tmp_path, [start(deaf)], [read(job(), wait=20)], *stops, "ok")
    await heard(kernel, job())
    assert (await reports(kernel))[0].startswith(f"Command {job()} was stopped (signal 9)")


async def test_a_cancel_stops_what_the_run_has_started(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given commands of a run that has ended and of one that is cancelled, then only those of the latter are stopped,
    and the session is not notified; when it is closed, the others are stopped as well, and their files go."""
    await begin(kernel, tmp_path, [start(SLEEPER)], "ok", [start(SLEEPER)], [pause(3600)], "never")
    await kernel.end("s")
    await kernel.send("s", run_id="second")
    await kernel.until("s", "timer_set")
    await kernel.ask("cancel", "s", "second", "enough")
    async with asyncio.timeout(k.STUCK_SECONDS):
        await kernel.until("s", "command_ended")
    second = job(run_id="second")
    assert await states(kernel) == {job(): "started", second: "stopped"}
    await kernel.ask("close", "s", "done")
    await kernel.until("s", "command_ended", 2)
    assert await states(kernel) == {job(): "stopped", second: "stopped"}
    assert await reports(kernel) == []
    kernel.check()


async def test_no_more_than_a_session_may_have(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given as many commands as a session may have, when it starts another one, then that is refused, and none begins;
    what can't be started is refused as well."""
    calls = [start(SLEEPER) for _ in range(MOST_COMMANDS)]
    await begin(kernel, tmp_path, calls, [start("echo more"), start(" ")], "ok", parallel_tools=1)
    await kernel.end("s")
    more, nothing = (await kernel.results())[-2:]
    assert "may have no more" in more
    assert nothing.startswith("ToolError: a command must be a text")
    assert len(await states(kernel)) == MOST_COMMANDS


async def test_two_calls_are_never_one_command(
    kernel: k.Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given two calls whose commands would have the same id, when both start one, then the second is refused."""
    monkeypatch.setattr(commands, "job_identifier", lambda _call_id: "command-same")
    await begin(kernel, tmp_path, [start("true")], [start("echo more")], "ok")
    await kernel.end("s")
    first, second = (await kernel.results())[:2]
    assert first == "started command command-same"
    assert "another command of the session has the id command-same" in second


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_at_every_point(store: str, tmp_path: Path, victim: str) -> None:
    """Given a session that starts, reads and stops commands, when a frame or the node service dies at one of many
    points, then each command begins once, its end is reported once, and the transcript is that without a death."""
    problems = []
    async with k.running(store, tmp_path) as kernel:
        wanted = await _life(kernel, "clean", tmp_path)
        points = len(kernel.points)
        for at in tiers.points(range(0, points + 4, 3), is_sqlite=kernel.service.database.is_sqlite):
            deaths = Deaths(kernel, f"s{at}", at, victim)
            try:
                found = await _life(kernel, f"s{at}", tmp_path)
            except k.Stuck as stuck:
                problems.append(f"{deaths.where}: {stuck}")
                continue
            finally:
                kernel.on_point = None
            await kernel.quiet()
            kernel.check(f"s{at}")
            if found != wanted:
                problems.append(f"{deaths.where}: {found} is not {wanted}")
        await nothing_left(kernel)
    assert not problems, "\n".join(problems)


async def _life(kernel: k.Kernel, session_id: str, directory: Path) -> tuple[Any, ...]:
    """What comes of a session that starts two commands and stops one: its results, how often each command has begun,
    and which ends were reported to it."""
    short, long = f"echo short >> {session_id}.begun; echo done", f"echo long >> {session_id}.begun; {SLEEPER}"
    calls = [start(short), start(long)], [read(job(index=1), wait=20)], [("stop_job", {"job": job(index=1)})]
    await kernel.spawn(session_id, agent(directory, *calls, "ok"))
    await kernel.send(session_id)
    await kernel.end(session_id)
    await kernel.until(session_id, "command_ended", 2)
    for index in range(2):
        await heard(kernel, job(index=index), session_id)
    begun = (directory / f"{session_id}.begun").read_text().split()
    said = [re.sub(r"[0-9.]+ seconds?", "N", text) for text in await kernel.results(session_id)]
    return said, sorted(begun), sorted(text.splitlines()[0].split(":")[0] for text in await reports(kernel, session_id))


async def test_twenty_kills(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given commands at work, when frames and node services are killed twenty times meanwhile, then each command was
    started once, goes on, and is stopped and reported once in the end."""
    chosen, count = random.Random(7), 4
    commands = [start(f"echo {number} >> begun; {SLEEPER}") for number in range(count)]
    stops = [("stop_job", {"job": job(index=index)}) for index in range(count)]
    pauses = [[pause(0.05)] for _ in range(10)]
    patient = {**k.POLICY, "stuck_after": 100}  # deaths may come faster than anything is done
    await begin(kernel, tmp_path, commands, *pauses, stops, "ok", restart=patient)
    for _ in range(20):
        if chosen.random() < 0.5 and kernel.is_up:
            kernel.kill_node()
        else:
            kernel.kill(kernel.holder("s") or next(iter(kernel.workers.values())))
        await asyncio.sleep(0.05 * chosen.random())
        await kernel.quiet()
    await kernel.end("s")
    await kernel.until("s", "command_ended", count)
    for index in range(count):
        await heard(kernel, job(index=index))
    assert sorted((tmp_path / "begun").read_text().split()) == [str(number) for number in range(count)]
    assert await states(kernel) == {job(index=index): "stopped" for index in range(count)}
    assert sorted(text.split()[1] for text in await reports(kernel)) == sorted(
        job(index=index) for index in range(count)
    )


@pytest.mark.parametrize("backend", ["bubblewrap", "none"])
async def test_a_runner_that_is_killed_takes_its_command_along(kernel: k.Kernel, tmp_path: Path, backend: str) -> None:
    """Given a command whose runner is killed, then the command ends, is lost, and the session is notified."""
    sandbox = {"backend": backend}
    await begin(kernel, tmp_path, [start("echo begun; sleep 1000")], [read(job(), wait=20)], "ok", sandbox=sandbox)
    await kernel.end("s")
    assert "begun" in (await kernel.results())[-1]
    found = psutil.Process(runner(kernel)["pid"])
    sleeper = os.pidfd_open(found.children(recursive=True)[-1].pid)
    found.kill()
    await heard(kernel, job())
    [text] = await reports(kernel)
    assert text.startswith(f"Command {job()} is lost: what ran it was killed: ")
    assert text.endswith("\nThe end of its output:\nbegun\n")
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sleeper, ended.set)
    await asyncio.wait_for(ended.wait(), k.STUCK_SECONDS)
    asyncio.get_running_loop().remove_reader(sleeper)
    os.close(sleeper)


async def test_a_pid_that_is_used_again_is_not_signalled(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a runner's file with the pid of another process that began later, when the service that follows finds it,
    then that process is not signalled, and the command is lost."""
    await begin(kernel, tmp_path, [start(SLEEPER)], "ok")
    await kernel.end("s")
    [path] = (kernel.directory / f"commands-{kernel.machine}").glob("*/runner")
    found = runner(kernel)
    other = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        kernel.kill_node()
        path.write_text(json.dumps({"pid": other.pid, "start": start_time(other.pid) - 1}))
        await kernel.quiet()
        await kernel.until("s", "command_ended")
        await kernel.ask("close", "s", "done")
        assert other.returncode is None
        assert (await states(kernel))[job()] == "lost"
    finally:
        other.kill()
        await other.wait()
        os.kill(found["pid"], 9)


async def test_a_lost_node_loses_its_commands(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a command of a node that has no service any more, when another node takes over, then it is lost, and the
    session is notified once."""
    await begin(kernel, tmp_path, [start(SLEEPER)], "ok")
    await kernel.end("s")
    await kernel.service.journal.submit(lambda tx: commands.lost(tx, ["another"]))
    await heard(kernel, job())
    assert (await reports(kernel))[0].startswith(f"Command {job()} is lost: nothing is known of its end")
    assert await kernel.service.journal.submit(lambda tx: commands.lost(tx, ["another"])) == 0
    kernel.check()


async def test_another_node_of_the_machine_takes_over(
    store: str, server: OfflineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given commands at work and one that has ended, when Ray is restarted, so that the node has another id, then
    those go on, are read and stopped, and are not lost, also when their own node is missed for long; what the other one
    has written can be read."""
    monkeypatch.setattr(commands_of_nodes, "GONE_SECONDS", 0.5)
    for name in ("go", "end"):
        os.mkfifo(tmp_path / name)
    waiter = "echo again >> begun; echo one; read _ < go; echo two; exit 3"
    before = k.Kernel(store, server, tmp_path)
    await before.start(2)
    replies: list[Any] = [[start(waiter), start(SLEEPER), start("read _ < end; echo over")], "ok", "heard of the end"]
    replies += [[read(job(), after=0), read(job(2)), ("stop_job", {"job": job(1)})], "read", "ok", "ok"]
    await begin(before, tmp_path, *replies)
    await before.end("s")  # a run of its own hears of the command's end
    await asyncio.to_thread((tmp_path / "end").write_text, "\n")
    await heard(before, job(2))
    await before.lose()
    after = k.Kernel(store, server, tmp_path, node_id="node2", machine=before.machine)
    await after.start(2)
    try:
        looked = after.service.commands
        await until(lambda: len(looked._watched) == 2)
        await asyncio.sleep(1.0)  # longer than nodes are missed
        assert await states(after) == {job(): "started", job(1): "started", job(2): "ended"}
        await after.send("s", run_id="second")
        await after.end("s", "second")
        first, over, _ = (await after.results())[-3:]
        assert first == "one\n\n[running; bytes 0 to 4 of 4]"
        assert over == "over\n\n[has ended (exit code 0); bytes 0 to 5 of 5]"
        await heard(after, job(1))
        await asyncio.to_thread((tmp_path / "go").write_text, "\n")
        await heard(after, job())
        assert await states(after) == {job(): "ended", job(1): "stopped", job(2): "ended"}
        assert (await reports(after))[-1].endswith("The end of its output:\none\ntwo\n")
        assert (tmp_path / "begun").read_text() == "again\n"
    finally:
        await after.stop()


async def test_two_nodes_of_a_machine(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given two nodes of one machine, then neither takes over, ends or removes what the other one has; a command of a
    node without a process here is lost when its node was missed for long."""
    both = [k.Kernel(postgres, server, tmp_path, node_id=name, machine="one") for name in ("a", "b")]
    for kernel in both:
        await kernel.start(1)
    a, b = both
    try:
        for kernel in both:
            await kernel.take_over(b.generation, ["a", "b"])
        await begin(a, tmp_path, [start(SLEEPER)], "ok")
        await a.end("s")
        mine, others = (a.service.commands, b.service.commands) if a.service.commands._watched else (
            b.service.commands, a.service.commands
        )  # fmt: skip
        await others._look()
        assert (len(mine._watched), len(others._watched)) == (1, 0)
        await a.ask("close", "s", "done")
        await a.until("s", "command_ended")
        assert await states(a) == {job(): "stopped"}
    finally:
        await asyncio.gather(*(kernel.stop() for kernel in both))


async def test_what_nobody_takes_over_is_lost(
    store: str, server: OfflineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a command of a node that is gone, on another machine, then it is lost when it was missed for long enough to
    have ended there, and not before."""
    before = k.Kernel(store, server, tmp_path)
    await before.start(2)
    await begin(before, tmp_path, [start(SLEEPER)], "ok", "lost")
    await before.end("s")
    os.kill(runner(before)["pid"], 9)
    await before.lose()
    monkeypatch.setattr(commands_of_nodes, "GONE_SECONDS", 1.0)
    after = k.Kernel(store, server, tmp_path, node_id="node2")
    await after.start(2)
    try:
        assert await states(after) == {job(): "started"}
        await heard(after, job())
        assert await states(after) == {job(): "lost"}
        assert (await reports(after))[0].endswith("\nread_command reads what is left of its output.")
    finally:
        await after.stop()


async def test_a_removed_session_leaves_nothing(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a session with a command at work, when its tree is removed, then the command is killed."""
    await begin(kernel, tmp_path, [start(SLEEPER)], "ok")
    await kernel.end("s")
    handle = os.pidfd_open(runner(kernel)["pid"])
    await kernel.service.journal.submit(lambda tx: tx.drop(["s"]), "s")
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(handle, ended.set)
    await asyncio.wait_for(ended.wait(), k.STUCK_SECONDS)
    asyncio.get_running_loop().remove_reader(handle)
    os.close(handle)


async def test_a_start_that_failed_and_is_repeated(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a command whose process can't be started, when the session's process dies before it has heard so, then the
    call's result says that it could not be started."""
    processes = kernel.service.commands._processes
    assert processes is not None
    killed: list[Any] = []

    async def failing(key: str, process: Any) -> None:
        raise OSError("Resource temporarily unavailable")

    def removed(key: str) -> None:
        if not killed:
            killed.append(kernel.holder("s"))
            kernel.kill(killed[0])

    processes.start, processes.remove = failing, removed  # type: ignore[method-assign]
    await begin(kernel, tmp_path, [start("echo x")], "ok")
    await kernel.end("s")
    assert killed
    assert "could not be started" in (await kernel.results())[0]


PAUSED = """
import os, sys, time
data = sys.stdin.buffer.read()
open({paused!r}, "w").close()
while not os.path.exists({go!r}):
    time.sleep(0.01)
r, w = os.pipe()
os.write(w, data)
os.close(w)
os.dup2(r, 0)
os.execv(sys.executable, [sys.executable, "-I", "-S", {runner!r}, *sys.argv[1:]])
"""


async def test_a_runner_that_begins_late(kernel: k.Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a runner that stands still while it starts, and a node service that dies then, when the run is cancelled
    before the runner goes on, then the command does not stay at work."""
    paused, go, alive = tmp_path / "paused", tmp_path / "go-on", tmp_path / "alive"
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(PAUSED.format(paused=str(paused), go=str(go), runner=str(command_processes.RUNNER)))
    monkeypatch.setattr(command_processes, "RUNNER", wrapper)
    monkeypatch.setattr(command_processes, "START_SECONDS", 1000.0)  # who waited is dead, and does nothing any more
    await begin(kernel, tmp_path, [start(f"echo $$ > {alive}; exec sleep 1000")], "ok", sandbox={"backend": "none"})
    await until(paused.exists)
    kernel.kill(kernel.holder("s"), replace=False)
    await kernel.replace_service()
    await kernel.ask("cancel", "s", "r", "enough")
    await kernel.take_over(kernel.generation, kernel.nodes)
    kernel.add_frame()
    await kernel.end("s")
    await kernel.until("s", "command_ended")
    go.touch()
    await until(lambda: alive.exists() and alive.read_text().strip() != "")
    pid = int(alive.read_text())
    kernel.service.commands.look_if_needed()  # as the sweep does, now and then
    await until(lambda: not psutil.pid_exists(pid))
