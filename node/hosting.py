"""What lives in a node service's process besides the service: its start, its health."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

from understudy import logs
from understudy.config import ModelProfile, Settings, without_password
from understudy.errors import InvalidConfiguration, StoreRefused
from understudy.identifiers import digest
from understudy.ports import ClusterHead, ModelGateway, TaskRunner, ToolHost
from understudy.reads import OwnerRecord
from understudy.redaction import know, passwords
from understudy.store.reads import queries
from understudy.telemetry import header_values, telemetry_of
from understudy.transport.channel import socket_directory
from understudy.transport.ends import machine_identity

from .basis import NodeConfig
from .command_processes import COMMANDS_PREFIX
from .node_service import NodeService
from .notices import Tell
from .service_link import Kill

log = logging.getLogger(__name__)


class NodeHost:
    """Starts the service on its first call, once, and says how it is.

    Args:
        settings: without secrets.
        whole: gives the same with them; its argument says that the store did not accept those it gave before.
    """

    def __init__(
        self, settings: Settings, whole: Callable[[bool], Awaitable[Settings]], node_id: str, span_directory: str,
        address: str, *, gateway: ModelGateway, tell: Tell, kill: Kill, runner: TaskRunner, tool_host: ToolHost,
        kill_tool_host: Kill, head: ClusterHead,
    ) -> None:  # fmt: skip
        os.umask(0o077)  # the store and the spans hold whole conversations
        logs.set_up("node", {**telemetry_of(os.environ), **settings.telemetry})
        self._whole, self._refused = whole, False
        self._node_id, self._span_directory, self._address = node_id, span_directory, address
        self._gateway, self._tell, self._kill, self._runner = gateway, tell, kill, runner
        self._tool_host, self._kill_tool_host, self._head = tool_host, kill_tool_host, head
        self._service: NodeService | None = None
        self._starting = asyncio.Lock()
        self._started = False
        self._last_beat = time.monotonic()
        self._beating: asyncio.Task[None] | None = None

    async def node(self) -> NodeService:
        """The started service. Raises what kept it from starting; the next call tries again."""
        if not self._started:
            async with self._starting:
                if not self._started:
                    await self._start(await self._whole(self._refused))
                    self._beating = asyncio.get_running_loop().create_task(self._beat())
                    self._started = True
        assert self._service is not None
        return self._service

    async def _start(self, settings: Settings) -> None:
        config = self._config(settings)
        if self._service is not None and self._service.config != config:  # made with secrets that the store refused
            self._service.database.close()
            self._service = None
        if self._service is None:
            self._service = NodeService(
                config, self._gateway, self._tell, self._kill, runner=self._runner,
                tool_host=self._tool_host, kill_tool_host=self._kill_tool_host, head=self._head,
            )  # fmt: skip
        try:
            await self._service.start()
        except StoreRefused:
            self._refused = True
            raise

    def _config(self, settings: Settings) -> NodeConfig:
        # The exporters read their variables themselves. What the connect says comes before what this node has.
        os.environ.update(settings.telemetry)
        telemetry = telemetry_of(os.environ)
        know(*passwords(settings.store), *header_values(telemetry))
        return NodeConfig(
            settings.store, settings.namespace, self._node_id, writer_of(settings.store, self._node_id),
            settings.metrics_port, self._span_directory, settings.schema_policy, self._address, telemetry,
            prices=settings.prices, command_directory=_command_directory(settings),
        )  # fmt: skip

    async def owner(self) -> str | None:
        """Who supervises, as the store says; None if that is not known here, as before the service has started."""
        if self._service is None or not self._started:
            return None
        owner: OwnerRecord | None = await self._service.reading.query(queries.owner)
        return owner.holder if owner is not None else None

    def metrics_address(self) -> str:
        """Where Prometheus finds this node's metrics."""
        return f"http://{self._service.projection.address}/metrics" if self._service and self._started else ""

    def known_profiles(self) -> list[ModelProfile]:
        """Credentials given to this service, for a supervisor that has lost its own copy."""
        return self._service.profiles.all() if self._service is not None else []

    def heard(self) -> None:
        """The supervisor has called."""
        if self._service is not None and self._started:
            self._service.supervisor_heard = time.monotonic()

    def health(self) -> dict[str, float]:
        """See `understudy.supervisor.ports.NodeHandle.probe`."""
        if not self._started or self._service is None:
            return {"silent": 0.0, "journal": 0.0, "failing": 0.0}
        journal = self._service.journal
        return {
            "silent": time.monotonic() - self._last_beat,
            "journal": journal.silence(),
            "failing": journal.outage.failing(),
        }

    async def close(self) -> None:
        """Stop the service."""
        if self._started and self._service is not None:
            await self._service.close()

    async def _beat(self) -> None:
        while True:
            self._last_beat = time.monotonic()
            await asyncio.sleep(0.5)


def writer_of(store: str, node_id: str) -> str:
    """What a node's log goes by in the store. Two services that commit at once must have different ones: the name has
    the whole id, since ids may begin alike (`RAY_OVERRIDE_NODE_ID_FOR_TESTING`). SQLite has one service, which may move
    to another node and goes on with the same log."""
    return "node" if store.startswith("sqlite") else f"node-{node_id}"


def _command_directory(settings: Settings) -> str:
    """Where commands in the background are found again; empty where there is no safe place for them.

    It is that of the machine, not of the node: a Ray that is restarted has other nodes.
    """
    try:
        name = digest(machine_identity(), settings.namespace, without_password(settings.store), size=8)
        return str(socket_directory() / f"{COMMANDS_PREFIX}{name}")
    except (InvalidConfiguration, OSError) as error:
        log.warning("there can be no commands in the background here: %s", error)
        return ""
