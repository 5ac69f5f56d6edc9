"""What agents note: a board, and a session's notes, are what the committed results of the calls say."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from sqlalchemy import func, select

from understudy.identifiers import COPIED
from understudy.messages import text_of
from understudy.notes import BOARD, HEAD, NOTES
from understudy.store.db.statements import MESSAGE, NOTE, SESSION, TOOL_CALL

from .handoffs import hands_off

DONE = re.compile(r"(session note|agent note|board entry) (\S+) is (added|updated|removed) \(version (\d+)\)")
SCOPE = {"session note": "session", "agent note": "agent", "board entry": "tree"}

Writes = dict[tuple[str, str], list[tuple[int, str, str, dict[str, Any]]]]
"""By scope and owner: version, what was done, key and arguments."""


def wrong(connection: Any) -> Iterator[str]:
    """What is not as the results say. Of agents' notes only that no version is used twice: sessions that wrote some may
    be gone."""
    writes = _writes(connection)
    columns = (NOTE.c.scope, NOTE.c.owner, NOTE.c.key, NOTE.c.text, NOTE.c.version)
    stored: dict[tuple[str, str], dict[str, tuple[str, int]]] = defaultdict(dict)
    for row in connection.execute(select(*columns)):
        stored[row.scope, row.owner][row.key] = row.text, row.version
    for owner in sorted({*writes, *stored}):
        found = sorted(writes.get(owner, []), key=lambda write: write[0])
        versions = [version for version, *_ in found]
        last = stored[owner].pop(HEAD, ("", 0))[1]
        if owner[0] == "agent":
            if len(set(versions)) != len(versions) or max(versions, default=0) > last:
                yield f"notes of {owner}: versions {versions} of {last}"
            continue
        if versions != list(range(1, last + 1)):
            yield f"notes of {owner}: the results say versions {versions}, and there were {last}"
            continue
        kept: dict[str, tuple[str, int]] = {}
        for version, done, key, arguments in found:
            before = kept.get(key, ("", 0))[1]
            expected = arguments.get("expected_version")
            if (done == "added") == bool(before) or (expected is not None and expected != before):
                yield f"notes of {owner}: {key} was {done} as version {version} of {before}, expected {expected}"
            if done == "removed":
                kept.pop(key, None)
            else:
                kept[key] = arguments["text"], version
        if kept != stored[owner]:
            yield f"notes of {owner} are {stored[owner]}, and the results say {kept}"


def count(connection: Any) -> int:
    """How often notes were written that are there now."""
    return connection.execute(select(func.sum(NOTE.c.version)).where(NOTE.c.key == HEAD)).scalar() or 0


def _writes(connection: Any) -> Writes:
    calls = {
        (row.session_id, row.call_id): row.arguments
        for row in connection.execute(
            select(TOOL_CALL.c.session_id, TOOL_CALL.c.call_id, TOOL_CALL.c.arguments).where(
                TOOL_CALL.c.tool.in_((*NOTES, *BOARD))
            )
        )
    }
    found: Writes = defaultdict(list)
    results = (
        select(MESSAGE.c.session_id, MESSAGE.c.body, SESSION.c.root_id, SESSION.c.agent, SESSION.c.spec)
        .join(SESSION, SESSION.c.session_id == MESSAGE.c.session_id)
        .where(MESSAGE.c.role == "tool")
    )
    for row in connection.execute(results):
        key = row.session_id, row.body["tool_call_id"]
        said = DONE.fullmatch(text_of(row.body["content"]))
        if key[1].startswith(COPIED):  # a fork has notes of its own
            continue
        if key in calls and said is not None:
            owners = {"session": row.session_id, "agent": row.agent, "tree": row.root_id}
            scope = SCOPE[said[1]]
            if scope == "agent" and hands_off(row.spec):  # which it was then its row does not say
                continue
            found[scope, owners[scope]].append((int(said[4]), said[3], said[2], json.loads(calls[key])))
    return found
