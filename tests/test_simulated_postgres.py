"""The simulated PostgreSQL behaves as the real one does."""

from __future__ import annotations

import os

from sqlalchemy import insert, select, update

from understudy.store.engine import Database
from understudy.store.statements import OWNER

from . import differential
from .round_robin import RoundRobin
from .simulation.postgres.database import SimulatedDatabase
from .simulation.postgres.server import Server

SCHEDULES = int(os.environ.get("UNDERSTUDY_TEST_SCHEDULES", "200"))
FIRST_SCHEDULE = int(os.environ.get("UNDERSTUDY_TEST_FIRST_SCHEDULE", "0"))


async def test_random_schedules_end_as_on_the_real_server(postgres: str) -> None:
    """Sessions that read, lock, write and end at random are told the same after each step, and wait for the same, as on
    a real server; and the tables are the same at the end."""
    database = Database(postgres)
    database.prepare()
    database.close()
    async with differential.real(postgres) as real:
        for seed in range(FIRST_SCHEDULE, FIRST_SCHEDULE + SCHEDULES):
            difference = await differential.compare(seed, real)
            assert difference is None, str(difference)


def test_smoke() -> None:
    """A write is seen after its commit."""
    host = RoundRobin()
    server = Server(host)
    database = SimulatedDatabase(server, "a")
    log = []

    def first() -> None:
        with database.write() as connection:
            connection.execute(insert(OWNER).values(namespace="n", generation=1, holder="h", lease_until=5))
        with database.write() as connection:
            found = connection.execute(select(OWNER).with_for_update()).mappings().first()
            log.append(found["generation"])
            host.sleep(1)
            connection.execute(update(OWNER).values(generation=2))

    def second() -> None:
        other = SimulatedDatabase(server, "b")
        host.sleep(0.5)
        with other.write() as connection:
            log.append("wants")
            found = connection.execute(update(OWNER).where(OWNER.c.generation == 1).values(generation=3))
            log.append(found.rowcount)
            log.append(host.now())
            found = connection.execute(select(OWNER).with_for_update()).mappings().first()
            log.append(found["generation"])

    a = host.start("a", first)
    b = host.start("b", second)
    host.run()
    assert [a.error, b.error] == [None, None]
    assert log == [1, "wants", 0, 1_000_000, 2]
    with server.committed() as connection:
        assert connection.execute(select(OWNER.c.generation)).scalar() == 2
