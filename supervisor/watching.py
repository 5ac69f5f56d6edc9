"""Watching every process: what dies is reported to its node, what hangs is killed first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from understudy.errors import UnderstudyError
from understudy.tasks import Tasks

from .known import Known, Node
from .ports import FrameHandle, Machinery, NodeReport
from .probing import frame_hangs, node_hangs

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 1.0
"""How long the kill of a silent frame waits for its node's service to hear why."""

REPEAT_SECONDS = 0.5
PROBE_SECONDS = 2.0


class Watching:
    """Awaits the end of frames and node services, and looks whether they hang.

    Guarantees: sessions are resumed only after their process is known to be gone; no wait for one process ages another.

    Args:
        take_over: tells a node service that was restarted what it needs.
    """

    def __init__(
        self, machinery: Machinery, known: Known, tasks: Tasks, take_over: Callable[[Node], Awaitable[None]]
    ) -> None:
        self._machinery = machinery
        self._known = known
        self._tasks = tasks
        self._take_over = take_over

    async def watch_frame(self, frame: FrameHandle, term: int, patience: float | None = None) -> None:
        """Await a frame's end, for `patience` seconds if that is given; then have its session resumed."""
        self._known.well.setdefault(frame.frame_id, time.monotonic())
        try:
            async with asyncio.timeout(patience) as limit:
                cause = await frame.watch()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if limit.expired():
                return
            log.info("frame %s (pid %d) died: %s", frame.frame_id, frame.pid, error)
            cause = getattr(error, "details", {}).get("cause", "process_died")
        await self._frame_ended(frame, term, cause)

    async def _frame_ended(self, frame: FrameHandle, term: int, cause: str) -> None:
        """Have the session of a frame that has ended resumed, unless that was done, or is another supervisor's."""
        if term != self._known.term or self._known.frames.pop(frame.frame_id, None) is None:
            return
        seen = self._known.well.pop(frame.frame_id, time.monotonic())
        if frame.node_id in self._known.nodes:
            self._known.nodes[frame.node_id].stock.died(frame.placement, cause, time.monotonic())
        # Also where Ray reported a death: a loop that failed leaves a process, and a session is resumed only after it.
        await self._end_frame(term, frame.node_id, frame.frame_id, frame.pid, frame, cause, seen)

    async def _end_frame(
        self, term: int, node_id: str, frame_id: str, pid: int, frame: FrameHandle | None, cause: str, seen: float
    ) -> None:  # fmt: skip
        """End what is left of a frame's process, then have its session resumed."""
        home = self._known.nodes.get(node_id)
        if home is not None:
            home.ending.add(frame_id)
        try:
            gone = await self._machinery.kill(node_id, pid, frame)
            # Its node's service must hear of it, and may have just been restarted itself, or be without its store.
            while (node := self._known.nodes.get(node_id)) is not None and self._known.serves(node, term):
                try:
                    silence = time.monotonic() - seen if seen else 0.0
                    await node.handle.call("frame_died", frame_id, cause, silence, not gone)
                    return
                except UnderstudyError as error:
                    log.warning("the death of frame %s is reported again: %s", frame_id, error)
                    await asyncio.sleep(REPEAT_SECONDS)
        finally:
            if home is not None:
                home.ending.discard(frame_id)

    def heed(self, node: Node, report: NodeReport) -> None:
        """What a node's service says of its frames."""
        if report.named.keys() - self._known.frames_of(node):
            self._tasks.alone(("strangers", node.handle.node_id), self._meet_strangers, node, report.named)
        for frame_id in report.condemned:
            self._tasks.alone(f"kill {frame_id}", self._kill_frame, frame_id, "its run was ended by force")

    async def _meet_strangers(self, node: Node, named: dict[str, int]) -> None:
        """A node's service names frames that are not known: a supervisor that was overtaken made them, they were not
        seen to start, or they died unnoticed.

        Those that live are watched from now on; of the others the service hears that they are gone. They are looked for
        only after they were named, so that one which is not found did live, and does no more.
        """
        term, known = self._known.term, self._known.frames_of(node)
        found = await self._machinery.frames(node.handle.node_id, known)
        listed = await self._machinery.frame_ids(node.handle.node_id)
        if not self._known.serves(node, term):
            return
        for frame in found:
            if frame.frame_id not in self._known.frames_of(node):
                self._known.frames[frame.frame_id] = frame
                self._tasks.spawn(self.watch_frame(frame, term))
        # One that was known before was not looked for; it may have become unknown since.
        for frame_id in sorted(named.keys() - listed - known - self._known.frames_of(node)):
            ended = self._end_frame(term, node.handle.node_id, frame_id, named[frame_id], None, "process_died", 0.0)
            self._tasks.spawn(ended)

    async def watch_node(self, node: Node, term: int) -> None:
        """Await a node service's death; Ray restarts it, and it must be given what it needs."""
        while self._known.serves(node, term):
            try:
                await node.handle.watch()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if self._known.serves(node, term):
                    log.warning("node service %s died: %s", node.handle.node_id[:8], error)
            if not self._known.serves(node, term) or self._known.stopped:
                return
            try:
                await self._take_over(node)
            except Exception as error:
                log.warning("node service %s is not back yet: %s", node.handle.node_id[:8], error)
                await asyncio.sleep(0.5)

    async def probing(self, term: int) -> None:
        """Find what hangs: a process that does not answer, or one that answers but does not progress."""
        while term == self._known.term:
            await asyncio.sleep(PROBE_SECONDS)
            for frame in self._known.frames.values():
                self._tasks.alone(frame, self._probe_frame, frame)
            for node in self._known.nodes.values():
                self._tasks.alone(node.handle, self._probe_node, node)

    async def _probe_frame(self, frame: FrameHandle) -> None:
        try:
            reason = await frame_hangs(frame)
        except Exception:  # its watch tells of a death; unless it was lost itself, then another one fails at once
            if frame.frame_id in self._known.frames:  # unless that is lost as well: the next probe tries again
                self._tasks.alone(("watch", frame.frame_id), self.watch_frame, frame, self._known.term, PROBE_SECONDS)
            return
        if reason:
            await self._announce(frame)
            await self._kill_frame(frame.frame_id, reason)
        elif frame.frame_id in self._known.well:
            self._known.well[frame.frame_id] = time.monotonic()

    async def _announce(self, frame: FrameHandle) -> None:
        """Say since when a frame is silent. Its node's service hears of its end from its socket, before this supervisor
        can tell: only what was said before the kill gets into the event."""
        node, seen = self._known.nodes.get(frame.node_id), self._known.well.get(frame.frame_id)
        if node is None or seen is None:
            return
        with suppress(TimeoutError, UnderstudyError):
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                await node.handle.call("frame_hangs", frame.frame_id, time.monotonic() - seen)

    async def _kill_frame(self, frame_id: str, reason: str) -> None:
        frame = self._known.frames.get(frame_id)
        if frame is not None:
            log.warning("frame %s (pid %d) is killed: %s", frame_id, frame.pid, reason)
            term = self._known.term
            if await self._machinery.kill(frame.node_id, frame.pid, frame):
                # Its watch may never tell: a process that a tool has forked keeps Ray's connections open.
                await self._frame_ended(frame, term, "process_died")

    async def _probe_node(self, node: Node) -> None:
        try:
            reason = await node_hangs(node.handle)
        except Exception:  # its watch tells of a death; one that is silent for long is lost
            return
        if not reason:
            node.heard = time.monotonic()
            return
        log.warning("node service %s (pid %d) hangs: %s", node.handle.node_id[:8], node.handle.pid, reason)
        await self._machinery.kill(node.handle.node_id, node.handle.pid, node.handle)
