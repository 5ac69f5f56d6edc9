"""Commands in the background: what a session's process, node services and the store say of them. Pure."""

from __future__ import annotations

import msgspec

from .identifiers import digest
from .messages import storable

START_COMMAND = "start_command"
"""The tool that starts a command and does not wait for it."""

READ_COMMAND = "read_command"
"""The tool that reads its output."""

COMMAND_TOOLS = (START_COMMAND, READ_COMMAND)

COMMAND = "command"
"""The source of an input that tells of a command's end, and the origin of the message that it becomes."""

MOST_COMMANDS = 8
"""So many of a session may be at work at a time."""

MOST_SECONDS = 86_400
"""A command that is at work after so long is stopped."""

LONGEST_COMMAND = 100_000
"""Characters of a command line."""

LONGEST_NAME = 64

KEPT_OUTPUT = 4 << 20
"""Bytes of a command's output that are kept at least, if there are as many: the newest."""

READ_BYTES = 20_000
"""Bytes of output that one read returns at most."""

TAIL_BYTES = 2_000
"""Bytes of the end of the output that the input has which tells of a command's end."""

LONGEST_READ = 60
"""Seconds for which a read may wait for more output."""

STOP_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL, unless the caller of `stop_job` gives others."""

RUNNING, STOPPING, ENDED, STOPPED, LOST = "running", "stopping", "ended", "stopped", "lost"
"""How a command stands. `stopping`: it was asked to end and has not. `lost`: nothing is known of its end."""


class CommandProcess(msgspec.Struct, frozen=True):
    """What is executed.

    Attributes:
        arguments: program and arguments. Its standard error is a pipe to read from, which ends when nobody looks after
            it any more.
        directory: it begins there.
        environment: all variables that it has.
        secrets: texts that the kept end of its output must not have.
        umask: its file mode creation mask.
    """

    arguments: list[str]
    directory: str
    environment: dict[str, str]
    secrets: list[str] = []
    umask: int = 0o022


class StartCommand(msgspec.Struct, frozen=True):
    """A command that a tool call starts.

    Attributes:
        call_id: of the call: repeated, it starts nothing more.
        node_id: of the frame that asks.
        command: as the model wrote it.
    """

    call_id: str
    node_id: str
    command: str
    name: str
    process: CommandProcess

    def __post_init__(self) -> None:
        problem = command_problem(self.command, self.name)
        if problem is not None:
            raise ValueError(problem)


class CommandOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a command.

    Attributes:
        state: `running`, `stopping`, `ended`, `stopped` or `lost`.
        exit_code: of a command that has ended; negative: the signal that ended it. None if it is not known.
        problem: see `CommandEnd`.
        node_id: where its output is, if it can't be read here; empty otherwise.
        start: bytes of the output that came before `data`; it may be more than was asked for, if these were dropped.
        data: the output from there on.
        size: bytes of the output so far.
    """

    state: str
    exit_code: int | None = None
    problem: str = ""
    node_id: str = ""
    start: int = 0
    data: bytes = b""
    size: int = 0


class CommandEnd(msgspec.Struct, frozen=True):
    """How a command's process has ended.

    Attributes:
        exit_code: negative: the signal that ended it. None if it is not known, because what ran it was killed.
        tail: the end of its output.
        problem: why it could not be started, was stopped without the session's wish, or is lost; empty otherwise.
        lost: nothing is known of its end.
    """

    exit_code: int | None = None
    tail: str = ""
    problem: str = ""
    lost: bool = False


def job_identifier(call_id: str) -> str:
    """The id of the command that a tool call starts: the same one for the same call."""
    return f"command-{digest(call_id, size=4)}"


def command_key(namespace: str, session_id: str, incarnation: int, job: str) -> str:
    """What names a command on its machine; another session that is made under the same id has others."""
    return digest(namespace, session_id, str(incarnation), job)


def command_problem(command: str, name: str) -> str | None:
    """What is wrong with a command; None if nothing is."""
    if not command.strip() or "\0" in command or len(command) > LONGEST_COMMAND:
        return f"a command must be a text of at most {LONGEST_COMMAND} characters without NUL."
    if len(name) > LONGEST_NAME or storable(name) != name or "\n" in name:
        return f"a command's name must be one line of at most {LONGEST_NAME} characters."
    return None


def ending(state: str, exit_code: int | None, problem: str) -> str:
    """How a command has ended, in words."""
    if problem:
        return problem
    if state == LOST:
        return "is lost: nothing is known of its end"
    code = "" if exit_code is None else f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
    if state == STOPPED:
        return "was stopped" + (f" ({code})" if code else "")
    return f"has ended ({code})" if code else "has ended"


def news_text(job: str, shown: str, how: str, tail: str, *, lost: bool = False) -> str:
    """What a model reads of the end of a command. Of one that is lost, nobody may know here what it has written."""
    nothing = f"{READ_COMMAND} reads what is left of its output." if lost else "It has written no output."
    said = f"The end of its output:\n{tail}" if tail.strip() else nothing
    return f"Command {job} {how}: {shown}\n{said}"
