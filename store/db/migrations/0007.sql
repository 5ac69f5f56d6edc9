-- Which node services there are, and where Prometheus finds them.

CREATE TABLE service (
    namespace TEXT NOT NULL,
    node_id TEXT NOT NULL,
    writer TEXT NOT NULL,
    address TEXT NOT NULL,
    started_at BIGINT NOT NULL,
    PRIMARY KEY (namespace, node_id)
);
