"""The alert rules at a cluster that really has what they tell of: `python -m tests.alerts_live` says which fire, and
how soon. A phase that misses one ends the command with status 1.

Two Ray nodes of its own, PostgreSQL and a real Prometheus. The rules are those of the code, with a second where they
have a minute; only `HeadUnreachable` keeps its minute. Prometheus scrapes fixed targets, both node services.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import understudy.cluster.ray.ray_edge  # noqa: F401 - before Ray, which learns from it how to authenticate

# isort: split
import ray
import yaml

from understudy import Budget, Cluster, Session
from understudy.cluster.client import background
from understudy.errors import UnderstudyError
from understudy.observability import conventions as names
from understudy.observability.dashboards.alerts import LONGEST_QUEUE, OLDEST_INPUT, rule_file
from understudy.observability.dashboards.promql import wire

from .cluster.test_nodes import SecondNode, at
from .faults import Head, Stage, call, staged, wait_until
from .postgres import PostgresServer
from .prometheus import Prometheus, prometheus

PATIENCE = 90.0
SCRAPE = "1s"
OUTLIVES_THE_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
"""As KubeRay sets it where the head's state is in Redis."""

PRICES = {"m": {"input": "10000", "output": "10000"}}

SOONER = {"UnderstudyRunsQueued": (LONGEST_QUEUE, 2), "UnderstudyInboxOld": (OLDEST_INPUT, 5)}
"""Rules whose limit is a time: what it is, and what it is here."""

UNITS = {"h": 60, "m": 1}


def hurried(text: str) -> str:
    """A rule file with a second for each minute; its limits stay, but for those of `SOONER`."""

    def seconds(found: re.Match[str]) -> str:
        return f"{int(found[1]) * UNITS[found[2]]}s"

    rules = yaml.safe_load(text)
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = re.sub(r"\b(\d+)([hm])\b", seconds, rule["expr"]).replace(":30s]", ":1s]")
        rule["for"] = re.sub(r"(\d+)([hm])", seconds, rule["for"])
        if rule["alert"] in SOONER:
            limit, sooner = SOONER[rule["alert"]]
            assert rule["expr"].endswith(f"> {limit}")
            rule["expr"] = rule["expr"].removesuffix(str(limit)) + str(sooner)
    return json.dumps(rules)  # JSON is YAML


@dataclass
class Situation:
    """A cluster of two nodes under Prometheus.

    Attributes:
        here, there: the addresses that Prometheus scrapes: of the first node, and of the second, which will be killed.
        nodes: their ids, by address.
        missed: what was expected and never fired, behind its phase.
    """

    directory: Path
    head: Head
    second: SecondNode
    stage: Stage
    here: str
    there: str
    nodes: dict[str, str]
    running: Prometheus
    missed: list[str] = field(default_factory=list)

    def watch(self, phase: str, *expected: str, running: Prometheus | None = None) -> None:
        """Wait until all of these have fired, each once, and print when each did, and what else."""
        seen: set[tuple[str, str]] = set()
        began = time.monotonic()
        while not set(expected) <= {name for name, _ in seen}:
            if time.monotonic() - began > PATIENCE:
                self.missed += [f"{phase}: {name}" for name in sorted(set(expected) - {name for name, _ in seen})]
                return
            for name, target in sorted(firing(running or self.running) - seen):
                also = "" if name in expected else "  (not asked for)"
                print(f"{phase:9} {name:22} fires after {time.monotonic() - began:5.1f} s  {target}{also}", flush=True)
                seen.add((name, target))
            time.sleep(0.2)

    def quiet(self, *alerts: str) -> None:
        """Wait until none of these fires."""
        began = time.monotonic()
        while left := set(alerts) & {name for name, _ in firing(self.running)}:
            if time.monotonic() - began > PATIENCE:
                self.missed += [f"{name} ends" for name in sorted(left)]
                return
            time.sleep(0.2)
        print(f"{'':9} all of these ended after {time.monotonic() - began:.1f} s", flush=True)

    def at(self, address: str, count: int) -> list[Session]:
        """New sessions at home on a node."""
        return at(self.stage, self.nodes[address], count)


def firing(running: Prometheus) -> set[tuple[str, str]]:
    """The alerts that fire now, each with the node service that it names; empty where it names none."""
    found = running.query('ALERTS{alertstate="firing"}')
    labels = map(dict, found)
    return {(each["alertname"].removeprefix("Understudy"), each.get("instance", "")) for each in labels}


def waiting(now: Situation) -> None:
    """Sessions that no node has the resources for; then more at work than either node has actors."""
    lacking = [now.stage.spawn(resources={"no-such-thing": 1}) for _ in range(2)]
    for session in lacking:
        session.send("hello")
    now.watch("waiting", "ActorsLacking")
    for session in lacking:
        session.close()
    now.quiet("ActorsLacking")
    crowd = [session for address in (now.here, now.there) for session in now.at(address, 4)]
    for session in crowd:
        for number in range(16):
            session.send(call("act", name=f"{number}", seconds=1.0))
    now.watch("waiting", "ActorsBusy", "RunsQueued", "InboxOld")
    for session in crowd:
        session.close()
    now.quiet("ActorsBusy", "RunsQueued", "InboxOld")


def outcomes(now: Situation) -> None:
    """Runs that cost much, a tree that has nearly spent its budget, runs that fail."""
    rich = now.stage.spawn(tools=[], budget=Budget(tokens=20_000), parameters={"max_completion_tokens": 16})
    while next(found.spent * 10 < found.allowed * 9 for found in rich.budgets() if found.resource == "tokens"):
        assert rich.send("hello").result(PATIENCE).ok
    now.stage.server.hold()
    rich.send("hello")  # at work again
    now.watch("outcomes", "BudgetsNearLimit", "Spending")
    now.stage.server.release()
    broken = now.stage.spawn(instructions="offline-policy: none")
    for _ in range(30):
        assert broken.send("go").result(PATIENCE).status == "failed"
    now.watch("outcomes", "RunsFailing")
    now.quiet("BudgetsNearLimit", "RunsFailing")


def node(now: Situation) -> None:
    """A Prometheus that knows one of two nodes; then the other node is killed."""
    rules = [now.directory / "rules.yaml"]
    with prometheus(now.directory / "half", targets=[now.here], rules=rules, scrape=SCRAPE) as half:
        now.watch("node", "NodeServicesNotScraped", running=half)
    now.second.kill()
    now.watch("node", "NodeServiceDown", "NodesMissing")


def head(now: Situation) -> None:
    """The head's GCS is stopped, for longer than the rule waits: sessions go on, and the alert fires meanwhile."""
    [worker] = now.at(now.here, 1)
    for number in range(200):
        worker.send(call("look", name=f"{number}", seconds=0.5))
    began = len(now.stage.effects())
    wait_until(lambda: len(now.stage.effects()) > began, "a session at work", PATIENCE)  # no actor starts without it
    [gcs] = [pid for pid, line in now.head.command_lines().items() if line[0].endswith("gcs_server")]
    silence = wire(names.HEAD_SILENCE)
    print(f"{'head':9} silence before: {now.running.query(silence)}", flush=True)
    os.kill(gcs, signal.SIGSTOP)
    began, before = time.monotonic(), len(now.stage.effects())
    try:
        now.watch("head", "HeadUnreachable")
        silent = now.running.query(silence)
        print(f"{'head':9} silence after {time.monotonic() - began:.1f} s: {silent}", flush=True)
        done = len(now.stage.effects()) - before
        print(f"{'head':9} tools run by a session meanwhile: {done}", flush=True)
        if not done:
            now.missed.append("head: sessions go on")
    finally:
        os.kill(gcs, signal.SIGCONT)
    continued = time.monotonic()
    wait_until(lambda: now.running.value(f"max({silence})") == 0, "the head answers", PATIENCE)
    print(f"{'head':9} silence is 0 after {time.monotonic() - continued:.1f} s", flush=True)
    now.quiet("HeadUnreachable")
    worker.close()


def cluster(now: Situation) -> None:
    """Everything is killed; then a Prometheus that begins only now."""
    now.head.kill()
    now.second.kill()
    now.watch("cluster", "ClusterGone", "NodeServiceDown")
    rules = [now.directory / "rules.yaml"]
    targets = [now.here, now.there]
    with prometheus(now.directory / "late", targets=targets, rules=rules, scrape=SCRAPE) as late:
        now.watch("cluster", "Gone", running=late)


PHASES: dict[str, Callable[[Situation], None]] = {
    phase.__name__: phase for phase in (waiting, outcomes, node, head, cluster)
}


@contextlib.contextmanager
def situation() -> Iterator[Situation]:
    """Start all of it, and end it."""
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="understudy-alerts-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        (directory / "rules.yaml").write_text(hurried(rule_file()))
        dsn = stack.enter_context(PostgresServer()).database()
        os.environ.update(OUTLIVES_THE_HEAD)
        first = Head(directory, OUTLIVES_THE_HEAD)
        stack.callback(first.close)
        first.start()
        os.environ.update(first.environment)
        second = SecondNode(first.address)
        stack.callback(second.kill)
        stack.callback(ray.shutdown)
        opened = stack.enter_context(Cluster.connect(dsn, max_actors=1, standby=0, prices=PRICES))

        def both() -> list[tuple[str, str, int]]:
            background.wait(opened._connection.find_again())  # by itself it looks for new nodes twice a minute
            found = [service for service in opened.services() if service.role == "node" and service.address]
            return [(each.address.split("/")[2], each.node_id, each.pid) for each in found] if len(found) == 2 else []

        services = wait_until(both, "a node service on each node", PATIENCE)
        addresses = {pid in second.pids(): address for address, _, pid in services}
        nodes = {address: node_id for address, node_id, _ in services}
        stage = stack.enter_context(staged(dsn, directory / "stage"))
        rules = [directory / "rules.yaml"]
        running = stack.enter_context(prometheus(directory / "prometheus", targets=nodes, rules=rules, scrape=SCRAPE))
        wait_until(lambda: set(running.targets().values()) == {"up"}, "both are scraped")
        yield Situation(directory, first, second, stage, addresses[False], addresses[True], nodes, running)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.alerts_live", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("phases", nargs="*", metavar="PHASE", help=f"only these, in this order: {' '.join(PHASES)}")
    given = parser.parse_args()
    if unknown := set(given.phases) - set(PHASES):
        parser.error(f"no such phase: {', '.join(sorted(unknown))}")
    with situation() as now:
        for name in given.phases or PHASES:
            try:
                PHASES[name](now)
            except (AssertionError, UnderstudyError) as error:  # the others may be right
                now.missed.append(f"{name}: {error!r}")
    for missed in now.missed:
        print(f"not within {PATIENCE:g} s: {missed}")
    return 1 if now.missed else 0


if __name__ == "__main__":
    sys.exit(main())
