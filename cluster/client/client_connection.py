"""What the public client needs of a connection to the services, whatever these are. No Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from understudy.config import Settings
from understudy.event_wire import EventWire
from understudy.identifiers import new_identifier
from understudy.protocol import NewSession, Spawned, unpacked
from understudy.reads import DrainInfo, NodeLoad

from .follower import Follower, Homes, asked
from .results import ServiceInfo

Result = TypeVar("Result")


class ClientConnection(ABC):
    """Lives on the client's loop.

    Attributes:
        settings: of the services.
        follower: tells what is committed and streamed.
        identity: who uses it, for the events of what is asked for; empty: nobody says.
    """

    def __init__(self, settings: Settings, homes: Homes) -> None:
        self.settings = settings
        self.follower = Follower(homes)
        self._homes = homes
        self.identity = ""

    async def events(self, session_id: str, after: int) -> list[EventWire]:
        """Events of a session after a `seq`, in wire form."""
        return await asked(self._homes, list[EventWire], session_id, "events", session_id, after)

    async def change(self, kind: type[Result], method: str, session_id: str, *arguments: Any, by: str = "") -> Result:
        """A request of a session's node service that could do more when it is repeated: its id is made here, once for
        all its attempts.

        Args:
            kind: of its result.
            by: who asks for it, if not the connection's `identity`.
        """
        request = new_identifier(), by or self.identity
        return await asked(self._homes, kind, session_id, method, session_id, *arguments, *request)

    async def ask_once(self, kind: type[Result], method: str, *arguments: Any) -> Result:
        """A request that concerns no session, of any node service; its id is made here, as by `change`."""
        return await asked(self._homes, kind, None, method, *arguments, new_identifier(), self.identity)

    async def keeping(
        self, runtime_env: dict[str, Any] | None, put: Callable[[dict[str, bytes]], Awaitable[Result]]
    ) -> Result:
        """What `put` does, given the packages of a job's runtime environment that the store may lack."""
        return await put({})

    async def read(self, kind: type[Result], what: str, *arguments: Any, **options: Any) -> Result:
        """One of `READS`, at the node service of the session that the first argument names, if there is one.

        Args:
            kind: of what is read.
        """
        session_id = arguments[0] if arguments and isinstance(arguments[0], str) else None
        return await asked(self._homes, kind, session_id, "read", what, list(arguments), options)

    async def load(self, node_id: str) -> NodeLoad:
        """What a node service has to do. Raises `ServiceGone`, `TimeoutError`: it does not say."""
        found: NodeLoad = unpacked(await self._homes.call(node_id, "request", "load"), NodeLoad, "the node's load")
        return found

    @abstractmethod
    async def spawn(
        self,
        session: NewSession,
        blobs: dict[str, bytes],
        placements: Iterable[str] = (),
        runtime_env: dict[str, Any] | None = None,
    ) -> Spawned:
        """Get or create a session.

        Args:
            placements: those of its tree, which get standbys.
            runtime_env: of the driver's job, if its code is needed.
        """

    @abstractmethod
    def code_placement(self) -> dict[str, Any]:
        """What a process must have that runs this driver's own code (`compiling.driver_placement`)."""

    @abstractmethod
    async def services(self) -> list[ServiceInfo]:
        """The processes of the cluster."""

    @abstractmethod
    async def drain(
        self, node_id: str | None, timeout: float, *, wait: bool, stop: bool, by: str = ""
    ) -> list[DrainInfo]:
        """See `Cluster.drain`."""

    @abstractmethod
    async def undrain(self, node_id: str) -> bool:
        """See `Cluster.undrain`."""

    @abstractmethod
    async def different_settings(self) -> list[str]:
        """Settings in which the running services differ from this client's."""

    @abstractmethod
    async def renew(self, timeout: float) -> bool:
        """Give this client's credentials to the services again, whatever became of them, and say that it keeps them;
        False if they were ended."""

    @abstractmethod
    async def let_go(self) -> None:
        """Say that this client does not keep the services any more (`renew`), if they can be reached."""

    @abstractmethod
    async def find_again(self) -> None:
        """Forget the services that are known: they were ended, and started again."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything here."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the services."""
