"""Workflows that models write, in the simulation: what they write, well and badly, and what must become of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.actors.awaited import Record, Result
from understudy.actors.replay import Execution
from understudy.actors.results import rendered
from understudy.actors.workflow_context import WorkflowContext
from understudy.actors.workflow_interpreter import interpret
from understudy.errors import UnderstudyError, WorkflowDiverged
from understudy.identifiers import COPIED
from understudy.store.db.statements import EVENT, SESSION, TOOL_CALL
from understudy.workflow_definition.checking import converted
from understudy.workflows import CREATE_WORKFLOW, MODEL_AGENT, WORKFLOW, WORKFLOW_STATUS

from .background import LAST
from .tasks import INPUTS, rewritten
from .tools import BY_POLICY, TOOLS
from .workflows import SIGNALS

if TYPE_CHECKING:
    from .plan import Work
    from .reference import Known

BEYOND = "beyond the limits"
"""The description of a definition that must be refused."""

Step = dict[str, Any]


def some_written(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans many of its agents write workflows."""
    if chosen.random() >= 0.25:
        return work
    return tuple(writing(chosen, item) if chosen.random() < 0.7 else item for item in work)


def writing(chosen: random.Random, work: Work) -> Work:
    """The same work; its agent's model writes workflows between its other calls, within limits and beyond them."""
    own = {tool["name"] for tool in work.spec["tools"]}
    usable = [name for names in BY_POLICY.values() for name in names if name in own]
    limits: dict[str, Any] = {
        "tools": usable[: chosen.choice((2, 4, 8))],
        "agents": sorted(work.spec["agents"])[: chosen.choice((0, 1, 2))],
        "models": [],
        "steps": chosen.choice((4, 12, 60)),
        "at_once": chosen.choice((1, 2, 8)),
        "budget": chosen.choice((None, None, [{"scope": "tree", "children": chosen.choice((0, 1))}])),
    }
    tools = [tool for tool in work.spec["tools"] if tool["name"] not in (CREATE_WORKFLOW, WORKFLOW_STATUS)]
    tools += [TOOLS[CREATE_WORKFLOW], TOOLS[WORKFLOW_STATUS]]

    def with_definitions(text: str) -> str:
        said = json.loads(text)
        for number in range(chosen.choice((1, 1, 2))):
            at = chosen.randrange(len(said["rounds"]) + 1)
            call = Writing(chosen, f"{said['name']}.w{number}", limits).call()
            more = [[WORKFLOW_STATUS, {"workflow": LAST}]] if chosen.random() < 0.3 else []
            said["rounds"][at:at] = [[[CREATE_WORKFLOW, call]], *([more] if more else [])]
            said["thinking"][at:at] = [round(0.3 * chosen.random(), 3) for _ in range(1 + bool(more))]
        return json.dumps(said)

    spec = {**work.spec, "tools": tools, "workflows": limits}
    return rewritten(replace(work, spec=spec), with_definitions, kinds=INPUTS)


class Writing:
    """Draws a definition.

    Args:
        name: begins the names of all calls.
    """

    def __init__(self, chosen: random.Random, name: str, limits: dict[str, Any]) -> None:
        self._chosen, self._name, self._limits = chosen, name, limits
        self._count = self._names = 0
        self._apart = random.Random(f"{name}/timeout")  # so that all else is what it has been

    def call(self) -> Any:
        """The arguments of a call."""
        chosen = self._chosen
        steps = [self._step(2, self._limits["at_once"]) for _ in range(chosen.choice((1, 2, 3)))]
        definition: Step = {"name": "drawn", "inputs": {"word": {"type": "string"}}, "steps": steps}
        found: Step = {"definition": definition, "inputs": {"word": self._named()}}
        if chosen.random() < 0.5:
            found["detached"] = True
        if chosen.random() < 0.25:
            self._go_beyond(found)
        if self._count > self._limits["steps"]:
            definition["description"] = BEYOND
        return found

    def _go_beyond(self, call: Step) -> None:
        definition = call["definition"]
        definition["description"] = BEYOND
        how = self._chosen.choice(("tool", "agent", "width", "model", "variable", "inputs"))
        wrong: dict[str, Step] = {
            "tool": {"tool": {"name": "shell"}},
            "agent": {"agent": {"name": "nobody", "task": "x"}},
            "width": {"parallel": [self._tool() for _ in range(self._limits["at_once"] + 1)]},
            "model": {"model": {"prompt": "x", "model": "large"}},
            "variable": {"agent": {"name": "helper", "task": "{{nothing}}"}},
        }
        if how == "inputs":
            call["inputs"] = {"word": 3}
        else:
            definition["steps"].insert(self._chosen.randrange(len(definition["steps"]) + 1), wrong[how])

    def _step(self, depth: int, room: int) -> Step:
        """A step.

        Args:
            room: so many steps may be under way at once in it.
        """
        chosen, draw = self._chosen, self._chosen.random()
        step: Step
        if depth and draw < 0.4:
            self._count += 1
            step = self._composed(depth - 1, room)
        elif draw < 0.7:
            step = self._tool()
        elif draw < 0.8 and self._limits["agents"]:
            self._count += 1
            task = {"name": self._named(), "rounds": [], "thinking": [self._seconds(0.2, 3.0)]}
            step = {"agent": {"name": chosen.choice(self._limits["agents"]), "task": json.dumps(task)}}
        else:
            self._count += 1
            timed = {"timeout": 1 + self._seconds(3.0)}
            step = chosen.choice(
                (
                    {"wait": {"seconds": 0.01 + self._seconds(0.3, 3.0)}},
                    {"ask": {"question": f"which {self._named()}?"}, **timed},
                    {"wait": {"event": chosen.choice(SIGNALS)}, **timed},
                )
            )
        if self._apart.random() < 0.15 and "wait" not in step:
            step["timeout"] = round(0.1 + 3.0 * self._apart.random(), 3)
        if chosen.random() < 0.15:
            step["retry"] = {"max_attempts": 2, "backoff": 0.3}
        for name in ("fallback", "undo"):
            if chosen.random() < 0.1:
                step[name] = self._tool()
        return {**step, "on_error": "continue"} if chosen.random() < 0.6 else step

    def _composed(self, depth: int, room: int) -> Step:
        chosen = self._chosen
        limit = chosen.randint(1, room)
        kind = chosen.choice(("sequence", "parallel", "foreach", "branch", "loop"))
        if kind == "sequence":
            return {kind: [self._step(depth, room) for _ in range(chosen.choice((1, 2)))]}
        if kind == "parallel":
            steps = [self._step(depth, room // limit) for _ in range(chosen.choice((1, 2, 3)))]
            return {kind: steps, "max_concurrency": limit}
        if kind == "foreach":
            items = [self._named() for _ in range(chosen.choice((0, 1, 3)))]
            return {kind: {"items": items, "do": self._tool("{{item}}.{{index}}")}, "max_concurrency": limit}
        if kind == "branch":
            case = {"when": chosen.choice(("word == 'x'", "word != ''")), "do": self._step(depth, room)}
            return {kind: {"cases": [case], **({"else": self._tool()} if chosen.random() < 0.5 else {})}}
        return {kind: {"do": self._tool(f"{self._named()}.{{{{index}}}}"), "max": chosen.choice((1, 2, 5))}}

    def _tool(self, name: str = "") -> Step:
        chosen = self._chosen
        self._count += 1
        kills = chosen.choice((1, 1, 3)) if chosen.random() < 0.06 else 0
        given = {"name": name or self._named(), "seconds": self._seconds(0.0, 0.1, 1.0, 6.0)}
        given |= {"fails": chosen.random() < 0.1, "kills": kills}
        return {"tool": {"name": chosen.choice(self._limits["tools"]), "arguments": given}}

    def _seconds(self, *longest: float) -> float:
        return round(self._chosen.choice(longest) * self._chosen.random(), 3)

    def _named(self) -> str:
        self._names += 1
        return f"{self._name}.{self._names}"


# What must hold.


def misfits(above: dict[str, Any], found: dict[str, Any], arguments: str) -> Iterator[str]:
    """What of a session is not as the call says that has created it.

    Args:
        above: the specification of the agent that has written it.
    """
    given, limits = json.loads(arguments), above["workflows"]
    definition = given["definition"]
    if definition.get("description") == BEYOND:
        yield f"{arguments[:200]} is beyond the limits, and was begun"
    due = {
        "kind": WORKFLOW, "max_depth": above["max_depth"] - 1, "budget": limits["budget"], "lifecycle": "ephemeral",
        "restart_type": "temporary", "hooks": above.get("hooks"),
    }  # fmt: skip
    for name, value in due.items():
        if found.get(name) != value:
            yield f"a written workflow has the {name} {found.get(name)}, and its call says {value}"
    function = found["workflow"]
    if (function["definition"], function["most_steps"]) != (definition, limits["steps"]):
        yield f"a written workflow does {function}, and its call says {definition}"
    if [tool["name"] for tool in found["tools"]] != [
        tool["name"] for tool in above["tools"] if tool["name"] in limits["tools"]
    ]:
        yield f"a written workflow has the tools {found['tools']}, and may have {limits['tools']}"
    if sorted(found["agents"]) != sorted([*limits["agents"], MODEL_AGENT]):
        yield f"a written workflow has the agents {sorted(found['agents'])}, and may have {limits['agents']}"


def comes_to(definition: dict[str, Any], most_steps: int, inputs: dict[str, Any], known: Known) -> tuple[str, Any]:
    """What a definition does by a run's record: `completed` with a value, `failed` with code and text, or `open`."""
    asked = {path: (tool, rendered(given).text) for path, (tool, given) in known.asked.items()}
    results = [(path, Result(outcome, text)) for path, outcome, text in known.results]
    context = WorkflowContext("s", "r")

    async def code(within: WorkflowContext) -> Any:
        return await interpret(within, converted(definition), inputs, most_steps)

    execution = Execution(context.whole(code, {}), Record(asked, results, dict(known.taken)))
    try:
        execution.replay()
    except WorkflowDiverged as diverged:
        return "diverged", diverged.message
    if not execution.is_over:
        return "open", None
    error = execution.error
    if isinstance(error, UnderstudyError):
        return "failed", (error.code, error.message)
    return "completed", execution.value


def violations(connection: Any, counts: Counter[str]) -> Iterator[str]:
    """A call within the limits is not refused for them; one beyond them begins nothing; each begins one workflow at
    most, and that is never started again."""
    children = dict[tuple[str, str], list[Any]]()
    columns = (SESSION.c.session_id, SESSION.c.parent_id, SESSION.c.call_id, SESSION.c.restart_number)
    for row in connection.execute(select(*columns).where(SESSION.c.parent_id.is_not(None))):
        children.setdefault((row.parent_id, row.call_id), []).append(row)
    outcomes = {
        (row.session_id, row.body["call_id"]): row.body.get("outcome", "ok")
        for row in connection.execute(select(EVENT.c.session_id, EVENT.c.body).where(EVENT.c.type == "tool_finished"))
    }
    calls = select(TOOL_CALL.c.session_id, TOOL_CALL.c.call_id, TOOL_CALL.c.arguments)
    for call in connection.execute(calls.where(TOOL_CALL.c.tool == CREATE_WORKFLOW)):
        key = call.session_id, call.call_id
        if call.call_id.startswith(COPIED) or key not in outcomes:
            continue
        beyond = json.loads(call.arguments)["definition"].get("description") == BEYOND
        begun = children.get(key, [])
        counts["written workflows"] += bool(begun)
        counts["workflows refused"] += beyond and outcomes[key] == "invalid"
        if beyond and (begun or outcomes[key] == "ok"):
            yield f"{key} is {outcomes[key]}, and has begun {begun}: it is beyond the limits"
        if not beyond and outcomes[key] == "invalid":
            yield f"{key} was refused, and is within the limits: {call.arguments[:300]}"
        if len(begun) > 1 or any(row.restart_number for row in begun):
            yield f"{key} has begun {begun}"
