"""A server of the Model Context Protocol for tests, with faults: `python tests/mcp_server.py DIRECTORY`.

Its calls are lines in DIRECTORY/calls. A call of `hold` waits for DIRECTORY/go.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import anyio
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

DIRECTORY = Path(sys.argv[1])

server = MCPServer("test")


def note(text: str) -> None:
    """Append a line to the calls, in one write."""
    with (DIRECTORY / "calls").open("a") as file:
        file.write(f"{text} {os.getpid()}\n")


async def held(name: str = "go") -> None:
    """Wait for a file."""
    while not (DIRECTORY / name).exists():
        await anyio.sleep(0.005)


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    note(f"add {a} {b}")
    return str(a + b)


@server.tool()
async def hold(word: str) -> str:
    """Wait, then repeat a word."""
    note(f"hold {word}")
    await held()
    return f"held {word}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def look(word: str) -> str:
    """Wait, then repeat a word; it only reads."""
    note(f"look {word}")
    await held()
    return f"seen {word}"


@server.tool()
def hang() -> str:
    """Never answer, and nothing else either."""
    note("hang")
    time.sleep(3_600)
    return ""


@server.tool()
def slow() -> str:
    """Take long."""
    note("slow")
    time.sleep(0.5)
    return "slow"


@server.tool()
def die() -> str:
    """Die in the middle of the call."""
    note("die")
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


@server.tool()
def flood(size: int) -> str:
    """Say very much."""
    note("flood")
    sys.stderr.write("f" * size + "\n")
    return "x" * size


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("it does not work")


@server.tool()
def secret() -> str:
    """The variables that it has been given."""
    return f"{os.environ.get('TEST_MCP_SECRET', 'none')} {os.environ.get('UNDERSTUDY_OTHER_SECRET', 'none')}"


@server.tool()
def grow() -> str:
    """Offer another tool from now on."""

    @server.tool(name="grown")
    def grown() -> str:
        """It was not there before."""
        return "grown"

    return "done"


@server.resource("memo://welcome")
def welcome() -> str:
    """A memo."""
    return "Welcome."


@server.prompt()
def greet(name: str) -> str:
    """Greet somebody."""
    return f"Greet {name}."


if __name__ == "__main__":
    note("start")
    print(f"started with {os.environ.get('TEST_MCP_SECRET', 'nothing')}", file=sys.stderr)
    server.run("stdio")
