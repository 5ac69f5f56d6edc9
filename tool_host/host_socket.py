"""The tool host's socket, for its node service alone. No Ray."""

from __future__ import annotations

from understudy.ports import ToolHost
from understudy.transport.service_socket import ServiceSocket


class ToolHostSocket(ServiceSocket):
    """Answers a node service on its socket, and who takes another way.

    Args:
        node_id: a part of the socket's name.
        servers: does what is asked for.
    """

    def __init__(self, node_id: str, servers: ToolHost) -> None:
        super().__init__(f"tools-{node_id[:12]}", ToolHost, servers)
