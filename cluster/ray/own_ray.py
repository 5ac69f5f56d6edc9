"""The Ray that this process is connected to: found, or started on this machine, and ended."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayError

from understudy.config import state_home
from understudy.environment import for_services
from understudy.errors import ClusterUnreachable, InvalidConfiguration

from .authentication import check_token, present_token
from .ray_edge import RAY_NAMESPACE, hide_secrets, quiet

NOT_RUNNING = "`understudy up` starts the services. `understudy store export SESSION -o -` reads a session without any."
"""What to do where somebody only wants to look."""

CONTROL_SERVICE = "gcs_server"
START_SECONDS = 120.0
GRPC_SECONDS = 10.0
HTTP2_BEGINNING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC says first: HTTP/2's preface, and a frame with no settings. A server answers with its own."""


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
    # It reads the logs of all processes ten times a second, for drivers that show them; ours do not (`connect_ray`).
    command += ["--include-log-monitor=false"]
    # Ray gives its workers 15: on a busy machine sessions would wait for whatever else there is, also for their driver.
    environment = {"RAY_worker_niceness": "0", **for_services()}
    try:
        # A session of its own: with the terminal's, the end of `ssh -t HOST understudy up` would be Ray's end, too.
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False,
            start_new_session=True,
        )  # fmt: skip
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
    hide_secrets()
    try:
        ray.init(address=target, namespace=RAY_NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        text = str(error).strip().splitlines()
        raise ClusterUnreachable(f"Ray at {target}: {text[0] if text else error!r}") from None
    # Before Ray's own end, which first waits half a second for messages of workers to arrive: they are not shown.
    atexit.register(ray.shutdown)
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
        wait_for(some, seconds)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for(found, 5.0)
    marker.unlink(missing_ok=True)
    return len(found)


def wait_for(processes: Collection[psutil.Process], seconds: float) -> None:
    """Wait until they have ended, for so many seconds at most. One that nobody reaps has, too: in a container there is
    often nobody who would."""
    deadline = time.monotonic() + seconds
    while any(map(lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    return False


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
