"""`understudy steer` and `understudy fork`, on the cluster in one process."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from understudy import AgentSpec, tool
from understudy.cluster.cli import main, steering_commands
from understudy.cluster.cli.main import app
from understudy.errors import ModelProfileMissing
from understudy.gateway import gateway_calls
from understudy.testing import LocalCluster

PATIENCE = 30.0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster that the commands connect to."""
    with LocalCluster() as made:

        @contextlib.contextmanager
        def connected(_store: str | None, **_options: Any) -> Iterator[LocalCluster]:
            yield made

        monkeypatch.setattr(steering_commands, "connected", connected)
        yield made


def test_a_run_is_steered_and_its_session_forked(cluster: LocalCluster) -> None:
    """Given a run whose tool is at work, when it is steered, then its id is printed and it answers to that; a fork of
    its session has the id that was asked for. Without a run, or at no message, the command fails and says why."""
    begun, may_end = threading.Event(), threading.Event()

    @tool(on_crash="rerun")
    def works() -> str:
        """Work until somebody says so."""
        begun.set()
        may_end.wait(PATIENCE)
        return "worked"

    session, runner = cluster.spawn(AgentSpec(name="a", tools=[works]), session_id="s"), CliRunner()
    run = session.send("call works {}")
    assert begun.wait(PATIENCE)
    steered = runner.invoke(app, ["steer", "s", "rather this", "--json"])
    assert json.loads(steered.stdout) == {"session_id": "s", "run_id": run.run_id}
    may_end.set()
    assert run.result(PATIENCE, check=True).text == "offline: rather this"
    assert runner.invoke(app, ["steer", "s", "too late"]).exit_code == 1
    last = session.messages()[-1].seq
    made = runner.invoke(app, ["fork", "s", "--at", str(last), "--session", "f"])
    assert (made.exit_code, made.stdout.strip()) == (0, "f")
    assert len(cluster.session("f").messages()) == len(session.messages())
    assert runner.invoke(app, ["fork", "s", "--at", str(last + 50)]).exit_code == 2


def test_a_run_that_did_not_complete_is_run_again(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a run that was out of rounds, when its session is resumed with `--again`, then its input is another run's,
    and of that one also if the same run is named once more; a run that completed is left alone."""
    monkeypatch.setattr(main, "connected", steering_commands.connected)

    @tool(on_crash="rerun")
    def look() -> str:
        """Look around."""
        return "seen"

    session, runner = cluster.spawn(AgentSpec(name="a", max_rounds=1, tools=[look]), session_id="s"), CliRunner()
    assert session.send("call look {}", run_id="r").result(PATIENCE).status == "round_limit"
    made = runner.invoke(app, ["resume", "s", "--again", "--json"])
    assert json.loads(made.stdout) == {"run_id": "r-again"}
    assert session.run("r-again").result(PATIENCE).status == "round_limit"
    again = session.run_again("r")
    assert again is not None
    assert again.run_id == "r-again"
    session.send("hello").result(PATIENCE, check=True)
    assert json.loads(runner.invoke(app, ["resume", "s", "--again", "--json"]).stdout) == {"run_id": None}
    assert [run.content for run in session.runs()] == ["call look {}", "call look {}", "hello"]


def test_a_run_whose_key_is_still_missing_is_not_sent_again(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a run that failed for a missing key, then `resume --again` says so, and what to do, and sends nothing."""
    monkeypatch.setattr(main, "connected", steering_commands.connected)
    monkeypatch.setattr(gateway_calls, "PROFILE_SECONDS", 0.1)
    session = cluster.spawn(AgentSpec(name="a", model="some", profile="ours"), session_id="s")
    failed = session.send("hello").result(PATIENCE)
    assert (failed.error or {})["code"] == ModelProfileMissing.code
    refused = CliRunner().invoke(app, ["resume", "s", "--again"])
    assert refused.exit_code == 1
    assert "agent 'a' uses model 'some', and no key is known for its model profile 'ours'" in refused.stderr
    assert ModelProfileMissing.hint in refused.stderr
    assert len(session.runs()) == 1
