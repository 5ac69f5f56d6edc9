"""One call of a Python tool, in the process that runs it in the sandbox. See `sandboxed`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import msgspec

from understudy.errors import ToolError
from understudy.skills import SkillFolder

from .execution import Outcome, bind_checked, execute
from .parameters import ToolContext
from .tools import load
from .web_rules import WebRules

LONGEST = 365 * 86_400.0
"""Seconds: it is the session's process that ends a call in time."""


def answer(request: dict[str, Any]) -> None:
    """Execute the call, and write its outcome as the only thing that comes to standard output."""
    written = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what the function prints is no part of its result
    os.dup2(nowhere, 2)
    outcome = asyncio.run(_outcome(request))
    with open(written, "w", encoding="utf-8") as stream:
        said = {"outcome": outcome.outcome, "content": outcome.content, "attachments": outcome.attachments}
        json.dump(said, stream)


def _by_value(digest: str) -> bytes:
    raise KeyError(digest)  # such a function is refused where its agent is described


async def _outcome(request: dict[str, Any]) -> Outcome:
    try:
        tool = load(request["spec"], _by_value, None)
    except Exception as error:
        hint = "In the sandbox only importable files and `Sandbox.readable` can be read"
        return Outcome("error", f"{error} {hint}.")
    web, skills = request["web"], request["skills"]
    context = ToolContext(
        **request["context"],
        web=msgspec.convert(web, WebRules) if web is not None else None,
        skill_files=_WrittenSkills(skills) if skills is not None else None,
    )
    keywords = bind_checked(tool, request["arguments"], context)
    if isinstance(keywords, Outcome):
        return keywords
    found = await execute(tool, keywords, LONGEST)
    return found or Outcome("error", "it was too late to begin")


class _WrittenSkills:
    """The skills of the agent, which the session's process has written into a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    async def folder(self, name: str) -> SkillFolder:
        """See `parameters.SkillFiles`."""
        raise ToolError(f"the files of the skill {name!r} are in `skills_directory()`")

    async def directory(self) -> str | None:
        """See `parameters.SkillFiles`."""
        return self._directory
