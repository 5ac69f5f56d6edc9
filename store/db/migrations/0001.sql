-- The tables of version 0.1.0. One text for both backends: what SQLite calls BLOB is BYTEA in PostgreSQL.

CREATE TABLE schema_migration (
    version INTEGER NOT NULL,
    applied_at BIGINT NOT NULL,
    PRIMARY KEY (version)
);

CREATE TABLE code_blob (
    namespace TEXT NOT NULL,
    digest TEXT NOT NULL,
    data BLOB NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, digest)
);

CREATE TABLE event (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    seq BIGINT NOT NULL,
    v BIGINT NOT NULL,
    writer TEXT NOT NULL,
    writer_seq BIGINT NOT NULL,
    type TEXT NOT NULL,
    at BIGINT NOT NULL,
    run_id TEXT,
    body JSON,
    PRIMARY KEY (namespace, session_id, seq)
);

CREATE UNIQUE INDEX event_writer ON event (namespace, writer, writer_seq);

CREATE TABLE export_cursor (
    namespace TEXT NOT NULL,
    writer TEXT NOT NULL,
    sink TEXT NOT NULL,
    writer_seq BIGINT NOT NULL,
    PRIMARY KEY (namespace, writer, sink)
);

CREATE TABLE inbox (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    item BIGINT NOT NULL,
    kind TEXT NOT NULL,
    "key" TEXT NOT NULL,
    payload JSON,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id, item)
);

CREATE TABLE message (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    seq BIGINT NOT NULL,
    v BIGINT NOT NULL,
    run_id TEXT,
    round BIGINT NOT NULL,
    role TEXT NOT NULL,
    body JSON,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id, seq)
);

CREATE TABLE metric_state (
    namespace TEXT NOT NULL,
    writer TEXT NOT NULL,
    writer_seq BIGINT NOT NULL,
    state JSON,
    PRIMARY KEY (namespace, writer)
);

CREATE TABLE owner (
    namespace TEXT NOT NULL,
    generation BIGINT NOT NULL,
    holder TEXT NOT NULL,
    lease_until BIGINT NOT NULL,
    PRIMARY KEY (namespace)
);

CREATE TABLE reservation (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    wait_key TEXT NOT NULL,
    root_id TEXT NOT NULL,
    tokens BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id)
);

CREATE TABLE run (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    content JSON,
    source TEXT NOT NULL,
    status TEXT NOT NULL,
    text TEXT,
    output JSON,
    error JSON,
    rounds BIGINT NOT NULL,
    usage JSON,
    trace_id TEXT NOT NULL,
    parent_span_id TEXT NOT NULL,
    cancel_requested TEXT,
    accepted_at BIGINT NOT NULL,
    started_at BIGINT NOT NULL,
    finished_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id, run_id)
);

CREATE TABLE session (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    parent_id TEXT,
    root_id TEXT NOT NULL,
    depth BIGINT NOT NULL,
    call_id TEXT,
    parent_run_id TEXT,
    agent TEXT NOT NULL,
    kind TEXT NOT NULL,
    spec JSON,
    spec_hash TEXT NOT NULL,
    placement TEXT NOT NULL,
    metadata_json JSON,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    status TEXT NOT NULL,
    active BIGINT NOT NULL,
    closed BIGINT NOT NULL,
    error JSON,
    node_id TEXT NOT NULL,
    frame_id TEXT,
    actor_pid BIGINT,
    epoch BIGINT NOT NULL,
    batch_no BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    version BIGINT NOT NULL,
    inbox_seq BIGINT NOT NULL,
    inbox_count BIGINT NOT NULL,
    children_open BIGINT NOT NULL,
    calls_open BIGINT NOT NULL,
    run_id TEXT,
    round BIGINT NOT NULL,
    wait TEXT,
    wait_attempt BIGINT NOT NULL,
    wait_since BIGINT NOT NULL,
    wait_holder TEXT NOT NULL,
    wait_error JSON,
    cancel_reason TEXT,
    trace_id TEXT NOT NULL,
    parent_span_id TEXT NOT NULL,
    run_usage JSON,
    run_started_at BIGINT NOT NULL,
    deaths JSON,
    stuck BIGINT NOT NULL,
    progress BIGINT NOT NULL,
    progress_at_death BIGINT NOT NULL,
    restarts BIGINT NOT NULL,
    tokens_used BIGINT NOT NULL,
    tokens_redone BIGINT NOT NULL,
    budget_tokens BIGINT,
    budget_reserved BIGINT NOT NULL,
    budget_spent BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id)
);

CREATE INDEX session_live ON session (namespace, active, node_id);

CREATE INDEX session_parent ON session (namespace, parent_id);

CREATE INDEX session_root ON session (namespace, root_id);

CREATE TABLE timer (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    name TEXT NOT NULL,
    due_at BIGINT NOT NULL,
    payload JSON,
    PRIMARY KEY (namespace, session_id, name)
);

CREATE INDEX timer_due ON timer (namespace, due_at);

CREATE TABLE tool_call (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    call_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    round BIGINT NOT NULL,
    "index" BIGINT NOT NULL,
    tool TEXT NOT NULL,
    arguments TEXT NOT NULL,
    provider_id TEXT NOT NULL,
    state TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    executions BIGINT NOT NULL,
    result JSON,
    child_id TEXT,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id, call_id)
);
