"""Guards: hooks that run beside a model call, in the frame that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from understudy.errors import Refused
from understudy.ports import Node
from understudy.protocol import Exit, Judged, StepCall, Work
from understudy.records import Finish

Guards = Callable[[], Awaitable[dict[str, Any] | None]]
"""Calls the hooks beside a model call. Returns why its answer is for nobody, as the call's error; None if they let it
pass."""

Guard = Coroutine[Any, Any, dict[str, Any] | None]
"""One of them at work; the same of it alone."""

STOPPED = "stopped"
"""In the details of such an error: the text with which a hook ends the run."""


async def guarded(node: Node, call: StepCall, guards: Guards) -> Work | Exit:
    """Make a step whose model call has hooks beside it, and tell their verdict while it is under way.

    A step that has its answer without them, because its call was never made, failed or is not wanted any more, ends
    them. When this returns they have ended.
    """
    assert call.activation is not None
    assert call.request is not None
    step = asyncio.ensure_future(node.step(call))
    guarding = asyncio.ensure_future(guards())
    tasks: list[asyncio.Future[Any]] = [step, guarding]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            verdict = Judged(call.number, call.activation, call.request.wait_key, guarding.result())
            # Under way until the step has its answer; what it fails with, the step fails with as well.
            tasks.append(asyncio.ensure_future(node.judge(call.frame.frame_id, verdict)))
        return await step
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_tripped(guards: Sequence[Guard]) -> dict[str, Any] | None:
    """Have guards work beside each other; what the first trips with, which ends the others. Of several that trip at the
    same time it is the first of the sequence."""
    tasks = [asyncio.ensure_future(guard) for guard in guards]
    pending = set(tasks)
    try:
        while pending:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            found = (task.result() for task in tasks if task.done())
            error = next((error for error in found if error is not None), None)
            if error is not None:
                return error
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def refusal(name: str, refused: str | None, stopped: str | None, session_id: str) -> dict[str, Any] | None:
    """The error of a model call whose answer the hook of this name does not let count.

    Args:
        refused: why; None if it did not refuse.
        stopped: with which text it ends the run; None if it does not.
    """
    if refused is not None:
        return Refused(refused, session_id=session_id).to_wire()
    if stopped is None:
        return None
    return Refused(f"the hook {name} stopped the run", session_id=session_id, details={STOPPED: stopped}).to_wire()


def end_of(error: dict[str, Any]) -> Finish:
    """How a run ends whose model call has this error (`refusal`)."""
    stopped = (error.get("details") or {}).get(STOPPED)
    return Finish("completed", stopped, stopped=True) if stopped is not None else Finish("failed", "", error=error)
