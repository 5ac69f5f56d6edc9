-- Notes of sessions, agents and projects, and the boards of session trees. The row with an empty key counts an owner's
-- writes.

CREATE TABLE note (
    namespace TEXT NOT NULL,
    scope TEXT NOT NULL,
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    text TEXT NOT NULL,
    version BIGINT NOT NULL,
    pinned BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    written_by TEXT NOT NULL,
    PRIMARY KEY (namespace, scope, owner, key)
);
