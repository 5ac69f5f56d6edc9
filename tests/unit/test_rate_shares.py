"""Shares of rate limits: how they are divided, and that what nodes may use together never exceeds the limit."""

from __future__ import annotations

import random

import pytest

from understudy.gateway.pace import Pace
from understudy.rates import HEADROOM, LEASE_SECONDS, NOTHING, RateReport, Rates, RateShares, RateUse
from understudy.supervisor.rate_shares import FLOOR, Need, RateLedger, divided

KEY = ("p", "m")


def needs(chosen: random.Random) -> dict[str, Need]:
    """Of some nodes, most of which need something."""
    count = chosen.randint(1, 12)
    return {
        f"n{number}": Need(chosen.choice((0.0, 1.0, 20.0, 400.0)) * chosen.random(), float(chosen.randint(1, 40)))
        for number in range(count)
    }


@pytest.mark.parametrize("seed", range(30))
def test_a_limit_is_divided_fairly(seed: int) -> None:
    """All of a limit is dealt out; everybody has the floor; nobody has more than it needs while another one has less
    for each of its trees and lacks some."""
    chosen = random.Random(seed)
    total, wanted = chosen.choice((1.0, 60.0, 5_000.0)), needs(chosen)
    parts = divided(total, wanted)
    floor = total * FLOOR / len(wanted)
    assert sum(parts.values()) == pytest.approx(total)
    assert min(parts.values()) >= floor * 0.999
    lacking = [node for node, need in wanted.items() if parts[node] < need.wanted * 0.999]
    assert not lacking or all(parts[node] <= max(floor, need.wanted) * 1.001 for node, need in wanted.items())
    for node in lacking:
        for other, need in wanted.items():
            above = (parts[other] - floor) / need.weight
            assert above <= (parts[node] - floor) / wanted[node].weight * 1.001 + 1e-9


def test_a_newcomer_can_begin() -> None:
    """Given a busy node and one that needs nothing, then the latter has the floor, and the busy one all else."""
    parts = divided(60.0, {"busy": Need(1_000.0, 40.0), "idle": Need(0.0, 1.0)})
    assert parts == {"busy": pytest.approx(57.0), "idle": pytest.approx(3.0)}


def test_trees_count_not_nodes() -> None:
    """Given two nodes that both lack turns, then each of their trees gets as much, wherever it is."""
    parts = divided(110.0, {"a": Need(1_000.0, 40.0), "b": Need(1_000.0, 10.0)})
    floor = 110.0 * FLOOR / 2
    assert (parts["a"] - floor) / 40 == pytest.approx((parts["b"] - floor) / 10)


class SimulatedNode:
    """A gateway's pace behind messages that are late, lost or out of order."""

    def __init__(self, name: str, limit: Rates, nodes: int) -> None:
        self.name = name
        self.limit = limit
        self.nodes = nodes
        self.latest: RateShares | None = None
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Another gateway takes the place of the one before: its service gives it what it has heard."""
        self.pace = Pace(*KEY, self.limit, self.nodes, now)
        self.shares = (0, 0)
        if self.latest is not None:
            self.set_share(self.latest, now)

    def set_share(self, shares: RateShares, now: float) -> None:
        """What `NodeRates.share` and `Limits.share` do."""
        if (shares.generation, shares.number) <= self.shares:
            return
        self.latest = shares
        self.shares, self.nodes = (shares.generation, shares.number), shares.nodes
        self.pace.shared_by(shares.nodes, now)
        for share in shares.shares:
            self.pace.set_share(share, shares.at + LEASE_SECONDS, now)

    def report(self, chosen: random.Random, now: float) -> RateReport:
        """With a need that changes."""
        use = self.pace.use(0, 0.0, set(), now)
        waiting = chosen.choice((0, 0, 5, 300))
        use = RateUse(*KEY, use.limit, use.share, use.claim, waiting, 0.0, float(chosen.randint(1, 9)), NOTHING)
        return RateReport(1, now, self.shares, [use])


@pytest.mark.parametrize("seed", range(6))
def test_shares_never_exceed_the_limit(seed: int) -> None:
    """Given nodes whose messages are late, lost and out of order, whose gateways are replaced, and supervisors that are
    replaced or away, when everybody acts on what it has heard, then what all may use together is within the limit at
    all times."""
    chosen = random.Random(seed)
    limit = Rates(60.0)
    names = [f"n{number}" for number in range(chosen.randint(2, 5))]
    nodes = {name: SimulatedNode(name, limit, len(names)) for name in names}
    ledger, generation, now, away_until = RateLedger(1), 1, 0.0, 0.0
    ledger.between(names, 0.0)
    to_nodes = [(0.0, name, RateShares(1, 0, 0.0, len(names))) for name in names]
    to_supervisor: list[tuple[float, int, str, RateReport]] = []
    most = 0.0
    for _ in range(2_500):
        now += 0.05
        for item in [item for item in to_nodes if item[0] <= now]:
            to_nodes.remove(item)
            nodes[item[1]].set_share(item[2], now)
        if now >= away_until:
            for late in [late for late in to_supervisor if late[0] <= now]:
                to_supervisor.remove(late)
                if late[1] == generation:
                    ledger.heard(late[2], late[3], now)
            for name in names:
                shares = ledger.due(name, now, generation)
                if shares is not None and chosen.random() < 0.8:
                    to_nodes.append((now + chosen.choice((0.0, 0.1, 1.0, 9.0)) * chosen.random(), name, shares))
        for name, node in nodes.items():
            if chosen.random() < 0.03:
                report = node.report(chosen, now)
                to_supervisor.append((now + chosen.choice((0.0, 0.1, 2.0)) * chosen.random(), generation, name, report))
        if chosen.random() < 0.002:
            nodes[chosen.choice(names)].begin(now)
        if chosen.random() < 0.003:  # the next supervisor knows nothing
            generation += 1
            ledger, away_until = RateLedger(generation), now + chosen.choice((0.0, 3.0, 60.0)) * chosen.random()
            ledger.between(names, away_until)
            greeting = RateShares(generation, 0, 0.0, len(names))
            to_nodes += [(away_until + 3.0 * chosen.random(), name, greeting) for name in names]
        together = sum(node.pace.rates(now).requests or 0.0 for node in nodes.values())
        most = max(most, together)
        assert together <= 60.0 * (1 - HEADROOM) * 1.000_001, f"at {now:.2f}"
    assert most > 40.0  # and the limit is used


def test_all_of_a_limit_is_used() -> None:
    """Given nodes that hear each other's needs, then the shares add up to what can be used, and follow the need."""
    ledger = RateLedger(0)
    nodes = {name: SimulatedNode(name, Rates(60.0), 2) for name in ("a", "b")}
    ledger.between(nodes, 0.0)
    waiting = {"a": 300, "b": 0}
    for step in range(6):
        now = 1.0 + step
        for name, node in nodes.items():
            use = RateUse(*KEY, node.pace.limit, node.pace.rates(now), node.pace.claimed(now), waiting[name], 0.0, 1.0)
            ledger.heard(name, RateReport(1, now, node.shares, [use]), now)
        for name, node in nodes.items():
            shares = ledger.due(name, now, 1)
            if shares is not None:
                node.set_share(shares, now)
        waiting = {"a": 300, "b": 300 if step >= 2 else 0}
        if step == 2:
            assert [node.pace.rates(now).requests for node in nodes.values()] == pytest.approx([54.15, 2.85], rel=0.01)
    assert [node.pace.rates(now).requests for node in nodes.values()] == pytest.approx([28.5, 28.5], rel=0.25)


def test_a_refusal_reaches_all() -> None:
    """Given a node that must send nothing for a time, when it reports, then the others are sent that at once,
    and not again for what is the same stop."""
    ledger = RateLedger(0)
    ledger.between(("a", "b"), 0.0)
    for name in ("a", "b"):
        ledger.heard(name, RateReport(1, 1.0, (0, 0), [RateUse(*KEY, Rates(60.0), NOTHING, NOTHING)]), 1.0)
        assert ledger.due(name, 1.0, 1) is not None
    stopped = RateReport(2, 2.0, (1, 1), [RateUse(*KEY, Rates(60.0), NOTHING, NOTHING, stopped=20.0)])
    ledger.heard("a", stopped, 2.0)
    shares = ledger.due("b", 2.0, 1)
    assert shares is not None
    assert [share.stopped for share in shares.shares] == [20.0]
    ledger.heard("a", RateReport(3, 3.0, (1, 1), [RateUse(*KEY, Rates(60.0), NOTHING, NOTHING, stopped=19.1)]), 3.0)
    assert ledger.due("b", 3.0, 1) is None


def test_a_node_that_is_lost_counts_until_its_lease_ends() -> None:
    """Given a node that is lost, then the others get its share only when it can't use it any more."""
    ledger = RateLedger(0)
    ledger.between(("a", "b"), 0.0)
    for name, waiting in (("a", 0), ("b", 300)):
        ledger.heard(name, RateReport(1, 1.0, (0, 0), [RateUse(*KEY, Rates(60.0), NOTHING, NOTHING, waiting)]), 1.0)
    b = ledger.due("b", 1.0, 1)
    assert b is not None
    assert b.shares[0].share.requests == pytest.approx(54.15)
    ledger.between(("a",), 5.0)
    ledger.heard("a", RateReport(1, 5.0, (0, 0), [RateUse(*KEY, Rates(60.0), NOTHING, NOTHING, 300)]), 5.0)
    early = ledger.due("a", 5.0, 1)
    assert early is not None
    assert early.shares[0].share.requests == pytest.approx(2.85)
    ledger.heard("a", RateReport(1, 17.0, (0, 9), [RateUse(*KEY, Rates(60.0), NOTHING, NOTHING, 300)]), 17.0)
    late = ledger.due("a", 17.0, 1)
    assert late is not None
    assert late.shares[0].share.requests == pytest.approx(57.0)
