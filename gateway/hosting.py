"""What lives in a gateway's process besides its calls: the offline model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from understudy.config import OFFLINE_MODEL, ModelProfile
from understudy.environment import for_services

from .gateway import Gateway
from .gateway_calls import GatewayCalls


class GatewayHost:
    """Makes model calls, also of the offline model: a server of its own process, reached over HTTP like any other.

    Args:
        latency: of the offline model, in seconds.
    """

    def __init__(self, latency: float) -> None:
        self._gateway = Gateway()
        self.calls = GatewayCalls(self._gateway, self._prepare)
        self._latency = latency
        self._starting = asyncio.Lock()
        self._offline: subprocess.Popen[bytes] | None = None

    async def _prepare(self, name: str) -> None:
        if name != OFFLINE_MODEL or self._gateway.knows(OFFLINE_MODEL):
            return
        async with self._starting:
            if self._gateway.knows(OFFLINE_MODEL):
                return
            url = await asyncio.to_thread(self._start_offline)
            self._gateway.register(ModelProfile(OFFLINE_MODEL, "offline", url))

    def _start_offline(self) -> str:
        """It dies with this process."""
        command = [sys.executable, "-m", "understudy.testing", "--port", "0", "--parent-death"]
        command += ["--latency", str(self._latency)]
        self._offline = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=for_services())
        assert self._offline.stdout is not None
        ready: dict[str, Any] = json.loads(self._offline.stdout.readline())
        return str(ready["url"])
