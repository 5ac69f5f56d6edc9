"""How the server of agents is reached: over the standard streams, or over HTTP."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper

import anyio
import uvicorn
from mcp.server.stdio import stdio_server

from .mcp_server import AgentServer

PATH = "/mcp"


@dataclass(frozen=True)
class Streams:
    """Standard input and output, for the protocol alone."""

    read: TextIOWrapper
    write: TextIOWrapper


@contextmanager
def protocol_streams() -> Iterator[Streams]:
    """Keep the standard streams for the protocol: meanwhile whatever is printed, by whoever in this process and those
    that it starts, goes to stderr, and nobody else reads stdin."""
    sys.stdout.flush()
    own = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3) for number in (0, 1)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        # A thread may be reading still when this ends: the descriptor must not come to be another file's.
        read = TextIOWrapper(os.fdopen(own[0], "rb", closefd=False), encoding="utf-8", errors="replace")
        yield Streams(read, TextIOWrapper(os.fdopen(own[1], "wb", closefd=False), encoding="utf-8"))
    finally:
        sys.stdout.flush()
        os.dup2(own[0], 0)
        os.dup2(own[1], 1)
        os.close(nothing)


async def serve_streams(agents: AgentServer, streams: Streams) -> None:
    """Serve one client over standard streams until it closes them; its runs go on."""
    server = agents.server()
    read, write = anyio.wrap_file(streams.read), anyio.wrap_file(streams.write)
    async with stdio_server(read, write) as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


async def serve_http(agents: AgentServer, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve clients over streamable HTTP until the process is asked to end; their runs go on.

    Args:
        port: 0 takes any that is free.
        started: is given the address once it is served.
    """
    app = agents.server().streamable_http_app(streamable_http_path=PATH, host=host)
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)
    sockets = [config.bind_socket()]
    shown = f"[{host}]" if ":" in host else host
    started(f"http://{shown}:{sockets[0].getsockname()[1]}{PATH}")
    await uvicorn.Server(config).serve(sockets=sockets)
