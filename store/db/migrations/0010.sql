-- Ids that are used again: a new session's incarnation is later than any removed one's, whatever the clocks say.

CREATE TABLE removal (
    namespace TEXT NOT NULL,
    incarnation BIGINT NOT NULL,
    PRIMARY KEY (namespace)
);

ALTER TABLE session ADD COLUMN first_incarnation BIGINT NOT NULL DEFAULT 0;
