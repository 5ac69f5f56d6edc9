"""The restart decision: a pure function of the facts of a death.

It follows OTP's supervisor (intensity within a period), with two additions. A death while the session only waited
counts for nothing: it can't have been the session's fault. And progress counts: a session that dies again and again
without an answer or a tool result in between is stuck. Its open tool calls are given up then, once in a run; if that
does not help, or there are none, the session is given up long before the intensity would say so.
"""

from __future__ import annotations

from understudy.errors import InvalidInput
from understudy.identifiers import digest
from understudy.ports import Death, Verdict

MICROSECONDS = 1_000_000

REMEMBERED_DEATHS = 32
"""Deaths that a backoff looks back on; long before, it has reached its limit."""


def decide(death: Death) -> Verdict:
    """Resume a session, at once or after a delay, with or without its open tool calls, or quarantine it.

    * waiting: resume at once; nothing is counted.
    * `stuck_after` deaths in a row without progress: abort the open calls and resume at once; quarantine if there are
      none, or some were aborted before in this run.
    * more than `max_restarts` counted deaths within `period` seconds: quarantine.
    * a death with progress: resume at once. Without: after `backoff`, doubled for each further one up to `backoff_max`,
      less up to `jitter` of itself; without a counted death for `reset_after` seconds it begins again.

    Raises:
        InvalidInput: the policy lacks a field.
    """
    policy = death.policy
    try:
        period, limit, stuck_after = policy["period"] * MICROSECONDS, policy["max_restarts"], policy["stuck_after"]
        if death.waiting:
            return Verdict("resume", deaths=death.deaths, stuck=death.stuck)
        known = _connected((*death.deaths, death.at), max(policy["period"], _reset_after(death)))
        known = known[-max(limit + 1, REMEMBERED_DEATHS) :]
        stuck = 0 if death.progress else death.stuck + 1
        delay = 0 if death.progress else _delay(death, known, stuck)
    except KeyError as error:
        raise InvalidInput(f"the restart policy lacks {error}") from None
    recent = sum(0 <= death.at - at < period for at in known)  # none of before the clock was set back
    reason = f"died {stuck} times in a row without progress"
    if stuck >= stuck_after and (death.aborted or not death.open_calls):
        return Verdict("quarantine", rule="no_progress", reason=reason, deaths=known, stuck=stuck)
    if recent > limit:
        too_many = f"died {recent} times within {policy['period']:g} s (limit {limit})"
        return Verdict("quarantine", rule="max_restarts", reason=too_many, deaths=known, stuck=stuck)
    if stuck >= stuck_after:
        text = f"given up: the agent's process died {stuck} times in a row while this call was open"
        return Verdict("abort", reason=text, deaths=known, stuck=0)
    return Verdict("resume", delay=delay, deaths=known, stuck=stuck)


def _reset_after(death: Death) -> float:
    found = death.policy.get("reset_after")
    return float(death.policy["period"] if found is None else found)


def _connected(deaths: tuple[int, ...], seconds: float) -> tuple[int, ...]:
    """The last of these times, as many as follow each other within so many seconds."""
    first = len(deaths) - 1
    while first > 0 and deaths[first] - deaths[first - 1] < seconds * MICROSECONDS:
        first -= 1
    return deaths[first:]


def _delay(death: Death, known: tuple[int, ...], stuck: int) -> int:
    """The pause after the `stuck`-th death in a row without progress; `known` ends with this one."""
    policy = death.policy
    in_a_row = min(stuck, len(_connected(known, _reset_after(death))))
    delay = min(policy["backoff_max"], policy["backoff"] * 2 ** (in_a_row - 1))
    share = int(digest("jitter", death.session_id, str(death.number), size=4), 16) / 2**32
    return int(delay * (1 - policy.get("jitter", 0.0) * share) * MICROSECONDS)
