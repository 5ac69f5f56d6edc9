"""The image of the pods: what goes into it is named, by version, hash and digest."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..manifests import lock

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "k8s" / "Dockerfile").read_text()
LOCKED = lock.read(ROOT / "k8s" / "requirements.lock")


def test_it_has_what_was_locked() -> None:
    """Every dependency of the wheel, and what builds it, is in the lock, in a version that is allowed; each file of
    the lock has its hash, and the image installs nothing else, on a base that a digest names."""
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    for requirement in map(Requirement, wanted):
        locked = LOCKED[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(locked.version), requirement
    assert all(one.hashes and set(map(len, one.hashes)) == {64} for one in LOCKED.values())
    installs = re.findall(r"pip (?:install|download|wheel) [^\n&]*", DOCKERFILE)
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
    assert "--require-hashes -r /requirements.lock" in DOCKERFILE
    assert re.search(r"^ARG PYTHON=python:\S+-slim-bookworm@sha256:[0-9a-f]{64}$", DOCKERFILE, re.M)
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.M) == ["${PYTHON}", "${PYTHON}"]


def test_what_is_locked_needs_nothing_else() -> None:
    """Given the distributions that are installed here in the locked version, then all they need on Linux is locked."""
    environment = {"python_version": "3.12", "python_full_version": "3.12.14", "extra": ""}
    for name, locked in LOCKED.items():
        try:
            here = distribution(name)
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, here.requires or []) if here.version == locked.version else ():
            if requirement.marker is None or requirement.marker.evaluate(environment):
                assert canonicalize_name(requirement.name) in LOCKED, (name, requirement)


def test_it_is_built_of_every_folder() -> None:
    """The Dockerfile copies each folder of the package, .dockerignore lets it through, and nothing else is sent."""
    folders = {path.partition("/")[0] for path in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    copied = {name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M) for name in line.split()[:-1]}
    assert allowed == copied == folders | {"pyproject.toml", "README.md", "LICENSE", "k8s/requirements.lock"}
