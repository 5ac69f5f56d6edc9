"""Calls over a Unix socket: who is let in, what is answered, and what either side learns of the other's end."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import signal
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import example, given
from hypothesis import strategies as st

from understudy.errors import Fenced, InvalidConfiguration, InvalidInput, ServiceGone, UnderstudyError
from understudy.transport import channel as under_test
from understudy.transport import remote_node, wire
from understudy.transport.channel import Channel, ChannelServer, Ticket
from understudy.transport.remote_node import CONNECT_TRIES, RemoteNode, SocketCalls

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A short directory for temporary files of the test's own."""
    with tempfile.TemporaryDirectory(prefix="us-") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


class Service:
    """Answers with what it was asked; waits, raises or cancels where the method says so."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, str, Any]] = []
        self.begun = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.at_once = 0

    async def answer(self, peer: str, call_id: str, method: str, arguments: list[Any]) -> Any:
        self.heard.append((peer, call_id, method, arguments))
        self.at_once += 1
        try:
            if method == "wait":
                self.begun.set()
                await self.may_answer.wait()
            elif method == "fence":
                raise Fenced("the activation is over", session_id="s", details={"epoch": 3})
            elif method == "fail":
                raise ZeroDivisionError("by zero")
            elif method == "nonsense":
                return object()
            elif method == "cancel":
                raise asyncio.CancelledError
            return arguments[0] if arguments else None
        finally:
            self.at_once -= 1


@asynccontextmanager
async def serving(calls_at_once: int | None = 1_000) -> AsyncIterator[tuple[Service, ChannelServer]]:
    service = Service()
    server = ChannelServer("node", service.answer, calls_at_once=calls_at_once)
    await server.start()
    try:
        async with asyncio.timeout(PATIENCE):
            yield service, server
    finally:
        await server.close()


@asynccontextmanager
async def connected(calls_at_once: int | None = 1_000) -> AsyncIterator[tuple[Service, ChannelServer, Channel]]:
    async with serving(calls_at_once) as (service, server):
        channel = await Channel.connect(server.admit("f"))
        try:
            yield service, server, channel
        finally:
            await channel.close()


# Calls.


async def test_answers_come_in_any_order() -> None:
    """Given a call that waits, when others are made on the same connection, then they are answered meanwhile."""
    async with connected() as (service, _, channel):
        slow = asyncio.create_task(channel.call("1", "wait", "slow"))
        await service.begun.wait()
        assert await asyncio.gather(*(channel.call(str(n), "echo", n) for n in range(50))) == list(range(50))
        service.may_answer.set()
        assert await slow == "slow"
        assert service.heard[0] == ("f", "1", "wait", ["slow"])


class Text(str):
    """As texts of HTML libraries are."""

    def __str__(self) -> str:
        return "something else"


class Count(int):
    """As numbers of numerical libraries are."""


async def test_subclasses_of_texts_and_numbers_arrive_as_what_they_are() -> None:
    """A tool's result may be any kind of text."""
    async with connected() as (service, _, channel):
        sent = {"text": Text("<b>"), Text("key"): [Text("\ud800"), Count(3), Count(1 << 70), True]}
        assert await channel.call("1", "echo", sent) == {"text": "<b>", "key": ["\ud800", 3, 1 << 70, True]}
        assert {type(value) for value in service.heard[0][3][0].values()} == {str, list}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=20,
)


@pytest.mark.thorough
@given(JSON)
@example({"\ud800": [10**500, -(1 << 70), 1 << 64, -(1 << 63)]})
def test_any_json_arrives_as_it_was(value: Any) -> None:
    """Whatever a user's data is, numbers beyond 64 bits and halves of characters included."""

    async def there_and_back() -> None:
        async with connected() as (service, _, channel):
            assert await channel.call("1", "echo", value) == value
            assert service.heard[0][3] == [value]

    asyncio.run(there_and_back())


async def test_bytes_travel() -> None:
    """Code by value is bytes."""
    async with connected() as (_, _, channel):
        assert await channel.call("1", "echo", b"\0\xff") == b"\0\xff"


async def test_errors_keep_their_class() -> None:
    """An error of ours arrives as what it was; any other as one of ours that says what it was; nothing else breaks."""
    async with connected() as (_, _, channel):
        with pytest.raises(Fenced) as fenced:
            await channel.call("1", "fence")
        assert (fenced.value.session_id, fenced.value.details) == ("s", {"epoch": 3})
        with pytest.raises(UnderstudyError, match="ZeroDivisionError: by zero"):
            await channel.call("2", "fail")
        with pytest.raises(ServiceGone):
            await channel.call("3", "cancel")
        with pytest.raises(UnderstudyError, match="TypeError"):
            await channel.call("4", "nonsense")
        assert await channel.call("5", "echo", "still there") == "still there"


async def test_a_call_that_was_given_up_disturbs_no_other() -> None:
    """Given a call whose caller has given up, when its answer comes, then it is dropped."""
    async with connected() as (service, _, channel):
        slow = asyncio.create_task(channel.call("1", "wait", "slow"))
        await service.begun.wait()
        slow.cancel()
        service.may_answer.set()
        assert await channel.call("2", "echo", "next") == "next"


async def test_what_is_too_large_is_refused_where_it_would_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message beyond the limit is an error of its sender, call or answer, and the connection goes on."""
    async with connected() as (service, _, channel):
        monkeypatch.setattr(wire, "LARGEST_MESSAGE", 1_000)
        with pytest.raises(InvalidInput, match="can't be sent"):
            await channel.call("1", "echo", "x" * 2_000)
        assert service.heard == []
        monkeypatch.setattr(wire, "LARGEST_MESSAGE", 1 << 20)
        slow = asyncio.create_task(channel.call("2", "wait", "x" * 2_000))
        await service.begun.wait()
        monkeypatch.setattr(wire, "LARGEST_MESSAGE", 1_000)
        service.may_answer.set()
        with pytest.raises(InvalidInput, match="can't be sent"):
            await slow
        assert await channel.call("3", "echo", "next") == "next"


async def test_one_client_has_so_many_calls_at_once() -> None:
    """Given more calls than a service works at for one client, then the others are begun as those are answered, and
    another client is not held up."""
    async with connected(10) as (service, server, channel):
        # Each is larger than what is read at once, so that reading stops between them.
        calls = [asyncio.create_task(channel.call(str(n), "wait", "x" * 300_000)) for n in range(30)]
        other = await Channel.connect(server.admit("other"))
        while service.at_once < 10:
            await other.call("o", "echo", "me too")
        for _ in range(20):
            await other.call("o", "echo", "me too")
        assert service.at_once <= 12  # what had been read with the tenth
        service.may_answer.set()
        assert len(await asyncio.gather(*calls)) == 30
        await other.close()


# The end of a side.


def _serve(ready: Connection, directory: str) -> None:
    """A service in a process of its own."""

    async def serve() -> None:
        tempfile.tempdir = directory
        server = ChannelServer("node", Service().answer)
        await server.start()
        ready.send(server.admit("f"))
        await asyncio.Event().wait()

    asyncio.run(serve())


async def test_a_server_may_work_at_any_number_of_calls() -> None:
    """Given a server without such a limit, when more calls wait than it would work at else, then one more is answered:
    a gateway that has thousands of calls in flight still hears of an abort."""
    async with connected(None) as (service, _, channel):
        calls = [asyncio.create_task(channel.call(str(n), "wait", "")) for n in range(1_200)]
        assert await channel.call("last", "echo", "heard") == "heard"
        service.may_answer.set()
        await asyncio.gather(*calls)


async def test_the_death_of_a_service_fails_what_it_was_asked(directory: Path) -> None:
    """Given calls that wait, when the service is killed, then they fail at once, and so does every further one; the
    next service removes its socket."""
    context = multiprocessing.get_context("fork")
    ready, end = context.Pipe()
    process = context.Process(target=_serve, args=(end, str(directory)))
    process.start()
    ticket: Ticket = await asyncio.to_thread(ready.recv)
    channel = await Channel.connect(ticket)
    waiting = asyncio.create_task(channel.call("1", "wait"))
    assert await channel.call("2", "echo", "there") == "there"
    os.kill(process.pid or 0, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(ServiceGone):
            await waiting
        with pytest.raises(ServiceGone):
            await channel.call("3", "echo")
    assert channel.lost
    await asyncio.to_thread(process.join)
    with pytest.raises(ServiceGone, match="nobody listens"):
        await Channel.connect(ticket)
    async with serving():
        assert not os.path.exists(ticket.path)  # noqa: ASYNC240


async def test_a_forked_process_keeps_no_connection(directory: Path) -> None:
    """Given a client whose process has forked another, as tools do, when the client ends its connection, then the
    server hears of it at once, although the other one lives; that one ends its own copy only."""
    gone = asyncio.Event()
    server = ChannelServer("node", Service().answer, lambda _peer, _pid: gone.set())
    await server.start()
    context = multiprocessing.get_context("fork")
    may_end, end = context.Pipe()
    try:
        channel = await Channel.connect(server.admit("f"))
        process = context.Process(target=end.recv)
        process.start()
        assert await channel.call("1", "echo", "still here") == "still here"
        await channel.close()
        async with asyncio.timeout(PATIENCE):
            await gone.wait()
        assert process.is_alive()
    finally:
        may_end.send(None)
        await asyncio.to_thread(process.join)
        await server.close()


async def test_a_frame_finds_the_next_service() -> None:
    """Given a call that waits when its service ends, then it is repeated at the next one under the same id, with a
    ticket of that."""
    first, second = Service(), Service()
    servers = [ChannelServer(f"node{number}", service.answer) for number, service in enumerate((first, second))]
    current = servers[0]

    async def admit() -> Ticket:
        return current.admit("f")

    async def nowhere(_call_id: str, method: str, *_arguments: Any) -> Any:
        raise AssertionError(f"{method} takes the other way")

    for server in servers:
        await server.start()
    second.may_answer.set()
    async with asyncio.timeout(PATIENCE):
        node = RemoteNode(SocketCalls(admit, nowhere))
        waiting = asyncio.create_task(node._send("wait", ["answer"]))
        await first.begun.wait()
        current = servers[1]
        await servers[0].close()
        assert await waiting == "answer"
    assert first.heard == second.heard
    await servers[1].close()


async def test_a_client_that_ends_leaves_its_calls() -> None:
    """Given a client that is gone before its answer, the service does what it was asked, and the answer is dropped."""
    async with connected() as (service, server, channel):
        waiting = asyncio.create_task(channel.call("1", "wait"))
        await service.begun.wait()
        await channel.close()
        with pytest.raises(ServiceGone):
            await waiting
        service.may_answer.set()
        again = await Channel.connect(server.admit("f"))
        assert await again.call("2", "echo", 1) == 1
        assert service.at_once == 0
        await again.close()


async def test_who_does_not_reach_the_socket_takes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a socket that is not there, as from another container, then calls take the other way, and soon nobody looks
    for the socket any more, but now and then."""
    tickets = 0

    async def admit() -> Ticket:
        nonlocal tickets
        tickets += 1
        return Ticket("/nowhere/at.sock", "f", "token")

    async def other_way(call_id: str, method: str, *arguments: Any) -> Any:
        return call_id, method, arguments

    calls = SocketCalls(admit, other_way)
    assert [await calls(str(number), "echo", number) for number in range(5)] == [
        (str(number), "echo", (number,)) for number in range(5)
    ]
    assert tickets == CONNECT_TRIES
    monkeypatch.setattr("understudy.transport.remote_node.TRY_AGAIN_SECONDS", 0.0)
    assert await calls("9", "echo", 9) == ("9", "echo", (9,))
    assert tickets == CONNECT_TRIES + 1


async def test_a_socket_whose_file_was_removed_is_made_again() -> None:
    """Given something that removes old files, then who is connected stays so, and the next one finds a socket."""
    async with connected() as (_, server, channel):
        await asyncio.to_thread(os.unlink, server.path)
        assert await channel.call("1", "echo", 1) == 1
        with pytest.raises(ServiceGone):
            await Channel.connect(server.admit("g"))
        await server.start()
        other = await Channel.connect(server.admit("g"))
        assert [await each.call("2", "echo", 2) for each in (channel, other)] == [2, 2]
        await other.close()


@pytest.mark.parametrize("error", [InvalidConfiguration("no socket can be made"), UnderstudyError("OSError: full")])
async def test_a_service_without_a_socket_is_called_on_the_other_way(error: UnderstudyError) -> None:
    """Given a service that can make no socket, then its callers take the other way instead of failing."""

    async def admit() -> Ticket:
        raise error

    async def other_way(_call_id: str, method: str, *_arguments: Any) -> Any:
        return method

    calls = SocketCalls(admit, other_way)
    assert [await calls("1", "echo") for _ in range(5)] == ["echo"] * 5


async def test_a_service_that_gives_no_ticket_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a service that is stopped when somebody connects, then that is a time-out, as for any call: whoever repeats
    the call goes on for longer than if it were gone."""
    monkeypatch.setattr(remote_node, "ADMIT_SECONDS", 0.01)

    async def admit() -> Ticket:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(TimeoutError):
        await SocketCalls(admit, admit)("1", "echo")  # type: ignore[arg-type]


async def test_what_was_closed_connects_no_more() -> None:
    """Given calls that were closed, also while they connected, then no connection is left or made."""
    async with serving() as (_, server):
        may_have = asyncio.Event()

        async def admit() -> Ticket:
            await may_have.wait()
            return server.admit("f")

        calls = SocketCalls(admit, admit)  # type: ignore[arg-type]
        first = asyncio.create_task(calls("1", "echo", 1))
        await asyncio.sleep(0)
        closing = asyncio.create_task(calls.close())
        await asyncio.sleep(0)
        may_have.set()
        await closing
        await asyncio.wait([first])
        with pytest.raises(ServiceGone):
            await calls("2", "echo", 2)
        assert not calls._channel or calls._channel.lost


# Who is let in.


async def _refused(ticket: Ticket) -> bool:
    try:
        channel = await Channel.connect(ticket)
    except ServiceGone:
        return True
    assert await channel.call("1", "echo", 1) == 1
    await channel.close()
    return False


async def test_only_a_ticket_lets_in() -> None:
    """A wrong token, another's, none at all, or one that was used or replaced: the connection is ended, and the
    service was asked nothing."""
    async with serving() as (service, server):
        ticket = server.admit("f")
        other = server.admit("other")
        for wrong in (
            ticket._replace(token="0" * 32), ticket._replace(token=""), ticket._replace(peer="nobody"),
            ticket._replace(token=other.token), ticket._replace(token="ü"),
        ):  # fmt: skip
            assert await _refused(wrong)
        assert service.heard == []
        assert not await _refused(ticket)
        assert await _refused(ticket)
        replaced, ticket = server.admit("f"), server.admit("f")
        assert await _refused(replaced)
        assert not await _refused(ticket)


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\x01\xc1", b"\0\0\0\x03\x92\x63\x01", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n",
        wire.LENGTH.pack(6) + b"\x94\x01\x01\xa0\xa0\x90",
    ],
)  # fmt: skip
async def test_whoever_talks_otherwise_is_shown_the_door(data: bytes) -> None:
    """Garbage, a length beyond all bounds, another protocol, or a call before a ticket end the connection, and no
    other one."""
    async with connected() as (service, server, channel):
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write(data)
        assert await reader.read() == b""
        writer.close()
        assert await channel.call("1", "echo", 1) == 1
        assert len(service.heard) == 1


async def test_whoever_says_nothing_is_shown_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that does not say whose it is ends by itself."""
    monkeypatch.setattr(under_test, "HELLO_SECONDS", 0.05)
    async with serving() as (_, server):
        reader, writer = await asyncio.open_unix_connection(server.path)
        assert await reader.read() == b""
        writer.close()


async def test_another_user_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket is of no use to a process of another user; root's may come in."""
    monkeypatch.setattr(under_test, "_process", lambda _transport: (1, 4711))
    async with serving() as (service, server):
        assert await _refused(server.admit("f"))
        assert service.heard == []
        monkeypatch.setattr(under_test, "_process", lambda _transport: (1, 0))
        assert not await _refused(server.admit("f"))


async def test_the_socket_is_for_one_user(directory: Path) -> None:
    """Neither the directory nor the socket may be entered by anybody else; a directory that may be is refused."""
    async with serving() as (_, server):
        path = Path(server.path)
        modes = [stat.S_IMODE(os.stat(each).st_mode) for each in (path.parent, path)]
        assert modes == [0o700, 0o600]
    path.parent.chmod(0o755)
    with pytest.raises(InvalidConfiguration, match="TMPDIR"):
        await ChannelServer("node", Service().answer).start()
    path.parent.rmdir()
    path.parent.symlink_to(directory / "nowhere")
    with pytest.raises(InvalidConfiguration, match="TMPDIR"):
        await ChannelServer("node", Service().answer).start()
    path.parent.unlink()
    path.parent.write_text("")
    with pytest.raises(InvalidConfiguration, match="TMPDIR"):
        await ChannelServer("node", Service().answer).start()


async def test_a_path_that_is_too_long_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets have short paths: what is too long is said before anything is made."""
    deep = directory / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(InvalidConfiguration, match="too long"):
        await ChannelServer("node", Service().answer).start()


@pytest.mark.parametrize(
    "test",
    [
        test_answers_come_in_any_order, test_bytes_travel, test_errors_keep_their_class,
        test_a_call_that_was_given_up_disturbs_no_other, test_one_client_has_so_many_calls_at_once,
        test_the_death_of_a_service_fails_what_it_was_asked, test_a_frame_finds_the_next_service,
        test_a_client_that_ends_leaves_its_calls, test_only_a_ticket_lets_in,
    ],
)  # fmt: skip
def test_uvloop(test: Any, request: pytest.FixtureRequest) -> None:
    """The same where uvloop is the event loop, as in Ray's actors."""
    fixtures = {name: request.getfixturevalue(name) for name in inspect.signature(test).parameters}
    uvloop.run(test(**fixtures))
