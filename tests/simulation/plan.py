"""What a simulation does: the work, the faults and their times, all drawn from one seed before anything runs.

A plan is data: a failing one is made shorter by leaving parts of it out, and what is left runs as it did before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from understudy.manifest import is_guarded
from understudy.notes import BOARD, NOTES
from understudy.placement import DEFAULT, ISOLATED

from .background import SPAWN, some_in_background
from .commands import some_with_commands
from .delegating import some_delegating
from .executed import EXECUTED, some_executed
from .files import leaves_files, with_files
from .folding import folding
from .goals import GOAL, some_goals
from .guards import some_guarded
from .handoffs import hands_off, some_handed_off
from .hooks import HOOKS
from .jobs import some_with_jobs
from .loops import some_loops
from .queues import some_in_queues
from .recalling import some_recalling
from .schedules import fires_workflows, some_with_schedules
from .servers import have_servers, some_with_servers
from .tasks import rewritten
from .tools import BY_POLICY, TOOLS
from .typed import output
from .workflows import SIGNALS, WORKFLOW, has_limits, some_workflows
from .written import some_written

STEER = "steer"
"""How messages begin that steer a run: the model does what it would have done without them."""

MAX_CONTINUATIONS = 2
WINDOWS = (12.0, 20.0, 30.0, 60.0)
"""Within one of these times faults happen; after it everything is healed, and all work must end."""

PLACEMENTS = (DEFAULT, "other", f"own{ISOLATED}")
"""Where sessions run: with most others, in processes of their own kind, in a process for each activation."""


@dataclass(frozen=True)
class Task:
    """One input: in each round so many tool calls after so much thinking, at last an answer."""

    name: str
    rounds: tuple[tuple[tuple[str, dict[str, Any]], ...], ...]
    thinking: tuple[float, ...]

    def text(self) -> str:
        """As the model reads it."""
        return json.dumps({"name": self.name, "rounds": self.rounds, "thinking": self.thinking})


@dataclass(frozen=True)
class Trigger:
    """A moment that is known only while it runs: so many events of a type were committed.

    Attributes:
        root_id: only those of this tree count, if it is given.
    """

    event: str
    count: int
    root_id: str = ""


@dataclass(frozen=True)
class Action:
    """Something that a client does at a time: `send`, `cancel`, `close`, `answer`, `abort`, `schedule`, …

    Attributes:
        on: then `at` is counted from this moment of the client's tree.
    """

    at: float
    kind: str
    what: dict[str, Any] = field(default_factory=dict)
    on: Trigger | None = None

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.2f}" + (f" after {self.on.event} {self.on.count}" if self.on else "")


@dataclass(frozen=True)
class Work:
    """A root session and what its client does with it."""

    session_id: str
    spec: dict[str, Any]
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time.

    Attributes:
        pick: chooses among the processes that are there then, 0 to 1.
        seconds: how long it lasts, where it lasts.
        on: then `at` is counted from this moment, and it hits the processes of the session whose event it is.
    """

    at: float
    kind: str
    pick: float = 0.0
    seconds: float = 0.0
    on: Trigger | None = None

    @property
    def method(self) -> str:
        """Of `slow_calls`: the method whose calls are late."""
        return SLOW_METHODS[min(int(self.pick * len(SLOW_METHODS)), len(SLOW_METHODS) - 1)]

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.3f} s" if self.seconds else ""
        after = f" after {self.on.event} {self.on.count} {self.on.root_id}".rstrip() if self.on else ""
        return f"{self.at:8.3f} s{after}  {self.kind}{lasts} (pick {self.pick:.3f})"


@dataclass(frozen=True)
class Plan:
    """A whole simulation.

    Attributes:
        seconds: faults happen within this time.
        calm: nobody loses the CPU by chance.
        astray: share of the requests that clients send to another node than the session's, as it was known once.
        stuck: share of the model calls that take very long, unless they are made again.
        limit: requests that the endpoint takes in any minute; 0 for any number. The profile says so if it is even.
        reports: tools report what they do, and clients follow the answers as they stream.
        asks: share of the calls of MCP servers during which these ask a person.
        responses: the endpoint makes responses in the background, and keeps them.
        scales: the number of machines follows the load; a machine goes when there was little for so many seconds.
        forked: share of the frames whose tools leave a process that keeps the frame's connections open: nobody hears of
            such a frame's end.
    """

    seed: int
    backend: str
    machines: int
    standby: int
    max_actors: int
    work: tuple[Work, ...]
    faults: tuple[Fault, ...]
    seconds: float = 30.0
    endpoint_trouble: float = 0.0
    calm: bool = False
    astray: float = 0.0
    stuck: float = 0.0
    forked: float = 0.0
    reports: bool = False
    limit: int = 0
    responses: bool = False
    asks: float = 0.0
    scales: float = 0.0

    def to_json(self) -> str:
        """All of it, as a regression keeps it."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The same plan again."""
        data = json.loads(text)
        work = tuple(
            Work(item["session_id"], item["spec"], tuple(Action(**_triggered(action)) for action in item["actions"]))
            for item in data.pop("work")
        )
        return cls(**{**data, "work": work, "faults": tuple(Fault(**_triggered(fault)) for fault in data["faults"])})

    def features(self) -> set[str]:
        """What occurs in it: kinds of faults, actions, budgets and tools; what its agents may do; which calls are slow
        (`slow commit`); and what happens at which event (`kill_frame at tool_started`)."""
        found = {"machines"} if self.machines > 1 else set()
        simple = ("astray", "stuck", "forked", "reports", "limit", "responses", "asks", "scales")
        found |= {name for name in simple if getattr(self, name)}
        for item in (*self.faults, *(action for work in self.work for action in work.actions)):
            found |= {item.kind, f"{item.kind} at {item.on.event}"} if item.on else {item.kind}
        found |= {f"slow {fault.method}" for fault in self.faults if fault.kind == "slow_calls"}
        for work in self.work:
            helpers = [*work.spec["agents"].values()]
            found |= {"grandchildren"} if any(helper["agents"] for helper in helpers) else set()
            helpers += [inner for helper in helpers for inner in helper["agents"].values()]
            found |= {"children"} if helpers else set()
            found |= {name for name in ("hooks", "context", "memory", "delegation", "mcp_servers") if name in work.spec}
            found |= {"written"} if "workflows" in work.spec else set()
            found |= (
                {"providers"} if any(one.get("memory", {}).get("providers") for one in (work.spec, *helpers)) else set()
            )
            found |= {"background"} if any(tool["name"] == "start_agent" for tool in work.spec["tools"]) else set()
            found |= {"guards"} if is_guarded(work.spec) else set()
            found |= {"handoffs"} if hands_off(work.spec) else set()
            found |= {"queues"} if any("place" in action.what for action in work.actions) else set()
            found |= {"jobs"} if any(tool["name"] == "schedule_wakeup" for tool in work.spec["tools"]) else set()
            found |= {"commands"} if any(tool["name"] == "start_command" for tool in work.spec["tools"]) else set()
            found |= {"executed"} if any(tool["name"] in EXECUTED for tool in work.spec["tools"]) else set()
            found |= {"files"} if leaves_files(work.spec) else set()
            found |= {"merge"} if "follow_ups" in work.spec else set()
            found |= {"goals"} if work.spec["name"] == GOAL else set()
            found |= {"loops"} if any(action.what.get("memory") for action in work.actions) else set()
            found |= {"failing loops"} if any(action.what.get("fails") for action in work.actions) else set()
            found |= {"workflows"} if work.spec.get("kind") == WORKFLOW else set()
            found |= {"time limits"} if has_limits(work) else set()
            found |= {"workflows fired"} if fires_workflows(work) else set()
            found |= {"interrupt"} if any(action.what.get("interrupt") for action in work.actions) else set()
            found |= {"approvals"} if any(tool.get("approve") for tool in work.spec["tools"]) else set()
            found |= {f"output {spec['output']['mode']}" for spec in (work.spec, *helpers) if "output" in spec}
            found |= {"notes"} if any(tool["name"] in BOARD for tool in work.spec["tools"]) else set()
            found |= {f"placement {spec['placement']}" for spec in (work.spec, *helpers) if spec.get("placement")}
            found |= {f"budget {name}" for limit in work.spec["budget"] or () for name in limit if name != "scope"}
            found |= {f"tool {tool['on_crash']}" for tool in work.spec["tools"] if "on_crash" in tool}
            for name in ("on_parent_end", "lifecycle", "restart_type", "shutdown"):
                found |= {f"{name} {helper[name]}" for helper in helpers}
            if helpers:
                found.add(f"strategy {work.spec['supervision']['strategy']}")
        return found

    def describe(self) -> Iterator[str]:
        """Lines for people."""
        yield (
            f"seed {self.seed}: {self.backend}, {self.machines} machines, {self.standby} standbys, "
            f"at most {self.max_actors} frames each, {len(self.work)} root sessions, faults within {self.seconds:.0f} s"
        )
        for work in self.work:
            yield f"  {work.session_id}: {', '.join(map(str, work.actions))}"
        for fault in self.faults:
            yield f"  {fault}"


def _order(item: Action | Fault) -> tuple[bool, float]:
    """First what has a time, then what waits for a moment."""
    return item.on is not None, item.at


def _triggered(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "on": Trigger(**item["on"]) if item.get("on") else None}


def task(chosen: random.Random, name: str, policies: list[str], *, spawns: bool) -> Task:
    """A task for an agent that has the tools of these policies."""
    rounds = []
    if spawns and chosen.random() < 0.12:  # a sub-agent, perhaps refused, beside a tool that dies until it is given up
        deadly = call(chosen, f"{name}.deadly", policies, spawns=False, kills=4)
        rounds.append((spawn(chosen, f"{name}.beside", policies), deadly))
    for number in range(chosen.choice((0, 1, 2, 2, 3, 4))):
        calls: list[tuple[str, dict[str, Any]]] = []
        for index in range(chosen.choice((1, 1, 2, 2, 3))):
            calls.append(call(chosen, f"{name}.{number}.{index}", policies, spawns=spawns))
        rounds.append(tuple(calls))
    times = (0.02, 0.02, 0.2, 0.2, 1.0, 1.0, 3.0, 3.0, 25.0)
    thinking = tuple(round(chosen.choice(times) * chosen.random(), 3) for _ in range(len(rounds) + 1))
    return Task(name, tuple(rounds), thinking)


def spawn(chosen: random.Random, name: str, policies: list[str]) -> tuple[str, dict[str, Any]]:
    """A call for a sub-agent."""
    inner = task(chosen, f"{name}.sub", policies, spawns=False)
    return SPAWN, {"agent": chosen.choice(("helper", "watcher")), "task": inner.text()}


def call(
    chosen: random.Random, name: str, policies: list[str], *, spawns: bool, kills: int = 0
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """One tool call."""
    draw = chosen.random()
    if not kills and spawns and draw < 0.25:
        return spawn(chosen, name, policies)
    if not kills and draw < 0.30:
        return "request_user_input", {"prompt": f"which {name}?"}
    if not kills and draw < 0.36:
        return "wait", {"seconds": round(chosen.choice((0.2, 2.0, 9.0)), 3)}
    policy = chosen.choice(policies)
    seconds = round(chosen.choice((0.0, 0.0, 0.1, 1.0, 6.0, 15.0)) * chosen.random(), 3)
    kills = kills or (chosen.choice((1, 1, 3, 4)) if chosen.random() < 0.05 else 0)
    tool = chosen.choice(BY_POLICY[policy])
    return tool, {"name": name, "seconds": seconds, "fails": chosen.random() < 0.05, "kills": kills}


def child_spec(chosen: random.Random, name: str, policies: list[str]) -> dict[str, Any]:
    """What a sub-agent is."""
    return agent(
        name, policies, restart_type=chosen.choice(("temporary", "transient", "permanent")),
        on_parent_end=chosen.choice(("cancel", "abandon", "wait")),
        lifecycle=chosen.choice(("ephemeral", "linked", "detached")),
        shutdown=chosen.choice((None, 0.0, 2.0, 10.0)),
        max_rounds=chosen.choice((2, 20, 20)),
    )  # fmt: skip


def agent(name: str, policies: list[str], **more: Any) -> dict[str, Any]:
    """A compiled specification."""
    tools = [TOOLS[tool] for policy in policies for tool in BY_POLICY[policy]]
    fields: dict[str, Any] = dict(
        name=name, hash=f"hash-{name}", instructions="offline-policy: simulation", model="offline", profile="offline",
        tools=[*tools, TOOLS["request_user_input"], TOOLS["wait"]], agents={}, workspace=None, max_rounds=20,
        max_continuations=MAX_CONTINUATIONS, tool_timeout=12.0, parallel_tools=4, max_depth=3, deadline=60.0,
        parameters={}, budget=None, metadata={}, repeat_limit=4,
        restart={"max_restarts": 20, "period": 60, "stuck_after": 3, "backoff": 0.1, "backoff_max": 10.0},
    )  # fmt: skip
    return {**fields, **more}


SUPERVISION = {"period": 3600.0, "backoff": 1.0, "backoff_max": 60.0, "jitter": 0.2, "reset_after": 600.0}


def session(chosen: random.Random, number: int, busy: float) -> Work:
    """A root session with its client."""
    session_id = f"s{number}"
    policies = chosen.sample(sorted(BY_POLICY), chosen.randint(1, 4))
    spawns = chosen.random() < 0.6
    more: dict[str, Any] = {"shutdown": chosen.choice((None, 0.0, 2.0, 10.0))}
    if spawns:
        more["agents"] = {name: child_spec(chosen, name, policies) for name in ("helper", "watcher")}
        more["supervision"] = {
            **SUPERVISION, "strategy": chosen.choice(("one_for_one", "one_for_all", "rest_for_one")),
            "max_restarts": chosen.choice((0, 2)), "exceeded": chosen.choice(("escalate", "report")),
        }  # fmt: skip
    if chosen.random() < 0.35:
        more["budget"] = [budget(chosen)]
    spec = agent(f"agent{number % 3}", policies, **more)
    if spawns:
        spec["tools"] = [*spec["tools"], TOOLS[SPAWN]]
    actions = [Action(0.0, "spawn")]
    at = chosen.random() * 3.0
    for run in range(chosen.choice((1, 2, 3, 4))):
        content = task(chosen, f"{session_id}.r{run}", policies, spawns=spawns).text()
        actions.append(Action(at, "send", {"run_id": f"r{run}", "content": content}))
        at += chosen.random() * chosen.choice((0.2, 3.0, busy / 3))
        if chosen.random() < 0.3:
            actions.append(Action(at, "cancel", {"run_id": chosen.choice((None, f"r{run}"))}))
        if chosen.random() < 0.08:
            actions.append(Action(at, "abort"))
        if chosen.random() < 0.12:
            actions.append(Action(at, "schedule", wakeup(chosen, f"{session_id}.w{run}", f"w{run}", policies)))
    draw = chosen.random()
    if draw < 0.15:
        actions.append(Action(at + chosen.random() * busy, "close"))
    elif draw < 0.30:
        content = task(chosen, f"{session_id}.again", policies, spawns=spawns).text()
        actions.append(Action(at + chosen.random() * busy, "replace", {"run_id": "r0", "content": content}))
    for _ in range(chosen.choice((0, 0, 1, 2))):
        kind = chosen.choice(("cancel", "cancel", "cancel_child", "cancel_child", "close_child", "abort", "upgrade"))
        moment = Trigger(chosen.choice(MOMENTS), chosen.choice((1, 1, 2, 3, 5)))
        actions.append(Action(soon(chosen), kind, {"run_id": None}, moment))
    return Work(session_id, spec, tuple(sorted(actions, key=_order)))


def put_away(chosen: random.Random, work: Work, window: float) -> Work:
    """The same work, and at its end the session is exported, removed and imported."""
    if any(action.kind in ("close", "replace") for action in work.actions):
        return work
    content = task(chosen, f"{work.session_id}.back", sorted(BY_POLICY), spawns=False).text()
    at = max(action.at for action in work.actions if action.on is None) + chosen.random() * window / 2
    action = Action(at, "put_away", {"run_id": "back", "content": content})
    return replace(work, actions=(*work.actions, action))


def steered(chosen: random.Random, work: Work, window: float) -> Work:
    """The same work; its client steers the runs, now and then and at some moments, and perhaps interrupts them."""
    if any(action.kind == "replace" for action in work.actions):
        return work
    actions = list(work.actions)
    interrupts = chosen.choice((0.0, 0.5, 1.0))
    for number in range(chosen.choice((4, 8, 16))):
        what = {"content": f"{STEER} {work.session_id}.{number}", "interrupt": chosen.random() < interrupts}
        at, moment = round(chosen.random() * window / 2, 3), None
        if chosen.random() < 0.9:
            event = chosen.choice(("run_started", "model_call_started", "model_call_completed", "tool_started"))
            at, moment = soon(chosen), Trigger(event, chosen.choice((1, 2, 3, 5, 8)))
        actions.append(Action(at, "steer", what, moment))
        if chosen.random() < 0.1:
            actions.append(Action(at + soon(chosen), "cancel", {"run_id": None}, moment))
    return replace(work, actions=tuple(sorted(actions, key=_order)))


def forking(chosen: random.Random, work: Work) -> Work:
    """The same work; its client forks the session, and the forks get an input each."""
    actions = list(work.actions)
    for number in range(chosen.choice((1, 2))):
        content = task(chosen, f"{work.session_id}.f{number}", policies_of(work.spec), spawns=False).text()
        what = {"session_id": f"{work.session_id}.f{number}", "pick": round(chosen.random(), 3), "content": content}
        moment = Trigger(chosen.choice(MOMENTS), chosen.choice((2, 5, 8, 13)))
        actions.append(Action(soon(chosen), "fork", what, moment))
    return replace(work, actions=tuple(sorted(actions, key=_order)))


def signalled(chosen: random.Random, work: Work, window: float) -> Work:
    """The same work; where it is a workflow's, its client signals it, mostly soon after something of it was begun."""
    if work.spec.get("kind") != WORKFLOW:
        return work
    actions = list(work.actions)
    for _ in range(chosen.choice((0, 2, 4, 8))):
        at, moment = round(chosen.random() * window / 2, 3), None
        if chosen.random() < 0.8:
            event = chosen.choice(("run_started", "tool_started", "tool_finished", "timer_set", "timer_fired"))
            at, moment = soon(chosen), Trigger(event, chosen.choice((1, 2, 3, 5, 8)))
        actions.append(Action(at, "signal", {"name": chosen.choice(SIGNALS)}, moment))
    return replace(work, actions=tuple(sorted(actions, key=_order)))


def merging(chosen: random.Random, work: Work) -> Work:
    """The same work; inputs that wait are merged, and most of them come early."""
    actions = tuple(
        replace(action, at=0.1) if action.kind == "send" and chosen.random() < 0.7 else action
        for action in work.actions
    )
    spec = {**work.spec, "follow_ups": "merge"}
    return replace(work, spec=spec, actions=tuple(sorted(actions, key=_order)))


def some_with_files(chosen: random.Random, plan: Plan) -> Plan:
    """The same plan; in some its sessions leave files, and are so many at once that some wait for a frame."""
    if chosen.random() >= 0.5:
        return plan
    work = [crowding(chosen, item) for item in plan.work]
    return replace(plan, max_actors=2, work=tuple(with_files(chosen, item) for item in work))


def crowding(chosen: random.Random, work: Work) -> Work:
    """The same work; its client sends short inputs besides, which keep a frame for a while."""
    if any(action.kind == "replace" for action in work.actions):
        return work
    actions, tool = list(work.actions), BY_POLICY[policies_of(work.spec)[0]][0]
    for number in range(3):
        name = f"{work.session_id}.c{number}"
        calls = tuple(
            ((tool, {"name": f"{name}.{index}", "seconds": round(4 * chosen.random(), 3), "fails": False, "kills": 0}),)
            for index in range(2)
        )
        content = Task(name, calls, (0.02, 0.5, 0.02)).text()
        actions.append(Action(round(12 * chosen.random(), 3), "send", {"run_id": f"c{number}", "content": content}))
    return replace(work, actions=tuple(sorted(actions, key=_order)))


def wakeup(chosen: random.Random, task_name: str, name: str, policies: list[str]) -> dict[str, Any]:
    """A wakeup, once or again and again."""
    every = round(chosen.uniform(1.0, 9.0), 3) if chosen.random() < 0.3 else None
    prompt = task(chosen, task_name, policies, spawns=False).text()
    return {"name": name, "prompt": prompt, "seconds": round(chosen.uniform(0.5, 20.0), 3), "every": every}


MOMENTS = (
    "run_accepted", "run_started", "model_call_started", "model_call_completed", "model_call_completed",
    "model_call_reissued", "tool_started", "tool_started", "tool_finished", "child_spawned", "child_finished",
    "cancel_requested", "session_activated", "session_crashed", "session_moved", "input_requested", "timer_set",
    "timer_fired", "run_finished",
)  # fmt: skip
"""Events at which something else happens, soon after their commit."""


def soon(chosen: random.Random) -> float:
    """So long after a moment: mostly before whoever is concerned has heard of it, or just then."""
    return round(chosen.choice((0.0, 0.001, 0.003, 0.01, 0.1, 1.0)) * chosen.random(), 4)


def budget(chosen: random.Random) -> dict[str, Any]:
    """A limit that may or may not be reached."""
    return chosen.choice(
        (
            {"scope": "tree", "tokens": chosen.choice((600, 3_000, 100_000))},
            {"scope": "run", "tokens": chosen.choice((600, 3_000, 100_000))},
            {"scope": "tree", "children": chosen.choice((0, 0, 1, 3))},
            {"scope": "tree", "children": chosen.choice((0, 0, 1, 3))},
            {"scope": "session", "rounds": chosen.choice((1, 3, 9))},
            {"scope": "run", "seconds": chosen.choice((2_000_000, 20_000_000))},
        )
    )


KINDS = {
    "kill_frame": 8, "kill_node": 4, "kill_supervisor": 3, "pause_frame": 5, "pause_node": 3, "pause_supervisor": 2,
    "slow_kill": 3, "trouble": 4, "clock_step": 1, "endpoint": 2, "drain": 2, "slow_calls": 5, "exporter": 1,
    "freeze": 3,
}  # fmt: skip
SLOW_METHODS = (
    "step", "step", "commit", "commit", "blob", "blob", "specification", "reload", "interrupted", "request",
    "frame_died", "take_over", "demand", "notice", "pid", "retire", "acquire", "start", "kill_process",
)  # fmt: skip
CALLS_OF_FRAMES = 8
"""So many of them, at the front, are what a frame calls while it works."""

STORE_KINDS = {"store_down": 2, "lose_connection": 4, "lose_commit": 5, "hang_commit": 3, "slow_store": 2}
MACHINE_KINDS = {"cut_off": 2, "cut_link": 2, "lose_machine": 1, "notice": 1, "second_supervisor": 1}
LASTING = (
    "pause",
    "freeze",
    "slow",
    "trouble",
    "cut",
    "endpoint",
    "store",
    "hang",
    "drain",
    "second",
    "clock",
    "lose_c",
    "exp",
    "notice",
)


def faults(chosen: random.Random, backend: str, machines: int, window: float) -> tuple[Fault, ...]:
    """What goes wrong, and when."""
    kinds = dict(KINDS)
    if backend == "postgresql":
        kinds.update(STORE_KINDS)
    if machines > 1:
        kinds.update(MACHINE_KINDS)
    else:
        del kinds["drain"]
    # Few kinds at a time: some of what can go wrong shows only where nothing else does ("Swarm Testing", Groce et al.,
    # ISSTA 2012).
    some = chosen.choice((1, 2, 2, 3, 5, len(kinds)))
    names = sorted(chosen.sample(sorted(kinds), min(some, len(kinds))))
    weights = [kinds[name] for name in names]
    found = []
    for _ in range(chosen.choice((0, 3, 8, 16, 24))):
        kind = chosen.choices(names, weights)[0]
        seconds = 0.0
        if kind.startswith(LASTING):
            seconds = round(chosen.choice((0.05, 0.5, 3.0, 5.0, 8.0, 15.0, 40.0)) * (0.5 + chosen.random()), 3)
        at, moment = round(chosen.random() * window, 3), None
        if chosen.random() < 0.5:
            at, moment = soon(chosen), Trigger(chosen.choice(MOMENTS), chosen.choice((1, 2, 3, 5, 8, 13)))
        if found and chosen.random() < 0.3:  # several things go wrong with one thing
            at, moment = (soon(chosen), found[-1].on) if found[-1].on else (found[-1].at + soon(chosen), None)
        found.append(Fault(at, kind, round(chosen.random(), 3), seconds, moment))
    return tuple(sorted(found, key=_order))


def meet(chosen: random.Random, work: tuple[Work, ...], faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """The same faults; some happen when a client does something, to the session that it does it to."""
    moments = [
        replace(action.on, root_id=item.session_id) for item in work for action in item.actions if action.on is not None
    ]
    found = [
        replace(fault, at=soon(chosen), on=chosen.choice(moments)) if moments and chosen.random() < 0.3 else fault
        for fault in faults
    ]
    return tuple(sorted(found, key=_order))


def late_notices(chosen: random.Random, others: tuple[Fault, ...], window: float) -> tuple[Fault, ...]:
    """The same faults; and what nodes tell each other of their commits arrives late, again and again."""
    found = list(others)
    for _ in range(3):
        pick = round((SLOW_METHODS.index("notice") + chosen.random()) / len(SLOW_METHODS), 3)
        seconds = round(chosen.choice((0.05, 0.5, 3.0, 8.0)) * (0.5 + chosen.random()), 3)
        at, moment = round(chosen.random() * window, 3), None
        if chosen.random() < 0.7:
            at, moment = 0.0, Trigger(chosen.choice(("run_started", "model_call_started")), chosen.choice((1, 2, 5)))
        found.append(Fault(at, "slow_calls", pick, seconds, moment))
    return tuple(sorted(found, key=_order))


def hurried(chosen: random.Random, work: Work) -> Work:
    """The same work; its inputs come at once, and a client cancels the first by name while that is at work, so that the
    news of it may arrive when the next one is."""
    inputs = [action.what["run_id"] for action in work.actions if action.kind == "send"]
    actions = [replace(action, at=0.1) if action.kind == "send" else action for action in work.actions]
    if len(inputs) > 1:
        event = chosen.choice(("model_call_started", "model_call_completed", "tool_started"))
        moment = Trigger(event, chosen.choice((1, 1, 2, 3)))
        actions.append(Action(soon(chosen), "cancel", {"run_id": inputs[0]}, moment))
    return replace(work, actions=tuple(sorted(actions, key=_order)))


def late_commits(chosen: random.Random, others: tuple[Fault, ...], window: float) -> tuple[Fault, ...]:
    """The same faults; and what frames commit beside their steps arrives late, again and again."""
    found = list(others)
    for _ in range(3):
        pick = round((SLOW_METHODS.index("commit") + chosen.random()) / len(SLOW_METHODS), 3)
        seconds = round(chosen.choice((0.5, 3.0, 8.0)) * (0.5 + chosen.random()), 3)
        found.append(Fault(round(chosen.random() * window / 2, 3), "slow_calls", pick, seconds))
    return tuple(sorted(found, key=_order))


def rivals(chosen: random.Random, others: tuple[Fault, ...], window: float) -> tuple[Fault, ...]:
    """The same faults; and another cluster, which believes that the store's owner is dead, takes the store, mostly
    while that is slow."""
    found = list(others)
    for _ in range(chosen.choice((1, 2, 4))):
        at = round(chosen.random() * window, 3)
        seconds = round(chosen.choice((0.05, 0.5, 3.0, 12.0)) * (0.5 + chosen.random()), 3)
        found.append(Fault(at, "rival", round(chosen.random(), 3), seconds))
        if chosen.random() < 0.7:
            found.append(Fault(max(0.0, round(at - 3.0 * chosen.random(), 3)), "slow_store", 0.5, 6.0))
    return tuple(sorted(found, key=_order))


def late_threads(chosen: random.Random, others: tuple[Fault, ...], window: float) -> tuple[Fault, ...]:
    """The same faults; and what threads have read is heard late, again and again."""
    found = list(others)
    for _ in range(3):
        seconds = round(chosen.choice((0.05, 0.5, 3.0)) * (0.5 + chosen.random()), 3)
        found.append(Fault(round(chosen.random() * window, 3), "late_threads", round(chosen.random(), 3), seconds))
    return tuple(sorted(found, key=_order))


def unreached(chosen: random.Random, others: tuple[Fault, ...], machines: int, window: float) -> tuple[Fault, ...]:
    """The same faults; and clients reach nobody for a while, again and again. Drains are asked for a second time."""
    found = list(others)
    for _ in range(chosen.choice((1, 3))):
        seconds = round(chosen.choice((3.0, 8.0, 15.0, 40.0)) * (0.5 + chosen.random()), 3)
        found.append(Fault(round(chosen.random() * window, 3), "cut_clients", round(chosen.random(), 3), seconds))
    if machines > 1:
        at = round(chosen.random() * window / 2, 3)
        found.append(Fault(at, "drain", round(chosen.random(), 3), chosen.choice((0.5, 5.0))))
        found.append(Fault(round(at + chosen.choice((0.1, 6.0, 20.0)) * chosen.random(), 3), "drain_again", 0.5, 1.0))
    return tuple(sorted(found, key=_order))


def fragile(chosen: random.Random, work: Work) -> Work:
    """The same work; its session may die less often, and a person lets it go on when it was given up."""
    restart = {**work.spec["restart"], "max_restarts": chosen.choice((0, 1, 2)), "period": chosen.choice((5, 60))}
    moments = [Action(soon(chosen), "resume", {}, Trigger("session_quarantined", count)) for count in (1, 2)]
    return replace(work, spec={**work.spec, "restart": restart}, actions=(*work.actions, *moments))


def gateways(chosen: random.Random, others: tuple[Fault, ...], window: float) -> tuple[Fault, ...]:
    """The same faults; and gateways die, or stand still, mostly when they have calls; so do their services then."""
    found = list(others)
    for _ in range(chosen.choice((1, 2, 4))):
        at, moment = round(chosen.random() * window, 3), None
        if chosen.random() < 0.7:
            event = chosen.choice(("run_started", "model_call_started", "model_call_completed", "model_call_reissued"))
            at, moment = soon(chosen), Trigger(event, chosen.choice((1, 2, 3, 5, 8)))
        kind, seconds = chosen.choice(("kill_gateway", "pause_gateway")), 0.0
        if kind == "pause_gateway":
            seconds = round(chosen.choice((0.05, 3.0, 8.0, 15.0)) * (0.5 + chosen.random()), 3)
        found.append(Fault(at, kind, round(chosen.random(), 3), seconds, moment))
        if chosen.random() < 0.4:
            found.append(Fault(at + soon(chosen), "kill_node", round(chosen.random(), 3), 0.0, moment))
    for _ in range(chosen.choice((0, 2, 4))):  # a service dies right behind an answer, which its gateway has still
        moment = Trigger(
            chosen.choice(("model_call_completed", "tool_started")), chosen.choice((1, 2, 3, 5, 8, 13, 21))
        )
        found.append(Fault(soon(chosen), "kill_node", round(chosen.random(), 3), 0.0, moment))
    return tuple(sorted(found, key=_order))


def tool_hosts(
    chosen: random.Random, work: tuple[Work, ...], others: tuple[Fault, ...], window: float
) -> tuple[Fault, ...]:  # fmt: skip
    """The same faults; and tool hosts, if there are any, die or stand still, mostly when they have calls; so do frames
    and node services then, at whose death nothing may be done twice."""
    if not have_servers(work) or chosen.random() < 0.3:
        return others
    found = list(others)
    for _ in range(chosen.choice((1, 2, 4))):
        at, moment = round(chosen.random() * window, 3), None
        if chosen.random() < 0.8:
            at = soon(chosen)
            moment = Trigger(chosen.choice(("tool_started", "mcp_server_listed")), chosen.choice((1, 2, 3, 5, 8)))
        kind, seconds = chosen.choice(("kill_tool_host", "pause_tool_host", "kill_frame", "kill_node")), 0.0
        if kind == "pause_tool_host":
            seconds = round(chosen.choice((0.05, 3.0, 8.0, 15.0)) * (0.5 + chosen.random()), 3)
        found.append(Fault(at, kind, round(chosen.random(), 3), seconds, moment))
        if chosen.random() < 0.3:
            found.append(Fault(at + soon(chosen), "kill_node", round(chosen.random(), 3), 0.0, moment))
    return tuple(sorted(found, key=_order))


def task_services(
    chosen: random.Random, work: tuple[Work, ...], others: tuple[Fault, ...], window: float, machines: int
) -> tuple[Fault, ...]:  # fmt: skip
    """The same faults; and where calls are executed in processes of their own, what has them executed dies, and who
    waits for them; or they have to leave with their sessions."""
    if not any(tool["name"] in EXECUTED for item in work for tool in item.spec["tools"]) or chosen.random() < 0.3:
        return others
    found = list(others)
    for _ in range(chosen.choice((1, 2, 4))):
        at, moment = round(chosen.random() * window, 3), None
        if chosen.random() < 0.8:
            at, moment = soon(chosen), Trigger("tool_started", chosen.choice((1, 2, 3, 5, 8)))
        kinds = ("kill_frame", "kill_frame", "kill_node", "drain") if machines > 1 else ("kill_frame", "kill_node")
        kind = chosen.choice(kinds)
        seconds = chosen.choice((0.5, 5.0)) if kind == "drain" else 0.0
        found.append(Fault(at, kind, round(chosen.random(), 3), seconds, moment))
        if kind == "drain" and chosen.random() < 0.7:
            found.append(Fault(at + soon(chosen), "kill_frame", round(chosen.random(), 3), 0.0, moment))
    return tuple(sorted(found, key=_order))


def approved(chosen: random.Random, work: Work) -> Work:
    """The same work; a person must approve calls of some of its agents' tools, in time."""
    needed = {tool for names in BY_POLICY.values() for tool in names if chosen.random() < 0.4}
    needed |= {SPAWN} if chosen.random() < 0.2 else set()
    seconds, default = chosen.choice((None, None, 2.0, 15.0)), chosen.choice(("approve", "reject"))
    fields = {"approve_timeout": seconds, "approve_default": default}

    def held(spec: dict[str, Any]) -> dict[str, Any]:
        tools = [{**tool, "approve": True} if tool["name"] in needed else tool for tool in spec["tools"]]
        agents = {name: held(agent) for name, agent in spec["agents"].items()}
        return {**spec, **fields, "tools": tools, "agents": agents}

    return replace(work, spec=held(work.spec))


def policies_of(spec: dict[str, Any]) -> list[str]:
    """The policies of an agent's tools."""
    return [name for name in BY_POLICY if any(tool["name"] in BY_POLICY[name] for tool in spec["tools"])]


def deepen(chosen: random.Random, work: Work) -> Work:
    """The same work; its sub-agents have a sub-agent each, to begin with."""
    policies = policies_of(work.spec)
    agents = {
        name: {
            **spec, "agents": {"inner": child_spec(chosen, "inner", policies)},
            "tools": [*spec["tools"], TOOLS[SPAWN]], "supervision": work.spec["supervision"],
        }
        for name, spec in work.spec["agents"].items()
    }  # fmt: skip

    def deeper(text: str, *, root: bool) -> str:
        said = json.loads(text)
        for _, arguments in (call for calls in said["rounds"] for call in calls if call[0] == SPAWN):
            arguments["task"] = deeper(arguments["task"], root=False)
        if not root:
            inner = task(chosen, f"{said['name']}.inner", policies, spawns=False).text()
            said["rounds"].insert(0, [[SPAWN, {"agent": "inner", "task": inner}]])
            said["thinking"].insert(0, 0.05)
        return json.dumps(said)

    return rewritten(replace(work, spec={**work.spec, "agents": agents}), lambda text: deeper(text, root=True))


def noted(chosen: random.Random, work: Work) -> Work:
    """The same work; its agents keep notes and write on the board of their tree, and most are shown their memory."""
    memory = {
        "scopes": ["agent", "session"],
        "project": None,
        "max_tokens": 500,
        "share": 0.1,
        "providers": [],
        "timeout": 5.0,
    }
    shown = {"memory": memory} if chosen.random() < 0.7 else {}

    def with_tools(spec: dict[str, Any]) -> dict[str, Any]:
        agents = {name: with_tools(inner) for name, inner in spec["agents"].items()}
        return {**spec, **shown, "agents": agents, "tools": [*spec["tools"], *map(TOOLS.__getitem__, (*NOTES, *BOARD))]}

    def with_calls(text: str) -> str:
        said = json.loads(text)
        for calls in said["rounds"]:
            for _, arguments in (call for call in calls if call[0] == SPAWN):
                arguments["task"] = with_calls(arguments["task"])
            calls += [note_call(chosen) for _ in range(chosen.choice((0, 1, 1, 2)))]
        said["rounds"].append([note_call(chosen), note_call(chosen)])
        said["thinking"].append(round(chosen.random() * 0.2, 3))
        return json.dumps(said)

    return rewritten(replace(work, spec=with_tools(work.spec)), with_calls, names=("content", "prompt"))


def note_call(chosen: random.Random) -> list[Any]:
    """A call that reads or writes notes or the board; few keys and low versions, so that they meet."""
    key, text = chosen.choice("kl"), f"text {chosen.randrange(1000)}"
    expected = {"expected_version": chosen.choice((1, 1, 2, 2, 3, 4))}
    tool = chosen.choice(("post_to_board", "post_to_board", "update_board", "update_board", *BOARD, *NOTES))
    if tool in ("list_notes", "read_board"):
        return [tool, {}]
    if tool in ("delete_note", "remove_from_board"):
        return [tool, {"key": key}]
    scope = {"scope": chosen.choice(("session", "agent"))} if tool in NOTES else {}
    return [tool, {"key": key, "text": text, **scope, **(expected if tool == "update_board" else {})}]


def placed(chosen: random.Random, work: Work) -> Work:
    """The same work; its agents ask for processes of some kind, and with upgrades for those of others."""
    agents = {name: {**spec, "placement": chosen.choice(PLACEMENTS)} for name, spec in work.spec["agents"].items()}
    actions = tuple(
        replace(action, what={**action.what, "placement": chosen.choice(PLACEMENTS)})
        if action.kind == "upgrade"
        else action
        for action in work.actions
    )
    spec = {**work.spec, "agents": agents, "placement": chosen.choice(PLACEMENTS)}
    return replace(work, spec=spec, actions=actions)


def typed(chosen: random.Random, work: Work) -> Work:
    """The same work; its agent's answers must fit a schema, or those of its sub-agents, or both."""
    spec, agents = work.spec, work.spec["agents"]
    if not agents or chosen.random() < 0.7:
        spec = {**spec, "output": output(chosen)}
    agents = {
        name: {**agent, "output": output(chosen)} if chosen.random() < 0.7 else agent for name, agent in agents.items()
    }
    return replace(work, spec={**spec, "agents": agents})


def lose(
    chosen: random.Random, work: tuple[Work, ...], others: tuple[Fault, ...]
) -> tuple[tuple[Work, ...], tuple[Fault, ...]]:  # fmt: skip
    """A machine that is cut off, and reaches the store, from the middle of long chains of short tool calls on; commits
    are lost when the others take its sessions over."""
    found = []
    for item in work:
        policies = policies_of(item.spec)
        rounds = tuple(
            (
                call(
                    chosen,
                    f"{item.session_id}.long.{number}",
                    policies,
                    spawns=False,
                    kills=chosen.choice((0, 0, 0, 3)),
                ),
            )
            for number in range(12)
        )
        content = Task(f"{item.session_id}.long", rounds, tuple([0.05] * 13)).text()
        actions = [action for action in item.actions if action.kind in ("spawn", "schedule") or action.on is not None]
        send = Action(0.5, "send", {"run_id": "long", "content": content})
        actions = sorted([*actions, send], key=_order)
        found.append(replace(item, spec={**item.spec, "max_rounds": 60}, actions=tuple(actions)))
    at = round(4.0 + 6.0 * chosen.random(), 3)
    wrong = [*others[:4], Fault(at, "cut_off", 0.75, 40.0)]
    for _ in range(chosen.choice((0, 0, 4))):
        wrong.append(
            Fault(round(at + 9.0 + 4.0 * chosen.random(), 3), "lose_commit", 0.5, round(3 * chosen.random(), 3))
        )
    for _ in range(chosen.choice((0, 1, 1, 2))):  # and what is under way there takes long
        late = round(at + 10.0 * chosen.random(), 3)
        pick = round(chosen.random() * CALLS_OF_FRAMES / len(SLOW_METHODS), 3)
        wrong.append(Fault(late, "slow_calls", pick, chosen.choice((4.0, 9.0, 14.0, 20.0))))
    return tuple(found), tuple(sorted(wrong, key=_order))


def draw(seed: int, backend: str | None = None) -> Plan:
    """The plan of a seed. Its parts are drawn from streams of their own, so that one does not move another."""
    shape = random.Random(f"{seed}/shape")
    drawn = shape.choice(("sqlite", "postgresql", "postgresql"))
    machines = shape.choice((1, 2, 3))
    backend = backend or drawn
    machines = 1 if backend == "sqlite" else machines
    count = shape.choice((2, 4, 8))
    window = shape.choice(WINDOWS)
    work = tuple(session(random.Random(f"{seed}/work/{number}"), number, window / 2) for number in range(count))
    hooked = random.Random(f"{seed}/hooks")
    work = tuple(replace(item, spec={**item.spec, "hooks": HOOKS}) if hooked.random() < 0.25 else item for item in work)
    wrong = faults(random.Random(f"{seed}/faults"), backend, machines, window)
    wrong = meet(random.Random(f"{seed}/meet"), work, wrong)
    lost, stuck = random.Random(f"{seed}/lost"), random.Random(f"{seed}/stuck")
    loses = machines > 1 and lost.random() < 0.2
    if loses:
        window = 60.0
        work, wrong = lose(lost, work, wrong)
    noticed = random.Random(f"{seed}/notices")
    hasty = machines > 1 and noticed.random() < 0.15
    if hasty:
        wrong = late_notices(noticed, wrong, window)
        work = tuple(hurried(noticed, item) if noticed.random() < 0.5 else item for item in work)
    threads = random.Random(f"{seed}/threads")
    if threads.random() < 0.15:
        wrong = late_threads(threads, wrong, window)
    slow = random.Random(f"{seed}/commits")
    if slow.random() < 0.08:
        wrong = late_commits(slow, wrong, window)
        work = tuple(hurried(slow, item) if slow.random() < 0.7 and not hasty else item for item in work)
    others = random.Random(f"{seed}/rivals")
    if backend == "postgresql" and others.random() < 0.08:
        wrong = rivals(others, wrong, window)
    dying = random.Random(f"{seed}/gateways")
    if dying.random() < 0.25:
        wrong = gateways(dying, wrong, window)
    outside = random.Random(f"{seed}/clients")
    if outside.random() < 0.1:
        wrong = unreached(outside, wrong, machines, window)
    given_up = random.Random(f"{seed}/fragile")
    if given_up.random() < 0.1:
        work = tuple(fragile(given_up, item) for item in work)
    archived = random.Random(f"{seed}/archives")
    work = tuple(put_away(archived, item, window) if archived.random() < 0.08 else item for item in work)
    deep = random.Random(f"{seed}/deep")
    if deep.random() < 0.15:
        work = tuple(deepen(deep, item) if item.spec["agents"] else item for item in work)
    work = some_in_background(random.Random(f"{seed}/background"), work)
    work = some_with_jobs(random.Random(f"{seed}/jobs"), work)
    work = some_with_commands(random.Random(f"{seed}/commands"), work)
    placements = random.Random(f"{seed}/placements")
    if placements.random() < 0.15:
        work = tuple(placed(placements, item) for item in work)
    folds = random.Random(f"{seed}/folds")
    if folds.random() < 0.3:
        work = tuple(replace(item, spec=folding(folds, item.spec)) for item in work)
    keeping = random.Random(f"{seed}/notes")
    if keeping.random() < 0.25:
        work = tuple(noted(keeping, item) for item in work)
    work = some_recalling(random.Random(f"{seed}/providers"), work)
    work = some_delegating(random.Random(f"{seed}/delegation"), work)
    work = some_written(random.Random(f"{seed}/written"), work)
    served = random.Random(f"{seed}/servers")
    work = some_with_servers(served, work)
    wrong = tool_hosts(served, work, wrong, window)
    executed = random.Random(f"{seed}/executed")
    work = some_executed(executed, work)
    wrong = task_services(executed, work, wrong, window, machines)
    steering = random.Random(f"{seed}/steering")
    if steering.random() < 0.2:
        work = tuple(steered(steering, item, window) if steering.random() < 0.8 else item for item in work)
    merged = random.Random(f"{seed}/follow_ups")
    if merged.random() < 0.15:
        work = tuple(merging(merged, item) if merged.random() < 0.8 else item for item in work)
    split = random.Random(f"{seed}/forks")
    work = tuple(forking(split, item) if split.random() < 0.1 else item for item in work)
    approvals = random.Random(f"{seed}/approvals")
    work = tuple(approved(approvals, item) if approvals.random() < 0.3 else item for item in work)
    outputs = random.Random(f"{seed}/outputs")
    work = tuple(typed(outputs, item) if outputs.random() < 0.25 else item for item in work)
    work = some_guarded(random.Random(f"{seed}/guards"), work)
    work = some_handed_off(random.Random(f"{seed}/handoffs"), work)
    work = some_with_schedules(random.Random(f"{seed}/schedules"), work, window)
    work = some_loops(random.Random(f"{seed}/loops"), work, window)
    work = some_in_queues(random.Random(f"{seed}/queues"), work, window)
    forks = random.Random(f"{seed}/forked")
    limits = random.Random(f"{seed}/limit")
    scaled = random.Random(f"{seed}/scaling")
    plan = Plan(
        seed, backend, machines, shape.choice((0, 1, 2)), shape.choice((2, 3, 5)), work,
        wrong, window,
        shape.choice((0.0, 0.0, 0.05)), calm=shape.random() < 0.3,
        astray=0.5 if random.Random(f"{seed}/astray").random() < (0.6 if hasty else 0.2) else 0.0,
        stuck=0.2 if stuck.random() < (0.5 if loses else 0.05) else 0.0,
        forked=forks.choice((0.3, 1.0)) if forks.random() < 0.15 else 0.0,
        reports=random.Random(f"{seed}/reports").random() < 0.3,
        limit=limits.choice((30, 31, 60, 61, 240)) if limits.random() < 0.2 else 0,
        responses=random.Random(f"{seed}/responses").random() < 0.2,
        scales=scaled.choice((3.0, 8.0, 20.0)) if backend == "postgresql" and scaled.random() < 0.2 else 0.0,
        asks=0.4 if have_servers(work) and random.Random(f"{seed}/asks").random() < 0.5 else 0.0,
    )  # fmt: skip
    plan = some_with_files(random.Random(f"{seed}/files"), plan) if plan.scales else plan
    programs = random.Random(f"{seed}/workflows")
    work = some_goals(random.Random(f"{seed}/goals"), some_workflows(programs, plan.work))
    return replace(plan, work=tuple(signalled(programs, item, window) for item in work))
