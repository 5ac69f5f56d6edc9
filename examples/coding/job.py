"""The job "mend a repository": an agent with file tools and a shell in a sandbox, and, if asked, kills on the way."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from understudy.cluster.client.client import Cluster
from understudy.cluster.ray.ray_edge import nodes_here
from understudy.config import OFFLINE_MODEL
from understudy.errors import DeadlineExceeded
from understudy.spec import AgentSpec

from ..chaos import RESTART, Chaos, Count
from . import repository
from .repository import Judgement

STRIKE_SECONDS = 0.02
RUN_ID = "mend"

INSTRUCTIONS = """You mend the repository that is your workspace. Find out with `python3 -m unittest` which tests fail,
read the code, change it with apply_patch (never the tests), and run the tests again. Once they pass, commit your work
with git, and say in a sentence what was wrong."""

OFFLINE_LINE = "\noffline-policy: understudy.examples.coding.policy:policy"


@dataclass(frozen=True)
class CodingOutcome:
    """What became of the repository, and what it took.

    Attributes:
        judgement: of the repository, by its tests and its history.
        text: the agent's answer.
        killed: session actors that were killed on purpose before the work ended; `wanted`: how many were to be.
        restore_ms: for each crash in the midst of work, from the kill until the session was active again.
        tokens_redone: of model calls that were answered a second time.
        tool_calls_repeated: executions of tools whose result was there, or which may not run twice.
        interrupted: calls whose outcome was not known after a crash, which was reported to the model.
        messages_lost: gaps in the logs, and tool calls without a result.
        seconds: from the input to the end.
    """

    judgement: Judgement
    status: str
    text: str
    wanted: int
    killed: int
    crashes: int
    restore_ms: list[float]
    tokens: int
    tokens_redone: int
    tool_calls: int
    tool_calls_repeated: int
    interrupted: int
    messages_lost: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether the work is done, once, and nothing was lost or paid again."""
        done = self.judgement == Judgement(passes=True, commits=1, clean=True) and self.status == "completed"
        return done and not (self.tokens_redone or self.tool_calls_repeated or self.messages_lost)


def coder(directory: Path, model: str | None, *, offline: bool) -> AgentSpec:
    """The agent.

    Args:
        model: None for the cluster's.
        offline: the model is the offline one, which is given its part.
    """
    return AgentSpec(
        name="coder", instructions=INSTRUCTIONS + (OFFLINE_LINE if offline else ""), model=model,
        workspace=str(directory), tools=["files", "bash"], restart=RESTART, max_rounds=60,
        repeat_limit=0,  # a call that is cut off by kill after kill has to be asked for again
    )  # fmt: skip


def mend(
    cluster: Cluster, directory: Path, *, kills: int = 0, seed: int = 0, model: str | None = None
) -> CodingOutcome:
    """Make the repository, have it mended, and judge the result.

    Args:
        directory: empty, or not there.
        kills: session actors to SIGKILL on the way; only processes of this machine are.
        seed: of the choice of moments.

    Raises:
        InvalidInput: the directory is not empty.
    """
    repository.create(directory)
    offline = (model or cluster._settings.model) == OFFLINE_MODEL
    started = time.monotonic()
    session = cluster.spawn(coder(directory, model, offline=offline))
    run = session.send("The tests of this repository fail. Mend it.", run_id=RUN_ID)
    chaos = Chaos(kills, random.Random(seed), nodes_here() if kills else set())
    while True:
        try:
            result = run.result(timeout=STRIKE_SECONDS if chaos.left else 1.0)
            break
        except DeadlineExceeded:
            chaos.strike(session.tree())
    seconds = time.monotonic() - started
    count = Count()
    events = session.events()
    count.add(session.id, events, session.messages(), chaos.killed)
    return CodingOutcome(
        judgement=repository.judge(directory), status=result.status, text=result.text, wanted=kills,
        killed=len(chaos.killed), crashes=count.crashes, restore_ms=count.restore_ms, tokens=count.tokens,
        tokens_redone=count.tokens_redone, tool_calls=count.tool_calls,
        tool_calls_repeated=count.tool_calls_repeated, interrupted=count.interrupted,
        messages_lost=count.messages_lost, seconds=seconds,
    )  # fmt: skip
