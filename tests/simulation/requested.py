"""What clients ask for is done once, and nothing is done that none of them has asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.events import (
    CancelRequested,
    Event,
    InputReceived,
    RunAccepted,
    SessionClosed,
    SessionResumed,
)
from understudy.store.db.statements import RUN
from understudy.store.operations.questions import ABORTED

if TYPE_CHECKING:
    from understudy.store.transaction import Transaction

    from .scheduler import Process
    from .world import World

Request = tuple[str, str]
"""Whom it concerns (nobody: the whole namespace), and its id."""

NAMING: dict[str, tuple[type[Event], ...]] = {
    "send": (RunAccepted,),
    "steer": (InputReceived,),
    "cancel": (CancelRequested,),
    "answer": (InputReceived,),
    "decide": (InputReceived,),
    "abort_pending": (InputReceived,),
    "close": (SessionClosed, CancelRequested),
    "resume": (SessionResumed,),
}
"""Requests whose events say who asked."""

OF_PEOPLE = ("cancel ", "a client ", "the plan says so")
"""With what the reasons of clients begin, and no others."""


class Requested:
    """Counts what requests with an id have done, compares runs with what was sent, and events with who asked.

    Every request has a person of its own, so that an event's name tells which request it is of.

    A process has one journal, and that one transaction at a time: what is done in it counts when it is committed.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._doing: dict[Process, dict[Request, int]] = {}
        self._done: Counter[Request] = Counter()
        self._people: dict[str, tuple[str, str]] = {}
        # Where a clock goes forward by hours, requests are forgotten that may be repeated yet.
        self._remembered = not any(fault.kind == "clock_step" for fault in world.plan.faults)

    def watched(self, once: Callable[..., Any]) -> Callable[..., Any]:
        """`requests.once`; the operations that it does are counted."""

        def counting(tx: Transaction, session_id: str, request_id: str, operation: Callable[[Transaction], Any]) -> Any:
            def counted(tx: Transaction) -> Any:
                result = operation(tx)
                self._doing[self._world.scheduler.current][session_id, request_id] = tx.now
                return result

            return once(tx, session_id, request_id, counted)

        return counting

    def begin(self) -> None:
        """A process begins a transaction; what it had done in one before that is done, or not."""
        self._doing[self._world.scheduler.current] = {}

    def committed(self) -> None:
        """It is committed. The row that a lost one left shows whether it is committed as well."""
        for request, at in self._doing[self._world.scheduler.current].items():
            self._done[request] += 1
            of_it = f"session_id = '{request[0]}' AND request_id = '{request[1]}'"
            rows = self._world.committed(f"SELECT created_at FROM request WHERE {of_it}")
            lost = sum(row[0] != at for row in rows) if self._done[request] == 1 else 0
            if self._done[request] + lost > 1 and self._remembered:
                self._world.invariants.violated(f"the request {request} was done {self._done[request] + lost} times")

    def accepted(self, event: RunAccepted) -> None:
        """An input of a client is accepted: the session's client has sent it, to this session and no earlier one."""
        client = next((one for one in self._world.clients if one.session_id == event.session_id), None)
        if client is None or event.source != "client":
            return
        run = (RUN.c.session_id == event.session_id, RUN.c.run_id == event.run_id)
        with self._world.store.committed() as connection:
            for content in connection.execute(select(RUN.c.content).where(*run)).scalars():
                if client.sent.get(event.run_id or "") != content:
                    text = f"run {event.run_id} of {event.session_id} was accepted, and not sent to this session"
                    self._world.invariants.violated(text)

    def asks(self, method: str, session_id: str) -> str:
        """Who asks for this: somebody new."""
        name = f"person {len(self._people)}"
        self._people[name] = method, session_id
        return name

    def named(self, event: Event) -> None:
        """An event says who asked, if somebody did, and nobody else."""
        if not isinstance(event, RunAccepted | CancelRequested | InputReceived | SessionClosed | SessionResumed):
            return
        method, session_id = self._people.get(event.by, ("", ""))
        what = f"{event.type} {event.seq} of {event.session_id} names {event.by!r}"
        if not event.by:
            if self._is_of_somebody(event):
                self._world.invariants.violated(f"{what}, and somebody has asked for it")
        elif type(event) not in NAMING.get(method, ()):
            self._world.invariants.violated(f"{what}, who has asked for {method or 'nothing'}")
        elif event.session_id != session_id and isinstance(event, RunAccepted | InputReceived | SessionResumed):
            self._world.invariants.violated(f"{what}, who has asked for {method} of {session_id}")

    @staticmethod
    def _is_of_somebody(event: RunAccepted | CancelRequested | InputReceived | SessionClosed | SessionResumed) -> bool:
        match event:
            case RunAccepted():
                return event.source == "client"
            case CancelRequested() | SessionClosed():
                return event.reason.startswith(OF_PEOPLE)
            case InputReceived():
                return not event.timed_out and event.decision != ABORTED["decision"]
        return True
