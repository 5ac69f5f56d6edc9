"""The console with many sessions and nodes: a filter in the address, one action for many, drains, the keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.async_api import Page, expect

from understudy.actors.workflow import workflow
from understudy.actors.workflow_context import WorkflowContext
from understudy.cluster.client.running_again import again_id
from understudy.cluster.client.workflows import compile_workflow, definition_required
from understudy.cluster.console import download
from understudy.config import ModelProfile
from understudy.errors import ModelProfileMissing, ServiceGone, StoreUnreachable
from understudy.gateway import gateway_calls
from understudy.identifiers import check_identifier
from understudy.node.paging import Ready
from understudy.reads import NodeLoad
from understudy.store.operations import activation
from understudy.testing.offline import Faults

from ..console_stage import KernelSource, chromium, served
from . import kernel as k
from .test_console_page import watched

STATES = ("acting", "waiting", "standby")
TOKEN = "correct-horse-battery-staple"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def stage(tmp_path: Path, fail_first: int = 0) -> AsyncIterator[tuple[k.Kernel, KernelSource, str]]:
    """A kernel, its source, and the URL of a console with a token; so many model calls are refused at first."""
    faults = Faults(fail_first=fail_first, fail_status=400)
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans", faults=faults) as kernel:
        source = KernelSource(kernel)
        async with served(source, TOKEN) as url:
            yield kernel, source, url


def client_of(url: str) -> httpx2.AsyncClient:
    """Who asks with the console's token."""
    return httpx2.AsyncClient(base_url=url, headers=BEARER)


@asynccontextmanager
async def opened(url: str, address: str = "", **options: Any) -> AsyncIterator[tuple[Page, list[str]]]:
    """A page that is logged in, and what goes wrong in it."""
    async with chromium() as browser:
        page = await browser.new_page(**options)
        await page.goto(f"{url}/{address}")
        await page.get_by_label("The console's token").fill(TOKEN)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Log out")).to_be_visible()
        yield page, watched(page)


async def quarantine(kernel: k.Kernel, session_id: str) -> None:
    """Give a session up."""
    await kernel.service.journal.submit(
        lambda tx: activation.quarantine(tx, tx.session(session_id), "stuck", "it dies each time"), session_id
    )


async def give_up(kernel: k.Kernel, session_id: str, agent: str = "agent") -> None:
    """A session whose run has ended because the session was given up."""
    await kernel.spawn(
        session_id, k.spec(k.script([("request_user_input", {"prompt": "?"})]), ["request_user_input"], name=agent)
    )
    await kernel.send(session_id)
    await kernel.paused(session_id)
    await quarantine(kernel, session_id)
    assert (await kernel.end(session_id))["status"] == "quarantined"


async def test_sessions_are_found_by_agent_tree_time_and_how_their_last_run_ended(tmp_path: Path) -> None:
    """Each alone and all together, page by page without gap or repetition; a status that is none is refused."""
    async with stage(tmp_path) as (kernel, _, url), client_of(url) as client:
        for number in range(5):
            await kernel.run(f"good-{number}", k.spec("", name="reader"))
        await give_up(kernel, "bad-0", "reader")
        await give_up(kernel, "bad-1", "writer")
        await kernel.spawn("new", k.spec("", name="reader"))

        async def found(**query: Any) -> list[str]:
            rows: list[str] = []
            cursor = ""
            while True:
                answer = await client.get("/api/sessions", params={"limit": 2, **query, "cursor": cursor})
                assert answer.status_code == 200, answer.text
                rows += [row["session_id"] for row in answer.json()["rows"]]
                if answer.json()["next"] is None:
                    return rows
                cursor = ",".join(map(str, answer.json()["next"]))

        everything = ["new", "bad-1", "bad-0", "good-4", "good-3", "good-2", "good-1", "good-0"]
        assert await found() == everything
        assert await found(by="ended_at") == everything[1:]  # none of `new` has ended
        assert await found(agent="reader", outcome=["quarantined", "failed"]) == ["bad-0"]
        assert await found(tree="good-2") == ["good-2"]
        assert await found(status="quarantined") == ["bad-1", "bad-0"]
        ended = {name: (await kernel.info(name))["ended_at"] for name in ("good-1", "good-3")}
        assert await found(by="ended_at", since=ended["good-1"], until=ended["good-3"]) == everything[4:7]
        for query in ({"status": "nonsense"}, {"outcome": "idle"}, {"by": "agent"}, {"since": "-1"}, {"tree": "a b"}):
            assert (await client.get("/api/sessions", params=query)).status_code == 400


async def test_an_input_from_the_page_is_accepted_once(tmp_path: Path) -> None:
    """Sent again under its run's id it begins no second run; one that is no text, or names no run, is refused."""
    async with stage(tmp_path) as (kernel, _, url), client_of(url) as client:
        await kernel.spawn("s", k.spec(""))
        for done in (True, False):
            sent = await client.post("/api/sessions/s/send", json={"text": "go", "run_id": "r1"})
            assert sent.json() == {"done": done, "run_id": "r1"}
        await kernel.end("s", "r1")
        for body in (
            {"text": " ", "run_id": "r2"},
            {"text": 3, "run_id": "r2"},
            {"text": "go"},
            {"run_id": "a b", "text": "x"},
        ):
            assert (await client.post("/api/sessions/s/send", json=body)).status_code == 400
        assert (await client.post("/api/sessions/none/send", json={"text": "go", "run_id": "r"})).status_code == 404
        assert [run["run_id"] for run in (await client.get("/api/sessions/s")).json()["runs"]] == ["r1"]


async def test_a_run_that_did_not_complete_is_run_again_once(tmp_path: Path) -> None:
    """However often it is asked for, and when the new run has failed too; one that completed, or is none, is not."""
    async with stage(tmp_path, fail_first=2) as (kernel, _, url), client_of(url) as client:
        assert (await kernel.run("s", k.spec("fine"), "the question"))["status"] == "failed"

        async def again(run_id: Any, session_id: str = "s") -> httpx2.Response:
            return await client.post(f"/api/sessions/{session_id}/run-again", json={"run_id": run_id})

        assert (await again("r")).json() == {"done": True, "run_id": "r-again"}
        assert (await kernel.end("s", "r-again"))["status"] == "failed"
        assert (await again("r")).json() == {"done": False, "run_id": "r-again"}
        assert (await again("r-again")).json() == {"done": True, "run_id": "r-again-2"}
        assert (await kernel.end("s", "r-again-2"))["text"] == "offline: the question"
        assert (await again("r-again-2")).json() == {"done": False, "run_id": None}
        assert [run["content"] for run in await kernel.ask("read", "runs", ["s"], {})] == ["the question"] * 3
        for wrong, status in ((None, 400), (3, 400), ("none", 404)):
            assert (await again(wrong)).status_code == status
        assert (await again("r", "nobody")).status_code == 404


async def test_a_session_that_was_given_up_is_resumed_with_all_its_inputs(tmp_path: Path) -> None:
    """The run that it was at, and the one behind it, go on in their order; a late repetition resumes nothing."""
    async with stage(tmp_path) as (kernel, _, url), client_of(url) as client:
        kernel.server.hold()
        await kernel.spawn("s", k.spec("fine"))
        await kernel.send("s", "first", "one")
        await kernel.until("s", "model_call_started")
        await kernel.send("s", "second", "two")
        await quarantine(kernel, "s")
        kernel.server.release()
        asked = [await client.post("/api/sessions/s/run-again", json={"run_id": "two"}) for _ in range(2)]
        assert [answer.json() for answer in asked] == [{"done": done, "run_id": "two-again"} for done in (True, False)]
        assert (await kernel.end("s", "two-again"))["status"] == "completed"
        runs = {run["run_id"]: run for run in await kernel.ask("read", "runs", ["s"], {})}
        new = {name: run["content"] for name, run in runs.items() if "again" in name}
        assert new == {"one-again": "first", "two-again": "second"}
        assert runs["one-again"]["accepted_at"] < runs["two-again"]["accepted_at"]
        await quarantine(kernel, "s")
        assert not (await client.post("/api/sessions/s/run-again", json={"run_id": "two"})).json()["done"]
        assert (await kernel.info("s"))["status"] == "quarantined"


async def test_a_run_that_lacked_its_models_key_is_run_again_once_somebody_has_brought_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a run that failed for a missing key, then to run it again is refused with what to do, and nothing is sent,
    until the key is there."""
    monkeypatch.setattr(gateway_calls, "PROFILE_SECONDS", 0.1)
    async with stage(tmp_path) as (kernel, _, url), client_of(url) as client:
        assert (await kernel.run("s", k.spec("fine", profile="ours")))["error"]["code"] == ModelProfileMissing.code
        refused = await client.post("/api/sessions/s/run-again", json={"run_id": "r"})
        assert refused.status_code == 409
        assert "no key is known for its model profile 'ours'" in refused.text
        assert len(await kernel.ask("read", "runs", ["s"], {})) == 1
        await kernel.service.register(ModelProfile("ours", "key", kernel.server.url))
        again = await client.post("/api/sessions/s/run-again", json={"run_id": "r"})
        assert again.json() == {"done": True, "run_id": "r-again"}
        assert (await kernel.end("s", "r-again"))["status"] == "completed"


@pytest.mark.thorough
async def test_failed_runs_are_found_looked_at_and_run_again_together(tmp_path: Path) -> None:
    """A person chooses one agent's runs of the last hour that did not complete, opens a trace, goes back, and runs all
    again: those that failed and those that were given up."""
    async with stage(tmp_path, fail_first=3) as (kernel, _, url):
        for name, agent in (("bad-0", "reader"), ("bad-1", "reader"), ("other", "writer")):
            assert (await kernel.run(name, k.spec("fine", name=agent)))["status"] == "failed"
        await give_up(kernel, "bad-2", "reader")
        await kernel.run("fine", k.spec("", name="reader"))
        async with opened(url) as (page, wrong):
            rows = page.get_by_role("table", name="All sessions").locator("tbody tr")
            await expect(rows).to_have_count(5)
            await page.get_by_label("Status").select_option("last:bad")
            await page.get_by_role("combobox", name="Time", exact=True).select_option("hour")
            await page.get_by_label("Time of").select_option("ended_at")
            await page.get_by_label("Agent", exact=True).fill("reader")
            await expect(rows).to_have_count(3)
            filtered = page.url
            assert "status=last%3Abad" in filtered  # the word of the HTTP API
            await rows.first.get_by_role("link", name=re.compile("Trace")).click()
            await expect(page.locator(".waterfall")).to_be_visible()
            await page.go_back()
            await expect(rows).to_have_count(3)
            assert page.url == filtered
            await page.reload()
            await expect(rows).to_have_count(3)
            await page.get_by_role("button", name="Select all that match").click()
            await expect(page.get_by_text("3 selected")).to_be_visible()
            await page.get_by_role("button", name="Run again").press("Enter")
            dialog = page.get_by_role("dialog")
            await expect(dialog).to_contain_text("Run again: 3 sessions?")
            await expect(dialog.get_by_role("button", name="Leave it")).to_be_focused()
            await page.keyboard.press("Tab")
            await page.keyboard.press("Enter")
            await expect(dialog).to_contain_text("3 of 3 done.")
            await page.keyboard.press("Escape")
            await expect(dialog).to_be_hidden()
            ended = [(await kernel.end(name, "r-again"))["status"] for name in ("bad-0", "bad-1")]
            assert ended == ["completed", "completed"]
            await page.get_by_role("button", name="Refresh").click()
            await expect(rows).to_have_count(0)
            await page.go_back()  # the last choice but one: of any time
            await expect(page.get_by_label("Time of")).to_have_value("")
            # One alone, from its own page.
            await page.goto(f"{url}/#/session/other")
            await page.get_by_role("button", name="Run again").click()
            await expect(dialog).to_contain_text("The input of run r, which ended failed, is sent again.")
            await dialog.get_by_role("button", name="Run again").dblclick()
            await expect(page.get_by_role("button", name="Run again")).to_be_hidden()
            assert wrong == []
        await kernel.paused("bad-2")
        assert (await kernel.end("other", "r-again"))["status"] == "completed"
        for name in ("bad-0", "bad-1", "bad-2", "other"):
            assert len(await kernel.ask("read", "runs", [name], {})) == 2
        await kernel.ask("cancel", "bad-2", None, "enough")
        await kernel.end("bad-2", "r-again")


def test_the_run_that_does_another_again_has_one_id() -> None:
    """It is one that a client may choose, at most 128 characters long, and other runs' is another."""
    given = ["r", "r-again", "r-again-2", "r-again-x"]
    assert [again_id(name) for name in given] == ["r-again", "r-again-2", "r-again-3", "r-again-x-again"]
    odd = ["x" * 128, "y" * 128, "timer:daily/1", "fork:r", "x" * 121 + "-again"]
    assert len({again_id(name) for name in odd}) == len(odd)
    for name in odd:
        for _ in range(3):
            name = check_identifier(again_id(name), "run_id")


async def test_a_session_is_downloaded_in_the_order_of_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read a few at a time, each message and event is there once; the last line counts them. Not without the token."""
    monkeypatch.setattr(download, "PAGE_LIMIT", 3)
    async with stage(tmp_path) as (kernel, _, url), client_of(url) as client:
        note = [("note", {"path": str(tmp_path / "n"), "text": "x"})]
        await kernel.run("s", k.spec(k.script(note, "done"), [k.note]))
        answer = await client.get("/api/sessions/s/download")
        assert answer.headers["content-disposition"] == 'attachment; filename="s.jsonl"'
        first, *found, last = map(json.loads, answer.text.splitlines())
        assert first["session"]["session_id"] == "s"
        seqs = [data["seq"] for line in found for data in line.values()]
        assert seqs == sorted(set(seqs))
        messages = [line["message"] for line in found if "message" in line]
        events = [line["event"] for line in found if "event" in line]
        assert (messages, events) == (await kernel.messages("s"), await kernel.events("s"))
        assert last == {"end": {"messages": len(messages), "events": len(events)}}
        assert (await client.get("/api/sessions/nobody/download")).status_code == 404
        assert (await client.get("/api/sessions/s/download", headers={"authorization": ""})).status_code == 401


@pytest.mark.thorough
async def test_a_session_is_saved_from_its_page(tmp_path: Path) -> None:
    """The link on the session's page saves a file with what was said."""
    async with stage(tmp_path) as (kernel, _, url):
        await kernel.run("s", k.spec(""), "remember this")
        async with opened(url, "#/session/s") as (page, wrong):
            async with page.expect_download() as saving:
                await page.get_by_role("link", name="Download messages and events").click()
            saved = await saving.value
            assert saved.suggested_filename == "s.jsonl"
            await saved.save_as(tmp_path / "saved")
            assert "remember this" in (tmp_path / "saved").read_text()
            assert wrong == []


class Refusing(KernelSource):
    """A kernel of which one session can't be closed."""

    async def act(self, method: str, session_id: str, *arguments: Any, by: str = "") -> Any:
        if session_id == "s-2":
            raise StoreUnreachable("the store is away")
        return await super().act(method, session_id, *arguments, by=by)


@pytest.mark.thorough
async def test_what_failed_of_many_is_listed_with_its_reason_and_stays_chosen(tmp_path: Path) -> None:
    """By keyboard and with Shift a range of rows is chosen and closed; who refuses is named, and can be tried again."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        for number in range(5):
            await kernel.spawn(f"s-{number}", k.spec("", name=f"agent-{number}"))
        async with served(Refusing(kernel), TOKEN) as url, opened(url) as (page, _):
            table = page.get_by_role("table", name="All sessions")
            await table.get_by_role("link", name="agent-3").focus()
            await page.keyboard.press("Space")
            await expect(page.get_by_text("1 selected")).to_be_visible()
            await table.get_by_role("checkbox", name="agent-1").click(modifiers=["Shift"])
            await expect(page.get_by_text("3 selected")).to_be_visible()
            close, dialog = page.get_by_role("button", name="Close", exact=True), page.get_by_role("dialog")
            await close.focus()
            await page.keyboard.press("Enter")
            await page.keyboard.press("Escape")
            await expect(dialog).to_be_hidden()
            assert not any([(await kernel.info(f"s-{number}"))["closed"] for number in range(5)])
            await page.keyboard.press("Enter")  # the focus is back on the button
            await page.keyboard.press("Enter")  # in the field of the reason
            await expect(dialog).to_contain_text("2 of 3 done, 1 failed.")
            await expect(dialog.get_by_role("listitem")).to_contain_text("s-2: the store is away")
            await page.keyboard.press("Escape")
            await expect(page.get_by_text("1 selected")).to_be_visible()
        closed = [(await kernel.info(f"s-{number}"))["closed"] for number in range(5)]
        assert closed == [0, 1, 0, 1, 0]


class Silent(KernelSource):
    """A kernel whose node service does not say how it is."""

    async def load(self, node_id: str) -> NodeLoad:
        raise ServiceGone("it is being restarted")


async def test_a_node_tells_its_actors_their_bound_its_memory_and_what_is_ready(tmp_path: Path) -> None:
    """As the node service has them; one that does not answer is shown with what the store and the supervisor know."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        frames = kernel.service.frames
        frames.supply.cap, memory = 7, frames.supply.memory()
        kernel.server.hold()
        await kernel.spawn("s", k.spec(""))
        await kernel.send("s")
        await kernel.until("s", "model_call_started")
        frames.paging.add(Ready("other", "nowhere", root_id="other"))
        async with (
            served(KernelSource(kernel)) as url,
            served(Silent(kernel)) as silent,
            httpx2.AsyncClient() as client,
        ):
            load = (await client.get(f"{url}/api/nodes")).json()["loads"][kernel.node_id]
            unknown = (await client.get(f"{silent}/api/nodes")).json()
        slots = frames.paging.slots.values()
        states = {state: len([slot for slot in slots if slot.state == state]) for state in STATES}
        assert {state: load[state] for state in STATES} == states
        assert load["acting"] + load["waiting"] == 1
        assert (load["cap"], load["ready"]) == (7, 1)
        assert (load["memory_free"], load["memory_total"]) == (memory.free, memory.total)
        assert unknown["loads"] == {kernel.node_id: None}
        assert kernel.node_id in [service["node_id"] for service in unknown["services"]]
        frames.paging.remove("other")
        kernel.server.release()
        await kernel.end("s")


@pytest.mark.thorough
async def test_a_node_is_drained_and_taken_back_from_its_page(tmp_path: Path) -> None:
    """The nodes' page shows processes and sessions of each node; a drain is confirmed, shown, and taken back."""
    async with stage(tmp_path) as (kernel, _, url):
        await kernel.spawn("s", k.spec(k.script([("request_user_input", {"prompt": "?"})]), ["request_user_input"]))
        await kernel.send("s")
        await kernel.paused("s")
        kernel.service.frames.supply.cap = 7
        kernel.service.frames.supply.memory()
        async with opened(url, "#/nodes", viewport={"width": 400, "height": 800}) as (page, wrong):
            node = page.get_by_role("table", name="Nodes").locator("tbody tr")
            await expect(node).to_contain_text("in use")
            await expect(node).to_contain_text("1 waiting for input")
            await expect(node).to_contain_text("at most 7")
            await expect(node).to_contain_text(re.compile(r"[\d.]+ [MG]iB of [\d.]+ [MG]iB free"))
            assert await page.evaluate("document.documentElement.scrollWidth") <= 400
            await node.get_by_role("button", name="Drain …").click()
            await page.get_by_label("Seconds that they have").fill("60")
            await page.get_by_role("dialog").get_by_role("button", name="Drain").click()
            await expect(node).to_contain_text(re.compile("drain(ing|ed)"))
            (drain,) = await kernel.ask("read", "drains", [], {})
            assert (drain["node_id"], drain["reason"]) == (kernel.node_id, "asked for by console")
            await node.get_by_role("button", name="Undrain").click()
            await page.get_by_role("button", name="Take it back").click()
            await expect(node).to_contain_text("in use")
            assert await kernel.ask("read", "drains", [], {}) == []
            assert wrong == []


async def waiting_in_queues(kernel: k.Kernel) -> None:
    """A queue of one at once with a run at work and three that wait, and a paused loop with something in triage."""
    await kernel.ask("set_queue", {"name": "crawl", "concurrency": 1, "rate": {"limit": 9, "seconds": 60}})
    kernel.server.hold()
    for name, priority in (("at-work", 0), ("second", 0), ("third", 0), ("first", 5)):
        await kernel.spawn(name, k.spec(""))
        place = {"queue": "crawl", "key": "acme", "priority": priority}
        await kernel.ask("send", name, {"run_id": "r", "content": "go", "place": place})
    poor = k.spec(budget=[{"scope": "tree", "tokens": 1}])
    looks = {"name": "looks", "content": "Look <b>around</b>", "timing": {"every": 3600}, "memory": True, "spec": poor}
    await kernel.ask("set_schedule", looks, {})
    fired = await kernel.ask("trigger_schedule", "looks")
    await kernel.end(fired["session_id"], fired["run_id"])
    await kernel.ask("set_schedule", {**looks, "place": {"queue": "crawl"}}, {})
    await kernel.ask("pause_schedule", "looks", True)


async def test_schedules_triage_and_queues_are_shown(tmp_path: Path) -> None:
    """The console's server shows all of them, and for a session that waits its queue and its place there."""
    async with stage(tmp_path) as (kernel, _, url), client_of(url) as client:
        await waiting_in_queues(kernel)
        found = (await client.get("/api/schedules")).json()
        (queue,), (entry,), (schedule,) = found["queues"], found["triage"], found["schedules"]
        assert (queue["name"], queue["at_work"], queue["waiting"], queue["concurrency"]) == ("crawl", 1, 3, 1)
        assert (entry["schedule"], entry["count"], entry["last_run"]) == ("looks", 1, schedule["last_run"])
        assert (schedule["queue"], schedule["paused"], schedule["last_status"]) == ("crawl", True, "budget_exceeded")
        places = {}
        for name in ("at-work", "first", "second", "third"):
            waits = (await client.get(f"/api/sessions/{name}")).json()["waits_in"]
            places[name] = waits and (waits["queue"], waits["key"], waits["place"], waits["waiting"])
        assert places == {
            "at-work": None, "first": ("crawl", "acme", 1, 3), "second": ("crawl", "acme", 2, 3),
            "third": ("crawl", "acme", 3, 3),
        }  # fmt: skip
        assert (await client.get("/api/schedules", headers={"authorization": ""})).status_code == 401
        kernel.server.release()
        await kernel.end("third")


@pytest.mark.thorough
async def test_who_waits_in_a_queue_is_seen(tmp_path: Path) -> None:
    """The page has queues, schedules and triage, as text; a session's page its place in the queue, which changes as
    others begin."""
    async with stage(tmp_path) as (kernel, _, url):
        await waiting_in_queues(kernel)
        await kernel.ask("pause_queue", "crawl", True)
        async with opened(url, "#/schedules", viewport={"width": 400, "height": 800}) as (page, wrong):
            queue = page.get_by_role("table", name="Queues").locator("tbody tr")
            await expect(queue).to_contain_text("crawl")
            await expect(queue).to_contain_text("paused")
            await expect(queue).to_contain_text("1 at once, 9 within 1 min 0 s")
            await expect(page.get_by_role("table", name="Open in triage").locator("tbody tr")).to_contain_text("1 time")
            schedule = page.get_by_role("table", name="Schedules").locator("tbody tr")
            await expect(schedule).to_contain_text("Look <b>around</b>")
            await expect(schedule).to_contain_text("budget exceeded")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 400
            await page.goto(f"{url}/#/session/third")
            await expect(page.get_by_text("Waits in queue")).to_contain_text("place 3 of 3")
            await kernel.ask("cancel", "second", "r", "no")
            await expect(page.get_by_text("Waits in queue")).to_contain_text("place 2 of 2")
            await page.get_by_text("Waits in queue").get_by_role("link", name="crawl").click()
            await expect(page).to_have_title("Schedules and queues · Understudy")
            await kernel.ask("pause_queue", "crawl", False)
            kernel.server.release()
            await kernel.end("third")
            await expect(queue).to_contain_text("active")
            assert wrong == []


@pytest.mark.thorough
async def test_a_person_sends_an_input_and_answers_without_a_mouse(tmp_path: Path) -> None:
    """The skip link leads to the content; Escape leaves a dialog, and what is sent begins a run."""
    async with stage(tmp_path) as (kernel, _, url):
        await kernel.spawn("s", k.spec(""))
        async with opened(url, "#/session/s") as (page, wrong):
            await page.reload()
            send = page.get_by_role("button", name="Send an input")
            await expect(send).to_be_visible()
            await page.evaluate("document.activeElement.blur()")
            await page.locator(".skip").focus()
            await page.keyboard.press("Enter")
            await expect(page.locator("main")).to_be_focused()
            assert page.url.endswith("#/session/s")
            await send.focus()
            await page.keyboard.press("Enter")
            await page.keyboard.press("Escape")
            await expect(page.get_by_role("dialog")).to_be_hidden()
            await expect(send).to_be_focused()
            await page.keyboard.press("Enter")
            await page.get_by_label("The input").fill("hello")
            await page.get_by_role("dialog").get_by_role("button", name="Send").press("Enter")
            await expect(page.locator(".events .summary").get_by_text("completed")).to_be_visible()
            assert wrong == []


@workflow
async def moves(ctx: WorkflowContext) -> str:
    """It says where it is, and waits for an address."""
    await ctx.publish("stage", {"number": 1})
    address = await ctx.event("address")
    return f"moved to {address['city']}"


@pytest.mark.thorough
async def test_a_workflow_is_looked_at_and_sent_a_signal(tmp_path: Path) -> None:
    """Its page has its open steps and what it has published; a step that waits for a signal goes on with what a person
    sends. Why one was not sent is on the page until one is. A session that is no workflow has no such part."""
    async with stage(tmp_path) as (kernel, _, url):
        definition = definition_required(moves)
        await kernel.spawn("w", compile_workflow(definition, model="offline", profile="offline", pickle=None).spec)
        await kernel.spawn("s", k.spec(""))
        await kernel.send("w", "{}")
        async with opened(url, "#/session/w/steps") as (page, wrong):
            await expect(page.locator("[role=tabpanel]")).to_contain_text('{"number":1}')
            await expect(page.locator("[role=tabpanel] tr").filter(has_text="event")).to_contain_text("waiting")
            address = '{"city": "Oslo"}'
            for name, payload, refusal in (
                ("address", "Oslo", "That is no JSON"),
                ("an address", address, "must be 1 to 128 characters"),
                ("address", address, None),
            ):
                await page.get_by_role("button", name="Send a signal").click()
                await expect(page.get_by_label("Its name")).to_have_value("address")
                await page.get_by_label("Its name").fill(name)
                await page.get_by_label("What the step returns, as JSON").fill(payload)
                await page.get_by_role("dialog").get_by_role("button", name="Send").click()
                if refusal is not None:
                    await expect(page.get_by_role("alert")).to_contain_text(refusal)
            await expect(page.get_by_role("alert")).to_have_count(0)
            assert (await kernel.end("w"))["output"] == "moved to Oslo"
            await expect(page.locator("[role=tabpanel]")).to_contain_text("No step is open.")
            await page.goto(f"{url}/#/session/s")
            await expect(page.get_by_role("tab", name="Messages")).to_be_visible()
            await expect(page.get_by_role("tab", name="Steps")).to_be_hidden()
            assert [line for line in wrong if "400 (Bad Request)" not in line] == []  # the signal that was refused


async def test_a_signal_from_the_page_is_checked(tmp_path: Path) -> None:
    """Without a name, or with one that is none, it is refused; so is one for a session that is no workflow."""
    async with stage(tmp_path) as (kernel, _, url), client_of(url) as client:
        await kernel.spawn("s", k.spec(""))
        for body in ({}, {"name": 3}, {"name": "a b"}, {"name": "address"}):
            assert (await client.post("/api/sessions/s/signal", json=body)).status_code == 400
        assert (await client.post("/api/sessions/none/signal", json={"name": "address"})).status_code == 404
        assert (await client.get("/api/sessions/s")).json()["workflow"] is None
