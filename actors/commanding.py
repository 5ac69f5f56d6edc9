"""How a tool reaches the commands that its session has in the background: at its node service."""

from __future__ import annotations

from understudy.commands import CommandOutput, CommandProcess, StartCommand
from understudy.ports import Node
from understudy.protocol import FrameIdentity

from .window import Window


class NodeCommands:
    """The commands of an activation's session."""

    def __init__(self, node: Node, frame: FrameIdentity, window: Window) -> None:
        self._node = node
        self._frame = frame
        self._window = window

    async def start(self, call_id: str, command: str, name: str, process: CommandProcess) -> str:
        """See `Node.start_command`."""
        wanted = StartCommand(call_id, self._frame.node_id, command, name, process)
        return await self._node.start_command(self._frame.frame_id, self._window.activation, wanted)

    async def read(self, job: str, after: int | None, wait: float) -> CommandOutput:
        """See `Node.read_command`."""
        return await self._node.read_command(self._frame.frame_id, self._window.activation, job, after, wait)
