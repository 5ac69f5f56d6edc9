"""The product on the simulated PostgreSQL: it reads there what it reads on the real one, and journals that work at once
leave a store in order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select, text

from understudy.errors import StoreUnreachable, UnderstudyError
from understudy.messages import Message, Usage
from understudy.records import ActivationId, Batch, Finish, ModelAnswer
from understudy.store import ledger
from understudy.store.check.check import check
from understudy.store.db.failures import StoreRace
from understudy.store.db.session_row import SessionRow
from understudy.store.db.tables import metadata
from understudy.store.operations import activation, batches, beginnings, endings, model_calls, presence
from understudy.store.operations.activation import FrameRef
from understudy.store.reads import gauges, overview, queries
from understudy.store.transaction import Transaction
from understudy.store.upkeep import archive, maintenance, retention
from understudy.supervisor.groups import decide_end

from ..kernel import kernel as k
from ..round_robin import RoundRobin
from ..store import test_plans
from ..store.test_store import spec
from .postgres.database import SimulatedDatabase
from .postgres.server import Server

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


@pytest.mark.thorough
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


# Journals that work at once.

SESSIONS = [f"s{number}" for number in range(5)]
TRANSACTIONS = 20


class Shaky(RoundRobin):
    """Messages take a while, and some go wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.is_shaky = False

    def round_trip(self, client: str, what: str) -> str:
        super().round_trip(client, what)
        if self._current is None or not self.is_shaky:
            return ""
        self.sleep(self.random.uniform(0.0005, 0.01))
        kinds = ("lost_before", "lost_after", "hang") if what == "commit" else ("lost_before",)
        return self.random.choice(kinds) if self.random.random() < 0.03 else ""

    def hanging(self, client: str) -> tuple[float, bool]:
        return self.random.choice((0.1, 2.0, 40.0)), self.random.random() < 0.7


class Node:
    """Commits what clients want, as a journal does, but several transactions of the same log at once."""

    def __init__(self, host: Shaky, server: Server, name: str) -> None:
        self._host = host
        self._random = host.random
        self._name = name
        self._database = SimulatedDatabase(server, name)
        self.generation = 0
        self.errors: list[str] = []

    def work(self) -> None:
        """One transaction after another."""
        for _ in range(TRANSACTIONS):
            wanted = self._random.sample(SESSIONS, self._random.randint(1, 3))
            self.commit(lambda tx, wanted=wanted: [self._move(tx, session_id) for session_id in wanted])  # type: ignore[misc]

    def commit(self, operation: Callable[[Transaction], Any]) -> Any:
        """Try until it is committed; what may have been committed unnoticed is done once more."""
        while True:
            try:
                with self._database.write() as connection:
                    tx = Transaction(
                        connection, self._database.statements, "tests", now=self._host.now() + 1, writer=self._name,
                        writer_seq=None, generation=self.generation, decide_end=decide_end,
                    )  # fmt: skip
                    result = operation(tx)
                    tx.flush()
                return result
            except (StoreUnreachable, StoreRace) as error:
                self.errors.append(str(error).split(": ")[-2])
                self._host.sleep(self._random.uniform(0.01, 0.1))

    def _move(self, tx: Transaction, session_id: str) -> None:
        """Something that the session's row allows, or that is refused."""
        row = tx.find(session_id)
        if row is None:
            compiled = spec(budget={"tokens": 500})
            options: dict[str, Any] = {"spec_hash": compiled["hash"], "placement": "", "node_id": "n", "metadata": {}}
            beginnings.create_session(tx, session_id, compiled, **options)
            return
        before, chance = tx.writes, self._random.random()
        try:
            if chance < 0.2 or (chance < 0.5 and row.run_id is None):
                beginnings.accept(tx, session_id, f"r{self._random.randrange(1000)}", "go")
            elif chance < 0.25 and row.run_id is not None:
                endings.request_cancel(tx, row, "enough")
            elif row.wait == "model":
                got = ModelAnswer("hi", usage=Usage(10, 5))
                key = (session_id, row.run_id, row.round, row.wait_attempt, "m", got)
                model_calls.answer(tx, *key, incarnation=row.incarnation)
            elif row.active:
                self._activate_or_commit(tx, row)
        except UnderstudyError:
            assert tx.writes == before

    def _activate_or_commit(self, tx: Transaction, row: SessionRow) -> None:
        session_id, run_id = row.session_id, row.run_id
        if not row.epoch or self._random.random() < 0.3:
            activation.activate(tx, session_id, FrameRef(f"f-{self._name}", 1, "n"))
            return
        fields: dict[str, Any] = {"wait": "model", "request_round": row.round + 1, "request_model": "m"}
        inbox = tx.inbox(row)
        if run_id is None and inbox:
            run_id = fields["start_run"] = inbox[0].key
            fields["request_round"] = 1
        if run_id is None:
            fields = {"wait": "idle"}
        elif row.round > self._random.randrange(3):
            fields = {"finish": Finish("completed", "done"), "wait": "idle"}
        else:
            fields.update(entries=(Message("user", "go", run_id=run_id),), request_tokens=20)
        held = ActivationId(session_id, row.incarnation, row.epoch)
        batches.commit(tx, Batch(*held, row.batch_no + 1, **fields), row.frame_id, holder=self._name)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_journals_at_once_leave_the_store_in_order(seed: int) -> None:
    """Two nodes of three tasks each write to the same few sessions, with lost connections and commits that hang: after
    each commit the check finds nothing, and the schedule is the same each time."""

    def play(*, looks: bool) -> tuple[Any, ...]:
        host = Shaky(seed)
        broken: list[str] = []

        def look() -> None:
            if looks:
                with server.committed() as connection:
                    broken.extend(map(str, check(connection, "tests")))

        server = Server(host, on_commit=look)
        nodes = [Node(host, server, name) for name in ("n1", "n2")]
        own = host.start("n1", lambda: nodes[0].commit(lambda tx: activation.acquire(tx, "me", 1 << 60, may_take=bool)))
        host.run_until_idle()
        host.is_shaky = True
        for node in nodes:
            node.generation = own.result
        tasks = [host.start(f"n{number % 2}", nodes[number % 2].work) for number in range(6)]
        host.run()
        assert [task.error for task in tasks] == [None] * 6
        assert not broken
        assert not server.open_transactions()
        with server.committed() as connection:
            events = connection.execute(text("SELECT type, count(*) FROM event GROUP BY type ORDER BY type")).all()
        return server.commits, server.waits, [node.errors for node in nodes], events, len(host.messages), host.now()

    commits, waits, errors, events, *_ = played = play(looks=True)
    assert commits > 60
    assert waits > 50
    assert {name for name, _ in events} >= {"run_finished", "model_call_completed"}
    assert {word for words in errors for word in words} >= {"LockNotAvailable", "UniqueViolation", "OperationalError"}
    assert play(looks=False) == played
