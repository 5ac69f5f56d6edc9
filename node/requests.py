"""What clients ask of a node service: one method each.

Any of it may be repeated, and arrive late. Where that would do more than the first time, the request has an id, made
once by whoever asks; docs/guarantees.md says of each request why its repetition is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import replace

from understudy.approvals import APPROVE, arguments_problem
from understudy.config import OFFLINE_MODEL
from understudy.errors import InvalidInput, InvalidSpec, ModelProfileMissing, NotRunning, UnderstudyError
from understudy.event_wire import EventWire
from understudy.identifiers import check_identity
from understudy.manifest import below
from understudy.protocol import (
    Accepted,
    Decision,
    Following,
    Fork,
    Input,
    NewNote,
    NewSession,
    NewWakeup,
    Scheduled,
    Signal,
    Spawned,
    Steer,
    SteerAnswer,
    Steered,
    Watched,
    Work,
    packed,
    unpacked,
)  # fmt: skip
from understudy.queues import NewQueue, QueueSet
from understudy.reads import NodeLoad, SessionRecord
from understudy.schedules import Fired, NewSchedule, ScheduleSet
from understudy.store import budgets
from understudy.store.operations import (
    activation,
    beginnings,
    code,
    draining,
    endings,
    forks,
    loops,
    notes,
    questions,
    queues,
    requests,
    schedules,
    steering,
    steps,
    triage,
    wakeups,
)
from understudy.store.reads import overview, pending, queries, traces, workflows
from understudy.store.reads import queues as queue_reads
from understudy.store.reads import schedules as schedule_reads
from understudy.store.reads import triage as triage_reads
from understudy.store.transaction import Transaction

from .node_service import NodeService
from .paging import Ready

Result = TypeVar("Result")

READS: dict[str, Callable[..., Any]] = {  # what each returns is what its reply is unpacked as
    "info": queries.session_info,
    "sessions": queries.session_list,
    "tree": queries.tree,
    "messages": queries.messages,
    "run": queries.run_info,
    "runs": queries.runs,
    "trace": traces.trace_events,
    "questions": queries.questions,
    "asked": queries.asked,
    "asked_below": pending.below,
    "wakeups": queries.wakeups,
    "schedule": schedule_reads.schedule,
    "schedules": schedule_reads.schedules,
    "triage": triage_reads.triage,
    "triage_entry": triage_reads.triage_entry,
    "loop_memory": triage_reads.loop_memory,
    "queue": queue_reads.queue,
    "queues": queue_reads.queues,
    "waits_in": queue_reads.waits_in,
    "notes": queries.notes,
    "owner": queries.owner,
    "homes": queries.homes,
    "drains": queries.drains,
    "working": overview.working,
    "holders": overview.holders,
    "node_sessions": overview.node_sessions,
    "totals": overview.totals,
    "activity": overview.activity,
    "page": overview.page,
    "event_page": overview.event_page,
    "latest_runs": overview.latest_runs,
    "budgets": overview.budgets,
    "published": workflows.published,
    "workflow_status": workflows.status,
}

ANSWER_UNFIT = "answer to call {!r} must be JSON that fits what is asked for"


def asked_by(by: str, operation: Callable[[Transaction], Result]) -> Callable[[Transaction], Result]:
    """The operation, whose events say that this person asked for it; others of the same transaction do not.

    Raises:
        InvalidInput: when called, of an identity that can't be one.
    """
    check_identity(by)

    def attributed(tx: Transaction) -> Result:
        tx.by = by
        try:
            return operation(tx)
        finally:
            tx.by = ""

    return attributed


class Requests:
    """The clients' side of a node service.

    `by` is, in all of them, who asks (`Cluster.connect(identity=…)`); empty: nobody says so.
    """

    def __init__(self, node: NodeService) -> None:
        self._node = node

    async def _once(
        self,
        kind: type[Result],
        session_id: str,
        request_id: str,
        operation: Callable[[Transaction], Result],
        by: str = "",
        *,
        alone: bool = False,
    ) -> Result:
        """See `requests.once`; the result is remembered as it is sent."""
        touches = [session_id] if session_id else []
        done = await self._node.journal.submit(
            asked_by(by, lambda tx: requests.once(tx, session_id, request_id, lambda tx: packed(operation(tx)))),
            *touches,
            alone=alone or not session_id,
        )
        found: Result = unpacked(done, kind, "what a request has done")
        return found

    async def spawn(self, session: NewSession, blobs: dict[str, bytes]) -> Spawned:
        """Get or create a session.

        Raises:
            SessionConflict: it exists with another specification.
            InvalidSpec: it limits the cost of a model that has no price.
        """
        node = self._node

        def operation(tx: Transaction) -> Spawned:
            if tx.find(session.session_id) is None:
                self._require_prices(session.spec)
            for digest, data in blobs.items():
                code.put(tx, digest, data)
            created = beginnings.create_session(
                tx, session.session_id, session.spec, spec_hash=session.spec["hash"], placement=session.placement,
                node_id=node.homes.home_for(session.session_id), metadata=session.metadata,
            )  # fmt: skip
            row = tx.session(session.session_id)
            if created:
                node.specifications.remember(row, session.spec)
            return Spawned(created, row.node_id)

        found = await node.journal.submit(operation, session.session_id)
        if found.created:
            node.specifications.remember_placement(session.session_id, session.placement)
        return found

    async def lacking(self, digests: list[str]) -> list[str]:
        """Which of these pieces of code the store does not have; the others it keeps for another day."""
        return await self._node.journal.submit(lambda tx: [digest for digest in digests if not code.touch(tx, digest)])

    def _require_prices(self, spec: dict[str, Any], limited: bool = False) -> None:
        """A limit of money needs models with prices: the agent's, and those of all that it may create."""
        limited = limited or any(resource == "cost" for _, resource, _ in budgets.limits_of(spec.get("budget")))
        if limited and self._node.profiles.price(spec["profile"], spec["model"]) is None:
            raise InvalidSpec(
                f"budget: the cost of agent {spec['name']!r} is limited, and model {spec['model']!r} has no price. "
                "Give it one in the file of UNDERSTUDY_PRICES or with Cluster.connect(prices=…), or limit tokens.",
            )
        for agent in below(spec):
            self._require_prices(agent, limited)

    async def send(self, session_id: str, run: Input, request_id: str, by: str = "") -> Accepted:
        """Accept an input; it is durable when this returns. Where a frame is free the session is activated with it.

        Not by `once`, which takes three statements more: the run remembers the request, and `requests.outlive` its
        session's end.

        Raises:
            UnknownSession, UnknownQueue, RunConflict, SessionClosed: see `beginnings.accept`.
        """
        node = self._node
        placement = await node.specifications.placement(session_id)
        spare = node.frames.take_spare(session_id, placement) if node.frames.paging.holder(session_id) is None else None
        ready = Ready(session_id, placement, root_id="")  # never queued: its tree does not matter

        def operation(tx: Transaction) -> tuple[Accepted, Work | None]:
            after = tx.session(session_id).seq
            created = beginnings.accept(
                tx, session_id, run.run_id, run.content, trace_id=run.trace_id, parent_span_id=run.parent_span_id,
                sampled=run.sampled, request_id=request_id, place=run.place,
            )  # fmt: skip
            accepted = Accepted(created, after)
            if created:
                node.homes.take_in(tx, session_id)
            if not created or spare is None or session_id not in tx.woken:
                return accepted, None
            woken = tx.woken[session_id]
            node.specifications.remember_placement(session_id, woken.placement)
            if woken.frame_id is not None:
                return accepted, None
            try:
                work = node.frames.activation(spare, ready)(tx)
            except UnderstudyError:
                tx.woken[session_id] = woken
                return accepted, None
            return accepted, work

        with node.frames.offered(session_id, spare) as offer:
            accepted, offer.work = await node.journal.submit(asked_by(by, operation), session_id)
        return accepted

    async def require_key(self, session_id: str, request_id: str, by: str = "") -> None:
        """Refuse a session whose model's key nobody has brought here; what it would be asked would fail for that, after
        a while. It changes nothing, so that a repetition needs no memory.

        Raises:
            UnknownSession, ModelProfileMissing: there is none.
        """
        node = self._node
        spec = await node.journal.submit(lambda tx: node.specifications.within(tx, session_id), session_id)
        if spec["profile"] != OFFLINE_MODEL and not node.profiles.knows(spec["profile"]):
            raise ModelProfileMissing(
                f"agent {spec['name']!r} uses model {spec['model']!r}, and no key is known for its model profile "
                f"{spec['profile']!r}",
                session_id=session_id,
            )

    async def cancel(self, session_id: str, run_id: str | None, reason: str, request_id: str, by: str = "") -> bool:
        """Ask a run to end, or the one that is current when this arrives first; True if there was one to end."""

        def operation(tx: Transaction) -> bool:
            return endings.request_cancel(tx, tx.session(session_id), reason, run_id)

        return await self._once(bool, session_id, request_id, operation, by)

    async def steer(self, session_id: str, wanted: Steer, request_id: str, by: str = "") -> Steered:
        """Accept a message for the run that the session is at. See `steering.steer`.

        A refusal is remembered as well: an attempt that arrives later might find another run.
        """

        def operation(tx: Transaction) -> SteerAnswer:
            try:
                accepted = steering.steer(tx, session_id, wanted, request_id)
            except NotRunning as error:
                return SteerAnswer(refusal=error.message)
            self._node.homes.take_in(tx, session_id)
            return SteerAnswer(accepted)

        answer = await self._once(SteerAnswer, session_id, request_id, operation, by)
        if answer.steered is None:
            raise NotRunning(answer.refusal, session_id=session_id)
        return answer.steered

    async def signal(self, session_id: str, wanted: Signal, request_id: str, by: str = "") -> bool:
        """Accept an event that a workflow waits for, or will; True if a step waited for it. See `steps.signal`."""

        def operation(tx: Transaction) -> bool:
            waited = steps.signal(tx, session_id, wanted)
            self._node.homes.take_in(tx, session_id)
            return waited

        return await self._once(bool, session_id, request_id, operation, by)

    async def fork(self, session_id: str, wanted: Fork, request_id: str, by: str = "") -> Spawned:
        """Get or create a fork of the session. See `forks.fork`."""
        home = self._node.homes.home_for(wanted.session_id)
        return await self._once(
            Spawned, session_id, request_id, lambda tx: forks.fork(tx, session_id, wanted, home), by
        )

    async def close(self, session_id: str, reason: str, request_id: str, by: str = "") -> bool:
        """Take no more input; True if the session was open."""
        return await self._once(bool, session_id, request_id, lambda tx: endings.close(tx, session_id, reason), by)

    async def answer(
        self, session_id: str, call_id: str, decision: str, text: str, asked: int, request_id: str, by: str = ""
    ) -> bool:
        """Answer a call that waits for a person; True if the answer is new. Raises as `questions.decide`."""
        return bool(await self.decide(session_id, [Decision(call_id, asked, decision, text)], request_id, by))

    async def decide(self, session_id: str, decisions: list[Decision], request_id: str, by: str = "") -> list[str]:
        """Answer calls that wait for a person, all of them or none; returns those of which the answer is new. Raises as
        `questions.decide`."""
        for decision in decisions:
            # An answer in words waits for nothing: a cancel that is sent behind it must not come before it.
            of_form = decision.decision == "ok" and decision.text.lstrip().startswith("{")
            if of_form or (decision.decision == APPROVE and decision.text):
                await self._require_fitting(session_id, decision)

        def operation(tx: Transaction) -> list[str]:
            accepted = questions.decide(tx, session_id, decisions)
            if accepted:
                self._node.homes.take_in(tx, session_id)
            return accepted

        return await self._once(list[str], session_id, request_id, operation, by)

    async def _require_fitting(self, session_id: str, decision: Decision) -> None:
        """Refuse arguments that the call's tool does not take, and an answer that is not what was asked for. Before the
        transaction: a schema may take its time."""
        call_id, of_tool = decision.call_id, decision.decision == APPROVE
        if of_tool:
            schema = await self._node.reading.query(pending.parameters, session_id, call_id)
        else:
            schema = await self._node.reading.query(pending.form, session_id, call_id, decision.asked)
        problem = await asyncio.to_thread(arguments_problem, decision.text, schema) if schema is not None else None
        if problem is not None:
            wrong = "arguments for call {!r} don't fit its tool" if of_tool else ANSWER_UNFIT
            raise InvalidInput(f"the {wrong.format(call_id)}: {problem}", session_id=session_id)

    async def abort_pending(self, session_id: str, call_id: str | None, request_id: str, by: str = "") -> list[str]:
        """Give up calls that wait for a person; returns their ids. See `questions.abort`."""
        return await self._once(
            list[str], session_id, request_id, lambda tx: questions.abort(tx, session_id, call_id), by
        )

    async def schedule(self, session_id: str, wakeup: NewWakeup, request_id: str, by: str = "") -> Scheduled:
        """Set a wakeup. See `wakeups.schedule`."""

        def operation(tx: Transaction) -> Scheduled:
            done = wakeups.schedule(tx, session_id, wakeup.name, wakeup.prompt, wakeup.seconds, wakeup.every)
            self._node.homes.take_in(tx, session_id)
            return done

        return await self._once(Scheduled, session_id, request_id, operation, by)

    async def cancel_wakeup(self, session_id: str, name: str, request_id: str, by: str = "") -> bool:
        """Give a wakeup up; True if there was one."""
        return await self._once(bool, session_id, request_id, lambda tx: wakeups.cancel(tx, session_id, name), by)

    async def set_schedule(
        self, wanted: NewSchedule, blobs: dict[str, bytes], request_id: str, by: str = ""
    ) -> ScheduleSet:
        """Set a schedule. See `schedules.put`; raises `InvalidSpec` as `spawn` does."""
        if wanted.spec is not None:
            self._require_prices(wanted.spec)

        def operation(tx: Transaction) -> ScheduleSet:
            for digest, data in blobs.items():
                code.put(tx, digest, data)
            return schedules.put(tx, wanted)

        return await self._once(ScheduleSet, schedules.request_key(wanted.name), request_id, operation, by)

    async def pause_schedule(self, name: str, paused: bool, request_id: str, by: str = "") -> bool:
        """Pause a schedule, or resume it. See `schedules.pause`."""
        return await self._once(
            bool, schedules.request_key(name), request_id, lambda tx: schedules.pause(tx, name, paused), by
        )

    async def trigger_schedule(self, name: str, request_id: str, by: str = "") -> Fired:
        """Fire a schedule now. See `schedules.trigger`."""

        def operation(tx: Transaction) -> Fired:
            return schedules.trigger(tx, name, self._node.homes)

        return await self._once(Fired, schedules.request_key(name), request_id, operation, by)

    async def delete_schedule(self, name: str, request_id: str, by: str = "") -> bool:
        """Remove a schedule; True if there was one."""
        return await self._once(
            bool, schedules.request_key(name), request_id, lambda tx: schedules.delete(tx, name), by
        )

    async def resolve_triage(self, entry_id: str, request_id: str, by: str = "") -> bool:
        """Resolve an entry in triage; True if it was open. See `triage.resolve`."""
        return await self._once(
            bool, triage.request_key(entry_id), request_id, lambda tx: triage.resolve(tx, entry_id), by
        )

    async def retry_triage(self, entry_id: str, request_id: str, by: str = "") -> Fired:
        """Fire the schedule of an entry in triage. See `schedules.retry`."""

        def operation(tx: Transaction) -> Fired:
            return schedules.retry(tx, entry_id, self._node.homes)

        return await self._once(Fired, triage.request_key(entry_id), request_id, operation, by)

    async def reset_loop(self, name: str, request_id: str, by: str = "") -> bool:
        """Forget what a loop knows; True if it knew anything. See `loops.reset`."""
        return await self._once(bool, schedules.request_key(name), request_id, lambda tx: loops.reset(tx, name), by)

    async def set_queue(self, wanted: NewQueue, request_id: str, by: str = "") -> QueueSet:
        """Set a queue. See `queues.put`."""
        return await self._of_queue(QueueSet, wanted.name, request_id, lambda tx: queues.put(tx, wanted), by)

    async def pause_queue(self, name: str, paused: bool, request_id: str, by: str = "") -> bool:
        """Have none of its runs begin, or begin again. See `queues.pause`."""
        return await self._of_queue(bool, name, request_id, lambda tx: queues.pause(tx, name, paused), by)

    async def remove_queue(self, name: str, request_id: str, by: str = "") -> bool:
        """Remove a queue; True if there was one. See `queues.remove`."""
        return await self._of_queue(bool, name, request_id, lambda tx: queues.remove(tx, name), by)

    async def _of_queue(
        self, kind: type[Result], name: str, request_id: str, operation: Callable[[Transaction], Result], by: str
    ) -> Result:
        """Alone, since it locks the queue's row before other operations of a transaction could lock what they need."""
        return await self._once(kind, queues.request_key(name), request_id, operation, by, alone=True)

    async def set_note(self, session_id: str, note: NewNote, request_id: str, by: str = "") -> int:
        """Set a note of a session; its version. See `notes.put`."""

        def operation(tx: Transaction) -> int:
            return notes.put(tx, session_id, note.key, note.text, note.pinned)

        return await self._once(int, session_id, request_id, operation, by)

    async def delete_note(self, session_id: str, key: str, request_id: str, by: str = "") -> bool:
        """Remove a note of a session; True if there was one."""
        return await self._once(bool, session_id, request_id, lambda tx: notes.remove(tx, session_id, key), by)

    async def resume(self, session_id: str, request_id: str, by: str = "") -> bool:
        """Let a quarantined session take input again. See `activation.resume`."""
        return await self._once(bool, session_id, request_id, lambda tx: activation.resume(tx, session_id), by)

    async def read(self, what: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        """One of `READS`, as it is sent. If a session waits for a frame that can't be started, its record says so."""
        found = await self._node.reading.query(READS[what], *arguments, **options)
        if self._node.frames.supply.unschedulable and what in ("info", "sessions", "tree"):
            found = self._explained(found) if what == "info" else list(map(self._explained, found))
        return packed(found)

    def _explained(self, session: SessionRecord) -> SessionRecord:
        reason = self._node.frames.supply.unschedulable.get(session.placement)
        if not reason or session.session_id not in self._node.frames.paging.ready or session.error is not None:
            return session
        error = {"code": "unschedulable", "message": reason, "session_id": session.session_id}
        return replace(session, error=error)

    async def load(self) -> NodeLoad:
        """What this node service has to do, as its metrics have it (`shown`)."""
        paging, supply = self._node.frames.paging, self._node.frames.supply
        states = paging.states()
        memory = supply.measured
        measured = (memory.free, memory.total, memory.frame) if memory is not None else ()
        return NodeLoad(
            states["acting"], states["waiting"], states["standby"], supply.cap, len(paging.ready), *measured
        )

    async def events(self, session_id: str, after: int) -> list[EventWire]:
        """Events of a session after a `seq`, in wire form."""
        await self._node.reading.session(session_id)
        return [event.to_wire() for event in await self._node.reading.events(session_id, after)]

    async def watch(self, client_id: str, follow: dict[str, Following], timeout: float) -> Watched:
        """See `Feed.watch`."""
        return await self._node.feed.watch(client_id, follow, timeout)

    async def begin_drains(
        self, node_ids: list[str], deadline: int, reason: str, stop: bool, nodes: list[str], request_id: str
    ) -> None:
        """See `draining.begin`."""

        def operation(tx: Transaction) -> None:
            for node_id in node_ids:
                draining.begin(tx, node_id, deadline, reason=reason, stop=stop, nodes=nodes)

        await self._once(type(None), "", request_id, operation)

    async def end_drains(self, node_ids: list[str], request_id: str) -> int:
        """See `draining.end`."""
        return await self._once(int, "", request_id, lambda tx: draining.end(tx, node_ids))

    async def acquire(self, holder: str, lease: int, dead_holder: str, request_id: str) -> int:
        """See `activation.acquire`; an owner known to be dead need not be waited for."""

        def operation(tx: Transaction) -> int:
            return activation.acquire(tx, holder, lease, may_take=lambda current: current == dead_holder)

        return await self._once(int, "", request_id, operation)

    async def renew(self, generation: int, holder: str, lease: int) -> None:
        """See `activation.renew`."""
        await self._node.journal.submit(lambda tx: activation.renew(tx, generation, holder, lease), alone=True)
