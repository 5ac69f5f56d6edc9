"""A death at every commit point, and between any two: the session's transcript is the same as without."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import or_, select

from understudy.messages import INTERRUPTED
from understudy.prices import Price
from understudy.store.db.statements import ACCOUNT

from .. import tiers
from . import kernel as k
from .deaths import Deaths

pytestmark = pytest.mark.conformance

TOOL_ROUNDS = 2


BUDGET = [{"scope": "tree", "tokens": 50_000, "rounds": 3}, {"scope": "run", "rounds": 3, "cost": 10**6}]
"""Not a round more than the session needs: one that was counted twice would end it early."""


def compiled(tool: Any, path: Path, budget: Any = None) -> dict[str, Any]:
    """Two rounds of tools, the second with two calls at once, then a third with the answer."""
    name = tool.__name__
    calls = [[(name, {"path": str(path), "text": f"{number}"})] for number in range(TOOL_ROUNDS)]
    calls[-1].append((name, {"path": str(path), "text": "twin"}))
    return k.spec(k.script(*calls, "all done"), [tool], budget=budget)


@dataclass
class Clean:
    """A run in which nobody dies: its transcript, what the model was asked, and its points."""

    transcript: list[Any]
    requests: list[str]
    points: list[str]


async def clean_run(kernel: k.Kernel, tool: Any, path: Path, budget: Any) -> Clean:
    start = len(kernel.points)
    await kernel.run("clean", compiled(tool, path, budget))
    transcript = await kernel.transcript("clean")
    assert [entry[0] for entry in transcript] == ["user", *["assistant", "tool"] * TOOL_ROUNDS, "tool", "assistant"]
    return Clean(transcript, asked(kernel, path), kernel.points[start:])


def asked(kernel: k.Kernel, path: Path) -> list[str]:
    """The messages of each model call of the session that works on this file."""
    texts = [json.dumps(request.body["messages"]) for request in kernel.server.requests]
    mine = [text.replace(f"/{path.name}", "/clean") for text in texts if f'/{path.name}\\"' in text]
    return [re.sub(r"call_(\d)_\d+_\d", r"call_\1", text) for text in mine]  # made unique with a `seq`


async def sweep(kernel: k.Kernel, tool: Any, directory: Path, victim: str, budget: Any = None) -> list[str]:
    """One session per point, with a death there; returns what was not as in the clean run."""
    clean = await clean_run(kernel, tool, directory / "clean", budget)
    problems = []
    for at in tiers.points(range(len(clean.points) + 4)):
        session_id, path = f"s{at}", directory / f"notes-{at}"
        deaths = Deaths(kernel, session_id, at, victim)
        try:
            ended = await kernel.run(session_id, compiled(tool, path, budget))
        except k.Stuck as stuck:
            problems.append(f"{deaths.where}: {stuck}")
            break
        kernel.on_point = None
        await kernel.quiet()
        kernel.check(session_id)
        where = deaths.where
        if ended["status"] != "completed":
            problems.append(f"{where}: ended as {ended['status']}: {ended['error']}")
        problems += [f"{where}: {text}" for text in await differences(kernel, tool, session_id, path, clean)]
        if victim == "frame" and len(asked(kernel, path)) != len(clean.requests):
            problems.append(f"{where}: {len(asked(kernel, path))} model calls instead of {len(clean.requests)}")
    return problems


async def differences(kernel: k.Kernel, tool: Any, session_id: str, path: Path, clean: Clean) -> list[str]:
    """How a session's transcript and effects differ from what they must be."""
    found = await kernel.transcript(session_id)
    effects = [line.partition("/")[2] for line in k.notes(path)]
    interrupted = {entry[3] for entry in found if entry[1] == INTERRUPTED}
    problems = []
    wanted = [paths(entry, "clean", path.name) for entry in clean.transcript]
    wanted = [(e[0], INTERRUPTED, *e[2:]) if e[3] in interrupted else e for e in wanted]
    if tool is k.look and interrupted:
        problems.append(f"harmless calls were not repeated: {sorted(interrupted)}")
    if tool is k.note and len(set(effects)) != len(effects):
        problems.append(f"effects happened twice: {effects}")
    if found != wanted:
        same = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(found))
        problems.append(f"after {same} messages comes {found[same:]}, not {wanted[same:]}")
    if not interrupted and (strange := set(asked(kernel, path)) - set(clean.requests)):
        problems.append(f"the model was asked something else: {[text[-400:] for text in strange]}")
    calls = {entry[3] for entry in clean.transcript if entry[0] == "tool"}
    if calls - set(effects) - interrupted:
        problems.append(f"calls never executed: {calls - set(effects) - interrupted}")
    return problems


def paths(entry: tuple[Any, ...], old: str, new: str) -> tuple[Any, ...]:
    """The entry with the name of another session's file in its calls' arguments."""
    calls = entry[2] and [[c, name, text.replace(f"/{old}", f"/{new}"), p] for c, name, text, p in entry[2]]
    return (*entry[:2], calls, *entry[3:])


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
@pytest.mark.parametrize("tool", [k.look, k.note], ids=["rerun", "report"])
async def test_a_death_anywhere_leaves_the_transcript_as_it_would_have_been(
    tool: Any, victim: str, tmp_path: Path
) -> None:
    """Frame or node service killed at each call, commit and tool of a session: no message is lost or doubled, no
    started call of a default tool runs twice, and a frame's death costs no model call."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        problems = await sweep(kernel, tool, tmp_path, victim)
    assert not problems, "\n".join(problems)


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_charges_a_budget_as_it_would_have_been(victim: str, tmp_path: Path) -> None:
    """The same under a budget of exactly as many rounds as the session needs: none is counted twice or kept reserved,
    and the books balance after every death."""
    prices = {"offline": Price(10**6, 10**6, 10**6)}
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, prices=prices) as kernel:
        problems = await sweep(kernel, k.look, tmp_path, victim, BUDGET)
        with kernel.service.database.read() as connection:
            left = connection.execute(select(ACCOUNT).where(or_(ACCOUNT.c.reserved != 0, ACCOUNT.c.beyond != 0))).all()
            rounds = connection.execute(select(ACCOUNT.c.spent).where(ACCOUNT.c.resource == "rounds")).scalars()
            assert (left, set(rounds)) == ([], {TOOL_ROUNDS + 1})
    assert not problems, "\n".join(problems)
