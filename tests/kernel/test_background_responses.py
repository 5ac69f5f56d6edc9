"""Responses in background mode: nothing that dies has them paid again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from understudy.testing.offline import Faults, OfflineServer

from . import kernel as k

BACKGROUND = {"protocol": "responses", "background": True}
ROUNDS = 3
NONE = frozenset[str]()


def compiled(tmp_path: Path) -> dict[str, Any]:
    """An agent whose run takes a few rounds, with an effect in each but the last."""
    calls = [[("note", {"path": str(tmp_path / "notes"), "text": f"round {number}"})] for number in range(ROUNDS - 1)]
    return k.spec(k.script(*calls, "done"), tools=[k.note])


async def begin(kernel: k.Kernel, tmp_path: Path) -> None:
    """Have the session begin with its run."""
    await kernel.spawn("s", compiled(tmp_path))
    await kernel.send("s")


async def identified(kernel: k.Kernel, round_number: int = 1, fetches: int = 0, before: frozenset[str] = NONE) -> str:
    """Wait until the store knows the id of the response that the session waits for in a round, which is none of those
    before, and so many responses were fetched; returns the id. No event tells of it."""
    async with asyncio.timeout(k.STUCK_SECONDS):
        while True:
            row = await kernel.service.journal.submit(lambda tx: tx.find("s"))
            waits = row is not None and (row.wait, row.round) == ("model", round_number)
            if waits and row.response_id not in {"", *before} and kernel.server.stats.fetches >= fetches:
                return str(row.response_id)
            await asyncio.sleep(0.005)


async def outcome(kernel: k.Kernel, tmp_path: Path) -> tuple[Any, ...]:
    """What must be the same whatever died: transcript, effects, tokens, and which of them were paid again."""
    assert (await kernel.end("s"))["text"] == "done"
    info = await kernel.info("s")
    effects = k.notes(tmp_path / "notes")
    (tmp_path / "notes").unlink()
    return await kernel.transcript("s"), effects, info["tokens_used"], info["tokens_redone"]


async def undisturbed(tmp_path: Path) -> tuple[Any, ...]:
    """The same run with nothing that dies."""
    dsn = f"sqlite:///{tmp_path}/undisturbed.db"
    with OfflineServer() as server:
        async with k.running(dsn, tmp_path, frames=1, server=server, profile=BACKGROUND) as kernel:
            await begin(kernel, tmp_path)
            found = await outcome(kernel, tmp_path)
        assert (server.count, server.stats.fetches) == (ROUNDS, 0)
        return found


@pytest.mark.parametrize("dies", ["gateway", "gateway and node service", "everything"])
async def test_a_death_during_a_response_pays_nothing_again(
    store: str, tmp_path: Path, server: OfflineServer, dies: str
) -> None:
    """Given a response that the endpoint makes in the background, when its gateway dies, with the node service, or with
    everything, in each round of a run, then each response is fetched by its id, no token is paid again, and transcript
    and effects are those of a run in which nothing died."""
    expected = await undisturbed(tmp_path)
    kernel = k.Kernel(store, server, tmp_path, profile=BACKGROUND)
    await kernel.start(1)
    server.hold()
    await begin(kernel, tmp_path)
    for number in range(1, ROUNDS + 1):
        await identified(kernel, number)
        assert (server.count, server.stats.fetches) == (number, number - 1)
        kernel.gateway.kill()
        if dies == "gateway and node service":
            kernel.kill_node()
            await kernel.quiet()
        elif dies == "everything":
            await kernel.lose()
            numbers = kernel.numbers
            kernel = k.Kernel(store, server, tmp_path, profile=BACKGROUND)
            kernel.numbers = numbers
            await kernel.start(1)
        await identified(kernel, number, fetches=number)
        server.release()
        if number < ROUNDS:
            server.hold()
    found = await outcome(kernel, tmp_path)
    types = await kernel.types("s")
    await kernel.stop()
    assert (server.count, server.stats.cancelled) == (ROUNDS, 0)
    assert found == expected
    assert types.count("model_call_reissued") == ROUNDS


async def test_a_response_that_the_endpoint_does_not_have_any_more_is_made_anew(store: str, tmp_path: Path) -> None:
    """Given a response that can't be fetched any more, when its gateway dies twice, then it is made anew each time, and
    what that took is counted as paid again."""
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
