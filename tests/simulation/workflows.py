"""Workflows, in the simulation: programs that are drawn, the workflow that does them, and who signals it."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Awaitable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from understudy import StepFailed, WorkflowContext, workflow
from understudy.actors.code import fingerprint, sourced
from understudy.actors.workflow_context import Retry
from understudy.workflows import MODEL_AGENT, WORKFLOW

from .executed import EXECUTED
from .tools import BY_POLICY

if TYPE_CHECKING:
    from .plan import Action, Work

Node = dict[str, Any]
"""A part of a program: what it does (`do`), and with what."""

NOTED = "+"
"""Begins the names of calls that the program notes when they are done: what it does afterwards depends on the order."""

SIGNALS = ("go", "more")
BACKOFF = 0.5
NAME = "programmed"
IN_TIME: Node = {"do": "within", "seconds": 3.0, "part": {"do": "sleep", "seconds": 0.1}, "catch": True}
"""As a rule its timer is still set when the next part begins."""


@workflow
async def programmed(ctx: WorkflowContext, program: Node, times: int = 0) -> Any:
    """Do a program.

    Args:
        times: how often it has begun again.
    """
    return await Doing(ctx, program, times).value(program, None)


class Doing:
    """A program that a workflow does.

    Args:
        whole: the program.
    """

    def __init__(self, ctx: WorkflowContext, whole: Node, times: int) -> None:
        self._ctx, self._whole, self._times = ctx, whole, times
        self._done: list[str] = []

    async def value(self, node: Node, given: Any) -> Any:
        """What a part comes to; where it is to catch failures, what is said of one.

        Args:
            given: the value of the part before it.
        """
        try:
            return await getattr(self, f"_{node['do']}")(node, given)
        except StepFailed as failed:
            if not node.get("catch"):
                raise
            return {"failed": failed.message}

    async def _tool(self, node: Node, given: Any) -> Any:
        arguments = {**node["with"], "name": call_name(node["with"]["name"], self._done, given)}
        try:
            return await self._ctx.tool(node["tool"], retry=_retry(node), **arguments)
        finally:
            if arguments["name"].startswith(NOTED):
                self._done.append(arguments["name"])

    async def _agent(self, node: Node, given: Any) -> Any:
        return await self._ctx.agent(node["agent"], task_of(node, self._done, given), retry=_retry(node))

    async def _model(self, node: Node, given: Any) -> Any:
        return await self._ctx.model(None, task_of(node, self._done, given), retry=_retry(node))

    async def _child(self, node: Node, _given: Any) -> Any:
        return await self._ctx.workflow(programmed, node["program"], retry=_retry(node))

    async def _sleep(self, node: Node, _given: Any) -> Any:
        await self._ctx.sleep(node["seconds"])

    async def _until(self, node: Node, _given: Any) -> Any:
        await self._ctx.until(await self._ctx.now() + timedelta(seconds=node["seconds"]))

    async def _ask(self, node: Node, _given: Any) -> Any:
        return await self._ctx.ask(node["prompt"], timeout=node["timeout"], default=node["default"])

    async def _event(self, node: Node, _given: Any) -> Any:
        return await self._ctx.event(node["name"], timeout=node["timeout"])

    async def _now(self, _node: Node, _given: Any) -> Any:
        return (await self._ctx.now()).timestamp()

    async def _random(self, _node: Node, _given: Any) -> Any:
        return await self._ctx.random()

    async def _patched(self, node: Node, _given: Any) -> Any:
        return await self._ctx.patched(node["name"])

    async def _publish(self, node: Node, given: Any) -> Any:
        await self._ctx.publish(node["name"], given)
        return given

    async def _sequence(self, node: Node, given: Any) -> Any:
        for part in node["parts"]:
            given = await self.value(part, given)
        return given

    async def _gather(self, node: Node, given: Any) -> Any:
        parts: list[Awaitable[Any]] = [self.value(part, given) for part in node["parts"]]
        found = await self._ctx.gather(*parts, limit=node["limit"], return_exceptions=node["keeps"])
        return [said(value) for value in found]

    async def _foreach(self, node: Node, _given: Any) -> Any:
        def each(item: int) -> Awaitable[Any]:
            return self.value(node["part"], item)

        items = range(node["count"])
        found = await self._ctx.foreach(items, each, limit=node["limit"], return_exceptions=node["keeps"])
        return [said(value) for value in found]

    async def _within(self, node: Node, given: Any) -> Any:
        return await self._ctx.within(node["seconds"], self.value(node["part"], given))

    async def _undo(self, node: Node, given: Any) -> Any:
        self._ctx.on_failure(self._undone, node["tool"], node["with"])
        return given

    async def _undone(self, tool: str, arguments: Node) -> None:
        await self._ctx.tool(tool, **arguments)

    async def _again(self, node: Node, given: Any) -> Any:
        if self._times < node["most"]:
            await self._ctx.continue_as_new(program=self._whole, times=self._times + 1)
        return given


def said(value: Any) -> Any:
    """A result of parts that were done at once: also one that failed."""
    return {"raised": value.message} if isinstance(value, StepFailed) else value


def call_name(name: str, done: list[str], given: Any) -> str:
    """The name of a call: it says what was done before it, in which order, and what came out of the part before."""
    return f"{name}~{zlib.crc32(json.dumps([done, given]).encode()):08x}"


def task_of(node: Node, done: list[str], given: Any) -> str:
    """The task of an agent, with a name as that of a call."""
    return json.dumps({**node["task"], "name": call_name(node["task"]["name"], done, given)})


def _retry(node: Node) -> Retry | None:
    return Retry(node["attempts"], BACKOFF) if node.get("attempts") else None


# Drawing.


class Drawn:
    """Draws programs.

    Args:
        name: begins the names of all calls.
        policies: of the tools that are called; with none, no tool is, and nothing waits for others for ever.
        agents: whether agents and workflows do some steps.
    """

    def __init__(self, chosen: random.Random, name: str, policies: list[str], *, agents: bool, elsewhere: bool) -> None:
        self._chosen, self._name, self._policies = chosen, name, policies
        self._agents, self._elsewhere = agents, elsewhere
        self._count = 0
        self._apart = random.Random(f"{name}/within")  # so that all else is what it has been

    def program(self) -> Node:
        """A whole program."""
        chosen = self._chosen
        parts = [self._part(2) for _ in range(chosen.choice((1, 2, 3, 5)))]
        places = [chosen.randrange(len(parts) + 1) for _ in range(chosen.choice((0, 0, 1, 2)))]
        places = places if self._policies else []
        if chosen.random() < 0.15:
            # Before all that is to be undone: a workflow can't begin again with something to undo.
            again = chosen.randrange(min(places, default=len(parts)) + 1)
            before = [IN_TIME] if self._apart.random() < 0.5 else []
            parts[again:again] = [*before, {"do": "again", "most": chosen.choice((1, 2))}]
            places = [place + len(before) + 1 for place in places]
        for place in places:
            parts.insert(place, {"do": "undo", **self._call(noted=False)})
        return {"do": "sequence", "parts": parts}

    def _part(self, depth: int) -> Node:
        node = self._unlimited(depth)
        if self._apart.random() >= 0.1:
            return node
        seconds = round(self._apart.choice((0.3, 3.0, 12.0)) * self._apart.random() + 0.01, 3)
        node = json.loads(json.dumps(node).replace(f'"name": "{NOTED}', '"name": "'))  # a call may end with its time
        return {"do": "within", "seconds": seconds, "part": node, "catch": self._apart.random() < 0.7}

    def _unlimited(self, depth: int) -> Node:
        chosen, draw = self._chosen, self._chosen.random()
        node: Node
        if depth and draw < 0.4:
            return self._composed(depth)
        if draw < 0.65 and self._policies:
            retried = chosen.random() < 0.25
            node = {"do": "tool", **self._call(noted=not retried)}
            node |= {"attempts": chosen.choice((2, 3))} if retried else {}
        elif draw < 0.78 and self._agents:
            node = self._of_child(depth)
        elif draw < 0.84:
            node = {"do": chosen.choice(("sleep", "until")), "seconds": self._seconds(0.0, 0.3, 3.0, 12.0)}
        elif draw < 0.89:
            timed = chosen.random() < 0.6 or not self._policies
            node = {"do": "ask", "prompt": self._named("which"), "timeout": self._seconds(0.2, 2.0) if timed else None,
                    "default": chosen.choice((None, "as always")) if timed else None}  # fmt: skip
        elif draw < 0.96:
            timed = chosen.random() < 0.7 or not self._policies
            node = {"do": "event", "name": chosen.choice(SIGNALS),
                    "timeout": self._seconds(0.3, 3.0, 12.0) if timed else None}  # fmt: skip
        else:
            node = {"do": chosen.choice(("now", "random", "patched", "publish")), "name": chosen.choice("pq")}
        return {**node, "catch": True} if chosen.random() < 0.7 else node

    def _composed(self, depth: int) -> Node:
        chosen = self._chosen
        kind = chosen.choice(("sequence", "gather", "gather", "foreach"))
        keeps = chosen.random() < 0.5
        if kind == "foreach":
            node = {"do": kind, "count": chosen.choice((0, 1, 3, 6)), "part": self._part(depth - 1)}
            return {**node, "limit": chosen.choice((1, 2, 16)), "keeps": keeps}
        parts = [self._part(depth - 1) for _ in range(chosen.choice((1, 2, 3, 4)))]
        if kind == "sequence":
            return {"do": kind, "parts": parts}
        return {"do": kind, "parts": parts, "limit": chosen.choice((None, None, 1, 2)), "keeps": keeps}

    def _of_child(self, depth: int) -> Node:
        chosen = self._chosen
        kind = chosen.choice(("agent", "agent", "model", "child")) if depth else "agent"
        retried = {"attempts": 2} if chosen.random() < 0.2 else {}
        inner = Drawn(chosen, self._named("in"), self._policies, agents=False, elsewhere=False)
        if kind == "child":
            return {"do": kind, "program": {"do": "sequence", "parts": [inner._part(1) for _ in range(2)]}, **retried}
        calls = [inner._call(noted=False) for _ in range(chosen.choice((0, 1, 1, 2)))] if kind == "agent" else []
        rounds = [[[call["tool"], call["with"]]] for call in calls]
        task = {"name": self._named(kind), "rounds": rounds, "thinking": [self._seconds(0.2, 3.0)] * (len(rounds) + 1)}
        return {"do": kind, "agent": chosen.choice(("helper", "watcher")), "task": task, **retried}

    def _call(self, *, noted: bool) -> Node:
        chosen, name = self._chosen, self._named(NOTED if noted else "")
        if self._elsewhere and chosen.random() < 0.2:
            dies = chosen.choice((1, 4)) if chosen.random() < 0.15 else 0
            given = {"name": name, "seconds": self._seconds(0.0, 0.1, 1.0, 6.0), "dies": dies, "slow": 0.0}
            return {"tool": chosen.choice(sorted(EXECUTED)), "with": given}
        kills = chosen.choice((1, 1, 3, 4)) if chosen.random() < 0.06 else 0
        given = {"name": name, "seconds": self._seconds(0.0, 0.0, 0.1, 1.0, 6.0, 15.0)}
        given |= {"fails": chosen.random() < 0.1, "kills": kills}
        return {"tool": chosen.choice(BY_POLICY[chosen.choice(self._policies)]), "with": given}

    def _seconds(self, *longest: float) -> float:
        return round(self._chosen.choice(longest) * self._chosen.random(), 3)

    def _named(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._name}.{self._count}"


# The work of plans.

KEPT = (
    "instructions", "model", "profile", "workspace", "max_rounds", "max_continuations", "tool_timeout",
    "parallel_tools", "max_depth", "deadline", "parameters", "budget", "metadata", "repeat_limit", "restart",
    "shutdown", "supervision", "placement", "approve_timeout", "approve_default",
)  # fmt: skip
"""What a workflow's specification has as an agent's."""

STEERING = ("steer", "fork")
"""What can't be done to a workflow."""


def some_workflows(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans many of the root sessions are workflows."""
    if chosen.random() >= 0.3:
        return work
    return tuple(as_workflow(chosen, item) if chosen.random() < 0.7 else item for item in work)


def as_workflow(chosen: random.Random, work: Work) -> Work:
    """The same work, done by programs: the session's inputs are some."""
    spec = specification(chosen, work)
    names = {tool["name"] for tool in spec["tools"]}
    policies = [policy for policy in BY_POLICY if names & {*BY_POLICY[policy]}]

    def with_new_task(action: Action) -> Action:
        name = next((name for name in ("content", "prompt") if action.what.get(name, "").startswith("{")), "")
        if not name:
            return action
        begins = f"{work.session_id}.{json.loads(action.what[name])['name']}"
        if action.what.get("own"):  # no client looks after the sessions that a schedule makes
            apart = random.Random(f"{begins}/{action.what[name]}")  # so other programs are what they have been
            drawn = Drawn(apart, begins, [], agents=False, elsewhere=False)
        else:
            agents = "helper" in spec["agents"]
            drawn = Drawn(chosen, begins, policies, agents=agents, elsewhere=bool(names & {*EXECUTED}))
        of_agents = ("memory", "fails")  # what a schedule of a workflow can't have
        what = {name: value for name, value in action.what.items() if name not in of_agents}
        return replace(action, what={**what, name: json.dumps({"program": drawn.program()})})

    actions = tuple(with_new_task(action) for action in work.actions if action.kind not in STEERING)
    return replace(work, spec=spec, actions=actions)


def has_limits(work: Work) -> bool:
    """Whether a program of its has something done within a time."""
    return any('"do": "within"' in str(text) for action in work.actions for text in action.what.values())


def specification(chosen: random.Random, work: Work) -> dict[str, Any]:
    """The specification of a workflow that has the tools and the agents of an agent."""
    of_policies = {name for names in BY_POLICY.values() for name in names}
    tools = [tool for tool in work.spec["tools"] if tool["name"] in of_policies | {*EXECUTED}]
    source, _ = sourced(NAME, programmed, None)
    spec = {name: work.spec[name] for name in KEPT if name in work.spec}
    like_a_child = {
        "restart_type": chosen.choice(("temporary", "transient", "permanent")),
        "on_parent_end": chosen.choice(("cancel", "abandon", "wait")),
        "lifecycle": chosen.choice(("ephemeral", "linked", "detached")),
    }
    asking = {**spec, **like_a_child, "name": MODEL_AGENT, "hash": "hash-model", "tools": [], "agents": {}}
    asking |= {"budget": None, "max_depth": 0}
    return {
        **spec, **like_a_child, "name": NAME, "hash": f"hash-{NAME}-{work.session_id}", "tools": tools,
        "kind": WORKFLOW, "workflow": {"name": NAME, "source": source, **fingerprint(programmed)},
        "agents": {**work.spec["agents"], MODEL_AGENT: asking},
        "supervision": spec.get("supervision", SUPERVISION),
    }  # fmt: skip


SUPERVISION = {
    "period": 3600.0, "backoff": 1.0, "backoff_max": 60.0, "jitter": 0.2, "reset_after": 600.0,
    "strategy": "one_for_one", "max_restarts": 2, "exceeded": "report",
}  # fmt: skip
