"""What lives in a node service's process besides the service: its start, its health, the offline model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

from understudy.actors.gateway import Gateway
from understudy.config import OFFLINE_MODEL, ModelProfile, Settings

from .node_service import NodeConfig, NodeService
from .ray_edge import clean_environment
from .requests import Requests

OFFLINE_LATENCY = "UNDERSTUDY_OFFLINE_LATENCY"


class NodeHost:
    """Starts the service on its first call, once, and says how it is."""

    def __init__(self, settings: Settings, node_id: str, span_directory: str) -> None:
        single = settings.store.startswith("sqlite")
        # One writer per log: with SQLite the one service may move to another node and goes on with the same log.
        writer = "node" if single else f"node-{node_id[:12]}"
        config = NodeConfig(settings.store, settings.namespace, node_id, writer, settings.metrics_port, span_directory)
        self._gateway = Gateway()
        self._service = NodeService(config, self._gateway, self._prepare_profile)
        self.requests = Requests(self._service)
        self._starting = asyncio.Lock()
        self._started = False
        self._last_beat = time.monotonic()
        self._beating: asyncio.Task[None] | None = None
        self._offline: subprocess.Popen[bytes] | None = None

    async def node(self) -> NodeService:
        """The started service. Raises what kept it from starting; the next call tries again."""
        if not self._started:
            async with self._starting:
                if not self._started:
                    await self._service.start()
                    self._beating = asyncio.get_running_loop().create_task(self._beat())
                    self._started = True
        return self._service

    def known_profiles(self) -> list[ModelProfile]:
        """Credentials given to this service, for a supervisor that has lost its own copy."""
        return [profile for profile in self._gateway.profiles() if profile.name != OFFLINE_MODEL]

    def health(self) -> dict[str, float]:
        """Seconds since the event loop and the journal's thread turned."""
        now = time.monotonic()
        if not self._started:
            return {"silent": 0.0, "journal": 0.0}
        return {"silent": now - self._last_beat, "journal": now - self._service.journal.last_beat}

    async def close(self) -> None:
        """Stop the service and the offline model."""
        if self._offline is not None:
            self._offline.kill()
            self._offline.wait()
        if self._started:
            await self._service.close()

    async def _beat(self) -> None:
        while True:
            self._last_beat = time.monotonic()
            await asyncio.sleep(0.5)

    async def _prepare_profile(self, name: str) -> None:
        """The offline model is a server of its own process, reached over HTTP like any other; it dies with this one."""
        if name != OFFLINE_MODEL or self._gateway.knows(OFFLINE_MODEL):
            return
        async with self._starting:
            if self._gateway.knows(OFFLINE_MODEL):
                return
            url = await asyncio.to_thread(self._start_offline)
            self._gateway.register(ModelProfile(OFFLINE_MODEL, "offline", url))

    def _start_offline(self) -> str:
        command = [sys.executable, "-m", "understudy.testing", "--port", "0", "--parent-death"]
        command += ["--latency", os.environ.get(OFFLINE_LATENCY, "0.05")]
        self._offline = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=clean_environment()
        )
        assert self._offline.stdout is not None
        ready: dict[str, Any] = json.loads(self._offline.stdout.readline())
        return str(ready["url"])
