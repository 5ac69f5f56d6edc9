"""Ray's peculiarities in one place: starting it, finding it, its errors, its noise."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
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

from understudy.config import state_home
from understudy.environment import for_services
from understudy.errors import (
    ClusterError,
    ClusterUnreachable,
    InvalidConfiguration,
    ServiceGone,
    UnderstudyError,
)  # fmt: skip
from understudy.transport.channel import Ticket
from understudy.transport.ends import has_ended, process_identity
from understudy.transport.remote_node import Attempt

from .authentication import check_token, present_token

log = logging.getLogger(__name__)

RAY_VERSION: str = ray.__version__
RAY_NAMESPACE = "understudy"
NOT_RUNNING = "`understudy up` starts the services. `understudy store export SESSION -o -` reads a session without any."
"""What to do where somebody only wants to look."""

CONTROL_SERVICE = "gcs_server"
START_SECONDS = 120.0
GRPC_SECONDS = 10.0
HTTP2_BEGINNING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC says first: HTTP/2's preface, and a frame with no settings. A server answers with its own."""


async def settle(reference: Awaitable[Any]) -> Any:
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
    told = any(text in str(error) for text in ("running low on memory", "OOM kill reason"))
    return {"cause": "out_of_memory"} if told or isinstance(error, OutOfMemoryError) else {}


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
    """How a node service is called through Ray. Raises what `settle` and `submitted` raise."""

    async def attempt(call_id: str, method: str, *arguments: Any) -> Any:
        return await settle(submitted(lambda: service.repeated.remote(call_id, method, *arguments)))

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
    return Ticket(*await settle(submitted(lambda: service.admit.remote(role, name))))


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


def on_sigterm(told: Callable[[], None]) -> None:
    """In an actor's process: have SIGTERM call this on the main thread, instead of ending the process.

    An actor can't set a handler: Ray runs its code on another thread. Ray's own handler ends the process by raising
    through this function, which is looked up when the signal comes.
    """
    worker = ray._private.worker
    original = worker.raise_sys_exit_with_custom_error_message

    def end(message: str, *arguments: Any, **options: Any) -> None:
        if "SIGTERM" in message:
            told()
        else:
            original(message, *arguments, **options)

    worker.raise_sys_exit_with_custom_error_message = end


def state_directory() -> Path:
    """Where Understudy keeps its own small files: spans, and what it started.

    Raises:
        InvalidConfiguration: there is no place for it, or it can't be made.
    """
    path = state_home() / "understudy"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InvalidConfiguration(
            f"the directory {path} can't be made ({error.strerror}): set HOME or XDG_STATE_HOME"
        ) from None
    return path


def _marker() -> Path:
    return state_directory() / "ray.json"


def start_ray() -> str:
    """Start a Ray head as a daemon, so that it outlives this process; returns its address.

    Ray listens on the machine's own address even where loopback is asked for: keep its ports behind a firewall.

    Raises:
        ClusterUnreachable: it did not come up; the reason is Ray's own.
    """
    port = _free_port()
    # Before the start: whatever interrupts it, `understudy down` knows what to end.
    _marker().write_text(json.dumps({"port": port}))
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head"]
    command += [f"--port={port}", "--include-dashboard=false", "--disable-usage-stats", "--log-color=false"]
    # Ray gives its workers 15: on a busy machine sessions would wait for whatever else there is, also for their driver.
    environment = {"RAY_worker_niceness": "0", **for_services()}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterUnreachable(f"`ray start` did not finish within {START_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise ClusterUnreachable(f"`ray start` failed: {(done.stderr or done.stdout).strip()[-500:]}")
    address = _head_at(port)
    if address is None:
        raise ClusterUnreachable(f"`ray start` succeeded, but no raylet belongs to port {port}")
    return address


def own_address() -> str | None:
    """Address of the daemon that `start_ray` started here; None if none runs."""
    try:
        address = _head_at(json.loads(_marker().read_text())["port"])
    except FileNotFoundError:
        return None
    return address if address is not None and _answers(address) else None


def _start_once() -> str:
    """Start Ray unless another process is just doing so."""
    with (state_directory() / "ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return running_address() or start_ray()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _head_at(port: int) -> str | None:
    """Address of the head that listens on `port`, as its raylet's command line has it."""
    for process in psutil.process_iter(["cmdline"]):
        address = re.search(rf"gcs-address=(\S+:{port})(?:\s|$)", " ".join(process.info["cmdline"] or ()))
        if address:
            return address.group(1)
    return None


def running_address() -> str | None:
    """Address of the cluster that RAY_ADDRESS names; without it, of our own daemon, or of any Ray on this machine.

    Our own comes before others: Ray itself would take the one that was started last, by whomever.
    """
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    own = own_address()
    if own is not None:
        return own
    with contextlib.suppress(Exception):
        found = ray._private.services.canonicalize_bootstrap_address("auto")
        if found and _answers(found):
            return str(found)
    return None


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(_host_and_port(address), timeout=2):
        return True
    return False


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _speaks_grpc(address: str) -> bool:
    """Whether who listens there answers as gRPC servers do, Ray's among them; behind TLS anybody may.

    `ray.init` would try anybody else for 35 s, and then end the process.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True
    with contextlib.suppress(OSError), socket.create_connection(_host_and_port(address), timeout=GRPC_SECONDS) as probe:
        probe.sendall(HTTP2_BEGINNING)
        with probe.makefile("rb") as answer:
            return answer.read(9)[3:4] == b"\x04"  # the type of the first frame: settings
    return False


def connect_ray(address: str | None, *, start: bool = True) -> str:
    """Connect this process to Ray, starting one if none runs (unless `start` is False); returns the address.

    Raises:
        ClusterUnreachable: no cluster answers at the address.
        InvalidAuthToken: it wants another token than this process has.
    """
    if ray.is_initialized():
        quiet()
        return str(ray.get_runtime_context().gcs_address)
    target = address or running_address()
    if target is None:
        if not start:
            raise ClusterUnreachable("no Ray cluster runs on this machine", details={"hint": NOT_RUNNING})
        target = _start_once()
    present_token()
    if re.fullmatch(r"[^/]+:\d+", target):
        if not _answers(target):
            raise ClusterUnreachable(f"nobody listens at {target}")
        if not _speaks_grpc(target):
            raise ClusterUnreachable(f"who listens at {target} is no Ray, or hangs: it does not speak gRPC")
        check_token(target)
    quiet()
    try:
        ray.init(address=target, namespace=RAY_NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        text = str(error).strip().splitlines()
        raise ClusterUnreachable(f"Ray at {target}: {text[0] if text else error!r}") from None
    return target


def stop_ray() -> int:
    """Stop the Ray daemon that `start_ray` started, and only that one; returns how many processes were ended."""
    marker = _marker()
    if not marker.exists():
        return 0
    port = json.loads(marker.read_text())["port"]
    found: set[psutil.Process] = set()
    # The head's processes name its address, or its session; agents rename themselves, but have one of these as parent.
    for pattern in (rf"address=\S+:{port}(?:\s|$)|[-_]port={port}(?:\s|$)", "|".join(_sessions_of(port)) or "$^"):
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if re.search(pattern, line) and ("ray." in line or "/ray/" in line or line.startswith("ray::")):
                found |= {process, *_descendants(process)}
    found = {process for process in found if process.pid not in _own_line()}
    # The control service last: without it Ray's daemon waits for its answers until its patience is over.
    last = {process for process in found if _name(process) == CONTROL_SERVICE}
    for some, seconds in ((found - last, 8.0), (found, 1.0)):
        for process in some:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(some, timeout=seconds)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=5)
    marker.unlink(missing_ok=True)
    return len(found)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _sessions_of(port: int) -> set[str]:
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return {
        name for line in lines if f":{port} " in f"{line} " for name in re.findall(r"session_[0-9]{4}[0-9_-]+", line)
    }


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.children(recursive=True))
    return []


def _own_line() -> set[int]:
    """This process and those it was started by: never to be ended."""
    return {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}


def find_actor(name: str) -> Any | None:
    """A named actor of ours, or None."""
    try:
        return ray.get_actor(name, namespace=RAY_NAMESPACE)
    except ValueError:
        return None


def cluster_identity() -> str:
    """The Ray cluster, as `address/id`: two can have heads of one address, on hosts whose containers share nothing.

    Ray makes the id when it makes a cluster, and keeps it for as long as it keeps that one's actors. All processes
    have it; its public API, no word of it in all releases that we work with.
    """
    cluster_id, _ = ray._private.worker.global_worker.current_cluster_and_job
    return f"{ray.get_runtime_context().gcs_address}/{cluster_id.hex()}"


def supervisor_here(holder: str, instance: str) -> int:
    """The pid of a supervisor of this cluster, by its name as the store's owner, if it is on this machine; else 0."""
    if holder.split("/")[-3:-1] != [cluster_identity().split("/")[-1], instance]:
        return 0
    process = holder.split("/")[-1]
    pid = int(process.split(":")[1])
    return pid if process_identity(pid) == process else 0


async def kill_process(pid: int, timeout: float = 5.0) -> bool:
    """SIGKILL a Ray worker of this machine and wait until it is gone; True if it is.

    A pid that belongs to something else by now is left alone: the worker is gone. One that outlives its signal (a
    process can, inside the kernel) takes no thread from others.
    """
    try:
        if not psutil.Process(pid).cmdline()[:1][0].startswith("ray::"):
            return True
    except (psutil.NoSuchProcess, psutil.AccessDenied, IndexError):
        return True
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has gone, or it is another user's
        return True
    return await has_ended(pid, timeout)
