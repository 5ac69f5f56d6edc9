"""What KubeRay refuses, or does not do, that no schema says. Names of functions are those of its source, v1.6.0 and
v1.7.0: `ray-operator/controllers/ray/utils/validation.go`, unless another file is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from .objects import Manifest, named, of_kind, ray_clusters

MAX_CLUSTER_NAME, MAX_JOB_NAME = 53, 47
"""utils/constant.go, `MaxRayClusterNameLength`, `MaxRayJobNameLength`."""

DNS1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"(|[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)")
RAY_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
V2_VARIABLE = "RAY_enable_autoscaler_v2"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Ray's autoscaler looks for `token` and `ca.crt` (ray/autoscaler/_private/kuberay/node_provider.py)."""

NODE_TYPE = "metadata.labels['ray.io/node-type']"
SKIPS = re.compile(r'\[ "\$KUBERAY_NODE_TYPE" = redis-cleanup \] (\|\| exec |&& exit 0\n)')

Check = Callable[[Manifest], Iterator[str]]


def findings(documents: list[Manifest]) -> list[str]:
    """What the operator would refuse, or what would not work with it."""
    found = []
    for document in of_kind(documents, "RayCluster", "RayJob"):
        found += [f"{named(document)}: {problem}" for problem in metadata(document)]
    for job in of_kind(documents, "RayJob"):
        for check in JOB_CHECKS:
            found += [f"{named(job)}: {problem}" for problem in check(job)]
    for owner, cluster in ray_clusters(documents):
        for check in CLUSTER_CHECKS:
            found += [f"{owner}: {problem}" for problem in check(cluster)]
    for document in of_kind(documents, "RayCluster", "RayJob"):
        found += [f"{named(document)}: {problem}" for problem in annotations(document)]
    return found


def metadata(document: Manifest) -> Iterator[str]:
    """ValidateRayClusterMetadata, ValidateRayJobMetadata."""
    name = document["metadata"].get("name", "")
    longest = MAX_CLUSTER_NAME if document["kind"] == "RayCluster" else MAX_JOB_NAME
    if len(name) > longest:
        yield f"the name has more than {longest} characters"
    if not DNS1035.fullmatch(name):
        yield "the name is no DNS label that begins with a letter"


def job_spec(job: Manifest) -> Iterator[str]:
    """ValidateRayJobSpec: what is said of its life."""
    spec = job["spec"]
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield "suspend needs shutdownAfterJobFinishes"
    if spec.get("ttlSecondsAfterFinished", 0) < 0:
        yield "ttlSecondsAfterFinished is negative"
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not spec.get("shutdownAfterJobFinishes"):
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"  # validateDeletionConfiguration
    if spec.get("backoffLimit", 0) < 0:
        yield "backoffLimit is negative"
    try:
        yaml.safe_load(spec.get("runtimeEnvYAML", ""))
    except yaml.YAMLError:
        yield "runtimeEnvYAML is no YAML"
    for field in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(field, 1) <= 0:
            yield f"{field} is not positive"


def job_cluster(job: Manifest) -> Iterator[str]:
    """ValidateRayJobSpec, ValidateRayClusterUpgradeOptions: what is said of its cluster."""
    spec = job["spec"]
    selector, cluster = spec.get("clusterSelector"), spec.get("rayClusterSpec")
    if cluster is None and not selector:
        yield "neither rayClusterSpec nor clusterSelector"
    if selector is not None and not selector.get("ray.io/cluster"):
        yield "the clusterSelector names no ray.io/cluster"
    if spec.get("suspend") and selector:
        yield "a job with a clusterSelector can't be suspended"
    if spec.get("backoffLimit") and (selector or spec.get("submissionMode") == "InteractiveMode"):
        yield "backoffLimit goes with neither clusterSelector nor InteractiveMode"
    if cluster and cluster.get("upgradeStrategy"):
        yield "a job's cluster has no upgradeStrategy"
    if cluster and (cluster.get("authOptions") or {}).get("enableK8sTokenAuth"):
        yield "a job's cluster has no enableK8sTokenAuth"


def job_submitter(job: Manifest) -> Iterator[str]:
    """ValidateRayJobSpec: what is said of what submits it."""
    spec = job["spec"]
    if spec.get("submissionMode") == "SidecarMode":
        if spec.get("clusterSelector"):
            yield "SidecarMode goes with no clusterSelector"
        if spec.get("submitterPodTemplate") or spec.get("submitterConfig"):
            yield "SidecarMode goes with no submitterPodTemplate and no submitterConfig"
        if _restart((spec.get("rayClusterSpec") or {}).get("headGroupSpec", {})) not in ("", "Never"):
            yield "SidecarMode needs the head's restartPolicy Never"
    template = spec.get("submitterPodTemplate", {}).get("spec", {})
    if template and template.get("restartPolicy") not in ("Never", "OnFailure"):
        yield "the submitter's restartPolicy must be Never or OnFailure: it is a Job's pod"  # Kubernetes: Job


def groups(cluster: Manifest) -> Iterator[str]:
    """ValidateRayClusterSpec: what is said of each group."""
    head = cluster.get("headGroupSpec", {})
    workers = cluster.get("workerGroupSpecs", [])
    for name, group in [("head", head), *((one.get("groupName", "?"), one) for one in workers)]:
        parameters = group.get("rayStartParams") or {}
        if not group.get("template", {}).get("spec", {}).get("containers"):
            yield f"group {name} has no container"
        if group.get("resources") and any(parameters.get(resource) for resource in RAY_RESOURCES):
            yield f"group {name} has resources twice: in rayStartParams and beside them"  # validateRayGroupResources
        if "labels" in parameters:
            yield f"group {name} has labels in rayStartParams"  # validateRayGroupLabels
        for key, value in (group.get("labels") or {}).items():
            if not LABEL_VALUE.fullmatch(str(value)) or len(key.rpartition("/")[2]) > 63:
                yield f"group {name}: {key}={value} is no label"
    for group in workers:
        least, most = group["minReplicas"], group["maxReplicas"]  # the schema requires them
        name = group.get("groupName")
        if least < 0 or least > most:
            yield f"group {name}: minReplicas {least}, maxReplicas {most}"
        if group.get("suspend") and cluster.get("enableInTreeAutoscaling"):
            yield f"group {name} can't be suspended beside an autoscaler"
        if (group.get("idleTimeoutSeconds") or 0) < 0:
            yield f"group {name}: idleTimeoutSeconds is negative"  # validateWorkerGroupIdleTimeout
        if group.get("priority") and _ray(cluster) < (2, 56):
            yield f"group {name}: priority needs rayVersion 2.56"  # validateWorkerGroupPriority
        if not least <= group.get("replicas", least) <= most:
            yield f"group {name}: replicas are not between minReplicas and maxReplicas"  # utils/util.go


def autoscaler(cluster: Manifest) -> Iterator[str]:
    """ValidateRayClusterSpec: what is said of the autoscaler."""
    options = cluster.get("autoscalerOptions") or {}
    head, workers = cluster.get("headGroupSpec", {}), cluster.get("workerGroupSpecs", [])
    by_variable = V2_VARIABLE in _environment(head)
    v2 = options.get("version") == "v2"
    if not cluster.get("enableInTreeAutoscaling"):
        if by_variable or options:
            yield "the autoscaler is set up, but enableInTreeAutoscaling is not set"
        return
    if by_variable and options.get("version"):
        yield f"autoscalerOptions.version and {V2_VARIABLE} are both set"
    for name, group in [("head", head), *((one.get("groupName"), one) for one in workers)]:
        if v2 and _restart(group) not in ("", "Never"):
            yield f"autoscaler v2 needs restartPolicy Never: group {name}"
        if not v2 and (group.get("idleTimeoutSeconds") is not None or group.get("priority")):
            yield f"group {name}: idleTimeoutSeconds and priority need autoscaler v2"
    if (options.get("idleTimeoutSeconds") or 0) < 0:
        yield "the autoscaler's idleTimeoutSeconds is negative"
    if "KUBERAY_GEN_AUTOSCALER_START_CMD" in {variable["name"] for variable in options.get("env", [])}:
        yield "KUBERAY_GEN_AUTOSCALER_START_CMD is the operator's"
    # common/rbac.go: it patches the RayCluster. common/pod.go, mergeAutoscalerOverrides: its mounts are kept.
    pod = head.get("template", {}).get("spec", {})
    mounted = [mount["name"] for mount in options.get("volumeMounts", []) if mount["mountPath"] == ACCOUNT]
    files = [_projected(volume) for volume in pod.get("volumes", []) if volume["name"] in mounted]
    if pod.get("automountServiceAccountToken") is False and not any({"token", "ca.crt"} <= one for one in files):
        yield f"the autoscaler needs its service account's token, and ca.crt, in {ACCOUNT}"


def authentication(cluster: Manifest) -> Iterator[str]:
    """ValidateRayClusterSpec: what is said of tokens."""
    options = cluster.get("authOptions") or {}
    delegated = options.get("enableK8sTokenAuth")
    if options.get("mode") == "token":
        if _ray(cluster) < (2, 52):
            yield "authOptions.mode token needs rayVersion 2.52"
        if delegated and _ray(cluster) < (2, 55):
            yield "enableK8sTokenAuth needs rayVersion 2.55"
        if delegated and options.get("secretName"):
            yield "enableK8sTokenAuth goes with no secretName"
    elif delegated:
        yield "enableK8sTokenAuth needs authOptions.mode token"


def redis_cleanup(cluster: Manifest) -> Iterator[str]:
    """raycluster_controller.go, buildRedisCleanupJob: when a cluster with Redis is deleted, a Job's pod is made of the
    head's. It keeps the init containers, and of the Ray container all but its command, probes and resources: hooks
    as well. It may fail once only. Of the head it differs in the label `ray.io/node-type` and nothing else that a
    process of ours could read in both kinds of containers."""
    pod = cluster.get("headGroupSpec", {}).get("template", {}).get("spec", {})
    if cluster.get("gcsFaultToleranceOptions") is None:
        return
    commands = [(one, one.get("command", [])) for one in pod.get("initContainers", [])]
    for container in pod.get("containers", [])[:1]:
        for hook in (container.get("lifecycle") or {}).values():
            commands.append((container, (hook.get("exec") or {}).get("command", [])))
    for container, command in commands:
        if not SKIPS.search(command[-1] if command else ""):
            yield f"{container.get('name')}: {command[:1]} runs in the Job that cleans up Redis, too"
        fields = {one["name"]: one.get("valueFrom", {}).get("fieldRef", {}) for one in container.get("env", [])}
        if fields.get("KUBERAY_NODE_TYPE", {}).get("fieldPath") != NODE_TYPE:
            yield f"{container.get('name')}: KUBERAY_NODE_TYPE is not the label ray.io/node-type"


def fault_tolerance(cluster: Manifest) -> Iterator[str]:
    """ValidateRayClusterSpec, validateGcsFaultToleranceBackend: what is said of the head's state."""
    options = cluster.get("gcsFaultToleranceOptions")
    head = cluster.get("headGroupSpec", {})
    parameters, variables = head.get("rayStartParams") or {}, _environment(head)
    if "redis-username" in parameters or "REDIS_USERNAME" in variables:
        yield "the user's name for Redis belongs into gcsFaultToleranceOptions"
    if options is None:
        if "RAY_REDIS_ADDRESS" in variables:
            yield "RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions"
        return
    if "redis-password" in parameters or {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"} & variables:
        yield "Redis' address and password belong into gcsFaultToleranceOptions"
    if options.get("backend") == "rocksdb":
        yield "backend rocksdb needs the feature gate GCSFaultToleranceEmbeddedStorage"
        if {"redisAddress", "redisPassword", "redisUsername", "externalStorageNamespace"} & options.keys():
            yield "backend rocksdb goes with nothing of Redis"
    else:
        if not options.get("redisAddress"):
            yield "redisAddress is missing"
        if options.get("storage"):
            yield "storage is the rocksdb backend's"


def annotations(document: Manifest) -> Iterator[str]:
    """ValidateRayClusterSpec: what is said of annotations."""
    spec = document["spec"] if document["kind"] == "RayCluster" else document["spec"].get("rayClusterSpec") or {}
    given = document["metadata"].get("annotations") or {}
    if spec.get("gcsFaultToleranceOptions") is not None:
        for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
            if given.get(name):
                yield f"{name} and gcsFaultToleranceOptions are both set"


def gates(cluster: Manifest) -> Iterator[str]:
    """ValidateRayClusterSpec: fields of features that are off by default (pkg/features/features.go)."""
    for field, gate in (
        ("networkPolicy", "RayClusterNetworkPolicy"),
        ("tlsOptions", "RayClusterMTLS"),
        ("historyServerOptions", "RayClusterHistoryServer"),
    ):
        if cluster.get(field) is not None:
            yield f"{field} needs the feature gate {gate}"
    if _ray(cluster) < (2, 53):  # common/pod.go, initLivenessAndReadinessProbe: before, they call wget in the container
        yield "the operator's probes speak HTTP from rayVersion 2.53 on only; the image has no wget"


def commands(cluster: Manifest) -> Iterator[str]:
    """common/pod.go, BuildPod: a command of the Ray container runs before `ray start`, which then may never come."""
    for group in [cluster.get("headGroupSpec", {}), *cluster.get("workerGroupSpecs", [])]:
        for container in group.get("template", {}).get("spec", {}).get("containers", [])[:1]:
            if container.get("command") or container.get("args"):
                yield f"{container.get('name')}: the operator puts its own command behind this one"


JOB_CHECKS: tuple[Check, ...] = (job_spec, job_cluster, job_submitter)
CLUSTER_CHECKS: tuple[Check, ...] = (
    groups,
    autoscaler,
    authentication,
    fault_tolerance,
    redis_cleanup,
    gates,
    commands,
)


def _ray(cluster: Manifest) -> tuple[int, int]:
    version = re.match(r"(\d+)\.(\d+)", cluster.get("rayVersion", ""))
    return (int(version.group(1)), int(version.group(2))) if version else (0, 0)


def _projected(volume: Manifest) -> set[str]:
    """Names of the files that a projected volume has, of those that service accounts need."""
    sources = (volume.get("projected") or {}).get("sources", [])
    token = {source["serviceAccountToken"]["path"] for source in sources if "serviceAccountToken" in source}
    items = [item for source in sources for item in source.get("configMap", {}).get("items", [])]
    return token | {item["path"] for item in items}


def _restart(group: Manifest) -> str:
    return str(group.get("template", {}).get("spec", {}).get("restartPolicy", ""))


def _environment(group: Manifest) -> set[str]:
    """Names of the variables of a group's Ray container."""
    containers: list[Any] = group.get("template", {}).get("spec", {}).get("containers", [])
    return {variable["name"] for container in containers[:1] for variable in container.get("env", [])}
