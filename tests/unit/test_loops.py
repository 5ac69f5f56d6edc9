"""Loops and triage: what is compared, what a firing reads, the Python API on the cluster in one process, and the
commands."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from understudy import AgentSpec, LoopMemory, TriageEntry, UnknownTriageEntry, tool
from understudy.cluster.cli import loop_command, schedules_command, state_command, triage_command
from understudy.cluster.cli.main import app
from understudy.loops import FOOT, KEPT_RUNS, LoopRun, begun, ended, loop_name, memory_text, with_memory
from understudy.testing import LocalCluster
from understudy.triage import entry_identifier

PATIENCE = 30.0

Command = Callable[..., Any]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(identity="ann") as made:
        yield made


@pytest.fixture
def command(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`understudy …`, connected to that cluster."""

    @contextlib.contextmanager
    def connected(_store: str | None, **_options: Any) -> Iterator[LocalCluster]:
        yield cluster

    for module in (loop_command, schedules_command, state_command, triage_command):
        monkeypatch.setattr(module, "connected", connected)
    runner = CliRunner(env={"COLUMNS": "300"})
    return lambda *words: runner.invoke(app, [*words], catch_exceptions=False)


@tool(on_crash="rerun")
def looks() -> str:
    """Look."""
    return "seen"


FAILS = AgentSpec(name="fails", tools=[looks], max_rounds=1)
PASSES = AgentSpec(name="passes", tools=[looks])


def run_of(cluster: LocalCluster, name: str) -> Any:
    """The result of a run that a schedule is triggered to begin."""
    fired = cluster.schedule(name).trigger()
    return cluster.session(fired.session_id).run(fired.run_id).result(PATIENCE)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("no answer after 20 rounds", "no answer after 3 rounds", True),
        ("Timeout at 0x7f3a90 in worker 12", "timeout at 0x11aaaa in  worker 7", True),
        ("job 018f2b6a-1111-7abc-8def-0123456789ab failed", "job 018f2b6b-2222-7abc-8def-abcdef012345 failed", True),
        ("commit 91a85decaa does not build", "commit cbcc767708 does not build", True),
        ("disk full", "disk is on fire", False),
    ],
)
def test_failures_that_are_the_same(one: str, other: str, same: bool) -> None:
    """Given two texts of failures, then numbers, ids, hashes, letter case and spaces make no other failure of them."""
    assert (entry_identifier("s", "failed", one) == entry_identifier("s", "failed", other)) is same


def test_the_memory_is_the_fold_of_outcomes() -> None:
    """Given runs that begin and end in any way, then each is counted once, and the last ones are kept."""
    memory = LoopMemory("n")
    statuses = ("completed", "failed", "cancelled", "round_limit") * 5
    for number, status in enumerate(statuses):
        memory = begun(memory, f"r{number}")
        found = ended(memory, LoopRun(f"r{number}", status, "x", number))
        assert found is not None
        memory = found
    assert (memory.attempted, memory.passed, memory.failed, memory.cancelled) == (20, 5, 10, 5)
    assert [run.at for run in memory.recent] == list(range(19, 19 - KEPT_RUNS, -1))
    assert ended(memory, LoopRun("r3", "failed", "again", 99)) is None


def test_what_a_firing_reads_is_bounded() -> None:
    """Given many long answers and failures, then what a firing reads has a limit, and is the same each time."""
    runs = tuple(LoopRun(f"r{number}", "completed", "long " * 1000, number) for number in range(KEPT_RUNS))
    memory = LoopMemory("n", 10**9, 10**9, recent=runs, pending=("p",))
    entries = [
        TriageEntry(f"e{number}", "n", "failed", "y" * 9000, 10**9, 0, 0, "", "", 0, "", 0, "") for number in range(50)
    ]  # fmt: skip
    text = memory_text(memory, entries)
    assert len(text) < 12_000
    assert text.endswith(FOOT)
    assert with_memory("go", memory, entries) == f"go\n\n{text}"


def test_names_of_loops() -> None:
    """Given a task, then its loop's name tells of it, and another task's is another one."""
    assert loop_name("Look at the new issues!").startswith("look-at-the-new-issues-")
    assert loop_name("Look at the new issues") != loop_name("Look at the new issues!")
    assert loop_name("ü").startswith("loop-")
    assert len(loop_name("x" * 500)) <= 64


def test_a_loop_and_its_triage(cluster: LocalCluster) -> None:
    """Given a loop that fails, is mended and retried, then triage and its memory say so, and who resolved what."""
    loop = cluster.schedule("nightly", "call looks {}", agent=FAILS, every=3600, memory=True)
    assert (loop.info().memory, loop.memory()) == (True, LoopMemory("nightly"))
    assert run_of(cluster, "nightly").status == "round_limit"
    [entry] = cluster.triage()
    item = cluster.triage_item(entry.id)
    assert item.info() == entry
    assert [item.resolve(), item.resolve(), cluster.triage()] == [True, False, []]
    assert cluster.triage(resolved=True)[0].resolved_by == "ann"
    assert run_of(cluster, "nightly").status == "round_limit"
    cluster.schedule("nightly", "call looks {}", agent=PASSES, every=3600, memory=True)
    fired = item.retry()
    assert cluster.session(fired.session_id).run(fired.run_id).result(PATIENCE).status == "completed"
    assert (cluster.triage(), item.info().count, item.info().reopened) == ([], 2, 1)
    memory = loop.memory()
    assert (memory.attempted, memory.passed, memory.failed, memory.pending) == (3, 1, 2, ())
    assert [run.status for run in memory.recent] == ["completed", "round_limit", "round_limit"]
    assert [loop.reset(), loop.reset(), loop.memory()] == [True, False, LoopMemory("nightly")]


async def test_triage_is_awaited(cluster: LocalCluster) -> None:
    """Given an asynchronous program, then what concerns loops can be awaited, and what is unknown is said to be."""
    loop = await cluster.schedule.aio("n", "x", agent=PASSES, every=3600, memory=True)
    assert [await loop.memory.aio(), await loop.reset.aio(), await cluster.triage.aio()] == [LoopMemory("n"), False, []]
    for method in (item := cluster.triage_item("none")).info, item.resolve, item.retry:
        with pytest.raises(UnknownTriageEntry):
            await method.aio()


def test_the_loop_command(cluster: LocalCluster, command: Command) -> None:
    """Given a task, when a loop is made of it twice, then there is one; the command says how to go on, and `--once`
    follows a run to its end and exits as that ended."""
    made = command("loop", "say hello", "--every", "5m")
    assert made.exit_code == 0, made.output
    assert "every 5m" in made.stdout
    name = loop_name("say hello")
    for hint in (f"schedules delete {name}", f"state show {name}", "understudy triage"):
        assert hint in made.stderr
    before = cluster.schedule(name).info()
    again = json.loads(command("loop", "say hello", "--every", "300s", "--json").stdout)
    assert (again["name"], again["memory"], again["updated_at"]) == (name, True, before.updated_at)
    assert len(cluster.schedules()) == 1
    once = command("loop", "say hello", "--every", "5m", "--once")
    assert (once.exit_code, "offline: say hello" in once.stdout) == (0, True), once.output
    result = json.loads(command("loop", "say hello", "--every", "5m", "--once", "--json").stdout)
    assert result["status"] == "completed"
    assert "1 attempted, 1 passed" in result["text"]  # the offline model repeats what it reads
    shown = command("state", "show", name).stdout
    assert "2 attempted, 2 passed, 0 failed, 0 cancelled, 0 pending" in shown
    assert json.loads(command("state", "show", name, "--json").stdout)["memory"]["attempted"] == 2
    assert [command("state", "reset", name).stdout, command("state", "reset", name).stdout] == [
        "reset\n", "it knew nothing\n",
    ]  # fmt: skip


def test_the_triage_command(cluster: LocalCluster, command: Command) -> None:
    """Given a loop whose run fails, then the commands list, show, retry and resolve what is in triage, for people and
    as JSON."""
    empty = command("triage")
    assert (empty.exit_code, "nothing is open in triage" in empty.stderr) == (0, True)
    cluster.schedule("nightly", "call looks {}", agent=FAILS, every=3600, memory=True)
    run_of(cluster, "nightly")
    [entry] = json.loads(command("triage", "--json").stdout)["triage"]
    assert json.loads(command("triage", "list", "--json").stdout)["triage"] == [entry]
    assert (entry["schedule"], entry["count"]) == ("nightly", 1)
    assert "round_limit: no answer after 1 round" in command("triage").stdout
    assert "1 time, first" in command("triage", "show", entry["id"]).stdout
    assert "round_limit" in command("state", "show", "nightly").stdout
    fired = json.loads(command("triage", "retry", entry["id"], "--json").stdout)
    cluster.session(fired["session_id"]).run(fired["run_id"]).result(PATIENCE)
    assert json.loads(command("triage", "show", entry["id"], "--json").stdout)["count"] == 2
    assert command("triage", "resolve", entry["id"]).stdout == f"resolved: {entry['id']}\n"
    assert command("triage", "resolve", "--all").stdout == "nothing was open\n"
    run_of(cluster, "nightly")
    assert json.loads(command("triage", "resolve", "--all", "--json").stdout) == {"resolved": [entry["id"]]}
    assert "resolved" in command("triage", "--all").stdout
    assert "by ann" in command("triage", "show", entry["id"]).stdout


def test_a_loop_at_work_is_not_fired_again(cluster: LocalCluster, command: Command) -> None:
    """Given a loop whose run has not ended, when it is to be fired once more, then the command fails and says why."""
    agent = AgentSpec(name="slow", instructions='offline-script: [{"delay": 60}]')
    cluster.schedule("n", "go", agent=agent, every=300, memory=True)
    cluster.schedule("n").trigger()
    entry = cluster.schedule("n").trigger()
    assert entry.outcome == "skipped"


def test_a_loop_fires_by_itself(cluster: LocalCluster) -> None:
    """Given a loop of a second, then each firing reads of those before it."""
    loop = cluster.schedule("n", "tell", agent=AgentSpec(name="a"), every=1, max_firings=2, memory=True)
    deadline = time.monotonic() + PATIENCE
    while (memory := loop.memory()).passed < 2:
        assert time.monotonic() < deadline, memory
        time.sleep(0.05)
    assert "1 attempted, 1 passed" in memory.recent[0].text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("loop", "--every", "5m"), 2, "say what to do"),
        (("loop", "x"), 2, "say how often"),
        (("loop", "x", "--every", "5m", "--cron", "@daily"), 2, "say how often"),
        (("loop", "x", "--every", "often"), 2, "is no duration"),
        (("triage", "show", "none"), 1, "there is no entry 'none'"),
        (("triage", "retry", "none"), 1, "there is no entry 'none'"),
        (("triage", "resolve", "none"), 1, "there is no entry 'none'"),
        (("triage", "resolve"), 2, "say which"),
        (("triage", "resolve", "x", "--all"), 2, "say which"),
    ],
)
def test_mistakes_are_reported(command: Command, words: tuple[str, ...], code: int, said: str) -> None:
    """Given a mistake, then a command's exit code and its error say so, with `--json` as JSON."""
    done = command(*words, "--json")
    assert (done.exit_code, said in json.loads(done.stdout)["error"]["message"]) == (code, True), done.stdout
    assert said in command(*words).stderr.replace("\n", " ")
