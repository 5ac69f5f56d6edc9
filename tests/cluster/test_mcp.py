"""MCP servers on Ray: a process of their own holds them, which is started on demand, and dies like others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from understudy import AgentSpec, Cluster, McpServer

from ..faults import PATIENCE, gone, kill, wait_until
from ..kernel.kernel import script
from ..mcp_calls import calls, command, pids

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(240)]


@pytest.fixture
def cluster(ray_cluster: str, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster.connect(f"sqlite:///{tmp_path}/store.db", max_actors=4, standby=1) as connected:
        yield connected
        connected.shutdown()


def test_a_tool_host_is_started_on_demand_and_calls_outlast_frames(cluster: Cluster, tmp_path: Path) -> None:
    """There is no tool host before a session has an MCP server. A call under way outlasts its frame and the node
    service; with the tool host it is lost, its servers end, and the next run has others."""

    def roles() -> dict[str, int]:
        return {service.role: service.pid for service in cluster.services()}

    replies = [("test_hold", {"word": "x"})]
    spec = AgentSpec(
        name="agent", instructions=script(replies, "done"), mcp_servers=[McpServer("test", command=command(tmp_path))]
    )
    cluster.spawn(AgentSpec(name="plain", instructions=script("done"))).send("go").result(PATIENCE)
    assert "tool_host" not in roles()

    session = cluster.spawn(spec, session_id="s")
    run = session.send("go")
    wait_until(lambda: calls(tmp_path) == ["start", "hold x"], "the call is under way")
    frame = session.info().actor_pid or 0
    kill(frame, signal.SIGKILL)
    wait_until(lambda: session.info().actor_pid not in (None, frame), "another frame has the session")
    kill(roles()["node"], signal.SIGKILL)
    (tmp_path / "go").touch()
    assert run.result(PATIENCE).text == "done"
    assert [message.text for message in session.messages() if message.role == "tool"] == ["held x"]
    assert calls(tmp_path) == ["start", "hold x"]

    (tmp_path / "go").unlink()
    run = session.send("again")
    wait_until(lambda: calls(tmp_path).count("hold x") == 2, "the call is under way")
    host, server = roles()["tool_host"], pids(tmp_path, "start")[-1]
    kill(host, signal.SIGKILL)
    assert run.result(PATIENCE).text == "done"
    assert gone(server)
    assert [message.text for message in session.messages() if message.role == "tool"][-1].startswith("interrupted: ")

    (tmp_path / "go").touch()
    assert session.send("once more").result(PATIENCE).text == "done"
    assert roles()["tool_host"] != host
    assert calls(tmp_path).count("hold x") == 3
    last = pids(tmp_path, "start")[-1]
    cluster.shutdown()
    wait_until(lambda: not psutil.pid_exists(last), "the server has ended with the cluster")
    assert os.getpid() != last
