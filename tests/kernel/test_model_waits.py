"""What node services show of model calls that wait, are tried again or fail: real gateways, HTTP and stores."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.errors import MetricsPortTaken
from understudy.node import projection
from understudy.prices import price_table
from understudy.testing.offline import Faults

from ..postgres import free_port
from . import kernel as k
from .test_exact_metrics import EventRows, get, shown, total, until


async def test_calls_that_wait_for_a_place_are_seen_while_they_do_and_after(store: str, tmp_path: Path) -> None:
    """Given an endpoint with one place that is taken, then the next call is shown as waiting by its profile; when both
    have ended, each has its wait, and their durations are without it."""
    async with k.running(store, tmp_path, frames=2, profile={"max_concurrency": 1}) as kernel:
        metrics = kernel.service.metrics
        kernel.server.hold()
        runs = [asyncio.create_task(kernel.run(f"s{number}", k.spec())) for number in range(2)]
        await until(lambda: total(shown(metrics), "understudy_model_calls_waiting", profile="offline") == 1)
        kernel.server.release()
        await asyncio.gather(*runs)
        await until(lambda: total(shown(metrics), "understudy_model_calls_waiting", profile="offline") == 0)
        found = shown(metrics)
        waited = "understudy_model_call_wait_seconds"
        assert total(found, f"{waited}_count", profile="offline") == 2
        ended = [row for row in EventRows(store).read() if row["type"] == "model_call_completed"]
        waits = [row["waited"]["offline"] for row in ended]
        assert total(found, f"{waited}_sum") == sum(waits) / 1e6
        assert min(waits) < max(waits)
        first, second = sorted(ended, key=lambda row: row["started_at"])
        assert second["started_at"] >= first["started_at"] + first["duration"] - 1_000  # when the place was free


async def test_a_call_that_failed_tells_of_its_tries(store: str, tmp_path: Path) -> None:
    """Given an endpoint that fails too often, then the failed call has its retries, its provider and its duration."""
    async with k.running(store, tmp_path, frames=1, faults=Faults(fail_first=4)) as kernel:
        await kernel.run("s", k.spec())
        found = shown(kernel.service.metrics)
        assert total(found, "understudy_model_retries_total", model="offline", reason="server_error") == 3
        failed = {
            "error_type": "model_unavailable",
            "gen_ai_provider_name": "openai",
            "gen_ai_request_model": "offline",
        }
        assert total(found, "gen_ai_client_inference_duration_seconds_count", **failed) == 1
        assert total(found, "gen_ai_client_inference_duration_seconds_sum", **failed) > 0
        assert total(found, "understudy_model_call_wait_seconds_count", profile="offline") == 1


async def test_costs_are_shown_in_their_currency(store: str, tmp_path: Path) -> None:
    """Given a price table that says its currency, then that is a label of what agents' calls cost, in its unit."""
    prices = price_table({"currency": "EUR", "offline": {"input": 1000, "output": 2000}})
    async with k.running(store, tmp_path, frames=1, prices=prices) as kernel:
        await kernel.run("s", k.spec())
        [spent] = [row["usage"][5] for row in EventRows(store).read() if row["type"] == "model_call_completed"]
        found = shown(kernel.service.metrics)
        assert spent > 0
        assert total(found, "understudy_model_cost_total", model="offline", currency="EUR") == spent / 1e6


async def test_a_port_that_was_asked_for_is_had_or_an_error(
    store: str, server: k.OfflineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a port that another service has, then the next one does not start and says why; when the port is free
    within its patience it has that one, and no other."""
    first, second = (k.Kernel(store, server, tmp_path, namespace=name) for name in ("one", "two"))
    port = free_port()
    for kernel in (first, second):
        kernel.serves, kernel.service.config = True, replace(kernel.service.config, metrics_port=port)
    await first.start(0)
    try:
        monkeypatch.setattr(projection, "TAKEN_SECONDS", 0.0)
        with pytest.raises(MetricsPortTaken, match=str(port)):
            await second.start(0)
        monkeypatch.setattr(projection, "TAKEN_SECONDS", 60.0)
        starting = asyncio.create_task(second.start(0))
    finally:
        await first.stop()
    await starting
    try:
        assert second.service.projection.address == f"127.0.0.1:{port}"
        assert "understudy_build_info" in await asyncio.to_thread(get, f"http://127.0.0.1:{port}/metrics")
    finally:
        await second.stop()
