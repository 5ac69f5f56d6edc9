"""The process that holds MCP servers: what it does with servers that die, hang, flood and come by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from mcp_types import Tool as McpTool

from understudy.errors import ServiceGone, ToolError
from understudy.tool_host import hosted_servers, http, server
from understudy.tool_host.hosted_servers import HostedServers, make_server
from understudy.tool_host.listing import _described
from understudy.tool_host.server import Server
from understudy.tool_hosting import ServerAnswer, ServerCall, ServerConfiguration, ServerTools

from .. import service_clock
from ..mcp_calls import SCRIPT, calls, command, until, until_called

pytestmark = pytest.mark.uvloop


class Stage:
    """A host, and who calls it as a node service does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.host = HostedServers()
        self.number, self.identity = "", ""
        self._keys = 0

    async def attach(self, service: str = "node") -> None:
        attached = await self.host.attach(service)
        self.number, self.identity = attached.number, attached.host

    def configuration(self, *arguments: str, **more: Any) -> ServerConfiguration:
        started = command(self.directory, *arguments)
        return ServerConfiguration(**{"instance": "i", "name": "test", "command": started, **more})

    async def tools(self, configuration: ServerConfiguration | None = None) -> ServerTools:
        return await self.host.tools(self.number, configuration or self.configuration())

    async def call(
        self, tool: str, configuration: ServerConfiguration | None = None, *, key: str = "", timeout: float = 30.0,
        **arguments: Any,
    ) -> ServerAnswer:  # fmt: skip
        self._keys += 1
        key = key or f"key{self._keys}"
        wanted = ServerCall("test", key, 0, self.identity, tool, arguments=arguments, timeout=timeout)
        return await self.host.call(self.number, key, configuration or self.configuration(), wanted)

    def calls(self) -> list[str]:
        return calls(self.directory)

    async def until_called(self, call: str) -> None:
        await until_called(self.directory, call)

    def server(self) -> Server:
        (found,) = self.host.servers
        assert isinstance(found, Server)
        return found


@asynccontextmanager
async def stage(directory: Path) -> AsyncIterator[Stage]:
    made = Stage(directory)
    await made.attach()
    try:
        yield made
    finally:
        await made.host.close()


async def test_a_call_is_made_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    """Whoever asks for a call that is under way, or has ended, gets the one answer, under another node service as well;
    once it is released nothing is known of it."""
    async with stage(tmp_path) as made:
        first = asyncio.ensure_future(made.call("hold", key="k", word="x"))
        await made.until_called("hold x")
        await made.attach("another")
        asked = ServerCall("test", "k")
        second = asyncio.ensure_future(made.host.call(made.number, "k", made.configuration(), asked))
        (tmp_path / "go").touch()
        assert (await first).content == (await second).content == "held x"
        assert (await made.host.call(made.number, "k", made.configuration(), asked)).outcome == "ok"
        await made.host.release(made.number, ["k"])
        assert (await made.host.call(made.number, "k", made.configuration(), asked)).outcome == "unknown"
    assert made.calls() == ["start", "hold x"]


async def test_a_host_makes_no_call_that_was_for_another_one(tmp_path: Path) -> None:
    """A call that was handed to a host that has ended may have been made there: the next one says that it is lost."""
    async with stage(tmp_path) as made:
        made.identity = "the one before"
        assert (await made.call("add", a=1, b=2)).outcome == "lost"
    assert made.calls() == []


async def test_a_node_service_that_was_replaced_is_refused(tmp_path: Path) -> None:
    """What a node service says that another one has replaced has no effect."""
    async with stage(tmp_path) as made:
        late = made.number
        await made.attach("another")
        with pytest.raises(ServiceGone):
            await made.host.tools(late, made.configuration())
        with pytest.raises(ServiceGone):
            await made.attach("node")


async def test_a_server_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends at its timeout; a server that then answers nothing at all is killed, and the next call has another
    one."""
    monkeypatch.setattr(server, "CHECK_SECONDS", 0.2)
    async with stage(tmp_path) as made:
        await made.tools()
        assert (await made.call("hang", timeout=0.3)).outcome == "timeout"
        assert (await made.call("add", a=1, b=2, timeout=60.0)).content == "3"
    assert made.calls().count("start") == 2


@pytest.mark.parametrize("next_is", ["a list", "a list at once", "a call"])
async def test_a_server_that_hangs_in_a_cancelled_call_is_killed(
    next_is: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a server that is stopped in a call, when the call is cancelled, then the server is killed, and what it is
    needed for meanwhile waits for that and is done by the next process."""
    monkeypatch.setattr(server, "CHECK_SECONDS", 0.2)
    async with stage(tmp_path) as made:
        held = asyncio.ensure_future(made.call("hold", key="k", word="x"))
        pid = await until_called(tmp_path, "hold x")
        os.kill(pid, signal.SIGSTOP)
        await made.host.cancel(made.number, "k")
        assert (await held).outcome == "error"
        if next_is != "a list at once":
            await until(lambda: not made.server().in_flight)
        if next_is == "a call":
            assert (await made.call("add", a=1, b=2)).content == "3"
        else:
            assert (await made.tools()).error == ""
        assert not _lives(pid)
    assert made.calls().count("start") == 2


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_server_that_hangs_or_dies_while_nobody_needs_it(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a server that runs, when it hangs, or has just died, then who asks for its tools gets those of the next
    process."""
    monkeypatch.setattr(server, "LIST_SECONDS", 1.0)
    async with stage(tmp_path) as made:
        assert (await made.tools()).error == ""
        pid = made.server().pid
        os.kill(pid, number)
        assert (await made.tools()).error == ""
        assert not _lives(pid)
    assert made.calls().count("start") == 2


async def test_a_new_server_that_gives_no_list_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a server that hangs whenever it is asked for its tools, then that is tried once more where it was running,
    and not where it was started for this."""

    async def never(_client: Any) -> None:
        await asyncio.Event().wait()

    async with stage(tmp_path) as made:
        await made.call("add", a=1, b=2)
        monkeypatch.setattr(server, "LIST_SECONDS", 0.05)
        monkeypatch.setattr(server, "tools_of", never)
        assert "did not list its tools" in (await made.tools()).error
        assert made.calls().count("start") == 2
        assert "did not list its tools" in (await made.tools()).error
    assert made.calls().count("start") == 3


async def test_a_server_that_takes_long_is_not_killed(tmp_path: Path) -> None:
    """Given a call that ends at its timeout, while the server answers others, then the server goes on."""
    async with stage(tmp_path) as made:
        assert (await made.call("hold", word="x", timeout=0.2)).outcome == "timeout"
        assert (await made.call("add", a=1, b=2)).content == "3"
    assert made.calls().count("start") == 1


async def test_a_flood_takes_no_memory(tmp_path: Path) -> None:
    """A message that is too long is an error of its call, a long result loses its middle, and the server goes on; what
    it writes to its standard error is bounded as well."""
    async with stage(tmp_path) as made:
        before = psutil.Process().memory_info().rss
        assert "longer than" in (await made.call("flood", size=50_000_000)).content
        cut = (await made.call("flood", size=3_000_000)).content
        assert 900_000 < len(cut) < 1_000_100
        assert "the middle is left out" in cut
        assert (await made.call("add", a=1, b=2)).content == "3"
        assert psutil.Process().memory_info().rss - before < 60_000_000
    assert made.calls().count("start") == 1


async def test_kept_answers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of answers that nobody releases the oldest go first, once they are too much. Their calls are not made again, of
    so many as may be kept in mind."""
    monkeypatch.setattr(hosted_servers, "KEPT_ANSWERS", 250_000)
    monkeypatch.setattr(hosted_servers, "KEPT_CALLS", 4)
    async with stage(tmp_path) as made:
        for number in range(5):
            await made.call("flood", key=f"k{number}", size=100_000)
        assert made.host.held == 4
        begun = made.calls()
        again = [await made.call("flood", key=f"k{number}", size=100_000) for number in range(1, 5)]
        assert [answer.outcome for answer in again] == ["lost", "lost", "ok", "ok"]
        assert made.calls() == begun


async def test_a_server_that_nobody_needs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was not used for long is ended, but not during a call; the next call starts it again."""
    monkeypatch.setattr(hosted_servers, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(hosted_servers, "LOOK_SECONDS", 0.02)
    async with stage(tmp_path) as made:
        held = asyncio.ensure_future(made.call("hold", word="x"))
        await made.until_called("hold x")
        pid = made.server().pid
        await asyncio.sleep(0.3)
        assert psutil.pid_exists(pid)
        (tmp_path / "go").touch()
        assert (await held).content == "held x"
        await until(lambda: not made.host.servers and not psutil.pid_exists(pid))
        assert (await made.call("add", a=1, b=2)).content == "3"


async def test_a_host_with_calls_is_not_abandoned_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a host that no node service calls any more, then it waits for one for as long as its calls are kept: a call
    under way, about which a person may be asked, for a week, an answer for an hour; without calls no longer than it was
    given."""
    looks = service_clock.looks(monkeypatch)

    async def is_abandoned(seconds: float) -> bool:
        alone = asyncio.create_task(made.host.abandoned(300.0))
        looks.put_nowait(seconds)
        looked = asyncio.create_task(looks.join())
        await asyncio.wait((alone, looked), return_when=asyncio.FIRST_COMPLETED)
        found = alone.done()
        for task in (alone, looked):
            task.cancel()
        await asyncio.wait((alone, looked))
        while looks._unfinished_tasks:  # type: ignore[attr-defined]
            looks.task_done()
        return found

    async with stage(tmp_path) as made:
        call = asyncio.create_task(made.call("order", key="k", questions=1))
        assert (await call).outcome == "asks"
        assert not await is_abandoned(6 * 86_400.0)
        assert await is_abandoned(8 * 86_400.0)
        await made.host.cancel(made.number, "k")
        assert not await is_abandoned(3_000.0)
        assert await is_abandoned(3_700.0)
        await made.host.release(made.number, ["k"])
        assert await is_abandoned(301.0)


async def test_there_are_no_more_servers_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as many servers as there may be, then another one takes the place of the one that was not needed for
    longest; where all of them are at calls it is refused."""
    monkeypatch.setattr(hosted_servers, "MOST_SERVERS", 2)
    async with stage(tmp_path) as on:
        configured = {name: on.configuration(instance=name) for name in ("one", "two", "three")}
        for name in ("one", "two", "one", "three"):
            assert not (await on.tools(configured[name])).error
        assert sorted(on.host._servers) == ["one", "three"]
        held = [asyncio.create_task(on.call("hold", configured[name], word=name)) for name in ("one", "three")]
        for name in ("one", "three"):
            await on.until_called(f"hold {name}")
        assert "there may be no more" in (await on.tools(configured["two"])).error
        (tmp_path / "go").touch()
        await asyncio.gather(*held)


async def test_a_server_that_cannot_be_started_is_tried_less_and_less_often(tmp_path: Path) -> None:
    """A server that ends at once is started again after pauses that grow; who would wait too long is refused."""
    made_by = ["sh", "-c", f"echo tried >> {tmp_path}/tries; echo reason >&2; exit 1"]
    async with stage(tmp_path) as made:
        configuration = ServerConfiguration("i", "test", made_by)
        errors = [(await made.tools(configuration)).error for _ in range(3)]
        made.server()._not_before = time.monotonic() + 20
        refused = (await made.tools(configuration)).error
    assert all("reason" in error for error in errors)
    assert "started again in" in refused
    assert (tmp_path / "tries").read_text().count("tried") == 3


async def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the `mcp` package is missing, servers can't be used, and the error says what to do."""
    for name in [name for name in sys.modules if name.startswith(("mcp", "understudy.tool_host."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ToolError, match=r"pip install 'understudy\[mcp\]'"):
        await make_server(ServerConfiguration("i", "test", ["x"]))


HOST = """
import asyncio, sys
from understudy.tool_host.hosted_servers import HostedServers
from understudy.tool_hosting import ServerConfiguration

async def main():
    host = HostedServers()
    attached = await host.attach("node")
    script = "sleep 1000 & echo $! > {directory}/child; exec {python} {script} {directory}"
    found = await host.tools(attached.number, ServerConfiguration("i", "test", ["sh", "-c", script]))
    print(host.servers[0].pid, found.error, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_servers_end_with_their_host(tmp_path: Path) -> None:
    """When the host is killed, its servers and what they have started die with it."""
    program = HOST.format(directory=tmp_path, python=sys.executable, script=SCRIPT)
    with started(program, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        pid = int((await asyncio.to_thread(host.stdout.readline)).split()[0])
        child = int((tmp_path / "child").read_text())
        assert _lives(pid)
        assert _lives(child)
        host.send_signal(signal.SIGKILL)
    await until(lambda: not _lives(pid) and not _lives(child))


def started(program: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    """A Python program as a process."""
    return subprocess.Popen([sys.executable, "-P", "-c", program, *arguments], text=True, **more)


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


WEB = """
import sys
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("web")

@server.tool()
def headers(context: Context) -> str:
    return context.headers["x-token"]

@server.tool()
def die() -> str:
    import os
    os._exit(1)

server.run("streamable-http", port=int(sys.argv[1]))
"""


@pytest.mark.thorough
async def test_a_server_by_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is reached by HTTP gets its headers from the node's environment; a call that it dies with is lost,
    it can't be used while it is away, and it is found again afterwards."""
    monkeypatch.setenv("TEST_MCP_VALUE", "token-of-the-test")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def served() -> subprocess.Popen[str]:
        process = started(WEB, str(port), stderr=subprocess.DEVNULL)
        await until(lambda: _listens(port))
        return process

    async with stage(tmp_path) as made:
        web = made.configuration(command=[], url=f"http://127.0.0.1:{port}/mcp", headers={"X-Token": "TEST_MCP_VALUE"})
        process = await served()
        try:
            found = await made.tools(web)
            assert [tool.name for tool in found.tools] == ["headers", "die"]
            assert (await made.call("headers", web)).content == "***"
            assert (await made.call("die", web)).outcome == "lost"
            process.wait()
            assert (await made.tools(web)).error
            process = await served()
            assert (await made.tools(web)).error == ""
            assert (await made.call("headers", web)).content == "***"
        finally:
            process.kill()
            process.wait()
    assert os.environ["TEST_MCP_VALUE"] == "token-of-the-test"


async def test_a_silent_server_by_http_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has its time, and a person any, whatever the transport thinks of silence; to connect has a bound."""
    given: list[httpx2.Timeout] = []

    @asynccontextmanager
    async def streams(_url: str, *, http_client: httpx2.AsyncClient, **_: Any) -> AsyncIterator[None]:
        given.append(http_client.timeout)
        yield

    monkeypatch.setattr(http, "streamable_http_client", streams)
    async with http.by_http("http://127.0.0.1:1/mcp", {}):
        pass
    assert given[0].read is given[0].pool is None
    assert given[0].connect == http.CONNECT_SECONDS


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server by HTTP that never answers when its session is ended."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = head.partition("content-length:")[2].partition("\r")[0]
            message = json.loads(await reader.readexactly(int(size or 0)) or b"{}")
            if head.startswith("delete"):
                await reader.read()
                break
            results: dict[str, Any] = {
                "initialize": {
                    "protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                    "serverInfo": {"name": "web", "version": "1"},
                },
                "tools/list": {"tools": []},
            }  # fmt: skip
            said: dict[str, Any] = {"jsonrpc": "2.0", "id": message.get("id")}
            if message.get("method") in results:
                said["result"] = results[message["method"]]
            else:
                said["error"] = {"code": -32601, "message": "there is no such method"}
            body = json.dumps(said).encode() if "id" in message else b""
            status = "405 No" if head.startswith("get") else "200 OK" if body else "202 Accepted"
            kind = "content-type: application/json\r\nmcp-session-id: one\r\n" if body else ""
            writer.write(f"HTTP/1.1 {status}\r\n{kind}content-length: {len(body)}\r\n\r\n".encode() + body)
    writer.close()


async def test_a_server_by_http_that_hangs_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a server that never answers when its session is ended, then the next connection is made all the same, and
    the host ends."""
    monkeypatch.setattr(server, "END_SECONDS", 0.1)
    serving = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = serving.sockets[0].getsockname()[1]
    async with stage(tmp_path) as made:
        web = made.configuration(command=[], url=f"http://127.0.0.1:{port}/mcp")
        assert (await made.tools(web)).error == ""
        made.server()._kill()
        await until(lambda: made.server()._client is None)
        async with asyncio.timeout(20):
            assert (await made.tools(web)).error == ""
            await made.host.close()
    serving.close()


@pytest.mark.parametrize("closed", ["server", "host"])
async def test_a_server_is_closed_while_it_starts(closed: str, tmp_path: Path) -> None:
    """Given a server that hangs before it is ready, and whose only call was cancelled, when the server or the host is
    closed, then that ends, and so does the server's process."""
    async with stage(tmp_path) as made:
        call = asyncio.ensure_future(made.call("add", made.configuration(command=["sleep", "1000"]), key="k"))
        await until(lambda: bool(made.host.servers) and made.server().pid != 0)
        hangs, pid = made.server(), made.server().pid
        await made.host.cancel(made.number, "k")
        assert (await call).outcome == "error"
        await until(lambda: not hangs.in_flight)
        closing = asyncio.ensure_future(hangs.close() if closed == "server" else made.host.close())
        ended, _ = await asyncio.wait((closing,), timeout=20)
        if not ended and hangs._connection is not None:
            hangs._connection.cancel()
        assert ended
        assert not _lives(pid)


async def test_a_start_that_nobody_waits_for_any_more_serves_the_next_one(tmp_path: Path) -> None:
    """Given a server that takes its time to start, when who asked first is cancelled, then the next one is served by
    the process that was started."""
    async with stage(tmp_path) as made:
        slowly = made.configuration("0.3")
        first = asyncio.ensure_future(made.tools(slowly))
        await until(lambda: "start" in made.calls())
        first.cancel()
        await asyncio.wait((first,))
        assert (await made.tools(slowly)).error == ""
    assert made.calls() == ["start"]


async def test_the_schema_of_an_output_is_not_looked_at(tmp_path: Path) -> None:
    """A result counts as it is: a server's schema for it, which may take for ever to check, is not used."""
    async with stage(tmp_path) as made:
        await made.tools()
        answer = await made.call("untrue")
        assert (answer.outcome, answer.content) == ("ok", "text")


def test_a_tool_with_an_endless_name_is_left_out() -> None:
    """The lists that are kept of a server have names that a person can read."""
    assert _described(McpTool(name="n" * 201, input_schema={})) == (None, "its name is too long")
    assert _described(McpTool(name="n" * 200, input_schema={}))[0] is not None


async def test_a_packed_answer_is_refused() -> None:
    """What a few bytes are unpacked to has no bound: by HTTP none are asked for, and none are taken."""
    packed = {"content-encoding": "gzip", "content-type": "application/json"}
    with pytest.raises(httpx2.ReadError, match="packed"):
        await http._bound(httpx2.Response(200, headers=packed, stream=httpx2.ByteStream(b"")))
    await http._bound(httpx2.Response(200, stream=httpx2.ByteStream(b"{}")))


async def test_an_error_of_the_server_is_an_answer(tmp_path: Path) -> None:
    """A server's own errors are results of their calls, whatever their codes: nothing is in doubt."""
    async with stage(tmp_path) as made:
        answer = await made.call("refuse")
        assert (answer.outcome, answer.content) == ("error", "refused")
    assert made.calls().count("start") == 1
