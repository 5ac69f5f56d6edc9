"""Sub-agents in the background, in the simulation: who starts and reaches them, and what must hold of their ends."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.agents import CHILD, SEND_TO_AGENT, START_AGENT
from understudy.identifiers import COPIED
from understudy.jobs import LIST_JOBS, STOP_JOB
from understudy.store.db.statements import EVENT, MESSAGE, RUN, SESSION
from understudy.store.operations.beginnings import TASK, TASK_AT_WORK
from understudy.testing.policies import Reply, content_text

from .tasks import INPUTS, rewritten
from .tools import TOOLS

if TYPE_CHECKING:
    from .plan import Work

SPAWN = "spawn_agent"
NEWS = "Sub-agent "
"""How messages begin that tell of an end: the model does what it would have done without them."""

STARTED = "started sub-agent "
LAST = "(the last one)"
"""Instead of an id, which nobody knows before: the model names the sub-agent that it started last."""

BACKGROUND = (START_AGENT, LIST_JOBS, SEND_TO_AGENT, STOP_JOB)


def some_in_background(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans it is as `in_background` says."""
    if chosen.random() >= 0.25:
        return work
    return tuple(in_background(chosen, item) if item.spec["agents"] else item for item in work)


def in_background(chosen: random.Random, work: Work) -> Work:
    """The same work; many of its sub-agents work in the background, and their parents list them, send to them and stop
    them."""

    def with_tools(spec: dict[str, Any]) -> dict[str, Any]:
        if not spec["agents"]:
            return spec
        agents = {name: with_tools(agent) for name, agent in spec["agents"].items()}
        return {**spec, "agents": agents, "tools": [*spec["tools"], *(TOOLS[name] for name in BACKGROUND)]}

    def moved(text: str) -> str:
        said = json.loads(text)
        rounds, thinking = [], []
        for calls, time in zip(said["rounds"], said["thinking"], strict=False):
            rounds.append(calls)
            thinking.append(time)
            starts = [call for call in calls if call[0] == SPAWN]
            for call in starts:
                call[1]["task"] = moved(call[1]["task"])
                call[0] = START_AGENT if chosen.random() < 0.7 else SPAWN
            if starts and chosen.random() < 0.6:
                rounds.append([list(_reaching(chosen, said["name"]))])
                thinking.append(round(chosen.choice((0.0, 0.3, 3.0)) * chosen.random(), 3))
        return json.dumps({**said, "rounds": rounds, "thinking": [*thinking, said["thinking"][-1]]})

    return rewritten(replace(work, spec=with_tools(work.spec)), moved, kinds=INPUTS)


def _reaching(chosen: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    tool = chosen.choice((LIST_JOBS, SEND_TO_AGENT, STOP_JOB))
    if tool == LIST_JOBS:
        return tool, {}
    return tool, {"agent": LAST, "message": f"steer {name}"} if tool == SEND_TO_AGENT else {"job": LAST}


def unheard(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without those that tell of ends."""
    return [said for said in messages if not (said["role"] == "user" and content_text(said).startswith(NEWS))]


def named(reply: Reply, messages: list[dict[str, Any]]) -> Reply:
    """The reply with the id of the sub-agent that was started last, where it names that."""
    texts = [content_text(message) for message in messages if message["role"] == "tool"]
    last = next((text.removeprefix(STARTED) for text in reversed(texts) if text.startswith(STARTED)), LAST)
    calls = tuple(
        (tool, {name: last if value == LAST else value for name, value in given.items()})
        if isinstance(given, dict)
        else (tool, given)
        for tool, given in reply.tool_calls
    )
    return replace(reply, tool_calls=calls)


def violations(connection: Any, counts: Counter[str]) -> Iterator[str]:
    """The end of each sub-agent in the background is reported once, in the order of the ends; or it is not, and then
    its parent's run has ended badly, or its parent accepts no more input."""
    columns = [SESSION.c[name] for name in ("session_id", "parent_id", "parent_run_id", "task_open", "abandoned")]
    children = connection.execute(select(*columns).where(SESSION.c.background == 1)).all()
    runs = {
        (row.session_id, row.run_id): row
        for row in connection.execute(
            select(RUN.c.session_id, RUN.c.run_id, RUN.c.status, RUN.c.started_at, RUN.c.merged_into, RUN.c.source)
        )
    }
    closed = set(connection.execute(select(SESSION.c.session_id).where(SESSION.c.closed == 1)).scalars())
    events = select(EVENT.c.session_id, EVENT.c.type, EVENT.c.body).where(
        EVENT.c.type.in_(("child_finished", "session_quarantined"))
    )
    ends: dict[str, list[str]] = {}
    given_up = set()
    for event in connection.execute(events.order_by(EVENT.c.session_id, EVENT.c.seq)):
        if event.type == "child_finished":
            ends.setdefault(event.session_id, []).append(event.body["child_id"])
        else:
            given_up.add(event.session_id)
    reported = _reported(connection)
    for child in children:
        name, parent = child.session_id, child.parent_id
        if child.task_open == TASK_AT_WORK:
            yield f"{name} is at work in the background, and all work has ended"
        news = [row for key, row in runs.items() if _is_news(key, parent, name) and row.source == CHILD]
        first = [row for row in news if row.run_id == f"news.{name}"]
        begun = sum(row.started_at > 0 or row.merged_into != "" for row in news)
        counts["ends reported"] += begun
        said = reported.get(parent, []).count(name)
        if not begun <= said <= len(news):
            yield f"{parent} received {said} reports of the ends of {name}, and has {begun} inputs of these"
        if bool(child.abandoned) == bool(first):
            yield f"the end of {name} was {'' if first else 'not '}reported to {parent}; abandoned is {child.abandoned}"
        ended_badly = runs[parent, child.parent_run_id].status != "completed"
        if child.abandoned and not (ended_badly or parent in closed | given_up):
            yield f"the end of {name} is not reported to {parent}, whose run has completed"
    # The end of an abandoned one's task is not reported; those of tasks that it was sent later are.
    mine = {child.session_id for child in children if not child.abandoned}
    for parent, names in reported.items():
        once = [name for name in dict.fromkeys(names) if name in mine]
        if [name for name in ends.get(parent, []) if name in once] != once:
            yield f"{parent} received reports of the ends of {once}, and they ended as {ends.get(parent)}"


def _is_news(key: tuple[str, str], parent: str, name: str) -> bool:
    return key[0] == parent and (key[1] == f"news.{name}" or key[1].startswith(f"news.{name}.{TASK}-"))


def _reported(connection: Any) -> dict[str, list[str]]:
    """By session, the sub-agents whose ends its messages report, in order."""
    found: dict[str, list[str]] = {}
    columns = (MESSAGE.c.session_id, MESSAGE.c.run_id, MESSAGE.c.body)
    for row in connection.execute(select(*columns).where(MESSAGE.c.role == "user").order_by(MESSAGE.c.seq)):
        if row.body.get("origin") == CHILD and not row.run_id.startswith(COPIED):
            found.setdefault(row.session_id, []).append(row.body["content"].removeprefix(NEWS).split()[0])
    return found
