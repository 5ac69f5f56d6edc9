"""The console's server: JSON and server-sent events about a cluster, and the page's own files. Knows no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import understudy
from understudy.errors import (
    InvalidInput,
    StoreUnreachable,
    UnderstudyError,
    UnknownRun,
    UnknownSession,
)
from understudy.event_wire import EventWire
from understudy.events import Event
from understudy.identifiers import check_identifier
from understudy.messages import Message
from understudy.reads import AccountRecord, RunSummary, SessionRecord, WaitsIn, Wakeup, WorkflowStatus
from understudy.workflows import WORKFLOW

from ..client.fleet import Source, Wire, problem_of
from .access import HEADERS, Access, AccessDenied, Binding
from .download import lines
from .fleet_requests import fleet_routes
from .live import Hub, TooManyViewers
from .parsing import PAGE_LIMIT, Handler, json_answer, json_body, number, session_of

STATIC = Path(__file__).parent / "static"
WRONG_TOKEN_SECONDS = 0.5
ACT_SECONDS = 30.0
TRACE_EVENTS = 20_000

ACTIONS: dict[str, tuple[str, ...]] = {
    "cancel": ("run_id", "reason"),
    "close": ("reason",),
    "resume": (),
    "abort_pending": ("call_id",),
    "answer": ("call_id", "decision", "text", "asked"),
    "decide": ("decisions",),
}
"""What a page may ask of a session: methods of `Requests`, and their arguments in order."""

DEFAULTS = {
    "run_id": None,
    "reason": "asked for in the console",
    "call_id": None,
    "decision": "ok",
    "text": "",
    "decisions": (),
}


def application(source: Source, binding: Binding, *, namespace: str = "") -> Starlette:
    """The application for one cluster."""
    return Console(source, binding, namespace).app


class Console:
    """The handlers of all requests."""

    def __init__(self, source: Source, binding: Binding, namespace: str) -> None:
        self._source = source
        self._namespace = namespace
        self._access = Access(binding)
        self._hub = Hub(source)
        read, act = self._reading, self._acting
        routes = [
            Route("/", self._index),
            Route("/healthz", self._healthy),
            Route("/api/login", self._answered(self._log_in), methods=["POST"]),
            Route("/api/logout", self._answered(self._log_out), methods=["POST"]),
            Route("/api/me", self._answered(self._me)),
            Route("/api/fleet/stream", read(self._fleet_stream)),
            Route("/api/sessions/{session}", read(self._session)),
            Route("/api/sessions/{session}/stream", read(self._tree_stream)),
            Route("/api/sessions/{session}/messages", read(self._messages)),
            Route("/api/sessions/{session}/events", read(self._events)),
            Route("/api/sessions/{session}/trace", read(self._trace)),
            Route("/api/sessions/{session}/download", read(self._download)),
            *fleet_routes(source, self._hub, read, act, self._identity),
            Route("/api/sessions/{session}/{action}", act(self._act), methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        self.app = app
        app.add_middleware(_Headers, prefix=binding.prefix)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        tidying = asyncio.create_task(self._hub.tidy())
        try:
            yield
        finally:
            tidying.cancel()
            await self._hub.close()

    # Rules.

    def _answered(self, handler: Handler) -> Handler:
        """Errors become answers that say what is wrong."""

        async def answer(request: Request) -> Response:
            try:
                self._access.check_host(request)
                return await handler(request)
            except AccessDenied as error:
                return json_answer({"error": {"code": "access_denied", "message": str(error)}}, error.status)
            except TimeoutError:
                return json_answer({"error": StoreUnreachable("the services gave no answer in time").to_wire()}, 503)
            except UnderstudyError as error:
                return json_answer({"error": error.to_wire()}, _status(error))
            except Exception as error:
                return json_answer({"error": problem_of(error)}, 500)

        return answer

    def _reading(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            self._access.check_read(request)
            return await handler(request)

        return self._answered(checked)

    def _acting(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            self._access.check_act(request)
            return await handler(request)

        return self._answered(checked)

    # Answers.

    async def _index(self, _request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _healthy(self, _request: Request) -> Response:
        return json_answer({"ok": True})

    async def _me(self, request: Request) -> Response:
        access = self._access
        person = access.person(request)
        locked = access.has_token and person is None
        state = {"has_token": access.has_token, "locked": locked, "may_act": access.may_act(request)}
        name = person.name if person else ""
        shown = {"name": name, "namespace": self._namespace, "version": understudy.__version__}
        return json_answer({**state, **({} if locked else shown)})

    async def _log_in(self, request: Request) -> Response:
        self._access.check_origin(request)
        cookie = self._access.log_in(str((await json_body(request)).get("token", "")))
        if cookie is None:
            await asyncio.sleep(WRONG_TOKEN_SECONDS)
            raise AccessDenied("this is not the console's token", 401)
        response = json_answer({"ok": True})
        response.set_cookie(value=cookie, **self._access.cookie(request))
        return response

    async def _log_out(self, request: Request) -> Response:
        self._access.check_origin(request)
        self._access.log_out(request)
        response = json_answer({"ok": True})
        response.delete_cookie(**self._access.cookie(request))
        return response

    async def _fleet_stream(self, request: Request) -> Response:
        await self._hub.check("")
        return self._stream(request, self._hub.fleet())

    async def _tree_stream(self, request: Request) -> Response:
        session = session_of(request)
        await self._hub.check(session)
        last = request.headers.get("last-event-id") or request.query_params.get("last", "")
        return self._stream(request, self._hub.tree(session, last))

    def _stream(self, request: Request, parts: AsyncGenerator[str, None]) -> Response:
        return StreamingResponse(
            self._while_known(request, parts), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def _while_known(self, request: Request, parts: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        """Until the request's cookie ends; there is a part every `HEARTBEAT_SECONDS` at least."""
        async with aclosing(parts) as following:
            async for part in following:
                if not self._access.may_read(request):
                    break
                yield part

    async def _session(self, request: Request) -> Response:
        session = session_of(request)

        async def read() -> Wire:
            record = await self._source.read(SessionRecord, "info", session)
            steps = None
            if record.kind == WORKFLOW:
                steps = await self._source.read(WorkflowStatus, "workflow_status", session)
            waits: list[WaitsIn] = []
            if record.status == "waiting_for_queue":
                waits = await self._source.read(list[WaitsIn], "waits_in", session)
            return {
                "session": record,
                "workflow": steps,
                "waits_in": waits[0] if waits else None,
                "runs": await self._source.read(list[RunSummary], "latest_runs", session),
                "budgets": await self._source.read(list[AccountRecord], "budgets", session),
                "wakeups": await self._source.read(list[Wakeup], "wakeups", session),
            }

        return json_answer(await self._hub.reads.get(("session", session), read))

    async def _messages(self, request: Request) -> Response:
        session, after = session_of(request), number(request.query_params.get("after"), 0, most=1 << 62)

        async def read() -> Any:
            found = await self._source.read(list[Message], "messages", session, after, PAGE_LIMIT)
            return [message.to_wire() for message in found]

        return json_answer({"messages": await self._hub.reads.get(("messages", session, after), read)})

    async def _events(self, request: Request) -> Response:
        session, query = session_of(request), request.query_params
        before = number(query["before"], 0, most=1 << 62) if "before" in query else None
        limit = number(query.get("limit"), 200)

        async def read() -> Any:
            return await self._source.read(list[EventWire], "event_page", session, before, limit)

        return json_answer({"events": await self._hub.reads.get(("events", session, before, limit), read)})

    async def _trace(self, request: Request) -> Response:
        session, run = session_of(request), request.query_params.get("run") or None
        if run is not None:
            check_identifier(run, "run")

        async def read() -> Wire:
            from understudy.observability.traces import trace_of

            page = partial(self._source.read, list[EventWire], "trace", session, run)
            wires: list[EventWire] = []
            after, truncated = ("", 0), False
            while not truncated and (some := await page(after)):
                truncated = len(wires) >= TRACE_EVENTS
                wires += [] if truncated else some
                after = (some[-1]["session_id"], some[-1]["seq"])
            spans = await asyncio.to_thread(trace_of, map(Event.from_wire, wires))
            return {"spans": spans, "events": len(wires), "truncated": truncated}

        return json_answer(await self._hub.reads.get(("trace", session, run), read))

    async def _download(self, request: Request) -> Response:
        session = session_of(request)
        record = await self._source.read(SessionRecord, "info", session)
        named = {"content-disposition": f'attachment; filename="{session}.jsonl"'}  # an id has no quotes
        return StreamingResponse(lines(self._source, record), media_type="application/x-ndjson", headers=named)

    async def _act(self, request: Request) -> Response:
        session, action = session_of(request), request.path_params["action"].replace("-", "_")
        if action not in ACTIONS:
            raise InvalidInput(f"a session can't be asked to {action!r}")
        body = await json_body(request)
        _check_body(action, body)
        arguments = [body.get(name, DEFAULTS.get(name)) for name in ACTIONS[action]]
        async with asyncio.timeout(ACT_SECONDS):
            done = await self._source.act(action, session, *arguments, by=self._identity(request))
        return json_answer({"done": done})

    def _identity(self, request: Request) -> str:
        """Who has sent a request; empty if nobody is known."""
        person = self._access.person(request)
        return person.name if person else ""


def _check_body(action: str, body: Wire) -> None:
    texts = [body.get(name) for name in ("run_id", "reason", "call_id", "decision", "text")]
    if any(text is not None and (not isinstance(text, str) or "\0" in text) for text in texts):
        raise InvalidInput("run_id, reason, call_id, decision and text are strings without zero bytes")
    if action == "decide" and not (isinstance(body.get("decisions"), list) and body["decisions"]):
        raise InvalidInput("name the decisions, of a call each")
    if action != "answer":
        return
    if not body.get("call_id") or not isinstance(body.get("asked"), int):
        raise InvalidInput("an answer names the call, and which time it asked: a number")
    decision = body.get("decision", DEFAULTS["decision"])
    if decision not in ("ok", "error", "rerun") or (decision == "rerun") == bool(body.get("text")):
        raise InvalidInput("an answer is a text, or has the call run again")


class _Headers:
    """ASGI middleware: the headers of every answer, and the prefix of paths, which a proxy may have taken off."""

    def __init__(self, app: Any, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._prefix and scope["type"] == "http":
            if scope["path"] == self._prefix:  # without the slash the page's own files would be beside it
                return await RedirectResponse(f"{self._prefix}/", 308)(scope, receive, send)
            if scope["path"].startswith(f"{self._prefix}/"):
                scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}

        async def sent(part: Any) -> None:
            if part["type"] == "http.response.start":
                cached = scope.get("path", "").startswith("/static/") or scope.get("path") == "/"
                more = {**HEADERS, "cache-control": "no-cache" if cached else "no-store"}
                part = {**part, "headers": [*part["headers"], *((k.encode(), v.encode()) for k, v in more.items())]}
            await send(part)

        await self._app(scope, receive, sent if scope["type"] == "http" else send)


def _status(error: UnderstudyError) -> int:
    if isinstance(error, (UnknownSession, UnknownRun)):
        return 404
    if isinstance(error, TooManyViewers | StoreUnreachable) or error.code in ("cluster_unreachable", "service_gone"):
        return 503
    return 400 if isinstance(error, InvalidInput) else 409
