"""Make docs/images/console.png: `python -m tests.picture` takes it from a real console, of a tree at work.

A lead and four surveyors of this repository on a `LocalCluster`; one surveyor's process dies while its model call is in
flight, and another takes over. Prints the same tree as `understudy tree` shows it. Needs Chromium.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import expect

from understudy import AgentSpec
from understudy.cluster.cli.rendering import print_tree
from understudy.cluster.client import background
from understudy.cluster.client.cluster_source import ClusterSource
from understudy.cluster.client.results import SessionInfo
from understudy.cluster.local.local_cluster import LocalCluster
from understudy.examples.survey import tools as survey
from understudy.examples.survey.policy import SURVEYOR_TOOLS, task
from understudy.testing.policies import Reply

from .console_stage import chromium, served

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "console.png"
PARTS = {"core": 1.2, "store": 0.9, "tests": 1.5, "docs": 0.5}
"""What is surveyed, and how many seconds a model call about it takes."""

KILLED = "store"
SECONDS = 60.0


def policy(body: dict[str, Any]) -> Reply:
    """The lead gives each part to a surveyor of its name; a surveyor calls its three tools, one a round."""
    instructions = str(body["messages"][0]["content"])
    results = sum(message["role"] == "tool" for message in body["messages"])
    if "lead" in instructions:
        calls = tuple(("spawn_agent", {"agent": part, "task": task(part)}) for part in PARTS)
        return Reply(text="All parts are surveyed.", delay=1) if results else Reply(tool_calls=calls, delay=0.8)
    part = next(part for part in PARTS if part in instructions)
    if results < len(SURVEYOR_TOOLS):
        return Reply(tool_calls=((SURVEYOR_TOOLS[results], {"path": part}),), delay=PARTS[part])
    return Reply(text=f"{part}: surveyed.", delay=PARTS[part] if part == "docs" else 30)


def wait_for(cluster: LocalCluster, done: Callable[[dict[str, SessionInfo]], bool]) -> list[SessionInfo]:
    """The lead's tree, as soon as it is as wanted."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found = cluster.session("survey").tree()
        if len(found) > len(PARTS) and done({info.name: info for info in found}):
            return found
        time.sleep(0.05)
    raise TimeoutError("the tree at work is not as the picture wants it")


async def photograph(cluster: LocalCluster) -> None:
    """The page of the tree, in the light theme."""
    async with served(ClusterSource(cluster._connection)) as url, chromium() as browser:
        context = await browser.new_context(
            viewport={"width": 1100, "height": 640}, color_scheme="light", device_scale_factor=1.5
        )
        page = await context.new_page()
        await page.goto(f"{url}/#/session/survey")
        await expect(page.locator(".tree [role=listitem]")).to_have_count(1 + len(PARTS), timeout=20_000)
        await expect(page.locator(".tree .row").nth(2)).to_contain_text("model", timeout=10_000)
        PICTURE.parent.mkdir(exist_ok=True)
        taken = io.BytesIO(await page.screenshot())
    Image.open(taken).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(PICTURE, optimize=True)


def main() -> None:
    with LocalCluster(policy=policy, standby=2, max_actors=6) as cluster:
        agents = [
            AgentSpec(
                name=part, instructions=f"Survey {part}.", workspace=str(ROOT),
                tools=[survey.measure, survey.definitions, survey.todos],
            )
            for part in PARTS
        ]  # fmt: skip
        lead = AgentSpec(name="lead", instructions="You are the lead.", tools=["spawn_agent"], agents=agents)
        cluster.spawn(lead, session_id="survey").send("Survey this repository: core, store, tests and docs.")
        found = wait_for(cluster, lambda now: now[KILLED].status == "waiting_for_model" and now[KILLED].seq > 6)
        (killed,) = [info.id for info in found if info.name == KILLED]
        assert cluster.kill(killed)
        print_tree(wait_for(cluster, lambda now: now["docs"].status == "completed" and now[KILLED].restarts > 0))
        background.wait(photograph(cluster))


if __name__ == "__main__":
    main()
