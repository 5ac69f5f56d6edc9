"""A node service's way to its tool host, which is started once somebody needs it."""

from __future__ import annotations

from typing import Any, NoReturn

from understudy.errors import ServiceGone
from understudy.ports import ToolHost
from understudy.tool_hosting import HostAttached
from understudy.waiting import answered_within

from . import service_link
from .service_link import Kill, ServiceLink, never_killed


class ToolHostLink(ServiceLink[HostAttached]):
    """Attaches to the tool host when it is needed.

    Args:
        service: what this node service is called, and no other.
    """

    def __init__(self, host: ToolHost, service: str, kill: Kill = never_killed) -> None:
        super().__init__("the tool host", kill, always=False)
        self.host = host
        self._service = service

    async def _attached_to(self) -> HostAttached:
        return await answered_within(self.host.attach(self._service), service_link.SILENCE)

    async def _hear(self, attached: HostAttached) -> None:
        await self.host.heard(attached.number)


class _NoToolHost:
    """A `ToolHost` that never comes."""

    async def attach(self, service: str) -> HostAttached:
        return self._gone()

    async def _other(self, *_arguments: Any) -> NoReturn:
        self._gone()

    tools = call = cancel = release = heard = _other

    def _gone(self) -> NoReturn:
        raise ServiceGone("this process has no tool host")


NO_TOOL_HOST: ToolHost = _NoToolHost()
"""Of a node service for sessions without MCP servers."""
