"""Skills in the driver: folders with a `SKILL.md`, read and packed for the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.errors import InvalidInput, InvalidSpec
from understudy.skills import (
    INSTRUCTIONS,
    LARGEST_SKILLS,
    LOAD_SKILL,
    LONGEST_DESCRIPTION,
    LONGEST_INSTRUCTIONS,
    LONGEST_NAME,
    MOST_SKILLS,
    NAME,
    Skill,
    digest,
    read_folder,
)
from understudy.spec import AgentSpec

from .extensions import find_skills
from .front_matter import read_front_matter


@dataclass
class SkillsRead:
    """The skills of an agent.

    Attributes:
        blobs: their packed folders by hash.
        problems: what is wrong with the others, as `{"field", "problem"}`.
    """

    skills: list[Skill] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)


def tools_of(spec: AgentSpec) -> tuple[Any, ...]:
    """The entries of a specification's tools, and the tool by which it reads its skills."""
    return (*spec.tools, LOAD_SKILL) if spec.skills and LOAD_SKILL not in spec.tools else spec.tools


def read_skills(paths: Sequence[str]) -> SkillsRead:
    """Read skills: of folders, of folders of such folders, or of packages (`DISTRIBUTION:NAME`)."""
    found = SkillsRead()
    for path in paths:
        try:
            for folder in folders_at(path):
                _add(found, folder)
        except InvalidInput as error:
            found.problems.append({"field": "skills", "problem": error.message})
    if len(found.skills) > MOST_SKILLS or sum(map(len, found.blobs.values())) > LARGEST_SKILLS:
        limit = f"an agent may have {MOST_SKILLS} skills with {LARGEST_SKILLS:,} bytes together"
        found.problems.append({"field": "skills", "problem": limit})
    return found


def folders_at(path: str) -> list[Path]:
    """The folders of the skills at a path.

    Raises:
        InvalidInput: there are none.
    """
    location = Path(path).expanduser()
    if not location.is_dir():
        location = find_skills(path) or location
    if (location / INSTRUCTIONS).is_file():
        return [location]
    try:
        below = sorted(other for other in location.iterdir() if (other / INSTRUCTIONS).is_file())
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}") from None
    if not below:
        raise InvalidInput(f"{path} has no {INSTRUCTIONS}, nor has a folder in it")
    return below


def _add(found: SkillsRead, folder: Path) -> None:
    """Read a skill. Raises `InvalidInput` or `InvalidSpec`: it can't be used."""
    try:
        packed = read_folder(folder).packed()
        text = (folder / INSTRUCTIONS).read_text(encoding="utf-8")
    except InvalidSpec as error:
        raise InvalidSpec(f"{folder}: {error.message}") from None
    except OSError as error:
        raise InvalidInput(f"{folder} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{folder / INSTRUCTIONS} is not UTF-8") from None
    matter = read_front_matter(text, str(folder / INSTRUCTIONS))
    wrong = [f"{folder / INSTRUCTIONS}: {problem}" for problem in _problems(matter.fields, matter.body)]
    if wrong:
        raise InvalidSpec("; ".join(wrong))
    name, description = matter.fields["name"], " ".join(matter.fields["description"].split())
    if any(skill.name == name for skill in found.skills):
        raise InvalidSpec(f"{folder}: there are two skills named {name!r}")
    found.skills.append(Skill(name, description, digest(packed)))
    found.blobs[found.skills[-1].blob] = packed


def _problems(fields: dict[str, Any], body: str) -> Iterator[str]:
    """What is wrong with the fields of a skill and its text. Fields of other programs are left alone."""
    name, description = fields.get("name"), fields.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        yield f"name must be 1 to {LONGEST_NAME} lower-case letters and digits, with single hyphens between them"
    if not isinstance(description, str) or not description.strip() or len(description) > LONGEST_DESCRIPTION:
        yield f"description must be a text of 1 to {LONGEST_DESCRIPTION} characters: what it does, and when to use it"
    if not body:
        yield "there are no instructions below the fields"
    if len(body) > LONGEST_INSTRUCTIONS:
        yield f"the instructions have {len(body):,} characters, of {LONGEST_INSTRUCTIONS:,}: move parts to files"
