-- Under which id the endpoint has the response to the model call that a session waits for.

ALTER TABLE session ADD COLUMN response_id TEXT NOT NULL DEFAULT '';
