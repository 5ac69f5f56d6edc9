"""The file of people who have tokens for the console."""

from __future__ import annotations

import re
from pathlib import Path

from understudy.errors import InvalidConfiguration, InvalidInput
from understudy.identifiers import check_identity

from .access import Person

RIGHTS = {"act": True, "read": False}
BY_PROXY = "-"


def read_users(file: Path) -> tuple[dict[str, Person], frozenset[str]]:
    """People by the digests of their tokens, and those that only look.

    A line is `NAME act|read DIGEST`: the hexadecimal SHA-256 of a token, or `-` for somebody whom only a proxy knows.
    Empty lines, and those that begin with `#`, say nothing.

    Raises:
        InvalidConfiguration: it can't be read, or a line is of another form, or a name or token comes twice.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidConfiguration(f"the users in {file} can't be read: {reason}") from None
    people: dict[str, Person] = {}
    tokens: dict[str, Person] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or line.lstrip().startswith("#"):
            continue
        try:
            name, rights, digest = words
            person = Person(check_identity(name), RIGHTS[rights])
        except (ValueError, KeyError, InvalidInput):
            raise InvalidConfiguration(f"line {number} of {file} is not: NAME act|read SHA256-OF-TOKEN") from None
        if digest != BY_PROXY and not re.fullmatch(r"[0-9a-f]{64}", digest):
            problem = "has no SHA-256 of a token at its end: printf %s TOKEN | sha256sum"
            raise InvalidConfiguration(f"line {number} of {file} {problem}")
        if name in people or digest in tokens:
            raise InvalidConfiguration(f"line {number} of {file} has a name or a token that is in it already")
        people[name] = person
        if digest != BY_PROXY:
            tokens[digest] = person
    return tokens, frozenset(name for name, person in people.items() if not person.acts)
