"""A workflow over many items for the fault tests, and processes of each kind that die while it works.

`python -m tests.workflow_work --items 1000 --kills 50 --limit 16`, from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import select

from understudy import AgentSpec, Cluster, RestartPolicy, Session, ToolContext, WorkflowContext, tool, workflow
from understudy.events import ModelCallCompleted, SessionCrashed, ToolFinished
from understudy.store.db.engine import Database
from understudy.store.db.statements import SESSION

from .faults import Head, Stage, gone, kill, of, staged, wait_until
from .soak_facts import Log
from .soak_kills import FRAME, GATEWAY, NODE, SUPERVISOR, Watch, is_a

WORKFLOW, CHILD = "workflow", "agent"
KINDS = (WORKFLOW, CHILD, NODE, CHILD, GATEWAY, WORKFLOW, SUPERVISOR, CHILD)

NEVER_GIVEN_UP = RestartPolicy(max_restarts=10_000, stuck_after=1_000, backoff_max=0.2)


def _done(path: str, name: str) -> bool:
    return Path(path).exists() and f"{name}\n" in Path(path).read_text().splitlines(keepends=True)


def _find_out(ctx: ToolContext) -> str:
    """What became of a `record` whose process died: as one looks whether a payment has arrived."""
    path, name = ctx.arguments["path"], ctx.arguments["name"]
    if not _done(path, name):
        record(path, name)
    return f"did {name}"


@tool(on_crash=_find_out)
def record(path: str, name: str) -> str:
    """Do something that must be done once."""
    with open(path, "a") as file:
        file.write(f"{name}\n")
    return f"did {name}"


@workflow(restart=NEVER_GIVEN_UP)
async def every(ctx: WorkflowContext, agent: dict[str, Any], path: str, items: int, limit: int) -> list[str]:
    """An agent's answer for each item, and an effect of the workflow's own."""
    worker = AgentSpec.model_validate(agent)

    async def one(number: int) -> str:
        said = await ctx.agent(worker, f"item {number}")
        await ctx.tool(record, path, str(number))
        return str(said)

    found: list[str] = await ctx.foreach(range(items), one, limit=limit)
    return found


class Deaths:
    """Kills processes of a cluster while a workflow makes progress, spread over the whole of it.

    Attributes:
        killed: how often, by kind. `WORKFLOW` and `CHILD` are processes that hold the workflow, and one of its agents.
    """

    def __init__(self, stage: Stage, watch: Watch, session_id: str, count: int, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._watch = watch
        self._session_id = session_id
        self._count = count
        self._random = random.Random(seed)
        self._planned = [KINDS[number % len(KINDS)] for number in range(count)]
        self._store = Database(stage.dsn)

    @property
    def left(self) -> int:
        """How many are to come."""
        return len(self._planned)

    def due(self, share: float) -> bool:
        """Whether one more is due when that share of the work is done."""
        return bool(self._planned) and share >= (self._count - self.left + 0.5) / (self._count + 1)

    def kill_one(self) -> None:
        """Kill the first of those planned that can be killed now; what must be put off stays the first."""
        for number, kind in enumerate(self._planned):
            if kind in self._planned[:number]:
                continue
            found = self._pids(kind)
            if found:
                pid = self._random.choice(found)
                kill(pid)
                wait_until(lambda pid=pid: gone(pid), f"the end of process {pid}")  # type: ignore[misc]
                self.killed[self._planned.pop(number)] += 1
                return

    def close(self) -> None:
        """Let the store go."""
        self._store.close()

    def _pids(self, kind: str) -> list[int]:
        if kind not in (WORKFLOW, CHILD):
            known = self._watch.pids.get(kind, []) if self._watch.both_know_the_key() else []
            return [pid for pid in known if is_a(kind, pid)]
        column = SESSION.c.session_id if kind == WORKFLOW else SESSION.c.parent_id
        where = column == self._session_id, SESSION.c.active == 1, SESSION.c.actor_pid.is_not(None)
        with self._store.read() as connection:
            found = connection.execute(select(SESSION.c.actor_pid).where(*where).distinct()).scalars()
            return [pid for pid in found if is_a(FRAME, pid)]


def work(stage: Stage, items: int, kills: int, limit: int, *, seed: int = 0, patience: float = 600.0) -> dict[str, Any]:
    """Run the workflow while processes die; the facts of it.

    Raises:
        AssertionError: an item is missing, or was done twice, or has another answer than it should; or not so many
            processes were killed.
    """
    worker = AgentSpec(name="worker", model="m", profile=stage.profile, restart=NEVER_GIVEN_UP)
    path = stage.directory / "effects"
    began = time.monotonic()
    run = stage.cluster.workflow(
        with_agents(every.__understudy_workflow__, [worker]), worker.model_dump(mode="json", exclude_defaults=True),
        str(path), items, limit, session_id=f"work-{seed}",
    )  # fmt: skip
    session = stage.cluster.session(run.session_id)
    stage.sessions.append(session)
    watch = Watch(stage)
    watch.start()
    deaths = Deaths(stage, watch, session.id, kills, seed)
    try:
        while deaths.left and time.monotonic() - began < patience:
            done = path.read_text().count("\n") if path.exists() else 0
            if done >= items:
                break
            if deaths.due(done / items):
                deaths.kill_one()
            time.sleep(0.02)
    finally:
        watch.stop()
        deaths.close()
    result = run.result(patience, check=True)
    seconds = time.monotonic() - began
    facts = judged(stage, session, result.output, items)
    assert not deaths.left, f"{deaths.left} of {kills} kills are left; killed: {deaths.killed}"
    lost = limit * deaths.killed[GATEWAY]  # so many calls can have been under way with a gateway that died
    assert facts["answers paid twice"] <= lost, facts
    return {
        "items": items, "limit": limit, "seconds": round(seconds, 1), "killed": dict(deaths.killed),
        "load": round(os.getloadavg()[0], 1), **facts,
    }  # fmt: skip


def judged(stage: Stage, session: Session, output: Any, items: int) -> dict[str, int]:
    """What the store, the effects and the result say: each item once, and right."""
    assert output == [f"offline: item {number}" for number in range(items)]
    effects = Counter((stage.directory / "effects").read_text().split())
    assert effects == Counter(str(number) for number in range(items)), effects.most_common(3)
    log = Log(stage.dsn)
    below = [info.id for info in session.tree() if info.parent_id == session.id]
    assert len(below) == items
    answers = [event for child in below for event in of(log.events[child], ModelCallCompleted)]
    assert Counter(event.session_id for event in answers) == Counter(below), "an agent was answered twice"
    steps = of(log.events[session.id], ToolFinished)
    assert Counter(event.call_id for event in steps).most_common(1)[0][1] == 1, "a step has two results"
    stage.check(session)
    return {
        "crashes of the workflow": len(of(log.events[session.id], SessionCrashed)),
        "crashes of its agents": sum(len(of(log.events[child], SessionCrashed)) for child in below),
        "answers paid twice": sum(event.redone for event in answers),
    }


def with_agents(definition: Any, agents: list[AgentSpec]) -> Any:
    """The workflow with agents that only this process knows."""
    function = definition.function
    function.__understudy_workflow__ = replace(definition, agents=tuple(agents))
    return function


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.workflow_work", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--limit", type=int, default=16, help="items at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="all must be done by then")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="workflow-"))
    head = Head(directory)
    try:
        head.start()
        os.environ.update(head.environment)
        dsn = f"sqlite:///{directory}/store.db"
        with Cluster.connect(dsn, max_actors=6, standby=1) as cluster:
            with staged(dsn, directory / "stage") as stage:
                patience = 60 * given.minutes
                facts = work(stage, given.items, given.kills, given.limit, seed=given.seed, patience=patience)
                print(json.dumps(facts))
            cluster.shutdown()
    finally:
        head.close()


if __name__ == "__main__":
    main()
