"""The console's first page with few sessions and with many: first paint, bytes, and the processor time of node
service and console while it is open. No Ray."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from functools import partial
from typing import Any

import psutil
import uvicorn
from harness import Bench, Limit, Row, median
from playwright.async_api import Browser, async_playwright
from scrape import FEW, add_sessions, one_service

from understudy.cluster.client.results import ServiceInfo
from understudy.cluster.console.access import Binding
from understudy.cluster.console.application import application
from understudy.identifiers import new_identifier
from understudy.node.node_service import NodeService
from understudy.node.requests import Requests
from understudy.protocol import unpacked
from understudy.store.operations import beginnings

PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
CHANGE_SECONDS = 0.1
AT_WORK = 'table[aria-label="Sessions at work"] tbody tr'
LISTED = 'table[aria-label="All sessions"] tbody tr'


class ServiceSource:
    """`fleet.Source` on a node service of this process."""

    def __init__(self, service: NodeService) -> None:
        self._requests = Requests(service)

    async def read(self, kind: Any, what: str, *arguments: Any, **options: Any) -> Any:
        return unpacked(await self._requests.read(what, list(arguments), options), kind, what)

    async def services(self) -> list[ServiceInfo]:
        return [ServiceInfo(role, os.getpid(), "node", "") for role in ("supervisor", "node")]

    async def act(self, method: str, session_id: str, *arguments: Any) -> Any:
        raise NotImplementedError

    drain = undrain = follow = load = act


def fleet_page(bench: Bench) -> list[Row]:
    """With 10 and with 10,000 sessions in the store of one service, all with work, ten of which change each second."""
    return asyncio.run(_measure(bench))


async def _measure(bench: Bench) -> list[Row]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        bench.say("there is no Chromium: the console's page is not measured")
        return []
    many = bench.some(10_000, 500)
    async with one_service(bench, "page") as service, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        await add_sessions(service, 0, FEW)
        few = await _looked_at(service, browser, bench, FEW)
        await add_sessions(service, FEW, many)
        bench.say(f"{many} sessions are there")
        found = await _looked_at(service, browser, bench, many)
        await browser.close()
    what, beside = f"{many:,} sessions", f"{FEW} sessions"
    return [
        Row("page", f"{name}, {what}", found[name], unit, few[name], beside, limit)
        for name, unit, limit in (
            ("first paint", "ms", Limit(1_000)), ("sessions listed", "ms", Limit(2_000)), ("requests", "", Limit(40)),
            ("sent until then", "kB", Limit(500)), ("rows in the page", "", Limit(400)),
            ("sent while open", "kB/s", None), ("processor while open", "% of a core", Limit(40)),
        )
    ]  # fmt: skip


async def _changing(service: NodeService, sessions: int) -> None:
    """Inputs for one session after another, until cancelled."""
    for number in itertools.count():
        session_id = f"session-{number % sessions}"
        given = partial(beginnings.accept, session_id=session_id, run_id=new_identifier(), content="more")
        await service.journal.submit(given, session_id)
        await asyncio.sleep(CHANGE_SECONDS)


async def _looked_at(service: NodeService, browser: Browser, bench: Bench, sessions: int) -> dict[str, float]:
    """The page opened several times, and left open for a while each time; medians."""
    changing = asyncio.create_task(_changing(service, sessions))
    server = uvicorn.Server(
        uvicorn.Config(application(ServiceSource(service), Binding("127.0.0.1", 0)), log_config=None, port=0)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    turns: dict[str, list[float]] = {}
    for _ in range(bench.some(5, 1)):
        for name, value in (await _opened(browser, f"http://127.0.0.1:{port}/", bench.some(10.0, 2.0))).items():
            turns.setdefault(name, []).append(value)
    changing.cancel()
    await asyncio.gather(changing, return_exceptions=True)
    server.should_exit = True
    await serving
    return {name: median(values) for name, values in turns.items()}


async def _opened(browser: Browser, url: str, seconds: float) -> dict[str, float]:
    page = await browser.new_page()
    network = await page.context.new_cdp_session(page)
    await network.send("Network.enable")
    requests, sent = 0, 0

    def asked(_event: Any) -> None:
        nonlocal requests
        requests += 1

    def received(event: Any) -> None:
        nonlocal sent
        sent += event["dataLength"]

    network.on("Network.requestWillBeSent", asked)
    network.on("Network.dataReceived", received)
    await page.goto(url)
    await page.locator(LISTED).first.wait_for()
    listed = await page.evaluate("performance.now()")
    painted = await page.evaluate(PAINTED)
    await page.locator(AT_WORK).first.wait_for()
    at_first, before = (requests, sent), psutil.Process().cpu_times()
    await asyncio.sleep(seconds)
    after = psutil.Process().cpu_times()
    rows = await page.locator("tbody tr").count()
    await page.close()
    return {
        "first paint": painted, "sessions listed": listed, "requests": at_first[0],
        "sent until then": at_first[1] / 1e3,
        "rows in the page": rows, "sent while open": (sent - at_first[1]) / 1e3 / seconds,
        "processor while open": 100 * (after.user + after.system - before.user - before.system) / seconds,
    }  # fmt: skip
