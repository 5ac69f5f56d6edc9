"""Every query of every dashboard and rule, by a real Prometheus and PostgreSQL, after a cluster has had a bad day."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from understudy import AgentSpec, Budget, Cluster, Run, Session
from understudy.config import ModelProfile
from understudy.node.counting import LONGEST_PAUSE
from understudy.observability import conventions as names
from understudy.observability.dashboards.alerts import alerts
from understudy.observability.dashboards.indicators import CLUSTER, unaccounted
from understudy.observability.dashboards.promql import ZERO, wire
from understudy.testing.offline import Faults, OfflineServer

from .. import grafana
from ..faults import PATIENCE, call, kill, tools_of, wait_until
from ..postgres import database, free_port
from ..prometheus import Prometheus, prometheus
from .test_dashboards import BUILT, FILES

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(420)]

PRICES = {"m": {"input": "0.15", "output": "0.60"}}


NOT_TODAY = (
    "ALERTS",
    wire(names.INFERENCE_CACHED_TOKENS),
    wire(names.INFERENCE_REASONING_TOKENS),
)
"""What did not happen: no alert fired, and the offline model caches nothing and does not reason."""

GAP_SECONDS = 5.0


@dataclass
class Day:
    """A cluster that has worked, and what watched it.

    Attributes:
        lead: a session with a sub-agent, whose process was killed; it waits for a person now.
        since: when it began, seconds since 1970.
    """

    dsn: str
    prometheus: Prometheus
    lead: Session
    since: float

    def values(self, dashboard: dict[str, Any]) -> dict[str, str | list[str]]:
        """What the dashboard's variables stand for: everything, and this session."""
        found: dict[str, str | list[str]] = {name: ".*" for name in grafana.variables(dashboard)}
        return found | {"namespace": "default", "session": self.lead.id, "agents": ["lead", "helper"]}


@pytest.fixture(scope="module")
def day(ray_cluster: str, postgres_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """A session actor and the node service die at work, a model call fails, a budget ends, a tool is in doubt."""
    directory, port, since = tmp_path_factory.mktemp("day"), free_port(), time.time()
    with pytest.MonkeyPatch.context() as patch, database(postgres_server) as dsn, OfflineServer(latency=0.02) as server:
        patch.setenv("UNDERSTUDY_METRICS_PORT", str(port))
        profile = ModelProfile("day", "sk-of-the-tests", server.url, requests_per_minute=6_000)
        with Cluster.connect(dsn, profiles=[profile], prices=PRICES, max_actors=4, standby=1) as cluster:
            try:
                # Before anything happens, so that it sees counters rise.
                found = f"http://127.0.0.1:{port}/targets"
                rules = [BUILT / "alerts.yaml"]
                with prometheus(directory / "prometheus", discovery=found, rules=rules) as running:
                    running.until(lambda: "up" in running.targets().values(), "the first scrape")
                    lead = _work(cluster, server, directory)
                    _scraped(running)
                    _more_tools(cluster, directory, running)
                    yield Day(dsn, running, lead, since)
            finally:
                cluster.shutdown()


def _agent(name: str, directory: Path, **options: Any) -> AgentSpec:
    return AgentSpec(name=name, model="m", profile="day", **{"tools": tools_of(directory), **options})


def _work(cluster: Cluster, server: OfflineServer, directory: Path) -> Session:
    """All that the dashboards are about, once; returns the session that is left waiting for a person."""
    worker = cluster.spawn(_agent("worker", directory))

    # The node service dies with a model call in flight.
    server.latency = 0.5
    run = worker.send(call("look", name="across"))
    wait_until(lambda: server.stats.in_flight, "a model call")
    kill(next(service.pid for service in cluster.services() if service.role == "node"))
    _ended(run, "completed")
    server.latency = 0.02

    # A session actor dies while a tool is at work.
    tools = [*tools_of(directory), "spawn_agent", "wait", "request_user_input"]
    helper = _agent("helper", directory)
    lead = cluster.spawn(_agent("lead", directory, tools=tools, agents=[helper], budget=Budget(tokens=100_000)))
    run = lead.send(call("act", name="slow-tool"))
    effects = directory / "effects"
    wait_until(lambda: "slow-tool" in effects.read_text(), "the tool")
    kill(lead.info().actor_pid or 0)
    _ended(run, "completed")
    _ended(lead.send(call("spawn_agent", agent="helper", task="say hello")), "completed")
    _ended(lead.send(call("wait", seconds=0.1)), "completed")

    # A model call fails for good, one is retried, a budget ends.
    _ended(cluster.spawn(_agent("refused", directory, instructions="offline-policy: none")).send("go"), "failed")
    server.faults = Faults(fail_first=server.stats.requests + 1)
    _ended(worker.send("again"), "completed")
    poor = cluster.spawn(_agent("poor", directory, budget=Budget(tokens=1_500), instructions="x" * 3_000))
    _ended(poor.send(call("look", name="a")), "budget_exceeded")

    # A person answers one question, and not the other.
    question = call("request_user_input", prompt="Which?", options=["this", "that"])
    asked = lead.send(question)
    [pending] = wait_until(lambda: asked.result(PATIENCE).pending, "the question")
    lead.answer(pending.call_id, "this")
    wait_until(lambda: asked.result(PATIENCE).status == "completed", "the answer")
    lead.send(question).result(PATIENCE)
    return lead


def _more_tools(cluster: Cluster, directory: Path, running: Prometheus) -> None:
    """Tool calls of a queue's runs, between which Prometheus looks: it knows no rate of a series that it never saw
    rise, and on a busy machine whole pieces of the day can lie between two scrapes."""
    worker = cluster.spawn(_agent("worker-again", directory))
    cluster.queue("looks", concurrency=1)
    counted = "gen_ai_execute_tool_duration_seconds_count", f"{wire(names.QUEUE_WAITED)}_count"
    for name in ("once more", "and again"):
        known = [running.query(f"sum({one})") for one in counted]
        _ended(worker.send(call("look", name=name), queue="looks"), "completed")
        for asked, before in zip(counted, known, strict=True):
            running.until(lambda asked=asked, before=before: running.query(f"sum({asked})") != before, asked)
    refused = _agent("refused-again", directory, instructions="offline-policy: none")
    cluster.schedule("broken", "go", agent=refused, every=86_400).trigger()
    counts = PATIENCE + LONGEST_PAUSE  # what a busy machine counts slowly is counted seldom
    for name in (names.QUEUE_RUNS, names.TRIAGE_OPEN):  # for longer than a graph's step
        running.until(lambda name=name: running.query(f"{wire(name)} offset 2s"), name, seconds=counts)


def _ended(run: Run, status: str) -> None:
    result = run.result(PATIENCE)
    assert result.status == status, (result.status, result.error)


def _scraped(running: Prometheus) -> None:
    """Wait until Prometheus has seen the last event for longer than a graph's step: a rate takes two samples."""
    asked = f"sum({wire(names.INPUTS_REQUESTED)} offset 2s)"
    running.until(lambda: 2 in running.query(asked).values(), "the second question, two seconds ago")


def _has_data(running: Prometheus, expr: str, *, now: bool, since: float) -> bool:
    """Whether it gives a number, as Grafana would ask.

    One of this moment may come a little later: a scrape that took too long on a busy machine leaves a gap.
    """
    deadline = time.monotonic() + GAP_SECONDS
    while now:
        if any(math.isfinite(value) for value in running.query(expr).values()):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    found = running.api("query_range", query=expr, start=since, end=time.time(), step="1s")
    return any(math.isfinite(float(value)) for series in found["result"] for _, value in series["values"])


@pytest.mark.parametrize("name", FILES)
def test_every_panel_has_data(day: Day, name: str) -> None:
    """Given that day, when Prometheus and PostgreSQL get the query of each panel and variable, then each has data."""
    dashboard = json.loads((BUILT / name).read_text())
    values, empty = day.values(dashboard), []
    until = time.time_ns() + 1_000_000_000
    options = "-c default_transaction_read_only=on"
    with psycopg.connect(day.dsn, options=options, autocommit=True) as connection:
        for panel in grafana.panels(dashboard):
            for target in panel["targets"]:
                if "expr" in target:
                    expr = grafana.promql(target["expr"], values)
                    if not any(name in expr for name in NOT_TODAY):
                        expr = expr.removesuffix(ZERO)  # which would hide that nothing is there
                    answered = _has_data(day.prometheus, expr, now=target["instant"], since=day.since)
                else:
                    expr = grafana.sql(target["rawSql"], values, int(day.since * 1e9), until)
                    answered = bool(connection.execute(expr).fetchall())  # type: ignore[call-overload]
                if not answered:
                    empty.append(f"{panel['title']}: {expr}")
        for variable in grafana.variables(dashboard).values():
            if variable["type"] == "query" and "rawSql" not in variable and isinstance(variable["query"], dict):
                selector, label = grafana.label_values(variable["query"]["query"])
                if not day.prometheus.api(f"label/{label}/values", **{"match[]": grafana.promql(selector, values)}):
                    empty.append(f"variable {variable['name']}")
    for annotation in dashboard["annotations"]["list"]:
        if not _has_data(day.prometheus, grafana.promql(annotation["expr"], values), now=False, since=day.since):
            empty.append(f"annotation {annotation['name']}")
    assert not empty, "\n".join(empty)


def test_every_rule_has_data(day: Day) -> None:
    """Given that day, then each rule's expression without its threshold has a value, but for those that have one only
    when nobody is there; and Prometheus evaluates all."""
    empty = [
        alert.name
        for alert in alerts()
        for condition in alert.conditions
        # Steps of half a minute are too few on a day that lasts one.
        if not _has_data(day.prometheus, condition.expr.replace(":30s]", ":1s]"), now=True, since=day.since)
    ]
    assert empty == ["UnderstudyGone", "UnderstudyClusterGone"]
    [group] = day.prometheus.api("rules")["groups"]
    assert {rule["name"]: rule["health"] for rule in group["rules"]} == {alert.name: "ok" for alert in alerts()}


def test_no_run_was_lost(day: Day) -> None:
    """Given that day, then runs accepted, finished and live add up, in Prometheus' eyes too."""
    expr = grafana.promql(unaccounted(CLUSTER), {"job": ".*"})

    def values(expression: str) -> list[float]:
        return list(day.prometheus.query(expression).values())

    # Not at once: a scrape that took too long on a busy machine left a gap.
    day.prometheus.until(lambda: values(expr) == [0], "the books balance")
    day.prometheus.until(lambda: values(f"sum({wire(names.RUNS_FINISHED)}) >= 8") != [], "the runs that ended")
    day.prometheus.until(lambda: values(f"sum({wire(names.SESSION_CRASHES)}) >= 1") != [], "the crash")
    day.prometheus.until(lambda: values(f"sum({wire(names.RUNS_LIVE)})") == [1], "the run that waits")


def test_an_exemplar_leads_to_its_trace(day: Day) -> None:
    """Given the panels that ask for exemplars, then these have trace ids, and the store knows the run of each."""
    dashboard = json.loads((BUILT / "fleet.json").read_text())
    asking = [target for panel in grafana.panels(dashboard) for target in panel["targets"] if target.get("exemplar")]
    traces = {
        exemplar["labels"]["trace_id"]
        for target in asking
        for exemplar in day.prometheus.exemplars(grafana.promql(target["expr"], day.values(dashboard)))
    }
    with psycopg.connect(day.dsn) as connection:
        known = {row[0] for row in connection.execute("SELECT DISTINCT trace_id FROM run")}
    assert traces
    assert traces <= known
