"""Python tools in the sandbox: `@tool(sandbox=True)`. Each call is a process of its own that imports the function, is
sent the arguments as JSON and sends back the outcome as JSON. `sandboxed_call` is what happens in there."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec

from understudy.errors import ToolError

from .parameters import ToolContext
from .results import Result, received
from .sandbox import run_confined
from .short_process import import_path
from .workspace import Workspace

CONTEXT = "the call's context"
"""The argument that takes the `ToolContext`; no parameter can have such a name."""

ONLY_HERE = frozenset({"confinement", "skill_files", "web", "_reporting", "_commands"})
"""Fields of the context that a call in the sandbox is not given: they lead to the session's process and its node."""

MAX_ANSWER_BYTES = 7_000_000
"""A longer answer is none: its text is cut to `execution.MAX_RESULT_CHARACTERS` in the sandbox."""

_PROGRAM = """
import json, sys
request = json.load(sys.stdin)
sys.path[:] = request["import_path"]
from understudy.actors.sandboxed_call import answer
answer(request)
"""


def in_sandbox(spec: dict[str, Any]) -> Callable[..., Coroutine[Any, Any, Result]]:
    """The function to call in this process for a tool that runs in the sandbox."""

    async def call(**arguments: Any) -> Result:
        context: ToolContext = arguments.pop(CONTEXT)
        shared = {
            field.name: getattr(context, field.name)
            for field in dataclasses.fields(context)
            if field.name not in ONLY_HERE
        }
        skills = await context.skills_directory()
        workspace = None if context.workspace is None else str(Workspace(context.workspace).root)
        paths = import_path()
        request = {
            "spec": {name: value for name, value in spec.items() if name != "sandbox"},
            "arguments": arguments, "context": {**shared, "workspace": workspace}, "import_path": paths,
            "skills": skills, "web": msgspec.to_builtins(context.web),
        }  # fmt: skip
        # -I: nothing is imported from the current directory, nor from where PYTHONPATH points. Its time is `execute`'s.
        ended = await run_confined(
            [sys.executable, "-I", "-c", _PROGRAM], workspace, context.confinement, seconds=None,
            kept=MAX_ANSWER_BYTES, variables={"TRACEPARENT": context.traceparent} if context.traceparent else {},
            code=[*_code(spec["source"]["import"], paths), *([skills] if skills is not None else [])],
            sent=json.dumps(request).encode(),
        )  # fmt: skip
        return _content(spec["name"], ended.code, ended.output)

    return call


def _content(name: str, code: int, output: bytes) -> Result:
    try:
        answer = json.loads(output)
        outcome, content, attachments = answer["outcome"], answer["content"], answer.get("attachments", [])
    except (ValueError, KeyError, TypeError, RecursionError):
        ending = f"exit code {code}" if code >= 0 else f"signal {-code}"
        said = output[-500:].decode(errors="replace").strip()
        raise ToolError(
            f"{name} gave no result, its process ended with {ending}: {said or 'it said nothing'}"
        ) from None
    if not (isinstance(outcome, str) and isinstance(content, str)):  # what is in there may write what it wants
        raise ToolError(f"{name} gave no result")
    if outcome != "ok":
        raise ToolError(content.removeprefix("ToolError: "))
    return received(content, attachments)


def _code(reference: str, paths: list[str]) -> Iterator[str]:
    """What can be imported outside of this Python's own directories: modules and packages, but no other files beside
    them, where keys may be."""
    top = sys.modules.get(reference.partition(":")[0].partition(".")[0])
    for module in (sys.modules["understudy"], sys.modules[__package__], top):
        yield from getattr(module, "__path__", ())
    if top is not None and not hasattr(top, "__path__") and top.__file__:
        yield top.__file__
    for entry in map(Path, paths):
        if entry.is_relative_to(sys.prefix) or entry.is_relative_to(sys.base_prefix):
            continue
        if entry.name in ("site-packages", "dist-packages") or entry.is_file():
            yield str(entry)
        elif entry.is_dir():
            yield from (str(found) for found in sorted(entry.iterdir()) if _is_importable(found))


def _is_importable(path: Path) -> bool:
    return path.suffix in (".py", ".so") or (path.is_dir() and (path / "__init__.py").is_file())
