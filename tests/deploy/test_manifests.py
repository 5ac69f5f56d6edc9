"""The Kubernetes manifests: they render, are what the schemas, the operator and we demand, and each rule bites."""

from __future__ import annotations

import ast
import copy
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import typer

from understudy.cluster.cli.main import app
from understudy.examples.survey.__main__ import app as survey

from ..manifests import kuberay, network, ours
from ..manifests.generated import PATH, SOURCE, generated
from ..manifests.objects import RENDERED, Manifest, of_kind, pods, ray_clusters, render
from ..manifests.rules import PROVIDED, check_manifests

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "k8s" / "Dockerfile").read_text()
GONE: Any = object()

if not os.environ.get("CI") and shutil.which("kubectl") is None:
    pytest.skip("kubectl is not installed", allow_module_level=True)

PRODUCTION, DEVELOPMENT, OWN, ON, COLLECTED = RENDERED[1], RENDERED[0], RENDERED[3], RENDERED[2], RENDERED[4]
HEAD = "spec.headGroupSpec.template.spec"
WORKER = "spec.workerGroupSpecs.0.template.spec"
SECURITY = "containers.0.securityContext"

Fault = tuple[str, str, str, Any, str]
"""Which manifests, which object of theirs, the path in it, the new value, and what is found then."""

BY_SCHEMAS: list[Fault] = [
    (PRODUCTION, "RayCluster", "spec.headGroupSpecs", {}, "'headGroupSpecs' was unexpected"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.minReplicas", "three", "'three' is not of type 'integer'"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.groupName", GONE, "'groupName' is a required property"),
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.ports.0.containerPort", "6379", "is not of type 'integer'"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.readinesProbe", {}, "'readinesProbe' was unexpected"),
    (PRODUCTION, "RayCluster", "spec.autoscalerOptions.version", "v3", "'v3' is not one of"),
    (OWN, "RayJob", "spec.backofLimit", 2, "'backofLimit' was unexpected"),
    (OWN, "RayJob", "spec.rayClusterSpec.rayVersion", 2.6, "is not of type 'string'"),
    (PRODUCTION, "PodMonitor", "spec.podMetricsEndpoints.0.interval", "soon", "does not match"),
    (PRODUCTION, "PrometheusRule", "spec.groups.0.rules.0.expr", GONE, "'expr' is a required property"),
    (PRODUCTION, "PodDisruptionBudget", "spec.minAvailible", 2, "minAvailible"),
    (PRODUCTION, "NetworkPolicy", "spec.egress.0.ports", [{"port": [53]}], "NetworkPolicy/understudy"),
    (DEVELOPMENT, "PersistentVolumeClaim", "spec.accessModes", "ReadWriteOnce", "is not of type 'array'"),
    (PRODUCTION, "ConfigMap", "apiVersion", "v2", "nobody knows the kind"),
    (
        PRODUCTION, "RayCluster", "spec.enableInTreeAutoscaling + spec.workerGroupSpecs.0.minReplicas", (False, GONE),
        "'minReplicas' is a required property",
    ),
]  # fmt: skip
BY_RULES: list[Fault] = [
    # What the operator says.
    (PRODUCTION, "RayCluster", "metadata.name", "u" * 54, "more than 53 characters"),
    (PRODUCTION, "RayCluster", "metadata.name", "1st", "no DNS label"),
    (OWN, "RayJob", "metadata.name", "u" * 48, "more than 47 characters"),
    (OWN, "RayJob", "spec.shutdownAfterJobFinishes", GONE, "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"),
    (ON, "RayJob", "spec.suspend", True, "suspend needs shutdownAfterJobFinishes"),
    (ON, "RayJob", "spec.suspend", True, "with a clusterSelector can't be suspended"),
    (OWN, "RayJob", "spec.ttlSecondsAfterFinished", -1, "ttlSecondsAfterFinished is negative"),
    (ON, "RayJob", "spec.clusterSelector", GONE, "neither rayClusterSpec nor clusterSelector"),
    (ON, "RayJob", "spec.clusterSelector", {"ray.io/clutser": "understudy"}, "names no ray.io/cluster"),
    (ON, "RayJob", "spec.submissionMode", "SidecarMode", "SidecarMode goes with no clusterSelector"),
    (ON, "RayJob", "spec.backoffLimit", 1, "backoffLimit goes with neither clusterSelector"),
    (OWN, "RayJob", "spec.submissionMode", "InteractiveMode", "nor InteractiveMode"),
    (OWN, "RayJob", "spec.backoffLimit", -1, "backoffLimit is negative"),
    (OWN, "RayJob", "spec.submissionMode", "SidecarMode", "SidecarMode goes with no submitterPodTemplate"),
    (OWN, "RayJob", "spec.activeDeadlineSeconds", 0, "activeDeadlineSeconds is not positive"),
    (OWN, "RayJob", "spec.rayClusterSpec.upgradeStrategy", {"type": "Recreate"}, "has no upgradeStrategy"),
    (OWN, "RayJob", "spec.submitterPodTemplate.spec.restartPolicy", "Always", "must be Never or OnFailure"),
    (PRODUCTION, "RayCluster", f"{HEAD}.restartPolicy", "Always", "restartPolicy Never: group head"),
    (PRODUCTION, "RayCluster", f"{WORKER}.restartPolicy", "OnFailure", "restartPolicy Never: group agents"),
    (
        PRODUCTION, "RayCluster", "spec.autoscalerOptions.version + spec.workerGroupSpecs.0.idleTimeoutSeconds",
        ("v1", 60), "idleTimeoutSeconds and priority need autoscaler v2",
    ),
    (
        PRODUCTION, "RayCluster", "spec.autoscalerOptions.env",
        [{"name": "KUBERAY_GEN_AUTOSCALER_START_CMD", "value": "true"}], "is the operator's",
    ),
    (
        OWN, "RayJob", "spec.submissionMode + spec.rayClusterSpec.headGroupSpec.template.spec.restartPolicy",
        ("SidecarMode", "Always"), "SidecarMode needs the head's restartPolicy Never",
    ),
    (PRODUCTION, "RayCluster", "spec.enableInTreeAutoscaling", False, "enableInTreeAutoscaling is not set"),
    (PRODUCTION, "RayCluster", "spec.autoscalerOptions.idleTimeoutSeconds", -1, "idleTimeoutSeconds is negative"),
    (
        PRODUCTION, "RayCluster", f"{HEAD}.containers.0.env.0", {"name": "RAY_enable_autoscaler_v2", "value": "1"},
        "are both set",
    ),
    (PRODUCTION, "RayCluster", f"{HEAD}.automountServiceAccountToken", False, "needs its service account's token"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.minReplicas", 11, "minReplicas 11, maxReplicas 10"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.replicas", 11, "not between"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.suspend", True, "can't be suspended"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.rayStartParams.labels", "a=b", "labels in rayStartParams"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.labels", {"a": "b c"}, "is no label"),
    (PRODUCTION, "RayCluster", "spec.headGroupSpec.resources", {"CPU": "1"}, "resources twice"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers", [], "has no container"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.command", ["sleep"], "its own command behind this one"),
    (PRODUCTION, "RayCluster", "spec.gcsFaultToleranceOptions.redisAddress", GONE, "redisAddress is missing"),
    (PRODUCTION, "RayCluster", "spec.gcsFaultToleranceOptions.backend", "rocksdb", "nothing of Redis"),
    (PRODUCTION, "RayCluster", "spec.gcsFaultToleranceOptions.storage", {"size": "1Gi"}, "the rocksdb backend's"),
    (PRODUCTION, "RayCluster", "spec.headGroupSpec.rayStartParams.redis-password", "x", "belong into gcsFault"),
    (
        DEVELOPMENT, "RayCluster", f"{HEAD}.containers.0.env", [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}],
        "RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions",
    ),
    (PRODUCTION, "RayCluster", "spec.headGroupSpec.rayStartParams.redis-username", "x", "the user's name for Redis"),
    (PRODUCTION, "RayCluster", "metadata.annotations", {"ray.io/ft-enabled": "true"}, "are both set"),
    (PRODUCTION, "RayCluster", "spec.networkPolicy", {}, "feature gate RayClusterNetworkPolicy"),
    (PRODUCTION, "RayCluster", "spec.rayVersion", "2.52.0", "speak HTTP from rayVersion 2.53"),
    # What we say: rights and resources.
    (PRODUCTION, "RayCluster", f"{HEAD}.securityContext.runAsNonRoot", False, "ray-head may run as root"),
    (PRODUCTION, "RayCluster", f"{WORKER}.{SECURITY}.runAsUser", 0, "ray-worker may run as root"),
    (PRODUCTION, "RayCluster", f"{WORKER}.{SECURITY}.capabilities", GONE, "ray-worker may get more rights"),
    (PRODUCTION, "RayCluster", f"{WORKER}.{SECURITY}.readOnlyRootFilesystem", GONE, "ray-worker may write its image"),
    (PRODUCTION, "RayCluster", f"{HEAD}.initContainers.0.securityContext", GONE, "migrate may get more rights"),
    (PRODUCTION, "RayCluster", f"{WORKER}.securityContext.seccompProfile", GONE, "no seccomp profile"),
    (PRODUCTION, "RayCluster", "spec.autoscalerOptions.securityContext", GONE, "autoscaler may get more"),
    (PRODUCTION, "RayCluster", "spec.autoscalerOptions.resources.requests", GONE, "autoscaler requests no CPU"),
    (PRODUCTION, "RayCluster", f"{WORKER}.automountServiceAccountToken", GONE, "has a token of the API server"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.volumeMounts.0", GONE, "lacks a place to write: /tmp"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.resources.requests.cpu", GONE, "requests no CPU"),
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.resources.limits", GONE, "no limit of memory"),
    (OWN, "RayJob", "spec.submitterPodTemplate.spec.containers.0.image", "understudy:0.1.0", "several images"),
    (ON, "RayJob", "spec.submitterPodTemplate.spec.containers.0.image", "understudy:latest", "say which version"),
    # Ports, probes, hooks.
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.ports.1.name", "understudy-metrics", "more than 15 characters"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.ports.1.name", "metrics", "twice"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.ports.1.containerPort", 9465, "UNDERSTUDY_METRICS_PORT 9464"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.readinessProbe.httpGet.port", "ready", "which is not there"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.readinessProbe", GONE, "whether its node service works"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.lifecycle", GONE, "not drained before it ends"),
    (PRODUCTION, "RayCluster", f"{WORKER}.terminationGracePeriodSeconds", GONE, "killed after 30 s"),
    (PRODUCTION, "RayCluster", f"{WORKER}.terminationGracePeriodSeconds", 545, "killed after 545 s"),
    # What refers to something.
    (PRODUCTION, "ConfigMap", "metadata.name", "settings", "there is no ConfigMap understudy"),
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.env.0.valueFrom.secretKeyRef.name", "db", "there is no Secret db"),
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.env.1.valueFrom.secretKeyRef.key", "key", "understudy has no key"),
    (
        PRODUCTION, "RayCluster", "spec.gcsFaultToleranceOptions.redisPassword.valueFrom.secretKeyRef.key", "redis",
        "Secret understudy has no redis",
    ),
    (DEVELOPMENT, "PersistentVolumeClaim", "metadata.name", "store", "no PersistentVolumeClaim understudy-store"),
    (PRODUCTION, "RayCluster", f"{WORKER}.volumes.0.name", "scratch", "there is no volume tmp"),
    (PRODUCTION, "PodMonitor", "spec.selector.matchLabels", {"app": "ray"}, "PodMonitor/understudy selects no pod"),
    (PRODUCTION, "PodMonitor", "spec.podMetricsEndpoints.0.port", "http", "no pod has a port http"),
    (PRODUCTION, "PodDisruptionBudget", "spec.selector.matchLabels", {"app": "ray"}, "workers selects no pod"),
    (PRODUCTION, "PodDisruptionBudget", "spec", {"maxUnavailable": 1}, "only a whole number in minAvailable"),
    (PRODUCTION, "PodDisruptionBudget", "spec.minAvailable", "50%", "only a whole number in minAvailable"),
    (PRODUCTION, "PodDisruptionBudget", "spec.minAvailable", 3, "no pod may ever be taken away: 3 of 3"),
    (PRODUCTION, "PodDisruptionBudget", "spec.minAvailable", 0, "all may be taken away at once"),
    (
        PRODUCTION, "RayCluster", f"{WORKER}.topologySpreadConstraints.0.labelSelector.matchLabels", {"app": "ray"},
        "not among those that are spread over",
    ),
    # The store, and secrets.
    (PRODUCTION, "RayCluster", "spec.headGroupSpec.rayStartParams.num-cpus", "1", "the supervisor may be at the head"),
    (PRODUCTION, "RayCluster", "spec.headGroupSpec.rayStartParams.num-cpus", GONE, "the supervisor may be at the head"),
    (DEVELOPMENT, "RayCluster", "spec.headGroupSpec.rayStartParams.num-cpus", "0", "the head must offer CPUs"),
    (DEVELOPMENT, "RayCluster", f"{HEAD}.containers.0.volumeMounts.2.mountPath", "/data", "is on no volume"),
    (DEVELOPMENT, "ConfigMap", "data.UNDERSTUDY_STORE", "sqlite:////tmp/store.db", "/tmp/store.db is on no volume"),
    (PRODUCTION, "ConfigMap", "data.UNDERSTUDY_STORE", "sqlite:////x.db", "nothing is ever done at a worker"),
    (PRODUCTION, "ConfigMap", "data.OPENAI_API_KEY", "sk-1", "OPENAI_API_KEY in clear"),
    (PRODUCTION, "ConfigMap", "data.OTHER", "postgresql://me:secret@host/db", "OTHER has a password in it"),
    (
        PRODUCTION, "RayCluster", f"{HEAD}.containers.0.env.1", {"name": "OPENAI_API_KEY", "value": "sk-1"},
        "OPENAI_API_KEY in clear",
    ),
    (
        PRODUCTION, "RayCluster", f"{WORKER}.containers.0.envFrom", [{"secretRef": {"name": "understudy"}}],
        "it has a secret, and tools run there",
    ),
    (
        PRODUCTION, "RayCluster", f"{WORKER}.volumes.0", {"name": "tmp", "secret": {"secretName": "understudy"}},
        "it has a secret, and tools run there",
    ),
    (
        PRODUCTION, "RayCluster", f"{WORKER}.volumes.0", {"name": "tmp", "configMap": {"name": "other"}},
        "there is no ConfigMap other",
    ),
    (OWN, "RayJob", "spec.runtimeEnvYAML", "env_vars: {OPENAI_API_KEY: sk-1}", "OPENAI_API_KEY in clear"),
    (
        PRODUCTION, "ConfigMap", "",
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"a": "b"}},
        "a Secret with its content",
    ),
    # Dashboards.
    (PRODUCTION, "ConfigMap/understudy-fleet", "metadata.labels", {}, "by the label grafana_dashboard"),
    (PRODUCTION, "ConfigMap/understudy-fleet", "data", {"fleet.json": "{"}, "is no JSON"),
    (PRODUCTION, "ConfigMap/understudy-fleet", "data", {"fleet.json": "{}"}, "no uid or no title"),
    (PRODUCTION, "ConfigMap/understudy-fleet", "data.more", "x" * 300_000, "too large for `kubectl apply`"),
    # The network: what is missing, and what is too much.
    (PRODUCTION, "NetworkPolicy/understudy", "spec.egress.1", GONE, "to the cluster's DNS, port 53, is not let"),
    (PRODUCTION, "NetworkPolicy/understudy", "spec.egress.0", GONE, "to another pod of ours, port 12345, is not let"),
    (PRODUCTION, "NetworkPolicy/understudy", "spec.ingress.1", GONE, "from Prometheus, port 9464, is not let"),
    (PRODUCTION, "NetworkPolicy/understudy", "spec.ingress.0.from", [], "from another pod of the namespace, port 6379"),
    (PRODUCTION, "NetworkPolicy/understudy", "spec.ingress.1.ports", GONE, "from Prometheus, port 8265, is let"),
    (PRODUCTION, "NetworkPolicy/understudy", "spec.policyTypes", ["Egress"], "from the internet, port 8265, is let"),
    (PRODUCTION, "NetworkPolicy/understudy-head", "spec.ingress", [], "from the operator, port 8265, is not let"),
    (PRODUCTION, "NetworkPolicy/understudy-head", "spec.egress.0.ports.1", GONE, "port 6379, is not let"),
    (PRODUCTION, "NetworkPolicy/understudy-worker", "spec.egress.0", GONE, "port 5432, is not let"),
    (PRODUCTION, "NetworkPolicy/understudy-worker", "spec.egress.1", GONE, "to the internet, port 443, is not let"),
    (PRODUCTION, "NetworkPolicy/understudy-worker", "spec.egress.1.to", GONE, "to the cloud's metadata, port 443"),
    (PRODUCTION, "NetworkPolicy/understudy-worker", "spec.egress.1.ports", GONE, "to the internet, port 22, is let"),
    # The collector.
    (COLLECTED, "NetworkPolicy/understudy-worker-collector", "spec.egress", [], "to the collector, port 4318, is not"),
    (COLLECTED, "NetworkPolicy/understudy-worker-collector", "spec.egress.0.ports", GONE, "the collector, port 22, is"),
    (COLLECTED, "NetworkPolicy/understudy-collector", "spec.ingress", [], "from a worker of ours, port 4318, is not"),
    (COLLECTED, "NetworkPolicy/understudy-collector", "spec.ingress.0.from", GONE, "from another pod of the namespace"),
    (
        COLLECTED, "NetworkPolicy/understudy-collector",
        "spec.ingress.0.from.0.podSelector.matchLabels", {"app.kubernetes.io/part-of": "understudy"},
        "from our head, port 4318, is let through",
    ),
    (COLLECTED, "NetworkPolicy/understudy-collector", "spec.egress.1", GONE, "to the internet, port 443, is not let"),
    (COLLECTED, "NetworkPolicy/understudy-collector", "spec.egress.1.to", GONE, "to the cloud's metadata, port 443"),
    (COLLECTED, "Deployment", "spec.template.metadata.labels", {"app": "other"}, "selects no pod"),
    (COLLECTED, "Deployment", "spec.template.spec.containers.0.image", "otel/collector:latest", "say which version"),
    (COLLECTED, "Deployment", "spec.template.spec.containers.0.securityContext", GONE, "collector may write its image"),
    (COLLECTED, "Deployment", "spec.template.spec.volumes.0.configMap.name", "x", "there is no ConfigMap x"),
    (COLLECTED, "Service", "spec.ports.0.targetPort", 4317, "no pod has the port 4317"),
    (COLLECTED, "Service", "spec.ports.0.port", 4317, "spans are sent to understudy-collector:4318"),
    *(
        (
            COLLECTED, "ConfigMap/understudy-collector", "data",
            {"collector.yaml": (ROOT / "k8s/components/collector/config.yaml").read_text().partition("|\n")[2].replace(
                *change
            )}, finding,
        )
        for change, finding in (
            (("[otlp]", "[otlp, jaeger]"), "pipeline traces has jaeger, which is not defined"),
            (("[memory_limiter, batch]", "[batch, memory_limiter]"), "does not begin with memory_limiter"),
            (("[health_check]", "[health]"), "extension health is not defined"),
        )
    ),
]  # fmt: skip


@cache
def rendered(name: str) -> list[Manifest]:
    """What is applied; not to be changed."""
    return render(name)


def seeded(name: str, target: str, path: str, value: Any) -> list[Manifest]:
    """The manifests with one fault: a field of an object of this kind (or `Kind/name`) set, or taken out; or several,
    joined by ` + `, where it takes more for one."""
    documents = copy.deepcopy(rendered(name))
    kind, _, wanted = target.partition("/")
    matching = [d for d in documents if d["kind"] == kind and (not wanted or d["metadata"]["name"] == wanted)]
    found = next((d for d in matching if d["metadata"]["name"] == "understudy"), matching[0])
    if not path:
        return [value if document is found else document for document in documents]
    paths = path.split(" + ")
    for one, new in zip(paths, value if len(paths) > 1 else [value], strict=True):
        *parents, last = [int(step) if step.isdecimal() else step for step in one.split(".")]
        place: Any = found
        for step in parents:
            place = place[step]
        if new is GONE:
            del place[last]
        else:
            place[last] = new
    return documents


@pytest.mark.parametrize("name", RENDERED)
def test_manifests_are_in_order(name: str) -> None:
    """What people apply renders, and nothing is found in it."""
    assert check_manifests(rendered(name), PROVIDED) == []


@pytest.mark.parametrize(("name", "target", "path", "value", "finding"), BY_SCHEMAS + BY_RULES)
def test_a_fault_is_found(name: str, target: str, path: str, value: Any, finding: str) -> None:
    """Given manifests with one fault, when they are checked, then it is found: no rule is there for show."""
    found = check_manifests(seeded(name, target, path, value), PROVIDED)
    assert [problem for problem in found if finding in problem], found


@pytest.mark.thorough
def test_every_rule_has_a_fault() -> None:
    """Each place in the rules that reports something is reached by one of the faults above."""
    modules = (kuberay, network, ours)
    places = {(module.__file__, number) for module in modules for number in reports(Path(str(module.__file__)))}
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _value: Any) -> Any:
        if frame.f_code.co_filename not in {module.__file__ for module in modules}:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for fault in BY_RULES:
            for module in (kuberay, network):
                module.findings(seeded(*fault[:4]))
            ours.findings(seeded(*fault[:4]), PROVIDED)
    finally:
        sys.settrace(before)
    assert len(places) > 60
    assert sorted(places - reached) == []


def reports(path: Path) -> Iterator[int]:
    """Lines of a module that yield something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
            yield node.lineno


def test_alerts_and_dashboards_are_those_of_everybody() -> None:
    """The alert rules are those that `understudy dashboards` writes (else: `scripts/manifests --write`), and each
    dashboard there is a ConfigMap here, unchanged."""
    assert PATH.read_text() == generated()
    maps = [document["data"] for document in of_kind(rendered(PRODUCTION), "ConfigMap")]
    shipped = {name: text for data in maps for name, text in data.items() if name.endswith(".json")}
    assert shipped == {path.name: path.read_text() for path in SOURCE.parent.glob("*.json")}


def test_manifests_are_split_as_promised() -> None:
    """Production has all that keeps work going while pods come and go, and development needs nothing from outside."""
    kinds = {name: sorted({document["kind"] for document in rendered(name)}) for name in RENDERED}
    common = ["ConfigMap", "PodMonitor", "PrometheusRule"]
    assert kinds[DEVELOPMENT] == sorted([*common, "PersistentVolumeClaim", "RayCluster"])
    assert kinds[PRODUCTION] == sorted([*common, "NetworkPolicy", "PodDisruptionBudget", "RayCluster"])
    assert kinds[COLLECTED] == sorted([*kinds[PRODUCTION], "Deployment", "Service"])
    assert kinds[OWN] == sorted([*common, "NetworkPolicy", "PodDisruptionBudget", "RayJob"])
    [(_, cluster)] = ray_clusters(rendered(PRODUCTION))
    [(_, of_job)] = ray_clusters(rendered(OWN))
    assert {**of_job, "upgradeStrategy": {"type": "Recreate"}} == cluster
    [worker] = [pod for pod in pods(rendered(PRODUCTION)) if pod.role == "worker"]
    assert worker.spec["topologySpreadConstraints"]
    assert "gcsFaultToleranceOptions" in cluster
    assert cluster["autoscalerOptions"]["version"] == "v2"


def test_versions_are_the_same_everywhere() -> None:
    """Image tag, Ray's version, Python's and the user's number: manifests and Dockerfile say the same."""
    ray = re.search(r"^ARG RAY_VERSION=(\S+)$", DOCKERFILE, re.M)
    python = re.search(r"^ARG PYTHON_VERSION=(\d+\.\d+)", DOCKERFILE, re.M)
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M)
    assert ray is not None
    assert python is not None
    assert user is not None
    for name in RENDERED:
        for _, cluster in ray_clusters(rendered(name)):
            assert cluster["rayVersion"] == ray.group(1)
        for pod in [pod for pod in pods(rendered(name)) if pod.role != "collector"]:
            security = pod.spec["securityContext"]
            assert (str(security["runAsUser"]), str(security["runAsGroup"])) == user.groups()
            images = {container["image"] for container in pod.containers() if "image" in container}
            assert images == {f"understudy:{PROJECT['project']['version']}"}
        for job in of_kind(rendered(name), "RayJob"):
            assert f"/python{python.group(1)}/" in job["spec"]["entrypoint"]
    assert f"Programming Language :: Python :: {python.group(1)}" in PROJECT["project"]["classifiers"]


def test_the_image_is_built_of_every_folder() -> None:
    """The Dockerfile copies each folder of the package, .dockerignore lets it through, and nothing else is sent."""
    folders = {path.partition("/")[0] for path in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    copied = {name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M) for name in line.split()[:-1]}
    assert allowed == copied == folders | {"pyproject.toml", "README.md", "LICENSE"}


def commands(value: Any) -> Iterator[str]:
    """All command lines of ours in some manifest."""
    if isinstance(value, dict):
        for item in value.values():
            yield from commands(item)
    elif isinstance(value, list):
        if value[:1] == ["understudy"]:
            yield shlex.join(map(str, value))
        else:
            for item in value:
                yield from commands(item)
    elif isinstance(value, str):
        yield from re.findall(r"\bunderstudy (?:up|run|drain|store|send)\b[^;&|<>()\n]*", value)
        yield from re.findall(r"\bpython -m understudy\.[^;&|<>()\n]*", value)


def test_commands_exist() -> None:
    """Each command that hooks, init containers and jobs call is one that our command line, or an example's, takes."""
    found = {line.strip() for name in RENDERED for line in commands(of_kind(rendered(name), "RayCluster", "RayJob"))}
    examples = {line for line in found if line.startswith("python -m understudy.examples.survey ")}
    assert {line.split()[1] for line in found - examples} == {"up", "drain", "store"}
    assert len(examples) == 1
    for line in found:
        skipped, program = (3, survey) if line in examples else (1, app)
        arguments = [str(ROOT) if part.startswith("/usr/local/") else part for part in shlex.split(line)[skipped:]]
        command: Any = typer.main.get_command(program)
        context = command.make_context("understudy", [*arguments], resilient_parsing=True)
        while hasattr(command, "resolve_command"):
            _, command, arguments = command.resolve_command(context, arguments)
            if hasattr(command, "resolve_command"):
                context = command.make_context(command.name, [*arguments], parent=context, resilient_parsing=True)
        command.make_context(command.name, arguments, parent=context)


def test_people_are_told_of_the_secret() -> None:
    """The documentation has people make the Secret with each key that the manifests want."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    for name, keys in PROVIDED.items():
        assert f"create secret generic {name}" in text
        for key in keys:
            assert f"--from-literal={key}=" in text
