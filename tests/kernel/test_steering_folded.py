"""Steering and forks of sessions whose history is folded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from understudy.records import STEER
from understudy.testing.offline import OfflineServer
from understudy.testing.policies import Reply

from . import kernel as k
from .test_context import Stepping, compiled, run


class Slow(Stepping):
    """Its first summary takes a minute."""

    def __call__(self, body: dict[str, Any]) -> Reply:
        folds, reply = self.folds, super().__call__(body)
        return replace(reply, delay=60.0) if self.folds > folds == 0 else reply


async def test_a_fork_of_a_folded_session_is_sent_the_same(tmp_path: Path) -> None:
    """Given a session whose history was folded, when it is forked and both get the same input, then both models are
    sent the same bytes: the summary stands for the same messages in both."""
    with OfflineServer(Stepping(30), window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            assert (await run(kernel, window=2_000))["status"] == "completed"
            last = (await kernel.messages("s"))[-1]["seq"]
            await kernel.ask("fork", "s", {"session_id": "f", "at": last})
            for session_id in ("s", "f"):
                await kernel.send(session_id, "and now?", run_id="q")
                assert (await kernel.end(session_id, "q"))["status"] == "completed"
            first, second = (json.dumps(request.body, sort_keys=True) for request in list(server.requests)[-2:])
    assert first == second
    assert "So far I did STEP" in first


async def test_an_interrupted_summary_is_none(tmp_path: Path) -> None:
    """Given a model call for a summary, when the run is interrupted, then nothing is made of what came of it, the model
    is sent the message, and the run goes on."""
    policy = Slow(20)
    with OfflineServer(policy, window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            await kernel.spawn("s", compiled(window=2_000))
            await kernel.send("s")
            after, asked = 0, False
            while not asked:
                found = await kernel.ask("watch", "s/fold", {"s": {"after": after}}, 30.0)
                after = found["events"][-1]["seq"]
                asked = any(event["data"].get("purpose") for event in found["events"])
            await kernel.ask("steer", "s", {"content": "quick", "interrupt": True})
            assert (await kernel.end("s"))["status"] == "completed"
            messages = await kernel.messages("s")
            aborted = [e for e in await kernel.events("s") if e["type"] == "model_call_failed"]
    assert [event["data"]["error_code"] for event in aborted] == ["aborted"]
    assert [message["content"] for message in messages if message.get("origin") == STEER] == ["quick"]
