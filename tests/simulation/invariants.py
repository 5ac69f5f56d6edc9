"""What must hold in every simulation, checked at each effect, now and then on what is committed, and at the end."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.events import (
    CancelRequested,
    ChildRestarted,
    ChildSpawned,
    Event,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    RunFinished,
    SessionActivated,
    SessionCrashed,
    SessionMoved,
    SessionQuarantined,
    ShutdownForced,
    ToolFinished,
    ToolStarted,
)
from understudy.observability.metrics import Metrics
from understudy.observability.spans import spans_of
from understudy.records import LEASE_SECONDS, ModelRequest
from understudy.store import queries
from understudy.store.check import check
from understudy.store.journal import Committed
from understudy.store.statements import EVENT, INBOX, MESSAGE, RUN, SESSION, TIMER, TOOL_CALL
from understudy.store.transaction import Row
from understudy.testing.policies import content_text

from .hooks import refused
from .spans import key_of, text_of
from .tools import POLICY_OF

if TYPE_CHECKING:
    from understudy.actors.hooks import HookContext
    from understudy.actors.tools import ToolContext
    from understudy.actors.window import Window
    from understudy.cluster.node_service import NodeService

    from .cluster import Machine
    from .scheduler import Process
    from .world import Effect, World

CHECKED_SHARE = 0.02
"""Share of the commits after which the whole store is checked."""

ABANDON_SECONDS = 30.0
"""So long after something had happened to a machine it may be given up for it."""

HARMLESS = ("kill_frame", "pause_frame", "endpoint", "exporter")
"""Faults of which node services hear at once, or not at all."""

QUIET_SECONDS, QUIET_COMMITS = 10.0, 150
"""So many commits, within so many seconds without a single event, are done for nothing."""


SHOWN = (
    "status", "wait", "epoch", "frame_id", "node_id", "run_id", "round", "cancel_reason", "inbox_count", "calls_open",
    "children_open", "held",
)  # fmt: skip


class Invariants:
    """Judges a world.

    Attributes:
        violations: what was wrong.
        permitted: how often a person let a call run again.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[str] = []
        self.permitted: Counter[str] = Counter()
        self._random = random.Random(f"{world.plan.seed}/checks")
        self._quiet: dict[str, list[float]] = {}
        self._generation = 0
        self._generation_since = 0.0
        self._started: dict[tuple[str, str], float] = {}
        self._activated_in: dict[str, SessionActivated] = {}
        self._asked: dict[str, Process] = {}
        self._abandoned: set[str] = set()
        self._moved: set[str] = set()
        self._begun: set[tuple[str, str]] = set()
        self._left_behind: set[str] = set()
        self._answered: set[str] = set()
        self._cancelled: set[tuple[str, str | None]] = set()
        self._complete: dict[str, Process] = {}
        self._crashed: set[tuple[str, int]] = set()
        self._forced: set[tuple[str, str | None]] = set()
        self._hooked: set[tuple[str, str]] = set()
        self._hooked_in_time: set[tuple[str, str]] = set()
        self._with_hooks = {work.session_id for work in world.plan.work if work.spec.get("hooks")}
        world.cluster.violated = self.violated

    def violated(self, text: str) -> None:
        """Something is wrong."""
        self.violations.append(f"{self._world.scheduler.time():.4f} s: {text}")
        self._world.note(f"VIOLATION {text}")

    # While it runs.

    def forget(self, session_ids: list[str]) -> None:
        """Sessions were removed: others may have their ids."""
        gone = set(session_ids)
        for session_id in gone:
            self._activated_in.pop(session_id, None)
        self._begun = {known for known in self._begun if known[0] not in gone}
        self._left_behind = {key for key in self._left_behind if key.partition("/")[0] not in gone}
        self._asked = {key: process for key, process in self._asked.items() if key.partition("/")[0] not in gone}
        self._answered = {key for key in self._answered if key.partition("/")[0] not in gone}
        self._complete = {key: at for key, at in self._complete.items() if key.partition("/")[0] not in gone}
        self._crashed = {known for known in self._crashed if known[0] not in gone}
        self._cancelled = {known for known in self._cancelled if known[0] not in gone}
        self._started = {known: at for known, at in self._started.items() if known[0] not in gone}
        for hooked in (self._hooked, self._hooked_in_time):
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
        for _, row in committed.written.values():
            self._held(row)
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
        for (owner,) in self._world.committed("SELECT generation FROM owner"):
            if owner < self._generation:
                self.violated(f"the ownership goes back from generation {self._generation} to {owner}")
            if owner != self._generation:
                self._generation, self._generation_since = owner, now
        if self._random.random() < CHECKED_SHARE:
            self._check_store()

    def _event(self, event: Event, now: float) -> None:
        run = (event.session_id, event.run_id)
        if isinstance(event, ToolStarted):
            self._started[event.session_id, event.call_id] = now
            self._begun.add((event.session_id, event.call_id))
            self._left_behind.discard(f"{event.session_id}/{event.call_id}")
        elif isinstance(event, ModelCallFailed | ModelCallReissued | ModelCallCompleted):
            self._model_call(event)
        elif isinstance(event, CancelRequested):
            self._cancelled.add(run)
        elif isinstance(event, ChildSpawned | ChildRestarted) and run in self._cancelled:
            self.violated(f"{event.session_id} has a new sub-agent in run {event.run_id}, which was cancelled before")
        elif isinstance(event, SessionActivated):
            self._activation(event, now)
            self._left_behind |= {f"{session}/{call}" for session, call in self._begun if session == event.session_id}
        elif isinstance(event, SessionMoved):
            self._moved.add(event.session_id)
        elif isinstance(event, ToolFinished):
            self._begun.discard((event.session_id, event.call_id))
        elif isinstance(event, SessionCrashed):
            if (event.session_id, event.epoch) in self._crashed:
                self.violated(f"the death of activation {event.epoch} of {event.session_id} was counted twice")
            self._crashed.add((event.session_id, event.epoch))
        elif isinstance(event, ShutdownForced | SessionQuarantined):
            self._forced.add(run)
        elif isinstance(event, RunFinished) and run not in self._forced:
            at_work = (
                f"SELECT session_id FROM session WHERE parent_id = '{run[0]}' AND parent_run_id = '{run[1]}'"
                " AND task_open = 1 AND abandoned = 0 AND active = 1"
            )
            for (child,) in self._world.committed(at_work):
                self.violated(f"run {run[1]} of {run[0]} ended ({event.status}) before its sub-agent {child}")

    def _model_call(self, event: ModelCallFailed | ModelCallReissued | ModelCallCompleted) -> None:
        """What a model answered is in the log, once; what is said to be lost is."""
        if isinstance(event, ModelCallReissued):
            asked = self._asked.get(event.lost_key.rpartition("/")[0])
            if asked is not None and not (asked.dead or self._gave_up(asked) or event.session_id in self._moved):
                self.violated(f"{event.lost_key} is said to be lost, and the service that makes it lives")
        elif isinstance(event, ModelCallFailed):
            if event.error_code.startswith("store"):
                self.violated(f"the answer to {event.request_key} was lost: {event.error_code}")
        else:
            wait_key = event.request_key.rpartition("/")[0]
            self._complete.pop(wait_key, None)
            if not event.late:
                self._answered.add(wait_key)

    def _held(self, row: Row) -> None:
        """A session stays in its process while its tools are at work there, unless that was ended or is not reached."""
        last = self._activated_in.get(row["session_id"])
        if row["frame_id"] is not None or last is None or last.epoch != row["epoch"]:
            return
        actor = self._world.cluster.frames.get(last.frame_id)
        if actor is None or not actor.alive or actor.target is None or actor.pid in self._world.killed:
            return
        window = self._window_of(actor.process)
        if window is None or (window.session_id, window.epoch) != (last.session_id, last.epoch):
            return
        begun = any(session_id == last.session_id for session_id, _ in self._begun)
        if begun and last.session_id not in self._moved and not self._unreached(actor.machine):
            self.violated(f"{last.session_id} left frame {last.frame_id}, where a tool of it is at work")

    def _activation(self, event: SessionActivated, now: float) -> None:
        """A session is given to another process only if the one that has it was ended, or is not reached; and then only
        when the lease of what that was allowed to begin is over."""
        before, self._activated_in[event.session_id] = self._activated_in.get(event.session_id), event
        actor = self._world.cluster.frames.get(before.frame_id) if before is not None else None
        if before is None or before.frame_id == event.frame_id or actor is None:
            return
        if not actor.alive or actor.target is None or actor.pid in self._world.killed:
            return
        window = self._window_of(actor.process)
        if window is None or (window.session_id, window.epoch) != (event.session_id, before.epoch):
            return
        calls = f"SELECT call_id, tool, state FROM tool_call WHERE session_id = '{event.session_id}'"
        for call_id, tool, state in self._world.committed(calls):
            at = self._started.get((event.session_id, call_id), -LEASE_SECONDS)
            if state == "started" and POLICY_OF.get(tool, "rerun") != "rerun" and now - at < LEASE_SECONDS:
                text = f"{now - at:.2f} s after the start of {call_id}, and frame {before.frame_id} lives"
                self.violated(f"{event.session_id} was activated again ({event.cause}) {text}")
        forced = any(session_id == event.session_id for session_id, _ in self._forced)
        if not (self._unreached(actor.machine) or forced or self._world.counts["upgraded"] or event.cause == "moved"):
            self.violated(f"{event.session_id} was taken from frame {before.frame_id}, which is at work at it")

    def check_process(self, context: ToolContext, process: Process) -> None:
        """A tool goes on: its process is at no other activation."""
        window = self._window_of(process)
        if window is not None and (window.session_id, window.epoch) != (context.session_id, context.epoch):
            other = f"{window.session_id}, epoch {window.epoch}"
            self.violated(f"{context.call_key}, epoch {context.epoch}, goes on in a process that serves {other}")

    def _window_of(self, process: Process | None) -> Window | None:
        """What the activation that a frame's process is at knows; None if it is at none."""
        for actor in self._world.cluster.frames.values():
            if actor.process is process and actor.target is not None:
                acting = actor.target.frame.activation
                return acting.window if acting is not None else None
        return None

    def _gave_up(self, process: Process) -> bool:
        """Whether the process's machine was taken for lost, or is cut off."""
        machine = self._world.machine_of(process)
        return machine is None or self._unreached(machine)

    def _unreached(self, machine: Machine) -> bool:
        """Whether a machine was taken for lost, or may be: it is cut off, or its node service does not answer."""
        service = self._world.cluster.actors.get(f"node/{machine.node_id}")
        silent = service is not None and service.process is not None and service.process.paused
        return self._cut(machine) or machine.node_id in self._abandoned or bool(silent)

    def _cut(self, machine: Machine) -> bool:
        """Whether somebody can't reach the machine, or it somebody."""
        return machine.cut_off or any(machine.node_id in link for link in self._world.cluster.cut)

    def check_model_call(self, request: ModelRequest) -> None:
        """A model is asked: nobody has its answer yet, and it is sent what was committed."""
        wait_key = request.wait_key
        session_id = wait_key.partition("/")[0]
        if wait_key in self._answered:
            self.violated(f"the model call {wait_key} is made again, and its answer was committed")
        process, before = self._world.scheduler.current, self._asked.get(wait_key)
        self._asked[wait_key] = process
        if before is not None and not (before.dead or self._gave_up(before) or session_id in self._moved):
            self.violated(f"the model call {wait_key} is made again, and the service that made it lives")
        sent = [_said(message) for message in request.messages if message["role"] != "system"]
        with self._world.store.committed() as connection:
            where = MESSAGE.c.session_id == session_id
            rows = connection.execute(select(MESSAGE.c.role, MESSAGE.c.body).where(where).order_by(MESSAGE.c.seq))
            stored = [_said({"role": row.role, **row.body}) for row in rows]
        if sent != stored:
            self.violated(f"the model call {wait_key} was sent {sent}, and the store has {stored}")

    def answered(self, request: ModelRequest) -> None:
        """A model has answered, and what it said is to be paid: it must be in the log."""
        process = self._world.scheduler.current
        if process is not None:
            self._complete[request.wait_key] = process

    def check_hook(self, context: HookContext) -> None:
        """A hook is told whether it may have been called before; not if by a process that was replaced by then."""
        known = (context.point, context.call_key)
        self._hooked.add(known)
        if self._is_current(context.session_id):
            if known in self._hooked_in_time and not context.redone:
                self.violated(f"the hook {context.point} was called again for {context.call_key}, and not told")
            self._hooked_in_time.add(known)

    def _of_removed(self, session_id: str) -> bool:
        """Whether the process that calls is at a session of this id that was removed."""
        window = self._window_of(self._world.scheduler.current)
        rows = self._world.committed(f"SELECT incarnation FROM session WHERE session_id = '{session_id}'")
        return window is not None and rows != [(window.incarnation,)]

    def _is_current(self, session_id: str) -> bool:
        """Whether the process that calls is at the session's last activation, as far as the store knows."""
        window = self._window_of(self._world.scheduler.current)
        rows = self._world.committed(f"SELECT epoch FROM session WHERE session_id = '{session_id}'")
        return window is not None and rows == [(window.epoch,)]

    def check_abandoned(self, machine: Machine) -> None:
        """A machine on which nothing went wrong is not given up."""
        now = self._world.scheduler.time()
        self._abandoned.add(machine.node_id)
        if machine.alive and not self._cut(machine) and now > machine.disturbed_until + ABANDON_SECONDS:
            self.violated(f"machine {machine.node_id} was given up, and nothing had happened to it")

    def _check_store(self) -> None:
        with self._world.store.committed() as connection:
            for violation in check(connection, self._world.namespace):
                self.violated(f"check: {violation}")

    def check_effect(self, effect: Effect) -> None:
        """No effect after its fence, and none that its policy does not allow."""
        session_id, _, call_id = effect.call_key.partition("/")
        with self._world.store.committed() as connection:
            where = (SESSION.c.session_id == session_id, TOOL_CALL.c.session_id == SESSION.c.session_id)
            row = connection.execute(
                select(SESSION.c.epoch, TOOL_CALL.c.state, TOOL_CALL.c.tool, TOOL_CALL.c.updated_at)
                .where(*where, TOOL_CALL.c.call_id == call_id)
            ).first()  # fmt: skip
        if row is None and self._of_removed(session_id):
            return None  # its run was ended by force, while its process was about to begin (guarantees.md)
        if row is None:
            return self.violated(f"effect of {effect.call_key}, which no model asked for")
        if session_id in self._with_hooks:
            if ("before_tool", effect.call_key) not in self._hooked:
                self.violated(f"effect of {effect.call_key}, and no hook was asked")
            if refused(effect.call_key):
                self.violated(f"effect of {effect.call_key}, which a hook refused")
        policy = POLICY_OF[row.tool]
        if policy == "rerun":
            return None
        # What a run's process was about to begin when the run was ended by force may have its effect (guarantees.md).
        forced = (session_id, call_id.rsplit("/", 2)[0]) in self._forced
        if row.epoch != effect.epoch and self._activated(session_id) > effect.epoch and not forced:
            self.violated(f"effect of {effect.call_key} under epoch {effect.epoch}, which epoch {row.epoch} had fenced")
        started = self._started.get((session_id, call_id), effect.at)
        # Where a commit's reply was lost nobody told of it here; the row's time has its machine's clock.
        age = time.time_ns() / 1e9 - row.updated_at / 1e6
        if effect.at > started + LEASE_SECONDS and age > LEASE_SECONDS:
            self.violated(f"effect of {effect.call_key} {effect.at - started:.1f} s after its start was committed")
        if row.state != "started" and row.epoch == effect.epoch:
            self.violated(f"effect of {effect.call_key}, which is {row.state}")
        allowed = 1 + self.permitted[effect.call_key] + (8 if policy == "ask" else 0)
        if self._world.effects_of(effect.call_key) > allowed:
            self.violated(f"{effect.call_key} acted {self._world.effects_of(effect.call_key)} times, {allowed} allowed")
        return None

    def _activated(self, session_id: str) -> int:
        """The epoch of a session's last activation. A run that is ended by force raises the epoch, and its process is
        killed only then: what that process begins meanwhile, under its lease, nobody else does as well."""
        statement = select(EVENT).where(EVENT.c.session_id == session_id, EVENT.c.type == "session_activated")
        with self._world.store.committed() as connection:
            rows = connection.execute(statement.order_by(EVENT.c.seq)).mappings()
            return max((queries.event_from_row(row).epoch for row in rows), default=0)

    # At the end.

    def unfinished(self) -> list[str]:
        """Sessions with work that nobody but the services can end, now or at a time that they have noted; what is due
        while a session is quarantined is put off."""
        with self._world.store.committed() as connection:
            active = select(SESSION.c.session_id).where(SESSION.c.active == 1)
            timers = select(TIMER.c.session_id).join(SESSION, SESSION.c.session_id == TIMER.c.session_id)
            due = timers.where(SESSION.c.status != "quarantined")
            return [*connection.execute(active).scalars(), *connection.execute(due).scalars()]

    def check_end(self) -> None:
        """Everything that must hold when all work is done."""
        self._check_store()
        with self._world.store.committed() as connection:
            self._runs(connection)
            self._cancels(connection)
            self._interruptions(connection)
            self._results(connection)
            self._leftovers(connection)
        self._answers()
        self._tokens()
        self._services()
        for context in self._world.scheduler.errors:
            self.violated(f"an error reached an event loop: {context.get('message')} {context.get('exception')!r}")
        for text in getattr(self._world.store, "deadlocks", ()):
            self.violated(f"a deadlock: {text}")
        for text in self._world.endpoint.refused:
            self.violated(f"the endpoint was sent what it refuses: {text}")

    def _runs(self, connection: Any) -> None:
        """Every accepted input is answered once, in the order in which they were accepted."""
        rows = connection.execute(select(RUN).order_by(RUN.c.accepted_at)).mappings().all()
        by_key = {(row["session_id"], row["run_id"]): row for row in rows}
        for client in self._world.clients:
            for run_id in client.accepted:
                row = by_key.get((client.session_id, run_id))
                if row is None or not row["finished_at"]:
                    self.violated(f"run {run_id} of {client.session_id} was accepted and has no end")
        events = connection.execute(
            select(EVENT.c.session_id, EVENT.c.run_id, EVENT.c.type)
            .where(EVENT.c.type.in_(["run_started", "run_finished"]))
            .order_by(EVENT.c.session_id, EVENT.c.seq)
        ).all()
        ends = Counter((event.session_id, event.run_id) for event in events if event.type == "run_finished")
        for key in by_key:
            if ends[key] != 1:
                self.violated(f"run {key[1]} of {key[0]} ended {ends[key]} times")
        started: dict[str, list[str]] = {}
        for event in events:
            if event.type == "run_started":
                started.setdefault(event.session_id, []).append(event.run_id)
        for client in self._world.clients:
            order = [run_id for run_id in started.get(client.session_id, []) if run_id in client.accepted]
            if order != [run_id for run_id in client.accepted if run_id in order]:
                self.violated(f"runs of {client.session_id} began in another order: {order}")
        self._world.counts["runs"] += len(rows)

    def _cancels(self, connection: Any) -> None:
        """A request to cancel, however often it is sent, ends one run at most."""
        roots = {client.session_id for client in self._world.clients}
        ended = Counter(
            (row.session_id, row.error["message"])
            for row in connection.execute(select(RUN.c.session_id, RUN.c.error).where(RUN.c.status == "cancelled"))
            if row.session_id in roots and row.error["message"].startswith("cancel ")
        )
        for (session_id, request), count in ended.items():
            if count > 1:
                self.violated(f"the request {request!r} cancelled {count} runs of {session_id}")

    def _interruptions(self, connection: Any) -> None:
        """Tools and model calls are cancelled only in runs that were asked to end."""
        kinds = (
            "cancel_requested", "tool_finished", "model_call_failed", "shutdown_forced", "session_quarantined",
            "child_spawned", "run_finished",
        )  # fmt: skip
        statement = select(EVENT).where(EVENT.c.type.in_(kinds)).order_by(EVENT.c.session_id, EVENT.c.seq)
        asked: set[tuple[str, str | None]] = set()
        for row in connection.execute(statement).mappings():
            event, run = queries.event_from_row(row), (row["session_id"], row["run_id"])
            if row["type"] in ("cancel_requested", "shutdown_forced", "session_quarantined"):
                asked.add(run)
            elif row["type"] == "child_spawned":
                if run in asked:
                    self.violated(f"a sub-agent of {run} was spawned behind its cancel")
            elif isinstance(event, RunFinished):
                if run not in asked and event.error_code == "aborted":
                    self.violated(f"{run} failed, since a model call was aborted, and it was not cancelled")
            elif run not in asked and getattr(event, "outcome", "") == "cancelled":
                self.violated(f"call {event.call_id} of {run} was cancelled, and its run was not")  # type: ignore[attr-defined]
            elif run not in asked and getattr(event, "error_code", "") == "aborted" and not event.late:  # type: ignore[attr-defined]
                self.violated(f"a model call of {run} was aborted, and its run was not cancelled")

    def _results(self, connection: Any) -> None:
        """What the model was told of its calls is what happened, and each input has its own answer."""
        statement = select(MESSAGE.c.session_id, MESSAGE.c.run_id, MESSAGE.c.body).where(MESSAGE.c.role == "user")
        inputs = {(row.session_id, row.run_id): row.body["content"] for row in connection.execute(statement)}
        ended = select(RUN.c.session_id, RUN.c.run_id, RUN.c.text).where(RUN.c.status == "completed")
        for row in connection.execute(ended):
            task = json.loads(inputs[row.session_id, row.run_id])["name"]
            if not row.text.startswith(f"{task}: "):
                self.violated(f"{row.session_id}/{row.run_id} was asked {task}, and answered {row.text[:60]!r}")
        effects = Counter(effect.call_key for effect in self._world.effects)
        statement = select(MESSAGE.c.session_id, MESSAGE.c.body).where(MESSAGE.c.role == "tool")
        calls = {
            (row.session_id, row.call_id): row
            for row in connection.execute(select(TOOL_CALL.c.session_id, TOOL_CALL.c.call_id, TOOL_CALL.c.tool))
        }
        for session_id, body in connection.execute(statement):
            call_id, text = body["tool_call_id"], body["content"]
            call = calls.get((session_id, call_id))
            if call is None or call.tool not in POLICY_OF:
                continue
            key = f"{session_id}/{call_id}"
            if session_id in self._with_hooks and text.startswith("did ") and ("after_tool", key) not in self._hooked:
                self.violated(f"{key} has a result that no hook has seen")
            count = effects[key]
            if text == "cancelled" and key in self._left_behind:
                self.violated(f"{key} had begun in a process that died, and is said to have been cancelled")
            if text.startswith("did ") and count == 0:
                self.violated(f"{key} is said to have acted, and has not")
            if "ToolError" in text and count == 0:
                self.violated(f"{key} is said to have failed, and never ran")
        self._world.counts["effects"] += len(self._world.effects)

    def _answers(self) -> None:
        for wait_key, process in self._complete.items():
            if not (process.dead or self._gave_up(process)):
                self.violated(f"the answer to {wait_key} was complete, and is not in the log")

    def _tokens(self) -> None:
        """How often models were asked, for the record; `check_model_call` judges each call."""
        endpoint, counts = self._world.endpoint, self._world.counts
        counts["model calls"] += endpoint.calls.total()
        counts["model calls again"] += sum(count - 1 for count in endpoint.calls.values())

    def _leftovers(self, connection: Any) -> None:
        """Nothing waits for a session that has nothing to do."""
        idle = {
            row.session_id: row
            for row in connection.execute(
                select(SESSION.c.session_id, SESSION.c.active, SESSION.c.inbox_count, SESSION.c.wait, SESSION.c.closed)
            )
        }
        for row in connection.execute(select(INBOX.c.session_id, INBOX.c.kind, INBOX.c.key)):
            if not idle[row.session_id].active:
                self.violated(f"{row.session_id}: {row.kind} {row.key} is left in the inbox of an idle session")

    def leftovers(self) -> list[str]:
        """What the services still hold when nothing is to do: their memory is as small as what they do."""
        found = []
        for name, actor in self._world.cluster.actors.items():
            if not name.startswith("node/") or actor.target is None:
                continue
            service = actor.target.service
            sizes = {
                "calls": len(service.calls), "ready": len(service.frames.paging.ready), "own": len(service.own),
                "placing": len(service.frames.placing), "interrupts": len(service.interrupts),
                "operations": max(0, service.journal._submitted.qsize() + len(service.journal._groups) - 2),
                "expected": len(service.frames.expected), "condemned": len(service.frames.condemned),
            }  # fmt: skip
            found += [f"{name} still has {size} {what} when nothing is to do" for what, size in sizes.items() if size]
            writer = service.config.writer
            [(last,)] = self._world.committed(f"SELECT max(writer_seq) FROM event WHERE writer = '{writer}'")
            measured = service.projection.metrics.writer_seq
            if actor.target._started and measured < (last or 0):
                found.append(f"{name}: metrics have {measured} events of {last}")
            for sink, export in service.projection.exports.items():
                if export.cursor < (last or 0):
                    found.append(f"{name}: {sink} have {export.cursor} events of {last}")
        return found

    def _services(self) -> None:
        for left in self.leftovers():
            self.violated(left)
        for name, actor in self._world.cluster.actors.items():
            if name.startswith("node/") and actor.target is not None:
                self._world.counts["swept"] += actor.target.service.recovery.swept
                if actor.target.service.recovery.swept and not self._may_lose_a_wake_up():
                    self.violated(f"{name}: the sweep found a session that nobody had woken, and nothing was lost")
                self._metrics(name, actor.target.service)
        self._spans()
        self._followed()

    def _metrics(self, name: str, service: NodeService) -> None:
        """What a service has measured, over all its lives, is what its whole log says when it is measured anew."""
        if self._world.counts["replaced"]:
            return  # a part of the log is gone, but not what was made of it
        again = Metrics()
        with self._world.store.committed() as connection:
            again.apply(queries.writer_events(connection, self._world.namespace, service.config.writer, 0, 1_000_000))
        measured, counted = service.projection.metrics.checkpoint(), again.checkpoint()
        for metric, totals in counted["totals"].items():
            if measured["totals"].get(metric) != totals:
                self.violated(f"{name}: {metric} is {measured['totals'].get(metric)}, its log says {totals}")

    def _may_lose_a_wake_up(self) -> bool:
        """Whether something went wrong that may keep a service from hearing what was committed."""
        return any(fault.kind not in HARMLESS for fault in self._world.plan.faults)

    def _spans(self) -> None:
        """The collector has every span of the log, and no other."""
        taken, expected = self._world.spans.spans, {}
        with self._world.store.committed() as connection:
            for row in connection.execute(select(EVENT)).mappings():
                for span in spans_of(queries.event_from_row(row)):
                    expected[key_of(span)] = text_of(span)
        for problem in self._world.spans.problems:
            self.violated(problem)
        alive = {actor.machine.node_id for actor in self._world.cluster.actors.values()}
        lost = len(alive) < len(self._world.cluster.machines)  # what it had not exported is exported later, by another
        for key in expected.keys() - taken.keys() if not lost else ():
            self.violated(f"a span is missing: {expected[key]}")
        for key in expected.keys() & taken.keys():
            if expected[key] not in taken[key]:
                self.violated(f"a span was exported as {taken[key]}, and is {expected[key]}")
        if not self._world.counts["replaced"]:
            for key in taken.keys() - expected.keys():
                self.violated(f"a span is of no event: {taken[key]}")

    def _followed(self) -> None:
        """Whoever followed a session from its beginning was told every event, once, in order."""
        for client in self._world.clients:
            rows = self._world.committed(f"SELECT seq FROM event WHERE session_id = '{client.session_id}' ORDER BY seq")
            wanted = [row[0] for row in rows]
            if client.finished and not client.replaced and client.followed != wanted[: len(client.followed)]:
                self.violated(f"the follower of {client.session_id} was told {client.followed}, there is {wanted}")

    def situation(self) -> str:
        """Why nothing happens: what sessions with work wait for."""
        lines = []
        with self._world.store.committed() as connection:
            for row in connection.execute(select(SESSION).where(SESSION.c.active == 1)).mappings():
                lines.append(f"  {row['session_id']}: " + ", ".join(f"{name}={row[name]!r}" for name in SHOWN))
            lines += [f"  inbox of {row.session_id}: {row.kind} {row.key}" for row in connection.execute(select(INBOX))]
        alive = [name for name, actor in self._world.cluster.actors.items() if actor.alive]
        return "\n".join([*lines, f"  processes: {alive}"])


def _said(message: dict[str, Any]) -> tuple[str, str, int]:
    """What a message says, without the ids that each side has of its own."""
    return message["role"], content_text(message), len(message.get("tool_calls") or ())
