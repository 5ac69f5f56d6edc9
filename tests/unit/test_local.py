"""The cluster in one process: what its users' tests see of it, and that nothing is left when it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec, ToolContext, tool
from understudy.cluster.client import background
from understudy.errors import (
    CannotDrain,
    ClusterUnreachable,
    DeadlineExceeded,
    InvalidInput,
    StoreOwned,
    UnderstudyError,
    UnknownSession,
)
from understudy.events import (
    ChildSpawned,
    CustomEvent,
    Event,
    ModelCallCompleted,
    ModelCallReissued,
    SessionCrashed,
    TextDelta,
    ToolCallDelta,
    ToolProgress,
)
from understudy.node.node_service import NodeService
from understudy.testing import LocalCluster

from .. import tiers

PATIENCE = 30.0
INTERRUPTED = "interrupted: the agent's process died while this tool ran; its outcome is unknown"

ALONE = """
import json, sys
from understudy import AgentSpec
from understudy.testing import LocalCluster
with LocalCluster() as cluster:
    text = cluster.spawn(AgentSpec(name="a")).send("hello").result(30, check=True).text
print(json.dumps([text, sorted({"ray", "grpc"} & set(sys.modules))]))
"""


@pytest.fixture
def effects() -> list[str]:
    """What tools did: they append to the very list that the test looks at."""
    return []


@pytest.fixture
def agent(effects: list[str]) -> AgentSpec:
    """An agent with a tool that must not be repeated."""

    @tool
    def act(name: str) -> str:
        """Act on the world, once."""
        effects.append(name)
        return f"did {name}"

    return AgentSpec(name="actor", tools=[act])


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """A cluster of the test's own."""
    with LocalCluster() as found:
        yield found


def call(tool_name: str, **arguments: Any) -> str:
    """An input that makes the offline model call a tool, then answer with its result."""
    return f"call {tool_name} {json.dumps(arguments)}"


def of_run(events: list[Event]) -> list[Event]:
    """Those that whoever follows the run `r` receives."""
    return [event for event in events if event.run_id == "r"]


def crashes(events: list[Event]) -> int:
    """How many deaths there were."""
    return sum(isinstance(event, SessionCrashed) for event in events)


def test_neither_ray_nor_a_process_is_needed() -> None:
    """Given a plain program, then a session runs, and Ray is not even imported."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert json.loads(done.stdout) == ["offline: hello", []]
    assert done.stderr == ""


def test_a_run_is_followed_with_what_it_streams(cluster: LocalCluster) -> None:
    """Given a tool that reports, then who follows its run receives the model's call as it streams and the reports; who
    asks later for the events after one that he has gets the rest of the reports."""

    @tool(on_crash="rerun")
    def count(words: str, context: ToolContext) -> str:
        """Count words."""
        for number, word in enumerate(words.split(), 1):
            context.emit("word", word)
            context.progress(number / 3)
        return "3"

    session = cluster.spawn(AgentSpec(name="counter", tools=[count]))
    events = list(session.send(call("count", words="a b c")))
    asked = [event for event in events if isinstance(event, ToolCallDelta)]
    assert {event.tool for event in asked} == {"count"}
    assert json.loads("".join(event.arguments for event in asked)) == {"words": "a b c"}
    words = [event for event in events if isinstance(event, CustomEvent)]
    assert [event.data for event in words] == ["a", "b", "c"]
    assert [event.fraction for event in events if isinstance(event, ToolProgress)][-1] == 1.0
    later = [event.data for event in session.events(words[0].seq) if isinstance(event, CustomEvent)]
    assert later == ["b", "c"]


def test_a_run_is_as_in_a_cluster(cluster: LocalCluster, agent: AgentSpec, effects: list[str]) -> None:
    """Given a session, then its runs, events, streamed text and messages are those of any cluster, and its tools are
    the test's own functions."""
    session = cluster.spawn(agent)
    assert session.send(call("act", name="x")).result(PATIENCE, check=True).text == "offline: did x"
    assert effects == ["x"]
    events = list(session.send("again"))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "offline: again"
    assert [message.role for message in session.messages()] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert {service.role for service in cluster.services()} >= {"supervisor", "node", "gateway"}
    assert cluster.model_server.stats.requests == 3
    with pytest.raises(CannotDrain):
        cluster.drain()


@pytest.mark.thorough
def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the test that docs/api.md shows, then it passes as it stands there."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [source] = [block for block in blocks if "LocalCluster" in block]
    (tmp_path / "example_of_the_docs.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("example_of_the_docs").test_a_refund_survives_any_death()


def test_events_say_who_asked() -> None:
    """Given an identity, then it is in the events of what is asked for with any handle; one with a line break is
    refused, and nothing is started."""
    with LocalCluster(identity="ann") as cluster:
        session = cluster.spawn(AgentSpec(name="clerk"))
        session.send("hello").result(PATIENCE)
        session.close("done")
        named = {event.type: event.by for event in session.events() if hasattr(event, "by")}
        assert named == {"run_accepted": "ann", "session_closed": "ann"}
    with pytest.raises(InvalidInput, match="identity"):
        LocalCluster(identity="a\nb")


@pytest.mark.sweep
def test_a_death_at_any_point_is_survived(agent: AgentSpec, effects: list[str]) -> None:
    """Given a run, when its session actor dies at any of the points that it passes, then the run completes, the model
    is asked no question twice, and the tool has had its effect once, or the model reads that nobody knows."""
    with LocalCluster() as clean:
        clean.spawn(agent, session_id="s").send(call("act", name="x")).result(PATIENCE, check=True)
        points = list(clean.points)
    assert points[0] == "s: reply to step"
    assert points.count("s: before commit") == 1
    for at in tiers.points(range(len(points))):
        effects.clear()
        with LocalCluster() as cluster:
            cluster.kill_at(at)
            session = cluster.spawn(agent, session_id="s")
            result = session.send(call("act", name="x")).result(PATIENCE, check=True)
            assert cluster.points[: at + 1] == points[: at + 1], at
            last = at == len(points) - 1  # behind the run's end: perhaps it has not died yet
            assert last or crashes(session.events()) == 1, at
            assert not [event for event in session.events() if isinstance(event, ModelCallReissued)], at
            assert cluster.model_server.stats.requests == 2, at
        assert (result.text, effects) in (
            ("offline: did x", ["x"]), (f"offline: {INTERRUPTED}", ["x"]), (f"offline: {INTERRUPTED}", []),
        ), at  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("service", ["node", "gateway"])
def test_the_death_of_a_service_at_any_point_is_survived(
    agent: AgentSpec, effects: list[str], service: str
) -> None:  # fmt: skip
    """Given a run, when a service dies at any of the points that its session actor passes, then the run completes, who
    follows it receives all once, the tool has its effect once, and no model call is lost but with the gateway."""
    with LocalCluster() as clean:
        clean.spawn(agent, session_id="s").send(call("act", name="x")).result(PATIENCE, check=True)
        points = list(clean.points)
    for at in tiers.points(range(len(points))):
        effects.clear()
        with LocalCluster() as cluster:
            cluster.kill_at(at, service=service)
            session = cluster.spawn(agent, session_id="s")
            followed = list(session.send(call("act", name="x"), run_id="r"))
            assert session.run("r").result(PATIENCE, check=True).text == "offline: did x", at
            assert effects == ["x"], at
            events = session.events()
            assert [event for event in followed if event.seq] == of_run(events), at
            assert crashes(events) == 0, at
            assert cluster.points[: at + 1] == points[: at + 1], at
            again = sum(isinstance(event, ModelCallReissued) for event in events)
            assert again == 0 or service == "gateway", at
            assert 2 <= cluster.model_server.stats.requests <= 2 + again, at


@pytest.mark.parametrize(("service", "requests"), [("node", 1), ("gateway", 2)])
def test_a_service_dies_during_a_model_call(cluster: LocalCluster, service: str, requests: int) -> None:
    """Given a model call, when the node service dies, then the next one gets its answer of the gateway; when that dies,
    then the call is made again. Either way it has one answer, and the session stays in its actor."""
    server = cluster.model_server
    server.hold()
    session = cluster.spawn(AgentSpec(name="a"))
    run = session.send("hello")
    server.wait(lambda stats: stats.requests == 1)
    cluster.kill_service(service)
    server.wait(lambda stats: stats.requests == requests)
    server.release()
    assert run.result(PATIENCE, check=True).text == "offline: hello"
    events = session.events()
    assert server.stats.requests == requests
    assert sum(isinstance(event, ModelCallReissued) for event in events) == requests - 1
    assert (sum(isinstance(event, ModelCallCompleted) for event in events), crashes(events)) == (1, 0)


@pytest.mark.parametrize("services", [("node",), ("gateway",), ("gateway", "node"), ("node", "node", "node")])
def test_services_die_during_a_tool(cluster: LocalCluster, services: tuple[str, ...]) -> None:
    """Given a tool at work, when services die, then it goes on, its result gets to the next ones, and it is not
    repeated; these have the credentials."""
    began, go_on, times = threading.Event(), threading.Event(), list[int]()

    @tool
    def act() -> str:
        """Act on the world, once."""
        times.append(1)
        began.set()
        go_on.wait(PATIENCE)
        return "done"

    session = cluster.spawn(AgentSpec(name="a", tools=[act]))
    run = session.send("call act {}")
    assert began.wait(PATIENCE)
    for service in services:
        cluster.kill_service(service)
    assert session.info().status == "running"  # answered by the next node service
    go_on.set()
    assert run.result(PATIENCE, check=True).text == "offline: done"
    assert (len(times), crashes(session.events()), cluster.model_server.stats.requests) == (1, 0, 2)


def test_services_die_again_and_again(tmp_path: Path, agent: AgentSpec, effects: list[str]) -> None:
    """Given a cluster whose services die between its runs and within them, then each run ends right, nothing of the
    dead is left open, and closing it ends what there is."""
    path, tasks = tmp_path / "store.db", asyncio.all_tasks(background.loop())

    def opened() -> int:
        return sum(Path(found).name.startswith(path.name) for found in files())

    with LocalCluster(f"sqlite:///{path}") as cluster:
        session = cluster.spawn(agent)
        for number in range(6):
            run = session.send(call("act", name=f"{number}"))
            cluster.kill_service("node" if number % 2 else "gateway")
            assert run.result(PATIENCE, check=True).text == f"offline: did {number}"
        assert effects == [f"{number}" for number in range(6)]
        until = time.monotonic() + PATIENCE
        while opened() > 3 * 3 and time.monotonic() < until:  # what is dead closes its files beside the run
            time.sleep(0.02)
        assert opened() <= 3 * 3  # three connections, of three files each
    assert (opened(), of_local_clusters()) == (0, [])
    assert asyncio.all_tasks(background.loop()) <= tasks
    with pytest.raises(ClusterUnreachable, match="was closed"):
        cluster.kill_service("node")


def test_a_node_service_dies_while_it_starts(
    cluster: LocalCluster, agent: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a node service that is killed at the end of its start, then the next one starts, and answers."""
    start, deaths = NodeService.start, list[NodeService]()

    async def start_and_die(service: NodeService) -> None:
        await start(service)
        if not deaths:
            deaths.append(service)
            cluster._local._node.kill()

    monkeypatch.setattr(NodeService, "start", start_and_die)
    cluster.kill_service("node")
    assert cluster.spawn(agent).send("hello").result(PATIENCE, check=True).text == "offline: hello"
    assert len(deaths) == 1


def files() -> list[str]:
    """What this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


@pytest.mark.parametrize("role", ["supervisor", "frame", ""])
def test_who_can_not_be_killed(cluster: LocalCluster, role: str) -> None:
    """Given what is no service that can be killed, then that is said."""
    with pytest.raises(InvalidInput, match="node, gateway"):
        cluster.kill_service(role)
    with pytest.raises(InvalidInput, match="node, gateway"):
        cluster.kill_at(0, service=role)


@pytest.mark.parametrize("before", [(), ("node",)])
def test_who_is_killed_by_name(cluster: LocalCluster, before: tuple[str, ...]) -> None:
    """Given a session whose tool waits, when its actor is killed, also under a node service that it has not called yet,
    then it goes on in another; one with nothing to do is in none."""
    began = threading.Event()

    @tool(on_crash="rerun")
    async def look(times: list[int] = []) -> str:  # noqa: B006 # kept from one execution to the next
        """Look."""
        times.append(1)
        if len(times) == 1:
            began.set()
            await asyncio.Event().wait()
        return f"looked {len(times)} times"

    session = cluster.spawn(AgentSpec(name="a", tools=[look]))
    run = session.send("call look {}")
    assert began.wait(PATIENCE)
    for service in before:
        cluster.kill_service(service)
    assert cluster.kill(session)
    assert run.result(PATIENCE, check=True).text == "offline: looked 2 times"
    assert crashes(session.events()) == 1
    assert not cluster.kill(session)
    with pytest.raises(UnknownSession):
        cluster.kill("nobody")
    with pytest.raises(InvalidInput, match="have passed"):
        cluster.kill_at(0)


def test_a_tool_that_is_named_like_one_of_the_loop(cluster: LocalCluster) -> None:
    """Given a function of the user's named `spawn_agent`, then that is called, and no sub-agent is created."""
    tasks = list[str]()

    @tool(name="spawn_agent")
    def act(task: str) -> str:
        """Not what the built-in tool of this name does."""
        tasks.append(task)
        return "mine"

    session = cluster.spawn(AgentSpec(name="a", tools=[act]))
    assert session.send('call spawn_agent {"task": "go"}').result(PATIENCE, check=True).text == "offline: mine"
    assert (tasks, session.children()) == (["go"], [])


def test_sub_agents_and_questions(cluster: LocalCluster) -> None:
    """Given an agent that spawns another, which asks a person, then both are there, and the answer lets both go on."""
    asks = [{"tool_calls": [["request_user_input", {"prompt": "which?"}]]}, {"text": "done"}]
    child = AgentSpec(name="child", instructions=f"offline-script: {json.dumps(asks)}", tools=["request_user_input"])
    spawns = [{"tool_calls": [["spawn_agent", {"agent": "child", "task": "go"}]]}, {"text": "all done"}]
    lead = AgentSpec(
        name="lead", instructions=f"offline-script: {json.dumps(spawns)}", tools=["spawn_agent"], agents=[child]
    )
    session = cluster.spawn(lead)
    run = session.send("go")
    asked = next(event for event in run if isinstance(event, ChildSpawned))
    below = cluster.session(asked.child_id)
    result = below.run(below.runs()[0].run_id).result(PATIENCE)
    assert result.status == "waiting_for_input"
    assert below.answer(result.pending[0].call_id, "the red one")
    assert run.result(PATIENCE, check=True).text == "all done"
    assert [(info.id, info.parent_id) for info in session.tree()] == [(session.id, None), (below.id, session.id)]


def test_a_store_that_is_given_is_kept(agent: AgentSpec, tmp_path: Path) -> None:
    """Given a store, when a cluster on it is closed and another begins, then its sessions go on."""
    store = f"sqlite:///{tmp_path}/store.db"
    with LocalCluster(store) as first:
        assert first.spawn(agent, session_id="s").send("one", run_id="one").result(PATIENCE).ok
    with LocalCluster(store) as second:
        session = second.session("s")
        assert session.run("one").result(PATIENCE).text == "offline: one"
        assert session.send("two").result(PATIENCE).text == "offline: two"
        assert "a function of another cluster" in session.send(call("act", name="x")).result(PATIENCE).text


def test_a_tool_may_use_the_cluster(cluster: LocalCluster) -> None:
    """Given an asynchronous tool that asks the cluster itself, as one can in a process of its own, then it is
    answered."""

    @tool
    async def count() -> str:
        """Count the sessions."""
        return f"{len(cluster.sessions())} sessions"

    assert (
        cluster.spawn(AgentSpec(name="a", tools=[count])).send("call count {}").result(PATIENCE).text
        == "offline: 1 sessions"
    )


def test_a_tool_that_blocks_does_not_keep_its_caller_waiting(cluster: LocalCluster) -> None:
    """Given an asynchronous tool that blocks the services, then whoever waits for its run gets his time-out."""
    go_on = threading.Event()

    @tool
    async def block() -> str:
        """Block."""
        go_on.wait(PATIENCE)
        return "done"

    run = cluster.spawn(AgentSpec(name="a", tools=[block])).send("call block {}")
    with pytest.raises(DeadlineExceeded):
        run.result(0.5)
    go_on.set()
    assert run.result(PATIENCE).ok


def test_a_tool_that_swallows_its_end_delays_nobody(cluster: LocalCluster) -> None:
    """Given a tool that does not end when it is cancelled, when its session actor is killed, then the session goes on
    beside it, and closing the cluster ends it."""
    began, ended = threading.Event(), threading.Event()

    @tool(on_crash="rerun")
    async def look(times: list[int] = []) -> str:  # noqa: B006 # kept from one execution to the next
        """Look."""
        times.append(1)
        if len(times) == 1:
            began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()
        return "looked"

    run = cluster.spawn(AgentSpec(name="a", tools=[look])).send("call look {}")
    assert began.wait(PATIENCE)
    cluster.kill(run.session_id)
    assert run.result(PATIENCE, check=True).text == "offline: looked"
    assert not ended.is_set()
    cluster.close()
    assert ended.is_set()


def test_what_is_closed_takes_no_work(tmp_path: Path, agent: AgentSpec) -> None:
    """Given a cluster that was closed, then it says so to whoever goes on; to close it again does nothing."""
    cluster = LocalCluster(f"sqlite:///{tmp_path}/store.db")
    session = cluster.spawn(agent)
    cluster.close()
    for use in (lambda: session.send("hello"), lambda: cluster.spawn(agent), cluster.sessions, session.info):
        with pytest.raises(ClusterUnreachable, match="was closed"):
            use()
    cluster.close()
    cluster.shutdown()


@pytest.mark.parametrize("wrong", [{"max_actors": 0}, {"standby": -1}, {"prices": "/nowhere.json"}])
def test_what_can_not_be_set(wrong: dict[str, Any]) -> None:
    """Given a setting that can't be used, then that is said, and nothing is left."""
    with pytest.raises(UnderstudyError):
        LocalCluster(**wrong)
    assert not of_local_clusters()


@pytest.mark.thorough
def test_a_store_has_one_cluster(tmp_path: Path, agent: AgentSpec) -> None:
    """Given a cluster on a store, then another one is refused, and the first goes on; once it is closed, its store is
    free at once."""
    store = f"sqlite:///{tmp_path}/store.db"
    with LocalCluster(store) as first:
        session = first.spawn(agent, session_id="s")
        with pytest.raises(StoreOwned):
            LocalCluster(store)
        assert session.send("hello").result(PATIENCE).ok
    with LocalCluster(store) as second:
        assert second.session("s").send("again").result(PATIENCE).ok


def of_local_clusters() -> list[str]:
    """Threads of local clusters."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("understudy-local")]


def test_the_process_stays_as_it_is(agent: AgentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a test that changes its environment between two runs, then the second one's tools see that, and the test
    finds it as it left it; when the cluster is closed, nothing of it is left on the event loop."""
    before = asyncio.all_tasks(background.loop())

    @tool
    def show() -> str:
        """Show a variable."""
        return os.environ.get("SHOWN", "nothing")

    with LocalCluster() as cluster:
        spec = AgentSpec(name="a", tools=[show])
        assert cluster.spawn(spec).send("call show {}").result(PATIENCE).text == "offline: nothing"
        monkeypatch.setenv("SHOWN", "something")
        assert cluster.spawn(spec).send("call show {}").result(PATIENCE).text == "offline: something"
    assert os.environ["SHOWN"] == "something"
    assert not of_local_clusters()
    assert asyncio.all_tasks(background.loop()) <= before
