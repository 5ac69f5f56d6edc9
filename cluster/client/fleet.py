"""What `understudy top` and the console show of the whole cluster: one snapshot, refreshed once for all who look."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, TypeVar

from understudy.errors import UnderstudyError
from understudy.event_wire import EventWire
from understudy.messages import Usage
from understudy.protocol import packed
from understudy.reads import Activity, NodeLoad, SessionAtWork, Totals, Working

from .results import ServiceInfo

log = logging.getLogger(__name__)

Result = TypeVar("Result")

Wire = dict[str, Any]
"""A part of the snapshot, or of what a page receives: JSON, as browsers and scripts get it."""

REFRESH_SECONDS = 0.7
SHARE = 4.0
"""The pause is this many times what a refresh took, if that is longer: a busy store has most of its time for others."""

SERVICES_SECONDS = 3.0
TOTALS_SECONDS = 5.0
ANSWER_SECONDS = 8.0
WINDOW_SECONDS = 60.0
INCIDENTS = 30
ROWS = 300

INCIDENT_TYPES = {
    "session_crashed", "session_quarantined", "model_call_reissued", "tool_in_doubt", "input_requested",
    "session_moved", "shutdown_forced", "child_restarted",
}  # fmt: skip


COUNTED = (
    "tokens", "cost", "calls", "calls_failed", "runs_accepted", "runs_finished", "crashes", "only_waited", "restores",
    "restore",
)  # fmt: skip
LONGEST = "restore"
"""Of this the greatest counts, not the sum."""

SERVICES = {"supervisor": "supervisor", "node": "node service"}
"""The roles whose deaths are shown, and the names under which people read of them."""


class Source(Protocol):
    """The cluster as it is looked at: `Connection` behind a small door, so that pages and views are tested without Ray.

    Every method raises `UnderstudyError`, and may take as long as the store is away.
    """

    async def read(self, kind: type[Result], what: str, *arguments: Any, **options: Any) -> Result:
        """One of `requests.READS`; `kind` is what it returns."""
        ...

    async def services(self) -> list[ServiceInfo]:
        """The processes of the cluster."""
        ...

    async def load(self, node_id: str) -> NodeLoad:
        """What a node service has to do."""
        ...

    def follow(self, session_id: str, after: int) -> AsyncIterator[EventWire]:
        """Events of a session after a `seq`, each once and in order, as they are committed."""
        ...

    async def act(self, method: str, session_id: str, *arguments: Any, by: str = "") -> Any:
        """A request that changes something (`Requests`), and who asks for it."""
        ...

    async def drain(self, node_id: str, timeout: float, by: str = "") -> None:
        """Begin to drain a node; see `Cluster.drain`. Returns before it is done."""
        ...

    async def undrain(self, node_id: str) -> bool:
        """Take a drain back; see `Cluster.undrain`."""
        ...


def problem_of(error: Exception) -> Wire:
    """Why there is nothing to show, for people."""
    if isinstance(error, TimeoutError):
        return {
            "code": "no_answer",
            "message": f"the services gave no answer within {ANSWER_SECONDS:.0f} s",
            "hint": "",
        }
    if isinstance(error, UnderstudyError):
        return {"code": error.code, "message": error.message, "hint": error.hint}
    log.error("the cluster can't be looked at", exc_info=error)
    return {"code": "error", "message": type(error).__name__, "hint": ""}


def in_trees(rows: Sequence[SessionAtWork]) -> list[Wire]:
    """Sessions below their parents, with `indent`. First the trees that want a person, then the others by age."""
    known = {row.session_id for row in rows}
    below: dict[str | None, list[SessionAtWork]] = {}
    urgent: dict[str, bool] = {}
    tops: list[SessionAtWork] = []
    for row in sorted(rows, key=lambda row: (row.created_at, row.session_id)):
        wants = row.status == "waiting_for_input" or row.stuck > 0
        urgent[row.root_id] = urgent.get(row.root_id, False) or wants
        (below.setdefault(row.parent_id, []) if row.parent_id in known else tops).append(row)
    tops.sort(key=lambda row: not urgent[row.root_id])
    ordered: list[Wire] = []
    waiting = [(row, 0) for row in reversed(tops)]
    while waiting:
        row, indent = waiting.pop()
        ordered.append({**packed(row), "indent": indent})
        waiting += [(child, indent + 1) for child in reversed(below.get(row.session_id, ()))]
    return ordered


def counts(event: EventWire) -> dict[str, int]:
    """What one event adds to `COUNTED`."""
    kind, data = event["type"], event["data"]
    if kind == "model_call_completed":
        usage = Usage.from_wire(data["usage"])
        return {"calls": 1, "tokens": usage.total_tokens, "cost": usage.cost}
    if kind == "session_activated" and data["cause"] == "resume":
        return {"restores": 1, "restore": data["down"]}
    if kind == "session_crashed":
        return {"crashes": 1, "only_waited": int(data["waiting"])}
    names = {"model_call_failed": "calls_failed", "run_accepted": "runs_accepted", "run_finished": "runs_finished"}
    return {names[kind]: 1} if kind in names else {}


class Rates:
    """What happened within the last minute, counted by second, and what went wrong lately."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[str, int]] = {}
        self._only_waited: dict[str, int] = {}
        self.incidents: deque[Wire] = deque(maxlen=INCIDENTS)

    def take(self, events: list[EventWire]) -> None:
        """Take in what one look at the logs found."""
        for event in sorted(events, key=lambda event: event["at"]):
            self._count(event)
            data = event["data"]
            failed = event["type"] == "run_finished" and data["status"] in ("failed", "quarantined", "budget_exceeded")
            restored = event["type"] == "session_activated" and data["cause"] != "ready"
            if failed or restored or event["type"] in INCIDENT_TYPES:
                self.incidents.append(
                    {
                        "type": event["type"], "at": event["at"], "session_id": event["session_id"],
                        "agent": event["agent"], "run_id": event["run_id"], "seq": event["seq"], "data": data,
                    }
                )  # fmt: skip

    def _count(self, event: EventWire) -> None:
        second, found = event["at"] // 1_000_000, counts(event)
        counted = self._seconds.setdefault(second, dict.fromkeys(COUNTED, 0))
        for name, number in found.items():
            counted[name] = max(counted[name], number) if name == LONGEST else counted[name] + number
        if event["type"] not in ("session_crashed", "session_activated"):
            return
        crashed = self._seconds.get(self._only_waited.pop(event["session_id"], -1))
        if found.get("only_waited"):
            self._only_waited[event["session_id"]] = second
        elif found.get("restores") and crashed is not None:  # an actor that stands by is given to who only waits, too
            crashed["only_waited"] -= 1

    def per_minute(self, now: int) -> dict[str, int]:
        """Counts of the last minute; `cost` in millionths, `restore` the longest time from a crash to an activation.

        Of the `crashes`, `restores` were followed by an activation because of them, and `only_waited` were of sessions
        that only waited and get an actor when their wait ends.
        """
        since = int(now / 1e6 - WINDOW_SECONDS)
        self._seconds = {second: found for second, found in self._seconds.items() if second >= since}
        self._only_waited = {name: second for name, second in self._only_waited.items() if second >= since}
        found = {name: [second[name] for second in self._seconds.values()] for name in COUNTED}
        return {name: max(each, default=0) if name == LONGEST else sum(each) for name, each in found.items()}


def service_incidents(before: list[ServiceInfo], after: list[ServiceInfo], at: int) -> list[Wire]:
    """What became of the supervisor and the node services between two looks at them.

    One that has another process than before was restarted, whether it died or was ended; one that is in the list no
    more is lost. Of what happened before the first look nothing is known.
    """
    now = {_place(service): service for service in after}
    found: list[Wire] = []
    for service in before:
        if service.role not in SERVICES:
            continue
        successor = now.get(_place(service))
        # In containers, processes of two nodes can have the same pid.
        if successor is not None and (successor.node_id, successor.pid) == (service.node_id, service.pid):
            continue
        data = {
            "role": service.role, "node_id": (successor or service).node_id, "old_pid": service.pid,
            "pid": successor.pid if successor is not None else None,
        }  # fmt: skip
        kind = "service_lost" if successor is None else "service_restarted"
        envelope = {"session_id": "", "agent": SERVICES[service.role], "run_id": None, "seq": at + len(found)}
        found.append({"type": kind, "at": at, **envelope, "data": data})
    return found


def _place(service: ServiceInfo) -> tuple[str, str]:
    """What stays the same when a service is restarted; there is one supervisor, wherever it is."""
    return service.role, "" if service.role == "supervisor" else service.node_id


class Fleet:
    """The cluster at a glance: one snapshot for all who look.

    Attributes:
        snapshot: the latest, as JSON has it; None before the first.
        version: rises with each.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._rates = Rates()
        self._cursors: dict[str, int] | None = None
        self._services: list[ServiceInfo] = []
        self._services_at = 0
        self._services_problem: Wire | None = None
        self._totals = Totals(0, {})
        self._working = Working([], {})
        self._as_of = 0
        self._problem: Wire | None = None
        self.snapshot: Wire | None = None
        self.version = 0
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Refresh until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._often())
            group.create_task(self._every_few_seconds())

    async def once(self) -> Wire:
        """One complete snapshot."""
        await self._look_at_services()
        await self._look_at_totals()
        await self.look()
        assert self.snapshot is not None
        return self.snapshot

    async def newer(self, version: int) -> tuple[int, Wire]:
        """The next snapshot after a version, or the latest if that is newer; with its own version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version > version)
            assert self.snapshot is not None
            return self.version, self.snapshot

    async def _often(self) -> None:
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(REFRESH_SECONDS, SHARE * (time.monotonic() - began)))

    async def _every_few_seconds(self) -> None:
        counted = -TOTALS_SECONDS
        while True:
            await self._look_at_services()
            if time.monotonic() - counted >= TOTALS_SECONDS:
                counted = time.monotonic()
                await self._look_at_totals()
            await asyncio.sleep(SERVICES_SECONDS)

    async def _look_at_services(self) -> None:
        """Slow where the supervisor is being restarted, so that it holds up nothing else."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await self._source.services()
            self._rates.incidents += service_incidents(self._services, found, _now())
            self._services, self._services_at, self._services_problem = found, _now(), None
        except Exception as error:
            self._services_problem = problem_of(error)

    async def _look_at_totals(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self._totals = await self._source.read(Totals, "totals")
        except Exception as error:
            log.info("the sessions can't be counted: %s", problem_of(error)["message"])

    async def look(self) -> None:
        """Refresh the snapshot; what can't be had stays as it was, beside the `problem`."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self._working = await self._source.read(Working, "working", limit=ROWS)
                news = await self._source.read(Activity, "activity", self._cursors)
            self._cursors = news.cursors
            self._rates.take(news.events)
            self._as_of, self._problem = _now(), None
        except Exception as error:
            self._problem = problem_of(error)
        snapshot = {
            "at": _now(),
            "as_of": self._as_of,
            "problem": self._problem,
            "services": packed(self._services),
            "services_at": self._services_at,
            "services_problem": self._services_problem,
            "totals": packed(self._totals),
            "statuses": self._working.statuses,
            "sessions": in_trees(self._working.rows),
            "rates": self._rates.per_minute(_now()),
            "incidents": list(self._rates.incidents)[::-1],
        }
        async with self._changed:
            self.snapshot, self.version = snapshot, self.version + 1
            self._changed.notify_all()


def _now() -> int:
    return time.time_ns() // 1_000
