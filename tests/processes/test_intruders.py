"""A tool that connects to its machine's sockets and tries every message: refused with an error, and nothing changes."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, select

from understudy.errors import InvalidInput, ServiceGone
from understudy.gateway.gateway import Gateway
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.gateway.gateway_socket import GatewaySocket
from understudy.node.node_calls import NodeCalls
from understudy.node.node_socket import CLIENT, FRAME
from understudy.ports import ModelGateway, ToolHost
from understudy.transport.channel import Channel, Ticket
from understudy.transport.remote_gateway import RemoteGateway
from understudy.transport.remote_node import SocketCalls
from understudy.transport.service_socket import SERVICE, methods_of

from ..kernel import kernel as k
from .test_node_socket import Stage

PATIENCE = 60.0
KEY = "sk-secret-0123456789"

TOOL = """
import asyncio, json, pathlib, struct, sys
import msgspec

LENGTH = struct.Struct(">I")
directory, tries = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])

async def said(path, messages):
    reader, writer = await asyncio.open_unix_connection(str(path))
    for message in messages:
        data = msgspec.msgpack.encode(message)
        writer.write(LENGTH.pack(len(data)) + data)
    try:
        found = await reader.read()  # to the end: whoever is refused is cut off
    except ConnectionError:
        found = b""
    writer.close()
    return found.hex()

async def main():
    found = []
    for path in sorted(directory.glob("*.sock")):
        for messages in tries:
            found.append([path.name, await said(path, messages)])
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # tmp_path is made first
    with tempfile.TemporaryDirectory(prefix="us-") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield


class House:
    """A node service and a gateway with their sockets, and a session whose tool tries what it can."""

    def __init__(self, stage: Stage, store: str) -> None:
        self.stage = stage
        self.calls = GatewayCalls(Gateway())
        self.socket = GatewaySocket("node" * 8, self.calls)
        self.service = RemoteGateway(SocketCalls(self.socket.admit, _nowhere, "the gateway"))
        self._engine = create_engine(store)

    def rows(self) -> dict[str, list[Any]]:
        """All that the store has, but for how far the service has got with the events that it exports."""
        tables = MetaData()
        tables.reflect(self._engine)
        kept = [table for name, table in tables.tables.items() if name not in ("export_cursor", "metric_state")]
        with self._engine.connect() as connection:
            return {table.name: sorted(map(repr, connection.execute(select(table)))) for table in kept}

    async def close(self) -> None:
        self._engine.dispose()
        await self.socket.close()
        await self.calls.close()
        await self.stage.close()


async def _nowhere(*_arguments: Any) -> Any:
    raise AssertionError


@asynccontextmanager
async def house(tmp_path: Path) -> AsyncIterator[House]:
    store = f"sqlite:///{tmp_path}/store.db"
    async with k.running(store, tmp_path, frames=0) as kernel:
        made = House(Stage(kernel), store)
        try:
            async with asyncio.timeout(PATIENCE):
                for name in ("s", "other"):
                    await kernel.spawn(name, k.spec(k.script("done")))
                    await kernel.send(name)
                yield made
        finally:
            await made.close()


def methods() -> list[str]:
    """All that a node service or a gateway answers to anybody, and a name that is no method."""
    of_node = [name for name, _ in inspect.getmembers(NodeCalls, inspect.isfunction) if not name.startswith("_")]
    return [*of_node, *methods_of(ModelGateway), *methods_of(ToolHost), "__init__", "_node", "close", "nothing"]


async def test_without_a_ticket_nobody_is_heard(tmp_path: Path) -> None:
    """Given a process of the same user without a ticket, when it says anything on any socket, first of all or behind a
    name that it has found out, then the connection ends, and it received nothing."""
    async with house(tmp_path) as made:
        await made.stage.frame("f")  # a frame at work, whose name is known
        ticket = await made.stage.socket.admit(FRAME, "waited-for")  # given out, and not used yet
        attached = await made.service.attach("node", [])
        await made.socket.admit()  # as when the service is about to come again
        before = made.rows()
        names = ["frame/f", ticket.peer, f"{CLIENT}/c", SERVICE, ""]
        hellos = [[0, name, token] for name in names for token in ("", "0" * 32)]
        calls = [[1, 1, "id", name, []] for name in methods()]
        tries = [*([hello, *calls] for hello in hellos), *([call] for call in calls), [[2, 1, None]], [[9]], ["x"]]
        directory = Path(ticket.path).parent
        tool = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TOOL, str(directory), json.dumps(tries), stdout=PIPE
        )
        output, _ = await tool.communicate()
        found = json.loads(output)
        assert (len(found), {said for _, said in found}) == (2 * len(tries), {""})
        assert made.rows() == before
        await made.service.heard(attached.number)  # its attachment holds


async def test_with_the_ticket_of_its_frame_a_tool_gets_no_more_than_its_session(tmp_path: Path) -> None:
    """Given a tool that has found its own frame's ticket, when it calls every method for others, then each is refused
    with an error that says so, and the store is as it was; the gateway does not know the ticket."""
    async with house(tmp_path) as made:
        _, work = await made.stage.frame("f")
        assert work["session_id"] in ("s", "other")
        ticket = await made.stage.socket.admit(FRAME, "g")
        at_gateway = await made.socket.admit()
        before = made.rows()
        channel = await Channel.connect(ticket)
        other = {"frame_id": "f", "pid": 1, "node_id": "node", "placement": ""}
        for name in methods():
            for arguments in ([], ["f"], [{"frame": other, "number": 9}], [None, {}, "", 0]):
                if name == "blob":
                    continue  # code is named by its digest: who knows that knows the code
                with pytest.raises(InvalidInput, match="can't call"):
                    await channel.call("1", name, *arguments)
        await channel.close()
        with pytest.raises(ServiceGone):
            await Channel.connect(Ticket(at_gateway.path, ticket.peer, ticket.token))
        assert made.rows() == before


async def test_a_ticket_is_good_for_one_connection(tmp_path: Path) -> None:
    """Given a ticket that was used, when it is used again, then nobody is let in, and its owner goes on."""
    async with house(tmp_path) as made:
        ticket = await made.stage.socket.admit(CLIENT, "c")
        channel = await Channel.connect(ticket)
        with pytest.raises(ServiceGone):
            await Channel.connect(ticket)
        assert not channel.lost
        await channel.close()
