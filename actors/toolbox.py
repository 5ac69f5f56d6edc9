"""The tools of an agent: those of its specification, and those of its MCP servers as the log has them. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from understudy.json_text import to_json
from understudy.messages import NEVER, Message
from understudy.tool_hosting import ORIGIN, ServerTool

LONGEST_NAME = 64
"""Characters of a tool's name, as endpoints take it."""


class Toolbox:
    """An agent's tools as a model is offered them.

    Args:
        spec: the agent's compiled specification.
        records: of its servers' tools (`record_of`), oldest first.

    Attributes:
        by_name: their specifications. Of two tools of one name the agent's own counts, or that of the first server.
        functions: the same in the form in which a model is offered them.
        size: of that form, in bytes.
    """

    def __init__(self, spec: dict[str, Any], records: Iterable[Message] = ()) -> None:
        self.by_name: dict[str, dict[str, Any]] = {tool["name"]: tool for tool in spec.get("tools", ())}
        latest = latest_of(spec, records)
        for server in spec.get("mcp_servers", ()):
            for tool in latest[server["name"]]["tools"] if server["name"] in latest else ():
                self.by_name.setdefault(tool["name"], tool)
        self.functions: list[dict[str, Any]] = [
            {"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters")}}
            for tool in self.by_name.values()
        ]
        self.size = len(to_json(self.functions).encode()) if self.functions else 0


def latest_of(spec: dict[str, Any], records: Iterable[Message]) -> dict[str, dict[str, Any]]:
    """What the log says last of each of an agent's servers, by name: one that was configured otherwise is another
    one."""
    keys = {server["name"]: server["key"] for server in spec.get("mcp_servers", ())}
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        extra = record.extra or {}
        if record.origin == ORIGIN and keys.get(extra["server"]) == extra["key"]:
            found[extra["server"]] = extra
    return found


def tools_of(server: dict[str, Any], listed: Sequence[ServerTool]) -> list[dict[str, Any]]:
    """The specifications of a server's tools that the agent has.

    Args:
        server: as the agent's compiled specification has it.
        listed: as the server says.
    """
    found = []
    for tool in listed:
        if not _matches(tool.name, server["include"]) or _matches(tool.name, server["exclude"]):
            continue
        name = tool_name(server["name"], tool.name)
        on_crash = next((rule for wanted, rule in server["on_crash"].items() if fnmatchcase(tool.name, wanted)), None)
        source = {"mcp": server["name"], "tool": tool.name, "does": tool.does}
        described = {
            "name": name, "description": tool.description, "parameters": tool.parameters,
            "on_crash": on_crash or tool.on_crash, "timeout": server["timeout"], "source": source,
        }  # fmt: skip
        approve = {"approve": True} if _matches(name, server["approve"]) else {}
        found.append({**described, **approve})
    return found


def tool_name(server: str, tool: str) -> str:
    """`SERVER_TOOL`, as endpoints take names. One that is too long ends with a hash of all of it."""
    whole = f"{server}_{tool}"
    name = re.sub(r"[^A-Za-z0-9_-]", "_", whole)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}_{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def record_of(server: dict[str, Any], tools: Sequence[dict[str, Any]]) -> Message:
    """The record that the agent has these tools of a server from now on."""
    content = f"the MCP server {server['name']} offers {len(tools)} tools"
    extra = {"server": server["name"], "key": server["key"], "tools": list(tools)}
    return Message("system", content, origin=ORIGIN, visibility=NEVER, extra=extra)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
