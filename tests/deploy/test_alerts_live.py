"""Alerts for what is gone and for what waits, by a real Prometheus, while a real cluster loses part after part."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml

from understudy.observability.dashboards.alerts import HEAD_SILENCE, LONGEST_QUEUE, OLDEST_INPUT, alerts
from understudy.testing.offline import OfflineServer

from ..cluster.test_nodes import SecondNode
from ..faults import Head, call, driver, output
from ..postgres import database
from ..prometheus import Prometheus, prometheus
from .test_alerts import RULES

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(240)]

SOONER = {
    "UnderstudyHeadUnreachable": (HEAD_SILENCE, 3),
    "UnderstudyRunsQueued": (LONGEST_QUEUE, 2),
    "UnderstudyInboxOld": (OLDEST_INPUT, 2),
}
"""Rules whose limit is a time: what it is, and what it is here."""

WORK = """
import json, os, sys, time
from understudy import AgentSpec, Cluster, tool
from understudy.config import ModelProfile

store, url, go, words = sys.argv[1:]

@tool
def act() -> str:
    while not os.path.exists(go):
        time.sleep(0.05)
    return "done"

profile = ModelProfile("p", "sk-of-the-tests", url)
nodes = []
while len(nodes) < 2:  # a client asks for new nodes twice a minute; one that connects, at once
    with Cluster.connect(store, profiles=[profile], max_actors=1, standby=0) as cluster:
        services = cluster.services()
    nodes = [service for service in services if service.role == "node" and service.address]
with Cluster.connect(store, profiles=[profile]) as cluster:
    [here] = [service.node_id for service in services if service.role == "supervisor"]
    spec = AgentSpec(name="actor", model="m", profile="p", tools=[act])
    homes = {service.node_id: [] for service in nodes}
    while min(map(len, homes.values())) < 2:  # else one that waits would go to the node that has an actor
        session = cluster.spawn(spec)
        homes[session.info().node_id].append(session)
    for session in [session for found in homes.values() for session in found]:
        session.send(words)
        session.send("hello")  # behind it
print(json.dumps({service.address.split("/")[2]: service.node_id == here for service in nodes}))
"""


def hurried(path: Path) -> Path:
    """The rules, with windows of seconds where they have minutes, and without patience."""
    found = yaml.safe_load(RULES.read_text())
    for rule in found["groups"][0]["rules"]:
        rule["for"] = "0s"
        rule["expr"] = re.sub(r"\[\d+m\]", "[3s]", rule["expr"])
        if rule["alert"] in SOONER:
            limit, sooner = SOONER[rule["alert"]]
            assert rule["expr"].endswith(f"> {limit}")
            rule["expr"] = rule["expr"].removesuffix(str(limit)) + str(sooner)
    path.write_text(json.dumps(found))  # JSON is YAML
    return path


def firing(running: Prometheus) -> set[tuple[str, str]]:
    """The alerts that fire now, each with the node service that it names; empty where it names none."""
    found = running.query('ALERTS{alertstate="firing"}')
    return {
        (dict(labels)["alertname"].removeprefix("Understudy"), dict(labels).get("instance", "")) for labels in found
    }


def wait_for(running: Prometheus, *expected: tuple[str, str]) -> None:
    """Wait until these fire."""
    running.until(lambda: set(expected) <= firing(running), f"all of {expected} fire")


def test_each_loss_is_told(postgres_server: str, tmp_path: Path) -> None:
    """Given two nodes under Prometheus, when sessions wait for actors, then it is told where; when a node, then
    the head's GCS, then everything is killed, then each loss is told, with the node services that it concerns."""
    with contextlib.ExitStack() as stack:
        dsn = stack.enter_context(database(postgres_server))
        server = stack.enter_context(OfflineServer())
        head = stack.enter_context(contextlib.closing(Head(tmp_path)))
        head.start()
        second = SecondNode(head.address)
        stack.callback(second.kill)
        go = tmp_path / "go"
        work = driver(tmp_path / "work", WORK, dsn, server.url, str(go), call("act"), environment=head.environment)
        services: dict[str, bool] = output(work)
        [here], [there] = (
            [address for address, is_here in services.items() if is_here == kind] for kind in (True, False)
        )
        rules = [hurried(tmp_path / "rules.yaml")]
        running = stack.enter_context(prometheus(tmp_path / "prometheus", targets=services, rules=rules))

        wait_for(running, *((name, node) for name in ("ActorsBusy", "InboxOld") for node in (here, there)))
        gone = {alert.name.removeprefix("Understudy") for alert in alerts()[:8]}
        assert not gone & {name for name, _ in firing(running)}
        go.touch()
        wait_for(running, ("RunsQueued", ""))
        running.until(lambda: not firing(running), "nothing fires")

        second.kill()
        wait_for(running, ("NodeServiceDown", there), ("NodesMissing", ""))
        [gcs] = [pid for pid, line in head.command_lines().items() if line[0].endswith("gcs_server")]
        os.kill(gcs, signal.SIGKILL)
        wait_for(running, ("HeadUnreachable", here))
        head.kill()
        wait_for(running, ("ClusterGone", ""), ("NodeServiceDown", here), ("NodeServiceDown", there))
