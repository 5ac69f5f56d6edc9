"""Workflows on Ray: real processes die while one works over many items."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from understudy import Cluster
from understudy.cluster.cli.main import app
from understudy.config import ModelProfile
from understudy.events import ToolFinished
from understudy.testing.offline import OfflineServer

from ..faults import PATIENCE, driver, kill, of, output, staged, wait_until
from ..unit.test_workflow_examples import answers, begin_review
from ..workflow_work import KINDS, work
from .test_console_cluster import console

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


def printed(*words: str) -> Any:
    """The JSON document of a command."""
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_one_run_is_seen_everywhere(ray_cluster: str, tmp_path: Path) -> None:
    """Given the review panel of the examples on two files, then `tree`, the metrics, one trace and the console have the
    same sessions and steps: eight sessions of one tree, a call for each step, and one trace that joins all of them."""
    dsn, place = f"sqlite:///{tmp_path}/store.db", tmp_path / "files"
    place.mkdir()
    with OfflineServer(policy=answers) as server:
        profile = ModelProfile("panel", "sk-of-the-tests", server.url)
        with Cluster.connect(dsn, max_actors=4, model="m", profiles=[profile]) as cluster:
            assert begin_review(cluster, place).ok
            session = cluster.session("s")
            steps = {event.call_id: event.tool for event in of(session.events(), ToolFinished)}
            tree = printed("tree", "s", "--store", dsn)
            spans = printed("trace", "s", "r", "--store", dsn)
            [metrics] = [service.address for service in cluster.services() if service.role == "node"]
            scrape = urllib.request.urlopen(metrics, timeout=PATIENCE).read().decode()
            with console("--store", dsn, "--port", "0") as (_, said):
                shown = {
                    path: json.load(urllib.request.urlopen(f"{said['url']}api/sessions{path}", timeout=PATIENCE))
                    for path in ("", "/s/events", "/s/trace?run=r")
                }
            cluster.shutdown()
    rows = {row["session_id"]: row for row in shown[""]["rows"]}
    assert rows.keys() == {info["id"] for info in tree}
    agents = Counter(info["name"] for info in tree)
    assert agents == {"review": 1, "correctness": 2, "security": 2, "clarity": 2, "model": 1}
    assert Counter(steps.values()) == {"python_files": 1, "agent": 6, "model": 1}
    finished = [event for event in shown["/s/events"]["events"] if event["type"] == "tool_finished"]
    assert {event["data"]["call_id"]: event["data"]["tool"] for event in finished} == steps
    assert shown["/s/trace?run=r"]["spans"] == spans
    joined(spans, steps, rows)
    found = [sample for family in text_string_to_metric_families(scrape) for sample in family.samples]
    runs = {s.labels["agent"]: s.value for s in found if s.name == "understudy_runs_accepted_total"}
    assert runs == agents
    calls = {s.labels["tool"]: s.value for s in found if s.name == "understudy_tool_calls_total" and s.value}
    assert calls == Counter(steps.values())


def joined(spans: list[dict[str, Any]], steps: dict[str, str], rows: dict[str, Any]) -> None:
    """One trace has all sessions: each below the step that it does, which is below the workflow's run."""
    ids = {span["span_id"]: span for span in spans}
    assert len({span["trace_id"] for span in spans}) == 1
    assert {span["session_id"] for span in spans} == rows.keys()
    runs = {span["session_id"]: span for span in spans if span["operation"] == "invoke_agent"}
    top = runs.pop("s")
    assert (top["name"], top["parent_span_id"]) == ("invoke_agent review", "")
    calls = {span["attributes"]["gen_ai.tool.call.id"]: span for span in spans if span["operation"] == "execute_tool"}
    assert {call: span["attributes"]["gen_ai.tool.name"] for call, span in calls.items()} == steps
    assert {span["parent_span_id"] for span in calls.values()} == {top["span_id"]}
    assert all(ids[run["parent_span_id"]] is calls[rows[child]["call_id"]] for child, run in runs.items())
    chats = [span for span in spans if span["operation"] == "chat"]
    assert Counter(span["parent_span_id"] for span in chats) == Counter(run["span_id"] for run in runs.values())
