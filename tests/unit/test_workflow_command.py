"""`understudy workflow run|status`, `signal` and `query`, on the cluster in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from understudy import AgentSpec, WorkflowContext, tool, workflow
from understudy.cluster.cli import following
from understudy.cluster.cli.main import app
from understudy.cluster.client import client
from understudy.cluster.client.workflow_target import find_workflow, input_of
from understudy.errors import InvalidInput
from understudy.testing import LocalCluster

PATIENCE = 30.0

FLOWS = '''
from dataclasses import dataclass
from understudy import WorkflowContext, tool, workflow

@dataclass
class Parcel:
    weight: int

@tool(on_crash="rerun")
def weigh(weight: int) -> int:
    """Weigh."""
    if weight < 0:
        raise ValueError("it flies")
    return weight * 1000

@workflow
async def send(ctx: WorkflowContext, parcel: Parcel, to: str, times: int = 1) -> dict:
    """Send a parcel."""
    grams = await ctx.tool(weigh, parcel.weight)
    await ctx.publish("grams", grams)
    if to == "ask":
        to = await ctx.ask("Where to?", options=["Oslo", "Bergen"])
    if to == "wait":
        to = await ctx.event("address")
    return {"grams": grams, "to": to, "times": times}

def plain():
    """No workflow."""
'''

FILE = """
name: parcels
inputs:
  weight: {type: integer}
  to: {type: string}
  session_id: {type: array, default: []}
steps:
  - id: grams
    tool: {name: weigh, arguments: {weight: "{{weight}}"}}
  - when: to == 'ask'
    ask: {question: "Where to?"}
  - id: label
    agent: {name: clerk, task: "Label for {{to}}"}
  - id: kept
    when: to == 'keep'
    tool: {name: write_file, arguments: {path: label.txt, content: "{{label}}"}}
output: {grams: "{{grams}}", label: "{{label}}", ids: "{{session_id}}"}
"""

CLERK = """---
name: clerk
---
You write labels.
"""

Command = Callable[..., Result]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as made:
        yield made


@pytest.fixture
def understudy(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`understudy` with these arguments in a directory with `parcels.py`, connected to the local cluster."""

    class Connected:
        @classmethod
        def connect(cls, store: str | None, **_options: Any) -> LocalCluster:
            return cluster

    for name in ("OPENAI_API_KEY", "OPENAI_API_KEY_FILE", "UNDERSTUDY_MODEL", "UNDERSTUDY_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "Cluster", Connected)
    monkeypatch.setattr(cluster, "close", lambda: None)
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "parcels", raising=False)
    (tmp_path / "parcels.py").write_text(FLOWS)
    (tmp_path / "parcels.yaml").write_text(FILE)
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "clerk.md").write_text(CLERK)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, stdin="": CliRunner().invoke(app, list(arguments), input=stdin)


PARCEL = 'parcel={"weight": 2}'


def test_a_workflow_is_run_and_its_result_is_all_that_stdout_has(understudy: Command) -> None:
    """Given a workflow by its file or its module, then stdout has what it returns, and stderr the next step; the same
    session and run ids are one run."""
    done = understudy("workflow", "run", "parcels.py:send", PARCEL, "to=7", "--session", "s", "--run-id", "r")
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"grams": 2000, "to": "7", "times": 1}), done.output
    assert "understudy workflow status s" in done.stderr
    assert "· 0 weigh\n" in done.stderr
    assert "rounds" not in done.stderr
    again = understudy("workflow", "run", "parcels:send", PARCEL, "to=7", "--session", "s", "--run-id", "r", "--json")
    found = json.loads(again.stdout)
    assert (found["status"], found["run_id"], found["output"]["grams"]) == ("completed", "r", 2000)
    given = ("--input", '{"parcel": {"weight": 1}, "to": "x"}', "times=3")
    other = understudy("workflow", "run", "parcels:send", *given)
    assert json.loads(other.stdout) == {"grams": 1000, "to": "x", "times": 3}
    piped = understudy("workflow", "run", "parcels:send", "--input", "-", stdin='{"parcel": {"weight": 1}, "to": "y"}')
    assert json.loads(piped.stdout)["to"] == "y"


TOOLS = ("--tool", "parcels:weigh", "-t", "write_file")
GIVEN = ("parcels.yaml", "--agents", "agents", *TOOLS)


def test_a_definition_is_run_from_its_file(understudy: Command, tmp_path: Path) -> None:
    """Given a workflow's file, a directory of agents, a tool of one's own and a built-in one, then it is run as a
    function is, questions and a second run with the same ids included; built-in tools work in the current directory."""
    ids = ("--session", "s", "--run-id", "r")
    done = understudy("workflow", "run", *GIVEN, "weight=2", "to=7", 'session_id=["x"]', *ids)
    label = "offline: Label for 7"
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"grams": 2000, "label": label, "ids": ["x"]}), done.output
    again = understudy("workflow", "run", *GIVEN, "weight=2", "to=7", 'session_id=["x"]', *ids, "--json")
    assert json.loads(again.stdout)["run_id"] == "r"
    asked = understudy("workflow", "run", *GIVEN, "--input", '{"weight": 1, "to": "ask"}', "--session", "t")
    assert asked.exit_code == 3
    assert "understudy answer t" in asked.stderr
    one = ("parcels.yaml", "--agents", "agents/clerk.md", *TOOLS)
    assert understudy("workflow", "run", *one, "weight=1", "to=keep").exit_code == 0
    assert (tmp_path / "label.txt").read_text() == "offline: Label for keep"


def test_a_result_is_printed_at_a_terminal(understudy: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a terminal, where answers are shown as they are streamed, then what a workflow returns is printed, too."""
    monkeypatch.setattr(following.Screen, "__init__", screens(following.Screen.__init__))
    done = understudy("workflow", "run", "parcels:send", PARCEL, "to=x")
    assert json.loads(done.stdout)["to"] == "x"


def screens(begin: Callable[..., None]) -> Callable[..., None]:
    """A screen that streams, whatever stdout is."""
    return lambda self, **options: begin(self, **{**options, "streams": True})


def test_a_workflow_that_waits_for_a_person(understudy: Command) -> None:
    """Given a question, then the exit code says so, `status` shows the step with what is published, and after the
    answer the run is followed to its end."""
    asked = understudy("workflow", "run", "parcels:send", PARCEL, "to=ask", "--session", "s", "--run-id", "r")
    assert asked.exit_code == 3
    assert "understudy answer s r/2 TEXT" in asked.stderr
    shown = understudy("workflow", "status", "s")
    for text in ("Where to?", "published grams = 2000", "asked", "waiting_for_input", "understudy answer s r/2"):
        assert text in shown.stdout, text
    found = json.loads(understudy("workflow", "status", "s", "--json").stdout)
    (step,) = found["open"]
    assert (step["path"], step["tool"], step["state"]) == ("2", "ask", "asked")
    assert json.loads(step["arguments"])["prompt"] == "Where to?"
    assert [(one["path"], one["tool"], one["outcome"], one["text"]) for one in found["done"]] == [
        ("0", "weigh", "ok", "2000")
    ]
    assert (found["published"], found["run"]["run_id"]) == ({"grams": 2000}, "r")
    assert understudy("answer", "s", "r/2", "Oslo").exit_code == 0
    done = understudy("run", "--session", "s", "--run-id", "r")
    assert json.loads(done.stdout)["to"] == "Oslo"
    assert "understudy workflow status s" in done.stderr


def test_a_workflow_is_signalled_and_queried(understudy: Command, cluster: LocalCluster) -> None:
    """Given a workflow that is not waited for, then a signal is what its step returns, a published value is JSON, and
    each command says what it did; one that has ended takes no signals, and the error says where to look."""
    begun = understudy("workflow", "run", "parcels:send", PARCEL, "to=wait", "--session", "s", "--no-wait", "--json")
    ids = json.loads(begun.stdout)
    assert ids["session_id"] == "s"
    kept = understudy("signal", "s", "other", "1")
    assert (kept.exit_code, kept.stdout) == (0, "no step waits for it yet: it is kept for the next one\n")
    assert understudy("signal", "s", "address", '{"city"').exit_code == 2
    assert understudy("signal", "s", "address", '{"city": "Oslo"}').exit_code == 0
    result = cluster.session("s").run(ids["run_id"]).result(PATIENCE, check=True)
    assert result.output["to"] == {"city": "Oslo"}
    assert json.loads(understudy("query", "s", "grams").stdout) == 2000
    assert json.loads(understudy("query", "s", "nothing", "--json").stdout)["value"] is None
    late = understudy("signal", "s", "address")
    assert late.exit_code == 1
    assert "understudy workflow status s" in late.stderr


def test_a_workflow_that_fails(understudy: Command) -> None:
    """Given a step that fails, then the command does, and `status` says why; of an agent there is no such status."""
    done = understudy("workflow", "run", "parcels:send", 'parcel={"weight": -2}', "to=x", "--session", "s")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "it flies" in done.stderr
    shown = understudy("workflow", "status", "s").stdout
    assert "failed" in shown
    assert "it flies" in shown


def test_only_workflows_have_a_status(understudy: Command, cluster: LocalCluster) -> None:
    """Given an agent's session, or none, then the command says what to do instead, and ends as others do."""
    cluster.spawn(AgentSpec(name="clerk"), session_id="agent")
    refused = understudy("workflow", "status", "agent")
    assert refused.exit_code == 2
    assert "understudy show SESSION" in refused.stderr
    assert understudy("workflow", "status", "nobody").exit_code == 1
    assert understudy("query", "nobody", "x").exit_code == 1


@pytest.mark.parametrize(
    ("target", "arguments", "said"),
    [
        ("parcels", [], "MODULE:FUNCTION or FILE.py:FUNCTION"),
        ("parcels:nothing", [], "there are: send"),
        ("parcels:plain", [], "there are: send"),
        ("missing.py:send", [], "there is no file"),
        ("no_such_module:send", [], "can't be imported: ModuleNotFoundError"),
        ("parcels:send", ["to=x"], "missing a required argument: 'parcel'"),
        ("parcels:send", [PARCEL, "to=x", "other=1"], "unexpected keyword argument 'other'"),
        ("parcels:send", [PARCEL, "to=x", "times=many"], 'times: "many" is no int'),
        ("parcels:send", ["parcel=1", "to=x"], "parcel: 1 is no Parcel"),
        ("parcels:send", ["to"], "'to' is no NAME=VALUE"),
        ("parcels:send", ["--input", "[1]"], "the input must be a JSON object with the parameters: parcel, to, times"),
        ("parcels:send", [PARCEL, "to=x", "--run-id", "r"], "--run-id goes with --session"),
        ("parcels:send", [PARCEL, "to=x", "--session", "a b"], "--session"),
        ("parcels:send", [PARCEL, "to=x", "--tool", "bash"], "--agents and --tool are for a workflow's file"),
        ("missing.yaml", [], "can't be read: No such file or directory"),
        ("parcels.yaml", ["weight=1"], "steps[0].tool.name: no tool is named 'weigh'; there is none (line 9)"),
        ("parcels.yaml", [*TOOLS], "agents are given with --agents PATH, tools with --tool NAME"),
        ("parcels.yaml", ["--agents", "nowhere.md"], "nowhere.md"),
        ("parcels.yaml", ["--agents", "agents", "--tool", "wiegh"], "no tool is named 'wiegh'"),
        ("parcels.yaml", [*GIVEN[1:], "to=x"], "weight: is missing"),
        ("parcels.yaml", [*GIVEN[1:], "weight=1", "to=x", "too=y"], "too: there is no such input (did you mean 'to'?)"),
        ("parcels.yaml", [*GIVEN[1:], "weight=many", "to=x"], "weight: $: 'many' is not of type 'integer'"),
        ("parcels.yaml", [*GIVEN[1:], "--input", "[1]"], "a JSON object with the parameters: weight, to, session_id"),
    ],
)
def test_what_can_not_be_run_is_refused_before_there_is_a_session(
    understudy: Command, cluster: LocalCluster, target: str, arguments: list[str], said: str
) -> None:
    """Given no workflow, or an input that it does not take, then the usage is wrong, and nothing was created."""
    done = understudy("workflow", "run", target, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.split())
    assert cluster.sessions() == []


def test_a_file_is_the_module_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a file that is named as another module, or can't be imported, then that is said instead of taking the other
    one."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("json.py", "two-words.py"):
        (tmp_path / name).write_text(FLOWS)
    with pytest.raises(InvalidInput, match="another module is named json"):
        find_workflow("json.py:send", tmp_path)
    with pytest.raises(InvalidInput, match="letters, digits and underscores"):
        find_workflow("two-words.py:send", tmp_path)


@workflow
async def greets(ctx: WorkflowContext, name: str) -> str:
    """One text."""
    return name


@workflow
async def adds(ctx: WorkflowContext, numbers: list[int], note: Any = None) -> int:
    """Numbers, and anything."""
    return sum(numbers)


def test_values_are_json_or_texts() -> None:
    """Given the only parameter as a text, then it is that; values that are no JSON are texts, `null` is none, and where
    a parameter is a text all values are."""
    assert input_of(greets, "Ann", []) == {"name": "Ann"}
    assert input_of(greets, None, ["name=null"]) == {"name": "null"}
    assert input_of(adds, None, ["numbers=[1, 2]", "note=a b"]) == {"numbers": [1, 2], "note": "a b"}
    assert input_of(adds, '{"numbers": [1]}', ["note=null"]) == {"numbers": [1], "note": None}


@tool(on_crash="rerun")
def nothing() -> None:
    """Do nothing."""


@workflow
async def many(ctx: WorkflowContext, count: int) -> None:
    """Many steps and values."""
    for number in range(count):
        await ctx.tool(nothing)
        await ctx.publish(f"v{number % 3}", number)


def test_a_status_has_the_last_results_and_the_latest_values(cluster: LocalCluster) -> None:
    """Given a workflow of many steps, and a run of it before, then the status has the last results, latest first, and
    the values of the last run only."""
    session = cluster.workflow(many, 2, session_id="s", run_id="one").result(PATIENCE, check=True).session_id
    found = cluster.session(session).workflow_status()
    assert (found.run_id, found.open, found.published) == ("one", (), {"v0": 0, "v1": 1})
    cluster.workflow(many, 13, session_id="s", run_id="two").result(PATIENCE, check=True)
    found = cluster.session(session).workflow_status()
    assert found.published == {"v0": 12, "v1": 10, "v2": 11}
    assert [step.path for step in found.done] == [str(2 * number) for number in range(12, 2, -1)]
    assert {(step.tool, step.outcome, step.text) for step in found.done} == {("nothing", "ok", "null")}
