"""What network policies let through, for what must get through and what must not."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
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
NODE_DNS = Peer("the node's DNS cache", address="169.254.20.10")
OPENSHIFT_DNS = Peer("OpenShift's DNS", {"dns.operator.openshift.io/daemonset-dns": "default"}, "openshift-dns")
FALSE_DNS = Peer("a pod that calls itself DNS", {"k8s-app": "kube-dns"}, "elsewhere")
PROMETHEUS = Peer("Prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring")
FALSE_OPERATOR = Peer(
    "a pod that calls itself the operator", {"app.kubernetes.io/name": "kuberay-operator"}, "elsewhere"
)
FALSE_OPERATOR_HERE = Peer("a pod of ours that calls itself the operator", FALSE_OPERATOR.labels)
API_SERVER = Peer("the API server", address="172.20.0.1")
INTERNET = Peer("the internet", address="203.0.113.7")
INTERNET_6 = Peer("the internet, IPv6", address="2001:db8::7")
METADATA = Peer("the cloud's metadata", address="169.254.169.254")
AROUND = tuple(
    Peer(f"a private address, {address}", address=address)
    for address in (
        "10.20.30.40", "100.64.0.1", "172.16.5.6", "172.31.255.1", "192.168.1.1", "169.254.1.1",
        "fd12:3456::1", "fe80::1",
    )
)  # fmt: skip
CLOUDS = (
    METADATA,
    *(
        Peer(f"a cloud's metadata, {address}", address=address)
        for address in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254")
    ),
)
"""AWS, Azure, Google and others; Alibaba; Azure's own; Oracle; AWS by IPv6."""

WORKER = Peer("a worker of ours", {**OURS, "app.kubernetes.io/component": "worker"})
HEAD = Peer("our head", {**OURS, "app.kubernetes.io/component": "head"})
COLLECTOR = Peer("the collector", {"app.kubernetes.io/name": "understudy-collector"})
PROXY = Peer("the proxy of the console", {"app.kubernetes.io/name": "understudy-console-proxy"})
INGRESS = Peer("the ingress controller", {"app.kubernetes.io/name": "ingress-nginx"}, "ingress-nginx")

Flow = tuple[str, str, Peer, int]
"""Role of our pod, `to` or `from`, the peer, the port (TCP; DNS is UDP, too)."""

DNS_PORTS = (53, 5353)
ROLES = ("head", "worker", "submitter")

NEEDED: tuple[Flow, ...] = (
    *((role, "to", peer, 53) for role in ROLES for peer in (DNS, NODE_DNS)),
    *((role, "to", OPENSHIFT_DNS, 5353) for role in ROLES),
    *((role, way, OWN, 12345) for role in ("head", "worker") for way in ("to", "from")),
    ("submitter", "to", OWN, 8265),
    ("head", "to", API_SERVER, 443),
    ("head", "to", API_SERVER, 6443),
    ("worker", "to", INTERNET, 443),
    ("worker", "to", INTERNET_6, 443),
    ("worker", "from", PROMETHEUS, 9464),
    *(("head", "from", PROMETHEUS, port) for port in (8080, 44217, 44227)),
    ("worker", "from", PROMETHEUS, 8080),
)
PINNED: tuple[tuple[str, str, int, str], ...] = (
    ("head", "from", 8265, "the operator"),
    ("head", "to", 5432, "the store"),
    ("worker", "to", 5432, "the store"),
    ("head", "to", 6379, "Redis"),
)
"""Ports that somebody must get through to, whom each installation names."""

FORBIDDEN: tuple[Flow, ...] = (
    *(("head", "from", STRANGER, port) for port in (6379, 8265, 10001, 8080, 44217, 44227, 52365)),
    *(("worker", "from", STRANGER, port) for port in (9464, 8080, 10002)),
    *((role, "from", INTERNET, 8265) for role in ROLES),
    ("head", "from", PROMETHEUS, 8265),
    *(("head", "from", peer, 8265) for peer in (FALSE_OPERATOR, FALSE_OPERATOR_HERE)),
    ("worker", "from", FALSE_OPERATOR, 9464),
    *((role, "to", INTERNET, port) for role in ROLES for port in (22, 25, 53, 80, 5432, 6379, 8080)),
    *((role, "to", FALSE_DNS, 53) for role in ROLES),
    *((role, "to", peer, port) for role in ROLES for peer in CLOUDS for port in (80, 443)),
    *(("worker", "to", peer, 443) for peer in AROUND),
    *((role, "to", STRANGER, port) for role in ROLES for port in (5432, 6379, 9999)),
    *((role, "to", peer, port) for role in ROLES for peer in AROUND for port in (5432, 6379)),
    ("worker", "to", API_SERVER, 443),
    ("worker", "to", API_SERVER, 6443),
    ("submitter", "to", INTERNET, 443),
)

NEEDED_OF_COLLECTOR: tuple[Flow, ...] = (
    ("worker", "to", COLLECTOR, 4318),
    ("collector", "from", WORKER, 4318),
    *(("collector", "to", peer, 53) for peer in (DNS, NODE_DNS)),
    ("collector", "to", OPENSHIFT_DNS, 5353),
    *(("collector", "to", peer, 443) for peer in (INTERNET, INTERNET_6)),
)
"""Where there is one."""

FORBIDDEN_TO_COLLECTOR: tuple[Flow, ...] = (
    *(("collector", "from", peer, 4318) for peer in (STRANGER, HEAD, INTERNET)),
    ("worker", "to", COLLECTOR, 22),
    *(("collector", "to", peer, 443) for peer in (*CLOUDS, *AROUND)),
    ("collector", "to", OWN, 8265),
    ("collector", "to", STRANGER, 5432),
    ("collector", "to", FALSE_DNS, 53),
    *(("collector", "to", INTERNET, port) for port in (22, 53)),
)

NEEDED_OF_CONSOLE: tuple[Flow, ...] = (
    ("head", "from", PROXY, 8484),
    ("proxy", "from", INGRESS, 4180),
    ("proxy", "to", HEAD, 8484),
    *(("proxy", "to", peer, 53) for peer in (DNS, NODE_DNS)),
    ("proxy", "to", OPENSHIFT_DNS, 5353),
    *(("proxy", "to", peer, 443) for peer in (INTERNET, INTERNET_6)),
)
"""Where it is behind an ingress."""

FORBIDDEN_TO_CONSOLE: tuple[Flow, ...] = (
    *(("head", "from", peer, 8484) for peer in (INGRESS, STRANGER, INTERNET, PROMETHEUS)),
    *(("head", "from", PROXY, port) for port in (6379, 8265, 10001)),
    *(("proxy", "from", peer, 4180) for peer in (STRANGER, WORKER, INTERNET)),
    ("proxy", "from", INGRESS, 44180),
    ("proxy", "to", HEAD, 8265),
    ("proxy", "to", WORKER, 8484),
    *(("proxy", "to", peer, 443) for peer in (*CLOUDS, *AROUND)),
    ("proxy", "to", STRANGER, 5432),
    ("proxy", "to", FALSE_DNS, 53),
    *(("proxy", "to", INTERNET, port) for port in (22, 53)),
)


def findings(documents: list[Manifest]) -> list[str]:
    """What the policies keep back that is needed, and what they let through that is not; nothing without policies."""
    policies = of_kind(documents, "NetworkPolicy")
    if not policies:
        return []
    found, listed = [], pods(documents)
    needed, forbidden = NEEDED, FORBIDDEN
    if any(pod.role == "collector" for pod in listed):
        needed, forbidden = needed + NEEDED_OF_COLLECTOR, forbidden + FORBIDDEN_TO_COLLECTOR
    if any(pod.role == "proxy" for pod in listed):
        needed, forbidden = needed + NEEDED_OF_CONSOLE, forbidden + FORBIDDEN_TO_CONSOLE
    for pod in listed:
        for wanted, flows in ((True, needed), (False, forbidden)):
            for role, way, peer, port in flows:
                for protocol in ("TCP", "UDP") if port in DNS_PORTS else ("TCP",):
                    if role == pod.role and passes(policies, pod, way, peer, port, protocol) is not wanted:
                        problem = "is not let through" if wanted else "is let through"
                        found.append(f"network of {pod.name}: {way} {peer.what}, {protocol} port {port}, {problem}")
        for role, way, port, what in PINNED:
            if role == pod.role:
                found += [f"network of {pod.name}: {problem}" for problem in _pinned(policies, pod, way, port, what)]
    return found


def passes(policies: list[Manifest], pod: Pod, way: str, peer: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether the policies let a connection of a pod through: the sum of what those for it and this way allow."""
    rules = _rules(policies, pod, way)
    return rules is None or any(
        _has_port(rule.get("ports"), port, protocol) and _has_peer(rule.get(way), peer) for rule in rules
    )


def _rules(policies: list[Manifest], pod: Pod, way: str) -> list[Manifest] | None:
    """The rules for a pod and this way; None, if no policy is for it."""
    kind, rules = ("Egress", "egress") if way == "to" else ("Ingress", "ingress")
    meant = [
        policy["spec"]
        for policy in policies
        if kind in policy["spec"].get("policyTypes", []) and selects(policy["spec"].get("podSelector"), pod.labels)
    ]
    return [rule for spec in meant for rule in spec.get(rules) or []] if meant else None


def _pinned(policies: list[Manifest], pod: Pod, way: str, port: int, what: str) -> Iterator[str]:
    """Who may use a port is named: pods by their labels, in a namespace by its name, or a few addresses."""
    named = [
        peer
        for rule in _rules(policies, pod, way) or []
        if any(one.get("port") == port for one in rule.get("ports") or [])
        for peer in rule.get(way) or [{}]
    ]
    if not named:
        yield f"nobody is let through {way} {what}, port {port}"
    for peer in named:
        if not _names(peer):
            yield f"{way} {what}, port {port}: {peer or 'everybody'} is more than {what}"


def _names(peer: Manifest) -> bool:
    if "ipBlock" in peer:
        network = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return network.num_addresses <= 1 << (8 if network.version == 4 else 64)
    namespace = (peer.get("namespaceSelector") or {}).get("matchLabels") or {}
    in_one = "namespaceSelector" not in peer or "kubernetes.io/metadata.name" in namespace
    return in_one and bool((peer.get("podSelector") or {}).get("matchLabels"))


def _has_port(ports: list[Manifest] | None, port: int, protocol: str) -> bool:
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
