"""What must hold of workflows: what is recorded of their steps, what they come to, and what became of signals."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.events import ToolFinished
from understudy.messages import text_of
from understudy.store.db.session_row import SessionRow
from understudy.store.db.statements import MESSAGE, RUN, SESSION
from understudy.workflows import CONTINUED, EVENT_STEP, ORIGIN, SNAPSHOT, TIMEOUT_STEP, TIMERS, WORKFLOW, step_path

from . import goals
from .reference import Known, Reference
from .scheduler import EPOCH
from .tools import POLICY_OF
from .written import comes_to

if TYPE_CHECKING:
    from .world import World

IN_NO_FRAME = ("input", "child")
"""Waits in which a session is in no process."""

BY_CODE = ("step_failed", "step_timeout", "step_limit")
"""How runs fail whose code did: programs do nothing else that fails."""

WRONG = ("workflow_error", "workflow_diverged", "invalid_input", "tool_error")
"""How no run may fail."""

Key = tuple[str, str]
"""A session, and a run, a call or a name of it."""

MARGIN = 1_000
"""Microseconds by which two times may differ that are the same."""


@dataclass(frozen=True)
class Signalled:
    """A signal that was accepted, between two moments (microseconds since 1970)."""

    session_id: str
    name: str
    number: int
    since: int
    until: int


@dataclass
class Run:
    """What the log has of a workflow's run.

    Attributes:
        epochs: of its steps, since it began and each time it began again, with the input of each.
        times: of each step by call, when it was asked for and when it had its result.
        results: how many each call has.
        calls: tool, arguments, outcome and text of each.
        snapshots: how many there are.
        problems: what is wrong with these.
    """

    session_id: str
    run_id: str
    epochs: list[tuple[Known, dict[str, Any]]] = field(default_factory=list)
    times: dict[str, list[int]] = field(default_factory=dict)
    results: Counter[str] = field(default_factory=Counter)
    calls: dict[str, tuple[str, dict[str, Any], str, str]] = field(default_factory=dict)
    snapshots: int = 0
    problems: list[str] = field(default_factory=list)


class Late:
    """The steps of workflows whose time was over, by the events of the log."""

    def __init__(self) -> None:
        self._begins: set[Key] = set()

    def note(self, event: Any) -> None:
        """What follows in the log may be of these."""
        if isinstance(event, ToolFinished) and event.tool == TIMEOUT_STEP and event.outcome == "ok":
            self._begins.add((event.session_id, f"{event.call_id.removesuffix('0.0')}1."))

    def has(self, event: Any) -> bool:
        """Whether a call is one of these, or a timer that nobody needs any more."""
        if not isinstance(event, ToolFinished):
            return False
        own = (begins for session_id, begins in self._begins if session_id == event.session_id)
        return event.tool == TIMEOUT_STEP or any(map(event.call_id.startswith, own))


class Stepped:
    """Judges the workflows of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers = 0
        self._signalled: list[Signalled] = []
        self._stepped = any(fault.kind == "clock_step" for fault in world.plan.faults)

    def forget(self, session_ids: set[str]) -> None:
        """Sessions were removed: others may have their ids."""
        self._signalled = [one for one in self._signalled if one.session_id not in session_ids]

    # While it runs.

    def numbered(self) -> int:
        """What the next signal says: no other one does."""
        self._numbers += 1
        return self._numbers

    def signalled(self, session_id: str, name: str, number: int, since: float) -> None:
        """A signal was accepted between a moment and now."""
        moments = (EPOCH // 1000 + round(at * 1e6) for at in (since, self._world.scheduler.time()))
        self._signalled.append(Signalled(session_id, name, number, *moments))

    def awaited(self, root_id: str, chosen: random.Random) -> Iterator[tuple[str, str]]:
        """Some of the sessions of a tree that wait for a signal, and its name: most of those that would for ever."""
        waiting = self._world.committed(
            "SELECT session.session_id, tool_call.arguments FROM session, tool_call WHERE"
            f" session.root_id = '{root_id}' AND session.kind = 'workflow' AND tool_call.open = 1"
            " AND tool_call.session_id = session.session_id AND tool_call.tool = 'event'"
            " AND tool_call.state = 'waiting' ORDER BY session.session_id, tool_call.call_id"
        )
        for session_id, text in waiting:
            said = json.loads(text)
            if chosen.random() < (0.5 if said["seconds"] is None else 0.05):
                yield session_id, said["name"]

    def written(self, row: SessionRow) -> Iterator[str]:
        """A session was written: a workflow that waits is in no frame, and nothing that was cancelled for a person."""
        if row.cancel_reason is not None and row.wait == "input":
            yield f"run {row.run_id} of {row.session_id} was cancelled, and waits for a person"
        if row.kind == WORKFLOW and row.wait in IN_NO_FRAME and row.frame_id is not None:
            yield f"{row.session_id} waits ({row.wait}), and is in frame {row.frame_id}"

    # When all work is done.

    def violations(self, connection: Any, counts: Counter[str]) -> Iterator[str]:
        """Each step has one result, and each run comes to what its program does by these; each child is made once, and
        each signal taken once, by a step of its name."""
        runs = _runs(connection)
        if not runs:
            return
        counts["workflow runs"] += len(runs)
        children = _children(connection)
        workflows = select(SESSION.c.session_id, SESSION.c.spec).where(SESSION.c.kind == WORKFLOW)
        functions = {row.session_id: row.spec["workflow"] for row in connection.execute(workflows)}
        effects = Counter(effect.call_key for effect in self._world.effects)
        ended = {
            (row.session_id, row.run_id): row for row in connection.execute(select(RUN)) if row.finished_at
        }  # fmt: skip
        for key, run in runs.items():
            counts["steps"] += len(run.calls)
            counts["times over"] += sum((call[0], call[2]) == (TIMEOUT_STEP, "ok") for call in run.calls.values())
            counts["snapshots"] += run.snapshots
            yield from run.problems
            if key in ended:
                yield from _results(run, ended[key])
                yield from _outcome(run, ended[key], functions[run.session_id], counts)
            yield from self._calls(run, children, effects)
        yield from goals.conversations(connection, _tries(runs, children), counts)
        yield from self._signals(runs, ended, counts)

    def _calls(self, run: Run, children: dict[Key, list[Any]], effects: Counter[str]) -> Iterator[str]:
        """What is said of a step has happened."""
        for call_id, (tool, arguments, outcome, text) in run.calls.items():
            key, made = f"{run.session_id}/{call_id}", children.get((run.session_id, call_id), [])
            if len(made) > 1:
                yield f"{key} has {len(made)} sessions: {made}"
            if tool in ("agent", "model", "workflow") and outcome == "ok":
                found = [row for row in made if row.text is not None]
                said = [row.output if row.output is not None else row.text or "" for row in found]
                # One that was started again is another session.
                if len(made) == 1 and said and not made[0].replaced_by and json.loads(text) not in said:
                    yield f"{key} has the result {text}, and its session came to {said}"
            if tool in POLICY_OF and outcome == "ok" and text.startswith('"did ') and not effects[key]:
                yield f"{key} is said to have acted, and has not"
            if tool in TIMERS and outcome == "ok" and not self._stepped and "seconds" in arguments:
                asked, answered = run.times[call_id]
                if answered - asked < arguments["seconds"] * 1e6 - MARGIN:
                    yield f"{key}: a {tool} of {arguments['seconds']} s was over after {(answered - asked) / 1e6} s"

    def _signals(self, runs: dict[Key, Run], ended: dict[Key, Any], counts: Counter[str]) -> Iterator[str]:
        """A signal that was accepted is taken once, by a step of its name; it is left only where none waited for it."""
        taken: dict[int, Key] = {}
        for run in runs.values():
            yield from _lost(run)
            for tool, arguments, outcome, text in run.calls.values():
                if (tool, outcome) == (EVENT_STEP, "ok"):
                    number, here = json.loads(text), (run.session_id, arguments["name"])
                    if number in taken:
                        yield f"signal {number} was taken by {here} and {taken[number]}"
                    taken[number] = here
                    counts["signals taken"] += 1
        for one in self._signalled:
            here = one.session_id, one.name
            if taken.get(one.number, here) != here:
                yield f"{one} was taken by {taken[one.number]}"
            if one.number not in taken:
                counts["signals left"] += 1
                yield from self._left(one, runs, ended)

    def _left(self, one: Signalled, runs: dict[Key, Run], ended: dict[Key, Any]) -> Iterator[str]:
        if self._stepped:  # no two times can be compared
            return
        for key, run in runs.items():
            began = ended[key].started_at if key in ended else math.inf
            if run.session_id != one.session_id or one.since < began + MARGIN:
                continue
            for call_id, (tool, arguments, outcome, _) in run.calls.items():
                if (tool, outcome, arguments.get("name")) != (EVENT_STEP, "timeout", one.name):
                    continue
                if one.until < run.times[call_id][0] + round(arguments["seconds"] * 1e6) - MARGIN:
                    yield f"{one} was accepted, and {call_id} waited for it in vain"


def _lost(run: Run) -> Iterator[str]:
    """No signal goes to a step that is out of time: its code has nothing of it."""
    for known, _ in run.epochs:
        late: tuple[str, ...] = ()
        for path, outcome, text in known.results:
            tool, _ = known.asked.get(path, ("", {}))
            if (tool, outcome) == (TIMEOUT_STEP, "ok"):
                late += (f"{path.removesuffix('0.0')}1.",)
            elif (tool, outcome) == (EVENT_STEP, "ok") and path.startswith(late):
                yield f"signal {text} went to {path} of {run.session_id}, whose time was over"


def _runs(connection: Any) -> dict[Key, Run]:
    """The runs of workflows by session and id."""
    found: dict[Key, Run] = {}
    columns = (MESSAGE.c.session_id, MESSAGE.c.run_id, MESSAGE.c.role, MESSAGE.c.body, MESSAGE.c.created_at)
    mine = select(*columns).join(SESSION, SESSION.c.session_id == MESSAGE.c.session_id)
    for row in connection.execute(mine.where(SESSION.c.kind == WORKFLOW).order_by(MESSAGE.c.session_id, MESSAGE.c.seq)):
        key = row.session_id, row.run_id
        _add(found.setdefault(key, Run(*key)), row)
    return found


def _add(run: Run, row: Any) -> None:
    body = row.body
    if row.role == "user":
        run.epochs.append((Known(), json.loads(body["content"])))
    elif row.role == "assistant":
        for call_id, name, arguments, *_ in body["tool_calls"]:
            given = json.loads(arguments)
            run.epochs[-1][0].asked[step_path(run.run_id, call_id)] = name, given
            run.times[call_id] = [row.created_at]
            run.calls[call_id] = name, given, "", ""
    elif row.role == "tool":
        call_id, text = body["tool_call_id"], text_of(body["content"]) or ""
        outcome = (body.get("extra") or {}).get("outcome", "cancelled")  # the store says nothing of what it gives up
        run.results[call_id] += 1
        run.times.setdefault(call_id, [0]).append(row.created_at)
        run.epochs[-1][0].results.append((step_path(run.run_id, call_id), outcome, text))
        run.calls[call_id] = *run.calls[call_id][:2], outcome, text
    elif body.get("origin") == ORIGIN:
        _record(run, body["extra"])


def _record(run: Run, extra: dict[str, Any]) -> None:
    known, name, value = run.epochs[-1][0], extra["name"], extra["value"]
    if name == CONTINUED:
        known.ended = True
        run.epochs.append((Known(f"n{len(run.epochs)}."), value["given"]))
    elif name != SNAPSHOT:
        known.taken[extra["key"]] = name, value
    else:
        run.snapshots += 1
        asked = {path: (tool, json.loads(arguments)) for path, (tool, arguments) in value["asked"].items()}
        results = [(path, outcome, text) for path, outcome, text, _ in value["results"]]
        taken = {key: tuple(said) for key, said in value["taken"].items()}
        if (asked, results, taken) != (known.asked, known.results, known.taken):
            run.problems.append(f"a snapshot has {value}, and the log before it {known}")


def _children(connection: Any) -> dict[Key, list[Any]]:
    """The sessions that steps have made, without those that were started again, with what they came to."""
    of_session = (SESSION.c.parent_id, SESSION.c.call_id, SESSION.c.session_id, SESSION.c.replaced_by)
    of_task = (RUN.c.session_id == SESSION.c.session_id) & (RUN.c.source == "parent") & (RUN.c.status == "completed")
    found: dict[Key, dict[str, Any]] = {}
    made = select(*of_session, RUN.c.text, RUN.c.output).join(RUN, of_task, isouter=True)
    for row in connection.execute(made.where(SESSION.c.parent_id.is_not(None), SESSION.c.restart_number == 0)):
        found.setdefault((row.parent_id, row.call_id), {})[row.session_id] = row
    return {key: list(rows.values()) for key, rows in found.items()}


def _tries(runs: dict[Key, Run], children: dict[Key, list[Any]]) -> dict[str, list[Any]]:
    """Of each run of a goal, the sessions that were its tries, in order, as far as none was started again."""
    found: dict[str, list[Any]] = {}
    for (session_id, run_id), run in runs.items():
        tries = [call for call, (_, given, *_) in run.calls.items() if given.get("conversation") == goals.WORKER]
        for call_id in tries:
            made = children.get((session_id, call_id), [])
            if len(made) != 1 or made[0].replaced_by or made[0].text is None:
                break
            found.setdefault(f"{session_id}/{run_id}", []).append(made[0].session_id)
    return found


def _results(run: Run, row: Any) -> Iterator[str]:
    """Each step of a run that has ended has one result."""
    for call_id in run.calls:
        if run.results[call_id] != 1:
            yield f"step {call_id} of {run.session_id} has {run.results[call_id]} results; its run is {row.status}"
    for call_id in run.results.keys() - run.calls.keys():
        yield f"{run.session_id} has a result of {call_id}, which it did not ask for"
    if any(tool == "diverged" for tool, *_ in run.calls.values()):
        yield f"run {run.run_id} of {run.session_id} is said to have diverged, and its code is what it was"


def _outcome(run: Run, row: Any, function: dict[str, Any], counts: Counter[str]) -> Iterator[str]:
    """A run has come to what its program does by its record."""
    code = (row.error or {}).get("code", "")
    if code in WRONG:
        yield f"run {row.run_id} of {row.session_id} failed: {row.error}"
        return
    if "definition" in function:
        yield from _as_written(run, row, function, counts)
        return
    by_code = row.status == "completed" or (row.status == "failed" and code in BY_CODE)
    for number, (known, given) in enumerate(run.epochs):
        is_last = number == len(run.epochs) - 1
        if "condition" in given:
            for problem in goals.problems(known, given, row, counts):
                yield f"goal {row.run_id} of {row.session_id} ({row.status}): {problem}"
            continue
        known.ended = by_code or not is_last
        judged = Reference(known, given["program"], given.get("times", 0))
        status, value = judged.outcome()
        for problem in judged.problems:
            yield f"run {row.run_id} of {row.session_id} ({row.status}): {problem}"
        if judged.problems or not known.ended:
            continue
        counts["workflows compared"] += 1
        due = ("failed", (code, row.error["message"])) if code else ("completed", row.output)
        due = due if is_last else ("again", None)
        if (status, value) != due:
            yield f"run {row.run_id} of {row.session_id} is {due}, and by its record its program is {status}, {value!r}"


def _as_written(run: Run, row: Any, function: dict[str, Any], counts: Counter[str]) -> Iterator[str]:
    """A run of a workflow that a model has written has come to what its definition does by its record."""
    code = (row.error or {}).get("code", "")
    if row.status != "completed" and not (row.status == "failed" and code in BY_CODE):
        return
    known, given = run.epochs[-1]
    found = comes_to(function["definition"], function["most_steps"], given, known)
    counts["written compared"] += 1
    due = ("failed", (code, row.error["message"])) if code else ("completed", row.output)
    if found != due:
        yield f"run {row.run_id} of {row.session_id} is {due}, and by its record its definition is {found}"
