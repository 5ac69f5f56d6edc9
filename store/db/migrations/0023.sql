-- When the last run of a session ended, and how: sessions are found by it.

ALTER TABLE session ADD COLUMN ended_at BIGINT NOT NULL DEFAULT 0;

ALTER TABLE session ADD COLUMN ended_as TEXT NOT NULL DEFAULT '';

UPDATE session SET ended_at = COALESCE((SELECT MAX(run.finished_at) FROM run
WHERE run.namespace = session.namespace AND run.session_id = session.session_id), 0);

UPDATE session SET ended_as = COALESCE((SELECT MAX(run.status) FROM run WHERE run.namespace = session.namespace
AND run.session_id = session.session_id AND run.finished_at = session.ended_at), '') WHERE ended_at > 0;

CREATE INDEX session_ended ON session (namespace, ended_at);

CREATE INDEX session_agent ON session (namespace, agent, created_at);

DROP INDEX session_root;

CREATE INDEX session_root ON session (namespace, root_id, created_at);
