"""A short soak: sessions work while every kind of process dies. The long one is a command, `tests.soak`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..postgres import PostgresServer
from ..soak import Options, ready, soak
from ..soak_kills import BACKEND, FRAME, GATEWAY, NODE, SERVER, SUPERVISOR

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.fixture(params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer | None]:
    """A PostgreSQL server that may be killed; none for SQLite."""
    if request.param == "sqlite":
        yield None
        return
    with PostgresServer() as found:
        yield found


def test_everything_ends_right(ray_cluster: str, server: PostgresServer | None, tmp_path: Path) -> None:
    """Given twelve sessions with tools and sub-agents, when twelve processes die under them, then each run ends once
    with the right answer, no effect is repeated, nothing is paid twice but calls lost with a gateway, and no
    message is missing or doubled."""
    weights = {FRAME: 7, NODE: 2, GATEWAY: 1, SUPERVISOR: 2}
    if server is not None:
        weights = {FRAME: 4, NODE: 2, GATEWAY: 1, SUPERVISOR: 2, SERVER: 2, BACKEND: 1}
    options = Options(kills=12, sessions=12, pause=0.7, minutes=2.0, weights=weights)
    dsn = server.database() if server is not None else f"sqlite:///{tmp_path}/store.db"
    with ready(options, dsn, tmp_path / "stage") as (stage, model):
        report = soak(options, stage, model, server)
    assert report.right, "\n".join(report.facts.problems)
    assert {kill.kind for kill in report.kills} == weights.keys()
    assert report.facts.totals["runs finished right"] >= options.sessions
