"""The console's process: a plain actor on the node where it was asked for, since loopback means that machine."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from typing import Any

import ray
import uvicorn
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from understudy.config import Settings
from understudy.errors import ClusterError, Conflict, InvalidConfiguration, ServiceGone
from understudy.secrets import part

from ..client.cluster_source import ClusterSource
from ..console.access import Binding
from ..console.application import application
from .connection import Connection
from .ray_edge import RAY_NAMESPACE, find_actor, result_of, submitted
from .versions import Versioned

OPEN_SECONDS = 30.0
START_SECONDS = 60.0
STOP_SECONDS = 5.0


def console_name(settings: Settings, port: int) -> str:
    """Name of the actor, by which `understudy down` finds it too."""
    return f"console/{settings.instance}/{port}"


def url_of(binding: Binding) -> str:
    """What to open in a browser."""
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(binding.host, binding.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{binding.port}{binding.prefix}/"


# No CPUs: a pod's head offers none, and is where people run commands.
@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=100)
class ConsoleActor(Versioned):
    """The console as an actor. It writes nothing, so that its death costs nothing."""

    def __init__(self, settings: Settings, binding: Binding) -> None:
        self._settings = settings
        self._binding = binding
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._connection: Connection | None = None

    async def serve(self) -> dict[str, Any]:
        """Connect and listen: `{"url", "pid"}`."""
        listening = listen(self._binding)
        binding = replace(self._binding, port=listening.getsockname()[1])
        address = str(ray.get_runtime_context().gcs_address)
        self._connection = Connection(self._settings, address)
        await self._connection.open([], OPEN_SECONDS, start=False)
        app = application(ClusterSource(self._connection), binding, namespace=self._settings.namespace)
        # Neither requests nor their addresses are logged: nothing that could hold a token is ever written.
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=1,
            server_header=False,
            proxy_headers=False,  # they count with the proxy's secret only
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))
        return {"url": url_of(binding), "pid": os.getpid()}

    async def watch(self) -> None:
        """Pending for as long as it serves."""
        assert self._serving is not None
        await asyncio.shield(self._serving)

    async def stop(self) -> None:
        """End all connections."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=STOP_SECONDS)
        if self._connection is not None:
            await self._connection.close()


def listen(binding: Binding) -> socket.socket:
    """A socket that listens there. Raises `InvalidConfiguration`."""
    try:
        found = socket.getaddrinfo(binding.host.strip("[]"), binding.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        reason = f"the console can't listen on {binding.host}, port {binding.port}: {error.strerror or error}"
        raise InvalidConfiguration(f"{reason}. Choose another with --port; --port 0 takes any.") from None
    return listening


async def start(settings: Settings, binding: Binding, *, detached: bool) -> tuple[Any, dict[str, Any]]:
    """Start a console here: its handle, and what `serve` says.

    Raises:
        InvalidConfiguration: nobody can listen there.
        Conflict: a console of this store does already.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = console_name(settings, binding.port)
    if binding.port and await asyncio.to_thread(find_actor, name) is not None:
        raise Conflict(f"a console serves port {binding.port} already: `understudy console --stop` ends it")
    options: dict[str, Any] = {"lifetime": "detached"} if detached else {}
    if binding.port:
        options["name"] = name
    elif detached:
        raise InvalidConfiguration("a console that stays behind needs a --port by which it is found again")

    def create() -> Any:
        return ConsoleActor.options(  # type: ignore[attr-defined]
            namespace=RAY_NAMESPACE, scheduling_strategy=here, **options
        ).remote(part(settings)[0], binding)

    handle = submitted(create)
    try:
        return handle, await asyncio.wait_for(result_of(handle.serve.remote()), START_SECONDS)
    except TimeoutError:
        ray.kill(handle)
        raise ClusterError(f"the console did not start within {START_SECONDS:.0f} s: has Ray room for it?") from None
    except BaseException:
        ray.kill(handle)
        raise


async def end(handle: Any) -> None:
    """End a console."""
    try:
        await asyncio.wait_for(result_of(handle.stop.remote()), STOP_SECONDS + 2)
    except (TimeoutError, ServiceGone):
        pass
    ray.kill(handle)


async def end_at(settings: Settings, port: int) -> bool:
    """End the console at this port; True if there was one."""
    handle = await asyncio.to_thread(find_actor, console_name(settings, port))
    if handle is None:
        return False
    await end(handle)
    return True
