"""What the console is asked about many sessions, nodes, schedules and queues, and an input from a person."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from understudy.errors import InvalidInput, UnderstudyError
from understudy.identifiers import check_identifier
from understudy.protocol import Input, Signal, packed
from understudy.reads import DrainInfo, NodeLoad, NodeSessions, QueueInfo, ScheduleInfo, SessionPage, TriageEntry
from understudy.records import RUN_STATUSES, SESSION_STATUSES

from ..client.fleet import Source
from ..client.running_again import run_again
from .live import Hub
from .parsing import Handler, json_answer, json_body, number, session_of

ACT_SECONDS = 30.0
LATEST_TIME = 1 << 62
LOAD_SECONDS = 2.0
SHOWN_CHARACTERS = 500
SHOWN_ENTRIES = 200
DRAIN_SECONDS = 600.0
LONGEST_DRAIN = 24 * 3600


def fleet_routes(
    source: Source,
    hub: Hub,
    read: Callable[[Handler], Handler],
    act: Callable[[Handler], Handler],
    identity: Callable[[Request], str],
) -> list[Route]:
    """The routes.

    Args:
        read, act: put a handler behind the rules for who may read, and who may act.
        identity: who has sent a request; empty if nobody is known.
    """
    found = FleetRequests(source, hub, identity)
    return [
        Route("/api/sessions", read(found.page)),
        Route("/api/nodes", read(found.nodes)),
        Route("/api/schedules", read(found.schedules)),
        Route("/api/nodes/{node}/drain", act(found.drain), methods=["POST"]),
        Route("/api/nodes/{node}/undrain", act(found.undrain), methods=["POST"]),
        Route("/api/sessions/{session}/send", act(found.send), methods=["POST"]),
        Route("/api/sessions/{session}/run-again", act(found.run_again), methods=["POST"]),
        Route("/api/sessions/{session}/signal", act(found.signal), methods=["POST"]),
    ]


class FleetRequests:
    """The handlers."""

    def __init__(self, source: Source, hub: Hub, identity: Callable[[Request], str]) -> None:
        self._source = source
        self._hub = hub
        self._identity = identity

    async def page(self, request: Request) -> Response:
        """A page of sessions (`understudy.store.reads.overview.page`)."""
        query = request.query_params
        by = query.get("by", "created_at")
        at, _, last = query.get("cursor", "").partition(",")
        options: dict[str, Any] = {
            "text": _text(query.get("text", "")),
            "statuses": _known(query.getlist("status"), SESSION_STATUSES),
            "outcomes": _known(query.getlist("outcome"), RUN_STATUSES),
            "agent": _text(query.get("agent", "")),
            "root_id": check_identifier(query["tree"], "tree") if query.get("tree") else "",
            "by": by,
            "since": number(query.get("since"), 0, most=LATEST_TIME),
            "until": number(query.get("until"), 0, most=LATEST_TIME),
            "cursor": (number(at, 0, most=LATEST_TIME), check_identifier(last, "cursor")) if last else None,
            "limit": max(1, number(query.get("limit"), 50)),
        }

        async def read() -> Any:
            return await self._source.read(SessionPage, "page", **options)

        return json_answer(await self._hub.reads.get(("page", *options.values()), read))

    async def nodes(self, _request: Request) -> Response:
        """The nodes that have a service, or are drained: processes, sessions with work, drains, and their load."""

        async def read() -> Any:
            services, sessions, drains = await asyncio.gather(
                self._source.services(),
                self._source.read(list[NodeSessions], "node_sessions"),
                self._source.read(list[DrainInfo], "drains"),
            )
            nodes = [service.node_id for service in services if service.role == "node"]
            loads = await asyncio.gather(*map(self._load, nodes))
            return {
                "services": packed(services), "sessions": packed(sessions), "drains": packed(drains),
                "loads": {node_id: packed(load) for node_id, load in zip(nodes, loads, strict=True)},
            }  # fmt: skip

        return json_answer(await self._hub.reads.get(("nodes",), read))

    async def schedules(self, _request: Request) -> Response:
        """The schedules, what of theirs is open in triage, and the queues."""

        async def read() -> Any:
            schedules, triage, queues = await asyncio.gather(
                self._source.read(list[ScheduleInfo], "schedules"),
                self._source.read(list[TriageEntry], "triage"),
                self._source.read(list[QueueInfo], "queues"),
            )
            shown = [replace(one, content=str(one.content)[:SHOWN_CHARACTERS]) for one in schedules]
            at = time.time_ns() // 1_000
            return {"at": at, "schedules": shown, "triage": triage[:SHOWN_ENTRIES], "queues": queues}

        return json_answer(await self._hub.reads.get(("schedules",), read))

    async def _load(self, node_id: str) -> NodeLoad | None:
        """None of one that does not say, so that the others are shown."""
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                return await self._source.load(node_id)
        except (TimeoutError, UnderstudyError):
            return None

    async def drain(self, request: Request) -> Response:
        """Begin to drain a node; how far it is, `nodes` says."""
        seconds = (await json_body(request)).get("seconds", DRAIN_SECONDS)
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= LONGEST_DRAIN:
            raise InvalidInput(f"a drain takes from 0 to {LONGEST_DRAIN} seconds")
        async with asyncio.timeout(ACT_SECONDS):
            await self._source.drain(_node(request), float(seconds), self._identity(request))
        return json_answer({"done": True})

    async def undrain(self, request: Request) -> Response:
        """Take a drain back."""
        async with asyncio.timeout(ACT_SECONDS):
            return json_answer({"done": await self._source.undrain(_node(request))})

    async def send(self, request: Request) -> Response:
        """An input for a session. The page chooses the run's id, so that one that is sent twice is accepted once."""
        session, body = session_of(request), await json_body(request)
        text, run_id = body.get("text"), body.get("run_id")
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            raise InvalidInput("an input is a text, without zero bytes")
        if not isinstance(run_id, str):
            raise InvalidInput("name the run that the input begins: run_id")
        run = Input(check_identifier(run_id, "run_id"), text)
        async with asyncio.timeout(ACT_SECONDS):
            accepted = await self._source.act("send", session, run, by=self._identity(request))
        return json_answer({"done": bool(accepted["created"]), "run_id": run.run_id})

    async def run_again(self, request: Request) -> Response:
        """The input of a run that did not complete, once more; see `running_again.run_again`."""
        session, body = session_of(request), await json_body(request)
        run_id = body.get("run_id")
        if not isinstance(run_id, str) or not run_id or "\0" in run_id:
            raise InvalidInput("name the run that did not complete: run_id")
        async with asyncio.timeout(ACT_SECONDS):
            found = await run_again(self._source, session, run_id, by=self._identity(request))
        return json_answer({"done": found is not None and found[1], "run_id": found[0] if found else None})

    async def signal(self, request: Request) -> Response:
        """An event for a workflow; see `Session.signal`."""
        session, body = session_of(request), await json_body(request)
        name = body.get("name")
        if not isinstance(name, str):
            raise InvalidInput("name what the workflow waits for: name")
        wanted = Signal(check_identifier(name, "name"), body.get("payload"))
        async with asyncio.timeout(ACT_SECONDS):
            waited = await self._source.act("signal", session, wanted, by=self._identity(request))
        return json_answer({"done": True, "waited": bool(waited)})


def _node(request: Request) -> str:
    return check_identifier(request.path_params["node"], "node")


def _text(given: str) -> str:
    return given[:200].replace("\0", "")


def _known(given: list[str], names: tuple[str, ...]) -> tuple[str, ...]:
    """Those that there are; a name that is none is refused, since leaving it out would find all."""
    unknown = set(given) - set(names)
    if unknown:
        raise InvalidInput(f"there is no status {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return tuple(sorted(set(given)))
