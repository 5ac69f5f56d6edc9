-- Drains and upgrades: nodes that give their sessions away, and specifications that wait for a run's end.

CREATE TABLE drain (
    namespace TEXT NOT NULL,
    node_id TEXT NOT NULL,
    reason TEXT NOT NULL,
    stop BIGINT NOT NULL,
    started_at BIGINT NOT NULL,
    deadline BIGINT NOT NULL,
    finished_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, node_id)
);

ALTER TABLE session ADD COLUMN moved BIGINT NOT NULL DEFAULT 0;

ALTER TABLE session ADD COLUMN next_spec JSON;
