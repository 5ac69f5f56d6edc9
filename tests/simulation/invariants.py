"""What must hold in every simulation, checked at each effect, now and then on what is committed, and at the end."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING

from sqlalchemy import select

from understudy.events import (
    CancelRequested,
    ChildRestarted,
    ChildSpawned,
    Event,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    ModelCallStarted,
    RunAccepted,
    RunAdmitted,
    RunFinished,
    SessionActivated,
    SessionCrashed,
    SessionMoved,
    SessionQuarantined,
    ShutdownForced,
    ToolFinished,
    ToolInDoubt,
    ToolStarted,
)
from understudy.records import LEASE_SECONDS, ModelRequest
from understudy.scaling import SCALED_DOWN
from understudy.store.check.check import check
from understudy.store.db.session_row import SessionRow
from understudy.store.db.statements import EVENT, QUESTION, SESSION, TOOL_CALL
from understudy.store.entries import event_from_row
from understudy.store.journal import Committed

from . import approvals, deaths, delegating, queues, schedules
from .executed import Executed
from .files import Files
from .guards import Guarded
from .hooks import refused
from .loops import Outcomes
from .operator import RIVAL
from .recalling import Recalled
from .responses import Counted
from .sent import Sent
from .servers import Served
from .stepped import Stepped
from .streams import Reported
from .tools import POLICY_OF

if TYPE_CHECKING:
    from understudy.actors.hooks import HookContext
    from understudy.actors.window import Window

    from .cluster import Actor, Machine
    from .scheduler import Process
    from .world import Effect, World

CHECKED_SHARE = 0.02
"""Share of the commits after which the whole store is checked."""

ABANDON_SECONDS = 30.0
"""So long after something had happened to a machine it may be given up for it."""

QUIET_SECONDS, QUIET_COMMITS = 10.0, 150
"""So many commits, within so many seconds without a single event, are done for nothing."""


class Invariants:
    """Judges a world.

    Attributes:
        violations: what was wrong.
        upgraded: sessions that were given another specification.
        hooked: which hooks were called, and for what.
        left_behind: calls that had begun in a process that died.
        complete: model calls whose answer is not in the log yet, with the process that has it.
        with_hooks: sessions whose agents have hooks.
        reported: what tools report.
        sent: what models are sent.
        recalled: what memory providers are asked, and say.
        guarded: what guards have made of model calls.
        served: which calls of MCP servers were made.
        executed: which calls are executed in processes of their own.
        files: where sessions have left files.
        outcomes: how the runs of schedules were begun and ended.
        stepped: which signals workflows were sent, and what became of their steps.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[str] = []
        self._random = random.Random(f"{world.plan.seed}/checks")
        self._quiet: dict[str, list[float]] = {}
        self._generation = 0
        self._generation_since = 0.0
        self._rivals_until = 0
        self._stepped = any(fault.kind == "clock_step" for fault in world.plan.faults)
        self._started: dict[tuple[str, str], float] = {}
        self._activated_in: dict[str, SessionActivated] = {}
        self._asked: dict[str, Process] = {}
        self._made: Counter[str] = Counter()
        self._abandoned: set[int] = set()
        self._moved: set[tuple[str, str | None]] = set()
        self._sent_off: set[tuple[str, str | None]] = set()
        self._ended_by_force: set[str] = set()
        self._begun: set[tuple[str, str]] = set()
        self.left_behind: set[str] = set()
        self.upgraded: set[str] = set()
        self._answered: set[str] = set()
        self._cancelled: set[tuple[str, str | None]] = set()
        self.complete: dict[str, Process] = {}
        self._crashed: set[tuple[str, int]] = set()
        self._forced: set[tuple[str, str | None]] = set()
        self.hooked: set[tuple[str, str]] = set()
        self._hooked_in_time: set[tuple[str, str]] = set()
        self.with_hooks = {
            work.session_id
            for work in world.plan.work
            if any(not hook.get("parallel") for hook in work.spec.get("hooks", ()))
        }
        self.guarded = Guarded(world)
        self._for_folds: set[str] = set()
        self._counted = Counted(self.violated)
        self.reported = Reported(self.violated)
        self.sent = Sent(world, self.violated)
        self.recalled = Recalled(world, self)
        self.served = Served(world)
        self.executed = Executed(world)
        self.files = Files(world)
        self.stepped = Stepped(world)
        self.outcomes = Outcomes()
        world.cluster.violated = self.violated

    def violated(self, text: str) -> None:
        """Something is wrong; not what is only said while the simulation is taken apart."""
        if self._world.scheduler.over:
            return
        self.violations.append(f"{self._world.scheduler.time():.4f} s: {text}")
        self._world.note(f"VIOLATION {text}")

    # While it runs.

    def forget(self, session_ids: list[str]) -> None:
        """Sessions were removed: others may have their ids."""
        gone = set(session_ids)
        judges = (self.reported, self.sent, self.recalled, self.guarded, self.served, self.executed, self.files)
        for one in (*judges, self.stepped):
            one.forget(gone)
        self._for_folds = {key for key in self._for_folds if key.partition("/")[0] not in gone}
        for session_id in gone:
            self._activated_in.pop(session_id, None)
        self._begun = {known for known in self._begun if known[0] not in gone}
        self.left_behind = {key for key in self.left_behind if key.partition("/")[0] not in gone}
        self._asked = {key: process for key, process in self._asked.items() if key.partition("/")[0] not in gone}
        self._made = Counter({key: made for key, made in self._made.items() if key.partition("/")[0] not in gone})
        self._answered = {key for key in self._answered if key.partition("/")[0] not in gone}
        self.complete = {key: at for key, at in self.complete.items() if key.partition("/")[0] not in gone}
        self._crashed = {known for known in self._crashed if known[0] not in gone}
        self._moved = {known for known in self._moved if known[0] not in gone}
        self._sent_off = {known for known in self._sent_off if known[0] not in gone}
        self._forced = {known for known in self._forced if known[0] not in gone}
        self._ended_by_force -= gone
        self._cancelled = {known for known in self._cancelled if known[0] not in gone}
        self._started = {known: at for known, at in self._started.items() if known[0] not in gone}
        for hooked in (self.hooked, self._hooked_in_time):
            hooked -= {known for known in hooked if known[1].partition("/")[0] in gone}

    def committed(self, process: str, generation: int, began: float, committed: Committed, events: list[Event]) -> None:
        """A journal has committed: nobody works for nothing, and the books balance.

        Args:
            generation: for which it acts.
            began: when its transaction began.
            events: what is new in the log, of this commit or of one whose journal does not know that it counts.
        """
        counts = self._world.counts
        counts["commits"] += 1
        counts["events"] += len(events)
        now = self._world.scheduler.time()
        for event in events:
            self._event(event, now)
            self._world.requested.named(event)
            for text in delegating.spawned(self._world, event):
                self.violated(text)
        for _, row in committed.written.values():
            self._held(row)
            for text in self.stepped.written(row):
                self.violated(text)
        for event in committed.events:
            if isinstance(event, SessionActivated) and generation < self._generation and began > self._generation_since:
                self.violated(f"{process} activated {event.session_id} for generation {generation}, which is over")
        quiet = self._quiet.setdefault(process, [])
        if events:
            quiet.clear()
        quiet.append(now)
        while quiet[0] < now - QUIET_SECONDS:
            quiet.pop(0)
        if len(quiet) == QUIET_COMMITS:
            self.violated(f"{QUIET_COMMITS} commits of {process} within {now - quiet[0]:.1f} s and not one event")
        for owner, holder, lease_until in self._world.committed("SELECT generation, holder, lease_until FROM owner"):
            if owner < self._generation:
                self.violated(f"the ownership goes back from generation {self._generation} to {owner}")
            if owner != self._generation:
                self._generation, self._generation_since = owner, now
                if not holder.startswith(RIVAL) and self._rivals_until > time.time_ns() / 1e3 and not self._stepped:
                    self.violated(f"{holder} takes the store from another cluster, whose lease is not over")
            self._rivals_until = lease_until if holder.startswith(RIVAL) else 0
        self._queues(events)
        if self._random.random() < CHECKED_SHARE:
            self.check_store()

    def _queues(self, events: list[Event]) -> None:
        """Where a run was accepted, got a slot or ended: the queues are as they must be."""
        if any(isinstance(event, RunAccepted | RunAdmitted | RunFinished) for event in events):
            with self._world.store.committed() as connection:
                for text in queues.overtaken(connection):
                    self.violated(text)

    def _event(self, event: Event, now: float) -> None:
        self.reported.event(event)
        self.outcomes.event(event)
        run = (event.session_id, event.run_id)
        if isinstance(event, ToolStarted):
            self._started[event.session_id, event.call_id] = now
            self._begun.add((event.session_id, event.call_id))
            self.left_behind.discard(f"{event.session_id}/{event.call_id}")
        elif isinstance(event, ModelCallStarted | ModelCallFailed | ModelCallReissued | ModelCallCompleted):
            self._model_call(event, run)
        elif isinstance(event, CancelRequested):
            self._cancelled.add(run)
        elif isinstance(event, ChildSpawned | ChildRestarted) and run in self._cancelled:
            self.violated(f"{event.session_id} has a new sub-agent in run {event.run_id}, which was cancelled before")
        elif isinstance(event, SessionActivated):
            self._activation(event, now)
            self.files.activated(event)
            self.left_behind |= {f"{session}/{call}" for session, call in self._begun if session == event.session_id}
        elif isinstance(event, SessionMoved):
            self._moved.add(run)
        elif isinstance(event, ToolInDoubt):
            self.executed.in_doubt(event, run in self._moved | self._sent_off)
        elif isinstance(event, RunAccepted):
            self._world.requested.accepted(event)
            if (text := schedules.too_early(self._world, event)) is not None:
                self.violated(text)
        elif isinstance(event, ToolFinished):
            self._begun.discard((event.session_id, event.call_id))
        elif isinstance(event, SessionCrashed):
            self._death(event)
        elif isinstance(event, ShutdownForced | SessionQuarantined):
            self._forced.add(run)
            self._ended_by_force.add(event.session_id)
        elif isinstance(event, RunFinished) and run not in self._forced:
            at_work = (
                f"SELECT session_id FROM session WHERE parent_id = '{run[0]}' AND parent_run_id = '{run[1]}'"
                " AND task_open = 1 AND abandoned = 0 AND background = 0 AND active = 1"
            )
            for (child,) in self._world.committed(at_work):
                self.violated(f"run {run[1]} of {run[0]} ended ({event.status}) before its sub-agent {child}")

    def _model_call(
        self,
        event: ModelCallStarted | ModelCallFailed | ModelCallReissued | ModelCallCompleted,
        run: tuple[str, str | None],
    ) -> None:
        """What a model answered is in the log, once; what is said to be lost is."""
        if isinstance(event, ModelCallStarted):
            self._for_folds |= {event.request_key.rpartition("/")[0]} if event.purpose else set()
        elif isinstance(event, ModelCallReissued):
            asked = self._asked.get(event.lost_key.rpartition("/")[0])
            if asked is not None and not (asked.dead or self.gave_up(asked) or run in self._moved | self._sent_off):
                self.violated(f"{event.lost_key} is said to be lost, and the gateway that makes it lives")
        elif isinstance(event, ModelCallFailed):
            if event.error_code.startswith("store"):
                self.violated(f"the answer to {event.request_key} was lost: {event.error_code}")
            if self.guarded.names(event.session_id):  # what its answer took is in the log
                self.complete.pop(event.request_key.rpartition("/")[0], None)
            if event.error_code == "refused":
                self._answered.add(event.request_key.rpartition("/")[0])
        else:
            wait_key = event.request_key.rpartition("/")[0]
            if self._world.plan.responses:
                self._counted.completed(event.response_id, event.request_key)
            self.complete.pop(wait_key, None)
            if not event.late:
                self._answered.add(wait_key)
                problem = self.guarded.problem(wait_key) if wait_key not in self._for_folds else None
                if problem is not None:
                    self.violated(f"the answer to {wait_key} counts, and {problem}")

    def _held(self, row: SessionRow) -> None:
        """A session stays in its process while its tools are at work there, unless that was ended or is not reached."""
        last = self._activated_in.get(row.session_id)
        if row.frame_id is not None or last is None or last.epoch != row.epoch:
            return
        actor = self._at_work(last)
        if actor is None:
            return
        runs = {_run_of(call_id) for session_id, call_id in self._begun if session_id == last.session_id}
        begun = any((last.session_id, run) not in self._moved for run in runs)
        if begun and not self._unreached(actor):
            self.violated(f"{last.session_id} left frame {last.frame_id}, where a tool of it is at work")

    def _activation(self, event: SessionActivated, now: float) -> None:
        """A session is given to another process only if the one that has it was ended, or is not reached; and then only
        when the lease of what that was allowed to begin is over."""
        before, self._activated_in[event.session_id] = self._activated_in.get(event.session_id), event
        crashed = before is not None and (event.session_id, before.epoch) in self._crashed  # judged then (`_death`)
        of_run = f"{event.session_id}/{event.run_id}/"
        if any(self.gave_up(asked) for key, asked in self._asked.items() if key.startswith(of_run)):
            self._moved.add((event.session_id, event.run_id))  # from a machine that may come back
        forced = event.session_id in self._ended_by_force  # since that one: whatever is killed then may live a little
        self._ended_by_force.discard(event.session_id)
        actor = self._at_work(before) if before is not None and before.frame_id != event.frame_id else None
        if before is None or actor is None:
            return
        calls = f"SELECT call_id, tool, state FROM tool_call WHERE session_id = '{event.session_id}'"
        for call_id, tool, state in self._world.committed(calls):
            at = self._started.get((event.session_id, call_id), -LEASE_SECONDS)
            if state == "started" and POLICY_OF.get(tool, "rerun") != "rerun" and now - at < LEASE_SECONDS:
                text = f"{now - at:.2f} s after the start of {call_id}, and frame {before.frame_id} lives"
                self.violated(f"{event.session_id} was activated again ({event.cause}) {text}")
        rightly = crashed or forced or event.session_id in self.upgraded or event.cause == "moved"
        if not (rightly or self._unreached(actor)):
            self.violated(f"{event.session_id} was taken from frame {before.frame_id}, which is at work at it")

    def _death(self, event: SessionCrashed) -> None:
        """A process is said to have died once, and only if it has, or is not reached."""
        if (event.session_id, event.epoch) in self._crashed:
            self.violated(f"the death of activation {event.epoch} of {event.session_id} was counted twice")
        self._crashed.add((event.session_id, event.epoch))
        for text in deaths.judge(self._world, event):
            self.violated(f"the death of activation {event.epoch} of {event.session_id}: {text}; {event.body()}")
        last = self._activated_in.get(event.session_id)
        actor = self._at_work(last) if last is not None and last.epoch == event.epoch else None
        if actor is None or actor.process is None or self._unreached(actor) or self.gave_up(actor.process):
            return
        self.violated(f"{event.session_id} is said to have died in {actor.name}, which is at work at it")

    def _at_work(self, activated: SessionActivated) -> Actor | None:
        """The frame that was given a session, if its process lives, is not being killed, and is at that activation."""
        actor = self._world.cluster.frames.get(activated.frame_id)
        if actor is None or not actor.alive or actor.target is None or actor.pid in self._world.killed:
            return None
        window = self.window_of(actor.process)
        if window is None or (window.session_id, window.epoch) != (activated.session_id, activated.epoch):
            return None
        return actor

    def check_process(self, call_key: str, session_id: str, epoch: int, process: Process) -> None:
        """Code of the user's goes on: its process is at no other activation."""
        window = self.window_of(process)
        if window is not None and (window.session_id, window.epoch) != (session_id, epoch):
            other = f"{window.session_id}, epoch {window.epoch}"
            self.violated(f"{call_key}, epoch {epoch}, goes on in a process that serves {other}")

    def window_of(self, process: Process | None) -> Window | None:
        """What the activation that a frame's process is at knows; None if it is at none."""
        for actor in self._world.cluster.frames.values():
            if actor.process is process and actor.target is not None:
                acting = actor.target.frame.activation
                return acting.window if acting is not None else None
        return None

    def gave_up(self, process: Process) -> bool:
        """Whether the process's machine was taken for lost, is cut off, or is not part of the cluster any more for the
        service that acts now: when its supervisor began, that machine was not reached."""
        machine = self._world.machine_of(process)
        if machine is None or any(self._unreached(actor) for actor in machine.actors if actor.process is process):
            return True
        acting = (
            actor for actor in self._world.cluster.actors.values() if actor.process is self._world.scheduler.current
        )
        services = [actor.target.service for actor in acting if hasattr(actor.target, "service")]
        return any(service.homes.nodes and machine.node_id not in service.homes.nodes for service in services)

    def _unreached(self, actor: Actor) -> bool:
        """Whether a process was given up with its machine, or may be: the machine is cut off, or its node service does
        not answer. A machine that is given up may come back; what had been on it then does not."""
        service = self._world.cluster.actors.get(f"node/{actor.machine.node_id}")
        silent = service is not None and service.process is not None and service.process.paused
        return self._cut(actor.machine) or bool(silent) or actor.pid in self._abandoned or self._is_left_over(actor)

    def _is_left_over(self, actor: Actor) -> bool:
        """Whether it is a gateway of a node service that was given up with its machine, and started it afterwards: that
        makes the calls which the service knows of, until both are killed."""
        if not actor.name.startswith("gateway/"):
            return False
        services = [one.pid for one in actor.machine.actors if one.name.startswith("node/") and one.pid < actor.pid]
        return max(services, default=-1) in self._abandoned

    def _cut(self, machine: Machine) -> bool:
        """Whether somebody can't reach the machine, or it somebody."""
        return machine.cut_off or any(machine.node_id in link for link in self._world.cluster.cut)

    def check_model_call(self, request: ModelRequest) -> None:
        """A model is asked: nobody has its answer yet."""
        self.sent.check(request)
        wait_key = request.wait_key
        session_id, run_id = wait_key.rpartition("/")[0].split("/", 1)
        self._hooked_in_time.discard(("run_end", f"{session_id}/{run_id}"))  # one that was steered goes on
        self.recalled.goes_on(session_id, run_id)
        process, before = self._world.scheduler.current, self._asked.get(wait_key)
        self._asked[wait_key] = process
        # A gateway whose machine was given up does what it was asked before that, as soon as it goes on.
        lost = process is not None and self.gave_up(process)
        if wait_key in self._answered and not lost:
            self.violated(f"the model call {wait_key} is made again, and its answer was committed")
        cut = lost or (session_id, run_id) in self._moved | self._sent_off
        if before is not None and not (before.dead or self.gave_up(before) or cut):
            self.violated(f"the model call {wait_key} is made again, and the gateway that made it lives")
        self._made[wait_key] += 1
        mine = f"session_id = '{session_id}' AND '{wait_key}' = session_id || '/' || run_id || '/' || round"
        attempts = self._world.committed(f"SELECT wait_attempt FROM session WHERE wait = 'model' AND {mine}")
        if attempts and self._made[wait_key] > attempts[0][0]:
            self.violated(
                f"the model call {wait_key} is made {self._made[wait_key]} times, in {attempts[0][0]} attempts"
            )

    def sent_off(self, session_id: str, run_id: str | None) -> None:
        """A drain's deadline is over: what a session waits for here is ended, also if it has nowhere else to go."""
        self._sent_off.add((session_id, run_id))

    def is_cut_short(self, wait_key: str) -> bool:
        """Whether a drain's deadline ended what a session waits for."""
        session_id, run_id = wait_key.rpartition("/")[0].split("/", 1)
        return (session_id, run_id) in self._sent_off

    def answered(self, request: ModelRequest, incarnation: int) -> None:
        """A model has answered, and what it said is to be paid: it must be in the log, unless that was removed since
        the call was made."""
        process = self._world.scheduler.current
        if process is not None and self._world.incarnation(request.wait_key.partition("/")[0]) == incarnation:
            self.complete[request.wait_key] = process

    def check_hook(self, context: HookContext) -> None:
        """A hook learns whether it may have been called before, unless by a process that was replaced by then."""
        known = (context.point, context.call_key)
        self.hooked.add(known)
        if self.is_current(context.session_id):
            if known in self._hooked_in_time and not context.redone:
                self.violated(f"the hook {context.point} was called again for {context.call_key}, without `redone`")
            self._hooked_in_time.add(known)

    def _of_removed(self, session_id: str) -> bool:
        """Whether the process that calls is at a session of this id that was removed."""
        window = self.window_of(self._world.scheduler.current)
        return window is not None and self._world.incarnation(session_id) != window.incarnation

    def is_current(self, session_id: str) -> bool:
        """Whether the process that calls is at the session's last activation, as far as the store knows."""
        window = self.window_of(self._world.scheduler.current)
        rows = self._world.committed(f"SELECT epoch FROM session WHERE session_id = '{session_id}'")
        return window is not None and rows == [(window.epoch,)]

    def check_abandoned(self, machine: Machine) -> None:
        """A machine on which nothing went wrong is not given up, unless it was drained to be given back."""
        now = self._world.scheduler.time()
        self._abandoned.update(actor.pid for actor in machine.actors)
        self.files.given_up(machine.node_id)
        where = f"node_id = '{machine.node_id}' AND reason = '{SCALED_DOWN}' AND finished_at > 0"
        given_back = self._world.committed(f"SELECT 1 FROM drain WHERE {where}")
        well = machine.alive and not self._cut(machine) and now > machine.disturbed_until + ABANDON_SECONDS
        if well and not given_back:
            self.violated(f"machine {machine.node_id} was given up, and nothing had happened to it")

    def check_store(self) -> None:
        with self._world.store.committed() as connection:
            for violation in check(connection, self._world.namespace):
                self.violated(f"check: {violation}")

    def check_effect(self, effect: Effect) -> None:
        """No effect after its fence, and none that its policy does not allow."""
        session_id, _, call_id = effect.call_key.partition("/")
        with self._world.store.committed() as connection:
            where = (SESSION.c.session_id == session_id, TOOL_CALL.c.session_id == SESSION.c.session_id)
            row = connection.execute(
                select(SESSION.c.epoch, TOOL_CALL.c.state, TOOL_CALL.c.tool, TOOL_CALL.c.updated_at, SESSION.c.spec)
                .where(*where, TOOL_CALL.c.call_id == call_id)
            ).first()  # fmt: skip
            if row is not None and approvals.is_held(row.spec, row.tool):
                self._world.counts["effects of approved calls"] += 1
                problem = approvals.problem(connection, session_id, call_id, row.tool)
                if problem is not None:
                    self.violated(f"effect of {effect.call_key}, {problem}")
        if row is None and self._of_removed(session_id):
            return None  # its run was ended by force, while its process was about to begin (guarantees.md)
        if row is None:
            return self.violated(f"effect of {effect.call_key}, which no model asked for")
        if session_id in self.with_hooks:
            if ("before_tool", effect.call_key) not in self.hooked:
                self.violated(f"effect of {effect.call_key}, and no hook was asked")
            if refused(effect.call_key):
                self.violated(f"effect of {effect.call_key}, which a hook refused")
        if not any(tool["name"] == row.tool for tool in row.spec["tools"]):
            self.violated(f"effect of {effect.call_key}, and its agent has no tool {row.tool}")
        problem = self.guarded.problem(f"{session_id}/{call_id.rpartition('/')[0]}")
        if problem is not None:
            self.violated(f"effect of {effect.call_key}, and {problem}")
        policy = POLICY_OF[row.tool]
        if policy == "rerun":
            return None
        # What a run's process was about to begin when the run was ended by force may have its effect (guarantees.md).
        forced = (session_id, _run_of(call_id)) in self._forced
        if row.epoch != effect.epoch and self._activated(session_id) > effect.epoch and not forced:
            self.violated(f"effect of {effect.call_key} under epoch {effect.epoch}, which epoch {row.epoch} had fenced")
        started = self._started.get((session_id, call_id), effect.at)
        # Where a commit's reply was lost nobody reported it here; the row's time has its machine's clock.
        age = time.time_ns() / 1e9 - row.updated_at / 1e6
        if effect.at > started + LEASE_SECONDS and age > LEASE_SECONDS:
            self.violated(f"effect of {effect.call_key} {effect.at - started:.1f} s after its start was committed")
        if row.state != "started" and row.epoch == effect.epoch:
            self.violated(f"effect of {effect.call_key}, which is {row.state}")
        allowed = 1 + self._permitted(session_id, call_id)
        if self._world.effects_of(effect.call_key) > allowed:
            self.violated(f"{effect.call_key} acted {self._world.effects_of(effect.call_key)} times, {allowed} allowed")
        return None

    def _permitted(self, session_id: str, call_id: str) -> int:
        """How often a person has let a call run again, as far as that is committed."""
        mine = (QUESTION.c.session_id == session_id, QUESTION.c.call_id == call_id)
        with self._world.store.committed() as connection:
            answers = connection.execute(select(QUESTION.c.answer).where(*mine)).scalars()
            return sum((answer or {}).get("decision") == "rerun" for answer in answers)

    def _activated(self, session_id: str) -> int:
        """The epoch of a session's last activation. A run that is ended by force raises the epoch, and its process is
        killed only then: what that process begins meanwhile, under its lease, nobody else does as well."""
        statement = select(EVENT).where(EVENT.c.session_id == session_id, EVENT.c.type == "session_activated")
        with self._world.store.committed() as connection:
            rows = connection.execute(statement.order_by(EVENT.c.seq)).mappings()
            return max((event_from_row(row).epoch for row in rows), default=0)


def _run_of(call_id: str) -> str:
    """The run that a call is of."""
    return call_id.rsplit("/", 2)[0]
