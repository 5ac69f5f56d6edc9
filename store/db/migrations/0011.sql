-- Whether what a session does before its next model call may have been done before, by a process that died or lost it.

ALTER TABLE session ADD COLUMN redone BIGINT NOT NULL DEFAULT 0;
