-- Sub-agents that work in the background: no run of their parent waits for them.

ALTER TABLE session ADD COLUMN background BIGINT NOT NULL DEFAULT 0;
