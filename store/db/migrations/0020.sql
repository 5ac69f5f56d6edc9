-- Questions of MCP servers: what their answers must fit, and what the servers know them by.

ALTER TABLE question ADD COLUMN form JSON;

ALTER TABLE question ADD COLUMN elicitation TEXT NOT NULL DEFAULT '';
