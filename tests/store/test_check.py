"""The accounting identity: it holds after every commit, and each rule bites when the tables are made to break it."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text, update

from understudy.actors.tools import handoff_spec
from understudy.errors import UnderstudyError
from understudy.events import ToolFinished, ToolStarted
from understudy.identifiers import child_identifier
from understudy.messages import Message, Usage
from understudy.ports import Death, Verdict
from understudy.protocol import Decision, Fork, Steer
from understudy.queues import NewQueue, QueuePlace
from understudy.records import ActivationId, Ask, Batch, CallState, Finish, Handoff, ModelAnswer, Spawn
from understudy.schedules import LATEST_TIME, NewSchedule, Timing
from understudy.spec import Supervision
from understudy.store.check.check import MOST_OF_ONE_RULE, RULES, Violation, check
from understudy.store.db import prepared
from understudy.store.db.engine import Database
from understudy.store.db.statements import EVENT, MESSAGE, QUESTION
from understudy.store.operations import (
    activation,
    batches,
    beginnings,
    draining,
    endings,
    forks,
    loops,
    model_calls,
    notes,
    questions,
    queues,
    schedules,
    steering,
    timers,
    triage,
    wakeups,
)
from understudy.triage import entry_identifier

from ..postgres import database
from .test_store import MINUTE, Store, opened, spec

pytestmark = pytest.mark.conformance

Move = Callable[[], Awaitable[Any]]


def violations(db: Store, *session_ids: str) -> list[Violation]:
    with db.database.snapshot() as connection:
        return check(connection, db.namespace, session_ids or None)


def rows(db: Store, table: str, session_id: str | None = None) -> list[dict[str, Any]]:
    where = "namespace = :n" + (" AND session_id = :s" if session_id else "")
    with db.database.snapshot() as connection:
        found = connection.execute(
            text(f"SELECT * FROM {table} WHERE {where} ORDER BY session_id"), {"n": db.namespace, "s": session_id}
        )
        return [dict(row) for row in found.mappings()]


# Whatever is done, in whatever order.


def specification(row: dict[str, Any]) -> dict[str, Any]:
    """Of a session's row, as either driver reads it."""
    found: dict[str, Any] = json.loads(row["spec"]) if isinstance(row["spec"], str) else row["spec"]
    return found


def _activation(row: dict[str, Any]) -> ActivationId:
    return ActivationId(*(row[name] for name in ActivationId._fields))


class Play:
    """All that may happen to a store next, as clients, frames, models and deaths do it."""

    def __init__(self, db: Store) -> None:
        self.db = db
        self.calls: set[tuple[str, str, int, int]] = set()  # model calls on their way

    async def begin(self) -> None:
        await self.db.own()
        rules = Supervision(strategy="one_for_all", max_restarts=2, backoff=0).model_dump()
        await self.db.create("plain", spec("plain", supervision=rules))
        await self.db.create("thrifty", spec("thrifty", budget={"tokens": 200}))
        await self.db.create("handed", handing_off())

    def moves(self, disturb: bool) -> list[Move]:
        """What moves the work on, or what comes between; the other one where there is nothing of the kind."""
        sessions = rows(self.db, "session")
        onwards = [self._answer(key, kind) for key in sorted(self.calls) for kind in (0, 1, 2, 2, 3)]
        for session in sessions:
            onwards += self._agent(session)
            if session["active"] and not session["frame_id"] and session["wait"] is None:
                onwards.append(lambda s=session["session_id"]: self.db.activate(s))
        if onwards and not disturb:
            return onwards
        between: list[Move] = []
        if all(session["closed"] or session["status"] == "quarantined" for session in sessions):
            between.append(lambda: self.db.create(f"more{len(sessions)}", spec("more", budget={"tokens": 500})))
        for timer in rows(self.db, "timer"):
            due = timer["session_id"], timer["name"], timer["due_at"]
            between.append(lambda due=due: self.db.do(timers.fire, *due))
        for session in sessions:
            between += self._client(session) + self._deaths(session)
        return between

    def _client(self, row: dict[str, Any]) -> list[Move]:
        db, session_id = self.db, row["session_id"]

        def cancel(run_id: str | None) -> Move:
            return lambda: db.journal.submit(
                lambda tx: endings.request_cancel(tx, tx.session(session_id), "why", run_id)
            )

        def upgrade(name: str, more: int) -> Move:
            limits = {"tokens": budget["tokens"] + more} if (budget := specification(row).get("budget")) else None
            return lambda: db.create(session_id, spec(name, budget=limits, on_change="migrate"))

        found: list[Move] = [lambda n=n: db.accept(session_id, f"r{n}") for n in range(2 + row["seq"] // 30)]
        if row["seq"] % 3 == 0 and row["parent_id"] is None:
            found += [upgrade("newer", 0), upgrade("newest", 100)]
        found += [cancel(None)] + [cancel(item["key"]) for item in rows(db, "inbox", session_id)]
        for question in rows(db, "question", session_id):
            for decision in ("ok", "error", "rerun"):
                said = (session_id, question["call_id"], decision, "x")
                found.append(lambda said=said, asked=question["asked"]: db.do(questions.answer, *said, asked=asked))
            found.append(lambda call_id=question["call_id"]: db.do(questions.abort, session_id, call_id))
        for name, every in (("once", None), ("often", 60)):
            found.append(lambda name=name, every=every: db.do(wakeups.schedule, session_id, name, "x", 60, every))
        found.append(lambda: db.do(wakeups.cancel, session_id, "once"))
        if row["status"] == "quarantined":
            found.append(lambda: db.do(activation.resume, session_id))
        return found + ([lambda: db.do(endings.close, session_id, "enough")] if row["seq"] > 25 else [])

    def _deaths(self, row: dict[str, Any]) -> list[Move]:
        db, session_id, held = self.db, row["session_id"], _activation(row)
        if not row["active"]:
            return []

        def crash(verdict: Verdict) -> Move:
            def decide(death: Death) -> Verdict:
                possible = verdict.action != "abort" or (death.open_calls and not death.aborted)
                return verdict if possible else Verdict("resume")

            return lambda: db.do(activation.crash, held, decide, cause="died", pid=1, policy={})

        async def reissue() -> None:
            issued = await db.do(model_calls.reissue, held, row["frame_id"] or "", "h", "m")
            if issued is not None:
                self.calls.add((session_id, row["run_id"], row["round"], issued.attempt))

        def give_away() -> Move:
            return lambda: db.journal.submit(
                lambda tx: draining.leave(tx, tx.session(session_id), row["node_id"], ["elsewhere", "or there"])
            )

        found: list[Move] = [lambda: db.activate(session_id), give_away()]
        if row["frame_id"]:
            found += [crash(Verdict("resume")), crash(Verdict("resume", delay=MINUTE))]
            found += [crash(Verdict("quarantine", reason="hopeless"))] if row["seq"] > 20 else []
            found += [crash(Verdict("abort", reason="given up"))] if row["wait"] is None else []
        if row["wait"] == "model":
            found += [reissue, lambda: db.do(activation.park, held)]
        return found

    def _answer(self, key: tuple[str, str, int, int], kind: int) -> Move:
        calls = tuple((f"p{index}", "spawn_agent" if index else "t", "{}") for index in range(kind))
        if kind == 2 and key[0] == "handed":
            calls = (calls[0], ("p1", "transfer_to_other", "{}"))
        got = ModelAnswer("hi", calls, usage=Usage(7 + kind, 3))
        if kind == 3:
            got = ModelAnswer("h", error={"code": "model_unavailable", "message": "away"})

        async def answer() -> None:
            self.calls.discard(key)
            await self.db.do(model_calls.answer, *key, "m", got, incarnation=self.db.held(key[0], 0).incarnation)

        return answer

    def _agent(self, row: dict[str, Any]) -> list[Move]:
        """What the frame that holds the session may commit; see `understudy.actors.session`."""
        if not row["frame_id"] or row["wait"] in ("model", "timer"):
            return []
        inbox = sorted(rows(self.db, "inbox", row["session_id"]), key=lambda item: item["item"])
        inputs = [item["key"] for item in inbox if item["kind"] == "input"]
        run_id = row["run_id"]
        if run_id is None:
            start = inputs[0] if inputs else "gone"  # the input it began with may have been cancelled meanwhile
            begin = {"start_run": start, "entries": (Message("user", "go", run_id=start),)}
            return [
                self._commit(row, **begin, wait="model"), self._commit(row, **begin), self._commit(row, wait="idle"),
            ]  # fmt: skip
        found = rows(self.db, "tool_call", row["session_id"])
        calls = [call for call in found if (call["run_id"], call["round"]) == (run_id, row["round"])]
        calls = [call for call in calls if call["state"] != "done"]
        if row["cancel_reason"] is not None or row["wait_error"] not in (None, "null"):
            return [self._round_ended(row, calls, finish=Finish("failed", "so far"), wait="idle")] * 3
        unfinished = [call for call in calls if call["state"] != "finished"]
        if not unfinished:
            ended = [call for call in calls if "aborted" not in str(call["result"])]
            away = [call["call_id"] for call in ended if call["tool"] == "transfer_to_other"]
            if away and row["agent"] == "handed":
                return [self._round_ended(row, calls, handoff=Handoff(away[0]))]
            ask = self._round_ended(row, calls, wait="model")
            ends = [Finish("completed", "done"), Finish("failed", "no", error={"code": "failed", "message": "no"})]
            return [ask, ask, *(self._round_ended(row, calls, finish=finish, wait="idle") for finish in ends)]
        return self._tools(row, unfinished, [item for item in inbox if item["kind"] != "input"])

    def _tools(self, row: dict[str, Any], calls: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[Move]:
        found: list[Move] = []
        by_id = {call["call_id"]: call for call in calls}
        for call in calls:
            if call["tool"] == "t" and call["state"] == "requested":
                for asked in ({"seconds": 60}, {"prompt": "x", "seconds": 60, "every": None, "name": "mine"}):
                    kind = "schedule_wakeup" if "name" in asked else "wait"
                    found.append(self._commit(row, asks=(Ask(call["call_id"], kind, "", arguments=asked),)))
            if call["tool"] == "t" and call["state"] not in ("asked", "waiting"):
                started = CallState(call["call_id"], "started")
                event = ToolStarted(call_id=call["call_id"], tool="t")
                found.append(self._commit(row, entries=(event,), calls=(started,)))
                found.append(self._commit(row, **self._result(call)))
                kind = "in_doubt" if call["state"] == "started" else "question"
                found.append(self._commit(row, asks=(Ask(call["call_id"], kind, "Well?"),)))
            elif call["tool"] == "spawn_agent" and call["state"] == "requested" and row["depth"] < 2:
                child = child_identifier(row["session_id"], call["call_id"])
                spawn = Spawn(call["call_id"], child, child_spec(child), "your task")
                state = CallState(call["call_id"], "started", child_id=child, executions=1)
                found.append(self._commit(row, spawns=(spawn,), calls=(state,)))
            elif call["state"] == "requested":
                found.append(self._commit(row, **self._result(call)))
        for item in results:
            found.append(self._commit(row, **self._result(by_id[item["key"]]), inbox_done=(item["item"],)))
        waiting = [call for call in calls if not call["child_id"]]
        if all(call["state"] in ("asked", "waiting") for call in waiting):
            wait = "input" if any(call["state"] == "asked" for call in waiting) else "timer" if waiting else "child"
            found.append(self._commit(row, wait=wait))
        return found

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        event = ToolFinished(call_id=call["call_id"], tool=call["tool"])
        state = CallState(call["call_id"], "finished", executions=1, result={"content": "x"})
        return {"entries": (event,), "calls": (state,)}

    def _round_ended(self, row: dict[str, Any], calls: list[dict[str, Any]], **fields: Any) -> Move:
        """The batch that gives every call of the round its result."""
        entries: list[Any] = []
        for call in calls:
            if call["state"] != "finished":
                entries.append(ToolFinished(call_id=call["call_id"], tool=call["tool"], outcome="cancelled"))
            result = Message("tool", "x", tool_call_id=call["call_id"], run_id=row["run_id"], round=row["round"])
            entries.append(result)
        done = tuple(CallState(call["call_id"], "done", executions=1) for call in calls)
        return self._commit(row, entries=tuple(entries), calls=done, **fields)

    def _commit(self, row: dict[str, Any], **fields: Any) -> Move:
        key = (*_activation(row), row["batch_no"] + 1)
        if fields.get("wait") == "model":
            fields.update(request_round=row["round"] + 1, request_model="m", request_tokens=40)
        batch = Batch(*key, **fields)

        async def commit() -> None:
            result = await self.db.do(batches.commit, batch, row["frame_id"], holder="h")
            if result.wait == "model" and not result.ack.replayed:
                run_id = batch.start_run or row["run_id"]
                self.calls.add((batch.session_id, run_id, batch.request_round, 1))

        return commit


def child_spec(child_id: str) -> dict[str, Any]:
    """One of all kinds of sub-agents and of supervisors, by the id."""
    number = crc32(child_id.encode())

    def one_of(*values: Any) -> Any:
        nonlocal number
        number, index = divmod(number, len(values))
        return values[index]

    rules = Supervision(
        strategy=one_of("one_for_one", "one_for_all", "rest_for_one"), exceeded=one_of("escalate", "report"),
        max_restarts=one_of(0, 1, 3), backoff=one_of(0, 60),
    )  # fmt: skip
    return spec(
        "child", supervision=rules.model_dump(),
        restart_type=one_of("temporary", "transient", "permanent", "transient"),
        on_parent_end=one_of("cancel", "cancel", "abandon", "wait"), shutdown=one_of(None, 0, 10),
        lifecycle=one_of("ephemeral", "linked", "detached"),
    )  # fmt: skip


@pytest.mark.thorough
@given(st.lists(st.integers(0, 10_000), max_size=60))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_books_balance_after_every_commit(store: str, choices: list[int]) -> None:
    """Whatever clients, frames, models and deaths do, alone or in one transaction, no rule is ever broken."""
    asyncio.run(play(store, choices))


async def play(dsn: str, choices: list[int]) -> None:
    async with opened(dsn, namespace=f"n{uuid.uuid4().hex}") as db:
        played = Play(db)
        await played.begin()
        for choice in choices:
            together = 1 + (choice % 7 == 0) + (choice % 49 == 0)
            chosen = []
            for number in range(together):
                moves = played.moves(disturb=(choice // 7 + number) % 5 == 0)
                chosen.append(moves[(choice // 35 + 13 * number) % len(moves)])
            for result in await asyncio.gather(*(move() for move in chosen), return_exceptions=True):
                assert not isinstance(result, BaseException) or isinstance(result, UnderstudyError), result
            assert not violations(db), "\n".join(map(str, violations(db)))


# What breaks each rule.


def handing_off() -> dict[str, Any]:
    """An agent that may hand off to another one."""
    return spec("handed", tools=[handoff_spec("other")], handoffs={"other": spec("other", tools=[])})


async def scene(db: Store) -> None:
    """Sessions in every condition: `old` is through with a run, `lead` waits for `kid`, which waits for its model,
    `boss` has the result of `aide` in its inbox, `queued` has only an input, `crashed` waits for its timer, `asking`
    waits for a person, `replied` has a person's answer in its inbox, `resting` waits for a time, `rested` has waited,
    `handed` is under another agent, and `sleeper` will be woken."""
    await db.asking("old")
    await db.do(notes.put, "old", "plan", "go on", pinned=False)
    await db.activate("old")
    await db.answer("old", tool_calls=(("p", "t", "{}"),))
    finished = ToolFinished(call_id="r/1/0", tool="t")
    await db.ask(
        "old", epoch=2, round_number=2, calls=(CallState("r/1/0", "done", executions=1),),
        entries=(finished, Message("tool", "x", tool_call_id="r/1/0", run_id="r", round=1)),
    )  # fmt: skip
    await db.answer("old", round_number=2, content="done")
    await db.commit("old", 2, 2, finish=Finish("completed", "done"), wait="idle")
    for parent, child in (("lead", "kid"), ("boss", "aide")):
        await db.asking(parent, spec(parent, budget={"tokens": 100}), tokens=50)
        await db.answer(parent, tool_calls=(("p", "spawn_agent", "{}"),))
        call = CallState("r/1/0", "started", child_id=child, executions=1)
        await db.commit(parent, 1, 2, spawns=(Spawn("r/1/0", child, spec(child), "x"),), calls=(call,), wait="child")
        await db.activate(child)
    model = {"wait": "model", "request_round": 1, "request_model": "m", "request_tokens": 40}
    await db.commit("kid", 1, 1, start_run="task", entries=(Message("user", "x", run_id="task"),), **model)
    await db.commit("aide", 1, 1, start_run="task")
    await db.commit("aide", 1, 2, finish=Finish("completed", "hi"), wait="idle")
    for session_id in ("queued", "crashed"):
        await db.create(session_id)
        await db.accept(session_id)
    await db.activate("crashed")
    verdict = Verdict("resume", delay=MINUTE)
    await db.do(activation.crash, db.held("crashed", 1), lambda _: verdict, cause="died", pid=1, policy={})
    for session_id in ("asking", "replied"):
        await db.asking(session_id)
        await db.answer(session_id, tool_calls=(("p", "t", "{}"),))
        await db.commit(session_id, 1, 2, asks=(Ask("r/1/0", "question", "Well?"),), wait="input")
    await db.do(questions.answer, "replied", "r/1/0", "ok", "yes", asked=1)
    for session_id in ("resting", "rested"):
        await db.asking(session_id)
        await db.answer(session_id, tool_calls=(("p", "wait", "{}"),))
        await db.commit(session_id, 1, 2, asks=(Ask("r/1/0", "wait", "", arguments={"seconds": 60}),), wait="timer")
    due = next(row["due_at"] for row in rows(db, "timer", "rested"))
    await db.do(timers.fire, "rested", "call:r/1/0", due)
    await db.asking("handed", handing_off())
    await db.activate("handed")
    await db.answer("handed", tool_calls=(("p", "transfer_to_other", "{}"),))
    finished = ToolFinished(call_id="r/1/0", tool="transfer_to_other")
    await db.commit(
        "handed", 2, 1, calls=(CallState("r/1/0", "done", executions=1),), handoff=Handoff("r/1/0"),
        entries=(finished, Message("tool", "x", tool_call_id="r/1/0", run_id="r", round=1)),
    )  # fmt: skip
    await db.create("sleeper")
    await db.do(wakeups.schedule, "sleeper", "w", "x", 60, None)
    await newer_scene(db)


async def newer_scene(db: Store) -> None:
    """`approving` waits for an approval that will be given by itself, and has a message that steers it; `approved` may
    execute its call, with other arguments; `trusting` remembers an approval; `merging` is at a run with two inputs and
    `merged` through with one; `caller` learns of the end of `helper`, which it did not wait for; `folded` was, twice;
    `forked` is a fork of `old`. The schedule `hourly` was due once while it was paused; `once` was due, too. `hourly`
    has failed; the loop `nightly` has a run. Of the queue `narrow` the run of `first` has the slot, and `second` waits
    with two."""
    for session_id, timeout in (("approving", MINUTE), ("approved", 0), ("trusting", 0)):
        await db.asking(session_id)
        await db.answer(session_id, tool_calls=(("p", "t", "{}"),))
        default = {"decision": "approve", "text": ""} if timeout else None
        asked = Ask("r/1/0", "approval", "May it?", timeout=timeout, default=default)
        await db.commit(session_id, 1, 2, asks=(asked,), wait="input")
    await db.do(steering.steer, "approving", Steer("in French"), "q")
    await db.do(questions.decide, "approved", [Decision("r/1/0", 1, "approve", '{"a":1}')])
    await db.do(questions.decide, "trusting", [Decision("r/1/0", 1, "approve", remember="tool")])
    for session_id in ("merging", "merged"):
        await db.create(session_id)
        for run_id in ("r", "f"):
            await db.accept(session_id, run_id)
        await db.activate(session_id)
        entries = tuple(Message("user", "x", run_id="r") for _ in range(2))
        await db.ask(session_id, entries=entries, merge_runs=("f",))
    await db.answer("merged", content="done")
    await db.commit("merged", 1, 2, finish=Finish("completed", "done"), wait="idle")
    await db.asking("caller")
    await db.answer("caller", tool_calls=(("p", "start_agent", "{}"),))
    call = CallState("r/1/0", "waiting", child_id="helper", executions=1)
    started = Spawn("r/1/0", "helper", spec("helper"), "x", background=True)
    await db.commit("caller", 1, 2, spawns=(started,), calls=(call,))
    await db.activate("helper")
    await db.commit("helper", 1, 1, start_run="task")
    await db.commit("helper", 1, 2, finish=Finish("completed", "hi"), wait="idle")
    await db.asking("folded")
    await db.answer("folded", tool_calls=(("p", "t", "{}"),))
    done = (ToolFinished(call_id="r/1/0", tool="t"), Message("tool", "x", tool_call_id="r/1/0", run_id="r", round=1))
    folds = [Message("user", "so far", run_id="r", origin="fold", visibility="never", extra={"through": n, "elided": n})
             for n in (2, 3)]  # fmt: skip
    state = (CallState("r/1/0", "done", executions=1),)
    await db.ask("folded", number=2, round_number=2, calls=state, entries=(*done, *folds))
    last = next(row["seq"] for row in reversed(rows(db, "message", "old")))
    await db.do(forks.fork, "old", Fork("forked", last), "n")
    for name, timing in (("hourly", Timing(every=3600)), ("once", Timing(at=LATEST_TIME))):
        await db.do(schedules.put, NewSchedule(name=name, content="x", timing=timing, session_id="sleeper"))
        await db.do(schedules.pause, name, True)
        due = next(row["due_at"] for row in schedule_rows(db) if row["name"] == name)
        await db.do(schedules.fire, name, due, None)
    await db.do(queues.put, NewQueue(name="narrow", concurrency=1))
    for session_id, run_id in (("first", "r"), ("second", "r"), ("second", "r2")):
        if run_id == "r":
            await db.create(session_id)
        await db.do(beginnings.accept, session_id, run_id, "go", place=QueuePlace("narrow"))
    await db.do(triage.add, "hourly", "session_closed", "the session is closed")
    await db.journal.submit(lambda tx: loops.run_begun(tx, loops.memory(tx, "nightly"), "schedule.nightly.1"))


TRIAGE_ENTRY = f"triage {entry_identifier('hourly', 'session_closed', 'the session is closed')}"


def schedule_rows(db: Store) -> list[dict[str, Any]]:
    with db.database.snapshot() as connection:
        return [dict(row) for row in connection.execute(text("SELECT * FROM schedule")).mappings()]


def edit(
    table: Any, kind: str, change: Callable[[dict[str, Any]], Any], session_id: str = "old"
) -> Callable[[Any], None]:
    """Change the body of the last message or event of a kind in a session."""

    def corrupt(connection: Any) -> None:
        column = table.c.role if table is MESSAGE else table.c.type
        chosen = (table.c.session_id == session_id, column == kind)
        found = connection.execute(select(table.c.seq, table.c.body).where(*chosen).order_by(table.c.seq.desc()))
        seq, body = found.first()
        change(body)
        connection.execute(update(table).where(*chosen, table.c.seq == seq).values(body=body))

    return corrupt


def row(session_id: str, **values: Any) -> str:
    """SQL that changes a session's row."""
    changes = ", ".join(f"{name} = {value}" for name, value in values.items())
    return f"UPDATE session SET {changes} WHERE session_id = '{session_id}'"


def account(session_id: str, **values: Any) -> str:
    """SQL that changes a session's account."""
    changes = ", ".join(f"{name} = {value}" for name, value in values.items())
    return f"UPDATE account SET {changes} WHERE session_id = '{session_id}'"


def call(session_id: str, state: str) -> str:
    """SQL that changes the state of a session's call."""
    return f"UPDATE tool_call SET state = '{state}' WHERE session_id = '{session_id}'"


def part(session_id: str, **values: Any) -> str:
    """SQL that changes the run that is a part of another."""
    changes = ", ".join(f"{name} = {value}" for name, value in values.items())
    return f"UPDATE run SET {changes} WHERE session_id = '{session_id}' AND run_id = 'f'"


def answer(session_id: str, **said: str) -> Callable[[Any], None]:
    """Change what a person said of a session's call."""

    def corrupt(connection: Any) -> None:
        connection.execute(update(QUESTION).where(QUESTION.c.session_id == session_id).values(answer=said))

    return corrupt


def remembered(**said: str) -> Callable[[Any], None]:
    """Change what `trusting` remembers."""
    return edit(MESSAGE, "system", lambda body: body["extra"].update(**said), "trusting")


def crowd(connection: Any) -> None:
    """Give `old` more notes than it may have, each with a version of its own."""
    connection.execute(text("UPDATE note SET version = 99 WHERE key = '' AND owner = 'old'"))
    for number in range(64):
        more = NOTE.format("old", number, "'x'").replace(", 1, 0, 1, 1,", f", {number + 2}, 0, 1, 1,")
        connection.execute(text(more))


def retype(session_id: str, old: str, new: str) -> str:
    """SQL that makes events others."""
    return f"UPDATE event SET type = '{new}' WHERE session_id = '{session_id}' AND type = '{old}'"


ACCOUNT = "namespace, session_id, scope, resource, allowed, reserved, spent, beyond, since"
GHOST = "INSERT INTO timer (namespace, session_id, name, due_at) VALUES ('tests', 'ghost', 'resume', 1)"
MOVE = "UPDATE timer SET session_id = '{}' WHERE session_id = '{}'"
STRAY = (
    "INSERT INTO inbox (namespace, session_id, item, kind, key, created_at) "
    "VALUES ('tests', '{}', {}, '{}', 'stray', 1)"
)

COMMAND = (
    "INSERT INTO command (namespace, session_id, job, key, call_id, run_id, node_id, name, command, state, quiet, "
    "stop_at, problem, tail, started_at, ended_at) "
    "VALUES ('tests', 'old', '{}', 'k', 'r/1/0', 'r', 'n', '', 'x', '{}', 0, 0, '', '', 1, {})"
).format
# The rules that bite, the session that they name, and how its rows are made wrong.
NOTE = (
    "INSERT INTO note (namespace, scope, owner, key, text, version, pinned, created_at, updated_at, written_by) "
    "VALUES ('tests', 'session', '{}', '{}', {}, 1, 0, 1, 1, '')"
)

CORRUPTIONS: list[tuple[str, str, str | Callable[[Any], None]]] = [
    ("own_session", "ghost", GHOST),
    ("run_events", "queued", retype("queued", "run_accepted", "tool_in_doubt")),
    ("run_events", "queued", retype("queued", "session_created", "run_accepted")),
    ("run_events", "queued", "UPDATE event SET run_id = 'x' WHERE session_id = 'queued' AND type = 'run_accepted'"),
    ("run_events", "crashed", retype("crashed", "session_crashed", "run_finished")),
    ("run_state", "old", "UPDATE run SET status = 'queued' WHERE session_id = 'old'"),
    ("run_state", "queued", "UPDATE run SET status = 'running' WHERE session_id = 'queued'"),
    ("run_state", "old", "UPDATE run SET status = 'strange' WHERE session_id = 'old'"),
    ("inbox run_state", "queued", "DELETE FROM inbox WHERE session_id = 'queued'"),
    ("current_run", "lead", row("lead", trace_id="'x'")),
    ("current_run", "lead", row("lead", cancel_reason="'x'")),
    ("current_run", "lead", row("lead", sampled=1)),
    ("current_run", "old", row("old", sampled=0)),
    ("current_run", "old", row("old", round=3)),
    ("current_run run_order status", "old", row("old", run_id="'x'")),
    ("inbox", "queued", row("queued", inbox_count=2)),
    ("inbox", "queued", row("queued", inbox_seq=0)),
    ("inbox status", "queued", row("queued", active=0)),
    ("inbox_items", "queued", STRAY.format("queued", 2, "input") + ";" + row("queued", inbox_count=2, inbox_seq=2)),
    ("inbox_items", "boss", STRAY.format("boss", 9, "child_result") + ";" + row("boss", inbox_count=2, inbox_seq=9)),
    ("inbox inbox_items", "old", STRAY.format("old", 1, "timer")),
    ("open_calls", "lead", row("lead", calls_open=5)),
    ("open_calls tool_calls", "old", "UPDATE tool_call SET state = 'finished' WHERE session_id = 'old'"),
    ("inbox_items questions", "replied", "UPDATE inbox SET kind = 'child_result' WHERE session_id = 'replied'"),
    ("questions", "asking", "UPDATE run SET status = 'running' WHERE session_id = 'asking'"),
    ("questions", "replied", "UPDATE run SET status = 'waiting_for_input' WHERE session_id = 'replied'"),
    ("questions", "replied", "DELETE FROM inbox WHERE session_id = 'replied';" + row("replied", inbox_count=0)),
    ("questions question_events", "asking", "UPDATE question SET answered_at = 1 WHERE session_id = 'asking'"),
    ("questions status", "asking", "UPDATE tool_call SET state = 'started' WHERE session_id = 'asking'"),
    ("approvals", "old", "UPDATE tool_call SET edited = '{}' WHERE session_id = 'old'"),
    ("approvals waits", "resting", "UPDATE timer SET name = 'question:r/1/0' WHERE session_id = 'resting'"),
    ("approvals", "approved", answer("approved", decision="reject", text="")),
    ("approvals", "approved", "UPDATE tool_call SET edited = '{}' WHERE session_id = 'approved'"),
    ("approvals", "approved", "UPDATE tool_call SET edited = NULL WHERE session_id = 'approved'"),
    ("approvals", "approved", "UPDATE question SET kind = 'question' WHERE session_id = 'approved'"),
    ("questions status waits", "approving", call("approving", "waiting")),
    ("approvals questions status", "approving", call("approving", "approved")),
    ("due", "approving", "DELETE FROM timer WHERE session_id = 'approving'"),
    ("remembered", "trusting", remembered(decision="reject")),
    ("remembered", "trusting", remembered(arguments="{}")),
    ("remembered", "trusting", answer("trusting", decision="approve", text="")),
    ("merged", "merging", row("merging", merged="NULL")),
    ("merged run_state", "merging", part("merging", merged_into="''")),
    ("merged run_events", "merging", part("merging", status="'completed'", finished_at=1)),
    ("merged", "merged", part("merged", text="'other'")),
    ("merged", "merged", part("merged", status="'failed'")),
    ("merged", "merged", part("merged", rounds=1)),
    ("merged", "merged", part("merged", merged_into="'gone'")),
    ("current_run", "old", row("old", merged="'[]'")),
    ("inbox_items", "queued", STRAY.format("queued", 2, "steer") + ";" + row("queued", inbox_count=2, inbox_seq=2)),
    ("child_events", "helper", retype("caller", "child_finished", "tool_in_doubt")),
    ("tree", "old", row("old", background=1)),
    ("folds", "folded", edit(MESSAGE, "user", lambda body: body["extra"].update(through=99), "folded")),
    ("folds", "folded", edit(MESSAGE, "user", lambda body: body["extra"].update(elided=1), "folded")),
    ("folds", "folded", edit(MESSAGE, "user", lambda body: body["extra"].pop("through"), "folded")),
    ("forks", "forked", "UPDATE message SET run_id = 'r' WHERE session_id = 'forked' AND role = 'user'"),
    ("forks", "forked", edit(EVENT, "session_created", lambda body: body.update(forked_at=2), "forked")),
    ("question_events", "asking", retype("asking", "input_requested", "tool_in_doubt")),
    ("question_events", "replied", retype("replied", "input_received", "tool_in_doubt")),
    ("question_events", "old", retype("old", "model_call_started", "input_received")),
    ("current_run", "old", row("old", aborted=1)),
    ("timer", "crashed", "DELETE FROM timer WHERE session_id = 'crashed'"),
    ("moved", "kid", row("kid", moved=1)),
    ("moved", "old", row("old", moved=1)),
    ("next_spec", "old", row("old", next_spec="'{}'")),
    ("next_spec", "kid", row("kid", next_spec="'{}'")),
    ("waits", "resting", "DELETE FROM timer WHERE session_id = 'resting'"),
    ("waits", "rested", "DELETE FROM inbox WHERE session_id = 'rested';" + row("rested", inbox_count=0)),
    ("waits", "rested", GHOST.replace("ghost", "rested").replace("resume", "call:r/1/0")),
    ("waits", "sleeper", "UPDATE timer SET name = 'call:r/1/0' WHERE session_id = 'sleeper'"),
    ("waits status", "resting", "UPDATE tool_call SET state = 'started' WHERE session_id = 'resting'"),
    ("status", "resting", row("resting", status="'waiting_for_input'")),
    ("notes", "old", "UPDATE note SET version = 9 WHERE key = 'plan'"),
    ("notes", "old", "UPDATE note SET version = 0 WHERE key = 'plan'"),
    ("notes", "old", "DELETE FROM note WHERE key = ''"),
    ("notes", "old", NOTE.format("old", "twin", "'x'")),
    ("notes", "old", f"UPDATE note SET text = '{'x' * 4001}' WHERE key = 'plan'"),
    ("notes", "ghost", "UPDATE note SET owner = 'ghost'"),
    ("notes", "old", crowd),
    ("command_events", "old", COMMAND("a", "ended", 2)),
    ("commands command_events", "old", COMMAND("a", "running", 2)),
    ("notes", "kid", "UPDATE note SET owner = 'kid', scope = 'tree'"),
    ("schedules", "schedule hourly", "UPDATE schedule SET skipped = 2 WHERE name = 'hourly'"),
    ("schedules", "schedule hourly", "UPDATE schedule SET missed = 1 WHERE name = 'hourly'"),
    ("schedules", "schedule hourly", "UPDATE schedule SET due_at = 0 WHERE name = 'hourly'"),
    ("schedules", "schedule hourly", "UPDATE schedule SET last_at = next_at WHERE name = 'hourly'"),
    ("schedules", "schedule once", "UPDATE schedule SET skipped = 0 WHERE name = 'once'"),
    ("slots queued", "first", "UPDATE run SET slot = 0 WHERE session_id = 'first'"),
    ("slots", "second", "UPDATE run SET slot = 3 - slot WHERE session_id = 'second'"),
    ("queued", "second", row("second", queued=1)),
    ("slots queued", "second", row("second", queue="'narrow'")),
    ("triage", TRIAGE_ENTRY, "UPDATE triage SET count = 0"),
    ("triage", TRIAGE_ENTRY, "UPDATE triage SET reopened = 1"),
    ("triage", TRIAGE_ENTRY, "UPDATE triage SET resolved_by = 'ann'"),
    ("loops", "loop nightly", "UPDATE loop_memory SET attempted = 2"),
    ("loops", "loop nightly", "UPDATE loop_memory SET passed = 1, attempted = 2"),
    ("loops", "loop nightly", """UPDATE loop_memory SET attempted = 2, pending = '["a", "a"]'"""),
    ("wakeups", "sleeper", row("sleeper", closed=1, status="'completed'")),
    ("wakeups", "kid", "UPDATE session SET lifecycle = 'ephemeral';" + MOVE.format("kid", "sleeper")),
    ("status", "crashed", row("crashed", status="'idle'")),
    ("status", "lead", row("lead", active=0)),
    ("status", "lead", row("lead", wait="NULL")),
    ("status", "kid", row("kid", frame_id="NULL")),
    ("status", "old", row("old", closed=1)),
    ("tree", "kid", row("kid", depth=2)),
    ("tree", "aide", row("aide", root_id="'aide'")),
    ("tree", "old", row("old", call_id="'x'")),
    ("tree", "kid", "UPDATE tool_call SET child_id = NULL WHERE session_id = 'lead'"),
    ("children_open", "lead", row("lead", children_open=2)),
    (
        "linked",
        "aide",
        row("boss", closed=1) + ";" + row("aide", lifecycle="'linked'", closed=0, status="'idle'"),
    ),
    ("child_events", "kid", retype("lead", "child_spawned", "tool_in_doubt")),
    ("child_events", "aide", retype("boss", "child_finished", "tool_in_doubt")),
    ("child_events", "aide", "UPDATE run SET status = 'failed' WHERE session_id = 'aide'"),
    ("child_events", "old", retype("old", "model_call_started", "child_finished")),
    ("budget", "lead", account("lead", spent="spent + 1")),
    ("budget", "lead", account("lead", reserved=0)),
    ("budget_limit", "lead", account("lead", allowed=-1, beyond=500)),
    ("budget_limit", "lead", account("lead", allowed=50)),
    ("budget budget_limit", "boss", account("boss", resource="'rounds'", beyond=1)),
    ("budget budget_limit", "boss", account("boss", resource="'seconds'")),
    ("charged_accounts", "kid", row("kid", accounts="'lead:2'")),
    ("charged_accounts", "old", row("old", accounts="'old:0'")),
    (
        "charged_accounts",
        "old",
        f"INSERT INTO account ({ACCOUNT}) VALUES ('tests', 'old', 'run', 'rounds', 5, 0, 0, 0, 0)",
    ),
    ("reservation", "kid", "UPDATE reservation SET wait_key = 'kid/task/9'"),
    ("reservation", "kid", "DELETE FROM reservation;" + account("lead", reserved=0)),
    ("tokens", "old", row("old", cost_used=1)),
    ("sequence", "old", row("old", seq="seq + 1")),
    ("sequence", "old", row("old", seq="seq - 1")),
    ("sequence", "old", row("old", pruned_seq=99)),
    ("sequence", "old", "DELETE FROM event WHERE session_id = 'old' AND type = 'model_call_started'"),
    ("sequence", "old", "UPDATE event SET seq = 5 WHERE session_id = 'old' AND type = 'session_created'"),
    ("run_order", "old", "UPDATE message SET run_id = 'x' WHERE session_id = 'old' AND role = 'user'"),
    (
        "run_events run_order",
        "lead",
        "UPDATE event SET run_id = 'x' WHERE session_id = 'lead' AND type = 'run_started'",
    ),
    ("handoffs", "handed", row("handed", agent="'handed'")),
    ("handoffs", "handed", edit(EVENT, "agent_handed_off", lambda body: body.update(call_id="x"), "handed")),
    ("handoffs tool_results", "handed", retype("handed", "tool_finished", "tool_in_doubt")),
    ("tool_results", "old", retype("old", "tool_finished", "tool_in_doubt")),
    ("tool_results tool_calls", "old", edit(MESSAGE, "tool", lambda body: body.update(tool_call_id="x"))),
    ("tool_results", "old", edit(EVENT, "tool_finished", lambda body: body.update(call_id="x"))),
    ("tool_calls", "old", "UPDATE tool_call SET arguments = '[]' WHERE session_id = 'old'"),
    ("tool_calls", "old", "DELETE FROM tool_call WHERE session_id = 'old'"),
    ("tokens", "old", row("old", tokens_used="tokens_used + 1")),
    ("tokens", "old", row("old", tokens_redone=1)),
    (
        "tokens run_usage",
        "old",
        edit(EVENT, "model_call_completed", lambda body: body.update(usage=[1, 1])),
    ),
    ("answers", "old", "UPDATE message SET round = 1 WHERE session_id = 'old' AND role = 'assistant' AND round = 2"),
    ("answers", "old", edit(EVENT, "model_call_completed", lambda body: body.update(request_key="old/r/1/1"))),
    ("answers run_usage tokens", "old", retype("old", "model_call_completed", "tool_in_doubt")),
    ("run_usage", "old", "UPDATE run SET usage = '[1, 1, 0, 0, false]' WHERE session_id = 'old'"),
    ("run_usage", "lead", row("lead", run_usage="'[1, 1, 0, 0, false]'")),
    ("epochs", "old", row("old", epoch=1)),
    ("epochs", "old", edit(EVENT, "session_activated", lambda body: body["_"].__setitem__(1, 1))),
]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def staged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """The scene on each backend; tests break it in transactions that they give up."""

    async def build(dsn: str) -> None:
        async with opened(dsn) as db:
            await scene(db)

    with ExitStack() as stack:
        if request.param == "sqlite":
            dsn = f"sqlite:///{tmp_path_factory.mktemp('scene')}/store.db"
        else:
            dsn = stack.enter_context(database(request.getfixturevalue("postgres_server")))
        asyncio.run(build(dsn))
        found = Database(dsn)
        yield found
        found.close()


def after(staged: Database, *corruptions: str | Callable[[Any], None], **options: Any) -> list[Violation]:
    """What the check finds once the scene was broken in these ways."""
    with staged.writer.connect() as connection:
        for corruption in corruptions:
            if callable(corruption):
                corruption(connection)
            else:
                for statement in corruption.split(";"):
                    assert connection.execute(text(statement)).rowcount > 0, statement
        return check(connection, "tests", **options)


def test_the_scene_breaks_no_rule(staged: Database) -> None:
    """Sessions in every condition: the books balance."""
    assert after(staged) == []


@pytest.mark.parametrize(("rules", "session_id", "corruption"), CORRUPTIONS)
def test_each_rule_bites(
    staged: Database, rules: str, session_id: str, corruption: str | Callable[[Any], None]
) -> None:
    """Given rows that somebody made wrong, then the rules they break are named, with the session, and no others."""
    found = after(staged, corruption)
    assert ({violation.rule for violation in found}, {violation.session_id for violation in found}) == (
        set(rules.split()), {session_id},
    ), "\n".join(map(str, found))  # fmt: skip


def test_every_rule_says_what_it_demands_and_is_broken_here() -> None:
    """`RULES` is documentation, and there is no rule that never bites."""
    assert all(RULES.values())
    assert {rule for rules, _, _ in CORRUPTIONS for rule in rules.split()} == set(RULES)


def test_some_sessions_only(staged: Database) -> None:
    """Given two that are broken, when only some sessions are checked, then only those are reported."""
    broken = (row("old", tokens_used=1), row("queued", inbox_count=2), row("kid", depth=2))
    assert {violation.session_id for violation in after(staged, *broken)} == {"old", "queued", "kid"}
    assert {violation.session_id for violation in after(staged, *broken, session_ids=["old"])} == {"old"}
    assert {violation.session_id for violation in after(staged, *broken, session_ids=["kid", "aide"])} == {"kid"}
    assert after(staged, *broken, session_ids=["lead", "boss", "crashed"]) == []
    assert after(staged, *broken, session_ids=[]) == []


def test_what_a_rule_reports_is_about_its_own_select(staged: Database) -> None:
    """Given rows of a session that is gone, then what each SELECT of the same rule finds is reported with its table."""
    texts = [found.text for found in after(staged, "DELETE FROM session WHERE session_id = 'old'")]
    for table in ("message", "event", "run", "tool_call"):
        assert len([text for text in texts if f" rows of {table} belong to no session" in text]) == 1, texts


def test_another_check_prepares_nothing(staged: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a check of all and of some, when a store is opened again and checked, then no statement is made again."""
    made: list[Any] = []
    make = prepared.Query.__init__

    def counted(query: prepared.Query, statement: Any, dialect: Any) -> None:
        made.append(statement)
        make(query, statement, dialect)

    monkeypatch.setattr(prepared.Query, "__init__", counted)
    monkeypatch.setattr(prepared, "_STATEMENTS", {})
    numbers = []
    for _ in range(2):
        reopened = Database(staged.dsn)
        try:
            for chosen in (None, ["old", "kid"], ["lead"]):
                with reopened.snapshot() as connection:
                    assert check(connection, "tests", chosen) == []
        finally:
            reopened.close()
        numbers.append(len(made))
    assert numbers[0] == numbers[1] > 2 * len(RULES)


def test_pruned_events_are_not_missed(staged: Database) -> None:
    """Given events that retention removed, however many, then no rule is broken; a message among them is missed."""
    with staged.snapshot() as connection:
        seq = connection.execute(text("SELECT seq FROM session WHERE session_id = 'old'")).scalar()
    for last in range(1, (seq or 0) + 1):
        gone = f"DELETE FROM event WHERE session_id = 'old' AND seq <= {last}"
        assert after(staged, gone, row("old", pruned_seq=last)) == [], last
    result = "DELETE FROM message WHERE session_id = 'old' AND role = 'tool'"
    rules = {violation.rule for violation in after(staged, gone, row("old", pruned_seq=seq), result)}
    assert rules == {"tool_results", "tool_calls"}


def test_another_namespace_is_not_looked_at(staged: Database) -> None:
    """Only the one that was asked for."""
    with staged.writer.connect() as connection:
        connection.execute(text("UPDATE session SET namespace = 'other', seq = 99 WHERE session_id = 'old'"))
        for table in ("message", "event", "run", "tool_call"):
            connection.execute(text(f"UPDATE {table} SET namespace = 'other' WHERE session_id = 'old'"))
        connection.execute(text("UPDATE note SET namespace = 'other'"))
        connection.execute(text("UPDATE schedule SET namespace = 'other'"))
        assert check(connection, "tests") == []
        assert {violation.rule for violation in check(connection, "other")} == {"sequence"}


async def test_any_text_can_be_checked(store: str) -> None:
    """Given NUL and strange characters wherever others' texts are kept, then the check reads them."""
    strange = "a\0b \\u0000 \ud800"
    async with opened(store) as db:
        await db.asking()
        await db.answer("s", content=strange, tool_calls=(("p\0", "t", strange),))
        event = ToolFinished(call_id="r/1/0", tool="t", error_message="a\0b")
        result = Message("tool", "a\0b", tool_call_id="r/1/0", run_id="r", round=1)
        done = (CallState("r/1/0", "done"),)
        await db.commit("s", 1, 2, entries=(event, result), calls=done, finish=Finish("completed"), wait="idle")
        await db.accept("s", "next", "a\0b")
        await db.do(endings.close, "s", "a\0b")
        assert violations(db) == []


@pytest.mark.parametrize("answered", [False, True])
async def test_a_run_that_is_given_up_while_it_asks(store: str, answered: bool) -> None:
    """Its question stays as it is, with or without an answer that nobody has read; the session may go on."""
    async with opened(store) as db:
        await db.asking("s")
        await db.answer("s", tool_calls=(("p", "t", "{}"), ("q", "t", "{}")))
        await db.commit("s", 1, 2, asks=(Ask("r/1/0", "question", "Well?"),))
        if answered:
            await db.do(questions.answer, "s", "r/1/0", "ok", "yes", asked=1)
        assert not violations(db)
        hopeless = Verdict("quarantine", reason="hopeless")
        await db.do(activation.crash, db.held("s", 1), lambda _: hopeless, cause="died", pid=1, policy={})
        assert not violations(db)
        await db.do(activation.resume, "s")
        await db.accept("s", "r2")
        assert not violations(db)


async def test_what_is_broken_everywhere_is_reported_a_hundred_times(store: str) -> None:
    """The number of sessions does not matter, nor that they are read in pages; of one rule only so much is reported."""
    async with opened(store) as db:
        options = {"spec_hash": "h", "placement": "", "node_id": "n", "metadata": {}}

        def create(tx: Any) -> None:
            for number in range(450):
                beginnings.create_session(tx, f"s{number}", spec(), **options)

        await db.journal.submit(create)
        assert violations(db) == []
        with db.database.writer.begin() as connection:
            connection.execute(text("UPDATE session SET seq = 2"))
        found = violations(db)
        assert {violation.rule for violation in found} == {"sequence"}
        assert len(found) == MOST_OF_ONE_RULE
        assert {v.session_id for v in violations(db, "s7", "s449")} == {"s7", "s449"}


async def test_the_check_sees_one_snapshot(store: str) -> None:
    """Given a commit in the middle of a check, then the check does not see a part of it."""
    async with opened(store) as db:
        await db.create("s")
        with db.database.snapshot() as connection:
            assert check(connection, "tests") == []
            await db.accept("s")
            seen = connection.execute(text("SELECT seq, inbox_count FROM session")).one()
        assert tuple(seen) == (1, 0)


def test_every_rule_is_documented() -> None:
    """`docs/store.md` has each rule with its own words, and no other."""
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    rows = [
        line for line in page.partition("## The proof")[2].partition("## ")[0].splitlines() if line.startswith("| `")
    ]
    assert rows == [f"| `{name}` | {' '.join(text.split())} |" for name, text in RULES.items()]
