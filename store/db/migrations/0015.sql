-- The arguments with which a person approved a tool call, where they are not the model's.

ALTER TABLE tool_call ADD COLUMN edited TEXT;
