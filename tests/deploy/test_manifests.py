"""The Kubernetes manifests: they render, are what the schemas, the operator and we demand, and each rule bites."""

from __future__ import annotations

import ast
import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import typer

from understudy.cluster.cli import doctor
from understudy.cluster.cli.main import app
from understudy.examples.survey.__main__ import app as survey

from ..manifests import console, kuberay, lock, network, ours
from ..manifests.faults import BY_NEWEST, BY_RULES, BY_SCHEMAS
from ..manifests.generated import PATH, SOURCE, generated
from ..manifests.objects import (
    COLLECTED,
    DEVELOPMENT,
    GONE,
    OWN,
    PRODUCTION,
    RENDERED,
    SHOWN,
    Manifest,
    of_kind,
    pods,
    ray_clusters,
    render,
)
from ..manifests.rules import PROVIDED, check_manifests
from ..manifests.schemas import OPERATORS, custom

ROOT = Path(__file__).parents[2]
DOCUMENTATION = (ROOT / "docs" / "kubernetes.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "k8s" / "Dockerfile").read_text()
LOCKED = lock.read(ROOT / "k8s" / "requirements.lock")

if not os.environ.get("CI") and shutil.which("kubectl") is None:
    pytest.skip("kubectl is not installed", allow_module_level=True)


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


@pytest.mark.parametrize(("name", "target", "path", "value", "finding"), BY_SCHEMAS + BY_RULES + BY_NEWEST)
def test_a_fault_is_found(name: str, target: str, path: str, value: Any, finding: str) -> None:
    """Given manifests with one fault, when they are checked, then it is found: no rule is there for show."""
    newest = (name, target, path, value, finding) in BY_NEWEST
    found = check_manifests(seeded(name, target, path, value), PROVIDED, OPERATORS[-1:] if newest else OPERATORS)
    assert [problem for problem in found if finding in problem], found


@pytest.mark.thorough
def test_every_rule_has_a_fault() -> None:
    """Each place in the rules that reports something is reached by one of the faults above."""
    modules = (console, kuberay, network, ours)
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
        for fault in BY_RULES + BY_NEWEST:
            for module in (console, kuberay, network):
                module.findings(seeded(*fault[:4]))
            ours.findings(seeded(*fault[:4]), PROVIDED)
    finally:
        sys.settrace(before)
    assert len(places) > 80
    assert sorted(places - reached) == []


def reports(path: Path) -> Iterator[int]:
    """Lines of a module that yield something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
            yield node.lineno


@pytest.mark.parametrize(
    ("name", "rules", "flows"),
    [
        (OWN, [{}], network.FORBIDDEN), (OWN, [], network.NEEDED),
        (COLLECTED, [{}], network.FORBIDDEN_TO_COLLECTOR), (COLLECTED, [], network.NEEDED_OF_COLLECTOR),
        (SHOWN, [{}], network.FORBIDDEN_TO_CONSOLE), (SHOWN, [], network.NEEDED_OF_CONSOLE),
    ],
)  # fmt: skip
def test_every_flow_of_the_network_is_asked_for(
    name: str, rules: list[Manifest], flows: tuple[network.Flow, ...]
) -> None:
    """Given one policy that lets everything through, or nothing, then each flow that must not be, or must be, is
    found."""
    spec = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": rules, "egress": rules}
    others = [document for document in rendered(name) if document["kind"] != "NetworkPolicy"]
    found = network.findings([*others, {"kind": "NetworkPolicy", "metadata": {"name": "one"}, "spec": spec}])
    for role, way, peer, port in flows:
        whose = rf"network of \S+ {role}: {way} {re.escape(peer.what)}, \w+ port {port}, "
        assert any(re.match(whose, problem) for problem in found), (role, way, peer, port)


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
    assert kinds[SHOWN] == sorted([*kinds[PRODUCTION], "Deployment", "Ingress", "Service"])
    assert kinds[OWN] == sorted([*common, "NetworkPolicy", "PodDisruptionBudget", "RayJob"])
    [(_, cluster)] = ray_clusters(rendered(PRODUCTION))
    [(_, of_job)] = ray_clusters(rendered(OWN))
    assert {**of_job, "upgradeStrategy": {"type": "Recreate"}} == cluster
    [worker] = [pod for pod in pods(rendered(PRODUCTION)) if pod.role == "worker"]
    assert worker.spec["topologySpreadConstraints"]
    assert "gcsFaultToleranceOptions" in cluster
    assert cluster["autoscalerOptions"]["version"] == "v2"


def test_versions_are_the_same_everywhere() -> None:
    """Image tag, Ray's version, Python's and the user's number: manifests, Dockerfile, lock and documentation say the
    same, and the Dockerfile names no version of ours."""
    version = PROJECT["project"]["version"]
    python = re.search(r"^ARG PYTHON=python:(\d+\.\d+)", DOCKERFILE, re.M)
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M)
    assert python is not None
    assert user is not None
    for name in RENDERED:
        for _, cluster in ray_clusters(rendered(name)):
            assert cluster["rayVersion"] == LOCKED["ray"].version
        for pod in [pod for pod in pods(rendered(name)) if pod.is_ours]:
            security = pod.spec["securityContext"]
            assert (str(security["runAsUser"]), str(security["runAsGroup"])) == user.groups()
            images = {container["image"] for container in pod.containers() if "image" in container}
            assert images == {f"understudy:{version}"}
        for job in of_kind(rendered(name), "RayJob"):
            assert f"/python{python.group(1)}/" in job["spec"]["entrypoint"]
    assert f"Programming Language :: Python :: {python.group(1)}" in PROJECT["project"]["classifiers"]
    assert f"--python-version {python.group(1)} " in (ROOT / "scripts" / "lock").read_text()
    documented = set(re.findall(r"\bunderstudy:([\d.]+\d)|newTag: ([\d.]+\d)", DOCUMENTATION))
    assert {one or other for one, other in documented} == {version}
    assert version not in DOCKERFILE


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
        yield from re.findall(r"\bunderstudy (?:up|run|drain|store|send|console)\b[^;&|<>()\n]*", value)
        yield from re.findall(r"\bpython -m understudy\.[^;&|<>()\n]*", value)


def test_commands_exist() -> None:
    """Each command that hooks, init containers and jobs call is one that our command line, or an example's, takes."""
    found = {line.strip() for name in RENDERED for line in commands(of_kind(rendered(name), "RayCluster", "RayJob"))}
    examples = {line for line in found if line.startswith("python -m understudy.examples.survey ")}
    assert {line.split()[1] for line in found - examples} == {"up", "drain", "store", "console"}
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


def test_ray_is_as_the_manifests_take_it() -> None:
    """Ray's autoscaler reads its token where ours is mounted, its probes need no token, and it has the function that
    the operator's Job cleans up Redis with."""
    provider = import_module("ray.autoscaler._private.kuberay.node_provider")
    files = (provider.IN_CLUSTER_TOKEN_PATH, provider.IN_CLUSTER_CA_CERT_PATH)
    assert files == (f"{kuberay.ACCOUNT}/token", f"{kuberay.ACCOUNT}/ca.crt")
    assert "/api/healthz" in import_module("ray.dashboard.http_server_agent").PUBLIC_EXACT_PATHS
    assert callable(import_module("ray._private.gcs_utils").cleanup_redis_storage)


def test_an_overlay_as_documented_is_in_order(tmp_path: Path) -> None:
    """Given an overlay with the patches that the documentation shows for an operator, PostgreSQL and Redis elsewhere,
    when it is rendered, then they are let through, and nothing is found in it."""
    [patches] = re.findall(r"```yaml\n(patches:.*?)```", DOCUMENTATION, re.S)
    base = os.path.relpath(ROOT / "k8s" / PRODUCTION, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{base}]\nnamespace: agents\n{patches}")
    documents = render(str(tmp_path))
    assert check_manifests(documents) == []
    policies = of_kind(documents, "NetworkPolicy")
    [head] = [pod for pod in pods(documents) if pod.role == "head"]
    operator = network.Peer("the operator", network.FALSE_OPERATOR.labels, "default")
    assert network.passes(policies, head, "from", operator, 8265)
    assert network.passes(policies, head, "to", network.Peer("PostgreSQL", address="10.8.0.12"), 5432)
    redis = network.Peer("Redis", {"app.kubernetes.io/name": "redis"}, "redis")
    assert network.passes(policies, head, "to", redis, 6379)


def test_the_secret_is_documented() -> None:
    """The documentation has people make the Secret with each key that the manifests want."""
    for name, keys in PROVIDED.items():
        assert f"create secret generic {name}" in DOCUMENTATION
        for key in keys:
            assert f"--from-literal={key}=" in DOCUMENTATION


def test_operators_are_said_everywhere() -> None:
    """The oldest operator is the same in the documentation, in `understudy doctor`, in the annotation of whatever the
    operator reads, and the first that manifests are checked for."""
    oldest = ".".join(map(str, doctor.OLDEST_OPERATOR))
    assert oldest == OPERATORS[0]
    assert {"understudy/kuberay": f">={oldest}"} == ours.OPERATORS
    assert f"KubeRay](https://github.com/ray-project/kuberay) {oldest} or newer" in DOCUMENTATION
    for operator in OPERATORS:
        assert set(custom("RayCluster", "ray.io/v1", (operator,))) == {f"kuberay-{operator}: "}
        assert set(custom("RayJob", "ray.io/v1", (operator,))) == {f"kuberay-{operator}: "}


def what_runs(command: list[str], node_type: str, programs: Path) -> list[str]:
    """What a container's command calls of ours until all of it has ended, also what it leaves in the background. The
    pod's log, the output of its process 1, is a pipe here."""
    reading, writing = os.pipe()
    line = [part.replace("/proc/1/fd/1", f"/dev/fd/{writing}") for part in command]
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "KUBERAY_NODE_TYPE": node_type}
    with open(reading) as log:
        subprocess.run(line, env=environment, stdout=writing, pass_fds=(writing,), check=True, timeout=60)
        os.close(writing)
        return log.read().splitlines()


@pytest.mark.parametrize("name", [PRODUCTION, OWN, SHOWN])
def test_the_job_that_cleans_up_redis_runs_nothing_of_ours(name: str, tmp_path: Path) -> None:
    """Given the head's init container and hook as they are rendered, when a shell runs them in the operator's Job that
    cleans up Redis, then they end well and have called nothing; at the head each calls what it should."""
    (tmp_path / "understudy").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "understudy").chmod(0o755)
    [head] = [pod for pod in pods(rendered(name)) if pod.role == "head"]
    hook = head.containers()[0]["lifecycle"]["postStart"]["exec"]["command"]
    [migrate] = [container["command"] for container in head.spec["initContainers"]]
    assert what_runs(migrate, "head", tmp_path) == ["store migrate"]
    called = what_runs(hook, "head", tmp_path)
    assert "up --keep" in called
    assert {line.split()[0] for line in called} == ({"up", "console"} if name == SHOWN else {"up"})
    assert len(called) == len({line.split()[0] for line in called})
    assert what_runs(migrate, "redis-cleanup", tmp_path) == what_runs(hook, "redis-cleanup", tmp_path) == []
