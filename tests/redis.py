"""A Redis server of our own, in which Ray's head keeps what it must not lose (GCS fault tolerance)."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .postgres import free_port

PATIENCE = 30.0


class RedisServer:
    """A server in a child process. Its file is not compressed, so that texts can be found in it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(directory),
            "save": "",
            "rdbcompression": "no",
        }
        command = ["redis-server", *(part for name, value in options.items() for part in (f"--{name}", value))]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                assert self.ask("PING") == b"+PONG"
                break
            except OSError:
                assert self._process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)

    @property
    def environment(self) -> dict[str, str]:
        """What makes a Ray head use it."""
        return {"RAY_REDIS_ADDRESS": f"127.0.0.1:{self.port}"}

    def ask(self, command: str) -> bytes:
        """The first line of the answer to a command."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            connection.sendall(command.encode() + b"\r\n")
            return connection.makefile("rb").readline().rstrip()

    def dump(self) -> bytes:
        """All that it holds."""
        assert self.ask("SAVE") == b"+OK"
        return (self._directory / "dump.rdb").read_bytes()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(PATIENCE)


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server, while the context lasts."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server (apt-get install redis-server)")
    directory = Path(tempfile.mkdtemp(prefix="understudy-redis-"))
    try:
        server = RedisServer(directory)
        try:
            yield server
        finally:
            server.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
