-- Which endpoint has that response: it may be a fallback's. Of those before this migration that is not known.

ALTER TABLE session ADD COLUMN response_profile TEXT NOT NULL DEFAULT '';

ALTER TABLE session ADD COLUMN response_model TEXT NOT NULL DEFAULT '';

UPDATE session SET response_id = '' WHERE response_id <> '';
