"""An autoscaler, as Ray's is: it brings machines that are asked for, and takes those away that rest."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from understudy.scaling import Scaling

from .cluster import Machine

if TYPE_CHECKING:
    from .world import World

MORE = 2
"""So many machines there may be beside those that the plan begins with."""

LOOK_SECONDS = 1.0
START_SECONDS = (1.0, 12.0)
REST_SECONDS = (2.0, 15.0)


def limits(machines: int, quiet: float) -> Scaling:
    """What the supervisor may ask for."""
    return Scaling(1, machines + MORE, up_after=1.0, down_after=quiet)


class Autoscaler:
    """Looks once a second at what was asked for, and at machines on which nothing lives that did before.

    Attributes:
        wanted: so many machines are asked for; 0 for none.
    """

    def __init__(self, world: World, chosen: random.Random) -> None:
        self._world = world
        self._chosen = chosen
        self.wanted = 0
        self._starting = 0
        self._numbers = 0
        self._resting: dict[str, float] = {}

    def start(self) -> None:
        """Begin to look."""
        self._world.cluster.after(LOOK_SECONDS, self._look)

    def request(self, machines: int) -> None:
        """So many machines shall there be, in place of what was asked for before."""
        self.wanted = machines

    def _look(self) -> None:
        world = self._world
        machines = [machine for machine in world.cluster.machines.values() if machine.alive]
        most = world.plan.machines + MORE
        for _ in range(min(self.wanted, most) - len(machines) - self._starting):
            self._starting += 1
            world.cluster.after(self._chosen.uniform(*START_SECONDS), self._join)
        for machine in machines[1:]:
            self._take_away(machine)
        world.cluster.after(LOOK_SECONDS, self._look)

    def _join(self) -> None:
        self._starting -= 1
        self._numbers += 1
        machine = self._world.cluster.add_machine(f"m{self._numbers}")
        self._world.note(f"machine {machine.node_id} joins")
        self._world.counts["machines that joined"] += 1

    def _take_away(self, machine: Machine) -> None:
        """Take a machine away on which nothing lives, nor will again, for long enough."""
        now = self._world.scheduler.time()
        if not machine.actors or any(actor.alive or (actor.restarts and not actor.removed) for actor in machine.actors):
            self._resting.pop(machine.node_id, None)
        elif now >= self._resting.setdefault(machine.node_id, now + self._chosen.uniform(*REST_SECONDS)):
            self._world.counts["machines that were given back"] += 1
            self._world.cluster.lose(machine)
            machine.noticed = True
