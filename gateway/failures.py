"""Tries of a model call that fail in a way worth another one, and why."""

from __future__ import annotations

from typing import Any

from understudy.records import RetryReason

RETRIED = frozenset({408, 409, 429})
"""Statuses below 500 that are worth another try."""
FINAL_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
"""Error codes that waiting doesn't cure, whatever the status."""
FINAL_REPORTS = FINAL_CODES | {
    "invalid_prompt", "context_length_exceeded",
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
    "billing_error",
}  # fmt: skip
"""The same of errors that are reported in place of an answer, without a status: OpenAI's, then Anthropic's."""


class Pending(Exception):
    """The endpoint works on the response: it has to be asked again for it."""


class RateLimited(Exception):
    """A try was refused for a rate limit: the call waits for another turn."""


class Failure(Exception):
    """A try failed in a way worth retrying."""

    def __init__(
        self, what: str, reason: RetryReason, *, status: int | None = None, code: Any = None,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(what)
        self.what = what
        self.reason = reason
        self.status = status
        self.code = code
        self.retry_after = retry_after


def reason_of(status: int) -> RetryReason:
    """What a status that is worth another try says."""
    if status == 429:
        return "rate_limited"
    if status == 408:
        return "timeout"
    return "conflict" if status == 409 else "server_error"
