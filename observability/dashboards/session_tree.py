"""The dashboard *session tree*: a session and all below it, from the store, and its agents, from Prometheus."""

from __future__ import annotations

import json
from urllib.parse import quote

from .. import conventions as names
from . import sql
from .indicators import AGENT_LABEL
from .model import METRICS, STORE, Dashboard, Link, Panel, Query, Row, Sql, Variable, lines, table
from .promql import Scope, or_zero

UID = "understudy-session-tree"
AGENTS = Scope(('job=~"$job"', 'agent=~"$agents"'))
GENAI_AGENTS = Scope(('job=~"$job"', f'{AGENT_LABEL}=~"$agents"'))
OF_AGENT = f"{{{{{AGENT_LABEL}}}}}"


def _explored() -> str:
    """Grafana's address of a trace, whose id is in the column `trace`."""
    source = {"type": "tempo", "uid": "${traces}"}
    query = {"refId": "A", "datasource": source, "queryType": "traceql", "query": "${__data.fields.trace}"}
    panes = {"trace": {"datasource": "${traces}", "queries": [query], "range": {"from": "${__from}", "to": "${__to}"}}}
    return f"/explore?schemaVersion=1&panes={quote(json.dumps(panes, separators=(',', ':')), safe='${}:.')}"


TRACE = Link("Open the trace", _explored(), new_tab=True)
CHOICES = "${__url_time_range}&${metrics:queryparam}&${store:queryparam}&${traces:queryparam}&${namespace:queryparam}"
SUBTREE = Link("Only this session and what is below it", f"/d/{UID}?var-session=${{__value.raw}}&{CHOICES}")


def _tree() -> Row:
    numbers = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "center",
        "textMode": "value_and_name",
        "orientation": "vertical",
    }
    return Row(
        "The tree",
        (
            Panel(
                kind="stat",
                title="In all",
                description="Of the chosen session and all sub-agents below it. Redone tokens were paid twice, because "
                "an answer was lost with its gateway.",
                queries=(Sql(sql.SUMMARY),),
                base="blue",
                width=24,
                height=4,
                options=numbers,
            ),
            Panel(
                kind="nodeGraph",
                title="Who called whom",
                description="Sessions with their tokens and crashes; red: quarantined or failed, orange: stuck, blue: "
                "waiting, green: running.",
                queries=(Sql(sql.NODES), Sql(sql.EDGES)),
                width=8,
                height=12,
                options={"nodes": {"mainStatUnit": "short", "secondaryStatUnit": "short", "arcs": []}, "edges": {}},
            ),
            table(
                "Sessions",
                "In the order of the tree. `stuck` counts deaths without progress; three in a row and the session is "
                "given up. A session id leads to that session's own tree.",
                Sql(sql.TABLE),
                width=16,
                height=12,
                units={"tokens": "short", "redone": "short"},
                links={"session": SUBTREE, "trace": TRACE},
            ),
        ),
    )


def _time() -> Row:
    return Row(
        "What happened when",
        (
            Panel(
                kind="state-timeline",
                title="States",
                description="What each session was doing, from its events. Red is the time between the detection of a "
                "crash and the next activation: tens of milliseconds, so zoom in. A tool that is `rerun` has no state "
                "of its own.",
                queries=(Sql(sql.TIMELINE, series=True),),
                width=24,
                height=12,
                mappings=sql.STATES,
                custom={"fillOpacity": 80, "lineWidth": 0, "spanNulls": True},
                options={
                    "mergeValues": True,
                    "showValue": "auto",
                    "alignValue": "left",
                    "rowHeight": 0.9,
                    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                    "tooltip": {"mode": "single", "sort": "none"},
                },
            ),
            table(
                "Runs",
                "Inputs of these sessions within the time range, newest first, with their tokens and cost; one that "
                "goes on has no end yet. `trace` opens the whole trace.",
                Sql(sql.RUNS),
                units={"queued": "s", "took": "s", "input": "short", "cached": "short", "output": "short"},
                links={"session": SUBTREE, "trace": TRACE},
            ),
            table(
                "Events",
                "The event log within the time range, newest first, 1,000 at most; `seq` is the order within a "
                "session. What agents and people said is not shown: `Session.messages()`.",
                Sql(sql.EVENTS),
                height=14,
                units={"took": "s"},
                links={"session": SUBTREE, "trace": TRACE},
            ),
        ),
    )


def _open() -> Row:
    return Row(
        "What it waits for, what it may spend",
        (
            table(
                "Open tool calls",
                "`asked` waits for a person (`understudy answer`), `started` is at work or in doubt after a crash, "
                "`requested` has not begun.",
                Sql(sql.CALLS),
                width=12,
                links={"session": SUBTREE},
            ),
            table(
                "Budgets",
                "Accounts of these sessions: cost in millionths, seconds in microseconds. `used` at 100 %: the next "
                "model call ends its run with `budget_exceeded`. Raise a limit by spawning the session again with it.",
                Sql(sql.BUDGETS),
                width=12,
                units={"used": "percentunit", "allowed": "short", "spent": "short", "reserved": "short"},
            ),
        ),
    )


def _agents() -> Row:
    return Row(
        "Its agents, in all sessions of theirs",
        (
            lines(
                "Tokens by agent",
                "Tokens per second of this tree's agents, in whatever session: Prometheus knows no sessions.",
                Query(or_zero(GENAI_AGENTS.rate(names.INFERENCE_INPUT_TOKENS, by=AGENT_LABEL)), f"{OF_AGENT} input"),
                Query(or_zero(GENAI_AGENTS.rate(names.INFERENCE_OUTPUT_TOKENS, by=AGENT_LABEL)), f"{OF_AGENT} output"),
            ),
            lines(
                "Run duration by agent",
                "95 in 100 runs of the agent take no longer.",
                Query(
                    GENAI_AGENTS.quantile(0.95, names.INVOKE_AGENT_DURATION, by=AGENT_LABEL),
                    f"{OF_AGENT} p95",
                    exemplars=True,
                ),
                unit="s",
            ),
            lines(
                "Runs by agent",
                "Inputs accepted per second, and sub-agents spawned.",
                Query(or_zero(AGENTS.rate(names.RUNS_ACCEPTED, by="agent")), "{{agent}}"),
                Query(or_zero(AGENTS.rate(names.CHILDREN_SPAWNED, by="agent")), "spawned by {{agent}}"),
                unit="ops",
            ),
        ),
    )


def session_tree() -> Dashboard:
    """One session and all below it, as the store knows them."""
    job = f"label_values({Scope().series(names.FRAMES)}, job)"
    return Dashboard(
        uid=UID,
        title="Understudy: session tree",
        description="One session and its sub-agents: what they do, what happened, what it cost. Needs a PostgreSQL "
        "store.",
        variables=(
            Variable(name="metrics", label="Prometheus", kind="datasource", query="prometheus"),
            Variable(name="store", label="Store", kind="datasource", query=STORE["type"]),
            Variable(name="traces", label="Traces", kind="datasource", query="tempo"),
            Variable(name="job", label="Cluster (job)", kind="query", query=job, source=METRICS, every=True),
            Variable(name="namespace", label="Namespace", kind="query", query=sql.NAMESPACES, source=STORE),
            Variable(
                name="session",
                label="Session",
                kind="query",
                query=sql.SESSIONS,
                source=STORE,
                description="The 200 newest; any other id can be typed, a sub-agent's too.",
            ),
            Variable(
                name="agents", label="Agents", kind="query", query=sql.AGENTS, source=STORE, every=True, hidden=True
            ),
        ),
        rows=(_tree(), _time(), _open(), _agents()),
        since="now-6h",
    )
