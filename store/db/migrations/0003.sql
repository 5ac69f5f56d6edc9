-- Supervision: restart types, groups of sub-agents, shutdown, and how a parent's end reaches its children.

ALTER TABLE session ADD COLUMN restart_type TEXT NOT NULL DEFAULT 'temporary';

ALTER TABLE session ADD COLUMN on_parent_end TEXT NOT NULL DEFAULT 'cancel';

ALTER TABLE session ADD COLUMN lifecycle TEXT NOT NULL DEFAULT 'ephemeral';

ALTER TABLE session ADD COLUMN shutdown BIGINT;

ALTER TABLE session ADD COLUMN start_order BIGINT NOT NULL DEFAULT 0;

ALTER TABLE session ADD COLUMN restart_number BIGINT NOT NULL DEFAULT 0;

ALTER TABLE session ADD COLUMN cancel_as JSON;

ALTER TABLE session ADD COLUMN held JSON;

ALTER TABLE session ADD COLUMN group_state JSON;

ALTER TABLE session ADD COLUMN replaced_by TEXT;

ALTER TABLE session ADD COLUMN abandoned BIGINT NOT NULL DEFAULT 0;

ALTER TABLE session ADD COLUMN task_open BIGINT NOT NULL DEFAULT 0;

UPDATE session SET task_open = 1 WHERE parent_id IS NOT NULL AND closed = 0;

UPDATE timer SET name = 'pause' WHERE name = 'resume';

CREATE INDEX session_task ON session (namespace, parent_id, task_open);
