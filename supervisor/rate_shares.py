"""How nodes share the rate limits of endpoints: a pure function of what they need, and a ledger of what they hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from understudy.rates import HEADROOM, LEASE_SECONDS, RateReport, Rates, RateShare, RateShares, RateUse

FLOOR = 0.1
"""The part of a limit that is divided equally whatever nodes need, so that one that was idle can begin at once."""

GROWTH = 1.25
"""By so much a node may use more than lately before it has to ask."""

RENEW_SECONDS = 4.0
"""A share is renewed when there is a report that is so much later than the one it answers."""

CHANGE = 0.2
"""A share that differs by less is not changed before it is renewed."""

STOP_CHANGE = 0.5
"""Seconds by which a stop must last longer to be sent again."""

Key = tuple[str, str]
"""Profile and model of a limit (`RateUse`)."""


@dataclass(frozen=True)
class Need:
    """What a node needs of a limit.

    Attributes:
        wanted: per minute.
        weight: of the trees that it needs it for.
    """

    wanted: float
    weight: float


def divided(total: float, needs: Mapping[str, Need]) -> dict[str, float]:
    """The parts of a limit by node: max-min fair, weighted by trees.

    Guarantees: the sum is `total`. Each node gets its part of the floor. Of the rest, no node gets more than it needs
    while another one, with fewer for each of its trees, lacks some. What nobody needs is dealt out equally, so nothing
    is left over.
    """
    floor = total * FLOOR / len(needs)
    parts = dict.fromkeys(needs, floor)
    left = total - floor * len(needs)
    hungry = {node: need for node, need in needs.items() if need.wanted > floor and need.weight > 0}
    while hungry and left > 0:
        weight = sum(need.weight for need in hungry.values())
        # The node that is satisfied first, by what it lacks for each of its trees.
        first = min(hungry, key=lambda node: (hungry[node].wanted - parts[node]) / hungry[node].weight)
        each = min((hungry[first].wanted - parts[first]) / hungry[first].weight, left / weight)
        for node, need in hungry.items():
            parts[node] += each * need.weight
        left = max(0.0, left - each * weight)
        del hungry[first]
    return {node: part + left / len(needs) for node, part in parts.items()}


@dataclass(frozen=True)
class _Grant:
    """Shares that were sent to a node: it may use them until then, as far as is known here. The first one is what a
    node had when it was first heard of: it may come to use more by itself (`RateUse.claim`)."""

    number: tuple[int, int]
    ends: float
    at: float
    nodes: int
    shares: Mapping[Key, Rates]
    limits: Mapping[Key, Rates]
    stops: Mapping[Key, float]
    claims: Mapping[Key, Rates] | None = None


@dataclass
class _Node:
    """What is known of a node since a time; `grants` are those that it may use still, the latest one last."""

    since: float
    report: RateReport | None = None
    heard: float = 0.0
    grants: list[_Grant] = field(default_factory=list)

    def use(self, key: Key) -> RateUse | None:
        uses = self.report.uses if self.report is not None else ()
        return next((use for use in uses if (use.profile, use.model) == key), None)


class RateLedger:
    """What nodes have said of their use, and what they were given.

    Guarantees: what all nodes may use of a limit together, whichever of the messages to them have arrived, is never
    more than the limit less `HEADROOM`: a node gets more only once others are known to have less. A node counts with
    what it was given until it has said that it uses something newer, or its lease has ended; then with an equal part,
    which is what it falls back to. A node that is lost counts until its lease has ended.

    Args:
        generation: of its supervisor. What an earlier one gave to the nodes is not known here.
    """

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._nodes: dict[str, _Node] = {}
        self._lost: list[_Grant] = []
        self._limits: dict[Key, Rates] = {}
        self._stops: dict[Key, float] = {}
        self._number = 0

    def between(self, nodes: Collection[str], now: float) -> None:
        """These nodes share the limits from now on."""
        for gone in self._nodes.keys() - set(nodes):
            self._lost += self._nodes.pop(gone).grants
        for name in nodes:
            self._nodes.setdefault(name, _Node(now))

    def heard(self, name: str, report: RateReport, now: float) -> None:
        """A node has said how it uses its limits. A report that arrives late says nothing any more, nor does one of a
        node that has not heard of this supervisor: what an earlier one gave it may still arrive there."""
        node = self._nodes.get(name)
        if node is None or (node.report is not None and report.at < node.report.at):
            return
        if node.report is None and report.shares[0] < self._generation:
            return
        before = {(use.profile, use.model): use.limit for use in node.report.uses} if node.report is not None else {}
        for use in report.uses:
            key = (use.profile, use.model)
            # What a node has learned itself, not what it was sent: that may be older than what another has learned.
            if use.limit != before.get(key, use.limit) or key not in self._limits:
                self._limits[key] = use.limit
            if use.stopped > 0 and now + use.stopped > self._stops.get(key, 0.0) + STOP_CHANGE:
                self._stops[key] = now + use.stopped
        if node.report is None:  # what it uses now, it may use until it is known to use something newer
            shares = {(use.profile, use.model): use.share for use in report.uses}
            claims = {(use.profile, use.model): use.claim for use in report.uses}
            node.grants = [_Grant(report.shares, now + LEASE_SECONDS, report.at, 0, shares, {}, {}, claims)]
        node.report, node.heard = report, now
        node.grants = [grant for grant in node.grants if grant.number >= report.shares]

    def due(self, name: str, now: float, generation: int) -> RateShares | None:
        """What the node is to be given; None while what it has is good enough, or nothing was heard of it."""
        node = self._nodes.get(name)
        limits = {key: limit for key, limit in self._limits.items() if limit}
        if node is None or node.report is None or not limits:
            return None
        shares = {key: self._share(key, name, now) for key in limits}
        last = node.grants[-1] if node.grants else None
        stops = {key: self._stops[key] for key in limits if self._stops.get(key, 0.0) > now}
        if last is not None and not self._differs(last, node.report, shares, limits, stops):
            return None
        number = (generation, self.number())
        ends = node.heard + LEASE_SECONDS
        node.grants.append(_Grant(number, ends, node.report.at, len(self._nodes), shares, limits, stops))
        rows = [
            RateShare(*key, limit, shares[key], max(0.0, stops.get(key, 0.0) - now)) for key, limit in limits.items()
        ]
        return RateShares(*number, node.report.at, len(self._nodes), rows)

    def number(self) -> int:
        """The next one for a message to a node."""
        self._number += 1
        return self._number

    def _differs(
        self, last: _Grant, report: RateReport, shares: Mapping[Key, Rates], limits: Mapping[Key, Rates],
        stops: Mapping[Key, float],
    ) -> bool:  # fmt: skip
        """Whether a node is to be sent its shares again."""
        if last.nodes != len(self._nodes) or last.limits != limits or report.at - last.at >= RENEW_SECONDS:
            return True
        if any(end > last.stops.get(key, 0.0) for key, end in stops.items()):
            return True
        pairs = ((shares[key], last.shares[key]) for key in limits)
        return any(
            new is not None and old is not None and abs(new - old) > CHANGE * max(new, old)
            for one, other in pairs
            for new, old in ((one.requests, other.requests), (one.tokens, other.tokens))
        )

    def _share(self, key: Key, name: str, now: float) -> Rates:
        return Rates(
            self._part(key, name, now, "requests"),
            self._part(key, name, now, "tokens"),
        )

    def _part(self, key: Key, name: str, now: float, kind: str) -> float | None:
        limit: float | None = getattr(self._limits[key], kind)
        if limit is None:
            return None
        usable = limit * (1 - HEADROOM)
        wanted = divided(usable, {other: _need(node.use(key), kind) for other, node in self._nodes.items()})[name]
        others = [self._held(other, key, usable, now, kind) for other in self._nodes if other != name]
        known = usable - sum(part for part in others if part is not None)
        known -= sum(_of(grant.claims or grant.shares, key, kind) for grant in self._lost if grant.ends > now)
        # What a node has that was not heard of yet was counted by whoever gave it: it is kept, but nothing is added.
        free = known if None not in others else 0.0
        own = max((_of(grant.shares, key, kind) for grant in self._nodes[name].grants if grant.ends > now), default=0.0)
        return max(0.0, min(wanted, max(free, min(own, known))))

    def _held(self, name: str, key: Key, usable: float, now: float, kind: str) -> float | None:
        """The most that a node may be using now; None if that is not known."""
        node, even = self._nodes[name], usable / len(self._nodes)
        if node.report is None:
            return None if now < node.since + LEASE_SECONDS else even
        claims = ((grant.claims or grant.shares) if grant.ends > now else None for grant in node.grants)
        return max((even if claim is None else _of(claim, key, kind) for claim in claims), default=even)


def _of(shares: Mapping[Key, Rates], key: Key, kind: str) -> float:
    share = shares.get(key)
    return (getattr(share, kind) or 0.0) if share is not None else 0.0


def _need(use: RateUse | None, kind: str) -> Need:
    if use is None:
        return Need(0.0, 1.0)
    waiting = use.waiting if kind == "requests" else use.waiting_tokens
    return Need(waiting + GROWTH * (getattr(use.used, kind) or 0.0), max(use.weight, 1.0))
