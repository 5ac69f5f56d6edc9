"""A session's messages and events as a file: JSON Lines, read a piece at a time, however long the session is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from understudy.event_wire import EventWire
from understudy.json_text import jsonable
from understudy.messages import Message
from understudy.reads import SessionRecord

from ..client.fleet import Source, Wire
from .parsing import PAGE_LIMIT


async def lines(source: Source, session: SessionRecord) -> AsyncIterator[str]:
    """A line for the session, then one for each message and event up to its `seq`, in their order.

    The last line counts them: a file without it was cut off. Messages and events that were pruned are missing.
    """
    yield _line("session", session)
    counted = {"message": 0, "event": 0}
    for after in range(0, session.seq, PAGE_LIMIT):
        upto = min(after + PAGE_LIMIT, session.seq)
        messages = await source.read(list[Message], "messages", session.session_id, after, PAGE_LIMIT)
        events = await source.read(list[EventWire], "event_page", session.session_id, upto + 1, PAGE_LIMIT)
        found: list[tuple[int, str, Wire]] = [(message.seq, "message", message.to_wire()) for message in messages]
        found += [(event["seq"], "event", {**event}) for event in events]
        for seq, kind, data in sorted(found, key=lambda item: item[0]):
            if after < seq <= upto:
                counted[kind] += 1
                yield _line(kind, {"seq": seq, **data})
    yield _line("end", {"messages": counted["message"], "events": counted["event"]})


def _line(kind: str, data: object) -> str:
    return json.dumps({kind: data}, default=jsonable) + "\n"
