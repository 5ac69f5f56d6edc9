"""Operations of an upgrade: a session goes on under another specification, between two runs and never within one."""

from __future__ import annotations

from typing import Any

from understudy import events
from understudy.errors import SessionConflict
from understudy.manifest import changes

from .transaction import Row, Transaction


def take_on(tx: Transaction, row: Row, spec: dict[str, Any], placement: str) -> None:
    """Give a session another specification: at once if it is in no run, else as soon as its run has ended.

    The run at work keeps what it began with, so nothing that a run may do ever changes within it. The last one that
    is given holds.

    Raises:
        SessionConflict: the new one says `on_change="refuse"`, or the session is a sub-agent.
    """
    changed = changes(tx.specification(row["session_id"]), spec)
    if changed and (spec.get("on_change", "refuse") != "migrate" or row["parent_id"] is not None):
        raise SessionConflict(
            f"session {row['session_id']!r} exists with another specification: {', '.join(changed)} changed",
            session_id=row["session_id"], details={"changed": list(changed)},
        )  # fmt: skip
    wanted = {"spec": spec, "placement": placement} if changed else None
    if (row["next_spec"] or {}).get("spec", {}).get("hash") == (wanted and spec["hash"]):
        return
    tx.changed(row)
    row["next_spec"] = wanted
    if row["run_id"] is None:
        migrate(tx, row)


def migrate(tx: Transaction, row: Row) -> None:
    """Have a session that is between two runs go on under the specification that waits for it, if there is one.

    It is another incarnation from here on: whatever nodes and frames know of it is void. Its activation is over.
    """
    if row["next_spec"] is None:
        return
    tx.changed(row)
    spec, placement = row["next_spec"]["spec"], row["next_spec"]["placement"]
    changed = changes(tx.specification(row["session_id"]), spec)
    shutdown = spec.get("shutdown", 10.0)
    tx.rewrite(
        row, spec=spec, spec_hash=spec["hash"], placement=placement, agent=spec["name"], incarnation=tx.now,
        shutdown=None if shutdown is None else int(shutdown * 1_000_000),
    )  # fmt: skip
    row.update(
        next_spec=None, epoch=row["epoch"] + 1, batch_no=0, frame_id=None, actor_pid=None,
        budget_tokens=(spec.get("budget") or {}).get("tokens"),
    )  # fmt: skip
    tx.append(row, events.SessionMigrated(changed=list(changed), spec_hash=spec["hash"]))
    if row["active"] and row["wait"] is None:
        tx.wake(row)
