"""Handoffs: what is checked at the gate, what is compiled, and the pure functions of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from understudy import AgentSpec, Budget, tool
from understudy.actors.context import View
from understudy.actors.execution import Outcome
from understudy.actors.handoffs import handoff_of, later_handoffs
from understudy.actors.tools import handoff_spec
from understudy.actors.window import Window
from understudy.approvals import APPROVE, memory, remembered
from understudy.cluster.client.compiling import compile_spec, place
from understudy.errors import InvalidSpec
from understudy.handoffs import KEPT, ORIGIN, agent_at, present, target, tool_name
from understudy.manifest import changes
from understudy.messages import FOLD, NEVER, Message
from understudy.protocol import Work
from understudy.records import CallState, Handoff
from understudy.store.operations.code import digests
from understudy.testing import LocalCluster


def compiled(spec: AgentSpec) -> dict[str, Any]:
    return compile_spec(spec, model="m", profile="p").spec


LEGAL = AgentSpec(name="legal.team", instructions="Law.", handoffs=["triage"])
BILLING = AgentSpec(name="billing", instructions="Money.", model="large", handoffs=[LEGAL, "triage"])
TRIAGE = AgentSpec(
    name="triage", instructions="Ask.", handoffs=[BILLING, LEGAL], budget=Budget(tokens=9), max_rounds=7, tools=["wait"]
)


def names(spec: dict[str, Any]) -> list[str]:
    return [one["name"] for one in spec["tools"]]


# The gate.


def test_all_agents_are_in_one_table() -> None:
    """Given agents that hand off to each other, each has a tool for each of its own targets, and the specification has
    all of them, once, whichever names them. One that names no model has the first one's."""
    spec = compiled(TRIAGE)
    assert names(spec) == ["wait", "transfer_to_billing", "transfer_to_legal_team"]
    assert list(spec["handoffs"]) == ["billing", "legal.team"]
    assert names(spec["handoffs"]["billing"]) == ["transfer_to_legal_team", "transfer_to_triage"]
    assert [agent["model"] for agent in spec["handoffs"].values()] == ["large", "m"]
    assert all("handoffs" not in agent for agent in spec["handoffs"].values())
    assert target(spec, "transfer_to_legal_team") == "legal.team"
    assert target(spec, "wait") is None


def test_an_agent_without_handoffs_is_compiled_as_before() -> None:
    """Nothing of them is in the specification of an agent that hands off to nobody: its hash stays."""
    assert "handoffs" not in compiled(AgentSpec(name="a"))


def test_what_is_wrong_is_reported_at_once() -> None:
    """Targets twice, unknown ones, the agent itself, different ones of a name, tools of the same name, and names that
    are too long are all reported."""

    @tool
    def transfer_to_billing() -> str:
        """Not that."""
        return ""

    other = AgentSpec(name="billing", instructions="Something else.")
    long = AgentSpec(name="x" * 60, handoffs=[other])
    spec = AgentSpec(
        name="triage", tools=[transfer_to_billing],
        handoffs=[BILLING, "billing", "triage", "nobody", long, LEGAL, AgentSpec(name="legal_team")],
    )  # fmt: skip
    with pytest.raises(InvalidSpec) as raised:
        compiled(spec)
    problems = [problem["problem"] for problem in raised.value.details["problems"]]
    assert {problem["field"] for problem in raised.value.details["problems"]} == {"handoffs"}
    for wanted in (
        "several agents named 'billing'", "'nobody' is no agent that is known", "'billing' is there twice",
        "can't hand off to itself", "is among the agent's own", "would have the same tool", "is too long",
    ):  # fmt: skip
        assert any(wanted in problem for problem in problems), wanted


def test_a_change_of_a_target_is_a_change() -> None:
    """Another instruction of a target, or one more target, is another specification, and the change is named."""
    before = compiled(TRIAGE)
    after = compiled(TRIAGE.model_copy(update={"handoffs": (BILLING.model_copy(update={"handoffs": ()}),)}))
    assert before["hash"] != after["hash"]
    assert changes(before, after) == (
        "handoffs.billing", "handoffs.legal.team", "tools.transfer_to_legal_team",
    )  # fmt: skip


def test_placements_are_noted_for_targets() -> None:
    """A target that needs other processes has its own placement."""
    spec = compiled(AgentSpec(name="a", handoffs=[AgentSpec(name="b", isolation="process")]))
    stored = place(spec, {})
    assert spec["placement"] == ""
    assert [*stored] == [spec["handoffs"]["b"]["placement"]]


def test_code_of_all_agents_is_kept() -> None:
    """Whichever agent a session is under, what the others refer to is needed: it may come back to them."""
    spec = compiled(AgentSpec(name="a", resources={"GPU": 1}, handoffs=[AgentSpec(name="b", isolation="process")]))
    stored = place(spec, {})
    assert len(stored) == 2
    for agent in ("a", "b"):
        assert digests(spec, present(spec, agent)["placement"]) == set(stored)


# Which specification a session has.


def test_what_stays_and_what_changes() -> None:
    """Under another agent the session has that agent's instructions, model and tools, and its own budget, limits and
    standing; the first agent is among those that it may come back to."""
    found = present(compiled(TRIAGE), "billing")
    assert (found["name"], found["instructions"], found["model"]) == ("billing", "Money.", "large")
    assert (found["budget"], found["max_rounds"]) == ([{"scope": "tree", "tokens": 9}], 7)
    assert set(found["handoffs"]) == {"triage", "legal.team"}
    assert present(compiled(TRIAGE), "nobody")["name"] == "triage"


AGENTS = st.sampled_from(["triage", "billing", "legal.team"])


@given(way=st.lists(AGENTS, max_size=6), last=AGENTS)
def test_the_way_does_not_matter(way: list[str], last: str) -> None:
    """Whichever agents a session, or copies of its agents, were under before: under the same agent the specification is
    the same, and what is kept is the first one's."""
    spec = compiled(TRIAGE)
    found = spec
    for agent in (*way, last):
        found = present(found, agent)
    wanted = present(spec, last)
    assert {name: value for name, value in found.items() if name != "handoffs"} == {
        name: value for name, value in wanted.items() if name != "handoffs"
    }
    assert set(found["handoffs"]) == set(wanted["handoffs"])
    assert all(found.get(name) == spec.get(name) for name in KEPT)


@given(way=st.lists(AGENTS, min_size=1, max_size=8), seq=st.integers(0, 90))
def test_the_agent_at_a_place(way: list[str], seq: int) -> None:
    """At each place of a log the agent is the one that the last handoff before it leads to."""
    records = [(10 * (n + 1), {"from": a, "to": b}) for n, (a, b) in enumerate(itertools.pairwise(way))]
    wanted = ([way[0]] + [record["to"] for at, record in records if at <= seq])[-1]
    assert agent_at(records, seq, way[-1]) == wanted


def test_only_the_first_handoff_of_a_round_counts() -> None:
    """By its place among the calls, whatever order they are in here."""
    specs = {"transfer_to_b": handoff_spec("b"), "wait": {"source": {"builtin": "wait"}}}
    calls = [CallState("r/1/2", "requested", "transfer_to_b", index=2), CallState("r/1/0", "requested", "wait"),
             CallState("r/1/1", "requested", "transfer_to_b", index=1)]  # fmt: skip
    assert {call_id: outcome.outcome for call_id, outcome in later_handoffs(calls, specs).items()} == {
        "r/1/2": "refused"
    }
    assert later_handoffs(calls[1:], specs) == {}


@pytest.mark.parametrize(("agent", "forgets"), [("billing", True), ("legal.team", False)])
def test_what_was_learned_of_a_model_is_of_that_model(agent: str, forgets: bool) -> None:
    """The window that an endpoint reported, and how many tokens a byte was, are forgotten with a handoff to an agent
    with another model."""
    window = Window("s", compiled(TRIAGE))
    learned = replace(View(window=5000, per_byte=0.3).record(), seq=3, run_id="r")
    work = Work(
        session_id="s", incarnation=1, epoch=1, batch_no=0, after_seq=0, seq=3, root_id="s", run_id="r",
        messages=(learned,),
    )  # fmt: skip
    window.apply(work)
    call = CallState("r/1/0", "requested", tool_name(agent), "{}")
    found = handoff_of(window, [call], {"r/1/0": Outcome("ok", "")})
    assert found is not None
    handoff, records = found
    assert handoff == Handoff("r/1/0")
    assert [record.origin for record in records] == [ORIGIN, *[FOLD] * forgets]
    assert window.view(records).window == (0 if forgets else 5000)
    assert window.view(records).per_byte == (0.0 if forgets else 0.3)


def test_what_a_person_decided_counts_for_that_agent() -> None:
    """A remembered approval holds under the agent that it was given under, not under another with a tool of the same
    name, and again when the session is back."""

    def handed(before: str, after: str) -> Message:
        return Message("system", "", origin=ORIGIN, visibility=NEVER, extra={"from": before, "to": after})

    said = [memory("refund", "{}", APPROVE, "", "tool")]
    assert remembered(said, "refund", "{}") is not None
    said.append(handed("triage", "billing"))
    assert remembered(said, "refund", "{}") is None
    said.append(handed("billing", "triage"))
    assert remembered(said, "refund", "{}") is not None


def test_names_of_tools() -> None:
    """Endpoints take no dots in the names of tools."""
    assert tool_name("legal.team") == "transfer_to_legal_team"


# As users have it.


def test_a_session_goes_on_under_another_agent() -> None:
    """Given two agents of which one answers with data, when the first hands off, then the run's result is the second's,
    as plain data, and what the session is called says which agent it is under."""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    clerk = AgentSpec(name="clerk", output_type=schema)
    desk = AgentSpec(name="desk", instructions='offline-script: [{"tool_calls": [["transfer_to_clerk", {}]]}]',
                     handoffs=[clerk])  # fmt: skip
    with LocalCluster() as cluster:
        session = cluster.spawn(desk, session_id="s")
        result = session.send("go").result(20, check=True)
        assert (result.output, result.rounds) == ({"sum": 0}, 2)
        assert session.info().name == "clerk"
        assert cluster.spawn(desk, session_id="s").info().name == "clerk"
        assert [event.to_agent for event in session.events() if event.type == "agent_handed_off"] == ["clerk"]
