"""The simulator's picture of processes, against real ones: the same scenario on both, and what is seen is the same.

A service that answers calls, is stopped, continued and killed; a timer of it that comes due while it is stopped; a
transaction on PostgreSQL that its client leaves behind when it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest

from understudy.errors import ServiceGone

from .cluster import Actor, Cluster
from .scheduler import Scheduler

SERVICE = """
import asyncio, sys

async def main(path):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.1)
            ticks += 1

    async def serve(reader, writer):
        async def answer(number, word):
            if word == "sleep":
                await asyncio.sleep(30)
            writer.write(f"{number} {word if word != 'ticks' else ticks}\\n".encode())

        while line := await reader.readline():
            number, word = line.decode().split()
            asyncio.create_task(answer(number, word))

    asyncio.create_task(tick())
    server = await asyncio.start_unix_server(serve, path)
    print("ready", flush=True)
    await server.serve_forever()

asyncio.run(main(sys.argv[1]))
"""
SHORT = 0.5


class Service(Protocol):
    """A process that answers, real or simulated."""

    async def call(self, word: str) -> str: ...
    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def kill(self) -> None: ...


class RealService:
    """A process behind a Unix socket; a lost connection is its death."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: Any) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._numbers = iter(range(1, 1_000_000))
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                number, word = line.decode().split()
                self._waiting.pop(number).set_result(word)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ServiceGone("it died"))

    async def call(self, word: str) -> str:
        number = str(next(self._numbers))
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(f"{number} {word}\n".encode())
        return await asyncio.shield(future)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def real(directory: Path) -> AsyncIterator[Service]:
    """The service as a real process."""
    path = str(directory / "socket")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, path, stdout=asyncio.subprocess.PIPE, cwd=directory
    )
    assert process.stdout is not None
    await process.stdout.readline()
    reader, writer = await asyncio.open_unix_connection(path)
    service = RealService(process, reader, writer)
    try:
        yield service
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await service._reading
        writer.close()


class SimulatedService:
    """The same as an actor of the simulated cluster."""

    def __init__(self, actor: Actor, cluster: Cluster) -> None:
        self._actor = actor
        self._cluster = cluster

    async def call(self, word: str) -> str:
        return str(await self._cluster.call(self._actor, "answer", word))

    def stop(self) -> None:
        assert self._actor.process is not None
        self._actor.process.pause()

    def go_on(self) -> None:
        assert self._actor.process is not None
        self._actor.process.resume()

    def kill(self) -> None:
        self._actor.kill()


class Target:
    """What runs in the simulated process."""

    def __init__(self) -> None:
        self._ticks = 0
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self._ticks += 1

    async def answer(self, word: str) -> str:
        if word == "sleep":
            await asyncio.sleep(30)
        return word if word != "ticks" else str(self._ticks)


async def scenario(service: Service) -> list[str]:
    """What a caller sees of a service that is stopped, continued and killed."""
    seen = [await service.call("hello")]

    async def outcome(call: Awaitable[str], seconds: float | None = None) -> str:
        try:
            return await asyncio.wait_for(call, seconds)
        except TimeoutError:
            return "no answer"
        except ServiceGone:
            return "gone"

    service.stop()
    held = asyncio.ensure_future(service.call("held"))
    seen.append(await outcome(asyncio.shield(held), SHORT))
    service.go_on()
    seen.append(await outcome(held, 5.0))
    before = int(await service.call("ticks"))
    service.stop()
    await asyncio.sleep(1.0)
    service.go_on()
    missed = int(await service.call("ticks")) - before
    seen.append("ticks that were missed are not made up for" if missed <= 3 else f"{missed} ticks at once")
    slow = asyncio.ensure_future(service.call("sleep"))
    await asyncio.sleep(0.05)
    service.kill()
    seen.append(await outcome(slow, 5.0))
    return seen


EXPECTED = ["hello", "no answer", "held", "ticks that were missed are not made up for", "gone"]


async def test_stopped_continued_and_killed_really(tmp_path: Path) -> None:
    """Given a real process, when it is stopped, continued and killed, then its callers see what is expected."""
    async with real(tmp_path) as service:
        assert await scenario(service) == EXPECTED


def test_stopped_continued_and_killed_in_the_simulation() -> None:
    """Given a simulated process, then its callers see the same."""
    scheduler = Scheduler(random.Random(1), calm=True)
    cluster = Cluster(scheduler, random.Random(1), lambda _text: None)
    actor = cluster.start_actor("service", cluster.add_machine("n0"), lambda _actor: Target())
    caller = scheduler.process("caller")

    async def main() -> list[str]:
        return await caller.spawn(scenario(SimulatedService(actor, cluster)))

    assert scheduler.run_until_complete(main()) == EXPECTED
    scheduler.end()


CLIENT = """
import sys, time, psycopg
connection = psycopg.connect(sys.argv[1])
connection.execute("UPDATE held SET value = 2")
print("holds", flush=True)
time.sleep(60)
"""


async def test_what_a_killed_client_held_is_free_at_once(postgres: str, tmp_path: Path) -> None:
    """Given a process that is killed within a transaction, then PostgreSQL undoes that and frees its locks at once, as
    the simulated one does (`Server.client_died`)."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("CREATE TABLE held (value integer)")
        connection.execute("INSERT INTO held VALUES (1)")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, postgres, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        assert process.stdout is not None
        await process.stdout.readline()
        connection.execute("SET lock_timeout = '300ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute("UPDATE held SET value = 3")
        process.kill()
        await process.wait()
        connection.execute("SET lock_timeout = '5s'")
        connection.execute("UPDATE held SET value = value + 10")
        assert connection.execute("SELECT value FROM held").fetchall() == [(11,)]
