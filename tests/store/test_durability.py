"""What an acknowledged commit has waited for."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import text

from understudy.store.db.engine import Database


def test_a_sqlite_store_waits_for_the_disk(tmp_path: Path) -> None:
    """A connection that writes uses WAL, and each of its commits waits until the disk has it (`synchronous=FULL`)."""
    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.prepare()
    with database.writer.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2
    database.close()
