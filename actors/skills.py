"""Skills in a frame: their catalogue in the instructions, the tool `load_skill`, and their files for commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from understudy.errors import InvalidSpec, ToolError
from understudy.identifiers import digest as joined_digest
from understudy.skills import (
    INSTRUCTIONS,
    SKILLS_VARIABLE,
    Skill,
    SkillFile,
    SkillFolder,
    digest,
    read_folder,
    split,
    unpacked,
    write_folder,
)
from understudy.suggestions import did_you_mean
from understudy.transport.channel import socket_directory

from .parameters import ToolContext
from .tools import tool

LONGEST_PIECE = 50_000
"""Characters of a file that one call returns."""

SHOWN_FILES = 100
UNUSED_SECONDS = 7 * 86_400
"""Copies of skills that no command had the use of for so long are removed."""

HEADING = (
    "You have skills: instructions and files for certain kinds of work. Where one fits the task, load it with "
    "load_skill before you begin."
)


def catalogue(spec: dict[str, Any]) -> str:
    """What the instructions of a compiled specification say of its skills; empty without any."""
    skills = described(spec)
    return "\n".join([HEADING, *(f"- {skill.name}: {skill.description}" for skill in skills)]) if skills else ""


def described(spec: dict[str, Any]) -> list[Skill]:
    """The skills of a compiled specification."""
    return msgspec.convert(spec.get("skills") or [], list[Skill])


class Skills:
    """The skills of a session's agent, as its tools reach them (`parameters.SkillFiles`).

    Args:
        read: returns the packed folder of a hash.
    """

    def __init__(self, skills: Sequence[Skill], read: Callable[[str], Awaitable[bytes]]) -> None:
        self._skills = {skill.name: skill for skill in skills}
        self._read = read

    async def folder(self, name: str) -> SkillFolder:
        """The files of a skill. Raises `ToolError`: there is none of this name."""
        skill = self._skills.get(name)
        if skill is None:
            known = ", ".join(self._skills) or "none"
            raise ToolError(f"there is no skill {name!r}{did_you_mean(name, self._skills)}; there are: {known}")
        try:
            return unpacked(await self._read(skill.blob), skill.blob)
        except ValueError as error:
            raise ToolError(f"the skill {name!r} can't be read: {error}") from None

    async def directory(self) -> str | None:
        """A directory of this node with a folder for each skill, by its name, for reading only; None without skills.

        Its name depends on the skills alone. What was changed or removed there is replaced.

        Raises:
            ToolError: it can't be written.
        """
        if not self._skills:
            return None
        key = joined_digest(*(f"{skill.name}={skill.blob}" for skill in self._skills.values()))[:32]
        try:
            target = socket_directory() / "skills" / key
            if not await asyncio.to_thread(self._is_whole, target):
                folders = {name: await self.folder(name) for name in self._skills}
                await asyncio.to_thread(self._make, folders, target)
        except OSError as error:
            raise ToolError(f"the files of the skills can't be written on this node: {error.strerror}") from error
        return str(target)

    def _is_whole(self, target: Path) -> bool:
        """Whether the directory has the files of all skills as they are to be; it counts as used then."""
        try:
            for skill in self._skills.values():
                if digest(read_folder(target / skill.name).packed()) != skill.blob:
                    return False
            os.utime(target)
        except (OSError, InvalidSpec):
            return False
        return True

    def _make(self, folders: dict[str, SkillFolder], target: Path) -> None:
        """Write the folders beside the directory, then put them in its place in one step: who sees it sees all."""
        target.parent.mkdir(mode=0o700, exist_ok=True)
        _remove_unused(target.parent)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
        try:
            for name, folder in folders.items():
                write_folder(folder, made / name)
            old = Path(tempfile.mkdtemp(prefix=".old-", dir=target.parent))
            with contextlib.suppress(FileNotFoundError):
                target.rename(old / "it")
            with contextlib.suppress(OSError):  # another process was faster: it has written the same
                made.rename(target)
            _remove(old)
        finally:
            _remove(made)


def _remove_unused(parent: Path) -> None:
    for other in parent.iterdir():
        with contextlib.suppress(OSError):
            if other.stat().st_mtime < time.time() - UNUSED_SECONDS:
                _remove(other)


def _remove(directory: Path) -> None:
    for place, _, _ in os.walk(directory):
        with contextlib.suppress(OSError):
            os.chmod(place, 0o700)
    shutil.rmtree(directory, ignore_errors=True)


@tool(on_crash="rerun")
async def load_skill(name: str, context: ToolContext, file: str | None = None, offset: int = 0) -> str:
    """Read a skill's instructions, with a list of its files; or one of these files.

    Args:
        name: The skill's name.
        file: Path of a file of the skill, as the list names it.
        offset: Characters of the file to leave out, for the rest of a long one.
    """
    if context.skill_files is None:
        raise ToolError("this agent has no skills")
    folder = await context.skill_files.folder(name)
    if file is None:
        return _instructions(name, folder)
    return _piece(name, folder, file.removeprefix("./"), max(0, offset))


def _instructions(name: str, folder: SkillFolder) -> str:
    main = folder.file(INSTRUCTIONS)
    text = main.data.decode(errors="replace") if main is not None else ""
    found = split(text)
    parts = [found[1] if found is not None else text.strip()]
    others = [file for file in folder.files if file.path != INSTRUCTIONS]
    if others:
        lines = [f"- {_line(file)}" for file in others[:SHOWN_FILES]]
        lines += [f"- and {len(others) - SHOWN_FILES} more"] if len(others) > SHOWN_FILES else []
        where = f"Files of this skill (load_skill reads them; commands find them in ${SKILLS_VARIABLE}/{name}):"
        parts.append("\n".join([where, *lines]))
    return "\n\n".join(parts)


def _line(file: SkillFile) -> str:
    return f"{file.path} ({len(file.data)} bytes{', executable' if file.executable else ''})"


def _piece(name: str, folder: SkillFolder, path: str, offset: int) -> str:
    file = folder.file(path)
    if file is None:
        paths = [one.path for one in folder.files]
        known = ", ".join(paths[:SHOWN_FILES])
        raise ToolError(f"the skill {name!r} has no file {path!r}{did_you_mean(path, paths)}; it has: {known}")
    try:
        text = file.data.decode()
    except UnicodeDecodeError:
        raise ToolError(f"{_line(file)} is no text; commands find it as ${SKILLS_VARIABLE}/{name}/{path}") from None
    piece = text[offset : offset + LONGEST_PIECE]
    left = len(text) - offset - len(piece)
    return f"{piece}\n[… {left} more characters: offset {offset + len(piece)} …]" if left > 0 else piece
