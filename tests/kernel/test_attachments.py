"""Images as results of tools: each request is the same after any death, and the log has what was seen."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.directives import Replace
from understudy.actors.hooks import HookContext, describe_hook, hook
from understudy.actors.tools import tool
from understudy.attachments import Image, as_content
from understudy.testing.offline import OfflineServer

from .. import tiers
from . import kernel as k
from .deaths import Deaths

pytestmark = pytest.mark.conformance

CALLS = [("plot", {"number": 1}), ("plot", {"number": 2})]
SCRIPT = k.script(CALLS, [("plot", {"number": 3})], "done")


def png(number: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + struct.pack(">II", 512, number) + b"\0" * 99


@tool(on_crash="rerun")
async def plot(number: int) -> list[Any]:
    """Draw."""
    return [f"plot {number}", Image(png(number), f"{number}.png")]


@hook("after_tool")
def censor(context: HookContext) -> Replace | None:
    return Replace(text="nothing to see") if context.arguments == {"number": 1} else None


def seen(body: dict[str, Any]) -> list[list[str]]:
    """The types of parts of each message that has parts."""
    return [[part["type"] for part in m["content"]] for m in body["messages"] if isinstance(m["content"], list)]


async def test_a_model_is_shown_the_images(tmp_path: Path) -> None:
    """Given an input with an image and tools that return some: each request has those before it, and so has the log."""
    with OfflineServer() as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            ended = await kernel.run("s", k.spec(SCRIPT, [plot]), as_content(["look", Image(png(9))]))
            results = await kernel.results()
    assert ended["text"] == "done"
    given, both = ["text", "image_url"], ["text", "text", "image_url", "text", "image_url"]
    one = ["text", "text", "image_url"]
    assert [seen(request.body) for request in server.requests] == [[given], [given, both], [given, both, one]]
    assert [[part["type"] for part in result] for result in results] == [given] * 3


async def test_a_hook_that_replaces_a_result_takes_its_images_away(tmp_path: Path) -> None:
    """What its text has no placeholder of is neither in a request nor in the log."""
    with OfflineServer() as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            hooks = [describe_hook(censor, pickle=None)[0]]
            await kernel.run("s", k.spec(SCRIPT, [plot], hooks=hooks))
            results = await kernel.results()
    assert results[0] == "nothing to see"
    assert seen(server.requests[1].body) == [["text", "text", "image_url"]]


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_changes_no_request(victim: str, tmp_path: Path) -> None:
    """Killed at each point: the model is asked the same, byte for byte, and the log is the same."""
    clean: list[Any] = []

    async def once(at: int | None) -> int:
        directory = tmp_path / str(at)
        directory.mkdir()
        with OfflineServer() as server:
            async with k.running(f"sqlite:///{directory}/store.db", directory, server=server) as kernel:
                start = len(kernel.points)
                if at is not None:
                    Deaths(kernel, "s", at, victim)
                ended = await kernel.run("s", k.spec(SCRIPT, [plot]))
                kernel.on_point = None
                await kernel.quiet()
                points = len(kernel.points) - start
                found = [await kernel.transcript("s"), ended["text"]]
        asked = dict.fromkeys(json.dumps(request.body["messages"]) for request in server.requests)
        if at is None:
            clean.extend([list(asked), found])
        else:
            assert [list(asked), found] == clean, f"point {at}"
        return points

    for at in tiers.points(range(await once(None))):
        await once(at)
