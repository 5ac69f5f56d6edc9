"""How many nodes there should be, and which sessions move: pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.config import Settings
from understudy.errors import InvalidConfiguration
from understudy.scaling import Scaling
from understudy.supervisor.scaling import SHARE_SECONDS, NodeLoad, Share, Sizing, shares

UP, DOWN = 5.0, 300.0
LIMITS = Scaling(1, 4, UP, DOWN)

loads = st.lists(
    st.builds(
        NodeLoad, st.just(""), st.just(2.0), st.integers(1, 8), busy=st.integers(0, 8), ready=st.integers(0, 40),
        oldest=st.sampled_from([0.0, SHARE_SECONDS, UP, 60.0]), stays=st.booleans(), drained=st.booleans(),
    ),
    max_size=6,
).map(lambda found: [replace(load, node_id=f"n{number}") for number, load in enumerate(found)])  # fmt: skip


def node(name: str, **values: object) -> NodeLoad:
    """A node with four frames at most."""
    return NodeLoad(name, 2.0, 4, **values)  # type: ignore[arg-type]


def late(name: str, ready: int) -> NodeLoad:
    """A node whose frames are all at work, and where sessions have waited for long."""
    return node(name, busy=4, ready=ready, oldest=UP)


@given(loads)
def test_shares_fit(found: list[NodeLoad]) -> None:
    """Given any loads, then no node gives more than it has no frame for, none takes more than it has frames for, none
    does both, and drained ones do neither."""
    known = {load.node_id: load for load in found}
    given_away, taken = dict.fromkeys(known, 0), dict.fromkeys(known, 0)
    for share in shares(found):
        assert share.count > 0
        given_away[share.giver] += share.count
        taken[share.taker] += share.count
    for name, load in known.items():
        assert given_away[name] <= load.excess
        assert taken[name] <= load.spare
        assert not (given_away[name] and taken[name])
        assert not (load.drained and given_away[name] + taken[name])


@given(loads)
def test_nobody_waits_beside_a_free_frame(found: list[NodeLoad]) -> None:
    """Given any loads, when the shares are given, then sessions that have waited for long are left only if there is no
    frame that could have them."""
    gone = sum(share.count for share in shares(found))
    excess = sum(load.excess for load in found if load.oldest >= SHARE_SECONDS and not load.drained)
    assert gone == min(excess, sum(load.spare for load in found))


def test_who_has_waited_longest_goes_first() -> None:
    """Given two nodes with sessions that wait and one free frame, then the node whose session has waited longer gives
    it away."""
    found = [late("a", 1), replace(late("b", 1), oldest=60.0), node("c", busy=3)]
    assert shares(found) == [Share(1, "b", "c")]


def test_a_node_is_asked_for_where_sessions_wait_for_long() -> None:
    """Given frames that are all at work, when sessions have waited for less than the time that is set, then nothing is
    asked for; when for longer, then as many nodes as have frames for them, within the limit."""
    sizing = Sizing(LIMITS, "a", 0.0)
    assert sizing.decide([replace(late("a", 5), oldest=UP - 1)], (), 10.0).nodes == 1
    assert sizing.decide([late("a", 5)], (), 11.0).nodes == 3
    assert sizing.decide([late("a", 500)], (), 20.0).nodes == 4


def test_nodes_that_are_starting_are_counted() -> None:
    """Given a node that was asked for, when it is not there yet, then not one more is asked for; when it has come and
    has frames, then the sessions that still wait elsewhere ask for no other."""
    sizing = Sizing(LIMITS, "a", 0.0)
    for now in (10.0, 11.0, 30.0, 300.0):
        assert sizing.decide([late("a", 4)], (), now).nodes == 2
    assert sizing.decide([late("a", 4), node("b")], (), 301.0).nodes == 2


def test_a_request_ends_with_its_need() -> None:
    """Given a node that was asked for, when nobody waits any more before it is there, then it is not asked for."""
    sizing = Sizing(LIMITS, "a", 0.0)
    assert sizing.decide([late("a", 4)], (), 10.0).nodes == 2
    assert sizing.decide([node("a", busy=4)], (), 11.0).nodes == 1


def test_the_weakest_node_goes_after_a_quiet_time() -> None:
    """Given three nodes with little to do, when that has lasted for the time that is set, then the one with least to do
    goes, but not the supervisor's own; then the next one after another such time; and never one more than the limit."""
    sizing = Sizing(replace(LIMITS, least=2), "a", 0.0)
    nodes = [node("a"), node("b", busy=1), node("c", busy=2)]
    assert sizing.decide(nodes, (), 1.0).give_up == ""
    assert sizing.decide(nodes, (), DOWN).give_up == ""
    assert sizing.decide(nodes, (), DOWN + 1.0).give_up == "b"
    assert sizing.decide(nodes, ("b",), 3 * DOWN).give_up == ""
    assert sizing.decide([nodes[0], nodes[2]], (), 9 * DOWN).give_up == ""


def test_a_busy_moment_restarts_the_quiet_time() -> None:
    """Given nodes with little to do, when they have much to do for a moment, then the time counts from there."""
    sizing = Sizing(LIMITS, "a", 0.0)
    quiet, busy = [node("a"), node("b")], [node("a", busy=4), node("b", busy=4)]
    sizing.decide(quiet, (), 1.0)
    sizing.decide(busy, (), DOWN - 1.0)
    assert sizing.decide(quiet, (), DOWN + 2.0).give_up == ""
    assert sizing.decide(quiet, (), 2 * DOWN + 2.0).give_up == "b"


def test_a_node_with_something_that_would_be_lost_stays() -> None:
    """Given a node where a command runs in the background, then another one goes, or none."""
    sizing = Sizing(LIMITS, "a", -DOWN)
    nodes = [node("a"), node("b", stays=True), node("c", busy=1)]
    sizing.decide(nodes, (), 0.0)
    assert sizing.decide(nodes, (), DOWN).give_up == "c"
    alone = Sizing(LIMITS, "a", -DOWN)
    alone.decide(nodes[:2], (), 0.0)
    assert alone.decide(nodes[:2], (), DOWN).give_up == ""


def test_a_node_that_was_given_up_is_taken_back_first() -> None:
    """Given a node that is drained to be given back, when sessions wait again, then it is kept, and no other one is
    asked for."""
    sizing = Sizing(LIMITS, "a", 0.0)
    decided = sizing.decide([late("a", 4), node("b", drained=True)], ("b",), 10.0)
    assert (decided.nodes, decided.keep) == (2, ["b"])


@given(st.lists(st.tuples(loads, st.floats(0.1, 400.0)), max_size=20), st.integers(1, 3), st.integers(0, 3))
def test_decisions_keep_the_limits(steps: list[tuple[list[NodeLoad], float]], least: int, more: int) -> None:
    """Given any history, then the number of nodes that is wanted is within the limits or what there is, at most one
    node goes, it is one of those that serve and not the supervisor's own, and nothing goes while something is asked
    for."""
    limits = Scaling(least, least + more, UP, DOWN)
    sizing, now = Sizing(limits, "n0", 0.0), 0.0
    for found, passed in steps:
        now += passed
        serving = [load for load in found if not load.drained]
        decided = sizing.decide(found, [load.node_id for load in found if load.drained], now)
        assert decided.nodes <= max(limits.most, len(serving))
        assert decided.nodes >= min(limits.least, len(serving))
        if decided.give_up:
            assert decided.give_up in {load.node_id for load in serving if not load.stays} - {"n0"}
            assert len(serving) > limits.least
            assert not decided.keep


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"UNDERSTUDY_NODES": "3"}, "UNDERSTUDY_NODES='3' must be the least and the most nodes, such as 3-10"),
        ({"UNDERSTUDY_NODES": "4-3"}, "UNDERSTUDY_NODES='4-3' must be"),
        ({"UNDERSTUDY_NODES": "0-3"}, "UNDERSTUDY_NODES='0-3' must be"),
        ({"UNDERSTUDY_SCALE_UP_AFTER": "0"}, "UNDERSTUDY_SCALE_UP_AFTER='0' must be seconds"),
        ({"UNDERSTUDY_SCALE_DOWN_AFTER": "soon"}, "UNDERSTUDY_SCALE_DOWN_AFTER='soon' must be seconds"),
        ({"UNDERSTUDY_NODES": "1-3", "UNDERSTUDY_STORE": "sqlite:////a.db"}, "UNDERSTUDY_NODES needs PostgreSQL"),
    ],
)
def test_settings_that_can_not_be_used_are_refused(settings: dict[str, str], says: str) -> None:
    """A limit that makes no sense is refused when the settings are read, with the variable's name."""
    environment = {"UNDERSTUDY_STORE": "postgresql://host/db", **settings}
    with pytest.raises(InvalidConfiguration) as refused:
        Settings.from_environment(environment)
    assert says in refused.value.message


def test_settings_of_scaling() -> None:
    """Given limits and times, then the services have them and say so; without limits nothing scales."""
    environment = {"UNDERSTUDY_STORE": "postgresql://host/db", "UNDERSTUDY_SCALE_DOWN_AFTER": "1.5"}
    assert Settings.from_environment(environment).scaling is None
    settings = Settings.from_environment({**environment, "UNDERSTUDY_NODES": "3-10"})
    assert settings.scaling == Scaling(3, 10, 5.0, 1.5)
    assert settings.of_services()["UNDERSTUDY_NODES"] == "3-10 (up after 5 s, down after 1.5 s)"
