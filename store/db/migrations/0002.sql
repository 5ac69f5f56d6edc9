-- Retention: how far a session's event log may have been pruned. Sessions are listed newest first, all or only roots.

ALTER TABLE session ADD COLUMN incarnation BIGINT NOT NULL DEFAULT 0;

ALTER TABLE session ADD COLUMN pruned_seq BIGINT NOT NULL DEFAULT 0;

CREATE INDEX session_created ON session (namespace, created_at);

DROP INDEX session_parent;

CREATE INDEX session_parent ON session (namespace, parent_id, created_at);
