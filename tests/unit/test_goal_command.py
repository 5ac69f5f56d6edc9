"""`understudy goal`, on the cluster in one process: what it prints where, how it ends, and how it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from understudy.cluster.cli import following
from understudy.cluster.cli.goal_following import verdict_line
from understudy.cluster.cli.main import app
from understudy.cluster.client import client
from understudy.testing import LocalCluster
from understudy.testing.offline import Reply, register_policy
from understudy.testing.policies import content_text

from ..git_repository import repository

Goal = Callable[..., Result]

EVALUATOR = """---
name: critic
---
You judge.
offline-policy: {policy}
"""


def by_the_second_try(body: dict[str, Any]) -> Reply:
    """The condition holds once the worker has read that it does not."""
    met = "It does not hold yet" in content_text(body["messages"][1])
    return Reply(text=json.dumps({"reason": "it was told so" if met else "it is the first", "met": met}))


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as made:
        yield made


@pytest.fixture
def goal(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Goal:
    """`understudy goal` with these arguments, connected to the local cluster, in a directory with `critic.md`."""

    class Connected:
        @classmethod
        def connect(cls, store: str | None, **_options: Any) -> LocalCluster:
            return cluster

    for name in ("OPENAI_API_KEY", "OPENAI_API_KEY_FILE", "UNDERSTUDY_MODEL", "UNDERSTUDY_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "Cluster", Connected)
    monkeypatch.setattr(cluster, "close", lambda: None)
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    register_policy("second", by_the_second_try)
    (tmp_path / "critic.md").write_text(EVALUATOR.format(policy="second"))
    return lambda *arguments, stdin="": CliRunner().invoke(app, ["goal", *arguments], input=stdin)


IDS = ("--session", "g", "--run-id", "1")


def test_rounds_and_verdicts_are_on_stderr_and_the_answer_on_stdout(goal: Goal) -> None:
    """Given a goal that is met in its second round, then stdout has that round's answer, stderr both verdicts in order,
    and what to do next; the exit code is 0."""
    done = goal("it holds", "Work", "--evaluator", "critic.md", *IDS)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("offline: It does not hold yet.")
    lines = done.stderr.splitlines()
    verdicts = [line for line in lines if line.startswith("= ")]
    assert verdicts == ["= round 1: not met: it is the first", "= round 2: met: it was told so"]
    agents = [line.split()[2] for line in lines if line.startswith("+ sub-agent")]
    assert agents == ["assistant", "critic", "assistant", "critic"]
    assert lines.index(verdicts[0]) < [number for number, line in enumerate(lines) if "+ sub-agent" in line][2]
    assert "understudy workflow status g" in done.stderr


def test_a_goal_is_followed_again(goal: Goal) -> None:
    """Given a goal that has ended, when it is followed by its ids, then the same is shown, and nothing is done."""
    first = goal("it holds", "Work", "--evaluator", "critic.md", *IDS)
    again = goal(*IDS)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert [line for line in again.stderr.splitlines() if line.startswith("= ")] == [
        "= round 1: not met: it is the first",
        "= round 2: met: it was told so",
    ]


def test_a_goal_that_is_not_met_has_the_exit_code_1(goal: Goal) -> None:
    """Given the offline model alone, whose smallest verdict is that nothing holds, then after all rounds the exit code
    is 1, and the error has its code; also in JSON."""
    done = goal("it holds", "Work", "--max-rounds", "2", *IDS)
    assert (done.exit_code, done.stdout) == (1, ""), done.output
    assert "= round 2: not met" in done.stderr
    assert "not met in 2 rounds" in done.stderr
    wire = json.loads(goal(*IDS, "--json").stdout)
    assert (wire["status"], wire["error"]["code"], wire["error"]["details"]["rounds"]) == ("failed", "goal_not_met", 2)


def test_no_verdict_has_the_exit_code_1(goal: Goal, tmp_path: Path) -> None:
    """Given an evaluator that says what is no verdict, then the exit code is 1, and no round is said to be met."""
    (tmp_path / "vague.md").write_text('---\nname: vague\n---\noffline-script: [{"text": "Yes, it is met."}]\n')
    done = goal("it holds", "Work", "--evaluator", "vague.md", *IDS)
    assert (done.exit_code, done.stdout) == (1, ""), done.output
    assert "round 1 has no verdict" in done.stderr
    assert "= round" not in done.stderr


def test_a_goal_that_waits_for_a_person_has_the_exit_code_3(goal: Goal, cluster: LocalCluster) -> None:
    """Given a worker that asks a person, then the exit code is 3 and the question is shown; when it is answered, the
    goal is followed to its end."""
    asks = 'call request_user_input {"prompt": "Which one?"}'
    paused = goal("it holds", asks, "--tool", "request_user_input", "--evaluator", "critic.md", *IDS)
    assert paused.exit_code == 3, paused.output
    assert "Which one?" in paused.stderr
    assert "understudy goal --session g --run-id 1" in paused.stderr
    for info in cluster.session("g").tree():
        for asked in info.pending:
            cluster.session(getattr(asked, "session_id", "") or info.id).answer(asked.call_id, "this one")
    again = goal(*IDS)
    assert again.exit_code == 3, again.output  # it asks in the second round as well
    assert "= round 1: not met: it is the first" in again.stderr


def test_options_describe_the_agent_and_the_evaluator(goal: Goal, cluster: LocalCluster, tmp_path: Path) -> None:
    """Given options, then the worker has its tools and instructions, the evaluator its model and tools that only read,
    and the budget is that of the whole goal."""
    done = goal(
        "it holds", "-", "--tool", "files", "--instructions", "Be quick.", "--max-rounds", "1", "--budget-tokens",
        "100000", "--no-wait", "--json", *IDS, stdin="From stdin",
    )  # fmt: skip
    assert json.loads(done.stdout) == {"session_id": "g", "run_id": "1"}
    assert goal(*IDS).exit_code == 1
    worker, evaluator = (request.body for request in cluster.model_server.requests)
    assert "From stdin" in content_text(worker["messages"][1])
    assert content_text(worker["messages"][0]) == "Be quick."
    other = goal("it holds", "Work", "--evaluator-model", "other")
    assert "agent 'evaluator' uses model 'other', and no key is set" in other.stderr
    assert {one["function"]["name"] for one in evaluator["tools"]} == {"read_file", "glob", "grep"}
    limits = [(one.resource, one.allowed) for one in cluster.session("g").budgets()]
    assert limits == [("tokens", 100_000)]


def test_a_worktree_is_merged_when_the_goal_is_met(goal: Goal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given `--worktree` in a repository, then what the worker has written is there once the goal is met."""
    top = repository(tmp_path / "repository")
    monkeypatch.chdir(top)
    writes = 'call write_file {"path": "c.txt", "content": "done"}'
    met = json.dumps([{"text": json.dumps({"reason": "it is there", "met": True})}])
    (tmp_path / "yes.md").write_text(f"---\nname: yes\n---\noffline-script: {met}\n")
    options = ("--tool", "files", "--sandbox", "none", "--worktree", "--evaluator", str(tmp_path / "yes.md"))
    done = goal("it holds", writes, *options, *IDS)
    assert done.exit_code == 0, done.output
    assert (top / "c.txt").read_text() == "done"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "say when it is done"),
        (("--session", "g"), "say when it is done"),
        (("it holds",), "the task of a goal"),
        (("it holds", "Work", "--run-id", "1"), "--run-id goes with --session"),
        (("it holds", "Work", "--session", "no id"), "--session"),
        ((" ", "Work"), "the condition of a goal"),
    ],
)
def test_wrong_usage_is_reported_before_there_is_a_session(
    goal: Goal, cluster: LocalCluster, arguments: tuple[str, ...], said: str
) -> None:
    """Given what says no goal, then the exit code is 2, and no session is made."""
    done = goal(*arguments)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert cluster.sessions() == []


def test_a_verdict_is_one_line() -> None:
    """Given a reason of several lines, or none, then a verdict is one line."""
    assert verdict_line(2, {"met": False, "reason": "a\nb"}) == ("= round 2: not met: a b", "yellow")
    assert verdict_line(3, {"met": True, "reason": ""}) == ("= round 3: met", "green")
