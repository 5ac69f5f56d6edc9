"""Node service and session actors as parts of this process, and the supervisor's port to them. No Ray."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Container, Sequence
from typing import Any, NoReturn

from understudy.actors.frame import Frame
from understudy.actors.gateway import Gateway
from understudy.errors import ServiceGone
from understudy.placement import DEFAULT

from .node_calls import NodeCalls
from .node_service import NodeConfig, NodeService
from .remote_node import RemoteNode
from .requests import Requests

NODE = "local"

Point = Callable[[str, "LocalFrame"], None]
"""Told that a session actor is at a point of its work, where it can die."""


class LocalNode(NodeCalls):
    """A node service in this process."""

    def __init__(self, config: NodeConfig, gateway: Gateway) -> None:
        super().__init__()
        self.service = NodeService(config, gateway, _prepared)
        self._asked = Requests(self.service)

    async def _node(self) -> NodeService:
        return self.service

    async def _requests(self) -> Requests:
        return self._asked

    async def profiles(self) -> list[Any]:
        """The gateway has them already."""
        return []

    async def close(self) -> None:
        """Stop the service; calls that have no answer get none."""
        await self.service.close()
        await self._answering.close()

    def health(self) -> dict[str, float]:
        """See `understudy.supervisor.ports.NodeHandle.probe`."""
        journal = self.service.journal
        return {"silent": 0.0, "journal": journal.silence(), "failing": journal.failing()}


async def _prepared(_profile: str) -> None:
    return None


class LocalNodeHandle:
    """The node service, as the supervisor sees it."""

    node_id = NODE

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self.pid = os.getpid()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of its methods."""
        return await getattr(self._node, method)(*arguments)

    async def meet(self) -> None:
        """It is always the same process."""

    async def watch(self) -> None:
        """It ends with this process."""
        await asyncio.Event().wait()

    async def probe(self) -> dict[str, float]:
        """See `LocalNode.health`."""
        return self._node.health()


class LocalFrame(RemoteNode):
    """A session actor as a part of this process: for the supervisor a frame, for the frame its node service.

    When it is killed, nothing that it says is heard any more, and its task is cancelled. What cancellation can't end
    goes on, as a tool in a thread does; of that nothing is heard either.

    Attributes:
        session_id: what it is at; empty while it has no session.
    """

    def __init__(
        self, node: LocalNode, frame_id: str, placement: str, unpickle: Callable[[bytes], Any], at_point: Point
    ) -> None:
        super().__init__(self._attempt_here)
        self.frame_id = frame_id
        self.node_id = NODE
        self.placement = placement
        self.pid = os.getpid()
        self.dead = False
        self.session_id = ""
        self._node = node
        self._at_point = at_point
        self._frame = Frame(self, frame_id, NODE, placement, unpickle=unpickle, alone=False)
        self._work = asyncio.get_running_loop().create_task(self._frame.run())

    async def watch(self) -> str:
        """See `understudy.supervisor.ports.FrameHandle.watch`."""
        await asyncio.wait({self._work})
        if self.dead or self._work.cancelled():
            raise ServiceGone("it was killed", details={"cause": "process_died"})
        self._work.result()
        return "exit"

    async def probe(self) -> dict[str, float]:
        """See `Frame.health`."""
        return self._frame.health()

    def kill(self) -> None:
        """End it as SIGKILL would end its process, as far as a process can do so with a part of itself."""
        self.dead = True
        self._work.cancel()

    async def end(self) -> None:
        """The same, and wait until it has ended, for a second at most."""
        self.kill()
        await asyncio.wait({self._work}, timeout=1.0)

    async def _attempt_here(self, call_id: str, method: str, *arguments: Any) -> Any:
        # What is said is copied, as between processes: else a change in one would be seen in the other.
        self._pass(f"before {method}", method)
        await self._alive()
        found = await self._node.repeated(call_id, method, *json.loads(json.dumps(arguments)))
        if method == "step":
            self.session_id = found.get("session_id", "")
        self._pass(f"reply to {method}", method)
        await self._alive()
        return found if isinstance(found, bytes) else json.loads(json.dumps(found))

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

    def __init__(self, node: LocalNode, unpickle: Callable[[bytes], Any], at_point: Point) -> None:
        self._node = node
        self._unpickle = unpickle
        self._at_point = at_point
        self._handle = LocalNodeHandle(node)
        self.alive: dict[str, LocalFrame] = {}

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
        frame = LocalFrame(self._node, frame_id, placement or DEFAULT, self._unpickle, self._at_point)
        self.alive[frame_id] = frame
        return frame

    async def kill(self, _node_id: str, _pid: int, handle: Any) -> bool:
        """End a frame; the service is not ended."""
        if isinstance(handle, LocalFrame):
            self.alive.pop(handle.frame_id, None)
            await handle.end()
        return True

    def abandon(self, _node: Any, frames: Sequence[Any]) -> None:
        """Forget frames."""
        for frame in frames:
            frame.kill()

    def cpus(self, _node_id: str) -> float:
        """Of this machine."""
        return float(os.cpu_count() or 1)

    def holder_is_dead(self, holder: str) -> bool:
        """Whoever used the store before in this process has ended."""
        return holder.startswith(f"{NODE}/")

    async def stop(self) -> None:
        """End all frames."""
        frames, self.alive = list(self.alive.values()), {}
        await asyncio.gather(*(frame.end() for frame in frames))
