"""The dashboard *fleet*: everything that runs, as Prometheus alone knows it."""

from __future__ import annotations

from .. import conventions as names
from .fleet_health import health, recovery, work
from .fleet_load import models, nodes, queues, store, tools
from .indicators import CLUSTER, FLEET, MODEL_LABEL
from .model import METRICS, Annotation, Dashboard, Variable
from .promql import Scope


def _variables() -> tuple[Variable, ...]:
    def values(name: str, series: str, text: str, label: str = "") -> Variable:
        query = f"label_values({series}, {label or name})"
        return Variable(name=name, label=text, kind="query", query=query, source=METRICS, every=True)

    return (
        Variable(name="metrics", label="Prometheus", kind="datasource", query="prometheus"),
        values("job", Scope().series(names.FRAMES), "Cluster (job)"),
        values("instance", CLUSTER.series(names.FRAMES), "Node service"),
        values("agent", CLUSTER.series(names.RUNS_ACCEPTED), "Agent"),
        values("model", CLUSTER.series(names.INFERENCE_DURATION, suffix="_count"), "Model", MODEL_LABEL),
    )


def fleet() -> Dashboard:
    """Everything that runs, as Prometheus knows it."""
    crashes = f"sum by (cause) (increase({FLEET.series(names.SESSION_CRASHES)}[$__rate_interval])) > 0"
    return Dashboard(
        uid="understudy-fleet",
        title="Understudy: fleet",
        description="Is it healthy, what is it doing, how does it recover, what does it cost.",
        variables=_variables(),
        rows=(health(), work(), recovery(), models(), tools(), queues(), store(), nodes()),
        annotations=(Annotation("Crashes", crashes, "crash: {{cause}}"),),
    )
