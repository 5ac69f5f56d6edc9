"""Rules of the accounting identity about what a session's log says of itself: folds, forks, decisions that are
remembered, questions that answer themselves, and inputs that were merged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import and_, bindparam, func, or_, select

from understudy.approvals import APPROVAL
from understudy.identifiers import COPIED
from understudy.messages import FOLD

from ..db.prepared import Row
from ..db.statements import NAMESPACE, QUESTION, RUN, SESSION, TIMER, same_session
from ..operations.waiting import QUESTION_TIMER
from .check_log import Entry, LogRule
from .check_scope import Books, Found, Scope, Wrong, selected

ANSWERS = select(QUESTION.c.answer).where(
    QUESTION.c.namespace == NAMESPACE,
    QUESTION.c.session_id == bindparam("session"),
    QUESTION.c.kind == APPROVAL,
    QUESTION.c.answered_at > 0,
)
TIMERS = select(TIMER.c.name).where(TIMER.c.namespace == NAMESPACE, TIMER.c.session_id == bindparam("session"))


@selected
def merged(scope: Scope) -> Iterator[Wrong]:
    """The inputs that are a part of the current run are those that its session's row names; one whose run has ended
    has that run's end, and no rounds of its own."""
    part = RUN.alias("part")
    is_part = and_(same_session(part, SESSION), part.c.merged_into == SESSION.c.run_id, part.c.finished_at == 0)
    parts = select(func.count()).select_from(part).where(is_part).scalar_subquery()
    counted = (
        select(SESSION.c.session_id, SESSION.c.merged, parts.label("parts"))
        .where(scope.of(SESSION), or_(SESSION.c.merged.is_not(None), parts > 0))
    )  # fmt: skip

    def tell(row: Row) -> str | None:
        parts, named = row["parts"], len(row["merged"] or ())
        return None if parts == named else f"{parts} runs are a part of the current one, and its row names {named}"

    yield counted, tell
    whole = RUN.alias("whole")
    differs = or_(
        whole.c.run_id.is_(None), whole.c.finished_at == 0, whole.c.status != part.c.status,
        whole.c.text.is_distinct_from(part.c.text), part.c.rounds != 0,
    )  # fmt: skip
    ended = (
        select(part.c.session_id, part.c.run_id, part.c.merged_into)
        .outerjoin(whole, and_(same_session(whole, part), whole.c.run_id == part.c.merged_into))
        .where(scope.of(part), part.c.merged_into != "", part.c.finished_at > 0, differs)
    )
    yield ended, lambda row: f"run {row['run_id']!r} is a part of {row['merged_into']!r}, and has not its end"


class Folds(LogRule):
    """A record of which part of the log a model is sent tells of what is before it, and leaves out no less than the
    one before."""

    types = ("user",)

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.last = (0, 0)

    def read(self, entry: Entry) -> Iterator[str]:
        if entry.data.get("origin") != FOLD:
            return
        extra = entry.data.get("extra") or {}
        through, elided = extra.get("through", 0), extra.get("elided", 0)
        if max(through, elided) >= entry.seq:
            yield f"the record at seq {entry.seq} leaves out what is up to {max(through, elided)}"
        elif through < self.last[0] or elided < self.last[1]:
            yield f"the record at seq {entry.seq} leaves out less than the one before it"
        self.last = through, elided


class Forks(LogRule):
    """What a fork was given is what its log begins with: copies up to the place that it names, and none behind that."""

    types = ("session_created", "user", "assistant", "tool", "system")

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.copied = 0  # `seq` of the last copy
        self.own = 0  # `seq` of the first message that is none

    def read(self, entry: Entry) -> Iterator[str]:
        if entry.is_event:
            at = entry.data.get("forked_at", 0)
            if self.copied != at or (at and self.own):
                yield f"it was forked at {at}, and what was copied goes up to {self.copied}"
        elif not (entry.run_id or "").startswith(COPIED):
            self.own = self.own or entry.seq
        elif self.own:
            yield f"the message at seq {entry.seq} is a copy, and the one at {self.own} is none"
        else:
            self.copied = entry.seq


class Remembered(LogRule):
    """What a session remembers of approvals was said by somebody who approved or rejected a call of it."""

    types = ("system",)

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.said: list[tuple[str, str]] = []

    def read(self, entry: Entry) -> Iterable[str]:
        if entry.data.get("origin") == APPROVAL and not (entry.run_id or "").startswith(COPIED):
            extra = entry.data.get("extra") or {}
            self.said.append((extra.get("decision", ""), "arguments" if "arguments" in extra else "tool"))
        return ()

    def end(self) -> Iterator[str]:
        if not self.said:
            return
        answers = [row["answer"] or {} for row in self.books.read(ANSWERS, session=self.session["session_id"])]
        wanted = [(answer["decision"], answer["remember"]) for answer in answers if answer.get("remember")]
        if sorted(wanted) != sorted(self.said):
            yield f"it remembers {sorted(self.said)} of approvals, and {sorted(wanted)} was to be remembered"


class Due(LogRule):
    """A question that is answered by itself at a time has the timer for that as long as nobody has answered, and its
    run was not asked to end."""

    types = ("input_requested", "input_received")

    def __init__(self, books: Books, session: Row) -> None:
        super().__init__(books, session)
        self.open: dict[str, str | None] = {}  # by call: its run

    def read(self, entry: Entry) -> Iterable[str]:
        call_id = entry.data.get("call_id", "")
        self.open.pop(call_id, None)
        if entry.data.get("due_at"):
            self.open[call_id] = entry.run_id
        return ()

    def end(self) -> Iterator[str]:
        run_id = self.session["run_id"]
        open_calls = [call_id for call_id, of in self.open.items() if of == run_id]
        if not open_calls or self.session["cancel_reason"] is not None:
            return
        there = {row["name"] for row in self.books.read(TIMERS, session=self.session["session_id"])}
        for call_id in open_calls:
            if QUESTION_TIMER + call_id not in there:
                yield f"the question of call {call_id} has no timer, and is to be answered at a time"


RECORD_ROW_RULES: dict[str, Callable[[Books], Iterable[Found]]] = {"merged": merged}
RECORD_LOG_RULES: dict[str, type[LogRule]] = {
    "folds": Folds, "forks": Forks, "remembered": Remembered, "due": Due,
}  # fmt: skip
