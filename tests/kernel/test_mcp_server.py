"""Agents served over the Model Context Protocol, as the protocol's own client sees them: each call is a run that does
not depend on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError

from understudy import AgentSpec, tool
from understudy.cluster.client.mcp_server import AgentServer
from understudy.events import RunFinished
from understudy.testing import LocalCluster

from . import kernel as k

MODES = ["auto", "legacy"]
"""The protocol's version of 2026, and those before it."""

effects: list[str] = []


@tool
def note(text: str) -> str:
    """Write something down."""
    effects.append(text)
    return "noted"


@tool(approve=True)
def pay(amount: int) -> str:
    """Pay."""
    effects.append(f"paid {amount}")
    return "paid"


def agent(*replies: Any, name: str = "clerk", **more: Any) -> AgentSpec:
    fields: dict[str, Any] = {"tools": [note, pay, "wait", "request_user_input"], **more}
    return AgentSpec(name=name, instructions=k.script(*replies), **fields)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing() -> None:
    effects.clear()


def client(cluster: LocalCluster, *agents: AgentSpec, mode: str = "auto", **options: Any) -> Client:
    return Client(AgentServer(cluster, agents).server(), mode=mode, **options)


def said(result: types.CallToolResult) -> str:
    [block] = result.content
    assert isinstance(block, types.TextContent)
    return block.text


async def test_each_agent_is_a_tool(cluster: LocalCluster) -> None:
    """A tool has its agent's name and description, and takes a prompt, a session and a run id."""
    agents = agent("a", description="Does a."), agent("b", name="other")
    async with client(cluster, *agents) as connected:
        clerk, other = (await connected.list_tools()).tools
        assert (clerk.name, clerk.description, other.description) == ("clerk", "Does a.", "The agent other.")
        assert set(clerk.input_schema["properties"]) == {"prompt", "session", "run_id"}
        with pytest.raises(MCPError, match="there is no agent 'nobody': clerk, other"):
            await connected.call_tool("nobody", {"prompt": "x"})


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_is_a_run(cluster: LocalCluster, mode: str) -> None:
    """The result is the run's answer; the same run id is the same run, whoever asks; a session can be continued."""
    spec = agent([("note", {"text": mode})], "first", name=f"clerk-{mode}")
    async with client(cluster, spec, mode=mode) as connected:
        found = await connected.call_tool(spec.name, {"prompt": "go", "run_id": "r1"})
        assert (said(found), found.is_error) == ("first", False)
        assert found.structured_content == {"text": "first", "status": "completed", "session": "r1", "run_id": "r1"}
    async with client(cluster, spec, mode=mode) as connected:
        assert said(await connected.call_tool(spec.name, {"prompt": "go", "run_id": "r1"})) == "first"
        again = await connected.call_tool(spec.name, {"prompt": "more", "session": "r1"})
        assert (said(again), again.structured_content["session"]) == ("first", "r1")
    assert effects == [mode, mode]
    assert len(cluster.session(f"mcp.{spec.name}.r1").runs()) == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "missing required field `prompt`"),
        ({"prompt": ""}, "length >= 1"),
        ({"prompt": "x", "promt": 1}, "unknown field `promt`"),
        ({"prompt": "x", "session": "a b"}, "session 'a b' must be"),
        ({"prompt": "other", "run_id": "taken"}, "run_conflict"),
    ],
)
async def test_what_can_not_be_asked(cluster: LocalCluster, arguments: dict[str, Any], problem: str) -> None:
    """Wrong arguments, or another prompt under a run id, are an error that the calling model can read."""
    async with client(cluster, agent("done", name="strict")) as connected:
        await connected.call_tool("strict", {"prompt": "first", "run_id": "taken"})
        result = await connected.call_tool("strict", arguments)
        assert (result.is_error, problem in said(result)) == (True, True), said(result)


async def test_no_other_session_is_reached(cluster: LocalCluster) -> None:
    """A session that was not begun by such calls has another id, whatever a client names."""
    cluster.spawn(agent("secret"), session_id="private")
    async with client(cluster, agent("mine")) as connected:
        assert said(await connected.call_tool("clerk", {"prompt": "go", "session": "private"})) == "mine"
    assert cluster.session("private").messages() == []


async def test_a_run_that_fails(cluster: LocalCluster) -> None:
    """How it ended and why is said, as an error."""
    async with client(cluster, agent([("note", {"text": "x"})], "never", max_rounds=1, name="short")) as connected:
        result = await connected.call_tool("short", {"prompt": "go"})
    assert (result.is_error, result.structured_content["status"]) == (True, "round_limit")
    assert "The run ended as round_limit: no answer after 1 rounds" in said(result)


async def test_progress_is_reported(cluster: LocalCluster) -> None:
    """A client that asks for progress hears of the run's events, in order."""
    heard: list[tuple[float, str | None]] = []

    async def hear(progress: float, _total: float | None, message: str | None) -> None:
        heard.append((progress, message))

    spec = agent([("note", {"text": "x"})], [("wait", {"seconds": 0.2})], "done", name="reports")
    async with client(cluster, spec, mode="legacy") as connected:
        await connected.call_tool(spec.name, {"prompt": "go"}, progress_callback=hear)
    assert [number for number, _ in heard] == [*range(1, len(heard) + 1)]
    assert [text for _, text in heard[:3]] == ["the run has begun", "the model calls tools: 1", "note: ok"]


def ended(cluster: LocalCluster, session: str, run_id: str) -> str:
    """How a run ended, once it has."""
    for event in cluster.session(session).run(run_id):
        if isinstance(event, RunFinished):
            return event.status
    raise AssertionError


def wait_agent(name: str) -> AgentSpec:
    return agent([("wait", {"seconds": 3})], "waited", name=name)


async def begin(connected: Client, name: str, cluster: LocalCluster) -> asyncio.Task[Any]:
    """A call that waits for a run which has begun."""
    heard = asyncio.Event()

    async def hear(_progress: float, _total: float | None, _message: str | None) -> None:
        heard.set()

    call = connected.call_tool(name, {"prompt": "go", "run_id": "r"}, progress_callback=hear)
    task = asyncio.ensure_future(call)
    async with asyncio.timeout(30):
        await heard.wait()
    return task


async def test_a_cancelled_call_ends_its_run(cluster: LocalCluster) -> None:
    """A client that cancels its call, by the protocol's notification, ends the run."""
    async with client(cluster, wait_agent("cancelled"), mode="legacy") as connected:
        call = await begin(connected, "cancelled", cluster)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(ended, cluster, "mcp.cancelled.r", "r") == "cancelled"


async def test_a_client_that_goes_away_ends_nothing(cluster: LocalCluster) -> None:
    """The run of a client whose connection ends goes on; the same call finds it, and waits for its answer."""
    spec, connecting = wait_agent("left"), asyncio.Event()

    async def leave() -> None:
        async with client(cluster, spec, mode="legacy") as connected:
            task = await begin(connected, "left", cluster)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            connecting.set()
            raise ConnectionResetError

    with suppress(ConnectionResetError, BaseExceptionGroup):
        await leave()
    assert connecting.is_set()
    async with client(cluster, spec, mode="legacy") as connected:
        result = await connected.call_tool("left", {"prompt": "go", "run_id": "r"})
    assert said(result) == "waited"
    assert len(cluster.session("mcp.left.r").runs()) == 1


Answer = Callable[[types.ElicitRequestParams], types.ElicitResult]


def asking(answer: Answer, seen: list[types.ElicitRequestParams]) -> Any:
    """The callback of a client whose person answers so."""

    async def ask(_context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        seen.append(params)
        return answer(params)

    return ask


def accept(**content: Any) -> Answer:
    return lambda _: types.ElicitResult(action="accept", content=content)


@pytest.mark.parametrize("mode", MODES)
async def test_people_are_asked_by_the_client(cluster: LocalCluster, mode: str) -> None:
    """A question, and a call that needs an approval, come to the client's person as forms; the run goes on with the
    answers."""
    asked = ("request_user_input", {"prompt": "Which one?", "options": ["red", "blue"]})
    spec = agent([asked], [("pay", {"amount": 3})], "done", name=f"asks-{mode}")
    seen: list[types.ElicitRequestParams] = []

    def answer(params: types.ElicitRequestParams) -> types.ElicitResult:
        assert isinstance(params, types.ElicitRequestFormParams)
        fields = params.requested_schema["properties"]
        content = {"answer": "blue"} if "answer" in fields else {"decision": "approve"}
        return types.ElicitResult(action="accept", content=content)

    async with client(cluster, spec, mode=mode, elicitation_callback=asking(answer, seen)) as connected:
        result = await connected.call_tool(spec.name, {"prompt": "go", "run_id": "r"})
    assert said(result) == "done"
    assert seen[0].message == "Which one?"
    assert len(seen) == 2
    tools = [m.text for m in cluster.session(f"mcp.{spec.name}.r").messages() if m.role == "tool"]
    assert (tools[0], effects) == ("blue", ["paid 3"])


@pytest.mark.parametrize("mode", MODES)
async def test_a_person_who_does_not_answer(cluster: LocalCluster, mode: str) -> None:
    """A client that asks nobody, or whose person declines, reads what is waited for and how it is answered; the run
    goes on when that is done, and the same call has its answer then."""
    spec = agent([("request_user_input", {"prompt": "Which one?"})], "done", name=f"declined-{mode}")
    declined: Answer = lambda _: types.ElicitResult(action="decline")  # noqa: E731
    for options in ({}, {"elicitation_callback": asking(declined, [])}):
        async with client(cluster, spec, mode=mode, **options) as connected:
            result = await connected.call_tool(spec.name, {"prompt": "go", "run_id": "r"})
        assert (result.is_error, result.structured_content["status"]) == (False, "waiting_for_input")
        assert "Which one?" in said(result)
        assert f"understudy answer mcp.{spec.name}.r r/1/0 TEXT" in said(result)
    session = cluster.session(f"mcp.{spec.name}.r")
    await session.answer.aio("r/1/0", "that one")
    async with client(cluster, spec, mode=mode) as connected:
        assert said(await connected.call_tool(spec.name, {"prompt": "go", "run_id": "r"})) == "done"


async def test_a_rejected_call(cluster: LocalCluster) -> None:
    """What a person rejects is not executed, and the model reads why."""
    spec = agent([("pay", {"amount": 9})], "done", name="rejects")
    answer = accept(decision="reject", reason="too much")
    async with client(cluster, spec, elicitation_callback=asking(answer, [])) as connected:
        assert said(await connected.call_tool("rejects", {"prompt": "go", "run_id": "r"})) == "done"
    [text] = [m.text for m in cluster.session("mcp.rejects.r").messages() if m.role == "tool"]
    assert "too much" in text
    assert effects == []


@pytest.mark.parametrize("mode", MODES)
async def test_questions_of_sub_agents(cluster: LocalCluster, mode: str) -> None:
    """What a sub-agent asks, for which the run waits, is asked as the run's own questions are."""
    helper = agent([("request_user_input", {"prompt": "Below?"})], "helped", name="helper")
    spec = agent(
        [("spawn_agent", {"task": "help"})], "done", name=f"leads-{mode}", tools=["spawn_agent"], agents=(helper,)
    )
    seen: list[types.ElicitRequestParams] = []
    callback = asking(accept(answer="yes"), seen)
    async with client(cluster, spec, mode=mode, elicitation_callback=callback) as connected:
        assert said(await connected.call_tool(spec.name, {"prompt": "go"})) == "done"
    assert [params.message for params in seen] == ["Below?"]
