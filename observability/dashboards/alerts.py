"""The alert rules, as a Prometheus rule file. `docs/alerts.md` has a section for each: what it means and what to do."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

from .. import conventions as names
from .indicators import RESUMED_P99, model_error_share, unaccounted
from .promql import Scope, or_zero

GROUP = "understudy"
RUNBOOK = "docs/alerts.md"
ERROR_BUDGET = 0.01
"""Share of model calls that may fail for good; the burn alerts are multiples of it."""

LEAST_FAILED = 4
"""So few failed calls in the long window are no burn: where hardly anybody calls, one of them is all of them."""


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
    """

    name: str
    conditions: tuple[Condition, ...]
    lasting: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    any_of: bool = False

    @property
    def expr(self) -> str:
        return (" or " if self.any_of else "\nand\n").join(map(str, self.conditions))

    @property
    def runbook(self) -> str:
        """Where docs/alerts.md tells of it."""
        return f"{RUNBOOK}#{self.name.lower()}"

    def text(self) -> str:
        """The rule in YAML; texts are written as JSON, which is YAML too."""
        return (
            f"- alert: {self.name}\n"
            f"  expr: |-\n{textwrap.indent(self.expr, '    ')}\n"
            f"  for: {self.lasting}\n"
            f"  labels:\n    severity: {self.severity}\n"
            "  annotations:\n"
            f"    summary: {json.dumps(self.summary, ensure_ascii=False)}\n"
            f"    runbook_url: {self.runbook}\n"
        )


def _over(window: str) -> Scope:
    return Scope((), window, ("job",))


CLUSTER = _over("5m")


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


def alerts() -> tuple[Alert, ...]:
    """All rules."""
    deaths = _over("10m").increase(names.SESSION_CRASHES, 'waiting="false"')
    return (
        Alert(
            name="UnderstudyGone",
            conditions=(Condition(or_zero(f"count({CLUSTER.series(names.BUILD_INFO)})"), "< 1"),),
            lasting="2m",
            severity="critical",
            summary="No node service is scraped any more",
        ),
        Alert(
            name="UnderstudySupervisorGone",
            conditions=(Condition(CLUSTER.total(names.SUPERVISOR_SILENCE, function="max"), "> 30"),),
            lasting="1m",
            severity="critical",
            summary="A node service has not heard of the supervisor for {{ $value | humanizeDuration }}",
        ),
        Alert(
            name="UnderstudyStoreUnreachable",
            conditions=(Condition(CLUSTER.total(names.STORE_OUTAGE, function="max"), "> 30"),),
            lasting="1m",
            severity="critical",
            summary="The store has not answered for {{ $value | humanizeDuration }}: all sessions pause",
        ),
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
        _error_burn(
            "UnderstudyModelErrorsFast", 14.4, "5m", "1h", lasting="2m", severity="critical",
            summary="{{ $value | humanizePercentage }} of model calls fail: a month's budget is gone in two days",
        ),
        _error_burn(
            "UnderstudyModelErrorsSlow", 6, "30m", "6h", lasting="15m", severity="warning",
            summary="{{ $value | humanizePercentage }} of model calls fail: a month's budget is gone in five days",
        ),
        Alert(
            name="UnderstudyProjectionLag",
            conditions=(
                Condition(CLUSTER.total(names.LAG, by="sink", function="max"), "> 60"),
            ),
            lasting="5m",
            severity="warning",
            summary="The sink {{ $labels.sink }} is {{ $value | humanizeDuration }} behind",
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
    )  # fmt: skip


def rule_file() -> str:
    """The rule file's text."""
    rules = "".join(alert.text() for alert in alerts())
    return (
        "# Alert rules of Understudy for Prometheus; docs/alerts.md says what each means and what to do.\n"
        "# Built by `understudy dashboards`: change observability/dashboards/alerts.py instead.\n"
        f"groups:\n- name: {GROUP}\n  rules:\n{textwrap.indent(rules, '  ')}"
    )
