-- Queues: limits of how many runs are at work and begin, and how each run stands with its queue, and in which those of a schedule
-- wait. Sub-agents in the background are found without the others of their parent.

CREATE TABLE queue (
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    concurrency BIGINT NOT NULL,
    per_key BIGINT NOT NULL,
    rate BIGINT NOT NULL,
    period BIGINT NOT NULL,
    paused BIGINT NOT NULL,
    begins JSON,
    due_at BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    set_by TEXT NOT NULL,
    PRIMARY KEY (namespace, name)
);

ALTER TABLE run ADD COLUMN queue TEXT NOT NULL DEFAULT '';
ALTER TABLE run ADD COLUMN queue_key TEXT NOT NULL DEFAULT '';
ALTER TABLE run ADD COLUMN queue_rank BIGINT NOT NULL DEFAULT 0;
ALTER TABLE run ADD COLUMN slot BIGINT NOT NULL DEFAULT 0;

CREATE INDEX run_queued ON run (namespace, queue, slot, queue_rank, accepted_at) WHERE slot <> 0;

ALTER TABLE schedule ADD COLUMN queue TEXT NOT NULL DEFAULT '';

ALTER TABLE session ADD COLUMN queue TEXT NOT NULL DEFAULT '';
ALTER TABLE session ADD COLUMN queued BIGINT NOT NULL DEFAULT 0;

CREATE INDEX session_background ON session (namespace, parent_id, created_at) WHERE background = 1;
