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
RENDERED = (
    "overlays/development", "overlays/production", "jobs/on-cluster", "jobs/own-cluster",
    "overlays/production+components/collector",
)  # fmt: skip
"""What people apply: folders of `k8s`, the last one an overlay of theirs with a component."""

RENDER_SECONDS = 60.0


def render(name: str) -> list[Manifest]:
    """What `kubectl kustomize` makes of one of `RENDERED`."""
    resource, *components = [KUBERNETES / part for part in name.split("+")]
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder) if components else resource
        if components:  # kustomize takes folders elsewhere by relative paths only
            own = {
                "resources": [os.path.relpath(resource, overlay.resolve())],
                "components": [os.path.relpath(component, overlay.resolve()) for component in components],
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
        role: `head`, `worker`, `submitter` or `collector`.
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
            found.append(Pod(owner, "worker", group.get("template", {}), group.get("minReplicas", 0)))
    for job in of_kind(listed, "RayJob"):
        template = job["spec"].get("submitterPodTemplate")
        if template is not None:
            found.append(Pod(named(job), "submitter", template))
    for deployment in of_kind(listed, "Deployment"):
        spec = deployment["spec"]
        found.append(Pod(named(deployment), "collector", spec["template"], spec.get("replicas", 1)))
    return found


def _with_autoscaler(cluster: Manifest) -> Manifest:
    """The head's template with what the operator adds to it: the autoscaler, of its options and the head's image, and
    the password of Redis (common/pod.go: DefaultHeadPodTemplate, mergeAutoscalerOverrides, configureRedisFT)."""
    template = copy.deepcopy(cluster.get("headGroupSpec", {}).get("template", {}))
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
    """Whether a label selector with `matchLabels` only matches; an empty one matches everything."""
    return all(labels.get(key) == value for key, value in ((selector or {}).get("matchLabels") or {}).items())
