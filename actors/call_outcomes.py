"""What is done about one tool call: it is permitted, asked about, executed or handed over, and has one outcome."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from understudy.approvals import IN_DOUBT, QUESTION
from understudy.confinement import confinement_of
from understudy.errors import ToolError
from understudy.events import ToolInDoubt, ToolStarted
from understudy.identifiers import tool_span_identifier, traceparent
from understudy.logs import about
from understudy.messages import AGENT_PROCESS, GIVEN_UP, interrupted
from understudy.ports import Node
from understudy.protocol import FrameIdentity
from understudy.records import LEASE_SECONDS, Ask, CallState, InboxItem, LogEntry, Spawn
from understudy.tool_hosting import Elicitation
from understudy.workflows import WORKFLOW

from .answers import outcome_of, without_result
from .approval import Permitted, as_edited, by_rules, permit, with_edit, with_time_out
from .asking import answer_for_server, answer_to, ask_about, ask_for_server
from .commanding import NodeCommands
from .commits import Commits, Patience
from .delegation import wanted_by
from .execution import Outcome, bind, execute, may_go_on, now, presentable, reconcile, reconcile_failed
from .handoffs import handed_off, is_handoff
from .hooks import Hooks, arguments_of
from .reports import CallReports, Reports
from .servers import FRAME_SECONDS, MOST_ATTEMPTS, SERVER_PROCESS, Servers, is_of_server
from .skills import Skills, described
from .task_calls import LOST, MOST_LOST, TASK_PROCESS, TaskCalls, begun, is_task, unloaded
from .tools import LoadedTool, ToolContext
from .window import Window

GOES_ON = "interrupted: the run was ended while this tool ran, and it could not be stopped; its outcome is unknown"
"""What a model reads as the result of such a call."""

Loader = Callable[[dict[str, Any]], Awaitable[LoadedTool]]


class CallOutcomes:
    """Brings single calls of an activation's window to their outcomes, in drafts of its next commits.

    Attributes:
        leave: the process is to end with this activation: a thread goes on that can't be stopped.
        results: the outcomes so far, by call id, as hooks left them.
        ended: the same before hooks were asked, with the executions and the inbox row that brought the outcome.
        begun, finding_out: the user's code that was begun: tools by call id, and functions that look into a call in
            doubt.
        handed_over: calls that others are at since this activation: sub-agents, people, the store.
        asked: calls about which a person is asked.
        again: those that a person has answered so that they are executed here once more, from the commit on that has
            the answer: nobody else is at them.
        reports: what tools report while they run.
    """

    def __init__(
        self, window: Window, node: Node, frame: FrameIdentity, commits: Commits, hooks: Hooks, patience: Patience,
        load: Loader, servers: Servers,
    ) -> None:  # fmt: skip
        self.leave = False
        self.results: dict[str, Outcome] = {}
        self.ended: dict[str, tuple[Outcome, int, InboxItem | None]] = {}
        self.begun: dict[str, asyncio.Future[Any]] = {}
        self.finding_out: list[asyncio.Future[Any]] = []
        self.handed_over: set[str] = set()
        self.asked = {call.call_id for call in window.calls if call.state == "asked"}
        self.again: set[str] = set()
        self.reports = Reports()
        self._window = window
        self._commits = commits
        self._hooks = hooks
        self._patience = patience
        self._load = load
        self._skills = Skills(described(window.spec), node.blob)
        self._tasks = TaskCalls(window, node, frame.frame_id, patience)
        self._commands = NodeCommands(node, frame, window)
        self._servers = servers
        self._since: dict[str, tuple[int, int]] = {}  # when calls were last begun here, and how often by then
        self._first_inbox = {item.id for item in window.inbox}
        self._unrecorded: list[Callable[[], None]] = []

    @property
    def stuck(self) -> bool:
        """Whether code of the user's goes on that ignores its cancellation."""
        return any(not work.done() for work in (*self.begun.values(), *self.finding_out))

    def leave_what_goes_on(self) -> None:
        """Have the process end with this activation if code of the user's may go on in it."""
        self.leave = self.leave or any(map(may_go_on, (*self.begun.values(), *self.finding_out)))

    async def give_up(self, call: CallState, known: dict[str, Outcome]) -> None:
        """Give a call its outcome whose run, or round, ends first.

        Args:
            known: outcomes of calls that nobody has begun.
        """
        spec = self._window.tools.get(call.tool)
        if call.state == "asked" and call.executions and spec is not None and is_of_server(spec):
            await self._servers.give_up(call, spec)
        if spec is not None and _may_go_on_elsewhere(call, spec):  # also where this activation was not at it yet
            await self._tasks.end(call.call_id)
        ended, executions, item = self.ended.get(call.call_id) or self._left(call, spec, known)
        await self.conclude(call, ended, executions=executions, item=item)

    def _left(
        self, call: CallState, spec: dict[str, Any] | None, known: dict[str, Outcome]
    ) -> tuple[Outcome, int, InboxItem | None]:
        """What is said of a call whose run ends first: an answer that was accepted for it, or that there is none. One
        for a server, or to run the call again, is done with then."""
        if call.state == "requested" and call.call_id in known:
            return known[call.call_id], call.executions, None
        item = answer_to(call, self._window.inbox)  # also of one that asked in this activation
        answered = outcome_of(call, item.payload) if item is not None else None
        if answered is not None:
            return answered, call.executions, item
        begun = self.begun.get(call.call_id)
        since, executions = self._since.get(call.call_id, (call.updated_at or now(), call.executions))
        goes_on = begun is not None and may_go_on(begun)
        if goes_on or self._is_left_to_server(call, spec):
            outcome = Outcome("interrupted", GOES_ON if goes_on else GIVEN_UP, max(0, now() - since), since)
            return outcome, executions, item
        return without_result(call, _died_at(call, spec)), call.executions, item

    def _is_left_to_server(self, call: CallState, spec: dict[str, Any] | None) -> bool:
        """Whether a server was at a call that is given up, which may have had its effect."""
        if spec is None or not is_of_server(spec):
            return False
        begun = self.begun.get(call.call_id)
        if begun is not None:
            return (begun.cancelled() or call.call_id in self.asked) and spec["on_crash"] != "rerun"
        return call.state == "asked" and call.executions > 0 and call.question == QUESTION

    def answer_to(self, call: CallState) -> InboxItem | None:
        """The answer to a call, if it has come with all that follows from it: the record of a decision that is to be
        remembered is a message, which an Ack does not bring."""
        item = answer_to(call, self._window.inbox)
        return None if item is not None and "remember" in item.payload and item.id not in self._first_inbox else item

    async def run(self, call: CallState, spec: dict[str, Any], limit: asyncio.Semaphore) -> Outcome | None:
        """Run one call under its `on_crash` rule and put its result into the draft; None if a person is asked."""
        async with limit:
            outcome = None
            if _may_go_on_elsewhere(call, spec):
                outcome = await self._elsewhere(call, partial(self._tasks.attach, spec, self._context(call)))
            died, item = AGENT_PROCESS, self.answer_to(call) if call.state in ("asked", "waiting") else None
            said = answer_for_server(item.payload) if item is not None else None
            if is_of_server(spec) and (call.state == "started" or said is not None):
                self._patience.expect(time.monotonic() + (spec["timeout"] or 0.0) + FRAME_SECONDS)
                held = await self._servers.held(call, spec, said)
                if said is not None:  # from here on it is a call that has started, as any other
                    call = replace(call, state="started", executions=call.executions - 1, question="")
                    died = SERVER_PROCESS
                if isinstance(held, Elicitation):
                    self._ask_for_server(call, held, call.executions + 1, item)
                    return None
                outcome = held
            if call.state == "started" and outcome is None and spec["on_crash"] == "ask":
                self._ask_in_doubt(call, died, item)
                return None
            if call.state == "started" and outcome is not None:
                return await self.conclude(call, outcome, executions=call.executions + 1, item=item)
            if call.state == "started":
                outcome = await self._in_doubt(call, spec, died)
            elif item is not None:
                outcome = outcome_of(call, item.payload)
            permitted = outcome or await self._permit(call, spec)
            if isinstance(permitted, Outcome):
                return await self.conclude(call, permitted, executions=call.executions, item=item)
            return await self._execute(call, permitted.arguments, spec, item) if permitted is not None else None

    async def _permit(self, call: CallState, spec: dict[str, Any]) -> CallState | Outcome | None:
        """The call as hooks let it be executed, or its outcome; None if a person is asked for approval."""
        permitted = await self._hooks.before_tool(call, spec)
        if isinstance(permitted, Permitted):
            permitted = by_rules(self._window, spec, permitted)
        if isinstance(permitted, Outcome):
            return permitted
        found = permit(self._window, call, spec, permitted)
        if isinstance(found, Ask):
            self._ask(found)
            return None
        return found

    def _ask_in_doubt(self, call: CallState, died: str, item: InboxItem | None = None) -> None:
        if item is not None:
            self._commits.draft.inbox_done.append(item.id)
        self._commits.draft.entries.append(ToolInDoubt(call_id=call.call_id, tool=call.tool, policy="ask"))
        self._ask(ask_about(call, died))

    def _ask_for_server(self, call: CallState, asked: Elicitation, executions: int, item: InboxItem | None) -> None:
        """Ask a person what the server of a call asks. One commit has that and the answer before it is done with: until
        then that answer is passed on by whoever has the session."""
        if item is not None:
            self._commits.draft.inbox_done.append(item.id)
        self._ask(with_time_out(self._window, ask_for_server(replace(call, executions=executions), asked)))

    def _ask(self, asked: Ask) -> None:
        """Ask a person about a call that is executed here, from the next commit on."""
        self.asked.add(asked.call_id)
        self.handed_over.add(asked.call_id)
        self._commits.draft.asks.append(replace(asked, prompt=presentable(asked.prompt)))

    async def _execute(
        self, call: CallState, arguments: str, spec: dict[str, Any], item: InboxItem | None
    ) -> Outcome | None:
        """Execute a call. What can wait or fail comes before the commit of its start: the lease runs from there."""
        if is_handoff(spec):
            done = handed_off(spec, replace(call, arguments=arguments))
            return await self.conclude(call, done, executions=call.executions + 1, item=item)
        if is_task(spec):
            return await self._execute_elsewhere(call, arguments, spec, item)
        timeout = spec["timeout"] or self._window.spec["tool_timeout"]
        self._patience.expect(time.monotonic() + timeout)
        failure: type[Exception] = Exception
        if is_of_server(spec):
            failure, timeout = ToolError, timeout + FRAME_SECONDS
        try:
            loaded = await (self._servers.load(call, spec) if is_of_server(spec) else self._load(spec))
        except failure as error:
            failed = Outcome("error", str(error))
            return await self.conclude(call, failed, executions=call.executions, item=item)
        context = self._context(replace(call, arguments=arguments), self.reports.of(call))
        keywords = bind(loaded, arguments, context)
        if isinstance(keywords, Outcome):
            return await self.conclude(call, keywords, executions=call.executions, item=item)
        if item is not None:
            self._run_again(call, item)
        outcome, before, begun = None, math.inf, partial(self.begun.__setitem__, call.call_id)
        executions = call.executions
        while outcome is None:
            if spec["on_crash"] != "rerun" or item is not None:
                before = await self._fence(call, ToolStarted(call_id=call.call_id, tool=call.tool))
                if self._window.stops:
                    return Outcome("cancelled", "cancelled")
            self._patience.expect(time.monotonic() + timeout)
            self._since[call.call_id] = now(), executions + 1
            ids = {"run_id": self._window.run_id or "", "trace_id": self._window.trace_id}
            with about(**ids, span_id=tool_span_identifier(self._window.session_id, call.call_id)):
                ran = await execute(loaded, keywords, timeout, before, begun)
            if ran is None:
                continue
            executions += 1
            answered = self._servers.answered(call, ran)
            if isinstance(answered, Elicitation):
                self._ask_for_server(call, answered, executions, None)
                return None
            outcome = answered
            if outcome is None:
                if spec["on_crash"] == "ask":
                    self._ask_in_doubt(replace(call, state="started", executions=executions), SERVER_PROCESS)
                    return None
                outcome = self._died(call, spec, executions, ran)
                loaded = loaded if outcome is not None else await self._servers.load(call, spec)
        self.leave = self.leave or outcome.stuck_thread
        return await self.conclude(call, outcome, executions=executions)

    def _run_again(self, call: CallState, item: InboxItem) -> None:
        """A person wants it: one commit has the answer and the start."""
        self._commits.draft.inbox_done.append(item.id)
        self.again.add(call.call_id)

    def _died(self, call: CallState, spec: dict[str, Any], executions: int, ran: Outcome) -> Outcome | None:
        """What is said of a call whose server has died; None to make it again."""
        policy = spec["on_crash"]
        self._commits.draft.entries.append(ToolInDoubt(call_id=call.call_id, tool=call.tool, policy=policy))
        if policy == "rerun" and executions - call.executions < MOST_ATTEMPTS:
            return None
        return Outcome("interrupted", interrupted(SERVER_PROCESS), ran.duration, ran.started_at)

    async def _execute_elsewhere(
        self, call: CallState, arguments: str, spec: dict[str, Any], item: InboxItem | None
    ) -> Outcome | None:  # fmt: skip
        """Execute a call in a process of its own, which outlasts this one; None if a person is asked what became of
        it."""
        context = self._context(replace(call, arguments=arguments))
        fitting = bind(unloaded(spec), arguments, context)
        if isinstance(fitting, Outcome):
            return await self.conclude(call, fitting, executions=call.executions, item=item)
        if item is not None:
            self._run_again(call, item)
        for _ in range(MOST_LOST):
            service = await self._tasks.service()  # before the commit: what it begins later, it alone knows of
            if spec["on_crash"] != "rerun":
                await self._fence(call, ToolStarted(call_id=call.call_id, tool=call.tool))
                if self._window.stops:
                    return Outcome("cancelled", "cancelled")
            since = now()
            outcome = await self._elsewhere(call, partial(self._tasks.run, spec, context, arguments, service))
            if outcome is not None:
                return await self.conclude(call, outcome, executions=call.executions + 1)
            if spec["on_crash"] != "rerun":
                return await self._lost_elsewhere(begun(call, since), spec)
            await self._commits.flush()  # what follows in the log is the next process's
            if self._window.stops:
                return Outcome("cancelled", "cancelled")
        return await self.conclude(call, Outcome("error", LOST), executions=call.executions + 1)

    async def _elsewhere(
        self, call: CallState, ask: Callable[[CallReports], Awaitable[Outcome | None]]
    ) -> Outcome | None:
        """How a call ended in a process of its own; None if nobody knows: then what it had reported comes first."""
        outcome = await ask(self.reports.of(call))
        if outcome is None:
            self._commits.draft.entries += self.reports.end(call.call_id)
        return outcome

    async def _lost_elsewhere(self, call: CallState, spec: dict[str, Any]) -> Outcome | None:
        """A call is in doubt since its process died, not this one; None if a person is asked."""
        if spec["on_crash"] == "ask":
            self._ask_in_doubt(call, TASK_PROCESS)
            return None
        found = await self._in_doubt(call, spec, TASK_PROCESS)
        return await self.conclude(call, found, executions=call.executions) if found is not None else None

    def _context(self, call: CallState, reports: CallReports | None = None) -> ToolContext:
        window = self._window
        span_id = tool_span_identifier(window.session_id, call.call_id)
        return ToolContext(
            session_id=window.session_id,
            run_id=window.run_id or "",
            round=window.round,
            call_id=call.call_id,
            call_key=f"{window.session_id}/{call.call_id}",
            epoch=window.epoch,
            agent=window.spec["name"],
            workspace=window.spec["workspace"],
            confinement=confinement_of(window.spec),
            traceparent=traceparent(window.trace_id, span_id, window.sampled) if window.trace_id else "",
            skill_files=self._skills,
            web=window.web,
            arguments=arguments_of(call.arguments) or {},
            _reporting=reports,
            _commands=self._commands,
        )

    async def _fence(self, call: CallState, *events: LogEntry) -> float:
        """Commit that something is done about a call; the monotonic time before which it must have begun.

        The process may be stopped at any time, and after the lease somebody else may act on this call. So the lease is
        looked at last of all, by whoever begins; where it is over they come here again, and may be fenced.
        """
        sent = time.monotonic()
        self._commits.draft.entries += events
        self._commits.draft.calls[call.call_id] = CallState(call.call_id, "started", executions=call.executions)
        await self._commits.flush()
        return sent + LEASE_SECONDS

    async def _in_doubt(self, call: CallState, spec: dict[str, Any], died: str) -> Outcome | None:
        """What is known of a call that had started when a process died that was at it; None to run it again."""
        policy = spec["on_crash"]
        event = ToolInDoubt(call_id=call.call_id, tool=call.tool, policy=policy)
        if policy == "reconcile":
            return await self._reconcile(call, spec, event, died)
        self._commits.draft.entries.append(event)
        if policy == "rerun":
            return None
        return without_result(call, died)

    async def _reconcile(self, call: CallState, spec: dict[str, Any], event: LogEntry, died: str) -> Outcome:
        """What the tool's own function finds out about a call; it is code of the user's, and begins as a tool does."""
        timeout = spec["timeout"] or self._window.spec["tool_timeout"]
        self._patience.expect(time.monotonic() + timeout)
        try:
            loaded = await self._load(spec)
        except Exception as error:
            self._commits.draft.entries.append(event)
            return Outcome("interrupted", presentable(reconcile_failed(f"{type(error).__name__}: {error}", died)))
        outcome, events = None, [event]
        while outcome is None:
            before = await self._fence(call, *events)
            self._patience.expect(time.monotonic() + timeout)
            outcome = await reconcile(loaded, self._context(call), timeout, before, self.finding_out.append, died)
            events = []
        self.leave = self.leave or outcome.stuck_thread
        return outcome

    async def hand_over(self, call: CallState, spec: dict[str, Any]) -> Outcome | None:
        """Let the call wait for a sub-agent, a person or the store from the next commit on."""
        permitted = await self._permit(call, spec)
        if permitted is None:
            return None
        if isinstance(permitted, Outcome):
            return await self.conclude(call, permitted, executions=0)
        wanted = wanted_by(permitted, spec, self._window)
        if isinstance(wanted, str):
            return await self.conclude(call, Outcome("invalid", wanted), executions=0)
        if isinstance(wanted, Spawn):
            self._commits.draft.spawns.append(wanted)
            state = "waiting" if wanted.background else "started"
            started = CallState(call.call_id, state, child_id=wanted.child_id, executions=1)
            self._commits.draft.calls[call.call_id] = started
        else:
            wanted = with_time_out(self._window, wanted) if wanted.kind == QUESTION else wanted
            self._commits.draft.asks.append(replace(wanted, prompt=presentable(wanted.prompt)))
        self.handed_over.add(call.call_id)
        return None

    async def conclude(
        self, call: CallState, outcome: Outcome, *, executions: int, item: InboxItem | None = None
    ) -> Outcome:
        """Give a call its one result, as the hooks leave it. One commit has it and the inbox row that brought it."""
        self.ended[call.call_id] = outcome, executions, item
        call = as_edited(call)
        if call.edited is not None and self._window.spec.get("kind") != WORKFLOW:  # whose code wants the value alone
            outcome = dataclasses.replace(outcome, content=presentable(with_edit(call.edited, outcome.content)))
        outcome = await self._hooks.after_tool(call, outcome)
        self.results[call.call_id] = outcome
        record = partial(self._record, call, outcome, executions, item)
        if outcome.outcome == "ok" and is_handoff(self._window.tools.get(call.tool)):
            self._unrecorded.append(record)  # no commit may have it but the one that hands off
        else:
            record()
        return outcome

    def record_handoff(self) -> None:
        """Have the next commit hold the outcome of a call that hands off, which does so with that commit."""
        while self._unrecorded:
            self._unrecorded.pop()()

    def _record(self, call: CallState, outcome: Outcome, executions: int, item: InboxItem | None) -> None:
        if item is not None:
            self._commits.draft.inbox_done.append(item.id)
        self._commits.draft.entries += self.reports.end(call.call_id)
        self._commits.draft.record(call, outcome, executions=executions)


def _may_go_on_elsewhere(call: CallState, spec: dict[str, Any]) -> bool:
    """Whether a process other than the one that died may be at this call."""
    return call.state == "started" and is_task(spec)


def _died_at(call: CallState, spec: dict[str, Any] | None) -> str:
    """Which process was at a call in doubt: a person who is asked about it was shown that."""
    if spec is None or call.question != IN_DOUBT:
        return AGENT_PROCESS
    return SERVER_PROCESS if is_of_server(spec) else TASK_PROCESS if is_task(spec) else AGENT_PROCESS
