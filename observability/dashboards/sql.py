"""The queries of the dashboard *session tree*: PostgreSQL, with the macros and variables of Grafana's data source.

Variables reach a query as `${name:sqlstring}` only: Grafana quotes them then, and doubles the quotes inside. Nothing
that people or models wrote (inputs, answers, arguments, results, error texts) is selected.
"""

from __future__ import annotations

NAMESPACE = "${namespace:sqlstring}"
SESSION = "${session:sqlstring}"
FROM = "$__unixEpochNanoFrom() / 1000"
TO = "$__unixEpochNanoTo() / 1000"
"""The dashboard's time range in microseconds, as our columns have it, so that nothing is computed for each row."""

TREE = f"""WITH RECURSIVE tree AS (
  SELECT session_id, parent_id, agent, 0 AS level, ARRAY[''] AS place
  FROM session WHERE namespace = {NAMESPACE} AND session_id = {SESSION}
  UNION ALL
  SELECT child.session_id, child.parent_id, child.agent, parent.level + 1,
    parent.place || (lpad(child.start_order::text, 19, '0') || child.session_id)
  FROM session child JOIN tree parent ON child.parent_id = parent.session_id
  WHERE child.namespace = {NAMESPACE}
)"""
"""The chosen session and everything below it; `place` sorts a tree as one would print it."""


def when(column: str) -> str:
    """A time as Grafana shows it; nothing where it has not come yet."""
    return f"to_timestamp(nullif({column}, 0) / 1000000.0)"


NAMESPACES = "SELECT namespace FROM owner ORDER BY namespace"

SESSIONS = f"""SELECT session_id AS __value,
  concat_ws(' · ', agent, to_char({when("created_at")}, 'YYYY-MM-DD HH24:MI'), session_id) AS __text
FROM session WHERE namespace = {NAMESPACE} AND parent_id IS NULL
ORDER BY created_at DESC LIMIT 200"""

AGENTS = f"{TREE}\nSELECT DISTINCT agent FROM tree ORDER BY agent"

SUMMARY = f"""{TREE}
SELECT count(*) AS "sessions", sum(s.active) AS "at work", sum(s.restarts) AS "crashes",
  sum(s.tokens_used) AS "tokens", sum(s.tokens_redone) AS "tokens redone", sum(s.cost_used) / 1000000.0 AS "cost"
FROM tree JOIN session s ON s.namespace = {NAMESPACE} AND s.session_id = tree.session_id
HAVING count(*) > 0"""

NODES = f"""{TREE}
SELECT tree.session_id AS "id", tree.agent AS "title", s.status AS "subtitle", s.tokens_used AS "mainstat",
  s.restarts AS "secondarystat",
  CASE WHEN s.status IN ('quarantined', 'failed') THEN 'red' WHEN s.stuck > 0 THEN 'orange'
    WHEN s.status LIKE 'waiting%' THEN 'blue' WHEN s.status = 'running' THEN 'green' ELSE 'gray' END AS "color"
FROM tree JOIN session s ON s.namespace = {NAMESPACE} AND s.session_id = tree.session_id
ORDER BY tree.place LIMIT 1000"""

EDGES = f"""{TREE}
SELECT session_id AS "id", parent_id AS "source", session_id AS "target"
FROM tree WHERE level > 0 ORDER BY place LIMIT 1000"""

TABLE = f"""{TREE}
SELECT repeat('· ', tree.level) || tree.agent AS "agent", tree.session_id AS "session", s.status AS "status",
  {when("s.wait_since")} AS "waits since", s.run_id AS "run", s.round AS "round", s.epoch AS "epoch",
  s.restarts AS "crashes", s.stuck AS "stuck", s.inbox_count AS "inbox", s.tokens_used AS "tokens",
  s.tokens_redone AS "redone", s.cost_used / 1000000.0 AS "cost", left(s.node_id, 8) AS "node",
  CASE WHEN s.active = 1 THEN s.actor_pid END AS "pid",
  {when("s.created_at")} AS "created", {when("s.updated_at")} AS "changed",
  nullif(s.trace_id, '') AS "trace"
FROM tree JOIN session s ON s.namespace = {NAMESPACE} AND s.session_id = tree.session_id
ORDER BY tree.place LIMIT 1000"""

# JSON of type `json` may hold \u0000, and then no key of it can be read as text.
_READABLE = "CASE WHEN strpos(body::text, '\\u0000') = 0 THEN body END"

STATES: dict[str, tuple[str, str]] = {
    "0": ("idle", "#8e8e8e"),
    "1": ("at work", "green"),
    "2": ("waits for the model", "blue"),
    "3": ("runs a tool", "dark-green"),
    "4": ("waits for sub-agents", "purple"),
    "5": ("waits for a person", "yellow"),
    "6": ("waits for a time", "light-blue"),
    "7": ("crashed", "red"),
    "8": ("quarantined", "dark-red"),
    "9": ("moves to another node", "orange"),
    "10": ("ended badly", "semi-dark-orange"),
    "11": ("closed", "#555555"),
}
"""What a session is doing, as the timeline's numbers: its series can't be texts."""

_STATE_OF_EVENT = f"""CASE type
    WHEN 'model_call_started' THEN 2 WHEN 'model_call_reissued' THEN 2
    WHEN 'tool_started' THEN 3 WHEN 'child_spawned' THEN 4 WHEN 'input_requested' THEN 5
    WHEN 'timer_set' THEN CASE WHEN ({_READABLE})->>'kind' = 'wait' THEN 6 END
    WHEN 'session_crashed' THEN CASE WHEN ({_READABLE})->>'waiting' = 'true' THEN NULL ELSE 7 END
    WHEN 'session_quarantined' THEN 8 WHEN 'session_moved' THEN 9
    WHEN 'run_finished' THEN CASE WHEN ({_READABLE})->>'status' IN ('completed', 'cancelled') THEN 0 ELSE 10 END
    WHEN 'session_closed' THEN 11 WHEN 'session_created' THEN 0 WHEN 'session_resumed' THEN 0
    WHEN 'session_activated' THEN 1 WHEN 'run_started' THEN 1 WHEN 'model_call_completed' THEN 1
    WHEN 'model_call_failed' THEN 1 WHEN 'input_received' THEN 1 WHEN 'timer_fired' THEN 1
  END"""

TIMELINE = f"""{TREE}, moment AS (
  SELECT e.session_id, e.seq, e.at, {_STATE_OF_EVENT} AS state
  FROM tree JOIN event e ON e.namespace = {NAMESPACE} AND e.session_id = tree.session_id
  WHERE e.at <= {TO}
), known AS (
  SELECT * FROM moment WHERE state IS NOT NULL
), shown AS (
  SELECT session_id, seq, at, state FROM known WHERE at >= {FROM}
  UNION ALL
  (SELECT DISTINCT ON (session_id) session_id, seq, {FROM}, state FROM known WHERE at < {FROM}
   ORDER BY session_id, seq DESC)
), latest AS (
  SELECT * FROM shown ORDER BY at DESC, seq DESC LIMIT 10000
)
SELECT {when("latest.at")} AS "time",
  repeat('· ', tree.level) || tree.agent || ' ' || right(tree.session_id, 12) AS metric, latest.state AS value
FROM latest JOIN tree ON tree.session_id = latest.session_id ORDER BY latest.at, tree.place, latest.seq"""

EVENTS = f"""{TREE}, entry AS (
  SELECT tree.agent, e.session_id, e.seq, e.at, e.type, e.run_id, {_READABLE} AS body
  FROM tree JOIN event e ON e.namespace = {NAMESPACE} AND e.session_id = tree.session_id
  WHERE e.at BETWEEN {FROM} AND {TO}
  ORDER BY e.at DESC, e.session_id, e.seq DESC LIMIT 1000
)
SELECT {when("at")} AS "time", agent, session_id AS "session", seq, (body->'_'->>1)::bigint AS "epoch", type AS "event",
  concat_ws(', ', body->>'cause', body->>'decision', body->>'model', body->>'tool', body->>'kind', body->>'outcome',
    body->>'policy', body->>'status', body->>'child_agent', nullif(body->>'error_code', ''),
    CASE WHEN type = 'session_quarantined' THEN body->>'reason' END,
    CASE WHEN (body->>'waiting')::boolean THEN 'while waiting' END) AS "what",
  coalesce(body->>'duration', nullif(body->>'down', '0'), nullif(body->>'queued', '0'))::bigint / 1000000.0 AS "took",
  run_id AS "run", nullif(body->'_'->>2, '') AS "trace"
FROM entry ORDER BY at DESC, session_id, seq DESC"""

RUNS = f"""{TREE}
SELECT {when("r.accepted_at")} AS "accepted", tree.agent AS "agent", r.session_id AS "session", r.run_id AS "run",
  r.status AS "status", r.source AS "from",
  (nullif(r.started_at, 0) - r.accepted_at) / 1000000.0 AS "queued",
  (coalesce(nullif(r.finished_at, 0), {TO}) - nullif(r.started_at, 0)) / 1000000.0 AS "took",
  r.rounds AS "rounds", (r.usage->>0)::bigint AS "input", (r.usage->>2)::bigint AS "cached",
  (r.usage->>1)::bigint AS "output", coalesce((r.usage->>5)::bigint, 0) / 1000000.0 AS "cost",
  nullif(r.trace_id, '') AS "trace"
FROM tree JOIN run r ON r.namespace = {NAMESPACE} AND r.session_id = tree.session_id
WHERE r.accepted_at <= {TO} AND (r.finished_at = 0 OR r.finished_at >= {FROM})
ORDER BY r.accepted_at DESC LIMIT 1000"""

CALLS = f"""{TREE}
SELECT {when("c.updated_at")} AS "since", tree.agent AS "agent", c.session_id AS "session", c.tool AS "tool",
  c.state AS "state", c.executions AS "executions", c.child_id AS "sub-agent", c.call_id AS "call"
FROM tree JOIN tool_call c ON c.namespace = {NAMESPACE} AND c.session_id = tree.session_id
WHERE c.state IN ('requested', 'started', 'asked') ORDER BY c.updated_at LIMIT 1000"""

BUDGETS = f"""{TREE}
SELECT tree.agent AS "agent", a.session_id AS "session", a.scope AS "scope", a.resource AS "resource",
  a.allowed AS "allowed", a.spent AS "spent", a.reserved AS "reserved",
  (a.spent + a.reserved)::float / nullif(a.allowed, 0) AS "used"
FROM tree JOIN account a ON a.namespace = {NAMESPACE} AND a.session_id = tree.session_id
ORDER BY tree.place, a.scope, a.resource LIMIT 1000"""
