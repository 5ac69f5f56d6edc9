"""The agents' files of a directory, as they are written: nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from understudy.errors import InvalidInput
from understudy.skills import split

from .agent_text import SUFFIXES, read_text


@dataclass(frozen=True)
class AgentListed:
    """An agent's file.

    Attributes:
        file: its name.
        tools: as written.
        problem: why it can't be read; then all else is empty.
    """

    file: str
    name: str = ""
    description: str = ""
    model: str | None = None
    tools: tuple[str, ...] = ()
    problem: str = ""


def list_agents(directory: Path) -> list[AgentListed]:
    """The agents of a directory, by the names of their files; those of directories below it are left out.

    Markdown without fields, and tables without a name, are no agents.

    Raises:
        InvalidInput: the directory can't be read.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES and path.is_file())
    except OSError as error:
        raise InvalidInput(f"{directory} can't be read: {error.strerror}") from None
    return [agent for agent in map(_listed, paths) if agent is not None]


def _listed(path: Path) -> AgentListed | None:
    try:
        if path.suffix == ".md" and split(path.read_text(encoding="utf-8", errors="replace")) is None:
            return None
        fields = read_text(path).fields
    except (InvalidInput, OSError) as error:
        return AgentListed(path.name, problem=error.message if isinstance(error, InvalidInput) else str(error))
    name, tools = fields.get("name"), fields.get("tools")
    if not isinstance(name, str):
        return None
    return AgentListed(
        path.name, name, str(fields.get("description") or ""), fields.get("model"),
        tuple(map(str, tools)) if isinstance(tools, list) else (),
    )  # fmt: skip
