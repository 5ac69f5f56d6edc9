"""Session actors as parts of this process, and the supervisor's port to them and to the node service. No Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container, Sequence
from typing import Any, NoReturn

from understudy.actors.frame import Frame
from understudy.errors import ServiceGone
from understudy.identifiers import new_identifier
from understudy.node.node_calls import NodeCalls
from understudy.transport.ends import is_gone, process_identity
from understudy.transport.remote_node import RemoteNode
from understudy.transport.repeating import SUPERVISOR_PATIENCE, Joining
from understudy.transport.signatures import signature_of
from understudy.waiting import retrieve_error

from ..client.background import LoopThread
from .local_node import LocalNode

NODE = "local"
THREADS = "understudy-local"
"""What threads of local clusters are called, or begin with."""

END_SECONDS = 1.0
"""What was cancelled and goes on is waited for no longer."""

_live: set[str] = set()
"""The clusters of this process that have not been closed, by what they are called in their stores."""

Point = Callable[[str, "LocalFrame"], None]
"""Called when a session actor is at a point of its work, where it can die."""


class LocalNodeHandle:
    """The node service, as the supervisor sees it."""

    node_id = NODE

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._calls = Joining(SUPERVISOR_PATIENCE)
        self.pid = os.getpid()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of its methods; repeated while another service takes the place of one that was killed."""
        found = await self._calls.call(
            lambda call_id: self._node.repeated(call_id, method, *arguments), method, arguments
        )
        return signature_of(getattr(NodeCalls, method)).result(found)

    async def meet(self) -> None:
        """It is always the same process."""

    async def watch(self) -> None:
        """Raise `ServiceGone` when it was killed."""
        await self._node.repeated("", "watch")

    async def probe(self) -> dict[str, float]:
        """See `LocalNode.health`."""
        return self._node.health()


class LocalFrame(RemoteNode):
    """A session actor as a part of this process, with an event loop and a thread of its own: for the supervisor a
    frame, for the frame its node service. It is made, watched and probed on the services' loop.

    When it is killed, nothing that it says is heard any more, its session goes on in another at once, and its task is
    cancelled. So, other than with SIGKILL, a tool's `finally` runs; and what cancellation can't end goes on, as a tool
    in a thread does. Of neither anything is heard.

    Attributes:
        session_id: what it is at; empty while it has no session.
    """

    def __init__(
        self,
        node: LocalNode,
        services: LoopThread,
        frame_id: str,
        placement: str,
        unpickle: Callable[[bytes], Any],
        at_point: Point,
    ) -> None:
        super().__init__(self._attempt_here)
        self.frame_id = frame_id
        self.node_id = NODE
        self.placement = placement
        self.pid = os.getpid()
        self.dead = False
        self.session_id = ""
        self._node = node
        self._services = services
        self._at_point = at_point
        self._killed = asyncio.Event()
        self._thread = LoopThread(f"{THREADS}-{frame_id}")
        self._frame = Frame(self, frame_id, NODE, placement, unpickle=unpickle, alone=False)
        self._work = self._thread.submit(self._frame.run())

    async def watch(self) -> str:
        """See `understudy.supervisor.ports.FrameHandle.watch`."""
        work: asyncio.Future[Any] = asyncio.shield(asyncio.wrap_future(self._work))
        work.add_done_callback(retrieve_error)  # it may end long after its death was reported
        killed: asyncio.Future[Any] = asyncio.ensure_future(self._killed.wait())
        try:
            await asyncio.wait({work, killed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            killed.cancel()
        if self.dead or self._work.cancelled():
            raise ServiceGone("it was killed", details={"cause": "process_died"})
        self._work.result()
        return "exit"

    async def probe(self) -> dict[str, float]:
        """See `Frame.health`."""
        return self._frame.health()

    def kill(self) -> None:
        """End it as SIGKILL would end its process, as far as a process can do so with a part of itself. From any
        thread."""
        self.dead = True
        self._services.loop.call_soon_threadsafe(self._killed.set)
        self._work.cancel()

    async def end(self) -> None:
        """The same, and wait until it has ended, but not for ever: one that blocks keeps its thread."""
        self.kill()
        await asyncio.to_thread(self._thread.stop, END_SECONDS)

    async def _attempt_here(self, call_id: str, method: str, *arguments: Any) -> Any:
        self._pass(f"before {method}", method)
        await self._alive()
        call = self._node.repeated(call_id, method, *arguments)
        found = await asyncio.wrap_future(self._services.submit(call))
        if method == "step":
            self.session_id = found.get("session_id", "")
        self._pass(f"reply to {method}", method)
        await self._alive()
        return found

    def _pass(self, label: str, method: str) -> None:
        # What a clock calls is no progress of the session, nor is waiting for one.
        if method != "interrupted" and self.session_id and not self.dead:
            self._at_point(label, self)

    async def _alive(self) -> None:
        if self.dead:
            await asyncio.Event().wait()  # until the cancellation comes

    async def _leave(self) -> NoReturn:
        self.kill()
        await asyncio.Event().wait()
        raise AssertionError


class LocalMachinery:
    """What the supervisor needs of a cluster (`understudy.supervisor.ports.Machinery`), in this process."""

    def __init__(
        self, node: LocalNode, services: LoopThread, unpickle: Callable[[bytes], Any], at_point: Point
    ) -> None:
        self._node = node
        self._services = services
        self._unpickle = unpickle
        self._at_point = at_point
        self._handle = LocalNodeHandle(node)
        self._made: list[LocalFrame] = []
        self.alive: dict[str, LocalFrame] = {}
        self.holder = f"{NODE}/{new_identifier()}/{process_identity(os.getpid())}"
        _live.add(self.holder)

    async def node_ids(self) -> list[str]:
        """The one."""
        return [NODE]

    async def notices(self) -> dict[str, float | None]:
        """Nobody will end it."""
        return {}

    async def node_service(self, _node_id: str) -> LocalNodeHandle:
        """The one."""
        return self._handle

    async def frames(self, _node_id: str, known: Container[str] = ()) -> Sequence[LocalFrame]:
        """Those that live."""
        return [frame for frame_id, frame in self.alive.items() if frame_id not in known]

    async def frame_ids(self, _node_id: str) -> set[str]:
        """Those that live."""
        return set(self.alive)

    async def create_frame(self, _node: Any, frame_id: str, placement: str) -> LocalFrame:
        """Start one, whatever it should have for its own: it has what this process has."""
        frame = LocalFrame(self._node, self._services, frame_id, placement, self._unpickle, self._at_point)
        self.alive[frame_id] = frame
        self._made.append(frame)
        return frame

    async def kill(self, _node_id: str, _pid: int, handle: Any) -> bool:
        """End a frame; the service is not ended."""
        if isinstance(handle, LocalFrame):
            self.alive.pop(handle.frame_id, None)
            handle.kill()
        return True

    def abandon(self, _node: Any, frames: Sequence[Any]) -> None:
        """Forget frames."""
        for frame in frames:
            frame.kill()

    async def request_nodes(self, _cpus: list[float]) -> None:
        """There will be no other."""

    def cpus(self, _node_id: str) -> float:
        """Of this machine."""
        return float(os.cpu_count() or 1)

    def holder_is_dead(self, holder: str) -> bool:
        """Whether it was a local cluster that has been closed, or whose process has ended."""
        if not holder.startswith(f"{NODE}/"):
            return False
        process = holder.rpartition("/")[2]
        return holder not in _live if process == process_identity(os.getpid()) else is_gone(process)

    async def stop(self) -> None:
        """End all frames, and what is left of those that were killed."""
        frames, self._made, self.alive = self._made, [], {}
        await asyncio.gather(*(frame.end() for frame in frames))

    def forget(self) -> None:
        """The store may be taken from now on."""
        _live.discard(self.holder)
