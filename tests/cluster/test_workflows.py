"""Workflows on Ray: real processes die while one works over many items."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from understudy import Cluster

from ..faults import PATIENCE, driver, kill, output, staged, wait_until
from ..workflow_work import KINDS, work

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_workflow_over_many_items_survives_kills(ray_cluster: str, tmp_path: Path) -> None:
    """Given a workflow with an agent and an effect for each of 40 items, eight at a time: its process, those of its
    agents, node service, gateway and supervisor are killed, over the whole of the run; every item is done once, and the
    result is right."""
    dsn = f"sqlite:///{tmp_path}/store.db"
    with Cluster.connect(dsn, max_actors=4, standby=1) as cluster:
        with staged(dsn, tmp_path / "stage") as stage:
            facts = work(stage, items=40, kills=8, limit=8, patience=240.0)
        cluster.shutdown()
    assert facts["killed"] == Counter(KINDS)


FLOW = '''
from understudy import WorkflowContext, tool, workflow

@tool
def effect(name: str) -> str:
    """Do something once."""
    with open(__file__ + ".effects", "a") as file:
        file.write(name + chr(10))
    return name

@workflow
async def flow(ctx: WorkflowContext) -> list:
    first = await ctx.tool(effect, "first")
    answer = await ctx.ask("Go on?")
    {rest}
'''
OLD = 'return [first, answer, await ctx.tool(effect, "old")]'
CHANGED = 'return [first, await ctx.tool(effect, "new"), answer]'
PATCHED = """name = "new" if await ctx.patched("better") else "old"
    return [first, answer, await ctx.tool(effect, name)]"""

START = """
import json, os, sys
from understudy import Cluster
from flow import flow
with Cluster.connect(sys.argv[1], max_actors=3, standby=1) as cluster:
    run = cluster.workflow(flow, session_id=sys.argv[2], run_id="r")
    paused = run.result(120)
print(json.dumps([paused.status, [asked.prompt for asked in paused.pending]]))
"""


def test_changed_code_is_noticed_patched_and_mended(ray_cluster: str, tmp_path: Path) -> None:
    """Given a workflow that waits for a person: its file is changed, its process dies and it is answered. The run asks
    what to do, naming both steps; once the file is mended, it goes on where it was, and has the change in what it comes
    to then."""
    folder = tmp_path / "project"
    folder.mkdir()
    flow = folder / "flow.py"

    def write(code: str) -> None:
        flow.write_text(FLOW.replace("{rest}", code))

    def start(session_id: str) -> list[str]:
        status, prompts = output(driver(folder, START, dsn, session_id))
        assert status == "waiting_for_input"
        return list(prompts)

    dsn = f"sqlite:///{tmp_path}/store.db"
    with Cluster.connect(dsn, max_actors=3, standby=1) as cluster:
        with staged(dsn, tmp_path / "stage") as stage:
            write(OLD)
            assert start("s") == ["Go on?"]
            session = cluster.session("s")
            run = session.run("r")
            write(CHANGED)
            flow.write_text(flow.read_text().replace('answer = await ctx.ask("Go on?")', 'answer = "asked no more"'))
            for pid in stage.frames():
                kill(pid)
            session.answer(session.pending()[0], "yes")
            asked = wait_until(
                lambda: [item for item in session.pending() if "diverged" in item.prompt], "the question"
            )
            assert 'ask with {"prompt": "Go on?"' in asked[0].prompt
            assert 'effect with {"name": "new"}' in asked[0].prompt
            write(PATCHED)
            session.answer(asked[0], "retry")
            assert run.result(PATIENCE, check=True).output == ["first", "yes", "new"]
            assert start("t") == ["Go on?"]
            other = cluster.session("t")
            other.answer(other.pending()[0], "yes")
            assert other.run("r").result(PATIENCE, check=True).output == ["first", "yes", "new"]
        cluster.shutdown()
    assert (folder / "flow.py.effects").read_text().split() == ["first", "new", "first", "new"]
