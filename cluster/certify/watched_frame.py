"""A frame's process under `understudy certify`: the frame that every session has, which halts around each tool.

Its node service is at the other end of a Unix socket, one JSON message per line. Imports as little as any frame.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from understudy.actors.frame import Frame
from understudy.actors.tools import LoadedTool, ToolContext
from understudy.errors import UnderstudyError
from understudy.transport.remote_node import CalledNode

START = "from understudy.cluster.certify.watched_frame import main; main()"
"""What `python -c` runs; arguments: the socket's file descriptor, the directory of the agent's file."""

LINE_LIMIT = 1 << 30
"""Bytes of one message; a session's whole window is one."""

TOOL_BEGINS = "tool_begins"
TOOL_DONE = "tool_done"

CONTEXT = "understudy_context"

Halt = Callable[[str, str, str, str], Coroutine[Any, Any, None]]
"""Tells that a tool's call is at a moment (moment, session, call, tool); returns when it may go on."""


def line_of(message: dict[str, Any]) -> bytes:
    """A message as it is sent. JSON has no bytes: they travel as base64, which whoever checks the message reads."""
    return json.dumps(message, default=lambda data: base64.b64encode(data).decode()).encode() + b"\n"


class SocketNode(CalledNode):
    """The node service, and `halt`, as this process reaches them. Without them it ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    async def halt(self, moment: str, session_id: str, call_id: str, tool: str) -> None:
        """See `Halt`."""
        await self._send("halt", [moment, session_id, call_id, tool])

    async def _send(self, method: str, arguments: Sequence[Any]) -> Any:
        self._number += 1
        number = self._number
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "arguments": arguments}
        self._writer.write(line_of(message))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def read(self) -> None:
        """Take in answers for ever."""
        while line := await self._reader.readline():
            message = json.loads(line)
            future = self._waiting.get(message["id"])
            if future is None or future.done():
                continue
            if "error" in message:
                future.set_exception(UnderstudyError.from_wire(message["error"]))
            else:
                future.set_result(message["result"])
        os._exit(0)  # whoever certifies is gone: no tool may go on alone


class HaltingFrame(Frame):
    """A frame that tells when a tool begins and when it has had its effect, and waits for leave to go on."""

    async def _load(self, spec: dict[str, Any]) -> LoadedTool:
        node: Any = self.node
        return halting(await super()._load(spec), node.halt)


def halting(tool: LoadedTool, halt: Halt) -> LoadedTool:
    """The tool with a halt before its function and one after it, whether that returned or raised."""
    given = tool.context_parameter
    function = tool.function
    loop = asyncio.get_running_loop()

    def context_of(arguments: dict[str, Any]) -> ToolContext:
        context: ToolContext = arguments[given] if given is not None else arguments.pop(CONTEXT)
        return context

    async def asynchronous(**arguments: Any) -> Any:
        context = context_of(arguments)
        await halt(TOOL_BEGINS, context.session_id, context.call_id, tool.name)
        try:
            result = await function(**arguments)
        except Exception:
            await halt(TOOL_DONE, context.session_id, context.call_id, tool.name)
            raise
        await halt(TOOL_DONE, context.session_id, context.call_id, tool.name)
        return result

    def synchronous(**arguments: Any) -> Any:
        context = context_of(arguments)

        def wait(moment: str) -> None:
            leave = halt(moment, context.session_id, context.call_id, tool.name)
            asyncio.run_coroutine_threadsafe(leave, loop).result()

        wait(TOOL_BEGINS)
        try:
            return function(**arguments)
        finally:
            wait(TOOL_DONE)

    return dataclasses.replace(
        tool, function=asynchronous if tool.is_async else synchronous, context_parameter=given or CONTEXT
    )


async def _run(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(
        False
    )  # its end is how this process's death is noticed: tools' processes must not hold it
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LINE_LIMIT)
    writer.write(b'{"ready": true}\n')
    line = await reader.readline()
    if not line:
        return  # not needed
    name = json.loads(line)
    node = SocketNode(reader, writer)
    reading = asyncio.create_task(node.read())
    await HaltingFrame(node, name["frame_id"], name["node_id"], "").run()
    reading.cancel()


def main() -> None:
    """Be a frame until asked to exit, or until nobody is there any more."""
    sys.path.insert(0, sys.argv[2])
    asyncio.run(_run(int(sys.argv[1])))
