-- The steps of workflows that have no result yet: they are found by this, since a workflow has no rounds.

ALTER TABLE tool_call ADD COLUMN open BIGINT NOT NULL DEFAULT 0;

CREATE INDEX tool_call_open ON tool_call (namespace, session_id) WHERE open = 1;
