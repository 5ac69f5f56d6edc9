"""The job "survey a directory": a lead agent, a surveyor for each part, and, if asked, kills on the way.

`run_survey` uses nothing but the public client. What it tells of crashes and repeats is read from the committed events
and messages of all sessions of the tree, after the end.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from understudy.cluster.client.client import Cluster
from understudy.cluster.client.results import SessionInfo
from understudy.cluster.client.session_handle import Session
from understudy.cluster.ray.ray_edge import nodes_here
from understudy.config import OFFLINE_MODEL
from understudy.errors import DeadlineExceeded, InvalidInput
from understudy.spec import AgentSpec

from ..chaos import RESTART, Chaos, Count
from . import tools as survey

UPDATE_SECONDS = 0.15
STRIKE_SECONDS = 0.02
"""How often the tree is looked at; the second while there is somebody left to kill."""

RUN_ID = "survey"
LEAD = """You survey the directory that is your workspace. Every number comes from tools, none from you.
1. Call survey_parts.
2. In one turn, call spawn_agent once for each part, with the agent "surveyor" and this task, in which PART is the part
exactly as it was listed:
Survey this part of the workspace.
Part: "PART"
3. Call merge_report with the surveyors' answers, each exactly as it came.
4. If the report says that a part was not surveyed, give that part to a new surveyor once, and merge all answers again.
5. Answer with the report exactly as merge_report returned it, and nothing else."""

SURVEYOR = """You survey one part of a directory. Every number comes from tools, none from you.
1. Call measure, then definitions, then todos, each with the path that stands behind "Part:" in your task.
2. Answer with one JSON object and nothing else: {"measure": …, "definitions": …, "todos": …}. Each value is what that
tool returned, copied character for character: it carries a checksum."""

OFFLINE_LINE = "\noffline-policy: understudy.examples.survey.policy:policy"

OnUpdate = Callable[[list[SessionInfo], dict[str, str]], None]
"""Takes the tree, root first, and what each surveyor works on, by session id."""


@dataclass(frozen=True)
class SurveyOutcome:
    """A finished survey, and what it took.

    Attributes:
        report: as the last `merge_report` returned it, so that no model can have changed it; without one, the answer.
        status: how the lead's run ended.
        run: id of that run; `sessions`: ids of all sessions, the lead's first.
        crashes: activations lost; one process may have held several sessions that waited.
        restore_ms: for each crash in the middle of work, from the kill (its detection, if nobody was killed on purpose)
            until the session was active again, in milliseconds; waiting for a free or new actor is part of it.
        tokens_redone: tokens of model calls that were answered a second time.
        tool_calls_repeated: executions of tools whose result was already there. A read-only tool that was cut off
            before it had a result simply runs; that is not counted.
        messages_lost: gaps in the logs of messages and events, and tool calls without a result.
        chaos: how many processes were to be killed on purpose; `chaos_pids`: those that were, before the work ended.
        seconds: from the first input to the end.
    """

    report: str
    status: str
    run: str
    sessions: list[str]
    crashes: int
    restore_ms: list[float]
    tokens: int
    tokens_redone: int
    tool_calls: int
    tool_calls_repeated: int
    messages_lost: int
    chaos: int
    chaos_pids: list[int]
    seconds: float


def survey_specs(directory: str, model: str | None, offline: bool) -> AgentSpec:
    """The lead, with the surveyor it may spawn.

    Args:
        directory: absolute path; no tool leaves it.
        model: None for the cluster's.
        offline: the model is the offline one, whose policy the instructions name.
    """
    line = OFFLINE_LINE if offline else ""
    surveyor = AgentSpec(
        name="surveyor", instructions=SURVEYOR + line, model=model, workspace=directory, restart=RESTART, max_rounds=16,
        tools=[survey.measure, survey.definitions, survey.todos],
    )  # fmt: skip
    return AgentSpec(
        name="lead", instructions=LEAD + line, model=model, workspace=directory, restart=RESTART, max_rounds=16,
        tools=[survey.survey_parts, "spawn_agent", survey.merge_report], agents=(surveyor,),
    )  # fmt: skip


def run_survey(
    cluster: Cluster,
    directory: str | Path,
    *,
    chaos: int = 0,
    seed: int = 0,
    session_id: str | None = None,
    run_id: str | None = None,
    model: str | None = None,
    on_update: OnUpdate | None = None,
) -> SurveyOutcome:
    """Survey a directory and return when the lead's run has ended. A session that has done it is not asked again.

    Args:
        chaos: session actors to SIGKILL on the way; only processes of this machine are.
        seed: of the choice of victims and moments.
        session_id: of the lead; a new one by default.
        model: None for the cluster's.

    Raises:
        InvalidInput: there is no such directory.
        SessionConflict: the session exists and surveys something else.
    """
    path = Path(directory).resolve()
    if not path.is_dir():
        raise InvalidInput(f"{directory} is not a directory: name one that exists on this machine")
    offline = (model or cluster._settings.model) == OFFLINE_MODEL
    started = time.monotonic()
    lead = cluster.spawn(survey_specs(str(path), model, offline), session_id=session_id)
    run = lead.send("Survey this directory.", run_id=run_id or RUN_ID)
    killer = Chaos(chaos, random.Random(seed), nodes_here() if chaos else set())
    labels: dict[str, str] = {}

    def look() -> list[SessionInfo]:
        tree = lead.tree()
        killer.strike(tree)
        if on_update is not None:
            _label(lead, tree, labels)
            on_update(tree, labels)
        return tree

    while True:
        try:
            result = run.result(timeout=STRIKE_SECONDS if killer.left else UPDATE_SECONDS)
            break
        except DeadlineExceeded:
            look()
    seconds = time.monotonic() - started
    killer.left = 0
    tree = look()
    count = Count()
    for info in tree:
        session = cluster.session(info.id)
        count.add(info.id, session.events(), session.messages(), killer.killed)
    merged = [message.text for message in lead.messages() if message.role == "tool" and message.name == "merge_report"]
    reports = [text for text in merged if text.startswith("# Survey of ")]
    return SurveyOutcome(
        report=reports[-1] if reports else result.text,
        status=result.status,
        run=run.run_id,
        sessions=[info.id for info in tree],
        crashes=count.crashes,
        restore_ms=count.restore_ms,
        tokens=count.tokens,
        tokens_redone=count.tokens_redone,
        tool_calls=count.tool_calls,
        tool_calls_repeated=count.tool_calls_repeated,
        messages_lost=count.messages_lost,
        chaos=chaos,
        chaos_pids=list(killer.killed),
        seconds=seconds,
    )


def _label(lead: Session, tree: list[SessionInfo], labels: dict[str, str]) -> None:
    """Find out what surveyors that are new in the tree work on: their tasks are in the lead's messages."""
    new = [info for info in tree if info.call_id and info.id not in labels]
    if not new:
        return
    tasks = {call.call_id: call.arguments for message in lead.messages() for call in message.tool_calls}
    for info in new:
        labels[info.id] = part_of(tasks.get(info.call_id or "", ""))


def part_of(arguments: str) -> str:
    """The part that a `spawn_agent` call hands out, as far as its task says so."""
    try:
        task = str(json.loads(arguments)["task"])
    except (ValueError, KeyError, TypeError):
        return ""
    found = re.search(r'Part: "?(.*?)"?\s*$', task, re.MULTILINE)
    return found[1] if found else task[:40]
