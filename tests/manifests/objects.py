"""Manifests as plain data: what is in them, and the pods that come of them."""

from __future__ import annotations

import copy
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

KUBERNETES = Path(__file__).parent.parent.parent / "k8s"
DEVELOPMENT, PRODUCTION, ON, OWN, COLLECTED, SHOWN = RENDERED = (
    "overlays/development",
    "overlays/production",
    "jobs/on-cluster",
    "jobs/own-cluster",
    "overlays/production+components/collector",
    "overlays/production+components/console",
)
"""What people apply: folders of `k8s`, the last ones as overlays of theirs with a component."""

GONE: Any = object()
"""Instead of a value: the field is taken out."""

Fault = tuple[str, str, str, Any, str]
"""Which manifests, which object of theirs, the path in it, the new value, and what is found then."""

RENDER_SECONDS = 60.0
TOKEN_KEY = "auth_token"
"""utils/constant.go, `RAY_AUTH_TOKEN_SECRET_KEY`."""


def render(name: str) -> list[Manifest]:
    """What `kubectl kustomize` makes of one of `RENDERED`."""
    resource, *components = [KUBERNETES / part for part in name.split("+")]
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder).resolve() if components else resource
        if components:  # kustomize takes folders elsewhere by relative paths only
            own = {
                "resources": [os.path.relpath(resource, overlay)],
                "components": [os.path.relpath(component, overlay) for component in components],
            }
            (overlay / "kustomization.yaml").write_text(yaml.safe_dump(own))
        done = subprocess.run(
            ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, timeout=RENDER_SECONDS, check=False
        )
    if done.returncode != 0:
        raise ValueError(f"{name}: {done.stderr.strip()}")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def named(document: Manifest) -> str:
    """`Kind/name`."""
    return f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"


def of_kind(documents: Iterable[Manifest], *kinds: str) -> list[Manifest]:
    """Those of some kinds."""
    return [document for document in documents if document.get("kind") in kinds]


def ray_clusters(documents: Iterable[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every specification of a Ray cluster, with the name of what holds it."""
    for document in of_kind(documents, "RayCluster", "RayJob"):
        spec = document.get("spec", {})
        inner = spec if document["kind"] == "RayCluster" else spec.get("rayClusterSpec")
        if inner is not None:
            yield named(document), inner


@dataclass(frozen=True)
class Pod:
    """Pods of one template.

    Attributes:
        owner: what makes them.
        role: `head`, `worker`, `submitter`, `collector` or `proxy`, which is before the console.
        least: how many there are at least.
        start: parameters of `ray start`.
    """

    owner: str
    role: str
    template: Manifest
    least: int = 1
    start: Manifest = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.owner} {self.role}"

    @property
    def is_ours(self) -> bool:
        """Whether it runs our image."""
        return self.role not in ("collector", "proxy")

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the template; the operator adds others."""
        return dict(self.template.get("metadata", {}).get("labels", {}))

    @property
    def spec(self) -> Manifest:
        return dict(self.template.get("spec", {}))

    def containers(self, *, with_init: bool = True) -> list[Manifest]:
        """Its containers; the first one is Ray's."""
        return [*self.spec.get("containers", []), *(self.spec.get("initContainers", []) if with_init else [])]

    def ports(self) -> dict[str, int]:
        """Its ports by name, with the one that the operator adds."""
        found = {
            port["name"]: port["containerPort"]
            for container in self.containers()
            for port in container.get("ports", [])
            if "name" in port
        }
        return {"metrics": 8080, **found} if self.role in ("head", "worker") else found


def pods(documents: Iterable[Manifest]) -> list[Pod]:
    """The pods that the operator and Kubernetes make of these."""
    listed = list(documents)
    found = []
    for owner, cluster in ray_clusters(listed):
        parameters = cluster.get("headGroupSpec", {}).get("rayStartParams") or {}
        found.append(Pod(owner, "head", _with_autoscaler(cluster), start=parameters))
        for group in cluster.get("workerGroupSpecs", []):
            template = _with_token(group.get("template", {}), cluster)
            found.append(Pod(owner, "worker", template, group.get("minReplicas", 0)))
    for job in of_kind(listed, "RayJob"):
        template = job["spec"].get("submitterPodTemplate")
        if template is not None:
            found.append(Pod(named(job), "submitter", _with_token(template, job["spec"].get("rayClusterSpec") or {})))
    for deployment in of_kind(listed, "Deployment"):
        spec = deployment["spec"]
        role = spec["template"]["spec"]["containers"][0]["name"]
        found.append(Pod(named(deployment), role, spec["template"], spec.get("replicas", 1)))
    return found


def _with_token(template: Manifest, cluster: Manifest) -> Manifest:
    """A template with what the operator adds where Ray wants a token (common/pod.go: SetContainerTokenAuthEnvVars);
    without a `secretName` the Secret is the operator's own, too."""
    options = cluster.get("authOptions") or {}
    extended = copy.deepcopy(template)
    for container in extended.get("spec", {}).get("containers", [])[:1]:
        if options.get("mode") == "token" and options.get("secretName"):
            reference = {"secretKeyRef": {"name": options["secretName"], "key": TOKEN_KEY}}
            container.setdefault("env", []).append({"name": "RAY_AUTH_TOKEN", "valueFrom": reference})
    return dict(extended)


def _with_autoscaler(cluster: Manifest) -> Manifest:
    """The head's template with what the operator adds to it: the autoscaler, of its options and the head's image, and
    the password of Redis (common/pod.go: DefaultHeadPodTemplate, mergeAutoscalerOverrides, configureRedisFT)."""
    template = _with_token(cluster.get("headGroupSpec", {}).get("template", {}), cluster)
    containers = template.get("spec", {}).get("containers", [])
    password = (cluster.get("gcsFaultToleranceOptions") or {}).get("redisPassword")
    if containers and password:
        containers[0].setdefault("env", []).append({"name": "REDIS_PASSWORD", **password})
    if containers and cluster.get("enableInTreeAutoscaling"):
        options = cluster.get("autoscalerOptions") or {}
        given = ("resources", "securityContext", "volumeMounts", "env", "envFrom", "image")
        extra = {field: options[field] for field in given if field in options}
        containers.append({"image": containers[0].get("image"), **extra, "name": "autoscaler"})
    return dict(template)


def selects(selector: Manifest | None, labels: dict[str, str]) -> bool:
    """Whether a label selector matches, of whose expressions `In` is known; an empty one matches everything."""
    wanted = (selector or {}).get("matchLabels") or {}
    expressions = (selector or {}).get("matchExpressions") or []
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"] for one in expressions
    )
