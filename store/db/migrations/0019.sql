-- Commands that sessions have started in the background.

CREATE TABLE command (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    job TEXT NOT NULL,
    key TEXT NOT NULL,
    call_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    node_id TEXT NOT NULL,
    name TEXT NOT NULL,
    command TEXT NOT NULL,
    state TEXT NOT NULL,
    quiet BIGINT NOT NULL,
    stop_at BIGINT NOT NULL,
    exit_code BIGINT,
    problem TEXT NOT NULL,
    tail TEXT NOT NULL,
    started_at BIGINT NOT NULL,
    ended_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id, job)
);

CREATE INDEX command_at_work ON command (namespace, ended_at, node_id);
