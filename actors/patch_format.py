"""The patch format that coding models know: what a patch says, and a file's text after one. Pure.

*** Begin Patch
*** Update File: src/a.py
@@ def f(x):
 return x
-# old
+# new
*** Add File: notes.txt
+the only line
*** Delete File: b.py
*** End Patch
"""

from __future__ import annotations

from dataclasses import dataclass

from understudy.errors import ToolError

BEGIN, END = "*** Begin Patch", "*** End Patch"
ADD, UPDATE, DELETE = "*** Add File: ", "*** Update File: ", "*** Delete File: "
MOVE, END_OF_FILE = "*** Move to: ", "*** End of File"
KEEP, REMOVE, INSERT = " ", "-", "+"


@dataclass(frozen=True)
class Chunk:
    """One place of a file that is changed.

    Attributes:
        headers: lines of the file behind which the place is, one behind the other (`@@ …`).
        lines: each with what is done about it: `KEEP`, `REMOVE` or `INSERT`.
        at_end: the place is the end of the file.
        number: line of the patch at which it begins, for messages.
    """

    headers: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]
    at_end: bool
    number: int

    def reversed(self) -> Chunk:
        """The chunk that undoes this one."""
        swapped = {KEEP: KEEP, REMOVE: INSERT, INSERT: REMOVE}
        lines = tuple((swapped[kind], text) for kind, text in self.lines)
        return Chunk(self.headers, lines, self.at_end, self.number)


@dataclass(frozen=True)
class Change:
    """What a patch does to one file.

    Attributes:
        kind: `ADD`, `UPDATE` or `DELETE`.
        content: of a file that is added.
        move_to: the path that an updated file gets; None if it keeps its own.
    """

    kind: str
    path: str
    content: str = ""
    chunks: tuple[Chunk, ...] = ()
    move_to: str | None = None


def parse_patch(text: str) -> list[Change]:
    """The changes of a patch, in its order. Line ends may be CRLF.

    Raises:
        ToolError: the text is no such patch; the message has the line and what was expected there.
    """
    return _Parser(text).changes()


class _Parser:
    def __init__(self, text: str) -> None:
        self._lines = [line.removesuffix("\r") for line in text.strip("\r\n").split("\n")]
        self._at = 0

    def changes(self) -> list[Change]:
        if self._next().rstrip() != BEGIN:
            raise self._problem(f"a patch begins with the line `{BEGIN}`")
        self._at += 1
        found: list[Change] = []
        while self._next().rstrip() != END:
            found.append(self._change())
        if self._at + 1 < len(self._lines):
            self._at += 1
            raise self._problem(f"nothing may follow `{END}`")
        if not found:
            raise self._problem("the patch changes no file")
        paths = [path for change in found for path in (change.path, change.move_to) if path is not None]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise ToolError(f"the patch names {twice[0]} twice: put all that is done to a file into one section")
        return found

    def _next(self) -> str:
        if self._at >= len(self._lines):
            raise self._problem(f"the line `{END}` is missing")
        return self._lines[self._at]

    def _problem(self, what: str) -> ToolError:
        line = self._lines[self._at] if self._at < len(self._lines) else ""
        return ToolError(f"line {self._at + 1} of the patch ({line[:120]!r}): {what}. Nothing was changed")

    def _change(self) -> Change:
        line = self._next()
        kind = next((kind for kind in (ADD, UPDATE, DELETE) if line.startswith(kind)), None)
        if kind is None:
            raise self._problem(f"expected `{ADD}PATH`, `{UPDATE}PATH`, `{DELETE}PATH` or `{END}`")
        path = self._path(kind)
        if kind == DELETE:
            return Change(kind, path)
        if kind == ADD:
            return Change(kind, path, content=self._content())
        move_to = self._path(MOVE) if self._next().startswith(MOVE) else None
        chunks = []
        while not self._is_section(self._next()):
            chunks.append(self._chunk())
        if not chunks and move_to is None:
            raise self._problem(f"the section of {path} has no changes")
        return Change(kind, path, chunks=tuple(chunks), move_to=move_to)

    def _path(self, keyword: str) -> str:
        path = self._next()[len(keyword) :].strip()
        if not path:
            raise self._problem("the path is missing")
        self._at += 1
        return path

    def _content(self) -> str:
        lines = []
        while not self._is_section(line := self._next()):
            if not line.startswith(INSERT):
                raise self._problem(f"each line of a file that is added begins with `{INSERT}`")
            lines.append(line[1:] + "\n")
            self._at += 1
        return "".join(lines)

    def _chunk(self) -> Chunk:
        number, headers, lines = self._at + 1, [], list[tuple[str, str]]()
        while self._next().startswith("@@"):
            header = self._next()[2:].strip()
            headers += [header] if header else []
            self._at += 1
        while not self._is_section(line := self._next()) and not line.startswith("@@"):
            if line.rstrip() == END_OF_FILE:
                break
            if line and line[0] not in (KEEP, REMOVE, INSERT):
                raise self._problem("a line begins with a space (kept), `-` (removed) or `+` (inserted), or with `@@`")
            lines.append((line[0], line[1:]) if line else (KEEP, ""))  # models leave the space of empty lines out
            self._at += 1
        at_end = self._next().rstrip() == END_OF_FILE
        if all(kind == KEEP for kind, _ in lines):
            raise self._problem("this place has no line that is removed or inserted")
        self._at += at_end
        return Chunk(tuple(headers), tuple(lines), at_end, number)

    def _is_section(self, line: str) -> bool:
        return line.startswith((ADD, UPDATE, DELETE)) or line.rstrip() == END


def patched(text: str, chunks: tuple[Chunk, ...], shown: str) -> str:
    """A file's text with its chunks applied, in their order. Lines that are kept stay as the file has them, and lines
    that are inserted end as the file's own.

    A chunk's kept and removed lines must be in the file, one behind the other, behind the headers and the chunk before.
    They are compared exactly; where that finds nothing, without white space at the ends of lines. Without a header
    there must be one such place only.

    Raises:
        ToolError: there is no such place, or more than one.
    """
    lines = text.split("\n")
    ends_with_newline = lines[-1] == ""
    if ends_with_newline:
        lines.pop()
    ending = "\r" if lines and lines[0].endswith("\r") else ""
    made: list[str] = []
    position = 0
    for chunk in chunks:
        place = _place(lines, chunk, position, shown)
        made += lines[position:place]
        position = place
        for kind, line in chunk.lines:
            if kind == INSERT:
                made.append(line + ending)
            else:
                made += [lines[position]] if kind == KEEP else []
                position += 1
    made += lines[position:]
    return "\n".join(made) + ("\n" if made and (ends_with_newline or not text) else "")


def _place(lines: list[str], chunk: Chunk, start: int, shown: str) -> int:
    """Where a chunk's kept and removed lines begin."""
    wanted = [line for kind, line in chunk.lines if kind != INSERT]
    for header in chunk.headers:
        found = next((at for at in range(start, len(lines)) if lines[at].strip() == header), None)
        if found is None:
            raise _missing(shown, chunk, f"the line of its `@@ {header[:120]}` is not in the file behind line {start}")
        start = found
    if chunk.at_end:
        candidates = [max(start, len(lines) - len(wanted))]
    elif wanted:
        candidates = list(range(start, len(lines) - len(wanted) + 1))
    elif chunk.headers:
        return start + 1
    elif not lines:
        return 0
    else:
        raise _missing(shown, chunk, f"it does not say where: add lines that are kept, a header, or `{END_OF_FILE}`")
    for same in (str.__str__, str.rstrip):
        pattern = [same(line) for line in wanted]
        compared = [same(line) for line in lines[start:]]
        matches = [at for at in candidates if compared[at - start : at - start + len(pattern)] == pattern]
        if len(matches) > 1 and not chunk.headers:
            places = ", ".join(str(at + 1) for at in matches[:5])
            raise _missing(
                shown, chunk, f"its lines are at {len(matches)} places (lines {places}): add lines that are kept or a "
                "header (`@@ LINE`), so that one place is meant",
            )  # fmt: skip
        if matches:
            return matches[0]
    where = "at the end of the file" if chunk.at_end else f"behind line {start}" if start else "in the file"
    raise _missing(
        shown, chunk, f"its kept and removed lines are not {where}, beginning with {wanted[0][:120]!r}. Read the file "
        "and copy them exactly",
    )  # fmt: skip


def _missing(shown: str, chunk: Chunk, what: str) -> ToolError:
    return ToolError(f"{shown}: the place at line {chunk.number} of the patch: {what}. Nothing was changed")
