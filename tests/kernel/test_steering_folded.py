"""Steering and forks of sessions whose history is folded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.context import INPUT_CHARACTERS, REMOVED
from understudy.actors.folding import repeated
from understudy.messages import FOLD
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


@pytest.mark.parametrize("length", [1, 3_000], ids=["short", "long"])
async def test_all_inputs_of_a_run_stay_when_they_are_folded(tmp_path: Path, length: int) -> None:
    """Given a run of two inputs that were merged, and of a message that steered it, when all three are left out of what
    its model is sent, then what stands for them has each: whole, or its beginning and its end if they are long."""
    policy = Stepping(40)
    with OfflineServer(policy, window=6_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            server.hold()
            await kernel.spawn("s", {**compiled(window=6_000, fold="drop"), "follow_ups": "merge"})
            await kernel.send("s", "STEP 40", run_id="first")
            await kernel.until("s", "model_call_started")
            texts = [f"{name} begins {'x' * length} {name} ends" for name in ("one", "two", "three")]
            for name, text in zip("ab", texts, strict=False):
                await kernel.send("s", text, run_id=name)
            policy.steps = 120
            server.release()
            server.hold()
            await kernel.until("s", "run_merged")
            await kernel.ask("steer", "s", {"content": texts[2]})
            server.release()
            ended = await kernel.end("s", "a")
            views = [message for message in await kernel.messages("s") if message.get("origin") == FOLD]
            last = str(list(server.requests)[-1].body["messages"][1]["content"])
    assert (ended["status"], ended["text"]) == ("completed", "did all 120")
    assert len(views) > 3
    assert last.startswith(REMOVED)
    assert re.findall(r"(\w+) (begins|ends)", last) == [
        (name, end) for name in ("one", "two", "three") for end in ("begins", "ends")
    ]
    assert ("characters are left out" in last) is (length > 1)


def test_what_is_repeated_of_many_inputs_is_bounded() -> None:
    """Given more inputs of a run than can be repeated, then the first and the latest are, and how many are left out."""
    found = repeated([f"input {number} {'x' * 500} {number} ends" for number in range(5_000)])
    assert len(found) < 2 * INPUT_CHARACTERS
    assert [int(number) for number in re.findall(r"input (\d+) x", found)] == [0, *range(4_981, 5_000)]
    assert [int(number) for number in re.findall(r"(\d+) ends", found)] == [0, *range(4_981, 5_000)]
    assert "[… 4980 inputs are left out …]" in found
    assert repeated(["one", "two"]) == "one\n\ntwo"


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
