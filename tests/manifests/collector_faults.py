"""Faults of the collector's manifests that the checks must find."""

from __future__ import annotations

from .objects import COLLECTED, GONE, KUBERNETES, Fault

WAY_IN = "NetworkPolicy/understudy-worker-collector"
POLICY = "NetworkPolicy/understudy-collector"
CONFIG = (KUBERNETES / "components" / "collector" / "config.yaml").read_text().partition("|\n")[2]


def _configured(old: str, new: str) -> dict[str, str]:
    return {"collector.yaml": CONFIG.replace(old, new)}


OF_THE_COLLECTOR: list[Fault] = [
    (COLLECTED, WAY_IN, "spec.egress", [], "to the collector, TCP port 4318, is not let"),
    (COLLECTED, WAY_IN, "spec.egress.0.ports", GONE, "to the collector, TCP port 22, is let"),
    (COLLECTED, POLICY, "spec.ingress", [], "from a worker of ours, TCP port 4318, is not let"),
    (COLLECTED, POLICY, "spec.ingress.0.from", GONE, "from another pod of the namespace, TCP port 4318, is let"),
    (
        COLLECTED, POLICY, "spec.ingress.0.from.0.podSelector.matchLabels",
        {"app.kubernetes.io/part-of": "understudy"}, "from our head, TCP port 4318, is let through",
    ),
    (COLLECTED, POLICY, "spec.egress.0", GONE, "to the cluster's DNS, UDP port 53, is not let"),
    (COLLECTED, POLICY, "spec.egress.1", GONE, "to OpenShift's DNS, UDP port 5353, is not let"),
    (COLLECTED, POLICY, "spec.egress.2", GONE, "to the internet, TCP port 443, is not let"),
    (COLLECTED, POLICY, "spec.egress.2.to", GONE, "to the cloud's metadata, TCP port 443, is let"),
    (COLLECTED, POLICY, "spec.egress.2.ports", GONE, "to the internet, TCP port 22, is let"),
    (COLLECTED, "Deployment", "spec.template.metadata.labels", {"app": "other"}, "selects no pod"),
    (COLLECTED, "Deployment", "spec.template.spec.containers.0.image", "otel/collector:latest", "say which version"),
    (COLLECTED, "Deployment", "spec.template.spec.containers.0.securityContext", GONE, "collector may write its image"),
    (COLLECTED, "Deployment", "spec.template.spec.volumes.0.configMap.name", "x", "there is no ConfigMap x"),
    (COLLECTED, "Service", "spec.ports.0.targetPort", 4317, "no pod has the port 4317"),
    (COLLECTED, "Service", "spec.ports.0.port", 4317, "spans are sent to understudy-collector:4318"),
    (
        COLLECTED, "ConfigMap/understudy-collector", "data", _configured("[otlp]", "[otlp, jaeger]"),
        "pipeline traces has jaeger, which is not defined",
    ),
    (
        COLLECTED, "ConfigMap/understudy-collector", "data",
        _configured("[memory_limiter, batch]", "[batch, memory_limiter]"), "does not begin with memory_limiter",
    ),
    (
        COLLECTED, "ConfigMap/understudy-collector", "data", _configured("[health_check]", "[health]"),
        "extension health is not defined",
    ),
]  # fmt: skip
