"""What Grafana does to a dashboard's queries before it sends them: variables, then the data source's macros.

After https://grafana.com/docs/grafana/latest/dashboards/variables/variable-syntax/ (formats of variables; in PromQL
values are regular expressions), …/datasources/prometheus/template-variables/ (`$__rate_interval`, `$__range`) and
…/datasources/postgres/query-editor/#macros, with the data source's `macros.go` for the exact text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

VARIABLE = re.compile(r"\$\{(\w+)(?::(\w+))?\}|\$(?!__)([a-z]\w*)")
MACRO = re.compile(r"\$([_a-zA-Z0-9]+)\(([^)]*)\)")
RATE_INTERVAL, RANGE = "5m", "1h"

Values = Mapping[str, str | list[str]]


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels that show something: all but the rows."""
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def variables(dashboard: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The dashboard's variables by name."""
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


def promql(expr: str, values: Values) -> str:
    """A PromQL query as the Prometheus data source sends it."""

    def regular(found: re.Match[str]) -> str:
        name, form, short = found.groups()
        assert form is None, f"{found[0]}: in PromQL a variable is a regular expression"
        value = values[name or short]
        return value if isinstance(value, str) else "(" + "|".join(map(_escaped, value)) + ")"

    expanded = expr.replace("$__rate_interval", RATE_INTERVAL).replace("$__range", RANGE)
    expanded = VARIABLE.sub(regular, expanded)
    assert "$" not in expanded, expanded
    return expanded


def _escaped(value: str) -> str:
    return re.sub(r"[\\^$.*+?()\[\]{}|]", lambda found: f"\\\\{found[0]}", value)


def sql(statement: str, values: Values, since: int, until: int) -> str:
    """A query as the PostgreSQL data source sends it; the time range is in nanoseconds."""
    expanded = VARIABLE.sub(lambda found: _formatted(found, values), statement)
    # A value may hold a `$` by now; Grafana looks for macros in it too.
    return MACRO.sub(lambda found: _macro(found[1], since, until), expanded)


def _formatted(found: re.Match[str], values: Values) -> str:
    name, form, _ = found.groups()
    assert form == "sqlstring", f"{found[0]} is not quoted"
    value = values[name]
    listed = [value] if isinstance(value, str) else value
    return ",".join("'" + text.replace("'", "''") + "'" for text in listed)


def _macro(name: str, since: int, until: int) -> str:
    known = {"__unixEpochNanoFrom": str(since), "__unixEpochNanoTo": str(until)}
    if name not in known:
        raise AssertionError(f"a macro that is not needed here, or that Grafana does not have: {name}")
    return known[name]


def label_values(query: str) -> tuple[str, str]:
    """The series selector and the label of a variable's `label_values(…)`."""
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    assert found, query
    return found[1], found[2]
