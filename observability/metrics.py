"""The running totals that committed events are added to, shown to Prometheus.

`Metrics` belongs to one journal. Its totals are a function of the events applied, in the order of `writer_seq`: a
checkpoint and the events after it give exactly the totals of a process that never stopped.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from understudy.events import Event

from . import conventions as names
from .live_table import LiveRow
from .metric_table import TABLE, Labels, Measure, MetricRow

log = logging.getLogger(__name__)

MAX_LABEL_VALUES = 200
"""Distinct values of one label (agent, tool, model, …); later ones are counted together as `other`."""

OTHER = "other"
MICROSECONDS = 1_000_000

Read = Callable[[], Mapping[Labels, float]]
"""Reads live state at scrape time, in the scraping thread: a value for each tuple of label values."""

Trace = tuple[str, int, int]
"""Exemplar: trace id, amount, time of the commit."""


class _Live(NamedTuple):
    """What is read when somebody looks."""

    row: LiveRow
    read: Read

    def family(self) -> Metric:
        kind = CounterMetricFamily if self.row.kind == "counter" else GaugeMetricFamily
        name = names.prometheus_name(self.row.name, self.row.unit)
        family: Metric = kind(name, self.row.help, labels=self.row.labels, unit=self.row.unit)
        for values, amount in self.read().items():
            family.add_metric([str(value) for value in values], float(amount))  # type: ignore[attr-defined]
        return family


class _Vocabulary:
    """Which label values have series of their own: for each label the first ones seen, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, set[str]] = {}

    def admit(self, names: Labels, values: Labels) -> Labels:
        """The label values to count under. Values that no exposition could hold are made printable."""
        admitted = []
        for name, value in zip(names, values, strict=True):
            text = str(value).encode(errors="replace").decode()
            known = self._known.setdefault(name, set())
            if text not in known and text != OTHER:
                if len(known) >= self._limit:
                    text = OTHER
                else:
                    known.add(text)
            admitted.append(text)
        return tuple(admitted)


class _Counter:
    """A counter's totals: `[amount, exemplar]` by label values."""

    def __init__(self, row: MetricRow, vocabulary: _Vocabulary) -> None:
        self.row = row
        self._vocabulary = vocabulary
        self._series: dict[Labels, list[Any]] = {}
        self.clear()

    def clear(self) -> None:
        """Back to the start."""
        self._series = {}
        for labels in self.row.initial:
            self._admitted(labels)

    def _admitted(self, labels: Labels) -> list[Any]:
        return self._series.setdefault(self._vocabulary.admit(self.row.labels, labels), [0, None])

    def add(self, labels: Labels, amount: int, _counts: Sequence[int] = (), trace: str = "", at: int = 0) -> None:
        series = self._series.get(labels) or self._admitted(labels)
        series[0] += amount
        if trace:
            series[1] = (trace, amount, at)

    def dump(self) -> dict[str, Any]:
        """The totals, JSON-compatible, with what they can be checked against."""
        return {
            "labels": list(self.row.labels),
            "series": [[list(labels), series[0]] for labels, series in self._series.items()],
        }

    def load(self, dumped: Mapping[str, Any]) -> bool:
        """Take over dumped totals; False, and nothing changed, when they are of another shape."""
        if dumped.get("labels") != list(self.row.labels):
            return False
        for labels, amount in dumped["series"]:
            self._admitted(tuple(labels))[0] += amount  # a lower limit of label values may merge series
        return True

    def copy(self) -> list[tuple[Labels, Any, Any]]:
        """Label values, amount and exemplar of each series, for showing them outside the lock."""
        return [(labels, series[0], series[1]) for labels, series in self._series.items()]

    def family(self, copied: list[tuple[Labels, Any, Any]]) -> Metric:
        name = names.prometheus_name(self.row.name, self.row.unit)
        family = CounterMetricFamily(name, self.row.help, labels=self.row.labels, unit=self.row.unit)
        for labels, amount, trace in copied:
            shown = amount if self.row.scale == 1 else amount / self.row.scale
            family.add_metric(labels, shown, exemplar=_exemplar(trace, self.row.scale))
        return family


class _Histogram:
    """A histogram's totals: `[sum, counts by bucket, exemplars by bucket]` by label values."""

    def __init__(self, row: MetricRow, vocabulary: _Vocabulary) -> None:
        self.row = row
        self._vocabulary = vocabulary
        self._bounds = [round(bound * row.scale) for bound in row.buckets]
        self._shown = [*map(floatToGoString, row.buckets), "+Inf"]
        self._series: dict[Labels, list[Any]] = {}
        self.clear()

    def clear(self) -> None:
        """Back to the start."""
        self._series = {}
        for labels in self.row.initial:
            self._admitted(labels)

    def _admitted(self, labels: Labels) -> list[Any]:
        width = len(self._shown)
        return self._series.setdefault(
            self._vocabulary.admit(self.row.labels, labels), [0, [0] * width, [None] * width]
        )

    def add(self, labels: Labels, amount: int, counts: Sequence[int] = (), trace: str = "", at: int = 0) -> None:
        series = self._series.get(labels) or self._admitted(labels)
        if counts:
            series[0] += amount
            for bucket, number in enumerate(counts):
                series[1][bucket] += number
            return
        if amount < 0:
            amount = 0  # the clock was set back in between
        bucket = bisect_left(self._bounds, amount)
        series[0] += amount
        series[1][bucket] += 1
        if trace:
            series[2][bucket] = (trace, amount, at)

    def dump(self) -> dict[str, Any]:
        """The totals, JSON-compatible, with what they can be checked against."""
        return {
            "labels": list(self.row.labels),
            "bounds": self._bounds,
            "series": [[list(labels), series[0], list(series[1])] for labels, series in self._series.items()],
        }

    def load(self, dumped: Mapping[str, Any]) -> bool:
        """Take over dumped totals; False, and nothing changed, when they are of another shape."""
        if dumped.get("labels") != list(self.row.labels) or dumped.get("bounds") != self._bounds:
            return False
        for labels, total, counts in dumped["series"]:
            series = self._admitted(tuple(labels))
            series[0] += total
            series[1] = [old + new for old, new in zip(series[1], counts, strict=True)]
        return True

    def copy(self) -> list[tuple[Labels, Any, Any]]:
        """Label values, sum with counts, and exemplars of each series, for showing them outside the lock."""
        return [(labels, (series[0], list(series[1])), list(series[2])) for labels, series in self._series.items()]

    def family(self, copied: list[tuple[Labels, Any, Any]]) -> Metric:
        name = names.prometheus_name(self.row.name, self.row.unit)
        family = HistogramMetricFamily(name, self.row.help, labels=self.row.labels, unit=self.row.unit)
        for labels, (total, counts), traces in copied:
            buckets, count = [], 0
            for shown, inside, trace in zip(self._shown, counts, traces, strict=True):
                count += inside
                buckets.append((shown, count, _exemplar(trace, self.row.scale)))
            family.add_metric(labels, buckets, total / self.row.scale)  # type: ignore[arg-type] # no exemplar is fine
        return family


def _exemplar(trace: Trace | None, scale: int) -> Exemplar | None:
    if trace is None:
        return None
    trace_id, amount, at = trace
    return Exemplar({"trace_id": trace_id}, amount / scale, at / MICROSECONDS)


class Metrics(Collector):
    """All metrics of one journal, as a collector in a registry of its own.

    One thread applies events, others may scrape at the same time. Totals never move back: an event at or below the
    last `writer_seq` applied is ignored, however often it comes.

    Attributes:
        registry: what an exposition endpoint serves.
    """

    def __init__(self, *, max_label_values: int = MAX_LABEL_VALUES) -> None:
        self._lock = threading.Lock()
        self._max_label_values = max_label_values
        self._writer_seq = 0
        self._live: dict[str, _Live] = {}
        self._build()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def _build(self) -> None:
        vocabulary = _Vocabulary(self._max_label_values)
        self._totals: dict[str, _Counter | _Histogram] = {
            row.name: (_Counter if row.kind == "counter" else _Histogram)(row, vocabulary) for row in TABLE
        }
        self._projection: dict[type[Event], list[tuple[Measure, Callable[..., None]]]] = {}
        for row in TABLE:
            for kind, measure in row.measures.items():
                self._projection.setdefault(kind, []).append((measure, self._totals[row.name].add))

    @property
    def writer_seq(self) -> int:
        """The last event applied."""
        return self._writer_seq

    def apply(self, events: Iterable[Event]) -> None:
        """Add committed events, in the order of `writer_seq`. Never raises: what can't be measured is logged."""
        with self._lock:
            projection, last = self._projection, self._writer_seq
            for event in events:
                if event.writer_seq <= last:
                    continue
                self._writer_seq = last = event.writer_seq
                try:
                    for measure, add in projection.get(type(event), ()):
                        for labels, amount, counts in measure(event):
                            add(labels, amount, counts, event.trace_id, event.at)
                except Exception:
                    log.exception("event %s %d is not fully measured", event.type, event.writer_seq)

    def observe_commit(self, duration_seconds: float, operations: int) -> None:
        """Measure one transaction of the journal. Local to this process: starts at 0 with it."""
        with self._lock:
            self._totals[names.COMMIT_DURATION].add((), round(duration_seconds * MICROSECONDS))
            self._totals[names.COMMIT_OPERATIONS].add((), operations)

    def count_fenced(self) -> None:
        """Count one write refused to a stale activation. Local to this process: starts at 0 with it."""
        with self._lock:
            self._totals[names.FENCED_WRITES].add((), 1)

    def show(self, row: LiveRow, read: Read) -> None:
        """Show live state; `read` runs at every scrape, and a later one replaces it.

        One that raises is logged and left out of that scrape.
        """
        with self._lock:
            self._live[row.name] = _Live(row, read)

    def runs_open(self) -> int:
        """Runs whose acceptance was counted here, less those whose end was."""
        with self._lock:
            totals = {name: self._totals[name].dump() for name in (names.RUNS_ACCEPTED, names.RUNS_FINISHED)}
        accepted, finished = runs_of({"totals": totals})
        return accepted - finished

    def checkpoint(self) -> dict[str, Any]:
        """Totals and the last event applied, JSON-compatible, for `restore`."""
        with self._lock:
            return {
                "writer_seq": self._writer_seq,
                "totals": {name: totals.dump() for name, totals in self._totals.items() if totals.row.measures},
            }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Replace all event totals by a checkpoint's; then `apply` the events after its `writer_seq`.

        A metric whose labels or buckets have changed since starts at 0 again.
        """
        with self._lock:
            self._build()
            self._writer_seq = checkpoint["writer_seq"]
            for name, dumped in checkpoint["totals"].items():
                totals = self._totals.get(name)
                if totals is not None and not totals.load(dumped):
                    log.warning("metric %s has another shape than in the checkpoint: it starts at 0", name)

    def collect(self) -> Iterator[Metric]:
        """Every metric as of one moment. Called by the registry at each scrape."""
        with self._lock:
            # Only copied here: formatting thousands of series would hold up the journal.
            copies = [(totals, totals.copy()) for totals in self._totals.values()]
            shown = list(self._live.values())
        for totals, copied in copies:
            yield totals.family(copied)
        for live in shown:
            try:
                yield live.family()
            except Exception:
                log.exception("%s can't be read", live.row.name)


def runs_of(checkpoint: Mapping[str, Any]) -> tuple[int, int]:
    """How many runs a checkpoint has counted as accepted, and as finished."""
    if "runs" in checkpoint:  # of an import, which counts nothing else
        accepted, finished = checkpoint["runs"]
        return accepted, finished
    totals = checkpoint.get("totals", {})
    return (
        sum(amount for _, amount in totals.get(names.RUNS_ACCEPTED, {}).get("series", ())),
        sum(amount for _, amount in totals.get(names.RUNS_FINISHED, {}).get("series", ())),
    )
