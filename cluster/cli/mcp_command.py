"""`understudy mcp`: agents as tools of the Model Context Protocol."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from understudy.errors import InvalidConfiguration, InvalidInput

from .command import Store, command, connected, errors

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Where the SDK refuses requests of other sites' pages by itself (DNS rebinding)."""

EXTRA = (
    "`understudy mcp` needs the official SDK of the protocol: pip install 'understudy[mcp]', or in a checkout "
    "`make install EXTRAS=mcp`"
)


@command
def mcp(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="agent.md, .toml or .json; one tool each.", exists=True, dir_okay=False),
    ],
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve streamable HTTP there, instead of stdin and stdout.")
    ] = None,
    store: Store = None,
) -> int:
    """Serve agents to programs that speak the Model Context Protocol: each agent is a tool.

    A call is a run of the cluster, which goes on when the client or this command ends: the same call with the same
    `run_id` finds it again. What the agent asks a person, the client asks, if it can.

    \b
    understudy mcp reviewer.md
    understudy mcp agents/*.md --http 127.0.0.1:8585

    Over HTTP it listens on this machine only: there is no authentication.
    """
    from ..client.agent_file import read_agent

    try:
        from ..client.mcp_server import AgentServer
        from ..client.mcp_transports import protocol_streams, serve_http, serve_streams
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise InvalidConfiguration(EXTRA) from None
    address = _address(http) if http is not None else None
    with nullcontext() if address is not None else protocol_streams() as streams:
        agents = [read_agent(file).spec for file in files]
        with connected(store) as cluster:
            server = AgentServer(cluster, agents)
            if address is not None:
                asyncio.run(serve_http(server, *address, _started))
            elif streams is not None:
                asyncio.run(serve_streams(server, streams))
    return 0


def _started(address: str) -> None:
    errors.print(f"serving at {address}", soft_wrap=True)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65_535:
        raise InvalidInput(f"--http: {text} is not of the form HOST:PORT")
    if host not in LOOPBACK:
        raise InvalidInput(
            f"--http: {host} can be reached from other machines, and there is no authentication: listen on 127.0.0.1, "
            "behind a proxy that has it"
        )
    return host, int(port)
