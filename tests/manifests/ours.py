"""What we demand of our own manifests: of pods, and of what refers to something else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import yaml

from understudy.config import has_credentials, is_secret_name
from understudy.scaling import NODES

from .objects import TOKEN_KEY, Manifest, Pod, named, of_kind, pods, ray_clusters, selects

Secrets = Mapping[str, frozenset[str]]
"""Secrets that whoever installs this must have made, with their keys."""

WRITABLE = ("/tmp", "/home/understudy")
PORT_NAME_LENGTH = 15
DRAIN_SPARE_SECONDS = 30
"""What the hook's process takes besides the drain's own timeout, and what Ray needs to end."""

OPERATORS = {"understudy/kuberay": ">=1.6"}
"""The annotation that says which operators the manifests are for. Those before 1.6 ask how Ray is with `wget`, which
the image lacks, and know neither `upgradeStrategy` nor `authOptions.secretName` (KubeRay's tags v1.5.2 and v1.6.0)."""

HEAD_BYTES = 5 << 30
"""What a head has in KubeRay's own chart and samples (helm-chart/ray-cluster/values.yaml, v1.7.0): GCS and dashboard
grow with the actors and jobs they have seen."""

APPLIED_BYTES = 256 * 1024
"""`kubectl apply` keeps what it applied in an annotation; all annotations together may have so many bytes."""


def findings(documents: list[Manifest], provided: Secrets) -> list[str]:
    """What is wrong with manifests that belong together."""
    found = []
    for pod in pods(documents):
        for check in (_rights, _account, _resources, _ports, _goodbye, _spread, _secrets_there):
            found += [f"{pod.name}: {problem}" for problem in check(pod)]
        found += [f"{pod.name}: {problem}" for problem in _references(pod, documents, provided)]
        found += [f"{pod.name}: {problem}" for problem in _metrics_port(pod, documents)]
        found += [f"{pod.name}: {problem}" for problem in _store(pod, documents)]
    for document in of_kind(documents, "RayCluster", "RayJob"):
        if not OPERATORS.items() <= (document["metadata"].get("annotations") or {}).items():
            found.append(f"{named(document)}: does not say which operators it is for: {OPERATORS}")
    for owner, cluster in ray_clusters(documents):
        found += [f"{owner}: {problem}" for problem in _authentication(cluster)]
        found += [f"{owner}: {problem}" for problem in _scaling(cluster, documents)]
    found += _images(pods(documents))
    found += _selectors(documents)
    found += _services(documents)
    for document in documents:
        found += [f"{named(document)}: {problem}" for problem in _clear_secrets(document)]
    for document in of_kind(documents, "ConfigMap"):
        found += [f"{named(document)}: {problem}" for problem in _config_map(document)]
    return found


def _rights(pod: Pod) -> Iterator[str]:
    around = pod.spec.get("securityContext") or {}
    if (around.get("seccompProfile") or {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"
    for container in pod.containers():
        name, own = container.get("name"), container.get("securityContext") or {}
        if not {**around, **own}.get("runAsNonRoot") or {**around, **own}.get("runAsUser", 0) == 0:
            yield f"{name} may run as root"
        if own.get("allowPrivilegeEscalation") is not False or (own.get("capabilities") or {}).get("drop") != ["ALL"]:
            yield f"{name} may get more rights"
        if not own.get("readOnlyRootFilesystem"):
            yield f"{name} may write its image"
        mounted = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
        if pod.is_ours and not mounted.issuperset(WRITABLE):
            yield f"{name} lacks a place to write: {', '.join(sorted(set(WRITABLE) - mounted))}"


def _account(pod: Pod) -> Iterator[str]:
    """Only the autoscaler may have a token of the API server."""
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield "all its containers have a token of the API server"
    tokens = {
        volume["name"]
        for volume in pod.spec.get("volumes", [])
        for source in (volume.get("projected") or {}).get("sources", [])
        if "serviceAccountToken" in source
    }
    for container in pod.containers():
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        if container.get("name") != "autoscaler" and mounted & tokens:
            yield f"{container.get('name')} has a token of the API server"


def _authentication(cluster: Manifest) -> Iterator[str]:
    """Where Ray is more than one pod, whoever reaches it could run what they like, but for its token."""
    options = cluster.get("authOptions") or {}
    if not cluster.get("workerGroupSpecs"):
        return
    if options.get("mode") != "token":
        yield "Ray lets in everybody (authOptions)"
    elif not options.get("secretName"):
        # common/pod.go, SetContainerTokenAuthEnvVars, and reconcileAuthSecret, which makes it only if there is none.
        yield "the operator takes the Secret with the cluster's name for that of the token (authOptions.secretName)"


def _scaling(cluster: Manifest, documents: list[Manifest]) -> Iterator[str]:
    """What may be asked of the autoscaler is what it may bring: else requests wait for ever, or workers stay idle."""
    said = _settings(documents).get(NODES, "")
    groups = cluster.get("workerGroupSpecs") or []
    may = "-".join(str(sum(group[name] for group in groups)) for name in ("minReplicas", "maxReplicas"))
    if bool(said) != bool(cluster.get("enableInTreeAutoscaling")):
        yield f"{NODES}={said} and an autoscaler belong together"
    elif said and said != may:
        yield f"{NODES}={said}, and there may be {may} workers"


def _resources(pod: Pod) -> Iterator[str]:
    for container in pod.containers():
        given = container.get("resources") or {}
        if not {"cpu", "memory"} <= (given.get("requests") or {}).keys():
            yield f"{container.get('name')} requests no CPU or no memory"
        if "memory" not in (given.get("limits") or {}):
            yield f"{container.get('name')} has no limit of memory"


def _ports(pod: Pod) -> Iterator[str]:
    names = [port.get("name", "") for container in pod.containers() for port in container.get("ports", [])]
    for name in names:
        if not name or len(name) > PORT_NAME_LENGTH:
            yield f"port name {name!r} has no or more than {PORT_NAME_LENGTH} characters"
    if len(set(names)) < len(names):
        yield "a port name is there twice"
    for container in pod.containers():
        for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
            port = (container.get(kind) or {}).get("httpGet", {}).get("port")
            if port is not None and port not in pod.ports() and port not in pod.ports().values():
                yield f"{kind} asks port {port}, which is not there"


def _goodbye(pod: Pod) -> Iterator[str]:
    if pod.role != "worker":
        return
    [*_, container] = pod.containers(with_init=False)[:1] or [{}]
    command = (((container.get("lifecycle") or {}).get("preStop") or {}).get("exec") or {}).get("command") or []
    if command[:3] != ["understudy", "drain", "--here"]:
        yield "it is not drained before it ends (preStop)"
        return
    seconds = float(command[command.index("--timeout") + 1]) if "--timeout" in command else 600.0
    grace = pod.spec.get("terminationGracePeriodSeconds", 30)
    if seconds + DRAIN_SPARE_SECONDS > grace:
        yield f"the drain may take {seconds:g} s, and the pod is killed after {grace} s"
    if "readinessProbe" not in container:
        yield "nobody asks whether its node service works (readinessProbe)"


def _spread(pod: Pod) -> Iterator[str]:
    for constraint in pod.spec.get("topologySpreadConstraints", []):
        if not selects(constraint.get("labelSelector"), pod.labels):
            yield f"it is not among those that are spread over {constraint.get('topologyKey')}"


def _secrets_there(pod: Pod) -> Iterator[str]:
    if pod.role == "worker" and any(kind == "Secret" and key != TOKEN_KEY for kind, _, key in _referred(pod)):
        yield "it has a secret, and tools run there"


def _referred(pod: Pod) -> Iterator[tuple[str, str, str]]:
    """What a pod refers to: kind, name, key (empty: all of it)."""
    for container in pod.containers():
        for source in container.get("envFrom", []):
            for field, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                if field in source:
                    yield kind, source[field]["name"], ""
        for variable in container.get("env", []):
            for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                if field in variable.get("valueFrom", {}):
                    yield kind, variable["valueFrom"][field]["name"], variable["valueFrom"][field]["key"]
    for volume in pod.spec.get("volumes", []):
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], ""
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"], ""
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"], ""


def _references(pod: Pod, documents: list[Manifest], provided: Secrets) -> Iterator[str]:
    there = {
        (document["kind"], document["metadata"]["name"]): (document.get("data") or {}).keys() for document in documents
    }
    there |= {("Secret", name): dict.fromkeys(keys).keys() for name, keys in provided.items()}
    for kind, name, key in _referred(pod):
        if (kind, name) not in there:
            yield f"there is no {kind} {name}"
        elif key and key not in there[kind, name]:
            yield f"{kind} {name} has no {key}"
    volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
    for container in pod.containers():
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{container.get('name')}: there is no volume {mount['name']}"


def _settings(documents: list[Manifest]) -> dict[str, str]:
    for document in of_kind(documents, "ConfigMap"):
        if document["metadata"]["name"] == "understudy":
            return dict(document.get("data") or {})
    return {}


def _metrics_port(pod: Pod, documents: list[Manifest]) -> Iterator[str]:
    given = pod.ports().get("understudy")
    wanted = _settings(documents).get("UNDERSTUDY_METRICS_PORT")
    if given is not None and wanted is not None and str(given) != wanted:
        yield f"port understudy is {given}, UNDERSTUDY_METRICS_PORT {wanted}"


def _store(pod: Pod, documents: list[Manifest]) -> Iterator[str]:
    """A SQLite file is on a volume of the head, where all work is done; with PostgreSQL none is done there."""
    if pod.role == "submitter" or not pod.is_ours or not _settings(documents):
        return
    dsn = _settings(documents).get("UNDERSTUDY_STORE", "postgresql://")
    cpus = str(pod.start.get("num-cpus", ""))
    if not dsn.startswith("sqlite"):
        if pod.role == "head" and cpus != "0":
            yield "the supervisor may be at the head, which offers CPUs"
        if pod.role == "head" and _bytes(pod) < HEAD_BYTES:
            yield "less than 5 GiB of memory for GCS and dashboard"
        return
    if pod.role == "worker":
        yield "with SQLite nothing is ever done at a worker"
        return
    if cpus == "0":
        yield "with SQLite the head must offer CPUs"
    claims = {volume["name"] for volume in pod.spec.get("volumes", []) if "persistentVolumeClaim" in volume}
    mounts = [mount for container in pod.containers() for mount in container.get("volumeMounts", [])]
    path = dsn.removeprefix("sqlite:///")
    if not any(mount["name"] in claims and path.startswith(mount["mountPath"] + "/") for mount in mounts):
        yield f"{path} is on no volume"


def _bytes(pod: Pod) -> float:
    """The memory that its Ray container asks for."""
    [container, *_] = pod.containers(with_init=False)
    asked = str(((container.get("resources") or {}).get("requests") or {}).get("memory", "0"))
    number = asked.rstrip("kKMGTi")
    binary, decimal = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}, {"": 0, "k": 3, "M": 6, "G": 9, "T": 12}
    unit = asked.removeprefix(number)
    return float(number) * (2 ** binary[unit] if unit in binary else 10 ** decimal[unit])


def _images(found: list[Pod]) -> Iterator[str]:
    images = {container.get("image", "") for pod in found for container in pod.containers()}
    ours = {container.get("image", "") for pod in found for container in pod.containers() if pod.is_ours}
    if len(ours) > 1:
        yield f"several images: {', '.join(sorted(ours))}"
    for image in images:
        name, _, tag = image.rpartition(":")
        if not name or tag == "latest" or "/" in tag:
            yield f"image {image}: say which version"


def _selectors(documents: list[Manifest]) -> Iterator[str]:
    """Whatever selects pods selects some, and what it wants of them is there."""
    found = pods(documents)
    for document in of_kind(documents, "PodMonitor", "PodDisruptionBudget", "NetworkPolicy"):
        spec = document["spec"]
        meant = [pod for pod in found if selects(spec.get("selector", spec.get("podSelector")), pod.labels)]
        if not meant and found:
            yield f"{named(document)} selects no pod"
        for endpoint in spec.get("podMetricsEndpoints", []):
            if meant and not any(endpoint.get("port") in pod.ports() for pod in meant):
                yield f"{named(document)}: no pod has a port {endpoint.get('port')}"
        if document["kind"] != "PodDisruptionBudget" or not meant:
            continue
        least, wanted = sum(pod.least for pod in meant), spec.get("minAvailable")
        # Kubernetes, "Specifying a Disruption Budget", arbitrary workloads: for pods of what has no scale.
        if not isinstance(wanted, int) or "maxUnavailable" in spec:
            yield f"{named(document)}: only a whole number in minAvailable works for a RayCluster's pods"
        elif wanted >= least:
            yield f"{named(document)}: no pod may ever be taken away: {wanted} of {least}"
        elif wanted < 1:
            yield f"{named(document)}: all may be taken away at once"


def _services(documents: list[Manifest]) -> Iterator[str]:
    """A Service leads to a port of some pod, and spans are sent to a port of a Service that is there."""
    ports = {}
    for service in of_kind(documents, "Service"):
        meant = [pod for pod in pods(documents) if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        known = {known for pod in meant for item in pod.ports().items() for known in item}
        for port in service["spec"]["ports"]:
            ports[service["metadata"]["name"], port["port"]] = port
            if port.get("targetPort", port["port"]) not in known:
                yield f"{named(service)}: no pod has the port {port.get('targetPort', port['port'])}"
    endpoint = urlsplit(_settings(documents).get("OTEL_EXPORTER_OTLP_ENDPOINT", ""))
    if endpoint.hostname and "." not in endpoint.hostname and (endpoint.hostname, endpoint.port) not in ports:
        yield f"spans are sent to {endpoint.netloc}, and no Service has that port"


def _collector(text: str) -> Iterator[str]:
    """The configuration of a collector: what its pipelines name is defined, and nothing comes in before the limit."""
    config = yaml.safe_load(text)
    for name, pipeline in config["service"]["pipelines"].items():
        for kind in ("receivers", "processors", "exporters"):
            for part in pipeline.get(kind) or [f"no {kind}"]:
                if part not in config.get(kind, {}):
                    yield f"pipeline {name} has {part}, which is not defined"
        if (pipeline.get("processors") or [""])[0] != "memory_limiter":
            yield f"pipeline {name} does not begin with memory_limiter"
    for extension in config["service"].get("extensions", []):
        if extension not in config.get("extensions", {}):
            yield f"extension {extension} is not defined"


def _clear_secrets(value: Any, name: str = "") -> Iterator[str]:
    """Passwords and keys in clear, wherever they stand."""
    if isinstance(value, dict):
        if value.get("kind") == "Secret" and (value.get("data") or value.get("stringData")):
            yield "a Secret with its content"
        own = value.get("name") if isinstance(value.get("value"), str) else None
        if own is not None and _is_clear(str(own), value["value"]):
            yield f"{own} in clear"
        for key, item in value.items():
            if isinstance(item, str) and key != "value" and _is_clear(str(key), item) and name == "data":
                yield f"{key} in clear"
            # Ray keeps a runtime environment, variables included, where everybody can read it.
            for variable in _job_variables(item) if key == "runtimeEnvYAML" else ():
                if is_secret_name(variable):
                    yield f"{variable} in clear"
            yield from _clear_secrets(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _clear_secrets(item, name)
    elif isinstance(value, str) and has_credentials(value):
        yield f"{name} has a password in it"


def _job_variables(text: str) -> list[str]:
    try:
        return list((yaml.safe_load(text) or {}).get("env_vars", {}))
    except yaml.YAMLError:
        return []  # the operator's rules tell


def _is_clear(name: str, value: str) -> bool:
    return is_secret_name(name) and bool(value) and not value.startswith("sqlite:") and not name.endswith(".json")


def _config_map(document: Manifest) -> Iterator[str]:
    if len(json.dumps(document)) > APPLIED_BYTES:
        yield "too large for `kubectl apply`"
    if "collector.yaml" in (document.get("data") or {}):
        yield from _collector(document["data"]["collector.yaml"])
    if (document["metadata"].get("labels") or {}).get("grafana_dashboard") != "1":
        if any(key.endswith(".json") for key in document.get("data") or {}):
            yield "Grafana finds dashboards by the label grafana_dashboard"
        return
    for key, text in (document.get("data") or {}).items():
        try:
            dashboard = json.loads(text)
        except ValueError:
            yield f"{key} is no JSON"
            continue
        if not dashboard.get("uid") or not dashboard.get("title"):
            yield f"{key} has no uid or no title: with each change there would be another one"
