"""What a node service knows of its frames: which of them holds a session, also where a call to one was cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy.placement import DEFAULT
from understudy.records import ActivationId
from understudy.supervisor.turns import Ready

from . import kernel as k

pytestmark = pytest.mark.conformance


def _identity(kernel: k.Kernel, frame_id: str) -> dict[str, Any]:
    return {"frame_id": frame_id, "pid": 1, "node_id": kernel.service.config.node_id, "placement": DEFAULT}


async def test_a_frame_that_never_heard_of_its_session_is_given_it_again(store: str, tmp_path: Path) -> None:
    """Given a frame whose call was answered with a session and cut off, when it calls again and knows of none, then the
    session goes on under the next epoch at once, without a sweep."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        first = await kernel.service.step({"frame": _identity(kernel, "f"), "number": 1})
        again = await kernel.service.step({"frame": _identity(kernel, "f"), "number": 2})
        assert [(work["session_id"], work["epoch"]) for work in (first, again)] == [("s", 1), ("s", 2)]
        assert kernel.service.recovery.swept == 0


async def test_a_session_that_is_given_to_another_frame_is_held_by_that_one_only(store: str, tmp_path: Path) -> None:
    """Given a session that is queued and in a frame, as after a change of the node service, when a frame that leaves
    another session is given it, then the model's answer goes to that frame, and the session ends there."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        await kernel.service.step({"frame": _identity(kernel, "old"), "number": 1})
        paging = kernel.service.frames.paging

        def found(_number: int, label: str, _worker: k.Worker | None) -> None:
            if label == "reply to step" and kernel.service.frames.paging.holder("t") is not None:
                kernel.on_point = None
                paging.add(Ready("s", DEFAULT, "s", "takeover", epoch=1))

        kernel.on_point = found
        kernel.add_frame()
        assert (await kernel.run("t", k.spec(k.script("done"))))["status"] == "completed"
        assert (await kernel.end("s"))["status"] == "completed"
        assert paging.slots["old"].session_id is None
        assert kernel.service.recovery.swept == 0


async def test_a_frame_that_shall_be_killed_is_named_until_it_is_gone(store: str, tmp_path: Path) -> None:
    """Given a frame of before the node service's restart whose run is ended by force, then the supervisor is told of it
    as one to be looked for, until it says that the frame is dead: nothing is kept of it then."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        frames, activation = kernel.service.frames, ActivationId("s", 1, 1)
        row = {"frame_id": "old", "actor_pid": 1, "placement": DEFAULT, "root_id": "s"}
        frames.expect({**row, "session_id": "s", "incarnation": 1, "epoch": 1})
        frames.condemn("old", activation)
        assert (frames.named(), frames.condemned) == ({"old": 0}, {"old"})
        await kernel.service.recovery.frame_died("old", "process_died")
        assert (frames.named(), frames.condemned) == ({}, set())
