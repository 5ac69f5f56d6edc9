"""PromQL about our metrics, whose names and units come from the metric table."""

from __future__ import annotations

from dataclasses import dataclass

from ..conventions import prometheus_name
from ..live_table import ROWS
from ..metric_table import TABLE

METRICS = {row.name: row for row in TABLE} | {row.name: row for row in ROWS}
"""Every metric there is, by its name."""


def wire(name: str) -> str:
    """What a metric is called in Prometheus; a histogram without the suffixes of its series."""
    row = METRICS[name]
    return prometheus_name(name, row.unit) + ("_total" if row.kind == "counter" else "")


@dataclass(frozen=True)
class Scope:
    """Which series a dashboard or rule is about, and over which time rates are taken.

    Attributes:
        matchers: of labels that every metric has, as `job=~"$job"`.
        window: as `5m`, or Grafana's `$__rate_interval`.
        by: labels that every sum keeps, so that clusters are distinguished.
    """

    matchers: tuple[str, ...] = ()
    window: str = "$__rate_interval"
    by: tuple[str, ...] = ()

    def series(self, name: str, *matchers: str, suffix: str = "") -> str:
        """A metric's series."""
        chosen = ",".join((*self.matchers, *matchers))
        return f"{wire(name)}{suffix}" + (f"{{{chosen}}}" if chosen else "")

    def total(self, name: str, *matchers: str, by: str = "", function: str = "sum") -> str:
        """The gauges of all node services together."""
        return f"{self._over(function, by)}({self.series(name, *matchers)})"

    def rate(self, name: str, *matchers: str, by: str = "", suffix: str = "") -> str:
        """How fast a counter rises, per second."""
        return f"{self._over('sum', by)}(rate({self.series(name, *matchers, suffix=suffix)}[{self.window}]))"

    def increase(self, name: str, *matchers: str, by: str = "", window: str = "") -> str:
        """By how much a counter rose."""
        return f"{self._over('sum', by)}(increase({self.series(name, *matchers)}[{window or self.window}]))"

    def quantile(self, share: float, name: str, *matchers: str, by: str = "") -> str:
        """A quantile over all node services: of the sum of their buckets, never a mean of theirs."""
        labels = f"{by}, le" if by else "le"
        return f"histogram_quantile({share}, {self.rate(name, *matchers, by=labels, suffix='_bucket')})"

    def mean(self, name: str, *matchers: str, by: str = "") -> str:
        """A histogram's mean."""
        parts = [self.rate(name, *matchers, by=by, suffix=suffix) for suffix in ("_sum", "_count")]
        return " / ".join(parts)

    def _over(self, function: str, by: str) -> str:
        labels = ", ".join((*self.by, *([by] if by else [])))
        return f"{function} by ({labels}) " if labels else function


ZERO = " or on() vector(0)"


def or_zero(expr: str) -> str:
    """0 where nothing has happened yet. `on()`: nothing is added where there is any series, whatever its labels."""
    return f"{expr}{ZERO}"


def share(part: str, whole: str) -> str:
    """A part of a whole; nothing where the whole is 0."""
    return f"{part} / ({whole} > 0)"
