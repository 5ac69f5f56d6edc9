"""Hooks: what they see, change and refuse, in which order, and what is left of that when processes die."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec, HookContext, Refuse, Replace, hook
from understudy.actors.hooks import POINTS, describe_hook
from understudy.actors.repeats import REPEATED
from understudy.actors.tools import tool
from understudy.cluster.certify.runs import reaches_outside, requested
from understudy.cluster.client.agent_file import read_agent
from understudy.cluster.client.compiling import compile_spec
from understudy.errors import InvalidSpec
from understudy.manifest import changes
from understudy.messages import INTERRUPTED
from understudy.store.operations.code import digests
from understudy.testing.offline import Faults

from .. import tiers
from . import kernel as k
from .deaths import Deaths

SEEN: list[tuple[str, HookContext, int]] = []
"""Name of the hook, what it received, and when (microseconds), in processes that lived on to the hook's end."""


def seen(name: str, context: HookContext) -> None:
    worker = k.WORKER.get()
    assert worker is not None
    if not worker.dead:
        SEEN.append((name, context, time.time_ns() // 1000))


async def point(label: str) -> None:
    """A point of this process's kernel, to wait or to die at."""
    worker = k.WORKER.get()
    assert worker is not None
    await worker.kernel.point(label, worker)


def contexts(*points: str) -> list[HookContext]:
    """What the hooks of these points received, in order."""
    return [context for _, context, _ in SEEN if context.point in points]


def watcher(point: str, name: str) -> Any:
    """A hook of this module that only sees."""

    @hook(point, name=name)
    def watch(context: HookContext) -> None:
        seen(name, context)

    watch.__qualname__ = name
    globals()[name] = watch
    return watch


USED = ("run_start", "before_model", "after_model", "before_tool", "after_tool", "tool_error", "run_end")
FIRST = [watcher(point, f"first_{point}") for point in USED]
SECOND = [watcher(point, f"second_{point}") for point in USED]


@hook("after_tool")
async def mark(context: HookContext) -> Replace:
    """Leave a mark at the result, with a point to die at before it and one after it."""
    await point("hook begins")
    seen("mark", context)
    await point("hook has ended")
    return Replace(text=f"{context.text} [seen]")


@hook("before_tool")
async def gate(context: HookContext) -> None:
    """See a call, with a point to die at after that."""
    seen("gate", context)
    await point("gate is passed")


@hook("before_tool")
async def deny(context: HookContext) -> Refuse:
    """Refuse every call."""
    seen("deny", context)
    return Refuse(f"{context.tool} is not for today")


@hook("before_tool")
def louder(context: HookContext) -> Replace:
    """Let the tool be called with another text."""
    seen("louder", context)
    assert context.arguments is not None
    return Replace(arguments={**context.arguments, "text": context.arguments["text"] + "!"})


@hook("before_tool")
def misfit(context: HookContext) -> Replace:
    """Give arguments that the tool does not take."""
    return Replace(arguments={"text": 7})


@hook("before_tool")
async def meddle(context: HookContext) -> None:
    """Change what it was given."""
    assert context.arguments is not None
    context.arguments.clear()


@hook("before_model")
async def meddle_more(context: HookContext) -> None:
    """The same with the model's messages."""
    assert context.messages is not None
    context.messages.pop()


@hook("before_model")
async def approach(context: HookContext) -> None:
    """See a model call, with a point to die at after that."""
    seen("approach", context)
    await point(f"approached round {context.round}")


@hook("before_model")
def close_the_door(context: HookContext) -> Refuse | None:
    """Refuse the second round."""
    return Refuse("enough is enough") if context.round == 2 else None


class Stubborn:
    """What a hook waits for that never returns in time."""

    leave = threading.Event()


async def _raises(context: HookContext) -> None:
    raise ValueError("out of order")


async def _hangs(context: HookContext) -> None:
    await k.never()


def _blocks(context: HookContext) -> None:
    Stubborn.leave.wait(20)


def _talks(context: HookContext) -> str:
    return "nonsense"


FAILURES = {"raises": _raises, "hangs": _hangs, "blocks": _blocks, "talks": _talks}


def failing(point: str, kind: str) -> dict[str, Any]:
    """The specification of a hook that fails in this way."""
    if kind == "gone":
        return {"name": "broken", "point": point, "source": {"import": f"{__name__}:nowhere"}}
    name = f"{kind}_{point}"

    async def asynchronous(context: HookContext) -> Any:
        return await FAILURES[kind](context)

    def synchronous(context: HookContext) -> Any:
        return FAILURES[kind](context)

    made = asynchronous if asyncio.iscoroutinefunction(FAILURES[kind]) else synchronous
    made.__qualname__ = name
    globals()[name] = hook(point, name="broken")(made)
    return described(globals()[name])[0]


def described(*hooks: Any) -> list[dict[str, Any]]:
    return [describe_hook(item, pickle=None)[0] for item in hooks]


def hooked(*replies: Any, hooks: Any, tools: Any = (k.look,), **more: Any) -> dict[str, Any]:
    """An agent with these hooks whose model gives these replies."""
    return k.spec(k.script(*replies), tools, hooks=described(*hooks), **more)


def call(path: Path, text: str = "x", name: str = "look") -> tuple[str, dict[str, str]]:
    return name, {"path": str(path), "text": text}


@tool(on_crash="ask")
async def pay(path: str, text: str, context: k.ToolContext) -> str:
    """Have an effect that must not happen twice unless a person says so."""
    await k.effect(path, context)
    return f"noted {text}"


@tool(on_crash="rerun")
async def crash() -> str:
    """Kill the process that runs it."""
    worker = k.WORKER.get()
    assert worker is not None
    worker.kernel.kill(worker)
    return await k.never()


@tool(timeout=0.05)
async def dawdle() -> str:
    """Never end."""
    return await k.never()


@tool
async def stumble() -> str:
    """Raise."""
    raise ValueError("over my feet")


@pytest.fixture(autouse=True)
async def _forget() -> AsyncIterator[None]:
    SEEN.clear()
    Stubborn.leave.clear()
    yield
    Stubborn.leave.set()


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as made:
        yield made


async def finished(kernel: k.Kernel, session_id: str = "s") -> list[dict[str, Any]]:
    """The `tool_finished` events, with the time of their commits."""
    events = await kernel.events(session_id)
    return [{**event["data"], "at": event["at"]} for event in events if event["type"] == "tool_finished"]


# What they receive, and when.


async def test_each_point_in_order(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given two hooks at each point, when an agent calls a tool and answers, then all are called in the spec's order,
    and what they receive fits together."""
    run = await kernel.run("s", hooked([call(tmp_path / "n")], "done", hooks=[*FIRST, *SECOND]), "hello")
    assert (run["status"], run["text"]) == ("completed", "done")
    points = ["run_start", "before_model", "after_model", "before_tool", "after_tool", "before_model", "after_model"]
    wanted = [f"{which}_{point}" for point in [*points, "run_end"] for which in ("first", "second")]
    assert [name for name, _, _ in SEEN] == wanted
    facts = [(c.point, c.round, c.call_key, c.call_id, c.tool, c.outcome, c.text) for _, c, _ in SEEN[::2]]
    assert facts == [
        ("run_start", 0, "s/r", "", "", "", "hello"),
        ("before_model", 1, "s/r/1", "", "", "", ""),
        ("after_model", 1, "s/r/1", "", "", "", ""),
        ("before_tool", 1, "s/r/1/0", "r/1/0", "look", "", ""),
        ("after_tool", 1, "s/r/1/0", "r/1/0", "look", "ok", "noted x"),
        ("before_model", 2, "s/r/2", "", "", "", ""),
        ("after_model", 2, "s/r/2", "", "", "", "done"),
        ("run_end", 2, "s/r", "", "", "completed", "done"),
    ]
    assert {(c.session_id, c.run_id, c.agent, c.redone) for _, c, _ in SEEN} == {("s", "r", "agent", False)}
    assert [c.arguments for c in contexts("before_tool", "after_tool")] == [call(tmp_path / "n")[1]] * 4
    asked = [request.body["messages"] for request in kernel.server.requests]
    assert [c.messages for c in contexts("before_model")[::2]] == asked


async def test_what_a_hook_gets_is_its_own(kernel: k.Kernel, tmp_path: Path) -> None:
    """A hook that changes what it was given changes neither the call, nor the request, nor what the next one sees."""
    agent = hooked([call(tmp_path / "n")], "done", hooks=[meddle, meddle_more, *FIRST])
    assert (await kernel.run("s", agent))["status"] == "completed"
    assert (await kernel.results(), len(k.notes(tmp_path / "n"))) == (["noted x"], 1)
    assert contexts("before_tool")[0].arguments == call(tmp_path / "n")[1]
    assert [len(c.messages or ()) for c in contexts("before_model")] == [2, 4]
    assert [len(request.body["messages"]) for request in kernel.server.requests] == [2, 4]


# Refusing and replacing.


@pytest.mark.parametrize("policy", [k.look, k.note], ids=["rerun", "report"])
async def test_a_refused_call_is_not_executed(kernel: k.Kernel, tmp_path: Path, policy: Any) -> None:
    """The model reads why and goes on; later `before_tool` hooks are not asked, the others hear of it; the call was
    never started."""
    agent = hooked([call(tmp_path / "n", name=policy.__name__)], "done", hooks=[deny, *FIRST], tools=[policy])
    assert (await kernel.run("s", agent))["status"] == "completed"
    [result] = await kernel.results()
    assert result == f"not executed: the hook deny refused it: {policy.__name__} is not for today"
    [event] = await finished(kernel)
    assert (event["outcome"], event["executions"], k.notes(tmp_path / "n")) == ("refused", 0, [])
    assert [name for name, c, _ in SEEN if c.tool] == ["deny", "first_after_tool", "first_tool_error"]
    assert "tool_started" not in await kernel.types("s")


async def test_a_sub_agent_or_a_question_can_be_refused(kernel: k.Kernel) -> None:
    """What the session does itself is asked for as any other call: nobody is started, nobody is asked."""
    calls = [("spawn_agent", {"task": "dig"}), ("request_user_input", {"prompt": "Why?"}), ("wait", {"seconds": 99})]
    agent = hooked(calls, "done", hooks=[deny], tools=[name for name, _ in calls])
    assert (await kernel.run("s", agent))["status"] == "completed"
    assert [event["outcome"] for event in await finished(kernel)] == ["refused"] * 3
    assert not {"child_spawned", "input_requested", "timer_set"} & set(await kernel.types("s"))


async def test_arguments_are_replaced_one_hook_after_the_other(kernel: k.Kernel, tmp_path: Path) -> None:
    """The tool gets what the last hook left; the history keeps what the model wrote, and the other hooks see that."""
    again = {**described(louder)[0], "name": "again"}
    agent = hooked([call(tmp_path / "n")], "done", hooks=[louder, *FIRST])
    agent["hooks"].insert(1, again)
    await kernel.run("s", agent)
    assert await kernel.results() == ["noted x!!"]
    texts = [(c.arguments or {})["text"] for c in contexts("before_tool", "after_tool")]
    assert texts == ["x", "x!", "x!!", "x"]
    [written] = [message["tool_calls"] for message in await kernel.messages("s") if message.get("tool_calls")]
    assert json.loads(written[0][2])["text"] == "x"


async def test_a_sub_agent_gets_another_task(kernel: k.Kernel) -> None:
    """Replaced arguments of `spawn_agent` are those that the sub-agent is started with."""

    @hook("before_tool")
    def other_task(_context: HookContext) -> Replace:
        return Replace(arguments={"task": "paint"})

    other_task.__qualname__ = "other_task"
    globals()["other_task"] = other_task
    child = k.spec(name="worker", hash="worker")
    agent = hooked(
        [("spawn_agent", {"task": "dig"})], "done", hooks=[other_task, mark], tools=["spawn_agent"],
        agents={"worker": child},
    )  # fmt: skip
    await kernel.run("s", agent)
    assert await kernel.results() == ["offline: paint [seen]"]


async def test_results_are_replaced_before_anybody_sees_them(kernel: k.Kernel, tmp_path: Path) -> None:
    """What `after_tool` makes of a result is in the message, in the event and in what `tool_error` receives; the text
    it replaced is nowhere in the store."""

    @hook("after_tool")
    async def redact(context: HookContext) -> Replace:
        return Replace(text=context.text.replace("feet", "***"))

    redact.__qualname__ = "redact"
    globals()["redact"] = redact
    await kernel.run("s", hooked([("stumble", {})], "done", hooks=[redact, *FIRST], tools=[stumble]))
    assert await kernel.results() == ["ValueError: over my ***"]
    assert [c.text for c in contexts("tool_error")] == ["ValueError: over my ***"]
    assert "feet" not in json.dumps([await kernel.messages("s"), await kernel.events("s")])


async def test_the_model_is_not_asked(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a hook refuses the second round, then the run fails as `refused` with the tool's result kept, and the
    session accepts the next input."""
    run = await kernel.run("s", hooked([call(tmp_path / "n")], "done", hooks=[close_the_door, *FIRST]))
    assert (run["status"], run["error"]["code"], run["rounds"]) == ("failed", "refused", 1)
    assert "the hook close_the_door refused: enough is enough" in run["error"]["message"]
    assert (kernel.server.stats.requests, await kernel.results()) == (1, ["noted x"])
    assert [c.outcome for c in contexts("run_end")] == ["failed"]
    assert (await kernel.info("s"))["status"] == "idle"
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["error"]["code"] == "refused"


# Hooks that fail.


@pytest.mark.parametrize("kind", ["raises", "hangs", "blocks", "talks", "gone"])
async def test_before_tool_fails_closed(kernel: k.Kernel, tmp_path: Path, kind: str) -> None:
    """A hook that raises, hangs, returns nonsense or can't be loaded: the call is not executed, the result names the
    hook, and the run goes on."""
    agent = hooked([call(tmp_path / "n")], "done", hooks=[], tool_timeout=0.1)
    agent["hooks"].append(failing("before_tool", kind))
    assert (await kernel.run("s", agent))["status"] == "completed"
    [result] = await kernel.results()
    assert result.startswith("not executed: the hook broken failed: ")
    assert ([e["outcome"] for e in await finished(kernel)], k.notes(tmp_path / "n")) == (["refused"], [])


async def test_a_hook_that_never_returns_costs_its_process(kernel: k.Kernel, tmp_path: Path) -> None:
    """A synchronous hook that outlives its timeout can't be stopped: the session goes on in another process."""
    agent = hooked([call(tmp_path / "n")], "done", hooks=[], tool_timeout=0.1)
    agent["hooks"].append(failing("before_tool", "blocks"))
    assert (await kernel.run("s", agent))["status"] == "completed"
    assert [worker.task.done() for worker in kernel.workers.values()].count(True) == 1
    assert (await kernel.info("s"))["restarts"] == 0


@pytest.mark.parametrize("made", [{"text": 7}, {"path": "n", "text": "x", "more": 1}, {"path": {1}, "text": "x"}, None])
async def test_arguments_that_do_not_fit(kernel: k.Kernel, tmp_path: Path, made: Any) -> None:
    """Arguments that the tool does not take, that JSON can't say, or none at all are the hook's failure, not the
    model's: the call is not executed."""

    @hook("before_tool")
    def unfit(_context: HookContext) -> Replace:
        return Replace(arguments=made)

    unfit.__qualname__ = "unfit"
    globals()["unfit"] = unfit
    await kernel.run("s", hooked([call(tmp_path / "n")], "done", hooks=[unfit]))
    [event] = await finished(kernel)
    assert (event["outcome"], k.notes(tmp_path / "n")) == ("refused", [])
    assert "the hook unfit failed" in event["error_message"]


@pytest.mark.parametrize("kind", ["raises", "talks", "gone"])
async def test_before_model_fails_closed(kernel: k.Kernel, kind: str) -> None:
    """The run ends without a model call, and its error names the hook."""
    agent = hooked("done", hooks=[])
    agent["hooks"].append(failing("before_model", kind))
    run = await kernel.run("s", agent)
    assert (run["status"], run["error"]["code"], kernel.server.stats.requests) == ("failed", "refused", 0)
    assert "the hook broken failed" in run["error"]["message"]


@pytest.mark.parametrize("point", ["run_start", "after_model", "after_tool", "tool_error", "run_end"])
@pytest.mark.parametrize("kind", ["raises", "hangs", "talks", "gone"])
async def test_what_only_sees_holds_nobody_up(
    kernel: k.Kernel, kind: str, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook that fails elsewhere is logged, those behind it are called, and the run goes on as without it."""
    agent = hooked([("stumble", {})], "done", hooks=[], tools=[stumble], tool_timeout=0.1)
    agent["hooks"] = [failing(point, kind), *described(*FIRST)]
    run = await kernel.run("s", agent)
    assert (run["status"], await kernel.results()) == ("completed", ["ValueError: over my feet"])
    assert any("the hook broken failed" in record.message for record in caplog.records)
    assert point in {c.point for _, c, _ in SEEN}


# Every outcome.


@pytest.mark.parametrize(
    ("wanted", "outcome"),
    [
        (("missing", {}), "unknown_tool"),
        (("look", '{"path"'), "invalid"),
        (("look", [1]), "invalid"),
        (("stumble", {}), "error"),
        (("dawdle", {}), "timeout"),
        (("request_user_input", {}), "invalid"),
        (("spawn_agent", {}), "invalid"),
        (("wait", {"seconds": 0.01}), "ok"),
        (("list_jobs", {}), "ok"),
    ],
    ids=str,
)
async def test_whatever_the_outcome(kernel: k.Kernel, wanted: Any, outcome: str) -> None:
    """However a call ends, `after_tool` is called once, may replace the text, and `tool_error` hears of what is not
    `ok`; only a call of a tool that does not exist has no `before_tool`."""
    tools = [k.look, stumble, dawdle, "request_user_input", "spawn_agent", "wait", "list_jobs"]
    await kernel.run("s", hooked([wanted], "done", hooks=[gate, mark, *FIRST], tools=tools))
    [result] = await kernel.results()
    assert result.endswith(" [seen]")
    assert [(c.point, c.outcome) for _, c, _ in SEEN if c.tool and c.point != "before_tool"] == [
        ("after_tool", outcome), ("after_tool", outcome), *([("tool_error", outcome)] if outcome != "ok" else []),
    ]  # fmt: skip
    assert len(contexts("before_tool")) == (0 if outcome == "unknown_tool" else 2)
    unreadable = wanted[1] in ('{"path"', [1])
    assert all((c.arguments is None) == unreadable for c in contexts("after_tool"))


async def test_a_repeated_call_is_only_seen(kernel: k.Kernel, tmp_path: Path) -> None:
    """Its text is what repetitions are counted by, so it stays: the limit holds although a hook would replace it."""
    agent = hooked(*[[call(tmp_path / "n")]] * 9, "done", hooks=[gate, mark], repeat_limit=2)
    run = await kernel.run("s", agent)
    assert (run["error"] or {})["code"] == "no_progress"
    outcomes = [event["outcome"] for event in await finished(kernel)]
    assert (outcomes, [c.outcome for c in contexts("after_tool")]) == (["ok", "repeated", "repeated", "cancelled"],) * 2
    assert (await kernel.results())[:3] == ["noted x [seen]", REPEATED, REPEATED]
    assert len(contexts("before_tool")) == 1


async def test_a_cancelled_run(kernel: k.Kernel, tmp_path: Path) -> None:
    """The agent's last words: each open call's `after_tool` and `run_end`, as cancelled."""

    def cancel(_number: int, label: str, _worker: k.Worker | None) -> None:
        if label == "tool begins":
            kernel.later(kernel.ask("cancel", "s", "r", "enough"))

    kernel.on_point = cancel
    agent = hooked([("note", call(tmp_path / "n")[1]), ("dawdle", {})], "done", hooks=FIRST, tools=[k.note, dawdle])
    agent["tools"][1]["timeout"] = 30.0
    assert (await kernel.run("s", agent))["status"] == "cancelled"
    assert {c.call_id: c.outcome for c in contexts("after_tool")}["r/1/1"] == "cancelled"
    assert [c.outcome for c in contexts("run_end")] == ["cancelled"]


async def test_sub_agents_have_hooks_of_their_own(kernel: k.Kernel, tmp_path: Path) -> None:
    """A sub-agent has the hooks that its own specification lists, and a copy of the agent has those of the agent."""
    plain = k.spec(k.script([call(tmp_path / "n")], "dug"), [k.look], name="worker", hash="worker")
    agent = hooked(
        [("spawn_agent", {"task": "dig"})], "done", hooks=FIRST, tools=["spawn_agent"], agents={"worker": plain}
    )  # fmt: skip
    assert (await kernel.run("s", agent))["status"] == "completed"
    assert {c.session_id for _, c, _ in SEEN} == {"s"}
    assert [c.text for c in contexts("after_tool")] == ["dug"]
    SEEN.clear()
    # The copy's model gives the same replies, so it would spawn as well, and is at the end of the tree.
    agent = hooked([("spawn_agent", {"task": "dig"})], "done", hooks=FIRST, tools=["spawn_agent"], max_depth=1)
    await kernel.run("t", agent)
    assert {c.point for c in contexts(*POINTS) if c.session_id != "t"} >= {"run_start", "before_tool", "run_end"}


# Deaths.


async def sweep(kernel: k.Kernel, policy: Any, directory: Path, victim: str) -> list[str]:
    """A session for each point of an undisturbed one, with a death there; what was not as promised."""

    def agent(path: Path) -> dict[str, Any]:
        name = policy.__name__
        rounds = [[call(path, "a", name)], [call(path, "b", name), call(path, "c", name)]]
        return hooked(*rounds, "all done", hooks=[gate, mark, *FIRST], tools=[policy])

    await kernel.run("clean", agent(directory / "clean"))
    points, problems = len(kernel.points), []
    assert not any(c.redone for _, c, _ in SEEN)
    for at in tiers.points(range(points + 4)):
        session_id, path = f"s{at}", directory / f"notes-{at}"
        SEEN.clear()
        deaths = Deaths(kernel, session_id, at, victim)
        run = await kernel.run(session_id, agent(path))
        kernel.on_point = None
        await kernel.quiet()
        where = f"death of the {victim} at {deaths.where}"
        if run["status"] != "completed":
            problems.append(f"{where}: {run['status']}: {run['error']}")
        problems += [f"{where}: {text}" for text in await broken(kernel, session_id, path)]
    return problems


async def broken(kernel: k.Kernel, session_id: str, path: Path) -> list[str]:
    """What of the promises does not hold for a session."""
    problems = [
        f"a result that no hook saw: {text}" for text in await kernel.results(session_id) if text[-7:] != " [seen]"
    ]
    for event in await finished(kernel, session_id):
        before = [c for _, c, when in SEEN if c.point == "after_tool" and c.call_id == event["call_id"]
                  and c.outcome == event["outcome"] and when <= event["at"]]  # fmt: skip
        if len(before) < 2:  # there are two such hooks
            problems.append(f"committed before its hooks were called: {event}")
    passed = [c.call_key for c in contexts("before_tool")]
    for key in k.notes(path):
        if key not in passed:
            problems.append(f"{key} was executed without a before_tool")
    known: set[tuple[str, str, str]] = set()
    for name, c, _ in SEEN:
        if (name, c.point, c.call_key) in known and not c.redone:
            problems.append(f"{name} was called again for {c.call_key} and not marked as redone")
        known.add((name, c.point, c.call_key))
    missing = {"run_start", "before_model", "after_model", "run_end"} - {c.point for _, c, _ in SEEN}
    rounds = {c.round for c in contexts("before_model")} ^ {c.round for c in contexts("after_model")}
    return problems + [f"never called: {missing}, {rounds}"] * bool(missing or rounds)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("policy", "victim"),
    [(k.look, "frame"), (k.note, "frame"), (k.careful, "frame"), (k.note, "node")],
    ids=["rerun", "report", "reconcile", "node"],
)
async def test_a_death_anywhere(policy: Any, victim: str, tmp_path: Path) -> None:
    """Frame or node service killed at each call, commit, tool and hook of a session: every result went through the
    hooks before its commit, every execution was let pass, and a repetition is marked as one."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        problems = await sweep(kernel, policy, tmp_path, victim)
    assert not problems, "\n".join(problems)


async def test_the_in_doubt_path(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a process died of a tool's effect, then `after_tool` gets what the model reads, as `interrupted` and as a
    possible repetition, and `tool_error` as well."""

    def die(_number: int, label: str, worker: k.Worker | None) -> None:
        if label == "tool has had its effect" and worker is not None:
            kernel.kill(worker)

    kernel.on_point = die
    agent = hooked([call(tmp_path / "n", name="note")], "done", hooks=[mark, *FIRST], tools=[k.note])
    await kernel.run("s", agent)
    assert await kernel.results() == [f"{INTERRUPTED} [seen]"]
    facts = [(c.point, c.outcome, c.text, c.redone) for c in contexts("after_tool", "tool_error")]
    text = f"{INTERRUPTED} [seen]"
    assert facts == [
        ("after_tool", "interrupted", INTERRUPTED, True), ("after_tool", "interrupted", text, True),
        ("tool_error", "interrupted", text, True),
    ]  # fmt: skip


@pytest.mark.parametrize("denied", [False, True])
async def test_a_person_lets_it_run_again(store: str, tmp_path: Path, denied: bool) -> None:
    """Given a call in doubt that a person lets run again, then `before_tool` is asked again, and its context says so;
    where it refuses this time, the model reads that the first execution's outcome is unknown."""
    passes = iter([None, Refuse("no more") if denied else None])

    @hook("before_tool")
    async def twice(context: HookContext) -> Refuse | None:
        seen("twice", context)
        return next(passes)

    twice.__qualname__ = "twice"
    globals()["twice"] = twice
    async with k.running(store, tmp_path) as kernel:
        deaths = iter([True])

        def die(_number: int, label: str, worker: k.Worker | None) -> None:
            if label == "tool has had its effect" and worker is not None and next(deaths, False):
                kernel.kill(worker)

        kernel.on_point = die
        agent = hooked([call(tmp_path / "n", name="pay")], "done", hooks=[twice, mark], tools=[pay])
        await kernel.spawn("s", agent)
        await kernel.send("s")
        await kernel.paused("s")
        assert contexts("after_tool") == []
        await kernel.ask("answer", "s", "r/1/0", "rerun", "", 1)
        assert (await kernel.end("s"))["status"] == "completed"
        assert [c.redone for c in contexts("before_tool")] == [False, True]
        [result] = await kernel.results()
        [context] = contexts("after_tool")
        refused = f"{INTERRUPTED}; not executed again: the hook twice refused it: no more [seen]"
        assert result == (refused if denied else "noted x [seen]")
        assert (context.outcome, context.redone) == ("interrupted" if denied else "ok", True)
        assert len(k.notes(tmp_path / "n")) == (1 if denied else 2)


async def test_a_person_answers_after_a_death(store: str, tmp_path: Path) -> None:
    """Given a process died after the hooks of the next model call, so that the tool before it is in doubt, and a person
    is asked, then those hooks learn of the repetition, though the session has left a process of itself since."""
    async with k.running(store, tmp_path) as kernel:
        deaths = iter([True])

        def die(_number: int, label: str, worker: k.Worker | None) -> None:
            if label == "approached round 2" and worker is not None and next(deaths, False):
                kernel.kill(worker)

        kernel.on_point = die
        await kernel.spawn("s", hooked([call(tmp_path / "n", name="pay")], "done", hooks=[approach], tools=[pay]))
        await kernel.send("s")
        await kernel.paused("s")
        await kernel.ask("answer", "s", "r/1/0", "ok", "paid", 1)
        assert (await kernel.end("s"))["status"] == "completed"
        assert [(c.round, c.redone) for c in contexts("before_model")] == [(1, False), (2, False), (2, True)]


async def test_a_person_answers(store: str, tmp_path: Path) -> None:
    """A person's answer goes through `after_tool` before the model reads it, also when the process dies of that; the
    answer is not lost."""
    async with k.running(store, tmp_path) as kernel:
        deaths = iter([True])

        def die(_number: int, label: str, worker: k.Worker | None) -> None:
            if label == "hook has ended" and worker is not None and next(deaths, False):
                kernel.kill(worker)

        kernel.on_point = die
        question = ("request_user_input", {"prompt": "Which colour?"})
        await kernel.spawn("s", hooked([question], "done", hooks=[gate, mark], tools=["request_user_input"]))
        await kernel.send("s")
        await kernel.paused("s")
        await kernel.ask("answer", "s", "r/1/0", "ok", "blue", 1)
        assert (await kernel.end("s"))["status"] == "completed"
        assert await kernel.results() == ["blue [seen]"]
        assert [(c.outcome, c.text) for c in contexts("after_tool")] == [("ok", "blue")] * 2
        assert (contexts("after_tool")[1].redone, len(contexts("before_tool"))) == (True, 1)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_calls_that_are_given_up(kernel: k.Kernel, tmp_path: Path, cancelled: bool) -> None:
    """Given a call that its process dies of again and again, then the store gives it up, and `after_tool` sees that
    before the model, or the end of the run, has it as a message."""
    if cancelled:  # it is cancelled as soon as it is given up

        def cancel(_number: int, label: str, worker: k.Worker | None) -> None:
            if label == "hook begins" and worker is not None:
                kernel.later(kernel.ask("cancel", "s", "r", "enough"))

        kernel.on_point = cancel
    run = await kernel.run("s", hooked([("crash", {})], "done", hooks=[gate, mark, *FIRST], tools=[crash]))
    [result] = await kernel.results()
    [context] = [c for name, c, _ in SEEN if name == "mark"]
    assert (context.outcome, context.redone, result) == ("aborted", True, f"{context.text} [seen]")
    assert run["status"] in (("cancelled", "completed") if cancelled else ("completed",))
    assert [c.redone for name, c, _ in SEEN if name == "gate"] == [False, True, True, True]


async def test_paging_is_no_repetition(tmp_path: Path) -> None:
    """Given more sessions than processes, so that they leave theirs and come back, then no hook is called as a
    possible repetition, and none is called twice."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1, latency=0.02) as kernel:
        names = [f"s{number}" for number in range(4)]
        for name in names:
            await kernel.spawn(name, hooked(*[[call(tmp_path / name, str(n))] for n in range(3)], "done", hooks=FIRST))
        for name in names:
            await kernel.send(name)
        assert {(await kernel.end(name))["status"] for name in names} == {"completed"}
        assert max([(await kernel.info(name))["epoch"] for name in names]) > 1
    assert not any(c.redone for _, c, _ in SEEN)
    keys = [(c.point, c.call_key) for _, c, _ in SEEN]
    assert len(keys) == len(set(keys)) == 4 * (2 + 4 * 2 + 3 * 2)


@hook("run_start")
async def linger(context: HookContext) -> None:
    """See a run start, with a point to wait at after that."""
    seen("linger", context)
    await point("run has been seen")


async def test_an_upgrade_is_a_repetition(kernel: k.Kernel) -> None:
    """Given a run that its frame has begun with, and shown to a hook, when its session is upgraded before that is
    committed, then another activation begins with it, and the hook learns that it may have seen the run before."""
    shown, point = asyncio.Event(), kernel.point

    async def waits(label: str, worker: k.Worker | None) -> None:
        if label == "run has been seen" and not shown.is_set():
            shown.set()
            await k.never()
        await point(label, worker)

    kernel.point = waits  # type: ignore[method-assign]
    await kernel.spawn("s", hooked("old", hooks=[linger], on_change="migrate", hash="old"))
    await kernel.send("s")
    await shown.wait()
    await kernel.spawn("s", hooked("new", hooks=[linger], on_change="migrate", hash="new"))
    run = await kernel.end("s")
    assert (run["text"], [context.redone for context in contexts("run_start")]) == ("new", [False, True])


async def test_a_failed_model_call(tmp_path: Path) -> None:
    """A model call that fails for good has no `after_model`, and the run's end is seen."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, faults=Faults(status_500=1.0)) as kernel:
        run = await kernel.run("s", hooked("done", hooks=FIRST, deadline=0.05))
        assert run["status"] == "failed"
    assert [c.point for _, c, _ in SEEN] == ["run_start", "before_model", "run_end"]


# How they travel, and what they are a part of.


def local(word: str) -> Any:
    """A hook that other processes can't import."""

    @hook("before_tool", name=f"no_{word}")
    def check(context: HookContext) -> Refuse | None:
        return Refuse(f"{word} is not wanted") if word in (context.arguments or {}).get("text", "") else None

    return check


async def test_hooks_travel_by_value(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given hooks that can't be imported, then their code is stored with the session, kept as long as it is needed,
    and called in its processes; switched off, the agent is refused."""
    spec = AgentSpec(
        name="a", model="offline", tools=[k.look], hooks=[local("rain"), local("snow")],
        instructions=k.script([call(tmp_path / "n", "rain"), call(tmp_path / "n", "sun")], "done"),
    )  # fmt: skip
    compiled = compile_spec(spec, model="offline", profile=None)
    assert (len(compiled.blobs), compiled.uses_own_code) == (2, True)
    assert digests(compiled.spec, "") == set(compiled.blobs)
    session = {"session_id": "s", "spec": compiled.spec, "placement": "", "metadata": {}}
    await kernel.ask("spawn", session, compiled.blobs)
    await kernel.send("s")
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.results() == ["not executed: the hook no_rain refused it: rain is not wanted", "noted sun"]
    with pytest.raises(InvalidSpec, match=r"hook 'no_rain' .* by value is switched off"):
        compile_spec(spec, model="offline", profile=None, pickle=None)


def test_hooks_are_a_part_of_what_an_agent_is() -> None:
    """A hook that came, went, has another source or another place is reported by name; the same ones are no change,
    though code that travels by value differs from process to process. An agent without hooks is the same as ever."""

    def compiled(*hooks: Any) -> dict[str, Any]:
        return compile_spec(AgentSpec(name="a", hooks=hooks), model="offline", profile=None).spec

    one = compiled(gate, mark)
    assert changes(one, compiled(gate, mark)) == ()
    assert changes(one, compiled(mark, gate)) == ("hooks",)
    assert changes(one, compiled(gate, deny)) == ("hooks.deny", "hooks.mark")
    assert changes(compiled(), one) == changes(one, compiled()) == ("hooks.gate", "hooks.mark")
    edited = {**one, "hooks": [{**one["hooks"][0], "code": "other"}, one["hooks"][1]]}
    assert changes(one, edited) == ("hooks.gate",)
    value = {**one, "hooks": [{**one["hooks"][0], "source": {"blob": digest}} for digest in "a"]}
    assert changes(value, {**value, "hooks": [{**value["hooks"][0], "source": {"blob": "b"}}]}) == ()
    assert "hooks" not in compiled()
    assert len({compiled()["hash"], one["hash"], compiled(mark, gate)["hash"]}) == 3


def test_hooks_that_make_no_sense() -> None:
    """Unknown points, functions that are not marked, names that are there twice."""
    with pytest.raises(InvalidSpec, match="there is no hook 'before_lunch'; there are: session_start, run_start"):
        hook("before_lunch")
    with pytest.raises(InvalidSpec, match="decorated with @hook"):
        AgentSpec(name="a", hooks=[k.look])
    with pytest.raises(InvalidSpec, match="must be a list"):
        AgentSpec(name="a", hooks="gate")  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match="hooks: 'gate' is there twice"):
        compile_spec(AgentSpec(name="a", hooks=[gate, gate]), model="offline", profile=None)


def test_hooks_of_an_agent_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file names hooks as `module:function`; `certify` runs with them, and reports that they may act anywhere."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "house_rules.py").write_text(
        "from understudy import hook\n@hook('before_tool')\ndef check(context):\n    return None\n"
    )
    (tmp_path / "agent.toml").write_text('name = "a"\nmodel = "offline"\nhooks = ["house_rules:check"]\ninput = "x"\n')
    request = requested(read_agent(tmp_path / "agent.toml"), None, points=None, only=None, timeout=1.0)
    assert [item["source"] for item in request.spec["hooks"]] == [{"import": "house_rules:check"}]
    assert reaches_outside(request.spec) == ["check"]
    (tmp_path / "agent.toml").write_text('name = "a"\nhooks = ["house_rules:hook", "nowhere:x"]\n')
    with pytest.raises(InvalidSpec) as caught:
        read_agent(tmp_path / "agent.toml")
    assert [problem["field"] for problem in caught.value.details["problems"]] == ["hooks.0", "hooks.1"]


PONDERING = asyncio.Event()


@hook("after_tool")
async def ponder(context: HookContext) -> None:
    """Take long over a result the first time."""
    first = not contexts("after_tool")
    seen("ponder", context)
    if first:
        PONDERING.set()
        await k.never()


async def test_a_cancel_while_a_hook_is_shown_a_result(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a call that has ended when its run is cancelled, while a hook is shown its result, then the hook is shown
    it once more, marked as redone, and the call keeps its result."""
    PONDERING.clear()
    await kernel.spawn("s", hooked([call(tmp_path / "n")], "done", hooks=[ponder]))
    await kernel.send("s")
    await PONDERING.wait()
    await kernel.ask("cancel", "s", "r", "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert [(c.outcome, c.text, c.redone) for c in contexts("after_tool")] == [
        ("ok", "noted x", False),
        ("ok", "noted x", True),
    ]
    [finished] = [event for event in await kernel.events("s") if event["type"] == "tool_finished"]
    assert (finished["data"]["outcome"], finished["data"]["executions"]) == ("ok", 1)
