"""Archives: a session, with its tree if wanted, in one JSON file that any backend takes in again.

The file is one JSON document, a row per line, and ends in the SHA-256 of all bytes before that last line, so a file
that was cut off or changed is refused. Rows are those of the tables without their namespace, so transcripts, events and
results are the same wherever they are read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from understudy.commands import LOST
from understudy.errors import (
    ArchiveVersion,
    InvalidArchive,
    InvalidInput,
    SessionActive,
    SessionConflict,
    UntrustedCode,
)
from understudy.identifiers import check_identifier
from understudy.queues import WAITS

from .. import budgets, ledger
from ..check.check import check
from ..db import schema
from ..db.engine import now
from ..db.prepared import Row, defaults
from ..db.session_row import SessionRow
from ..db.statements import (
    ACCOUNT,
    ACCOUNT_KEY,
    COMMAND,
    EVENT,
    INBOX,
    MESSAGE,
    NOTE,
    QUESTION,
    RESERVATION,
    RUN,
    SESSION,
    TIMER,
    TOOL_CALL,
)
from ..operations import code, notes, progress, queues, trust
from ..reads import queries
from ..transaction import Transaction

FORMAT = "understudy-archive"
VERSION = 1
PARTS = {
    table.name: table
    for table in (RUN, MESSAGE, EVENT, TOOL_CALL, INBOX, ACCOUNT, RESERVATION, TIMER, QUESTION, NOTE, COMMAND)
}
ORDER = {
    "run": RUN.c.accepted_at,
    "message": MESSAGE.c.seq,
    "event": EVENT.c.seq,
    "inbox": INBOX.c.item,
    "note": NOTE.c.key,
}
SUM = b'"sha256":"'
AT_ONCE = 1_000
BUDGET_SCHEMA = 4
"""Older archives have a tree's one budget in columns of its root."""

SHOWN = 5
"""How many sessions a message names; its details have all."""

IMPORTS = "import"
"""Writer of all events of a namespace that happened elsewhere."""


def export(connection: Connection, namespace: str, session_id: str, *, tree: bool = False) -> Generator[str]:
    """The lines of an archive of a session as it is in this snapshot.

    Args:
        connection: of `Database.snapshot`.
        tree: with all sessions below it.

    Raises:
        UnknownSession: there is no such session.
    """
    checksum = hashlib.sha256()
    for line in _lines(connection, namespace, session_ids(connection, namespace, session_id, tree=tree)):
        checksum.update(line.encode())
        yield line
    yield f'{SUM.decode()}{checksum.hexdigest()}"}}\n'


def session_ids(connection: Connection, namespace: str, session_id: str, *, tree: bool) -> list[str]:
    """The session and, if asked for, all below it; parents before children. Raises `UnknownSession`."""
    root_id = queries.session_info(connection, namespace, session_id).root_id
    if not tree:
        return [session_id]
    statement = (
        select(SESSION.c.session_id, SESSION.c.parent_id)
        .where(SESSION.c.namespace == namespace, SESSION.c.root_id == root_id)
        .order_by(SESSION.c.depth, SESSION.c.created_at, SESSION.c.session_id)
    )
    kept = {session_id: None}
    for found, parent_id in connection.execute(statement):
        if parent_id in kept:
            kept[found] = None
    return list(kept)


def _lines(connection: Connection, namespace: str, ids: list[str]) -> Iterator[str]:
    header = {"format": FORMAT, "version": VERSION, "schema": schema.newest(), "exported_at": now()}
    yield f'{_json(header)[:-1]},"sessions":[\n'
    wanted: set[str] = set()
    for number, session_id in enumerate(ids):
        where = (SESSION.c.namespace == namespace, SESSION.c.session_id == session_id)
        row = dict(connection.execute(select(SESSION).where(*where)).mappings().one())
        wanted |= code.digests(row["spec"] or {}, row["placement"]) | code.waiting(row["next_spec"])
        yield f'{"," if number else ""}{{"session":{_row(row)}'
        for name, table in PARTS.items():
            yield f',\n"{name}":['
            order = ORDER.get(name)
            statement = select(table).where(table.c.namespace == namespace, notes.of_session(table, session_id))
            order = order if order is not None else notes.session_of(table)
            statement = statement.order_by(order, *table.primary_key)  # the same session, the same text
            with connection.execute(statement.execution_options(yield_per=AT_ONCE)) as found:
                rows = enumerate(found.mappings())
                yield from (f"{',' if index else ''}\n{_row(dict(item))}" for index, item in rows)
            yield "]"
        yield "}\n"
    yield '],"code":{'
    for number, digest in enumerate(sorted(wanted)):
        data = queries.blob(connection, namespace, digest)
        if data is not None:
            yield f"{',' if number else ''}\n{_json(digest)}:{_json(base64.b64encode(data).decode())}"
    yield "},\n"


def _row(row: Row) -> str:
    row.pop("namespace")
    return _json(row)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True)
class Archive:
    """An archive as it was read: whole and of a known version, but its rows not yet looked into."""

    sessions: list[dict[str, Any]]
    code: dict[str, bytes]
    checksum: str

    @property
    def top(self) -> Row:
        """The session that was exported; the others are below it."""
        return dict(self.sessions[0]["session"])

    @property
    def messages(self) -> int:
        """How many there are."""
        return sum(len(session["message"]) for session in self.sessions)

    @property
    def unfinished(self) -> list[str]:
        """Sessions that had work to do when they were exported."""
        rows = [session["session"] for session in self.sessions]
        return [row["session_id"] for row in rows if row["active"] or row["inbox_count"]]


def read(data: bytes, name: str) -> Archive:
    """Read an archive.

    Args:
        name: of the file, for messages.

    Raises:
        ArchiveVersion: a newer version of Understudy wrote it.
        InvalidArchive: it is none, or was damaged.
    """
    body, mark, rest = data.rpartition(SUM)
    if not data.startswith(f'{{"format":"{FORMAT}"'.encode()):
        raise InvalidArchive(f"{name} is no archive of Understudy")
    checksum = rest.partition(b'"')[0].decode("ascii", "replace")
    if not mark or hashlib.sha256(body).hexdigest() != checksum:
        raise InvalidArchive(f"{name} was cut off or changed: its checksum does not match")
    try:
        document = json.loads(data)
        version, newest = (document["version"], document["schema"]), schema.newest()
        if version[0] > VERSION or version[1] > newest:
            raise ArchiveVersion(
                f"{name} has archive version {version[0]}, schema {version[1]}; this code knows {VERSION}, {newest}"
            )
        blobs = {digest: base64.b64decode(text, validate=True) for digest, text in document["code"].items()}
        if version[1] < BUDGET_SCHEMA:
            _add_accounts(document["sessions"])
        archive = Archive(document["sessions"], blobs, checksum)
        _check_rows(archive)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, binascii.Error) as error:
        raise InvalidArchive(f"{name} has not the form of an archive: {type(error).__name__}: {error}") from None
    except InvalidArchive:
        raise
    except InvalidInput as error:
        raise InvalidArchive(f"{name} has not the form of an archive: {error.message}") from None
    return archive


def _add_accounts(sessions: list[dict[str, Any]]) -> None:
    """Give an older archive's sessions the accounts that the migration gives a store's."""
    limited = {item["session"]["session_id"] for item in sessions if item["session"]["budget_tokens"] is not None}
    for item in sessions:
        row = item["session"]
        allowed, reserved, spent = (row.pop(f"budget_{name}") for name in ("tokens", "reserved", "spent"))
        item["account"] = []
        if row["root_id"] in limited:
            row["accounts"] = budgets.written([(row["root_id"], row["depth"])])
        if allowed is not None:
            account = budgets.new_account(row["session_id"], "tree", "tokens", allowed)
            account.update(reserved=reserved, spent=spent, beyond=max(0, spent + reserved - allowed))
            item["account"] = [{**account, "since": row["created_at"]}]
        for held in item["reservation"]:
            held.pop("root_id")


def _check_rows(archive: Archive) -> None:
    if not archive.sessions:
        raise ValueError("it holds no session")
    known: set[str] = set()
    for number, session in enumerate(archive.sessions):
        row = session["session"]
        session_id = check_identifier(row["session_id"], "session")
        if session_id in known or (number and row["parent_id"] not in known):
            raise ValueError(f"session {session_id} is there twice, or before its parent")
        known.add(session_id)
        for name, table in {"session": SESSION, **PARTS}.items():
            columns = set(table.columns.keys()) - {"namespace"}
            session.setdefault(name, [])  # an older version did not have the table
            for item in [row] if name == "session" else session[name]:
                owner = item["owner"] if name == NOTE.name and item["scope"] in notes.REMOVED_WITH_SESSION else None
                if item.get("session_id", owner) != session_id or not item.keys() <= columns:
                    raise ValueError(f"a row of table {name} does not belong to session {session_id}")


def load(tx: Transaction, archive: Archive, *, resume: bool = False, trust_code: bool = False) -> bool:
    """Take an archive in, all of it or nothing; False if it was taken in before.

    A session whose parent is not in the archive becomes the root of its tree.

    Args:
        resume: also with unfinished work, which then goes on here: whoever says so knows that the original does not.
        trust_code: also with code, which then runs here: whoever says so trusts who made the archive.

    Raises:
        UntrustedCode: it brings code, and `trust_code` is false; `details["code"]` says which, by session.
        SessionConflict: the store has another session of the same id.
        SessionActive: there is unfinished work, and `resume` is false.
        InvalidArchive: it lacks sub-agents that it waits for, or its rows don't fit together.
    """
    there = [tx.find(session["session"]["session_id"]) for session in archive.sessions]
    for session, row in zip(archive.sessions, there, strict=True):
        if row is not None and row.created_at != session["session"]["created_at"]:
            raise SessionConflict(
                "another session of this id is in the store",
                session_id=row.session_id,
                details={"hint": "Import it into another store, or under another UNDERSTUDY_NAMESPACE."},
            )
        if row is not None and row.seq < session["session"]["seq"]:
            raise SessionConflict(
                f"the archive is ahead of the store: {session['session']['seq']} entries, and {row.seq} there",
                session_id=row.session_id,
                details=_remove_first(row),
            )
    if all(there):
        return False
    for row in there:
        if row is not None and any(other is None for other in there):
            raise SessionConflict(
                "it is in the store already, and others of the archive are not",
                session_id=row.session_id,
                details=_remove_first(row),
            )
    if archive.unfinished and not resume:
        raise SessionActive(
            f"{len(archive.unfinished)} of the archive's sessions had work to do",
            session_id=archive.unfinished[0],
            details={
                "hint": "If the original does not go on, import it with --resume and it goes on here; else export it "
                "again when its runs have ended."
            },
        )
    if not trust_code:
        _refuse_code(tx, archive)
    parents = [session["session"]["parent_id"] for session in archive.sessions]
    for session in archive.sessions:
        row = session["session"]
        if row["children_open"] and row["session_id"] not in parents:
            raise InvalidArchive("it waits for sub-agents that are not in the archive: export it with --tree")
    if missing := _unreported(archive):
        raise InvalidArchive(
            f"{missing[0]} does not know of the end of its sub-agent {missing[1]}, which is not in the archive: "
            "export it with --tree",
            session_id=missing[0],
        )
    _insert(tx, archive)
    ids = [session["session"]["session_id"] for session in archive.sessions]
    for start in range(0, len(ids), AT_ONCE):
        violations = check(tx.connection, tx.namespace, ids[start : start + AT_ONCE])
        if not violations:
            continue
        first = violations[0]
        raise InvalidArchive(f"its rows don't fit together: {first.rule}: {first.text}", session_id=first.session_id)
    return True


def _unreported(archive: Archive) -> tuple[str, str] | None:
    """A session, and a sub-agent that it has started and heard no end of, if that is not in the archive: one in the
    background that is at work, or one that was given up."""
    known = {session["session"]["session_id"] for session in archive.sessions}
    for session in archive.sessions:

        def named(kind: str, field: str, events: list[Row] = session["event"]) -> set[str]:
            return {(event.get("body") or {}).get(field, "") for event in events if event.get("type") == kind}

        started = named("child_spawned", "child_id")
        missing = started - known - named("child_finished", "child_id") - named("child_restarted", "lost_id")
        if missing:
            return session["session"]["session_id"], min(missing)
    return None


def _refuse_code(tx: Transaction, archive: Archive) -> None:
    def definition(placement: str) -> bytes | None:
        return archive.code.get(placement) or queries.blob(tx.connection, tx.namespace, placement)

    try:
        found = trust.brought((session["session"] for session in archive.sessions), archive.code, definition)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidArchive(f"the specification of a session is malformed: {type(error).__name__}: {error}") from None
    if found:
        lines = [(f"session {name}: " if name else "") + ", ".join(items) for name, items in found.items()]
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise UntrustedCode(f"the archive brings {'; '.join(lines[:SHOWN])}{more}", details={"code": found})


def _remove_first(row: SessionRow) -> dict[str, str]:
    root = row.root_id
    return {"hint": f"Remove its tree first (`understudy store prune --session {root}`), or import into another store."}


def _insert(tx: Transaction, archive: Archive) -> None:
    top = archive.top
    known = {session["session"]["session_id"] for session in archive.sessions}
    # Its events were measured and exported where they happened, so their places are taken before they come.
    runs = [run for session in archive.sessions for run in session["run"]]
    writer_seq = progress.take(
        tx, IMPORTS, sum(len(session["event"]) for session in archive.sessions),
        runs=(len(runs), sum(run["finished_at"] > 0 for run in runs)),
    )  # fmt: skip
    for session in archive.sessions:
        row = {
            **session["session"],
            "frame_id": None,
            "actor_pid": None,
            "node_id": "",
            "moved": 0,
            "redone": int(any(session["session"].get(mark) for mark in ("redone", "moved", "frame_id"))),
            "root_id": top["session_id"],
        }
        row["updated_at"] = tx.now  # retention counts from here
        row["incarnation"] = row["first_incarnation"] = tx.next_incarnation()
        row["depth"] -= top["depth"]
        if row["session_id"] == top["session_id"]:
            # Nobody waits for its task here: to this store it is a root like any other.
            row.update(
                parent_id=None, call_id=None, parent_run_id=None, task_open=0, abandoned=0, replaced_by=None,
                background=0,
            )  # fmt: skip
        row["accounts"] = budgets.written(item for item in budgets.owners(row.get("accounts")) if item[0] in known)
        row["wait_holder"] = ""  # whoever takes over a wait for a model issues the call again
        _rows(tx, SESSION, [row])
        for name, table in PARTS.items():
            rows = session[name]
            if name == "event":
                rows = [
                    {**item, "writer": IMPORTS, "writer_seq": writer_seq + index + 1} for index, item in enumerate(rows)
                ]
                writer_seq += len(rows)
            if name == "command":  # what is at work elsewhere is not found here
                rows = [
                    item if item["ended_at"] else {**item, "state": LOST, "ended_at": tx.now, "node_id": ""}
                    for item in rows
                ]
            if name != "reservation" or row["accounts"] is not None:
                _rows(tx, table, rows)
    _take_off(tx, top["session_id"])
    for digest, data in archive.code.items():
        code.put(tx, digest, data)
    queues.look_soon(tx, {run["queue"] for run in runs if run.get("slot") == WAITS})


def _take_off(tx: Transaction, root_id: str) -> None:
    """What sessions had used that did not come along is taken off the limits: what is left stays the same."""
    for account, spent, reserved in ledger.reckon(tx.connection, tx.namespace, [root_id]):
        elsewhere = max(0, account["spent"] - spent)
        allowed, used = max(0, account["allowed"] - elsewhere), account["spent"] - elsewhere
        values = {"allowed": allowed, "spent": used, "reserved": min(account["reserved"], reserved)}
        values["beyond"] = max(account["beyond"], used + values["reserved"] - allowed)
        if any(account[name] != value for name, value in values.items()):
            key = [ACCOUNT.c[name] == account[name] for name in ACCOUNT_KEY]
            tx.writes += 1
            tx.connection.execute(update(ACCOUNT).where(*key).values(**values))


def _rows(tx: Transaction, table: Any, rows: list[Row]) -> None:
    tx.writes += len(rows)
    standard = defaults(table)
    full = [{**standard, **row, "namespace": tx.namespace} for row in rows]
    for start in range(0, len(full), AT_ONCE):
        tx.connection.execute(insert(table), full[start : start + AT_ONCE])


def size(connection: Connection, namespace: str, ids: list[str]) -> int:
    """How many messages and events these sessions have, for a progress bar."""
    total = 0
    for start in range(0, len(ids), AT_ONCE):
        some = ids[start : start + AT_ONCE]
        for table in (MESSAGE, EVENT):
            where = (table.c.namespace == namespace, table.c.session_id.in_(some))
            total += connection.execute(select(func.count()).select_from(table).where(*where)).scalar() or 0
    return total
