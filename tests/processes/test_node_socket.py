"""Frames on the socket of a real node service: what they may call, and what becomes of their sessions when they end."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from msgspec import structs

from understudy.errors import Fenced, InvalidInput, ServiceGone
from understudy.node.calls import Call
from understudy.node.node_service import NodeService
from understudy.node.node_socket import CLIENT, FRAME, NodeSocket
from understudy.placement import DEFAULT
from understudy.protocol import Exit, FrameIdentity, StepCall, packed
from understudy.records import ActivationId, Batch, ModelRequest
from understudy.supervisor.capacity import Memory
from understudy.transport.channel import Channel
from understudy.transport.ends import has_ended
from understudy.transport.repeating import Answering
from understudy.transport.signatures import signature_of

from ..kernel import kernel as k

PATIENCE = 30.0

CALL_IN = """
import asyncio, json, os, sys
from understudy.transport.channel import Channel, Ticket

async def call_in():
    ticket = Ticket(*sys.argv[1:])
    channel = await Channel.connect(ticket)
    frame = {"frame_id": ticket.peer.partition("/")[2], "pid": os.getpid(), "node_id": "node", "placement": ""}
    print(json.dumps(await channel.call("1", "step", {"frame": frame, "number": 1})), flush=True)
    await asyncio.Event().wait()

asyncio.run(call_in())
"""


class Stage:
    """A kernel without frames of its own, its socket, and frames in processes of their own."""

    def __init__(self, kernel: k.Kernel) -> None:
        self.kernel = kernel
        self.processes: list[asyncio.subprocess.Process] = []
        answering = Answering()

        async def node() -> NodeService:
            return kernel.service

        async def answer(call_id: str, method: str, *arguments: Any) -> Any:
            signature = signature_of(getattr(NodeService, method))
            given = signature.arguments(arguments)
            return signature.sent(await answering.answer(call_id, lambda: getattr(kernel.service, method)(*given)))

        self.socket = NodeSocket("node" * 8, node, answer)

    async def frame(self, frame_id: str) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        """A process that calls in once, and its work."""
        ticket = await self.socket.admit(FRAME, frame_id)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", CALL_IN, *ticket, stdout=PIPE)
        self.processes.append(process)
        assert process.stdout is not None
        work: dict[str, Any] = json.loads(await process.stdout.readline())
        return process, work

    def when_an_end_is_dealt_with(self) -> asyncio.Event:
        """Set once the socket has dealt with the next end of a connection."""
        done, tell = asyncio.Event(), self.socket._tell

        async def watched(frame_id: str, pid: int) -> None:
            await tell(frame_id, pid)
            done.set()

        self.socket._tell = watched  # type: ignore[method-assign]
        return done

    async def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # to the end of its output: its pipe is closed then
        await self.socket.close()


def identity(frame_id: str) -> dict[str, Any]:
    return {"frame_id": frame_id, "pid": 1, "node_id": "node", "placement": DEFAULT}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # tmp_path is made first
    with tempfile.TemporaryDirectory(prefix="us-") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=0) as kernel:
        made = Stage(kernel)
        try:
            async with asyncio.timeout(PATIENCE):
                await kernel.spawn("s", k.spec(k.script("done")))
                await kernel.send("s")
                yield made
        finally:
            await made.close()


async def test_the_end_of_a_frame_resumes_its_session(stage: Stage) -> None:
    """Given a frame with a session, when its process is killed, then the node service hears of it from the socket, by
    itself, and the next frame has the session under the next epoch."""
    process, work = await stage.frame("first")
    assert (work["session_id"], work["epoch"]) == ("s", 1)
    process.kill()
    crashed = (await stage.kernel.until("s", "session_crashed"))[-1]
    assert (crashed["data"]["cause"], crashed["data"]["pid"]) == ("process_died", process.pid)
    _, work = await stage.frame("second")
    assert (work["session_id"], work["epoch"]) == ("s", 2)


async def test_a_frame_that_was_silent_before_it_was_killed(stage: Stage) -> None:
    """Given a frame that hangs, as the supervisor says, when it is killed, then its crash was unseen for as long as it
    was silent: that its connection stayed open was no sign of life."""
    process, _ = await stage.frame("first")
    slot = stage.kernel.service.frames.paging.slots["first"]
    slot.seen -= 60_000_000
    stage.kernel.service.deaths.frame_hangs("first", 7.0)
    process.kill()
    crashed = (await stage.kernel.until("s", "session_crashed"))[-1]
    assert 7_000_000 <= crashed["data"]["unseen"] < 60_000_000


async def test_the_end_of_a_connection_is_no_death(stage: Stage) -> None:
    """Given a frame whose connection ends while its process lives, then nobody takes it for dead, and it may connect
    again."""
    stage.kernel.service.deaths.frame_died = AsyncMock()  # type: ignore[method-assign]
    for _ in range(2):
        channel = await Channel.connect(await stage.socket.admit(FRAME, "f"))
        with pytest.raises(InvalidInput, match="blob does not take 0 arguments"):
            await channel.call("1", "blob")
        done = stage.when_an_end_is_dealt_with()
        await channel.close()
        await done.wait()
    stage.kernel.service.deaths.frame_died.assert_not_called()


async def test_whoever_borrows_a_frames_name_can_not_end_it(stage: Stage) -> None:
    """Given a frame at work, when another process connects under its name and ends, then nobody takes the frame for
    dead: its pid is another one."""
    process, work = await stage.frame("f")
    stage.kernel.service.deaths.frame_died = AsyncMock()  # type: ignore[method-assign]
    done = stage.when_an_end_is_dealt_with()
    script = CALL_IN.replace("step", "specification").replace(
        '{"frame": frame, "number": 1}', f'"f", {[work["session_id"], work["incarnation"], work["epoch"]]}'
    )
    ticket = await stage.socket.admit(FRAME, "f")
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *ticket, stdout=PIPE)
    assert other.stdout is not None
    assert json.loads(await other.stdout.readline())["name"] == "agent"
    other.kill()
    await other.communicate()
    await done.wait()
    stage.kernel.service.deaths.frame_died.assert_not_called()
    assert process.returncode is None


async def test_ends_behind_the_services_own_are_no_deaths(stage: Stage) -> None:
    """Given a service that is being ended, then frames that end then are not taken for dead."""
    process, _ = await stage.frame("f")
    stage.kernel.service.deaths.frame_died = AsyncMock()  # type: ignore[method-assign]
    await stage.socket.close()
    process.kill()
    await process.wait()
    await asyncio.sleep(0)
    assert not list(stage.socket._tasks)
    stage.kernel.service.deaths.frame_died.assert_not_called()


@pytest.mark.parametrize(("free", "reported"), [(14, False), (15, True)])
async def test_where_memory_is_short_the_supervisor_says_why(stage: Stage, free: int, reported: bool) -> None:
    """Given a node that has little memory left, when a frame ends, then its service leaves the death to the
    supervisor, which hears from Ray whether that has killed it."""
    service = stage.kernel.service
    process, _ = await stage.frame("f")
    service.frames.supply._memory = Memory(total=100, free=free)
    service.deaths.frame_died = AsyncMock()  # type: ignore[method-assign]
    done = stage.when_an_end_is_dealt_with()
    process.kill()
    await done.wait()
    assert service.deaths.frame_died.called is reported


async def test_a_frame_calls_for_itself_only(stage: Stage) -> None:
    """Whoever has a frame's connection, as code of the user's in that process may, can call what frames call, for that
    frame; the store, other frames and the supervisor's calls are out of reach, and nothing changes."""
    before = await stage.kernel.info("s")
    channel = await Channel.connect(await stage.socket.admit(FRAME, "f"))
    calls: list[tuple[Any, ...]] = [
        ("request", "send", "s", {"content": "x"}), ("frame_died", "other", "process_died", 0.0, False),
        ("take_over", 99, 1, []), ("acquire", "me", 1, "", "r"), ("stop",), ("close",), ("__class__",), ("journal",),
        ("kill_process", 1), ("profiles",), ("register", {}), ("repeated", "1", "profiles"), ("admit", "frame", "x"),
        ("step", {"frame": identity("other"), "number": 1}), ("step",), ("step", "other"),
        ("commit", "other", {}), ("commit",), ("reload", "other", ["s", 1, 1]), ("interrupted", "other", [], "r"),
        ("specification", "other", ["s", 1, 1]), ("judge", "other", {}),
    ]  # fmt: skip
    for number, (method, *arguments) in enumerate(calls):
        with pytest.raises(InvalidInput, match="a frame can't call"):
            await channel.call(str(number), method, *arguments)
    await channel.close()
    assert await stage.kernel.info("s") == before
    assert stage.kernel.service.frames.paging.slots == {}


async def test_a_frame_learns_of_its_own_session_only(stage: Stage) -> None:
    """Given a frame with a session, when code in another frame names that session and its activation in every call that
    frames make, then it is fenced and learns nothing, and the session goes on as if nothing had been said."""
    _, work = await stage.frame("owner")
    held = [work["session_id"], work["incarnation"], work["epoch"]]
    before = await stage.kernel.info("s")
    batch = dict(zip(("session_id", "incarnation", "epoch"), held, strict=True), batch_no=1)
    request = {"wait_key": f"s/{work['inbox'][0]['key']}/1", "profile": "offline", "model": "m", "messages": b"[]"}
    step = {"frame": identity("thief"), "activation": held, "root_id": "s"}
    calls: list[tuple[Any, ...]] = [
        ("reload", "thief", held), ("interrupted", "thief", held, "r", 1), ("specification", "thief", held),
        ("judge", "thief", {"number": 1, "activation": held, "wait_key": request["wait_key"]}),
        ("commit", "thief", {**batch, "entries": [{"type": "message", "role": "user", "content": "pay"}]}),
        ("commit", "thief", {**batch, "batch_no": 0}),
        ("step", {**step, "number": 1, "batch": batch}), ("step", {**step, "number": 2, "request": request}),
        ("step", {**step, "number": 3, "batch": {**batch, "wait": "model"}, "request": request}),
        ("step", {**step, "number": 4, "batch": {**batch, "batch_no": 0}, "leave": True}),
    ]  # fmt: skip
    channel = await Channel.connect(await stage.socket.admit(FRAME, "thief"))
    for number, (method, *arguments) in enumerate(calls):
        with pytest.raises(Fenced, match="not in frame thief"):
            await asyncio.wait_for(channel.call(str(number), method, *arguments), PATIENCE)
    await channel.close()
    assert await stage.kernel.info("s") == before
    slots = stage.kernel.service.frames.paging.slots
    assert [slot.session_id for slot in slots.values() if slot.frame_id == "owner"] == ["s"]
    assert stage.kernel.server.stats.requests == 0


async def test_a_parked_session_is_nobodys(stage: Stage) -> None:
    """Given a session that waits for a model in no frame, when code in a frame repeats its last batch, then it learns
    nothing of the session, and can have no call made for it."""
    _, work = await stage.frame("owner")
    kernel = stage.kernel
    kernel.server.hold()
    held = ActivationId(work["session_id"], work["incarnation"], work["epoch"])
    run_id = work["inbox"][0]["key"]
    request = ModelRequest(f"s/{run_id}/1", "offline", "offline", b'[{"role":"user","content":"hi"}]')
    batch = Batch(*held, 1, start_run=run_id, wait="model", request_round=1, request_profile="offline")
    owner = FrameIdentity("owner", 1, kernel.service.config.node_id, "")
    step = StepCall(owner, 2, activation=held, batch=batch, request=request, leave=True)
    assert await kernel.service.step(step) == Exit()
    await kernel.send("s", "a secret", "later")
    before = await kernel.info("s")
    channel = await Channel.connect(await stage.socket.admit(FRAME, "thief"))
    answer = await channel.call("1", "commit", "thief", packed(Batch(*held, 1)))
    assert "inbox" not in answer
    for wait_key in ("s/r/99", f"s/{run_id}/2"):
        wanted = packed(structs.replace(request, wait_key=wait_key))
        call = {"frame": identity("thief"), "number": 1, "activation": list(held), "batch": packed(batch)}
        with pytest.raises(Fenced, match="does not wait for this request"):
            await asyncio.wait_for(channel.call(wait_key, "step", {**call, "request": wanted}), PATIENCE)
    with pytest.raises(InvalidInput, match="a step without a batch has a whole request"):
        await channel.call("4", "step", {"frame": identity("thief"), "number": 2, "activation": list(held)})
    await channel.close()
    assert await kernel.info("s") == before
    assert [call.request.wait_key for call in kernel.service.calls.in_flight()] == [request.wait_key]
    kernel.server.release()


async def test_only_who_holds_a_session_brings_its_messages(stage: Stage) -> None:
    """Given a call whose gateway lacks messages, of a session that has left its frame, when a frame without it names
    its activation and brings some, then it is refused, and the model is not asked."""
    _, work = await stage.frame("owner")
    kernel = stage.kernel
    held = ActivationId(work["session_id"], work["incarnation"], work["epoch"])
    run_id = work["inbox"][0]["key"]
    request = ModelRequest(f"s/{run_id}/1", "offline", "offline", b"]", text="t", lasting=40, left_out=40)
    batch = Batch(*held, 1, start_run=run_id, wait="model", request_round=1, request_profile="offline")
    owner = FrameIdentity("owner", 1, kernel.service.config.node_id, "")
    step = StepCall(owner, 2, activation=held, batch=batch, request=request, leave=True)
    lacking, lost = asyncio.Event(), kernel.service.calls._lost

    async def lost_and_noted(call: Call) -> None:
        await lost(call)
        lacking.set()

    with patch.object(kernel.service.calls, "_lost", lost_and_noted):
        assert await kernel.service.step(step) == Exit()
        await lacking.wait()
    [call] = kernel.service.calls.in_flight()
    channel = await Channel.connect(await stage.socket.admit(FRAME, "thief"))
    whole = structs.replace(request, messages=b'[{"role":"user","content":"evil"}]', left_out=0)
    forged = {"frame": identity("thief"), "number": 1, "activation": list(held)}
    with pytest.raises(InvalidInput, match="has a whole request"):
        await channel.call("1", "step", {**forged, "request": packed(request)})
    with pytest.raises(Fenced, match="left its frame"):
        await channel.call("2", "step", {**forged, "request": packed(whole)})
    await channel.close()
    assert call.lacks
    assert kernel.server.count == 0


async def test_a_client_makes_requests_only(stage: Stage) -> None:
    """A client's ticket is none of a frame: it can't step or commit."""
    channel = await Channel.connect(await stage.socket.admit(CLIENT, "c"))
    for method in ("step", "commit", "reload", "blob", "frame_died", "take_over"):
        with pytest.raises(InvalidInput, match="a client can't call"):
            await channel.call("1", method, {})
    await channel.close()


async def test_a_frame_without_a_ticket_is_not_heard(stage: Stage) -> None:
    """A ticket of another frame is of no use."""
    ticket = await stage.socket.admit(FRAME, "f")
    with pytest.raises(ServiceGone):
        await Channel.connect(ticket._replace(peer="frame/other"))


async def test_what_has_ended() -> None:
    """A process that lives has not ended; one that was killed has; one that is not seen from here can't be judged."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=PIPE)
    assert not await has_ended(process.pid, 0.05)
    process.kill()
    assert await has_ended(process.pid, 10.0)  # asyncio's watcher has not reaped it, or has
    await process.communicate()
    assert await has_ended(process.pid, 0.0)
    assert not await has_ended(0, 0.0)
