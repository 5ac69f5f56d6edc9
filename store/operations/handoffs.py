"""Handoffs: a session goes on under another agent of its specification, within its run (`understudy.handoffs`).

What it was spawned with stays: its specification, and with it its budgets and all that it is to others. Only its
agent's name changes, and so what `present` makes of the specification.
"""

from __future__ import annotations

from typing import NamedTuple

from understudy import events
from understudy.errors import InvalidInput
from understudy.handoffs import present, target
from understudy.records import Handoff

from ..db.session_row import SessionRow
from ..transaction import Transaction
from .upgrades import next_incarnation


class Wanted(NamedTuple):
    """A handoff that a batch has, with the agent that the session goes on under."""

    handoff: Handoff
    agent: str
    placement: str


def wanted(tx: Transaction, row: SessionRow, handoff: Handoff | None) -> Wanted | None:
    """Which agent of its specification a session is handed off to; nothing has changed yet. None for no handoff.

    Raises:
        InvalidInput: the call is none of the current round's, or hands off to nobody.
    """
    if handoff is None:
        return None
    spec = tx.specification(row.session_id)
    tool = next((call["tool"] for call in tx.current_calls(row) if call["call_id"] == handoff.call_id), "")
    agent = target(present(spec, row.agent), tool)
    if agent is None:
        raise InvalidInput(f"call {handoff.call_id!r} hands off to no agent", session_id=row.session_id)
    return Wanted(handoff, agent, present(spec, agent).get("placement", row.placement))


def hand_off(tx: Transaction, row: SessionRow, to: Wanted | None) -> None:
    """Have the session go on under another agent, if a batch wants it. It is another incarnation from here on: whatever
    nodes and frames know of it is void. Its activation is over."""
    if to is None:
        return
    event = events.AgentHandedOff(
        call_id=to.handoff.call_id, from_agent=row.agent, to_agent=to.agent, reason=to.handoff.reason
    )  # fmt: skip
    tx.append(row, event)
    tx.rewrite(row, agent=to.agent, placement=to.placement, incarnation=next_incarnation(row, tx.now))
    tx.changed(row)
    row.epoch, row.batch_no = row.epoch + 1, 0
    row.frame_id = row.actor_pid = None
