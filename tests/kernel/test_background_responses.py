"""Responses in background mode: nothing that dies has them paid again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.config import Fallback, ModelProfile
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.store.operations import activation
from understudy.testing.offline import Faults, OfflineServer

from ..mcp_calls import until
from . import kernel as k

BACKGROUND = {"protocol": "responses", "background": True}
ROUNDS = 3
TRIES = 4
"""Of a call, at an endpoint that fails each one."""

NONE = frozenset[str]()


def compiled(tmp_path: Path) -> dict[str, Any]:
    """An agent whose run takes a few rounds, with an effect in each but the last."""
    calls = [[("note", {"path": str(tmp_path / "notes"), "text": f"round {number}"})] for number in range(ROUNDS - 1)]
    return k.spec(k.script(*calls, "done"), tools=[k.note])


async def begin(kernel: k.Kernel, tmp_path: Path) -> None:
    """Have the session begin with its run."""
    await kernel.spawn("s", compiled(tmp_path))
    await kernel.send("s")


async def identified(
    kernel: k.Kernel, round_number: int = 1, fetches: int = 0, before: frozenset[str] = NONE, *,
    at: OfflineServer | None = None,
) -> str:  # fmt: skip
    """Wait until the store knows the id of the response that the session waits for in a round, which is none of those
    before, and so many responses were fetched; returns the id. No event reports it.

    Args:
        at: the endpoint that makes the response, if not the kernel's.
    """
    stats = (at or kernel.server).stats
    async with asyncio.timeout(k.STUCK_SECONDS):
        while True:
            row = await kernel.service.journal.submit(lambda tx: tx.find("s"))
            waits = row is not None and (row.wait, row.round) == ("model", round_number)
            if waits and row.response_id not in {"", *before} and stats.fetches >= fetches:
                return str(row.response_id)
            await asyncio.sleep(0.005)


async def outcome(kernel: k.Kernel, tmp_path: Path) -> tuple[Any, ...]:
    """What must be the same whatever died: transcript, effects, tokens, and which of them were paid again."""
    assert (await kernel.end("s"))["text"] == "done"
    info = await kernel.info("s")
    effects = k.notes(tmp_path / "notes")
    (tmp_path / "notes").unlink()
    return await kernel.transcript("s"), effects, info["tokens_used"], info["tokens_redone"]


@pytest.fixture
def failing() -> Iterator[OfflineServer]:
    """An endpoint that fails each call."""
    with OfflineServer(faults=Faults(status_500=1.0)) as made:
        yield made


def kernel_of(maker: str, store: str, tmp_path: Path, server: OfflineServer, failing: OfflineServer) -> k.Kernel:
    """A kernel whose responses the server makes in the background: as its own endpoint, or as the fallback of the one
    that fails."""
    if maker == "its own endpoint":
        return k.Kernel(store, server, tmp_path, profile=BACKGROUND)
    spare = ModelProfile("spare", "key", server.url, protocol="responses", background=True)
    fallbacks = (Fallback("spare", "other"),)
    return k.Kernel(store, failing, tmp_path, profile={**BACKGROUND, "fallbacks": fallbacks}, others=[spare])


async def undisturbed(tmp_path: Path) -> tuple[Any, ...]:
    """The same run with nothing that dies."""
    dsn = f"sqlite:///{tmp_path}/undisturbed.db"
    with OfflineServer() as server:
        async with k.running(dsn, tmp_path, frames=1, server=server, profile=BACKGROUND) as kernel:
            await begin(kernel, tmp_path)
            found = await outcome(kernel, tmp_path)
        assert (server.count, server.stats.fetches) == (ROUNDS, 0)
        return found


@pytest.mark.parametrize("maker", ["its own endpoint", "a fallback"])
@pytest.mark.parametrize("dies", ["gateway", "gateway and node service", "everything"])
async def test_a_death_during_a_response_pays_nothing_again(
    store: str, tmp_path: Path, server: OfflineServer, failing: OfflineServer, dies: str, maker: str
) -> None:
    """Given a response that an endpoint makes in the background, perhaps a fallback's, when its gateway dies, with the
    node service, or with everything, in each round of a run, then each response is fetched by its id from the endpoint
    that has it, no token is paid again, and transcript and effects are those of a run in which nothing died."""
    expected = await undisturbed(tmp_path)

    def made() -> k.Kernel:
        return kernel_of(maker, store, tmp_path, server, failing)

    kernel = made()
    await kernel.start(1)
    server.hold()
    await begin(kernel, tmp_path)
    for number in range(1, ROUNDS + 1):
        await identified(kernel, number, at=server)
        assert (server.count, server.stats.fetches) == (number, number - 1)
        kernel.gateway.kill()
        if dies == "gateway and node service":
            kernel.kill_node()
            await kernel.quiet()
        elif dies == "everything":
            await kernel.lose()
            numbers = kernel.numbers
            kernel = made()
            kernel.numbers = numbers
            await kernel.start(1)
        await identified(kernel, number, fetches=number, at=server)
        server.release()
        if number < ROUNDS:
            server.hold()
    found = await outcome(kernel, tmp_path)
    events = await kernel.events("s")
    await kernel.stop()
    assert (server.count, server.stats.cancelled) == (ROUNDS, 0)
    assert failing.count == (TRIES * ROUNDS if maker == "a fallback" else 0)  # not asked when a call goes out again
    assert found == expected
    again = [event for event in events if event["type"] == "model_call_reissued"]
    of = {(event["data"]["response_profile"], event["data"]["response_model"]) for event in again}
    assert (len(again), of) == (ROUNDS, {("spare", "other") if maker == "a fallback" else ("offline", "offline")})


async def test_a_response_that_the_endpoint_does_not_have_any_more_is_made_again(store: str, tmp_path: Path) -> None:
    """Given a response that can't be fetched any more, when its gateway dies twice, then it is made again each time,
    and what that took is counted as paid again."""
    with OfflineServer(faults=Faults(lost_ids=1.0)) as server:
        async with k.running(store, tmp_path, frames=1, server=server, profile=BACKGROUND) as kernel:
            server.hold()
            await kernel.spawn("s", k.spec(k.script("done")))
            await kernel.send("s")
            known = frozenset({await identified(kernel)})
            for _ in range(2):
                kernel.gateway.kill()
                known |= {await identified(kernel, before=known)}
            server.release()
            assert (await kernel.end("s"))["text"] == "done"
            info = await kernel.info("s")
            assert info["tokens_used"] == info["tokens_redone"] > 0
            assert (server.count, server.stats.missed) == (3, 2)


async def test_a_response_of_a_run_that_ends_is_cancelled(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """Given a response that is being made, when its run is cancelled, then the endpoint is asked to end it, also by a
    gateway that has only fetched it; one whose gateway is closed goes on, for the next gateway."""
    async with k.running(store, tmp_path, frames=1, server=server, profile=BACKGROUND) as kernel:
        server.hold()
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        await identified(kernel)
        kernel.gateway.kill()
        await identified(kernel, fetches=1)
        assert server.stats.cancelled == 0
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        await asyncio.to_thread(server.wait, lambda stats: stats.cancelled == 1)
        server.release()


async def test_a_response_that_takes_too_long_is_cancelled(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """Given a response that is not over when the call's deadline is, then the run fails, and the endpoint is asked to
    end the response."""
    async with k.running(store, tmp_path, frames=1, server=server, profile=BACKGROUND) as kernel:
        server.hold()
        await kernel.spawn("s", k.spec(k.script("done"), deadline=0.5))
        await kernel.send("s")
        assert (await kernel.end("s"))["error"]["code"] == "model_unavailable"
        await asyncio.to_thread(server.wait, lambda stats: stats.cancelled == 1)
        server.release()


@pytest.mark.parametrize("maker", ["its own endpoint", "a fallback"])
@pytest.mark.parametrize("shutdown", [None, 0])
async def test_a_cancel_reaches_a_response_that_no_gateway_has(
    store: str, tmp_path: Path, server: OfflineServer, failing: OfflineServer, shutdown: int | None, maker: str
) -> None:
    """Given a response that is being made when everything dies, when its run is cancelled before any gateway has the
    call again, by force or not, then a gateway of whoever ends the run asks the endpoint that has it to end it."""
    kernel = kernel_of(maker, store, tmp_path, server, failing)
    await kernel.start(1)
    server.hold()
    await kernel.spawn("s", k.spec(k.script("done"), shutdown=shutdown))
    await kernel.send("s")
    await identified(kernel, at=server)
    await kernel.lose()
    again = kernel_of(maker, store, tmp_path, server, failing)
    again.numbers = kernel.numbers
    await again.start(0)
    await again.ask("cancel", "s", "r", "enough")
    assert server.stats.cancelled == 0 or shutdown == 0
    again.add_frame()
    assert (await again.end("s"))["status"] == "cancelled"
    await asyncio.to_thread(server.wait, lambda stats: stats.cancelled == 1)
    assert (server.count, server.stats.fetches) == (1, 0)
    server.release()
    await again.stop()


@pytest.mark.parametrize("ends", ["cancel", "steer"])
async def test_a_response_is_cancelled_whose_gateway_has_died(
    store: str, tmp_path: Path, server: OfflineServer, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Given a response that is being made, when its gateway dies, and its run is cancelled, or its round interrupted,
    before there is another gateway, then that one asks the endpoint to end the response."""
    attach, may_attach = GatewayCalls.attach, asyncio.Event()

    async def later(calls: GatewayCalls, *arguments: Any) -> Any:
        await may_attach.wait()
        return await attach(calls, *arguments)

    async with k.running(store, tmp_path, frames=1, server=server, profile=BACKGROUND) as kernel:
        server.hold()
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        await identified(kernel)
        monkeypatch.setattr(GatewayCalls, "attach", later)
        kernel.gateway.kill()
        if ends == "cancel":
            await kernel.ask("cancel", "s", "r", "enough")
        else:
            await kernel.ask("steer", "s", {"content": "rather this", "interrupt": True})
        may_attach.set()
        await asyncio.to_thread(server.wait, lambda stats: stats.cancelled == 1)
        server.release()
        assert (await kernel.end("s"))["status"] == ("cancelled" if ends == "cancel" else "completed")
        assert (server.count, server.stats.cancelled) == (1 if ends == "cancel" else 2, 1)


async def test_a_response_of_a_session_that_is_given_up_is_asked_of_nobody_else(
    store: str, tmp_path: Path, server: OfflineServer
) -> None:
    """Given a response that is being made, when its session is quarantined, then the endpoint is asked to end it, and
    neither the endpoint nor its fallback is asked for another one."""
    with OfflineServer() as other:
        spare = ModelProfile("spare", "key", other.url)
        profile = {**BACKGROUND, "fallbacks": (Fallback("spare"),)}
        async with k.running(store, tmp_path, frames=1, server=server, profile=profile, others=[spare]) as kernel:
            server.hold()
            await kernel.spawn("s", k.spec(k.script("done")))
            await kernel.send("s")
            await identified(kernel)
            await kernel.service.journal.submit(
                lambda tx: activation.quarantine(tx, tx.session("s"), "stuck", "it dies each time"), "s"
            )
            assert (await kernel.end("s"))["status"] == "quarantined"
            await asyncio.to_thread(server.wait, lambda stats: stats.cancelled >= 1)
            await until(lambda: not kernel.gateway.calls.held)
            server.release()
        assert (server.count, other.count) == (1, 0)
