"""The alert rules, as a Prometheus rule file. `docs/alerts.md` has a section for each: what it means and what to do."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

from .. import conventions as names
from .indicators import RESUMED_P99, model_error_share, unaccounted
from .promql import Scope, share

GROUP = "understudy"
RUNBOOK = "docs/alerts.md"
"""Where each rule's `runbook_url` leads, to a section of its own, unless another page is given."""

COST_PER_HOUR = 100.0
"""In the price table's currency; more than that is an alert, unless another amount is given."""

MEMORY = "6h"
"""What was scraped within this time is missed when it no longer is. What was removed on purpose is missed as well, for
no longer than that."""

HEAD_SILENCE = 60
"""Seconds without an answer of the head. A Ray of KubeRay's ends its workers after 600 s of that."""

FULL = 0.9
"""At so large a share of the cap the actors of a node are taken to be all at work: between two sessions each is free
for a moment."""

FAILED_RUNS = 0.1
LONGEST_QUEUE, OLDEST_INPUT = 60, 3600
"""Seconds that a run may wait for its start, and an item of an inbox for being read."""

ERROR_BUDGET = 0.01
"""Share of model calls that may fail for good; the burn alerts are multiples of it."""

LEAST_FAILED = 4
"""So few failed calls in the long window are no burn: where hardly anybody calls, one of them is all of them."""


ABOUT = {"job": "{{ $labels.job }}: ", "instance": "{{ $labels.instance }} of {{ $labels.job }}: ", "all": ""}


@dataclass(frozen=True)
class Condition:
    """A value and what it must not be."""

    expr: str
    compared: str

    def __str__(self) -> str:
        return f"({self.expr}) {self.compared}"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One rule.

    Attributes:
        conditions: all of them, or any if `any_of`, for as long as `lasting`.
        summary: one line; Prometheus fills in `{{ $value }}` and labels.
        about: whom it names: a cluster, which is a `job`, one node service (`instance`) of it, or neither.
    """

    name: str
    conditions: tuple[Condition, ...]
    lasting: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    any_of: bool = False
    about: Literal["job", "instance", "all"] = "job"

    @property
    def expr(self) -> str:
        return (" or " if self.any_of else "\nand\n").join(map(str, self.conditions))

    @property
    def annotation(self) -> str:
        """The summary, behind whom it is about."""
        return ABOUT[self.about] + self.summary

    def runbook(self, page: str = RUNBOOK) -> str:
        """The section of a page that tells of it."""
        return f"{page}#{self.name.lower()}"

    def text(self, page: str) -> str:
        """The rule in YAML; texts are written as JSON, which is YAML too."""
        return (
            f"- alert: {self.name}\n"
            f"  expr: |-\n{textwrap.indent(self.expr, '    ')}\n"
            f"  for: {self.lasting}\n"
            f"  labels:\n    severity: {self.severity}\n"
            "  annotations:\n"
            f"    summary: {json.dumps(self.annotation, ensure_ascii=False)}\n"
            f"    runbook_url: {self.runbook(page)}\n"
        )


def _over(window: str) -> Scope:
    return Scope((), window, ("job",))


CLUSTER = _over("5m")
SERVICES = CLUSTER.series(names.BUILD_INFO)
KNOWN = f"last_over_time({SERVICES}[{MEMORY}])"
"""The node services that were scraped of late, each with its `job` and `instance`."""


def _each(expr: str) -> str:
    """What an expression has for each node service, by labels that others have as well."""
    return f"sum by (job, instance) ({expr})"


def _error_burn(name: str, factor: float, short: str, long: str, **settings: Any) -> Alert:
    limit = f"> {factor * ERROR_BUDGET:g}"
    shares = tuple(Condition(model_error_share(_over(window)), limit) for window in (short, long))
    failed = Condition(_over(long).increase(names.MODEL_CALLS, 'outcome="error"'), f"> {LEAST_FAILED}")
    return Alert(name=name, conditions=(*shares, failed), **settings)


def _always(expr: str, window: str) -> tuple[Condition, Condition]:
    """On one side of 0 during the whole window: scrapes of several node services are not of one moment, so between them
    the sum may be off for a scrape, to either side."""
    return (
        Condition(f"min_over_time(({expr})[{window}:30s])", "> 0"),
        Condition(f"max_over_time(({expr})[{window}:30s])", "< 0"),
    )


def _gone() -> tuple[Alert, ...]:
    """What is no longer there, and what Prometheus does not see."""
    there = _each(CLUSTER.series(names.NODES, 'state!="missing"'))
    known_nodes = f"max by (job) ({there})"
    known_targets = f"count by (job) (up and on (job, instance) {KNOWN})"
    return (
        Alert(
            name="UnderstudyGone",
            conditions=(Condition(f"absent_over_time({SERVICES}[{MEMORY}])", "== 1"),),
            lasting="2m",
            severity="critical",
            about="all",
            summary=f"No node service of any cluster has been scraped for {MEMORY}",
        ),
        Alert(
            name="UnderstudyClusterGone",
            conditions=(Condition(f"count by (job) ({KNOWN}) unless on (job) {SERVICES}", "> 0"),),
            lasting="2m",
            severity="critical",
            summary=f"no node service is scraped any more; {{{{ $value }}}} were within {MEMORY}",
        ),
        Alert(
            name="UnderstudyNodeServiceDown",
            conditions=(Condition(f"up and on (job, instance) {KNOWN}", "== 0"),),
            lasting="2m",
            severity="warning",
            about="instance",
            summary="this node service does not answer Prometheus",
        ),
        Alert(
            name="UnderstudyNodeServicesNotScraped",
            conditions=(Condition(f"{known_nodes} - {known_targets}", "> 0"),),
            lasting="10m",
            severity="warning",
            summary="{{ $value }} node services work that Prometheus does not know of",
        ),
        Alert(
            name="UnderstudyNodesMissing",
            conditions=(Condition(CLUSTER.total(names.NODES, 'state="missing"', function="max"), "> 0"),),
            lasting="5m",
            severity="warning",
            summary="{{ $value }} nodes are gone that were not drained, and no others have come in their place",
        ),
        Alert(
            name="UnderstudyHeadUnreachable",
            conditions=(Condition(CLUSTER.series(names.HEAD_SILENCE), f"> {HEAD_SILENCE}"),),
            lasting="0m",
            severity="critical",
            about="instance",
            summary="Ray's head has not answered this node service for {{ $value | humanizeDuration }}",
        ),
        Alert(
            name="UnderstudySupervisorGone",
            conditions=(Condition(CLUSTER.series(names.SUPERVISOR_SILENCE), "> 30"),),
            lasting="1m",
            severity="critical",
            about="instance",
            summary="this node service has not heard of the supervisor for {{ $value | humanizeDuration }}",
        ),
        Alert(
            name="UnderstudyStoreUnreachable",
            conditions=(Condition(CLUSTER.series(names.STORE_OUTAGE), "> 30"),),
            lasting="1m",
            severity="critical",
            about="instance",
            summary="the store has not answered this node service for {{ $value | humanizeDuration }}: sessions pause",
        ),
    )


def _recovery() -> tuple[Alert, ...]:
    """Deaths, and what follows from them."""
    deaths = _over("10m").increase(names.SESSION_CRASHES, 'waiting="false"')
    return (
        Alert(
            name="UnderstudyCrashLoop",
            conditions=(Condition(deaths, "> 10"),),
            lasting="5m",
            severity="warning",
            summary="{{ $value | humanize }} session actors died at work within 10 minutes",
        ),
        Alert(
            name="UnderstudySlowRecovery",
            conditions=(Condition(CLUSTER.quantile(0.99, names.RESTORE_DURATION), f"> {RESUMED_P99:g}"),),
            lasting="10m",
            severity="warning",
            summary="1 in 100 crashed sessions is resumed only after {{ $value | humanizeDuration }}",
        ),
        Alert(
            name="UnderstudyStuckSessions",
            conditions=(Condition(CLUSTER.total(names.SESSIONS_STUCK), "> 0"),),
            lasting="5m",
            severity="warning",
            summary="{{ $value }} sessions died and have made no progress since",
        ),
        Alert(
            name="UnderstudySessionsQuarantined",
            conditions=(Condition(_over("15m").increase(names.SESSIONS_QUARANTINED), "> 0"),),
            lasting="0m",
            severity="warning",
            summary="{{ $value | humanize }} sessions were given up within 15 minutes: a person has to look",
        ),
    )


def _saturation() -> tuple[Alert, ...]:
    """Work that waits."""
    acting = CLUSTER.series(names.FRAMES, 'state="acting"')
    waiting = Condition(_each(f"min_over_time({CLUSTER.series(names.READY_SESSIONS)}[10m])"), "> 0")
    cap = _each(f"avg_over_time({CLUSTER.series(names.ACTORS_CAP)}[10m])")
    used = f"{_each(f'avg_over_time({acting}[10m])')} / {cap}"
    return (
        Alert(
            name="UnderstudyActorsBusy",
            conditions=(waiting, Condition(used, f">= {FULL}")),
            lasting="5m",
            severity="warning",
            about="instance",
            summary="{{ $value }} sessions or more were always waiting for a session actor, all of which are at work",
        ),
        Alert(
            name="UnderstudyActorsLacking",
            conditions=(waiting, Condition(used, f"< {FULL}")),
            lasting="5m",
            severity="warning",
            about="instance",
            summary="{{ $value }} sessions or more were always waiting for a session actor, though there may be more",
        ),
        Alert(
            name="UnderstudyRunsQueued",
            conditions=(Condition(CLUSTER.quantile(0.99, names.RUN_QUEUED), f"> {LONGEST_QUEUE}"),),
            lasting="10m",
            severity="warning",
            summary="1 in 100 runs begins only {{ $value | humanizeDuration }} after its input, or later",
        ),
        Alert(
            name="UnderstudyInboxOld",
            conditions=(Condition(CLUSTER.series(names.INBOX_OLDEST), f"> {OLDEST_INPUT}"),),
            lasting="5m",
            severity="info",
            about="instance",
            summary="an input has not been read for {{ $value | humanizeDuration }}",
        ),
    )


def _outcomes(cost_per_hour: float) -> tuple[Alert, ...]:
    """Runs and model calls that fail, and what they cost."""
    runs = _over("30m")
    failed = runs.increase(names.RUNS_FINISHED, 'status=~"failed|quarantined"')
    spent = _over("1h").increase(names.MODEL_COST)
    return (
        Alert(
            name="UnderstudyRunsFailing",
            conditions=(
                Condition(share(failed, runs.increase(names.RUNS_FINISHED, 'status!="cancelled"')), f"> {FAILED_RUNS}"),
                Condition(failed, f"> {LEAST_FAILED}"),
            ),
            lasting="5m",
            severity="warning",
            summary="{{ $value | humanizePercentage }} of runs failed within 30 minutes",
        ),
        _error_burn(
            "UnderstudyModelErrorsFast", 14.4, "5m", "1h", lasting="2m", severity="critical",
            summary="{{ $value | humanizePercentage }} of model calls fail: a month's budget is gone in two days",
        ),
        _error_burn(
            "UnderstudyModelErrorsSlow", 6, "30m", "6h", lasting="15m", severity="warning",
            summary="{{ $value | humanizePercentage }} of model calls fail: a month's budget is gone in five days",
        ),
        Alert(
            name="UnderstudySpending",
            conditions=(Condition(spent, f"> {cost_per_hour:g}"),),
            lasting="0m",
            severity="warning",
            summary="model calls cost {{ $value | humanize }} within an hour",
        ),
        Alert(
            name="UnderstudyBudgetsNearLimit",
            conditions=(Condition(CLUSTER.total(names.BUDGETS_NEAR_LIMIT, by="resource"), "> 0"),),
            lasting="5m",
            severity="info",
            summary="{{ $value }} session trees have spent nine tenths of their budget of {{ $labels.resource }}",
        ),
    )  # fmt: skip


def _books() -> tuple[Alert, ...]:
    """What is reported of the work, and whether it adds up."""
    return (
        Alert(
            name="UnderstudyProjectionLag",
            conditions=(Condition(CLUSTER.series(names.LAG), "> 60"),),
            lasting="5m",
            severity="warning",
            about="instance",
            summary="the sink {{ $labels.sink }} is {{ $value | humanizeDuration }} behind",
        ),
        Alert(
            name="UnderstudyConservation",
            conditions=_always(unaccounted(CLUSTER), "10m"),
            any_of=True,
            lasting="5m",
            severity="critical",
            summary="{{ $value }} runs are unaccounted for: accepted − finished − live is not 0",
        ),
        Alert(
            name="UnderstudyFencedWrites",
            conditions=(Condition(_over("10m").increase(names.FENCED_WRITES), "> 5"),),
            lasting="0m",
            severity="warning",
            summary="{{ $value | humanize }} writes of superseded activations were refused within 10 minutes",
        ),
    )


def alerts(cost_per_hour: float = COST_PER_HOUR) -> tuple[Alert, ...]:
    """All rules.

    Args:
        cost_per_hour: what model calls may cost in an hour, in the price table's currency.
    """
    return (*_gone(), *_recovery(), *_saturation(), *_outcomes(cost_per_hour), *_books())


def rule_file(page: str = RUNBOOK, cost_per_hour: float = COST_PER_HOUR) -> str:
    """The rule file's text.

    Args:
        page: URL of the page that has a section for each rule.
        cost_per_hour: as for `alerts`.
    """
    rules = "".join(alert.text(page) for alert in alerts(cost_per_hour))
    return (
        "# Alert rules of Understudy for Prometheus; docs/alerts.md says what each means and what to do.\n"
        "# Built by `understudy dashboards`: change observability/dashboards/alerts.py instead.\n"
        f"groups:\n- name: {GROUP}\n  rules:\n{textwrap.indent(rules, '  ')}"
    )
