"""The public client: `Cluster`, `Session`, `Run`. One API for synchronous and asynchronous programs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.config import ModelProfile, Settings, model_profile_from_environment
from understudy.errors import DeadlineExceeded, InvalidConfiguration, InvalidInput, RunFailed, StoreUnreachable
from understudy.events import Event, ModelCallCompleted, RunFinished
from understudy.identifiers import check_identifier, new_identifier, read_traceparent
from understudy.messages import Message
from understudy.prices import price_table
from understudy.records import PAGE, RUN_STATUSES
from understudy.spec import AgentSpec
from understudy.wakeups import name_problem, wakeup_problem

from . import background
from .client_connection import ClientConnection
from .compiling import by_value, compile_spec, place
from .packages import refuse_temporary
from .results import BudgetUse, DrainInfo, PendingInput, RunResult, ServiceInfo, SessionInfo, Wakeup
from .streaming import Streaming

if TYPE_CHECKING:
    from understudy.observability.traces import TraceSpan  # which loads the OpenTelemetry SDK

STORE_PAUSE_SECONDS = 0.5
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 20.0, 120.0
"""Whoever waits for a run's end looks in the store after so long, later less often: other clusters tell nobody here."""


class Cluster:
    """A connection to the services of one store and namespace. Use it as a context manager, or call `close`.

    Closing ends the connection only: runs go on, and another process can attach to them by their ids.
    """

    def __init__(
        self,
        connection: ClientConnection,
        settings: Settings,
        profile: str | None,
        pickle: Callable[[Any], bytes] | None = by_value,
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._profile = profile
        self._pickle = pickle
        self._placement: str | None = None

    @classmethod
    def connect(
        cls,
        store: str | None = None,
        *,
        address: str | None = None,
        namespace: str | None = None,
        model: str | None = None,
        standby: int | None = None,
        max_actors: int | None = None,
        profiles: Iterable[ModelProfile] = (),
        prices: Mapping[str, Any] | str | Path | None = None,
        code_by_value: bool = True,
        start: bool = True,
        timeout: float = 60.0,
    ) -> Cluster:
        """Connect; start Ray as a daemon if none runs, and the services if they don't.

        Args:
            store: DSN; default `UNDERSTUDY_STORE`, else one SQLite file per user.
            address: of Ray; default `RAY_ADDRESS`, else the cluster on this machine.
            namespace, model, standby, max_actors: instead of the `UNDERSTUDY_…` variables.
            profiles: endpoints and credentials by name, for specs that name one; the first is the default.
            prices: what models cost, by name, as `{"input", "cached_input", "output"}` per million tokens, or a JSON or
                TOML file of that; beside `UNDERSTUDY_PRICES`. The services take them from the connect that starts them,
                and with the profiles of any; a profile's own come first.
            code_by_value: let tools defined in `__main__` travel by value.
            start: start what does not run; if False, raise `ClusterUnreachable` instead.
            timeout: seconds until the services must answer.

        Raises:
            InvalidConfiguration: a setting can't be used.
            ClusterUnreachable, StoreUnreachable, StoreOwned, StoreVersion: what is missing, and what to do.
        """
        from ..ray.connection import Connection  # loads Ray, which `understudy.testing.LocalCluster` has no use for
        from ..ray.ray_edge import connect_ray

        settings = Settings.from_environment(store=store)
        given: dict[str, Any] = {"namespace": namespace, "model": model, "standby": standby, "max_actors": max_actors}
        settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
        check_identifier(settings.namespace, "namespace")
        check_size(settings)
        settings = replace(settings, prices={**settings.prices, **price_table(prices or {})})
        refuse_temporary(settings.store)
        known = list(profiles)
        own = model_profile_from_environment()
        if own is not None:
            known.append(own)
        known = [replace(profile, prices={**settings.prices, **profile.prices}) for profile in known]
        # Here, not on the background loop: Ray sets its signal handlers only from the main thread.
        connection = Connection(settings, connect_ray(address, start=start))
        background.wait(connection.open(known, timeout, start=start))
        default = known[0].name if known else None
        return cls(connection, settings, default, by_value if code_by_value else None)

    def spawn(self, spec: AgentSpec, *, session_id: str | None = None) -> Session:
        """Get or create a session for an agent; the same id and spec give the same session.

        Raises:
            InvalidSpec: the spec can't be used, or limits the cost of a model without a price.
            SessionConflict: the id exists with another spec.
        """
        if not isinstance(spec, AgentSpec):
            raise InvalidInput(f"spawn takes an AgentSpec, not {type(spec).__name__}")
        identifier = check_identifier(session_id, "session_id") if session_id is not None else new_identifier()
        compiled = compile_spec(spec, model=self._settings.model, profile=self._profile, pickle=self._pickle)
        driver = self._connection.code_placement() if compiled.uses_own_code else {}
        placements = place(compiled.spec, driver)
        session = {
            "session_id": identifier,
            "spec": compiled.spec,
            "placement": compiled.spec["placement"],
            "metadata": dict(spec.metadata),
        }
        blobs = {**compiled.blobs, **placements}
        background.wait(self._connection.spawn(session, blobs, [*placements], driver.get("runtime_env")))
        return Session(self, identifier)

    def session(self, session_id: str) -> Session:
        """A session by its id; whether it exists shows when it is used."""
        return Session(self, check_identifier(session_id, "session_id"))

    def sessions(self, *, live_only: bool = False, roots_only: bool = False, limit: int = 100) -> list[SessionInfo]:
        """Sessions, newest first."""
        rows = self._read("sessions", live_only=live_only, roots_only=roots_only, limit=limit)
        return [SessionInfo.from_row(row) for row in rows]

    def services(self) -> list[ServiceInfo]:
        """The processes of the cluster."""
        return background.wait(self._connection.services())

    def drain(
        self, node_id: str | None = None, timeout: float = 600.0, *, wait: bool = True, stop: bool = False
    ) -> list[DrainInfo]:
        """Have a node's sessions finish what they are at, commit, and go on at other nodes; it gets no new ones.

        Args:
            node_id: or the beginning of one; None with `stop` only.
            timeout: seconds; what is left then moves the hard way, as if the node were lost.
            wait: until nothing is left there.
            stop: all nodes, and with nobody to go on: everything is parked, then the services end.

        Raises:
            CannotDrain: the node is unknown, or there would be nobody to go on.
        """
        return background.wait(self._connection.drain(node_id, timeout, wait=wait or stop, stop=stop))

    def undrain(self, node_id: str) -> bool:
        """Take a drain back: the node gets new sessions again; True if it was drained."""
        return background.wait(self._connection.undrain(node_id))

    def drains(self) -> list[DrainInfo]:
        """The nodes that are drained, or were."""
        return [DrainInfo.from_row(row) for row in self._read("drains")]

    def close(self) -> None:
        """End the connection; everything goes on."""
        background.wait(self._connection.close())

    def shutdown(self) -> None:
        """End the services of this store and namespace. Unfinished runs continue with the next `connect`."""
        background.wait(self._connection.shutdown())

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _read(self, what: str, *arguments: Any, **options: Any) -> Any:
        return background.wait(self._connection.read(what, *arguments, **options))


class Session:
    """One durable conversation of one agent."""

    def __init__(self, cluster: Cluster, session_id: str) -> None:
        self._cluster = cluster
        self._connection = cluster._connection
        self.id = session_id

    def send(
        self, content: str | list[dict[str, Any]], *, run_id: str | None = None, traceparent: str | None = None
    ) -> Run:
        """Queue an input; returns when it is durably accepted. A `run_id` sent again with the same input is one run.

        Args:
            traceparent: of the caller's span, as W3C Trace Context writes it: the run becomes a part of its trace. By
                default the span that is current in this thread or task, if the program uses OpenTelemetry and there is
                one; an empty text for none, and a trace of the run's own. `tracestate` is not carried on.

        Raises:
            InvalidInput: there is no content, or this is no `traceparent`.
            UnknownSession, SessionClosed: there is nobody to send to.
            RunConflict: the `run_id` was used for another input.
        """
        if not content or not isinstance(content, (str, list)):
            raise InvalidInput("send takes a text or a list of content parts, and it must not be empty")
        run_id = check_identifier(run_id, "run_id") if run_id is not None else new_identifier()
        run: dict[str, Any] = {"run_id": run_id, "content": content}
        caller = current_span() if traceparent is None else read_traceparent(traceparent) if traceparent else None
        if caller is not None:
            run["trace_id"], run["parent_span_id"] = caller
        accepted = background.wait(self._connection.change("send", self.id, run))
        return Run(self._cluster, self.id, run_id, accepted["after"] if accepted["created"] else None)

    def run(self, run_id: str) -> Run:
        """A run by its id, from any process."""
        return Run(self._cluster, self.id, check_identifier(run_id, "run_id"))

    def cancel(self, reason: str = "cancelled by the client") -> bool:
        """Ask the current run to end, and all it spawned; True if there was one."""
        return bool(background.wait(self._connection.change("cancel", self.id, None, reason)))

    def pending(self) -> list[PendingInput]:
        """What its current run asks people, oldest first: calls that wait for `answer`."""
        return [PendingInput.from_row(row) for row in self._cluster._read("questions", self.id)]

    def answer(self, call_id: str, text: str = "", *, failed: bool = False, rerun: bool = False) -> bool:
        """Answer a call that waits for a person; returns when the answer is durably accepted.

        Args:
            text: the result of the call, as the model will read it.
            failed: the text says why the call failed.
            rerun: a call in doubt runs again; there is no text then.

        Returns:
            True if the answer is new, False if it was given before.

        Raises:
            NotAsked: the call did not ask, or nobody waits for its answer any more.
            AnswerConflict: it was answered otherwise.
        """
        if rerun == bool(text) or (rerun and failed):
            raise InvalidInput("answer takes a text, or rerun=True without one")
        decision = "rerun" if rerun else "error" if failed else "ok"
        # Which time the call asked last, answered or not: the request must not answer a question that comes after it.
        asked = self._cluster._read("asked", self.id, call_id)
        return bool(background.wait(self._connection.change("answer", self.id, call_id, decision, text, asked)))

    def abort_pending(self, call_id: str | None = None) -> list[str]:
        """Give up the calls that wait for a person, or one of them, and let the run go on; returns their ids."""
        found: list[str] = background.wait(self._connection.change("abort_pending", self.id, call_id))
        return found

    def schedule(self, prompt: str, seconds: float, every: float | None = None, name: str | None = None) -> Wakeup:
        """Have the session get an input later; returns when that is durable.

        The run's id is `wakeup.NAME.DUE_AT`. A name has one wakeup: the same content again changes nothing, not even
        when it is due; another content replaces it. Once it has fired for the last time its name is free.

        Args:
            seconds: from now.
            every: again so many seconds after each time; missed ones are made up for by one.
            name: by default a new one.

        Raises:
            InvalidInput: this is no wakeup, or the session may not have one (more).
            UnknownSession, SessionClosed: there is nobody to wake.
        """
        name = name if name is not None else new_identifier()
        problem = wakeup_problem(prompt, seconds, every, name)
        if problem is not None:
            raise InvalidInput(problem, session_id=self.id)
        wakeup = {"name": name, "prompt": prompt, "seconds": seconds, "every": every}
        done = background.wait(self._connection.change("schedule", self.id, wakeup))
        return Wakeup(name, prompt, done["due_at"], every)

    def wakeups(self) -> list[Wakeup]:
        """What was scheduled and is not over, by the session itself or by clients; the first that is due first."""
        return [Wakeup(**row) for row in self._cluster._read("wakeups", self.id)]

    def cancel_wakeup(self, name: str) -> bool:
        """Give a wakeup up; an input that it has brought already stays. True if there was one."""
        problem = name_problem(name)
        if problem is not None:
            raise InvalidInput(problem, session_id=self.id)
        return bool(background.wait(self._connection.change("cancel_wakeup", self.id, name)))

    def resume(self) -> bool:
        """Let a quarantined session take input again; its runs stay ended. True if it was quarantined.

        Raises:
            SessionClosed: it was a sub-agent, or was closed.
        """
        return bool(background.wait(self._connection.change("resume", self.id)))

    def close(self, reason: str = "closed by the client") -> bool:
        """Take no more input and cancel what runs; True if the session was open."""
        return bool(background.wait(self._connection.change("close", self.id, reason)))

    def info(self) -> SessionInfo:
        """The session's state. Raises `UnknownSession`."""
        return SessionInfo.from_row(self._cluster._read("info", self.id))

    def budgets(self) -> list[BudgetUse]:
        """The limits that it is held to, its own and those of the trees it is in, nearest first, and what is used."""
        return [BudgetUse.from_row(row) for row in self._cluster._read("budgets", self.id)]

    def runs(self) -> list[dict[str, Any]]:
        """Its runs, oldest first, as plain data."""
        rows: list[dict[str, Any]] = self._cluster._read("runs", self.id)
        return rows

    def messages(self, after: int = 0) -> list[Message]:
        """Its messages in order."""
        pages = _pages(lambda after: self._cluster._read("messages", self.id, after), after)
        return [Message.from_wire(wire) for wire in pages]

    def events(self, after: int = 0) -> list[Event]:
        """Its events in order."""
        pages = _pages(lambda after: background.wait(self._connection.request("events", self.id, after)), after)
        return [Event.from_wire(wire) for wire in pages]

    def trace(self, run_id: str | None = None) -> list[TraceSpan]:
        """The trace of a run (default: the last one) by start, from committed events: sub-agents' spans, crashes and
        what still goes on included.

        Raises:
            UnknownSession, UnknownRun: there is none.
            EventsPruned: its events were removed.
        """
        from understudy.observability.traces import trace_of

        def events() -> Iterator[Event]:
            after = ("", 0)
            while wires := self._cluster._read("trace", self.id, run_id, after):
                yield from map(Event.from_wire, wires)
                after = (wires[-1]["session_id"], wires[-1]["seq"])

        return trace_of(events())

    def tree(self) -> list[SessionInfo]:
        """This session and all below it, parents before children."""
        return [SessionInfo.from_row(row) for row in self._cluster._read("tree", self.id)]

    def children(self) -> list[SessionInfo]:
        """The sessions it spawned."""
        return [info for info in self.tree() if info.parent_id == self.id]

    def __repr__(self) -> str:
        return f"Session({self.id!r})"


def _pages(read: Callable[[int], list[dict[str, Any]]], after: int) -> Iterator[dict[str, Any]]:
    """All that follows `after`; the services tell so much at a time."""
    while True:
        page = read(after)
        yield from page
        if len(page) < PAGE:
            return
        after = page[-1]["seq"]


class Run:
    """One input and what becomes of it: awaitable, iterable, asynchronously iterable."""

    def __init__(self, cluster: Cluster, session_id: str, run_id: str, after: int | None = None) -> None:
        self._connection = cluster._connection
        self.session_id = session_id
        self.run_id = run_id
        # The session's `seq` before this run was accepted; None where only the store knows whether there is such a run.
        self._after = after

    def result(self, timeout: float | None = None, *, check: bool = False) -> RunResult:
        """Wait for the end, or for a pause: then `status` is `waiting_for_input`, and `pending` must be answered.

        Asked again after the answer, it waits on.

        Args:
            timeout: seconds; None waits as long as it takes.
            check: raise `RunFailed` unless the run completed.

        Raises:
            DeadlineExceeded: the run goes on.
            UnknownSession, UnknownRun: there is no such run.
        """
        return background.wait(self._result(timeout, check))

    def cancel(self, reason: str = "cancelled by the client") -> bool:
        """Ask it to end; True if it had not ended."""
        return bool(background.wait(self._connection.change("cancel", self.session_id, self.run_id, reason)))

    def __await__(self) -> Generator[Any, None, RunResult]:
        return asyncio.wrap_future(background.submit(self._result(None, False))).__await__()

    def __iter__(self) -> Iterator[Event]:
        """Its events as they are committed, and its text as it streams (`TextDelta`), until it ends.

        Crashes in between show as events; nothing is missing and nothing comes twice. All deltas of a model call,
        since the last `StreamRestarted`, make up its text.
        """
        events = self._events()
        try:
            while True:
                try:
                    yield background.wait(_next(events))
                except StopAsyncIteration:
                    return
        finally:
            background.wait(events.aclose())  # type: ignore[attr-defined]

    async def __aiter__(self) -> AsyncIterator[Event]:
        events = self._events()
        try:
            while True:
                try:
                    yield await asyncio.wrap_future(background.submit(_next(events)))
                except StopAsyncIteration:
                    return
        finally:
            await asyncio.wrap_future(background.submit(events.aclose()))  # type: ignore[attr-defined]

    async def _row(self) -> dict[str, Any]:
        row: dict[str, Any] = await self._connection.read("run", self.session_id, self.run_id)
        return row

    async def _patient_row(self) -> dict[str, Any]:
        """The same; while the store is away the run waits, and so does who waits for it."""
        while True:
            try:
                return await self._row()
            except StoreUnreachable:
                await asyncio.sleep(STORE_PAUSE_SECONDS)

    async def _result(self, timeout: float | None, check: bool) -> RunResult:
        try:
            row = await asyncio.wait_for(self._ended(), timeout)
        except TimeoutError:
            raise DeadlineExceeded(
                f"run {self.run_id} has not ended after {timeout:g} s", session_id=self.session_id
            ) from None
        result = RunResult.from_row(row)
        if check and not result.ok:
            prompts = "; ".join(item.prompt for item in result.pending)
            message = (result.error or {}).get("message") or prompts or "no reason given"
            raise RunFailed(
                f"run {self.run_id} {'is' if result.pending else 'ended as'} {result.status}: {message}",
                session_id=self.session_id,
                details={"status": result.status, "error": result.error},
            )  # fmt: skip
        return result

    async def _ended(self) -> dict[str, Any]:
        """The run's row, once it has ended or is paused."""
        if self._after is None:
            row = await self._patient_row()
            if row["status"] in RUN_STATUSES:
                return row
        follow = self._connection.follower.follow(self.session_id, after=self._after or 0, ends=True)
        patience = LOOK_SECONDS
        async with follow as subscription:
            while True:
                try:
                    kind, *news = await asyncio.wait_for(subscription.queue.get(), patience)
                except TimeoutError:
                    row = await self._patient_row()
                    if row["status"] in RUN_STATUSES:  # another cluster took the store over and ended it there
                        return row
                    patience = min(2 * patience, LONGEST_LOOK_SECONDS)
                    continue
                if kind == "error":
                    raise news[0]
                event, row = news
                if event.run_id == self.run_id:
                    row = row if row is not None else await self._patient_row()
                    if row["status"] in RUN_STATUSES:  # a question may have been answered meanwhile
                        return row

    async def _events(self) -> AsyncIterator[Event]:
        if self._after is None:
            await self._row()
        streaming = Streaming(self.session_id, self.run_id)
        follow = self._connection.follower.follow(self.session_id, after=self._after or 0, stream=True)
        async with follow as subscription:
            while True:
                kind, *news = await subscription.queue.get()
                if kind == "error":
                    raise news[0]
                if kind == "text":
                    for delta in streaming.piece(*news):
                        yield delta
                    continue
                event = news[0]
                if event.run_id != self.run_id:
                    continue
                if isinstance(event, ModelCallCompleted) and (answer := await self._answer(event)) is not None:
                    for delta in streaming.rest(event, answer):
                        yield delta
                yield event
                if isinstance(event, RunFinished):
                    return

    async def _answer(self, event: ModelCallCompleted) -> Message | None:
        """The message right before this event; None where another attempt's answer came first."""
        wires = await self._connection.read("messages", self.session_id, event.seq - 2, 1)
        message = Message.from_wire(wires[0]) if wires else None
        if message is None or (message.seq, message.role, message.run_id) != (event.seq - 1, "assistant", self.run_id):
            return None
        return message

    def __repr__(self) -> str:
        return f"Run({self.session_id!r}, {self.run_id!r})"


def check_size(settings: Settings) -> None:
    """Raise `InvalidConfiguration` unless there can be so many session actors."""
    if not 0 <= settings.standby <= 64 or (settings.max_actors is not None and settings.max_actors < 1):
        raise InvalidConfiguration("standby must be 0 to 64, and max_actors at least 1")


def current_span() -> tuple[str, str] | None:
    """Trace id and span id of what the program is at, as OpenTelemetry knows it; it is not imported for that."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    return (f"{context.trace_id:032x}", f"{context.span_id:016x}") if context.is_valid else None


async def _next(events: AsyncIterator[Event]) -> Event:
    return await events.__anext__()
