"""Notes and boards: what tools and clients read and write of them, each within the transaction that commits the call.

The row with an empty key is locked by whoever writes a note of its owner, and counts these writes: so a note's version
is never used twice, also not for another note of the same key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, NamedTuple

from sqlalchemy import and_, delete, func, insert, select, update

from understudy import events
from understudy.errors import InvalidInput
from understudy.identifiers import digest
from understudy.messages import storable
from understudy.notes import (
    ADD_NOTE,
    AGENT,
    CURRENT_TIME,
    DELETE_NOTE,
    HEAD,
    LIST_NOTES,
    MOST_NOTES,
    OWN_SCOPES,
    POST_TO_BOARD,
    PROJECT,
    READ_BOARD,
    REMOVE_FROM_BOARD,
    SESSION,
    SHOWN_CHARACTERS,
    TODO,
    TODO_KEY,
    TREE,
    UPDATE_BOARD,
    UPDATE_NOTE,
    offset_of,
    todo_line,
)
from understudy.reads import Note
from understudy.records import Ask

from ..db.session_row import SessionRow
from ..db.statements import NOTE, columns_of
from ..transaction import Transaction

COLUMNS = columns_of(NOTE, Note)

REMOVED_WITH_SESSION = (SESSION, TREE)
"""Scopes whose notes are a session's own, and its tree's."""

Said = tuple[str, str]
"""The decision about a call (`ok` or `error`) and what the model reads."""


class Owner(NamedTuple):
    """Whose notes."""

    scope: str
    name: str


def answer(tx: Transaction, row: SessionRow, asked: Ask) -> Said:
    """The result of a call of one of `NOTE_TOOLS`, which has its effect here."""
    given = asked.arguments or {}
    if asked.kind == CURRENT_TIME:
        return "ok", _time(tx.now, given.get("offset"))
    if asked.kind == TODO:
        return _replace_todo(tx, row, given["items"])
    board = Owner(TREE, row.root_id)
    if asked.kind == READ_BOARD:
        return _listed(tx, [board], given.get("key"))
    if asked.kind == POST_TO_BOARD:
        return _add(tx, board, given["key"], given["text"], row.session_id)
    if asked.kind == UPDATE_BOARD:
        return _update(tx, [board], given, row.session_id)
    if asked.kind == REMOVE_FROM_BOARD:
        return _remove(tx, [board], given)
    owners = owners_of(row, given.get("project"))
    chosen = [owner for owner in owners if given.get("scope") in (None, owner.scope)]
    if asked.kind == ADD_NOTE:
        key = given.get("key") or digest(asked.call_id, size=4)
        return _add(tx, chosen[0], key, given["text"], row.session_id, pinned=bool(given.get("pinned")))
    if asked.kind == UPDATE_NOTE:
        return _update(tx, chosen, given, row.session_id)
    if asked.kind == DELETE_NOTE:
        return _remove(tx, chosen, given)
    assert asked.kind == LIST_NOTES
    return _listed(tx, chosen, given.get("key"))


def owners_of(row: SessionRow, project: str | None) -> list[Owner]:
    """Whose notes a session's tools know, the narrowest scope first."""
    names = {SESSION: row.session_id, AGENT: row.agent, PROJECT: project}
    return [Owner(scope, name) for scope in OWN_SCOPES if (name := names[scope])]


def shown(tx: Transaction, row: SessionRow, memory: dict[str, Any]) -> list[Note]:
    """The notes that a session's memory shows: pinned ones first, then the newest.

    Args:
        memory: of its compiled specification.
    """
    owners = [owner for owner in owners_of(row, memory.get("project")) if owner.scope in memory["scopes"]]
    found = [note for owner in owners for note in _all(tx, owner)]
    return sorted(found, key=lambda note: (not note.pinned, -note.updated_at, note.scope, note.key))


def put(tx: Transaction, session_id: str, key: str, text: str, pinned: bool) -> int:
    """Set a note of a session for a client; returns its version.

    Raises:
        UnknownSession: there is no such session.
        InvalidInput: it has as many notes as it may have.
    """
    owner = Owner(SESSION, tx.session(session_id).session_id)
    version = _lock(tx, owner)
    found = _find(tx, owner, key)
    if found is None and _count(tx, owner) >= MOST_NOTES:
        raise InvalidInput(_full(owner), session_id=session_id)
    return _write(tx, owner, key, text, version, found, pinned=pinned, by="")


def remove(tx: Transaction, session_id: str, key: str) -> bool:
    """Remove a note of a session for a client; True if there was one. Raises `UnknownSession`."""
    owner = Owner(SESSION, tx.session(session_id).session_id)
    version = _lock(tx, owner)
    if _find(tx, owner, key) is None:
        return False
    _delete(tx, owner, key, version)
    return True


def forget(tx: Transaction, session_ids: tuple[str, ...]) -> None:
    """Sessions are removed, with their notes and their trees' boards. Those of agents and projects stay."""
    for session_id in session_ids:
        tx.writes += 1
        tx.connection.execute(delete(NOTE).where(NOTE.c.namespace == tx.namespace, of_session(NOTE, session_id)))


def session_of(table: Any) -> Any:
    """The column of a table that says which session its rows belong to."""
    return table.c.owner if table is NOTE else table.c.session_id


def of_session(table: Any, session_id: str) -> Any:
    """The condition that a row belongs to a session, and goes with it."""
    mine = session_of(table) == session_id
    return and_(mine, NOTE.c.scope.in_(REMOVED_WITH_SESSION)) if table is NOTE else mine


def _add(tx: Transaction, owner: Owner, key: str, text: str, by: str, *, pinned: bool = False) -> Said:
    version = _lock(tx, owner)
    found = _find(tx, owner, key)
    if found is not None:
        change = "update_board" if owner.scope == TREE else "update_note"
        return "error", f"nothing was added: {_what(found)} already. Use {change} to change it. {_says(found)}"
    if _count(tx, owner) >= MOST_NOTES:
        return "error", f"nothing was added: {_full(owner)}"
    version = _write(tx, owner, key, text, version, None, pinned=pinned, by=by)
    return "ok", f"{_name(owner, key)} is added (version {version})"


def _update(tx: Transaction, owners: list[Owner], given: dict[str, Any], by: str) -> Said:
    for owner, version, found in _locked(tx, owners, given["key"]):
        if _is_outdated(found, given):
            return "error", f"nothing was changed: {_by_now(found, given)}"
        pinned = found.pinned if given.get("pinned") is None else given["pinned"]
        version = _write(tx, owner, found.key, given["text"], version, found, pinned=pinned, by=by)
        return "ok", f"{_name(owner, found.key)} is updated (version {version})"
    return _missing(tx, owners, given["key"])


def _remove(tx: Transaction, owners: list[Owner], given: dict[str, Any]) -> Said:
    for owner, version, found in _locked(tx, owners, given["key"]):
        if _is_outdated(found, given):
            return "error", f"nothing was removed: {_by_now(found, given)}"
        return "ok", f"{_name(owner, found.key)} is removed (version {_delete(tx, owner, found.key, version)})"
    return _missing(tx, owners, given["key"])


def _locked(tx: Transaction, owners: list[Owner], key: str) -> Iterator[tuple[Owner, int, Note]]:
    """The note of each of these owners that has one of this key, with the owner's last version, and locked: the first
    one is meant."""
    for owner in owners:
        version = _lock(tx, owner)
        found = _find(tx, owner, key)
        if found is not None:
            yield owner, version, found


def _is_outdated(found: Note, given: dict[str, Any]) -> bool:
    """Whether the agent wants to change another version of a note."""
    return given.get("expected_version") not in (None, found.version)


def _by_now(found: Note, given: dict[str, Any]) -> str:
    return f"{_what(found)} by now, not {given['expected_version']}. {_says(found)}"


def _replace_todo(tx: Transaction, row: SessionRow, items: list[dict[str, str]]) -> Said:
    owner = Owner(SESSION, row.session_id)
    version = _lock(tx, owner)
    items = [{"text": storable(item["text"]), "status": item["status"]} for item in items]
    before = _find(tx, owner, TODO_KEY)
    _write(tx, owner, TODO_KEY, json.dumps(items), version, before, pinned=False, by=row.session_id)
    done = sum(item["status"] == "done" for item in items)
    tx.append(row, events.TodoUpdated(items=items, done=done))
    lines = "\n".join(map(todo_line, items))
    return "ok", f"{done} of {len(items)} done\n{lines}" if items else "the todo list is empty"


def _listed(tx: Transaction, owners: list[Owner], key: str | None) -> Said:
    found = [note for owner in owners for note in _all(tx, owner) if note.key != TODO_KEY]
    if key is not None:
        texts = [f"{_what(note)}. {_says(note)}" for note in found if note.key == key]
        return ("ok", "\n\n".join(texts)) if texts else _missing(tx, owners, key)
    lines = []
    for note in found:
        line = note.text if len(note.text) <= SHOWN_CHARACTERS else f"{note.text[:SHOWN_CHARACTERS]}…"
        pinned = ", pinned" if note.pinned else ""
        lines.append(f"{_name(Owner(note.scope, note.owner), note.key)} (version {note.version}{pinned}): {line}")
    return "ok", "\n".join(lines) or ("the board is empty" if owners[0].scope == TREE else "there are no notes")


def _missing(tx: Transaction, owners: list[Owner], key: str) -> Said:
    keys = ", ".join(note.key for owner in owners for note in _all(tx, owner) if note.key != TODO_KEY) or "none"
    return "error", f"there is no {'entry' if owners[0].scope == TREE else 'note'} {key}. There are: {keys}"


def _name(owner: Owner, key: str) -> str:
    return f"board entry {key}" if owner.scope == TREE else f"{owner.scope} note {key}"


def _what(note: Note) -> str:
    return f"{_name(Owner(note.scope, note.owner), note.key)} has version {note.version}"


def _says(note: Note) -> str:
    return f"Its text:\n{note.text}"


def _full(owner: Owner) -> str:
    where = "the board has" if owner.scope == TREE else f"the {owner.scope} has"
    return f"{where} {MOST_NOTES} notes, and may have no more: remove one first, or join some into one."


def _time(now: int, offset: str | None) -> str:
    moment = datetime.fromtimestamp(now // 1_000_000, UTC)
    text = f"{moment:%Y-%m-%dT%H:%M:%SZ} ({moment:%A}), UTC"
    difference = offset_of(offset) if offset is not None else timedelta(0)
    if not difference:
        return text
    return f"{text}; {moment.astimezone(timezone(difference)).isoformat()} at {offset}"


# Rows. What is read here is not kept in the transaction: it is written at once.


def _of(tx: Transaction, owner: Owner) -> tuple[Any, ...]:
    return NOTE.c.namespace == tx.namespace, NOTE.c.scope == owner.scope, NOTE.c.owner == owner.name


def _lock(tx: Transaction, owner: Owner) -> int:
    """Keep others from writing this owner's notes until the commit; the version of the last write.

    It waits for nobody, since this transaction has sessions locked: where another one has this lock, `StoreBusy` has
    the whole transaction tried again.
    """
    head = select(NOTE.c.version).where(*_of(tx, owner), NOTE.c.key == HEAD)
    if tx.connection.dialect.name != "sqlite":
        head = head.with_for_update(nowait=True)
    found: int | None = tx.connection.execute(head).scalar()
    if found is None:
        _insert(tx, owner, HEAD, "", 0, pinned=False, by="")
    return found or 0


def _find(tx: Transaction, owner: Owner, key: str) -> Note | None:
    found = tx.connection.execute(select(*COLUMNS).where(*_of(tx, owner), NOTE.c.key == key)).first()
    return _note(found) if found is not None else None


def _all(tx: Transaction, owner: Owner) -> list[Note]:
    """An owner's notes by their keys, the todo list included."""
    rows = tx.connection.execute(select(*COLUMNS).where(*_of(tx, owner), NOTE.c.key != HEAD).order_by(NOTE.c.key))
    return sorted(map(_note, rows), key=lambda note: note.key)  # whatever the database's order of texts is


def _note(row: Any) -> Note:
    return Note(**{**row._mapping, "pinned": bool(row.pinned)})


def _count(tx: Transaction, owner: Owner) -> int:
    counted = select(func.count()).select_from(NOTE).where(*_of(tx, owner), NOTE.c.key.not_in((HEAD, TODO_KEY)))
    return tx.connection.execute(counted).scalar() or 0


def _write(
    tx: Transaction, owner: Owner, key: str, text: str, version: int, found: Note | None, *, pinned: bool, by: str
) -> int:  # fmt: skip
    version = _counted(tx, owner, version)
    text = storable(text)
    if found is None:
        _insert(tx, owner, key, text, version, pinned=pinned, by=by)
        return version
    values = {"text": text, "version": version, "pinned": int(pinned), "updated_at": tx.now, "written_by": by}
    tx.connection.execute(update(NOTE).where(*_of(tx, owner), NOTE.c.key == key).values(**values))
    return version


def _insert(tx: Transaction, owner: Owner, key: str, text: str, version: int, *, pinned: bool, by: str) -> None:
    tx.writes += 1
    values = {"namespace": tx.namespace, "scope": owner.scope, "owner": owner.name, "key": key, "text": text,
              "version": version, "pinned": int(pinned), "created_at": tx.now, "updated_at": tx.now,
              "written_by": by}  # fmt: skip
    tx.connection.execute(insert(NOTE).values(**values))


def _delete(tx: Transaction, owner: Owner, key: str, version: int) -> int:
    version = _counted(tx, owner, version)
    tx.connection.execute(delete(NOTE).where(*_of(tx, owner), NOTE.c.key == key))
    return version


def _counted(tx: Transaction, owner: Owner, version: int) -> int:
    """Count a write, of the owner whose notes are locked; its version."""
    tx.writes += 1
    values = {"version": version + 1, "updated_at": tx.now}
    tx.connection.execute(update(NOTE).where(*_of(tx, owner), NOTE.c.key == HEAD).values(**values))
    return version + 1
