"""Approvals as programs and the command line say them: which calls need one, and what is decided."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from understudy import AgentSpec, InvalidSpec, tool
from understudy.cluster.certify.runs import approved
from understudy.cluster.cli import approve_command
from understudy.cluster.cli.main import app
from understudy.cluster.client.compiling import compile_spec
from understudy.errors import InvalidInput
from understudy.messages import NEVER, Message
from understudy.testing import LocalCluster

PATIENCE = 20


@tool(approve=True)
def pay(to: str) -> str:
    """Pay somebody."""
    return f"paid {to}"


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"saw {at}"


def marked(**fields: Any) -> list[str]:
    """The tools of an agent whose calls need approval."""
    spec = AgentSpec(name="a", **{"tools": [pay, look, "bash", "request_user_input"], **fields})
    return [
        item["name"] for item in compile_spec(spec, model="offline", profile=None).spec["tools"] if "approve" in item
    ]


@pytest.mark.parametrize(
    ("approve", "found"),
    [((), ["pay"]), (("bash",), ["pay", "bash"]), (("*",), ["pay", "look", "bash"]), (("lo*", "pay"), ["pay", "look"])],
)
def test_rules_name_tools(approve: tuple[str, ...], found: list[str]) -> None:
    """A tool says so itself, or a rule names it; questions need no approval, also where the rule is for all tools."""
    assert marked(approve=approve) == found


@pytest.mark.parametrize("wrong", ["lok", "write_*", "request_user_input"])
def test_a_rule_that_is_for_no_tool(wrong: str) -> None:
    """A rule that no call would be held back by is an error, with the tools that there are."""
    with pytest.raises(InvalidSpec, match="pay, look, bash"):
        marked(approve=[wrong])


def test_a_specification_without_rules_is_what_it_was() -> None:
    """What says nothing about people is not in what the store keeps, so older sessions have the same specification."""
    compiled = compile_spec(AgentSpec(name="a", tools=[look]), model="offline", profile=None).spec
    assert not [name for name in compiled if name.startswith(("approve", "answer"))]
    assert "approve" not in compiled["tools"][0]


def test_certify_asks_nobody() -> None:
    """What is certified has no calls that wait for an approval, of sub-agents neither."""
    child = AgentSpec(name="child", tools=[pay])
    spec = AgentSpec(name="a", tools=[pay, "spawn_agent"], agents=[child])
    found = approved(compile_spec(spec, model="offline", profile=None).spec)
    assert not any("approve" in item for item in (*found["tools"], *found["agents"]["child"]["tools"]))


def agent(*calls: str, **fields: Any) -> AgentSpec:
    script = [{"tool_calls": [["pay", {"to": to}] for to in calls]}, {"text": "done"}]
    return AgentSpec(name="clerk", instructions=f"offline-script: {json.dumps(script)}", tools=[pay], **fields)


def results(messages: list[Message]) -> list[str]:
    return [message.text for message in messages if message.role == "tool"]


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are named, or all are meant, never both or neither; what was decided is printed."""
    with LocalCluster() as cluster:

        @contextmanager
        def connected(_store: str | None, **_options: Any) -> Iterator[LocalCluster]:
            yield cluster

        monkeypatch.setattr(approve_command, "connected", connected)

        def run(*words: str) -> tuple[int, str]:
            done = CliRunner().invoke(app, list(words))
            return done.exit_code, done.stdout

        session = cluster.spawn(agent("a", "b", "c"), session_id="s")
        run_of = session.send("go", run_id="r")
        assert len(run_of.result(PATIENCE).pending) == 3
        for wrong in ((), ("r/1/0", "--all"), ("r/1/0", "--arguments", "{"), ("r/1/0", "--arguments", "[]")):
            assert run("approve", "s", *wrong)[0] == 2
        assert run("approve", "s", "r/1/0", "--arguments", '{"to": 1}')[0] == 2
        assert run("approve", "s", "r/1/0", "--arguments", '{"to": "z"}') == (0, "approved: r/1/0\n")
        code, output = run("reject", "s", "r/1/1", "--reason", "no", "--json")
        assert (code, json.loads(output)) == (0, {"rejected": ["r/1/1"]})
        assert run("approve", "s", "--all", "--remember") == (0, "approved: r/1/2\n")
        assert run_of.result(PATIENCE, check=True).text == "done"
        edited, rejected, approved = results(session.messages())
        assert (edited.splitlines()[-1], rejected, approved) == (
            "paid z", "not executed: it was not approved: no", "paid c",
        )  # fmt: skip
        assert session.send("again").result(PATIENCE).ok  # nobody is asked any more
        assert [message.visibility for message in session.messages() if message.origin == "approval"] == [NEVER]


def test_what_programs_may_not_say() -> None:
    """Arguments are for one call and must be JSON; what is remembered is no edit."""
    with LocalCluster() as cluster:
        session = cluster.spawn(agent("a", "b"))
        run = session.send("go")
        pending = run.result(PATIENCE).pending
        for calls, more in (
            (pending, {"arguments": {"to": "x"}}),
            (pending[0], {"arguments": {"to": "x"}, "remember": True}),
            (pending[0], {"arguments": {"to": object()}}),
            (pending[0], {"remember": "always"}),
        ):
            with pytest.raises(InvalidInput):
                session.approve(calls, **more)
        assert session.pending() == list(pending)
        assert session.reject(pending) == [item.call_id for item in pending]
        assert run.result(PATIENCE).ok


def test_a_total_outage_while_a_person_thinks(tmp_path: Path) -> None:
    """Given the cluster is gone with all its processes while a call waits, when another one on the same store is asked
    to approve it, then it runs, once."""
    script = [{"tool_calls": [["pay", {"to": "a"}]]}, {"text": "done"}]
    spec = AgentSpec(name="clerk", instructions=f"offline-script: {json.dumps(script)}", tools=[pay])
    store = f"sqlite:///{tmp_path}/store.db"
    with LocalCluster(store) as cluster:
        assert cluster.spawn(spec, session_id="s").send("go", run_id="r").result(PATIENCE).pending
    with LocalCluster(store) as cluster:
        session = cluster.session("s")
        assert session.approve() == ["r/1/0"]
        assert session.run("r").result(PATIENCE, check=True).text == "done"
        assert (results(session.messages()), session.approve()) == (["paid a"], [])
