"""A call that a tool host makes, or has made: its answer, and what its server asks a person meanwhile. No Ray."""

from __future__ import annotations

import asyncio

from understudy.tool_hosting import CANCEL, LOST, Elicitation, ElicitationAnswer, ServerAnswer


class HeldCall:
    """A call under way, or its answer until that is released.

    Attributes:
        answer: how it ended.
        task: makes it; None once its answer was dropped.
        ended: when it did (monotonic).
    """

    def __init__(self) -> None:
        self.answer: asyncio.Future[ServerAnswer] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.ended = 0.0
        self._questions: dict[str, tuple[Elicitation, asyncio.Future[ElicitationAnswer]]] = {}
        self._asked = asyncio.Event()

    @property
    def size(self) -> int:
        """Characters that are kept of it."""
        return len(self.answer.result().content) if self.answer.done() and not self.answer.cancelled() else 0

    def drop_answer(self) -> None:
        """Keep only that the call was made: it is not made again if it comes again, but its answer is lost."""
        if self.task is None:  # done before
            return
        self.answer = asyncio.get_running_loop().create_future()
        self.answer.set_result(ServerAnswer(LOST))
        self.task = None

    @property
    def question(self) -> Elicitation | None:
        """The oldest question that has no answer."""
        return next((question for question, _ in self._questions.values()), None)

    async def ask(self, question: Elicitation) -> ElicitationAnswer:
        """What a person says; the server waits for it, however long."""
        said: asyncio.Future[ElicitationAnswer] = asyncio.get_running_loop().create_future()
        self._questions[question.id] = question, said
        self._asked.set()
        try:
            return await said
        finally:
            self._close(question.id)

    def pass_on(self, said: ElicitationAnswer) -> None:
        """Give the server an answer. One that it has, or does not wait for any more, changes nothing."""
        found = self._close(said.id)
        if found is not None and not found.done():
            found.set_result(said)

    def give_up(self) -> None:
        """Have nobody asked any more."""
        for name in list(self._questions):
            self.pass_on(ElicitationAnswer(name, CANCEL))

    async def changed(self) -> None:
        """Return when it has ended, or a question has no answer."""
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((self.answer, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()

    def _close(self, name: str) -> asyncio.Future[ElicitationAnswer] | None:
        found = self._questions.pop(name, None)
        if not self._questions:
            self._asked.clear()
        return found[1] if found is not None else None
