"""Job control, in the simulation: who sets wakeups and stops what goes on, and what must hold of what was stopped."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.agents import SEND_TO_AGENT
from understudy.events import SessionClosed, TimerCancelled, TimerFired, TimerSet
from understudy.identifiers import COPIED
from understudy.jobs import LIST_JOBS, STOP_JOB
from understudy.store.db.statements import EVENT, MESSAGE, RUN
from understudy.wakeups import SCHEDULE_WAKEUP

from .tasks import INPUTS, rewritten
from .tools import TOOLS

if TYPE_CHECKING:
    from .plan import Work

NAMES = ("j0", "j1")
"""The wakeups that models set and stop."""

STOPPED = re.compile(r"wakeup (j\d) is stopped")
FIRED = re.compile(r"wakeup (j\d) has fired ")
UNKNOWN = re.compile(r"you have no job '(j\d)'")
SUB_AGENT = re.compile(r"sub-agent (\S+) (?:is stopped|was told to end|is not at work)")


def some_with_jobs(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans its root sessions set wakeups, and list and stop their jobs."""
    if chosen.random() >= 0.25:
        return work
    return tuple(with_jobs(chosen, item) for item in work)


def with_jobs(chosen: random.Random, work: Work) -> Work:
    """The same work with such calls; stops of sub-agents have a grace, and come right behind further tasks."""
    known = {tool["name"] for tool in work.spec["tools"]}
    tools = [TOOLS[name] for name in (SCHEDULE_WAKEUP, LIST_JOBS, STOP_JOB) if name not in known]

    # A client ends wakeups that recur when all its inputs have ended: none may come later.
    recurring = all(action.on is None for action in work.actions if action.kind in INPUTS)

    def added(text: str) -> str:
        said = json.loads(text)
        rounds, thinking = said["rounds"], said["thinking"]
        for at, call in [(at, call) for at, calls in enumerate(rounds) for call in calls if call[0] == STOP_JOB][::-1]:
            if chosen.random() < 0.5:
                call[1]["grace"] = chosen.choice((0, 0.5, 3))
            if chosen.random() < 0.7:  # it mostly begins with the first of them just then
                more = {"agent": call[1]["job"], "message": f"steer {said['name']} more"}
                rounds.insert(at, [[SEND_TO_AGENT, more], [SEND_TO_AGENT, dict(more)]])
                thinking[at:at] = [0.0]
                thinking[at + 1] = 0.0
        for _ in range(chosen.choice((1, 1, 2))):
            at, name = chosen.randrange(len(rounds) + 1), chosen.choice(NAMES)
            more = [[_wakeup(chosen, name, recurring=recurring)], [[STOP_JOB, {"job": name}]], [[LIST_JOBS, {}]]]
            more = more[: chosen.choice((1, 2, 2, 3))]
            rounds[at:at] = more
            thinking[at:at] = [round(chosen.choice((0.0, 0.3, 3.0)) * chosen.random(), 3) for _ in more]
        return json.dumps(said)

    return rewritten(replace(work, spec={**work.spec, "tools": [*work.spec["tools"], *tools]}), added, kinds=INPUTS)


def _wakeup(chosen: random.Random, name: str, *, recurring: bool) -> list[Any]:
    seconds = round(chosen.choice((0.05, 0.5, 3.0, 30.0)) * chosen.random() + 0.001, 3)
    every = {"every": round(chosen.uniform(2.0, 9.0), 3)} if recurring and chosen.random() < 0.25 else {}
    prompt = json.dumps({"name": name, "rounds": [], "thinking": [0.1]})
    return [SCHEDULE_WAKEUP, {"name": name, "prompt": prompt, "seconds": seconds, **every}]


def violations(connection: Any, counts: Counter[str]) -> Iterator[str]:
    """A wakeup that was stopped does not fire, one that is said to have fired has, and none that is to come is said to
    be unknown; of the tasks that a stopped sub-agent had been given, none begins after that."""
    timers = _timers(connection)
    unreported = dict[tuple[str, str], int]()
    for session_id, found in timers.items():
        stands = dict[str, str]()
        for _, name, what in found:
            if what == TimerFired.type and stands.get(name) == TimerCancelled.type:
                yield f"the wakeup {name} of {session_id} fired, and had been stopped"
            stands[name] = what
            if what == TimerCancelled.type:
                unreported[session_id, name] = unreported.get((session_id, name), 0) + 1
    for session_id, asked, said, text in _stops(connection):
        counts["stopped"] += bool(STOPPED.match(text) or SUB_AGENT.match(text))
        if match := STOPPED.match(text):
            unreported[session_id, match[1]] = unreported.get((session_id, match[1]), 0) - 1
        elif match := FIRED.match(text):
            counts["fired before the stop"] += 1
            if not any(e[:2] < (said["seq"], "") and e[1:] == (match[1], TimerFired.type) for e in timers[session_id]):
                yield f"a result in {session_id} says that its wakeup {match[1]} had fired, and it had not"
        elif match := UNKNOWN.match(text):
            before = [e for e in timers.get(session_id, ()) if e[0] < asked["seq"] and e[1] in (match[1], "")]
            since = [e for e in timers.get(session_id, ()) if asked["seq"] < e[0] < said["seq"]]
            others = any(e[1] in (match[1], "") and e[2] != TimerCancelled.type for e in since)
            if before and before[-1][2] == TimerSet.type and not others:
                yield f"a result in {session_id} says that it has no wakeup {match[1]}, and it had"
        elif match := SUB_AGENT.match(text):
            runs = select(RUN.c.run_id).where(
                RUN.c.session_id == match[1], RUN.c.source == "parent", RUN.c.accepted_at < asked["created_at"],
                RUN.c.started_at > said["created_at"],
            )  # fmt: skip
            for run_id in connection.execute(runs).scalars():
                yield f"{match[1]} was stopped by {session_id}, and began {run_id} after that"
    for (session_id, name), more in unreported.items():
        if more < 0:
            yield f"the wakeup {name} of {session_id} is said to be stopped {-more} times more than it was"


def _timers(connection: Any) -> dict[str, list[tuple[int, str, str]]]:
    """`(seq, name, type)` of what became of each session's wakeups, in order; without a name: of all."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    types = (TimerSet.type, TimerFired.type, TimerCancelled.type, SessionClosed.type)
    events = select(EVENT.c.session_id, EVENT.c.seq, EVENT.c.type, EVENT.c.body).where(EVENT.c.type.in_(types))
    for row in connection.execute(events.order_by(EVENT.c.session_id, EVENT.c.seq)):
        if row.type == SessionClosed.type or row.body["kind"] == "wakeup":
            found.setdefault(row.session_id, []).append((row.seq, row.body.get("name", ""), row.type))
    return found


def _stops(connection: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """Of each answered call of `stop_job`: whose it was, the message that asked, the one with the result, and that."""
    asked = dict[tuple[str, str], dict[str, Any]]()
    columns = (MESSAGE.c.session_id, MESSAGE.c.seq, MESSAGE.c.role, MESSAGE.c.body)
    for row in connection.execute(select(*columns).order_by(MESSAGE.c.session_id, MESSAGE.c.seq)):
        body = {**row.body, "seq": row.seq}
        for call in body.get("tool_calls") or ():
            if call[1] == STOP_JOB:
                asked[row.session_id, call[0]] = body
        key = row.session_id, body.get("tool_call_id") or ""
        if row.role == "tool" and key in asked and not key[1].startswith(COPIED):
            yield row.session_id, asked[key], body, body["content"] or ""
