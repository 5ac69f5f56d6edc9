-- The steps of workflows that have no result yet: they are found by this, since a workflow has no rounds. And from where
-- on a workflow's log is read to run its code again.

ALTER TABLE tool_call ADD COLUMN open BIGINT NOT NULL DEFAULT 0;

CREATE INDEX tool_call_open ON tool_call (namespace, session_id) WHERE open = 1;

ALTER TABLE session ADD COLUMN record_seq BIGINT NOT NULL DEFAULT 0;
