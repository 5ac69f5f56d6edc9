"""What a Grafana dashboard is made of, as far as ours need it, and its JSON as Grafana 11 reads it.

Our own few classes rather than `grafana-foundation-sdk`: that is a distribution for each version of Grafana, and who
writes the files would need it. The tests read the result with its types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 39
COLUMNS = 24

METRICS = {"type": "prometheus", "uid": "${metrics}"}
STORE = {"type": "grafana-postgresql-datasource", "uid": "${store}"}
"""Data sources: whichever the dashboard's variables of these names say."""

GREEN, YELLOW, ORANGE, RED, BLUE, PURPLE, GREY = "green", "yellow", "orange", "red", "blue", "purple", "#8e8e8e"


@dataclass(frozen=True)
class Query:
    """A PromQL query.

    Attributes:
        legend: the name of each series; `{{label}}` is replaced.
        now: only the latest value.
        exemplars: ask for exemplars too; their trace ids lead to the trace.
    """

    expr: str
    legend: str = ""
    now: bool = False
    exemplars: bool = False
    format: Literal["time_series", "table", "heatmap"] = "time_series"

    def to_json(self, reference: str) -> dict[str, Any]:
        return {
            "refId": reference,
            "datasource": METRICS,
            "editorMode": "code",
            "expr": self.expr,
            "legendFormat": self.legend or "__auto",
            "format": self.format,
            "instant": self.now,
            "range": not self.now,
            "exemplar": self.exemplars,
        }


@dataclass(frozen=True)
class Sql:
    """A query to the store. `series`: its columns `time`, `metric` and `value` are time series."""

    sql: str
    series: bool = False

    def to_json(self, reference: str) -> dict[str, Any]:
        return {
            "refId": reference,
            "datasource": STORE,
            "editorMode": "code",
            "rawQuery": True,
            "rawSql": self.sql,
            "format": "time_series" if self.series else "table",
        }


@dataclass(frozen=True)
class Link:
    """Where a value leads; `url` may have Grafana's `${__value.raw}` and `${__data.fields.NAME}`."""

    title: str
    url: str
    new_tab: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "url": self.url, "targetBlank": self.new_tab}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        description: what it tells, and what to do about it; the text behind the panel's ⓘ.
        width: in columns, of 24.
        height: in Grafana's units of 30 pixels.
        thresholds: from which value on which colour; below the first it is `base`.
        mappings: a value's text and colour.
        colours: by the name of a series or column.
        links, units: by the name of a column.
        custom: settings of the panel's kind for its fields.
    """

    kind: str
    title: str
    description: str
    queries: tuple[Query | Sql, ...]
    width: int = 8
    height: int = 8
    unit: str = "short"
    decimals: int | None = None
    base: str = GREEN
    thresholds: tuple[tuple[float, str], ...] = ()
    mappings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    custom: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, identifier: int, x: int, y: int) -> dict[str, Any]:
        return {
            "id": identifier,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "datasource": METRICS if isinstance(self.queries[0], Query) else STORE,
            "targets": [query.to_json(chr(ord("A") + number)) for number, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": self._overrides()},
            "options": dict(self.options),
        }

    def _defaults(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [{"color": self.base, "value": None}]
        steps += [{"color": colour, "value": value} for value, colour in self.thresholds]
        found: dict[str, Any] = {
            "unit": self.unit,
            "color": {"mode": "thresholds" if self.kind in ("stat", "table") else "palette-classic"},
            "thresholds": {"mode": "absolute", "steps": steps},
            "custom": dict(self.custom),
        }
        if self.kind == "timeseries":
            found["min"] = 0
        if self.decimals is not None:
            found["decimals"] = self.decimals
        if self.mappings:
            options = {
                value: {"text": text, "color": colour, "index": index}
                for index, (value, (text, colour)) in enumerate(self.mappings.items())
            }
            found["mappings"] = [{"type": "value", "options": options}]
        return found

    def _overrides(self) -> list[dict[str, Any]]:
        properties: dict[str, list[dict[str, Any]]] = {}
        for name, colour in self.colours.items():
            properties.setdefault(name, []).append({"id": "color", "value": {"mode": "fixed", "fixedColor": colour}})
        for name, unit in self.units.items():
            properties.setdefault(name, []).append({"id": "unit", "value": unit})
        for name, link in self.links.items():
            properties.setdefault(name, []).append({"id": "links", "value": [link.to_json()]})
        return [
            {"matcher": {"id": "byName", "options": name}, "properties": listed} for name, listed in properties.items()
        ]


@dataclass(frozen=True)
class Row:
    """A headline and the panels below it, which fill lines from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A choice at the dashboard's top.

    Attributes:
        kind: `datasource` (the query is its type) or `query`.
        source: which data source is asked.
        every: offer "All" as well, and take several.
        hidden: not shown; other queries use it.
    """

    name: str
    label: str
    kind: Literal["datasource", "query"]
    query: str
    source: Mapping[str, str] | None = None
    every: bool = False
    hidden: bool = False
    description: str = ""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": self.name,
            "label": self.label,
            "description": self.description,
            "type": self.kind,
            "hide": 2 if self.hidden else 0,
            "query": self.query,
            "multi": self.every,
            "includeAll": self.every,
            # Asked again when the time range changes.
            "refresh": 1 if self.kind == "datasource" else 2,
        }
        if self.source is not None:
            found["datasource"] = dict(self.source)
            if self.source == METRICS:
                found |= {"query": {"qryType": 1, "query": self.query, "refId": self.name}, "sort": 1}
        if self.every:
            chosen = {"selected": True, "text": ["All"], "value": ["$__all"]}
            # A regular expression for everything, instead of a list of all values, in PromQL.
            found |= {"current": chosen, **({"allValue": ".*"} if self.source == METRICS else {})}
        return found


@dataclass(frozen=True)
class Annotation:
    """Marks on every graph, at the times when a PromQL query has values."""

    name: str
    expr: str
    title: str
    colour: str = RED

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "datasource": METRICS,
            "enable": True,
            "hide": False,
            "iconColor": self.colour,
            "expr": self.expr,
            "titleFormat": self.title,
        }


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """A dashboard. `uid` is its address in Grafana and stays the same; `since` is the time range it opens with."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    annotations: tuple[Annotation, ...] = ()
    since: str = "now-1h"
    refresh: str = "30s"

    def panels(self) -> list[Panel]:
        """All panels, in order."""
        return [panel for row in self.rows for panel in row.panels]

    def to_json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["understudy"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "timezone": "browser",
            "time": {"from": self.since, "to": "now"},
            "refresh": self.refresh,
            "links": [_SIBLINGS],
            "templating": {"list": [variable.to_json() for variable in self.variables]},
            "annotations": {"list": [annotation.to_json() for annotation in self.annotations]},
            "panels": self._placed(),
        }

    def text(self) -> str:
        """The file's text."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"

    def _placed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        y = 0
        for row in self.rows:
            place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
            found.append(
                {"id": len(found) + 1, "type": "row", "title": row.title, "collapsed": False, "gridPos": place}
                | {"panels": []}
            )
            y += 1
            x = height = 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    y, x, height = y + height, 0, 0
                found.append(panel.to_json(len(found) + 1, x, y))
                x, height = x + panel.width, max(height, panel.height)
            y += height
        return found


_SIBLINGS = {
    "title": "Understudy",
    "type": "dashboards",
    "tags": ["understudy"],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
    "icon": "external link",
    "tooltip": "",
    "url": "",
}


def stat(title: str, expr: str, description: str, **settings: Any) -> Panel:
    """One number in the colour of its threshold."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "center",
        "textMode": "auto",
        "orientation": "auto",
    }
    shape = {"width": 3, "height": 4, **settings}
    return Panel(
        kind="stat", title=title, description=description, queries=(Query(expr, now=True),), options=options, **shape
    )


def lines(title: str, description: str, *queries: Query, stacked: bool = False, **settings: Any) -> Panel:
    """Lines over time, with lines at the thresholds; or areas on top of each other."""
    custom: dict[str, Any] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if stacked else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if settings.get("thresholds") else "off"},
    }
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return Panel(
        kind="timeseries", title=title, description=description, queries=queries, custom=custom, options=options,
        **settings,
    )  # fmt: skip


def table(title: str, description: str, query: Sql | Query, **settings: Any) -> Panel:
    """Rows as the query gives them."""
    options = {"showHeader": True, "cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"], "fields": ""}}
    shape = {
        "width": COLUMNS,
        "height": 10,
        "unit": "none",
        "custom": {"align": "auto", "filterable": True},
        **settings,
    }
    return Panel(kind="table", title=title, description=description, queries=(query,), options=options, **shape)
