"""Long histories: what a model is sent stays within its window, goes on for ever, and is the same after any death."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.tools import ToolContext, tool
from understudy.testing.offline import OfflineServer
from understudy.testing.policies import Refusal, Reply, content_text

from .. import tiers
from . import kernel as k
from .deaths import Deaths

pytestmark = pytest.mark.conformance

INSTRUCTED = "Do not go on with the task now."
FILLING = "lorem ipsum dolor sit amet " * 20


@tool(on_crash="rerun")
async def step(number: int, context: ToolContext) -> str:
    """Take a step."""
    worker = k.WORKER.get()
    assert worker is not None
    await worker.kernel.point("tool begins", worker)
    return f"did STEP {number}. {FILLING}"


def seen(body: dict[str, Any]) -> int:
    """The last step that the model can know of from what it is sent."""
    return max((int(n) for m in body["messages"] for n in re.findall(r"STEP (\d+)", content_text(m))), default=0)


class Stepping:
    """A model that takes steps, one after the other, and only knows how far it is from what it is sent.

    Args:
        refuses: so many requests for a summary are refused, for another reason than their length.
        empty: it answers requests for a summary with nothing.
    """

    def __init__(self, steps: int, *, refuses: int = 0, empty: bool = False) -> None:
        self.steps, self.refuses, self.empty, self.folds = steps, refuses, empty, 0

    def __call__(self, body: dict[str, Any]) -> Reply:
        last = body["messages"][-1]
        if last["role"] == "user" and content_text(last).startswith(INSTRUCTED):
            self.folds += 1
            assert body.get("tool_choice") == "none"
            if self.folds <= self.refuses:
                raise Refusal(403, "no summaries today")
            return Reply(text="" if self.empty else f"So far I did STEP {seen(body)}.")
        done = seen(body)
        if done >= self.steps:
            return Reply(text=f"did all {done}")
        return Reply(tool_calls=(("step", {"number": done + 1}),))


def bodies(server: OfflineServer) -> list[str]:
    """What was asked, in order."""
    return [json.dumps(request.body, sort_keys=True) for request in server.requests]


def compiled(**context: Any) -> dict[str, Any]:
    return k.spec("You take steps.", [step], context=context, max_rounds=1_000)


async def run(kernel: k.Kernel, session_id: str = "s", **context: Any) -> dict[str, Any]:
    return await kernel.run(session_id, compiled(**context))


def sent(server: OfflineServer) -> list[int]:
    """The length of each request's messages, in tokens as the server counts."""
    return [len(json.dumps(request.body["messages"])) // 4 for request in server.requests]


@pytest.mark.parametrize("fold", ["summarise", "notes", "drop"])
@pytest.mark.parametrize("representation", ["full", "terse"])
async def test_a_run_ten_times_the_window_goes_on(fold: str, representation: str, tmp_path: Path) -> None:
    """Given a window for some 10 of 100 steps: the run takes them all, no request is refused as too long, and all the
    log is there in the end."""
    policy = Stepping(100)
    with OfflineServer(policy, window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            ended = await run(kernel, window=2_000, fold=fold, representation=representation)
            messages = await kernel.messages("s")
    assert (ended["status"], ended["text"]) == ("completed", "did all 100")
    assert max(sent(server)) <= 2_000
    assert sum(message["role"] == "tool" for message in messages) == 100
    assert server.stats.requests == len(server.requests) == 101 + policy.folds
    assert (policy.folds > 3) is (fold != "drop")


async def test_the_window_is_learned_when_the_endpoint_refuses(tmp_path: Path) -> None:
    """Given no window: the run goes on after the first refusal, and no other request is refused."""
    with OfflineServer(Stepping(40), window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            ended = await run(kernel)
            failed = [e for e in await kernel.events("s") if e["type"] == "model_call_failed"]
    assert ended["status"] == "completed", ended
    assert [event["data"]["error_code"] for event in failed] == ["context_overflow"]


async def test_a_wrong_window_is_corrected(tmp_path: Path) -> None:
    """Given a specification that says four times the window that there is: the run goes on all the same."""
    with OfflineServer(Stepping(60), window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            ended = await run(kernel, window=8_000)
    assert ended["status"] == "completed", ended


async def test_without_folds_the_run_fails_as_the_endpoint_says(tmp_path: Path) -> None:
    """`fold="none"` with the full representation sends everything: the run ends with the endpoint's own refusal."""
    with OfflineServer(Stepping(60), window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            ended = await run(kernel, window=2_000, fold="none", representation="full")
    assert (ended["status"], ended["error"]["code"]) == ("failed", "context_overflow")


@pytest.mark.parametrize("policy", [Stepping(60, refuses=1_000), Stepping(60, empty=True)], ids=["refused", "empty"])
async def test_a_failed_summary_costs_no_run(policy: Stepping, tmp_path: Path) -> None:
    """Given an endpoint that gives no summaries: messages are left out without, and nobody asks in every round."""
    with OfflineServer(policy, window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            ended = await run(kernel, window=2_000)
    assert ended["status"] == "completed", ended
    assert 0 < policy.folds < 30


async def test_one_message_that_is_too_long_bricks_nothing(tmp_path: Path) -> None:
    """Given an input that is longer than the window alone: it is shortened until the endpoint accepts the request."""
    with OfflineServer(window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            ended = await kernel.run("s", k.spec("", context={"window": 2_000}), "word " * 20_000)
            again = await kernel.send("s", "short", "second")
            second = await kernel.end("s", "second")
    assert (ended["status"], again, second["status"]) == ("completed", True, "completed")


async def test_a_long_result_is_read_in_parts(tmp_path: Path) -> None:
    """A result of 200,000 characters is in the log in full; the model is shown its ends, and reads the rest by its
    `seq`."""

    def policy(body: dict[str, Any]) -> Reply:
        results = [content_text(m) for m in body["messages"] if m["role"] == "tool"]
        if not results:
            return Reply(tool_calls=(("dump", {}),))
        if len(results) == 1:
            assert len(results[0]) < 2_000
            found = re.search(r"read_message with number (\d+) has them", results[0])
            assert found is not None
            arguments = {"number": int(found[1]), "offset": 100_000, "length": 30}
            return Reply(tool_calls=(("read_message", arguments),))
        return Reply(text=results[1])

    with OfflineServer(policy) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            kernel_tools = k.spec("", ["history"], context={"longest_result": 1_000})
            kernel_tools["tools"] += k.spec("", [module_dump])["tools"]
            ended = await kernel.run("s", kernel_tools)
    assert "characters 100000 to 100030 of 195000" in ended["text"]
    assert ended["text"].endswith("".join(f"[line {n:06}]" for n in range(15_000))[100_000:100_030])


@tool(name="dump", on_crash="rerun")
async def module_dump() -> str:
    """A long text."""
    return "".join(f"[line {number:06}]" for number in range(15_000))


async def test_what_was_folded_is_found_again(tmp_path: Path) -> None:
    """Given messages that were folded away: `recall` finds them by their words, whatever the case, and none else."""

    def policy(body: dict[str, Any]) -> Reply:
        last = body["messages"][-1]
        if last["role"] == "user" and content_text(last) == "find it":
            return Reply(tool_calls=(("recall", {"query": "Step 3. LOREM"}), ("recall", {"query": "nowhere"})))
        if last["role"] == "tool" and "nowhere" in content_text(last):
            return Reply(text="\n".join(content_text(m) for m in body["messages"][-2:]))
        return Stepping(20)(body)

    with OfflineServer(policy, window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            await kernel.run("s", k.spec("", [step, "history"], context={"window": 2_000}, max_rounds=100))
            await kernel.send("s", "find it", "second")
            ended = await kernel.end("s", "second")
    assert "STEP 3" not in str(server.requests[-3].body["messages"])
    assert re.search(r"message \d+, result of step: did STEP 3\. lorem", ended["text"])
    assert "STEP 4" not in ended["text"]
    assert ended["text"].endswith("No message has all of: nowhere.")


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_changes_no_request(victim: str, tmp_path: Path) -> None:
    """Given a run that folds several times: killed at each point, it asks its model the same, byte for byte."""
    clean: list[str] = []
    problems: list[str] = []

    async def once(at: int | None) -> int:
        with OfflineServer(Stepping(8), window=2_000) as server:
            directory = tmp_path / str(at)
            directory.mkdir()
            async with k.running(f"sqlite:///{directory}/store.db", directory, server=server) as kernel:
                start = len(kernel.points)
                if at is not None:
                    Deaths(kernel, "s", at, victim)
                ended = await run(kernel, window=2_000, fold_at=0.5)
                kernel.on_point = None
                await kernel.quiet()
                points = len(kernel.points) - start
        asked = bodies(server)
        if at is None:
            clean.extend(asked)
        elif ended["status"] != "completed" or list(dict.fromkeys(asked)) != clean:
            problems.append(f"point {at}: {ended['status']}, {len(asked)} requests")
        elif victim == "frame" and len(asked) != len(clean):
            problems.append(f"point {at}: {len(asked)} model calls instead of {len(clean)}")
        return points

    points = await once(None)
    assert sum(INSTRUCTED in text for text in clean) >= 2
    for at in tiers.points(range(points)):
        await once(at)
    assert not problems, "\n".join(problems)


async def test_a_death_after_every_commit_changes_no_request(tmp_path: Path) -> None:
    """Given a run of 60 steps that folds again and again, whose process is killed after each commit: no request and no
    message is another one than in a run without deaths."""

    async def once(directory: Path, deadly: bool) -> tuple[list[str], list[Any], int]:
        kills = 0
        with OfflineServer(Stepping(60), window=2_000) as server:
            async with k.running(f"sqlite:///{directory}/store.db", directory, server=server) as kernel:

                def on_point(_number: int, label: str, worker: k.Worker | None) -> None:
                    nonlocal kills
                    holder = worker or kernel.holder("s")
                    if label == "after the commit" and holder is not None:
                        kills += 1
                        kernel.kill(holder)

                kernel.on_point = on_point if deadly else None
                async with asyncio.timeout(120):
                    ended = await run(kernel, window=2_000)
                kernel.on_point = None
                await kernel.quiet()
                assert ended["status"] == "completed", ended
                return bodies(server), await kernel.transcript("s"), kills

    for name in ("clean", "deadly"):
        (tmp_path / name).mkdir()
    clean = await once(tmp_path / "clean", deadly=False)
    deadly = await once(tmp_path / "deadly", deadly=True)
    assert deadly[2] > 60
    assert deadly[0] == clean[0]
    assert deadly[1] == clean[1]
