"""`understudy certify`: one recorded run of an agent, then one run for each point at which its process can die."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from understudy.actors.approval import SHELL_TOOLS
from understudy.actors.tools import builtin
from understudy.config import OFFLINE_MODEL, ModelProfile, Settings, model_profile_from_environment
from understudy.confinement import confinement_of
from understudy.environment import for_tools
from understudy.errors import InvalidInput, ModelProfileMissing, RunFailed
from understudy.identifiers import new_identifier
from understudy.manifest import below, with_below
from understudy.testing.offline import OfflineServer

from ..client.agent_file import AgentFile
from ..client.compiling import compile_spec
from .frame_processes import FrameProcesses
from .recording import Recorded, Recorder, Replayer, Round, WatchedGateway
from .stage import Point, Record, Stage
from .verdict import Verdict, declared, judge
from .watched_frame import TOOL_DONE
from .workspaces import File, Workspaces

USABLE = ("completed", "round_limit", "budget_exceeded")
"""How the undisturbed run may end: a run that fails has nothing to be compared with."""

Progress = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Shows how far something has come: label and total in, a function that takes how much more is done out."""


@dataclass(frozen=True)
class Request:
    """What shall be certified.

    Attributes:
        spec: compiled.
        directory: of the agent's file.
        points: how many runs with a death; None for all.
        only: the tool whose calls alone are interrupted.
        timeout: seconds for each run.
        blobs: the agent's skills, by hash.
    """

    spec: dict[str, Any]
    directory: Path
    content: str
    points: int | None = None
    only: str | None = None
    timeout: float = 600.0
    blobs: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Certificate:
    """What was found, and from how much.

    Attributes:
        runs: those after the recorded one.
        rounds, tokens: of the recorded run, which is the one that the model was paid for.
    """

    agent: str
    content: str
    rounds: int
    tokens: int
    sessions: tuple[str, ...]
    status: str
    runs: int
    has_workspace: bool
    verdict: Verdict

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.verdict.findings

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"ok": self.ok, **asdict(self)}


def requested(
    agent: AgentFile, content: str | None, *, points: int | None, only: str | None, timeout: float
) -> Request:
    """A request from an agent's file and what the command was given.

    Raises:
        InvalidInput: there is no input, the agent has no tool `only`, or its specification can't be used.
        ModelProfileMissing: its model needs a key.
    """
    content = content if content is not None else agent.input
    if not content:
        raise InvalidInput("there is no input for the agent: give one with --input, or as `input` in its file")
    own = model_profile_from_environment()
    settings = Settings.from_environment()
    compiled = compile_spec(agent.spec, model=settings.model, profile=own.name if own else None, pickle=None)
    tools = declared(compiled.spec)
    if only is not None and only not in tools:
        raise InvalidInput(f"the agent has no tool {only!r}; it has: {', '.join(tools) or 'none'}")
    return Request(approved(compiled.spec), agent.directory, content, points, only, timeout, compiled.blobs)


def approved(spec: dict[str, Any]) -> dict[str, Any]:
    """The specification as if a person had approved every call that needs it: nobody is there who could."""
    tools = [{name: value for name, value in tool.items() if name != "approve"} for tool in spec["tools"]]
    return with_below({**spec, "tools": tools}, approved)


def reaches_outside(spec: dict[str, Any]) -> list[str]:
    """The tools whose effects are not confined to the workspace: the user's own, unless they run in a sandbox, and
    `bash` without one; all hooks, and memory providers."""
    confinement = confinement_of(spec)
    confined = confinement.backend != "none" and not confinement.network
    found = {
        tool["name"]
        for tool in spec["tools"]
        if not (confined and (tool.get("sandbox") or builtin(tool) in SHELL_TOOLS))
        and (builtin(tool) is None or builtin(tool) in SHELL_TOOLS)
    }
    found.update(hook["name"] for hook in spec.get("hooks", ()))
    found.update(provider["name"] for provider in (spec.get("memory") or {}).get("providers", ()))
    for agent in below(spec):
        found.update(reaches_outside(agent))
    return sorted(found)


@contextmanager
def scratch(keep: Path | None) -> Iterator[Path]:
    """A directory for stores, copies and logs: a temporary one, or one that is kept.

    Raises:
        InvalidInput: the directory to be kept has something in it, or can't be made.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="understudy-certify-", ignore_cleanup_errors=True) as name:
            yield Path(name).resolve()
        return
    try:
        keep.mkdir(mode=0o700, parents=True, exist_ok=True)
        empty = not any(keep.iterdir())
    except OSError as error:
        raise InvalidInput(f"{keep} can't be used: {error.strerror}") from None
    if not empty:
        raise InvalidInput(f"{keep} is not empty: name a new directory")
    yield keep.resolve()


class Certification:
    """The runs of one request, one after the other.

    Args:
        directory: for stores, copies and logs.
        keep: leave each run's store and workspace there.

    Raises:
        InvalidConfiguration: variables that the agent's tools need are not set.
    """

    def __init__(self, request: Request, directory: Path, *, keep: bool, progress: Progress) -> None:
        self._request = request
        self._directory = directory
        self._keep = keep
        self._progress = progress
        self._workspaces = Workspaces(request.spec, directory)
        environment = for_tools(os.environ, _variables(request.spec))
        self._processes = FrameProcesses(request.directory, environment, directory / "frames.log")
        self._token = new_identifier()[-12:]
        self._runs = 0

    async def certify(self) -> Certificate:
        """Record a run, repeat it, and let a process die at each point.

        Raises:
            RunFailed: the undisturbed run failed.
            ClusterError: the agent's processes don't start.
        """
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
            os.environ.pop(name, None)  # a trace of these runs would be taken for one of the agent's
        self._workspaces.save()
        try:
            with self._progress("recording the undisturbed run", None):
                clean, recording = await self._recorded()
            plan = self._plan(clean)
            with self._progress("certifying", len(plan) + 1) as advance:
                control = await self._replayed(clean, recording, Record())
                advance(1)
                records = []
                for point, forced in plan:
                    record = Record(victim=point, forced=forced)
                    records.append(await self._replayed(clean, recording, record))
                    advance(1)
        finally:
            await self._processes.close()
        verdict = judge(self._request.spec, clean, control, records)
        usage = [recorded.answer.usage.total_tokens for recorded in recording.values()]
        certificate = Certificate(
            self._request.spec["name"], self._request.content, len(recording), sum(usage), tuple(clean.transcript),
            clean.status, len(records) + 1, bool(self._workspaces), verdict,
        )  # fmt: skip
        if self._keep:
            self._write("report.json", certificate.to_json())
        return certificate

    async def _recorded(self) -> tuple[Record, dict[Round, Recorded]]:
        recorder, record = Recorder(), Record()
        async with _registered(recorder, self._request.spec):
            await self._run(recorder, record, self._request.spec)
        recording = recorder.recording()
        if self._keep:
            calls = [
                {"session": session, "round": number, "request": asdict(found.asked), "answer": asdict(found.answer)}
                for (session, number), found in recording.items()
            ]
            self._write("recording.json", calls)
        if record.status not in USABLE:
            raise RunFailed(f"the undisturbed run ended as {record.status}: {record.error}")
        return record, recording

    async def _replayed(self, clean: Record, recording: dict[Round, Recorded], record: Record) -> Record:
        spec = _rerunning(self._request.spec, record.forced) if record.forced else self._request.spec
        await self._run(Replayer(recording), record, spec)
        # What is as in the undisturbed run is kept once, however many runs there are.
        record.files = {path: _same(file, clean.files.get(path)) for path, file in record.files.items()}
        return record

    async def _run(self, gateway: WatchedGateway, record: Record, spec: dict[str, Any]) -> None:
        """One run: a session, a store and processes of its own, in workspaces as they were before the first."""
        self._runs += 1
        directory = self._directory / "runs" / f"{self._runs:03}"
        directory.mkdir(parents=True)
        self._workspaces.reset()
        session_id = f"certify-{self._token}-{self._runs:03}"
        working = _one_at_a_time(self._workspaces.redirected(spec))
        try:
            async with Stage(directory, gateway, self._processes, record) as stage:
                await stage.run(session_id, working, self._request.blobs, self._request.content, self._request.timeout)
            record.files = self._workspaces.snapshot()
        finally:
            if self._keep:
                self._workspaces.keep(directory / "workspaces")
            else:
                shutil.rmtree(directory, ignore_errors=True)

    def _plan(self, clean: Record) -> list[tuple[Point, str]]:
        """Where a process shall die, and which tool is made to rerun in that run."""
        request = self._request
        policies = declared(request.spec)
        found = []
        for point in dict.fromkeys(clean.points):
            if request.only is None or point.tool == request.only:
                found.append((point, ""))
            reported = policies.get(point.tool) == "report" and request.only in (None, point.tool)
            if reported and point.moment == TOOL_DONE:
                found.append((point, point.tool))
        return spread(found, request.points)

    def _write(self, name: str, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
        (self._directory / name).write_text(text + "\n", encoding="utf-8")


def spread(plan: list[Any], limit: int | None) -> list[Any]:
    """At most so many of a plan, evenly spread over it, the first and the last among them."""
    if limit is None or limit >= len(plan):
        return plan
    if limit == 1:
        return [plan[len(plan) // 2]]
    return [plan[index * (len(plan) - 1) // (limit - 1)] for index in range(limit)]


def _same(file: File, known: File | None) -> File:
    return known if known is not None and known == file else file


def _one_at_a_time(spec: dict[str, Any]) -> dict[str, Any]:
    """The specification with tools one after the other: what changed when one ran twice was then changed by it."""
    return with_below({**spec, "parallel_tools": 1}, _one_at_a_time)


def _rerunning(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """The specification with this tool declared `rerun`."""
    tools = [{**tool, "on_crash": "rerun"} if tool["name"] == name else tool for tool in spec["tools"]]
    return with_below({**spec, "tools": tools}, lambda agent: _rerunning(agent, name))


@asynccontextmanager
async def _registered(gateway: Recorder, spec: dict[str, Any]) -> AsyncIterator[None]:
    """Give a gateway the credentials that the agent and its sub-agents need; `offline` is served here."""
    names = _profiles(spec)
    own = model_profile_from_environment()
    missing = names - {OFFLINE_MODEL}
    if missing and own is None:
        raise ModelProfileMissing(f"no credentials for model profile {sorted(missing)[0]!r}: no key is set")
    for name in missing:
        assert own is not None
        gateway.register(replace(own, name=name))
    if OFFLINE_MODEL not in names:
        yield
        return
    server = OfflineServer()
    async with server.serving():
        gateway.register(ModelProfile(OFFLINE_MODEL, "offline", server.url))
        yield


def _variables(spec: dict[str, Any]) -> set[str]:
    """What the agent and its sub-agents name of the environment: one process runs all of them here."""
    found = set(spec.get("environment", ()))
    for agent in below(spec):
        found |= _variables(agent)
    return found


def _profiles(spec: dict[str, Any]) -> set[str]:
    found = {spec["profile"]}
    for agent in below(spec):
        found |= _profiles(agent)
    return found
