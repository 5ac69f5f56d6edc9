"""`understudy doctor`: what is there, what is missing, what to do. It starts and changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import inspect

from understudy.config import (
    KEPT_SETTINGS,
    OFFLINE_MODEL,
    Settings,
    differences,
    model_profile_from_environment,
    redact,
    state_home,
)
from understudy.errors import UnderstudyError
from understudy.profiles import DEFAULT_BASE_URLS
from understudy.profiles import check as check_profile
from understudy.protocol import ServiceDirectory, unpacked
from understudy.store.db.engine import Database
from understudy.store.reads import queries
from understudy.telemetry import (
    DEFAULT_SAMPLER,
    ENDPOINTS,
    RATIOS,
    captures_content,
    exports_spans,
    has_collector,
    protocol_of,
    sampler_of,
)
from understudy.waiting import answered_within

from ..client import background
from ..client.checking import git_here, sandbox_here
from ..ray.own_ray import connect_ray, running_address
from ..ray.ray_edge import RAY_VERSION, result_of
from ..ray.services import supervisor_handle
from ..ray.versions import ANSWER_SECONDS, VERSION, mismatch, version_of

FREE_BYTES = 1 << 30
OLDEST_OPERATOR = (1, 6)
"""The oldest KubeRay that the manifests in `k8s/` are for. Earlier ones probe Ray with `wget`, which the image lacks,
and know neither `upgradeStrategy` nor `authOptions.secretName`."""

OPERATOR_TAGS = "RAY_USAGE_STATS_EXTRA_TAGS"
"""Where KubeRay says its version, at the head only: `kuberay_version=v1.7.0;kuberay_crd=RayCluster` (its
`ray-operator/controllers/ray/common/pod.go`, `setContainerEnvVars`)."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        ok: what runs works, or what would be started would.
        advice: what to do, where it is not ok, or a warning.
        warning: it works, but perhaps not as the person who looks at it believes.
    """

    name: str
    ok: bool
    found: str
    advice: str = ""
    warning: bool = False


def examine(store: str | None) -> list[Check]:
    """All checks, in the order in which they build on each other."""
    checks = [Check("python", sys.version_info >= (3, 11), sys.version.split()[0], "Python 3.11 or newer is needed.")]
    try:
        settings = Settings.from_environment(store=store)
    except UnderstudyError as error:
        return [*checks, Check("settings", False, error.message, error.hint)]
    checks.append(Check("settings", True, f"namespace {settings.namespace}, model {settings.model}"))
    checks.append(Check("spans", True, _spans(settings)))
    checks.append(_model(settings))
    checks.append(_guarded("store", lambda: _store(settings)))
    checks.append(_disk())
    checks.append(Check("sandbox", True, sandbox_here()))  # agents without `bash` need none
    checks.append(Check("git", True, git_here()))  # agents without worktrees need none
    checks += _operator(os.environ.get(OPERATOR_TAGS, ""))
    try:
        address = running_address()
    except UnderstudyError as error:
        return [*checks, Check("ray", False, error.message, error.hint)]
    if address is None:
        checks.append(Check("ray", True, f"{RAY_VERSION}; none runs; `understudy up` or `run` starts one"))
        return checks
    checks.append(_guarded("ray", lambda: f"{RAY_VERSION} at {connect_ray(address)}"))
    if checks[-1].ok:
        checks += _services(settings)
    return checks


def _guarded(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except UnderstudyError as error:
        return Check(name, False, error.message, error.hint)


def _spans(settings: Settings) -> str:
    """Where services that are started from here would send spans."""
    variables = settings.telemetry
    if not exports_spans(variables):
        return "none"
    content = ", with content" if captures_content(variables) else ""
    sampler, ratio = sampler_of(variables)
    if sampler != DEFAULT_SAMPLER:
        content += f", sampled by {sampler}" + (f" of {ratio:g}" if sampler in RATIOS else "")
    if not has_collector(variables):
        return f"to local files{content}; `understudy trace` needs none"
    endpoint = next((variables[name] for name in ENDPOINTS if variables.get(name)), "the default endpoint")
    return f"to {endpoint} over {protocol_of(variables)}{content}"


def _model(settings: Settings) -> Check:
    if settings.model == OFFLINE_MODEL:
        return Check(
            "model", True, "offline (deterministic, local; set OPENAI_API_KEY or ANTHROPIC_API_KEY for a real one)"
        )
    try:
        profile = model_profile_from_environment()
        if profile is not None:
            check_profile(profile)
    except UnderstudyError as error:
        return Check("model", False, error.message, error.hint)
    if profile is None:
        advice = (
            "Set OPENAI_API_KEY (and OPENAI_BASE_URL for other endpoints) or ANTHROPIC_API_KEY, or "
            "UNDERSTUDY_MODEL=offline."
        )
        return Check("model", False, f"{settings.model} without a key", advice)
    where = (profile.base_url or DEFAULT_BASE_URLS[profile.protocol]).partition("?")[0]
    return Check("model", True, f"{settings.model} at {where}")


def _disk() -> Check:
    """What is free where the store, spans and Ray's daemon have their files by default, or will have."""
    try:
        home = state_home()
    except UnderstudyError as error:
        return Check("disk", False, error.message, error.hint)
    there = next(path for path in (home, *home.parents) if os.path.exists(path))  # Path.exists may be forbidden to look
    free = shutil.disk_usage(there).free
    return Check("disk", free > FREE_BYTES, f"{free >> 20} MiB free", "Less than 1 GiB is free.")


def _operator(tags: str) -> list[Check]:
    """KubeRay, if it made this process' container. Its builds from a branch may name no version."""
    version = re.search(r"kuberay_version=([^;]*)", tags)
    if version is None:
        return []
    numbers = re.match(r"v?(\d+)\.(\d+)", version.group(1))
    oldest = ".".join(map(str, OLDEST_OPERATOR))
    advice = (
        f"The manifests need KubeRay {oldest} or newer: upgrade its custom resource definitions, then the operator "
        "(`helm upgrade`), and let it recreate the pods."
    )
    known = numbers is None or (int(numbers.group(1)), int(numbers.group(2))) >= OLDEST_OPERATOR
    return [Check("operator", known, f"KubeRay {version.group(1)}", advice)]


def _store(settings: Settings) -> str:
    path = settings.store.removeprefix("sqlite:///")
    if settings.store.startswith("sqlite") and not os.path.exists(path):
        return f"{settings.store} (will be created)"
    database = Database(settings.store)
    try:
        with database.read() as connection:
            if not inspect(connection).has_table("schema_migration"):
                return f"{redact(settings.store)}: reachable, tables will be created"
            owner = queries.owner(connection, settings.namespace)
            live = len(queries.active_sessions(connection, settings.namespace, None))
    finally:
        database.close()
    ownership = f"generation {owner.generation}" if owner else "no owner yet"
    return f"{redact(settings.store)}: {ownership}, {live} sessions with work to do"


def _services(settings: Settings) -> list[Check]:
    try:
        handle = supervisor_handle(settings)
        if handle is None:
            return [Check("services", True, "none run; `understudy up` or `run` starts them")]
        version = background.wait(answered_within(version_of(handle), ANSWER_SECONDS))
        if version != VERSION:
            raise mismatch(version)
        done = background.wait(result_of(handle.ready.remote(5.0)))
        directory: ServiceDirectory = unpacked(done, ServiceDirectory, "the directory of the services")
        running = background.wait(result_of(handle.settings.remote()))
    except TimeoutError:
        return [Check("services", False, "the supervisor gives no answer", "Has Ray room for it (`ray status`)?")]
    except UnderstudyError as error:
        return [Check("services", False, error.message, error.hint)]
    nodes = ", ".join(f"node {node.node_id[:8]} pid {node.pid}" for node in directory.nodes)
    found = f"supervisor pid {directory.pid}, {nodes}, {len(directory.frames)} session actor(s)"
    different = differences(running, settings.of_services())
    return [Check("services", True, found), of_services(different), *placements(directory.problems)]


def of_services(different: list[str]) -> Check:
    """Whether running services have other settings than this environment: no failure, since what runs works."""
    name = "settings of the services"
    if not different:
        return Check(name, True, "as this environment says")
    advice = f"What runs works: {KEPT_SETTINGS}, which stays."
    return Check(name, True, ", ".join(different), advice, warning=True)


def placements(problems: dict[str, str]) -> list[Check]:
    """One for each placement that no session actor can be started for."""
    advice = "Its sessions wait; others go on. `ray status` shows what the nodes have."
    return [Check(f"placement {name[:8] or 'default'}", False, reason, advice) for name, reason in problems.items()]
