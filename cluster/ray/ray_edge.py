"""Ray's peculiarities in one place: its calls, its errors, its noise."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import ray
from ray.exceptions import (
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from understudy.errors import (
    ClusterError,
    ServiceGone,
    UnderstudyError,
)  # fmt: skip
from understudy.redaction import redacted
from understudy.transport.channel import Ticket
from understudy.transport.ends import has_ended, process_identity
from understudy.transport.remote_node import Attempt

log = logging.getLogger(__name__)

RAY_VERSION: str = ray.__version__
RAY_NAMESPACE = "understudy"


async def result_of(reference: Awaitable[Any]) -> Any:
    """Await an actor call and map Ray's errors to ours.

    Raises:
        UnderstudyError: what the actor raised.
        ServiceGone: the actor is dead, restarting or out of reach.
    """
    try:
        return await reference
    except RayTaskError as error:
        raise _cause(error) from None
    except RayActorError as error:
        raise ServiceGone(str(error).splitlines()[0][:300], details=_death(error)) from None
    except RayError as error:
        raise ServiceGone(
            f"{type(error).__name__}: {str(error).splitlines()[0][:300]}", details=_death(error)
        ) from None


def _death(error: RayError) -> dict[str, str]:
    """What Ray knows of the cause. Its text for any other death names the kernel's killer as one that is common."""
    named = any(text in str(error) for text in ("running low on memory", "OOM kill reason"))
    return {"cause": "out_of_memory"} if named or isinstance(error, OutOfMemoryError) else {}


def own_node() -> str:
    """The id of the node that this process is on; empty for a client that reaches Ray from elsewhere (`ray://`)."""
    return "" if ray.util.client.ray.is_connected() else str(ray.get_runtime_context().get_node_id())


def submitted(call: Callable[[], Any]) -> Any:
    """Submit an actor call. Ray refuses some at once: those to an actor that its head no longer knows.

    Raises:
        ServiceGone: it was refused, or this process is no longer connected.
    """
    if not ray.is_initialized():  # a call now would start a Ray of its own
        raise ServiceGone("this process is no longer connected to Ray")
    try:
        return call()
    except (RayError, ValueError, RuntimeError) as error:
        raise ServiceGone(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}") from None


def through_ray(service: Any) -> Attempt:
    """How a node service is called through Ray. Raises what `result_of` and `submitted` raise."""

    async def attempt(call_id: str, method: str, *arguments: Any) -> Any:
        return await result_of(submitted(lambda: service.repeated.remote(call_id, method, *arguments)))

    return attempt


def pid_of(actor: Any) -> int:
    """The process that an actor has now, as Ray knows it, whether it answers or not; 0 for none, or while it starts."""
    found = _table(actor)
    return int(found.get("Pid", 0)) if found.get("State") == "ALIVE" else 0


def where(actor: Any) -> tuple[int, str]:
    """An actor's pid and node, as Ray knows them; 0 and empty where it does not."""
    found = _table(actor)
    return int(found.get("Pid", 0)), str(found.get("Address", {}).get("NodeID") or "")


def _table(actor: Any) -> dict[str, Any]:
    state = ray._private.state.state  # as for `notices`; the public API has no pid, or needs the dashboard
    found: dict[str, Any] = state.actor_table(actor._actor_id.hex())
    return found


def nodes_here() -> set[str]:
    """Ids of Ray's nodes on this machine."""
    own = ray.get_runtime_context().get_node_id()
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return {node_id for node_id, host in address.items() if host == address.get(own)}


def actor_names() -> list[str]:
    """The names of all our actors in this Ray cluster, of whichever store.

    Raises:
        ServiceGone: this process is no longer connected.
    """
    if not ray.is_initialized():  # this would start a Ray of its own
        raise ServiceGone("this process is no longer connected to Ray")
    found = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in found if actor["namespace"] == RAY_NAMESPACE]


async def ticket(service: Any, role: str, name: str) -> Ticket:
    """A ticket for a node service's socket (`NodeSocket.admit`)."""
    return Ticket(*await result_of(submitted(lambda: service.admit.remote(role, name))))


def _cause(error: RayTaskError) -> Exception:
    cause = error.cause
    if isinstance(cause, UnderstudyError):
        return cause
    if isinstance(cause, (RayActorError, GetTimeoutError)):
        return ServiceGone(f"{type(cause).__name__}: {str(cause).splitlines()[0][:300]}")
    if isinstance(cause, asyncio.CancelledError):
        return ServiceGone("the call was cut off")
    return ClusterError(f"{type(cause).__name__}: {cause}")


def quiet() -> None:
    """Keep Ray's messages about dead workers off stdout: they would break `--json`.

    `log_to_driver=False` does not silence them; replacing the function that prints them does.
    """
    worker = ray._private.worker
    worker.print_to_stdstream = lambda *_args, **_kwargs: None
    logging.getLogger("ray").setLevel(logging.ERROR)


def hide_secrets() -> None:
    """Keep passwords out of what Ray stores of a driver: its command line, where a DSN may be."""
    utils = ray._private.utils
    original = utils.get_entrypoint_name
    if original.__module__ == utils.__name__:
        utils.get_entrypoint_name = lambda: redacted(str(original()))


def on_sigterm(handler: Callable[[], None]) -> None:
    """In an actor's process: have SIGTERM call `handler` on the main thread, instead of ending the process.

    An actor can't set a handler: Ray runs its code on another thread. Ray's own handler ends the process by raising
    through this function, which is looked up when the signal comes.
    """
    worker = ray._private.worker
    original = worker.raise_sys_exit_with_custom_error_message

    def end(message: str, *arguments: Any, **options: Any) -> None:
        if "SIGTERM" in message:
            handler()
        else:
            original(message, *arguments, **options)

    worker.raise_sys_exit_with_custom_error_message = end


def ask_head(timeout: float) -> None:
    """Have Ray's head (its GCS) answer something small, as `ray health-check` does. Lets other threads run.

    Raises:
        RayError: it has not answered within so many seconds.
    """
    ray._private.worker.global_worker.gcs_client.check_alive([], timeout=timeout)  # the public API has no timeout


def find_actor(name: str) -> Any | None:
    """A named actor of ours, or None."""
    try:
        return ray.get_actor(name, namespace=RAY_NAMESPACE)
    except ValueError:
        return None


def is_same(one: Any, other: Any) -> bool:
    """Whether two handles are of one actor: a later one of the same name is another one."""
    return bool(one._actor_id == other._actor_id)


def cluster_identity() -> str:
    """The Ray cluster, as `address/id`: two can have heads of one address, on hosts whose containers share nothing.

    Ray makes the id when it makes a cluster, and keeps it for as long as it keeps that one's actors. All processes
    have it; its public API, no word of it in all releases that we work with.
    """
    cluster_id, _ = ray._private.worker.global_worker.current_cluster_and_job
    return f"{ray.get_runtime_context().gcs_address}/{cluster_id.hex()}"


def supervisor_here(holder: str, instance: str) -> int:
    """The pid of a supervisor of this cluster, by its name as the store's owner, if it is on this Ray node; else 0.

    On this machine is not enough: of two Ray nodes on one, either may be cut off from Ray, and hear nothing. Workers of
    one node are children of its raylet.
    """
    if holder.split("/")[-3:-1] != [cluster_identity().split("/")[-1], instance]:
        return 0
    process = holder.split("/")[-1]
    pid = int(process.split(":")[1])
    try:
        ours = psutil.Process(pid).ppid() == os.getppid()
    except psutil.NoSuchProcess:
        return 0
    return pid if ours and process_identity(pid) == process else 0


async def kill_process(pid: int, timeout: float = 5.0) -> bool:
    """SIGKILL a Ray worker of this machine and wait until it is gone; True if it is. For processes that are workers
    themselves.

    A pid that belongs to something else by now is left alone: the worker is gone. One that outlives its signal (a
    process can, inside the kernel) takes no thread from others.
    """
    try:
        process = psutil.Process(pid)
        # A tool may have given it another title: workers are children of one raylet as well.
        if not process.cmdline()[:1][0].startswith("ray::") and process.ppid() != os.getppid():
            return True
    except (psutil.NoSuchProcess, psutil.AccessDenied, IndexError):
        return True
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has gone, or it is another user's
        return True
    return await has_ended(pid, timeout)
