"""The alert rules: `promtool` takes them, each fires when it should and not otherwise, and each is documented."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from understudy.observability import conventions as names
from understudy.observability.dashboards.alerts import RUNBOOK, alerts
from understudy.observability.dashboards.promql import wire

ROOT = Path(__file__).parents[2]
RULES = ROOT / "observability" / "dashboards" / "alerts.yaml"


def promtool(*arguments: str) -> str:
    """Run it, and return what it says; it must be content."""
    program = shutil.which("promtool")
    if program is None:
        assert not os.environ.get("CI"), "promtool is missing: apt-get install prometheus"
        pytest.skip("needs promtool: apt-get install prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class About(NamedTuple):
    """Whom an alert names, in these tests: its labels for that, and how its summary begins."""

    labels: dict[str, str]
    prefix: str


ABOUT = {
    "all": About({}, ""),
    "job": About({"job": "u"}, "u: "),
    "instance": About({"job": "u", "instance": "1"}, "1 of u: "),
}


class Case(NamedTuple):
    """Series as promtool takes them (a sample a minute), and whether the alert fires after so many minutes.

    `summary` is what it says then, behind whom it is about; empty: it is silent. `labels` are those that it has beside
    its severity and those of whom it is about.
    """

    why: str
    alert: str
    series: dict[str, str]
    minute: int
    summary: str = ""
    labels: dict[str, str] = {}  # noqa: RUF012 # never changed


def of(name: str, *labels: str, suffix: str = "", instance: str = "1", job: str = "u") -> str:
    """A series of a node service."""
    return series(wire(name) + suffix, *labels, instance=instance, job=job)


def series(name: str, *labels: str, instance: str = "1", job: str = "u") -> str:
    """A series of a target."""
    chosen = ",".join((f'job="{job}"', f'instance="{instance}"', *labels))
    return f"{name}{{{chosen}}}"


def there(up: str, scraped: str, instance: str = "1", job: str = "u") -> dict[str, str]:
    """A target that is a node service: whether it answers, and what it shows."""
    return {
        series("up", instance=instance, job=job): up,
        of(names.BUILD_INFO, 'version="1"', instance=instance, job=job): scraped,
    }


def nodes(serving: str, drained: str = "0x60", missing: str = "0x60", instance: str = "1") -> dict[str, str]:
    """What a node service says of the cluster's nodes."""
    states = {"serving": serving, "drained": drained, "missing": missing}
    return {of(names.NODES, f'state="{state}"', instance=instance): counts for state, counts in states.items()}


def actors(ready: str, acting: str, cap: str) -> dict[str, str]:
    """A node's ready sessions and session actors."""
    return {
        of(names.READY_SESSIONS): ready,
        of(names.FRAMES, 'state="acting"'): acting,
        of(names.FRAMES, 'state="waiting"'): "1x60",
        of(names.ACTORS_CAP): cap,
    }


def queued(fast: str, slow: str) -> dict[str, str]:
    """The buckets of runs, some begun within 10 ms, all within 82 s."""
    bounds = {"0.01": fast, "40.96": fast, "81.92": slow, "+Inf": slow}
    return {of(names.RUN_QUEUED, f'le="{bound}"', suffix="_bucket"): counts for bound, counts in bounds.items()}


def ended(completed: str, failed: str, cancelled: str = "0x90") -> dict[str, str]:
    """Runs that ended."""
    statuses = {"completed": completed, "failed": failed, "cancelled": cancelled}
    return {of(names.RUNS_FINISHED, f'status="{status}"'): counts for status, counts in statuses.items()}


def cost(series: str) -> dict[str, str]:
    """What model calls have cost, in the unit of their currency."""
    return {of(names.MODEL_COST, 'agent="a"', 'model="m"', 'currency="EUR"'): series}


def restores(fast: str, slow: str) -> dict[str, str]:
    """The buckets of recoveries, some within 60 ms, others within half a second."""
    bounds = {"0.06": fast, "0.25": fast, "0.5": slow, "+Inf": slow}
    return {of(names.RESTORE_DURATION, f'le="{bound}"', suffix="_bucket"): counts for bound, counts in bounds.items()}


def calls(ok: str, error: str, aborted: str = "0x500") -> dict[str, str]:
    """Model calls by outcome."""
    outcomes = {"ok": ok, "error": error, "aborted": aborted}
    return {of(names.MODEL_CALLS, f'outcome="{outcome}"'): counts for outcome, counts in outcomes.items()}


def books(accepted: str, finished: str, live: str, /, **carried: str) -> dict[str, str]:
    """Runs, and those that services counted which are gone."""
    found = {
        of(names.RUNS_ACCEPTED, 'agent="a"'): accepted,
        of(names.RUNS_FINISHED, 'status="completed"'): finished,
        of(names.RUNS_LIVE): live,
    }
    return found | {of(names.RUNS_CARRIED, f'state="{state}"'): counts for state, counts in carried.items()}


HEAD = of(names.HEAD_SILENCE)
SILENCE, OUTAGE = of(names.SUPERVISOR_SILENCE), of(names.STORE_OUTAGE)
CRASHES = of(names.SESSION_CRASHES, 'cause="process_died"', 'waiting="false"')
WAITING = of(names.SESSION_CRASHES, 'cause="process_died"', 'waiting="true"')
NEAR = of(names.BUDGETS_NEAR_LIMIT, 'resource="tokens"')
LAG = of(names.LAG, 'sink="spans"')
QUARANTINED = of(names.SESSIONS_QUARANTINED, 'reason="no_progress"')

CASES = [
    Case("nobody was ever there", "Gone", {"other": "0x20"}, 5,
         "No node service of any cluster has been scraped for 6h"),
    Case("nobody is there any more", "Gone", there("1x10 stale", "1x10 stale"), 380,
         "No node service of any cluster has been scraped for 6h"),
    Case("one of two is there", "Gone", there("1x500", "1x500"), 400),
    Case("it was there an hour ago: another rule says which", "Gone", there("1x10 stale", "1x10 stale"), 70),
    Case("one of two clusters is gone", "ClusterGone",
         there("1x10 stale", "1x10 stale") | there("1x60", "1x60", job="v"), 15,
         "no node service is scraped any more; 1 were within 6h"),
    Case("all of its services are down", "ClusterGone",
         there("1x10 0x20", "1x10 stale") | there("1x10 0x20", "1x10 stale", "2"), 15,
         "no node service is scraped any more; 2 were within 6h"),
    Case("one of its services is left", "ClusterGone",
         there("1x10 stale", "1x10 stale") | there("1x60", "1x60", "2"), 15),
    Case("an upgrade", "ClusterGone", there("1x10 0 1x20", "1x10 stale 1x20"), 12),
    Case("removed on purpose, hours ago", "ClusterGone", there("1x10 stale", "1x10 stale"), 380),
    Case("it does not answer", "NodeServiceDown", there("1x10 0x20", "1x10 stale") | there("1x60", "1x60", "2"), 15,
         "this node service does not answer Prometheus"),
    Case("a restart", "NodeServiceDown", there("1x10 0 1x20", "1x10 stale 1x20"), 12),
    Case("its node is gone", "NodeServiceDown", there("1x10 stale", "1x10 stale"), 15),
    Case("another target is down", "NodeServiceDown", {series("up", job="ray"): "0x60"}, 15),
    Case("one of three is not found", "NodeServicesNotScraped",
         nodes("3x60") | nodes("3x60", instance="2") | there("1x60", "1x60") | there("1x60", "1x60", "2"), 20,
         "1 node services work that Prometheus does not know of"),
    Case("a drained one is not found", "NodeServicesNotScraped", nodes("1x60", "1x60") | there("1x60", "1x60"), 20,
         "1 node services work that Prometheus does not know of"),
    Case("all are found, one is drained", "NodeServicesNotScraped",
         nodes("1x60", "1x60") | there("1x60", "1x60") | there("1x60", "1x60", "2"), 20),
    Case("one is found, and down", "NodeServicesNotScraped",
         nodes("2x60") | there("1x60", "1x60") | there("1x10 0x50", "1x10 stale", "2"), 30),
    Case("one is only just joining", "NodeServicesNotScraped",
         nodes("1x10 2x50") | there("1x60", "1x60") | there("_x15 1x45", "_x15 1x45", "2"), 18),
    Case("a machine is lost", "NodesMissing", nodes("3x10 2x50", missing="0x10 1x50"), 20,
         "1 nodes are gone that were not drained, and no others have come in their place"),
    Case("another one comes", "NodesMissing", nodes("3x10 2x3 3x40", missing="0x10 1x3 0x40"), 20),
    Case("it was drained", "NodesMissing", nodes("3x10 2x50", "0x10 1x10 0x40"), 30),
    Case("no answer of the head", "HeadUnreachable",
         {HEAD: "0 0 0+30x10", of(names.HEAD_SILENCE, instance="2"): "0x20"}, 6,
         "Ray's head has not answered this node service for 2m 0s"),
    Case("the head is started again", "HeadUnreachable", {HEAD: "0 0 15 45 0 0"}, 3),
    Case(
        "one service of two hears nothing", "SupervisorGone",
        {of(names.SUPERVISOR_SILENCE, instance="2"): "1x10", SILENCE: "0+60x10"}, 5,
        "this node service has not heard of the supervisor for 5m 0s",
    ),
    Case("a restart of the supervisor", "SupervisorGone", {SILENCE: "1 1 40 1 1 1"}, 2),
    Case("the store is away", "StoreUnreachable", {OUTAGE: "0 0 60 120 180"}, 4,
         "the store has not answered this node service for 3m 0s: sessions pause"),
    Case("a failover", "StoreUnreachable", {OUTAGE: "0 0 20 0 0"}, 3),
    Case("two deaths a minute", "CrashLoop", {CRASHES: "0+2x30"}, 20,
         "20 session actors died at work within 10 minutes"),
    Case("a burst that is over", "CrashLoop", {CRASHES: "0x5 16x30"}, 9),
    Case("deaths while waiting", "CrashLoop", {CRASHES: "0x30", WAITING: "0+20x30"}, 20),
    Case("one in ten takes half a second", "SlowRecovery", restores("0+9x40", "0+10x40"), 30,
         "1 in 100 crashed sessions is resumed only after 475ms"),
    Case("all within 60 ms", "SlowRecovery", restores("0+10x40", "0+10x40"), 30),
    Case("one node was lost, once", "SlowRecovery", restores("0x40", "0x10 50x30"), 18),
    Case("nobody crashed", "SlowRecovery", restores("0x40", "0x40"), 30),
    Case("a session makes no progress", "StuckSessions", {of(names.SESSIONS_STUCK): "0 1x20"}, 10,
         "1 sessions died and have made no progress since"),
    Case("one that recovers", "StuckSessions", {of(names.SESSIONS_STUCK): "0 1 1 0x20"}, 7),
    Case("one was given up", "SessionsQuarantined", {QUARANTINED: "0x5 1x20"}, 7,
         "1 sessions were given up within 15 minutes: a person has to look"),
    Case("long ago", "SessionsQuarantined", {QUARANTINED: "0x5 1x60"}, 40),
    Case("all actors at work, sessions in line", "ActorsBusy", actors("3x60", "4 3 4x58", "4x60"), 20,
         "3 sessions or more were always waiting for a session actor, all of which are at work"),
    Case("a burst", "ActorsBusy", actors("3x12 0 3x40", "4x60", "4x60"), 20),
    Case("busy, and nobody waits", "ActorsBusy", actors("0x60", "4x60", "4x60"), 20),
    Case("few actors at work", "ActorsBusy", actors("3x60", "1x60", "4x60"), 20),
    Case("no actor can be started", "ActorsLacking", actors("3x60", "1x60", "4x60"), 20,
         "3 sessions or more were always waiting for a session actor, though there may be more"),
    Case("all are at work", "ActorsLacking", actors("3x60", "4x60", "4x60"), 20),
    Case("they are being started", "ActorsLacking", actors("0x10 3x2 0x40", "1x60", "4x60"), 14),
    Case("a minute until a run begins", "RunsQueued", queued("0+9x40", "0+10x40"), 30,
         "1 in 100 runs begins only 1m 17s after its input, or later"),
    Case("all begin at once", "RunsQueued", queued("0+10x40", "0+10x40"), 30),
    Case("one long wait", "RunsQueued", queued("0x40", "0x10 1x30"), 18),
    Case("nobody reads it", "InboxOld", {of(names.INBOX_OLDEST): "0+60x90"}, 80,
         "an input has not been read for 1h 20m 0s"),
    Case("a long run before it", "InboxOld", {of(names.INBOX_OLDEST): "0+60x50 0x40"}, 49),
    Case("one in five fails", "RunsFailing", ended("0+8x90", "0+2x90"), 60, "20% of runs failed within 30 minutes"),
    Case("one in a hundred fails", "RunsFailing", ended("0+99x90", "0+1x90"), 60),
    Case("the only run fails", "RunsFailing", ended("0x90", "0x40 1x50"), 50),
    Case("many more are cancelled", "RunsFailing", ended("0+8x90", "0+2x90", "0+90x90"), 60,
         "20% of runs failed within 30 minutes"),
    Case("more than a hundred an hour", "Spending", cost("0+2x90"), 80, "model calls cost 120 within an hour"),
    Case("less", "Spending", cost("0+1x90"), 80),
    Case("a budget is nearly spent", "BudgetsNearLimit", {NEAR: "0x5 2x20"}, 15,
         "2 session trees have spent nine tenths of their budget of tokens", {"resource": "tokens"}),
    Case("its run ends", "BudgetsNearLimit", {NEAR: "0x5 2 2 0x20"}, 15),
    Case("a third fails", "ModelErrorsFast", calls("0+20x90", "0+10x90"), 80,
         "33.33% of model calls fail: a month's budget is gone in two days"),
    Case("a bad minute within a good hour", "ModelErrorsFast", calls("0+20x90", "0x85 20x5"), 88),
    Case("the only call of the hour fails", "ModelErrorsFast", calls("0x90", "0x80 1x9"), 84),
    Case("the only one of the day", "ModelErrorsSlow", calls("0x500", "0x380 1x119"), 400),
    Case("many are cancelled", "ModelErrorsFast", calls("0+20x90", "0x90", "0+90x90"), 80),
    Case("one in ten fails for hours", "ModelErrorsSlow", calls("0+18x500", "0+2x500"), 400,
         "10% of model calls fail: a month's budget is gone in five days"),
    Case("one in a hundred", "ModelErrorsSlow", calls("0+198x500", "0+2x500"), 400),
    Case("the collector refuses", "ProjectionLag", {LAG: "0+60x20"}, 15, "the sink spans is 15m 0s behind",
         {"sink": "spans"}),
    Case("a slow batch", "ProjectionLag", {LAG: "0 0 90 0 0x20"}, 6),
    Case("a run was lost", "Conservation", books("0+2x60", "0+1x60", "0+1x30 30+1x28"), 55,
         "1 runs are unaccounted for: accepted − finished − live is not 0"),
    Case("a run was counted twice", "Conservation", books("0+1x60", "0x9 11+1x50", "0x60"), 50,
         "-1 runs are unaccounted for: accepted − finished − live is not 0"),
    Case("all are accounted for", "Conservation", books("0+2x60", "0+1x60", "0+1x60"), 55),
    Case("scrapes of two moments", "Conservation", books("0+2x60", "0+2x60", "0 1 -1 1 -1 0 1 -1 1 -1 0 1 -1"), 12),
    Case("a service is gone, its runs are carried", "Conservation",
         books("5x60", "3x60", "4x60", accepted="7x60", finished="5x60"), 55),
    Case("nothing has run yet", "Conservation", {of(names.RUNS_LIVE): "0x60"}, 55),
    Case("many refused", "FencedWrites", {of(names.FENCED_WRITES): "0+2x30"}, 20,
         "20 writes of superseded activations were refused within 10 minutes"),
    Case("a few, as after any partition", "FencedWrites", {of(names.FENCED_WRITES): "0x5 3x30"}, 10),
]  # fmt: skip


def test_promtool_takes_the_rules() -> None:
    """Given the rule file, then `promtool check rules` finds as many rules as there are, and nothing wrong."""
    assert f"{len(alerts())} rules found" in promtool("check", "rules", str(RULES))


def as_promtool_test(case: Case) -> dict[str, Any]:
    name = f"Understudy{case.alert}"
    [alert] = [alert for alert in alerts() if alert.name == name]
    about = ABOUT[alert.about]
    expected = {
        "exp_labels": {**about.labels, **case.labels, "severity": alert.severity},
        "exp_annotations": {"summary": about.prefix + case.summary, "runbook_url": alert.runbook()},
    }
    return {
        "interval": "1m",
        "name": f"{case.alert}: {case.why}",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{case.minute}m", "alertname": name, "exp_alerts": [expected] if case.summary else []}
        ],
    }


@pytest.mark.thorough
@pytest.mark.parametrize("alert", [alert.name.removeprefix("Understudy") for alert in alerts()])
def test_each_rule_fires_when_it_should_and_only_then(alert: str, tmp_path: Path) -> None:
    """Given what goes wrong, then the alert fires and says what; given what only looks like it, then it is silent."""
    cases = [case for case in CASES if case.alert == alert]
    assert {bool(case.summary) for case in cases} == {True, False}
    tests = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [*map(as_promtool_test, cases)]}
    (tmp_path / "tests.yaml").write_text(json.dumps(tests, ensure_ascii=False))  # JSON is YAML
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


def test_every_case_is_of_a_rule() -> None:
    """Given the cases above, then none is of a rule that is gone."""
    assert {f"Understudy{case.alert}" for case in CASES} == {alert.name for alert in alerts()}


def test_the_file_has_what_the_code_says() -> None:
    """Given the rule file as a YAML parser reads it, then each rule has its expression, time, severity and texts."""
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    assert group["rules"] == [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.annotation, "runbook_url": alert.runbook()},
        }
        for alert in alerts()
    ]


def test_every_rule_has_its_section_and_every_section_its_rule() -> None:
    """Given docs/alerts.md, then its sections are the rules in order, and each says what it means and what to do."""
    text = (ROOT / RUNBOOK).read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert list(sections) == [alert.name for alert in alerts()]
    for name, section in sections.items():
        for part in ("**Means.**", "**Look at.**", "**Do.**"):
            assert part in section, f"{name} has no {part}"
    headings = {f"{RUNBOOK}#{heading.lower()}" for heading in sections}  # anchors as Markdown makes them
    assert {alert.runbook() for alert in alerts()} == headings
