"""What sub-agents ask people while the runs above wait for them, and what an answer must fit."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, and_, bindparam, select

from understudy.handoffs import present
from understudy.reads import PendingInput

from ..db.prepared import first, read
from ..db.statements import QUESTION, SESSION, TOOL_CALL, columns_of

ABOVE = SESSION.alias("above")

SELECT_WAITING = select(SESSION.c.root_id, SESSION.c.depth, SESSION.c.run_id, SESSION.c.children_open).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id == bindparam("session")
)
SELECT_ASKED_BELOW = (
    select(*columns_of(QUESTION, PendingInput))
    .join_from(
        SESSION,
        QUESTION,
        and_(
            QUESTION.c.namespace == SESSION.c.namespace, QUESTION.c.session_id == SESSION.c.session_id,
            QUESTION.c.run_id == SESSION.c.run_id,
        ),
    )
    .where(
        SESSION.c.namespace == bindparam("ns"), SESSION.c.root_id == bindparam("root"), SESSION.c.active == 1,
        SESSION.c.depth > bindparam("depth"), SESSION.c.cancel_reason.is_(None), QUESTION.c.answered_at == 0,
    )
    .order_by(QUESTION.c.asked_at, QUESTION.c.session_id, QUESTION.c.call_id)
)  # fmt: skip
SELECT_ABOVE = (
    select(SESSION.c.session_id, SESSION.c.parent_id)
    .join_from(
        SESSION,
        ABOVE,
        and_(
            ABOVE.c.namespace == SESSION.c.namespace, ABOVE.c.session_id == SESSION.c.parent_id,
            ABOVE.c.run_id == SESSION.c.parent_run_id,
        ),
    )
    .join(
        TOOL_CALL,
        and_(
            TOOL_CALL.c.namespace == ABOVE.c.namespace, TOOL_CALL.c.session_id == ABOVE.c.session_id,
            TOOL_CALL.c.call_id == SESSION.c.call_id, TOOL_CALL.c.child_id == SESSION.c.session_id,
        ),
    )
    .where(
        SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id.in_(bindparam("sessions", expanding=True)),
        SESSION.c.abandoned == 0, ABOVE.c.cancel_reason.is_(None), TOOL_CALL.c.state == "started",
    )
)  # fmt: skip
"""Of sub-agents whose parents' current runs wait for their results: the parents."""

SELECT_CALLED = select(SESSION.c.spec, SESSION.c.agent, TOOL_CALL.c.tool).join_from(
    SESSION,
    TOOL_CALL,
    and_(TOOL_CALL.c.namespace == SESSION.c.namespace, TOOL_CALL.c.session_id == SESSION.c.session_id),
).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id == bindparam("session"),
    TOOL_CALL.c.call_id == bindparam("call"),
)  # fmt: skip

SELECT_FORM = select(QUESTION.c.form).where(
    QUESTION.c.namespace == bindparam("ns"), QUESTION.c.session_id == bindparam("session"),
    QUESTION.c.call_id == bindparam("call"), QUESTION.c.asked == bindparam("asked"),
)  # fmt: skip


def below(
    connection: Connection, namespace: str, session_id: str, run_id: str | None = None
) -> list[PendingInput]:  # fmt: skip
    """What sub-agents ask, at whatever depth, for which the session's current run waits; oldest first.

    Args:
        run_id: nothing, unless this is the current run.
    """
    own = first(connection, SELECT_WAITING, ns=namespace, session=session_id)
    if own is None or own["run_id"] is None or own["run_id"] != (run_id or own["run_id"]) or not own["children_open"]:
        return []
    found = read(connection, SELECT_ASKED_BELOW, ns=namespace, root=own["root_id"], depth=own["depth"])
    asked = [PendingInput(**{**row, "options": tuple(row["options"] or ())}) for row in found]
    asking = dict.fromkeys((item.session_id for item in asked), "")
    at = {name: name for name in asking}
    while at:  # from each of those that ask one level up, as long as somebody waits there
        given = {"ns": namespace, "sessions": sorted(set(at.values()))}
        above = {row.session_id: row.parent_id for row in connection.execute(SELECT_ABOVE, given)}
        at = {name: above[place] for name, place in at.items() if place in above}
        asking.update({name: session_id for name, place in at.items() if place == session_id})
        at = {name: place for name, place in at.items() if place != session_id}
    return [item for item in asked if asking[item.session_id]]


def parameters(connection: Connection, namespace: str, session_id: str, call_id: str) -> dict[str, Any] | None:
    """The JSON schema of a call's arguments; None if there is no such call, or no such tool."""
    found = first(connection, SELECT_CALLED, ns=namespace, session=session_id, call=call_id)
    if found is None:
        return None
    tools = present(found["spec"], found["agent"])["tools"]
    return next((tool["parameters"] for tool in tools if tool["name"] == found["tool"]), None)


def form(connection: Connection, namespace: str, session_id: str, call_id: str, asked: int) -> dict[str, Any] | None:
    """The JSON schema of the answer to a question; None if any text is one, or nothing was asked."""
    found = first(connection, SELECT_FORM, ns=namespace, session=session_id, call=call_id, asked=asked)
    return found["form"] if found is not None else None
