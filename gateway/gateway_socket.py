"""The gateway's socket, for its node service alone. No Ray."""

from __future__ import annotations

from understudy.ports import ModelGateway
from understudy.transport.service_socket import ServiceSocket


class GatewaySocket(ServiceSocket):
    """Answers a node service on its socket, and who takes another way.

    Args:
        node_id: a part of the socket's name.
        calls: does what is asked for.
    """

    def __init__(self, node_id: str, calls: ModelGateway) -> None:
        super().__init__(f"gateway-{node_id[:12]}", ModelGateway, calls)
