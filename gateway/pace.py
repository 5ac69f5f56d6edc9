"""How fast the requests of one limit may go out. Plain data; the caller says what time it is."""

from __future__ import annotations

import math

from understudy.estimates import estimate_tokens
from understudy.messages import Usage
from understudy.rates import (
    GRACE_SECONDS,
    HEADROOM,
    MINUTE,
    UNLIMITED,
    Rates,
    RateShare,
    RateUse,
)
from understudy.records import ModelRequest

from .buckets import Bucket, Lately
from .rate_headers import Stated

FIRST_OUTPUT = 300.0
"""Tokens that a reply is taken to have before any is known."""

OUTPUT_WEIGHT = 0.1
"""How much the latest reply counts for what the next one is taken to have."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds for which nothing is sent after a refusal that says no time; doubled with each one in a row."""

WIDE = 1024
"""Requests at once after which a limit that nobody states is no longer felt for."""

TREE_SECONDS = 30.0
"""A tree that has not asked for so long does not count any more."""


class Pace:
    """One limit: how much of it this node may use, and what it has used.

    Its share is valid until its lease ends. Then the node uses no more than an equal part, and after a grace exactly
    that: all nodes do, so they stay within the limit together.

    Args:
        given: what the profile says; where it says anything, the endpoint's headers do not count.

    Attributes:
        refused: see `RateUse`.
    """

    def __init__(self, profile: str, model: str, given: Rates, nodes: int, now: float) -> None:
        self.profile = profile
        self.model = model
        self.given = given
        self.refused = 0
        self._learned = UNLIMITED
        self._share: Rates | None = None
        self._share_ends = 0.0
        self._nodes = nodes
        self._asked_since = now
        self._requests = Bucket(1.0, now)
        self._tokens = Bucket(1.0, now)
        self._stopped = 0.0
        self._stopped_by_others = 0.0
        self._held = 0.0
        self._refusals = 0
        self._in_flight = 0
        self._window: int | None = None
        self._output = FIRST_OUTPUT
        self._used_requests = Lately(now)
        self._used_tokens = Lately(now)
        self._trees: dict[str, tuple[float, float]] = {}

    @property
    def limit(self) -> Rates:
        """The whole limit, as given or else as learned."""
        return self.given or self._learned

    @property
    def is_known(self) -> bool:
        """Whether there is anything to tell others of."""
        return bool(self.limit) or self.refused > 0 or self._share is not None

    def rates(self, now: float) -> Rates:
        """What this node may use now."""
        if not self.limit:
            return UNLIMITED
        usable = self.limit.times(1 - HEADROOM)
        even = usable.times(1 / self._nodes)
        if self._share is not None:
            share = self._share.at_most(usable)
            if now < self._share_ends:
                return share
            return share.at_most(even) if now < self._share_ends + GRACE_SECONDS else even
        if self._nodes == 1 or now >= self._asked_since + GRACE_SECONDS:
            return even
        return even.times(0)

    def claimed(self, now: float) -> Rates:
        """The most that this node may use from now on if it hears nothing: where its share has ended, an equal part,
        also before the grace is over."""
        valid = self._share is not None and now < self._share_ends
        return self.rates(now) if valid else self.limit.times((1 - HEADROOM) / self._nodes)

    def set_share(self, share: RateShare, ends: float, now: float) -> None:
        """The supervisor says what this node may use."""
        self._fill(now)
        self._share, self._share_ends = share.share, ends
        if not self.given:
            self._learned = share.limit
        if share.stopped > 0:
            self._stopped_by_others = max(self._stopped_by_others, now + share.stopped)

    def shared_by(self, nodes: int, now: float) -> None:
        """So many nodes share the limit."""
        if nodes != self._nodes and self._share is None:
            self._asked_since = now
        self._nodes = nodes

    def learn(self, stated: Stated, now: float) -> bool:
        """A response states limits; whether they are others than before."""
        if stated.requests.is_used_up and stated.requests.limit:
            # Until one request is available again; how long it takes until all are, says nothing of that.
            self._held = now + min(stated.requests.reset or MINUTE, MINUTE / stated.requests.limit)
        says = stated.requests.limit is not None or stated.tokens.limit is not None
        if self.given or not says or stated.rates == self._learned:
            return False
        self._fill(now)
        self._learned = stated.rates
        return True

    def refuse(self, seconds: float | None, sent: float, now: float) -> float:
        """A request was refused with status 429: nothing is sent for a time; for how long.

        Args:
            seconds: for how long, as the endpoint says.
            sent: when the request was: of those that were under way together one counts.
        """
        self.refused += 1
        if sent >= self._stopped:
            self._refusals += 1
        if seconds is None:
            seconds = min(FIRST_PAUSE * 2.0 ** (self._refusals - 1), LONGEST_PAUSE)
        self._stopped = max(self._stopped, now + seconds)
        self._window = 1
        return seconds

    def stopped(self, now: float) -> float:
        """Seconds for which nothing is sent since the endpoint has said so, to whichever node."""
        return max(0.0, self._stopped - now, self._stopped_by_others - now)

    def wait(self, tokens: float, now: float) -> float:
        """Seconds until a request with so many tokens may go out; infinite if something has to happen first."""
        self._fill(now)
        if not self.limit.requests and self._window is not None and self._in_flight >= self._window:
            return math.inf
        paused = max(0.0, self.stopped(now), self._held - now)
        return max(paused, self._requests.wait(1.0), self._tokens.wait(tokens))

    def take(self, tokens: float, now: float) -> None:
        """A request goes out."""
        self._fill(now)
        self._requests.take(1.0)
        self._tokens.take(tokens)
        self._in_flight += 1
        self._used_requests.add(1.0, now)

    def unused(self, tokens: float) -> None:
        """It did not go out after all."""
        self._in_flight -= 1
        self._requests.give_back(1.0)
        self._tokens.give_back(tokens)

    def over(self) -> None:
        """It is over, whatever came of it."""
        self._in_flight -= 1

    def answered(self, reserved: float, usage: Usage, now: float) -> None:
        """It had an answer: what that really took counts."""
        self._refusals = 0
        used = float(usage.input_tokens + usage.output_tokens)
        self._used_tokens.add(used, now)
        self._fill(now)
        self._tokens.give_back(reserved - used)
        self._output += OUTPUT_WEIGHT * (usage.output_tokens - self._output)
        if self._window is not None:
            self._window = self._window + 1 if self._window < WIDE else None

    def expected(self, request: ModelRequest) -> float:
        """The tokens that are reserved for a request: its input, and a reply as they were lately."""
        if self.limit.tokens is None:
            return 0.0
        longest = request.parameters.get("max_completion_tokens") or request.parameters.get("max_tokens") or math.inf
        return estimate_tokens(request) + min(self._output, float(longest))

    def cost(self, tokens: float) -> float:
        """The part of a minute that a request takes of the limit that is scarcer for it."""
        limit = self.limit
        of_requests = 1 / limit.requests if limit.requests else 0.0
        of_tokens = tokens / limit.tokens if limit.tokens else 0.0
        return max(of_requests, of_tokens) or 1.0

    def asked(self, flow: str, weight: float, now: float) -> None:
        """A tree asks for its turn."""
        self._trees[flow] = (weight, now)

    def use(self, waiting: int, waiting_tokens: float, flows: set[str], now: float) -> RateUse:
        """What others should know.

        Args:
            flows: whose requests wait.
        """
        self._trees = {
            flow: (weight, at) for flow, (weight, at) in self._trees.items() if flow in flows or now - at < TREE_SECONDS
        }
        used = Rates(self._used_requests.per_minute(now), self._used_tokens.per_minute(now))
        return RateUse(
            self.profile, self.model, self.limit, self.rates(now), self.claimed(now), waiting, waiting_tokens,
            sum(weight for weight, _ in self._trees.values()), used, max(0.0, self._stopped - now), self.refused,
        )  # fmt: skip

    def _fill(self, now: float) -> None:
        rates = self.rates(now)
        self._requests.fill(rates.requests, now)
        self._tokens.fill(rates.tokens, now)
