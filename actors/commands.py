"""Tools by which a model starts commands in the background and reads what they write. `list_jobs` has them, too, and
`stop_job` stops them."""

from __future__ import annotations

from pathlib import Path

from understudy.commands import (
    LONGEST_READ,
    CommandOutput,
    CommandProcess,
    command_problem,
    ending,
)
from understudy.errors import ToolError, UnderstudyError

from .commanding import NodeCommands
from .execution import known_secrets
from .guarded import guarded
from .shell import shell_command
from .tools import ToolContext, tool


def _commands(context: ToolContext) -> NodeCommands:
    found: NodeCommands | None = context._commands
    if found is None:
        raise ToolError("commands in the background are there within a session only")
    return found


@tool(on_crash="rerun")
async def start_command(command: str, context: ToolContext, name: str = "") -> str:
    """Start a command with bash in the workspace, in the background, and return its job id at once.

    It goes on while you do something else, also when your run has ended. You are told when it has ended, with its exit
    code and the end of its output. At most 8 at a time; there is no input to read from. What it starts itself ends with
    it.

    Args:
        command: The command line or script.
        name: What it is, in a few words, for the list of jobs.
    """
    problem = command_problem(command, name)
    if problem is not None:
        raise ToolError(problem)
    wanted = await shell_command(command, context)
    process = CommandProcess(guarded(wanted.arguments), wanted.directory, wanted.environment, known_secrets(), _umask())
    try:
        job = await _commands(context).start(context.call_id, command, name, process)
    except UnderstudyError as error:
        raise ToolError(error.message) from None
    return f"started command {job}"


@tool(on_crash="rerun", timeout=LONGEST_READ + 60)
async def read_command(job: str, context: ToolContext, after: int | None = None, wait: float = 0) -> str:
    """Read what a command in the background has written (stdout and stderr together), and how it stands.

    Args:
        job: Its id.
        after: Bytes of its output that you have read: the result says how many. Leave it out for the end of the output.
        wait: Seconds to wait for more output, at most 60, if there is none and the command has not ended.
    """
    if (after is not None and after < 0) or not 0 <= wait <= LONGEST_READ:
        raise ToolError(f"after must be a number of bytes, and wait 0 to {LONGEST_READ} seconds")
    try:
        found = await _commands(context).read(job, after, wait)
    except UnderstudyError as error:
        raise ToolError(error.message) from None
    return _shown(found, after)


def _shown(found: CommandOutput, after: int | None) -> str:
    """What a model reads of it: the output, and a line in brackets."""
    text = found.data.decode(errors="replace")
    is_over = found.state not in ("running", "stopping")
    state = ending(found.state, found.exit_code, found.problem) if is_over else found.state
    if found.node_id:
        where = f"it is on node {found.node_id[:12]}, and its output can't be read here"
        return f"{text}\n[{state}; {where}{', but for its end' if text else ''}]".lstrip("\n")
    end = found.start + len(found.data)
    dropped = found.start - after if after is not None and found.start > after else 0
    notes = [state, f"bytes {found.start} to {end} of {found.size}"]
    notes += [f"{dropped} bytes before that are not kept any more"] if dropped else []
    notes += [f"read on after {end}"] if end < found.size else []
    return f"{text}\n[{'; '.join(notes)}]".lstrip("\n")


def _umask() -> int:
    """This process's file mode creation mask; to ask for it otherwise would change it for a moment."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
