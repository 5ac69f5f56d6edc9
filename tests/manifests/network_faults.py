"""Faults of network policies that the checks must find: what is missing, and what is too much."""

from __future__ import annotations

from .objects import GONE, PRODUCTION, Fault

ALL = "NetworkPolicy/understudy"
OPERATOR = "NetworkPolicy/understudy-operator"
POSTGRESQL = "NetworkPolicy/understudy-postgresql"
REDIS = "NetworkPolicy/understudy-redis"
API_SERVER = "NetworkPolicy/understudy-api-server"
INTERNET = "NetworkPolicy/understudy-internet"

IN_THE_NETWORK: list[Fault] = [
    (PRODUCTION, ALL, "spec.egress.1", GONE, "to the cluster's DNS, UDP port 53, is not let"),
    (PRODUCTION, ALL, "spec.egress.1.ports.1", GONE, "cluster's DNS, TCP port 53, is not let"),
    (PRODUCTION, ALL, "spec.egress.1.to.1", GONE, "to the node's DNS cache, UDP port 53, is not"),
    (PRODUCTION, ALL, "spec.egress.1.to", GONE, "to the internet, UDP port 53, is let through"),
    (
        PRODUCTION, ALL, "spec.egress.1.to.0.namespaceSelector", {},
        "to a pod that calls itself DNS, UDP port 53, is let through",
    ),
    (PRODUCTION, ALL, "spec.egress.2", GONE, "to OpenShift's DNS, UDP port 5353, is not let"),
    (PRODUCTION, ALL, "spec.egress.2.ports.0.port", 53, "DNS, UDP port 5353, is not let"),
    (PRODUCTION, ALL, "spec.egress.0", GONE, "another pod of ours, TCP port 12345, is not let"),
    (PRODUCTION, ALL, "spec.ingress.1", GONE, "from Prometheus, TCP port 9464, is not let"),
    (PRODUCTION, ALL, "spec.ingress.0.from", [], "pod of the namespace, TCP port 6379, is let"),
    (PRODUCTION, ALL, "spec.ingress.1.ports", GONE, "from Prometheus, TCP port 8265, is let"),
    (PRODUCTION, ALL, "spec.policyTypes", ["Egress"], "from the internet, TCP port 8265, is let"),
    (PRODUCTION, OPERATOR, "spec.ingress", [], "nobody is let through from the operator"),
    (
        PRODUCTION, OPERATOR, "spec.ingress.0.from.0.namespaceSelector", {},
        "a pod that calls itself the operator, TCP port 8265, is let through",
    ),
    (
        PRODUCTION, OPERATOR, "spec.ingress.0.from.0.namespaceSelector", {},
        "is more than the operator",
    ),
    (
        PRODUCTION, OPERATOR, "spec.ingress.0.from.0.namespaceSelector", GONE,
        "a pod of ours that calls itself the operator, TCP port 8265, is let through",
    ),
    (
        PRODUCTION, OPERATOR, "spec.ingress.0.from.0.podSelector", GONE,
        "port 8265: {'namespaceSelector'",
    ),
    (PRODUCTION, OPERATOR, "spec.ingress.0.ports.0.port", 9464, "nobody is let through from"),
    (PRODUCTION, POSTGRESQL, "spec.egress", [], "worker: nobody is let through to the store"),
    (PRODUCTION, POSTGRESQL, "spec.egress.0.to", GONE, "everybody is more than the store"),
    (PRODUCTION, POSTGRESQL, "spec.egress.0.to", GONE, "internet, TCP port 5432, is let"),
    (
        PRODUCTION, POSTGRESQL, "spec.egress.0.to", [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "{'ipBlock': {'cidr': '10.0.0.0/8'}} is more than the store",
    ),
    (
        PRODUCTION, POSTGRESQL, "spec.egress.0.to.0.podSelector", {},
        "to another pod of the namespace, TCP port 5432, is let through",
    ),
    (
        PRODUCTION, POSTGRESQL, "spec.podSelector.matchExpressions.0.values", ["head"],
        "worker: nobody is let through to the store",
    ),
    (PRODUCTION, REDIS, "spec.egress", [], "nobody is let through to Redis"),
    (PRODUCTION, REDIS, "spec.egress.0.to", GONE, "everybody is more than Redis"),
    (
        PRODUCTION, REDIS, "spec.podSelector.matchLabels",
        {"app.kubernetes.io/part-of": "other"}, "nobody is let through to Redis",
    ),
    (PRODUCTION, API_SERVER, "spec.egress", [], "the API server, TCP port 6443, is not let"),
    (
        PRODUCTION, API_SERVER, "spec.egress.0.to.0.ipBlock.except.2", "169.254.1.0/24",
        "head: to the cloud's metadata, TCP port 443, is let through",
    ),
    (
        PRODUCTION, API_SERVER, "spec.egress.0.to.1.ipBlock.except.0", GONE,
        "to a cloud's metadata, fd00:ec2::254, TCP port 443, is let through",
    ),
    (
        PRODUCTION, API_SERVER, "spec.podSelector.matchLabels",
        {"app.kubernetes.io/part-of": "understudy"}, "worker: to the API server, TCP port 6443, is let through",
    ),
    (PRODUCTION, INTERNET, "spec.egress.0.to.0", GONE, "the internet, TCP port 443, is not"),
    (PRODUCTION, INTERNET, "spec.egress.0.to.1", GONE, "internet, IPv6, TCP port 443, is not"),
    (PRODUCTION, INTERNET, "spec.egress.0.to", GONE, "to the cloud's metadata, TCP port 443"),
    (PRODUCTION, INTERNET, "spec.egress.0.ports", GONE, "to the internet, TCP port 22, is let"),
    *(
        (
            PRODUCTION, INTERNET, f"spec.egress.0.to.{block}.ipBlock.except.{number}", GONE,
            f"worker: to {whose}, {address}, TCP port 443, is let through",
        )
        for block, number, whose, address in (
            (0, 0, "a private address", "10.20.30.40"),
            (0, 1, "a private address", "100.64.0.1"),
            (0, 2, "a cloud's metadata", "168.63.129.16"),
            (0, 3, "a private address", "169.254.1.1"),
            (0, 4, "a private address", "172.31.255.1"),
            (0, 5, "a cloud's metadata", "192.0.0.192"),
            (0, 6, "a private address", "192.168.1.1"),
            (1, 0, "a private address", "fd12:3456::1"),
            (1, 1, "a private address", "fe80::1"),
        )
    ),
]  # fmt: skip
