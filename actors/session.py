"""The loop of a session: from what it knows to its next step, the same after a crash as without one.

There is no other state than the window. `advance` looks at it, does what is due (start a run, run tools, ask a model,
finish) and returns the next step for the node service. A restored session goes through the same door.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.events import Event, ToolFinished, ToolInDoubt, ToolStarted
from understudy.identifiers import child_identifier, tool_span_identifier
from understudy.messages import INTERRUPTED, Message
from understudy.ports import Node
from understudy.records import (
    LEASE_SECONDS,
    Ack,
    Ask,
    Batch,
    CallState,
    Finish,
    ModelRequest,
    Spawn,
    child_text,
)
from understudy.wakeups import WAIT

from .asking import REQUEST_USER_INPUT, answer_to, ask_about, began, read_question
from .estimates import estimate_tokens
from .execution import Outcome, execute, presentable
from .repeats import NO_PROGRESS, REPEATED, judge
from .spawning import read_spawn
from .tools import LoadedTool, ToolContext
from .waking import STORE_TOOLS, read_for_store
from .window import CONTINUE, Window, wanted_reply

COALESCE_SECONDS = 0.05
"""Results that come this soon after another share its commit."""

WATCH_AFTER_SECONDS = 0.25
"""Tools that run longer are watched for a cancellation."""

READERS = {REQUEST_USER_INPUT: read_question, **dict.fromkeys(STORE_TOOLS, read_for_store)}
"""What the calls of built-in tools ask that others answer: a person, or the store."""

Loader = Callable[[dict[str, Any]], Awaitable[LoadedTool]]


@dataclass
class Step:
    """What an activation wants next: the arguments of `Node.step`, before the wire."""

    batch: Batch | None
    request: ModelRequest | None = None
    leave: bool = False


@dataclass
class _Draft:
    """The batch that is being gathered."""

    entries: list[Message | Event] = field(default_factory=list)
    calls: dict[str, CallState] = field(default_factory=dict)
    spawns: list[Spawn] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    inbox_done: list[int] = field(default_factory=list)
    start_run: str | None = None

    def __bool__(self) -> bool:
        return bool(self.entries or self.calls or self.spawns or self.asks or self.inbox_done or self.start_run)


class Activation:
    """One incarnation of a session in this process, from taking it up to its next wait."""

    def __init__(self, window: Window, node: Node, load: Loader, frame_id: str) -> None:
        self.window = window
        self.leave = False
        self.tool_deadline: float | None = None
        self._node = node
        self._load = load
        self._frame_id = frame_id
        self._draft = _Draft()
        self._commit_lock = asyncio.Lock()
        self._results: dict[str, Outcome] = {}

    async def advance(self) -> Step:
        """Do what is due and return the next step.

        Raises:
            Fenced: another activation of the session exists; nothing more may be done here.
        """
        window = self.window
        if window.run_id is None and not self._start_run():
            return self._step(wait="idle")
        while True:
            if window.cancel is not None:
                return self._finish("cancelled", window.reply())
            if window.model_error is not None:
                refused = window.model_error["code"] == "budget_exceeded"  # by an account; nothing was asked
                status = "budget_exceeded" if refused else "failed"
                return self._finish(status, window.reply(), error=window.model_error)
            if window.wait == "model":  # taken up while a call is in flight: attach to it
                return Step(None, window.request(window.round))
            if window.calls:
                limit = window.spec.get("repeat_limit", 0)  # sessions of earlier versions have none
                waits = {tool["name"] for tool in window.spec["tools"] if _builtin(tool) == WAIT}
                repeated, hopeless = judge(window.messages, window.calls, limit, waits)
                if hopeless:
                    return self._finish("failed", window.reply(), error=NO_PROGRESS)
                waiting = await self._run_tools(repeated)
                if window.cancel is None and self.leave:
                    return self._step(leave=True)
                if window.cancel is None and waiting is not None:
                    return self._step(wait=waiting)
                continue
            last = self._last()
            if last is None or last.role != "assistant":
                return self._ask()
            if (last.extra or {}).get("finish_reason") != "length":
                return self._finish("completed", window.reply())
            if window.continuations() >= window.spec["max_continuations"]:
                return self._finish("completed", window.reply())
            self._add(Message("user", CONTINUE, name="continuation"))
            return self._ask()

    def _start_run(self) -> bool:
        item = next((item for item in self.window.inbox if item["kind"] == "input"), None)
        if item is None:
            return False
        self._draft.start_run = item["key"]
        self.window.run_id, self.window.round = item["key"], 0
        self.window.trace_id = item["payload"]["trace_id"]
        self.window.calls = []
        self._add(Message("user", item["payload"]["content"]))
        return True

    def _last(self) -> Message | None:
        """The run's last message, whether committed or still in the draft."""
        drafted = [entry for entry in self._draft.entries if isinstance(entry, Message)]
        if drafted:
            return drafted[-1]
        last = self.window.messages[-1] if self.window.messages else None
        return last if last is not None and last.run_id == self.window.run_id else None

    def _add(self, message: Message) -> None:
        window = self.window
        entry = Message(
            message.role, message.content, (), message.tool_call_id, message.name, window.run_id, window.round
        )
        self._draft.entries.append(entry)

    def _ask(self) -> Step:
        """The next model call, or the end of the run where a limit forbids it."""
        window = self.window
        if window.round >= window.spec["max_rounds"]:
            return self._finish("round_limit", window.reply())
        drafted = [entry for entry in self._draft.entries if isinstance(entry, Message)]
        window.messages.extend(drafted)
        request = window.request(window.round + 1)
        if drafted:
            del window.messages[-len(drafted) :]
        step = self._step(wait="model", round_number=window.round + 1, request=request)
        step.request = request
        return step

    def _finish(self, status: str, text: str, error: dict[str, Any] | None = None) -> Step:
        self._take_children()
        for call in self.window.calls:  # a run must not end with calls that have no result
            outcome = self._results.get(call.call_id)
            if outcome is None and call.result is not None:
                outcome = Outcome(**call.result)
            if outcome is None:
                outcome = Outcome("cancelled", "cancelled", 0, _now())
                self._record(call, outcome, executions=call.executions)
            self._settle(call, outcome)
        if status == "round_limit":
            error = {"code": "round_limit", "message": f"no answer after {self.window.round} rounds"}
        return self._step(wait="idle", finish=Finish(status, text, error=error))

    def _step(
        self, *, wait: str | None = None, finish: Finish | None = None, leave: bool = False, round_number: int = 0,
        request: ModelRequest | None = None,
    ) -> Step:  # fmt: skip
        return Step(self._batch(wait=wait, finish=finish, round_number=round_number, request=request), leave=leave)

    def _batch(
        self, *, wait: str | None = None, finish: Finish | None = None, round_number: int = 0,
        request: ModelRequest | None = None,
    ) -> Batch:  # fmt: skip
        window, draft = self.window, self._draft
        charged = request if window.budgeted else None
        self._draft = _Draft()
        window.batch_no += 1
        return Batch(
            session_id=window.session_id,
            epoch=window.epoch,
            batch_no=window.batch_no,
            entries=tuple(draft.entries),
            calls=tuple(draft.calls.values()),
            spawns=tuple(draft.spawns),
            asks=tuple(draft.asks),
            inbox_done=tuple(draft.inbox_done),
            start_run=draft.start_run,
            finish=finish,
            wait=wait,
            request_round=round_number,
            request_model=window.spec["model"] if wait == "model" else "",
            request_profile=window.spec["profile"] if wait == "model" else "",
            request_tokens=estimate_tokens([*charged.messages, *charged.tools]) if charged else 0,
            request_output=wanted_reply(charged) if charged else 0,
        )

    async def _flush(self) -> None:
        """Commit the draft and keep the frame; it holds no messages then. Callers that wait for the lock share one."""
        async with self._commit_lock:
            if not self._draft:
                return
            self.window.acknowledge(await self._commit(self._batch()))

    async def _commit(self, batch: Batch) -> Ack:
        call = {"frame": {"frame_id": self._frame_id}, "batch": batch.to_wire()}
        return Ack.from_wire(await self._node.commit(call))

    async def _run_tools(self, repeated: set[str]) -> str | None:
        """Bring every call of the round to its result; what is waited for where children or people are not ready.

        Args:
            repeated: calls that are not executed once more.
        """
        window = self.window
        tasks: dict[asyncio.Task[Outcome | None], CallState] = {}
        limit = asyncio.Semaphore(window.spec["parallel_tools"])
        specs = {tool["name"]: tool for tool in window.spec["tools"]}
        for call in window.calls:
            if call.state == "finished" and call.result is not None:
                self._results[call.call_id] = Outcome(**call.result)
            elif call.call_id in self._results:
                continue
            elif call.call_id in repeated and call.state == "requested":
                self._record(call, Outcome("repeated", REPEATED, 0, _now()), executions=0)
            elif call.tool == "spawn_agent" and "spawn_agent" in specs:
                self._spawn(call, specs["spawn_agent"])
            elif call.tool not in specs:
                known = ", ".join(sorted(specs)) or "none"
                text = f"there is no tool named {call.tool!r}. Tools you have: {known}."
                self._record(call, Outcome("unknown_tool", text, 0, _now()), executions=0)
            elif call.state == "requested" and _builtin(specs[call.tool]) in READERS:
                self._ask_others(call)
            elif call.state not in ("asked", "waiting") or answer_to(call, window.inbox) is not None:
                tasks[asyncio.create_task(self._run_tool(call, specs[call.tool], limit))] = call
        try:
            if self._draft.spawns:
                await self._flush()
            await self._gather(tasks)
        finally:
            for task in tasks:
                task.cancel()
        if window.cancel is not None:
            return None
        self._take_children()
        missing = [call for call in window.calls if call.call_id not in self._results]
        if missing:
            return _wait_for(missing, specs)
        for call in window.calls:
            self._settle(call, self._results[call.call_id])
        window.calls = []
        return None

    async def _gather(self, tasks: dict[asyncio.Task[Outcome | None], CallState]) -> None:
        """Await the tools, committing results early where others take longer; ends at once when cancelled."""
        pending: set[asyncio.Task[Any]] = set(tasks)
        watch: asyncio.Task[str] | None = None
        try:
            while pending:
                timeout = COALESCE_SECONDS if self._draft else None if watch else WATCH_AFTER_SECONDS
                done, pending = await asyncio.wait(
                    pending | ({watch} if watch else set()), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if watch is not None:
                    pending.discard(watch)
                    if watch in done:
                        await self._interrupt(watch, pending)
                        return
                for task in done:
                    await task  # Fenced, raised by a commit inside, ends the activation
                if done:
                    continue
                if self._draft:
                    await self._flush()
                    if self.window.cancel is not None:
                        return await self._stop(pending)
                elif watch is None:
                    watch = asyncio.create_task(self._node.interrupted(self.window.session_id, self.window.epoch))
        finally:
            if watch is not None:
                watch.cancel()

    async def _interrupt(self, watch: asyncio.Task[str], pending: set[asyncio.Task[Any]]) -> None:
        reason = await watch
        await self._stop(pending)
        self.window.cancel = reason

    async def _stop(self, pending: set[asyncio.Task[Any]]) -> None:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=5.0)

    async def _run_tool(self, call: CallState, spec: dict[str, Any], limit: asyncio.Semaphore) -> Outcome | None:
        """Run one call under its `on_crash` rule and put its result into the draft; None if a person is asked."""
        async with limit:
            if call.state == "started" and spec["on_crash"] == "ask":
                self._draft.entries.append(ToolInDoubt(call_id=call.call_id, tool=call.tool, policy="ask"))
                self._draft.asks.append(ask_about(call))
                return None
            outcome = None
            if call.state == "started":
                outcome = await self._in_doubt(call, spec)
            elif call.state in ("asked", "waiting"):
                outcome = self._take_answer(call)
            if outcome is not None:
                self._record(call, outcome, executions=call.executions)
                return outcome
            if spec["on_crash"] != "rerun":
                await self._mark_started(call)
                if self.window.cancel is not None:
                    return Outcome("cancelled", "cancelled", 0, _now())
            return await self._execute(call, spec)

    async def _execute(self, call: CallState, spec: dict[str, Any]) -> Outcome:
        timeout = spec["timeout"] or self.window.spec["tool_timeout"]
        deadline = time.monotonic() + timeout
        self.tool_deadline = max(self.tool_deadline or 0.0, deadline)
        try:
            loaded = await self._load(spec)
        except Exception as error:
            outcome = Outcome("error", str(error), 0, _now())
        else:
            outcome = await execute(loaded, call.arguments, self._context(call), timeout)
        self.leave = self.leave or outcome.stuck_thread
        self._record(call, outcome, executions=call.executions + 1)
        return outcome

    def _context(self, call: CallState) -> ToolContext:
        window = self.window
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
            trace_parent=f"00-{window.trace_id}-{span_id}-01",
        )

    async def _mark_started(self, call: CallState) -> None:
        """The fence before a side effect: committed, and the lease of its Ack still running."""
        while True:
            sent = time.monotonic()
            state = CallState(call.call_id, "started", executions=call.executions)
            self._draft.entries.append(ToolStarted(call_id=call.call_id, tool=call.tool))
            self._draft.calls[call.call_id] = state
            await self._flush()
            # The process may have been stopped since: after the lease somebody else may act on this call.
            if time.monotonic() - sent < LEASE_SECONDS:
                return

    async def _in_doubt(self, call: CallState, spec: dict[str, Any]) -> Outcome | None:
        """What is known of a call that had started when its process died; None to run it again."""
        policy = spec["on_crash"]
        self._draft.entries.append(ToolInDoubt(call_id=call.call_id, tool=call.tool, policy=policy))
        if policy == "rerun":
            return None
        if policy == "reconcile":
            timeout = spec["timeout"] or self.window.spec["tool_timeout"]
            self.tool_deadline = max(self.tool_deadline or 0.0, time.monotonic() + timeout)
            return await self._reconcile(spec, self._context(call), timeout)
        return Outcome("interrupted", INTERRUPTED, 0, _now())

    async def _reconcile(self, spec: dict[str, Any], context: ToolContext, timeout: float) -> Outcome:
        """Ask the tool's own function what became of the call; whatever goes wrong with that is told to the model."""
        started = _now()
        try:
            function = (await self._load(spec)).reconcile
            if function is None:
                return Outcome("interrupted", INTERRUPTED, 0, started)
            async with asyncio.timeout(timeout):
                found = await asyncio.to_thread(function, context)
                if asyncio.iscoroutine(found):
                    found = await found
        except Exception as error:
            text = presentable(f"{INTERRUPTED}; finding out failed: {type(error).__name__}: {error}")
            return Outcome("interrupted", text, _now() - started, started)
        text = found if isinstance(found, str) else json.dumps(found, default=str)
        return Outcome("ok", presentable(text), _now() - started, started)

    def _ask_others(self, call: CallState) -> None:
        """Let the call wait for a person, or the store, from the next commit on."""
        asked = READERS[call.tool](call)
        if isinstance(asked, str):
            self._record(call, Outcome("invalid", asked, 0, _now()), executions=0)
        else:
            self._draft.asks.append(replace(asked, prompt=presentable(asked.prompt)))

    def _take_answer(self, call: CallState) -> Outcome | None:
        """Take the answer to a call out of the inbox; None to run the call again.

        Nothing is awaited between this and the call's next state in the draft: one commit has both.
        """
        item = answer_to(call, self.window.inbox)
        assert item is not None
        answer = item["payload"]
        self._draft.inbox_done.append(item["id"])
        if answer["decision"] == "rerun":
            return None
        since = began(call, answer)
        return Outcome(answer["decision"], answer["text"], _now() - since, since)

    def _record(self, call: CallState, outcome: Outcome, *, executions: int) -> None:
        """Put a call's one result into the draft; it becomes a message when the round is complete."""
        self._results[call.call_id] = outcome
        self._draft.entries.append(
            ToolFinished(
                call_id=call.call_id, tool=call.tool, outcome=outcome.outcome, started_at=outcome.started_at,
                duration=outcome.duration, executions=executions,
                error_message="" if outcome.outcome == "ok" else outcome.content[:300],
            )
        )  # fmt: skip
        result = {"outcome": outcome.outcome, "content": outcome.content, "duration": outcome.duration,
                  "started_at": outcome.started_at}  # fmt: skip
        self._draft.calls[call.call_id] = CallState(call.call_id, "finished", executions=executions, result=result)

    def _settle(self, call: CallState, outcome: Outcome) -> None:
        self._add(Message("tool", outcome.content, tool_call_id=call.call_id, name=call.tool))
        executions = (
            self._draft.calls[call.call_id].executions if call.call_id in self._draft.calls else call.executions
        )
        self._draft.calls[call.call_id] = CallState(call.call_id, "done", executions=executions)

    def _spawn(self, call: CallState, spec: dict[str, Any]) -> None:
        """Create a sub-agent in the next batch, unless this call did so before."""
        window = self.window
        if call.state == "started":
            return
        problem, task, agent = read_spawn(call.arguments, window.spec["agents"])
        if problem is None and window.spec["max_depth"] < 1:
            problem = f"no sub-agent may be created at depth {window.depth}: that is as deep as this tree may grow."
        if problem is not None:
            self._record(call, Outcome("invalid", problem, 0, _now()), executions=0)
            return
        child = child_identifier(window.session_id, call.call_id)
        template = window.spec["agents"][agent] if agent else {**window.spec, "budget": None}
        depth = min(template["max_depth"], window.spec["max_depth"] - 1)
        compiled = {**template, "max_depth": depth}
        self._draft.spawns.append(Spawn(call.call_id, child, compiled, task))
        self._draft.calls[call.call_id] = CallState(call.call_id, "started", child_id=child, executions=1)

    def _take_children(self) -> None:
        """Turn children's results in the inbox into results of their calls."""
        calls = {call.call_id: call for call in self.window.calls}
        for item in self.window.inbox:
            call = calls.get(item["key"])
            if item["kind"] != "child_result" or call is None or call.call_id in self._results:
                continue
            started = call.updated_at or _now()
            payload = item["payload"]
            outcome = "ok" if payload["status"] == "completed" else "error"
            self._draft.inbox_done.append(item["id"])
            found = Outcome(outcome, child_text(payload), max(0, _now() - started), started)
            self._record(call, found, executions=1)


def _wait_for(missing: list[CallState], specs: dict[str, dict[str, Any]]) -> str:
    """What a session waits for whose round lacks these calls: a person first, then a time, then its sub-agents."""
    if any(call.tool != "spawn_agent" and _builtin(specs[call.tool]) not in STORE_TOOLS for call in missing):
        return "input"
    return "child" if all(call.tool == "spawn_agent" for call in missing) else "timer"


def _builtin(spec: dict[str, Any]) -> str | None:
    """The built-in tool that this is: tools of other people may have its name."""
    name: str | None = spec["source"].get("builtin")
    return name


def _now() -> int:
    return time.time_ns() // 1000
