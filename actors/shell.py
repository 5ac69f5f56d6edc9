"""The `bash` tool: one command in the agent's sandbox, in its workspace."""

from __future__ import annotations

import signal

from understudy.confinement import MAX_SECONDS
from understudy.errors import ToolError
from understudy.skills import SKILLS_VARIABLE
from understudy.worktrees import identity

from .guarded import Ended
from .sandbox import Confined, confined, run_to_its_end
from .tools import ToolContext, tool
from .workspace import Workspace


async def shell_command(command: str, context: ToolContext) -> Confined:
    """How a command line is executed, in the workspace and the agent's sandbox: the only place that says so.

    Raises:
        ToolError: it can't be.
    """
    if "\0" in command:
        raise ToolError("a command can't contain NUL")
    root = str(Workspace(context.workspace).root)
    variables = {"TRACEPARENT": context.traceparent} if context.traceparent else {}
    if context.confinement.worktree:  # git knows nobody here who could make a commit
        variables |= identity(context.agent, context.session_id)
    skills = await context.skills_directory()
    if skills is not None:
        variables[SKILLS_VARIABLE] = skills
    code = () if skills is None else (skills,)
    return await confined(["bash", "-c", command], root, context.confinement, variables, code)


@tool(on_crash="report", timeout=MAX_SECONDS + 30)
async def bash(command: str, context: ToolContext, timeout: int = 120) -> str:
    """Run a command with bash in the workspace and return its output (stdout and stderr together) and exit code.

    There is no input to read from. Background processes end with the command. Long output is cut in its middle. Keep
    files in the workspace: others may be gone after the command.

    Args:
        command: The command line or script.
        timeout: Seconds after which the command is killed, at most 600.
    """
    confinement = context.confinement
    seconds = min(max(timeout, 1), confinement.seconds)
    ended = await run_to_its_end(await shell_command(command, context), seconds=seconds, kept=confinement.output)
    return f"{_text(ended)}\n{_ending(ended, seconds)}".lstrip("\n")


def _text(ended: Ended) -> str:
    if not ended.left_out:
        return ended.output.decode(errors="replace")
    half = len(ended.output) // 2
    parts = (part.decode(errors="replace") for part in (ended.output[:half], ended.output[half:]))
    return f"\n[… {ended.left_out} bytes are left out …]\n".join(parts)


def _ending(ended: Ended, seconds: float) -> str:
    if ended.timed_out:
        return f"[timed out after {seconds:g} s: the command and what it started were killed]"
    code = ended.code
    return f"[exit code {code}]" if code >= 0 else f"[killed by {signal.Signals(-code).name}]"
