"""The gateway as its node service reaches it, from another process. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import ModelProfile
from ..ports import ModelGateway
from ..protocol import Attached, CallOrigin, Growth, packed
from ..records import ModelAnswer, ModelRequest
from .remote_node import Attempt
from .repeating import Patience, Repeating
from .signatures import signature_of

GATEWAY_PATIENCE = Patience(attempt=60.0, growth=2.0, longest=600.0, gone=0.0)
"""On a socket nothing gets lost but with its connection; what takes the other way can, and is asked for again. When a
gateway is gone nothing is repeated: its service attaches to the next one first."""


class RemoteGateway:
    """A `understudy.ports.ModelGateway` in another process.

    Args:
        attempt: how it is reached.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    async def attach(self, profiles: list[ModelProfile]) -> Attached:
        """See `ModelGateway.attach`."""
        return await self._call(ModelGateway.attach, profiles)  # type: ignore[no-any-return]

    async def register(self, number: str, profile: ModelProfile) -> None:
        """See `ModelGateway.register`."""
        await self._call(ModelGateway.register, number, profile)

    async def call(self, number: str, origin: CallOrigin, request: ModelRequest | None) -> ModelAnswer:
        """See `ModelGateway.call`."""
        return await self._call(ModelGateway.call, number, origin, request)  # type: ignore[no-any-return]

    async def growth(self, number: str, key: str, restarts: int, length: int) -> Growth:
        """See `ModelGateway.growth`."""
        return await self._call(ModelGateway.growth, number, key, restarts, length)  # type: ignore[no-any-return]

    async def abort(self, number: str, key: str) -> None:
        """See `ModelGateway.abort`."""
        await self._call(ModelGateway.abort, number, key)

    async def release(self, number: str, keys: list[str]) -> None:
        """See `ModelGateway.release`."""
        await self._call(ModelGateway.release, number, keys)

    async def heard(self, number: str) -> None:
        """See `ModelGateway.heard`."""
        await self._call(ModelGateway.heard, number)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        sent = packed(arguments)
        found = await Repeating(GATEWAY_PATIENCE).call(
            lambda call_id: self._attempt(call_id, method.__name__, *sent)
        )  # fmt: skip
        return signature_of(method).result(found)
