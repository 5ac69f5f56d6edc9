"""What tests of MCP servers have in common: the test server, what it has noted, and waiting for what it does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parent / "mcp_server.py"


def command(directory: Path, *arguments: str) -> list[str]:
    """Starts the test server, which notes its calls in a directory."""
    return [sys.executable, str(SCRIPT), str(directory), *arguments]


def _noted(directory: Path) -> list[tuple[str, int]]:
    path = directory / "calls"
    lines = [line.rpartition(" ") for line in path.read_text().splitlines()] if path.exists() else []
    return [(call, int(pid)) for call, _, pid in lines]


def calls(directory: Path) -> list[str]:
    """The calls that the server has noted."""
    return [call for call, _ in _noted(directory)]


def pids(directory: Path, call: str) -> list[int]:
    """The processes that have noted a call."""
    return [pid for noted, pid in _noted(directory) if noted == call]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what no event tells of."""
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def until_called(directory: Path, call: str, count: int = 1) -> int:
    """The pid of the server's process, once it has noted a call so often."""
    await until(lambda: calls(directory).count(call) >= count)
    return pids(directory, call)[-1]
