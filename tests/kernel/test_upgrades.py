"""Sessions that are restored under another specification, and those that an older version left behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.cluster.client.compiling import compile_spec
from understudy.errors import SessionConflict
from understudy.manifest import changes
from understudy.spec import AgentSpec
from understudy.store.db.engine import Database

from . import kernel as k

PATIENCE = 30.0


def other(instructions: str, tools: Any = (), **more: Any) -> dict[str, Any]:
    """A specification that says it may be taken on."""
    compiled = k.spec(instructions, tools, **more)
    return {**compiled, "hash": repr(instructions), "on_change": "migrate", **more}


# What changed.


def test_what_changed_is_named() -> None:
    """Instructions, model, tools that came, went or have another source, and sub-agents are named; nothing else is."""
    scout = {"name": "scout", "instructions": "look", "tools": []}
    tools = [{"name": name, "source": {"import": f"m:{name}"}, "code": "1"} for name in ("kept", "lost", "edited")]
    old = {"v": 1, "hash": "a", "model": "m", "instructions": "x", "tools": tools, "agents": {"scout": scout}}
    edited = {**tools[2], "code": "2"}
    new = {
        "v": 2, "hash": "b", "model": "n", "instructions": "x", "on_change": "migrate", "added_by_this_version": 7,
        "tools": [tools[0], edited, {**tools[0], "name": "came"}],
        "agents": {"scout": {**scout, "instructions": "look twice"}},
    }  # fmt: skip
    assert changes(old, new) == ("agents.scout", "model", "tools.came", "tools.edited", "tools.lost")


VALUES = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2))


@given(old=VALUES, new=VALUES, more=VALUES)
def test_changes_are_symmetric_and_know_nothing_of_new_fields(
    old: dict[str, Any], new: dict[str, Any], more: dict[str, Any]
) -> None:
    """Whatever the fields are: nothing differs from itself, both directions agree, and fields of a newer version that
    the older one did not have are no change."""
    assert changes(old, old) == ()
    assert changes(old, new) == changes(new, old)
    unknown = {f"new_{name}": value for name, value in more.items()}
    assert changes(old, {**old, **unknown}) == ()


def test_the_source_of_a_function_is_a_part_of_what_an_agent_is() -> None:
    """Two functions of one name and schema with different bodies are a change; what on_change says is none."""
    compiled = []
    for body in ("return 1", "return 2"):
        namespace: dict[str, Any] = {"__name__": "elsewhere", "tool": k.tool}
        source = f'@tool\ndef count(n: int) -> int:\n    """Count."""\n    {body}\n'
        path = Path(__file__).with_name(f"_{body[-1]}.py")
        exec(compile(source, str(path), "exec"), namespace)
        import linecache

        linecache.cache[str(path)] = (len(source), None, source.splitlines(True), str(path))
        spec = AgentSpec(name="a", model="offline", tools=[namespace["count"]])
        compiled.append(compile_spec(spec, model="offline", profile="offline").spec)
    assert changes(*compiled) == ("tools.count",)
    assert compiled[0]["hash"] != compiled[1]["hash"]
    kinds = [AgentSpec(name="a", model="offline", on_change=kind) for kind in ("migrate", "refuse")]
    first, second = [compile_spec(kind, model="offline", profile="offline").spec for kind in kinds]
    assert first["hash"] == second["hash"]


# Taking it on.


async def test_an_idle_session_has_the_new_one_from_its_next_run_on(store: str, tmp_path: Path) -> None:
    """Given a session that a frame holds between two runs, when it is spawned with other instructions, then the next
    run follows them, the first one's messages are still there, and the event says what changed."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        assert (await kernel.run("s", other(k.script("one"))))["text"] == "one"
        assert not (await kernel.spawn("s", other(k.script("two"), model="offline")))["created"]  # type: ignore[index]
        await kernel.send("s", "again", "r2")
        assert (await kernel.end("s", "r2"))["text"] == "two"
        events = [event["data"] for event in await kernel.events("s") if event["type"] == "session_migrated"]
        assert [event["changed"] for event in events] == [["instructions"]]
        assert [m["content"] for m in await kernel.messages("s")] == ["go", "one", "again", "two"]
        await kernel.spawn("s", other(k.script("two")))
        assert (await kernel.types("s")).count("session_migrated") == 1


async def test_a_run_ends_with_what_it_began_with(store: str, tmp_path: Path) -> None:
    """Given a run whose model asks for a tool that only the new specification has, when that was spawned during the
    run, then the tool is unknown to this run, and the queued one may use it."""
    notes = tmp_path / "notes"
    want = [("look", {"path": str(notes), "text": "x"})]
    async with k.running(store, tmp_path, frames=2) as kernel:
        kernel.server.hold()
        await kernel.spawn("s", other(k.script(want, "end")))
        await kernel.send("s")
        await kernel.send("s", "again", "r2")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        await kernel.spawn("s", other(k.script("never"), [k.look]))  # the last one that is given holds
        await kernel.spawn("s", {**other(k.script(want, "end"), [k.look]), "hash": "with look"})
        kernel.check()
        kernel.server.release()
        assert (await kernel.end("s"))["text"] == "end"
        assert (await kernel.end("s", "r2"))["text"] == "end"
        outcomes = [event["data"]["outcome"] for event in await kernel.events("s") if event["type"] == "tool_finished"]
        assert outcomes == ["unknown_tool", "ok"]
        assert len(k.notes(notes)) == 1
        events = [event["data"]["changed"] for event in await kernel.events("s") if event["type"] == "session_migrated"]
        assert events == [["tools.look"]]
        assert kernel.service.sweep.swept == 0


async def test_what_was_asked_for_can_be_taken_back(store: str, tmp_path: Path) -> None:
    """Given another specification that waits for a run's end, when the first one is spawned again, nothing changes."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        kernel.server.hold()
        await kernel.spawn("s", other(k.script("one")))
        await kernel.send("s")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        await kernel.spawn("s", other(k.script("two")))
        await kernel.spawn("s", other(k.script("one")))
        kernel.server.release()
        await kernel.end("s")
        assert "session_migrated" not in await kernel.types("s")


async def test_a_cancelled_run_goes_over_too(store: str, tmp_path: Path) -> None:
    """Given a run that waits for a model with another one queued, when it is cancelled, the queued one has the new
    specification at once: nobody has to find it."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        kernel.server.hold()
        await kernel.spawn("s", other(k.script("one")))
        await kernel.send("s")
        await kernel.send("s", "again", "r2")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        await kernel.spawn("s", other(k.script("two")))
        await kernel.ask("cancel", "s", "r", "enough")
        await kernel.end("s")
        kernel.server.release()
        assert (await kernel.end("s", "r2"))["text"] == "two"
        assert kernel.service.sweep.swept == 0


async def test_a_raised_limit_counts_from_the_next_run_on(store: str, tmp_path: Path) -> None:
    """Given a session that has used its budget up, when it is given more, then its next run has what is left of it."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        tools = [("look", {"path": str(tmp_path / "notes"), "text": "x"})]
        replies = k.script(tools, "done")
        ended = await kernel.run("s", other(replies, [k.look], budget=[{"rounds": 1}]))
        assert ended["status"] == "budget_exceeded"
        await kernel.spawn("s", other(replies, [k.look], budget=[{"rounds": 3}], hash="raised"))
        await kernel.send("s", "again", "r2")
        assert (await kernel.end("s", "r2"))["status"] == "completed"
        [account] = await kernel.ask("read", "budgets", ["s"], {})
        assert (account["allowed"], account["spent"]) == (3, 3)


async def test_refuse_is_a_conflict_that_says_what_changed(store: str, tmp_path: Path) -> None:
    """Given a session, when another specification says refuse, nothing changes and the error names what differs."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        await kernel.spawn("s", other("one"))
        with pytest.raises(SessionConflict) as caught:
            await kernel.spawn("s", other("two", model="larger", on_change="refuse"))
        assert caught.value.details["changed"] == ["instructions", "model"]
        assert (await kernel.run("t", other("one")))["status"] == "completed"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
async def test_a_migration_survives_deaths(store: str, tmp_path: Path, seed: int) -> None:
    """Given a session that is spawned again during its run, when its frame or the node service dies at any point after
    that, then the queued run has the new specification, exactly one event says so, and no wake-up got lost."""
    async with k.running(store, tmp_path, frames=2) as kernel:
        kernel.server.hold()
        await kernel.spawn("s", other(k.script("one")))
        await kernel.send("s")
        await kernel.send("s", "again", "r2")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        await kernel.spawn("s", other(k.script("two")))
        start = len(kernel.points)

        def strike(number: int, _label: str, worker: k.Worker | None) -> None:
            if number == start + 2 + 3 * seed:
                kernel.kill_node() if worker is None else kernel.kill(worker)

        kernel.on_point = strike
        kernel.server.release()
        assert (await kernel.end("s"))["text"] == "one"
        assert (await kernel.end("s", "r2"))["text"] == "two"
        assert (await kernel.types("s")).count("session_migrated") == 1
        kernel.on_point = None  # a kernel that stops has points, too


# Other versions.


async def test_a_session_of_the_last_version_goes_on(store: str, tmp_path: Path) -> None:
    """Given a session with a run at work whose specification and rows lack what this version added, when its services
    start, then it ends its run, and takes on the same agent compiled by this version without noticing."""
    old = k.spec(k.script([("look", {"path": str(tmp_path / "n"), "text": "x"})], "done"), [k.look])
    for name in ("stall", "shutdown", "on_change"):
        old.pop(name, None)
    for tool in old["tools"]:
        tool.pop("code", None)
    async with k.running(store, tmp_path, frames=1) as kernel:
        await kernel.stop_frames()
        await kernel.spawn("s", old)
        await kernel.send("s")
        database = Database(store)
        with database.writer.begin() as connection:
            connection.exec_driver_sql(
                "UPDATE session SET next_spec = NULL, moved = 0, incarnation = 0, first_incarnation = 0"
            )
        database.close()
        kernel.add_frame()
        assert (await kernel.end("s"))["text"] == "done"
        compiled = {**json.loads(json.dumps(old)), "hash": "of this version", "on_change": "refuse", "stall": 300.0}
        compiled["tools"][0]["code"] = "its source"
        assert not (await kernel.spawn("s", compiled))["created"]  # type: ignore[index]
        assert "session_migrated" not in await kernel.types("s")


async def test_one_that_is_queued_goes_on_in_a_process_of_its_new_placement(store: str, tmp_path: Path) -> None:
    """Given a session that queues for a frame, when it is upgraded to another placement, then it has a frame of that
    one and none of the old one."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        kernel.server.hold()
        await kernel.spawn(
            "busy", k.spec(k.script([("note", {"path": str(tmp_path / "n"), "text": "x"})], "end"), [k.note])
        )
        begun, may_end = k.held_at_effect(kernel)
        await kernel.send("busy")
        kernel.server.release()
        await begun.wait()
        await kernel.spawn("s", other(k.script("one")))
        await kernel.send("s")
        assert kernel.service.frames.paging.queued("") == 1
        await kernel.spawn("s", other(k.script("two"), placement="gpu"))
        assert kernel.service.frames.paging.queued("gpu") == 1
        assert kernel.service.frames.paging.queued("") == 0
        worker = kernel.add_frame("gpu")
        assert (await kernel.end("s"))["text"] == "two"
        may_end.set()
        await kernel.end("busy")
        frames = [
            event["data"]["frame_id"] for event in await kernel.events("s") if event["type"] == "session_activated"
        ]
        assert set(frames) == {worker.frame_id}
