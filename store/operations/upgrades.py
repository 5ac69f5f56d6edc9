"""Operations of an upgrade: a session goes on under another specification, between two runs and never within one."""

from __future__ import annotations

from typing import Any

from understudy import events
from understudy.errors import SessionConflict
from understudy.manifest import changes
from understudy.workflows import WORKFLOW

from ..budgets import limits_of
from ..db.session_row import SessionRow
from ..transaction import Transaction

SHUTDOWN_SECONDS = 10.0
"""For specifications of versions that did not know it."""


def shutdown_of(spec: dict[str, Any]) -> int | None:
    """Microseconds that a specification gives a run to end once it was asked to; None: for ever."""
    shutdown = spec.get("shutdown", SHUTDOWN_SECONDS)
    return None if shutdown is None else int(shutdown * 1_000_000)


def take_on(tx: Transaction, row: SessionRow, spec: dict[str, Any], placement: str) -> None:
    """Give a session another specification: at once if it is in no run, else as soon as its run has ended.

    The run at work keeps what it began with, so nothing that a run may do ever changes within it. The last one that
    is given holds.

    Raises:
        SessionConflict: the new one says `on_change="refuse"`, the session is a sub-agent, it is another workflow's, or
            a limit of its budget would be lowered, added or dropped: what was used under the old ones could not be
            distinguished from a fault.
    """
    old = tx.specification(row.session_id)
    if WORKFLOW in (row.kind, spec.get("kind")) and (row.kind, old["name"]) != (spec.get("kind"), spec["name"]):
        message = f"session {row.session_id!r} is of the {row.kind} {old['name']!r}"
        raise SessionConflict(message, session_id=row.session_id, details={"changed": ["name"]})
    changed = changes(old, spec)
    if changed and (spec.get("on_change", "refuse") != "migrate" or row.parent_id is not None):
        raise SessionConflict(
            f"session {row.session_id!r} exists with another specification: {', '.join(changed)} changed",
            session_id=row.session_id, details={"changed": list(changed)},
        )  # fmt: skip
    if not _raised(old, spec):
        raise SessionConflict(
            f"the limits of session {row.session_id!r} can be raised, but not lowered, added or dropped",
            session_id=row.session_id, details={"changed": ["budget"]},
        )  # fmt: skip
    wanted = {"spec": spec, "placement": placement} if changed else None
    if (row.next_spec or {}).get("spec", {}).get("hash") == (wanted and spec["hash"]):
        return
    tx.changed(row)
    row.next_spec = wanted
    if row.run_id is None:
        migrate(tx, row)


def migrate(tx: Transaction, row: SessionRow) -> None:
    """Have a session that is between two runs go on under the specification that waits for it, if there is one.

    It is another incarnation from here on: whatever nodes and frames know of it is void. Its activation is over.
    """
    if row.next_spec is None:
        return
    tx.changed(row)
    spec, placement = row.next_spec["spec"], row.next_spec["placement"]
    before = tx.specification(row.session_id)
    changed = changes(before, spec)
    agent = spec["name"]
    if agent == before["name"] and row.agent in (spec.get("handoffs") or {}):  # handed off, and still known there
        agent = row.agent
        placement = spec["handoffs"][agent].get("placement", placement)
    tx.rewrite(
        row, spec=spec, spec_hash=spec["hash"], placement=placement, agent=agent, shutdown=shutdown_of(spec),
        incarnation=next_incarnation(row, tx.now),
    )  # fmt: skip
    if row.active and row.frame_id is not None:
        row.redone = 1  # what that frame has begun, its next run perhaps, another one does again
    row.epoch, row.batch_no = row.epoch + 1, 0
    row.next_spec = row.frame_id = row.actor_pid = None
    old, new = ({item[:2]: item[2] for item in limits_of(of.get("budget"))} for of in (before, spec))
    for account in tx.accounts.of(row.session_id):  # an import may have left less than the specification allows
        key = account["scope"], account["resource"]
        account["allowed"] += new[key] - old[key]
    tx.append(row, events.SessionMigrated(changed=list(changed), spec_hash=spec["hash"], last_run=row.span_before))
    if row.active and row.wait is None:
        tx.wake(row)


def next_incarnation(row: SessionRow, now: int) -> int:
    """For a session that goes on as something else."""
    return max(now, row.incarnation + 1)


def _raised(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether both have the same limits, and none is lower in the new one."""
    before, after = ({item[:2]: item[2] for item in limits_of(spec.get("budget"))} for spec in (old, new))
    return before.keys() == after.keys() and all(after[key] >= limit for key, limit in before.items())
