"""Where each metric that is read when somebody looks (`observability/live_table.py`) is read. Runs in the scraping
thread: what belongs to the event loop is only copied, in one step of the interpreter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version

import psutil

from understudy.observability import conventions as names
from understudy.observability.export import Export
from understudy.observability.live_table import LIVE_TABLE
from understudy.placement import is_scarce
from understudy.ports import ClusterHead
from understudy.rates import Rates, RateUse
from understudy.store.db.engine import now

from .basis import NodeBasis
from .calls import Calls
from .paging import Paging
from .projection import Projection
from .rates import NodeRates
from .supply import Supply

Values = Mapping[tuple[str, ...], float]


def show_all(
    node: NodeBasis, paging: Paging, supply: Supply, calls: Calls, rates: NodeRates, head: ClusterHead,
    projection: Projection,
) -> None:  # fmt: skip
    """Have the service's metrics show all of them."""
    service = _service(paging, supply, calls)
    for reads in (_store(projection), _cluster(node, head), service, _rates(rates), _sinks(projection)):
        for name, read in reads.items():
            projection.metrics.show(LIVE_TABLE[name], read)


def _store(projection: Projection) -> dict[str, Callable[[], Values]]:
    counting, adoption = projection.counting, projection.adoption

    def counted(read: Callable[[], Values]) -> Callable[[], Values]:
        return lambda: read() if counting.counted is not None else {}

    def oldest() -> float:
        arrived = counting.counts.inbox_oldest
        return max(0.0, (now() - arrived) / 1e6) if arrived else 0.0

    def queue_runs() -> Values:
        states = ("at_work", "waiting", "behind")
        return {(queue.name, state): getattr(queue, state) for queue in counting.queues for state in states}

    def carried() -> Values:
        runs = adoption.carried
        return {} if runs is None else {("accepted",): runs[0], ("finished",): runs[1]}

    def age() -> Values:
        return {} if counting.counted is None else {(): time.monotonic() - counting.counted}

    return {
        names.SESSIONS: counted(lambda: {(status,): number for status, number in counting.sessions().items()}),
        names.RUNS_LIVE: counted(lambda: {(): counting.runs()}),
        names.SESSIONS_STUCK: counted(lambda: {(): counting.counts.stuck}),
        names.INBOX_ITEMS: counted(lambda: {(): counting.counts.inbox}),
        names.INBOX_OLDEST: counted(lambda: {(): oldest()}),
        names.TIMERS_PENDING: counted(lambda: {(): counting.counts.timers}),
        names.BUDGET_TOKENS: counted(lambda: {(state,): sum_ for state, sum_ in counting.counts.budget.items()}),
        names.BUDGETS_NEAR_LIMIT: counted(lambda: {(name,): number for name, number in counting.counts.near.items()}),
        names.QUEUE_RUNS: counted(queue_runs),
        names.TRIAGE_OPEN: counted(lambda: {(name,): number for name, number in counting.triage.items()}),
        names.RUNS_CARRIED: carried,
        names.STORE_COUNTS_AGE: age,
        names.STORE_OUTAGE: lambda: {(): counting.outage()},
    }


def _cluster(node: NodeBasis, head: ClusterHead) -> dict[str, Callable[[], Values]]:
    started, homes = time.monotonic(), node.homes

    def nodes() -> Values:
        if not homes.nodes:
            return {}
        serving = len(homes.available)
        return {("serving",): serving, ("drained",): len(homes.nodes) - serving, ("missing",): homes.missing}

    return {
        names.HEAD_SILENCE: lambda: {(): head.silence()},
        names.NODES: nodes,
        names.SUPERVISOR_SILENCE: lambda: {(): time.monotonic() - (node.supervisor_heard or started)},
    }


def _service(paging: Paging, supply: Supply, calls: Calls) -> dict[str, Callable[[], Values]]:
    process = psutil.Process(os.getpid())

    def by_state() -> Values:
        found = paging.states()
        return {(state,): float(found[state]) for state in ("acting", "waiting", "standby")}

    def frames_memory() -> Values:
        measured = [slot for slot in list(paging.slots.values()) if not is_scarce(slot.placement)]
        return {(): supply.measured.frame * len(measured)} if supply.measured else {}

    return {
        names.FRAMES: by_state,
        names.ACTORS_CAP: lambda: {(): supply.cap} if supply.cap else {},
        names.STANDBYS_TAKEN: lambda: {(): paging.standbys_taken},
        names.READY_SESSIONS: lambda: {(): len(paging.ready)},
        names.MODEL_CALLS_IN_FLIGHT: lambda: {(): len(calls)},
        names.SERVICE_MEMORY: lambda: {(): process.memory_info().rss},
        names.FRAMES_MEMORY: frames_memory,
        names.MEMORY_AVAILABLE: lambda: {(): supply.measured.free} if supply.measured else {},
        names.BUILD_INFO: lambda: {(version("understudy"),): 1},
    }


def _rates(rates: NodeRates) -> dict[str, Callable[[], Values]]:
    def uses() -> list[RateUse]:
        return rates.report.uses if rates.report is not None else []

    def by_kind(read: Callable[[RateUse], Rates]) -> Callable[[], Values]:
        def values() -> Values:
            found: dict[tuple[str, ...], float] = {}
            for use in uses():
                for kind in ("requests", "tokens"):
                    rate: float | None = getattr(read(use), kind)
                    if rate is not None:
                        found[(use.profile, use.model, kind)] = rate
            return found

        return values

    def each(read: Callable[[RateUse], float]) -> Callable[[], Values]:
        return lambda: {(use.profile, use.model): read(use) for use in uses()}

    def waiting() -> Values:
        return {(profile,): number for profile, number in (rates.report.waiting if rates.report else {}).items()}

    return {
        names.MODEL_CALLS_WAITING: waiting,
        names.RATE_LIMIT: by_kind(lambda use: use.limit),
        names.RATE_SHARE: by_kind(lambda use: use.share),
        names.RATE_WAITING: each(lambda use: use.waiting),
        names.RATE_REFUSED: each(lambda use: use.refused),
    }


def _sinks(projection: Projection) -> dict[str, Callable[[], Values]]:
    def each(read: Callable[[Export], float]) -> Callable[[], Values]:
        return lambda: {(sink,): read(export) for sink, export in projection.exports.items()}

    return {
        names.LAG_EVENTS: each(projection.lag_events),
        names.LAG: each(projection.lag_seconds),
        names.EXPORTED: each(lambda export: export.exported),
        names.EXPORT_FAILURES: each(lambda export: export.failures),
    }
