"""Guards as a program has them: hooks beside the model call, and what is left of an answer that they hold back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from understudy import AgentSpec, HookContext, Refuse, Stop, hook, tool
from understudy.errors import InvalidSpec
from understudy.events import ModelCallFailed, TextDelta
from understudy.node.verdicts import judged
from understudy.protocol import Judged
from understudy.records import ActivationId, ModelAnswer
from understudy.testing import LocalCluster

PATIENCE = 20.0


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as made:
        yield made


def test_what_streamed_is_void(cluster: LocalCluster) -> None:
    """Given a program that follows a run, when a guard trips behind the answer, then it received the pieces, learns
    that the call failed, and has no text."""
    streamed = threading.Event()

    @hook("before_model", parallel=True)
    async def late(_context: HookContext) -> Refuse:
        await asyncio.to_thread(streamed.wait, PATIENCE)
        return Refuse("not for you")

    run = cluster.spawn(AgentSpec(name="clerk", hooks=[late])).send("hello")
    seen = []
    for event in run:
        seen.append(event)
        if isinstance(event, TextDelta):
            streamed.set()
    result = run.result(PATIENCE)
    pieces = [n for n, event in enumerate(seen) if isinstance(event, TextDelta)]
    [(place, failed)] = [(n, event) for n, event in enumerate(seen) if isinstance(event, ModelCallFailed)]
    assert pieces
    assert max(pieces) < place
    assert (failed.error_code, failed.error_message) == ("refused", "the hook late refused: not for you")
    assert (result.status, result.text) == ("failed", "")
    assert result.error is not None
    assert result.error["code"] == "refused"
    assert result.usage.total_tokens > 0


def test_a_guard_stops_a_run(cluster: LocalCluster) -> None:
    """No tool of the answer runs; the run has the guard's text; the session goes on with its next input."""
    ran = []

    @tool
    def act() -> str:
        """Act."""
        ran.append(1)
        return "done"

    @hook("before_model", parallel=True)
    def only_once(context: HookContext) -> Stop | None:
        assert context.messages is not None
        return Stop("no") if "act" in context.messages[-1]["content"] else None

    session = cluster.spawn(AgentSpec(name="clerk", tools=[act], hooks=[only_once]))
    result = session.send("call act {}").result(PATIENCE)
    assert (result.status, result.text, ran) == ("completed", "no", [])
    assert session.send("hello").result(PATIENCE, check=True).text
    assert "act" not in str([message.tool_calls for message in session.messages()])


def test_only_model_calls_have_guards_beside_them() -> None:
    """At other points there is nothing that goes on beside the hook."""
    with pytest.raises(InvalidSpec, match="only one at before_model can run beside the model call"):
        hook("run_start", parallel=True)


REFUSED = {"code": "refused", "message": "no", "session_id": "s", "details": {}}
ABORTED = ModelAnswer.aborted("s").error


@pytest.mark.parametrize(
    ("answer", "verdict", "unwanted", "wanted"),
    [
        (ModelAnswer("text"), None, True, ABORTED),
        (ModelAnswer("text"), {}, False, None),
        (ModelAnswer("text"), REFUSED, False, REFUSED),
        (ModelAnswer("te", finish_reason="aborted"), {}, True, None),
        (ModelAnswer("te", finish_reason="aborted"), {}, False, ABORTED),
        (ModelAnswer("te", finish_reason="aborted"), REFUSED, True, REFUSED),
        (ModelAnswer(error={"code": "model_refused"}), None, False, {"code": "model_refused"}),
        (ModelAnswer(error={"code": "model_refused"}), REFUSED, False, REFUSED),
    ],
)
def test_what_counts_of_an_answer(
    answer: ModelAnswer, verdict: dict[str, object] | None, unwanted: bool, wanted: dict[str, object] | None
) -> None:
    """All of it, if the guards let it pass and it was not aborted for them; else why not, and nothing that it said."""
    said = None if verdict is None else Judged(1, ActivationId("s", 1, 1), "s/r/1", verdict or None)
    counts = judged(answer, said, "s", unwanted=unwanted)
    assert counts.error == wanted
    assert counts.content == (answer.content if wanted is None else None)


def test_the_model_works_beside_a_slow_guard(cluster: LocalCluster) -> None:
    """The model is asked before the guard has its verdict."""
    asked = []

    @hook("before_model", parallel=True)
    def waits(_context: HookContext) -> None:
        cluster.model_server.wait(lambda stats: stats.requests == 1, PATIENCE)
        asked.append(cluster.model_server.count)

    cluster.spawn(AgentSpec(name="clerk", hooks=[waits])).send("hello").result(PATIENCE, check=True)
    assert asked == [1]
