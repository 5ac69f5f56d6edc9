"""Workflow definitions in the cluster of one process: done by a function or without one, with deaths at any point."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec, RunFailed, RunResult, WorkflowContext, tool, workflow
from understudy.actors.workflow_interpreter import as_workflow, interpret
from understudy.errors import InvalidInput, InvalidSpec, SessionConflict
from understudy.events import ModelCallReissued, SessionCrashed
from understudy.testing import LocalCluster
from understudy.workflow_definition import builder as w
from understudy.workflow_definition.checking import read_definition
from understudy.workflow_definition.steps import Definition, Retry
from understudy.workflow_definition.text import read_text

from .. import tiers

PATIENCE = 30.0

TEXT = """
name: review
inputs: {path: {type: string}}
steps:
  - id: parts
    tool: {name: split, arguments: {path: "{{path}}"}}
    output_schema: {type: array, items: {type: string}}
  - id: found
    foreach:
      items: "{{parts}}"
      do: {agent: {name: helper, task: "Review {{item}}, number {{index}}"}}
    max_concurrency: 2
  - wait: {seconds: 0.01}
  - id: held
    tool: {name: hold}
  - tool: {name: fails}
    on_error: {tool: {name: note, arguments: {text: "{{error.code}}"}}}
  - id: summary
    model: {prompt: "Sum up {{held}}"}
output: {found: "{{found}}", summary: "{{summary}}"}
"""

DEFINITION = read_definition(read_text(TEXT, "YAML").data)

done: Counter[str] = Counter()
begun, released = threading.Event(), threading.Event()


@tool
def split(path: str) -> list[str]:
    """Parts of a path."""
    done["split"] += 1
    return [f"{path}1", f"{path}2", f"{path}3"]


@tool(on_crash="rerun")
def hold() -> str:
    """Lasts until the test lets it go."""
    begun.set()
    released.wait(PATIENCE)
    return "held"


@tool
def fails() -> None:
    """Always fails."""
    raise ValueError("no")


@tool
def note(text: str) -> None:
    """Something that must be done once."""
    done[text] += 1


@workflow(agents=[AgentSpec(name="helper")], tools=[split, hold, fails, note])
async def review(ctx: WorkflowContext, path: Any) -> Any:
    """The definition above."""
    return await interpret(ctx, DEFINITION, {"path": path})


def test_a_definition_survives_the_death_of_its_actor(tmp_path: Path) -> None:
    """Given a definition whose actor is killed while it is at a step, then it goes on there, and what was done is not
    done again; with inputs that do not fit, nothing is done."""
    with LocalCluster(f"sqlite:///{tmp_path}/store.db") as cluster:
        run = cluster.workflow(review, "src", session_id="w")
        assert begun.wait(PATIENCE)
        assert cluster.kill("w")
        released.set()
        assert run.result(PATIENCE, check=True).output == {
            "found": [f"offline: Review src{number + 1}, number {number}" for number in range(3)],
            "summary": "offline: Sum up held",
        }
        assert done == {"split": 1, "step_failed": 1}
        with pytest.raises(RunFailed, match=r"path: .*is not of type 'string'"):
            cluster.workflow(review, 7, session_id="v").result(PATIENCE, check=True)
        assert done == {"split": 1, "step_failed": 1}


KINDS = """
name: all.kinds
inputs:
  path: {type: string}
  from: {type: integer, default: 1}
steps:
  - id: parts
    tool: {name: split, arguments: {path: "{{path}}"}}
  - id: found
    foreach:
      items: "{{parts}}"
      do: {agent: {name: helper, task: "Review {{item}}"}}
    max_concurrency: 2
  - id: flaky
    tool: {name: flaky, arguments: {key: "{{path}}"}}
    retry: {max_attempts: 3, backoff: 0.01}
  - id: said
    ask: {question: "Go on with {{found.0}}?", options: ["yes", "no"]}
  - id: way
    branch:
      cases:
        - when: said == 'no'
          do: {tool: {name: note, arguments: {text: stopped}}}
      else: {model: {prompt: "Go on from {{from}}"}}
  - id: rounds
    loop:
      max: 5
      until: last >= 3
      do: {tool: {name: grown, arguments: {number: "{{index}}"}}}
output: ["{{found}}", "{{flaky}}", "{{way}}", "{{rounds}}"]
"""


@tool
def flaky(key: str) -> str:
    """Fails when it is called for the first time."""
    done[f"flaky {key}"] += 1
    if done[f"flaky {key}"] == 1:
        raise ValueError("not yet")
    return "at last"


@tool(on_crash="rerun")
def grown(number: int) -> int:
    """A pure function."""
    return number + 1


HELPER = AgentSpec(name="helper")
GIVEN = {"agents": [HELPER], "tools": [split, flaky, note, grown]}
WHOLE = [
    [f"offline: Review src{number + 1}" for number in range(3)], "at last", "offline: Go on from 1", 3,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _reset() -> None:
    done.clear()


def whole(cluster: LocalCluster, path: Path) -> RunResult:
    """The definition above, from its file, with an answer."""
    path.write_text(KINDS)
    run = cluster.workflow(path, path="src", session_id="s", run_id="r", **GIVEN)
    cluster.session("s").answer(run.result(PATIENCE).pending[0], "yes")
    return run.result(PATIENCE)


def test_a_definition_is_a_workflow(tmp_path: Path) -> None:
    """Given a file with a foreach, a retry, a question, a branch and a loop, then the cluster does it without a
    function around it; the same ids again are the same run."""
    with LocalCluster() as cluster:
        result = whole(cluster, tmp_path / "kinds.yaml")
        assert result.output == WHOLE, result
        assert cluster.session("s").info().name == "all.kinds"
        again = cluster.workflow(tmp_path / "kinds.yaml", {"path": "src"}, session_id="s", run_id="r", **GIVEN)
        assert again.result(PATIENCE).output == WHOLE
        assert done == {"split": 1, "flaky src": 2}


@pytest.mark.sweep
@pytest.mark.thorough
def test_a_definition_survives_a_death_at_any_point(tmp_path: Path) -> None:
    """Given the same, when the session actor that comes to a point first dies there, then the result is the same, and
    nothing is paid or done twice but the tool that was at work."""
    with LocalCluster() as clean:
        assert whole(clean, tmp_path / "kinds.yaml").output == WHOLE
        requests, count = clean.model_server.stats.requests, len(clean.points)
    died = 0
    tried = tiers.points(range(0, count, 3))
    for at in tried:
        done.clear()
        with LocalCluster() as cluster:
            cluster.kill_at(at)
            result = whole(cluster, tmp_path / "kinds.yaml")
            assert result.output == WHOLE, (at, result)
            assert cluster.model_server.stats.requests == requests
            events = [event for info in cluster.session("s").tree() for event in cluster.session(info.id).events()]
            assert not [event for event in events if isinstance(event, ModelCallReissued)]
            died += sum(isinstance(event, SessionCrashed) for event in events)
        assert (done["split"], done["flaky src"]) == (1, 2)
    assert died >= len(tried) - 3


def asks(question: str, path: str) -> Definition:
    """Asks, then splits a path."""
    return w.define("asks", w.ask(question), w.tool("split", {"path": path}))


def test_a_run_keeps_the_definition_that_it_began_with() -> None:
    """Given a run that waits, when its session is given another definition and its actor dies, then the run goes on by
    the old one, the next one is by the new one; with `refuse` the other definition is refused."""
    with LocalCluster() as cluster:

        def sent(definition: Definition, run_id: str, **options: Any) -> Any:
            made = as_workflow(definition, tools=[split], **options)
            return cluster.workflow(made, session_id="s", run_id=run_id)

        run = sent(asks("Old?", "old"), "one")
        [asked] = run.result(PATIENCE).pending
        with pytest.raises(SessionConflict) as refused:
            sent(asks("New?", "new"), "two", on_change="refuse")
        assert refused.value.details["changed"] == ["workflow"]
        later = sent(asks("New?", "new"), "two")
        cluster.kill("s")
        cluster.session("s").answer(asked, "yes")
        assert run.result(PATIENCE, check=True).output == ["old1", "old2", "old3"]
        [asked] = later.result(PATIENCE).pending
        assert asked.prompt == "New?"
        cluster.session("s").answer(asked, "yes")
        assert later.result(PATIENCE, check=True).output == ["new1", "new2", "new3"]


def test_definitions_of_one_name_are_not_mixed_up() -> None:
    """Given two definitions of one name, done by one process, then each session has its own."""
    with LocalCluster(max_actors=1) as cluster:
        for path in ("a", "b"):
            done_by = w.define("same", w.tool("split", {"path": path}))
            assert cluster.workflow(done_by, tools=[split]).result(PATIENCE).output == [f"{path}{n}" for n in (1, 2, 3)]


def test_a_definition_is_a_step_of_a_function() -> None:
    """Given a function that runs a definition, then that is a session below it."""
    inner = as_workflow(w.define("inner", w.tool("grown", {"number": "{{n}}"}), inputs={"n": {}}), tools=[grown])

    @workflow
    async def outer(ctx: WorkflowContext) -> Any:
        return await ctx.workflow(inner, n=4)

    with LocalCluster() as cluster:
        assert cluster.workflow(outer, session_id="s").result(PATIENCE, check=True).output == 5
        assert {info.name for info in cluster.session("s").tree()} == {"outer", "inner"}


def refusals() -> list[tuple[Any, dict[str, Any], type[Exception], list[str]]]:
    """What is run, with what, the error and the fields of its problems."""
    twice = w.define(
        "n", w.tool("split", {"path": "x"}), w.agent("hepler", "t"), inputs={"a": {"type": "string"}, "b": {}}
    )  # fmt: skip
    broken = Definition("n", [w.tool("split", {"path": "{{nothing}}"}, retry=Retry(0))])
    fine = w.define("n", w.tool("split", {"path": "{{a}}"}), inputs={"a": {"type": "string"}, "session_id": {}})
    return [
        (twice, {"agents": [HELPER], "a": "1", "b": 2}, InvalidSpec, ["steps[0].tool.name", "steps[1].agent.name"]),
        (broken, {"tools": [split]}, InvalidSpec, ["steps[0].tool.arguments.path", "steps[0].retry.max_attempts"]),
        (fine, {"tools": [split], "a": 1, "c": 2}, InvalidInput, ["a", "c", "session_id"]),
        (fine, {"tools": [split], "a": "1", "session_id": "s"}, InvalidInput, []),
        ("missing.yaml", {}, InvalidInput, []),
        ("workflow.txt", {}, InvalidInput, []),
    ]  # fmt: skip


def test_what_can_not_be_done_is_refused_whole(tmp_path: Path) -> None:
    """Given steps that name what is not given, a definition with mistakes, inputs that don't fit or are missing, or no
    file, then all that is wrong is reported, and there is no session."""
    with LocalCluster(f"sqlite:///{tmp_path}/store.db") as cluster:
        for definition, given, error, fields in refusals():
            with pytest.raises(error) as refused:
                cluster.workflow(definition, **given)
            assert type(refused.value) is error
            assert [item["field"] for item in refused.value.details.get("problems", [])] == fields
        with pytest.raises(InvalidSpec, match="has no option 'speed'"):
            as_workflow(asks("?", "x"), speed=1)
        with pytest.raises(InvalidSpec, match="by name, or as one dict"):
            cluster.workflow(w.define("n", w.ask("?"), inputs={"a": {}}), "a")
        assert cluster.sessions() == []
