"""Calls that are repeated while a service gives no answer: what was asked is done once, nothing piles up. No Ray."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.tools import tool
from understudy.errors import ServiceGone, StaleGeneration, StoreUnreachable
from understudy.node.calls import Call
from understudy.transport import remote_node
from understudy.transport.remote_node import RemoteNode
from understudy.transport.repeating import Answering, Joining, Patience, Repeating

from ..postgres import PostgresServer
from . import kernel as k

PATIENCE = 60.0
REPETITIONS = 20


class Gate:
    """Holds a tool until its store is gone."""

    begun, opened = asyncio.Event(), asyncio.Event()


@tool(on_crash="rerun")
async def held() -> str:
    """Go on once the gate is open."""
    Gate.begun.set()
    await Gate.opened.wait()
    return "held"


class Handle:
    """A kernel's node service, as its callers reach it; counts what it is asked and has not answered."""

    def __init__(self, kernel: k.Kernel) -> None:
        self.kernel = kernel
        self.asked = 0
        self.pending: set[asyncio.Task[Any]] = set()
        self.changed = asyncio.Event()
        self.answering = Answering()

    def __call__(self, call_id: str, method: str, *arguments: Any) -> asyncio.Future[Any]:
        self.asked += 1
        self.changed.set()
        task = asyncio.get_running_loop().create_task(self._answer(call_id, method, *arguments))
        self.pending.add(task)
        task.add_done_callback(self._done)
        return asyncio.shield(task)  # who gives an attempt up does not end it

    async def _answer(self, call_id: str, method: str, *arguments: Any) -> Any:
        return await self.answering.answer(call_id, lambda: self.kernel.node.repeated("", method, *arguments))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.pending.discard(task)
        if not task.cancelled():
            task.exception()  # nobody waits for an attempt that was given up

    async def until_asked(self, times: int) -> None:
        """Wait until so many more attempts were made."""
        until = self.asked + times
        async with asyncio.timeout(PATIENCE):
            while self.asked < until:
                self.changed.clear()
                await self.changed.wait()


def queued(kernel: k.Kernel) -> int:
    """What the journal holds."""
    journal = kernel.service.journal
    return journal._submitted.qsize() + sum(len(group) for group in journal._groups)


@pytest.fixture
def mortal_server() -> Iterator[PostgresServer]:
    """A server that may be killed."""
    with PostgresServer() as made:
        yield made


@pytest.mark.thorough
async def test_repetitions_do_not_pile_up(
    mortal_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a store that is gone, when a frame and a client repeat their calls again and again, then the service has
    each call once with one operation, and after the outage each was done once and no call is left."""
    monkeypatch.setattr(remote_node, "FRAME_PATIENCE", Patience(attempt=0.1))
    Gate.begun, Gate.opened = asyncio.Event(), asyncio.Event()
    async with k.running(mortal_server.database(), tmp_path, frames=0) as kernel:
        handle = Handle(kernel)
        kernel.add_frame().frame.node = RemoteNode(handle)
        await kernel.spawn("s", k.spec(k.script([("held", {})], "done"), [held]))
        await kernel.send("s")
        await asyncio.wait_for(Gate.begun.wait(), PATIENCE)
        mortal_server.kill()
        send = ("request", "send", "s", {"run_id": "r2", "content": "again"}, "a client's")
        client = Repeating(Patience(attempt=0.1))
        sending = asyncio.create_task(client.call(lambda call_id: handle(call_id, *send)))
        Gate.opened.set()
        await handle.until_asked(2 * REPETITIONS)
        found = len(handle.answering), len(handle.pending), queued(kernel)
        mortal_server.start()
        assert found[0] <= 3  # the frame's step and its question whether its run shall end, the client's input
        assert found[1] <= 6  # the last attempt of each, and one that it has just replaced
        assert found[2] <= 8  # with those of the service itself: its sweep, its timers
        await asyncio.wait_for(sending, PATIENCE)
        for run_id in ("r", "r2"):
            assert (await kernel.end("s", run_id))["status"] == "completed"
        assert len(handle.answering) <= 1  # the frame rests
        assert len(handle.pending) <= 2


class Service:
    """A service that answers once `done` is set, and counts how often it has begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.done = asyncio.Event()
        self.answering = Answering()

    async def work(self) -> str:
        self.begun += 1
        await self.done.wait()
        return "answer"

    def ask(self, call_id: str) -> Awaitable[str]:
        return self.answering.answer(call_id, self.work)


async def test_a_repetition_ends_the_attempt_before() -> None:
    """Given a call that is under way, when it is repeated, then it is not begun again, its first attempt ends, and the
    second one has the answer."""
    service = Service()
    first = asyncio.create_task(service.ask("call"))
    await asyncio.sleep(0)
    second = asyncio.create_task(service.ask("call"))
    with pytest.raises(ServiceGone):
        await asyncio.wait_for(first, PATIENCE)
    other = asyncio.create_task(service.ask("another"))
    service.done.set()
    assert await asyncio.wait_for(asyncio.gather(second, other), PATIENCE) == ["answer", "answer"]
    assert service.begun == 2
    assert len(service.answering) == 0


async def test_a_call_goes_on_without_its_caller() -> None:
    """Given a call that its caller gave up, when the same is asked again, then it is the same call."""
    service = Service()
    with pytest.raises(ServiceGone):
        await Repeating(Patience(attempt=0.01, whole=0.05)).call(service.ask, call_id="renew")
    service.done.set()
    assert await Repeating(Patience(attempt=PATIENCE)).call(service.ask, call_id="renew") == "answer"
    assert service.begun == 1


def failing(*errors: Exception) -> tuple[Callable[[str], Awaitable[str]], list[str]]:
    """Attempts that fail with these errors and then succeed, and the ids they are made under."""
    left, ids = list(errors), list[str]()

    async def attempt(call_id: str) -> str:
        ids.append(call_id)
        if left:
            raise left.pop(0)
        return "answer"

    return attempt, ids


async def test_attempts_of_a_call_share_an_id() -> None:
    """Given a service that is gone, then gives no answer, then has no store, the call is repeated under one id; the
    next call has another."""
    attempt, ids = failing(ServiceGone("killed"), TimeoutError(), StoreUnreachable("away"))
    repeating = Repeating(Patience(attempt=PATIENCE, store=True))
    assert await repeating.call(attempt) == "answer"
    assert len(ids) == 4
    assert await repeating.call(attempt) == "answer"
    assert len(set(ids)) == 2


async def test_a_service_that_is_gone_is_given_up() -> None:
    """Given a service that stays gone, then the call fails; without a store it fails at once, unless that is to be
    waited for."""

    async def gone(_call_id: str) -> str:
        raise ServiceGone("killed")

    with pytest.raises(ServiceGone):
        await asyncio.wait_for(Repeating(Patience(attempt=PATIENCE, gone=0.03)).call(gone), PATIENCE)
    attempt, _ = failing(StoreUnreachable("away"))
    with pytest.raises(StoreUnreachable):
        await Repeating(Patience(attempt=PATIENCE)).call(attempt)


async def test_a_model_call_that_is_started_twice_is_made_once(store: str, tmp_path: Path) -> None:
    """Given a model call in flight, when the same is started again, then the endpoint is asked once, and one answer is
    committed."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        kernel.server.hold()
        await kernel.spawn("s", k.spec())
        await kernel.send("s")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        calls = kernel.service.calls
        call = calls.of_session("s")
        assert call is not None
        calls.start(Call(call.origin, call.request))
        assert calls.of_session("s") is call
        assert len(calls) == 1
        kernel.server.release()
        assert (await kernel.end("s"))["status"] == "completed"
        await kernel.service.calls.close()
        assert kernel.server.count == 1
        assert (await kernel.types("s")).count("model_call_completed") == 1


async def test_equal_calls_of_one_caller_are_one_call() -> None:
    """Given two who ask for the same thing at the same time, then one call is made, both have its result, and neither
    ends the other's; what is asked after that is another call."""
    begun: list[str] = []
    arrived, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def attempt(call_id: str) -> int:
        begun.append(call_id)
        arrived.release()
        await go_on.wait()
        return len(begun)

    calls = Joining(Patience(attempt=None))
    both = [asyncio.create_task(calls.call(attempt, "take_over", (1, ["f"]))) for _ in range(2)]
    other = asyncio.create_task(calls.call(attempt, "take_over", (2, ["f"])))
    for _ in range(2):
        await arrived.acquire()
    go_on.set()
    assert await asyncio.gather(*both, other) == [2, 2, 2]
    assert await calls.call(attempt, "take_over", (1, ["f"])) == 3
    assert begun[0] == begun[2] != begun[1]


async def test_a_call_that_nobody_waits_for_any_more_ends() -> None:
    """Given a call that two wait for, when one gives up, then it goes on for the other; when both have, it ends."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def attempt(_call_id: str) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    calls = Joining(Patience(attempt=None))
    first, second = (asyncio.create_task(calls.call(attempt, "demand", ())) for _ in range(2))
    await began.wait()
    first.cancel()
    await asyncio.wait({first})
    assert not ended.is_set()
    second.cancel()
    await asyncio.wait_for(ended.wait(), 10)


async def test_callers_do_not_share_calls() -> None:
    """Another process's equal call has another id: at the service each would end the other's."""
    ids: list[str] = []

    async def attempt(call_id: str) -> None:
        ids.append(call_id)

    for _ in range(2):
        await Joining(Patience(attempt=None)).call(attempt, "take_over", (1,))
    assert ids[0] != ids[1]


async def test_a_call_that_fails_when_its_caller_is_gone() -> None:
    """Given a call that fails while it is ended for its caller, then asyncio reports no error that nobody has seen."""
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: seen.append(context))
    began = asyncio.Event()

    async def attempt(_call_id: str) -> None:
        began.set()
        try:
            await k.never()
        except asyncio.CancelledError:
            raise StaleGeneration("another supervisor owns the store") from None

    caller = asyncio.create_task(Joining(Patience(attempt=None)).call(attempt, "demand", ()))
    await began.wait()
    caller.cancel()
    await asyncio.wait({caller})
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    del others, caller
    gc.collect()
    assert seen == []
