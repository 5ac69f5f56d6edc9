"""Schedules on the cluster in one process: the Python API, and `understudy schedules`."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from understudy import (
    AgentSpec,
    InvalidInput,
    QueuePlace,
    ScheduleInfo,
    SessionClosed,
    UnknownQueue,
    UnknownSchedule,
    WorkflowContext,
    tool,
    workflow,
)
from understudy.cluster.cli import loop_command, schedules_command
from understudy.cluster.cli.main import app
from understudy.testing import LocalCluster

PATIENCE = 30.0

Command = Callable[..., Any]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(identity="ann") as made:
        yield made


@pytest.fixture
def command(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`understudy schedules …`, connected to that cluster."""

    @contextlib.contextmanager
    def connected(_store: str | None, **_options: Any) -> Iterator[LocalCluster]:
        yield cluster

    monkeypatch.setattr(schedules_command, "connected", connected)
    runner = CliRunner(env={"COLUMNS": "200"})
    return lambda *words: runner.invoke(app, ["schedules", *words], catch_exceptions=False)


@tool(on_crash="rerun")
def looks() -> str:
    """Look."""
    return "seen"


def until_fired(cluster: LocalCluster, name: str, number: int) -> ScheduleInfo:
    """The schedule, once it has fired so often; no event tells of it."""
    deadline = time.monotonic() + PATIENCE
    while (info := cluster.schedule(name).info()).fired < number:
        assert time.monotonic() < deadline, info
        time.sleep(0.02)
    return info


def test_an_agent_at_times(cluster: LocalCluster) -> None:
    """Given a schedule of an agent with a tool of this module, when it is due twice, then each time a session of the
    agent has done it; the schedule says so, and by whom it was set."""
    agent = AgentSpec(name="clerk", tools=[looks])
    made = cluster.schedule("pulse", "call looks {}", agent=agent, every=timedelta(seconds=1), max_firings=2)
    info = until_fired(cluster, "pulse", 2)
    assert (made.name, info.state, info.agent, info.by) == ("pulse", "ended", "clerk", "ann")
    found = [session for session in cluster.sessions() if session.name == "clerk"]
    assert len(found) == 2
    for session in found:
        [run] = cluster.session(session.id).runs()
        assert cluster.session(session.id).run(run.run_id).result(PATIENCE, check=True).text == "offline: seen"


async def test_schedules_are_awaited(cluster: LocalCluster) -> None:
    """Given an asynchronous program, then every method can be awaited, and all are listed by name."""
    session = await cluster.spawn.aio(AgentSpec(name="a"), session_id="s")
    for name in ("b", "a"):
        await cluster.schedule.aio(name, "hello", session=session, cron="0 3 * * *", zone="Europe/Berlin")
    assert [(one.name, one.session_id, one.state) for one in await cluster.schedules.aio()] == [
        ("a", "s", "active"), ("b", "s", "active"),
    ]  # fmt: skip
    schedule = await cluster.schedule.aio("a")
    assert [await schedule.pause.aio(), await schedule.resume.aio()] == [True, True]
    fired = await schedule.trigger.aio()
    assert (await session.run(fired.run_id)).text == "offline: hello"
    assert [await schedule.delete.aio(), await schedule.delete.aio()] == [True, False]
    with pytest.raises(UnknownSchedule):
        await schedule.info.aio()


def test_times_are_those_of_the_zone(cluster: LocalCluster) -> None:
    """Given a time that names no zone, then it is one of the schedule's zone; others are what they say."""
    cluster.spawn(AgentSpec(name="a"), session_id="s")
    here = cluster.schedule("here", "x", session="s", at=datetime(2090, 7, 1, 12), zone="Europe/Berlin").info()
    there = cluster.schedule("there", "x", session="s", at=datetime(2090, 7, 1, 10, tzinfo=UTC)).info()
    assert here.at == there.at


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every": 5}, "agent=…"),
        ({"session": "s", "every": 5, "agent": AgentSpec(name="a")}, "agent=…"),
        ({"session": "s"}, "give one of cron, every and at"),
        ({"session": "s", "every": 0}, "every is 0"),
        ({"session": "s", "at": datetime(2001, 1, 1)}, "never be due"),
        ({"session": "s", "every": 5, "overlap": "wait"}, "overlap is 'wait'"),
        ({"session": "s", "cron": "@daily", "zone": "Mars/Base"}, "zone is 'Mars/Base'"),
        ({"session": "s", "every": 5, "content": " "}, "must not be empty"),
        ({"session": "s", "every": 5, "name": "a/b"}, "name is 'a/b'"),
    ],
)
def test_what_is_no_schedule(cluster: LocalCluster, given: dict[str, Any], said: str) -> None:
    """Given a mistake, then nothing is set, and the error says what is wrong."""
    cluster.spawn(AgentSpec(name="a"), session_id="s")
    with pytest.raises(InvalidInput, match=said):
        cluster.schedule(**{"name": "n", "content": "x", **given})
    assert cluster.schedules() == []


@workflow
async def weighs(ctx: WorkflowContext, what: str, times: int = 1) -> str:
    """Look so many times."""
    found = [await ctx.tool(looks) for _ in range(times)]
    return f"{what}: {' '.join(found)}"


DEFINITION = """
name: parcels
inputs: {to: {type: string}}
steps: [{id: seen, tool: {name: looks}}, {id: label, agent: {name: clerk, task: "Label for {{to}}"}}]
output: {seen: "{{seen}}", label: "{{label}}"}
"""


def test_a_workflow_at_times(cluster: LocalCluster) -> None:
    """Given a schedule of a workflow, when it is due twice, then each time a session of its own has run it with the
    schedule's input; the schedule names the workflow."""
    cluster.schedule("pulse", workflow=weighs, input={"what": "gold", "times": 2}, every=1, max_firings=2)
    info = until_fired(cluster, "pulse", 2)
    assert (info.workflow, info.agent, info.content) == ("weighs", "", '{"what": "gold", "times": 2}')
    found = [session for session in cluster.sessions() if session.name == "weighs"]
    assert [session.kind for session in found] == ["workflow"] * 2
    for session in found:
        [run] = cluster.session(session.id).runs()
        assert (run.run_id, run.source) == (session.id, "schedule")
        assert cluster.session(session.id).run(run.run_id).result(PATIENCE, check=True).text == "gold: seen seen"


def test_a_definition_at_times(cluster: LocalCluster, tmp_path: Path) -> None:
    """Given a schedule of a workflow's file, with its agents and tools, when it fires, then the definition is done as
    it was when the schedule was set, whatever has become of the file."""
    path = tmp_path / "parcels.yaml"
    path.write_text(DEFINITION)
    clerk = AgentSpec(name="clerk")
    schedule = cluster.schedule("n", workflow=path, input={"to": "Oslo"}, agents=[clerk], tools=[looks], cron="@daily")
    path.unlink()
    fired = schedule.trigger()
    done = cluster.session(fired.session_id).run(fired.run_id).result(PATIENCE, check=True)
    assert json.loads(done.text) == {"seen": "seen", "label": "offline: Label for Oslo"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workflow": weighs}, "missing a required argument: 'what'"),
        ({"workflow": weighs, "input": {"what": "x", "often": 2}}, "unexpected keyword argument 'often'"),
        ({"workflow": weighs, "input": {"what": "x", "times": "many"}}, "times: .* is no int"),
        ({"workflow": weighs, "input": "x"}, "input must be a dict"),
        ({"workflow": weighs, "input": {"what": object()}}, "object"),
        ({"workflow": looks}, "is no workflow"),
        ({"workflow": weighs, "content": "x"}, "input=…"),
        ({"workflow": weighs, "tools": [looks]}, "@workflow names them"),
        ({"workflow": weighs, "session": "s"}, "one of agent=…"),
        ({"input": {"what": "x"}}, "give workflow=…"),
        ({"agent": AgentSpec(name="a")}, "give the input of each firing"),
        ({"workflow": "parcels.yaml"}, "can't be read"),
    ],
)
def test_what_is_no_schedule_of_a_workflow(cluster: LocalCluster, given: dict[str, Any], said: str) -> None:
    """Given a workflow that does not take its input, or that is none, then nothing is set, and the error says why."""
    with pytest.raises(InvalidInput, match=said):
        cluster.schedule("n", **given, every=5)
    assert cluster.schedules() == []


def test_a_closed_session_has_no_schedule(cluster: LocalCluster) -> None:
    """Given a session that takes no input, then no schedule is set for it."""
    cluster.spawn(AgentSpec(name="a"), session_id="s").close()
    with pytest.raises(SessionClosed):
        cluster.schedule("n", "x", session="s", every=60)


def test_a_schedule_in_a_queue(cluster: LocalCluster, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a queue, when a schedule or a loop is set for it, from Python or by a command, then the run of a firing
    waits there, and the schedule says where; one for a queue that is not there, or a key without one, is refused."""
    monkeypatch.setattr(loop_command, "connected", lambda *_, **__: contextlib.nullcontext(cluster))
    with pytest.raises(UnknownQueue):
        cluster.schedule("a", "x", agent=AgentSpec(name="a"), every=60, queue="crawl")
    refused = command("create", "a", "x", "--every", "1m", "--key", "acme", "--json")
    assert (refused.exit_code, "key and priority are of a queue" in refused.stdout) == (2, True)
    queue = cluster.queue("crawl", concurrency=1)
    queue.pause()
    cluster.schedule("a", "x", agent=AgentSpec(name="a"), every=3600, queue=QueuePlace("crawl", "acme", 2))
    command("create", "b", "y", "--every", "1h", "--queue", "crawl", "--key", "acme", "--priority", "3")
    CliRunner().invoke(app, ["loop", "z", "--name", "c", "--every", "1h", "--queue", "crawl"], catch_exceptions=False)
    found = json.loads(command("list", "--json").stdout)["schedules"]
    assert [(one["queue"], one["key"], one["priority"]) for one in found] == [
        ("crawl", "acme", 2), ("crawl", "acme", 3), ("crawl", "", 0),
    ]  # fmt: skip
    assert "queue      crawl, key acme, priority 3" in command("show", "b").stdout
    fired = [cluster.schedule(name).trigger() for name in "abc"]
    assert queue.info().waiting == 3
    queue.resume()
    texts = [cluster.session(one.session_id).run(one.run_id).result(PATIENCE, check=True).text for one in fired]
    assert texts[:2] == ["offline: x", "offline: y"]


def test_the_commands(cluster: LocalCluster, command: Command, tmp_path: Path) -> None:
    """Given an agent's file, when a schedule is created, listed, paused, triggered, resumed and deleted, then each
    command says what was done, for people and as JSON."""
    agent = tmp_path / "triage.toml"
    agent.write_text('name = "triage"\ninstructions = "Look."\n')
    words = ("nightly", "look at the issues", "--agent", str(agent), "--cron", "0 3 * * 1-5", "--zone", "Europe/Berlin")
    made = command("create", *words, "--jitter", "5m", "--window", "2h")
    assert made.exit_code == 0, made.output
    assert "0 3 * * 1-5 Europe/Berlin, within 5m" in made.stdout
    assert "overlap skip, catch-up latest, not later than 2h" in made.stdout
    again = json.loads(command("create", *words, "--jitter", "300", "--window", "120m", "--json").stdout)
    assert (again["name"], again["state"], again["agent"], again["fired"]) == ("nightly", "active", "triage", 0)
    assert again["created_at"] == again["updated_at"]  # it was the same
    [listed] = json.loads(command("list", "--json").stdout)["schedules"]
    assert listed == again
    assert "a session of triage" in command("list").stdout
    assert [command("pause", "nightly").stdout, command("pause", "nightly").stdout] == [
        "paused\n", "it was paused already\n"
    ]  # fmt: skip
    fired = json.loads(command("trigger", "nightly", "--json").stdout)
    assert fired["outcome"] == "fired"
    run = cluster.session(fired["session_id"]).run(fired["run_id"]).result(PATIENCE, check=True)
    assert run.text == "offline: look at the issues"
    shown = command("show", "nightly").stdout
    assert "0 fired, 1 triggered" in shown
    assert re.search(r"next +20\S+ \d\d:\d\d:\d\d[+-]\d\d:\d\d, in \d+[dhm]", shown)
    assert "last       run completed" in shown
    assert "run completed" in command("list").stdout
    assert json.loads(command("show", "nightly", "--json").stdout)["last_status"] == "completed"
    assert json.loads(command("resume", "nightly", "--json").stdout) == {"resumed": True}
    assert [command("delete", "nightly").stdout, command("delete", "nightly").stdout] == [
        "deleted\n",
        "there was none\n",
    ]
    assert json.loads(command("list", "--json").stdout) == {"schedules": []}


FLOWS = """
from understudy import WorkflowContext, workflow

@workflow
async def greet(ctx: WorkflowContext, name: str, times: int = 1) -> str:
    return f"hello {name}" * times
"""


@pytest.fixture
def flows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with workflows in it, which commands are run in."""
    (tmp_path / "greetings.py").write_text(FLOWS)
    (tmp_path / "parcels.yaml").write_text(
        "name: parcels\ninputs: {to: {type: string}}\nsteps: [{wait: {seconds: 0.01}}]"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "greetings", raising=False)


@pytest.mark.usefixtures("flows")
@pytest.mark.parametrize(
    ("words", "name", "result"),
    [
        (("greetings.py:greet", "name=Ann", "times=2"), "greet", "hello Annhello Ann"),
        (("greetings:greet", "--input", '{"name": "Ann"}'), "greet", "hello Ann"),
        (("parcels.yaml", "to=Oslo"), "parcels", ""),
    ],
)
def test_a_workflow_is_scheduled_by_a_command(
    cluster: LocalCluster, command: Command, words: tuple[str, ...], name: str, result: str
) -> None:
    """Given a workflow by its module or its file, when a schedule of it is created and triggered, then it has run with
    that input; the same command again changes nothing."""
    create = ("create", "nightly", "--workflow", *words, "--cron", "@daily", "--json")
    made = json.loads(command(*create).stdout)
    assert (made["workflow"], made["state"], json.loads(command(*create).stdout)) == (name, "active", made)
    assert f"workflow {name}" in command("list").stdout
    fired = json.loads(command("trigger", "nightly", "--json").stdout)
    assert cluster.session(fired["session_id"]).run(fired["run_id"]).result(PATIENCE, check=True).text == result


@pytest.mark.usefixtures("flows")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workflow", "greetings:greet"), "missing a required argument: 'name'"),
        (("--workflow", "greetings:greet", "name=Ann", "times=often"), "times: "),
        (("--workflow", "greetings:greets"), "has no function 'greets'"),
        (("--workflow", "greetings:greet", "Ann"), "is no NAME=VALUE"),
        (("--workflow", "parcels.yaml", "--input", '{"to": 7}'), "is not of type 'string'"),
        (("--workflow", "greetings:greet", "--session", "s"), "--workflow goes without"),
        (("hello", "--input", "{}"), "name one with --workflow"),
        (("name=Ann", "times=2"), "is for --workflow"),
    ],
)
def test_a_workflow_that_a_command_can_not_schedule(command: Command, words: tuple[str, ...], said: str) -> None:
    """Given a workflow that is not there, or an input that it does not take, then the command is wrong usage."""
    done = command("create", "nightly", *words, "--every", "1h", "--json")
    assert (done.exit_code, said in json.loads(done.stdout)["error"]["message"]) == (2, True), done.stdout
    assert json.loads(command("list", "--json").stdout) == {"schedules": []}


def test_what_became_of_the_last_due_time(cluster: LocalCluster, command: Command) -> None:
    """Given a schedule that has fired, and one that is paused, then the list says when that was, how the run stands,
    and when a due time did not fire."""
    for name in ("fires", "waits"):
        command("create", name, "go", "--every", "1s", "--max-firings", "1")
        if name == "waits":
            command("pause", name)
    until_fired(cluster, "fires", 1)
    cluster.session(cluster.schedule("fires").info().last_session).run(
        cluster.schedule("fires").info().last_run
    ).result(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not cluster.schedule("waits").info().skipped:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    fires, waits = (
        next(line for line in command("list").stdout.splitlines() if name in line) for name in ("fires", "waits")
    )
    assert re.search(r"fired \S+ ago, run completed", fires)
    assert re.search(r"not fired \S+ ago", waits)
    assert "problem    it is paused" in command("show", "waits").stdout


def test_what_is_triggered_and_skipped(cluster: LocalCluster, command: Command) -> None:
    """Given a run that has not ended, when its schedule is triggered again, then the command fails and says why."""
    cluster.spawn(AgentSpec(name="a", instructions='offline-script: [{"delay": 60}]'), session_id="s")
    command("create", "pulse", "go", "--session", "s", "--every", "1h")
    assert command("trigger", "pulse").exit_code == 0
    again = command("trigger", "pulse")
    assert again.exit_code == 1
    assert "skipped" in again.stderr
    assert "has not ended" in again.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "none"), 1, "there is no schedule 'none'"),
        (("trigger", "none"), 1, "there is no schedule 'none'"),
        (
            ("create", "n", "x", "--every", "often"),
            2,
            "'often' is no duration: write seconds as a number, or a text as 30s, 5m, 1h30m or 2d",
        ),
        (("create", "n", "x", "--at", "soon"), 2, "must be a time"),
        (("create", "n", "x", "--cron", "99 * * * *"), 2, "bad minute"),
        (("create", "n", "x"), 2, "give one of cron, every and at"),
        (("create", "n", "--every", "5m"), 2, "say what to do"),
        (("create", "n", "x", "--every", "5m", "--session", "s", "--model", "m"), 2, "--session goes without"),
        (("create", "n", "x", "--every", "5m", "--session", "nobody"), 1, "there is no session 'nobody'"),
    ],
)
def test_mistakes_are_reported(command: Command, words: tuple[str, ...], code: int, said: str) -> None:
    """Given a mistake, then a command's exit code and its error say so, with `--json` as JSON."""
    done = command(*words, "--json")
    assert (done.exit_code, said in json.loads(done.stdout)["error"]["message"]) == (code, True), done.stdout
    assert said in command(*words).stderr.replace("\n", " ")
