"""What happens to sessions that really run, as spans: in a run's trace, or beside it with a link to the last run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from understudy.events import Event
from understudy.identifiers import run_link, run_span_identifier, trace_identifier
from understudy.observability.spans import spans_of
from understudy.prices import Price
from understudy.spec import Supervision

from . import kernel as k
from .test_stuck import fine, poison
from .test_traces import assert_connected, trace
from .test_upgrades import other


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, prices={"offline": Price.of({"input": 1, "output": 2})}) as made:
        yield made


async def spans(kernel: k.Kernel, session_id: str, operation: str) -> list[ReadableSpan]:
    events = [Event.from_wire(wire) for wire in await kernel.events(session_id)]
    return [span for event in events for span in spans_of(event) if span.name.startswith(f"{operation} ")]


def links(span: ReadableSpan) -> list[str]:
    return [f"{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in span.links]


def parent(span: ReadableSpan) -> str:
    return f"{span.parent.span_id:016x}" if span.parent is not None else ""


def of_run(session_id: str, run_id: str = "r") -> str:
    return run_link(trace_identifier(session_id, run_id), session_id, run_id)


async def test_a_call_says_where_it_went_and_how(kernel: k.Kernel) -> None:
    """Given an agent with parameters and a model with a price, then a call's span names the server, those parameters
    and the cost, which is the run's as well."""
    compiled = k.spec(k.script("done"), parameters={"temperature": 0.25, "seed": 7, "stop": ["END"]})
    await kernel.run("s", compiled)
    (chat,) = await spans(kernel, "s", "chat")
    attributes: dict[str, Any] = dict(chat.attributes or {})
    host, _, port = kernel.server.url.partition("://")[2].partition("/")[0].partition(":")
    assert (attributes["server.address"], attributes["server.port"]) == (host, int(port))
    assert attributes["gen_ai.request.temperature"] == 0.25
    assert attributes["gen_ai.request.seed"] == 7
    assert attributes["gen_ai.request.stop_sequences"] == ("END",)
    assert "gen_ai.request.top_p" not in attributes
    (run,) = await spans(kernel, "s", "invoke_agent")
    assert (run.attributes or {})["gen_ai.usage.cost"] == attributes["gen_ai.usage.cost"] > 0


async def test_a_closed_session_links_to_its_last_run(kernel: k.Kernel) -> None:
    """Outside a run a close is a trace of its own; a session that has had no run links to nothing."""
    await kernel.run("s", k.spec(k.script("one")))
    await kernel.ask("close", "s", "private reason")
    await kernel.spawn("unused", k.spec(k.script("one")))
    await kernel.ask("close", "unused", "")
    (close,), (unused,) = await spans(kernel, "s", "close"), await spans(kernel, "unused", "close")
    assert (links(close), links(unused)) == ([of_run("s")], [])
    assert parent(close) == ""
    assert close.context is not None
    assert f"{close.context.trace_id:032x}" != trace_identifier("s", "r")
    assert "private" not in close.to_json()
    drawn = await trace(kernel, "s")
    assert_connected(drawn)
    assert {span.operation for span in drawn} == {"invoke_agent", "chat"}


async def test_what_happens_in_a_later_run_links_to_no_earlier_one(kernel: k.Kernel) -> None:
    """Given a session's second run, when it is closed in that, then the close is below it, and links to nothing."""
    ask = k.script([("request_user_input", {"prompt": "which?"})], "done")
    await kernel.spawn("s", k.spec(ask, ["request_user_input"]))
    for run_id in ("r", "r2"):
        await kernel.send("s", run_id=run_id)
        (question,) = await kernel.paused("s")
        if run_id == "r":
            await kernel.ask("answer", "s", question["call_id"], "ok", "that one", 1)
            await kernel.end("s", run_id)
    await kernel.ask("close", "s", "")
    await kernel.end("s", "r2")
    (close,) = await spans(kernel, "s", "close")
    assert (parent(close), links(close)) == (run_span_identifier("s", "r2"), [])


async def test_a_quarantine_is_in_the_run_and_its_end_links_to_it(kernel: k.Kernel) -> None:
    """Given a session that is given up in its run, then that is an error below the run, and the resume links there."""
    compiled = k.spec(k.script([("poison", {})], [("poison", {})], "done"), [poison, fine])
    assert (await kernel.run("s", compiled))["status"] == "quarantined"
    assert await kernel.ask("resume", "s")
    (quarantine,), (resume,) = await spans(kernel, "s", "quarantine"), await spans(kernel, "s", "resume")
    assert (parent(quarantine), links(quarantine)) == (run_span_identifier("s", "r"), [])
    assert (quarantine.attributes or {})["error.type"] == "no_progress"
    assert (parent(resume), links(resume)) == ("", [of_run("s")])
    drawn = await trace(kernel, "s")
    assert_connected(drawn)
    assert "quarantine" in {span.operation for span in drawn}


async def test_a_migration_links_to_the_run_before(kernel: k.Kernel) -> None:
    """Another specification that was given during a run is taken on when that has ended."""
    await kernel.run("s", other(k.script("one")))
    await kernel.spawn("s", other(k.script("two")))
    (migrate,) = await spans(kernel, "s", "migrate")
    assert (parent(migrate), links(migrate)) == ("", [of_run("s")])
    attributes = dict(migrate.attributes or {})
    assert "instructions" in attributes["understudy.migrate.changed"]


async def test_a_restart_is_in_the_parents_run(kernel: k.Kernel) -> None:
    """Given a sub-agent whose task is started again, then the parent's run says so, and the tree is one trace."""
    weak = k.spec("offline-script: this is not JSON", name="weak", restart_type="transient")
    rules = Supervision(max_restarts=1, backoff=0.01, jitter=0.0, exceeded="report").model_dump()
    call = [("spawn_agent", {"agent": "weak", "task": "go"})]
    await kernel.run("s", k.spec(k.script(call, "done"), ["spawn_agent"], agents={"weak": weak}, supervision=rules))
    (restart,) = await spans(kernel, "s", "restart")
    attributes = dict(restart.attributes or {})
    lost = attributes["understudy.restart.lost_id"]
    assert parent(restart) == run_span_identifier("s", "r")
    assert links(restart) == [run_link(trace_identifier("s", "r"), lost, "task")]
    assert attributes["understudy.restart.number"] == 1
    drawn = await trace(kernel, "s")
    assert_connected(drawn)
    assert [span.name for span in drawn if span.operation == "invoke_agent"].count("invoke_agent weak") == 2


async def test_a_run_has_a_span_as_soon_as_it_has_begun(kernel: k.Kernel) -> None:
    """Each run has one start, in its trace and below its span; it is not drawn beside the run itself."""
    child = k.spec(k.script("seen"), name="child")
    call = [("spawn_agent", {"agent": "child", "task": "look"})]
    await kernel.run("s", k.spec(k.script(call, "done"), ["spawn_agent"], agents={"child": child}, name="lead"))
    (start,) = await spans(kernel, "s", "start")
    assert parent(start) == run_span_identifier("s", "r")
    assert start.start_time == start.end_time
    drawn = await trace(kernel, "s")
    assert_connected(drawn)
    assert "start" not in {span.operation for span in drawn}
