"""Rules of the accounting identity that take reading: each follows the log of one session, from its first entry on.

`check.py` streams all logs once, in order; a rule keeps what a round or a run needs, never the log. Bodies are read
here and not in SQL, since PostgreSQL refuses to look into JSON that has `\\u0000` in any of its texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from sqlalchemy import Text, bindparam, select

from understudy.event_wire import ENVELOPE
from understudy.identifiers import wait_key
from understudy.messages import Usage
from understudy.workflows import ORIGIN

from ..db.prepared import Row
from ..db.statements import NAMESPACE, TOOL_CALL
from .check_scope import Books

LOOKED_UP_AT_ONCE = 200
"""Tool calls that are compared with their rows in one SELECT."""

# In the order in which a message says them.
CALL_SAID = ("run_id", "round", "index", "tool", "arguments", "provider_id", "state")
CALLS_BY_ID = select(TOOL_CALL.c.call_id, *(TOOL_CALL.c[name] for name in CALL_SAID)).where(
    TOOL_CALL.c.namespace == NAMESPACE,
    TOOL_CALL.c.session_id == bindparam("session"),
    TOOL_CALL.c.call_id.in_(bindparam("calls", type_=Text, expanding=True)),
)

EPOCH = ENVELOPE[4:].index("epoch")


class Entry(NamedTuple):
    """One message or event of a log.

    Attributes:
        type: the event's type, or the message's role.
        body: None where no rule reads it.
        run_usage: what the run's row says that the run used; with `run_finished` only.
    """

    session_id: str
    seq: int
    is_event: bool
    type: str
    run_id: str | None
    round: int
    body: dict[str, Any] | None
    run_usage: list[Any] | None

    @property
    def data(self) -> dict[str, Any]:
        """The body of an entry whose body is read."""
        return self.body or {}


class LogRule:
    """A rule as it follows one session's log. What it finds is reported as text.

    Attributes:
        types: what it reads; None for everything.
    """

    types: tuple[str, ...] | None = None

    def __init__(self, books: Books, session: Row) -> None:
        self.books = books
        self.session = session
        self.pruned: int = session["pruned_seq"]

    def read(self, entry: Entry) -> Iterable[str]:
        """Take in the next entry."""
        raise NotImplementedError

    def end(self) -> Iterable[str]:
        """The log is over."""
        return ()


class Sequence(LogRule):
    """Messages and events of a session share 1 to `session.seq`, each once; only what retention removed, or a fork was
    not given, is missing."""

    # A message that is missing in the pruned part looks like an event that was removed; `tool_results` and `run_usage`
    # notice most of these.
    last = 0

    def read(self, entry: Entry) -> Iterator[str]:
        if entry.seq == self.last:
            yield f"seq {entry.seq} is both a message and an event"
        yield from self._gap(entry.seq)
        self.last = entry.seq

    def end(self) -> Iterator[str]:
        seq = self.session["seq"]
        if self.last > seq:
            yield f"the log goes up to {self.last}, and the session's seq is {seq}"
        if self.pruned > seq:
            yield f"events up to {self.pruned} were removed, and the session's seq is {seq}"
        yield from self._gap(seq + 1)

    def _gap(self, following: int) -> Iterator[str]:
        missing = max(self.last, self.pruned) + 1
        if missing < following:
            yield f"nothing is at seq {missing}" + (f" to {following - 1}" if missing < following - 1 else "")


class RunOrder(LogRule):
    """One run at a time: it starts while none is at work, what happens is part of it, and it ends before the next."""

    types = ("run_started", "run_finished", "user", "assistant", "tool")
    current: str | None = None

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.known = self.pruned == 0

    def read(self, entry: Entry) -> Iterator[str]:
        if entry.type == "run_started":
            if self.known and self.current is not None:
                yield f"run {entry.run_id!r} starts at seq {entry.seq}, and run {self.current!r} has not ended"
            self.current, self.known = entry.run_id, True
        elif entry.type == "run_finished" and entry.run_id == self.current:
            self.current = None
        elif self.known and not entry.is_event and entry.run_id != self.current:
            yield f"the message at seq {entry.seq} is of run {entry.run_id!r}, and run {self.current!r} is at work"

    def end(self) -> Iterator[str]:
        if self.known and self.current != self.session["run_id"]:
            yield f"by the log run {self.current!r} is at work, by the session's row {self.session['run_id']!r}"


class ToolResults(LogRule):
    """Every call the model asked for has one `tool_finished` event and one result, or its round is not over."""

    types = ("assistant", "tool", "tool_finished", "run_finished")

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.open: dict[str, tuple[Entry, bool]] = {}  # by call: where it was asked for, and if it has finished

    def read(self, entry: Entry) -> Iterator[str]:
        if entry.type == "assistant":
            if entry.data.get("origin") != ORIGIN:  # the steps of a workflow overlap
                yield from self._unanswered(f"before the next answer at seq {entry.seq}")
                self.open = {}
            self.open |= {call[0]: (entry, False) for call in entry.data.get("tool_calls") or ()}
        elif entry.type == "tool_finished":
            yield from self._finished(entry)
        elif entry.type == "tool":
            call_id = entry.data.get("tool_call_id")
            asked, finished = self.open.pop(call_id or "", (None, False))
            if asked is None:
                yield f"the result at seq {entry.seq} is of call {call_id}, which has one or was not asked for"
            elif not finished and asked.seq > self.pruned:
                yield f"the result at seq {entry.seq} of call {call_id} has no tool_finished event"
        elif entry.type == "run_finished" and any(asked.run_id == entry.run_id for asked, _ in self.open.values()):
            # A quarantined run ends where its process died, and its calls stay as they are; no model is asked again.
            if entry.data.get("status") != "quarantined":
                yield from self._unanswered(f"before the run ended at seq {entry.seq}")
            self.open = {}

    def _finished(self, entry: Entry) -> Iterator[str]:
        call_id = entry.data.get("call_id", "")
        asked, finished = self.open.get(call_id, (None, False))
        if asked is None:
            yield f"the event at seq {entry.seq} tells of call {call_id}, which has a result or was not asked for"
        elif finished:
            yield f"the event at seq {entry.seq} tells for a second time that call {call_id} finished"
        else:
            self.open[call_id] = (asked, True)

    def end(self) -> Iterator[str]:
        current = (self.session["run_id"], self.session["round"])
        pending = all((asked.run_id, asked.round) == current for asked, _ in self.open.values())
        # How its run ended may have been removed.
        if not pending and any(asked.seq > self.pruned for asked, _ in self.open.values()):
            yield from self._unanswered("and its round is over")

    def _unanswered(self, when: str) -> Iterator[str]:
        for call_id, (asked, _) in self.open.items():
            yield f"call {call_id}, asked for at seq {asked.seq}, has no result {when}"


class ToolCalls(LogRule):
    """Every call the model asked for has its row, with the same arguments and as far as the log says, and no other."""

    types = ("assistant", "tool", "tool_finished")

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.count = 0
        self.calls: dict[str, tuple[list[Any], set[str]]] = {}  # what its row must say, and the states it may have

    def read(self, entry: Entry) -> Iterator[str]:
        if entry.type == "assistant":
            if len(self.calls) >= LOOKED_UP_AT_ONCE:
                overlap = entry.data.get("origin") == ORIGIN  # what is open of a workflow goes on
                yield from self._compare({"done"} if overlap else None)
            for index, call in enumerate(entry.data.get("tool_calls") or ()):
                self.count += 1
                states = {"requested", "approved", "started", "asked", "waiting"}
                states |= {"finished"} if entry.seq <= self.pruned else set()
                self.calls[call[0]] = ([entry.run_id, entry.round, index, *call[1:]], states)
        elif entry.type in ("tool", "tool_finished"):
            call_id = entry.data.get("tool_call_id" if entry.type == "tool" else "call_id", "")
            if call_id in self.calls:
                self.calls[call_id] = (self.calls[call_id][0], {"done" if entry.type == "tool" else "finished"})

    def end(self) -> Iterator[str]:
        yield from self._compare()
        if self.count != self.session["tool_calls"]:
            yield f"the model asked for {self.count} calls, and there are {self.session['tool_calls']} rows"

    def _compare(self, only: set[str] | None = None) -> Iterator[str]:
        """Compare calls with their rows, and forget them: all, or those that are in these states by the log."""
        calls = {call: said for call, said in self.calls.items() if only is None or said[1] == only}
        given = {"session": self.session["session_id"], "calls": list(calls)}
        found = self.books.read(CALLS_BY_ID, **given) if calls else []
        rows = {row["call_id"]: [row[name] for name in CALL_SAID] for row in found}
        for call_id, (asked, states) in calls.items():
            row = rows.get(call_id)
            if row is None:
                yield f"call {call_id} has no row"
            elif row[:-1] != asked:
                yield f"call {call_id} was asked for as {asked}, and its row says {row[:-1]}"
            elif row[-1] not in states:
                yield f"by the log call {call_id} is {' or '.join(sorted(states))}, by its row {row[-1]}"
        self.calls = {call: said for call, said in self.calls.items() if call not in calls}


class Tokens(LogRule):
    """Every token is counted once: `tokens_used` and `cost_used` are the sums of all answers, `tokens_redone` of those
    issued again."""

    types = ("model_call_completed", "model_call_failed")
    used = redone = cost = 0

    def read(self, entry: Entry) -> Iterable[str]:
        usage = Usage.from_wire(entry.data.get("usage"))
        tokens = usage.total_tokens
        self.cost += usage.cost
        self.used += tokens
        self.redone += tokens if entry.data.get("redone") else 0
        return ()

    def end(self) -> Iterator[str]:
        for name, count in (("tokens_used", self.used), ("tokens_redone", self.redone), ("cost_used", self.cost)):
            booked = self.session[name]
            if booked < count or (booked > count and not self.pruned):
                yield f"{name} is {booked}, and the answers in the log have {count}"


class Answers(LogRule):
    """A round has one answer: rounds rise within a run, each answer has its event, and no request key is used twice."""

    # A late answer, to a call that was issued again, may be there twice, if the transaction that counted it was
    # repeated: no row remembers which late answers there were.

    types = ("assistant", "model_call_completed", "model_call_failed")

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.last: Entry | None = None
        self.reported = True
        self.keys: set[str] = set()  # of the winning answers of the run

    def read(self, entry: Entry) -> Iterator[str]:
        last = self.last
        if entry.data.get("origin") == ORIGIN:  # no model has answered
            return
        if entry.type == "assistant":
            yield from self.end()
            if last is None or entry.run_id != last.run_id:
                self.keys = set()
            elif entry.round <= last.round:
                yield f"the answer at seq {entry.seq} is of round {entry.round}, and round {last.round} has one"
            self.last, self.reported = entry, False
            return
        key = entry.data.get("request_key", "")
        if key in self.keys:
            yield f"the event at seq {entry.seq} tells for a second time of the answer to {key}"
        if last is not None and entry.seq == last.seq + 1 and entry.type == "model_call_completed":
            self.reported = True
            self.keys.add(key)
            wanted = wait_key(entry.session_id, last.run_id or "", last.round)
            if key.rpartition("/")[0] != wanted:
                yield f"the answer at seq {last.seq} is to {key}, and its round is {wanted}"

    def end(self) -> Iterator[str]:
        if self.last is not None and not self.reported and self.last.seq >= self.pruned:  # else the event was removed
            yield f"the answer at seq {self.last.seq} has no model_call_completed event behind it"


class RunUsage(LogRule):
    """What a run used is the sum of the answers that it got, also of those that broke off: in its row, its session's
    row and its last event."""

    types = ("run_started", "assistant", "model_call_completed", "model_call_failed", "run_finished")

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.run_id: str | None = None  # of a run whose beginning is in the log
        self.used = Usage()
        self.answered = 0

    def read(self, entry: Entry) -> Iterator[str]:
        if entry.type == "run_started":
            self.run_id, self.used = entry.run_id, Usage()
        elif entry.type == "assistant":
            self.answered = entry.seq
        elif entry.type == "model_call_failed" or (
            entry.type == "model_call_completed" and self.answered == entry.seq - 1  # else it is a late one
        ):
            self.used += Usage.from_wire(entry.data.get("usage"))
        elif entry.type == "run_finished":
            reported, booked = Usage.from_wire(entry.data.get("usage")), Usage.from_wire(entry.run_usage)
            if reported != booked:
                yield f"run {entry.run_id!r} used {booked.to_wire()} by its row, {reported.to_wire()} by its last event"
            if entry.run_id == self.run_id:
                if reported != self.used:
                    yield f"run {entry.run_id!r} used {reported.to_wire()}, and its answers have {self.used.to_wire()}"
                self.run_id = None

    def end(self) -> Iterator[str]:
        booked = Usage.from_wire(self.session["run_usage"])
        if self.run_id is not None and self.run_id == self.session["run_id"] and booked != self.used:
            yield f"run_usage is {booked.to_wire()}, and the current run's answers have {self.used.to_wire()}"


class Epochs(LogRule):
    """Each activation has a higher epoch than the one before, and the session's own is not lower."""

    types = ("session_activated",)
    last = 0

    def read(self, entry: Entry) -> Iterator[str]:
        epoch = entry.data["_"][EPOCH]
        if epoch <= self.last:
            yield f"the activation at seq {entry.seq} has epoch {epoch}, the one before it {self.last}"
        self.last = epoch

    def end(self) -> Iterator[str]:
        if self.session["epoch"] < self.last:
            yield f"the session's epoch is {self.session['epoch']}, and its last activation's {self.last}"


class Handoffs(LogRule):
    """Each handoff is by a call that has ended well, once, and from the agent that the session was under; it is under
    the one that it was handed off to last, unless it was given another specification since."""

    types = ("tool_finished", "agent_handed_off", "session_migrated")

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.agent: str | None = None  # where it is known
        self.ended: set[str] = set()

    def read(self, entry: Entry) -> Iterator[str]:
        if entry.type == "session_migrated":
            self.agent = None
        elif entry.type == "tool_finished":
            self.ended |= {entry.data["call_id"]} if entry.data.get("outcome", "ok") == "ok" else set()
        else:
            call_id, agent = entry.data["call_id"], entry.data["from_agent"]
            if call_id not in self.ended and self.pruned == 0:
                yield f"the handoff at seq {entry.seq} is by call {call_id}: it has not succeeded, or did so before"
            self.ended.discard(call_id)
            if self.agent not in (None, agent):
                yield f"the handoff at seq {entry.seq} is from {agent}, and the session was under {self.agent}"
            self.agent = entry.data["to_agent"]

    def end(self) -> Iterator[str]:
        if self.agent not in (None, self.session["agent"]):
            yield f"it was handed off to {self.agent}, and is under {self.session['agent']}"


LOG_RULES: dict[str, type[LogRule]] = {
    "sequence": Sequence, "run_order": RunOrder, "tool_results": ToolResults, "tool_calls": ToolCalls,
    "tokens": Tokens, "answers": Answers, "run_usage": RunUsage, "epochs": Epochs,
    "handoffs": Handoffs,
}  # fmt: skip
