"""Sub-agents that models write, in the simulation: what they write, well and badly, and what must become of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.actors.delegating import LONGEST_INSTRUCTIONS, offered
from understudy.agents import START_AGENT
from understudy.events import ChildSpawned, Event
from understudy.handoffs import present
from understudy.identifiers import COPIED
from understudy.store.db.statements import ACCOUNT, EVENT, SESSION, TOOL_CALL
from understudy.workflows import CREATE_WORKFLOW, WORKFLOW

from .background import SPAWN
from .tasks import INPUTS, rewritten
from .tools import TOOLS
from .written import misfits

if TYPE_CHECKING:
    from .plan import Work
    from .world import World

INSTRUCTIONS = "offline-policy: simulation\n"
MODELS = ("offline", "small", "gpt-4o")
STARTING = (SPAWN, START_AGENT)
HALF = "half of \ud83d"
"""Models send halves of characters; what is kept has something else in their places."""

BEYOND = ("blank", "number", "tools alone", "model alone", "foreign tool", "no list", "nested", "foreign model", "both")
"""What is not within the limits."""

MAY_CHANGE = ("hash", "max_rounds", "on_change", "placement")
"""What upgrades change (`Client`)."""


def some_delegating(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans it is as `delegating` says."""
    if chosen.random() >= 0.25:
        return work
    return tuple(delegating(chosen, item) if item.spec["agents"] and chosen.random() < 0.8 else item for item in work)


def delegating(chosen: random.Random, work: Work) -> Work:
    """The same work; its agent's model writes many of the sub-agents, within limits and beyond them."""
    own = [tool["name"] for tool in work.spec["tools"]]
    limits: dict[str, Any] = {
        "tools": [name for name in own if chosen.random() < (0.8 if name in STARTING else 0.5)],
        "models": chosen.sample(MODELS, chosen.choice((0, 1, 2))),
        "budget": chosen.choice(
            (
                None,
                [{"scope": "tree", "tokens": chosen.choice((600, 3_000))}],
                [{"scope": "tree", "children": chosen.choice((0, 1))}, {"scope": "session", "rounds": 3}],
            )
        ),
    }
    tools = [offered(tool, limits, {}) for tool in work.spec["tools"]]
    like_a_child = {
        "restart_type": chosen.choice(("temporary", "transient", "permanent")),
        "on_parent_end": chosen.choice(("cancel", "abandon", "wait")),
        "lifecycle": chosen.choice(("ephemeral", "linked", "detached")),
    }
    spec = {**work.spec, **like_a_child, "tools": tools, "delegation": limits}

    def said(text: str) -> str:
        task = json.loads(text)
        for call in (call for calls in task["rounds"] for call in calls if call[0] in STARTING):
            if chosen.random() < 0.7:
                call[1] = _written(chosen, call[1], limits, own)
        return json.dumps(task)

    return rewritten(replace(work, spec=spec), said, kinds=INPUTS)


def _written(chosen: random.Random, given: dict[str, Any], limits: dict[str, Any], own: list[str]) -> Any:
    """The arguments of a call that writes a sub-agent instead of naming one."""
    task = json.loads(given["task"])
    found: dict[str, Any] = {"instructions": f"{INSTRUCTIONS}You are {task['name']}."}
    if chosen.random() < 0.15:
        found["instructions"] += HALF
    if chosen.random() < 0.6:
        found["tools"] = [name for name in limits["tools"] if chosen.random() < 0.7]
    if limits["models"] and chosen.random() < 0.6:
        found["model"] = chosen.choice(limits["models"])
    if chosen.random() < 0.5:  # one that starts others: copies of itself, and none that it writes
        inner = {"task": json.dumps({"name": f"{task['name']}.in", "rounds": [], "thinking": [0.05]})}
        inner |= chosen.choice(({}, {}, {"instructions": INSTRUCTIONS}))
        task["rounds"].insert(0, [[SPAWN, inner]])
        task["thinking"].insert(0, 0.05)
    found["task"] = json.dumps(task)
    if chosen.random() < 0.05:
        return json.dumps(found)[:-1]
    return _beyond(chosen, found, limits, own) if chosen.random() < 0.35 else found


def _beyond(
    chosen: random.Random, given: dict[str, Any], limits: dict[str, Any], own: list[str]
) -> dict[str, Any]:  # fmt: skip
    """The same arguments, beyond the limits."""
    foreign = [name for name in own if name not in limits["tools"]] or ["shell"]
    how = chosen.choice(BEYOND)
    wrong: dict[str, dict[str, Any]] = {
        "blank": {"instructions": " "},
        "number": {"instructions": 7},
        "tools alone": {"instructions": None, "tools": limits["tools"]},
        "model alone": {"instructions": None, "model": "offline"},
        "foreign tool": {"tools": [*limits["tools"], chosen.choice(foreign)]},
        "no list": {"tools": " ".join(limits["tools"]) or "wait"},
        "nested": {"tools": [limits["tools"]]},
        "foreign model": {"model": "large"},
        "both": {"agent": "helper"},
    }
    return {**given, **wrong[how]}


# What must hold.


def spawned(world: World, event: Event) -> Iterator[str]:
    """A sub-agent is what its call says within the specification of its parent's agent: also one that is started again,
    and one whose call was repeated after a death."""
    if not isinstance(event, ChildSpawned):
        return
    with world.store.committed() as connection:
        columns = (SESSION.c.session_id, SESSION.c.spec, SESSION.c.agent)
        both = SESSION.c.session_id.in_((event.session_id, event.child_id))
        specs = {
            row.session_id: present(row.spec, row.agent) for row in connection.execute(select(*columns).where(both))
        }
        where = (TOOL_CALL.c.session_id == event.session_id, TOOL_CALL.c.call_id == event.call_id)
        call = connection.execute(select(TOOL_CALL.c.arguments, TOOL_CALL.c.tool).where(*where)).first()
    if call is None or len(specs) < 2:
        return  # removed since
    above, found, arguments = specs[event.session_id], specs[event.child_id], call.arguments
    if call.tool == CREATE_WORKFLOW:
        yield from (f"{event.child_id}: {text}" for text in misfits(above, found, arguments))
        return
    due = of_step(above, arguments) if above.get("kind") == WORKFLOW else due_of(above, arguments)
    if due is None:
        yield f"{event.child_id} was started by {arguments[:200]}, which is beyond what is allowed"
        return
    if found["hash"] == specs[event.session_id]["hash"] and found["instructions"] != due["instructions"]:
        yield f"{event.child_id} has the hash of its parent, and is another agent"
    skipped = MAY_CHANGE if event.session_id in world.invariants.upgraded else MAY_CHANGE[:1]
    for name in sorted(due.keys() | found.keys()):
        if name not in skipped and due.get(name) != found.get(name):
            yield f"{event.child_id} has the {name} {found.get(name)}, and its call says {due.get(name)}"


def of_step(spec: dict[str, Any], arguments: str) -> dict[str, Any] | None:
    """What the session is that a workflow's step creates; None if it may create none.

    Args:
        spec: of the workflow.
    """
    name = json.loads(arguments)["agent"]
    found = spec if name == spec["name"] else spec["agents"].get(name)
    if found is None or spec["max_depth"] < 1:
        return None
    return {**found, "max_depth": min(found["max_depth"], spec["max_depth"] - 1)}


def due_of(spec: dict[str, Any], arguments: str) -> dict[str, Any] | None:
    """What the sub-agent is that a call creates; None if it may create none.

    Args:
        spec: of the agent that calls.
    """
    try:
        given = json.loads(arguments)
    except ValueError:
        return None
    if spec["max_depth"] < 1:
        return None
    limits = spec.get("delegation")
    own = {name: given[name] for name in ("instructions", "tools", "model") if given.get(name) is not None}
    if "instructions" in own or (limits is not None and own):
        found = _within(spec, limits, own) if limits is not None and given.get("agent") is None else None
    elif spec["agents"]:
        found = spec["agents"].get(given.get("agent"))
    else:
        found = {**spec, "budget": None} if given.get("agent") is None else None
    return None if found is None else {**found, "max_depth": min(found["max_depth"], spec["max_depth"] - 1)}


def _within(spec: dict[str, Any], limits: dict[str, Any], own: dict[str, Any]) -> dict[str, Any] | None:
    """The sub-agent that is written with these arguments; None if they are not within the limits."""
    instructions, tools, model = own.get("instructions"), own.get("tools", limits["tools"]), own.get("model")
    if not isinstance(instructions, str) or not instructions.strip() or len(instructions) > LONGEST_INSTRUCTIONS:
        return None
    if not isinstance(tools, list) or any(name not in limits["tools"] for name in tools):
        return None
    if model is not None and model not in limits["models"]:
        return None
    not_given = ("delegation", "output", "handoffs", "mcp_servers")
    found = {name: value for name, value in spec.items() if name not in not_given}
    found |= {
        "instructions": instructions.encode(errors="replace").decode(), "agents": {}, "budget": limits["budget"],
        "tools": [
            {**tool, "parameters": TOOLS[tool["name"]]["parameters"]} if tool["name"] in STARTING else tool
            for tool in spec["tools"] if tool["name"] in tools
        ],
    }  # fmt: skip
    if model is not None and model != spec["model"]:
        window = 128_000 if model == "gpt-4o" else None
        found |= {"model": model, "context": {**spec.get("context", {}), "window": window}}
    return found


def violations(connection: Any, counts: Counter[str]) -> Iterator[str]:
    """A call that is within the limits is not refused for them, and one that is not starts nothing; each starts one
    sub-agent at most, beside those that are started again, with the accounts that its budget says."""
    specs, children = {}, dict[tuple[str, str], list[str]]()
    columns = (SESSION.c.session_id, SESSION.c.spec, SESSION.c.parent_id, SESSION.c.call_id, SESSION.c.restart_number)
    for row in connection.execute(select(*columns)):
        specs[row.session_id] = row.spec
        if row.parent_id is not None and not row.restart_number:
            children.setdefault((row.parent_id, row.call_id), []).append(row.session_id)
    accounts: dict[str, dict[tuple[str, str], int]] = {}
    for row in connection.execute(select(ACCOUNT.c.session_id, ACCOUNT.c.scope, ACCOUNT.c.resource, ACCOUNT.c.allowed)):
        accounts.setdefault(row.session_id, {})[row.scope, row.resource] = row.allowed
    outcomes = {
        (row.session_id, row.body["call_id"]): row.body.get("outcome", "ok")
        for row in connection.execute(select(EVENT.c.session_id, EVENT.c.body).where(EVENT.c.type == "tool_finished"))
    }
    calls = select(TOOL_CALL.c.session_id, TOOL_CALL.c.call_id, TOOL_CALL.c.arguments)
    for call in connection.execute(calls.where(TOOL_CALL.c.tool.in_(STARTING))):
        key, spec = (call.session_id, call.call_id), specs[call.session_id]
        if call.call_id.startswith(COPIED) or not any(tool["name"] in STARTING for tool in spec["tools"]):
            continue
        due, started = due_of(spec, call.arguments), children.get(key, [])
        if "delegation" in spec:
            counts["written"] += bool(started) and due is not None and due["name"] == spec["name"]
            counts["not written"] += due is None
        if due is None and (started or outcomes.get(key) == "ok"):
            yield f"{key} is {outcomes.get(key)}, and has started {started}: {call.arguments[:200]} is not allowed"
        if due is not None and outcomes.get(key) == "invalid":
            yield f"{key} was refused, and is allowed: {call.arguments[:200]}"
        if len(started) > 1:
            yield f"{key} has started {started}"
        wanted = {
            (limit["scope"], name): amount
            for limit in (due or {}).get("budget") or () for name, amount in limit.items() if name != "scope"
        }  # fmt: skip
        for child in started:
            if accounts.get(child, {}) != wanted:
                yield f"{child} has the accounts {accounts.get(child)}, and the budget {wanted}"
