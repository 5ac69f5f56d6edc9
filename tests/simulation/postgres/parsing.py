"""SQL text as our code writes it, taken apart as far as locking needs it, and rewritten for SQLite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .locks import EXCLUSIVE, SHARE
from .storage import tables

ROWID = "_rowid"
"""The parameter that names a row in rewritten statements."""

TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|[(),]|\b(?:WITH|SELECT|INSERT\s+INTO|UPDATE|DELETE\s+FROM|FROM|WHERE|GROUP\s+BY|HAVING"""
    r"""|ORDER\s+BY|LIMIT|SET|VALUES|ON\s+CONFLICT|FOR\s+UPDATE|FOR\s+SHARE|RETURNING|UNION)\b""",
    re.IGNORECASE,
)
TABLE = re.compile(r'\s*"?(\w+)"?(?:\s+(?:AS\s+)?"?(\w+)"?)?\s*', re.IGNORECASE)
ADVISORY = re.compile(r"\bpg_(try_)?advisory_xact_lock(_shared)?\s*\(", re.IGNORECASE)
SETTING = re.compile(r"\s*SET\s+(LOCAL\s+)?(\w+)\s*(?:=|\bTO\b)\s*(\S+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Read:
    """A SELECT that locks nothing."""

    sql: str


@dataclass(frozen=True)
class LockRows:
    """SELECT … FOR UPDATE or FOR SHARE of one table.

    Attributes:
        wait: for those who have the rows; else it fails at once.
        skip: rows that others have are left out.
        sql: gives each row's number as one more column.
        one: reads one row again, by its number.
    """

    table: str
    mode: int
    wait: bool
    skip: bool
    sql: str
    one: str


@dataclass(frozen=True)
class Change:
    """An UPDATE or DELETE.

    Attributes:
        find: the numbers of the rows that it would change.
        one: changes one row if it still matches, by its number.
        sets: the columns that an UPDATE sets.
    """

    table: str
    sql: str
    find: str
    one: str
    sets: frozenset[str]


@dataclass(frozen=True)
class Insert:
    """One row of an INSERT.

    Attributes:
        keys: the unique indexes, each with the parameters that fill it, or a SELECT of what does.
        target: the columns of ON CONFLICT; None without it.
    """

    table: str
    sql: str
    keys: tuple[tuple[str, tuple[str, ...] | str], ...]
    target: tuple[str, ...] | None
    does_nothing: bool


@dataclass(frozen=True)
class Advisory:
    """Takes advisory locks.

    Attributes:
        keys: selects their numbers.
    """

    keys: str
    mode: int
    tries: bool


@dataclass(frozen=True)
class Setting:
    """SET, or SET LOCAL."""

    name: str
    value: str
    local: bool


Statement = Read | LockRows | Change | Insert | Advisory | Setting


class NotSimulated(NotImplementedError):
    """The simulated server does not know such a statement."""


@lru_cache(maxsize=4096)
def parse(sql: str) -> tuple[Statement, ...]:
    """What a statement does; an INSERT of several rows is several."""
    sql = sql.strip().removesuffix(";")
    if found := SETTING.fullmatch(sql):
        return (Setting(found[2].lower(), found[3].strip("'"), bool(found[1])),)
    places = _places(sql)
    if not places:
        raise NotSimulated(sql)
    match places[0][0]:
        case "SELECT" | "WITH":
            return (_select(sql, dict(reversed(places))),)
        case "UPDATE" | "DELETE FROM":
            return (_change(sql, dict(reversed(places))),)
        case "INSERT INTO":
            return tuple(_inserts(sql, dict(reversed(places))))
    raise NotSimulated(sql)


def _places(sql: str) -> list[tuple[str, int]]:
    """The keywords outside all parentheses, and where they begin."""
    found, depth = [], 0
    for token in TOKEN.finditer(sql):
        word = token[0]
        if word == "(":
            depth += 1
        elif word == ")":
            depth -= 1
        elif depth == 0 and word[0] not in "'\",":
            found.append((" ".join(word.upper().split()), token.start()))
    return found


def _after(sql: str, places: dict[str, int], keyword: str, *ends: str) -> str:
    """What stands between a keyword and the next of `ends`, or the end."""
    if keyword not in places:
        return ""
    start = places[keyword]
    stops = [places[end] for end in ends if places.get(end, -1) > start]
    return re.sub(
        r"^\w+(\s+(INTO|FROM|BY|CONFLICT))?\s", "", sql[start : min(stops, default=len(sql))], flags=re.I
    ).strip()


def _select(sql: str, places: dict[str, int]) -> Statement:
    if advisory := ADVISORY.search(sql):
        depth, end = 1, advisory.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(sql[end], 0)
            end += 1
        keys = f"{sql[: advisory.start()]}({sql[advisory.end() : end - 1]}){sql[end:]}"
        return Advisory(keys, SHARE if advisory[2] else EXCLUSIVE, bool(advisory[1]))
    mode = EXCLUSIVE if "FOR UPDATE" in places else SHARE if "FOR SHARE" in places else None
    if mode is None:
        return Read(sql)
    locking = places["FOR UPDATE" if mode == EXCLUSIVE else "FOR SHARE"]
    beyond = sql[locking:].split()[2:]
    if beyond not in ([], ["NOWAIT"], ["SKIP", "LOCKED"]) or places.keys() & {
        "WITH",
        "GROUP BY",
        "HAVING",
        "LIMIT",
        "UNION",
    }:
        raise NotSimulated(sql)
    sql = sql[:locking]
    columns = _after(sql, places, "SELECT", "FROM")
    source = _after(sql, places, "FROM", "WHERE", "ORDER BY")
    table = TABLE.fullmatch(source)
    if table is None:
        raise NotSimulated(sql)
    where = _after(sql, places, "WHERE", "ORDER BY") or "1"
    order = f" ORDER BY {_after(sql, places, 'ORDER BY')}" if "ORDER BY" in places else ""
    rowid = f"{table[2] or table[1]}.rowid"
    return LockRows(
        table[1],
        mode,
        beyond != ["NOWAIT"],
        beyond == ["SKIP", "LOCKED"],
        f"SELECT {columns}, {rowid} FROM {source} WHERE {where}{order}",
        f"SELECT {columns} FROM {source} WHERE ({where}) AND {rowid} = :{ROWID}",
    )


def _change(sql: str, places: dict[str, int]) -> Change:
    is_update = "UPDATE" in places
    if "RETURNING" in places or (is_update and "FROM" in places):
        raise NotSimulated(sql)
    source = _after(sql, places, "UPDATE", "SET") if is_update else _after(sql, places, "DELETE FROM", "WHERE")
    table = TABLE.fullmatch(source)
    if table is None or table[2]:
        raise NotSimulated(sql)
    where = _after(sql, places, "WHERE") or "1"
    head = sql[: places["WHERE"]] if "WHERE" in places else sql
    sets = _split(_after(sql, places, "SET", "WHERE")) if is_update else []
    return Change(
        table[1],
        sql,
        f'SELECT rowid FROM "{table[1]}" WHERE {where}',
        f"{head} WHERE ({where}) AND rowid = :{ROWID}",
        frozenset(part.partition("=")[0].strip().strip('"') for part in sets),
    )


def _inserts(sql: str, places: dict[str, int]) -> list[Insert]:
    if "VALUES" not in places or "RETURNING" in places:
        raise NotSimulated(sql)
    head = _after(sql, places, "INSERT INTO", "VALUES")
    name, _, columns = head.partition("(")
    table = name.strip().strip('"')
    names = [part.strip().strip('"') for part in columns.rstrip().removesuffix(")").split(",")]
    conflict = f" ON CONFLICT {_after(sql, places, 'ON CONFLICT')}" if "ON CONFLICT" in places else ""
    target = None
    if conflict:
        found = re.match(r" ON CONFLICT\s*\(([^)]*)\)", conflict)
        if found is None:
            raise NotSimulated(sql)
        target = tuple(part.strip().strip('"') for part in found[1].split(","))
    inserts = []
    listed = ", ".join(f'"{name}"' for name in names)
    for row in _split(_after(sql, places, "VALUES", "ON CONFLICT")):
        values = _split(row.strip()[1:-1])
        text = f'INSERT INTO "{table}" (rowid, {listed}) VALUES (:{ROWID}, {", ".join(values)}){conflict}'
        does_nothing = conflict.upper().endswith("DO NOTHING")
        keys = tuple(_keys(table, dict(zip(names, values, strict=True))))
        inserts.append(Insert(table, text, keys, target, does_nothing))
    return inserts


def _keys(table: str, values: dict[str, str]) -> Iterator[tuple[str, tuple[str, ...] | str]]:
    for index, columns in tables()[table].unique.items():
        parts = [values.get(name, "NULL") for name in columns]
        if all(part.startswith(":") for part in parts):
            yield index, tuple(part[1:] for part in parts)
        else:
            yield index, f"SELECT {', '.join(parts)}"


def _split(text: str) -> list[str]:
    """Parts between commas outside all parentheses."""
    parts, depth, start = [], 0, 0
    for token in TOKEN.finditer(text):
        if token[0] == "(":
            depth += 1
        elif token[0] == ")":
            depth -= 1
        elif token[0] == "," and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [part.strip() for part in [*parts, text[start:]]]
