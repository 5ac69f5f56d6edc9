"""One long conversation with everything that a model's context is made of, undisturbed and killed after each commit."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from understudy.actors.directives import Inject
from understudy.actors.hooks import HookContext, describe_hook, hook
from understudy.actors.tools import tool
from understudy.store.db.statements import MESSAGE, SESSION, TOOL_CALL
from understudy.testing.offline import OfflineServer
from understudy.testing.policies import Reply, content_text

from . import kernel as k

pytestmark = pytest.mark.conformance

RUNS, ROUNDS = 15, 20
"""So many inputs, and rounds for each, without those in which the history is folded."""
WINDOW = 5_000
FILLING = "lorem ipsum dolor sit amet " * 20


@tool(on_crash="rerun")
async def step(number: int) -> str:
    """Take a step."""
    return f"did STEP {number}. {FILLING}"


@hook("run_start")
def style(context: HookContext) -> Inject:
    return Inject(f"Be brief about {context.text}.")


@hook("before_model")
def clock(context: HookContext) -> Inject:
    return Inject(f"This is round {context.round}.", visibility="this_round")


@hook("after_tools")
def remark(context: HookContext) -> Inject | None:
    return Inject(f"Well done in round {context.round}.") if context.round % 5 == 0 else None


def largest(pattern: str, body: dict[str, Any]) -> int:
    """The largest number behind this word in all that the model is sent."""
    found = (int(n) for m in body["messages"] for n in re.findall(rf"{pattern} (\d+)", content_text(m)))
    return max(found, default=0)


def policy(body: dict[str, Any]) -> Reply:
    """Steps up to the last goal, each known from what is sent only; notes and searches beside some of them."""
    done, goal = largest("STEP", body), largest("GOAL", body)
    last = content_text(body["messages"][-1])
    if last.startswith("Do not go on with the task now."):
        return Reply(text=f"On the way to GOAL {goal} I did STEP {done}.")
    if done >= goal:
        return Reply(text=f"reached GOAL {goal}")
    number = done + 1
    calls: list[tuple[str, dict[str, Any] | str]] = [("step", {"number": number})]
    if number % 10 == 3:
        calls.append(("add_note", {"key": f"n{number % 7}", "text": f"noted at STEP {number}"}))
    if number % 10 == 6:
        calls.append(("recall", {"query": f"STEP {max(1, number - 40)}.", "limit": 2}))
    if number % 10 == 8:
        calls.append(("todo", {"items": [{"text": f"go beyond {number}", "status": "in_progress"}]}))
    return Reply(tool_calls=tuple(calls))


@dataclass
class Observed:
    """What a conversation was, from outside."""

    requests: list[str]
    transcript: list[Any]
    texts: list[str]
    kills: int
    folds: int


def progress(kernel: k.Kernel) -> str:
    """What of the conversation is in the store."""
    with kernel.service.database.read() as connection:
        messages = connection.execute(select(func.max(MESSAGE.c.seq))).scalar()
        calls = connection.execute(select(TOOL_CALL.c.state, func.count()).group_by(TOOL_CALL.c.state)).all()
        round_ = connection.execute(select(SESSION.c.run_id, SESSION.c.round, SESSION.c.wait)).one()
    return f"{messages} {sorted(map(tuple, calls))} {tuple(round_)}"


async def conversation(directory: Path, *, deadly: bool) -> Observed:
    compiled = k.spec(
        "You take steps.", [step, "notes", "todo", "history"], max_rounds=1_000, repeat_limit=0,
        hooks=[describe_hook(item, pickle=None)[0] for item in (style, clock, remark)],
        context={"window": WINDOW},
        memory={
            "scopes": ["session"], "project": None, "max_tokens": 200, "share": 0.1, "providers": [], "timeout": 5.0
        },
        restart={**k.POLICY, "max_restarts": 10_000, "stuck_after": 1_000, "backoff": 0.0},
    )  # fmt: skip
    kills, known = 0, ""
    with OfflineServer(policy, window=WINDOW) as server:
        requests = server.requests = type(server.requests)(maxlen=None)
        async with k.running(f"sqlite:///{directory}/store.db", directory, server=server) as kernel:

            def on_point(_number: int, label: str, worker: k.Worker | None) -> None:
                nonlocal kills, known
                victim = worker or kernel.holder("s")
                if label != "after the commit" or victim is None or victim.dead:
                    return
                now = progress(kernel)
                if now != known:  # an activation is none: the next one would come to it and no further
                    known, kills = now, kills + 1
                    kernel.kill(victim)

            await kernel.spawn("s", compiled)
            kernel.on_point = on_point if deadly else None
            texts = []
            async with asyncio.timeout(500):
                for number in range(1, RUNS + 1):
                    await kernel.send("s", f"GOAL {number * (ROUNDS - 1)}", f"r{number}")
                    ended = await kernel.end("s", f"r{number}")
                    assert ended["status"] == "completed", ended["error"]
                    texts.append(ended["text"])
            kernel.on_point = None
            await kernel.quiet()
            messages = await kernel.messages("s")
            transcript = await kernel.transcript("s")
    folds = sum(message.get("origin") == "fold_answer" for message in messages)
    return Observed([json.dumps(r.body, sort_keys=True) for r in requests], transcript, texts, kills, folds)


@pytest.mark.thorough
@pytest.mark.timeout(500)
async def test_three_hundred_rounds_are_the_same_with_a_death_after_each_commit(tmp_path: Path) -> None:
    """Given a conversation of 300 rounds, ten times its model's window, with folds, memory, notes, searches and
    injected messages: killed after each commit, no request differs by a byte, nor does the transcript, and no request
    is sent twice."""
    for name in ("clean", "deadly"):
        (tmp_path / name).mkdir()
    clean = await conversation(tmp_path / "clean", deadly=False)
    deadly = await conversation(tmp_path / "deadly", deadly=True)
    print(f"{len(clean.requests)} requests, {clean.folds} folds, {deadly.kills} kills")
    assert clean.texts == [f"reached GOAL {number * (ROUNDS - 1)}" for number in range(1, RUNS + 1)]
    assert len(clean.requests) == RUNS * ROUNDS + clean.folds
    assert clean.folds > 10
    assert sum(len(str(entry[1])) for entry in clean.transcript) > 10 * 4 * WINDOW
    assert deadly.kills >= len(clean.requests)
    assert deadly.requests == clean.requests
    assert deadly.transcript == clean.transcript
    assert deadly.texts == clean.texts
