-- Inputs that are merged: what the current run is made of beside its own, and the run that another one is a part of.

ALTER TABLE session ADD COLUMN merged JSON;
ALTER TABLE run ADD COLUMN merged_into TEXT NOT NULL DEFAULT '';
