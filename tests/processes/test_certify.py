"""`understudy certify`: agents whose faults are known, killed for real at each of their commit points."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from understudy.cluster.certify import frame_processes as certify_processes
from understudy.cluster.certify import stage as stage
from understudy.cluster.certify.verdict import (
    DIFFERENT_AFTER_REPORT,
    EQUAL,
    EQUAL_BUT_REPORTED,
    NOT_CALLED,
    NOT_INTERRUPTED,
    NOT_SAFE,
    RECONCILED,
    REPORTED,
    SAFE,
)
from understudy.cluster.cli.main import app
from understudy.testing.offline import OfflineServer

from ..kernel import kernel as k
from .test_environment import PASSWORDS

TOOLS = '''
import itertools, os, time
from pathlib import Path
from understudy import ToolContext, tool

@tool(on_crash="rerun")
def look(name: str, context: ToolContext) -> str:
    """Read a file."""
    return (Path(context.workspace) / name).read_text()

@tool(on_crash="rerun")
def append(text: str, context: ToolContext) -> str:
    """Append a line."""
    with open(Path(context.workspace) / "notes.txt", "a") as file:
        file.write(text + "\\n")
    return "appended"

@tool(on_crash="rerun")
async def create(name: str, context: ToolContext) -> str:
    """Make a new file, which must not be there."""
    with open(Path(context.workspace) / name, "x"):
        pass
    return "created"

@tool
def put(text: str, context: ToolContext) -> str:
    """Write a file; harmless to repeat, though not declared so."""
    (Path(context.workspace) / "put.txt").write_text(text)
    return "put"

@tool
def add(text: str, context: ToolContext) -> str:
    """Append a line, declared as what it is."""
    return append(text, context)

async def find_out(context: ToolContext) -> str:
    """Whether the order was placed."""
    placed = (Path(context.workspace) / "orders.txt").exists()
    return "ordered" if placed else "not ordered"

@tool(on_crash=find_out)
def order(item: str, context: ToolContext) -> str:
    """Order something."""
    (Path(context.workspace) / "orders.txt").write_text(item)
    return "ordered"

def at_a_loss(context: ToolContext) -> str:
    raise ConnectionError("nobody answers")

@tool(on_crash=at_a_loss)
def ship(item: str) -> str:
    """Ship something."""
    return "shipped"

@tool(on_crash="rerun")
def clock() -> str:
    """The time."""
    return str(time.time_ns())

seen = []

@tool(on_crash="rerun")
def remember(text: str) -> str:
    """Keep something in this process's memory."""
    seen.append(text)
    return "kept"

@tool(on_crash="rerun")
def recall() -> str:
    """What is in this process's memory."""
    return ",".join(seen)

@tool(on_crash="rerun")
def keys() -> str:
    """Which keys this process knows."""
    return ",".join(name for name in os.environ if name.startswith("OPENAI"))

@tool(on_crash="rerun")
def variables() -> str:
    """What this process has in its environment."""
    return " ".join(sorted(os.environ))

@tool(on_crash="rerun")
def slow(context: ToolContext) -> str:
    """Takes long, and says that it has begun."""
    Path(os.environ["BEGUN"]).write_text(str(os.getpid()))
    time.sleep(60)
    return "done"

def plain() -> str:
    return "no tool"
'''

pytestmark = pytest.mark.timeout(300)
"""A run costs two processes' starts, so these tests take as long as others let them."""

NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The offline model, and an import system that forgets the agents of this test."""
    for name in ("OPENAI_API_KEY", "UNDERSTUDY_MODEL", "UNDERSTUDY_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    assert descendants() == [], "processes were left behind"


def descendants() -> list[str]:
    return [
        str(child) for child in psutil.Process().children(recursive=True) if "certify_frame" in str(child.cmdline())
    ]


class Agent:
    """An agent's directory: its tools in a module of their own name, its workspace, its file."""

    def __init__(self, directory: Path, *replies: Any, tools: tuple[str, ...], **fields: Any) -> None:
        self.module = f"certified_tools_{next(NUMBERS)}"
        (directory / f"{self.module}.py").write_text(TOOLS)
        self.workspace = directory / "workspace"
        self.workspace.mkdir()
        (self.workspace / "facts.txt").write_text("fact\n")
        self.data: dict[str, Any] = {
            "name": "agent",
            "instructions": k.script(*replies),
            "tools": [name if name in ("files", "spawn_agent") else f"{self.module}:{name}" for name in tools],
            "workspace": "workspace",
            **fields,
        }
        self.file = directory / "agent.json"

    def certify(self, *arguments: str, input: str | None = "go") -> Result:
        self.file.write_text(json.dumps(self.data))
        given = ["--input", input] if input is not None else []
        return CliRunner().invoke(app, ["certify", str(self.file), *given, "--yes", *arguments])

    def certified(self, *arguments: str, exit_code: int) -> dict[str, Any]:
        result = self.certify("--json", *arguments)
        assert result.exit_code == exit_code, result.output + result.stderr
        found: dict[str, Any] = json.loads(result.stdout)
        assert found["ok"] == (exit_code == 0)
        return found


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {tool["name"]: tool["verdict"] for tool in found["verdict"]["tools"]}


def kinds(found: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in found["verdict"]["findings"]}


def states(found: dict[str, Any]) -> set[str]:
    return {point["comparison"]["state"] for point in found["verdict"]["points"] if not point["forced"]}


@pytest.mark.thorough
def test_a_safe_agent_passes(tmp_path: Path) -> None:
    """A reading tool and a writing one that is not declared rerun: killed at every point, both are as declared, the
    real workspace is untouched, and the hint says that the writing one could be rerun."""
    calls = [("look", {"name": "facts.txt"}), ("put", {"text": "new"})]
    agent = Agent(tmp_path, calls, "done", tools=("look", "put"))
    found = agent.certified(exit_code=0)
    assert verdicts(found) == {"look": SAFE, "put": REPORTED}
    tools = {tool["name"]: tool for tool in found["verdict"]["tools"]}
    assert (tools["look"]["executions"], tools["put"]["executions"]) == (2, 1)
    assert 'on_crash="rerun" may be possible' in tools["put"]["hint"]
    reached = " ".join(point["point"] for point in found["verdict"]["points"])
    for words in (
        "before commit 1 (input, model call 1)",
        "round 2 is in flight",
        "its reply lost",
        "look (1/0) begins",
    ):
        assert words in reached
    assert stage.Point(stage.TOOL_DONE, "agent", 0, "1/1", "put").__str__() in reached
    # The last one: `put` never began, so its file is missing.
    assert states(found) == {EQUAL, EQUAL_BUT_REPORTED, DIFFERENT_AFTER_REPORT}
    assert [path.name for path in agent.workspace.iterdir()] == ["facts.txt"]
    assert (found["rounds"], found["status"]) == (2, "completed")


@pytest.mark.thorough
def test_a_tool_that_appends_is_not_safe_to_rerun(tmp_path: Path) -> None:
    """Declared rerun, it appends: its second execution leaves a second line, which the report shows."""
    agent = Agent(tmp_path, [("append", {"text": "a line"})], "done", tools=("append", "look"))
    found = agent.certified("--only", "append", exit_code=1)
    assert verdicts(found) == {"append": NOT_SAFE, "look": NOT_CALLED}
    (finding,) = found["verdict"]["findings"]
    assert (finding["kind"], finding["tools"]) == ("rerun_changed", ["append"])
    assert "after the effect of append (1/0)" in finding["point"]
    (change,) = finding["comparison"]["files"]
    assert (change["path"], change["change"]) == ("notes.txt", "changed")
    assert "\n+a line" in change["diff"]
    shown = agent.certify("--only", "append")
    assert shown.exit_code == 1
    for words in ("not safe to rerun", "changed in the workspace: notes.txt", "+a line", "1 finding"):
        assert words in shown.stdout, shown.stdout


@pytest.mark.thorough
def test_a_death_repeats_one_call(tmp_path: Path) -> None:
    """Two calls in one round: a tool that is harmless to repeat is not blamed for the one before it."""
    calls = [("append", {"text": "a line"}), ("look", {"name": "facts.txt"})]
    agent = Agent(tmp_path, calls, "done", tools=("append", "look"))
    found = agent.certified(exit_code=1)
    assert verdicts(found) == {"append": NOT_SAFE, "look": SAFE}
    assert [finding["tools"] for finding in found["verdict"]["findings"]] == [["append"]] * 2


@pytest.mark.thorough
def test_another_result_of_the_second_execution_is_found(tmp_path: Path) -> None:
    """A tool that fails the second time changes no file but the transcript: its diff is shown, and that the request
    after the crash differs."""
    agent = Agent(tmp_path, [("create", {"name": "new.txt"})], "done", tools=("create",))
    found = agent.certified("--only", "create", exit_code=1)
    (finding,) = found["verdict"]["findings"]
    comparison = finding["comparison"]
    assert comparison["files"] == []
    assert comparison["requests"] == ["agent, round 2"]
    assert "-create (1/0): created" in comparison["diff"]
    assert "+create (1/0): FileExistsError" in comparison["diff"]


@pytest.mark.thorough
def test_a_tool_that_is_rightly_not_declared_rerun(tmp_path: Path) -> None:
    """An appending tool with the default declaration is no finding; forced to rerun, it shows why it is right."""
    found = Agent(tmp_path, [("add", {"text": "x"})], "done", tools=("add",)).certified("--only", "add", exit_code=0)
    assert verdicts(found) == {"add": REPORTED}
    assert "rightly not declared rerun" in found["verdict"]["tools"][0]["hint"]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "found_kinds"), [("order", set()), ("ship", {"reconcile_failed"})])
def test_reconcile_is_distinguished_from_one_that_fails(tmp_path: Path, name: str, found_kinds: set[str]) -> None:
    """A tool that finds out what happened passes; one whose function can't is a finding."""
    agent = Agent(tmp_path, [(name, {"item": "tea"})], "done", tools=(name,))
    found = agent.certified("--only", name, exit_code=1 if found_kinds else 0)
    assert verdicts(found) == {name: RECONCILED}
    assert kinds(found) == found_kinds
    assert all("nobody answers" in finding["text"] for finding in found["verdict"]["findings"])


@pytest.mark.thorough
def test_what_differs_without_a_death_is_not_held_against_a_tool(tmp_path: Path) -> None:
    """A tool that returns the time makes every request differ: that is one finding, with the difference, and the tool
    that was rerun after it is still judged."""
    agent = Agent(tmp_path, [("clock", {})], [("append", {"text": "x"})], "done", tools=("clock", "append"))
    found = agent.certified("--only", "append", exit_code=1)
    assert kinds(found) == {"not_deterministic", "rerun_changed"}
    first = found["verdict"]["findings"][0]
    assert (first["tools"], first["comparison"]["requests"][0]) == (["clock"], "agent, round 2")
    assert "clock (1/0): " in first["comparison"]["request_diff"]
    assert verdicts(found) == {"clock": NOT_INTERRUPTED, "append": NOT_SAFE}


@pytest.mark.thorough
def test_what_was_kept_in_memory_is_missed(tmp_path: Path) -> None:
    """A tool that relies on its process's memory: after a death between two tools the transcript differs, although
    nothing ran twice."""
    agent = Agent(tmp_path, [("remember", {"text": "x"})], [("recall", {})], "done", tools=("remember", "recall"))
    found = agent.certified("--points", "4", exit_code=1)  # one is the model call between the two
    assert "differs" in kinds(found)
    finding = next(finding for finding in found["verdict"]["findings"] if finding["kind"] == "differs")
    assert "-recall (2/0): x" in finding["comparison"]["diff"]


@pytest.mark.thorough
def test_sub_agents_are_killed_as_well(tmp_path: Path) -> None:
    """A lead and two sub-agents, one of which appends: points and findings name the session, and a lead that is killed
    has its sub-agent's result once."""
    spawns = [("spawn_agent", {"task": "go", "agent": "reader"}), ("spawn_agent", {"task": "go", "agent": "writer"})]
    agent = Agent(tmp_path, spawns, "done", tools=("spawn_agent",))
    common = {"workspace": "workspace"}
    agent.data["agents"] = [
        {"name": "reader", "tools": [f"{agent.module}:look"],
         "instructions": k.script([("look", {"name": "facts.txt"})], "read"), **common},
        {"name": "writer", "tools": [f"{agent.module}:append"],
         "instructions": k.script([("append", {"text": "x"})], "written"), **common},
    ]  # fmt: skip
    found = agent.certified("--only", "append", exit_code=1)
    assert verdicts(found) == {"look": NOT_INTERRUPTED, "append": NOT_SAFE}
    assert found["sessions"] == ["agent", "agent › reader 1/0", "agent › writer 1/1"]
    assert [(finding["tools"], finding["point"]) for finding in found["verdict"]["findings"]] == [
        (["append"], "agent › writer 1/1: after the effect of append (1/0), its result not committed")
    ]
    found = agent.certified("--only", "look", exit_code=0)
    assert (verdicts(found)["look"], states(found)) == (SAFE, {EQUAL})
    agent.data["agents"].pop()
    agent.data["instructions"] = k.script(spawns[:1], "done")
    found = agent.certified("--points", "7", exit_code=0)
    assert (states(found), len({point["point"].split(":")[0] for point in found["verdict"]["points"]})) == ({EQUAL}, 2)


@pytest.mark.thorough
def test_points_are_limited_evenly_and_kept(tmp_path: Path) -> None:
    """`--points` limits the runs; `--keep` leaves report, recording, and each run's store and workspace."""
    agent = Agent(tmp_path, [("look", {"name": "facts.txt"})], "done", tools=("look",))
    found = agent.certified("--points", "2", "--keep", str(tmp_path / "kept"), exit_code=0)
    assert (found["runs"], len(found["verdict"]["points"])) == (3, 2)
    assert verdicts(found) == {"look": NOT_INTERRUPTED}
    kept = tmp_path / "kept"
    assert json.loads((kept / "report.json").read_text())["ok"] is True
    assert [call["round"] for call in json.loads((kept / "recording.json").read_text())] == [1, 2]
    assert (kept / "runs" / "003" / "workspaces" / "workspace" / "facts.txt").read_text() == "fact\n"
    check = CliRunner().invoke(app, ["store", "check", "--store", f"sqlite:///{kept}/runs/003/store.db"])
    assert check.exit_code == 0, check.output
    again = agent.certify("--keep", str(kept))
    assert (again.exit_code, "is not empty" in again.stderr) == (2, True)


@pytest.mark.thorough
def test_a_run_that_does_not_end_is_reported(tmp_path: Path) -> None:
    """An agent that would be given up after its first death ends otherwise: quarantined, which is a finding."""
    agent = Agent(tmp_path, "done", tools=(), restart={"stuck_after": 1})
    found = agent.certified("--points", "2", exit_code=1)
    assert kinds(found) == {"ended"}
    assert "quarantined" in found["verdict"]["findings"][0]["text"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("agent.toml", 'name = "a', "is not TOML"),
        ("agent.json", "[1]", "must hold an object"),
        ("agent.json", "{", "is not JSON"),
        ("agent.toml", 'name = "a"', "there is no input"),
        ("agent.toml", 'name = "a"\ninput = 3', "input: must be a text"),
        ("agent.toml", 'name = "a"\ninput = "go"\nsandbox = "jail"', "sandbox.backend"),
    ],
)
def test_a_bad_file_is_a_usage_error(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """A file that can't be used ends with exit code 2 and says why; nothing was started."""
    (tmp_path / name).write_text(text)
    result = CliRunner().invoke(app, ["certify", str(tmp_path / name)])
    assert (result.exit_code, expected in result.stderr) == (2, True), result.output
    assert "Traceback" not in result.output


@pytest.mark.thorough
def test_tools_that_reach_outside_need_a_word(tmp_path: Path) -> None:
    """The user's own tools and bash need `--yes`; built-in file tools in a copied workspace do not."""
    agent = Agent(tmp_path, [("look", {"name": "facts.txt"})], "done", tools=("look",))
    agent.file.write_text(json.dumps(agent.data))
    refused = CliRunner().invoke(app, ["certify", str(agent.file), "--input", "go"])
    assert (refused.exit_code, "--yes" in refused.stderr) == (2, True)
    (tmp_path / "safe.toml").write_text(
        'name = "safe"\ntools = ["files"]\nworkspace = "workspace"\ninput = "call write_file '
        '{\\"path\\": \\"new.txt\\", \\"content\\": \\"x\\"}"\n'
    )
    passed = CliRunner().invoke(app, ["certify", str(tmp_path / "safe.toml"), "--points", "1", "--json"])
    assert passed.exit_code == 0, passed.output + passed.stderr
    assert verdicts(json.loads(passed.stdout))["read_file"] == NOT_CALLED
    assert not (agent.workspace / "new.txt").exists()


def test_only_names_a_tool_of_the_agent(tmp_path: Path) -> None:
    """`--only` with a tool that the agent lacks is a usage error which lists those it has."""
    result = Agent(tmp_path, "done", tools=("look",)).certify("--only", "lok")
    assert (result.exit_code, "it has: look" in result.stderr) == (2, True)


def test_a_run_that_fails_undisturbed_is_no_certificate(tmp_path: Path) -> None:
    """When the recorded run fails, there is nothing to compare with: exit code 1, and the model's error."""
    agent = Agent(tmp_path, "done", tools=(), instructions="offline-script: nonsense")
    result = agent.certify()
    assert (result.exit_code, "the undisturbed run ended as failed" in result.stderr) == (1, True), result.output


@pytest.mark.thorough
def test_only_the_recorded_run_asks_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key, the endpoint is asked once for each round of the undisturbed run, and no process of a session has
    the key in its environment, nor the address."""
    agent = Agent(tmp_path, [("keys", {})], "done", tools=("keys",), model="m")
    with OfflineServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-somebody")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        found = agent.certified("--only", "keys", exit_code=0)
        assert (found["runs"], server.count) == (3, 2)
        (result,) = [m["content"] for m in server.requests[-1].body["messages"] if m["role"] == "tool"]
    assert result == ""


@pytest.mark.thorough
def test_tools_have_no_variable_that_nobody_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the shell's variables a session's process has what any program needs, and what its agent or a sub-agent names;
    if that is not there, the command says so before it begins."""
    for name in PASSWORDS:
        monkeypatch.setenv(name, "hunter2-of-the-tests")
    child = {"name": "child", "environment": ["LEDGER"]}
    agent = Agent(
        tmp_path, [("variables", {})], "done", tools=("variables", "spawn_agent"), model="m",
        environment=["SMTP_PASS"], agents=[child],
    )  # fmt: skip
    with OfflineServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-somebody")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        result = agent.certify()
        assert (result.exit_code, "LEDGER" in result.stderr, server.count) == (2, True, 0), result.output
        monkeypatch.setenv("LEDGER", "/ledger")
        agent.certified("--only", "variables", exit_code=0)
        (names,) = [m["content"] for m in server.requests[-1].body["messages"] if m["role"] == "tool"]
    assert {"PATH", "HOME", "SMTP_PASS", "LEDGER"} <= set(names.split())
    assert {*PASSWORDS, "OPENAI_BASE_URL"} & set(names.split()) == {"SMTP_PASS"}


@pytest.mark.thorough
def test_a_process_that_does_not_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a session's process ends before it has begun, the command ends with the last that it said."""
    monkeypatch.setattr(certify_processes, "START", "raise SystemExit('out of luck')")
    result = Agent(tmp_path, "done", tools=()).certify()
    assert (result.exit_code, "out of luck" in result.stderr) == (1, True), result.output


@pytest.mark.thorough
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    """Interrupted in the middle of a tool, the command ends with 130, and so do its processes."""
    agent = Agent(tmp_path, [("slow", {})], "done", tools=("slow",), environment=["BEGUN"])
    agent.file.write_text(json.dumps(agent.data))
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    command = [sys.executable, "-P", "-c", "from understudy.cluster.__main__ import main; main()", "certify"]
    running = subprocess.Popen(
        [*command, str(agent.file), "--input", "go", "--yes"], env={**os.environ, "BEGUN": str(begun)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        pid = int(begun.read_text())  # as soon as the tool writes it
        started = [child.pid for child in psutil.Process(running.pid).children(recursive=True)]
        assert pid in started
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert (running.returncode, "nothing goes on" in said) == (130, True), said
    assert not [pid for pid in started if psutil.pid_exists(pid)]
