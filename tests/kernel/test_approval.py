"""Tool calls that a person must approve: approve, edit, reject, remember, in batches; by a rule, a hook, a time-out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from understudy.actors.directives import Ask, HookContext, Refuse, Replace
from understudy.actors.hooks import describe_hook, hook
from understudy.actors.tools import ToolContext, tool
from understudy.errors import AnswerConflict, InvalidInput, NotAsked
from understudy.protocol import Decision
from understudy.testing.offline import OfflineServer

from .. import tiers
from . import kernel as k
from .deaths import Deaths
from .people import Question, person


@tool(approve=True)
async def pay(path: str, text: str, context: ToolContext) -> str:
    """Have an effect that nobody may have without approval."""
    await k.effect(path, context)
    return f"paid {text}"


@tool(on_crash="rerun", approve=True)
async def count(path: str, text: str, context: ToolContext) -> str:
    """The same, harmless to repeat."""
    await k.effect(path, context)
    return f"counted {text}"


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, frames=1) as made:
        yield made


async def begin(kernel: k.Kernel, *replies: Any, tools: Any, session_id: str = "s", **more: Any) -> None:
    await kernel.spawn(session_id, k.spec(k.script(*replies), tools, **more))
    await kernel.send(session_id)


def call(path: Path, text: str = "x", name: str = "pay") -> tuple[str, dict[str, str]]:
    return name, {"path": str(path), "text": text}


async def decide(kernel: k.Kernel, decision: str, *calls: str, **more: str) -> Any:
    """What a person says of calls of the session that ask for the first time."""
    said = [to_builtins(Decision(call_id, 1, decision, **more)) for call_id in calls]
    return await kernel.ask("decide", "s", said)


# Decisions.


@pytest.mark.parametrize("used", [pay, count], ids=["report", "rerun"])
async def test_nothing_is_executed_before_it_is_approved(kernel: k.Kernel, tmp_path: Path, used: Any) -> None:
    """Given a tool that needs approval, then the run waits in no process and shows tool and arguments; once approved
    the call is executed once, and the answer sent again changes nothing."""
    notes = tmp_path / "notes"
    name = used.__understudy_tool__.name
    await begin(kernel, [call(notes, name=name)], "done", tools=[used])
    [question] = await kernel.paused("s")
    assert (question["kind"], question["session_id"], k.notes(notes)) == ("approval", "s", [])
    assert all(part in question["prompt"] for part in (name, str(notes)))
    assert await decide(kernel, "approve", "r/1/0") == ["r/1/0"]
    assert await decide(kernel, "approve", "r/1/0") == []
    assert (await kernel.end("s"))["status"] == "completed"
    assert len(k.notes(notes)) == 1
    with pytest.raises(AnswerConflict):
        await decide(kernel, "reject", "r/1/0")
    received = [event["data"] for event in await kernel.events("s") if event["type"] == "input_received"]
    assert [(data["kind"], data["decision"], data["timed_out"]) for data in received] == [
        ("approval", "approve", False)
    ]


async def test_a_rejected_call_is_refused_with_the_reason(kernel: k.Kernel, tmp_path: Path) -> None:
    """The model reads the reason; the outcome is `refused`, and nothing was executed."""
    await begin(kernel, [call(tmp_path / "notes")], "done", tools=[pay])
    await kernel.paused("s")
    await decide(kernel, "reject", "r/1/0", text="too expensive")
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.results() == ["not executed: it was not approved: too expensive"]
    outcomes = [event["data"]["outcome"] for event in await kernel.events("s") if event["type"] == "tool_finished"]
    assert (outcomes, k.notes(tmp_path / "notes")) == (["refused"], [])


async def test_edited_arguments(kernel: k.Kernel, tmp_path: Path) -> None:
    """Arguments that don't fit are refused, and nothing has changed; those that do are what is executed, and the model
    reads that it was. The history keeps its own."""
    await begin(kernel, [call(tmp_path / "wanted")], "done", tools=[pay])
    await kernel.paused("s")
    for wrong in ('{"path": 1}', "{", "[]", '{"path": "p", "text": "x", "more": 1}'):
        with pytest.raises(InvalidInput):
            await decide(kernel, "approve", "r/1/0", text=wrong)
    assert len(await kernel.paused("s")) == 1
    edited = json.dumps({"path": str(tmp_path / "other"), "text": "y"})
    await decide(kernel, "approve", "r/1/0", text=edited)
    assert (await kernel.end("s"))["status"] == "completed"
    assert (k.notes(tmp_path / "wanted"), len(k.notes(tmp_path / "other"))) == ([], 1)
    assert await kernel.results() == [f"[a person approved this call with other arguments: {edited}]\npaid y"]
    [said] = [message for message in await kernel.messages("s") if message.get("tool_calls")]
    assert str(tmp_path / "wanted") in said["tool_calls"][0][2]


async def test_several_calls_at_once(kernel: k.Kernel, tmp_path: Path) -> None:
    """All calls of a round that need approval ask at once while others run, also where only one may run at a time; what
    is said of several counts for all of them or for none."""
    notes = tmp_path / "notes"
    calls = [call(notes, name="look"), call(notes, "1"), call(notes, "2"), call(notes, "3")]
    await begin(kernel, calls, "done", tools=[pay, k.look], parallel_tools=1)
    asked = await kernel.paused("s")
    assert [item["call_id"] for item in asked] == ["r/1/1", "r/1/2", "r/1/3"]
    assert [line[-5:] for line in k.notes(notes)] == ["r/1/0"]
    with pytest.raises(NotAsked):
        await decide(kernel, "approve", "r/1/1", "r/9/0")
    assert len(await kernel.paused("s")) == 3
    assert await decide(kernel, "approve", "r/1/1", "r/1/2") == ["r/1/1", "r/1/2"]
    await kernel.until("s", "tool_finished", 3)
    assert [item["call_id"] for item in await kernel.paused("s")] == ["r/1/3"]
    await decide(kernel, "reject", "r/1/3")
    await kernel.end("s")
    assert await kernel.results() == ["noted x", "paid 1", "paid 2", "not executed: it was not approved."]


@pytest.mark.parametrize(("decision", "executed"), [("approve", 4), ("reject", 0)])
async def test_a_decision_is_remembered_for_the_session(
    kernel: k.Kernel, tmp_path: Path, decision: str, executed: int
) -> None:
    """Given a decision to be remembered for the tool, then later calls of it ask nobody, in this run, in another one
    and in another process; no model is sent the record."""
    notes = tmp_path / "notes"
    await begin(kernel, [call(notes, "1")], [call(notes, "2")], "done", tools=[pay])
    await kernel.paused("s")
    await decide(kernel, decision, "r/1/0", remember="tool")
    assert (await kernel.end("s"))["status"] == "completed"
    for worker in list(kernel.workers.values()):
        kernel.kill(worker)
    await kernel.quiet()
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"
    assert (len(k.notes(notes)), (await kernel.types("s")).count("input_requested")) == (executed, 1)
    [record] = [message for message in await kernel.messages("s") if message.get("origin") == "approval"]
    assert (record["visibility"], record["extra"]["tool"]) == ("never", "pay")


async def test_a_decision_remembered_for_its_arguments(kernel: k.Kernel, tmp_path: Path) -> None:
    """It counts for calls with the same arguments, however they are written, and for no others."""
    notes = tmp_path / "notes"
    same = json.dumps({"text": "1", "path": str(notes)})
    await begin(kernel, [call(notes, "1")], [("pay", same)], [call(notes, "2")], "done", tools=[pay])
    await kernel.paused("s")
    await decide(kernel, "approve", "r/1/0", remember="arguments")
    await kernel.until("s", "input_requested", 2)
    assert [item["call_id"] for item in await kernel.paused("s")] == ["r/3/0"]
    assert len(k.notes(notes)) == 2
    await decide(kernel, "reject", "r/3/0")
    await kernel.end("s")


async def test_what_is_no_decision_about_a_call(kernel: k.Kernel, tmp_path: Path) -> None:
    """An approval is no answer to a question, and the other way round; only decisions about calls can be remembered."""
    question = ("request_user_input", {"prompt": "Which?"})
    await begin(kernel, [call(tmp_path / "n"), question], "done", tools=[pay, "request_user_input"])
    await kernel.paused("s")
    for call_id, decision in (("r/1/0", "ok"), ("r/1/0", "rerun"), ("r/1/1", "approve"), ("r/1/1", "reject")):
        with pytest.raises(InvalidInput):
            await kernel.ask("answer", "s", call_id, decision, "", 1)
    for wrong in ({"decision": "ok", "remember": "tool"}, {"decision": "approve", "remember": "x"},
                  {"decision": "approve", "remember": "tool", "text": "{}"}):  # fmt: skip
        with pytest.raises(InvalidInput):
            await kernel.ask("decide", "s", [{"call_id": "r/1/0", "asked": 1, **wrong}])
    assert await kernel.ask("abort_pending", "s", None) == ["r/1/0", "r/1/1"]
    assert (await kernel.end("s"))["status"] == "completed"
    assert k.notes(tmp_path / "n") == []


@pytest.mark.parametrize("approved", [False, True])
async def test_a_cancel_ends_the_wait(kernel: k.Kernel, tmp_path: Path, approved: bool) -> None:
    """A call that nobody had approved was not executed: its result is `cancelled`, not that its outcome is unknown."""
    await begin(kernel, [call(tmp_path / "n")], "done", tools=[pay], session_id="s")
    await kernel.paused("s")
    if approved:
        await kernel.stop_frames()
        await decide(kernel, "approve", "r/1/0")
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert (await kernel.results(), k.notes(tmp_path / "n")) == (["cancelled"], [])


async def test_sub_agents_can_need_approval(kernel: k.Kernel) -> None:
    """A mark on `spawn_agent` holds the sub-agent back; approved with another task it is given that one."""
    child = k.spec(name="worker", hash="worker")
    spawn = [("spawn_agent", {"agent": "worker", "task": "dig"})] * 2
    compiled = k.spec(k.script(spawn, "done"), ["spawn_agent"], agents={"worker": child})
    compiled["tools"] = [{**item, "approve": True} for item in compiled["tools"]]
    await kernel.spawn("s", compiled)
    await kernel.send("s")
    assert len(await kernel.paused("s")) == 2
    assert "child_spawned" not in await kernel.types("s")
    await decide(kernel, "reject", "r/1/1", text="one is enough")
    await decide(kernel, "approve", "r/1/0", text='{"agent": "worker", "task": "plant"}')
    await kernel.end("s")
    first, second = await kernel.results()
    assert (first.endswith("offline: plant"), second) == (True, "not executed: it was not approved: one is enough")


# Hooks.


@hook("before_tool")
def careful(context: HookContext) -> Ask | None:
    """Have a person look at some calls."""
    return Ask("the text is risky") if (context.arguments or {}).get("text") == "risky" else None


@hook("before_tool")
def elsewhere(context: HookContext) -> Replace:
    """Another hook, which changes the arguments each time that it is asked."""
    return Replace(arguments={**(context.arguments or {}), "text": f"{(context.arguments or {})['text']}!"})


@hook("before_tool")
def closed(context: HookContext) -> Refuse | None:
    """A hook that refuses what it is asked about once more."""
    return Refuse("closed meanwhile") if context.redone else None


def hooks(*chosen: Any) -> list[dict[str, Any]]:
    return [describe_hook(item, pickle=None)[0] for item in chosen]


async def test_a_hook_asks(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a hook that wants a call approved, then a person is shown its reason and the arguments as the hooks leave
    them, once; other calls go on. After the approval the other hooks count as ever."""
    notes = tmp_path / "notes"
    calls = [call(notes, "safe", "note"), call(notes, "risky", "note")]
    await begin(kernel, calls, "done", tools=[k.note], hooks=hooks(careful, elsewhere))
    [question] = await kernel.paused("s")
    assert question["call_id"] == "r/1/1"
    assert all(part in question["prompt"] for part in ("risky!", "careful", "the text is risky"))
    await decide(kernel, "approve", "r/1/1")
    await kernel.end("s")
    assert await kernel.results() == ["noted safe!", "noted risky!"]
    assert (await kernel.types("s")).count("input_requested") == 1


async def test_a_hook_refuses_what_was_approved(kernel: k.Kernel, tmp_path: Path) -> None:
    """Hooks are asked again about a call that was approved, and may refuse it."""
    await begin(kernel, [call(tmp_path / "n")], "done", tools=[pay], hooks=hooks(closed))
    await kernel.paused("s")
    await decide(kernel, "approve", "r/1/0")
    await kernel.end("s")
    [result] = await kernel.results()
    assert (result.startswith("not executed: the hook closed refused it"), k.notes(tmp_path / "n")) == (True, [])


# Time-outs.


@pytest.mark.parametrize(("default", "executed"), [("reject", 0), ("approve", 1)])
async def test_nobody_approves_in_time(kernel: k.Kernel, tmp_path: Path, default: str, executed: int) -> None:
    """Given nobody is there, then the default of the specification is the decision, once; a late answer is refused."""
    more = {"approve_timeout": 0.3, "approve_default": default}
    await begin(kernel, [call(tmp_path / "n")], "done", tools=[pay], **more)
    assert (await kernel.end("s"))["status"] == "completed"
    assert len(k.notes(tmp_path / "n")) == executed
    [received] = [event["data"] for event in await kernel.events("s") if event["type"] == "input_received"]
    assert (received["decision"], received["timed_out"]) == (default, True)
    with pytest.raises(AnswerConflict):
        await decide(kernel, "reject" if default == "approve" else "approve", "r/1/0")


@pytest.mark.parametrize(
    ("default", "result"), [({}, "nobody answered within 0.3 s"), ({"answer_default": "red"}, "red")]
)
async def test_nobody_answers_in_time(kernel: k.Kernel, default: dict[str, str], result: str) -> None:
    """A question that nobody answers fails, or has the answer that the specification gives."""
    question = ("request_user_input", {"prompt": "Which?"})
    await begin(kernel, [question], "done", tools=["request_user_input"], answer_timeout=0.3, **default)
    await kernel.end("s")
    assert await kernel.results() == [result]


async def test_a_time_out_that_was_overtaken(kernel: k.Kernel, tmp_path: Path) -> None:
    """An answer in time, and the end of the run, leave nothing that is due."""
    await begin(kernel, [call(tmp_path / "n")], "done", tools=[pay], approve_timeout=3600.0)
    await kernel.paused("s")
    kernel.check()
    await decide(kernel, "approve", "r/1/0")
    await kernel.end("s")
    await begin(kernel, [call(tmp_path / "n")], "done", tools=[pay], session_id="t", approve_timeout=3600.0)
    await kernel.paused("t")
    await kernel.ask("cancel", "t", None, "enough")
    await kernel.end("t")
    kernel.check()


# Outages and deaths.


async def test_an_approval_outlasts_a_total_outage(tmp_path: Path) -> None:
    """Given everything dies while a person thinks, when it is there again and the call is approved, then it is executed
    once; what was due meanwhile is done at the next start."""
    store, notes = f"sqlite:///{tmp_path}/store.db", tmp_path / "notes"
    with OfflineServer() as server:
        async with k.running(store, tmp_path, server=server) as kernel:
            await begin(kernel, [call(notes)], "done", tools=[pay])
            await begin(kernel, [call(notes)], "done", tools=[pay], session_id="late", approve_timeout=0.5)
            await kernel.paused("s")
            await kernel.until("late", "input_requested")
            kernel.kill_node()
            for worker in list(kernel.workers.values()):
                kernel.kill(worker, replace=False)
        assert k.notes(notes) == []
        async with k.running(store, tmp_path, server=server) as kernel:
            assert [item["call_id"] for item in await kernel.paused("s")] == ["r/1/0"]
            assert (await kernel.end("late"))["status"] == "completed"
            await decide(kernel, "approve", "r/1/0")
            assert (await kernel.end("s"))["status"] == "completed"
            assert await kernel.results("late") == ["not executed: it was not approved: nobody answered within 0.5 s"]
    assert [line.partition("/")[0] for line in k.notes(notes)] == ["s"]


def compiled(path: Path, used: Any) -> dict[str, Any]:
    """Calls of one round that are approved, edited and rejected, and a later one that is decided as remembered."""
    name = used.__understudy_tool__.name
    calls = [call(path, text, name) for text in ("approved", "edited", "rejected")]
    return k.spec(k.script(calls, [call(path, "remembered", name)], "all done"), [used])


def decide_by(path: Path) -> Callable[[Question], dict[str, Any]]:
    """Approves the first call for good, edits the second, rejects the third."""
    decisions: dict[str, dict[str, Any]] = {
        "r/1/0": {"decision": "approve", "remember": "tool"},
        "r/1/1": {"decision": "approve", "text": json.dumps({"path": str(path), "text": "other"})},
        "r/1/2": {"decision": "reject", "text": "no"},
    }
    return lambda asked: decisions[asked["call_id"]]


@pytest.mark.sweep
@pytest.mark.conformance
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["frame", "node"])
@pytest.mark.parametrize("used", [pay, count], ids=["report", "rerun"])
async def test_a_death_anywhere_neither_asks_nor_acts_twice(tmp_path: Path, victim: str, used: Any) -> None:
    """Frame or node service killed at each call, commit and tool, and around each decision: each call asks once, none
    is executed that was rejected or not approved, and none twice that is not `rerun`."""
    problems = []
    with OfflineServer() as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            async with person(kernel, "clean", decide_by(tmp_path / "clean")):
                start = len(kernel.points)
                await kernel.run("clean", compiled(tmp_path / "clean", used))
            points = len(kernel.points) - start
            wanted = [text.replace("/clean", "/PATH") for text in await kernel.results("clean")]
            assert len(wanted) == 4
            for at in tiers.points(range(points + 6)):
                problems += await one_death(kernel, tmp_path, at, victim, used, wanted)
    assert not problems, "\n".join(problems)


async def one_death(
    kernel: k.Kernel, directory: Path, at: int, victim: str, used: Any, wanted: list[str]
) -> list[str]:  # fmt: skip
    """A session with one death at a point; what is not as it must be."""
    session_id, path = f"s{at}", directory / f"notes-{at}"
    deaths = Deaths(kernel, session_id, at, victim)
    async with person(kernel, session_id, decide_by(path)) as seen:
        try:
            ended = await kernel.run(session_id, compiled(path, used))
        except k.Stuck as stuck:
            return [f"{deaths.where}: {stuck}"]
        finally:
            kernel.on_point = None
        await kernel.quiet()
    kernel.check(session_id)
    found = [] if ended["status"] == "completed" else [f"{deaths.where}: ended as {ended['status']}: {ended['error']}"]
    asked = [question["call_id"] for question in seen]
    if sorted(asked) != ["r/1/0", "r/1/1", "r/1/2"]:
        found.append(f"{deaths.where}: asked {asked}")
    executed = [line.partition("/")[2] for line in k.notes(path)]
    twice = len(executed) > len(set(executed))
    if "r/1/2" in executed or (twice and used is pay):
        found.append(f"{deaths.where}: executed {executed}")
    texts = [text.replace(f"/{path.name}", "/PATH") for text in await kernel.results(session_id)]
    different = [text for text, right in zip(texts, wanted, strict=True) if text != right]
    if len(different) > (used is pay) or not all("interrupted" in text for text in different):
        found.append(f"{deaths.where}: {different}")
    return found


async def test_rules_for_commands(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given rules of an agent's sandbox, then a command that one denies is refused, one that is asked about waits for a
    person, and all others run; what a person puts in a command's place is judged, too."""
    rules = [{"command": "touch denied*", "action": "deny"}, {"command": "touch asked*", "action": "ask"}]
    calls = [("bash", {"command": f"cd . && touch {name}"}) for name in ("free", "denied", "asked", "asked2")]
    sandbox, work = {"backend": "none", "rules": rules}, tmp_path / "work"
    work.mkdir()
    await begin(kernel, calls, "done", tools=["bash"], workspace=str(work), sandbox=sandbox)
    questions = await kernel.paused("s")
    assert ["touch asked" in question["prompt"] for question in questions] == [True, True]
    assert "The rule for 'touch asked*' asks" in questions[0]["prompt"]
    await decide(kernel, "approve", "r/1/2")
    await decide(kernel, "approve", "r/1/3", text=json.dumps({"command": "touch denied3"}))
    assert (await kernel.end("s"))["status"] == "completed"
    results = await kernel.results()
    denied = "not executed: the agent's rules deny commands like 'touch denied*'"
    assert [result.splitlines()[-1] for result in results] == ["[exit code 0]", denied, "[exit code 0]", denied]
    made = [name for name in ("free", "denied", "denied3", "asked", "asked2") if (work / name).exists()]
    assert made == ["free", "asked"]
