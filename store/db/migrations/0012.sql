-- Inputs that are sent again after their session was removed: which request of a client brought a run.

ALTER TABLE run ADD COLUMN request_id TEXT NOT NULL DEFAULT '';
