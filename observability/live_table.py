"""The rest of the metric table: what is read when somebody looks, as it is now. No label names a session or a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from understudy.records import SESSION_STATUSES

from . import conventions as names


@dataclass(frozen=True)
class LiveRow:
    """One line of the table.

    Attributes:
        kind: a counter starts at 0 with the service.
        unit: in which it is shown; empty for numbers of things.
        source: `service`: read at the scrape; `store`: counted in the background for sessions at home on this node,
            so that a scrape never waits for the store.
        values: what each label can be, where that is known beforehand.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    source: Literal["service", "store"] = "service"
    values: tuple[str, ...] = ()


SINKS = ("sink",)
LIMITS = ("profile", "model")

ROWS = (
    LiveRow(names.SESSIONS, "gauge", "Sessions.", ("status",), source="store", values=SESSION_STATUSES),
    LiveRow(
        names.RUNS_LIVE, "gauge", "Runs that were accepted and have not ended, queued ones included.", source="store"
    ),
    LiveRow(
        names.SESSIONS_STUCK,
        "gauge",
        "Sessions at work whose process died, and that made no progress since.",
        source="store",
    ),
    LiveRow(
        names.INBOX_ITEMS, "gauge", "Inputs, results and answers that no session has taken in yet.", source="store"
    ),
    LiveRow(names.INBOX_OLDEST, "gauge", "Age of the oldest of them; 0 without one.", (), "seconds", "store"),
    LiveRow(
        names.TIMERS_PENDING,
        "gauge",
        "Timers that are set: waits, wakeups, pauses after crashes, deadlines.",
        source="store",
    ),
    LiveRow(
        names.BUDGET_TOKENS,
        "gauge",
        "Token budgets of trees, of the sessions at work that have one.",
        ("state",),
        source="store",
        values=("allowed", "reserved", "spent"),
    ),
    LiveRow(
        names.BUDGETS_NEAR_LIMIT,
        "gauge",
        "Trees of the sessions at work that have spent nine tenths of their budget, or more.",
        ("resource",),
        source="store",
        values=("tokens", "cost"),
    ),
    LiveRow(
        names.RUNS_CARRIED,
        "gauge",
        "Runs counted by node services that are gone for good, or imported; one service shows them. "
        "understudy_runs_accepted_total and this, less finished ones of both, are understudy_runs_live.",
        ("state",),
        source="store",
        values=("accepted", "finished"),
    ),
    LiveRow(
        names.QUEUE_RUNS,
        "gauge",
        "Runs of a queue; one service tells of all. `at_work`: they have a slot; `waiting`: for one; `behind`: another "
        "input of their session.",
        ("queue", "state"),
        source="store",
    ),
    LiveRow(
        names.TRIAGE_OPEN,
        "gauge",
        "Entries of triage that are open; one service tells of all.",
        ("schedule",),
        source="store",
    ),
    LiveRow(names.STORE_COUNTS_AGE, "gauge", "Time since these numbers were counted in the store.", (), "seconds"),
    LiveRow(names.STORE_OUTAGE, "gauge", "Time since the store works no more; 0 while it does.", (), "seconds"),
    LiveRow(names.SUPERVISOR_SILENCE, "gauge", "Time since the supervisor last called this service.", (), "seconds"),
    LiveRow(
        names.HEAD_SILENCE,
        "gauge",
        "Time since the cluster's head (Ray's GCS) answers no more; 0 while it does.",
        (),
        "seconds",
    ),
    LiveRow(
        names.NODES,
        "gauge",
        "Nodes of the cluster, as the supervisor says: each service tells of all. `missing`: gone without a drain, and "
        "no other has come in its place, for six hours at most.",
        ("state",),
        values=("serving", "drained", "missing"),
    ),
    LiveRow(
        names.FRAMES,
        "gauge",
        "Session actors of this node by state.",
        ("state",),
        values=("acting", "waiting", "standby"),
    ),
    LiveRow(names.ACTORS_CAP, "gauge", "The most session actors this node may have now, as memory allows."),
    LiveRow(names.STANDBYS_TAKEN, "counter", "Standing-by session actors that were given a session."),
    LiveRow(names.READY_SESSIONS, "gauge", "Sessions that wait for a session actor."),
    LiveRow(names.RATE_LIMIT, "gauge", "Limits of endpoints, per minute, as given or learned.", (*LIMITS, "resource")),
    LiveRow(names.RATE_SHARE, "gauge", "What this node may use of them now, per minute.", (*LIMITS, "resource")),
    LiveRow(names.RATE_WAITING, "gauge", "Model requests that wait for their turn under a rate limit.", LIMITS),
    LiveRow(names.RATE_REFUSED, "counter", "Model requests refused with status 429.", LIMITS),
    LiveRow(names.MODEL_CALLS_IN_FLIGHT, "gauge", "Model calls in flight, those that wait for their turn included."),
    LiveRow(
        names.MODEL_CALLS_WAITING,
        "gauge",
        "Model calls that wait for their turn: for one of the profile's places, or for its rate limit; up to 2 s old.",
        ("profile",),
    ),
    LiveRow(names.SERVICE_MEMORY, "gauge", "Resident memory of the node service.", (), "bytes"),
    LiveRow(names.FRAMES_MEMORY, "gauge", "Memory that this node's session actors share with nobody.", (), "bytes"),
    LiveRow(
        names.MEMORY_AVAILABLE,
        "gauge",
        "Memory that processes could still take, of the node or of its container.",
        (),
        "bytes",
    ),
    LiveRow(names.LAG_EVENTS, "gauge", "Committed events that a sink has not taken yet.", SINKS),
    LiveRow(names.LAG, "gauge", "Age of the oldest of them; 0 without one.", SINKS, "seconds"),
    LiveRow(names.EXPORTED, "counter", "What a sink has taken: spans, or events.", SINKS),
    LiveRow(names.EXPORT_FAILURES, "counter", "Batches that a sink refused, or that could not be read.", SINKS),
    LiveRow(names.BUILD_INFO, "gauge", "Always 1.", ("version",)),
)

LIVE_TABLE = {row.name: row for row in ROWS}
"""Each row by its name."""
