"""The product on the simulated PostgreSQL: it reads there what it reads on the real one, and journals that work at once
leave a store in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select, text

from understudy.store import archive, gauges, ledger, maintenance, overview, presence, queries, retention
from understudy.store.check import check
from understudy.store.tables import metadata

from . import kernel as k
from . import test_plans
from .round_robin import RoundRobin
from .simulation.postgres.database import SimulatedDatabase
from .simulation.postgres.server import Server

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(240)]

LATER = 1 << 60

DAMAGE = (
    "DELETE FROM run WHERE session_id = 's-lead'",
    "DELETE FROM message WHERE role = 'tool'",
    "DELETE FROM event WHERE type = 'run_finished'",
    "DELETE FROM session WHERE session_id = 's-cancel'",
    "UPDATE session SET children_open = 3, calls_open = 4, inbox_count = 5, wait = NULL WHERE active = 0",
    "UPDATE account SET spent = spent + 1, reserved = 7",
    "UPDATE tool_call SET child_id = NULL, state = 'started'",
    "DELETE FROM timer",
)
"""What somebody else's hand does to a store."""

UNSORTED = ("active_sessions", "homeless", "with_events", "finished_trees", "check")
"""What comes in no order, or in one that leaves some open."""


def looks() -> Iterator[tuple[str, Callable[[Connection], Any]]]:
    """Everything that is read of a store, with a name."""
    for function, options in test_plans.every_read():
        yield f"{function.__name__} {options}", lambda c, f=function, o=options: f(c, "tests", **o)  # type: ignore[misc]
    for session_id in ("s-lead", "s-doomed", "s-asking", "s-waiting", "s-woken", "s-cancel", "s-none"):
        more: dict[str, Callable[..., Any]] = {
            "tree": queries.tree, "wakeups": queries.wakeups, "messages": queries.messages,
            "info": queries.session_info, "events": queries.session_events, "runs": queries.runs,
            "latest_runs": overview.latest_runs,
            "budgets": overview.budgets, "tree_to_drop": retention.tree_to_drop,
            "event_page": lambda c, ns, s: overview.event_page(c, ns, s, 0, 50),
            "events_to_drop": lambda c, ns, s: retention.events_to_drop(c, ns, s, LATER),
            "export": lambda c, ns, s: list(archive.export(c, ns, s, tree=True))[1:-1],
            "reckon": lambda c, ns, s: list(ledger.reckon(c, ns, [s])),
        }  # fmt: skip
        for name, function in more.items():
            yield f"{name} {session_id}", lambda c, f=function, s=session_id: f(c, "tests", s)  # type: ignore[misc]
    whole: dict[str, Callable[..., Any]] = {
        "working": overview.working, "holders": overview.holders, "totals": overview.totals, "logs": presence.logs,
        "services": presence.services, "check": check, "session_count": maintenance.session_count,
        "finished_trees": lambda c, ns: retention.finished_trees(c, ns, LATER),
        "with_events": lambda c, ns: retention.sessions_with_events(c, ns, LATER),
        "unneeded_code": lambda c, ns: retention.unneeded_code(c, ns, LATER),
        "at_work": lambda c, ns: gauges.at_work(c, ns, "node1", ["node2"]),
        "passive": lambda c, ns: gauges.passive(c, ns, "node1", None),
        "homeless": lambda c, ns: queries.active_sessions(c, ns, None, may_be_ready=True),
    }  # fmt: skip
    for name, function in whole.items():
        yield name, lambda c, f=function: f(c, "tests")  # type: ignore[misc]


def seen(connection: Connection) -> dict[str, Any]:
    """What each look finds, errors included; as text. Of what has no order, the order is none."""
    found = {}
    for name, look in looks():
        try:
            rows = look(connection)
            unsorted = name.startswith(UNSORTED) and isinstance(rows, list)
            found[name] = pformat(sorted(rows, key=str) if unsorted else rows, width=1_000_000)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def assert_same(copy: Connection, real: Connection, when: str) -> None:
    for (name, found), (_, wanted) in zip(seen(copy).items(), seen(real).items(), strict=True):
        if found != wanted:
            same = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), 0)
            part = slice(max(0, same - 60), same + 150)
            pytest.fail(f"{when}: {name}:\nsimulated …{found[part]}\nreal      …{wanted[part]}")


async def test_what_is_read_is_what_the_real_server_says(postgres: str, tmp_path: Path) -> None:
    """Given a store in which everything has happened once, then every query finds the same on both servers, in the
    same order; also what the check finds when the rows are damaged."""
    await test_plans.work(postgres, tmp_path)
    server = Server(RoundRobin())
    simulated = SimulatedDatabase(server, "a").writer
    with k.opened(postgres) as database, database.writer.connect() as real, simulated.connect() as copy:
        for table in metadata.sorted_tables:
            rows = [dict(row) for row in real.execute(select(table)).mappings()]
            if rows and table.name != "schema_migration":
                copy.execute(insert(table), rows)
        assert_same(copy, real, "as it is")
        for damage in DAMAGE:
            assert copy.execute(text(damage)).rowcount == real.execute(text(damage)).rowcount > 0, damage
            assert_same(copy, real, damage)
