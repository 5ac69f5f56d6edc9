-- Whether the caller whose trace a run is in records that trace; NULL for a trace of the run's own.

ALTER TABLE session ADD COLUMN sampled BIGINT;

ALTER TABLE run ADD COLUMN sampled BIGINT;
