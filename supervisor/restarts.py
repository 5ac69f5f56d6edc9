"""The restart decision: a pure function of the facts of a death.

It follows OTP's supervisor (intensity within a period), with two additions. A death while the session only waited
counts for nothing: it can't have been the session's fault. And progress counts: a session that dies again and again
without an answer or a tool result in between is stuck, and is given up long before the intensity would say so.
"""

from __future__ import annotations

from understudy.errors import InvalidInput
from understudy.ports import Death, Verdict

MICROSECONDS = 1_000_000


def decide(death: Death) -> Verdict:
    """Resume a session, at once or after a delay, or quarantine it.

    * waiting: resume at once; nothing is counted.
    * `stuck_after` deaths in a row without progress: quarantine.
    * more than `max_restarts` counted deaths within `period` seconds: quarantine.
    * a death with progress: resume at once. Without: after `backoff`, doubled for each further one up to `backoff_max`.

    Raises:
        InvalidInput: the policy lacks a field.
    """
    policy = death.policy
    try:
        period, limit = policy["period"] * MICROSECONDS, policy["max_restarts"]
        stuck_after, backoff, backoff_max = policy["stuck_after"], policy["backoff"], policy["backoff_max"]
    except KeyError as error:
        raise InvalidInput(f"the restart policy lacks {error}") from None
    recent = tuple(at for at in death.deaths if death.at - at < period)
    if death.waiting:
        return Verdict("resume", deaths=recent, stuck=death.stuck)
    recent = (*recent, death.at)
    stuck = 0 if death.progress else death.stuck + 1
    if stuck >= stuck_after:
        reason = f"died {stuck} times in a row without progress"
        return Verdict("quarantine", reason=reason, deaths=recent, stuck=stuck)
    if len(recent) > limit:
        reason = f"died {len(recent)} times within {policy['period']:g} s (limit {limit})"
        return Verdict("quarantine", reason=reason, deaths=recent, stuck=stuck)
    delay = 0 if not stuck else int(min(backoff_max, backoff * 2 ** (stuck - 1)) * MICROSECONDS)
    return Verdict("resume", delay=delay, deaths=recent, stuck=stuck)
