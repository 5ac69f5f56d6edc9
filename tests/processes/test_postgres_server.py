"""The PostgreSQL server that other tests break: what it does when it is broken."""

from __future__ import annotations

import psutil
import psycopg
import pytest

from ..postgres import PostgresServer


@pytest.mark.thorough
def test_a_server_comes_back_with_its_data_after_every_death() -> None:
    """Stopped, killed, or one of its processes killed: same port, same rows; closed, nothing is left of it."""
    with PostgresServer() as server:
        dsn = server.database()
        with psycopg.connect(dsn, autocommit=True, application_name="understudy") as client:
            client.execute("CREATE TABLE t AS SELECT 1 AS a")
            server.kill_backend()
            with pytest.raises(psycopg.OperationalError):
                client.execute("SELECT 1")
        server.wait_until_ready()
        for end in (server.stop, server.kill):
            end()
            assert not server.is_running()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(dsn, connect_timeout=5)
            server.start()
            with psycopg.connect(dsn) as client:
                assert client.execute("SELECT a FROM t").fetchall() == [(1,)]
        processes = [process for process in psutil.process_iter() if str(server.directory) in _command(process)]
        assert processes
    assert not server.directory.exists()
    assert not any(process.is_running() for process in processes)


@pytest.mark.thorough
def test_what_was_acknowledged_is_on_the_promoted_standby() -> None:
    """A standby has every acknowledged row when its primary is killed, needs the password too, and can have its own."""
    with PostgresServer(password="hunter22") as primary, primary.standby() as standby:
        assert standby.is_standby()
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            standby.query("CREATE TABLE t (a int)")
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(standby.dsn.replace("hunter22", "wrong"), connect_timeout=5)
        primary.query("CREATE TABLE t AS SELECT 1 AS a")
        primary.kill()
        standby.promote()
        assert standby.query("SELECT a FROM t") == [(1,)]
        with standby.standby() as third:
            standby.query("INSERT INTO t VALUES (2)")
            standby.kill()
            third.promote()
            assert third.query("SELECT a FROM t ORDER BY a") == [(1,), (2,)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
