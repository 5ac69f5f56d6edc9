"""What a node service's process answers: to frames, to clients, to the supervisor and to other nodes' services.

The process itself is Ray's actor (`services.NodeActor`), a simulated one, or a part of the user's (`local`). No Ray,
and light: frames import it.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from understudy.commands import CommandOutput, StartCommand
from understudy.protocol import Exit, Judged, News, StepCall, Work
from understudy.rates import RateReport, RateShares
from understudy.reads import Note
from understudy.records import Ack, ActivationId, Batch
from understudy.supervisor.ports import DrainReport, NodeReport, TakenOver
from understudy.tool_hosting import ServerAnswer, ServerCall, ServerTools
from understudy.tool_tasks import TaskNews, ToolTask
from understudy.transport.serving import Serving
from understudy.transport.signatures import signature_of

if TYPE_CHECKING:
    from .node_service import NodeService
    from .requests import Requests


class NodeCalls(ABC):
    """Each call waits until the service has started; then it is done by the part of the service that it concerns."""

    def __init__(self) -> None:
        self._serving = Serving(NodeCalls, self)

    @abstractmethod
    async def _node(self) -> NodeService:
        """The started service. Raises what kept it from starting."""

    async def repeated(self, call_id: str, method: str, *arguments: Any) -> Any:
        """Any of the methods below, for a caller that repeats itself (`Repeating`); one that does not has no id.

        Args:
            arguments: as they arrive, and so is the result (`Serving`).

        Raises:
            InvalidInput: they are not what the method takes.
        """
        return await self._serving.answer(call_id, method, *arguments)

    # Frames.

    async def step(self, call: StepCall) -> Work | Exit:
        """See `understudy.ports.Node.step`."""
        return await (await self._node()).step(call)

    async def commit(self, frame_id: str, batch: Batch) -> Ack:
        """See `understudy.ports.Node.commit`."""
        return await (await self._node()).commit(frame_id, batch)

    async def reload(self, frame_id: str, activation: ActivationId) -> Work:
        """See `understudy.ports.Node.reload`."""
        return await (await self._node()).reload(frame_id, activation)

    async def interrupted(self, frame_id: str, activation: ActivationId, run_id: str, round_number: int) -> str:
        """See `understudy.ports.Node.interrupted`."""
        return await (await self._node()).interrupted(frame_id, activation, run_id, round_number)

    async def judge(self, frame_id: str, verdict: Judged) -> None:
        """See `understudy.ports.Node.judge`."""
        await (await self._node()).judge(frame_id, verdict)

    async def specification(self, frame_id: str, activation: ActivationId) -> dict[str, Any]:
        """See `understudy.ports.Node.specification`."""
        return await (await self._node()).specification(frame_id, activation)

    async def memory(self, frame_id: str, activation: ActivationId) -> list[Note]:
        """See `understudy.ports.Node.memory`."""
        return await (await self._node()).memory(frame_id, activation)

    async def blob(self, digest: str) -> bytes:
        """See `understudy.ports.Node.blob`; the supervisor asks for code as well."""
        return await (await self._node()).blob(digest)

    async def task_service(self, frame_id: str) -> str:
        """See `understudy.ports.Node.task_service`."""
        del frame_id  # the socket compares it with the one that the caller has
        return (await self._node()).tasks.service

    async def task(
        self, frame_id: str, activation: ActivationId, task: ToolTask, service: str, after: int | None
    ) -> TaskNews | None:
        """See `understudy.ports.Node.task`."""
        return await (await self._node()).tasks.run(frame_id, activation, task, service, after)

    async def end_task(self, frame_id: str, activation: ActivationId, call_id: str) -> None:
        """See `understudy.ports.Node.end_task`."""
        await (await self._node()).tasks.end(frame_id, activation, call_id)

    async def start_command(self, frame_id: str, activation: ActivationId, wanted: StartCommand) -> str:
        """See `understudy.ports.Node.start_command`."""
        return await (await self._node()).commands.start(frame_id, activation, wanted)

    async def read_command(
        self, frame_id: str, activation: ActivationId, job: str, after: int | None, wait: float
    ) -> CommandOutput:
        """See `understudy.ports.Node.read_command`."""
        return await (await self._node()).commands.read(frame_id, activation, job, after, wait)

    async def server_tools(self, frame_id: str, activation: ActivationId, server: str) -> ServerTools:
        """See `understudy.ports.Node.server_tools`."""
        return await (await self._node()).server_tools(frame_id, activation, server)

    async def tool_host(self, frame_id: str, activation: ActivationId) -> str:
        """See `understudy.ports.Node.tool_host`."""
        return await (await self._node()).tool_host(frame_id, activation)

    async def call_server(self, frame_id: str, activation: ActivationId, call: ServerCall) -> ServerAnswer:
        """See `understudy.ports.Node.call_server`."""
        return await (await self._node()).call_server(frame_id, activation, call)

    async def cancel_server_call(self, frame_id: str, activation: ActivationId, key: str, attempt: int) -> None:
        """See `understudy.ports.Node.cancel_server_call`."""
        await (await self._node()).cancel_server_call(frame_id, activation, key, attempt)

    # Clients, and other nodes' services.

    async def request(self, method: str, *arguments: Any) -> Any:
        """A client's request (`Requests`)."""
        function = getattr(await self._requests(), method)
        signature = signature_of(function.__func__)
        return signature.sent(await function(*signature.arguments(arguments)))

    async def _requests(self) -> Requests:
        from .requests import Requests  # which loads the store: here it is there already

        return Requests(await self._node())

    async def notice(self, news: News) -> None:
        """See `Notices.notice`."""
        await (await self._node()).notices.notice(news)

    # The supervisor.

    async def acquire(self, holder: str, lease: int, dead_holder: str, request_id: str) -> int:
        """See `Requests.acquire`."""
        return await (await self._requests()).acquire(holder, lease, dead_holder, request_id)

    async def take_over(self, generation: int, number: int, nodes: list[str]) -> TakenOver:
        """See `Takeover.run`."""
        return await (await self._node()).takeover.run(generation, number, nodes)

    async def frame_died(self, frame_id: str, cause: str, silence: float, may_live: bool) -> None:
        """See `Deaths.frame_died`."""
        await (await self._node()).deaths.frame_died(frame_id, cause, silence, may_live=may_live)

    async def frame_hangs(self, frame_id: str, silence: float) -> None:
        """See `Deaths.frame_hangs`."""
        (await self._node()).deaths.frame_hangs(frame_id, silence)

    async def unschedulable(self, failures: dict[str, str]) -> None:
        """Placements that no frame can be started for, and why."""
        (await self._node()).frames.supply.unschedulable = failures

    async def retire(self, leaving: dict[str, int]) -> None:
        """See `Supply.retire`."""
        await (await self._node()).frames.supply.retire(leaving)

    async def profiles(self) -> Any:
        """The model profiles that this process knows of itself. Profiles go as they are: Ray alone carries them."""
        return []

    async def register(self, profile: Any) -> None:
        """Learn a model profile."""
        await (await self._node()).register(profile)

    async def demand(self, timeout: float, cap: int = 0) -> NodeReport:
        """What the supervisor must know of the frames here, once that changes or the time is over (`Supply.demand`).

        Args:
            cap: so many actors this node may have, from now on; 0: as before.
        """
        node = await self._node()
        node.frames.supply.cap = cap or node.frames.supply.cap
        demand = await node.frames.supply.demand(timeout)
        drain = node.homes.drain if node.homes.is_drained else None
        frames = node.frames
        return NodeReport(
            await self.pid(), node.generation, node.homes.nodes,
            DrainReport(drain.reason, drain.finished_at > 0, bool(drain.stop)) if drain is not None else None, demand,
            list(frames.known.condemned), frames.named(), frames.supply.memory(), node.rates.report,
            stays=node.commands.any_at_work,
        )  # fmt: skip

    async def give(self, count: int, node_id: str, request_id: str) -> int:
        """See `Sharing.give`."""
        return await (await self._node()).sharing.give(count, node_id, request_id)

    async def share_rates(self, shares: RateShares) -> RateReport | None:
        """See `NodeRates.share`."""
        return await (await self._node()).rates.share(shares)

    @abstractmethod
    async def kill_process(self, pid: int) -> bool:
        """Make sure that a process of this node is gone; True if it is."""

    async def metrics_address(self) -> str:
        """Where Prometheus finds this node's metrics; empty if nowhere."""
        return ""

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    async def watch(self) -> None:
        """Pending for ever: its failure tells of this process's death."""
        await asyncio.Event().wait()
