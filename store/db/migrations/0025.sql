-- Schedules: what is due at times, and what became of that.

CREATE TABLE schedule (
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    definition JSON,
    anchor BIGINT NOT NULL,
    first_at BIGINT NOT NULL,
    next_at BIGINT NOT NULL,
    due_at BIGINT NOT NULL,
    paused BIGINT NOT NULL,
    fired BIGINT NOT NULL,
    skipped BIGINT NOT NULL,
    missed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    triggered BIGINT NOT NULL,
    last_at BIGINT NOT NULL,
    last_session TEXT NOT NULL,
    last_run TEXT NOT NULL,
    problem TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    set_by TEXT NOT NULL,
    PRIMARY KEY (namespace, name)
);

CREATE INDEX schedule_due ON schedule (namespace, due_at);
