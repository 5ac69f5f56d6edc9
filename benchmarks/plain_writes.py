"""A process that writes recorded transactions to a store with nothing but the driver, once a line on stdin says go.

    python plain_writes.py DSN TRANSACTIONS NAME

The transactions are a JSON file: `[[[sql, [parameters, …]], …], …]`. They are those of one session; NAME makes this
process's ids its own. The baseline of `commits.py`: what sessions cost whose processes write by themselves.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from typing import Any

RECORDED = "recorded"
"""The id of the session, and the name of the writer, that were recorded."""


def own(parameters: Any, name: str) -> Any:
    """The parameters with ids of this process."""

    def replaced(value: Any) -> Any:
        return f"{RECORDED}-{name}" if value == RECORDED else value

    if isinstance(parameters, dict):
        return {key: replaced(value) for key, value in parameters.items()}
    return tuple(replaced(value) for value in parameters)


def main(dsn: str, path: str, name: str) -> None:
    with open(path) as file:
        transactions = [
            [(sql, [own(row, name) for row in rows]) for sql, rows in transaction] for transaction in json.load(file)
        ]
    connection: Any
    if dsn.startswith("sqlite"):
        connection = sqlite3.connect(dsn.removeprefix("sqlite:///"), isolation_level=None, timeout=60)
        connection.execute("PRAGMA synchronous=FULL")
        begin = "BEGIN IMMEDIATE"
    else:
        import psycopg

        connection = psycopg.connect(dsn, autocommit=True)
        begin = "BEGIN"
    print("ready", flush=True)
    sys.stdin.readline()
    cursor = connection.cursor()
    for statements in transactions:
        cursor.execute(begin)
        for sql, rows in statements:
            if len(rows) == 1:
                cursor.execute(sql, rows[0])
            else:
                cursor.executemany(sql, rows)
        cursor.execute("COMMIT")
    connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
