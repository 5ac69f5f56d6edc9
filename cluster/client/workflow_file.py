"""A workflow as a file: its definition in YAML or JSON."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from understudy.errors import InvalidInput, InvalidSpec
from understudy.problem_texts import described
from understudy.workflow_definition.checking import converted
from understudy.workflow_definition.steps import Definition
from understudy.workflow_definition.text import FORMS, LONGEST_TEXT, DefinitionText, NoDefinition, read_text

from .agent_listing import list_agents
from .agent_text import read_text as read_agent_text


def read_workflow(
    path: Path, *, agents: Collection[str] | None = None, tools: Collection[str] | None = None
) -> Definition:
    """Read a workflow's file.

    Args:
        agents, tools: the names that a step may have; None: they are not looked at.

    Raises:
        InvalidInput: the file can't be read, or is not what its name says.
        InvalidSpec: with every problem in `details["problems"]`.
    """
    text = _text(path)
    found = text.problems(agents=agents, tools=tools)
    if found:
        raise InvalidSpec(described(str(path), found), details={"problems": found})
    return converted(text.data)


def _text(path: Path) -> DefinitionText:
    form = FORMS.get(path.suffix)
    if form is None:
        raise InvalidInput(f"{path} must be named as what it is: {', '.join(FORMS)}")
    try:
        with path.open(encoding="utf-8") as file:
            return read_text(file.read(LONGEST_TEXT + 1), form)
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8: {error}") from None
    except NoDefinition as error:
        raise InvalidInput(f"{path} {error}") from None


def agent_names(path: Path) -> list[str]:
    """The name of the agent of a file, or of those of a directory, as they are written: nothing is imported.

    Raises:
        InvalidInput: it can't be read, or has no agent.
    """
    if path.is_dir():
        found = [agent.name for agent in list_agents(path)]
    else:
        found = [str(read_agent_text(path).fields.get("name") or "")]
    names = [name for name in found if name]
    if not names:
        raise InvalidInput(f"there are no agents in {path}")
    return names


def agent_files(path: Path) -> list[Path]:
    """An agent's file, or those of a directory. Raises `InvalidInput`: there is none."""
    files = [path / agent.file for agent in list_agents(path)] if path.is_dir() else [path]
    if not files:
        raise InvalidInput(f"there are no agents in {path}")
    return files
