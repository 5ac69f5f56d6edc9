"""Logs of services and session actors: standard `logging`, each line with the ids of what it is about."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO

from .redaction import add_rules, redacted
from .telemetry import LOG_FORMAT, LOG_LEVEL, redaction_rules

IDS = ("session_id", "run_id", "trace_id", "span_id")

_about: ContextVar[Mapping[str, str]] = ContextVar("about", default={})  # noqa: B039 (never changed, only replaced)


@contextmanager
def about(**ids: str) -> Iterator[None]:
    """What is logged within is about these `IDS`; empty ones are left out."""
    token = _about.set({**_about.get(), **{name: value for name, value in ids.items() if value}})
    try:
        yield
    finally:
        _about.reset(token)


class Formatter(logging.Formatter):
    """A line of text, or a JSON object; without secrets.

    Args:
        role: of the process: `node`, `supervisor`, `frame`.
    """

    def __init__(self, role: str, *, as_json: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._role = role
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """The record, with the ids that it was given (`extra`) or that are known here."""
        known = _about.get()
        ids = {name: str(getattr(record, name, "") or known.get(name, "")) for name in IDS}
        ids = {name: value for name, value in ids.items() if value}
        if not self._as_json:
            suffix = "".join(f" {name}={value}" for name, value in ids.items())
            return redacted(super().format(record)) + suffix
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": record.levelname.lower(), "role": self._role, "logger": record.name,
                "message": redacted(record.getMessage()), **ids}  # fmt: skip
        if record.exc_info:
            line["error"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def set_up(role: str, variables: Mapping[str, str], stream: IO[str] | None = None) -> None:
    """Log what this package and the exporters have to say to stderr, as the variables ask; once more replaces it."""
    add_rules(redaction_rules(variables))
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Formatter(role, as_json=variables.get(LOG_FORMAT, "text").strip().lower() == "json"))
    handler.set_name("understudy")
    for name in ("understudy", "opentelemetry"):
        logger = logging.getLogger(name)
        for old in [old for old in logger.handlers if old.get_name() == "understudy"]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("understudy").setLevel(variables.get(LOG_LEVEL, "info").strip().upper())
