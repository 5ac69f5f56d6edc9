"""Handoffs, in the simulation: agents that hand off to each other, and what must hold of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.actors.tools import handoff_spec
from understudy.handoffs import HANDOFF, ORIGIN, tool_name
from understudy.identifiers import COPIED
from understudy.store.db.statements import EVENT, MESSAGE, SESSION
from understudy.testing.policies import Reply

if TYPE_CHECKING:
    from .plan import Work

AWAY = "(to the other)"
"""Instead of the tool, which depends on the agent: the model names one that it has."""

OTHERS = ("second", "third")


def some_handed_off(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans it is as `handing_off` says."""
    if chosen.random() >= 0.25:
        return work
    return tuple(handing_off(chosen, item) if chosen.random() < 0.8 else item for item in work)


def handing_off(chosen: random.Random, work: Work) -> Work:
    """The same work; the session's agent and two others hand off to each other, some where other processes are
    needed."""
    first = work.spec["name"]
    placements = [work.spec.get("placement", ""), *(("other",) if chosen.random() < 0.3 else ())]

    def agent(name: str) -> dict[str, Any]:
        targets = [other for other in (first, *OTHERS) if other != name]
        tools = [*work.spec["tools"], *map(handoff_spec, targets)]
        instructions = f"{work.spec['instructions']}\nYou are {name}."
        return {**work.spec, "name": name, "hash": f"hash-{name}", "instructions": instructions, "tools": tools}

    def moved(text: str) -> str:
        said = json.loads(text)
        for calls in said["rounds"]:
            for _ in range(chosen.choice((0, 0, 0, 1, 1, 2))):
                calls.insert(chosen.randint(0, len(calls)), [AWAY, {"reason": chosen.choice(("", "so"))}])
        return json.dumps(said)

    actions = tuple(
        replace(action, what={**action.what, "content": moved(action.what["content"])})
        if action.kind in ("send", "replace", "fork") and action.what.get("content", "").startswith("{")
        else action
        for action in work.actions
    )
    others = {name: {**agent(name), "placement": chosen.choice(placements)} for name in OTHERS}
    return replace(work, spec={**agent(first), "hash": work.spec["hash"], "handoffs": others}, actions=actions)


def to_one_of(reply: Reply, body: dict[str, Any]) -> Reply:
    """The reply with a tool that the model has, where it hands off: the first that it has been offered, or by turns."""
    names = [tool["function"]["name"] for tool in body.get("tools", ())]
    away = [name for name in names if any(name == tool_name(agent) for agent in _agents(names))]
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    calls = tuple(
        (away[turn % len(away)] if tool == AWAY and away else tool, given) for tool, given in reply.tool_calls
    )
    return replace(reply, tool_calls=calls)


def _agents(tools: list[str]) -> list[str]:
    prefix = tool_name("")
    return [name.removeprefix(prefix) for name in tools if name.startswith(prefix)]


def violations(connection: Any, upgraded: set[str], counts: Counter[str]) -> Iterator[str]:
    """Each call that hands off and is said to have done so did, once, from the agent that made it; and the session is
    under the agent that it was handed off to last."""
    columns = (SESSION.c.session_id, SESSION.c.agent, SESSION.c.spec)
    sessions = {row.session_id: row for row in connection.execute(select(*columns)) if row.spec.get("handoffs")}
    said, went = _said(connection), dict[str, list[dict[str, Any]]]()
    for row in connection.execute(
        select(EVENT.c.session_id, EVENT.c.body).where(EVENT.c.type == "agent_handed_off").order_by(EVENT.c.seq)
    ):
        went.setdefault(row.session_id, []).append(row.body)
    for name in sorted({*said, *went} - sessions.keys()):
        yield f"{name} was handed off, and its agent knows no other"
    for name, session in sessions.items():
        found, records, results = went.get(name, []), *said.get(name, ([], []))
        counts["handoffs"] += len(found)
        if [event["call_id"] for event in found] != results:
            yield f"{name} was handed off by {[event['call_id'] for event in found]}, and the results are of {results}"
        if [(event["from_agent"], event["to_agent"]) for event in found] != records:
            yield f"{name} was handed off as {found}, and its records say {records}"
        if name in upgraded or "." in name:  # a fork may begin with another
            continue
        at = session.spec["name"]
        for event in found:
            if event["from_agent"] != at:
                yield f"{name} was under {at}, and handed off by {event['from_agent']}"
            at = event["to_agent"]
        if session.agent != at:
            yield f"{name} is under {session.agent}, and was handed off to {at}"


def _said(connection: Any) -> dict[str, tuple[list[tuple[str, str]], list[str]]]:
    """By session what its messages say: the records of handoffs, and the calls that are said to have handed off."""
    found: dict[str, tuple[list[tuple[str, str]], list[str]]] = {}
    columns = (MESSAGE.c.session_id, MESSAGE.c.run_id, MESSAGE.c.body)
    for row in connection.execute(select(*columns).order_by(MESSAGE.c.session_id, MESSAGE.c.seq)):
        if (row.run_id or "").startswith(COPIED):
            continue
        records, results = found.setdefault(row.session_id, ([], []))
        if row.body.get("origin") == ORIGIN:
            records.append((row.body["extra"]["from"], row.body["extra"]["to"]))
        elif str(row.body["content"]).startswith("handed off: ") and row.body.get("tool_call_id"):
            results.append(row.body["tool_call_id"])
    return {name: said for name, said in found.items() if any(said)}


def hands_off(spec: dict[str, Any]) -> bool:
    """Whether an agent may hand off."""
    return any(tool["source"].get("builtin") == HANDOFF for tool in spec["tools"])
