"""A client's connection: Ray, the services' handles, and calls that survive their restarts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import ray

from understudy.config import ModelProfile, Settings, differences, redact
from understudy.environment import for_services
from understudy.errors import CannotDrain, ClusterUnreachable, ServiceGone, StoreError, UnderstudyError
from understudy.identifiers import new_identifier
from understudy.placement import is_scarce
from understudy.protocol import NewSession, ServiceDirectory, Spawned, unpacked
from understudy.reads import DrainInfo
from understudy.secrets import part
from understudy.transport.repeating import RETRY_SECONDS, Patience, Repeating
from understudy.waiting import answered_within

from ..client.client_connection import ClientConnection
from ..client.compiling import driver_placement
from ..client.packages import addresses, package_key
from ..client.results import ServiceInfo
from .bootstrap import request as bootstrap_request
from .directory import NodeDirectory
from .names import gateway_name, node_name, of_instance, tool_host_name
from .own_ray import NOT_RUNNING, state_directory
from .package_store import fetch
from .ray_edge import actor_names, find_actor, is_same, pid_of, result_of, submitted
from .services import supervisor_handle
from .versions import OLDER, VERSION, mismatch, other_versions

log = logging.getLogger(__name__)

Result = TypeVar("Result")

STOP_SECONDS = 30.0
DRAIN_LOOK_SECONDS = 0.3
GONE_LOOK_SECONDS = 0.05
GONE_LOOKS = 600
DRAIN_SPARE_SECONDS = 30.0
"""A node that has said nothing for so long after its deadline is gone."""

KEPT_SECONDS = 3600.0
"""A package that the store had so long ago is there still: retention leaves alone what was needed within a day."""

DRAIN_REASON = "asked for"

KEEPER = f"{socket.gethostname()}, pid {os.getpid()}"
"""Who keeps the services, if this process does."""

LET_GO_SECONDS = 2.0

ENDED_LOOK_SECONDS = 2.0
"""A call that was pending when its actor ended is now and then not answered for minutes: the list of actors says it."""


class Connection(ClientConnection):
    """The supervisor's handle, the node services, and what is followed there."""

    def __init__(self, settings: Settings, address: str) -> None:
        self.nodes = NodeDirectory(settings, lambda: self._directory(RETRY_SECONDS))
        super().__init__(settings, self.nodes)
        self._address = address
        self._supervisor: Any = None
        self._only_found = False  # no other supervisor is asked that has taken the place of the one that was found
        self._profiles: list[ModelProfile] = []
        self._placements: dict[str, asyncio.Future[None]] = {}
        self._kept: dict[str, float] = {}

    async def open(self, profiles: list[ModelProfile], timeout: float, *, start: bool = True) -> None:
        """Connect to the services; unless `start` is False, start what does not run."""
        self._profiles = profiles
        self._supervisor = supervisor_handle(self.settings)
        started = self._supervisor is None
        if started and not start:
            raise ClusterUnreachable(
                f"no services of {redact(self.settings.store)} run in the Ray cluster at {self._address}",
                details={"hint": NOT_RUNNING},
            )
        if started:
            left = of_instance(await asyncio.to_thread(actor_names), self.settings.instance)
            for version in await other_versions(left):  # they would be taken for this version's
                raise mismatch(version)
            await asyncio.to_thread(self._bootstrap, timeout)
            self._supervisor = supervisor_handle(self.settings)
        if self._supervisor is None:
            raise ClusterUnreachable("the supervisor was started but can't be found")
        try:
            await self._attach(timeout)
        except StoreError:
            if started:  # a mistyped store must not leave services behind that try it for ever
                await self._discard()
            raise

    async def _discard(self) -> None:
        handles = [find_actor(node_name(self.settings.instance, node["NodeID"])) for node in ray.nodes()]
        for handle in [self._supervisor, *handles]:
            if handle is not None:
                ray.kill(handle)

    async def open_existing(self) -> None:
        """Find the running supervisor, whatever state it is in; nothing is started."""
        if not await self.find_supervisor():
            raise ClusterUnreachable("no services of this store run")

    async def find_supervisor(self) -> bool:
        """Find the supervisor, whatever state it is in; whether there is one."""
        self._supervisor = await asyncio.to_thread(supervisor_handle, self.settings)
        return self._supervisor is not None

    async def find_supervisor_to_end(self) -> bool:
        """Find the supervisor, if there is one, and ask no other from now on, should somebody start one meanwhile."""
        self._only_found = True
        return await self.find_supervisor()

    async def is_ended(self) -> bool:
        """Whether the supervisor that was found has been ended for good; one that Ray restarts has not."""
        named = await asyncio.to_thread(supervisor_handle, self.settings)
        return named is None or not is_same(named, self._supervisor)

    async def supervisor_pid(self) -> int:
        """The process of the supervisor, as Ray knows it; 0 if there is none."""
        return await asyncio.to_thread(pid_of, self._supervisor)

    async def version(self, timeout: float) -> str:
        """The version that the supervisor runs. Raises `ClusterUnreachable` if it gives no answer."""
        if not hasattr(self._supervisor, "version"):
            return OLDER
        try:
            async with asyncio.timeout(timeout):
                return str(await self._supervise("version"))
        except TimeoutError:
            raise ClusterUnreachable(
                f"the supervisor gives no answer within {timeout:.0f} s; has Ray room for it (`ray status`)?"
            ) from None

    async def hand_over(self) -> None:
        """Give the supervisor the secrets of this client's settings, if there are any."""
        _, secrets = part(self.settings)
        if secrets.store or secrets.telemetry:
            await self._supervise("hand_over", secrets)

    async def find_again(self) -> None:
        """See `ClientConnection.find_again`."""
        self._supervisor = await asyncio.to_thread(supervisor_handle, self.settings) or self._supervisor
        await self.nodes.learn()

    async def different_settings(self) -> list[str]:
        """See `ClientConnection.different_settings`."""
        return differences(await self._supervise("settings"), self.settings.of_services())

    async def renew(self, timeout: float) -> bool:
        """Give this client's credentials to the services again, whatever became of them; False if they were ended."""
        if not await self.find_supervisor():
            return False
        renewal = asyncio.ensure_future(self._renew(timeout))
        try:
            while not renewal.done():
                await asyncio.wait({renewal}, timeout=ENDED_LOOK_SECONDS)
                if not renewal.done() and await self.is_ended():
                    return False
            await renewal
        finally:
            renewal.cancel()
        return True

    async def _renew(self, timeout: float) -> None:
        await self._attach(timeout)
        await self._supervise("keep", KEEPER)

    async def let_go(self) -> None:
        """See `ClientConnection.let_go`."""
        with suppress(TimeoutError, AttributeError, UnderstudyError):
            await answered_within(result_of(submitted(lambda: self._supervisor.let_go.remote(KEEPER))), LET_GO_SECONDS)

    async def keepers(self) -> list[str]:
        """Who says that it keeps the services (`renew`)."""
        return list(await self._supervise("kept_by"))

    def _bootstrap(self, timeout: float) -> None:
        spans = str(state_directory() / "spans" / self.settings.instance)
        command = [sys.executable, "-m", "understudy.cluster.ray.bootstrap", "--address", self._address]
        try:
            done = subprocess.run(
                command, input=bootstrap_request(self.settings, spans), capture_output=True, text=True,
                timeout=timeout, env=for_services(), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ClusterUnreachable(f"the services did not start within {timeout:.0f} s") from None
        lines = done.stdout.strip().splitlines()
        try:
            answer = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise ClusterUnreachable(f"the services did not start: {done.stderr.strip()[-500:]}") from None
        if "error" in answer:
            raise UnderstudyError.from_wire(answer["error"])

    async def _attach(self, timeout: float) -> None:
        """Wait until the services work, and give them this client's credentials.

        Raises:
            VersionMismatch: they are of another version.
        """
        version = await self.version(timeout)
        if version != VERSION:
            raise mismatch(version)
        await self.hand_over()
        try:
            directory = await asyncio.wait_for(self._directory(timeout), timeout + 5)
        except TimeoutError:
            raise ClusterUnreachable(
                f"the supervisor gives no answer within {timeout:.0f} s; has Ray room for it (`ray status`)?"
            ) from None
        await self.nodes.update(directory)
        for profile in self._profiles:
            await self._supervise("register", profile)

    async def _directory(self, timeout: float) -> ServiceDirectory:
        """Who runs where, once the supervisor works; it raises what keeps it from that."""
        found: ServiceDirectory = unpacked(
            await self._supervise("ready", timeout), ServiceDirectory, "the directory of the services"
        )
        return found

    async def _supervise(self, method: str, *arguments: Any) -> Any:
        def attempt(_call_id: str) -> Any:
            return result_of(submitted(lambda: getattr(self._supervisor, method).remote(*arguments)))

        try:
            return await Repeating(Patience(attempt=None, gone=RETRY_SECONDS)).call(attempt, choose=self._look_again)
        except ServiceGone as error:
            raise ClusterUnreachable(f"the services don't answer: {error.message}") from None

    async def _look_again(self, number: int) -> None:
        """Before a call is repeated: the supervisor may have been ended for good, and another one started. Raises
        `ServiceGone` where that is not to be asked."""
        if not number:
            return
        if not self._only_found:
            self._supervisor = await asyncio.to_thread(supervisor_handle, self.settings) or self._supervisor
        elif await self.is_ended():
            raise ServiceGone("somebody has ended them")

    async def spawn(
        self,
        session: NewSession,
        blobs: dict[str, bytes],
        placements: Iterable[str] = (),
        runtime_env: dict[str, Any] | None = None,
    ) -> Spawned:
        """See `ClientConnection.spawn`. New ones go to the nodes in turn; for scarce placements nothing stands by: it
        would hold what others need."""
        found = await self.keeping(runtime_env, lambda packages: self.nodes.spawn(session, {**blobs, **packages}))
        for placement in {session.placement, *placements}:
            if placement not in self._placements and not is_scarce(placement):
                # Not awaited: its frames come with its sessions, or a little earlier.
                self._placements[placement] = asyncio.ensure_future(self._want(placement))
        return found

    async def keeping(
        self, runtime_env: dict[str, Any] | None, put: Callable[[dict[str, bytes]], Awaitable[Result]]
    ) -> Result:
        """See `ClientConnection.keeping`."""
        now = time.monotonic()
        names = {package_key(address): address for address in addresses(runtime_env or {})}
        unsure = {key: names[key] for key in names if now - self._kept.get(key, -KEPT_SECONDS) >= KEPT_SECONDS}
        found = await put(await self._lacking(unsure))
        self._kept.update(dict.fromkeys(unsure, now))
        return found

    async def _lacking(self, packages: dict[str, str]) -> dict[str, bytes]:
        """What the store does not have of these packages (addresses by keys)."""
        found: dict[str, bytes] = {}
        for key in await self.nodes.request(None, "lacking", [*packages]) if packages else ():
            data = await asyncio.to_thread(fetch, packages[key])
            if data is not None:
                found[key] = data
        return found

    async def _want(self, placement: str) -> None:
        try:
            await self._supervise("want", placement)
        except UnderstudyError as error:
            log.info("no standbys are kept for placement %s: %s", placement[:12], error)

    def code_placement(self) -> dict[str, Any]:
        """The driver's module paths, and its job's runtime environment."""
        return driver_placement(dict(ray.get_runtime_context().runtime_env or {}))

    async def services(self) -> list[ServiceInfo]:
        """The processes of the cluster."""
        directory = await self._directory(30.0)
        address = self._address
        found = [ServiceInfo("supervisor", directory.pid, directory.node_id, address)]
        for node in directory.nodes:
            found.append(ServiceInfo("node", node.pid, node.node_id, await self._metrics(node.node_id)))
            for role, name in (("gateway", gateway_name), ("tool_host", tool_host_name)):
                pid = await asyncio.to_thread(self._service_pid, name(self.settings.instance, node.node_id))
                if pid:
                    found.append(ServiceInfo(role, pid, node.node_id, address))
        busy = set(await self.read(list[tuple[str, int]], "holders"))
        for frame in directory.frames:
            role = "frame" if (frame.node_id, frame.pid) in busy else "standby"
            found.append(ServiceInfo(role, frame.pid, frame.node_id, address))
        return found

    def _service_pid(self, name: str) -> int:
        """In a thread, since Ray's head is asked; 0 while there is none."""
        service = find_actor(name)
        return pid_of(service) if service is not None else 0

    async def drain(
        self, node_id: str | None, timeout: float, *, wait: bool, stop: bool, by: str = ""
    ) -> list[DrainInfo]:
        """See `Cluster.drain`."""
        nodes = await self._node_ids(None if stop else node_id)
        if node_id is None and not stop:
            raise CannotDrain("which node?", details={"nodes": nodes})
        who = by or self.identity
        reason = f"{DRAIN_REASON} by {who}" if who else DRAIN_REASON
        await self._supervise("drain", nodes, timeout, reason, stop, new_identifier())
        late = time.monotonic() + timeout + DRAIN_SPARE_SECONDS  # the deadline is by another machine's clock
        while True:
            found = [drain for drain in await self.read(list[DrainInfo], "drains") if drain.node_id in nodes]
            open_ = [drain for drain in found if not drain.finished_at]
            if not wait or not open_ or time.monotonic() > late or len(found) < len(nodes):
                break  # all are done; or one was lost, or taken back
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
        if stop and found:
            await self._end_found()
        return found

    async def undrain(self, node_id: str) -> bool:
        """See `Cluster.undrain`."""
        drains = await self.read(list[DrainInfo], "drains")
        known = [drain.node_id for drain in drains if drain.node_id.startswith(node_id)]
        return len(known) == 1 and bool(await self._supervise("undrain", known[0], new_identifier()))

    async def _node_ids(self, beginning: str | None) -> list[str]:
        """The nodes that have a service, or the one whose id begins like this."""
        nodes = [node.node_id for node in (await self._directory(RETRY_SECONDS)).nodes]
        found = [node_id for node_id in nodes if beginning is None or node_id.startswith(beginning)]
        if beginning is not None and len(found) != 1:
            matching = f"{len(found)} node ids begin" if found else "no node id begins"
            raise CannotDrain(f"{matching} with {beginning!r}; there are {', '.join(nodes)}", details={"nodes": nodes})
        return found

    async def _metrics(self, node_id: str) -> str:
        try:
            return str(await self.nodes.call(node_id, "metrics_address"))
        except (TimeoutError, ServiceGone):
            return ""  # it is just being restarted

    async def end(self, timeout: float) -> None:
        """End the services that were found (`find_supervisor`), and none that somebody has started since: in good
        order, if they come to an end within so many seconds, else at once."""
        self._only_found = True
        if timeout and self._supervisor is not None:
            try:
                async with asyncio.timeout(timeout + DRAIN_SPARE_SECONDS):
                    await self.nodes.update(await self._directory(timeout))
                    await self.drain(None, timeout, wait=True, stop=True)
            except (TimeoutError, AttributeError, UnderstudyError) as error:
                log.warning("the services can't be drained: %s", error or type(error).__name__)
        await self._end_found()
        for _ in range(GONE_LOOKS):  # whoever starts services now would find those that are just ending
            if not await asyncio.to_thread(self._left):
                break
            await asyncio.sleep(GONE_LOOK_SECONDS)

    async def close(self) -> None:
        """Let go of everything here."""
        for wanted in self._placements.values():
            wanted.cancel()
        await self.follower.close()
        await self.nodes.close()

    async def shutdown(self) -> None:
        """End the services that there are now, and the console that shows them."""
        await self.find_supervisor()
        await self._end_found()

    async def _end_found(self) -> None:
        await self.close()
        try:
            if self._supervisor is not None:
                await asyncio.wait_for(result_of(submitted(self._supervisor.stop.remote)), STOP_SECONDS)
        except (TimeoutError, UnderstudyError) as error:
            log.info("the services did not stop by themselves: %s", error)
        for handle in await asyncio.to_thread(self._left):
            ray.kill(handle)

    def _left(self) -> list[Any]:
        """The actors of the services that were found. None once somebody has started others, which wait for the end of
        these beforehand. Services are made by a supervisor only: what is looked up before a new one is seen is not its
        own."""
        names = of_instance(actor_names(), self.settings.instance)
        handles = [handle for handle in map(find_actor, names) if handle is not None]
        supervisor = supervisor_handle(self.settings)
        if supervisor is not None and (self._supervisor is None or not is_same(supervisor, self._supervisor)):
            log.info("somebody has started other services meanwhile: they are left alone")
            return []
        return handles
