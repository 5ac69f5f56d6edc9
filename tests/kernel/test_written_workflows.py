"""Workflows that a model writes: done once, within limits, and their ends reported, whatever dies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy import ToolContext
from understudy.actors.tools import tool
from understudy.actors.workflow_tools import limited
from understudy.agents import CHILD
from understudy.identifiers import child_identifier
from understudy.testing.offline import Reply, register_policy

from .. import tiers
from . import kernel as k
from .deaths import Deaths

pytestmark = pytest.mark.conformance

LIMITS = {"tools": ["upper"], "agents": ["worker"], "models": [], "steps": 20, "at_once": 4, "budget": None}
TOOLS = ("create_workflow", "workflow_status", "jobs", "wait")


@tool(on_crash="rerun")
def upper(ctx: ToolContext, text: str) -> str:
    """A text in capitals."""
    return text.upper()


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, frames=2) as made:
        yield made


def lead(*replies: Any, limits: dict[str, Any] | None = None, **more: Any) -> Any:
    """An agent whose model gives these replies one after the other, whatever begins its runs, and may write
    workflows."""
    elements = json.loads(k.script(*replies).partition(": ")[2])

    def policy(body: dict[str, Any]) -> Reply:
        element = elements[sum(message["role"] == "assistant" for message in body["messages"])]
        return Reply(element.get("text"), tuple((name, given) for name, given in element.get("tool_calls", ())))

    register_policy("lead", policy)
    worker = k.spec(k.script({"text": "dug", "delay": 0.05}), name="worker", hash="worker")
    made = k.spec("offline-policy: lead", [*TOOLS, upper], agents={"worker": worker}, **more)
    within = {**LIMITS, **(limits or {})}
    return {**made, "tools": [limited(one, within) for one in made["tools"]], "workflows": within}


DIG = {
    "name": "dig",
    "inputs": {"places": {"type": "array", "items": {"type": "string"}}},
    "steps": [
        {
            "id": "found",
            "foreach": {"items": "{{places}}", "do": {"agent": {"name": "worker", "task": "{{item}}"}}},
            "max_concurrency": 2,
        },
        {"id": "loud", "tool": {"name": "upper", "arguments": {"text": "{{found.0}}"}}},
    ],
    "output": {"found": "{{found}}", "loud": "{{loud}}"},
}
RESULT = '{"found":["dug","dug"],"loud":"DUG"}'


def write(definition: Any = DIG, inputs: Any = None, **more: Any) -> tuple[str, dict[str, Any]]:
    given = {"places": ["a", "b"]} if definition is DIG and inputs is None else inputs
    return "create_workflow", {"definition": definition, **({"inputs": given} if given is not None else {}), **more}


def tool_step(text: str = "x", **more: Any) -> dict[str, Any]:
    return {"tool": {"name": "upper", "arguments": {"text": text}}, **more}


def flow(*steps: Any) -> dict[str, Any]:
    return {"name": "n", "steps": list(steps)}


def written(session_id: str = "s", round_number: int = 1) -> str:
    """The id of the session that does the workflow that was written in a round."""
    return child_identifier(session_id, f"r/{round_number}/0")


async def end_messages(kernel: k.Kernel, session_id: str = "s") -> list[str]:
    """The messages to the session about the ends of what it had started."""
    return [message["content"] for message in await kernel.messages(session_id) if message.get("origin") == CHILD]


async def news_run(kernel: k.Kernel, session_id: str = "s") -> dict[str, Any]:
    """The run of the news of the workflow's end, once it has ended."""
    await kernel.until(session_id, "child_finished")
    return await kernel.end(session_id, f"news.{written(session_id)}")


async def test_the_call_waits_for_the_result(kernel: k.Kernel) -> None:
    """Given a workflow with agents and a tool of the caller's, when its model writes it, then it is a session below the
    caller, whose result the call has."""
    assert (await kernel.run("s", lead([write()], "done")))["text"] == "done"
    assert await kernel.results() == [RESULT]
    info = await kernel.info(written())
    assert (info["kind"], info["parent_id"], info["depth"], info["closed"]) == ("workflow", "s", 1, 1)


async def test_the_end_of_a_detached_one_wakes_the_agent(kernel: k.Kernel) -> None:
    """Given a workflow that is detached, then the call has its id at once, and its end begins another run of the
    agent, whose model has the result."""
    await kernel.run("s", lead([write(detached=True)], "it goes on", "heard"))
    assert await kernel.results() == [f"started sub-agent {written()}"]
    news = await news_run(kernel)
    assert (news["status"], news["text"], news["source"]) == ("completed", "heard", CHILD)
    assert await end_messages(kernel) == [f"Sub-agent {written()} (agent) has finished. Its answer:\n{RESULT}"]


async def test_all_problems_come_back_at_once(kernel: k.Kernel) -> None:
    """Given a workflow with several mistakes, then nothing is done, and the model reads all of them, each with its
    place, so that it can mend them."""
    agent = {"agent": {"name": "wroker", "task": "{{itm}}"}}
    wrong = flow(
        {"id": "a", "tool": {"name": "bash", "arguments": {}}, "when": "b =="},
        {"foreach": {"items": "{{a}}", "do": agent}},
        {"ask": {"question": "?"}},
        {"model": {"prompt": "x", "model": "large"}},
        {"tool": {"name": "upper"}, "colour": 1},
    )
    await kernel.run("s", lead([write(wrong)], [write()], "done"))
    refused, mended = await kernel.results()
    assert refused.splitlines()[0].endswith("has 8 problems. Mend all of it, and call again:")
    assert [line.removeprefix("- ").partition(": ")[0] for line in refused.splitlines()[1:]] == [
        "steps[0].tool.name", "steps[0].when", "steps[1]", "steps[1].foreach.do.agent.name",
        "steps[1].foreach.do.agent.task", "steps[2].ask", "steps[3].model.model", "steps[4].colour",
    ]  # fmt: skip
    assert "(did you mean 'worker'?)" in refused
    assert mended == RESULT


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (("create_workflow", {}), 'the argument "definition" must be an object'),
        (write([]), 'the argument "definition" must be an object'),
        (write(flow(tool_step("x" * 100_000))), "at most 100000 characters"),
        (write(flow(*[tool_step()] * 21)), "there are 21 steps, and you may have 20"),
        (write(DIG, {"places": 3}), "- places: $: 3 is not of type 'array'"),
        (write(DIG, [1]), 'the argument "inputs" must be an object'),
        (write(DIG, detached="no"), 'the argument "detached" must be true or false'),
        (write(flow({"parallel": [tool_step()] * 5})), "up to 5 steps would be under way at once, and 4 may"),
    ],
)  # fmt: skip
async def test_what_is_refused(kernel: k.Kernel, call: Any, why: str) -> None:
    """Given a call beyond the limits, or that is none, then nothing is started, and its result says why."""
    assert (await kernel.run("s", lead([call], "done")))["status"] == "completed"
    [said] = await kernel.results()
    assert why in said
    assert "child_spawned" not in await kernel.types("s")


async def test_the_depth_of_the_tree_holds(kernel: k.Kernel) -> None:
    """Given an agent as deep as its tree may be, then it may write no workflow; one above that, none with agents."""
    await kernel.run("s", lead([write()], "done", max_depth=0))
    await kernel.run("t", lead([write()], [write(flow(tool_step()))], "done", max_depth=1))
    assert "as deep as this tree may grow" in (await kernel.results("s"))[0]
    refused, done = await kernel.results("t")
    assert "steps[0].foreach.do.agent: no session may be created below yours" in refused
    assert done == '"X"'


async def test_a_run_comes_to_so_many_steps(kernel: k.Kernel) -> None:
    """Given a loop that would go on for longer than the limit of steps, then the workflow fails when it comes to one
    more, whatever its steps do about failures."""
    endless = flow({"loop": {"do": tool_step(on_error="continue"), "max": 1000}, "on_error": "continue"})
    await kernel.run("s", lead([write(endless)], "done"))
    [said] = await kernel.results()
    assert said.startswith("the sub-agent ended as failed: it may come to 20 steps in a run, and would come to more")
    assert len(await kernel.results(written())) == 19  # the loop is one as well


async def test_the_budget_of_the_limits(kernel: k.Kernel) -> None:
    """Given limits with a budget of one sub-agent, then a workflow that would start two fails, and its agent goes
    on."""
    budget = [{"scope": "tree", "children": 1}]
    assert (await kernel.run("s", lead([write()], "done", limits={"budget": budget})))["text"] == "done"
    [said] = await kernel.results()
    assert said.startswith("the sub-agent ended as ")
    assert "no sub-agent was started" in said


async def test_the_status_of_a_workflow(kernel: k.Kernel) -> None:
    """Given a detached workflow that waits, when its agent asks what it is at, then it hears the open steps and the
    last results; of what it has not written it hears nothing. When it stops it, it hears of the end."""
    steps = flow(tool_step("a"), {"wait": {"event": "paid"}})
    asked = ("workflow_status", {"workflow": written()})
    replies = (
        [write(steps, detached=True)], [("wait", {"seconds": 0.5})], [asked, ("workflow_status", {"workflow": "t"})],
        [("stop_job", {"job": written()})], "done", "heard",
    )  # fmt: skip
    await kernel.run("s", lead(*replies))
    _, _, status, other, _ = await kernel.results()
    assert status.splitlines() == [
        f"Workflow {written()}: waiting_for_input",
        "Open steps:", '- 1 event (waiting): {"name": "paid", "seconds": null}',
        "Last results, the latest first:", '- 0 upper (ok): "A"',
    ]  # fmt: skip
    assert other == "you have written no workflow 't': give the id that create_workflow has said."
    await news_run(kernel)
    assert "has ended: the sub-agent ended as cancelled" in (await end_messages(kernel))[0]


async def test_a_person_approves_what_the_tool_needs(kernel: k.Kernel) -> None:
    """Given a tool that needs an approval, then it needs one in a workflow that the agent writes as well."""
    spec = lead([write(flow(tool_step("x")))], "done")
    spec["tools"] = [{**one, "approve": True} if one["name"] == "upper" else one for one in spec["tools"]]
    await kernel.spawn("s", spec)
    await kernel.send("s")
    await kernel.until(written(), "input_requested")
    [asked] = await kernel.paused(written())
    assert asked["kind"] == "approval"
    await kernel.ask("answer", written(), asked["call_id"], "reject", "no", asked["asked"])
    await kernel.end("s")
    assert "the sub-agent ended as failed" in (await kernel.results())[0]


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
@pytest.mark.parametrize("detached", [False, True])
async def test_a_death_at_every_point(store: str, tmp_path: Path, victim: str, detached: bool) -> None:
    """Given a workflow that an agent writes, waited for or detached, when a frame or the node service dies at any
    point, then it is made once, its steps are done once, and its result, or the news of its end, comes once."""
    compiled = lead([write(detached=detached)], "done", "heard")
    async with k.running(store, tmp_path) as kernel:

        async def play(session_id: str) -> tuple[Any, ...]:
            await kernel.run(session_id, compiled)
            if detached:
                await news_run(kernel, session_id)
            await kernel.quiet()
            spawned = [event for event in await kernel.events(session_id) if event["type"] == "child_spawned"]
            news = [text.partition(" has ")[2] for text in await end_messages(kernel, session_id)]
            said = [text.replace(written(session_id), "") for text in await kernel.results(session_id)]
            steps = sorted(await kernel.results(written(session_id)))
            return len(spawned), said, steps, news, (await kernel.end(session_id))["text"]

        clean = await play("clean")
        assert clean[0] == 1
        assert clean[2] == ['"DUG"', '"dug"', '"dug"']
        assert clean[3] == ([f"finished. Its answer:\n{RESULT}"] if detached else [])
        points = len(kernel.points)
        for at in tiers.points(range(points), is_sqlite=kernel.service.database.is_sqlite):
            deaths = Deaths(kernel, f"s{at}", at, victim)
            found = await play(f"s{at}")
            kernel.on_point = None
            await kernel.quiet()
            assert found == clean, deaths.where
            kernel.check(f"s{at}")


def test_what_a_call_says_is_what_a_model_reads() -> None:
    """Given limits, then the tool's description names the tools, the agents and the numbers."""
    made = next(one for one in lead("x")["tools"] if one["name"] == "create_workflow")
    assert "Tools: upper; agents: worker. At most 20 steps" in made["description"]
    assert json.loads(json.dumps(made)) == made
