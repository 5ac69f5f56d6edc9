-- Traces: the span of a session's last run, to which its next one links.

ALTER TABLE session ADD COLUMN last_span TEXT NOT NULL DEFAULT '';
