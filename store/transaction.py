"""The unit of work behind a group commit: rows are read once under lock, changed in memory, written in bulk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from understudy.errors import StaleGeneration, UnknownSession
from understudy.events import Event
from understudy.messages import Message
from understudy.ports import DecideEnd
from understudy.queues import FREE
from understudy.records import ActivationId, Cancelled, InboxItem, Interrupted, Unwanted
from understudy.workflows import WORKFLOW

from .accounts import Accounts
from .budgets import Charge, owners
from .db.prepared import Row, Statements, cursor_of, pipelined
from .db.session_row import SessionRow
from .db.statements import (
    ACCOUNT,
    COMMAND,
    EVENT,
    INBOX,
    LOADED_AT_ONCE,
    MESSAGE,
    QUESTION,
    REMOVAL,
    RESERVATION,
    RUN,
    SELECT_CALLS,
    SELECT_END_OF_LOG,
    SELECT_INBOX,
    SELECT_MESSAGES,
    SELECT_OWNER,
    SELECT_REMOVAL,
    SELECT_SPECIFICATION,
    SELECT_STEPS,
    SESSION,
    TIMER,
    TOOL_CALL,
    calls_of_round,
    select_sessions,
)
from .entries import event_row, message_row, stamped
from .pending import Pending, seldom_of

OF_SESSION = (MESSAGE, EVENT, RUN, TOOL_CALL, INBOX, ACCOUNT, RESERVATION, TIMER, QUESTION, COMMAND)


class Transaction:
    """One transaction that carries the operations of many sessions.

    Operations check their condition before they change anything, so one that is refused leaves the others alone.

    Attributes:
        now: the commit's time, microseconds UTC; every row written carries it.
        writer_seq: place of the last event in this journal's own log; None while it is not known, and not needed.
        end_found: what that was before this transaction, if it had to be looked for.
        generation: the owner's generation that this journal acts for; 0 before there is one.
        writes: rises with every change, so that an operation which fails half-way is noticed.
        committed_events: the events in order, for the projection.
        woken: sessions whose wait ended here; they are ready for a frame.
        cancelled: which run of each session was asked to end here.
        interrupted: which run of each session was interrupted by a steer here.
        timers: when each timer that was set here is due, by session and name; schedules and queues too
            (`OF_SCHEDULES`, `OF_QUEUES`).
        killed: activations whose run was ended by force here, by the frame whose process must go.
        commands: nodes with commands in the background of which something was written here.
        unwanted: by session, the response that an endpoint makes in background mode for a run that ended here.
        queues: those of which a run may begin that could not before, since it has begun to wait, or another one has
            ended; and whether the queue has to be there. They are looked at when all operations are done
            (`queues.give_slots`).
        stopping: sub-agents that their group stops, which are asked to end one after the other.
        decide_end: what becomes of a group of sub-agents when one of them ends.
        written: every session that was changed, as it is now, and its `seq` before.
        accounts: of the budgets; `charges` has those that concern a session.
        loads: the sessions that were to be locked and read.
    """

    def __init__(
        self,
        connection: Connection,
        statements: Statements,
        namespace: str,
        *,
        now: int,
        writer: str,
        writer_seq: int | None,
        generation: int,
        decide_end: DecideEnd,
    ) -> None:
        self.connection = connection
        self._statements = statements
        self._cursor = cursor_of(connection)
        self.namespace = namespace
        self.now = now
        self.writer = writer
        self.writer_seq = writer_seq
        self.end_found: int | None = None
        self.generation = generation
        self.decide_end = decide_end
        self.by = ""
        self.committed_events: list[Event] = []
        self.woken: dict[str, SessionRow] = {}
        self.cancelled: dict[str, Cancelled] = {}
        self.interrupted: dict[str, Interrupted] = {}
        self.timers: dict[tuple[str, str], int] = {}
        self.killed: dict[str, ActivationId] = {}
        self.commands: dict[str, None] = {}
        self.unwanted: dict[str, Unwanted] = {}
        self.queues: dict[str, bool] = {}
        self.stopping: list[str] = []
        self.written: dict[str, tuple[int, SessionRow]] = {}
        self.accounts = Accounts(statements, self._cursor, namespace, lock=connection.dialect.name != "sqlite")
        self.writes = 0
        self.loads: set[str] = set()
        self._sessions: dict[str, SessionRow | None] = {}
        self._pending = Pending(statements, self._cursor, namespace)
        self._owner: int | None = None

    def load(self, session_ids: Iterable[str], *, wait: bool = True) -> None:
        """Lock and read sessions.

        Two journals can't deadlock on them: those that are locked first are locked in one order, and whoever has locked
        some waits for no more. If a later one is not to be had, the transaction fails as `StoreBusy`, and the next try
        locks all of them first.

        Args:
            wait: False where this transaction has other rows locked that whoever has a session may wait for.
        """
        wanted = sorted(set(session_ids) - self._sessions.keys())
        if not wanted:
            return
        wait = wait and not self._sessions
        self.loads.update(wanted)
        for start in range(0, len(wanted), LOADED_AT_ONCE):
            self._load(wanted[start : start + LOADED_AT_ONCE], wait)
        for session_id in wanted:
            self._sessions.setdefault(session_id, None)

    def _load(self, wanted: list[str], wait: bool) -> None:
        # The last id is repeated up to the next power of two, so that there are few statements to prepare.
        count = 1 << (len(wanted) - 1).bit_length()
        ids = {f"id{number}": wanted[min(number, len(wanted) - 1)] for number in range(count)}
        statement = select_sessions(count, self.connection.dialect.name != "sqlite", wait)
        values = {"ns": self.namespace, **ids}
        for row in self._statements.of(statement).objects(self._cursor, values, SessionRow):
            self._sessions[row.session_id] = row
            self._pending.seldom[row.session_id] = seldom_of(row)
        self._owner = None  # see `require_generation`

    def locking(self, statement: Any) -> Any:
        """A SELECT whose rows nobody else may write until the commit; SQLite's transactions keep others out anyway."""
        return statement if self.connection.dialect.name == "sqlite" else statement.with_for_update()

    def find(self, session_id: str) -> SessionRow | None:
        """The session's row, or None."""
        if session_id not in self._sessions:
            self.load([session_id])
        return self._sessions.get(session_id)

    def session(self, session_id: str) -> SessionRow:
        """The session's row.

        Raises:
            UnknownSession: there is none.
        """
        row = self.find(session_id)
        if row is None:
            raise UnknownSession(f"there is no session {session_id!r} in this store", session_id=session_id)
        return row

    def specification(self, session_id: str) -> dict[str, Any]:
        """The session's specification, which its row does not have: it is large, and seldom changes."""
        found: dict[str, Any] = self.read_one(SELECT_SPECIFICATION, session_id, session=session_id)
        return found

    def charges(self, row: SessionRow) -> list[Charge]:
        """The accounts that a session is charged to, nearest first: its own, and its ancestors' of their trees.

        They may be changed; whoever does has changed the session as well.
        """
        if row.accounts is None:
            return []
        charged = owners(row.accounts)
        if not self.accounts.has(owner for owner, _ in charged):
            # Those of all sessions that were read so far, in one order: two journals can't deadlock on them.
            known = (other.accounts for other in self._sessions.values() if other is not None)
            self.accounts.load(owner for accounts in known for owner, _ in owners(accounts))
        return [
            Charge(level, account)
            for owner, level in charged
            for account in self.accounts.of(owner)
            if level == 0 or account["scope"] == "tree"
        ]

    def changed(self, row: SessionRow) -> None:
        """Note that `row` must be written back."""
        self.writes += 1
        self._pending.unwritten.add(row.session_id)
        if row.session_id not in self._pending.dirty:
            self._pending.dirty[row.session_id] = row
            self.written[row.session_id] = (row.seq, row)
            row.updated_at = self.now

    def rewrite(self, row: SessionRow, **values: Any) -> None:
        """Change columns of a session that otherwise stay as they are, and so are not written back with the others."""
        self.changed(row)
        self.flush()
        where = (SESSION.c.namespace == self.namespace, SESSION.c.session_id == row.session_id)
        self.connection.execute(update(SESSION).where(*where).values(**values))
        for name, value in values.items():
            if name in SessionRow.__struct_fields__:
                setattr(row, name, value)

    def create(self, row: SessionRow, spec: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Add a new session."""
        self.writes += 1
        row.created_at = row.updated_at = self.now
        row.incarnation = row.first_incarnation = self.next_incarnation()
        self._sessions[row.session_id] = row
        self._pending.created.append((row, spec, metadata))
        self._pending.dirty[row.session_id] = row
        self.written[row.session_id] = (0, row)
        self._pending.unwritten.add(row.session_id)

    def next_incarnation(self) -> int:
        """For a session whose id is not in use: later than any removed one's, though their clocks may have been ahead.

        Read again each time: who removed a session of this id has committed, since it was not found.
        """
        return max(self.now, (self._scalar(SELECT_REMOVAL) or 0) + 1)

    def drop(self, session_ids: Sequence[str]) -> None:
        """Remove sessions with all that belongs to them; nobody else may be changing them in this transaction."""
        self.load(session_ids)
        self._note_removal(max(self.session(session_id).incarnation for session_id in session_ids))
        self.flush()
        mine = (COMMAND.c.namespace == self.namespace, COMMAND.c.session_id.in_(session_ids))
        nodes = self.connection.execute(
            select(COMMAND.c.node_id).where(*mine, COMMAND.c.ended_at == 0).distinct().order_by(COMMAND.c.node_id)
        )
        self.commands.update(dict.fromkeys(nodes.scalars()))
        for start in range(0, len(session_ids), LOADED_AT_ONCE):
            some = session_ids[start : start + LOADED_AT_ONCE]
            for table in (*OF_SESSION, SESSION):
                self.writes += 1
                where = (table.c.namespace == self.namespace, table.c.session_id.in_(some))
                self.connection.execute(delete(table).where(*where))
        self.accounts.forget(session_ids)
        for session_id in session_ids:
            self._sessions[session_id] = None
            self._pending.dirty.pop(session_id, None)
            self.written.pop(session_id, None)

    def _note_removal(self, incarnation: int) -> None:
        mine = REMOVAL.c.namespace == self.namespace
        known = self.connection.execute(self.locking(select(REMOVAL.c.incarnation).where(mine))).scalar()
        values = {"incarnation": max(incarnation, known or 0)}
        if known is None:
            self.connection.execute(insert(REMOVAL).values(namespace=self.namespace, **values))
        else:
            self.connection.execute(update(REMOVAL).where(mine).values(**values))

    def insert(self, table: Any, row: Row) -> None:
        """Add a row to any other table."""
        self.writes += 1
        row["namespace"] = self.namespace
        self._pending.unwritten.add(row["session_id"])
        self._pending.inserts.setdefault(table, []).append(row)

    def append(self, row: SessionRow, entry: Message | Event) -> int:
        """Append a message or an event to the session's log and return its `seq`."""
        self.changed(row)
        row.seq += 1
        if isinstance(entry, Message):
            self.insert(MESSAGE, message_row(row.session_id, row.seq, entry, self.now))
        else:
            self.writer_seq = self._end_of_log() + 1
            event = stamped(entry, row, self.now, self.writer_seq)
            self.committed_events.append(event)
            self.insert(EVENT, event_row(event, self.writer))
        return row.seq

    def _end_of_log(self) -> int:
        """The place of this journal's last event. Where it is not known it is read now, under the locks of what this
        transaction changes: a commit of the log that is still under way either held them, and is seen, or has taken
        the same place, and the insert waits for it and fails with `StoreRace`."""
        if self.writer_seq is None:
            self.writer_seq = self.end_found = int(self._scalar(SELECT_END_OF_LOG, writer=self.writer) or 0)
        return self.writer_seq

    def update_call(self, session_id: str, call_id: str, **state: Any) -> None:
        """Set a tool call's state; every field of `CALL_STATE` but the time must be given.

        A call keeps its child, and the arguments that a person gave it: a later state need not name them.
        """
        self._pending.update_call(session_id, call_id, {"edited": None, **state, "updated_at": self.now})

    def update_run(self, session_id: str, run_id: str, **end: Any) -> None:
        """Set how a run stands; every field of `RUN_END` but the slot must be given: it gives that back, unless it says
        otherwise."""
        self._pending.update_run(session_id, run_id, {"slot": FREE, **end})

    def read(self, statement: Any, session_id: str | None = None) -> Any:
        """Execute a SELECT that must see what this transaction has changed so far.

        What earlier operations of the group changed is still in memory; it is written first if it concerns the
        session (any session, if None is given).
        """
        if session_id is None or session_id in self._pending.unwritten:
            self.flush(everything=session_id is None)
        return self.connection.execute(statement)

    def read_one(self, statement: Any, session_id: str, **values: Any) -> Any:
        """The one value of a SELECT that is a constant of its module, and concerns one session only."""
        if session_id in self._pending.unwritten:
            self.flush(everything=False)
        return self._scalar(statement, **values)

    def _scalar(self, statement: Any, **values: Any) -> Any:
        return self._statements.of(statement).scalar(self._cursor, {"ns": self.namespace, **values})

    def _select(self, statement: Any, **values: Any) -> list[Row]:
        return self._statements.of(statement).rows(self._cursor, values)

    def inbox(self, row: SessionRow) -> tuple[InboxItem, ...]:
        """What is in the session's inbox now, oldest first."""
        if row.inbox_count <= 0:
            return ()
        stored = self._select(SELECT_INBOX, ns=self.namespace, session=row.session_id)
        taken = {item["b_item"] for item in self._pending.inbox_deletes if item["b_session_id"] == row.session_id}
        return tuple(
            InboxItem(item["item"], item["kind"], item["key"], item["payload"])
            for item in [*stored, *self._pending.of(INBOX, row.session_id)]
            if item["item"] not in taken
        )

    def messages(self, session_id: str, after: int) -> tuple[Message, ...]:
        """The session's messages after a `seq`, those of this transaction included."""
        stored = self._select(SELECT_MESSAGES, ns=self.namespace, session=session_id, after=after)
        pending = [item for item in self._pending.of(MESSAGE, session_id) if item["seq"] > after]
        return tuple(Message.from_wire({**item["body"], "seq": item["seq"]}) for item in [*stored, *pending])

    def calls(self, session_id: str, run_id: str, round_number: int) -> list[Row]:
        """The tool calls of a round as they are now, in order."""

        def stored(keys: Row) -> list[Row]:
            return self._select(SELECT_CALLS, ns=self.namespace, session=session_id, **keys)

        return self._pending.calls(calls_of_round(stored, run_id, round_number), session_id, run_id, round_number)

    def current_calls(self, row: SessionRow) -> list[Row]:
        """The tool calls of the round that the session is at, or a workflow's steps that have no result yet; none
        outside of a run."""
        if row.run_id is None:
            return []
        if row.kind != WORKFLOW:
            return self.calls(row.session_id, row.run_id, row.round)
        stored = self._select(SELECT_STEPS, ns=self.namespace, session=row.session_id)
        found = self._pending.calls(stored, row.session_id, row.run_id, row.round)
        return [call for call in found if call["state"] != "done"]

    def put_inbox(self, row: SessionRow, kind: str, key: str, payload: dict[str, Any]) -> None:
        """Put something into a session's inbox."""
        self.changed(row)
        row.inbox_seq = item = row.inbox_seq + 1
        row.inbox_count += 1
        self.insert(
            INBOX,
            {"session_id": row.session_id, "item": item, "kind": kind, "key": key, "payload": payload,
             "created_at": self.now},
        )  # fmt: skip

    def take_inbox(self, row: SessionRow, items: Iterable[int]) -> None:
        """Remove inbox rows that the batch takes care of."""
        for item in items:
            row.inbox_count -= 1
            self._pending.unwritten.add(row.session_id)
            self._pending.inbox_deletes.append(
                {"b_namespace": self.namespace, "b_session_id": row.session_id, "b_item": item}
            )

    def set_timer(self, row: SessionRow, name: str, due_at: int, payload: dict[str, Any] | None = None) -> None:
        """Have something happen at a time; a timer of this name that the session has is replaced."""
        self.writes += 1
        key = (row.session_id, name)
        self._pending.unwritten.add(row.session_id)
        self._pending.timer_changes[key] = {"namespace": self.namespace, "session_id": row.session_id, "name": name,
                                    "due_at": due_at, "payload": payload}  # fmt: skip
        self.timers[key] = due_at

    def drop_timer(self, row: SessionRow, name: str) -> None:
        """Have it not happen; nothing if there is no such timer."""
        self.writes += 1
        self._pending.unwritten.add(row.session_id)
        self._pending.timer_changes[row.session_id, name] = None
        self.timers.pop((row.session_id, name), None)

    def wake(self, row: SessionRow) -> None:
        """End the session's wait: it is ready for a frame."""
        self.changed(row)
        row.wait = None
        row.status = "running"
        row.active = 1
        self.woken[row.session_id] = row

    def require_generation(self) -> None:
        """Check that the supervisor this journal acts for still owns the store. To be called after `load`.

        A takeover may be committed right after this. That is as if what is done here had been done before it: the next
        owner's services must wait for the locks of the sessions that were loaded before the owner was read, and then
        find this as it is. So the owner is read again whenever more were loaded, and never locked.

        Raises:
            StaleGeneration: another one does, or none ever did.
        """
        if self._owner is None:
            self._owner = self._scalar(SELECT_OWNER) or 0
        if not self.generation or self._owner != self.generation:
            raise StaleGeneration(
                f"generation {self.generation} no longer owns the store: {self._owner} does",
                details={"generation": self.generation},
            )

    def flush(self, *, everything: bool = True) -> None:
        """Write back what was changed, a statement per table.

        Args:
            everything: see `Pending.write`.
        """
        with pipelined(self.connection):
            self._pending.write(everything=everything)
            self.accounts.write()
