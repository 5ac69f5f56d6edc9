-- Triage: failures of what schedules begin, the same ones as one row. And what loops know of their runs.

CREATE TABLE triage (
    namespace TEXT NOT NULL,
    id TEXT NOT NULL,
    schedule TEXT NOT NULL,
    code TEXT NOT NULL,
    text TEXT NOT NULL,
    count BIGINT NOT NULL,
    first_at BIGINT NOT NULL,
    last_at BIGINT NOT NULL,
    last_session TEXT NOT NULL,
    last_run TEXT NOT NULL,
    resolved_at BIGINT NOT NULL,
    resolved_by TEXT NOT NULL,
    reopened BIGINT NOT NULL,
    retry_run TEXT NOT NULL,
    PRIMARY KEY (namespace, id)
);

CREATE INDEX triage_schedule ON triage (namespace, schedule);

CREATE TABLE loop_memory (
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    attempted BIGINT NOT NULL,
    passed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    cancelled BIGINT NOT NULL,
    pending JSON,
    recent JSON,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, name)
);
