"""What frames, node services and tool hosts say to each other about MCP servers, as it is on the way (`protocol`)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

TOOL, LIST_RESOURCES, READ_RESOURCE, GET_PROMPT = "tool", "list_resources", "read_resource", "get_prompt"
"""What a server is asked for (`ServerTool.does`)."""

ORIGIN = "mcp"
"""The origin of the record of a server's tools, which no model is sent."""

OK, ERROR, TIMEOUT, LOST, UNKNOWN, ASKS = "ok", "error", "timeout", "lost", "unknown", "asks"
"""How a call ends (`ServerAnswer`). `LOST`: nobody knows whether the server has done it. `UNKNOWN`: this host has no
such call. `ASKS`: it has not ended, its server asks a person first."""

ACCEPT, DECLINE, CANCEL = "accept", "decline", "cancel"
"""What a person does about a question of a server (`ElicitationAnswer`)."""


class ServerConfiguration(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that a tool host must know of a server to start it.

    Attributes:
        instance: names the server within its host: equal instances share one.
        name: for logs and errors.
        command, url: one of them.
        environment: names of variables that it is given.
        headers: names of the variables that hold the values of HTTP headers, by header.
        workspace: the directory that it runs in, and that it is given as its root; empty for none.
    """

    instance: str
    name: str
    command: list[str] = []
    url: str = ""
    environment: list[str] = []
    headers: dict[str, str] = {}
    workspace: str = ""


class ServerTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool as a server describes it.

    Attributes:
        name: the server's own.
        parameters: JSON Schema of an object.
        on_crash: as the server's annotations have it: `rerun` for what only reads or may be done twice.
        does: what the server is asked for: its tool of this name (`TOOL`), or a resource or prompt.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    on_crash: str = "report"
    does: str = TOOL


class ServerTools(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tools of a server.

    Attributes:
        host: the tool host that it was asked at: calls are made there, and nowhere else.
        error: why the server can't be used; empty if it can.
        left_out: what of the list is too large, or can't be used, and why.
    """

    host: str
    tools: list[ServerTool] = []
    error: str = ""
    left_out: list[str] = []


class Elicitation(msgspec.Struct, frozen=True):
    """What a server asks a person during a call.

    Attributes:
        id: names it: no other question of any server has it.
        form: JSON Schema of the answer, an object.
    """

    id: str
    message: str
    form: dict[str, Any]


class ElicitationAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the person says.

    Attributes:
        id: of the question.
        action: `ACCEPT`, `DECLINE` or `CANCEL` (nobody has said anything).
        content: what fits the question's form, if it is accepted.
    """

    id: str
    action: str
    content: dict[str, Any] | None = None


class ServerCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that a frame wants to be made, once.

    Attributes:
        server: its name, in the agent's specification.
        key: the tool call's own (`ToolContext.call_key`).
        attempt: counts the times that it was made: a call that was lost is made again under the next number.
        host: may make it, and no other; empty if none may.
        tool, does: see `ServerTool`.
        arguments: None to get the answer to a call that the host has, and nothing else.
        timeout: seconds; those in which a person is asked don't count.
        said: the answer to a question of the call. The host passes it on once, however often it is said.
    """

    server: str
    key: str
    attempt: int = 0
    host: str = ""
    tool: str = ""
    does: str = TOOL
    arguments: dict[str, Any] | None = None
    timeout: float = 60.0
    said: ElicitationAnswer | None = None


class ServerAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a call ended.

    Attributes:
        outcome: `OK`, `ERROR`, `TIMEOUT`, `LOST`, `UNKNOWN` or `ASKS`.
        asks: the question, if it is `ASKS`.
    """

    outcome: str
    content: str = ""
    asks: Elicitation | None = None


class HostAttached(msgspec.Struct, frozen=True):
    """A tool host has a new node service to work for.

    Attributes:
        host: which one it is; one that takes its place is another one, and has none of its calls.
        number: names this attachment: each call of the service has it, so that late ones are refused.
        pid: of its process.
        calls: the keys of those that are under way there, as services before this one have left them.
    """

    host: str
    number: str
    pid: int
    calls: list[str] = []


def search_path(path: str | None) -> str:
    """The variable `PATH` of a server's process, by that of its environment. Servers are often installed beside this
    interpreter, in an environment that nobody has activated."""
    return os.pathsep.join(filter(None, (path, os.path.dirname(sys.executable))))


def program_of(command: Sequence[str], path: str | None) -> str | None:
    """Where the program is, on this machine, that starts a server; None if there is none. See `search_path`."""
    return shutil.which(command[0], path=search_path(path))
