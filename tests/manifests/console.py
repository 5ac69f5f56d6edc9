"""What we demand of the console behind an ingress: nobody gets to it but through what logs people in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from understudy.cluster.console.access import PROXY_SECRET

from .objects import Manifest, Pod, named, of_kind, pods, selects

SECRET_VARIABLE = "UNDERSTUDY_CONSOLE_PROXY_SECRET"


def findings(documents: list[Manifest]) -> list[str]:
    """What is wrong with Ingresses, the proxy that logs people in, and the console behind it."""
    found = []
    for ingress in of_kind(documents, "Ingress"):
        found += [f"{named(ingress)}: {problem}" for problem in _ingress(ingress, documents)]
    for pod in pods(documents):
        if pod.role == "proxy":
            found += [f"{pod.name}: {problem}" for problem in _proxy(pod, documents)]
    return found


def _ingress(ingress: Manifest, documents: list[Manifest]) -> Iterator[str]:
    tls = [one for one in ingress["spec"].get("tls") or [] if one.get("secretName")]
    secured = {host for one in tls for host in one.get("hosts", [])}
    for rule in ingress["spec"].get("rules", []):
        if rule.get("host") not in secured:
            yield f"{rule.get('host')} is served without TLS"
        for path in rule["http"]["paths"]:
            backend = path["backend"]["service"]
            roles = {pod.role for pod in _behind(backend["name"], backend["port"], documents)}
            if roles != {"proxy"}:
                yield f"{backend['name']} leads to {', '.join(sorted(roles)) or 'nothing'}, not to the proxy"


def _behind(name: str, port: Manifest, documents: list[Manifest]) -> list[Pod]:
    """The pods that a port of a Service leads to."""
    return [
        pod
        for service in of_kind(documents, "Service")
        if service["metadata"]["name"] == name
        and any(one.get("name") == port.get("name") or one["port"] == port.get("number") for one in _ports(service))
        for pod in pods(documents)
        if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)
    ]


def _ports(service: Manifest) -> list[Manifest]:
    return list(service["spec"]["ports"])


def _proxy(proxy: Pod, documents: list[Manifest]) -> Iterator[str]:
    """It names people in the header that the console takes, with the secret that the console has."""
    [head] = [pod for pod in pods(documents) if pod.role == "head"]
    hook = str(head.containers()[0].get("lifecycle"))
    command = re.search(r"understudy console .*?--port (\d+) --identity-header (\S+?);", hook)
    if command is None:
        yield "no console is started behind it, with a port and a header"
        return
    port, identity = int(command[1]), command[2].lower()
    if head.ports().get("console") != port:
        yield f"the console listens on {port}, which is not the head's port console"
    config = _config(documents)
    headers = {one["name"].lower(): one for one in config.get("injectRequestHeaders", [])}
    for name in (identity, PROXY_SECRET):
        if name not in headers:
            yield f"it does not send {name}"
        elif headers[name].get("preserveRequestValue"):
            yield f"it passes on what a browser sends as {name}"
    values = headers.get(PROXY_SECRET, {}).get("values", [])
    variables = [value.get("secretSource", {}).get("fromEnv") for value in values]
    given, wanted = [_secret(proxy, name) for name in variables], _secret(head, SECRET_VARIABLE)
    if wanted is None or given != [wanted]:
        yield f"it sends another secret than the console has: {given}, {wanted}"
    upstreams = [one["uri"] for one in config["upstreamConfig"]["upstreams"]]
    for service in of_kind(documents, "Service"):
        if head in _behind(service["metadata"]["name"], {"number": port}, documents):
            upstreams = [uri for uri in upstreams if uri != f"http://{service['metadata']['name']}:{port}"]
    if upstreams:
        yield f"it leads elsewhere than to the console: {', '.join(upstreams)}"


def _config(documents: list[Manifest]) -> dict[str, Any]:
    maps = [document.get("data") or {} for document in of_kind(documents, "ConfigMap")]
    [text] = [data["proxy.yaml"] for data in maps if "proxy.yaml" in data]
    return dict(yaml.safe_load(text))


def _secret(pod: Pod, variable: str | None) -> Any:
    """Of which Secret a variable of the pod's first container is."""
    for one in pod.containers()[0].get("env", []):
        if one["name"] == variable:
            return (one.get("valueFrom") or {}).get("secretKeyRef")
    return None
