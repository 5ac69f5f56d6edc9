"""Built-in tools for the files of an agent's workspace. See `workspace` for what confines them."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

from understudy.errors import ToolError

from .short_process import import_path, output_of
from .tools import ToolContext, tool
from .workspace import MAX_MATCHES, Workspace, compile_glob, read_lines, refuse_binary

MAX_OUTPUT_CHARACTERS = 45_000
"""Below what `execution` cuts in the middle: these tools stop in time and say how to go on."""

MAX_EDITED_BYTES = 10_000_000
"""A file larger than this is not edited."""

MAX_PATHS = 1_000
SEARCH_SECONDS = 30
"""How long `grep` may search before the kernel ends it."""


@tool(on_crash="rerun")
def read_file(path: str, context: ToolContext, offset: int = 0, limit: int = 2000) -> str:
    """Read a text file of the workspace.

    Args:
        path: Path of the file, relative to the workspace.
        offset: Number of lines to skip.
        limit: Number of lines to return at most.
    """
    if offset < 0 or limit < 1:
        raise ToolError("offset must be 0 or more, limit 1 or more")
    workspace = Workspace(context.workspace)
    location = workspace.resolve(path)
    parts: list[str] = []
    size = number = 0
    with workspace.open_file(location) as stream:
        refuse_binary(stream, workspace.shown(location))
        for number, line in enumerate(read_lines(stream)):
            if number < offset:
                continue
            text = line.decode(errors="replace")
            if number >= offset + limit or size + len(text) > MAX_OUTPUT_CHARACTERS:
                return "".join(parts) + f"[more follows: continue with offset={number}]"
            parts.append(text)
            size += len(text)
    if parts:
        return "".join(parts)
    return "[the file has fewer lines than offset]" if offset else "[the file is empty]"


@tool(on_crash="rerun")
def write_file(path: str, content: str, context: ToolContext) -> str:
    """Create or replace a text file of the workspace, all or nothing. Missing directories are created.

    Args:
        path: Path of the file, relative to the workspace.
        content: The whole new content.
    """
    workspace = Workspace(context.workspace)
    location = workspace.resolve(path)
    data = _encode(content)
    with workspace.changing():
        workspace.replace_file(location, data)
    return f"wrote {len(data)} bytes to {workspace.shown(location)}"


# Not `rerun`: where `new` contains `old`, a second execution would edit again.
@tool(on_crash="report")
def edit_file(path: str, old: str, new: str, context: ToolContext, replace_all: bool = False) -> str:
    """Replace text in a file of the workspace.

    Args:
        path: Path of the file, relative to the workspace.
        old: The exact text to replace, with its white space. It must occur exactly once, unless replace_all is set.
        new: The text to put there.
        replace_all: Replace every occurrence.
    """
    if not old or old == new:
        raise ToolError("old must not be empty, and new must differ from it")
    workspace = Workspace(context.workspace)
    location = workspace.resolve(path)
    with workspace.changing():
        count = _replace(workspace, location, _encode(old), _encode(new), replace_all=replace_all)
    return f"replaced {count} occurrence{'s' if count > 1 else ''} in {workspace.shown(location)}"


def _replace(workspace: Workspace, location: Path, found: bytes, wanted: bytes, *, replace_all: bool) -> int:
    """Replace in bytes: whatever else is in the file, in any encoding and with any line ends, stays as it is. How often
    it was replaced."""
    shown = workspace.shown(location)
    with workspace.open_file(location) as stream:
        refuse_binary(stream, shown)
        data = stream.read(MAX_EDITED_BYTES + 1)
    if len(data) > MAX_EDITED_BYTES:
        raise ToolError(f"{shown}: is larger than {MAX_EDITED_BYTES} bytes, which is too large to edit")
    count = data.count(found)
    if count == 0:
        hint = "; the new text is there already" if wanted and wanted in data else ""
        raise ToolError(f"{shown}: the old text does not occur in it{hint}. Read the file and copy the text exactly")
    if count > 1 and not replace_all:
        raise ToolError(
            f"{shown}: the old text occurs {count} times. Give more of its surroundings, or set replace_all"
        )
    workspace.replace_file(location, data.replace(found, wanted))
    return count


@tool(on_crash="rerun")
def glob(pattern: str, context: ToolContext, path: str = ".") -> str:
    """List files of the workspace whose path matches a pattern. Links and generated directories are left out.

    Args:
        pattern: Such as `*.py`, or `**/*.py` to look in all directories below.
        path: Directory to start from, relative to the workspace.
    """
    workspace = Workspace(context.workspace)
    start = workspace.existing(path)
    if not workspace.is_directory(start):
        raise ToolError(f"{workspace.shown(start)}: is not a directory")
    matches = compile_glob(pattern)
    found = (workspace.shown(file) for file in workspace.walk(start) if matches(file.relative_to(start).parts))
    return _listing(list(islice(found, MAX_PATHS + 1)), MAX_PATHS, "files")


@tool(on_crash="rerun")
async def grep(
    pattern: str, context: ToolContext, path: str = ".", glob: str | None = None, ignore_case: bool = False
) -> str:
    """Search the text files of the workspace, line by line, and return matches as `path:line: text`.

    Args:
        pattern: Regular expression in Python's syntax.
        path: File or directory to search, relative to the workspace.
        glob: Only files that match this pattern, such as `*.py` (anywhere) or `src/**/*.py`.
        ignore_case: Ignore upper and lower case.
    """
    workspace = Workspace(context.workspace)
    start = workspace.existing(path)
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ToolError(f"the pattern is not a regular expression: {error}") from None
    request = {"root": str(workspace.root), "start": str(start), "pattern": pattern, "glob": glob}
    return await _search_process({**request, "ignore_case": ignore_case})


# A regular expression can take exponential time and holds the GIL all the while: within the frame it would stop the
# event loop and every timeout with it. A process can be ended from outside; SIGALRM ends it even if its frame is gone.
_SEARCH = f"""
import json, signal, sys
signal.alarm({SEARCH_SECONDS})
request = json.load(sys.stdin)
sys.path[:] = request.pop("import_path")
from understudy.actors.workspace import search
json.dump(search(**request), sys.stdout)
"""


async def _search_process(request: dict[str, Any]) -> str:
    output = await output_of(
        _SEARCH, json.dumps({**request, "import_path": import_path()}).encode(), failed="the search failed",
        too_long=f"the search took longer than {SEARCH_SECONDS} s: use a simpler pattern or a smaller path",
    )  # fmt: skip
    return _listing(json.loads(output), MAX_MATCHES, "matches")


def _listing(found: list[str], limit: int, what: str) -> str:
    """Lines, with a note where there are more than `limit`, or more than fit."""
    lines: list[str] = []
    size = 0
    for line in found[:limit]:
        size += len(line) + 1
        if size > MAX_OUTPUT_CHARACTERS:
            break
        lines.append(line)
    if len(lines) < len(found):
        lines.append(f"[more {what} are not shown: narrow the pattern or the path]")
    return "\n".join(lines) or f"no {what}"


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ToolError("the text contains half of a surrogate pair, which no file can hold as UTF-8") from None
