"""Trees of agents: with actors killed all the time, cancelled half-way, and against a budget."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
from disturber import Disturber
from harness import Bench, Limit, Row, median, until
from workload import agent, call

from understudy import AgentSpec, Budget, Cluster
from understudy.cluster.client.session_handle import Session

MIDDLE, LEAVES = 8, 8
FOUND = "Oslo: 7 degrees"


def family(delay: float) -> AgentSpec:
    """1 + 8 + 64 agents; each leaf makes two model calls and one of a tool, and every parent waits for its children."""
    leaf = agent("leaf", [{**call("lookup", city="Oslo"), "delay": delay}], restart={"max_restarts": 100})
    return _parent("lead", MIDDLE, _parent("middle", LEAVES, leaf))


def _parent(name: str, count: int, child: AgentSpec, **fields: Any) -> AgentSpec:
    spawns = [["spawn_agent", {"task": f"part {number}"}] for number in range(count)]
    fields.setdefault("restart", {"max_restarts": 100})
    return agent(name, [{"tool_calls": spawns}], tools=["spawn_agent"], agents=[child], **fields)


def wrong(cluster: Cluster, session: Session, expected: tuple[int, ...]) -> int:
    """How many agents of a tree did not do exactly what they should: give their parent's model what they found, once.

    Args:
        expected: how many sub-agents an agent has, by depth.
    """
    results = [message.text for message in session.messages() if message.role == "tool"]
    ends = [event.status for event in session.events() if event.type == "run_finished"]
    children = session.children()
    texts = [cluster.session(child.id).messages()[-1].text for child in children]
    should = texts if expected else [FOUND]
    right = ends == ["completed"] and sorted(results) == sorted(should) and len(children) == (expected or (0,))[0]
    return (not right) + sum(wrong(cluster, cluster.session(child.id), expected[1:]) for child in children)


def tree(bench: Bench) -> list[Row]:
    """A tree of 1 + 8 + 64 agents, undisturbed and with kills: the right result, and how many actors there are."""
    standby, cap = 1, 8
    rows = []
    for kills in (0, bench.some(40, 8)):
        with bench.cluster(standby=standby, max_actors=cap) as cluster:
            cluster.spawn(_parent("warm", 2, agent("leaf", [call("lookup", city="Oslo")]))).send("go").result(60)
            before = bench.endpoint.stats()["requests"]
            disturber = Disturber(cluster, kills)
            disturber.start()
            began = time.monotonic()
            lead = cluster.spawn(family(bench.some(1, 0) * 1.0))
            result = lead.send("go").result(300)
            seconds = time.monotonic() - began
            disturber.stop()
            needed = 2 * MIDDLE * LEAVES + 2 * MIDDLE + 2
            repeated = bench.endpoint.stats()["requests"] - before - needed
            failed = wrong(cluster, lead, (MIDDLE, LEAVES)) + (not result.ok)
        text = f"1 + {MIDDLE} + {MIDDLE * LEAVES} agents, {disturber.killed} kills"
        samples = disturber.samples
        beyond = max(one.beyond for one in samples)
        most = max(one.actors for one in samples)
        waiting = max(one.working for one in samples)
        idle = [max(0, one.actors - one.working) for one in samples]
        note = f"at most {most} actors, of at most {cap}; {waiting} sessions at work at once; {len(samples)} looks"
        rows += [
            Row("tree", f"{text}: to the end", seconds, "s", note=note),
            Row("tree", "agents with a wrong result", failed, "", limit=Limit(0)),
            Row("tree", "model calls repeated", repeated, "", limit=Limit(0)),
            Row("tree", "actors that hold a session which does not work, most", beyond, "", limit=Limit(0)),
            Row("tree", "actors beyond the sessions at work, most", max(idle), "", limit=Limit(2),
                note=f"mean {sum(idle) / len(idle):.1f}; standbys: {standby} for each of two placements"),
        ]  # fmt: skip
    return rows


def cancel(bench: Bench) -> list[Row]:
    """A run with 64 sub-agents is cancelled while they call models and run commands; undisturbed, then with kills."""
    count, commands = 64, 8
    rows = []
    for kills in (0, bench.some(6, 2)):
        calls, processes = [], []
        behind = unfinished = 0
        for number in range(bench.some(3, 1)):
            with bench.cluster(max_actors=12) as cluster:
                ended = _cancel_one(bench, cluster, count, commands, kills, number)
            calls.append(ended.last_call)
            processes.append(ended.last_process)
            behind += ended.behind
            unfinished += ended.unfinished
        text = f"{count} sub-agents cancelled, {kills} kills"
        rows += [
            Row("cancel", f"{text}: the last model call is gone", median(calls), "s", note=f"worst {max(calls):.2f} s"),
            Row("cancel", "the last command is gone", median(processes), "s", note=f"worst {max(processes):.2f} s"),
            Row("cancel", "sub-agents or calls that appeared behind it", behind, "", limit=Limit(0)),
            Row("cancel", "sub-agents that did not end as cancelled", unfinished, "", limit=Limit(0)),
        ]
    return rows


@dataclass(frozen=True)
class _Ended:
    last_call: float
    last_process: float
    behind: int
    unfinished: int


def _cancel_one(bench: Bench, cluster: Cluster, count: int, commands: int, kills: int, seed: int) -> _Ended:
    """Seconds from the request to end until nothing of the tree is at work, and what should not be."""
    mark = str(600 + seed / 1000 + time.time() % 1 / 10_000)
    command = {**call("bash", command=f"sleep {mark}"), "delay": 0.0}
    busy = agent("busy", [command, {"text": "done"}], tools=["bash"], sandbox="none", tool_timeout=900,
                 workspace=str(bench.directory))  # fmt: skip
    thinks = agent("thinks", [{"text": "done", "delay": 600.0}], tools=[])
    spawns = [
        ["spawn_agent", {"task": f"part {number}", "agent": "busy" if number < commands else "thinks"}]
        for number in range(count)
    ]
    lead = cluster.spawn(agent("lead", [{"tool_calls": spawns}], tools=["spawn_agent"], agents=[busy, thinks]))
    run = lead.send("go")
    until(lambda: bench.endpoint.stats()["in_flight"] >= count - commands, "the model calls")
    until(lambda: len(_sleeping(mark)) >= commands, "the commands")
    requests = bench.endpoint.stats()["requests"]
    disturber = Disturber(cluster, kills, every=0.02, seed=seed)
    disturber.start()
    began = time.monotonic()
    run.cancel("enough")
    last_call = _gone(lambda: bench.endpoint.stats()["in_flight"] == 0, began)
    last_process = _gone(lambda: not _sleeping(mark), began)
    assert run.result(60).status == "cancelled"
    disturber.stop()
    time.sleep(1.0)  # that nothing appears any more can't be awaited
    children = lead.children()
    behind = len(children) - count + bench.endpoint.stats()["requests"] - requests + len(_sleeping(mark))
    unfinished = sum(_status(cluster.session(child.id)) != "cancelled" for child in children)
    return _Ended(last_call, last_process, behind, unfinished)


def _status(session: Session) -> str:
    return next(event.status for event in session.events() if event.type == "run_finished")


def _gone(condition: Callable[[], bool], began: float) -> float:
    until(condition, "the end", 0.005)
    return time.monotonic() - began


def _sleeping(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "sleep" and process.cmdline()[1:] == [mark]:
                found.append(process.pid)
    return found


def budget(bench: Bench) -> list[Row]:
    """64 sub-agents at once against one budget of tokens, again and again, every other time with kills."""
    runs, count, limit = bench.some(20, 2), 64, 30_000
    leaf = agent("leaf", [call("lookup", city="Oslo") for _ in range(3)], restart={"max_restarts": 100})
    over, spent, ends, killed = 0, [], [], 0
    with bench.cluster(max_actors=8) as cluster:
        for number in range(runs):
            lead = cluster.spawn(_parent("lead", count, leaf, budget=Budget(tokens=limit)))
            disturber = Disturber(cluster, 4 * (number % 2), every=0.3, seed=number)
            disturber.start()
            result = lead.send("go").result(180)
            disturber.stop()
            killed += disturber.killed
            used = sum(info.tokens_used for info in [lead.info(), *lead.children()])
            spent.append(used)
            over += used > limit
            ends.append(result.status)
    note = f"{min(spent):,} to {max(spent):,} of {limit:,} tokens; {killed} kills; ends: {json.dumps(_counts(ends))}"
    return [
        Row(
            "budget",
            f"{runs} times {count} sub-agents: times the budget was exceeded",
            over,
            "",
            limit=Limit(0),
            note=note,
        )
    ]


def _counts(values: list[str]) -> dict[str, int]:
    return {value: values.count(value) for value in sorted(set(values))}
