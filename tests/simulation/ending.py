"""What must hold when all work of a simulation is done."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain, permutations
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.agents import CHILD
from understudy.commands import COMMAND
from understudy.events import ModelCallStarted, RunFinished, SteerDropped, TimerFired, TimerSet, ToolFinished
from understudy.identifiers import COPIED
from understudy.messages import CUT_OFF, FOLD, Message
from understudy.observability.metrics import Metrics
from understudy.observability.spans import spans_of
from understudy.placement import is_isolated
from understudy.store.db import statements
from understudy.store.db.statements import EVENT, INBOX, MESSAGE, RUN, SESSION, TIMER, TOOL_CALL
from understudy.store.entries import event_from_row
from understudy.workflows import AGENT

from . import approvals, background, delegating, handoffs, jobs, kept, loops, queues, schedules, typed, written
from .guards import STOPPED
from .plan import MAX_CONTINUATIONS, STEER
from .spans import key_of, text_of, unrecorded
from .stepped import Late
from .tools import POLICY_OF

if TYPE_CHECKING:
    from understudy.node.node_service import NodeService

    from .invariants import Invariants
    from .world import World

HARMLESS = (
    "kill_frame",
    "pause_frame",
    "kill_gateway",
    "pause_gateway",
    "kill_tool_host",
    "pause_tool_host",
    "endpoint",
    "exporter",
    "cut_clients",
)
"""Faults of which node services hear at once, or not at all."""

CLOCK_ERROR = 1_000
"""Microseconds by which two clocks may differ that nobody has set."""

SHOWN = (
    "status", "wait", "epoch", "frame_id", "node_id", "run_id", "round", "cancel_reason", "inbox_count", "calls_open",
    "children_open", "held",
)  # fmt: skip


class Ending:
    """Judges a world in which nothing is left to do.

    Args:
        seen: what was seen while it ran.
    """

    def __init__(self, world: World, seen: Invariants) -> None:
        self._world = world
        self._seen = seen
        self._violated = seen.violated

    def unfinished(self) -> list[str]:
        """Sessions with work that nobody but the services can end, now or at a time that they have noted; what is due
        while a session is quarantined is put off."""
        with self._world.store.committed() as connection:
            active = select(SESSION.c.session_id).where(SESSION.c.active == 1)
            timers = select(TIMER.c.session_id).join(SESSION, SESSION.c.session_id == TIMER.c.session_id)
            due = timers.where(SESSION.c.status != "quarantined")
            commands = select(statements.COMMAND.c.session_id).where(statements.COMMAND.c.ended_at == 0)
            return [found for wanted in (active, due, commands) for found in connection.execute(wanted).scalars()]

    def check(self) -> None:
        """Everything that must hold when all work is done."""
        self._seen.check_store()
        with self._world.store.committed() as connection:
            self._runs(connection)
            self._cancels(connection)
            self._restarts(connection)
            self._interruptions(connection)
            self._results(connection)
            self._waits(connection)
            self._steers(connection)
            violations = (
                background.violations,
                delegating.violations,
                written.violations,
                self._seen.recalled.violations,
                jobs.violations,
                self._world.commands.violations,
                self._seen.stepped.violations,
            )
            for judged in violations:
                for text in judged(connection, self._world.counts):
                    self._violated(text)
            for text in handoffs.violations(connection, self._seen.upgraded, self._world.counts):
                self._violated(text)
            looked_after = loops.violations(self._world, connection, self._world.counts)
            for text in chain(schedules.violations(self._world, connection, self._world.counts), looked_after):
                self._violated(text)
            for text in queues.violations(self._world, connection, self._world.counts):
                self._violated(text)
            self._leftovers(connection)
            for text in kept.wrong(connection):
                self._violated(text)
            self._world.counts["notes"] += kept.count(connection)
        self._answers()
        self._tokens()
        self._services()
        for context in self._world.scheduler.errors:
            self._violated(f"an error reached an event loop: {context.get('message')} {context.get('exception')!r}")
        for text in getattr(self._world.store, "deadlocks", ()):
            self._violated(f"a deadlock: {text}")
        for text in self._world.endpoint.storms[:1]:
            self._violated(f"a storm: {text}")
        for text in self._world.endpoint.refused:
            self._violated(f"the endpoint was sent what it refuses: {text}")

    def _runs(self, connection: Any) -> None:
        """Every accepted input is answered once, in the order in which they were accepted."""
        rows = connection.execute(select(RUN).order_by(RUN.c.accepted_at)).mappings().all()
        by_key = {(row["session_id"], row["run_id"]): row for row in rows}
        for client in self._world.clients:
            for run_id in client.accepted:
                row = by_key.get((client.session_id, run_id))
                if row is None or not row["finished_at"]:
                    self._violated(f"run {run_id} of {client.session_id} was accepted and has no end")
        events = connection.execute(
            select(EVENT.c.session_id, EVENT.c.run_id, EVENT.c.type)
            .where(EVENT.c.type.in_(["run_started", "run_finished"]))
            .order_by(EVENT.c.session_id, EVENT.c.seq)
        ).all()
        ends = Counter((event.session_id, event.run_id) for event in events if event.type == "run_finished")
        for key in by_key:
            if ends[key] != 1:
                self._violated(f"run {key[1]} of {key[0]} ended {ends[key]} times")
        started: dict[str, list[str]] = {}
        for event in events:
            if event.type == "run_started":
                started.setdefault(event.session_id, []).append(event.run_id)
        for client in self._world.clients:
            order = [run_id for run_id in started.get(client.session_id, []) if run_id in client.accepted]
            if order != [run_id for run_id in client.accepted if run_id in order]:
                self._violated(f"runs of {client.session_id} began in another order: {order}")
        self._world.counts["runs"] += len(rows)

    def _restarts(self, connection: Any) -> None:
        """A sub-agent that a client asked to end is not started again."""
        again = select(SESSION.c.session_id, SESSION.c.incarnation).where(SESSION.c.replaced_by.is_not(None))
        started = {tuple(row) for row in connection.execute(again)}
        for client in self._world.clients:
            for session_id, incarnation in client.asked_to_end:
                if (session_id, incarnation) in started:
                    self._violated(f"{session_id} was asked to end, and was started again")

    def _cancels(self, connection: Any) -> None:
        """A request to cancel, however often it is sent, ends one run at most."""
        roots = {client.session_id for client in self._world.clients}
        ended = Counter(
            (row.session_id, row.error["message"])
            for row in connection.execute(
                select(RUN.c.session_id, RUN.c.error).where(
                    RUN.c.status == "cancelled", RUN.c.merged_into == "", RUN.c.source.not_in((CHILD, COMMAND))
                )
            )
            if row.session_id in roots and row.error["message"].startswith("cancel ")
        )
        for (session_id, request), count in ended.items():
            if count > 1:
                self._violated(f"the request {request!r} cancelled {count} runs of {session_id}")

    def _steers(self, connection: Any) -> None:
        """What was accepted to steer a run is in its log once, or the log says that it was dropped; what was accepted
        first comes first. Nothing is dropped from a run that completed by itself. A model call that began after that
        has it."""
        said: dict[str, list[tuple[str | None, str]]] = {}
        places: dict[tuple[str, str], int] = {}
        columns = (MESSAGE.c.session_id, MESSAGE.c.seq, MESSAGE.c.run_id, MESSAGE.c.body)
        messages = select(*columns).where(MESSAGE.c.role == "user").order_by(MESSAGE.c.seq)
        for session_id, seq, run_id, body in connection.execute(messages):
            if body.get("origin") == STEER and not run_id.startswith(COPIED):
                said.setdefault(session_id, []).append((run_id, body["content"]))
                places[session_id, body["content"]] = seq
        calls = select(EVENT).where(EVENT.c.type == ModelCallStarted.type)
        began: dict[str, list[int]] = {}
        for event in map(event_from_row, connection.execute(calls).mappings()):
            if isinstance(event, ModelCallStarted) and not event.purpose:  # one that folds the history has none
                began.setdefault(event.session_id, []).append(event.seq)
        of_guards = select(RUN.c.session_id, RUN.c.run_id).where(RUN.c.text == STOPPED)
        stopped = {tuple(row) for row in connection.execute(of_guards)}
        dropped = Counter[tuple[str, str | None, str]]()
        events = select(EVENT).where(EVENT.c.type == SteerDropped.type)
        for event in map(event_from_row, connection.execute(events).mappings()):
            assert isinstance(event, SteerDropped)
            dropped.update((event.session_id, event.run_id, request_id) for request_id in event.steers or ())
            if event.status == "completed" and (event.session_id, event.run_id) not in stopped:
                self._violated(f"run {event.run_id} of {event.session_id} completed, and a steer of it was dropped")
        for client in self._world.clients:
            mine, session_id = said.get(client.session_id, []), client.session_id
            for one in client.steers:
                count = mine.count((one.run_id, one.content)) + dropped[session_id, one.run_id, one.request_id]
                if count != 1:
                    self._violated(f"{one.content!r} for run {one.run_id} of {session_id} is in its log {count} times")
                place = places.get((session_id, one.content), 0)
                if any(one.after < seq < place for seq in began.get(session_id, ())):
                    self._violated(f"{session_id} asked its model without {one.content!r}, which had been accepted")
            if len(mine) + sum(key[0] == session_id for key in dropped.elements()) != len(client.steers):
                self._violated(f"{session_id} was steered by what nobody had sent: {mine}")
            order = {content: place for place, (_, content) in enumerate(mine)}
            read = [one for one in client.steers if one.content in order]
            for first, then in permutations(read, 2):
                if first.until < then.since and order[first.content] > order[then.content]:
                    self._violated(f"{session_id} has {then.content!r} before {first.content!r}")

    def _interruptions(self, connection: Any) -> None:
        """Tools and model calls are cancelled only in runs that were asked to end, or that a client interrupted: tools
        only in the round behind which the model was sent that. Steps of workflows also when their time is over."""
        kinds = (
            "cancel_requested", "tool_finished", "model_call_failed", "shutdown_forced", "session_quarantined",
            "child_spawned", "run_finished",
        )  # fmt: skip
        statement = select(EVENT).where(EVENT.c.type.in_(kinds)).order_by(EVENT.c.session_id, EVENT.c.seq)
        asked, late = set[tuple[str, str | None]](), Late()
        interrupted = {
            (client.session_id, one.run_id) for client in self._world.clients for one in client.steers if one.interrupts
        }
        rounds = self._interrupted_rounds(connection)
        for row in connection.execute(statement).mappings():
            event, run = event_from_row(row), (row["session_id"], row["run_id"])
            late.note(event)
            if row["type"] in ("cancel_requested", "shutdown_forced", "session_quarantined"):
                asked.add(run)
            elif row["type"] == "child_spawned":
                if run in asked:
                    self._violated(f"a sub-agent of {run} was spawned behind its cancel")
            elif isinstance(event, RunFinished):
                if run not in asked and event.error_code == "aborted":
                    self._violated(f"{run} failed, since a model call was aborted, and it was not cancelled")
            elif run in interrupted:
                cancelled = isinstance(event, ToolFinished) and event.outcome == "cancelled" and run not in asked
                if cancelled and not rounds & {(*run, int(event.call_id.split("/")[-2])), (*run, 0)}:  # type: ignore[attr-defined]
                    self._violated(f"call {event.call_id} of {run} was cancelled, and its round not interrupted")  # type: ignore[attr-defined]
            elif run not in asked and getattr(event, "outcome", "") == "cancelled" and not late.has(event):
                self._violated(f"call {event.call_id} of {run} was cancelled, and its run was not")  # type: ignore[attr-defined]
            elif run not in asked and getattr(event, "error_code", "") == "aborted" and not event.late:  # type: ignore[attr-defined]
                self._violated(f"a model call of {run} was aborted, and its run was not cancelled")

    def _interrupted_rounds(self, connection: Any) -> set[tuple[str, str | None, int]]:
        """The rounds of runs behind which their models were sent what interrupted them, perhaps after a fold, which is
        a round of its own; 0 where that was dropped."""
        contents = {one.content for client in self._world.clients for one in client.steers if one.interrupts}
        chosen = select(MESSAGE.c.session_id, MESSAGE.c.run_id, MESSAGE.c.role, MESSAGE.c.body)
        rounds: set[tuple[str, str | None, int]] = set()
        latest: dict[tuple[str, str | None], int] = {}  # of each run, the round whose answer it has gone on with
        for row in connection.execute(chosen.order_by(MESSAGE.c.session_id, MESSAGE.c.seq)):
            run = row.session_id, row.run_id
            if row.role == "assistant" and "visibility" not in row.body:  # no fold
                latest[run] = row.body["round"]
            elif row.body.get("origin") == STEER and row.body["content"] in contents:
                rounds |= {(*run, row.body["round"]), (*run, latest.get(run, row.body["round"]))}
        dropped = select(EVENT.c.session_id, EVENT.c.run_id).where(EVENT.c.type == SteerDropped.type)
        return rounds | {(row.session_id, row.run_id, 0) for row in connection.execute(dropped)}

    def _results(self, connection: Any) -> None:
        """What the model reads of its calls is what happened, and each input has its own answer."""
        self._texts(connection)
        effects = Counter(effect.call_key for effect in self._world.effects)
        statement = select(MESSAGE.c.session_id, MESSAGE.c.body).where(MESSAGE.c.role == "tool")
        calls = {
            (row.session_id, row.call_id): row
            for row in connection.execute(select(TOOL_CALL.c.session_id, TOOL_CALL.c.call_id, TOOL_CALL.c.tool))
        }
        for session_id, body in connection.execute(statement):
            call_id, text = body["tool_call_id"], Message("tool", body["content"]).text
            call = calls.get((session_id, call_id))
            if call is None or call.tool not in POLICY_OF or call_id.startswith(COPIED):
                continue
            key = f"{session_id}/{call_id}"
            text = text.partition("\n")[2] if text.startswith(approvals.EDITED) else text
            seen = session_id not in self._seen.with_hooks or ("after_tool", key) in self._seen.hooked
            if text.startswith("did ") and not seen:
                self._violated(f"{key} has a result that no hook has seen")
            count = effects[key]
            if text.startswith("not executed: it was not approved") and count:
                self._violated(f"{key} was not approved, and has acted")
            if text == "cancelled" and key in self._seen.left_behind:
                self._violated(f"{key} had begun in a process that died, and is said to have been cancelled")
            if text.startswith("did ") and count == 0:
                self._violated(f"{key} is said to have acted, and has not")
            if "ToolError" in text and count == 0:
                self._violated(f"{key} is said to have failed, and never ran")
        self._world.counts["effects"] += len(self._world.effects)

    def _texts(self, connection: Any) -> None:
        """A completed run was answered: its text is the model's last reply, with the pieces before it that were cut
        off, and every hook was shown it that there is."""
        statement = select(MESSAGE.c.session_id, MESSAGE.c.run_id, MESSAGE.c.role, MESSAGE.c.body).order_by(
            MESSAGE.c.seq
        )
        said: dict[tuple[str, str], list[Any]] = {}
        for row in connection.execute(statement):
            if "visibility" in row.body:  # it is about the history, and no part of it
                self._world.counts["folded"] += row.body["origin"] == FOLD
                continue
            said.setdefault((row.session_id, row.run_id), []).append(row)
        columns = (RUN.c.session_id, RUN.c.run_id, RUN.c.rounds, RUN.c.text, RUN.c.output, SESSION.c.spec)
        ended = select(*columns).join(SESSION, SESSION.c.session_id == RUN.c.session_id)
        by_models = (RUN.c.status == "completed", RUN.c.merged_into == "", SESSION.c.kind == AGENT)
        for run in connection.execute(ended.where(*by_models)):
            key, messages = f"{run.session_id}/{run.run_id}", said[run.session_id, run.run_id]
            inputs = [message.body for message in messages if message.role == "user" and not message.body.get("origin")]
            if not inputs or not inputs[-1]["content"].startswith("{"):  # a sub-agent's end, or what its parent sends
                continue
            if run.text == STOPPED:
                self._world.counts["stopped by guards"] += 1
                continue
            given, last = inputs[-1]["content"], messages[-1]
            task = json.loads(given.partition("\n\n")[0])["name"]  # a loop's has what it knows behind it
            due = {("run_end", key), ("after_model", f"{key}/{run.rounds}")}
            if run.session_id in self._seen.with_hooks and not due <= self._seen.hooked:
                self._violated(f"{key} ended, and no hook has seen {due - self._seen.hooked}")
            if "output" in run.spec:
                self._world.counts["outputs"] += 1
                if problem := typed.problem(run.spec, task, run.text, run.output):
                    self._violated(f"{key} {problem}")
                if last.role == "tool":  # the answer was a call
                    continue
                task = ""
            pieces, cut_off = [last.body["content"]], 0
            course = [message for message in messages if message.body.get("origin") not in (STEER, CHILD, COMMAND)]
            for asked, reply in zip(course[-2::-2], course[-3::-2], strict=False):
                if asked.body.get("origin") != "continuation":
                    break
                pieces.append(reply.body["content"])
                cut_off += 1
            self._world.counts["continued"] += cut_off
            begins = f"{task}: " if task else ""
            if not run.text.startswith(begins if cut_off < MAX_CONTINUATIONS else begins[: len(run.text)]):
                self._violated(f"{key} was asked {task}, and answered {run.text[:60]!r}")
            if last.role != "assistant" or last.body.get("tool_calls") or run.text != "".join(reversed(pieces)):
                self._violated(f"{key} ended with {last.role} {last.body}, and its text is {run.text!r}")
            if last.body["extra"]["finish_reason"] == CUT_OFF and cut_off < MAX_CONTINUATIONS:
                self._violated(f"{key} ended with a reply that was cut off, after {cut_off} continuations")

    def _waits(self, connection: Any) -> None:
        """A timer fires once, for a time that was set, and not before it; and no wait is over before its time."""
        stepped = any(fault.kind == "clock_step" for fault in self._world.plan.faults)
        due, fired = set[tuple[str, str, str, int]](), Counter[tuple[str, str, str, int]]()
        timers = select(EVENT).where(EVENT.c.type.in_(("timer_set", "timer_fired")))
        for row in connection.execute(timers.order_by(EVENT.c.session_id, EVENT.c.seq)).mappings():
            event = event_from_row(row)
            if isinstance(event, TimerSet):
                due.add((event.session_id, event.kind, event.name, event.due_at))
            elif isinstance(event, TimerFired):
                timer = (event.session_id, event.kind, event.name, event.at - event.late)
                fired[timer] += 1
                if timer not in due:
                    self._violated(f"the timer {timer} fired, and was not set")
                if event.late < -CLOCK_ERROR and not stepped:
                    self._violated(f"the timer {timer} fired {-event.late / 1e6:.3f} s early")
        for timer, count in fired.items():
            if count > 1:
                self._violated(f"the timer {timer} fired {count} times")
        if not stepped:
            self._waited(connection)

    def _waited(self, connection: Any) -> None:
        """The time that a result says was waited has passed since the model asked for it."""
        call, asked, answered = TOOL_CALL, MESSAGE.alias("asked"), MESSAGE.alias("answered")
        run = [asked.c[name] == call.c[name] for name in ("session_id", "run_id", "round")]
        results = [answered.c[name] == call.c[name] for name in ("session_id", "run_id", "round")]
        of_call = (call.c.session_id, call.c.call_id, call.c.arguments)
        columns = (*of_call, asked.c.created_at, answered.c.created_at, answered.c.body)
        where = (call.c.tool == "wait", *run, *results, asked.c.role == "assistant", answered.c.role == "tool")
        statement = select(*columns).where(*where).order_by(call.c.session_id, call.c.call_id)
        for session_id, call_id, arguments, since, until, result in connection.execute(statement):
            wanted = json.loads(arguments)["seconds"]
            if result["tool_call_id"] != call_id or not result["content"].startswith("waited "):
                continue
            if until - since < wanted * 1e6 - CLOCK_ERROR:
                self._violated(f"{session_id}/{call_id}: a wait of {wanted} s was over after {(until - since) / 1e6} s")
            self._world.counts["waits"] += 1

    def _answers(self) -> None:
        for wait_key, process in self._seen.complete.items():
            if not (process.dead or self._seen.gave_up(process) or self._seen.is_cut_short(wait_key)):
                self._violated(f"the answer to {wait_key} was complete, and is not in the log")

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
                self._violated(f"{row.session_id}: {row.kind} {row.key} is left in the inbox of an idle session")

    def leftovers(self) -> list[str]:
        """What the services still hold when nothing is to do: their memory is as small as what they do."""
        found = []
        for name, actor in self._world.cluster.actors.items():
            if name.startswith("gateway/") and actor.target is not None and actor.target.calls.held:
                found.append(f"{name} still holds {actor.target.calls.held} calls when nothing is to do")
            if not name.startswith("node/") or actor.target is None:
                continue
            if not actor.target._started:
                found.append(f"{name} has not started")
                continue
            service = actor.target.service
            sizes = {
                "calls": len(service.calls), "ready": len(service.frames.paging.ready), "own": len(service.claims),
                "assignments": len(service.frames.assignments.under_way), "interrupts": len(service.interrupts),
                "verdicts": len(service.verdicts),
                "processes of calls": len(service.tasks._calls),
                "guarding": sum(slot.guarding for slot in service.frames.paging.slots.values()),
                "operations": max(0, service.journal._submitted.qsize() + len(service.journal._groups) - 2),
                "expected": len(service.frames.known.expected), "condemned": len(service.frames.known.condemned),
            }  # fmt: skip
            found += [f"{name} still has {size} {what} when nothing is to do" for what, size in sizes.items() if size]
            found += self._misplaced(service)
            writer = service.config.writer
            [(last,)] = self._world.committed(f"SELECT max(writer_seq) FROM event WHERE writer = '{writer}'")
            measured = service.projection.metrics.writer_seq
            if measured < (last or 0):
                found.append(f"{name}: metrics have {measured} events of {last}")
            for sink, export in service.projection.exports.items():
                if export.cursor < (last or 0):
                    found.append(f"{name}: {sink} have {export.cursor} events of {last}")
        if not found:  # what a machine that was lost had not exported is exported by another, when its loss is noticed
            expected, taken = self._expected_spans(), self._world.spans.spans
            found += [f"a span is missing: {expected[key]}" for key in sorted(expected.keys() - taken.keys())]
        return found

    def _misplaced(self, service: NodeService) -> Iterator[str]:
        """What the store says of sessions in frames that live is what their service knows; and no process that is for
        one activation is left when that is over."""
        slots = service.frames.paging.slots
        for session_id, frame_id in self._world.committed("SELECT session_id, frame_id FROM session"):
            if frame_id in slots and slots[frame_id].session_id != session_id:
                yield f"the store has {session_id} in frame {frame_id}, which has {slots[frame_id].session_id}"
        for slot in slots.values():
            if is_isolated(slot.placement) and slot.session_id is not None:
                yield f"frame {slot.frame_id} is left behind by {slot.session_id}, and was for it only"

    def _services(self) -> None:
        for left in self.leftovers():
            self._violated(left)
        for name, actor in self._world.cluster.actors.items():
            if name.startswith("node/") and actor.target is not None:
                self._world.counts["swept"] += actor.target.service.sweep.swept
                if actor.target.service.sweep.swept and not self._may_lose_a_wake_up():
                    self._violated(f"{name}: the sweep found a session that nobody had woken, and nothing was lost")
                self._metrics(name, actor.target.service)
        self._spans()
        self._followed()

    def _metrics(self, name: str, service: NodeService) -> None:
        """What a service has measured, over all its lives, is what its whole log says when it is measured again; also
        of sessions that were removed since."""
        known = self._world.log.of_writers.get(service.config.writer, {})
        again, events = Metrics(), [known[place] for place in sorted(known)]
        if len(events) < service.projection.metrics.writer_seq:
            return  # a commit in doubt, of a session that was removed before anybody looked
        again.apply(events)
        measured, counted = service.projection.metrics.checkpoint(), again.checkpoint()
        for metric, totals in counted["totals"].items():
            if measured["totals"].get(metric) != totals:
                self._violated(f"{name}: {metric} is {measured['totals'].get(metric)}, its log says {totals}")

    def _may_lose_a_wake_up(self) -> bool:
        """Whether something went wrong that may keep a service from hearing what was committed."""
        return any(fault.kind not in HARMLESS for fault in self._world.plan.faults)

    def _expected_spans(self) -> dict[tuple[int, int], str]:
        """What the log says that there must be, of traces that their callers record."""
        with self._world.store.committed() as connection:
            rows = connection.execute(select(EVENT)).mappings()
            spans = [span for row in rows for span in spans_of(event_from_row(row))]
        left_out = unrecorded((client.session_id, run) for client in self._world.clients for run in client.sent)
        found = {key_of(span): text_of(span) for span in spans}
        return {key: text for key, text in found.items() if key[0] not in left_out}

    def _spans(self) -> None:
        """The collector has every span as the log says it, and no other."""
        taken, expected = self._world.spans.spans, self._expected_spans()
        for problem in self._world.spans.problems:
            self._violated(problem)
        for key in expected.keys() & taken.keys():
            if expected[key] not in taken[key]:
                self._violated(f"a span was exported as {taken[key]}, and is {expected[key]}")
        for key in taken.keys() - expected.keys():
            if not self._world.spans.of_removed(taken[key]):
                self._violated(f"a span is of no event: {taken[key]}")

    def _followed(self) -> None:
        """Whoever followed a session from its beginning received every event, once, in order."""
        for client in self._world.clients:
            rows = self._world.committed(f"SELECT seq FROM event WHERE session_id = '{client.session_id}' ORDER BY seq")
            wanted = [row[0] for row in rows]
            if client.finished and not client.replaced and client.followed != wanted[: len(client.followed)]:
                self._violated(f"the follower of {client.session_id} received {client.followed}, there is {wanted}")

    def situation(self) -> str:
        """Why nothing happens: what sessions with work wait for."""
        lines = []
        with self._world.store.committed() as connection:
            for row in connection.execute(select(SESSION).where(SESSION.c.active == 1)).mappings():
                lines.append(f"  {row['session_id']}: " + ", ".join(f"{name}={row[name]!r}" for name in SHOWN))
            lines += [f"  inbox of {row.session_id}: {row.kind} {row.key}" for row in connection.execute(select(INBOX))]
        alive = [name for name, actor in self._world.cluster.actors.items() if actor.alive]
        return "\n".join([*lines, f"  processes: {alive}"])
