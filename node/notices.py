"""What follows from a commit, here or at another node, for those it concerns."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from understudy.protocol import News
from understudy.records import ActivationId, Cancelled, Interrupted, Unwanted
from understudy.store.db.session_row import ActiveSession
from understudy.store.journal import Committed
from understudy.store.reads import queries

from .basis import NodeBasis
from .calls import Calls
from .claims import Claims
from .commands import Commands
from .feed import Feed
from .frames import Frames
from .interrupts import Interrupts
from .timers import Timers

MOST_UNREPORTED = 1_000
"""So many sessions are remembered that were written before it was known which nodes there are; a sweep finds others."""

Tell = Callable[[str, News], Coroutine[Any, Any, None]]
"""Tells the service of a node what another did to its sessions (`Notices.notice`). May get lost."""


async def alone(_node_id: str, _news: News) -> None:
    """The `Tell` of a service that is the only one."""


class Notices:
    """Has everybody act on what was committed: at once here, by a notice at the homes of other sessions.

    Args:
        sweep: looks for everything that can go on.
    """

    def __init__(
        self, node: NodeBasis, frames: Frames, calls: Calls, claims: Claims, interrupts: Interrupts, feed: Feed,
        timers: Timers, commands: Commands, *, tell: Tell, sweep: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:  # fmt: skip
        self._node = node
        self._frames = frames
        self._calls = calls
        self._claims = claims
        self._interrupts = interrupts
        self._feed = feed
        self._timers = timers
        self._commands = commands
        self._tell = tell
        self._sweep = sweep
        self._unreported: dict[str, None] = {}

    def committed(self, committed: Committed) -> None:
        """A transaction of this service was committed."""
        written = {session_id: (before, row.seq) for session_id, (before, row) in committed.written.items()}
        self._feed.publish(committed.events, written)
        if not self._node.homes.nodes and len(self._unreported) < MOST_UNREPORTED:
            self._unreported.update(dict.fromkeys(committed.written))
        for node_id, news in self._by_home(committed).items():
            self._tell_home(node_id, news)
        self._condemn(committed.killed)
        self._interrupt(committed.interrupted)
        self.act(committed.cancelled, committed.woken)
        for session_id, (_, row) in committed.written.items():
            if not row.active:  # no frame may ever come for it and find that it has ended
                self._frames.paging.remove(session_id)
        self._timers.note(committed.timers.items())
        self._commands.note(committed.commands)
        homes = {session_id: committed.written[session_id][1].node_id for session_id in committed.unwanted}
        here = [session_id for session_id, node_id in homes.items() if not self._node.homes.elsewhere(node_id)]
        self._cancel({session_id: committed.unwanted[session_id] for session_id in here})
        if committed.repeated:  # what the try before this one changed was not reported: look everywhere
            self._feed.forget_all()
            self._node.spawn_task(self._sweep())
        self._frames.dispatch()

    async def notice(self, news: News) -> None:
        """Another node service wrote to sessions at home here: act as if it had been this one.

        A notice that gets lost costs time only: the sweep finds what it would have reported.
        """
        self._condemn(news.killed)
        self._interrupt(news.interrupted)
        self.act(news.cancelled, {})
        self._cancel(news.unwanted)
        self._feed.forget(news.sessions)
        self._node.spawn_task(self._timers.look())
        self._commands.look_if_needed()
        queued = self._frames.paging.ready.keys() & set(news.sessions)
        rows = await self._node.reading.active([self._node.config.node_id], session_ids=news.sessions)
        for session_id in queued.difference(row.session_id for row in rows):
            self._frames.paging.remove(session_id)
        woken = {row.session_id: row for row in rows if self._calls.is_ready(row)}
        self.act(cancelled(rows), woken)  # earlier news may have got lost
        self._frames.dispatch()

    def act(self, to_cancel: dict[str, Cancelled], woken: Mapping[str, ActiveSession]) -> None:
        """Interrupt what was cancelled, and let what was woken go on.

        What a notice is about may be over: the name of its run keeps others from being interrupted for it.
        """
        for session_id, (run_id, incarnation, epoch, reason) in to_cancel.items():
            self._interrupts.cancel(ActivationId(session_id, incarnation, epoch), run_id, reason or "cancelled")
            # Also of a run that was ended by force: it waits for nothing any more.
            self._calls.abort(session_id, incarnation, run_id)
            if session_id in self._claims:  # its call goes out only after this commit is reported
                self._claims.cancelled[session_id].add(run_id)
        for session_id, row in woken.items():
            if session_id in self._claims:
                self._claims.miss(row)
            else:
                self.wake(row)

    def _interrupt(self, interrupted: dict[str, Interrupted]) -> None:
        """Have what these runs are at not go on. Where this is not heard, they go on when it has ended."""
        for session_id, (run_id, incarnation, epoch, round_number) in interrupted.items():
            self._interrupts.interrupt(ActivationId(session_id, incarnation, epoch), run_id, round_number)
            self._calls.abort(session_id, incarnation, run_id, round_number)
            if session_id in self._claims:  # its call goes out only after this commit is reported
                self._claims.interrupted[session_id].add((run_id, round_number))

    def _cancel(self, unwanted: dict[str, Unwanted]) -> None:
        """Have endpoints end these responses, once the calls that are here are aborted: a gateway that has one of them
        would take its end for a failure, and ask again."""
        for session_id, (run_id, incarnation, response) in unwanted.items():
            self._calls.abort(session_id, incarnation, run_id)
            self._calls.cancel(response)

    def wake(self, row: ActiveSession) -> None:
        """Let a session go on, if it is at home here."""
        if not self._node.homes.elsewhere(row.node_id):
            self._frames.wake(row)

    async def tell_homes(self) -> None:
        """Once it is known which nodes there are: tell them what was written here before to sessions that are at home
        there, and leave those to them."""
        unreported = list(self._unreported)
        if not unreported:
            return
        found: dict[str, News] = {}
        for session_id, (node_id, _) in (await self._node.reading.query(queries.homes, unreported)).items():
            if self._node.homes.elsewhere(node_id):
                found.setdefault(node_id, News()).sessions.append(session_id)
                self._frames.paging.remove(session_id)
        for session_id in unreported:
            self._unreported.pop(session_id, None)
        for node_id, news in found.items():
            self._tell_home(node_id, news)

    def _tell_home(self, node_id: str, news: News) -> None:
        self._feed.leave(news.sessions)
        self._node.spawn_task(self._tell(node_id, news))

    def _by_home(self, committed: Committed) -> dict[str, News]:
        """What was done to sessions at home elsewhere: their own services must hear of it."""
        found: dict[str, News] = {}
        killed = {activation.session_id: (frame_id, activation) for frame_id, activation in committed.killed.items()}
        for session_id, (_, row) in committed.written.items():
            if not self._node.homes.elsewhere(row.node_id):
                continue
            news = found.setdefault(row.node_id, News())
            news.sessions.append(session_id)
            if session_id in committed.cancelled:
                news.cancelled[session_id] = committed.cancelled[session_id]
            if session_id in committed.unwanted:
                news.unwanted[session_id] = committed.unwanted[session_id]
            if session_id in committed.interrupted:
                news.interrupted[session_id] = committed.interrupted[session_id]
            if session_id in killed:
                frame_id, activation = killed[session_id]
                news.killed[frame_id] = activation
        for node_id in committed.commands:
            if self._node.homes.elsewhere(node_id):
                found.setdefault(node_id, News())
        return found

    def _condemn(self, killed: Mapping[str, ActivationId]) -> None:
        for frame_id, activation in killed.items():
            self._frames.condemn(frame_id, activation)


def cancelled(rows: list[ActiveSession]) -> dict[str, Cancelled]:
    """The current runs of the sessions that were asked to end."""
    return {
        row.session_id: Cancelled(row.run_id, row.incarnation, row.epoch, row.cancel_reason)
        for row in rows
        if row.run_id is not None and row.cancel_reason is not None
    }
