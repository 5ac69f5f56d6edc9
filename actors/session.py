"""The loop of a session: from what it knows to its next step, the same after a crash as without one.

There is no other state than the window. `advance` looks at it, does what is due (start a run, run tools, ask a model,
finish) and returns the next step for the node service. A restored session goes through the same door.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from understudy.errors import ContextOverflow
from understudy.messages import CUT_OFF, NEVER, Message
from understudy.ports import Node
from understudy.records import Batch, Finish, ModelRequest
from understudy.wakeups import WAIT

from .commits import Commits, Patience
from .context import Exhausted
from .folding import make_room, take_summary
from .hooks import Hooks, LoadedHook
from .repeats import NO_PROGRESS, judge
from .steering import inputs_of, steers, take_steers
from .tool_calls import Loader, ToolCalls, given_up
from .tools import builtin
from .window import CONTINUATION, CONTINUE, Window

HookLoader = Callable[[dict[str, Any]], Awaitable[LoadedHook]]


@dataclass
class Step:
    """What an activation wants next: the arguments of `Node.step`, before the wire."""

    batch: Batch | None
    request: ModelRequest | None = None
    leave: bool = False


class Activation:
    """One incarnation of a session in this process, from taking it up to its next wait.

    Attributes:
        patience: when this process is to be taken for hung.
    """

    def __init__(self, window: Window, node: Node, load: Loader, load_hook: HookLoader, frame_id: str) -> None:
        self.window = window
        self.patience = Patience()
        self._hooks = Hooks(window, load_hook, self.patience.expect)
        self._commits = Commits(window, node, frame_id, self.patience)
        self._calls = ToolCalls(window, self._commits, self._hooks, self.patience, node, load, frame_id)

    @property
    def stuck(self) -> bool:
        """Whether a tool goes on that ignores its cancellation."""
        return self._calls.stuck

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
        while True:
            if window.cancel is not None:
                return await self._finish("cancelled", window.reply())
            if window.model_error is not None:
                return await self._after_error(window.model_error)
            if window.wait == "model":  # taken up while a call is in flight: attach to it
                return Step(None, window.request(window.round, whole=True))
            if window.calls:
                limit = window.spec.get("repeat_limit", 0)  # sessions of earlier versions have none
                waits = {tool["name"] for tool in window.spec["tools"] if builtin(tool) == WAIT}
                repeated, hopeless = judge(window.messages, window.calls, limit, waits)
                if hopeless:
                    return await self._finish("failed", window.reply(), error=NO_PROGRESS)
                waiting = await self._calls.bring(repeated)
                if window.cancel is None and self._calls.leave:
                    return await self._step(leave=True)
                if window.cancel is None and waiting is not None:
                    return await self._step(wait=waiting)
                continue
            take_summary(window, self._commits.draft)
            last = self._last()
            if last is None or last.role != "assistant" or steers(window.inbox):
                return await self._ask()
            if (last.extra or {}).get("finish_reason") != CUT_OFF:
                return await self._finish("completed", window.reply())
            if window.continuations() >= window.spec["max_continuations"]:
                return await self._finish("completed", window.reply())
            self._commits.draft.say(window, Message("user", CONTINUE, origin=CONTINUATION))
            return await self._ask()

    async def _start_run(self) -> bool:
        inputs = inputs_of(self.window)
        if not inputs:
            return False
        first, *others = inputs
        self._commits.draft.start_run = first.key
        self._commits.draft.merge_runs = tuple(item.key for item in others)
        self.window.run_id, self.window.round = first.key, 0
        self.window.trace_id = first.payload["trace_id"]
        self.window.calls = []
        messages = [Message("user", item.payload["content"]) for item in inputs]
        await self._hooks.see("run_start", text="\n\n".join(message.text for message in messages))
        for message in messages:
            self._commits.draft.say(self.window, message)
        return True

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
        """The next model call, or the end of the run where a limit or a hook forbids it."""
        window = self.window
        if window.rounds() >= window.spec["max_rounds"]:
            return await self._finish("round_limit", window.reply())
        take_steers(window, self._commits.draft)
        try:
            make_room(window, self._commits.draft)
        except Exhausted:
            return await self._finish("failed", window.reply(), error=window.model_error)
        request = window.request(window.round + 1, self._commits.draft.messages)
        refused = await self._hooks.before_model(request, window.round + 1) if not request.purpose else None
        if refused is not None:
            return await self._finish("failed", window.reply(), error=refused)
        step = await self._step(wait="model", round_number=window.round + 1, request=request)
        step.request = request
        return step

    async def _after_error(self, error: dict[str, Any]) -> Step:
        """Go on after a model call that failed: with less of the history, or as before if it was to fold that."""
        if error["code"] == "budget_exceeded":  # by an account; nothing was asked
            return await self._finish("budget_exceeded", self.window.reply(), error=error)
        if error["code"] == ContextOverflow.code or self.window.asked_to_fold():
            return await self._ask()
        return await self._finish("failed", self.window.reply(), error=error)

    async def _finish(self, status: str, text: str, error: dict[str, Any] | None = None) -> Step:
        await self._calls.end()
        if status == "round_limit":
            error = {"code": "round_limit", "message": f"no answer after {self.window.round} rounds"}
        await self._hooks.see("run_end", text=text, outcome=status)
        return await self._step(wait="idle", finish=Finish(status, text, error=error))

    async def _step(
        self, *, wait: str | None = None, finish: Finish | None = None, leave: bool = False, round_number: int = 0,
        request: ModelRequest | None = None,
    ) -> Step:  # fmt: skip
        batch = await self._commits.last(wait=wait, finish=finish, round_number=round_number, request=request)
        return Step(batch, leave=leave or self._hooks.stuck)
