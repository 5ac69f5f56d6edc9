"""A console's page for tests: its server on a kernel or any other source, and a browser that opens it."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from playwright.async_api import Browser, async_playwright, expect

from understudy.cluster.client.results import ServiceInfo
from understudy.cluster.console.access import Binding, Person, token_digest
from understudy.cluster.console.application import application
from understudy.cluster.ray.console_actor import listen
from understudy.identifiers import new_identifier
from understudy.protocol import packed, unpacked
from understudy.reads import NodeLoad

from .kernel import kernel as k

WATCH_SECONDS = 20.0

expect.set_options(timeout=30_000)  # what is expected of a page waits so many milliseconds for it: a limit, not a speed


class KernelSource:
    """`fleet.Source` on a kernel; counts what it is asked."""

    def __init__(self, kernel: k.Kernel) -> None:
        self.kernel = kernel
        self.asked: list[str] = []
        self.problem: Exception | None = None

    async def read(self, kind: Any, what: str, *arguments: Any, **options: Any) -> Any:
        self.asked.append(what)
        if self.problem is not None:
            raise self.problem
        return unpacked(await self.kernel.ask("read", what, list(arguments), options), kind, what)

    async def services(self) -> list[ServiceInfo]:
        busy = {pid for _, pid in await self.kernel.ask("read", "holders", [], {})}
        own = os.getpid()
        frames = ["frame" if busy else "standby" for _ in self.kernel.workers]
        return [ServiceInfo(role, own, self.kernel.node_id, "") for role in ("supervisor", "node", *frames)]

    async def load(self, node_id: str) -> NodeLoad:
        return unpacked(await self.kernel.ask("load"), NodeLoad, "load")

    async def follow(self, session_id: str, after: int) -> AsyncIterator[dict[str, Any]]:
        client = new_identifier()
        while True:
            found = await self.kernel.ask("watch", client, {session_id: {"after": after}}, WATCH_SECONDS)
            for event in found["events"]:
                after = event["seq"]
                yield event

    async def act(self, method: str, session_id: str, *arguments: Any, by: str = "") -> Any:
        self.asked.append(method)
        return await self.kernel.ask(method, session_id, *packed(arguments), new_identifier(), by)

    async def drain(self, node_id: str, timeout: float, by: str = "") -> None:
        deadline = time.time_ns() // 1_000 + int(timeout * 1e6)
        nodes = [self.kernel.node_id, "another"]
        await self.kernel.ask("begin_drains", [node_id], deadline, f"asked for by {by}", False, nodes)

    async def undrain(self, node_id: str) -> bool:
        return bool(await self.kernel.ask("end_drains", [node_id]))


@asynccontextmanager
async def served(source: Any, token: str | None = None, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """The console's URL, without a slash at its end."""
    tokens = {token_digest(token): Person("console")} if token else {}
    binding = Binding("127.0.0.1", port, **{"tokens": tokens, **options})
    binding.check()
    listening = listen(binding)
    port = listening.getsockname()[1]
    app = application(source, replace(binding, port=port))
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1, proxy_headers=False)
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The system's browser."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        problem = "there is no Chromium: install the package chromium"
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()
