"""What dashboards and alerts share: whose series they are about, targets, and expressions used more than once."""

from __future__ import annotations

from .. import conventions as names
from .model import ORANGE, RED, YELLOW, Query
from .promql import Scope, share

FLEET = Scope(('job=~"$job"', 'instance=~"$instance"'))
CLUSTER = Scope(('job=~"$job"',))
"""For what makes sense only for all node services together."""

AGENT, MODEL = 'agent=~"$agent"', 'model=~"$model"'
"""What is chosen, of metrics of our own."""
AGENT_LABEL, MODEL_LABEL, TOOL_LABEL, ERROR_LABEL = map(
    names.prometheus_name, (names.AGENT_NAME, names.REQUEST_MODEL, names.TOOL_NAME, names.ERROR_TYPE)
)
GENAI_AGENT, GENAI_MODEL = f'{AGENT_LABEL}=~"$agent"', f'{MODEL_LABEL}=~"$model"'
"""The same of those that the GenAI conventions name: `gen_ai_…`."""
RESUMED_P50, RESUMED_P99, NODE_LOST = 0.06, 0.25, 15.0
"""Seconds that a recovery may take: half of them, 99 in 100, after the loss of a whole node."""

BUDGETS = ((RESUMED_P50, YELLOW), (RESUMED_P99, ORANGE), (NODE_LOST, RED))


def unaccounted(scope: Scope) -> str:
    """Runs accepted − finished − live, those of node services that are gone for good included: always 0."""
    live = scope.total(names.RUNS_LIVE)

    def counted(expr: str) -> str:
        return f"({expr} or {live} * 0)"  # with the labels of the others, where nothing was counted yet

    accepted = counted(scope.total(names.RUNS_ACCEPTED))
    finished = counted(scope.total(names.RUNS_FINISHED))
    accepted_before = counted(scope.total(names.RUNS_CARRIED, 'state="accepted"'))
    finished_before = counted(scope.total(names.RUNS_CARRIED, 'state="finished"'))
    return f"{accepted} + {accepted_before} - {finished} - {finished_before} - {live}"


def model_error_share(scope: Scope) -> str:
    """Of the model calls that ended by themselves, how many failed for good."""
    failed = scope.rate(names.MODEL_CALLS, 'outcome="error"')
    return share(failed, scope.rate(names.MODEL_CALLS, 'outcome!="aborted"'))


def quantiles(name: str, *matchers: str, by: str = "", shares: tuple[float, ...] = (0.5, 0.99)) -> tuple[Query, ...]:
    """A line for each quantile, and for each value of `by`; exemplars with the last."""
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Query(FLEET.quantile(at, name, *matchers, by=by), f"p{round(at * 100)}{legend}", exemplars=at == shares[-1])
        for at in shares
    )
