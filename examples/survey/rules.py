"""What a survey counts: which files, which languages, what is a public definition, what is a TODO; and its limits."""

from __future__ import annotations

import os
import re
from pathlib import Path

from understudy.actors.workspace import SKIPPED_DIRECTORIES
from understudy.errors import ToolError

MAX_PARTS = 32
"""Directories beyond this many share the part `.` with the files at the top."""

MAX_FILES = 20_000
"""Files of one part that are looked at; the report says when there are more."""

MAX_READ_BYTES = 1_000_000
"""Larger files are measured, but not searched for definitions and TODOs."""

PROBE_BYTES = 8_192
"""A file with a NUL in its first so many bytes is binary."""

MAX_LARGEST = 5
MAX_NAMES = 8
MAX_TODOS = 8
MAX_TEXT = 100
"""Characters shown of a name or of a TODO's line."""

BINARY = "(binary)"
UNREADABLE = "(unreadable)"
OTHER = "(other text)"

_SUFFIXES = {
    "Python": "py pyi",
    "JavaScript": "js jsx mjs cjs",
    "TypeScript": "ts tsx mts cts",
    "Go": "go",
    "Rust": "rs",
    "Java": "java",
    "Kotlin": "kt kts",
    "C#": "cs",
    "C": "c h",
    "C++": "cc cpp cxx hpp hh",
    "Swift": "swift",
    "Ruby": "rb",
    "PHP": "php",
    "Shell": "sh bash zsh",
    "SQL": "sql",
    "HTML": "html htm",
    "CSS": "css scss less",
    "Markdown": "md",
    "reStructuredText": "rst",
    "Plain text": "txt",
    "JSON": "json jsonl",
    "YAML": "yaml yml",
    "TOML": "toml",
    "XML": "xml svg",
}
_BY_SUFFIX = {suffix: language for language, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
_BY_NAME = {"Makefile": "Make", "Dockerfile": "Docker"}

_EXPORT = (
    rb"^export[ \t]+(?:default[ \t]+)?(?:declare[ \t]+)?(?:abstract[ \t]+)?(?:async[ \t]+)?"
    rb"(?:function\*?|class|const|let|interface|type|enum)[ \t]+([A-Za-z_$][\w$]*)"
)
_PUBLIC_TYPE = (
    rb"^[ \t]*public[ \t]+(?:(?:abstract|final|static|sealed|partial|data|open)[ \t]+)*"
    rb"(?:class|interface|enum|record|struct|object)[ \t]+([A-Za-z_]\w*)"
)
_PATTERNS = {
    "JavaScript": _EXPORT,
    "TypeScript": _EXPORT,
    "Go": rb"^(?:func[ \t]+(?:\([^)\n]*\)[ \t]*)?|type[ \t]+)([A-Z]\w*)",
    "Rust": rb"^[ \t]*pub[ \t]+(?:(?:async|unsafe|const)[ \t]+)*(?:fn|struct|enum|trait|type|mod)[ \t]+([A-Za-z_]\w*)",
    "Java": _PUBLIC_TYPE,
    "Kotlin": _PUBLIC_TYPE,
    "C#": _PUBLIC_TYPE,
}
DEFINITIONS = {language: re.compile(pattern, re.MULTILINE) for language, pattern in _PATTERNS.items()}
"""What makes a line a public definition, by language: at most one a line, its name in group 1. Python is parsed."""

MARKERS = re.compile(rb"^.*?\b(TODO|FIXME|XXX)\b.*$", re.MULTILINE)
"""A marked line, with its first marker in group 1."""


def language_of(name: str) -> str:
    """The language of a text file, by its name."""
    return _BY_NAME.get(name) or _BY_SUFFIX.get(name.rpartition(".")[2].lower(), OTHER)


def visible(directory: str) -> bool:
    """Whether a directory of this name is surveyed: not hidden, not generated."""
    return not directory.startswith(".") and directory not in SKIPPED_DIRECTORIES


def list_parts(root: Path) -> list[str]:
    """The parts of a directory: `.`, then its visible directories by name, as far as there may be so many.

    Raises:
        ToolError: the directory can't be listed.
    """
    try:
        with os.scandir(root) as scan:
            names = sorted(entry.name for entry in scan if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise ToolError(f"the directory can't be listed: {error.strerror}") from None
    # A name that can't be shown as it is could not be passed on either: such a directory belongs to the part `.`.
    return [".", *[name for name in names if visible(name) and name.isprintable()][: MAX_PARTS - 1]]


def cut(text: str) -> str:
    """At most `MAX_TEXT` characters of a text."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def quote(line: bytes) -> str:
    """A line as it is shown: white space made single, nothing that can't be printed."""
    text = " ".join(line.decode(errors="replace").split())
    return cut("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))
