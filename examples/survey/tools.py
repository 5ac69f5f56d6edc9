"""The tools of the job "survey a directory", and the report made from their results.

Every number is a function of the files alone, so a survey whose processes are killed in the middle gives the same
report, byte for byte. What a tool returns carries a checksum: a model that passes results on can't change them
unnoticed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from understudy.actors.tools import ToolContext, tool
from understudy.actors.workspace import Workspace
from understudy.errors import ToolError

from .report import render_report
from .report import survey_directly as survey_directly
from .rules import (
    BINARY,
    DEFINITIONS,
    MARKERS,
    MAX_FILES,
    MAX_LARGEST,
    MAX_NAMES,
    MAX_READ_BYTES,
    MAX_TODOS,
    PROBE_BYTES,
    UNREADABLE,
    cut,
    language_of,
    list_parts,
    quote,
    visible,
)

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
        names={name: [cut(one) for one in sorted(set(found[name]))[:MAX_NAMES]] for name in sorted(found)},
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
    quoted: list[dict[str, Any]] = []
    for file, _, data in part.texts():
        for match in MARKERS.finditer(data):
            counts[match[1].decode()] += 1
            if len(quoted) < MAX_TODOS:
                number = data.count(b"\n", 0, match.start()) + 1
                quoted.append({"file": part.workspace.shown(file), "line": number, "text": quote(match[0])})
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
            directories[:] = sorted(name for name in directories if visible(name) and name not in skipped)
            for name in sorted(names):
                file = Path(folder, name)
                if os.path.isfile(file) and not os.path.islink(file):
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
                piece = stream.read(PROBE_BYTES)
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
            if b"\0" in data[:PROBE_BYTES]:
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
