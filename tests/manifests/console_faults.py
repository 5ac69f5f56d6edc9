"""Faults of the console's manifests that the checks must find."""

from __future__ import annotations

from typing import Any

from .objects import GONE, KUBERNETES, SHOWN, Fault

POLICY = "NetworkPolicy/understudy-console-proxy"
WAY_IN = "NetworkPolicy/understudy-console"
INGRESS = "Ingress"
BACKEND = "spec.rules.0.http.paths.0.backend.service"
CONFIG = (KUBERNETES / "components" / "console" / "config.yaml").read_text().partition("proxy.yaml: |\n")[2]
CONTAINER = "spec.template.spec.containers.0"
HEAD = "spec.headGroupSpec.template.spec.containers.0"


def _configured(old: str, new: str) -> dict[str, Any]:
    if CONFIG.count(old) != 1:
        raise ValueError(f"{old!r} is there {CONFIG.count(old)} times")
    return {"proxy.yaml": CONFIG.replace(old, new)}


def _of_config(old: str, new: str, finding: str) -> Fault:
    return (SHOWN, "ConfigMap/understudy-console-proxy", "data", _configured(old, new), finding)


OF_THE_CONSOLE: list[Fault] = [
    (SHOWN, WAY_IN, "spec.ingress", [], "from the proxy of the console, TCP port 8484, is not let"),
    (SHOWN, WAY_IN, "spec.ingress.0.from", GONE, "from the ingress controller, TCP port 8484, is let"),
    (SHOWN, WAY_IN, "spec.ingress.0.ports", GONE, "from the proxy of the console, TCP port 8265, is let"),
    (SHOWN, POLICY, "spec.ingress", [], "from the ingress controller, TCP port 4180, is not let"),
    (SHOWN, POLICY, "spec.ingress.0.from", GONE, "from another pod of the namespace, TCP port 4180, is let"),
    (SHOWN, POLICY, "spec.egress.0", GONE, "to our head, TCP port 8484, is not let"),
    (SHOWN, POLICY, "spec.egress.0.ports", GONE, "to our head, TCP port 8265, is let"),
    (SHOWN, POLICY, "spec.egress.1", GONE, "to the cluster's DNS, UDP port 53, is not let"),
    (SHOWN, POLICY, "spec.egress.3", GONE, "to the internet, TCP port 443, is not let"),
    (SHOWN, POLICY, "spec.egress.3.to", GONE, "to the cloud's metadata, TCP port 443, is let"),
    (SHOWN, INGRESS, "spec.tls", [], "console.example.com is served without TLS"),
    (SHOWN, INGRESS, "spec.tls.0.secretName", GONE, "console.example.com is served without TLS"),
    (SHOWN, INGRESS, f"{BACKEND}.name", "understudy-other", "leads to nothing, not to the proxy"),
    (
        SHOWN, INGRESS, BACKEND, {"name": "understudy-console", "port": {"name": "console"}},
        "understudy-console leads to head, not to the proxy",
    ),
    (SHOWN, "Deployment", "spec.template.metadata.labels", {"app": "other"}, "selects no pod"),
    (SHOWN, "Deployment", f"{CONTAINER}.env.0.valueFrom.secretKeyRef.key", "x", "Secret understudy-console has no x"),
    (
        SHOWN, "Deployment", f"{CONTAINER}.env.1.valueFrom.secretKeyRef.key", "cookie-secret",
        "another secret than the console has",
    ),
    (SHOWN, "RayCluster", f"{HEAD}.env.3", GONE, "another secret than the console has"),
    (SHOWN, "RayCluster", f"{HEAD}.env.3", {"name": "UNDERSTUDY_CONSOLE_PROXY_SECRET", "value": "x"}, "in clear"),
    (SHOWN, "RayCluster", f"{HEAD}.ports.6.containerPort", 8485, "listens on 8484, which is not the head's"),
    (
        SHOWN, "RayCluster", f"{HEAD}.lifecycle.postStart.exec.command.2",
        '[ "$KUBERAY_NODE_TYPE" = redis-cleanup ] && exit 0\nunderstudy up --keep &', "no console is started behind it",
    ),
    _of_config("- name: X-Forwarded-Email", "- name: X-Forwarded-User", "does not send x-forwarded-email"),
    _of_config("X-Understudy-Proxy-Secret", "X-Other-Secret", "does not send x-understudy-proxy-secret"),
    _of_config(
        "- name: X-Forwarded-Email", "- preserveRequestValue: true\n        name: X-Forwarded-Email",
        "passes on what a browser sends as x-forwarded-email",
    ),
    _of_config("http://understudy-console:8484", "http://other:8484", "elsewhere than to the console: http://other"),
]  # fmt: skip
