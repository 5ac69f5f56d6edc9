"""What clients ask for is done once, and nothing is done that none of them has asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.events import RunAccepted
from understudy.store.db.statements import RUN

if TYPE_CHECKING:
    from understudy.store.transaction import Transaction

    from .scheduler import Process
    from .world import World

Request = tuple[str, str]
"""Whom it concerns (nobody: the whole namespace), and its id."""


class Requested:
    """Counts what requests with an id have done, and compares runs with what was sent.

    A process has one journal, and that one transaction at a time: what is done in it counts when it is committed.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._doing: dict[Process, dict[Request, int]] = {}
        self._done: Counter[Request] = Counter()
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
        """It is committed. Whether one that was lost is committed as well is told by the row that it left."""
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
