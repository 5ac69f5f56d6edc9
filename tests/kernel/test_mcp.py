"""MCP servers of an agent: their tools are committed before a model is sent them, and their calls are made once."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.cluster.client.compiling import compile_spec
from understudy.mcp_servers import McpServer
from understudy.messages import GIVEN_UP
from understudy.node import tool_servers
from understudy.node.node_service import NodeService
from understudy.records import ActivationId
from understudy.spec import AgentSpec
from understudy.store.upkeep import retention
from understudy.tool_host import server as tool_host_server
from understudy.tool_host.hosted_servers import HostedServers
from understudy.tool_hosting import ServerAnswer, ServerCall

from ..mcp_calls import calls, command, pids, until, until_called
from . import kernel as k


def server(directory: Path, name: str = "test", **more: Any) -> McpServer:
    """The test server, which notes its calls in a directory."""
    return McpServer(name, command=command(directory), **more)


def agent(*replies: Any, servers: list[McpServer], **more: Any) -> dict[str, Any]:
    """The compiled specification of an agent that gives these replies."""
    spec = AgentSpec(name="agent", instructions=k.script(*replies), mcp_servers=servers, **more)
    return compile_spec(spec, model="offline", profile="offline", pickle=None).spec


@pytest.fixture(scope="module", autouse=True)
def _package() -> None:
    """The `mcp` package takes seconds to load, on a busy machine longer than a run may stand still here."""
    importlib.import_module("understudy.tool_host.server")


@pytest.fixture
def dsn(tmp_path: Path) -> str:
    """A store of its own: what differs between the backends is not the subject here."""
    return f"sqlite:///{tmp_path}/store.db"


def holder(kernel: k.Kernel) -> k.Worker:
    """The frame's process that has the session."""
    found = kernel.holder("s")
    assert found is not None
    return found


def last(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The last event of a kind."""
    return [event for event in events if event["type"] == kind][-1]


async def until_answered(kernel: k.Kernel) -> None:
    """Wait until the host is at no call any more."""
    await until(lambda: not any(one.in_flight for one in kernel.tool_host.servers.servers))


async def test_a_model_is_offered_a_servers_tools_and_calls_them(store: str, tmp_path: Path) -> None:
    """The tools of a server are offered under its name and called there; its answers are the calls' results, errors
    included; nothing of the server is in the driver or the frame."""
    spec = agent(
        [("test_add", {"a": 2, "b": 3}), ("test_fail", {})], [("test_add", {"a": "x"})], "done",
        servers=[server(tmp_path)],
    )  # fmt: skip
    async with k.running(store, tmp_path) as kernel:
        ended = await kernel.run("s", spec)
        results = await kernel.results()
        listed = [event["data"] for event in await kernel.events("s") if event["type"] == "mcp_server_listed"]
        offered = [tool["function"]["name"] for tool in kernel.server.requests[0].body["tools"]]
        await until(lambda: kernel.tool_host.servers.held == 0)  # what is committed the host has forgotten
        kernel.check()
    assert ended["status"] == "completed"
    assert results[0] == "5"
    assert results[1] == "it does not work"
    assert results[2].startswith("The arguments don't fit the parameters of test_add")
    assert calls(tmp_path) == ["start", "add 2 3"]
    assert [one["server"] for one in listed] == ["test"]
    assert offered == list(listed[0]["tools"])
    assert {"test_add", "test_read_resource", "test_get_prompt"} <= set(offered)


async def test_a_call_without_a_host_was_not_made(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given no process that holds servers, when a tool of one is called, then the model reads that it was not
    executed, and nothing is in doubt."""
    spec = agent([("test_add", {"a": 2, "b": 3})], "done", servers=[server(tmp_path)])

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with k.running(dsn, tmp_path) as kernel:
        kernel.server.hold()
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        monkeypatch.setattr(tool_servers, "START_SECONDS", 0.05)
        monkeypatch.setattr(HostedServers, "attach", never)
        kernel.tool_host.kill()
        kernel.server.release()
        ended = await kernel.end("s")
        results, types = await kernel.results(), await kernel.types("s")
    assert ended["status"] == "completed"
    assert "was not executed" in results[0]
    assert not {"tool_started", "tool_in_doubt"} & set(types)
    assert calls(tmp_path) == ["start"]


# What is in flight when somebody dies.


@pytest.mark.parametrize("tool", ["hold", "look"])
async def test_a_frame_that_dies_during_a_call_costs_nothing(tool: str, dsn: str, tmp_path: Path) -> None:
    """Given a call under way, when its session's process dies, then the next process gets that call's result, and the
    server has seen it once; whatever the tool's `on_crash` is."""
    spec = agent([(f"test_{tool}", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, f"{tool} x")
        kernel.kill(holder(kernel))
        await kernel.until("s", "session_activated", 2)
        (tmp_path / "go").touch()
        ended = await kernel.end("s")
        results, types = await kernel.results(), await kernel.types("s")
    assert ended["status"] == "completed"
    assert results == [f"{'held' if tool == 'hold' else 'seen'} x"]
    assert calls(tmp_path) == ["start", f"{tool} x"]
    assert "tool_in_doubt" not in types


async def test_a_result_waits_for_the_frame_that_takes_it(dsn: str, tmp_path: Path) -> None:
    """Given a call that ends while its session has no process, then the next process finds the result at the host."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path, frames=1) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, "hold x")
        kernel.kill(holder(kernel), replace=False)
        (tmp_path / "go").touch()
        await until_answered(kernel)
        kernel.add_frame()
        await kernel.end("s")
        assert await kernel.results() == ["held x"]
    assert calls(tmp_path) == ["start", "hold x"]


async def test_a_node_service_that_dies_during_a_call_costs_nothing(dsn: str, tmp_path: Path) -> None:
    """Given a call under way, when the node service dies, then the next one attaches to the host, and to the call."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, "hold x")
        kernel.kill_node()
        await kernel.quiet()
        (tmp_path / "go").touch()
        await kernel.end("s")
        assert await kernel.results() == ["held x"]
    assert calls(tmp_path) == ["start", "hold x"]


@pytest.mark.parametrize("victim", ["server", "host", "host and node", "host and frame"])
@pytest.mark.parametrize("tool", ["hold", "look"])
async def test_a_call_that_its_server_dies_with_is_in_doubt(victim: str, tool: str, dsn: str, tmp_path: Path) -> None:
    """Given a call under way, when its server dies, alone or with others, then the tool's `on_crash` decides: one that
    only reads is called again on the next server, of the other the model reads that nobody knows."""
    spec = agent([(f"test_{tool}", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        pid = await until_called(tmp_path, f"{tool} x")
        if victim == "server":
            os.kill(pid, signal.SIGKILL)
        else:
            kernel.tool_host.kill()
        killed_at = time.time_ns() // 1000
        if victim == "host and node":
            kernel.kill_node()
        if victim == "host and frame":
            kernel.kill(holder(kernel))
        if tool == "look":
            await until_called(tmp_path, "look x", 2)
        (tmp_path / "go").touch()
        ended = await kernel.end("s")
        results, events = await kernel.results(), await kernel.events("s")
    types, finished = [event["type"] for event in events], last(events, "tool_finished")["data"]
    assert ended["status"] == "completed"
    if tool == "look":
        assert results == ["seen x"]
        assert calls(tmp_path).count("look x") == 2
    else:
        died = "agent's process" if "frame" in victim else "MCP server"
        assert results == [f"interrupted: the {died} died while this tool ran; its outcome is unknown"]
        assert calls(tmp_path).count("hold x") == 1
        assert types.count("tool_in_doubt") == 1
        assert finished["started_at"] < killed_at < finished["started_at"] + finished["duration"]
        assert finished["executions"] == (0 if "frame" in victim else 1)


@pytest.mark.parametrize("decision", ["ok", "rerun"])
async def test_a_person_decides_about_a_call_in_doubt(decision: str, dsn: str, tmp_path: Path) -> None:
    """Given a tool with `on_crash="ask"`, when its server dies during a call, then a person is asked: the answer is the
    result, or the call is made again."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path, on_crash={"ho*": "ask"})])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        os.kill(await until_called(tmp_path, "hold x"), signal.SIGKILL)
        (asked,) = await kernel.paused("s")
        assert asked["prompt"].startswith("The MCP server died while test_hold ran with ")
        (tmp_path / "go").touch()
        answer = {"call_id": asked["call_id"], "asked": asked["asked"], "decision": decision, "text": "it did"}
        await kernel.ask("decide", "s", [answer])
        await kernel.end("s")
        results = await kernel.results()
    assert results == ["it did" if decision == "ok" else "held x"]
    assert calls(tmp_path).count("hold x") == (1 if decision == "ok" else 2)


async def test_a_server_that_dies_each_time_is_given_up(dsn: str, tmp_path: Path) -> None:
    """A tool that may be run again is called a few times while its server dies of it, and no more."""
    servers = [server(tmp_path, on_crash={"die": "rerun"})]
    async with k.running(dsn, tmp_path) as kernel:
        ended = await kernel.run("s", agent([("test_die", {})], [("test_die_once", {})], "done", servers=servers))
        results = await kernel.results()
    assert ended["status"] == "completed"
    assert results[0] == "interrupted: the MCP server died while this tool ran; its outcome is unknown"
    assert calls(tmp_path).count("die") == 3


async def test_a_cancelled_call_is_given_up_at_the_host(dsn: str, tmp_path: Path) -> None:
    """Given a call under way, when its run is cancelled, then the run ends at once and the host gives the call up."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, "hold x")
        await kernel.until("s", "tool_started")
        await kernel.ask("cancel", "s", "r", "enough")
        ended = await kernel.end("s")
        await until_answered(kernel)
    assert ended["status"] == "cancelled"


@pytest.mark.parametrize("ends_by", ["cancel", "steer"])
async def test_what_is_said_of_calls_that_are_given_up(ends_by: str, dsn: str, tmp_path: Path) -> None:
    """Given calls under way, when their run is cancelled or steered away from them, then the model reads that nobody
    knows the outcome of the one that may have an effect, and that the one that only reads is cancelled."""
    spec = agent([("test_hold", {"word": "x"}), ("test_look", {"word": "y"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, "hold x")
        await until_called(tmp_path, "look y")
        called_at = time.time_ns() // 1000
        await kernel.until_watched()
        if ends_by == "cancel":
            await kernel.ask("cancel", "s", "r", "enough")
        else:
            await kernel.ask("steer", "s", {"content": "left", "interrupt": True})
        await kernel.until("s", "tool_finished", 2)
        (tmp_path / "go").touch()
        assert (await kernel.end("s"))["status"] == ("cancelled" if ends_by == "cancel" else "completed")
        results, events = await kernel.results(), await kernel.events("s")
        await until_answered(kernel)
    assert results[:2] == [GIVEN_UP, "cancelled"]
    finished = [event["data"] for event in events if event["type"] == "tool_finished"]
    (held,) = [data for data in finished[:2] if data["tool"] == "test_hold"]
    assert (held["outcome"], held["executions"]) == ("interrupted", 1)
    assert held["started_at"] < called_at < held["started_at"] + held["duration"]


async def test_a_run_after_a_cancelled_one_has_the_tools_of_a_server_that_hung(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a server that hangs in a call whose run is cancelled, then the next run has its tools, and calls one."""
    monkeypatch.setattr(tool_host_server, "CHECK_SECONDS", 0.2)
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        os.kill(await until_called(tmp_path, "hold x"), signal.SIGSTOP)
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        (tmp_path / "go").touch()
        await kernel.send("s", run_id="r2")
        await kernel.end("s", "r2")
        results, types = await kernel.results(), await kernel.types("s")
    assert results[-1] == "held x"
    assert FAILED not in types
    assert calls(tmp_path).count("start") == 2


def watched(kernel: k.Kernel, before: Callable[[], None] = lambda: None) -> list[str]:
    """How the calls end that the node service makes, from now on; `before` is called before each."""
    servers, found = kernel.service.tool_servers, list[str]()
    call = servers.call

    async def calling(frame_id: str, activation: ActivationId, wanted: ServerCall) -> ServerAnswer:
        if wanted.arguments is None:
            return await call(frame_id, activation, wanted)
        before()
        answer = await call(frame_id, activation, wanted)
        found.append(answer.outcome)
        return answer

    servers.call = calling  # type: ignore[method-assign]
    return found


async def test_a_call_that_the_host_has_given_up_is_not_made_again(dsn: str, tmp_path: Path) -> None:
    """Given a call under way, when its frame hangs and its run is ended by force, then the host gives the call up, and
    is not asked for it again."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path)], shutdown=0)
    async with k.running(dsn, tmp_path) as kernel:
        found = watched(kernel)
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, "hold x")
        holder(kernel).dead = True  # it says nothing more
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        await until(lambda: bool(found) or len(calls(tmp_path)) > 2)
        assert (found, kernel.tool_host.servers.held) == (["lost"], 0)
    assert calls(tmp_path) == ["start", "hold x"]


async def test_a_process_that_lags_behind_the_end_of_its_run_makes_no_call_again(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a call under way of a tool that may be run again, when its run is ended by force, and its process has not
    heard of that when the host gives the call up, then the process does not have it made again."""
    spec = agent([("test_look", {"word": "x"})], "done", servers=[server(tmp_path)], shutdown=0)
    monkeypatch.setattr(NodeService, "interrupted", lambda *_: k.never())
    async with k.running(dsn, tmp_path) as kernel:
        found = watched(kernel)
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, "look x")
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        await until(lambda: not kernel.service.frames.known.condemned)  # it has called in
        assert (found, kernel.tool_host.servers.held) == (["lost"], 0)
    assert calls(tmp_path) == ["start", "look x"]


async def test_a_call_that_is_given_up_before_its_host_hears_of_it_is_not_made(dsn: str, tmp_path: Path) -> None:
    """Given a call that waits at the node service for its host, when its run is cancelled, then it is never made."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        asked, back, attach = asyncio.Event(), asyncio.Event(), kernel.tool_host.attach

        async def attached_later(service: str) -> Any:
            await back.wait()
            return await attach(service)

        def lose() -> None:
            link = kernel.service.tool_servers.link
            kernel.tool_host.attach = attached_later  # type: ignore[method-assign]
            assert link.current is not None
            link.lost(link.current)
            asked.set()

        found = watched(kernel, lose)
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await asked.wait()
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        back.set()
        await until(lambda: bool(found) or len(calls(tmp_path)) > 1)
        assert (found, kernel.tool_host.servers.held) == (["lost"], 0)
    assert calls(tmp_path) == ["start"]


# What is committed of a server.


def offered(kernel: k.Kernel) -> list[list[str]]:
    """The tools that each request to the model offered."""
    return [[tool["function"]["name"] for tool in request.body.get("tools", ())] for request in kernel.server.requests]


async def test_what_a_model_is_offered_is_what_the_log_says(dsn: str, tmp_path: Path) -> None:
    """Given a server that offers another tool in the middle of a run, then that run goes on with the tools that it
    began with, the next one is offered the new tool, and the log says so once each."""
    spec = agent([("test_grow", {})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.run("s", spec)
        for run_id in ("r2", "r3"):
            await kernel.send("s", run_id=run_id)
            await kernel.end("s", run_id)
        asked = [frozenset(names) for names in offered(kernel)]
        grown = ["test_grown" in names for names in asked]
        listed = [event["data"]["tools"] for event in await kernel.events("s") if event["type"] == "mcp_server_listed"]
    assert grown == [False, False, True, True, True, True]
    assert [frozenset(names) for names in listed] == [asked[0], asked[2]]


async def test_a_restore_asks_no_server(dsn: str, tmp_path: Path) -> None:
    """Given a model call under way, when everything dies but the store, and the server is gone for good, then the call
    is made again byte for byte."""
    spec = agent("done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path, latency=0.3) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until(lambda: bool(kernel.server.requests))
        kernel.gateway.kill()
        kernel.tool_host.kill()
        kernel.kill(holder(kernel))
        kernel.kill_node()
        ended = await kernel.end("s")
        bodies = [request.body for request in kernel.server.requests]
    assert ended["status"] == "completed"
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]
    assert calls(tmp_path) == ["start"]


async def test_a_run_goes_on_without_a_server_that_cannot_be_used(dsn: str, tmp_path: Path) -> None:
    """Given a server that can't be started, then the run goes on without its tools, an event says why with the last
    words of its process, and the next run tries again; where it is required the run fails."""
    broken = tmp_path / "broken"
    servers = [
        McpServer("other", command=["sh", "-c", f"echo no luck >&2; test -e {broken} || exit 3"]),
        McpServer("absent", command=["no-such-program-anywhere"]),
        server(tmp_path),
    ]
    async with k.running(dsn, tmp_path) as kernel:
        ended = await kernel.run("s", agent([("test_add", {"a": 1, "b": 1})], "done", servers=servers))
        failed = {one["data"]["server"]: one["data"] for one in await kernel.events("s") if one["type"] == FAILED}
        assert ended["status"] == "completed"
        assert await kernel.results() == ["2"]
        assert "no luck" in failed["other"]["error_message"]
        assert "no-such-program-anywhere" in failed["absent"]["error_message"]
        await kernel.send("s", run_id="r2")
        await kernel.end("s", "r2")
        assert (await kernel.types("s")).count(FAILED) == 4
        needed = [McpServer("absent", command=["no-such-program-anywhere"], required=True)]
        ended = await kernel.run("needed", agent("done", servers=needed))
    assert ended["status"] == "failed"
    assert ended["error"]["code"] == "mcp_server_unusable"


FAILED = "mcp_server_failed"


async def test_tools_are_chosen_and_ruled_by_patterns(dsn: str, tmp_path: Path) -> None:
    """`include` and `exclude` choose tools by the server's own names, `approve` asks a person before a call, and
    `on_crash` is the server's annotation unless it is overridden."""
    servers = [server(tmp_path, include=["*o*"], exclude=["fl*"], on_crash={"hold": "ask"})]
    spec = agent([("test_roots", {})], "done", servers=servers, approve=["test_r*"], workspace=str(tmp_path))
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        (asked,) = await kernel.paused("s")
        decision = {"call_id": asked["call_id"], "asked": asked["asked"], "decision": "approve"}
        await kernel.ask("decide", "s", [decision])
        await kernel.end("s")
        (result,) = await kernel.results()
        record = next(one for one in await kernel.messages("s") if one.get("origin") == "mcp")
    rules = {tool["name"]: tool["on_crash"] for tool in record["extra"]["tools"]}
    assert rules == {
        "test_hold": "ask", "test_look": "rerun", "test_die_once": "rerun", "test_grow": "report",
        "test_roots": "report", "test_order": "report", "test_list_resources": "rerun", "test_read_resource": "rerun",
        "test_get_prompt": "rerun",
    }  # fmt: skip
    assert json.loads(result) == {"roots": [{"uri": f"file://{tmp_path}", "name": tmp_path.name}]}


async def test_resources_and_prompts_are_tools(dsn: str, tmp_path: Path) -> None:
    """A server's resources are listed and read, and its prompts are had, by tools that only read."""
    wanted = [
        ("test_list_resources", {}), ("test_read_resource", {"uri": "memo://welcome"}),
        ("test_get_prompt", {"name": "greet", "arguments": {"whom": "Ann"}}),
    ]  # fmt: skip
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.run("s", agent(wanted, "done", servers=[server(tmp_path)]))
        results = await kernel.results()
    assert results == ["memo://welcome  welcome", "Welcome.", "user: Greet {'whom': 'Ann'}."]


async def test_secrets_are_for_the_server_alone(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable that is named for a server is given to it, and no other one; its value is in no log, message or event.
    One that is missing keeps the server from being used."""
    monkeypatch.setenv("TEST_MCP_VALUE", "sesame-sesame-4711")
    monkeypatch.setenv("TEST_MCP_OTHER", "other")
    caplog.set_level("INFO")
    named = [server(tmp_path, environment=["TEST_MCP_VALUE"]), server(tmp_path, "bare", environment=["TEST_MCP_NONE"])]
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.run("s", agent([("test_secret", {"key": "x"})], "done", servers=named))
        results, events = await kernel.results(), await kernel.events("s")
        sent = json.dumps([request.body for request in kernel.server.requests])
    assert results == ["*** none"]
    assert '"default": "***"' in sent
    assert "sesame" not in sent
    assert "started with ***" in caplog.text
    assert "sesame" not in caplog.text + json.dumps(events)
    assert [event["data"]["server"] for event in events if event["type"] == FAILED] == ["bare"]


@pytest.mark.parametrize("share", ["session", "tree", "node"])
async def test_a_server_is_shared_as_far_as_it_says(share: str, dsn: str, tmp_path: Path) -> None:
    """Two trees of two sessions each use as many processes as `share` says."""
    child = AgentSpec(name="child", instructions=k.script("done"), mcp_servers=[server(tmp_path, share=share)])
    spec = agent(
        [("spawn_agent", {"task": "go"})], "done", servers=[server(tmp_path, share=share)], tools=["spawn_agent"],
        agents=[child],
    )  # fmt: skip
    async with k.running(dsn, tmp_path) as kernel:
        for session_id in ("one", "two"):
            await kernel.run(session_id, spec)
    assert calls(tmp_path) == ["start"] * {"session": 4, "tree": 2, "node": 1}[share]


async def test_a_tree_that_has_a_removed_ones_id_has_its_own_server(dsn: str, tmp_path: Path) -> None:
    """Given a tree that was removed and is made again, then the server of the first one is not the second one's."""
    spec = agent([("test_add", {"a": 2, "b": 3})], "done", servers=[server(tmp_path, share="tree")])

    async def remove(service: NodeService) -> retention.Removed:
        return await service.journal.submit(lambda tx: retention.drop_tree(tx, "s"), "s")

    async with k.running(dsn, tmp_path) as kernel:
        await kernel.run("s", spec)
        await kernel.quiet()
        async with asyncio.timeout(60):
            while True:  # until its events are exported
                if not (await kernel.remote(remove)).kept:
                    break
                await asyncio.sleep(0.01)
        await kernel.spawn("s", spec)
        await kernel.send("s", run_id="again")
        await kernel.end("s", "again")
    assert calls(tmp_path) == ["start", "add 2 3"] * 2


async def test_a_shared_server_is_started_again_under_many_sessions(dsn: str, tmp_path: Path) -> None:
    """Given twenty sessions that are at calls of one shared server, when it is killed, then one other is started and
    all go on: calls that may be made again are, and the others are reported to the models."""
    specs = {
        f"s{number}": agent(
            [(f"test_{'look' if number % 2 else 'hold'}", {"word": f"w{number}"})], "done",
            servers=[server(tmp_path, share="node")],
        )
        for number in range(20)
    }  # fmt: skip
    async with k.running(dsn, tmp_path, frames=20) as kernel:
        for session_id, spec in specs.items():
            await kernel.spawn(session_id, spec)
            await kernel.send(session_id)
        for number in range(20):
            await until_called(tmp_path, f"{'look' if number % 2 else 'hold'} w{number}")
        os.kill(pids(tmp_path, "start")[0], signal.SIGKILL)
        (tmp_path / "go").touch()
        ended = [await kernel.end(session_id) for session_id in specs]
        results = [(await kernel.results(session_id))[0] for session_id in specs]
    assert {one["status"] for one in ended} == {"completed"}
    assert results[1::2] == [f"seen w{number}" for number in range(1, 20, 2)]
    assert all(result.startswith("interrupted: ") for result in results[::2])
    assert calls(tmp_path).count("start") == 2
    for number in range(20):
        assert calls(tmp_path).count(f"{'look' if number % 2 else 'hold'} w{number}") == 1 + number % 2
