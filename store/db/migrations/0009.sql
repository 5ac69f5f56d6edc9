-- Requests that may be repeated: what each did, for an hour at least.

CREATE TABLE request (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    request_id TEXT NOT NULL,
    result JSON,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id, request_id)
);
