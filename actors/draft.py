"""The batch that an activation gathers until its next commit."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from understudy.estimates import estimate_tokens
from understudy.events import ERROR_UNCUT, ToolFinished
from understudy.messages import Message
from understudy.records import Ask, Batch, CallState, Finish, Handoff, LogEntry, ModelRequest, Spawn

from .execution import Outcome
from .window import Window, wanted_reply


@dataclass
class Draft:
    """What the next batch holds. Nothing may be awaited between two changes that belong into one commit."""

    entries: list[LogEntry] = field(default_factory=list)
    calls: dict[str, CallState] = field(default_factory=dict)
    spawns: list[Spawn] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    inbox_done: list[int] = field(default_factory=list)
    steps: list[CallState] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    start_run: str | None = None
    merge_runs: tuple[str, ...] = ()
    of_request: int = 0  # so many of the last entries are nothing without the model call that comes with them
    handoff: Handoff | None = None

    def __bool__(self) -> bool:
        changes = self.entries or self.calls or self.steps or self.spawns or self.asks or self.given_up
        return bool(changes or self.inbox_done or self.start_run)

    @property
    def messages(self) -> list[Message]:
        """Those among the entries."""
        return [entry for entry in self.entries if isinstance(entry, Message)]

    def say(self, window: Window, message: Message) -> None:
        """Add a message of the current run and round."""
        self.entries.append(replace(message, run_id=window.run_id, round=window.round))

    def record(self, call: CallState, outcome: Outcome, *, executions: int) -> None:
        """Add a call's one result; it becomes a message when the round is complete."""
        self.entries.append(
            ToolFinished(
                call_id=call.call_id, tool=call.tool, outcome=outcome.outcome, started_at=outcome.started_at,
                duration=outcome.duration, executions=executions,
                error_message="" if outcome.outcome == "ok" else outcome.content[:ERROR_UNCUT],
            )
        )  # fmt: skip
        result = {"outcome": outcome.outcome, "content": outcome.said, "duration": outcome.duration,
                  "started_at": outcome.started_at}  # fmt: skip
        self.calls[call.call_id] = CallState(call.call_id, "finished", executions=executions, result=result)

    def finish_call(self, window: Window, call: CallState, outcome: Outcome) -> None:
        """Make a call's result a message."""
        self.say(window, Message("tool", outcome.said, tool_call_id=call.call_id, name=call.tool))
        executions = self.calls[call.call_id].executions if call.call_id in self.calls else call.executions
        self.calls[call.call_id] = CallState(call.call_id, "done", executions=executions)

    def batch(
        self, window: Window, *, wait: str | None = None, finish: Finish | None = None, round_number: int = 0,
        request: ModelRequest | None = None,
    ) -> Batch:  # fmt: skip
        """The activation's next batch."""
        charged = request if window.budgeted else None
        window.batch_no += 1
        return Batch(
            session_id=window.session_id,
            incarnation=window.incarnation,
            epoch=window.epoch,
            batch_no=window.batch_no,
            entries=tuple(self.entries),
            calls=tuple(self.calls.values()),
            spawns=tuple(self.spawns),
            asks=tuple(self.asks),
            inbox_done=tuple(self.inbox_done),
            start_run=self.start_run,
            merge_runs=self.merge_runs,
            handoff=self.handoff,
            steps=tuple(self.steps),
            given_up=tuple(self.given_up),
            finish=finish,
            wait=wait,
            request_round=round_number,
            request_model=request.model if request else "",
            request_profile=request.profile if request else "",
            request_tokens=estimate_tokens(charged) if charged else 0,
            request_output=wanted_reply(charged.parameters) if charged else 0,
            request_purpose=request.purpose if request else "",
            request_entries=self.of_request if request else 0,
        )
