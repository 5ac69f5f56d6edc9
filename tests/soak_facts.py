"""What a soak left in the store, compared with what its tasks and its kills demand."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from understudy.events import (
    Event,
    ModelCallCompleted,
    ModelCallReissued,
    RunFinished,
    SessionActivated,
    SessionCrashed,
    ToolFinished,
    ToolInDoubt,
)
from understudy.messages import Message, Usage
from understudy.store.db.engine import Database
from understudy.store.db.statements import EVENT, MESSAGE, RUN, SESSION
from understudy.store.entries import event_from_row

from .faults import Stage, of
from .soak_kills import BACKEND, FRAME, GATEWAY, NODE, SERVER, Kill
from .soak_work import Model, Task, expected, seen, sessions_of

SHOWN = 20
"""Problems of one kind that are shown one by one."""

NEVER_MADE = "never made"
"""A service died between the commit that asks for a call and its hand-over to the gateway: it goes out as the next
attempt, and counts as made again, though the endpoint was asked once."""


class Log:
    """Everything in the store, read past the services."""

    def __init__(self, dsn: str) -> None:
        self.events: dict[str, list[Event]] = defaultdict(list)
        self.messages: dict[str, list[Message]] = defaultdict(list)
        database = Database(dsn)
        try:
            with database.read() as connection:
                rows = connection.execute(select(EVENT).order_by(EVENT.c.session_id, EVENT.c.seq)).mappings()
                for event in map(event_from_row, rows):
                    self.events[event.session_id].append(event)
                rows = connection.execute(select(MESSAGE).order_by(MESSAGE.c.session_id, MESSAGE.c.seq)).mappings()
                for row in rows:
                    self.messages[row["session_id"]].append(Message.from_wire({**row["body"], "seq": row["seq"]}))
                columns = (SESSION.c.session_id, SESSION.c.status, SESSION.c.tokens_used, SESSION.c.tokens_redone)
                self.sessions = {
                    row["session_id"]: dict(row) for row in connection.execute(select(*columns)).mappings()
                }
                runs = connection.execute(select(RUN)).mappings()
                self.runs = {(row["session_id"], row["run_id"]): dict(row) for row in runs}
        finally:
            database.close()

    def every(self) -> Iterator[Event]:
        """The events of all sessions."""
        for events in self.events.values():
            yield from events


@dataclass
class Facts:
    """What was found. All counters of `wrong` must be 0."""

    totals: dict[str, Any] = field(default_factory=dict)
    wrong: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def complain(self, kind: str, what: str, count: int = 1) -> None:
        """Count something that must not be."""
        self.wrong[kind] += count
        if self.wrong[kind] <= SHOWN:
            self.problems.append(f"{kind}: {what}")


class Judge:
    """Compares the store, the endpoint and the effects with the tasks and the kills.

    Args:
        work: for each session the tasks that were sent to it, by run id, in order.
    """

    def __init__(self, stage: Stage, model: Model, work: dict[str, dict[str, Task]], kills: list[Kill]) -> None:
        self._stage = stage
        self._model = model
        self._work = work
        self._kills = kills
        self._log = Log(stage.dsn)
        self._all = [
            found
            for session_id, tasks in work.items()
            for run_id, task in tasks.items()
            for found in sessions_of(task, session_id, run_id)
        ]
        self.facts = Facts()

    def judge(self) -> Facts:
        """Look at everything."""
        self._deaths()
        self._runs()
        self._transcripts()
        self._effects()
        self._bills()
        self._logs()
        self._returns()
        return self.facts

    def _killed(self, *kinds: str) -> list[int]:
        return sorted(kill.at for kill in self._kills if kill.kind in kinds)

    def _deaths(self) -> None:
        """Each death in the log is one that was caused, and nothing is in doubt without one."""
        killed = {kill.pid: kill.at for kill in self._kills if kill.kind == FRAME}
        doubts = 0
        for session_id, events in self._log.events.items():
            crashed = False
            for event in events:
                if isinstance(event, SessionCrashed):
                    crashed = True
                    if killed.get(event.pid, event.at + 1) > event.at:
                        self.facts.complain("deaths nobody caused", f"{session_id} seq {event.seq}: pid {event.pid}")
                elif isinstance(event, ToolInDoubt) and not crashed:
                    before = [f"{e.seq} {e.at} {e.type} {e.body()}" for e in events if e.seq <= event.seq][-12:]
                    self.facts.complain(
                        "in doubt without a death", "\n    ".join([f"{session_id} {event.call_id}", *before])
                    )
                doubts += isinstance(event, ToolInDoubt)
        crashes = sum(isinstance(event, SessionCrashed) for event in self._log.every())
        self.facts.totals.update({"deaths of sessions at work": crashes, "tool calls in doubt": doubts})

    def _interrupted(self) -> set[tuple[str, str]]:
        return {
            (event.session_id, event.call_id)
            for event in self._log.every()
            if isinstance(event, ToolFinished) and event.outcome == "interrupted"
        }

    def _runs(self) -> None:
        """Each run ended once, completed, with the text that a computation without crashes gives."""
        interrupted, right = self._interrupted(), 0
        ended = Counter((e.session_id, e.run_id) for e in self._log.every() if isinstance(e, RunFinished))
        for session_id, run_id, task in self._all:
            row = self._log.runs.get((session_id, run_id))
            name = f"{session_id} {run_id}"
            if row is None:
                self.facts.complain("runs lost", name)
            elif row["status"] != "completed":
                self.facts.complain("runs not completed", f"{name}: {row['status']} {row['error']}")
            elif row["text"] != expected(task, session_id, run_id, interrupted).text:
                self.facts.complain("wrong answers", f"{name}: {row['text']!r}")
            elif ended[session_id, run_id] != 1:
                self.facts.complain("runs ended more than once", name)
            else:
                right += 1
        extra = self._log.runs.keys() - {(session_id, run_id) for session_id, run_id, _ in self._all}
        for session_id, run_id in extra:
            self.facts.complain("runs nobody asked for", f"{session_id} {run_id}")
        self.facts.totals.update({"runs": len(self._all), "runs finished right": right})

    def _transcripts(self) -> None:
        """Each session's messages are those that a computation without crashes gives, each once and in that order."""
        interrupted = self._interrupted()
        wanted: dict[str, list[Any]] = defaultdict(list)
        for session_id, run_id, task in self._all:
            wanted[session_id] += expected(task, session_id, run_id, interrupted).messages
        for session_id in wanted.keys() | self._log.messages.keys():
            found = Counter(map(repr, map(seen, self._log.messages.get(session_id, ()))))
            want = Counter(map(repr, wanted.get(session_id, ())))
            for message in (want - found).elements():
                self.facts.complain("messages lost", f"{session_id}: {message[:200]}")
            for message in (found - want).elements():
                self.facts.complain("messages doubled or unexpected", f"{session_id}: {message[:200]}")
            if found == want and list(map(seen, self._log.messages[session_id])) != wanted[session_id]:
                self.facts.complain("messages out of order", session_id)
        self.facts.totals["messages"] = sum(map(len, self._log.messages.values()))

    def _effects(self) -> None:
        """A call of `act` had its effect once, or not at all if it was interrupted; one of `look` at least once."""
        done = Counter(self._stage.effects())
        interrupted = self._interrupted()
        again = 0
        for session_id, run_id, task in self._all:
            for number, calls in enumerate(task.rounds, 1):
                for index, call in enumerate(calls):
                    if call.task is not None:
                        continue
                    count = done.pop(call.name, 0)
                    if call.tool == "look":
                        again += max(0, count - 1)
                    elif count > 1:
                        self.facts.complain("side effects repeated", f"{call.name}: {count}", count - 1)
                    in_doubt = (session_id, f"{run_id}/{number}/{index}") in interrupted
                    if count == 0 and not in_doubt:
                        self.facts.complain("side effects missing", call.name)
        for name, count in done.items():
            self.facts.complain("side effects nobody asked for", name, count)
        self.facts.totals.update({"calls interrupted": len(interrupted), "rerun tools run again": again})

    def _bills(self) -> None:
        """A model call is paid twice only if a gateway died with it, and then the log says so."""
        requests = {key: count for key, count in self._model.asked.items()}
        tokens: Counter[str] = Counter()
        lost = lost_tokens = repeated = 0
        for session_id, run_id, task in self._all:
            answers: Counter[int] = Counter()
            attempts: Counter[int] = Counter()
            costs: dict[int, int] = {}
            for event in self._log.events.get(session_id, ()):
                if event.run_id != run_id:
                    continue
                if isinstance(event, ModelCallCompleted):
                    answers[event.round] += 1
                    costs[event.round] = Usage.from_wire(event.usage).total_tokens
                    if event.redone:
                        again = requests.get((task.name, event.round), 0) - 1
                        cause = self._cause(session_id, run_id, event.round, again) if again > 0 else NEVER_MADE
                        tokens[cause] += costs[event.round]
                elif isinstance(event, ModelCallReissued):
                    attempts[event.round] += 1
            for number in range(1, len(task.rounds) + 2):
                asked = requests.pop((task.name, number), 0)
                repeated += asked - 1
                without_answer = asked - answers[number]
                lost += without_answer
                lost_tokens += without_answer * costs.get(number, 0)
                if answers[number] != 1:
                    self.facts.complain(
                        "answers not recorded once", f"{session_id} {run_id} {number}: {answers[number]}"
                    )
                if not 0 <= without_answer <= attempts[number]:
                    what = f"{session_id} {run_id} {number}: {asked} requests, {attempts[number]} issued again"
                    self.facts.complain("model calls repeated without a word", what, abs(without_answer))
        for key, count in requests.items():
            self.facts.complain("model calls nobody asked for", str(key), count)
        self._sums(lost, lost_tokens, repeated, tokens)

    def _sums(self, lost: int, lost_tokens: int, repeated: int, tokens: Counter[str]) -> None:
        """The endpoint's own counts say the same."""
        stats, facts = self._stage.server.stats, self.facts
        used = sum(row["tokens_used"] for row in self._log.sessions.values())
        redone = sum(row["tokens_redone"] for row in self._log.sessions.values())
        billed = stats.prompt_tokens + stats.completion_tokens
        answers = sum(isinstance(event, ModelCallCompleted) for event in self._log.every())
        if stats.requests != answers + lost:
            facts.complain("endpoint disagrees", f"{stats.requests} requests, {answers} answers, {lost} lost")
        if billed != used + lost_tokens:
            facts.complain("endpoint disagrees", f"{billed} tokens billed, {used} recorded, {lost_tokens} lost")
        if sum(tokens.values()) != redone:
            facts.complain("tokens_redone disagrees", f"{redone} in the sessions, {dict(tokens)} in the events")
        if tokens["nothing"]:
            facts.complain("tokens paid again without a gateway's death", str(tokens["nothing"]), tokens["nothing"])
        facts.totals.update({
            "model calls": stats.requests,
            "calls lost with a gateway": lost,
            "calls repeated": repeated,
            "tokens": billed,
            "tokens paid again, gateway": tokens[GATEWAY],
            "tokens paid again, all others": tokens["nothing"],
            "tokens counted as paid again, and paid once": tokens[NEVER_MADE],
        })  # fmt: skip

    def _cause(self, session_id: str, run_id: str, number: int, again: int) -> str:
        """Why a call was made again so many times: as often a gateway died between a lost attempt's start and the next
        one's. There may be more attempts: one that a service committed and did not hand over was never made."""
        killed = self._killed(GATEWAY)
        died = sum(
            bisect_right(killed, event.at) > bisect_right(killed, event.started_at)
            for event in of(self._log.events[session_id], ModelCallReissued)
            if (event.run_id, event.round) == (run_id, number)
        )
        return GATEWAY if again <= died else "nothing"

    def _logs(self) -> None:
        """The checks that every fault test makes, and the store's own if there are any."""
        for session_id in self._work:
            try:
                self._stage.check(self._stage.cluster.session(session_id))
            except AssertionError as error:
                self.facts.complain("log of a session", f"{session_id}: {str(error)[:500]}")
        idle = {"idle", "completed"}
        for session_id, row in self._log.sessions.items():
            if row["status"] not in idle:
                self.facts.complain("sessions not at rest", f"{session_id}: {row['status']}")
        self.facts.totals["sessions"] = len(self._log.sessions)

    def _returns(self) -> None:
        """When each victim's work went on, as far as the log tells."""
        commits = sorted({event.at for event in self._log.every()})
        for kill in self._kills:
            if kill.kind == FRAME:
                self._return_of_frame(kill)
            elif kill.kind in (NODE, GATEWAY, SERVER, BACKEND):
                place = bisect_right(commits, kill.gone)
                kill.back = commits[place] if place < len(commits) else 0
            if not kill.back and kill.kind != FRAME:
                self.facts.complain("not seen to come back", f"{kill.kind}, pid {kill.pid}")

    def _return_of_frame(self, kill: Kill) -> None:
        kill.note = "held nothing"
        for events in self._log.events.values():
            for number, event in enumerate(events):
                if not isinstance(event, SessionCrashed) or event.pid != kill.pid or event.at < kill.at:
                    continue
                kill.note = "waited" if event.waiting else "acted"
                later = [
                    next_ for next_ in events[number + 1 :] if event.waiting or isinstance(next_, SessionActivated)
                ]
                if later:
                    kill.back = later[0].at
                elif not event.waiting:
                    self.facts.complain("not seen to come back", f"{event.session_id} seq {event.seq}")
