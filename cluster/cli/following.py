"""A run as a command follows it: its text on stdout, what happens on the way on stderr, questions at the terminal."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from understudy.approvals import IN_DOUBT, QUESTION
from understudy.errors import (
    AnswerConflict,
    DeadlineExceeded,
    InvalidInput,
    NotAsked,
    StoreUnreachable,
    UnderstudyError,
)
from understudy.events import (
    AgentHandedOff,
    ChildFinished,
    ChildRestarted,
    ChildSpawned,
    CustomEvent,
    Event,
    InputRequested,
    McpServerFailed,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    ModelCallStarted,
    ReasoningDelta,
    RunStarted,
    SessionActivated,
    SessionCrashed,
    SessionMoved,
    SessionQuarantined,
    StreamRestarted,
    TextDelta,
    TimerSet,
    ToolCallDelta,
    ToolFinished,
    ToolInDoubt,
    ToolProgress,
    WorktreeEnded,
)
from understudy.json_text import to_json
from understudy.messages import Message
from understudy.reads import PendingInput
from understudy.workflows import CHILD_STEPS, TIMEOUT_STEP, step_path

from ..client import background
from .command import counted, errors
from .rendering import CONTROLS, clean, escape, print_pending, when

if TYPE_CHECKING:
    from ..client.client import Cluster
    from ..client.results import RunResult, SessionInfo
    from ..client.run_handle import Run
    from ..client.session_handle import Session

LOOK_SECONDS = 2.0
"""After so long without news it is looked whether a session asks a person: those below this one tell it nothing."""

SOON_SECONDS = 0.2
"""The same after a question of this session itself."""

SHOWN_ARGUMENTS = 100
"""Characters of a tool call's arguments that are shown."""

AT_WORK = frozenset({"running", "waiting_for_model", "waiting_for_timer", "waiting_for_queue"})
"""Statuses of sessions that go on without a person."""

ANSWERED_HERE = (QUESTION, IN_DOUBT)
"""Kinds of `PendingInput` that a terminal takes an answer to; others are shown, with the command that answers them."""

RERUN, FAILED = "/rerun", "/failed"
"""What decides about a call in doubt, instead of a text."""


Delta = TextDelta | ReasoningDelta | StreamRestarted


@dataclass
class Screen:
    """Writes a run's text and progress, each on lines of its own.

    Attributes:
        streams: text goes to stdout as it comes. Where stdout is no terminal, only the final text is printed, at the
            end: who reads it can't tell that the text of a lost model call is void.
        thinks: the model's reasoning goes to stderr as it comes.
        last: the last line of progress.
    """

    streams: bool
    thinks: bool = False
    last: str = ""
    _open: bool = False
    _thinking: bool = False

    def text(self, piece: str) -> None:
        """Part of an answer."""
        if self.streams and piece:
            self._end_thought()
            sys.stdout.write(CONTROLS.sub("�", piece))
            sys.stdout.flush()
            self._open = not piece.endswith("\n")

    def thought(self, piece: str) -> None:
        """Part of the model's reasoning."""
        if self.thinks and piece:
            if not self._thinking:
                self.end_line()
            errors.print(f"[dim]{escape(CONTROLS.sub('�', piece))}[/dim]", end="", soft_wrap=True)
            self._thinking = True

    def _end_thought(self) -> None:
        if self._thinking:
            errors.print()
            self._thinking = False

    def end_line(self) -> None:
        """What is written next begins a line."""
        self._end_thought()
        if self._open:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._open = False

    def note(self, text: str, style: str = "dim") -> None:
        """One line of progress."""
        self.end_line()
        self.last = text
        errors.print(f"[{style}]{escape(clean(text))}[/{style}]", soft_wrap=True)

    def void(self) -> None:
        """The text of this answer so far is not part of it."""
        if self.streams or self.thinks:
            self.note("the model call was lost and is made again; its text above is void", "yellow")

    def pending(self, session_id: str, item: PendingInput) -> None:
        """A question, and the command that answers it."""
        self.end_line()
        print_pending(session_id, [item], errors)


@dataclass
class Following:
    """One run, followed until it ends or only people can help.

    Args:
        interactive: there is a person at a terminal, who is asked what the agents ask.

    Attributes:
        command: by which a run is followed again.
    """

    command: ClassVar[str] = "run"
    cluster: Cluster
    session: Session
    run: Run
    screen: Screen
    interactive: bool
    left: list[tuple[str, PendingInput]] = field(default_factory=list)
    """What is asked and was not answered here, by the session that asks."""
    _seen: set[tuple[str, str, int]] = field(default_factory=set)
    _purposes: dict[str, str] = field(default_factory=dict)
    _held: dict[str, list[Delta]] = field(default_factory=dict)
    _looks: bool = True

    def result(self, timeout: float | None = None) -> RunResult | None:
        """Its result; None if it waits for the answers to `left`.

        Raises:
            DeadlineExceeded: it has not ended after so many seconds, and goes on.
        """
        until = None if timeout is None else time.monotonic() + timeout
        news, patience = self._news(), LOOK_SECONDS
        while True:
            left = patience if until is None else max(0.0, until - time.monotonic())
            try:
                event = news.get(timeout=min(patience, left))
            except queue.Empty:
                patience = LOOK_SECONDS
                if self._looks and self._people():
                    return None
                if until is not None and time.monotonic() >= until:
                    raise DeadlineExceeded(
                        f"run {self.run.run_id} has not ended after {timeout:g} s; it goes on{self._obstacle()}",
                        session_id=self.session.id,
                    ) from None
                continue
            if isinstance(event, BaseException):
                raise event
            if event is None:
                self.screen.end_line()
                return self.run.result()
            if isinstance(event, RunStarted):  # no run before it waits for people
                self._looks = False
            elif isinstance(event, (InputRequested, ChildSpawned)):
                self._looks = True
                patience = SOON_SECONDS if isinstance(event, InputRequested) else patience
            self._show(event)

    def _obstacle(self) -> str:
        """Why the session does not run, if that is known; empty otherwise."""
        try:
            error = self.session.info().error
        except UnderstudyError:
            return ""
        return f", once it can: {error['message']}" if error is not None else ""

    def _news(self) -> queue.SimpleQueue[Event | BaseException | None]:
        """The run's events, read in a thread: the terminal's is interrupted, has a deadline, and asks people."""
        news: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()

        def read() -> None:
            try:
                for event in self.run:
                    news.put(event)
            except BaseException as error:
                news.put(error)
            else:
                news.put(None)

        threading.Thread(target=read, name="understudy-follow", daemon=True).start()
        return news

    def _people(self) -> bool:
        """Ask what is asked; whether nothing goes on without the answers that nobody gave."""
        try:
            tree = self.session.tree()
        except StoreUnreachable:  # the run waits for it, and so does who waits for the run
            return False
        asked = [(_whose(info, item), item) for info in tree for item in info.pending]
        for session_id, item in asked:
            if (session_id, item.call_id, item.asked) in self._seen:  # also one that those above it have as theirs
                continue
            self._seen.add((session_id, item.call_id, item.asked))
            if not (self.interactive and item.kind in ANSWERED_HERE and self._answered(session_id, item)):
                self.screen.pending(session_id, item)
                self.left.append((session_id, item))
        self.left = [item for item in self.left if item in asked]
        return bool(self.left) and not _at_work(tree, [session_id for session_id, _ in asked])

    def _answered(self, session_id: str, item: PendingInput) -> bool:
        """Ask a person; False if the answer is put off."""
        self.screen.end_line()
        answer = ask(item)
        if answer is None:
            return False
        text, options = answer
        try:
            self.cluster.session(session_id).answer(item.call_id, text, **options)
        except (AnswerConflict, NotAsked) as error:
            self.screen.note(f"not taken: {error.message}", "yellow")
        return True

    def _show(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._text(event)
        elif isinstance(event, ToolCallDelta):
            return  # what a call is asked for is shown when all of it is known
        elif isinstance(event, ModelCallStarted):
            call = event.request_key.rpartition("/")[0]
            self._purposes[call] = event.purpose
            if event.purpose:
                self.screen.note("· the history is folded to fit the model's window")
            for piece in self._held.pop(call, ()):
                self._text(piece)
        elif isinstance(event, ModelCallCompleted):
            for line in self._calls(event) if event.tool_calls else ():
                self.screen.note(line)
        elif isinstance(event, ToolFinished) and event.outcome == "ok" and not self._purposes:
            if event.tool not in CHILD_STEPS:  # shown as what their sub-agents do
                path = step_path(event.run_id or "", event.call_id)
                self.screen.note(f"· {path} {event.tool}")  # of a workflow: no model has asked for it
        else:
            shown = progress(event)
            if shown is not None:
                self.screen.note(*shown)

    def _text(self, event: Delta) -> None:
        """Part of an answer; that of a call which is for something else is not for people. What a call is for says the
        event of its start, which may come after the first of its text."""
        call = event.request_key.rpartition("/")[0]
        if call not in self._purposes:
            self._held.setdefault(call, []).append(event)
        elif self._purposes[call]:
            return
        elif isinstance(event, TextDelta):
            self.screen.text(event.text)
        elif isinstance(event, ReasoningDelta):
            self.screen.thought(event.text)
        else:
            self.screen.void()

    def _calls(self, event: ModelCallCompleted) -> Iterator[str]:
        """The tool calls that an answer asks for: the answer is right before its event."""
        read = self.session._connection.read(list[Message], "messages", self.session.id, event.seq - 2, 1)
        try:
            found = background.wait(read)
        except UnderstudyError:  # what the calls were is seen by their results
            return
        for message in found:
            if message.seq == event.seq - 1:
                for call in message.tool_calls:
                    arguments = " ".join(call.arguments.split())
                    shown = arguments if len(arguments) <= SHOWN_ARGUMENTS else f"{arguments[:SHOWN_ARGUMENTS]}…"
                    yield f"· {call.name} {shown if shown != '{}' else ''}".rstrip()


def _whose(info: SessionInfo, item: PendingInput) -> str:
    return getattr(item, "session_id", "") or info.id


def _at_work(tree: list[SessionInfo], asking: list[str]) -> bool:
    return any(info.status in AT_WORK and info.id not in asking for info in tree)


def progress(event: Event) -> tuple[str, str] | None:
    """What people see of an event, and in which style; None for nothing."""
    tell = PROGRESS.get(type(event))
    return tell(event) if tell is not None else None


def _tool_finished(event: ToolFinished) -> tuple[str, str] | None:
    if event.tool == TIMEOUT_STEP:
        return ("  a step is out of time", "yellow") if event.outcome == "ok" else None
    if event.outcome == "ok":
        return None
    return f"  {event.tool}: {event.outcome} {event.error_message}".rstrip(), "yellow"


def _tool_progress(event: ToolProgress) -> tuple[str, str] | None:
    if not errors.is_terminal:  # a log has it in the session's events
        return None
    share = "" if event.fraction is None else f"{event.fraction:.0%}"
    return " ".join(filter(None, (f"  {event.tool}:", share, event.text))), "dim"


def _custom(event: CustomEvent) -> tuple[str, str] | None:
    if not errors.is_terminal:
        return None
    data = "" if event.data is None else to_json(event.data)
    shown = data if len(data) <= SHOWN_ARGUMENTS else f"{data[:SHOWN_ARGUMENTS]}…"
    return f"  {event.tool}: {event.name} {shown}".rstrip(), "dim"


def _crashed(event: SessionCrashed) -> tuple[str, str]:
    what = "it is given up" if event.decision == "quarantine" else "the session goes on in another one"
    return f"! the agent's process is gone ({event.cause}): {what}", "magenta"


def _activated(event: SessionActivated) -> tuple[str, str] | None:
    if event.cause != "resume":
        return None
    return f"! restored after {event.down / 1000:.0f} ms, as activation {event.epoch}", "magenta"


PROGRESS: dict[type[Event], Callable[..., tuple[str, str] | None]] = {
    ToolFinished: _tool_finished,
    ToolProgress: _tool_progress,
    CustomEvent: _custom,
    ToolInDoubt: lambda event: (f"! {event.tool} was cut off, its outcome is unknown ({event.policy})", "magenta"),
    McpServerFailed: lambda event: (f"! {event.error_message}", "yellow"),
    WorktreeEnded: lambda event: (f"worktree {event.branch}: {event.outcome} {', '.join(event.files)}".rstrip(), "dim"),
    SessionCrashed: _crashed,
    SessionActivated: _activated,
    SessionMoved: lambda _: ("! the session goes on at another node", "magenta"),
    SessionQuarantined: lambda event: (f"! the session is given up: {event.reason}", "red"),
    ModelCallReissued: lambda event: (
        f"! the model call was lost with its gateway, and is {'fetched' if event.response_id else 'made'} again",
        "magenta",
    ),
    ModelCallFailed: lambda event: (f"! the model call failed: {event.error_message or event.error_code}", "yellow"),
    AgentHandedOff: lambda event: (
        f"> {event.from_agent} hands off to {event.to_agent}{f': {event.reason}' if event.reason else ''}",
        "magenta",
    ),
    ChildSpawned: lambda event: (f"+ sub-agent {event.child_agent} ({event.child_id})", "dim"),
    ChildFinished: lambda event: (f"- sub-agent {event.child_id}: {event.status}", "dim"),
    ChildRestarted: lambda event: (f"+ sub-agent started again ({event.child_id}): was {event.status}", "yellow"),
    TimerSet: lambda event: (f"  waits until {when(event.due_at)}", "dim") if event.kind == "wait" else None,
}


def ask(item: PendingInput) -> tuple[str, dict[str, bool]] | None:
    """Ask the person at the terminal: a text and the options of `Session.answer`; None if the answer is put off."""
    errors.print(f"[bold]{escape(item.prompt)}[/bold]", soft_wrap=True)
    for number, option in enumerate(item.options, 1):
        errors.print(f"  {number}. {escape(option)}", soft_wrap=True)
    doubt = item.kind == IN_DOUBT
    how = f"its result, {RERUN}, or {FAILED} REASON; " if doubt else "a number or a text; " if item.options else ""
    while True:
        errors.print(f"[dim]({how}an empty line puts the answer off)[/dim] > ", end="", soft_wrap=True)
        line = sys.stdin.readline().strip()
        if not line:
            return None
        try:
            return read_answer(line, item)
        except InvalidInput as error:
            errors.print(f"[yellow]{escape(error.message)}[/yellow]", soft_wrap=True)


def read_answer(line: str, item: PendingInput) -> tuple[str, dict[str, bool]]:
    """What a line at the terminal says.

    Raises:
        InvalidInput: it says that the call failed, and not why.
    """
    word, _, reason = line.partition(" ")
    if item.kind == IN_DOUBT and line == RERUN:
        return "", {"rerun": True}
    if item.kind == IN_DOUBT and word == FAILED:
        if not reason.strip():
            raise InvalidInput(f"say why, behind {FAILED}")
        return reason.strip(), {"failed": True}
    if line.isdecimal() and 1 <= int(line) <= len(item.options):
        return item.options[int(line) - 1], {}
    return line, {}


def tokens(result: RunResult) -> str:
    """What a run took."""
    cost = f", cost {result.cost}" if result.cost else ""
    return f"{counted(result.rounds, 'round')}, {result.usage.total_tokens:,} tokens{cost}"
