"""Rate limits of model endpoints: what gateways, node services and the supervisor say of them to each other."""

from __future__ import annotations

import msgspec

MINUTE = 60.0
"""Seconds. All limits are per minute, as endpoints state them."""

HEADROOM = 0.05
"""The part of a limit that is never used: it makes up for the burst that each node is allowed, and for the different
times that requests take to their endpoint."""

LEASE_SECONDS = 15.0
"""How long a share is valid, counted by the gateway that uses it from the report that the share answers."""

GRACE_SECONDS = 20.0
"""A gateway whose share has ended uses no more than an equal part of the limit. Only after so many seconds more does it
rise to that: shares that were made before it was known to be silent have ended by then, also if a report took some
seconds to its supervisor."""

WEIGHTS = {"high": 4.0, "normal": 2.0, "low": 1.0}
"""How much of a limit a tree gets beside another one, by the priority of its requests."""

NORMAL = "normal"


class Rates(msgspec.Struct, frozen=True):
    """Requests and tokens per minute; None for any number."""

    requests: float | None = None
    tokens: float | None = None

    def __bool__(self) -> bool:
        return self.requests is not None or self.tokens is not None

    def times(self, factor: float) -> Rates:
        """So many times as much of both."""
        return Rates(
            None if self.requests is None else self.requests * factor,
            None if self.tokens is None else self.tokens * factor,
        )

    def at_most(self, other: Rates) -> Rates:
        """The lower one of each."""
        return Rates(_lower(self.requests, other.requests), _lower(self.tokens, other.tokens))


def _lower(one: float | None, other: float | None) -> float | None:
    return min((rate for rate in (one, other) if rate is not None), default=None)


UNLIMITED = Rates()
NOTHING = Rates(0.0, 0.0)


class RateUse(msgspec.Struct, frozen=True):
    """How one limit is used on one node.

    Attributes:
        profile: the model profile that it belongs to.
        model: of which model it is, where an endpoint states limits by model; empty for a limit that was given with the
            profile, which is of all its models together.
        limit: the whole limit, as far as it is known.
        share: what this node may use of it now.
        claim: the most that it will use until it hears of another share: more, where that has ended.
        waiting, waiting_tokens: requests that wait for their turn, and their tokens as estimated.
        weight: of the trees that have used the limit lately, or wait to.
        used: per minute, lately.
        stopped: seconds for which the endpoint has told this node to send nothing.
        refused: requests refused with status 429, since the gateway's start.
    """

    profile: str
    model: str
    limit: Rates
    share: Rates
    claim: Rates
    waiting: int = 0
    waiting_tokens: float = 0.0
    weight: float = 0.0
    used: Rates = NOTHING
    stopped: float = 0.0
    refused: int = 0


class RateReport(msgspec.Struct, frozen=True):
    """What a gateway tells of its limits.

    Attributes:
        version: rises when there is something that others should know at once.
        at: seconds by the gateway's own clock: the shares that answer this report end `LEASE_SECONDS` later.
        shares: the generation and the number of the shares that it uses.
        waiting: calls that wait for their turn, by profile, whether a limit of it is known or not.
    """

    version: int = 0
    at: float = 0.0
    shares: tuple[int, int] = (0, 0)
    uses: list[RateUse] = []
    waiting: dict[str, int] = {}


class RateShare(msgspec.Struct, frozen=True):
    """What one node may use of one limit.

    Attributes:
        profile, model: which limit it is (`RateUse`).
        limit: the whole limit, for nodes that have not learned it themselves.
        stopped: seconds for which nobody sends anything, since the endpoint has told a node so.
    """

    profile: str
    model: str
    limit: Rates
    share: Rates
    stopped: float = 0.0


class RateShares(msgspec.Struct, frozen=True):
    """All shares of a node, in place of those before.

    Attributes:
        generation, number: of the supervisor's, rising: what arrives late is not used.
        at: `RateReport.at` of the report that they answer.
        nodes: how many nodes the limits are shared by.
    """

    generation: int
    number: int
    at: float
    nodes: int
    shares: list[RateShare] = []
