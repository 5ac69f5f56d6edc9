"""The gateway as its node service reaches it, from another process. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import ModelProfile
from ..errors import ServiceGone
from ..ports import ModelGateway
from ..protocol import Attached, CallOrigin, Growth
from ..rates import RateReport, RateShares
from ..records import KeptResponse, ModelAnswer, ModelRequest
from .remote_node import Attempt
from .signatures import signature_of


class RemoteGateway:
    """A `understudy.ports.ModelGateway` in another process.

    Nothing is repeated: on a socket nothing gets lost but with its connection, and then the service attaches first.

    Args:
        attempt: how it is reached; takes our structures as they are.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    async def attach(self, service: str, profiles: list[ModelProfile]) -> Attached:
        """See `ModelGateway.attach`."""
        return await self._sent(ModelGateway.attach, service, profiles)  # type: ignore[no-any-return]

    async def register(self, number: str, profile: ModelProfile) -> None:
        """See `ModelGateway.register`."""
        await self._call(ModelGateway.register, number, profile)

    async def call(self, number: str, origin: CallOrigin, request: ModelRequest | None) -> ModelAnswer | None:
        """See `ModelGateway.call`."""
        return await self._call(ModelGateway.call, number, origin, request)  # type: ignore[no-any-return]

    async def growth(self, number: str, key: str, restarts: int, lengths: list[int]) -> Growth:
        """See `ModelGateway.growth`."""
        return await self._call(ModelGateway.growth, number, key, restarts, lengths)  # type: ignore[no-any-return]

    async def response(self, number: str, key: str, known: KeptResponse | None) -> KeptResponse | None:
        """See `ModelGateway.response`."""
        return await self._call(ModelGateway.response, number, key, known)  # type: ignore[no-any-return]

    async def cancel(self, number: str, response: KeptResponse) -> None:
        """See `ModelGateway.cancel`."""
        await self._call(ModelGateway.cancel, number, response)

    async def abort(self, number: str, key: str) -> None:
        """See `ModelGateway.abort`."""
        await self._call(ModelGateway.abort, number, key)

    async def release(self, number: str, keys: list[str]) -> None:
        """See `ModelGateway.release`."""
        await self._call(ModelGateway.release, number, keys)

    async def rates(self, number: str, seen: int) -> RateReport:
        """See `ModelGateway.rates`."""
        return await self._call(ModelGateway.rates, number, seen)  # type: ignore[no-any-return]

    async def share(self, number: str, shares: RateShares) -> RateReport:
        """See `ModelGateway.share`."""
        return await self._call(ModelGateway.share, number, shares)  # type: ignore[no-any-return]

    async def heard(self, number: str) -> None:
        """See `ModelGateway.heard`."""
        await self._call(ModelGateway.heard, number)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self._sent(method, *arguments)
        except TimeoutError:  # of a new connection, which only `attach` has a use for
            raise ServiceGone("the gateway can't be connected to") from None

    async def _sent(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return signature_of(method).result(await self._attempt("", method.__name__, *arguments))
