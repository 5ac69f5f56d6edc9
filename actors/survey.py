"""The tools of the job "survey a directory", and the report made from their results.

Every number is a function of the files alone, so a survey whose processes are killed in the middle gives the same
report, byte for byte. What a tool returns carries a checksum: a model that passes results on can't change them
unnoticed. `survey_directly` counts the same in another way, without agents, to check a report.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import re
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from understudy.errors import ToolError

from .survey_languages import BINARY, DEFINITIONS, MARKERS, UNREADABLE, language_of
from .survey_report import render_report
from .tools import ToolContext, tool
from .workspace import SKIPPED_DIRECTORIES, Workspace

MAX_PARTS = 32
"""Directories beyond this many share the part `.` with the files at the top."""

MAX_FILES = 20_000
"""Files of one part that are looked at; the report says when there are more."""

MAX_READ_BYTES = 1_000_000
"""Larger files are measured, but not searched for definitions and TODOs."""

MAX_LARGEST = 5
MAX_NAMES = 8
MAX_TODOS = 8
MAX_TEXT = 100
"""Characters shown of a TODO's line."""

KINDS = ("measure", "definitions", "todos")


@tool(on_crash="rerun")
def survey_parts(context: ToolContext) -> str:
    """List the parts of the workspace that are surveyed separately: its directories, and "." for what is left."""
    root = Workspace(context.workspace).root
    return _dump({"directory": root.name, "parts": list_parts(root)})


@tool(on_crash="rerun", timeout=600)
def measure(path: str, context: ToolContext) -> str:
    """Count the files, bytes and lines of a part, by language, and name its largest files.

    Args:
        path: The part, exactly as it was given to you.
    """
    part = _Part(context.workspace, path)
    languages: dict[str, Counter[str]] = {}
    sizes: list[tuple[int, str]] = []
    total: Counter[str] = Counter()
    for file in part.files():
        size, lines, language = part.look_at(file)
        counted = {"files": 1, "bytes": size, "lines": lines}
        total.update(counted)
        languages.setdefault(language, Counter()).update(counted)
        sizes.append((-size, part.workspace.shown(file)))
    largest = [{"file": name, "bytes": -size} for size, name in sorted(sizes)[:MAX_LARGEST]]
    return part.result(
        "measure",
        **{name: total[name] for name in ("files", "bytes", "lines")},
        languages={name: dict(languages[name]) for name in sorted(languages)},
        largest=largest,
        unreadable_directories=part.unreadable_directories,
        more_files=part.more_files,
    )


@tool(on_crash="rerun", timeout=600)
def definitions(path: str, context: ToolContext) -> str:
    """Count the public functions, classes and types that a part defines, by language, and name the first ones.

    Args:
        path: The part, exactly as it was given to you.
    """
    part = _Part(context.workspace, path)
    found: dict[str, list[str]] = {}
    unparsable = 0
    for _, language, data in part.texts():
        if language == "Python":
            names = _python_names(data)
            unparsable += names is None
        else:
            pattern = DEFINITIONS.get(language)
            names = [match[1].decode() for match in pattern.finditer(data)] if pattern else []
        if names:
            found.setdefault(language, []).extend(names)
    return part.result(
        "definitions",
        count=sum(len(names) for names in found.values()),
        languages={name: len(found[name]) for name in sorted(found)},
        names={name: [_cut(one) for one in sorted(set(found[name]))[:MAX_NAMES]] for name in sorted(found)},
        unparsable=unparsable,
        too_large=part.too_large,
    )


@tool(on_crash="rerun", timeout=600)
def todos(path: str, context: ToolContext) -> str:
    """Count the lines of a part that are marked TODO, FIXME or XXX, and quote the first ones.

    Args:
        path: The part, exactly as it was given to you.
    """
    part = _Part(context.workspace, path)
    counts: Counter[str] = Counter()
    quoted = []
    for file, _, data in part.texts():
        for match in MARKERS.finditer(data):
            counts[match[2].decode()] += 1
            if len(quoted) < MAX_TODOS:
                number = data.count(b"\n", 0, match.start()) + 1
                quoted.append({"file": part.workspace.shown(file), "line": number, "text": _quote(match[0])})
    return part.result("todos", count=counts.total(), markers=dict(sorted(counts.items())), first=quoted)


@tool(on_crash="rerun")
def merge_report(parts: list[Any], context: ToolContext) -> str:
    """Merge what the surveyors answered into the report. Parts that are missing or were altered are named in it.

    Args:
        parts: Each surveyor's answer, exactly as it came.
    """
    root = Workspace(context.workspace).root
    found: dict[str, dict[str, Any]] = {}
    for answer in parts:
        results = _read_answer(answer)
        if results is not None:
            found.setdefault(results["part"], results)
    return render_report(root.name, [found.get(name, {"part": name}) for name in list_parts(root)])


def list_parts(root: Path) -> list[str]:
    """The parts of a directory: `.`, then its visible directories by name, as far as there may be so many."""
    try:
        with os.scandir(root) as scan:
            names = sorted(entry.name for entry in scan if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise ToolError(f"the directory can't be listed: {error.strerror}") from None
    # A name that can't be shown as it is could not be passed on either.
    return [".", *[name for name in names if _visible(name) and name.isprintable()][: MAX_PARTS - 1]]


def _visible(directory: str) -> bool:
    return not directory.startswith(".") and directory not in SKIPPED_DIRECTORIES


class _Part:
    """One part of a workspace: its files in a fixed order, and what could not be looked at."""

    def __init__(self, workspace: str | None, path: str) -> None:
        self.workspace = Workspace(workspace)
        self.start = self.workspace.existing(path)
        if not self.start.is_dir():
            raise ToolError(f"{self.workspace.shown(self.start)}: is not a directory")
        self.name = self.start.relative_to(self.workspace.root).as_posix()
        # The top part is what no other part covers.
        self._others = set(list_parts(self.start)) if self.name == "." else set()
        self.unreadable_directories = 0
        self.too_large = 0
        self.more_files = False

    def files(self) -> Iterator[Path]:
        """Its regular files, at most `MAX_FILES`; hidden and generated directories, and links, are left out."""
        walk = self._walk()
        yield from islice(walk, MAX_FILES)
        self.more_files = next(walk, None) is not None

    def _walk(self) -> Iterator[Path]:
        for folder, directories, names in os.walk(self.start, onerror=self._unreadable):
            skipped = self._others if folder == str(self.start) else ()
            directories[:] = sorted(name for name in directories if _visible(name) and name not in skipped)
            for name in sorted(names):
                file = Path(folder, name)
                if file.is_file() and not file.is_symlink():
                    yield file

    def _unreadable(self, _: OSError) -> None:
        self.unreadable_directories += 1

    def look_at(self, file: Path) -> tuple[int, int, str]:
        """Size in bytes, lines, language. A last line without an end counts as one."""
        try:
            size = os.lstat(file).st_size
        except OSError:
            return 0, 0, UNREADABLE  # gone meanwhile
        try:
            with self.workspace.open_file(file) as stream:
                piece = stream.read(8192)
                if b"\0" in piece:
                    return size, 0, BINARY
                lines, last = 0, b"\n"
                while piece:
                    lines += piece.count(b"\n")
                    last = piece[-1:]
                    piece = stream.read(1 << 20)
        except (ToolError, OSError):
            return size, 0, UNREADABLE
        return size, lines + (last != b"\n"), language_of(file.name)

    def texts(self) -> Iterator[tuple[Path, str, bytes]]:
        """Its text files up to `MAX_READ_BYTES`: file, language, content."""
        for file in self.files():
            try:
                with self.workspace.open_file(file) as stream:
                    data = stream.read(MAX_READ_BYTES + 1)
            except (ToolError, OSError):
                continue  # `measure` counts it
            if b"\0" in data[:8192]:
                continue
            if len(data) > MAX_READ_BYTES:
                self.too_large += 1
                continue
            yield file, language_of(file.name), data

    def result(self, kind: str, **facts: Any) -> str:
        """The facts as JSON, with what identifies and seals them."""
        body = {"kind": kind, "part": self.name, **facts}
        return _dump({**body, "check": _checksum(body)})


def _python_names(data: bytes) -> list[str] | None:
    """Public functions and classes at the top level of a module; None if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(data).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=6).hexdigest()


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _quote(line: bytes) -> str:
    text = " ".join(line.decode(errors="replace").split())
    return _cut("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))


def _read_answer(answer: Any) -> dict[str, Any] | None:
    """A surveyor's results by kind, with their part; None if one is missing or is not as its tool returned it."""
    if isinstance(answer, str):
        try:
            # Models like to put JSON into a code block, or a sentence before it.
            answer = json.loads(answer[answer.find("{") : answer.rfind("}") + 1])
        except ValueError:
            return None
    if not isinstance(answer, dict):
        return None
    found: dict[str, Any] = {}
    for kind in KINDS:
        result = answer.get(kind)
        if not isinstance(result, dict) or result.get("kind") != kind:
            return None
        body = {name: value for name, value in result.items() if name != "check"}
        if result.get("check") != _checksum(body) or found.setdefault("part", result["part"]) != result["part"]:
            return None
        found[kind] = result
    return found


def survey_directly(directory: str) -> str:
    """The report of a directory, counted here and now by simpler means: no walk, parser or counter is shared.

    Holds one file in memory at a time, whatever its size.

    Raises:
        ToolError: it is not a directory that can be listed.
    """
    root = Workspace(directory).root
    names = list_parts(root)
    return render_report(root.name, [_count_directly(root, name, names) for name in names])


def _count_directly(root: Path, name: str, parts: list[str]) -> dict[str, Any]:
    broken: list[Path] = []
    excluded = set(parts) if name == "." else set()
    files = list(islice(_files_directly(root / name, excluded, broken), MAX_FILES + 1))
    shown = Workspace(str(root)).shown
    languages: dict[str, dict[str, int]] = {}
    public: dict[str, list[str]] = {}
    marked: list[tuple[str, dict[str, Any]]] = []
    unparsable = too_large = 0
    for file in files[:MAX_FILES]:
        try:
            data = file.read_bytes()
            language = BINARY if 0 in data[:8192] else language_of(file.name)
        except OSError:
            data, language = b"", UNREADABLE
        rows = data.split(b"\n") if language not in (BINARY, UNREADABLE) else [b""]
        row = languages.setdefault(language, {"files": 0, "bytes": 0, "lines": 0})
        row["files"] += 1
        row["bytes"] += file.lstat().st_size
        row["lines"] += len(rows) - (rows[-1] == b"")
        if language in (BINARY, UNREADABLE) or len(data) > MAX_READ_BYTES:
            too_large += language not in (BINARY, UNREADABLE)
            continue
        found = _names_directly(language, data, rows)
        unparsable += found is None
        if found:
            public.setdefault(language, []).extend(found)
        for number, line in enumerate(rows, 1):
            words = [word for word in re.findall(rb"\w+", line) if word in (b"TODO", b"FIXME", b"XXX")]
            if words:
                marked.append((words[0].decode(), {"file": shown(file), "line": number, "text": _quote(line)}))
    ordered = sorted(files[:MAX_FILES], key=lambda file: (-file.lstat().st_size, shown(file)))
    measured = {
        **{unit: sum(row[unit] for row in languages.values()) for unit in ("files", "bytes", "lines")},
        "languages": languages,
        "largest": [{"file": shown(file), "bytes": file.lstat().st_size} for file in ordered[:MAX_LARGEST]],
        "unreadable_directories": len(broken),
        "more_files": len(files) > MAX_FILES,
    }
    defined = {
        "count": sum(map(len, public.values())),
        "languages": {language: len(found) for language, found in public.items()},
        "names": {language: [_cut(one) for one in sorted(set(found))[:MAX_NAMES]] for language, found in public.items()},
        "unparsable": unparsable,
        "too_large": too_large,
    }
    noted = {
        "count": len(marked),
        "markers": {word: sum(marker == word for marker, _ in marked) for word in sorted({m for m, _ in marked})},
        "first": [row for _, row in marked[:MAX_TODOS]],
    }
    return {"part": name, "measure": measured, "definitions": defined, "todos": noted}


def _files_directly(folder: Path, excluded: set[str], broken: list[Path]) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError:
        broken.append(folder)
        return
    plain = [entry for entry in entries if not entry.is_symlink()]
    yield from (entry for entry in plain if entry.is_file())
    for entry in plain:
        if entry.is_dir() and _visible(entry.name) and entry.name not in excluded:
            yield from _files_directly(entry, set(), broken)


def _names_directly(language: str, data: bytes, rows: list[bytes]) -> list[str] | None:
    if language != "Python":
        pattern = DEFINITIONS.get(language)
        return [match[1].decode() for row in rows if (match := pattern.match(row))] if pattern else []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "<survey>", "exec", dont_inherit=True, flags=ast.PyCF_ONLY_AST)
        tokens = list(tokenize.tokenize(io.BytesIO(data).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return None
    return _definition_tokens(tokens)


def _definition_tokens(tokens: list[tokenize.TokenInfo]) -> list[str]:
    """Names behind `def`, `class` and `async def` that begin a line at the margin."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.INDENT, tokenize.DEDENT)
    kept = [token for token in tokens if token.type not in ignored]
    found = []
    for index, token in enumerate(kept):
        begins = token.start[1] == 0 and (index == 0 or kept[index - 1].type == tokenize.NEWLINE)
        if begins and token.string in ("def", "class", "async"):
            name = kept[index + (2 if token.string == "async" else 1)].string
            if not name.startswith("_") and kept[index + 1].string in (name, "def"):
                found.append(name)
    return found
