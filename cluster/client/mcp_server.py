"""Agents served over the Model Context Protocol: each agent is a tool, each call of it a run of the cluster.

The run does not depend on the connection. A client that goes away loses the answer, not the work: the same call with
the same `run_id` finds it again. Needs the extra `understudy[mcp]`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import mcp_types as types
import msgspec
from mcp.server import Server
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from understudy import __version__
from understudy.errors import InvalidInput, UnderstudyError
from understudy.identifiers import IDENTIFIER, digest, identifier_problem, new_identifier
from understudy.json_text import jsonable
from understudy.spec import AgentSpec

from .client import Cluster
from .mcp_events import described
from .mcp_people import answered, form_of, key_of, question, unanswered
from .results import RunResult
from .run_handle import Run
from .session_handle import Session

logger = logging.getLogger(__name__)

Context = ServerRequestContext[Any]
CANCELLED = "notifications/cancelled"
REMEMBERED = 1_000
"""So many calls that were cut off are remembered, for cancellations that arrive after that."""

PROMPT = "What the agent shall do, with all that it needs to know: it sees nothing of your conversation."
SESSION = (
    "Name of a conversation with this agent, to continue it or to begin one: letters, digits, dots, hyphens and "
    "underscores. Leave it out for a new one."
)
RUN_ID = (
    "Your own name for this piece of work. A call with the same one, and the same prompt, does not do the work again: "
    "it waits for the answer, or returns it. Use it to go on after a lost connection."
)
OUTPUT = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "The answer."},
        "status": {"type": "string", "description": "`completed`, or how else it ended or what it waits for."},
        "session": {"type": "string", "description": "The conversation, to continue it."},
        "run_id": {"type": "string"},
        "output": {"description": "The answer as data, of an agent with an output type."},
    },
    "required": ["text", "status", "session", "run_id"],
}


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a call."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    session: str | None = None
    run_id: str | None = None


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client says again when it brings the answers that a call waits for."""

    session: str
    run_id: str


class Begun(msgspec.Struct, frozen=True):
    """A call's session and run, and the names by which its client knows them."""

    session: Session
    run: Run
    state: State


class AgentServer:
    """Serves agents to clients of the protocol, by the runs of a cluster.

    Args:
        agents: one tool each, by their names.

    Raises:
        InvalidInput: two have one name.
    """

    def __init__(self, cluster: Cluster, agents: Sequence[AgentSpec]) -> None:
        self._cluster = cluster
        self._agents = {agent.name: agent for agent in agents}
        if len(self._agents) < len(agents):
            raise InvalidInput("two of the agents have the same name")
        self._calls: OrderedDict[tuple[str, types.RequestId | None], asyncio.Future[Begun]] = OrderedDict()

    def server(self) -> Server[Any]:
        """The protocol's server; one for all connections."""
        made: Server[Any] = Server(
            "understudy", version=__version__, on_list_tools=self._list_tools, on_call_tool=self._call_tool
        )
        made.middleware.append(self._hear)
        return made

    async def _list_tools(
        self, _context: Context, _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_tool(agent) for agent in self._agents.values()])

    async def _call_tool(
        self, context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        agent = self._agents.get(params.name)
        if agent is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no agent {params.name!r}: {', '.join(self._agents)}")
        # In a task of its own: whoever cancels this call must find the run that it has begun.
        beginning = asyncio.ensure_future(self._begin(agent, params))
        key = _key(context, context.request_id)
        self._calls[key] = beginning
        while len(self._calls) > REMEMBERED:
            self._calls.popitem(last=False)
        try:
            found = await self._follow(context, params, await asyncio.shield(beginning))
        except (UnderstudyError, msgspec.ValidationError) as error:
            text = str(error) if isinstance(error, UnderstudyError) else f"the arguments can't be used: {error}"
            found = types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
        self._calls.pop(key, None)  # not of one that was cut off: its cancellation may come now
        return found

    async def _hear(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """End the run of a call that its client cancels; one whose client is gone goes on."""
        if ctx.method == CANCELLED and ctx.request_id is None:
            beginning = self._calls.pop(_key(ctx, (ctx.params or {}).get("requestId")), None)
            if beginning is not None:
                with suppress(UnderstudyError, msgspec.ValidationError):
                    begun = await asyncio.shield(beginning)
                    await begun.run.cancel.aio("cancelled by the client of the Model Context Protocol")
        return await call_next(ctx)

    async def _begin(self, agent: AgentSpec, params: types.CallToolRequestParams) -> Begun:
        """Have a call's run accepted, or find it.

        Raises:
            ValidationError: the arguments are none.
            UnderstudyError: the run can't be accepted.
        """
        asked = msgspec.convert(params.arguments or {}, Asked)
        state = _state(params.request_state, asked)
        for what, name in (("session", state.session), ("run_id", state.run_id)):
            problem = identifier_problem(name, what)
            if problem is not None:
                raise InvalidInput(problem)
        session = await self._cluster.spawn.aio(agent, session_id=_session_id(agent.name, state.session))
        run = await session.send.aio(asked.prompt, run_id=state.run_id)
        return Begun(session, run, state)

    async def _follow(
        self, context: Context, params: types.CallToolRequestParams, begun: Begun
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Wait for the run's end, and ask the client's person what it asks."""
        progress = (
            asyncio.ensure_future(_report_progress(context, begun.run))
            if "progress_token" in (context.meta or {})
            else None
        )
        responses, declined = dict(params.input_responses or {}), set[str]()
        try:
            while True:
                result = await begun.run.result.aio()
                if result.status != "waiting_for_input":
                    return _ended(result, begun.state)
                new = [item for item in result.pending if key_of(item) not in declined]
                if not new or not _asks(context):
                    return unanswered(result, begun.session.id, _structured(result, begun.state))
                given = {key_of(item): responses.pop(key_of(item), None) for item in new}
                if not any(given.values()):
                    if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
                        return _input_required(result, declined, begun.state)
                    given = {key_of(new[0]): await _elicit(context, question(new[0]))}
                for item in new:
                    response = given.get(key_of(item))
                    if isinstance(response, types.ElicitResult) and not await answered(begun.session, item, response):
                        declined.add(key_of(item))
        finally:
            if progress is not None:
                progress.cancel()


def _tool(agent: AgentSpec) -> types.Tool:
    names = {"session": SESSION, "run_id": RUN_ID}
    properties: dict[str, Any] = {"prompt": {"type": "string", "minLength": 1, "description": PROMPT}}
    for name, text in names.items():
        properties[name] = {"type": "string", "pattern": f"^(?:{IDENTIFIER.pattern})$", "description": text}
    schema = {"type": "object", "properties": properties, "required": ["prompt"], "additionalProperties": False}
    description = agent.description or f"The agent {agent.name}."
    return types.Tool(name=agent.name, description=description, input_schema=schema, output_schema=OUTPUT)


def _state(request_state: str | None, asked: Asked) -> State:
    """The names of a call's session and run. A client could name them as arguments, so what it says is not trusted
    more than those."""
    if request_state is not None:
        return msgspec.json.decode(request_state, type=State)
    run_id = asked.run_id if asked.run_id is not None else new_identifier()
    return State(asked.session if asked.session is not None else run_id, run_id)


def _session_id(agent: str, name: str) -> str:
    """The id of a session that clients name so: none of them reaches a session that was not begun in this way."""
    plain = f"mcp.{agent}.{name}"
    return plain if IDENTIFIER.fullmatch(plain) else f"mcp.{digest(agent, name)}"


def _key(context: Context, request_id: Any) -> tuple[str, types.RequestId | None]:
    """What a request is known by among those of all clients: over HTTP each has a session of the protocol."""
    headers = getattr(context.request, "headers", None) or {}
    return str(headers.get("mcp-session-id", "")), request_id


def _asks(context: Context) -> bool:
    """Whether the client can ask a person to fill a form."""
    capabilities = context.session.client_capabilities
    found = capabilities.elicitation if capabilities is not None else None
    return found is not None and (found.form is not None or found.url is None)


async def _elicit(context: Context, asked: types.ElicitRequestFormParams) -> types.ElicitResult:
    """Ask the client, as it is done on a connection of the earlier versions of the protocol."""
    try:
        return await context.session.elicit_form(asked.message, asked.requested_schema, context.request_id)
    except MCPError as error:  # it can't after all
        logger.info("the client asks nobody: %s", error)
        return types.ElicitResult(action="cancel")


def _input_required(result: RunResult, declined: set[str], state: State) -> types.InputRequiredResult:
    requests: dict[str, Any] = {key_of(item): form_of(item) for item in result.pending if key_of(item) not in declined}
    return types.InputRequiredResult(input_requests=requests, request_state=msgspec.json.encode(state).decode())


async def _report_progress(context: Context, run: Run) -> None:
    """Report the run's events as the progress of the call; that nobody hears them ends nothing."""
    number = 0
    with suppress(UnderstudyError, MCPError):
        async for event in run:
            text = described(event)
            if text is not None:
                number += 1
                await context.session.report_progress(number, None, text)


def _structured(result: RunResult, state: State) -> dict[str, Any]:
    output = {} if result.output is None else {"output": json.loads(json.dumps(result.output, default=jsonable))}
    return {"text": result.text, "status": result.status, **msgspec.to_builtins(state), **output}


def _ended(result: RunResult, state: State) -> types.CallToolResult:
    text = result.text
    if not result.ok:
        reason = (result.error or {}).get("message") or "no reason given"
        text = "\n\n".join(filter(None, (text, f"The run ended as {result.status}: {reason}")))
    content: list[types.ContentBlock] = [types.TextContent(text=text)]
    return types.CallToolResult(content=content, structured_content=_structured(result, state), is_error=not result.ok)
