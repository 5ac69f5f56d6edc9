"""The report of a survey: one pure function that renders it, and a second way to count what it says."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from understudy.actors.workspace import Workspace

from .rules import (
    BINARY,
    DEFINITIONS,
    MAX_FILES,
    MAX_LARGEST,
    MAX_NAMES,
    MAX_READ_BYTES,
    MAX_TODOS,
    OTHER,
    PROBE_BYTES,
    UNREADABLE,
    cut,
    language_of,
    list_parts,
    quote,
    visible,
)

LARGEST_SHOWN = 10
TODOS_SHOWN = 40


def render_report(directory: str, parts: list[dict[str, Any]]) -> str:
    """The report in Markdown. A pure function: the same parts always give the same bytes.

    Args:
        directory: name of the directory, for the title.
        parts: `{"part", "measure", "definitions", "todos"}` each, the last three as the tools count them; a part
            without these is reported as not surveyed.
    """
    done = [part for part in parts if "measure" in part]
    sections = [
        f"# Survey of {_plain(directory)}",
        _summary(done),
        _parts_table(parts),
        _languages_table(done),
        _largest(done),
        _definitions(done),
        _todos(done),
        _notes(parts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _total(parts: list[dict[str, Any]], kind: str, name: str) -> int:
    return sum(part[kind][name] for part in parts)


def _summary(done: list[dict[str, Any]]) -> str:
    files, size, lines = (_total(done, "measure", unit) for unit in ("files", "bytes", "lines"))
    public, marked = _total(done, "definitions", "count"), _total(done, "todos", "count")
    return (
        f"{files:,} files with {size:,} bytes and {lines:,} lines of text in {len(done)} parts; "
        f"{public:,} public definitions, {marked:,} lines marked as to do."
    )


def _parts_table(parts: list[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        name = _code(part["part"])
        if "measure" not in part:
            rows.append([name, *["–"] * 6])
            continue
        measured = part["measure"]
        rows.append(
            [name, *(f"{measured[unit]:,}" for unit in ("files", "bytes", "lines")), _main_language(measured),
             f"{part['definitions']['count']:,}", f"{part['todos']['count']:,}"]
        )  # fmt: skip
    header = ["part", "files", "bytes", "lines", "mostly", "public definitions", "to do"]
    return "## Parts\n\n" + _table(header, rows, texts=(0, 4))


def _main_language(measured: dict[str, Any]) -> str:
    known = {
        name: row["lines"] for name, row in measured["languages"].items() if name not in (BINARY, UNREADABLE, OTHER)
    }
    return min(known, key=lambda name: (-known[name], name)) if known else "–"


def _languages_table(done: list[dict[str, Any]]) -> str:
    totals: dict[str, Counter[str]] = {}
    for part in done:
        for name, row in part["measure"]["languages"].items():
            totals.setdefault(name, Counter()).update(row)
        for name, count in part["definitions"]["languages"].items():
            totals.setdefault(name, Counter()).update({"public": count})
    if not totals:
        return ""
    ordered = sorted(totals, key=lambda name: (-totals[name]["lines"], -totals[name]["bytes"], name))
    rows = [[name, *(f"{totals[name][unit]:,}" for unit in ("files", "bytes", "lines", "public"))] for name in ordered]
    return "## Languages\n\n" + _table(["language", "files", "bytes", "lines", "public definitions"], rows, texts=(0,))


def _largest(done: list[dict[str, Any]]) -> str:
    found = sorted((-row["bytes"], row["file"]) for part in done for row in part["measure"]["largest"])
    rows = [[_code(name), f"{-size:,}"] for size, name in found[:LARGEST_SHOWN]]
    return "## Largest files\n\n" + _table(["file", "bytes"], rows, texts=(0,)) if rows else ""


def _definitions(done: list[dict[str, Any]]) -> str:
    lines = []
    for part in done:
        defined = part["definitions"]
        for language in sorted(defined["languages"]):
            count, names = defined["languages"][language], defined["names"][language]
            more = ", …" if count > len(names) else ""
            lines.append(f"- {_code(part['part'])}, {language}, {count:,}: {', '.join(map(_code, names))}{more}")
    return "## Public definitions\n\n" + "\n".join(lines) if lines else ""


def _todos(done: list[dict[str, Any]]) -> str:
    markers: Counter[str] = Counter()
    quoted = []
    for part in done:
        markers.update(part["todos"]["markers"])
        quoted += part["todos"]["first"]
    if not markers:
        return ""
    counts = ", ".join(f"{name} {markers[name]:,}" for name in sorted(markers))
    shown = quoted[:TODOS_SHOWN]
    lines = [f"- {_code(row['file'] + ':' + str(row['line']))}: {_code(row['text'])}" for row in shown]
    rest = markers.total() - len(shown)
    lines += [f"- … and {rest:,} more"] if rest else []
    return f"## To do\n\n{counts}\n\n" + "\n".join(lines)


def _notes(parts: list[dict[str, Any]]) -> str:
    notes = []
    for part in parts:
        name = _code(part["part"])
        if "measure" not in part:
            notes.append(f"- {name} was not surveyed: no unaltered result of it came back.")
            continue
        measured, defined = part["measure"], part["definitions"]
        unreadable = measured["languages"].get(UNREADABLE, {}).get("files", 0)
        facts = [
            (unreadable, "files could not be read"),
            (measured["unreadable_directories"], "directories could not be listed"),
            (defined["unparsable"], "Python files are not valid Python"),
            (defined["too_large"], f"text files over {MAX_READ_BYTES:,} bytes were only measured"),
        ]
        notes += [f"- {name}: {count:,} {text}." for count, text in facts if count]
        if measured["more_files"]:
            notes.append(f"- {name} has more than {MAX_FILES:,} files: the rest is not counted.")
    return "## Notes\n\n" + "\n".join(notes) if notes else ""


def _table(header: list[str], rows: list[list[str]], *, texts: tuple[int, ...]) -> str:
    rule = ["---" if index in texts else "---:" for index in range(len(header))]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *escaped])


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"


def _plain(text: str) -> str:
    return text if text.isprintable() else repr(text)


def survey_directly(directory: str) -> str:
    """The report of a directory, counted here and now by other means than the tools': a check on what agents reported.

    What counts is shared (`survey_rules`); the walk, the line counter, the parser and the sums are not.

    Raises:
        ToolError: it is not a directory that can be listed.
    """
    root = Workspace(directory).root
    names = list_parts(root)
    return render_report(root.name, [_count(root, name, set(names)) for name in names])


def _count(root: Path, part: str, parts: set[str]) -> dict[str, Any]:
    broken: list[Path] = []
    files = list(islice(_files(root / part, parts if part == "." else set(), broken), MAX_FILES + 1))
    shown = Workspace(str(root)).shown
    languages: dict[str, dict[str, int]] = {}
    public: dict[str, list[str]] = {}
    sizes: list[tuple[int, str]] = []
    marked: list[dict[str, Any]] = []
    unparsable = too_large = 0
    for file in files[:MAX_FILES]:
        language, lines, searched = _contents(file)
        size = os.lstat(file).st_size
        row = languages.setdefault(language, {"files": 0, "bytes": 0, "lines": 0})
        row["files"], row["bytes"], row["lines"] = row["files"] + 1, row["bytes"] + size, row["lines"] + lines
        sizes.append((-size, shown(file)))
        if searched is None:
            too_large += language not in (BINARY, UNREADABLE)
            continue
        names = _names(language, searched)
        unparsable += names is None
        if names:
            public[language] = public.get(language, []) + names
        marked += _marked(shown(file), searched)
    markers = [row["marker"] for row in marked]
    return {
        "part": part,
        "measure": {
            **{unit: sum(row[unit] for row in languages.values()) for unit in ("files", "bytes", "lines")},
            "languages": languages,
            "largest": [{"file": name, "bytes": -size} for size, name in sorted(sizes)[:MAX_LARGEST]],
            "unreadable_directories": len(broken),
            "more_files": len(files) > MAX_FILES,
        },
        "definitions": {
            "count": sum(len(names) for names in public.values()),
            "languages": {language: len(names) for language, names in public.items()},
            "names": {key: [cut(name) for name in sorted(set(names))[:MAX_NAMES]] for key, names in public.items()},
            "unparsable": unparsable,
            "too_large": too_large,
        },
        "todos": {
            "count": len(marked),
            "markers": {word: markers.count(word) for word in set(markers)},
            "first": marked[:MAX_TODOS],
        },
    }


def _files(folder: Path, excluded: set[str], broken: list[Path]) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError:
        broken.append(folder)
        return
    plain = [entry for entry in entries if not os.path.islink(entry)]
    yield from (entry for entry in plain if os.path.isfile(entry))
    for entry in plain:
        if os.path.isdir(entry) and visible(entry.name) and entry.name not in excluded:
            yield from _files(entry, set(), broken)


def _contents(file: Path) -> tuple[str, int, bytes | None]:
    """Language, lines, and the content if it is searched."""
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_READ_BYTES + 1)
            if 0 in data[:PROBE_BYTES]:
                return BINARY, 0, None
            stream.seek(0)
            lines = sum(1 for _ in stream)
    except OSError:
        return UNREADABLE, 0, None
    return language_of(file.name), lines, data if len(data) <= MAX_READ_BYTES else None


def _marked(file: str, data: bytes) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(data.split(b"\n"), 1):
        words = [word for word in re.findall(rb"\w+", line) if word in (b"TODO", b"FIXME", b"XXX")]
        if words:
            yield {"marker": words[0].decode(), "file": file, "line": number, "text": quote(line)}


def _names(language: str, data: bytes) -> list[str] | None:
    """Public names defined in a file; None for Python that isn't valid."""
    if language != "Python":
        pattern = DEFINITIONS.get(language)
        return [match[1].decode() for line in data.split(b"\n") if (match := pattern.match(line))] if pattern else []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "<survey>", "exec", flags=ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError:
        encoding = "latin-1"  # the compiler is less strict about the line that declares the encoding
    # It also takes a lone carriage return for the end of a line: so does newline=None.
    lines = io.StringIO(data.decode(encoding, errors="replace"), newline=None)
    try:
        tokens = list(tokenize.generate_tokens(lines.readline))
    except (SyntaxError, tokenize.TokenError):
        return None
    found = []
    depth, before = 0, tokenize.NEWLINE
    unseen = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)
    kept = [token for token in tokens if token.type not in unseen]
    for index, token in enumerate(kept):
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            depth += 1 if token.type == tokenize.INDENT else -1
            continue
        if depth == 0 and before == tokenize.NEWLINE and token.string in ("def", "class", "async"):
            words = [following.string for following in kept[index : index + 3]]
            keyword, name = words[1:] if words[0] == "async" else words[:2]
            if keyword in ("def", "class") and not name.startswith("_"):
                found.append(name)
        before = token.type
    return found
