"""The `apply_patch` tool: several files changed at once, all or nothing, also when its process dies.

A patch of more than one step is written to a journal in the workspace before its first step, under the workspace's
lock. Who finds a journal under the lock knows that its writer is dead, and takes the steps that are left: the next
patch does so, and the function that finds out what became of a call in doubt.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from understudy.errors import ToolError, WorkspaceViolation

from .patch_format import ADD, DELETE, Change, parse_patch, patched
from .tools import ToolContext, tool
from .workspace import TEMPORARY_PREFIX, Workspace

JOURNAL = TEMPORARY_PREFIX + "patch"
"""A file in the workspace's root, there only while a patch is being applied."""

MAX_FILE_BYTES, MAX_PATCHED_BYTES = 10_000_000, 32_000_000
"""A larger file is not patched, and no more in one patch."""

MAX_STEPS = 1_000


@dataclass(frozen=True)
class Step:
    """One file that is written or removed.

    Attributes:
        before, after: its content; None where there is no file.
    """

    path: str
    before: bytes | None
    after: bytes | None


class Pending(msgspec.Struct, frozen=True):
    """A step in the journal: digests of the file's content before and after it, empty for no file, and what is
    written."""

    path: str
    before: str
    after: str
    data: bytes = b""


class Journal(msgspec.Struct, frozen=True):
    """A patch that is being applied.

    Attributes:
        call_key: of the call that does so.
        summary: what it answers.
    """

    call_key: str
    summary: str
    steps: list[Pending]


def find_out(context: ToolContext) -> str:
    """What became of a patch whose process died: it is applied to its end. Raises `ToolError` where nobody can tell."""
    workspace = Workspace(context.workspace)
    with workspace.changing():
        journal = _journal(workspace)
        if journal is not None:
            changed = _finish(workspace, journal)
            if journal.call_key == context.call_key:
                others = f". Others had changed {', '.join(changed)}, which stayed as it is" if changed else ""
                return f"{journal.summary}\n[the agent's process died meanwhile; the patch was then completed{others}]"
        changes = parse_patch(str(context.arguments.get("patch", "")))
        states = {state for change in changes for state in [_state(workspace, change)] if state != "either"}
        if states == {"before"}:
            return _apply(workspace, changes, context.call_key)
        if states == {"after"}:
            return _summary(changes)
    raise ToolError("whether the patch was applied can't be told from its files: read them")


@tool(on_crash=find_out)
def apply_patch(patch: str, context: ToolContext) -> str:
    """Change, add, delete or move several text files of the workspace at once, all or nothing.

    The patch is a text of this form:

    *** Begin Patch
    *** Update File: src/app.py
    @@ def greet():
    -    return "Hi"
    +    return "Hello"
    *** Add File: notes.txt
    +each line begins with a plus
    *** Delete File: old.py
    *** End Patch

    In an update, a line begins with a space if it is kept, with - if it is removed, with + if it is inserted. Give
    about three kept lines around each place; where these are in the file more than once, name a line above the place
    behind @@. A second place begins with another @@ line. To rename a file, put the line *** Move to: PATH below
    *** Update File: PATH. Paths are relative to the workspace.

    Args:
        patch: The patch.
    """
    changes = parse_patch(patch)
    try:
        patch.encode()
    except UnicodeEncodeError:
        raise ToolError("the patch contains half of a surrogate pair, which no file can hold as UTF-8") from None
    workspace = Workspace(context.workspace)
    with workspace.changing():
        journal = _journal(workspace)
        if journal is not None:
            _finish(workspace, journal)
        return _apply(workspace, changes, context.call_key)


def _apply(workspace: Workspace, changes: list[Change], call_key: str) -> str:
    """Apply a patch, of which nothing is applied yet; under the workspace's lock."""
    steps = [step for change in changes for step in _steps(workspace, change)]
    written = sum(len(step.after or b"") for step in steps)
    if len(steps) > MAX_STEPS or written > MAX_PATCHED_BYTES:
        raise ToolError(f"the patch is too large: at most {MAX_STEPS} files, {MAX_PATCHED_BYTES} bytes in all")
    summary = _summary(changes)
    if len(steps) > 1:
        pending = [Pending(step.path, _digest(step.before), _digest(step.after), step.after or b"") for step in steps]
        content = msgspec.json.encode(Journal(call_key, summary, pending))
        workspace.replace_file(workspace.resolve(JOURNAL), content)
    taken: list[Step] = []
    try:
        for step in steps:
            taken.append(step)  # also one that fails: it may have come half of its way
            _write(workspace, step.path, step.after)
    except ToolError as error:
        _undo(workspace, taken, error)
        raise ToolError(f"{error.message}. Nothing was changed") from error
    finally:
        if len(steps) > 1:
            workspace.remove_file(workspace.resolve(JOURNAL))
    return summary


def _undo(workspace: Workspace, taken: list[Step], error: ToolError) -> None:
    """Give files back what they had."""
    failed = []
    for step in reversed(taken):
        try:
            if _read(workspace, step.path) != step.before:
                _write(workspace, step.path, step.before)
        except ToolError:
            failed.append(step.path)
    if failed:
        raise ToolError(f"{error.message}. What was changed before is undone, but not in: {', '.join(failed)}")


def _steps(workspace: Workspace, change: Change) -> list[Step]:
    """What is written and removed for a change.

    Raises:
        ToolError: a file is not there that should be, or is there and should not; or its text is another one.
    """
    shown = workspace.shown(workspace.resolve(change.path))
    before = _read(workspace, change.path)
    if change.kind == ADD:
        if before is not None:
            raise ToolError(f"{shown}: exists already, so it can't be added: update it. Nothing was changed")
        return [Step(change.path, None, change.content.encode())]
    if before is None:
        raise ToolError(f"{shown}: there is no such file. Nothing was changed")
    if change.kind == DELETE:
        return [Step(change.path, before, None)]
    after = _patched(before, change, shown)
    if change.move_to is None:
        return [Step(change.path, before, after)]
    if _read(workspace, change.move_to) is not None:
        raise ToolError(f"{workspace.shown(workspace.resolve(change.move_to))}: exists already. Nothing was changed")
    return [Step(change.move_to, None, after), Step(change.path, before, None)]


def _patched(content: bytes, change: Change, shown: str) -> bytes:
    if b"\0" in content[:8192]:
        raise ToolError(f"{shown}: is a binary file. Nothing was changed")
    # Bytes that are no UTF-8 stay as they are.
    text = content.decode(errors="surrogateescape")
    return patched(text, change.chunks, shown).encode(errors="surrogateescape")


def _state(workspace: Workspace, change: Change) -> str:
    """Whether the files are as `before` a change or `after` it, could be `either`, or are `other`s' work."""
    found = _read(workspace, change.path)
    if change.kind == DELETE:
        return "after" if found is None else "before"
    if change.kind == ADD:
        return "before" if found is None else "after" if found == change.content.encode() else "other"
    if change.move_to is not None:
        target = _read(workspace, change.move_to)
        if (found is None) == (target is None):
            return "other"
        return "after" if found is None else "before"
    if found is None:
        return "other"
    forwards = _fits(found, change)
    backwards = _fits(found, Change(change.kind, change.path, chunks=tuple(c.reversed() for c in change.chunks)))
    if forwards and backwards:
        return "either" if _patched(found, change, change.path) == found else "other"
    return "before" if forwards else "after" if backwards else "other"


def _fits(content: bytes, change: Change) -> bool:
    try:
        _patched(content, change, change.path)
    except ToolError:
        return False
    return True


def _journal(workspace: Workspace) -> Journal | None:
    """The journal of a process that died; the lock says that it did. One that can't be read, or has paths that no patch
    can have, was not of a patch: commands can write that file as well."""
    content = _read(workspace, JOURNAL, limit=2 * MAX_PATCHED_BYTES)
    if content is None:
        return None
    try:
        journal = msgspec.json.decode(content, type=Journal)
        for step in journal.steps:
            workspace.resolve(step.path)
        return journal
    except (msgspec.MsgspecError, WorkspaceViolation):
        workspace.remove_file(workspace.resolve(JOURNAL))
        return None


def _finish(workspace: Workspace, journal: Journal) -> list[str]:
    """Take the steps that are left; the files that others have changed meanwhile, which stay.

    A step that can't be taken stays out as well: with the journal, no other patch could be applied here ever again.
    """
    others = []
    for step in journal.steps:
        try:
            found = _digest(_read(workspace, step.path))
            if found == step.before != step.after:
                _write(workspace, step.path, step.data if step.after else None)
            elif found != step.after:
                others.append(step.path)
        except ToolError:
            others.append(step.path)
    workspace.remove_file(workspace.resolve(JOURNAL))
    return others


def _read(workspace: Workspace, path: str, *, limit: int = MAX_FILE_BYTES) -> bytes | None:
    """A file's content; None if there is none."""
    location = workspace.resolve(path)
    try:
        workspace.existing(path)
    except ToolError:
        return None
    with workspace.open_file(location) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ToolError(f"{workspace.shown(location)}: is larger than {limit} bytes, which is too large to patch")
    return content


def _write(workspace: Workspace, path: str, content: bytes | None) -> None:
    location = workspace.resolve(path)
    if content is None:
        workspace.remove_file(location)
    else:
        workspace.replace_file(location, content)


def _summary(changes: list[Change]) -> str:
    """What a model reads of a patch that was applied."""
    marks = {ADD: "A", DELETE: "D"}
    lines = []
    for change in changes:
        moved = f" -> {change.move_to}" if change.move_to is not None else ""
        lines.append(f"{marks.get(change.kind, 'M')} {change.path}{moved}")
    return "\n".join(["applied:", *lines])


def _digest(content: bytes | None) -> str:
    return "" if content is None else hashlib.sha256(content).hexdigest()
