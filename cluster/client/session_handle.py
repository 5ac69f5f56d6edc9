"""`Session`: one durable conversation, as its clients see it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from understudy.attachments import Given, as_content
from understudy.errors import InvalidInput
from understudy.event_wire import EventWire
from understudy.events import Event
from understudy.identifiers import check_identifier, new_identifier, read_traceparent
from understudy.json_text import from_json, to_json
from understudy.messages import Message
from understudy.notes import AGENT, SESSION, TREE, key_problem, text_problem
from understudy.protocol import (
    Accepted,
    Fork,
    Input,
    NewNote,
    NewWakeup,
    Scheduled,
    Signal,
    Spawned,
    Steer,
    Steered,
    content_problem,
)
from understudy.queues import QueuePlace
from understudy.reads import (
    BudgetUse,
    Note,
    PendingInput,
    PublishedValue,
    RunRecord,
    SessionRecord,
    Wakeup,
    WorkflowStatus,
)
from understudy.records import PAGE
from understudy.wakeups import name_problem, wakeup_problem

from .client_connection import ClientConnection
from .cluster_source import ClusterSource
from .method import client_method
from .people import Calls, Remember, arguments_text, decide, located, pending
from .queue_handle import queue_place
from .results import SessionInfo
from .run_handle import Run
from .running_again import run_again

if TYPE_CHECKING:
    from understudy.observability.traces import TraceSpan  # which loads the OpenTelemetry SDK

Item = TypeVar("Item")


class Session:
    """One durable conversation of one agent."""

    def __init__(self, connection: ClientConnection, session_id: str, output_type: Any = None) -> None:
        self._connection = connection
        self.id = session_id
        self._output_type = output_type

    @client_method
    async def send(
        self, content: Given, *, run_id: str | None = None, traceparent: str | None = None,
        queue: str | QueuePlace | None = None, key: str = "", priority: int = 0,
    ) -> Run:  # fmt: skip
        """Queue an input; returns when it is durably accepted. A `run_id` sent again with the same input is one run.

        Args:
            content: a text, an `Image` or `File`, or a list of these and of content parts as chat completions have
                them.
            traceparent: of the caller's span, as W3C Trace Context writes it: the run becomes a part of its trace. By
                default the span that is current in this thread or task, if the program uses OpenTelemetry and there is
                one; an empty text for none, and a trace of the run's own. `tracestate` is not carried on.
            queue: the run waits there until it may begin (docs/queues.md).
            key: whose run it is, for the queue's limit per key; empty: it counts for no key.
            priority: of the runs that wait, those with a higher one begin first; -1000 to 1000.

        Raises:
            InvalidInput: there is no content, or too much attached to it, or this is no `traceparent` or no place in a
                queue.
            UnknownQueue: there is no such queue.
            UnknownSession, SessionClosed: there is nobody to send to.
            RunConflict: the `run_id` was used for another input.
        """
        content = self._content(content)
        run_id = check_identifier(run_id, "run_id") if run_id is not None else new_identifier()
        caller = current_span() if traceparent is None else read_traceparent(traceparent) if traceparent else None
        trace_id, parent_span_id, sampled = caller or ("", "", None)
        run = Input(run_id, content, trace_id, parent_span_id, sampled, queue_place(queue, key, priority))
        accepted = await self._connection.change(Accepted, "send", self.id, run)
        after = accepted.after if accepted.created else None
        return Run(self._connection, self.id, run_id, after, self._output_type)

    def _content(self, given: Given) -> Any:
        """An input as it is sent. Raises `InvalidInput`."""
        content = as_content(given)
        problem = content_problem(content)
        if problem is not None:
            raise InvalidInput(problem, session_id=self.id)
        return content

    def run(self, run_id: str) -> Run:
        """A run by its id, from any process."""
        return Run(self._connection, self.id, check_identifier(run_id, "run_id"), None, self._output_type)

    @client_method
    async def cancel(self, reason: str = "cancelled by the client") -> bool:
        """Ask the current run to end, and all it spawned; True if there was one."""
        return await self._connection.change(bool, "cancel", self.id, None, reason)

    @client_method
    async def steer(self, content: Given, *, interrupt: bool = False) -> Run:
        """Send a message to the run that the session is at; returns that run when the message is durably accepted.

        The model is sent it in the run's next round, behind what the run has got by then; an answer that comes before
        that does not end the run. If the run ends otherwise first, an event says so (`SteerDropped`).

        Args:
            content: as for `send`.
            interrupt: what the run is at does not go on: the model call in flight is ended, and what has come of it
                kept; tools are cancelled; questions to people and waits are given up. Sub-agents go on, and the message
                is sent when they have ended.

        Raises:
            InvalidInput: there is no content, or too much attached to it.
            NotRunning: no run is at work, or it is about to end: use `send`.
            UnknownSession: there is no such session.
        """
        content = self._content(content)
        steered = await self._connection.change(Steered, "steer", self.id, Steer(content, interrupt))
        return Run(self._connection, self.id, steered.run_id)

    @client_method
    async def signal(self, name: str, payload: Any = None) -> bool:
        """Send a workflow a signal of this name (`WorkflowContext.event`); returns when it is durably accepted. If no
        step waits for it, it is kept for the next one that does, until the run ends.

        Args:
            payload: JSON data: what the step returns.

        Returns:
            True if a step waited for it.

        Raises:
            InvalidInput: the session is no workflow, this is no name or no JSON, or 1,000 signals wait already.
            NotRunning: it has no run, or one that is about to end.
            UnknownSession: there is no such session.
        """
        check_identifier(name, "the name of a signal")
        try:
            data = from_json(to_json(payload))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"the payload is no JSON data: {error}", session_id=self.id) from None
        return await self._connection.change(bool, "signal", self.id, Signal(name, data))

    @client_method
    async def query(self, name: str) -> Any:
        """The value that a workflow has published last under a name (`WorkflowContext.publish`); None without any."""
        found = await self._connection.read(PublishedValue, "published", self.id, name)
        return from_json(found.text) if found.text is not None else None

    @client_method
    async def workflow_status(self) -> WorkflowStatus:
        """The state of a workflow: its open steps, the last results, and the values that it has published.

        Raises:
            InvalidInput: the session is no workflow.
            UnknownSession: there is no such session.
        """
        return await self._connection.read(WorkflowStatus, "workflow_status", self.id)

    @client_method
    async def fork(self, at: int, *, session_id: str | None = None) -> Session:
        """Make a session of its own that begins with copies of this one's messages, under the same specification.

        This session may be at work, closed or quarantined: nothing about it changes. The fork's use of tokens, money
        and budgets begins at nothing. Its metadata have `forked_from` and `forked_at`.

        Args:
            at: `seq` of the last message that is copied, at which every tool call has its result; 0 for none. To have
                an input edited, fork before it and send another one.
            session_id: the fork's; the same one with the same origin and place is made once.

        Raises:
            InvalidInput: there is no such message, or a tool call has no result there; `details["allowed"]` has the
                nearest places.
            SessionConflict: the id is another session's.
            UnknownSession: there is no session to fork.
        """
        if not isinstance(at, int) or isinstance(at, bool) or at < 0:
            raise InvalidInput("at must be the seq of a message, or 0.", session_id=self.id)
        identifier = check_identifier(session_id, "session_id") if session_id is not None else new_identifier()
        await self._connection.change(Spawned, "fork", self.id, Fork(identifier, at))
        return Session(self._connection, identifier)

    @client_method
    async def pending(self, *, below: bool = False) -> list[PendingInput]:
        """What its current run asks people, oldest first: calls that wait for `answer`, `approve` or `reject`.

        Args:
            below: also what sub-agents ask, at whatever depth, for which the run waits.
        """
        return await pending(self._connection, self.id, below=below)

    @client_method
    async def answer(
        self, call: str | PendingInput, text: str = "", *, failed: bool = False, rerun: bool = False
    ) -> bool:
        """Answer a call that waits for a person; returns when the answer is durably accepted.

        Args:
            call: its id within this session, or what is pending, which may be a sub-agent's.
            text: the result of the call, as the model will read it; JSON that fits `PendingInput.form`, if it has one.
            failed: the text says why the call failed; a question of an MCP server is declined.
            rerun: a call in doubt runs again; there is no text then.

        Returns:
            True if the answer is new, False if it was given before.

        Raises:
            NotAsked: the call did not ask, or nobody waits for its answer any more.
            AnswerConflict: it was answered otherwise.
            InvalidInput: it needs an approval, not an answer, or the text does not fit the form.
        """
        if rerun == bool(text) or (rerun and failed):
            raise InvalidInput("answer takes a text, or rerun=True without one")
        decision = "rerun" if rerun else "error" if failed else "ok"
        session_id, call_id, asked = await located(self._connection, self.id, call)
        return await self._connection.change(bool, "answer", session_id, call_id, decision, text, asked)

    @client_method
    async def approve(
        self, call: Calls = None, *, arguments: dict[str, Any] | None = None, remember: Remember = False
    ) -> list[str]:
        """Let calls be executed that wait for an approval; returns when that is durable.

        Args:
            call: one or several, by their ids within this session or as they are pending, which may be sub-agents';
                None for all that wait in this session and below it. Those of one session are approved in one
                transaction.
            arguments: to be executed with, instead of the model's; of one call.
            remember: calls of the same tool (True) are approved for the rest of the session, or only those with the
                same arguments (`"arguments"`).

        Returns:
            Ids of the calls of which this is new.

        Raises:
            InvalidInput: a call asks something else, or its tool does not take the arguments.
            NotAsked, AnswerConflict: see `answer`.
        """
        text = arguments_text(arguments, self.id)
        return await decide(self._connection, self.id, call, "approve", text, remember)

    @client_method
    async def reject(self, call: Calls = None, reason: str = "", *, remember: Remember = False) -> list[str]:
        """Let calls not be executed that wait for an approval: the same as `approve` otherwise.

        Args:
            reason: the model reads it.
        """
        return await decide(self._connection, self.id, call, "reject", reason, remember)

    @client_method
    async def abort_pending(self, call_id: str | None = None) -> list[str]:
        """Give up the calls that wait for a person, or one of them, and let the run go on; returns their ids."""
        return await self._connection.change(list[str], "abort_pending", self.id, call_id)

    @client_method
    async def schedule(
        self, prompt: str, seconds: float, every: float | None = None, name: str | None = None
    ) -> Wakeup:
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
        wakeup = NewWakeup(name, prompt, seconds, every)
        done = await self._connection.change(Scheduled, "schedule", self.id, wakeup)
        return Wakeup(name, prompt, done.due_at, every)

    @client_method
    async def wakeups(self) -> list[Wakeup]:
        """What was scheduled and is not over, by the session itself or by clients; the first that is due first."""
        return await self._connection.read(list[Wakeup], "wakeups", self.id)

    @client_method
    async def cancel_wakeup(self, name: str) -> bool:
        """Give a wakeup up; an input that it has brought already stays. True if there was one."""
        problem = name_problem(name)
        if problem is not None:
            raise InvalidInput(problem, session_id=self.id)
        return await self._connection.change(bool, "cancel_wakeup", self.id, name)

    @client_method
    async def notes(self, scope: str = "session") -> list[Note]:
        """The notes of the session (`session`), its agent (`agent`), or the board of its tree (`tree`), the one that
        was written last at the end.

        Raises:
            UnknownSession: there is no such session.
            InvalidInput: there is no such scope, or it is `project`: see `Cluster.notes`.
        """
        info = await self._connection.read(SessionRecord, "info", self.id)
        owners = {SESSION: self.id, AGENT: info.agent, TREE: info.root_id}
        if scope not in owners:
            raise InvalidInput(f"scope is {scope!r}, and must be one of {', '.join(owners)}", session_id=self.id)
        return await self._connection.read(list[Note], "notes", scope, owners[scope])

    @client_method
    async def set_note(self, key: str, text: str, *, pinned: bool = False) -> int:
        """Set a note of the session, which its agent can read and is shown with its memory; returns its version.

        Raises:
            InvalidInput: this is no key or text of a note, or the session has as many as it may have.
            UnknownSession: there is no such session.
        """
        problem = key_problem(key) or text_problem(text)
        if problem is not None:
            raise InvalidInput(problem, session_id=self.id)
        return await self._connection.change(int, "set_note", self.id, NewNote(key, text, pinned))

    @client_method
    async def delete_note(self, key: str) -> bool:
        """Remove a note of the session; True if there was one."""
        problem = key_problem(key)
        if problem is not None:
            raise InvalidInput(problem, session_id=self.id)
        return await self._connection.change(bool, "delete_note", self.id, key)

    @client_method
    async def resume(self) -> bool:
        """Let a quarantined session take input again; its runs stay ended. True if it was quarantined.

        Raises:
            SessionClosed: it was a sub-agent, or was closed.
        """
        return await self._connection.change(bool, "resume", self.id)

    @client_method
    async def run_again(self, run_id: str | None = None) -> Run | None:
        """Send the input of a run again that failed, was quarantined, or ran out of rounds or budget; returns the new
        run, or None if the run goes on, completed or was cancelled. A quarantined session is resumed for it.

        Args:
            run_id: default: the last run. Of each run there is one that does it again: asked again, that is returned.

        Raises:
            UnknownSession, UnknownRun, SessionClosed: there is none, or nobody to send to.
            ModelProfileMissing: no client has brought the key of the agent's model.
        """
        found = await run_again(ClusterSource(self._connection), self.id, run_id)
        return Run(self._connection, self.id, found[0], None, self._output_type) if found is not None else None

    @client_method
    async def close(self, reason: str = "closed by the client") -> bool:
        """Take no more input and cancel what runs; True if the session was open."""
        return await self._connection.change(bool, "close", self.id, reason)

    @client_method
    async def info(self) -> SessionInfo:
        """The session's state. Raises `UnknownSession`."""
        return SessionInfo.of(await self._connection.read(SessionRecord, "info", self.id))

    @client_method
    async def budgets(self) -> list[BudgetUse]:
        """The limits that it is held to, its own and those of the trees it is in, nearest first, and what is used."""
        return await self._connection.read(list[BudgetUse], "budgets", self.id)

    @client_method
    async def runs(self) -> list[RunRecord]:
        """Its runs, oldest first, as the store has them."""
        return await self._connection.read(list[RunRecord], "runs", self.id)

    @client_method
    async def messages(self, after: int = 0) -> list[Message]:
        """Its messages in order."""
        read = partial(self._connection.read, list[Message], "messages", self.id)
        return [message async for message in _pages(read, after, attrgetter("seq"))]

    @client_method
    async def events(self, after: int = 0) -> list[Event]:
        """Its events in order."""
        read = partial(self._connection.events, self.id)
        return [Event.from_wire(wire) async for wire in _pages(read, after, itemgetter("seq"))]

    @client_method
    async def trace(self, run_id: str | None = None) -> list[TraceSpan]:
        """The trace of a run (default: the last one) by start, from committed events: sub-agents' spans, crashes and
        what still goes on included.

        Raises:
            UnknownSession, UnknownRun: there is none.
            EventsPruned: its events were removed.
        """
        loop = asyncio.get_running_loop()
        read = partial(self._connection.read, list[EventWire], "trace", self.id, run_id)
        return await asyncio.to_thread(
            _trace, lambda after: asyncio.run_coroutine_threadsafe(read(after), loop).result()
        )

    @client_method
    async def tree(self) -> list[SessionInfo]:
        """This session and all below it, parents before children."""
        return await self._tree()

    @client_method
    async def children(self) -> list[SessionInfo]:
        """The sessions it spawned."""
        return [info for info in await self._tree() if info.parent_id == self.id]

    async def _tree(self) -> list[SessionInfo]:
        return list(map(SessionInfo.of, await self._connection.read(list[SessionRecord], "tree", self.id)))

    def __repr__(self) -> str:
        return f"Session({self.id!r})"


async def _pages(
    read: Callable[[int], Awaitable[list[Item]]], after: int, seq: Callable[[Item], int]
) -> AsyncIterator[Item]:
    """All that follows `after`; the services tell so much at a time."""
    while True:
        page = await read(after)
        for item in page:
            yield item
        if len(page) < PAGE:
            return
        after = seq(page[-1])


def current_span() -> tuple[str, str, bool] | None:
    """Trace id and span id of what the program is at, as OpenTelemetry knows it, and whether it records that trace;
    OpenTelemetry is not imported for that."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled


def _trace(read: Callable[[tuple[str, int]], list[EventWire]]) -> list[TraceSpan]:
    """The trace of what is read in pages, each behind a session and its `seq`. In a thread: it may take long."""
    from understudy.observability.traces import trace_of

    def events() -> Iterator[Event]:
        after = ("", 0)
        while wires := read(after):
            yield from map(Event.from_wire, wires)
            after = (wires[-1]["session_id"], wires[-1]["seq"])

    return trace_of(events())
