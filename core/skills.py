"""Skills: folders of instructions, files and scripts that an agent reads when it needs them (`docs/skills.md`).

A folder is packed into bytes that depend on nothing but its files. Their hash names it in a specification, and the
store keeps them with the session, as it keeps code.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

import msgspec

from .errors import InvalidSpec

LOAD_SKILL = "load_skill"
"""The tool by which a model reads a skill."""

SKILLS_VARIABLE = "UNDERSTUDY_SKILLS"
"""Tells commands in which directory the skills' files are."""

INSTRUCTIONS = "SKILL.md"
"""The file that makes a folder a skill."""

LARGEST_SKILL = 1024 * 1024
"""Bytes of all files of a skill together."""

MOST_FILES = 500
MOST_SKILLS = 64
"""So many an agent may have: each takes a line or two of every request."""

LARGEST_SKILLS = 16 * 1024 * 1024
"""Bytes of all skills of an agent together."""

LONGEST_INSTRUCTIONS = 50_000
"""Characters of a skill's instructions, which a model reads at once."""

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
LONGEST_NAME, LONGEST_DESCRIPTION = 64, 1024

FENCE = "---"
LEFT_OUT = ("__pycache__",)
"""Directories that are no part of a skill; nor is anything whose name begins with a dot."""


class Skill(msgspec.Struct, frozen=True):
    """A skill as a compiled specification names it.

    Attributes:
        blob: the hash of its packed folder.
    """

    name: str
    description: str
    blob: str


class SkillFile(msgspec.Struct, frozen=True):
    """A file of a skill.

    Attributes:
        path: relative to the skill's folder, with forward slashes.
        executable: it may be run as a program.
    """

    path: str
    data: bytes
    executable: bool = False


class SkillFolder(msgspec.Struct, frozen=True):
    """The files of a skill, sorted by their paths."""

    files: tuple[SkillFile, ...]

    def file(self, path: str) -> SkillFile | None:
        """The file of this path; None if there is none."""
        return next((file for file in self.files if file.path == path), None)

    def packed(self) -> bytes:
        """The folder as the store keeps it."""
        return msgspec.msgpack.encode(self)


def digest(data: bytes) -> str:
    """What names a packed folder: its SHA-256."""
    return hashlib.sha256(data).hexdigest()


def unpacked(data: bytes, expected: str) -> SkillFolder:
    """The folder that was packed under this hash.

    Raises:
        ValueError: the bytes are not those.
    """
    if digest(data) != expected:
        raise ValueError("the stored skill does not match its hash")
    return msgspec.msgpack.decode(data, type=SkillFolder)


def read_folder(folder: Path) -> SkillFolder:
    """Read the files of a folder.

    What begins with a dot, and `__pycache__`, is left out.

    Raises:
        InvalidSpec: it has a link or a special file, is too large, or a name is not UTF-8.
        OSError: it can't be read.
    """
    found: list[SkillFile] = []
    size, pending = 0, [folder]
    while pending:
        with os.scandir(pending.pop()) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith(".") or entry.name in LEFT_OUT:
                continue
            path = Path(entry.path).relative_to(folder).as_posix()
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
                continue
            if not entry.is_file(follow_symlinks=False):
                raise InvalidSpec(f"{path!r} is a link or no regular file: a skill has files of its own only")
            size += entry.stat(follow_symlinks=False).st_size
            if size > LARGEST_SKILL or len(found) >= MOST_FILES:
                raise InvalidSpec(
                    f"it is too large: a skill may have {LARGEST_SKILL:,} bytes in {MOST_FILES} files; keep large "
                    "files elsewhere, and let its instructions say where"
                )
            found.append(_read(entry.path, path))
    return SkillFolder(tuple(sorted(found, key=lambda file: file.path)))


def _read(location: str, path: str) -> SkillFile:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidSpec(f"{path!r} is not UTF-8") from None
    descriptor = os.open(location, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        mode = os.fstat(descriptor).st_mode
        return SkillFile(path, stream.read(LARGEST_SKILL + 1), bool(mode & stat.S_IXUSR))


def write_folder(folder: SkillFolder, target: Path) -> None:
    """Write the files into a directory that does not exist yet, for reading only.

    Raises:
        OSError: they can't be written.
    """
    target.mkdir(mode=0o700)
    for file in folder.files:
        location = target / file.path
        location.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        location.write_bytes(file.data)
        location.chmod(0o555 if file.executable else 0o444)
    for directory, _, _ in os.walk(target, topdown=False):
        os.chmod(directory, 0o555)


def split(text: str) -> tuple[str, str] | None:
    """The front matter of a text, without the lines of `---` around it, and what follows; None if it has none."""
    lines = text.removeprefix("\ufeff").splitlines(keepends=True)
    if not lines or lines[0].rstrip() != FENCE:
        return None
    end = next((number for number, line in enumerate(lines[1:], 1) if line.rstrip() == FENCE), None)
    return None if end is None else ("".join(lines[1:end]), "".join(lines[end + 1 :]).strip())
