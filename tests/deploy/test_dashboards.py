"""The dashboards: Grafana can read them, nothing overlaps, and their SQL tells the truth about a real store."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import combinations
from pathlib import Path
from typing import Any

import psycopg
import pytest
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from hypothesis import given
from hypothesis import strategies as st
from psycopg.rows import dict_row
from typer.testing import CliRunner

from understudy.cluster.cli.main import app
from understudy.observability.dashboards import sql
from understudy.observability.dashboards.files import built
from understudy.observability.dashboards.fleet import fleet
from understudy.observability.dashboards.promql import METRICS, wire
from understudy.observability.dashboards.session_tree import session_tree
from understudy.prices import Price

from .. import grafana
from ..kernel import kernel as k

BUILT = Path(__file__).parents[2] / "observability" / "dashboards"
FILES = ("fleet.json", "session-tree.json")
EVERYTHING = (0, 2**62)
"""A time range, in nanoseconds."""

UNTYPED = (".titleFormat", ".spanNulls")
"""Documented fields that Grafana's types lack: a Prometheus annotation's title, a state timeline's connected gaps."""

register_default_plugins()


@pytest.fixture(params=FILES)
def dashboard(request: pytest.FixtureRequest) -> Any:
    """Each of the built files."""
    return json.loads((BUILT / request.param).read_text())


def strings(value: Any, key: str) -> Iterator[str]:
    """All values under this key, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get(key), str):
            yield value[key]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from strings(item, key)


def test_the_built_files_are_what_the_code_builds(tmp_path: Path) -> None:
    """Given the command, when it writes the files, then they are the committed ones: `understudy dashboards
    observability/dashboards` brings these up to date."""
    done = CliRunner().invoke(app, ["dashboards", str(tmp_path / "new"), "--json"])
    assert done.exit_code == 0, done.output
    written = [Path(path) for path in json.loads(done.stdout)["files"]]
    assert {path.name: path.read_text() for path in written} == {name: (BUILT / name).read_text() for name in built()}


def test_alerts_lead_to_a_copy_of_their_page(tmp_path: Path) -> None:
    """Given the URL of a copy of docs/alerts.md, then every rule links to it; what is no URL is wrong usage."""
    page = "https://wiki.example.com/alerts"
    assert CliRunner().invoke(app, ["dashboards", str(tmp_path), "--runbook", page]).exit_code == 0
    links = re.findall(r"runbook_url: (.*)#", (tmp_path / "alerts.yaml").read_text())
    assert (set(links), len(links)) == ({page}, built()["alerts.yaml"].count("runbook_url"))
    assert CliRunner().invoke(app, ["dashboards", str(tmp_path / "no"), "--runbook", "wiki page"]).exit_code == 2
    assert not (tmp_path / "no").exists()


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """Given a file where the directory's parent should be, then the command says so, and fails."""
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["dashboards", str(tmp_path / "file" / "below")])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "can't be written: Not a directory" in done.stderr
    result = CliRunner().invoke(app, ["dashboards", str(tmp_path / "file" / "below"), "--json"])
    assert json.loads(result.stdout)["error"]["code"] == "output_failed"


def test_grafanas_own_types_lose_nothing(dashboard: Any) -> None:
    """Given a dashboard, when Grafana's own types read and write it, then no field is lost: none is misspelt."""
    encoded = json.loads(json.dumps(Dashboard.from_json(dashboard).to_json(), default=lambda value: value.to_json()))
    lost = [found for found in differences(dashboard, encoded) if not found.split(" ")[0].endswith(UNTYPED)]
    assert not lost, "\n".join(lost)


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where `theirs` lacks, or has otherwise, what is in `ours`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key in theirs:
                yield from differences(value, theirs[key], f"{path}.{key}")
            elif value is not None:
                yield f"{path}.{key} is lost: {value!r}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif ours != theirs:
        yield f"{path}: {ours!r} became {theirs!r}"


def test_panels_have_places_of_their_own(dashboard: Any) -> None:
    """Given all panels and rows, then ids and titles are unique, and none overlaps another or leaves the grid."""
    listed = dashboard["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in listed}) == len(listed)
    places = [panel["gridPos"] for panel in listed]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart or above, (one, other)


def test_panels_say_what_they_are_about(dashboard: Any) -> None:
    """Given each panel, then it has a description, a unit, and a data source that one of the variables chooses."""
    sources = {f"${{{name}}}" for name, made in grafana.variables(dashboard).items() if made["type"] == "datasource"}
    for panel in grafana.panels(dashboard):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} <= sources
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_fleet_has_what_was_asked_for() -> None:
    """Given the fleet, then it begins with its health, and no quantile is averaged: buckets are summed first."""
    made = fleet()
    assert [row.title for row in made.rows] == [
        "Is it healthy?", "Work", "Recovery", "Model and money", "Tools", "Queues and schedules",
        "Store and projection", "Nodes",
    ]  # fmt: skip
    assert len(made.panels()) >= 14
    text = made.text()
    assert "avg" not in text
    assert len(re.findall(r"histogram_quantile\([\d.]+, sum by \([^)]*\ble\) ?\(rate", text)) == text.count("quantile(")


def test_every_metric_is_on_a_panel() -> None:
    """Given the metric table, then each metric is asked for by some panel: none is exported for nobody."""
    asked = "".join(built().values())
    assert [name for name in METRICS if wire(name) not in asked] == []


def test_every_variable_in_sql_is_quoted(dashboard: Any) -> None:
    """Given every query to the store, then variables are in it as `${…:sqlstring}` only."""
    queries = [*strings(dashboard, "rawSql")]
    made = grafana.variables(dashboard).values()
    queries += [each["query"] for each in made if each.get("datasource", {}).get("uid") == "${store}"]
    for query in queries:
        for found in re.findall(r"\$\{?[A-Za-z][^}]*\}?", query):
            assert re.fullmatch(r"\$\{\w+:sqlstring\}", found), found


@given(value=st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_quoted_value_is_one_literal(value: str) -> None:
    """Given any text in a variable, then what Grafana makes of it is one SQL string, which means that text."""
    quoted = grafana.sql("${session:sqlstring}", {"session": value}, *EVERYTHING)
    if not grafana.MACRO.search(value):
        assert re.fullmatch(r"'((?:[^']|'')*)'", quoted, re.S)
        assert quoted[1:-1].replace("''", "'") == value


# The SQL, on PostgreSQL.


def rows(dsn: str, statement: str, since: int = 0, until: int = 2**62, **values: Any) -> list[dict[str, Any]]:
    """What Grafana would get, over a connection that can only read."""
    expanded = grafana.sql(statement, {"namespace": "tests", **values}, since, until)
    with psycopg.connect(dsn, row_factory=dict_row, options="-c default_transaction_read_only=on") as connection:
        return connection.execute(expanded).fetchall()  # type: ignore[arg-type,call-overload,no-any-return]


QUERIES = (
    sql.NAMESPACES, sql.SESSIONS, sql.AGENTS, sql.SUMMARY, sql.NODES, sql.EDGES, sql.TABLE, sql.TIMELINE, sql.EVENTS,
    sql.RUNS, sql.CALLS, sql.BUDGETS,
)  # fmt: skip
CONTENT = (
    "SELECT body FROM message", "SELECT payload FROM inbox", "SELECT content FROM run", "SELECT text FROM run",
    "SELECT spec FROM session", "SELECT arguments FROM tool_call", "SELECT result FROM tool_call",
    "SELECT prompt FROM question", "SELECT data FROM code_blob", "DELETE FROM event",
)  # fmt: skip

UNREADABLE = """INSERT INTO event (namespace, session_id, seq, v, writer, writer_seq, type, at, run_id, body)
    SELECT namespace, session_id, 9999, v, 'test', 1, 'timer_set', at, run_id, '{"kind": "\\u0000", "_": []}'
    FROM event WHERE session_id = 'lead' AND type = 'run_finished'"""
"""An event with a text that PostgreSQL can't read."""

PRICES = {"offline": Price(1_000_000, 1_000_000, 1_000_000)}
"""A millionth for each token."""


async def family(dsn: str, directory: Path) -> None:
    """A session `lead` whose sub-agent spawned one of its own; the lead's process dies while its tool is at work."""
    leaf = k.spec(k.script("leaf done"), name="leaf", budget={"tokens": 50_000})
    middle = k.spec(k.script([("spawn_agent", {"agent": "leaf", "task": "t"})], "middle done"), ["spawn_agent"],
                    agents={"leaf": leaf}, name="middle")  # fmt: skip
    lead = k.spec(
        k.script([("spawn_agent", {"agent": "middle", "task": "t"})], [("no_such_tool", {})], "done"), ["spawn_agent"],
        agents={"middle": middle}, name="lead", budget={"tokens": 100_000},
    )  # fmt: skip
    async with k.running(dsn, directory, prices=PRICES) as kernel:
        killed = []

        def die(number: int, label: str, worker: k.Worker | None) -> None:
            if worker is not None and not killed and label.startswith("before"):
                killed.append(label)
                kernel.kill(worker)

        await kernel.spawn("lead", lead)
        await kernel.send("lead", "go", "r.1")
        kernel.on_point = die
        await kernel.end("lead", "r.1")
        await kernel.run("other", k.spec(k.script("hi"), name="other"))


@pytest.fixture(scope="module")
def store_dsn(
    new_postgres: Callable[[], AbstractContextManager[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A store in which the family above has done its work."""
    with new_postgres() as dsn:
        asyncio.run(family(dsn, tmp_path_factory.mktemp("family")))
        with psycopg.connect(dsn) as connection:
            connection.execute(UNREADABLE)
        yield dsn


def test_the_sql_tells_of_the_tree(store_dsn: str) -> None:
    """Given a tree that worked, crashed and ended, then each query says so, of this tree alone."""
    chosen = {"session": "lead"}
    assert rows(store_dsn, sql.NAMESPACES) == [{"namespace": "tests"}]
    assert {row["__value"] for row in rows(store_dsn, sql.SESSIONS)} == {"lead", "other"}
    assert {row["agent"] for row in rows(store_dsn, sql.AGENTS, **chosen)} == {"lead", "middle", "leaf"}
    tree = rows(store_dsn, sql.TABLE, **chosen)
    assert [row["agent"] for row in tree] == ["lead", "· middle", "· · leaf"]
    nodes, edges = (rows(store_dsn, query, **chosen) for query in (sql.NODES, sql.EDGES))
    assert [row["id"] for row in nodes] == [row["session"] for row in tree]
    assert [(row["source"], row["target"]) for row in edges] == [
        (tree[0]["session"], tree[1]["session"]),
        (tree[1]["session"], tree[2]["session"]),
    ]
    [summary] = rows(store_dsn, sql.SUMMARY, **chosen)
    assert (summary["sessions"], summary["at work"]) == (3, 0)
    runs = rows(store_dsn, sql.RUNS, **chosen)
    assert {row["agent"] for row in runs} == {"lead", "middle", "leaf"}
    assert sum(row["input"] + row["output"] for row in runs) == summary["tokens"] > 0
    assert sum(row["cost"] for row in runs) == summary["cost"] > 0
    assert all(row["took"] > 0 and re.fullmatch(r"[0-9a-f]{32}", row["trace"]) for row in runs)
    budgets = rows(store_dsn, sql.BUDGETS, **chosen)
    assert {(row["agent"], row["resource"], row["allowed"]) for row in budgets} >= {("lead", "tokens", 100_000)}
    assert rows(store_dsn, sql.CALLS, **chosen) == []


def test_the_timeline_begins_with_what_was_before(store_dsn: str) -> None:
    """Given a time range, then the timeline has each session's state at its beginning, and changes of it after that."""
    chosen = {"session": "lead"}
    whole = rows(store_dsn, sql.TIMELINE, **chosen)
    assert list(whole[0]) == ["time", "metric", "value"]
    assert [row["time"] for row in whole] == sorted(row["time"] for row in whole)
    names = [sql.STATES[str(row["value"])][0] for row in whole]
    assert {"idle", "at work", "waits for the model", "waits for sub-agents", "crashed"} <= set(names)
    assert len({row["metric"] for row in whole}) == 3
    last = {row["metric"]: row["value"] for row in whole}
    after = int(whole[-1]["time"].timestamp() + 1) * 1_000_000_000
    later = rows(store_dsn, sql.TIMELINE, after, after + 1_000_000_000, **chosen)
    assert {row["metric"]: row["value"] for row in later} == last
    assert {row["time"].timestamp() for row in later} == {after / 1_000_000_000}
    assert rows(store_dsn, sql.EVENTS, after, after + 1_000_000_000, **chosen) == []


def test_who_only_waited_when_its_process_died_was_not_down(store_dsn: str) -> None:
    """Given a crash of a session that waits, then the timeline goes on with what it waits for."""
    waited = "body::jsonb || jsonb_build_object('waiting', %s)"
    crash = f"UPDATE event SET body = ({waited})::json WHERE type = 'session_crashed'"
    found = []
    for waiting in (True, False):
        with psycopg.connect(store_dsn) as connection:
            connection.execute(crash, (waiting,))
        found.append([row["value"] for row in rows(store_dsn, sql.TIMELINE, session="lead")])
    crashed = int(next(number for number, (name, _) in sql.STATES.items() if name == "crashed"))
    assert found[0] == [value for value in found[1] if value != crashed] != found[1]


def test_a_timeline_that_is_cut_has_the_latest(store_dsn: str) -> None:
    """Given more changes than a timeline has room for, then it lacks the first of them, not what sessions do now."""
    whole = rows(store_dsn, sql.TIMELINE, session="lead")
    cut = rows(store_dsn, sql.TIMELINE.replace("LIMIT 10000", "LIMIT 3"), session="lead")
    assert len(cut) == 3
    assert {row["time"] for row in cut} <= {row["time"] for row in whole[-4:]}


def test_the_event_log_shows_no_content(store_dsn: str) -> None:
    """Given an event that no text can be read from, then it is listed, and so are all others, without what was said."""
    events = rows(store_dsn, sql.EVENTS, session="lead")
    assert {"session_crashed", "model_call_completed", "run_finished", "tool_finished"} <= {
        row["event"] for row in events
    }
    assert next(row["what"] for row in events if row["event"] == "model_call_completed").startswith("offline")
    assert [row["what"] for row in events if row["event"] == "timer_set"] == [""]
    assert not any("done" in row["what"] for row in events)


def test_a_reader_of_the_documented_kind_sees_the_dashboard_and_no_content(store_dsn: str) -> None:
    """Given the role of docs/dashboards.md, then every query works, and messages, inputs and results are refused."""
    role = f"reader_{uuid.uuid4().hex[:8]}"
    [block] = re.findall(r"```sql\n(.*?)```", (BUILT.parents[1] / "docs" / "dashboards.md").read_text(), re.S)
    with psycopg.connect(store_dsn, autocommit=True) as connection:
        connection.execute(block.replace("grafana_reader", role))
        try:
            connection.execute(f"SET ROLE {role}")
            for query in QUERIES:
                values = {"namespace": "tests", "session": "lead"}
                connection.execute(grafana.sql(query, values, *EVERYTHING))
            for query in CONTENT:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(query)
        finally:
            connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize(
    "value", ["'; DROP TABLE session; --", "x' OR '1'='1", "\\'; SELECT 1; --", "${namespace}", "%s %(a)s"]
)
def test_a_variable_can_inject_nothing(store_dsn: str, value: str) -> None:
    """Given SQL in the variable, which anybody can put into a link, then it is an id that no session has."""
    for query in QUERIES[2:]:
        assert rows(store_dsn, query, session=value) == []
    assert rows(store_dsn, sql.SESSIONS, namespace=value) == []
    assert len(rows(store_dsn, sql.TABLE, session="lead")) == 3


def test_every_state_has_a_colour() -> None:
    """Given the numbers of the timeline, then the panel has a name and a colour for each."""
    used = set(re.findall(r"(?:THEN|ELSE) (\d+)", sql.TIMELINE))
    assert used <= set(sql.STATES)
    [panel] = [panel for panel in session_tree().panels() if panel.kind == "state-timeline"]
    assert panel.mappings == sql.STATES
