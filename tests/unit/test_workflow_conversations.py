"""Steps of workflows that go on with what was said before, in the cluster of one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec, StepFailed, WorkflowContext, tool, workflow
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.testing import LocalCluster
from understudy.testing.offline import Refusal, Reply, default_policy
from understudy.testing.policies import content_text, last_turn

from .. import tiers

PATIENCE = 30.0

tried: list[str] = []


@tool(on_crash="rerun")
def look(name: str) -> str:
    """Look at something."""
    return f"saw {name}"


talker = AgentSpec(name="talker", instructions="You talk.", tools=[look])
other = AgentSpec(name="other", instructions="You talk as well.")
again = AgentSpec(name="again", instructions="You are started again.", restart_type="transient")


def answers(body: dict[str, Any]) -> Reply:
    """As the offline model does; an input `fails` is refused, and `once` the first time only."""
    text, _ = last_turn(body["messages"])
    if text == "fails" or (text == "once" and text not in tried):
        tried.append(text)
        raise Refusal(400, "it is refused")
    return default_policy(body)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster whose store is checked when the test is over."""
    store = f"sqlite:///{tmp_path}/store.db"
    tried.clear()
    with LocalCluster(store, policy=answers) as found:
        yield found
    database = Database(store)
    try:
        with database.snapshot() as connection:
            assert "\n".join(map(str, check(connection, "local"))) == ""
    finally:
        database.close()


def sent(cluster: LocalCluster) -> list[list[str]]:
    """What each request said behind the instructions."""
    bodies = [request.body for request in cluster.model_server.requests]
    return [[content_text(message) for message in body["messages"][1:]] for body in bodies]


@workflow
async def talks(ctx: WorkflowContext) -> Any:
    """One conversation, with a tool in it; another one of the same agent; one of another agent; and none."""
    await ctx.agent(talker, 'call look {"name": "a"}', conversation="first")
    await ctx.agent(talker, "b", conversation="second")
    await ctx.agent(talker, "c", conversation="first")
    await ctx.agent(other, "d", conversation="first")
    await ctx.agent(talker, "e")
    return await ctx.agent(talker, "f", conversation="first")


def test_a_conversation_is_of_one_agent_and_one_name(cluster: LocalCluster) -> None:
    """Given steps with conversations, then each begins with what was said in those of its agent and its name, calls of
    tools and their results included, and with nothing else."""
    assert cluster.workflow(talks).result(PATIENCE, check=True).output == "offline: f"
    first = ['call look {"name": "a"}', "", "saw a", "offline: saw a"]
    assert sent(cluster) == [
        first[:1], first[:3], ["b"], [*first, "c"], ["d"], ["e"], [*first, "c", "offline: c", "f"],
    ]  # fmt: skip
    bodies = [request.body["messages"] for request in cluster.model_server.requests]
    assert bodies[3][: len(bodies[1])] == bodies[1]  # also the ids by which the model knows its calls
    assert bodies[6][: len(bodies[3])] == bodies[3]


@workflow
async def looks(ctx: WorkflowContext) -> Any:
    """One conversation, with a tool in each step."""
    for number in range(5):
        await ctx.agent(talker, f'call look {{"name": "{number}"}}', conversation="c")


def test_calls_of_a_conversation_have_different_ids(tmp_path: Path) -> None:
    """Given a model that gives the first call of each of its sessions the same id, then it is sent a conversation in
    which each call has an id of its own, which its result names, and which stays the same."""
    with LocalCluster(f"sqlite:///{tmp_path}/store.db", policy=answers) as cluster:
        assert cluster.workflow(looks).result(PATIENCE).ok
        bodies = [request.body["messages"] for request in cluster.model_server.requests]
    for before, after in itertools.pairwise(bodies):
        assert after[: len(before)] == before
    asked = [call["id"] for message in bodies[-1] for call in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in bodies[-1] if message["role"] == "tool"]
    assert asked == answered
    assert len({*asked}) == 5


@workflow
async def fails(ctx: WorkflowContext) -> Any:
    """A step of a conversation fails."""
    await ctx.agent(other, "a", conversation="c")
    try:
        await ctx.agent(other, "fails", conversation="c")
    except StepFailed:
        pass
    return await ctx.agent(other, "b", conversation="c")


def test_what_failed_is_no_part_of_a_conversation(cluster: LocalCluster) -> None:
    """Given a step that failed, then the next one goes on with the last that has completed."""
    assert cluster.workflow(fails).result(PATIENCE).ok
    assert sent(cluster)[-1] == ["a", "offline: a", "b"]


@workflow
async def restarted(ctx: WorkflowContext) -> Any:
    """An agent that is started again when it fails."""
    await ctx.agent(again, "a", conversation="c")
    await ctx.agent(again, "once", conversation="c")
    return await ctx.agent(again, "b", conversation="c")


def test_an_agent_that_is_started_again_begins_with_the_conversation(cluster: LocalCluster) -> None:
    """Given an agent that its supervision starts again, then the new session begins with what the failed one began
    with, and the next step goes on with the new one."""
    assert cluster.workflow(restarted).result(PATIENCE).ok
    assert sent(cluster)[-2:] == [["a", "offline: a", "once"], ["a", "offline: a", "once", "offline: once", "b"]]


@pytest.mark.sweep
def test_a_death_at_every_point_changes_no_request() -> None:
    """Given steps with conversations, and a session actor that dies at some point: the same requests are made, each
    once."""
    with LocalCluster() as clean:
        assert clean.workflow(talks, session_id="w").result(PATIENCE).ok
        points, requests = len(clean.points), sent(clean)
    for at in tiers.points(range(points)):
        with LocalCluster() as cluster:
            cluster.kill_at(at)
            assert cluster.workflow(talks, session_id="w").result(PATIENCE).ok, (at, cluster.points[at])
            assert sent(cluster) == requests, (at, cluster.points[at])
