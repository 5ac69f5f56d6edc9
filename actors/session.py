"""The loop of a session: from what it knows to its next step, the same after a crash as without one.

There is no other state than the window. `advance` looks at it, does what is due (start a run, run tools, ask a model,
finish) and returns the next step for the node service. A restored session goes through the same door.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from understudy.errors import ContextOverflow, Refused
from understudy.messages import ALWAYS, CUT_OFF, NEVER, Message
from understudy.ports import Node
from understudy.protocol import FrameIdentity
from understudy.records import Batch, Finish, ModelRequest
from understudy.wakeups import WAIT

from .call_outcomes import Loader
from .commits import Commits, Patience
from .context import FOLD_REQUEST, Exhausted
from .execution import Outcome
from .folding import make_room, summary_of, take_summary
from .guards import Guards, end_of
from .handoffs import later_handoffs
from .hooks import Hooks, LoadedHook, Wanted
from .memory import Memory, ProviderLoader, visible_memory
from .output import Rejected
from .repeats import NO_PROGRESS, REPEATED, judge
from .servers import Servers
from .steering import inputs_of, message_of, steers, take_news, take_steers
from .tool_calls import ToolCalls, given_up
from .tools import builtin
from .window import CONTINUATION, CONTINUE, Window
from .worktrees import WorkingTree

HookLoader = Callable[[dict[str, Any]], Awaitable[LoadedHook]]


@dataclass
class Step:
    """What an activation wants next: the arguments of `Node.step`, before the wire.

    Attributes:
        guards: call the hooks that run beside the model call of `request`; None where there are none.
    """

    batch: Batch | None
    request: ModelRequest | None = None
    leave: bool = False
    guards: Guards | None = None


class Activation:
    """A session at work in this process, from the node service's work to the next step; an epoch may have several.

    Attributes:
        patience: when this process is to be taken for hung.
    """

    def __init__(
        self, window: Window, node: Node, load: Loader, load_hook: HookLoader, load_provider: ProviderLoader,
        frame: FrameIdentity,
    ) -> None:  # fmt: skip
        self.window, frame_id = window, frame.frame_id
        self.patience = Patience()
        self._ended: Finish | None = None  # as hooks want it
        self._begins = False  # a run does, of which no model was asked anything yet
        self._hooks = Hooks(window, load_hook, self.patience.expect)
        self._commits = Commits(window, node, frame_id, self.patience)
        self._memory = Memory(window, node, frame_id, self._commits, self.patience, load_provider)
        self._worktree = WorkingTree(window, self._commits, self.patience)
        self._servers = Servers(window, node, frame_id, self._commits, self.patience)
        self._calls = ToolCalls(window, self._commits, self._hooks, self.patience, node, load, self._servers, frame)

    @property
    def stuck(self) -> bool:
        """Whether code of the user's goes on that could not be stopped: no other session may be served beside it."""
        return self._calls.stuck or self._hooks.stuck or self._memory.stuck

    async def advance(self) -> Step:
        """Do what is due and return the next step.

        Raises:
            Fenced: another activation of the session exists; nothing more may be done here.
        """
        window = self.window
        if window.run_id is None and not await self._start_run():
            return await self._step(wait="idle")
        answer = self._new_answer()
        if answer is not None:
            await self._hooks.see("after_model", text=answer.text)
            if window.calls and self._hooks.has("before_tools"):
                await self._hooks.ask("before_tools", calls=tuple((c.call_id, c.tool) for c in window.calls))
        while True:
            if window.cancel is not None:
                return await self._finish("cancelled", window.reply())
            if self._ended is not None:
                return await self._end_as(self._ended)
            if window.model_error is not None:
                return await self._after_error(window.model_error)
            if window.wait == "model":  # activated while a call is in flight: attach to it
                return self._guarded(Step(None, window.request(window.round, whole=True)), redone=True)
            if window.calls:
                unusable = await self._worktree.make()
                if unusable is not None:
                    return await self._finish("failed", window.reply(), error=unusable)
                step = await self._bring_calls()
                if step is not None:
                    return step
                continue
            await self._take_summary()
            last = self._last()
            if last is None or last.role != "assistant" or steers(window.inbox):
                return await self._ask()
            is_cut = (last.extra or {}).get("finish_reason") == CUT_OFF
            if is_cut and window.continuations() < window.spec["max_continuations"]:
                self._commits.draft.say(window, Message("user", CONTINUE, origin=CONTINUATION))
                return await self._ask()
            return await self._final(last)

    async def _bring_calls(self) -> Step | None:
        """Bring the round's calls to their results; the step that ends the activation here, if one does."""
        window, typed = self.window, self.window.typed
        limit = window.spec.get("repeat_limit", 0)  # sessions of earlier versions have none
        waits = {name for name, tool in window.tools.items() if builtin(tool) == WAIT}
        repeated, hopeless = judge(window.messages, window.calls, limit, waits)
        known = {call_id: Outcome("repeated", REPEATED) for call_id in repeated}
        known |= later_handoffs(window.calls, window.tools)
        given = typed.given(window.calls, window.asked_model) if typed is not None else []
        if typed is not None and given:
            try:
                output = typed.of_calls(given, next(said for said in window.backwards() if said.tool_calls))
            except Rejected as rejected:
                if not typed.may_ask_again(rejected, window.backwards()):
                    known = typed.last_outcomes(window.calls, given, rejected)
                    error = typed.failed(rejected, window.session_id)
                    return await self._finish("failed", window.reply(), error=error, known=known)
                known |= typed.outcomes(given, rejected)
            else:
                known = typed.last_outcomes(window.calls, given)
                return await self._finish("completed", given[0].arguments, output=output, known=known)
        if hopeless:
            return await self._finish("failed", window.reply(), error=NO_PROGRESS)
        calls = window.calls
        waiting = await self._calls.bring(known)
        if window.cancel is not None:
            return None
        if waiting is None and self._hooks.has("after_tools"):
            ended = tuple((call.call_id, call.tool, self._calls.outcome(call.call_id)) for call in calls)
            self._ended = self._heed(await self._hooks.ask("after_tools", calls=ended))
        if self._calls.leave and self._ended is None:
            return await self._step()
        return await self._step(wait=waiting) if waiting is not None else None

    async def _final(self, last: Message) -> Step:
        """The end of the run with its answer; where that does not fit the agent's output, the model is asked again."""
        window, typed, text = self.window, self.window.typed, self.window.reply()
        if typed is None:
            return await self._finish("completed", text)
        try:
            output = typed.of_text(text, last)
        except Rejected as rejected:
            if not typed.may_ask_again(rejected, window.backwards()):
                return await self._finish("failed", text, error=typed.failed(rejected, window.session_id))
            self._commits.draft.say(window, typed.again(rejected, window.asked_model))
            return await self._ask()
        return await self._finish("completed", text, output=output)

    async def _start_run(self) -> bool:
        inputs = inputs_of(self.window)
        if not inputs:
            return False
        first, *others = inputs
        self._begins = True
        self._commits.draft.start_run = first.key
        self._commits.draft.merge_runs = tuple(item.key for item in others)
        self.window.run_id, self.window.round = first.key, 0
        self.window.trace_id, self.window.sampled = first.payload["trace_id"], first.payload.get("sampled")
        self.window.calls = []
        messages = [message_of(item) for item in inputs]
        text = "\n\n".join(message.text for message in messages)
        wanted = Wanted(text)
        for point in ("run_start",) if self.window.messages else ("session_start", "run_start"):
            if not wanted.is_over:
                before, wanted = wanted.messages, await self._hooks.ask(point, text=wanted.text)
                wanted.messages[:0] = before
        if wanted.text != text:
            messages = [Message("user", wanted.text)]
        visibility = NEVER if wanted.refused is not None else ALWAYS  # what was refused no model is ever sent
        for message in messages:
            self._commits.draft.say(self.window, replace(message, visibility=visibility))
        self._ended = self._heed(wanted)
        memory = await self._shown(await self._memory.message()) if self._ended is None else None
        if memory is not None:
            self._commits.draft.say(self.window, memory)
        return True

    def _heed(self, wanted: Wanted) -> Finish | None:
        """Add what hooks want to be added; how the run ends if they want it to."""
        for message in wanted.messages:
            self._commits.draft.say(self.window, message)
        if wanted.refused is not None:
            error = Refused(wanted.refused, session_id=self.window.session_id).to_wire()
            return Finish("failed", "", error=error)  # its answer goes to nobody
        return Finish("completed", wanted.stopped, stopped=True) if wanted.stopped is not None else None

    async def _end_as(self, wanted: Finish) -> Step:
        """The end of the run that a hook wants."""
        return await self._finish(wanted.status, wanted.text, error=wanted.error, stopped=wanted.stopped)

    def _new_answer(self) -> Message | None:
        """The model's answer, as long as nothing has followed from it that an agent's process did."""
        window, last = self.window, self._last()
        if window.cancel is not None or window.model_error is not None or window.wait == "model":
            return None
        followed = any(call.state != "requested" and not given_up(call) for call in window.calls)
        return last if last is not None and last.role == "assistant" and not followed else None

    def _last(self) -> Message | None:
        """The run's last message, whether committed or still in the draft."""
        seen = (said for said in self.window.backwards(self._commits.draft.messages) if said.visibility != NEVER)
        return next(seen, None)

    async def _ask(self) -> Step:
        """The next model call, or the end of the run where a limit or a hook forbids it; after a handoff the end of
        this activation: the next one asks under the other agent."""
        window = self.window
        if self._commits.draft.handoff is not None:
            return await self._step()
        if window.rounds() >= window.spec["max_rounds"]:
            return await self._finish("round_limit", window.reply())
        unusable = await self._worktree.make() or await self._servers.list_tools(all_servers=self._begins)
        self._begins = False
        if unusable is not None:
            return await self._finish("failed", window.reply(), error=unusable)
        take_news(window, self._commits.draft)
        take_steers(window, self._commits.draft)
        try:
            make_room(window, self._commits.draft)
        except Exhausted:
            return await self._finish("failed", window.reply(), error=window.model_error)
        memory = await self._shown(await self._memory.before_ask())
        if memory is not None:
            self._commits.draft.say(window, memory)
        number, draft = window.round + 1, self._commits.draft
        if any(message.origin == FOLD_REQUEST for message in draft.messages):
            await self._before_fold()
            draft.of_request = 1
        elif self._hooks.has("before_model"):

            def asked(more: list[Message]) -> ModelRequest:
                of_round = [replace(message, run_id=window.run_id, round=window.round) for message in more]
                return window.request(number, [*draft.messages, *of_round])

            added = len(draft.entries)
            ended = self._heed(await self._hooks.before_model(number, asked))
            if ended is not None:
                return await self._end_as(ended)
            draft.of_request = len(draft.entries) - added
        request = window.request(number, draft.messages)
        step = await self._step(wait="model", round_number=window.round + 1, request=request)
        step.request = request
        return self._guarded(step, redone=window.redone)

    def _guarded(self, step: Step, *, redone: bool) -> Step:
        """The same step; with it the hooks are called that run beside its model call."""
        if step.request is not None and step.request.guarded:
            step.guards = partial(self._hooks.beside_model, step.request, redone=redone)
        return step

    async def _after_error(self, error: dict[str, Any]) -> Step:
        """Go on after a model call that failed: with less of the history, as before if it was to fold that, or without
        the response format that the endpoint does not take."""
        if error["code"] == "budget_exceeded":  # by an account; nothing was asked
            return await self._finish("budget_exceeded", self.window.reply(), error=error)
        if error["code"] == Refused.code:  # by a hook beside the call
            return await self._end_as(end_of(error))
        if error["code"] in (ContextOverflow.code, "aborted") or self.window.asked_to_fold():
            # Aborted for nobody's sake: for a verdict of hooks that got lost, and that they did not repeat.
            return await self._ask()
        typed, model = self.window.typed, self.window.asked_model
        if typed is not None and typed.takes_no_format(error, model):
            self._commits.draft.say(self.window, typed.record(model))
            return await self._ask()
        return await self._finish("failed", self.window.reply(), error=error)

    async def _finish(
        self, status: str, text: str, error: dict[str, Any] | None = None, *, output: Any = None,
        known: dict[str, Outcome] | None = None, stopped: bool = False,
    ) -> Step:  # fmt: skip
        """The end of the run, unless a hook has it go on.

        Args:
            output: what was read of the text, for an agent with an output type.
            known: results of calls that were not begun.
            stopped: a hook wants it.
        """
        window = self.window
        await self._worktree.fence(status)
        await self._calls.end(known or {})
        if status == "round_limit":
            error = {"code": "round_limit", "message": f"no answer after {self.window.round} rounds"}
        wanted = await self._hooks.ask("run_end", text=text, outcome=status)
        if wanted.goes_on is not None and wanted.refused is None:
            self._heed(wanted)
            return await self._ask()
        ended = self._heed(wanted) or Finish(status, wanted.text, error=error, stopped=stopped)
        if ended.text == text and output is not None:
            ended = replace(ended, output=output)
        elif window.typed is not None and ended.status == "completed":  # a text of a hook's, perhaps
            ended = window.typed.checked(ended, window.session_id)
        await self._memory.remember(ended.text, ended.status)
        return await self._step(wait="idle", finish=await self._worktree.end(ended))

    async def _shown(self, memory: Message | None) -> Message | None:
        """What the agent is shown of its memory, as hooks leave it; None if it sees that already."""
        if memory is None or not self._hooks.has("memory_recalled"):
            return memory
        wanted = await self._hooks.ask("memory_recalled", text=memory.text)
        last = visible_memory(self.window, self._commits.draft.messages)
        return replace(memory, content=wanted.text) if last is None or last.content != wanted.text else None

    async def _before_fold(self) -> None:
        """Let hooks say what the model is asked in order to fold its history."""
        entries = self._commits.draft.entries
        at = next(n for n, one in enumerate(entries) if isinstance(one, Message) and one.origin == FOLD_REQUEST)
        asked = entries[at]
        assert isinstance(asked, Message)
        wanted = await self._hooks.ask("before_fold", text=asked.text)
        entries[at] = replace(asked, content=wanted.text)

    async def _take_summary(self) -> None:
        """Record the summary that has come, if one has, as hooks leave it."""
        summary = summary_of(self.window, self._commits.draft)
        if summary is not None:
            wanted = await self._hooks.ask("after_fold", text=summary)
            take_summary(self.window, self._commits.draft, wanted.text)

    async def _step(
        self, *, wait: str | None = None, finish: Finish | None = None, round_number: int = 0,
        request: ModelRequest | None = None,
    ) -> Step:  # fmt: skip
        batch = await self._commits.last(wait=wait, finish=finish, round_number=round_number, request=request)
        return Step(batch, leave=self._calls.leave)
