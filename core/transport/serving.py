"""The side of a service that is called: what arrives is checked, done once, and what is sent back is made of it. No
Ray."""

from __future__ import annotations

from functools import partial
from typing import Any

from .repeating import Answering
from .signatures import signature_of


class Serving:
    """Has the methods of an object done for callers that repeat themselves (`Repeating`).

    Args:
        methods: the class that has them as they were written: Ray sends its actors' own without annotations.
        target: does them.
    """

    def __init__(self, methods: type, target: object) -> None:
        self._methods = methods
        self._target = target
        self._answering = Answering()

    async def answer(self, call_id: str, method: str, *arguments: Any) -> Any:
        """What a method returns, as it is sent.

        Args:
            call_id: of a call whose repetitions have the same; empty for one that is not repeated.
            arguments: as they arrive.

        Raises:
            InvalidInput: they are not what the method takes.
        """
        signature = signature_of(getattr(self._methods, method))
        begin = partial(getattr(self._target, method), *signature.arguments(arguments))
        return signature.sent(await (self._answering.answer(call_id, begin) if call_id else begin()))

    async def close(self) -> None:
        """Give up what is under way."""
        await self._answering.close()
