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
from pathlib import Path
from typing import Any

from understudy import AgentSpec, RestartPolicy, ToolContext, WorkflowContext, tool, workflow
from understudy.events import ModelCallCompleted, SessionCrashed

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
    """Kills processes of a cluster, of each kind in turn, while a run goes on."""

    ROLES = ("frame", "frame", "node", "frame", "gateway", "frame", "supervisor")

    def __init__(self, stage: Any, seed: int) -> None:
        self._stage = stage
        self._chosen = random.Random(seed)
        self.killed: Counter[str] = Counter()

    def next(self) -> None:
        """Kill one more process."""
        from .faults import kill

        role = self.ROLES[sum(self.killed.values()) % len(self.ROLES)]
        pids = self._stage.pids(role)
        if pids:
            try:
                kill(self._chosen.choice(pids))
            except ProcessLookupError:
                return
            self.killed[role] += 1


def work(stage: Any, items: int, kills: int, limit: int, *, seed: int = 0, patience: float = 600.0) -> dict[str, Any]:
    """Run the workflow while processes die; the facts of it.

    Raises:
        AssertionError: an item is missing, or was done twice, or has another answer than it should.
    """
    worker = AgentSpec(name="worker", model="m", profile=stage.profile, restart=NEVER_GIVEN_UP)
    path = str(stage.directory / "effects")
    began = time.monotonic()
    chosen = every.__understudy_workflow__
    run = stage.cluster.workflow(
        with_agents(chosen, [worker]), worker.model_dump(mode="json", exclude_defaults=True), path, items, limit,
        session_id=f"work-{seed}",
    )  # fmt: skip
    session = stage.cluster.session(run.session_id)
    stage.sessions.append(session)
    deaths = Deaths(stage, seed)
    share = max(1, items // (3 * kills + 1))
    done = 0
    while sum(deaths.killed.values()) < kills and time.monotonic() - began < patience:
        now = len(Path(path).read_text().splitlines()) if os.path.exists(path) else 0
        if now >= items or stage.query("SELECT 1 FROM run WHERE session_id = :id AND finished_at > 0", id=session.id):
            break
        if now >= done + share or deaths.killed.total() == 0:
            done = now
            deaths.next()
        time.sleep(0.05)
    result = run.result(patience, check=True)
    seconds = time.monotonic() - began
    assert result.output == [f"offline: item {number}" for number in range(items)]
    effects = Counter(Path(path).read_text().split())
    assert effects == Counter(str(number) for number in range(items)), effects.most_common(3)
    children = [info for info in session.tree() if info.parent_id == session.id]
    assert len(children) == items
    answers: Counter[bool] = Counter()
    for info in children[:200]:
        answers.update(
            event.redone for event in stage.cluster.session(info.id).events() if isinstance(event, ModelCallCompleted)
        )
    crashes = sum(isinstance(event, SessionCrashed) for event in session.events())
    stage.check(session)
    return {
        "items": items, "limit": limit, "seconds": round(seconds, 1), "killed": dict(deaths.killed),
        "crashes of the workflow": crashes, "redone answers of 200": answers[True],
    }  # fmt: skip


def with_agents(definition: Any, agents: list[AgentSpec]) -> Any:
    """The workflow with agents that only this process knows."""
    from dataclasses import replace

    function = definition.function
    function.__understudy_workflow__ = replace(definition, agents=tuple(agents))
    return function


def main() -> None:
    from understudy import Cluster

    from .faults import Head, staged

    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="workflow-"))
    head = Head(directory)
    try:
        head.start()
        os.environ.update(head.environment)
        dsn = f"sqlite:///{directory}/store.db"
        with Cluster.connect(dsn, max_actors=6, standby=1) as cluster:
            with staged(dsn, directory / "stage") as stage:
                print(json.dumps(work(stage, given.items, given.kills, given.limit, seed=given.seed)))
            cluster.shutdown()
    finally:
        head.close()


if __name__ == "__main__":
    main()
