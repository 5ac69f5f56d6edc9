"""Model calls beside which hooks of the agent's run: their answers count only with the verdict of those.

The answer stays where it arrived until there is a verdict: so what hooks refuse never comes into the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from understudy.protocol import Judged
from understudy.records import ModelAnswer


class Verdicts:
    """What frames have said of the calls that they wait for; of each frame the latest, until it calls in for more."""

    def __init__(self) -> None:
        self._of_frames: dict[str, tuple[Judged, asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._of_frames)

    @contextmanager
    def kept(self, frame_id: str, verdict: Judged) -> Iterator[asyncio.Future[None]]:
        """Know the verdict in this context; it shall be left when the future is done."""
        self.drop(frame_id)
        mine = self._of_frames[frame_id] = verdict, asyncio.get_running_loop().create_future()
        try:
            yield mine[1]
        finally:
            if self._of_frames.get(frame_id) is mine:
                del self._of_frames[frame_id]

    def of(self, incarnation: int, wait_key: str) -> Judged | None:
        """What was said of a call."""
        return next((said for said, _ in self._of_frames.values() if _key(said) == (incarnation, wait_key)), None)

    def drop(self, frame_id: str, before: int | None = None) -> None:
        """Forget what a frame has said, if it was before its `StepCall` of this number."""
        verdict, over = self._of_frames.get(frame_id, (None, None))
        if verdict is None or over is None or (before is not None and verdict.number >= before):
            return
        del self._of_frames[frame_id]
        if not over.done():
            over.set_result(None)

    def over(self, incarnation: int, wait_key: str) -> None:
        """A call is over: what was said of it is of no use any more."""
        for frame_id, (verdict, _) in list(self._of_frames.items()):
            if _key(verdict) == (incarnation, wait_key):
                self.drop(frame_id)


def _key(verdict: Judged) -> tuple[int, str]:
    return verdict.activation.incarnation, verdict.wait_key


def judged(answer: ModelAnswer, verdict: Judged | None, session_id: str, *, unwanted: bool) -> ModelAnswer:
    """What counts of an answer: all of it, or what it took.

    Args:
        verdict: None if there was none when the call ended: nobody vouches for what came.
        unwanted: the session did not want the rest of it.
    """
    nothing = ModelAnswer.aborted(session_id).error if answer.error is None else answer.error
    if verdict is not None and verdict.error is not None:
        nothing = verdict.error
    elif verdict is not None and (unwanted or not _was_aborted(answer)):
        return answer
    return replace(answer, content=None, tool_calls=(), extra=None, error=nothing)


def _was_aborted(answer: ModelAnswer) -> bool:
    """Whether the call was aborted: where the session does not want that, for a verdict that got lost with its process
    and its service."""
    return answer.error is None and answer.finish_reason == "aborted"
