"""The console's page in a real browser: it is live, shows crashes as they happen, and takes nothing for markup."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from understudy.actors.tools import ToolContext, tool
from understudy.actors.workflow import workflow
from understudy.actors.workflow_context import WorkflowContext
from understudy.cluster.client import fleet
from understudy.cluster.client.results import ServiceInfo
from understudy.cluster.client.workflows import compile_workflow, definition_required
from understudy.cluster.console import application
from understudy.store.reads import traces

from ..console_stage import KernelSource, chromium, served
from ..records import session_record
from . import kernel as k

TOKEN = "correct-horse-battery-staple"
HOSTILE = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>{{7*7}}"


def watched(page: Page) -> list[str]:
    """What goes wrong in the page from now on: errors, refusals of the content security policy, foreign requests."""
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda sent: wrong.append(sent.url) if "//127.0.0.1:" not in sent.url else None)
    return wrong


@tool
async def echo(text: str, context: ToolContext) -> str:
    """Say something."""
    return text


@workflow
async def announces(ctx: WorkflowContext, text: str) -> str:
    """A tool, a published value, a question."""
    said = await ctx.tool(echo, text)
    await ctx.publish("draft", said)
    return await ctx.ask("Publish it?")


@pytest.mark.thorough
async def test_a_workflow_is_shown_by_its_steps(tmp_path: Path) -> None:
    """Its page says that it is one; its messages are steps by their paths, and values that it has taken."""
    async with (
        k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel,
        served(KernelSource(kernel)) as url,
        chromium() as browser,
    ):
        definition = definition_required(announces)
        await kernel.spawn("w", compile_workflow(definition, model="offline", profile="offline", pickle=None).spec)
        await kernel.send("w", json.dumps({"text": HOSTILE}))
        await kernel.paused("w")
        page = await browser.new_page()
        wrong = watched(page)
        await page.goto(f"{url}/#/session/w/messages")
        await expect(page.locator("h1 .pill").first).to_have_text("workflow")
        for summary in ("step 0 echo", "step 2 ask"):
            await expect(page.locator(".messages summary").filter(has_text=summary)).to_be_visible()
        await expect(page.locator(".messages li.system")).to_contain_text("value publish:draft")
        await expect(page.locator(".messages li.system .said")).to_have_text(json.dumps(HOSTILE))
        assert await page.evaluate("window.pwned") is None
        assert wrong == []


@pytest.mark.thorough
async def test_what_agents_say_is_shown_and_never_obeyed(tmp_path: Path) -> None:
    """Markup as an agent's name, question, option, answer, tool result, input and reason stays text on every page."""
    async with (
        k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel,
        served(KernelSource(kernel)) as url,
        chromium() as browser,
    ):
        replies = [("echo", {"text": HOSTILE})], [("request_user_input", {"prompt": HOSTILE, "options": [HOSTILE]})]
        compiled = k.spec(k.script(*replies, HOSTILE), [echo, "request_user_input"], name=HOSTILE)
        await kernel.spawn("s", compiled)
        await kernel.send("s", HOSTILE)
        await kernel.paused("s")
        page = await browser.new_page()
        wrong = watched(page)
        for path in ("", "session/s", "session/s/run/r", "session/s/cost", "session/s/messages"):
            await page.goto(f"{url}/#/{path}")
            await expect(page.get_by_text(HOSTILE).first).to_be_visible()
            assert await page.evaluate("window.pwned") is None
            assert await page.locator("main script, main img").count() == 0
        await page.get_by_text("calls echo").click()
        await expect(page.locator("pre:visible")).to_contain_text(HOSTILE)
        await kernel.ask("cancel", "s", None, HOSTILE)
        await kernel.end("s")
        await page.goto(f"{url}/#/session/s")
        await expect(page.locator(".events .summary").get_by_text(HOSTILE).first).to_be_visible()
        # A session id that is none, from the address: the server's refusal is text as well.
        await page.goto(f"{url}/#/session/<img src=x onerror='window.pwned = 3'>")
        await expect(page.get_by_text("There is no such session")).to_be_visible()
        assert await page.evaluate("window.pwned") is None
        assert [problem for problem in wrong if "404" not in problem] == []


@pytest.mark.thorough
async def test_a_crash_and_its_recovery_come_live(tmp_path: Path) -> None:
    """No reload: the crash and the recovery show in the tree, its lanes, the log and the waterfall."""
    note = [("note", {"path": str(tmp_path / "notes"), "text": "x"})]
    child = k.spec(k.script(note, "seen"), [k.note], name="child")
    spawn = [("spawn_agent", {"agent": "child", "task": "t"})]
    lead = k.spec(k.script(spawn, "all done"), ["spawn_agent"], agents={"child": child}, name="lead")
    async with (
        k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel,
        served(KernelSource(kernel)) as url,
        chromium() as browser,
    ):

        def on_point(_number: int, label: str, worker: k.Worker | None) -> None:
            if label == "tool has had its effect" and worker is not None:
                kernel.on_point = None
                kernel.kill(worker)

        page = await browser.new_page()
        wrong = watched(page)
        await kernel.spawn("s", lead)
        await page.goto(f"{url}/#/session/s")
        await expect(page.locator(".row")).to_have_count(1)
        await page.evaluate("window.loaded = 'once'")
        kernel.on_point = on_point
        await kernel.send("s")
        await expect(page.locator(".row", has=page.get_by_text("child", exact=True))).to_contain_text("↻1")
        await expect(page.locator(".lane .m-crash")).to_have_count(1)
        await expect(page.locator(".lane .m-recover")).to_have_count(1)
        await expect(page.locator("h1")).to_contain_text("idle")
        await page.get_by_label("Whose events").select_option("tree")
        await page.get_by_label("Filter events").fill("crashed")
        await expect(page.locator(".events li")).to_have_count(1)
        await page.get_by_role("tab", name="Trace").click()
        await expect(page.locator(".waterfall .name", has_text="recover child")).to_be_visible()
        await page.locator(".waterfall .span", has_text="crash child").click()
        await expect(page.locator(".waterfall dl")).to_contain_text("process_died")
        assert await page.evaluate("window.loaded") == "once"
        assert wrong == []


@pytest.mark.thorough
async def test_who_logs_in_can_answer_and_close(tmp_path: Path) -> None:
    """The form takes the token, a wrong one is refused; a question is answered, a session closed, each in a dialog."""
    async with (
        k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel,
        served(KernelSource(kernel), TOKEN) as url,
        chromium() as browser,
    ):
        question = [("request_user_input", {"prompt": "Which colour?", "options": ["red", "blue"]})]
        await kernel.spawn("s", k.spec(k.script(question, "thanks"), ["request_user_input"]))
        await kernel.send("s")
        await kernel.paused("s")
        page = await browser.new_page()
        await page.goto(f"{url}/#/session/s")
        for token in ("wrong", TOKEN):
            await page.get_by_label("The console's token").fill(token)
            await page.keyboard.press("Enter")
            if token == "wrong":
                await expect(page.get_by_role("alert")).to_contain_text("not the console's token")
        await page.get_by_role("button", name="blue").click()
        await page.get_by_role("button", name="Leave it").click()
        await page.get_by_role("button", name="Answer …").click()
        await page.get_by_label("The call's result").fill("green")
        await page.get_by_role("dialog").get_by_role("button", name="Send").click()
        assert (await kernel.end("s"))["text"] == "thanks"
        assert any(message["content"] == "green" for message in await kernel.messages("s"))
        await expect(page.locator(".asks")).to_have_count(0)
        await page.get_by_role("button", name="Close").click()
        await page.get_by_role("dialog").get_by_role("button", name="Close").click()
        await expect(page.locator("h1")).to_contain_text("closed")
        assert TOKEN not in await page.content() + page.url
        assert await page.evaluate("document.cookie") == ""
        await page.get_by_role("button", name="Log out").click()
        await expect(page.get_by_label("The console's token")).to_be_visible()


@pytest.mark.thorough
async def test_a_page_outlives_its_server(tmp_path: Path) -> None:
    """The console ends and another one takes its place: the page says so, comes back by itself, and shows all once."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel, chromium() as browser:
        await kernel.run("s", k.spec(""))
        page = await browser.new_page()
        async with served(KernelSource(kernel)) as url:
            await page.goto(f"{url}/#/session/s")
            await expect(page.locator(".events li")).to_have_count(len(await kernel.events("s")))
        await expect(page.locator("#connection")).to_have_text("reconnecting")
        await kernel.send("s", "again", "r2")
        await kernel.end("s", "r2")
        async with served(KernelSource(kernel), port=int(url.rpartition(":")[2])):
            await expect(page.locator("#connection")).to_have_text("live")
            await expect(page.locator(".events li")).to_have_count(len(await kernel.events("s")))


@pytest.mark.thorough
async def test_states_over_time_are_a_function_of_the_events(tmp_path: Path) -> None:
    """Queued, running, model, tools, sub-agents, down and again, from the events alone; marks at the crashes."""
    story: list[tuple[str, dict[str, Any]]] = [
        ("run_accepted", {}), ("run_started", {}), ("model_call_started", {}), ("session_crashed", {}),
        ("session_activated", {"cause": "resume"}), ("model_call_completed", {"tool_calls": 2}), ("child_spawned", {}),
        ("tool_finished", {}), ("child_finished", {}), ("tool_finished", {}), ("model_call_started", {}),
        ("model_call_completed", {"tool_calls": 0}), ("run_finished", {"started_at": 1}),
    ]  # fmt: skip
    events = [{"type": kind, "at": 10 * number, "data": data} for number, (kind, data) in enumerate(story)]
    async with (
        k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel,
        served(KernelSource(kernel)) as url,
        chromium() as browser,
    ):
        page = await browser.new_page()
        await page.goto(url)

        async def timeline(some: list[dict[str, Any]]) -> dict[str, Any]:
            script = f"import('/static/timeline.js').then((module) => module.timeline({json.dumps(some)}))"
            found: dict[str, Any] = await page.evaluate(script)
            return found

        found = await timeline(events)
        assert [(part["state"], part["start"], part["end"]) for part in found["segments"]] == [
            ("queued", 0, 10), ("running", 10, 20), ("model", 20, 30), ("down", 30, 40), ("model", 40, 50),
            ("tools", 50, 60), ("children", 60, 80), ("tools", 80, 90), ("running", 90, 100), ("model", 100, 110),
            ("running", 110, 120),
        ]  # fmt: skip
        assert [(mark["kind"], mark["at"]) for mark in found["marks"]] == [("crash", 30), ("recover", 40)]
        waited = [*events[:3], {**events[3], "data": {"waiting": True}}, *events[5:]]
        assert [part["state"] for part in (await timeline(waited))["segments"][:4]] == [
            "queued", "running", "model", "tools",
        ]  # fmt: skip
        assert (await timeline(events[:3]))["segments"][-1] == {"state": "model", "start": 20, "end": 0}
        assert await timeline([]) == {"segments": [], "marks": []}


@pytest.mark.thorough
async def test_narrow_and_dark_pages_have_no_sideways_scrolling(tmp_path: Path) -> None:
    """At 400 pixels, light and dark, no page is wider than the screen; with the keyboard a session can be opened."""
    async with (
        k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel,
        served(KernelSource(kernel)) as url,
        chromium() as browser,
    ):
        name = "a-session-with-a-rather-long-name-" * 3
        await kernel.run(name, k.spec("", name="an-agent-whose-name-is-not-short-either"), "x" * 3_000)
        for scheme in ("light", "dark"):
            page = await browser.new_page(viewport={"width": 400, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
            for path in (
                "",
                f"session/{name}",
                f"session/{name}/trace",
                f"session/{name}/messages",
                f"session/{name}/cost",
            ):
                await page.goto(f"{url}/#/{path}")
                await expect(page.get_by_text("an-agent-whose-name").first).to_be_visible()
                assert await page.evaluate("document.documentElement.scrollWidth") <= 400, path
            await page.screenshot(path=tmp_path / f"narrow-{scheme}.png")
        await page.goto(f"{url}/#/")
        await page.keyboard.press("/")
        await page.keyboard.type("rather")
        await expect(page.locator("tbody tr:visible")).to_have_count(1)
        await page.locator("tbody td.c-agent a").focus()
        await page.keyboard.press("Enter")
        await expect(page.locator(".row.chosen")).to_have_count(1)


class Replaced(KernelSource):
    """A kernel whose services have other processes later on."""

    pid = 1

    async def services(self) -> list[ServiceInfo]:
        return [ServiceInfo(role, self.pid, self.kernel.node_id, "") for role in ("supervisor", "node")]


@pytest.mark.thorough
async def test_a_page_tells_of_restarted_services_and_of_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's page shows sessions as they come, and services that have another process; a trace's page, what it
    leaves out."""
    monkeypatch.setattr(fleet, "SERVICES_SECONDS", 0.2)
    monkeypatch.setattr(fleet, "TOTALS_SECONDS", 0.2)
    monkeypatch.setattr(traces, "TRACE_PAGE", 3)
    monkeypatch.setattr(application, "TRACE_EVENTS", 3)
    async with (
        k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel,
        served(source := Replaced(kernel)) as url,
        chromium() as browser,
    ):
        page = await browser.new_page()
        wrong = watched(page)
        await page.goto(f"{url}/#/")
        await expect(page.get_by_text("supervisor 1 · 1 node")).to_be_visible()
        await expect(page.get_by_text("There are no sessions yet.")).to_be_visible()
        await kernel.run("s", k.spec(""))
        listed = page.get_by_role("table", name="All sessions").locator("tbody tr")
        await expect(listed).to_have_count(1)
        await expect(page.locator("th", has_text="Total tokens").first).to_be_visible()
        source.pid = 2
        incidents = page.locator(".incidents li")
        await expect(incidents).to_have_count(2)
        for role in ("supervisor", "node service"):
            line = incidents.filter(has_text=f"service restarted {role} node {kernel.node_id[:8]}, pid 1 → 2")
            await expect(line).to_have_count(1)
            await expect(line.locator("a")).to_have_count(0)
        await page.goto(f"{url}/#/session/s/trace")
        await expect(page.get_by_text("3 of its events are drawn, and more are not")).to_be_visible()
        assert wrong == []


class Talkative:
    """A source of one session that has had more events than a page keeps."""

    EVENTS = 30_000

    async def read(self, _kind: Any, what: str, *_arguments: Any) -> Any:
        row = session_record(agent="talker", updated_at=1, tools=[])
        return {"info": row, "tree": [row]}.get(what, [])

    async def follow(self, session_id: str, after: int) -> AsyncIterator[dict[str, Any]]:
        for seq in range(after + 1, self.EVENTS + 1):
            common = {"session_id": session_id, "agent": "talker", "run_id": "r", "epoch": 1, "round": 1}
            yield {"type": "cancel_requested", "seq": seq, "at": seq * 1000, "data": {"reason": "x"}, **common}
            if seq % 1_000 == 0:
                await asyncio.sleep(0.1)
        await asyncio.Event().wait()


@pytest.mark.thorough
@pytest.mark.timeout(320)
async def test_a_page_that_stays_open_keeps_no_more_than_it_shows(tmp_path: Path) -> None:
    """Given a session that goes on and on, then the page lets go of what is long ago, and the latest is there."""
    async with served(Talkative()) as url, chromium() as browser:
        page = await browser.new_page()
        wrong = watched(page)
        await page.goto(f"{url}/#/session/s")
        latest = page.locator(".events li .seq").first
        await expect(latest).to_have_text(str(Talkative.EVENTS), timeout=300_000)
        kept = re.search(r"of (\d+) events", await page.get_by_text(re.compile(r"\d+ of \d+ events")).inner_text())
        assert kept is not None
        assert 20_000 <= int(kept[1]) <= 25_000
        assert wrong == []
