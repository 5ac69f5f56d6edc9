"""The dashboard *fleet*: everything that runs, as Prometheus alone knows it."""

from __future__ import annotations

from .. import conventions as names
from . import pending
from .fleet_health import health, recovery, work
from .fleet_load import models, nodes, store, tools
from .indicators import FLEET
from .model import METRICS, Annotation, Dashboard, Variable
from .promql import wire


def _variables() -> tuple[Variable, ...]:
    def values(label: str, name: str, matchers: str, text: str) -> Variable:
        query = f"label_values({wire(name)}{matchers}, {label})"
        return Variable(name=label, label=text, kind="query", query=query, source=METRICS, every=True)

    return (
        Variable(name="metrics", label="Prometheus", kind="datasource", query="prometheus"),
        values("job", pending.FRAMES, "", "Cluster (job)"),
        values("instance", pending.FRAMES, '{job=~"$job"}', "Node service"),
        values("agent", names.RUNS_ACCEPTED, '{job=~"$job"}', "Agent"),
        values("model", names.INFERENCE_DURATION, '{job=~"$job"}', "Model"),
    )


def fleet() -> Dashboard:
    """Everything that runs, as Prometheus knows it."""
    crashes = f"sum by (cause) (increase({FLEET.series(names.SESSION_CRASHES)}[$__rate_interval])) > 0"
    return Dashboard(
        uid="understudy-fleet",
        title="Understudy: fleet",
        description="Is it healthy, what is it doing, how does it recover, what does it cost.",
        variables=_variables(),
        rows=(health(), work(), recovery(), models(), tools(), store(), nodes()),
        annotations=(Annotation("Crashes", crashes, "crash: {{cause}}"),),
    )
