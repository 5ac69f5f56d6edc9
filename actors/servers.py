"""The MCP servers of a session's agent, as its activation has them: which tools they offer, and calls of these.

The servers are held by a process of their own on the node (`understudy.tool_host`), which is reached through the node
service. What they offer is committed before a model is sent it; a call is made once, by the call's own key, however
often and by whichever process of the session it is asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from functools import partial
from typing import Any

import msgspec

from understudy.errors import McpServerUnusable, ToolError, UnderstudyError
from understudy.events import ERROR_UNCUT, McpServerFailed, McpServerListed
from understudy.messages import Message, encodable
from understudy.ports import Node
from understudy.records import CallState
from understudy.tasks import Tasks
from understudy.tool_hosting import (
    ERROR,
    LOST,
    ORIGIN,
    TIMEOUT,
    UNKNOWN,
    Elicitation,
    ElicitationAnswer,
    ServerAnswer,
    ServerCall,
)

from .commits import Commits, Patience
from .execution import Outcome, presentable
from .toolbox import latest_of, record_of, tools_of
from .tools import LoadedTool
from .window import Window

log = logging.getLogger(__name__)

SERVER_PROCESS = "the MCP server"
"""Who dies during a call of a server's; with its host its servers die as well."""

MOST_ATTEMPTS = 3
"""So often a call is made of a tool that may be run again, while its server dies each time."""

FRAME_SECONDS = 90.0
"""So much longer than its timeout a call is waited for: its server may have to be started first, and its host says how
it ended."""


def is_of_server(spec: dict[str, Any]) -> bool:
    """Whether a tool is a server's."""
    return "mcp" in spec["source"]


class Servers:
    """What an activation has of its agent's servers."""

    def __init__(self, window: Window, node: Node, frame_id: str, commits: Commits, patience: Patience) -> None:
        self._window = window
        self._node = node
        self._frame_id = frame_id
        self._commits = commits
        self._patience = patience
        self._attempts: dict[str, int] = {}
        self._answers: dict[str, ServerAnswer] = {}
        self._unusable: dict[str, str] = {}
        self._tasks = Tasks(log)

    # What they offer.

    async def list_tools(self, *, all_servers: bool) -> dict[str, Any] | None:
        """Have the next batch say what the servers offer, where that is not what the log says; the error that the run
        ends with where a server is needed that can't be used.

        Args:
            all_servers: ask all of them, as when a run begins; otherwise those of which the log says nothing.
        """
        servers: list[dict[str, Any]] = self._window.spec.get("mcp_servers", ())
        if not servers:
            return None
        known = self._known()
        due = [server for server in servers if all_servers or server["name"] not in known]
        if due:
            with self._patience.waiting():
                await asyncio.gather(*map(self._list, due))
        missing = [server["name"] for server in servers if server["required"] and server["name"] in self._unusable]
        if not missing:
            return None
        why = "; ".join(self._unusable[name] for name in missing)
        return McpServerUnusable(why, session_id=self._window.session_id).to_wire()

    def _known(self) -> dict[str, dict[str, Any]]:
        drafted = [message for message in self._commits.draft.messages if message.origin == ORIGIN]
        return latest_of(self._window.spec, [*self._window.listed, *drafted])

    async def _list(self, server: dict[str, Any]) -> None:
        name, draft = server["name"], self._commits.draft
        found = await self._node.server_tools(self._frame_id, self._window.activation, name)
        tools: list[dict[str, Any]] = []
        if found.error:
            self._unusable[name] = presentable(found.error)
            log.warning("session %s goes on without MCP server %s: %s", self._window.session_id, name, found.error)
            draft.entries.append(McpServerFailed(server=name, error_message=self._unusable[name][:ERROR_UNCUT]))
        else:
            tools = encodable(tools_of(server, found.tools))
        known = self._known().get(name)
        if known is not None and known["tools"] == tools:
            return
        record: Message = record_of(server, tools)
        draft.say(self._window, record)
        if not found.error:
            names, left_out = [tool["name"] for tool in tools], found.left_out[:20]
            draft.entries.append(McpServerListed(server=name, tools=names, left_out=left_out))

    # Calls.

    async def held(
        self, call: CallState, spec: dict[str, Any], said: ElicitationAnswer | None = None
    ) -> Outcome | Elicitation | None:
        """How a call ended, or ends, that a process of the session had begun, as the servers' host knows, or what the
        server asks a person first; None if the host does not have it.

        Args:
            said: what a person said to a question of the call.
        """
        answer = await self._held(call, spec, said)
        if answer is None:
            return None
        return answer.asks if answer.asks is not None else self._outcome(answer)

    async def load(self, call: CallState, spec: dict[str, Any]) -> LoadedTool:
        """The tool, for this call alone: it can be made at the host that there is now, and at no other.

        Raises:
            ToolError: there is no host, so that nothing can have been done.
        """
        answer = await self._held(call, spec)
        host = ""
        if answer is None:
            with self._patience.waiting():
                host = await self._node.tool_host(self._frame_id, self._window.activation)
            if not host:
                raise ToolError("it was not executed: the process that holds MCP servers on this node gives no answer")
        return LoadedTool(
            name=spec["name"], function=partial(self._call, call, spec, host, answer), is_async=True,
            parameters=spec["parameters"], from_server=True,
        )  # fmt: skip

    def answered(self, call: CallState, outcome: Outcome) -> Outcome | Elicitation | None:
        """How a call ended, from how its function did, or what the server asks a person first; None if the server
        died: whether it has done it, nobody knows."""
        answer = self._answers.pop(call.call_id, None)
        if answer is None:
            return outcome
        if answer.outcome == LOST:
            return None
        if answer.asks is not None:
            return answer.asks
        ended = self._outcome(answer)
        return Outcome(ended.outcome, ended.content, outcome.duration, outcome.started_at)

    async def give_up(self, call: CallState, spec: dict[str, Any]) -> None:
        """Have the host end a call that its server asks about, and that this process has not made itself."""
        await self._give_up(self._wanted(call, spec, self._attempts.get(call.call_id, 0)))

    async def _held(
        self, call: CallState, spec: dict[str, Any], said: ElicitationAnswer | None = None
    ) -> ServerAnswer | None:
        """What the host has of a call; None if it has nothing that is of use."""
        for attempt in itertools.count():
            self._attempts[call.call_id] = attempt
            answer = await self._ask(msgspec.structs.replace(self._wanted(call, spec, attempt), said=said))
            if answer.outcome == UNKNOWN:
                return None
            if answer.outcome != LOST:
                return answer
        raise AssertionError

    async def _call(
        self, call: CallState, spec: dict[str, Any], host: str, held: ServerAnswer | None, **arguments: Any
    ) -> str:
        """The tool's function."""
        if held is None:
            wanted = self._wanted(call, spec, self._attempts[call.call_id])
            held = await self._ask(msgspec.structs.replace(wanted, host=host, arguments=arguments))
        self._answers[call.call_id] = held
        return held.content

    def _wanted(self, call: CallState, spec: dict[str, Any], attempt: int) -> ServerCall:
        source, key = spec["source"], f"{self._window.session_id}/{call.call_id}"
        return ServerCall(
            source["mcp"], key, attempt, tool=source["tool"], does=source["does"], timeout=spec["timeout"]
        )  # fmt: skip

    async def _ask(self, wanted: ServerCall) -> ServerAnswer:
        """The host's answer. If nobody waits for it any more the call is given up there, too."""
        activation = self._window.activation
        try:
            with self._patience.waiting():
                return await self._node.call_server(self._frame_id, activation, wanted)
        except asyncio.CancelledError:
            self._tasks.spawn(self._give_up(wanted))
            raise

    async def _give_up(self, wanted: ServerCall) -> None:
        try:
            activation = self._window.activation
            await self._node.cancel_server_call(self._frame_id, activation, wanted.key, wanted.attempt)
        except UnderstudyError as error:  # another process has the session, and waits for the answer
            log.info("the call %s is not given up: %s", wanted.key, error)

    def _outcome(self, answer: ServerAnswer) -> Outcome:
        outcome = {ERROR: "error", TIMEOUT: "timeout"}.get(answer.outcome, "ok")
        return Outcome(outcome, presentable(answer.content))
