"""A session's history is sent to its gateway once: what follows brings what is new, unless the gateway has lost it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from understudy.gateway.gateway_calls import GatewayCalls
from understudy.protocol import CallOrigin, Steer
from understudy.records import ModelAnswer, ModelRequest

from . import kernel as k


def rounds(path: Path) -> dict[str, Any]:
    """An agent that asks its model five times."""
    calls = [[("look", {"path": str(path / "notes"), "text": f"note {number}"})] for number in range(4)]
    return k.spec(k.script(*calls, "done"), [k.look])


@pytest.fixture(autouse=True)
def brought() -> Iterator[list[ModelRequest]]:
    """The requests that gateways get; every text is worth keeping, and nobody sweeps."""
    found: list[ModelRequest] = []
    original = GatewayCalls.call

    async def call(
        calls: GatewayCalls, number: str, origin: CallOrigin, request: ModelRequest | None
    ) -> ModelAnswer | None:
        if request is not None:
            found.append(request)
        return await original(calls, number, origin, request)

    with (
        patch("understudy.actors.conversation.WORTH_KEEPING", 0),
        patch("understudy.node.sweep.SWEEP_SECONDS", 3_600.0),
        patch.object(GatewayCalls, "call", call),
    ):
        yield found


def sent(kernel: k.Kernel) -> list[list[dict[str, Any]]]:
    """What the model was asked, each time."""
    return [request.body["messages"] for request in kernel.server.requests]


def check_sent(kernel: k.Kernel) -> None:
    """Each request has all that the one before it had, and more."""
    asked = sent(kernel)
    assert [len(messages) for messages in asked] == [2, 4, 6, 8, 10]
    assert all(later[: len(one)] == one for one, later in pairwise(asked))


async def test_a_history_is_sent_once(brought: list[ModelRequest], tmp_path: Path) -> None:
    """Given a session of several rounds, then its gateway is brought what is new in each, and the model is sent all."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        await kernel.spawn("s", rounds(tmp_path))
        await kernel.send("s")
        assert (await kernel.end("s"))["text"] == "done"
        check_sent(kernel)
        assert len(brought) == 5
        assert not brought[0].left_out
        assert all(later.left_out == one.lasting > 0 for one, later in pairwise(brought))
        for number in range(4):  # twice: what is committed with a call is not known to last
            assert sum(f"noted note {number}".encode() in request.messages for request in brought) <= 2


@pytest.mark.parametrize("frames", [1, 2])
async def test_a_gateway_that_forgets_is_sent_all(
    brought: list[ModelRequest], frames: int, store: str, tmp_path: Path
) -> None:
    """Given a gateway that keeps nothing, and sessions that leave their frames, or need not, when a request leaves
    something out, then all of it is brought, and the call is made once, as the first attempt."""
    with patch("understudy.gateway.histories.KEPT_BYTES", 0):
        async with k.running(store, tmp_path, frames=frames) as kernel:
            names = ("first", "second")
            for name in names:
                await kernel.spawn(name, rounds(tmp_path))
                await kernel.send(name)
            for name in names:
                assert (await kernel.end(name))["text"] == "done"
                assert "model_call_reissued" not in await kernel.types(name)
            assert len(sent(kernel)) == 10
            assert kernel.service.sweep.swept == 0
            assert any(request.left_out for request in brought)
            assert sum(not request.left_out for request in brought) == 10


async def test_the_next_gateway_is_sent_all(brought: list[ModelRequest], store: str, tmp_path: Path) -> None:
    """Given a gateway that dies while a session is at its tools, when that asks again, then the next gateway is brought
    all messages, and no call is made twice."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        answers = 0

        def die(_number: int, label: str, _worker: k.Worker | None) -> None:
            nonlocal answers
            answers += label == "reply to step"
            if answers == 4:
                kernel.on_point = None
                kernel.gateway.kill()
                link = kernel.service.calls.link
                assert link.current is not None
                link.lost(link.current)  # as its next look at the gateway finds

        kernel.on_point = die
        await kernel.spawn("s", rounds(tmp_path))
        await kernel.send("s")
        assert (await kernel.end("s"))["text"] == "done"
        assert "model_call_reissued" not in await kernel.types("s")
        check_sent(kernel)
        assert [bool(request.left_out) for request in brought].count(False) == 2


async def test_a_call_that_lacks_messages_can_be_aborted(tmp_path: Path) -> None:
    """Given a call that nobody brings the messages of, when its run is cancelled, then it ends."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        lacking = asyncio.Event()

        async def lost(_call: Any) -> None:
            lacking.set()

        await kernel.spawn("s", rounds(tmp_path))
        with (
            patch("understudy.gateway.histories.KEPT_BYTES", 0), patch.object(kernel.service.calls, "_lost", lost),
        ):  # fmt: skip
            await kernel.send("s", run_id="r")
            await asyncio.wait_for(lacking.wait(), 10)
            await kernel.ask("cancel", "s", None, "enough")
            assert (await kernel.end("s"))["status"] == "cancelled"
        assert len(sent(kernel)) == 1


async def test_a_call_that_is_interrupted_while_its_messages_are_brought(tmp_path: Path) -> None:
    """Given a call whose messages its frame is bringing, when a steer interrupts it and that is committed first, then
    the session goes on with the steer, and no sweep has to find it."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        bring, answered = kernel.service.rounds._bring, kernel.service.answers.answered
        committed, steered = asyncio.Event(), list[bool]()

        async def noted(*args: Any) -> None:
            await answered(*args)
            committed.set()

        async def interrupted(*args: Any) -> None:
            if not steered:
                steered.append(True)
                committed.clear()
                await kernel.ask("steer", "s", Steer("stop that", interrupt=True))
                await asyncio.wait_for(committed.wait(), 10)
            await bring(*args)

        await kernel.spawn("s", rounds(tmp_path))
        with (
            patch("understudy.gateway.histories.KEPT_BYTES", 0),
            patch.object(kernel.service.rounds, "_bring", interrupted),
            patch.object(kernel.service.answers, "answered", noted),
        ):
            await kernel.send("s", run_id="r")
            assert (await kernel.end("s"))["text"] == "done"
        assert steered
        assert any(message["content"] == "stop that" for message in sent(kernel)[-1])
        assert kernel.service.sweep.swept == 0
