"""What hooks may want: to add, to replace, to refuse, to go on, to stop. All of it is committed before it counts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.directives import Continue, Inject, Refuse, Replace, Stop
from understudy.actors.hooks import HookContext, describe_hook, hook
from understudy.actors.tools import tool
from understudy.errors import InvalidSpec
from understudy.testing.offline import OfflineServer
from understudy.testing.policies import Reply, content_text

from .. import tiers
from . import kernel as k
from .deaths import Deaths

pytestmark = pytest.mark.conformance

WANTED: dict[str, Any] = {}
"""What the hook of each point returns; a function is called with the context."""
SEEN: list[HookContext] = []


def _wanted(context: HookContext) -> Any:
    SEEN.append(context)
    wanted = WANTED.get(context.point)
    return wanted(context) if callable(wanted) else wanted


@hook("session_start")
def session_start(context: HookContext) -> Any:
    return _wanted(context)


@hook("run_start")
def run_start(context: HookContext) -> Any:
    return _wanted(context)


@hook("before_model")
def before_model(context: HookContext) -> Any:
    return _wanted(context)


@hook("before_tools")
def before_tools(context: HookContext) -> Any:
    return _wanted(context)


@hook("after_tools")
def after_tools(context: HookContext) -> Any:
    return _wanted(context)


@hook("before_fold")
def before_fold(context: HookContext) -> Any:
    return _wanted(context)


@hook("after_fold")
def after_fold(context: HookContext) -> Any:
    return _wanted(context)


@hook("memory_recalled")
def memory_recalled(context: HookContext) -> Any:
    return _wanted(context)


@hook("run_end")
def run_end(context: HookContext) -> Any:
    return _wanted(context)


@hook("run_start", on_failure="refuse")
def strict(context: HookContext) -> None:
    raise ValueError("out of order")


ALL = (session_start, run_start, before_model, before_tools, after_tools, before_fold, after_fold, run_end)


@tool(on_crash="rerun")
async def look(what: str) -> str:
    """Look."""
    return f"saw {what}"


@pytest.fixture(autouse=True)
def clean() -> None:
    WANTED.clear()
    SEEN.clear()


def policy(body: dict[str, Any]) -> Reply:
    """A call, then an answer that names all texts it has seen, its model and its tools."""
    messages = [m for m in body["messages"] if m["role"] != "system"]
    if not any(m["role"] == "tool" for m in messages) and body.get("tools"):
        return Reply(tool_calls=(("look", {"what": "it"}),))
    said = " | ".join(f"{m['role']}: {content_text(m)}" for m in messages if m.get("content"))
    tools = ",".join(one["function"]["name"] for one in body.get("tools", ()))
    return Reply(text=f"{body['model']} [{tools}] {body.get('temperature')} {said}")


def compiled(*hooks: Any, **more: Any) -> dict[str, Any]:
    described = [describe_hook(item, pickle=None)[0] for item in hooks or ALL]
    return k.spec("", [look], hooks=described, **more)


async def run(tmp_path: Path, *hooks: Any, content: str = "go", **more: Any) -> tuple[dict[str, Any], OfflineServer]:
    with OfflineServer(policy) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            ended = await kernel.run("s", compiled(*hooks, **more), content)
            ended["messages"] = await kernel.messages("s")
    return ended, server


MAY_END = threading.Event()


@tool(on_crash="rerun", timeout=0.1)
def overlong() -> str:
    """Outlive its timeout, in a thread that nothing stops."""
    MAY_END.wait(k.STUCK_SECONDS)
    return "too late"


@pytest.mark.parametrize("wanted", [Inject("so"), Stop("enough")], ids=["inject", "stop"])
async def test_the_tools_hook_is_asked_before_a_process_is_replaced(tmp_path: Path, wanted: Any) -> None:
    """Given a tool in a thread that outlives its timeout, so that its process is replaced, then the hook behind the
    round's tools is asked all the same, once, and what it wants is done."""
    WANTED.update(after_tools=wanted)
    MAY_END.clear()
    described = [describe_hook(after_tools, pickle=None)[0]]
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        try:
            ended = await kernel.run("s", k.spec("", [overlong], hooks=described), "call overlong {}\n")
            messages = await kernel.messages("s")
            busy, *others = kernel.workers.values()
            assert {busy.task.done(), *(worker.task.done() for worker in others)} == {True, False}
        finally:
            MAY_END.set()
    assert [context.calls for context in SEEN] == [(("r/1/0", "overlong", "timeout"),)]
    if isinstance(wanted, Stop):
        assert (ended["status"], ended["text"]) == ("completed", "enough")
    else:
        assert [m["content"] for m in messages if m.get("origin")] == ["so"]


async def test_an_injected_message_stays(tmp_path: Path) -> None:
    """`Inject` at the start of a run, of a session and after the tools: the model has it from then on, in its place,
    and the log says which hook it is of."""
    WANTED.update(
        session_start=Inject("be brief"), run_start=[Inject("be kind"), Inject("be fast")], after_tools=Inject("so")
    )
    ended, _ = await run(tmp_path)
    assert ended["text"] == (
        "offline [look] None user: go | user: be brief | user: be kind | user: be fast | tool: saw it | user: so"
    )
    origins = [message.get("origin") for message in ended["messages"] if message.get("origin")]
    assert origins == ["hook:session_start", "hook:run_start", "hook:run_start", "hook:after_tools"]


async def test_a_message_for_one_round_comes_last_and_goes(tmp_path: Path) -> None:
    """`visibility="this_round"`: the message is behind all others in the next request, and in no other; what comes
    before it stays the beginning of the next request."""
    WANTED["before_model"] = lambda context: Inject(f"round {context.round}", visibility="this_round")
    ended, server = await run(tmp_path)
    first, second = (request.body["messages"] for request in server.requests)
    assert [content_text(m) for m in first] == ["go", "round 1"]
    assert [content_text(m) for m in second if m.get("content")] == ["go", "saw it", "round 2"]
    assert second[: len(first) - 1] == first[:-1]
    assert ended["status"] == "completed"


async def test_input_and_answer_are_replaced(tmp_path: Path) -> None:
    """`Replace(text=…)`: the model has the other input, the caller the other answer."""
    WANTED.update(run_start=Replace(text="my number is ****"), run_end=lambda c: Replace(text=c.text.upper()))
    ended, server = await run(tmp_path, content="my number is 4711")
    assert "4711" not in str([request.body for request in server.requests])
    assert ended["text"] == "OFFLINE [LOOK] NONE USER: MY NUMBER IS **** | TOOL: SAW IT"


async def test_model_parameters_and_tools_of_a_call_are_replaced(tmp_path: Path) -> None:
    """`Replace(model=…, parameters=…, tools=…)` before a model call is for that call only."""
    WANTED["before_model"] = lambda c: (
        Replace(model="small", parameters={"temperature": 0.5}, tools=["look"]) if c.round == 1 else Replace(tools=[])
    )
    ended, server = await run(tmp_path)
    asked = [(r.body["model"], r.body.get("temperature"), bool(r.body.get("tools"))) for r in server.requests]
    assert asked == [("small", 0.5, True), ("offline", None, False)]
    assert ended["status"] == "completed"


@pytest.mark.parametrize("point", ["session_start", "run_start", "before_model", "after_tools", "run_end"])
async def test_a_refused_run_fails(point: str, tmp_path: Path) -> None:
    """`Refuse`: the run ends as failed, with a reason that names the hook, and without a text."""
    WANTED[point] = Refuse("not here")
    ended, server = await run(tmp_path)
    assert (ended["status"], ended["error"]["code"], ended["text"]) == ("failed", "refused", "")
    assert ended["error"]["message"] == f"the hook {point} refused: not here"
    assert len(server.requests) == {"after_tools": 1, "run_end": 2}.get(point, 0)


async def test_a_refused_input_reaches_no_model(tmp_path: Path) -> None:
    """Given an input that a guardrail refused: the next run of the session goes without it."""
    WANTED["run_start"] = lambda c: Refuse("no") if "secret" in c.text else None
    with OfflineServer(policy) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            await kernel.run("s", compiled(), "the secret is 4711")
            await kernel.send("s", "hello", "second")
            ended = await kernel.end("s", "second")
    assert (ended["status"], len(server.requests)) == ("completed", 2)
    assert "4711" not in str([request.body for request in server.requests])


async def test_an_end_is_vetoed(tmp_path: Path) -> None:
    """`Continue`: the model reads why it is not done, and goes on, until the hook is content or its rounds are up."""
    WANTED["run_end"] = lambda c: Continue("check it once more") if c.text.count("check it") < 2 else None
    ended, _ = await run(tmp_path)
    assert (ended["status"], ended["rounds"], ended["text"].count("check it once more")) == ("completed", 4, 3)
    WANTED["run_end"] = Continue("never enough")
    (tmp_path / "again").mkdir()
    ended, _ = await run(tmp_path / "again", max_rounds=5)
    assert (ended["status"], ended["rounds"]) == ("round_limit", 5)


@pytest.mark.parametrize(("point", "requests"), [("run_start", 0), ("before_model", 0), ("after_tools", 1)])
async def test_a_run_is_stopped(point: str, requests: int, tmp_path: Path) -> None:
    """`Stop`: the run ends as completed with the hook's text, and no model is asked any more."""
    WANTED[point] = Stop("known already")
    ended, server = await run(tmp_path)
    assert (ended["status"], ended["text"], len(server.requests)) == ("completed", "known already", requests)


async def test_the_calls_of_a_round_are_shown(tmp_path: Path) -> None:
    """`before_tools` has the calls of the round, `after_tools` how each ended as well."""
    await run(tmp_path)
    shown = [(c.point, c.calls) for c in SEEN if c.point in ("before_tools", "after_tools")]
    assert shown == [("before_tools", (("r/1/0", "look"),)), ("after_tools", (("r/1/0", "look", "ok"),))]


async def test_folds_are_seen_and_changed(tmp_path: Path) -> None:
    """`before_fold` may ask for another summary, `after_fold` may put another one in its place."""

    def folding(body: dict[str, Any]) -> Reply:
        if content_text(body["messages"][-1]) == "in one word":
            return Reply(text="blah")
        if any("mine: blah" in content_text(message) for message in body["messages"]):
            return Reply(text="done")
        return Reply(tool_calls=(("look", {"what": "x" * 400}),))

    WANTED.update(before_fold=Replace(text="in one word"), after_fold=lambda c: Replace(text=f"mine: {c.text}"))
    with OfflineServer(folding) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            context = {"window": 2_000, "representation": "full"}
            ended = await kernel.run("s", compiled(context=context, repeat_limit=0))
    assert (ended["status"], ended["text"]) == ("completed", "done")


async def test_a_hook_says_what_its_failure_means(tmp_path: Path) -> None:
    """`on_failure="refuse"`: a guardrail that raises lets nothing through; where nothing can be refused that is no
    hook."""
    ended, server = await run(tmp_path, strict)
    assert (ended["status"], ended["error"]["code"], len(server.requests)) == ("failed", "refused", 0)
    assert "strict failed: ValueError: out of order" in ended["error"]["message"]
    with pytest.raises(InvalidSpec, match="nothing can be refused there"):
        hook("after_tool", on_failure="refuse")


@pytest.mark.parametrize(
    ("point", "wanted"),
    [
        ("run_start", Continue("x")),
        ("run_start", Replace(model="m")),
        ("run_end", Inject("x")),
        ("before_model", Replace(text="x")),
        ("after_tools", Inject("x", visibility="never")),  # type: ignore[arg-type]
    ],
)
async def test_what_means_nothing_at_a_point_is_not_done(point: str, wanted: Any, tmp_path: Path) -> None:
    """A directive that is not for this point is a failure of the hook: it is ignored, or taken for a refusal."""
    WANTED[point] = wanted
    ended, _ = await run(tmp_path)
    assert ended["status"] == ("failed" if point == "before_model" else "completed")


async def test_memory_is_shown_as_a_hook_leaves_it(tmp_path: Path) -> None:
    """`memory_recalled`: what the model is shown of its notes is what the hook makes of it, and is not shown again in
    the next run where that is the same."""
    WANTED["memory_recalled"] = lambda c: Replace(text=c.text.replace("4711", "****"))

    def noting(body: dict[str, Any]) -> Reply:
        said = [content_text(m) for m in body["messages"]]
        if len(said) == 2:
            return Reply(tool_calls=(("add_note", {"text": "the code is 4711"}),))
        return Reply(text="ok")

    with OfflineServer(noting) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            memory = {"scopes": ["session"], "project": None, "max_tokens": 500, "share": 0.1, "providers": []}
            spec = k.spec("", ["notes"], hooks=[describe_hook(memory_recalled, pickle=None)[0]])
            spec["memory"] = {**memory, "timeout": 5.0}
            await kernel.run("s", {**spec, "instructions": "note"})
            for number in range(3):
                await kernel.send("s", "again", f"r{number}")
                await kernel.end("s", f"r{number}")
    shown = [content_text(m) for m in server.requests[-1].body["messages"] if "****" in content_text(m)]
    assert len(shown) == 1


@pytest.mark.sweep
async def test_a_death_anywhere_changes_no_request(tmp_path: Path) -> None:
    """Given hooks that inject, replace and veto: killed at each point, a run asks its model the same, byte for byte."""
    WANTED.update(
        run_start=[Inject("be kind"), Replace(text="went")],
        before_model=lambda c: [
            Inject(f"round {c.round}", visibility="this_round"), Replace(parameters={"temperature": c.round / 10})
        ],
        after_tools=Inject("so"),
        run_end=lambda c: Continue("once more") if "once more" not in c.text else Replace(text="done"),
    )  # fmt: skip

    async def once(at: int | None) -> tuple[list[str], int, Any]:
        directory = tmp_path / str(at)
        directory.mkdir()
        with OfflineServer(policy) as server:
            async with k.running(f"sqlite:///{directory}/store.db", directory, server=server) as kernel:
                start = len(kernel.points)
                if at is not None:
                    Deaths(kernel, "s", at)
                ended = await kernel.run("s", compiled())
                points, kernel.on_point = len(kernel.points) - start, None
                await kernel.quiet()
                transcript = await kernel.transcript("s")
        return [json.dumps(r.body, sort_keys=True) for r in server.requests], points, (ended["text"], transcript)

    clean, points, found = await once(None)
    assert len(clean) == 3
    for at in tiers.points(range(points)):
        assert (await once(at))[::2] == (clean, found), f"point {at}"
