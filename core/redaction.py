"""Secrets in texts: what they look like, which ones this process knows, and what stands in their place.

Applied to what leaves a process for people or machines to read: log lines, error messages in events, captured content.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from .config import has_credentials, is_secret_name

HIDDEN = "***"

SHORTEST = 8
"""Characters: a shorter value would be found in texts that have nothing to do with it."""

SHAPES: tuple[tuple[str, str], ...] = (
    # What spans lines comes first, or its parts would be left.
    (r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", HIDDEN),
    (r"://([^/\s:@'\"]*):[^/\s@]+@", rf"://\1:{HIDDEN}@"),
    (r"(?i)\b(bearer\s+)(?=[\w.~+/=-]*\d)[\w.~+/=-]{12,}", rf"\1{HIDDEN}"),
    (r"(?i)\b(authorization\W{1,4}basic\s+)[\w+/=-]{6,}", rf"\1{HIDDEN}"),
    (r"(?<![\w-])(sk|pk|rk)-(?=[\w-]*\d)[A-Za-z0-9_-]{16,}", HIDDEN),
    (r"(?<!\w)(gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{30,})", HIDDEN),
    (r"(?<!\w)(xox[abprs]-[A-Za-z0-9-]{10,}|AIza[\w-]{35})", HIDDEN),
    (r"(?<![A-Z0-9])(AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])", HIDDEN),
    (r"(?<![\w-])eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}", HIDDEN),
    (r"(?i)(password|passwd|api[_-]?key|access[_-]?token|client[_-]?secret)=[^\s&;,'\"]{4,}", rf"\1={HIDDEN}"),
)
"""Keys of providers, Bearer and Basic credentials, passwords in URLs, private keys, AWS ids, tokens of three parts."""


class Redactor:
    """Takes secrets out of texts. Text without any comes back unchanged, and twice is the same as once.

    Args:
        values: secrets that are known; those shorter than `SHORTEST` are ignored.
        rules: regular expressions of the user's.
    """

    def __init__(self, values: Iterable[str] = (), rules: Iterable[str] = ()) -> None:
        known = {text for value in values if len(value) >= SHORTEST for text in (value, json.dumps(value)[1:-1])}
        self._values = sorted(known, key=len, reverse=True)  # one may contain another
        shapes = [*SHAPES, *((rule, HIDDEN) for rule in rules)]
        self._shapes = [(re.compile(shape, re.DOTALL), instead) for shape, instead in shapes]

    def text(self, text: str) -> str:
        """The text without secrets."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        for shape, instead in self._shapes:
            text = shape.sub(instead, text)
        return text

    def data(self, value: Any) -> Any:
        """JSON-compatible data without secrets in any text, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.data(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.data(item) for item in value]
        return value


def passwords(dsn: str) -> list[str]:
    """The passwords in a DSN, as written and decoded."""
    found = re.findall(r"://[^/:@]*:([^@]*)@|(?i:password)=([^&]+)", dsn)
    raw = [part for pair in found for part in pair if part]
    return [*raw, *(unquote(part) for part in raw)]


def secret_values(environ: Mapping[str, str]) -> set[str]:
    """Values of variables that are secrets by their name, or have a password in a URL; that password as well."""
    found: set[str] = set()
    for name, value in environ.items():
        if has_credentials(value):
            found.update((value, *passwords(value)))
        elif is_secret_name(name):
            found.add(value)
    return found


_known: set[str] = set()
_rules: list[str] = []
_current: Redactor | None = None
_changing = threading.Lock()
"""Secrets are learnt on the event loop while the journal's thread and readers redact."""


def know(*secrets: str) -> None:
    """From now on this process keeps these out of what it says: keys, passwords that are in no variable."""
    global _current
    with _changing:
        _known.update(secrets)
        _current = None


def add_rules(rules: Iterable[str]) -> None:
    """The user's own regular expressions."""
    global _current
    with _changing:
        _rules.extend(rule for rule in rules if rule not in _rules)
        _current = None


def redactor() -> Redactor:
    """This process's: what it was given, and the values of its secret variables."""
    global _current
    with _changing:
        if _current is None:
            _current = Redactor(_known | secret_values(os.environ), _rules)
        return _current


def redacted(text: str) -> str:
    """A text without the secrets that this process knows or recognizes."""
    return redactor().text(text)
