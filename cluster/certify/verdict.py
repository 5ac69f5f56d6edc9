"""What the runs of `understudy certify` say about an agent. Pure functions of what was seen.

Every run has at most one death, so a difference from the undisturbed run has one cause: what ran a second time, or what
was in the memory of the process that died. Three things are not held against anybody: what differs without a death as
well (found by a run without one, and by what happened before each death), results that are reported to the model as
unknown or as found out, and whatever follows from those, since the recorded answers are those of a model that received
something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.actors.delegation import HANDED_OVER, STARTING
from understudy.actors.tools import builtin
from understudy.handoffs import HANDOFF
from understudy.manifest import below
from understudy.messages import INTERRUPTED

from .recording import Call, Entry
from .stage import Record
from .workspaces import FileChange, changes, unified

SAFE = "safe"
NOT_SAFE = "not safe to rerun"
REPORTED = "reported to the model"
RECONCILED = "reconciled"
NOT_INTERRUPTED = "not interrupted"
NOT_CALLED = "not called"

EQUAL = "equal"
DIFFERENT = "different"
EQUAL_BUT_REPORTED = "equal but for what the model was told"
DIFFERENT_AFTER_REPORT = "different after what the model was told"
ENDED = "ended otherwise"
NOT_REACHED = "not reached"

MASK = "[not compared]"

HANDED_ON = {*STARTING, HANDOFF, *HANDED_OVER}
"""Tools whose calls no frame executes: sub-agents, people or the store do."""


@dataclass(frozen=True)
class Comparison:
    """How a run differs from the undisturbed one.

    Attributes:
        state: one of `EQUAL`, `DIFFERENT`, `EQUAL_BUT_REPORTED`, `DIFFERENT_AFTER_REPORT`, `ENDED`, `NOT_REACHED`.
        diff: of the transcript.
        requests: the model calls that asked something else, by session and round.
        request_diff: of the first of them.
    """

    state: str
    ended: str = ""
    diff: str = ""
    requests: tuple[str, ...] = ()
    request_diff: str = ""
    files: tuple[FileChange, ...] = ()

    @property
    def differs(self) -> bool:
        """Something is not as in the undisturbed run."""
        return bool(self.ended or self.diff or self.requests or self.files)


@dataclass(frozen=True)
class Finding:
    """Something that a person should look at.

    Attributes:
        kind: `rerun_changed`, `ran_twice`, `differs`, `ended`, `reconcile_failed` or `not_deterministic`.
        point: where the process was killed; empty without a death.
        tools: those concerned.
    """

    kind: str
    text: str
    point: str = ""
    tools: tuple[str, ...] = ()
    comparison: Comparison = field(default_factory=lambda: Comparison(EQUAL))


@dataclass(frozen=True)
class ToolReport:
    """What is known of a tool.

    Attributes:
        calls: in the undisturbed run.
        interrupted: runs in which a death came between a call's begin and its result's commit.
        executions: the most that one call's function ran in these runs.
        hint: what could be declared otherwise, or what limits the verdict.
    """

    name: str
    on_crash: str
    verdict: str
    calls: int
    interrupted: int
    executions: int
    hint: str = ""


@dataclass(frozen=True)
class PointReport:
    """What became of the run with a death at this point."""

    point: str
    forced: str
    tools: tuple[str, ...]
    comparison: Comparison


@dataclass(frozen=True)
class Verdict:
    """All that is to be said."""

    tools: tuple[ToolReport, ...]
    points: tuple[PointReport, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def judge(spec: dict[str, Any], clean: Record, control: Record, records: list[Record]) -> Verdict:
    """Say which tools are safe to rerun, and what else differs after a death.

    Args:
        spec: compiled, as the agent's file declares it.
        control: a run of the recording in which nobody dies.
        records: runs in which a process was to be killed.
    """
    return _Judge(spec, clean, control, records).verdict()


def compare(
    clean: Record, record: Record, tools: Collection[str], calls: Collection[Call], files: Collection[str]
) -> Comparison:
    """The differences of two runs, but for results of these tools and calls, and for these files."""
    if record.victim is not None and not record.killed:
        return Comparison(NOT_REACHED)

    def shown(session: str, entries: Iterable[Entry]) -> list[str]:
        return [line for entry in entries for line in _masked(entry, session, tools, calls).lines()]

    sessions = list(dict.fromkeys([*clean.transcript, *record.transcript]))
    before, after = (
        [line for session in sessions for line in _titled(session, sessions, run, shown)] for run in (clean, record)
    )
    asked, request_diff = [], ""
    for place in sorted({*clean.asked, *record.asked}):
        old, new = clean.asked.get(place), record.asked.get(place)
        lines = [
            shown(request.session or place[0], request.entries) if request is not None else [] for request in (old, new)
        ]
        if old is None or new is None or old.offered != new.offered or lines[0] != lines[1]:
            asked.append(f"{place[0]}, round {place[1]}")
            request_diff = request_diff or unified(*lines)
    ended = "" if record.status == clean.status else f"{record.status}: {record.error}".rstrip(": ")
    diff, changed = unified(before, after), changes(clean.files, record.files, files)
    differs = bool(diff or asked or changed)
    reported = any(policy != "rerun" for policy in record.in_doubt.values())
    state = ENDED if ended else DIFFERENT if differs else EQUAL
    if reported and not ended:
        state = DIFFERENT_AFTER_REPORT if differs else EQUAL_BUT_REPORTED
    return Comparison(state, ended, diff, tuple(asked), request_diff, tuple(changed))


def _titled(
    session: str, sessions: list[str], run: Record, shown: Callable[[str, Iterable[Entry]], list[str]]
) -> list[str]:
    lines = shown(session, run.transcript.get(session, ()))
    return [f"[{session}]", *lines] if len(sessions) > 1 and lines else lines


def _masked(entry: Entry, session: str, tools: Collection[str], calls: Collection[Call]) -> Entry:
    hidden = entry.role == "tool" and (entry.tool in tools or (session, entry.call) in calls)
    return replace(entry, text=MASK) if hidden else entry


def declared(spec: dict[str, Any]) -> dict[str, str]:
    """`on_crash` of every tool of an agent and its sub-agents that is executed in a frame, by name. What is handed over
    has its effect in the store's transactions, and no process can die in the middle."""
    found = {tool["name"]: tool["on_crash"] for tool in spec["tools"] if builtin(tool) not in HANDED_ON}
    for agent in below(spec):
        found = {**declared(agent), **found}
    return found


def results(record: Record) -> dict[Call, Entry]:
    """The result of every tool call."""
    return {
        (session, entry.call): entry
        for session, entries in record.transcript.items()
        for entry in entries
        if entry.role == "tool"
    }


class _Judge:
    def __init__(self, spec: dict[str, Any], clean: Record, control: Record, records: list[Record]) -> None:
        self.policies = declared(spec)
        self.hooked = _has_hooks(spec)
        self.clean, self.control, self.records = clean, control, records
        self.results = results(clean)
        self.unsteady_tools = {tool for run in (control, *records) for tool in self._unsteady(run)}
        self.unsteady_files = {change.path for change in changes(clean.files, control.files)}

    def _unsteady(self, run: Record) -> Iterator[str]:
        """Tools that answered something else although nobody had died yet."""
        for call, entry in results(run).items():
            steady = call in run.confirmed and run.begun.get(call) == 1 and call not in run.in_doubt
            if steady and call in self.results and entry.text != self.results[call].text:
                yield entry.tool

    def verdict(self) -> Verdict:
        findings = list(self._without_death())
        points = []
        for run in self.records:
            comparison = compare(self.clean, run, self.unsteady_tools, run.in_doubt, self.unsteady_files)
            hit = tuple(sorted({self._tool(call) for call in self._interrupted(run)}))
            points.append(PointReport(str(run.victim), run.forced, hit, comparison))
            if not run.forced:
                findings += self._findings(run, comparison)
        tools = tuple(self._tool_report(name, points, findings) for name in self.policies)
        return Verdict(tools, tuple(points), tuple(findings), tuple(self._notes()))

    def _tool(self, call: Call) -> str:
        return self.results[call].tool if call in self.results else ""

    def _interrupted(self, run: Record) -> set[Call]:
        """Calls that had begun when the process died, and whose results were not committed."""
        return {call for call, number in run.begun.items() if number > 1} | set(run.in_doubt)

    def _without_death(self) -> Iterator[Finding]:
        comparison = compare(self.clean, self.control, (), (), self.unsteady_files)
        if comparison.ended:
            text = f"run again without a death, it ended as {comparison.ended}"
            yield Finding("ended", text, comparison=comparison)
        elif comparison.diff or comparison.requests:
            names = ", ".join(sorted(self.unsteady_tools))
            cause = f": {names} gave another result" if names else ""
            text = f"the request differs from the recorded one without a death as well{cause}; that is not compared"
            yield Finding("not_deterministic", text, tools=tuple(sorted(self.unsteady_tools)), comparison=comparison)
        elif self.unsteady_tools:
            names = ", ".join(sorted(self.unsteady_tools))
            text = f"{names} gave another result before anybody had died; that is not compared"
            yield Finding("not_deterministic", text, tools=tuple(sorted(self.unsteady_tools)))

    def _findings(self, run: Record, comparison: Comparison) -> Iterator[Finding]:
        where = str(run.victim)
        twice = sorted({self._tool(call) for call, number in run.executed.items() if number > 1})
        for name in twice:
            if self.policies.get(name) != "rerun":
                yield Finding("ran_twice", f"{name} ran twice, and is not declared rerun", where, (name,), comparison)
        found = results(run)
        for call, policy in run.in_doubt.items():
            if policy == "reconcile" and found.get(call, Entry("", "")).text.startswith(INTERRUPTED):
                text = f"{self._tool(call)} could not find out what had happened: {found[call].text}"
                yield Finding("reconcile_failed", text, where, (self._tool(call),), comparison)
        if comparison.state == ENDED:
            yield Finding("ended", f"the run ended as {comparison.ended}", where, tuple(twice), comparison)
        elif comparison.state == DIFFERENT and twice:
            text = f"running {', '.join(twice)} a second time changed {_what(comparison)}"
            yield Finding("rerun_changed", text, where, tuple(twice), comparison)
        elif comparison.state == DIFFERENT:
            text = f"no tool ran twice, but {_what(comparison)} changed: {self._cause()}"
            yield Finding("differs", text, where, (), comparison)

    def _cause(self) -> str:
        cause = "was something kept in memory?"
        return f"{cause} Or is a hook or a memory provider not safe to be called again?" if self.hooked else cause

    def _tool_report(self, name: str, points: list[PointReport], findings: list[Finding]) -> ToolReport:
        policy = self.policies[name]
        calls = [call for call, entry in self.results.items() if entry.tool == name]
        hit = [run for run in self.records if not run.forced and self._interrupted(run) & {*calls}]
        executions = max((run.executed.get(call, 0) for run in hit for call in calls), default=0)
        blamed = any(
            name in finding.tools for finding in findings if finding.kind in ("rerun_changed", "ended", "ran_twice")
        )
        verdict = {"rerun": SAFE, "report": REPORTED}.get(policy, RECONCILED)
        if not calls:
            verdict = NOT_CALLED
        elif blamed:
            verdict = NOT_SAFE
        elif not hit or (policy == "rerun" and executions < 2):
            verdict = NOT_INTERRUPTED
        return ToolReport(name, policy, verdict, len(calls), len(hit), executions, self._hint(name, points))

    def _hint(self, name: str, points: list[PointReport]) -> str:
        forced = [point.comparison for point in points if point.forced == name and name in point.tools]
        if forced and not any(comparison.differs for comparison in forced):
            return 'running it twice changed nothing that was seen: on_crash="rerun" may be possible'
        if forced:
            return f"running it twice changed {_what(next(c for c in forced if c.differs))}: rightly not declared rerun"
        if name in self.unsteady_tools:
            return "its results differ without a death, too: only files and what came after were compared"
        return ""

    def _notes(self) -> Iterator[str]:
        if self.unsteady_files:
            names = ", ".join(sorted(self.unsteady_files)[:10])
            yield f"files that differ without a death, and were not compared: {names}"
        missed = sum(run.victim is not None and not run.killed for run in self.records)
        if missed:
            yield f"{missed} of the points were not reached again: the agent took another way"


def _has_hooks(spec: dict[str, Any]) -> bool:
    own = spec.get("hooks") or (spec.get("memory") or {}).get("providers")
    return bool(own) or any(map(_has_hooks, below(spec)))


def _what(comparison: Comparison) -> str:
    found = ["how the run ended"] if comparison.ended else []
    if comparison.diff:
        found.append("the transcript")
    if comparison.requests:
        found.append(f"the request ({comparison.requests[0]})")
    if comparison.files:
        names = ", ".join(change.path for change in comparison.files[:3])
        found.append(f"the workspace ({names}{', …' if len(comparison.files) > 3 else ''})")
    return " and ".join(found)
