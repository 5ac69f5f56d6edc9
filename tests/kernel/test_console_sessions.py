"""The console with many sessions and nodes: a filter in the address, one action for many, drains, the keyboard."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.async_api import Page, expect

from understudy.errors import StoreUnreachable
from understudy.store.operations import activation

from ..console_stage import KernelSource, chromium, served
from . import kernel as k
from .test_console_page import watched

TOKEN = "correct-horse-battery-staple"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def stage(tmp_path: Path) -> AsyncIterator[tuple[k.Kernel, KernelSource, str]]:
    """A kernel, its source, and the URL of a console with a token."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        source = KernelSource(kernel)
        async with served(source, TOKEN) as url:
            yield kernel, source, url


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


async def give_up(kernel: k.Kernel, session_id: str, agent: str = "agent") -> None:
    """A session whose run has ended because the session was given up."""
    await kernel.spawn(
        session_id, k.spec(k.script([("request_user_input", {"prompt": "?"})]), ["request_user_input"], name=agent)
    )
    await kernel.send(session_id)
    await kernel.paused(session_id)
    await kernel.service.journal.submit(
        lambda tx: activation.quarantine(tx, tx.session(session_id), "stuck", "it dies each time"), session_id
    )
    assert (await kernel.end(session_id))["status"] == "quarantined"


async def test_sessions_are_found_by_agent_tree_time_and_how_their_last_run_ended(tmp_path: Path) -> None:
    """Each alone and all together, page by page without gap or repetition; a status that is none is refused."""
    async with stage(tmp_path) as (kernel, _, url), httpx2.AsyncClient(base_url=url, headers=BEARER) as client:
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
    async with stage(tmp_path) as (kernel, _, url), httpx2.AsyncClient(base_url=url, headers=BEARER) as client:
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


@pytest.mark.thorough
async def test_failed_runs_are_found_looked_at_and_resumed_together(tmp_path: Path) -> None:
    """A person chooses the failed runs of one agent in the last hour, opens a trace, goes back, and resumes all."""
    async with stage(tmp_path) as (kernel, _, url):
        await kernel.run("fine", k.spec("", name="reader"))
        for number in range(3):
            await give_up(kernel, f"bad-{number}", "reader")
        await give_up(kernel, "other", "writer")
        async with opened(url) as (page, wrong):
            rows = page.get_by_role("table", name="All sessions").locator("tbody tr")
            await expect(rows).to_have_count(5)
            await page.get_by_label("Status").select_option("last:bad")
            await page.get_by_role("combobox", name="Time", exact=True).select_option("hour")
            await page.get_by_label("Time of").select_option("ended_at")
            await page.get_by_label("Agent", exact=True).fill("reader")
            await expect(rows).to_have_count(3)
            filtered = page.url
            await rows.first.get_by_role("link", name=re.compile("Trace")).click()
            await expect(page.locator(".waterfall")).to_be_visible()
            await page.go_back()
            await expect(rows).to_have_count(3)
            assert page.url == filtered
            await page.reload()
            await expect(rows).to_have_count(3)
            await page.get_by_role("button", name="Select all that match").click()
            await expect(page.get_by_text("3 selected")).to_be_visible()
            await page.get_by_role("button", name="Resume").click()
            dialog = page.get_by_role("dialog")
            await expect(dialog).to_contain_text("Resume: 3 sessions?")
            await dialog.get_by_role("button", name="Resume (3)").click()
            await expect(dialog).to_contain_text("3 of 3 done.")
            await page.keyboard.press("Escape")
            await expect(dialog).to_be_hidden()
            await expect(rows.first.locator(".c-status")).to_have_text("idle")
            await page.go_back()  # the last choice but one: of any time
            await expect(page.get_by_label("Time of")).to_have_value("")
            assert wrong == []
        assert [(await kernel.info(f"bad-{number}"))["status"] for number in range(3)] == ["idle"] * 3
        assert (await kernel.info("other"))["status"] == "quarantined"


class Refusing(KernelSource):
    """A kernel of which one session can't be closed."""

    async def act(self, method: str, session_id: str, *arguments: Any) -> Any:
        if session_id == "s-2":
            raise StoreUnreachable("the store is away")
        return await super().act(method, session_id, *arguments)


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


@pytest.mark.thorough
async def test_a_node_is_drained_and_taken_back_from_its_page(tmp_path: Path) -> None:
    """The nodes' page shows processes and sessions of each node; a drain is confirmed, shown, and taken back."""
    async with stage(tmp_path) as (kernel, _, url):
        await kernel.spawn("s", k.spec(k.script([("request_user_input", {"prompt": "?"})]), ["request_user_input"]))
        await kernel.send("s")
        await kernel.paused("s")
        async with opened(url, "#/nodes", viewport={"width": 400, "height": 800}) as (page, wrong):
            node = page.get_by_role("table", name="Nodes").locator("tbody tr")
            await expect(node).to_contain_text("in use")
            await expect(node).to_contain_text("1 waiting for input")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 400
            await node.get_by_role("button", name="Drain …").click()
            await page.get_by_label("Seconds that they have").fill("60")
            await page.get_by_role("dialog").get_by_role("button", name="Drain").click()
            await expect(node).to_contain_text(re.compile("drain(ing|ed)"))
            assert [drain["node_id"] for drain in await kernel.ask("read", "drains", [], {})] == [kernel.node_id]
            await node.get_by_role("button", name="Undrain").click()
            await page.get_by_role("button", name="Take it back").click()
            await expect(node).to_contain_text("in use")
            assert await kernel.ask("read", "drains", [], {}) == []
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
            await expect(page.locator(".events .told").get_by_text("completed")).to_be_visible()
            assert wrong == []
