-- Which model call's answer was committed last, and whether the run ended with it: in columns of their own, no longer as
-- tags in the place of the one who made the call. Of an answer whose run is over nothing is kept. The count of a row's
-- changes goes: transactions lock rows, and nobody compared it.

ALTER TABLE session ADD COLUMN answer_key TEXT NOT NULL DEFAULT '';
ALTER TABLE session ADD COLUMN answer_ended BIGINT NOT NULL DEFAULT 0;
UPDATE session SET answer_key = session_id || '/' || run_id || '/' || round || '/' || substr(wait_holder, 10),
    wait_holder = '' WHERE substr(wait_holder, 1, 9) = 'answered ' AND run_id IS NOT NULL;
UPDATE session SET wait_holder = '' WHERE substr(wait_holder, 1, 9) = 'answered ';
UPDATE session SET answer_key = substr(wait_holder, 7), answer_ended = 1, wait_holder = ''
    WHERE substr(wait_holder, 1, 6) = 'ended ';
ALTER TABLE session DROP COLUMN version;
