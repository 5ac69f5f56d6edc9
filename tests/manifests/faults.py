"""Faults of manifests that the checks must find: each rule has one."""

from __future__ import annotations

from .collector_faults import OF_THE_COLLECTOR
from .console_faults import OF_THE_CONSOLE
from .network_faults import IN_THE_NETWORK
from .objects import DEVELOPMENT, GONE, ON, OWN, PRODUCTION, Fault

HEAD = "spec.headGroupSpec.template.spec"
WORKER = "spec.workerGroupSpecs.0.template.spec"
SECURITY = "containers.0.securityContext"

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
    # What only an operator of some of the supported versions refuses.
    (PRODUCTION, "RayCluster", "spec.networkPolicy", {}, "kuberay-1.6: spec: Additional properties"),
    (PRODUCTION, "RayCluster", "spec.gcsFaultToleranceOptions.storage", {"size": "1Gi"}, "kuberay-1.6: spec.gcsFault"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.priority", 1, "kuberay-1.6: spec.workerGroupSpecs.0"),
    (PRODUCTION, "RayCluster", "spec.autoscalerOptions.args", ["-v"], "kuberay-1.6: spec.autoscalerOptions"),
    (OWN, "RayJob", "spec.rayClusterSpec.tlsOptions", {}, "kuberay-1.6: spec.rayClusterSpec: Additional properties"),
    (PRODUCTION, "RayCluster", "spec.authOptions.mode", "tokens", "kuberay-1.7: spec.authOptions.mode: 'tokens'"),
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
    (OWN, "RayJob", "spec.runtimeEnvYAML", "env_vars: {", "runtimeEnvYAML is no YAML"),
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
    (PRODUCTION, "RayCluster", "spec.autoscalerOptions.idleTimeoutSeconds", -1, "the autoscaler's idleTimeout"),
    (
        PRODUCTION, "RayCluster", f"{HEAD}.containers.0.env.1", {"name": "RAY_enable_autoscaler_v2", "value": "1"},
        "are both set",
    ),
    # The autoscaler's token, and nobody else's.
    (PRODUCTION, "RayCluster", f"{HEAD}.volumes.2", GONE, "needs its service account's token"),
    (PRODUCTION, "RayCluster", f"{HEAD}.volumes.2.projected.sources.1", GONE, "and ca.crt"),
    (PRODUCTION, "RayCluster", f"{HEAD}.volumes.2.projected.sources.0", GONE, "needs its service account's token"),
    (PRODUCTION, "RayCluster", "spec.autoscalerOptions.volumeMounts.2", GONE, "needs its service account's token"),
    (
        PRODUCTION, "RayCluster", "spec.autoscalerOptions.volumeMounts.2.mountPath", "/var/run/secrets/kubernetes.io",
        "needs its service account's token",
    ),
    (PRODUCTION, "RayCluster", f"{HEAD}.automountServiceAccountToken", True, "all its containers have a token"),
    (
        PRODUCTION, "RayCluster", f"{HEAD}.containers.0.volumeMounts.1.name", "api-server",
        "ray-head has a token of the API server",
    ),
    (
        PRODUCTION, "RayCluster", f"{HEAD}.initContainers.0.volumeMounts.1.name", "api-server",
        "migrate has a token of the API server",
    ),
    # Ray's token.
    (PRODUCTION, "RayCluster", "spec.authOptions", GONE, "Ray lets in everybody"),
    (PRODUCTION, "RayCluster", "spec.authOptions.mode", "disabled", "Ray lets in everybody"),
    (OWN, "RayJob", "spec.rayClusterSpec.authOptions", GONE, "Ray lets in everybody"),
    (PRODUCTION, "RayCluster", "spec.authOptions.secretName", GONE, "takes the Secret with the cluster's name"),
    (PRODUCTION, "RayCluster", "spec.authOptions.secretName", "ray", "worker: there is no Secret ray"),
    (PRODUCTION, "RayCluster", "spec.authOptions.enableK8sTokenAuth", True, "goes with no secretName"),
    (
        PRODUCTION, "RayCluster", "spec.authOptions", {"mode": "disabled", "enableK8sTokenAuth": True},
        "enableK8sTokenAuth needs authOptions.mode token",
    ),
    (
        PRODUCTION, "RayCluster", "spec.rayVersion + spec.authOptions.enableK8sTokenAuth", ("2.54.0", True),
        "enableK8sTokenAuth needs rayVersion 2.55",
    ),
    (PRODUCTION, "RayCluster", "spec.rayVersion", "2.51.0", "authOptions.mode token needs rayVersion 2.52"),
    (OWN, "RayJob", "spec.rayClusterSpec.authOptions.enableK8sTokenAuth", True, "a job's cluster has no enableK8s"),
    # The Job that cleans up Redis.
    (
        PRODUCTION, "RayCluster", f"{HEAD}.initContainers.0.command", ["understudy", "store", "migrate"],
        "migrate: ['understudy'] runs in the Job that cleans up Redis",
    ),
    (
        PRODUCTION, "RayCluster", f"{HEAD}.containers.0.lifecycle.postStart.exec.command.2", "understudy up --keep &",
        "ray-head: ['/bin/bash'] runs in the Job that cleans up Redis",
    ),
    (
        PRODUCTION, "RayCluster", f"{HEAD}.containers.0.lifecycle.preStop", {"exec": {"command": ["understudy", "up"]}},
        "ray-head: ['understudy'] runs in the Job that cleans up Redis",
    ),
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.env.0", GONE, "is not the label ray.io/node-type"),
    (
        PRODUCTION, "RayCluster", f"{HEAD}.initContainers.0.env.0", {"name": "KUBERAY_NODE_TYPE", "value": "head"},
        "migrate: KUBERAY_NODE_TYPE is not the label",
    ),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.minReplicas", 11, "minReplicas 11, maxReplicas 10"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.replicas", 11, "not between"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.suspend", True, "can't be suspended beside an autoscaler"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.idleTimeoutSeconds", -1, "agents: idleTimeoutSeconds is neg"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.rayStartParams.labels", "a=b", "labels in rayStartParams"),
    (PRODUCTION, "RayCluster", "spec.workerGroupSpecs.0.labels", {"a": "b c"}, "is no label"),
    (PRODUCTION, "RayCluster", "spec.headGroupSpec.resources", {"CPU": "1"}, "resources twice"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers", [], "has no container"),
    (PRODUCTION, "RayCluster", f"{WORKER}.containers.0.command", ["sleep"], "its own command behind this one"),
    (PRODUCTION, "RayCluster", "spec.headGroupSpec.rayStartParams.redis-password", "x", "belong into gcsFault"),
    (
        DEVELOPMENT, "RayCluster", f"{HEAD}.containers.0.env", [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}],
        "RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions",
    ),
    (PRODUCTION, "RayCluster", "spec.headGroupSpec.rayStartParams.redis-username", "x", "the user's name for Redis"),
    (PRODUCTION, "RayCluster", "metadata.annotations", {"ray.io/ft-enabled": "true"}, "are both set"),
    (PRODUCTION, "RayCluster", "spec.rayVersion", "2.52.0", "speak HTTP from rayVersion 2.53"),
    # What we say: operators, rights and resources.
    (PRODUCTION, "RayCluster", "metadata.annotations", GONE, "does not say which operators it is for"),
    (ON, "RayJob", "metadata.annotations", {"understudy/kuberay": ">=1.5"}, "does not say which operators it is for"),
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.resources.requests.memory", "4Gi", "less than 5 GiB"),
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.resources.requests.memory", "5000Mi", "less than 5 GiB"),
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.resources.requests.memory", "5G", "less than 5 GiB"),
    (PRODUCTION, "RayCluster", f"{HEAD}.securityContext.runAsNonRoot", False, "ray-head may run as root"),
    (PRODUCTION, "RayCluster", f"{WORKER}.{SECURITY}.runAsUser", 0, "ray-worker may run as root"),
    (PRODUCTION, "RayCluster", f"{WORKER}.{SECURITY}.capabilities", GONE, "ray-worker may get more rights"),
    (PRODUCTION, "RayCluster", f"{WORKER}.{SECURITY}.readOnlyRootFilesystem", GONE, "ray-worker may write its image"),
    (PRODUCTION, "RayCluster", f"{HEAD}.initContainers.0.securityContext", GONE, "migrate may get more rights"),
    (PRODUCTION, "RayCluster", f"{WORKER}.securityContext.seccompProfile", GONE, "no seccomp profile"),
    (PRODUCTION, "RayCluster", "spec.autoscalerOptions.securityContext", GONE, "autoscaler may get more"),
    (PRODUCTION, "RayCluster", "spec.autoscalerOptions.resources.requests", GONE, "autoscaler requests no CPU"),
    (PRODUCTION, "RayCluster", f"{WORKER}.automountServiceAccountToken", GONE, "all its containers have a token"),
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
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.env.1.valueFrom.secretKeyRef.name", "db", "there is no Secret db"),
    (PRODUCTION, "RayCluster", f"{HEAD}.containers.0.env.2.valueFrom.secretKeyRef.key", "key", "understudy has no key"),
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
    (PRODUCTION, "ConfigMap", "data.UNDERSTUDY_NODES", "3-20", "UNDERSTUDY_NODES=3-20, and there may be 3-10 workers"),
    (PRODUCTION, "ConfigMap", "data.UNDERSTUDY_NODES", GONE, "and an autoscaler belong together"),
    (PRODUCTION, "ConfigMap", "data.OPENAI_API_KEY", "sk-1", "OPENAI_API_KEY in clear"),
    (PRODUCTION, "ConfigMap", "data.OTHER", "postgresql://me:secret@host/db", "OTHER has a password in it"),
    (
        PRODUCTION, "RayCluster", f"{HEAD}.containers.0.env.2", {"name": "OPENAI_API_KEY", "value": "sk-1"},
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
    *IN_THE_NETWORK,
    *OF_THE_COLLECTOR,
    *OF_THE_CONSOLE,
]  # fmt: skip

BY_NEWEST: list[Fault] = [
    (PRODUCTION, "RayCluster", "spec.gcsFaultToleranceOptions.redisAddress", GONE, "redisAddress is missing"),
    (PRODUCTION, "RayCluster", "spec.gcsFaultToleranceOptions.backend", "rocksdb", "nothing of Redis"),
    (PRODUCTION, "RayCluster", "spec.gcsFaultToleranceOptions.storage", {"size": "1Gi"}, "the rocksdb backend's"),
    (PRODUCTION, "RayCluster", "spec.networkPolicy", {}, "feature gate RayClusterNetworkPolicy"),
    (
        PRODUCTION, "RayCluster", "spec.rayVersion + spec.workerGroupSpecs.0.priority", ("2.55.0", 1),
        "priority needs rayVersion 2.56",
    ),
]  # fmt: skip
"""What takes a field that only the newest operators know, and is checked for these alone."""
