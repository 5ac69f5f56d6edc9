"""The tool host as its node service reaches it, from another process. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ServiceGone
from ..ports import ToolHost
from ..tool_hosting import HostAttached, ServerAnswer, ServerCall, ServerConfiguration, ServerTools
from .remote_node import Attempt
from .signatures import signature_of


class RemoteToolHost:
    """A `understudy.ports.ToolHost` in another process. Nothing is repeated (`RemoteGateway`).

    Args:
        attempt: how it is reached; takes our structures as they are.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    async def attach(self, service: str) -> HostAttached:
        """See `ToolHost.attach`."""
        return await self._sent(ToolHost.attach, service)  # type: ignore[no-any-return]

    async def tools(self, number: str, server: ServerConfiguration) -> ServerTools:
        """See `ToolHost.tools`."""
        return await self._call(ToolHost.tools, number, server)  # type: ignore[no-any-return]

    async def call(self, number: str, key: str, server: ServerConfiguration, call: ServerCall) -> ServerAnswer:
        """See `ToolHost.call`."""
        return await self._call(ToolHost.call, number, key, server, call)  # type: ignore[no-any-return]

    async def cancel(self, number: str, key: str) -> None:
        """See `ToolHost.cancel`."""
        await self._call(ToolHost.cancel, number, key)

    async def release(self, number: str, keys: list[str]) -> None:
        """See `ToolHost.release`."""
        await self._call(ToolHost.release, number, keys)

    async def heard(self, number: str) -> None:
        """See `ToolHost.heard`."""
        await self._call(ToolHost.heard, number)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self._sent(method, *arguments)
        except TimeoutError:  # of a new connection, which only `attach` has a use for
            raise ServiceGone("the tool host can't be connected to") from None

    async def _sent(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return signature_of(method).result(await self._attempt("", method.__name__, *arguments))
