"""Goals, in the simulation: works that are pursued until a condition holds, what the two models say, and what must hold
of rounds, verdicts and the worker's conversation."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.actors.code import fingerprint, sourced
from understudy.actors.goal import VERDICT_SCHEMA, WORKER, evaluator_task, goal, worker_task
from understudy.identifiers import COPIED
from understudy.store.db.statements import MESSAGE
from understudy.testing.policies import content_text
from understudy.workflows import GOAL, PUBLISHED, VERDICT, WORKFLOW

from .typed import output
from .workflows import STEERING, specification

if TYPE_CHECKING:
    from .plan import Work
    from .reference import Known

WORKS, JUDGES = "helper", "judge"
"""The names of the agents."""

TASK = "Do "
"""How tasks of goals begin: behind it is one as agents have."""

TRY = "It holds at try "
"""How conditions begin: behind it is a number."""

ASKED = re.compile(rf"^{TASK}(\{{.*\}})$", re.MULTILINE)
ENDS = ("step_failed", "goal_not_met", "no_verdict")
"""How runs fail whose code did."""


def some_goals(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans root sessions whose agents have sub-agents pursue goals instead."""
    if chosen.random() >= 0.15:
        return work
    return tuple(as_goal(chosen, item) if WORKS in item.spec["agents"] and _is_agent(item) else item for item in work)


def _is_agent(work: Work) -> bool:
    return work.spec.get("kind") != WORKFLOW


def as_goal(chosen: random.Random, work: Work) -> Work:
    """The same inputs, each as a goal: one of the sub-agents works on it."""
    source, _ = sourced(GOAL, goal, None)
    spec, worker = specification(chosen, work), {**work.spec["agents"][WORKS], "max_rounds": 20}
    judge = {**worker, "name": JUDGES, "hash": f"hash-{JUDGES}", "agents": {}, "handoffs": {}, "tools": []}
    judge["output"] = {**output(chosen), "name": "verdict", "schema": VERDICT_SCHEMA}
    agents = {**spec["agents"], WORKS: worker, JUDGES: judge}
    spec |= {
        "name": GOAL, "hash": f"hash-{GOAL}-{work.session_id}", "agents": agents,
        "workflow": {"name": GOAL, "source": source, **fingerprint(goal)},
    }  # fmt: skip

    def with_new_task(action: Any) -> Any:
        name = next((name for name in ("content", "prompt") if action.what.get(name, "").startswith("{")), "")
        if not name or action.what.get("own"):
            return action
        task = json.loads(action.what[name])
        plain = [[call for call in calls if call[0] not in NOT_HERE] for calls in task["rounds"]]
        task |= {"rounds": [calls for calls in plain if calls][:2]}
        task["thinking"] = [seconds / 3 for seconds in task["thinking"][: len(task["rounds"]) + 1]]
        given = {
            "condition": f"{TRY}{chosen.choice((1, 2, 2, 3, 4))}", "task": f"{TASK}{json.dumps(task)}",
            "worker": WORKS, "evaluator": JUDGES, "max_rounds": chosen.choice((1, 2, 3, 3)),
        }  # fmt: skip
        return replace(action, what={**action.what, name: json.dumps(given)})

    actions = tuple(with_new_task(action) for action in work.actions if action.kind not in STEERING)
    if chosen.random() < 0.7:  # else most goals would be cancelled before their second round
        actions = tuple(action for action in actions if action.kind not in ENDING)
        spec["budget"] = None
    return replace(work, spec=spec, actions=actions)


ENDING = ("cancel", "close", "cancel_child", "close_child", "abort")
"""What clients do that ends runs."""

NOT_HERE = ("spawn_agent", "start_agent")
"""Tools that the agent that works does not have for its own."""


# What the models say.


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the models of a goal are asked, as tasks that simulated models can read: that of the worker is named after
    its try."""
    found, tries = list[dict[str, Any]](), 0
    for message in messages:
        asked = ASKED.search(content_text(message)) if message["role"] == "user" else None
        if asked is None:
            found.append(message)
            continue
        task = json.loads(asked[1])
        if said(message) is None:
            tries += 1
            task["name"] = f"{task['name']}.try{tries}"
        else:
            task = {"name": "verdict", "rounds": [], "thinking": task["thinking"][-1:]}
        found.append({**message, "content": json.dumps(task)})
    return found


def said(message: dict[str, Any]) -> str | None:
    """The verdict on what an evaluator reads; None for any other message."""
    text = content_text(message) if message["role"] == "user" else ""
    condition = re.search(rf"^{TRY}(\d+)$", text, re.MULTILINE)
    _, found, answer = text.partition("<answer>")
    if condition is None or not found:
        return None
    number = max(map(int, re.findall(r"\.try(\d+)", answer)), default=0)
    return json.dumps({"reason": f"it was try {number}", "met": number >= int(condition[1])})


def verdict(messages: list[dict[str, Any]]) -> str | None:
    """The verdict that a request asks for; None if it asks for none."""
    return next((text for text in map(said, reversed(messages)) if text is not None), None)


# What must hold.


def problems(known: Known, given: dict[str, Any], row: Any, counts: Counter[str]) -> Iterator[str]:
    """A run has at most its rounds, each with a try and the verdict on it; it ends as the last verdict says, and each
    try receives the reason of the verdict before it."""
    results = {path: (outcome, text) for path, outcome, text in known.results}
    due, reason, visited = None, "", set[str]()
    for number in range(1, given["max_rounds"] + 1):
        tried, judged, taken = (str(3 * (number - 1) + step) for step in range(3))
        asked = {
            "agent": WORKS, "task": worker_task(given["condition"], given["task"], reason, number),
            "conversation": WORKER,
        }  # fmt: skip
        yield from _asked(known, tried, asked, visited)
        if results.get(tried, ("", ""))[0] != "ok":
            due = ("failed", "step_failed") if tried in results else None
            break
        answer = json.loads(results[tried][1])
        asked = {"agent": JUDGES, "task": evaluator_task(given["condition"], given["task"], answer)}
        yield from _asked(known, judged, asked, visited)
        if results.get(judged, ("", ""))[0] != "ok":
            due = ("failed", "no_verdict") if judged in results else None
            break
        found = json.loads(results[judged][1])
        reason = found["reason"]
        if taken in known.taken and known.taken[taken] != (f"{PUBLISHED}{VERDICT}{number}", found):
            yield f"round {number} has the verdict {found}, and {known.taken[taken]} is published"
        counts["verdicts"] += 1
        due = ("completed", answer) if found["met"] else ("failed", "goal_not_met")
        if found["met"]:
            break
    if more := sorted(known.asked.keys() - visited):
        yield f"steps {more} are recorded, and the goal has none after {sorted(visited)}"
    code = (row.error or {}).get("code", "")
    if row.status == "completed" or (row.status in ("failed", "budget_exceeded") and code in ENDS):
        ended = (row.status, row.output) if row.status == "completed" else ("failed", code)
        spent = row.status == "budget_exceeded" and code == "step_failed"  # whoever of the two it was
        if ended != due and not (spent and due is not None and due[0] == "failed"):
            yield f"it is {ended}, and by its verdicts it is {due}"
        counts["goals met" if row.status == "completed" else "goals not met"] += 1


def _asked(known: Known, path: str, arguments: dict[str, Any], visited: set[str]) -> Iterator[str]:
    if path in known.asked:
        visited.add(path)
        if known.asked[path] != ("agent", arguments):
            yield f"step {path} is recorded as {known.asked[path]}, and the goal asks for {arguments}"


def conversations(connection: Any, tries: dict[str, list[Any]], counts: Counter[str]) -> Iterator[str]:
    """What each try begins with is what was said in the one before it, and nothing else.

    Args:
        tries: of each run, the sessions that were the tries, in order.
    """
    for run, sessions in tries.items():
        logs = [_log(connection, session_id) for session_id in sessions]
        for before, after in itertools.pairwise(logs):
            counts["conversations"] += 1
            copied = [(role, content) for role, run_id, content in after if (run_id or "").startswith(COPIED)]
            if copied != [(role, content) for role, _, content in before]:
                yield f"a try of {run} begins with {copied}, and the one before it has said {before}"


def _log(connection: Any, session_id: str) -> list[tuple[str, str | None, Any]]:
    columns = (MESSAGE.c.role, MESSAGE.c.run_id, MESSAGE.c.body)
    mine = select(*columns).where(MESSAGE.c.session_id == session_id).order_by(MESSAGE.c.seq)
    return [(row.role, row.run_id, row.body.get("content")) for row in connection.execute(mine)]
