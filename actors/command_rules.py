"""Rules for the commands of `bash`: a guard against mistakes, as a shell can do anything in ways that no text shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import islice

from understudy.confinement import CommandRule

MAX_SUBSTITUTIONS = 10
MAX_CHARACTERS = 20_000
"""So much of a command line is looked into: a session's process does nothing else meanwhile."""

_SUBSTITUTION = re.compile(r"\$\(|`|[<>]\(")
_ENDS = re.compile(r"[;&|()\n]+")

_STRICTNESS = ("allow", "ask", "deny")


def judge(command: str, rules: Sequence[CommandRule]) -> CommandRule | None:
    """The strictest of what the rules say of the simple commands in a command line; None if they allow all of them.

    The first rule that matches a simple command counts for it. What can't be split into them counts as a whole.
    """
    found: CommandRule | None = None
    for part in simple_commands(command) if rules else ():
        rule = next((rule for rule in rules if fnmatchcase(part, rule.command)), None)
        if rule is None or rule.action == "allow":
            continue
        if found is None or _STRICTNESS.index(rule.action) > _STRICTNESS.index(found.action):
            found = rule
    return found


def simple_commands(command: str) -> list[str]:
    """The simple commands of a command line, each with single spaces between its words, and without quotes and
    assignments before it. What is in a substitution is one, too, quoted or not."""
    text = command[:MAX_CHARACTERS].replace("\\\n", " ")
    inner = islice(_SUBSTITUTION.finditer(text), MAX_SUBSTITUTIONS)
    return [part for start in (0, *(found.end() for found in inner)) for part in _parts(text[start:])]


def _parts(text: str) -> list[str]:
    reader = shlex.shlex(_SUBSTITUTION.sub(";", text), posix=True, punctuation_chars=";&|()\n")
    reader.whitespace, reader.whitespace_split, reader.commenters = " \t\r", True, ""
    try:
        words = list(reader)
    except ValueError:  # a quote that is not closed
        return [part for part in (" ".join(line.split()) for line in _ENDS.split(text)) if part]
    parts: list[list[str]] = [[]]
    for word in words:
        if _ENDS.fullmatch(word):
            parts.append([])
        elif parts[-1] or not re.match(r"\w+=", word):
            parts[-1].append(word)
    return [" ".join(part) for part in parts if part]
