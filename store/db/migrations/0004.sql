-- Budgets: an account for each limit, charged by the session that has it and, if it is the tree's, by all below it.

CREATE TABLE account (
    namespace TEXT NOT NULL,
    session_id TEXT NOT NULL,
    scope TEXT NOT NULL,
    resource TEXT NOT NULL,
    allowed BIGINT NOT NULL,
    reserved BIGINT NOT NULL,
    spent BIGINT NOT NULL,
    beyond BIGINT NOT NULL,
    since BIGINT NOT NULL,
    PRIMARY KEY (namespace, session_id, scope, resource)
);

INSERT INTO account (namespace, session_id, scope, resource, allowed, reserved, spent, beyond, since)
SELECT namespace, session_id, 'tree', 'tokens', budget_tokens, budget_reserved, budget_spent,
    CASE WHEN budget_reserved + budget_spent > budget_tokens
        THEN budget_reserved + budget_spent - budget_tokens ELSE 0 END,
    created_at
FROM session WHERE budget_tokens IS NOT NULL AND parent_id IS NULL;

ALTER TABLE session ADD COLUMN accounts TEXT;

ALTER TABLE session ADD COLUMN cost_used BIGINT NOT NULL DEFAULT 0;

UPDATE session SET accounts = root_id || ':' || depth
WHERE EXISTS (
    SELECT 1 FROM account WHERE account.namespace = session.namespace AND account.session_id = session.root_id
);

ALTER TABLE session DROP COLUMN budget_tokens;

ALTER TABLE session DROP COLUMN budget_reserved;

ALTER TABLE session DROP COLUMN budget_spent;

ALTER TABLE reservation ADD COLUMN cost BIGINT NOT NULL DEFAULT 0;

ALTER TABLE reservation ADD COLUMN output BIGINT NOT NULL DEFAULT 0;

ALTER TABLE reservation DROP COLUMN root_id;
