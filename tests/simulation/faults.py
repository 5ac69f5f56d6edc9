"""What goes wrong in a simulation, as its plan says."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from understudy.errors import UnderstudyError

from . import operator
from .cluster import Actor, Machine
from .moments import Moments
from .plan import Fault
from .scheduler import Process

if TYPE_CHECKING:
    from understudy.events import Event

    from .world import World

SLOW_SECONDS = 6.0


class Faults:
    """Lets a plan's faults happen, each as a method of its name, and heals everything at the end.

    Attributes:
        furthest: seconds between the machines' clocks where they were furthest apart.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._paused: list[Process] = []
        self.over = False
        self.furthest = 0.0
        self._moments = Moments(world.plan.faults)
        self._hit = ""
        self._drained: tuple[Any, ...] = ()

    def start(self) -> None:
        """Each at its time."""
        for fault in self._world.plan.faults:
            if fault.on is None:
                self._world.cluster.after(fault.at, self._happen, fault)

    def committed(self, event: Event) -> None:
        """An event was committed: what shall happen then does."""
        for fault in self._moments.come(event):
            self._world.cluster.after(fault.at, self._happen, fault, event.session_id)

    def _happen(self, fault: Fault, session_id: str = "") -> None:
        if not self.over:
            self._hit = session_id
            self._world.note(f"fault: {fault}")
            if not fault.kind.endswith(
                ("_frame", "slow_kill", "endpoint", "clock_step", "exporter", "clients", "rival")
            ):
                until = self._world.scheduler.time() + fault.seconds
                for machine in self._world.cluster.machines.values():
                    machine.disturbed_until = max(machine.disturbed_until, until)
            self._world.counts[f"fault {fault.kind}"] += 1
            getattr(self, f"_{fault.kind}")(fault)

    def heal(self) -> None:
        """From now on nothing goes wrong any more."""
        world, self.over = self._world, True
        for process in self._paused:
            process.resume()
        self._paused.clear()
        for machine in world.cluster.machines.values():
            machine.frozen = False
            if machine.alive:
                world.cluster.heal(machine)
        world.cluster.heal(world.outside)
        world.cluster.trouble = (0.0, 0.0, 0.0)
        world.cluster.slow.clear()
        world.scheduler.hear_in_time()
        world.endpoint.trouble = 0.0
        world.spans.failing = False
        world.notices.clear()
        if hasattr(world.store, "heal"):
            world.store.heal()
        world.note("everything is healed")

    # Choosing.

    def _actors(self, prefix: str) -> list[Actor]:
        return [actor for name, actor in self._world.cluster.actors.items() if name.startswith(prefix) and actor.alive]

    def _pick(self, prefix: str, fault: Fault) -> Actor | None:
        found = self._actors(prefix)
        if self._hit:  # the session's own process, if there is one
            rows = self._world.committed(f"SELECT node_id, frame_id FROM session WHERE session_id = '{self._hit}'")
            for node_id, frame_id in rows:
                of_machine = {kind: f"{kind}{node_id}" for kind in ("node/", "gateway/", "tools/")}
                name = {"frame/": f"frame/{node_id}/{frame_id}/", **of_machine}.get(prefix, "none")
                found = [actor for actor in found if actor.name.startswith(name)] or found
        return found[min(int(fault.pick * len(found)), len(found) - 1)] if found else None

    def _machine(self, fault: Fault, *, spare_head: bool) -> Machine | None:
        machines = [machine for machine in self._world.cluster.machines.values() if machine.alive]
        machines = machines[1:] if spare_head else machines
        if self._hit:  # the session's own, if that may be hit
            rows = self._world.committed(f"SELECT node_id FROM session WHERE session_id = '{self._hit}'")
            machines = [machine for machine in machines if (machine.node_id,) in map(tuple, rows)] or machines
        return machines[min(int(fault.pick * len(machines)), len(machines) - 1)] if machines else None

    # The faults.

    def _kill(self, prefix: str, fault: Fault) -> None:
        actor = self._pick(prefix, fault)
        if actor is not None:
            actor.kill()

    def _kill_frame(self, fault: Fault) -> None:
        self._kill("frame/", fault)

    def _kill_node(self, fault: Fault) -> None:
        self._kill("node/", fault)

    def _kill_supervisor(self, fault: Fault) -> None:
        self._kill("supervisor", fault)

    def _pause(self, prefix: str, fault: Fault) -> None:
        actor = self._pick(prefix, fault)
        if actor is None or actor.process is None:
            return
        process = actor.process
        process.pause()
        self._paused.append(process)
        self._world.cluster.after(fault.seconds, self._resume, process)

    def _resume(self, process: Process) -> None:
        if process in self._paused:
            self._paused.remove(process)
            process.resume()
            self._world.note(f"{process.name} goes on")

    def _pause_frame(self, fault: Fault) -> None:
        self._pause("frame/", fault)

    def _pause_node(self, fault: Fault) -> None:
        self._pause("node/", fault)

    def _kill_gateway(self, fault: Fault) -> None:
        self._kill("gateway/", fault)

    def _pause_gateway(self, fault: Fault) -> None:
        self._pause("gateway/", fault)

    def _kill_tool_host(self, fault: Fault) -> None:
        self._kill("tools/", fault)

    def _pause_tool_host(self, fault: Fault) -> None:
        self._pause("tools/", fault)

    def _pause_supervisor(self, fault: Fault) -> None:
        self._pause("supervisor", fault)

    def _freeze(self, fault: Fault) -> None:
        """A machine stands still with all its processes, as one that is moved to another host, and goes on."""
        machine = self._machine(fault, spare_head=False)
        if machine is None or machine.frozen:
            return
        machine.frozen = True
        processes = [actor.process for actor in machine.actors if actor.alive and actor.process is not None]
        for process in processes:
            process.pause()
        self._paused.extend(processes)
        self._world.cluster.after(fault.seconds, self._thaw, machine, processes)

    def _thaw(self, machine: Machine, processes: list[Process]) -> None:
        machine.frozen = False
        for process in processes:
            self._resume(process)

    def _slow_kill(self, fault: Fault) -> None:
        """A frame hangs, and outlives SIGKILL for a while, as one that waits for a disk of the network."""
        on_head = f"frame/{next(iter(self._world.cluster.machines))}/"
        actor = self._pick(on_head if fault.pick * 3 % 1 < 0.5 else "frame/", fault)
        if actor is not None and actor.process is not None:
            self._world.slow_kills[actor.pid] = min(fault.seconds, 25.0)
            actor.process.pause()

    def _trouble(self, fault: Fault) -> None:
        """For a while answers and calls get lost, and some come twice."""
        self._world.cluster.trouble = (0.05, 0.03, 0.05)

        def end() -> None:
            self._world.cluster.trouble = (0.0, 0.0, 0.0)

        self._world.cluster.after(fault.seconds, end)

    def _slow_calls(self, fault: Fault) -> None:
        """For a while calls of one method are late, or its answers."""
        slow, method = self._world.cluster.slow, fault.method
        slow[method] = min(fault.seconds, 20.0) * (1 if fault.pick * 97 % 1 < 0.5 else -1)
        self._world.note(f"calls of {method} are late by {slow[method]:.3f} s")
        self._world.cluster.after(SLOW_SECONDS + fault.seconds, lambda: slow.pop(method, None))

    def _late_threads(self, fault: Fault) -> None:
        """For a while what threads have done is heard late, now and then."""
        scheduler, chosen = self._world.scheduler, random.Random(f"{self._world.plan.seed}/late {fault.at}")
        scheduler.lateness = lambda: chosen.uniform(0.0, fault.seconds) if chosen.random() < 0.3 else 0.0
        self._world.cluster.after(SLOW_SECONDS + fault.seconds, scheduler.hear_in_time)

    def _exporter(self, fault: Fault) -> None:
        """For a while nobody takes spans."""
        self._world.spans.failing = True
        self._world.cluster.after(fault.seconds, self._world.spans.recover)

    def _endpoint(self, fault: Fault) -> None:
        endpoint = self._world.endpoint
        before, endpoint.trouble = endpoint.trouble, 0.4

        def end() -> None:
            endpoint.trouble = 0.0 if self.over else before

        self._world.cluster.after(fault.seconds, end)

    def _clock_step(self, fault: Fault) -> None:
        """A machine's clock is set, forward, or back by minutes: what was set to a time waits for it."""
        machine = self._machine(fault, spare_head=False)
        if machine is None:
            return
        forward = fault.pick * 7 % 1 < 0.5
        seconds = fault.seconds * (300 if forward and fault.pick * 13 % 1 < 0.25 else 1)  # up to some hours
        machine.clock_offset += round(seconds * 1e9) * (1 if forward else -1)
        offsets = [other.clock_offset / 1e9 for other in self._world.cluster.machines.values()]
        self.furthest = max(self.furthest, max(offsets) - min(0.0, *offsets))
        for actor in machine.actors:
            if actor.process is not None:
                actor.process.clock_offset = machine.clock_offset

    def _cut_off(self, fault: Fault) -> None:
        machine = self._machine(fault, spare_head=True)
        if machine is not None:
            machine.cut_off, machine.store_cut_off = True, fault.pick * 5 % 1 < 0.5
            self._world.cluster.after(fault.seconds, self._world.cluster.heal, machine)

    def _cut_clients(self, fault: Fault) -> None:
        """No client reaches anybody: what it sends, and what is sent to it, arrives later."""
        self._world.outside.cut_off = True
        self._world.cluster.after(fault.seconds, self._world.cluster.heal, self._world.outside)

    def _cut_link(self, fault: Fault) -> None:
        """The supervisor's machine and another one don't reach each other, or one the other; all else works."""
        head, machine = next(iter(self._world.cluster.machines)), self._machine(fault, spare_head=True)
        if machine is not None:
            links = [(head, machine.node_id), (machine.node_id, head)]
            kept = int(fault.pick * 3 % 1 * 3)
            self._world.cluster.cut.update(links if kept == 2 else links[kept : kept + 1])
            self._world.cluster.after(fault.seconds, self._world.cluster.heal, machine)

    def _notice(self, fault: Fault) -> None:
        """The cluster says that a machine will end, and perhaps it does."""
        machine = self._machine(fault, spare_head=True)
        if machine is not None:
            self._world.notices[machine.node_id] = fault.seconds
            self._world.cluster.after(fault.seconds, self._end_notice, machine, fault)

    def _end_notice(self, machine: Machine, fault: Fault) -> None:
        self._world.notices.pop(machine.node_id, None)
        if machine.alive and not self.over and fault.pick * 11 % 1 < 0.5:
            self._world.counts["fault lose_machine"] += 1
            self._world.cluster.lose(machine)

    def _lose_machine(self, fault: Fault) -> None:
        machine = self._machine(fault, spare_head=True)
        if machine is not None:
            self._world.cluster.lose(machine)

    def _second_supervisor(self, fault: Fault) -> None:
        """The supervisor is only cut off, and Ray starts another one."""
        old = self._world.cluster.actors.pop("supervisor", None)
        if old is not None:
            old.removed = True
            self._world.start_supervisor()
            self._world.cluster.after(fault.seconds, old.kill)

    def _drain(self, fault: Fault) -> None:
        """A node is drained for a while."""
        machine = self._machine(fault, spare_head=False)
        if machine is not None:
            self._drained = ([machine.node_id], fault.seconds, "the plan says so", False, f"drain {fault.at}")
            self._ask_for_drain(fault)

    def _drain_again(self, fault: Fault) -> None:
        """The last drain is asked for once more, by who was not answered: perhaps when it is over."""
        if self._drained:
            self._ask_for_drain(fault)

    def _ask_for_drain(self, fault: Fault) -> None:
        supervisor = self._world.cluster.actors.get("supervisor")
        if supervisor is None:
            return
        wanted, world = self._drained, self._world
        [node_id] = wanted[0]

        async def drain() -> None:
            try:
                await world.call(supervisor, "drain", *wanted, here=None)
            except UnderstudyError as error:
                world.note(f"no drain: {error}")
            await asyncio.sleep(fault.seconds + 5.0)
            for _ in range(20):
                actor = world.cluster.actors.get("supervisor")
                try:
                    if actor is not None:
                        await world.call(actor, "undrain", node_id, f"undrain {fault.at}", here=None)
                        return
                except UnderstudyError as error:
                    world.note(f"no end of the drain: {error}")
                await asyncio.sleep(1.0)

        world.scheduler.world.spawn(drain())

    # The store's.

    def _rival(self, fault: Fault) -> None:
        """Another cluster, which believes that the store's owner is dead, takes the store and gives it up again."""
        number = self._world.counts["fault rival"]
        self._world.scheduler.process(f"rival.{number}").spawn(operator.own(self._world, number, fault.seconds))

    def _store_down(self, fault: Fault) -> None:
        self._world.store.crash(min(fault.seconds, 20.0))

    def _lose_connection(self, fault: Fault) -> None:
        self._world.store.trouble("lost_before", fault)

    def _lose_commit(self, fault: Fault) -> None:
        self._world.store.trouble("lost_after", fault)

    def _hang_commit(self, fault: Fault) -> None:
        self._world.store.trouble("hang", fault)

    def _slow_store(self, fault: Fault) -> None:
        self._world.store.slow(fault)
