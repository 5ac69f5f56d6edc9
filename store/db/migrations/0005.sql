-- Tool calls that wait for people: what was asked and answered. And whether a run's open calls were given up before.

CREATE TABLE question (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    call_id TEXT NOT NULL,
    asked BIGINT NOT NULL,
    run_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    prompt TEXT NOT NULL,
    options JSON,
    answer JSON,
    asked_at BIGINT NOT NULL,
    answered_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id, call_id, asked)
);

ALTER TABLE session ADD COLUMN aborted BIGINT NOT NULL DEFAULT 0;
