"""One call of a Python tool, in the process that runs it in the sandbox. See `sandboxed`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from .execution import Outcome, bind_checked, execute
from .parameters import ToolContext
from .tools import load

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
    keywords = bind_checked(tool, request["arguments"], ToolContext(**request["context"]))
    if isinstance(keywords, Outcome):
        return keywords
    found = await execute(tool, keywords, LONGEST)
    return found or Outcome("error", "it was too late to begin")
