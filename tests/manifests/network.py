"""What network policies let through, for what must get through and what must not."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from .objects import Manifest, Pod, of_kind, pods, selects

OURS = {"app.kubernetes.io/part-of": "understudy"}


@dataclass(frozen=True)
class Peer:
    """Somebody a pod speaks with: a pod elsewhere, or an address outside.

    Attributes:
        namespace: `""` is the pod's own.
    """

    what: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""
    address: str = ""


OWN = Peer("another pod of ours", OURS)
STRANGER = Peer("another pod of the namespace", {"app": "other"})
DNS = Peer("the cluster's DNS", {"k8s-app": "kube-dns"}, "kube-system")
PROMETHEUS = Peer("Prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring")
OPERATOR = Peer("the operator", {"app.kubernetes.io/name": "kuberay-operator"}, "kuberay-system")
INTERNET = Peer("the internet", address="203.0.113.7")
METADATA = Peer("the cloud's metadata", address="169.254.169.254")
DATABASE = Peer("a server of the network", address="10.20.30.40")

Flow = tuple[str, str, Peer, int]
"""Role of our pod, `to` or `from`, the peer, the port (TCP; 53 is UDP)."""

NEEDED: tuple[Flow, ...] = (
    *((role, "to", DNS, 53) for role in ("head", "worker", "submitter")),
    *((role, way, OWN, 12345) for role in ("head", "worker") for way in ("to", "from")),
    ("submitter", "to", OWN, 8265),
    ("worker", "to", DATABASE, 5432),
    ("head", "to", DATABASE, 5432),
    ("head", "to", DATABASE, 6379),
    ("head", "to", DATABASE, 6443),
    ("worker", "to", INTERNET, 443),
    ("worker", "from", PROMETHEUS, 9464),
    *(("head", "from", PROMETHEUS, port) for port in (8080, 44217, 44227)),
    ("worker", "from", PROMETHEUS, 8080),
    ("head", "from", OPERATOR, 8265),
)
FORBIDDEN: tuple[Flow, ...] = (
    *(("head", "from", STRANGER, port) for port in (6379, 8265, 10001, 8080, 44217, 44227, 52365)),
    *(("worker", "from", STRANGER, port) for port in (9464, 8080, 10002)),
    *((role, "from", INTERNET, 8265) for role in ("head", "worker", "submitter")),
    ("head", "from", PROMETHEUS, 8265),
    ("worker", "from", OPERATOR, 9464),
    *((role, "to", INTERNET, port) for role in ("head", "worker", "submitter") for port in (22, 25, 80, 8080)),
    ("worker", "to", METADATA, 443),
    ("worker", "to", METADATA, 80),
    ("worker", "to", DATABASE, 6379),
    ("worker", "to", DATABASE, 6443),
    ("worker", "to", STRANGER, 9999),
    ("submitter", "to", INTERNET, 443),
    ("submitter", "to", DATABASE, 5432),
)


def findings(documents: list[Manifest]) -> list[str]:
    """What the policies keep back that is needed, and what they let through that is not; nothing without policies."""
    policies = of_kind(documents, "NetworkPolicy")
    if not policies:
        return []
    found = []
    for pod in pods(documents):
        for wanted, flows in ((True, NEEDED), (False, FORBIDDEN)):
            for role, way, peer, port in flows:
                if role == pod.role and passes(policies, pod, way, peer, port) is not wanted:
                    problem = "is not let through" if wanted else "is let through"
                    found.append(f"network of {pod.name}: {way} {peer.what}, port {port}, {problem}")
    return found


def passes(policies: list[Manifest], pod: Pod, way: str, peer: Peer, port: int) -> bool:
    """Whether the policies let a connection of a pod through: the sum of what those for it and this way allow."""
    kind, rules, peers = ("Egress", "egress", "to") if way == "to" else ("Ingress", "ingress", "from")
    meant = [
        policy["spec"]
        for policy in policies
        if kind in policy["spec"].get("policyTypes", []) and selects(policy["spec"].get("podSelector"), pod.labels)
    ]
    return not meant or any(
        _has_port(rule.get("ports"), port) and _has_peer(rule.get(peers), peer)
        for spec in meant
        for rule in spec.get(rules) or []
    )


def _has_port(ports: list[Manifest] | None, port: int) -> bool:
    protocol = "UDP" if port == 53 else "TCP"
    return not ports or any(one.get("protocol", "TCP") == protocol and one.get("port") in (None, port) for one in ports)


def _has_peer(given: list[Manifest] | None, peer: Peer) -> bool:
    return not given or any(_is(one, peer) for one in given)


def _is(given: Manifest, peer: Peer) -> bool:
    if "ipBlock" in given:
        if not peer.address:
            return False
        address = ipaddress.ip_address(peer.address)
        excepted = given["ipBlock"].get("except", [])
        return address in ipaddress.ip_network(given["ipBlock"]["cidr"]) and not any(
            address in ipaddress.ip_network(block) for block in excepted
        )
    if peer.address:
        return False
    if "namespaceSelector" in given:
        here = selects(given["namespaceSelector"], {"kubernetes.io/metadata.name": peer.namespace})
    else:
        here = not peer.namespace
    return here and selects(given.get("podSelector"), dict(peer.labels))
