"""Python tools with `@tool(sandbox=True)`: what they can do, and what their calls give."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import select
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from understudy import AgentSpec, WebPolicy
from understudy.actors.execution import Outcome, bind, execute
from understudy.actors.sandbox import bubblewrap_problem
from understudy.actors.tools import ToolContext, describe, load, tool
from understudy.actors.web_rules import WebRules
from understudy.confinement import Confinement
from understudy.errors import InvalidSpec
from understudy.testing import LocalCluster

pytestmark = [
    pytest.mark.skipif(bubblewrap_problem() is not None, reason=str(bubblewrap_problem())),
    pytest.mark.uvloop,
]


class SessionsOwn:
    """What leads to a session's process, which can't be sent."""

    async def directory(self) -> None:
        """There are no skills."""


SESSIONS_OWN: Any = SessionsOwn()
"""In place of what a session's context leads to: nothing of it can be sent to another process."""

MODULE = """
import asyncio
import enum
import os
import time

import beside_sandboxed
from understudy import ToolContext, ToolError, tool


class Color(enum.Enum):
    red = "red"
    blue = "blue"


@tool(sandbox=True)
def paint(color: Color, context: ToolContext, times: int = 1) -> dict:
    context.progress(0.5, "half")
    print("noise on standard output")
    beside = os.path.dirname(__file__)
    return {
        "color": color.name, "times": times, "call": context.call_key, "directory": os.getcwd(), "pid": os.getpid(),
        "beside": sorted(os.listdir(beside)), "value": beside_sandboxed.VALUE, "secret": "SECRET" in os.environ,
    }


@tool(sandbox=True)
async def look(context: ToolContext) -> list:
    skills = await context.skills_directory()
    return [context.call_id, context.web and context.web.allow, skills and open(f"{skills}/pdf/a.txt").read()]


@tool(sandbox=True)
async def end(how: str) -> str:
    await asyncio.sleep(0)
    if how == "refuse":
        raise ToolError("not today")
    if how == "abort":
        os.abort()
    if how == "flood":
        os.write(1, b"x" * 100)
        return "y" * 3_000_000
    return open(how).read()


@tool(sandbox=True)
def hang() -> None:
    with open("alive", "w") as alive:
        alive.write("begun")
        alive.flush()
        time.sleep(1000)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module as an application has it, with another one and a file with a key beside it."""
    code = tmp_path / "application"
    code.mkdir()
    (code / "sandboxed_tools.py").write_text(textwrap.dedent(MODULE))
    (code / "beside_sandboxed.py").write_text("VALUE = 7\n")
    (code / ".env").write_text("KEY=a key\n")
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.setenv("SECRET", "a secret")
    yield importlib.import_module("sandboxed_tools")
    for name in ("sandboxed_tools", "beside_sandboxed"):
        sys.modules.pop(name, None)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    return place


async def call(
    function: Any, arguments: str, workspace: Path, backend: str = "bubblewrap", seconds: float = 60
) -> Outcome:
    (spec,), _ = describe(function, pickle=None)
    context = ToolContext(
        session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a", workspace=str(workspace),
        confinement=Confinement(backend=backend), skill_files=SESSIONS_OWN, web=WebRules(), _reporting=SESSIONS_OWN,
        _commands=SESSIONS_OWN,
    )  # fmt: skip
    loaded = load(spec, {}.__getitem__, None)
    keywords = bind(loaded, arguments, context)
    if isinstance(keywords, Outcome):
        return keywords
    found = await execute(loaded, keywords, seconds)
    assert found is not None
    return found


@pytest.mark.parametrize("backend", ["bubblewrap", "none"])
async def test_a_call_is_as_any_other(module: ModuleType, workspace: Path, backend: str) -> None:
    """Arguments become what the function's types say, it knows its call, and its result is the call's; it is another
    process, which in a sandbox sees no files but the workspace and what can be imported."""
    done = await call(module.paint, '{"color": "red", "times": 2.0}', workspace, backend)
    assert done.outcome == "ok", done.content
    found = json.loads(done.content)
    confined = backend == "bubblewrap"
    assert found.pop("pid") != os.getpid()
    assert (".env" not in found.pop("beside")) is confined
    assert found.pop("secret") is not confined
    assert found == {"color": "red", "times": 2, "call": "s/c", "directory": str(workspace), "value": 7}
    assert (await call(module.paint, '{"color": "green"}', workspace, backend)).outcome == "invalid"


@pytest.mark.parametrize("more", [False, True])
def test_a_session_calls_it(module: ModuleType, workspace: Path, tmp_path: Path, more: bool) -> None:
    """In a session as well the tool knows its call, what the agent may fetch, and where the files of its skills are."""
    (tmp_path / "skills" / "pdf").mkdir(parents=True)
    (tmp_path / "skills" / "pdf" / "SKILL.md").write_text("---\nname: pdf\ndescription: Fill it.\n---\nFill it.")
    (tmp_path / "skills" / "pdf" / "a.txt").write_text("a file")
    skills, web = ((str(tmp_path / "skills"),), WebPolicy(allow=["example.org"])) if more else ((), None)
    spec = AgentSpec(name="a", tools=[module.look], workspace=str(workspace), skills=skills, web=web)
    with LocalCluster() as cluster:
        run = cluster.spawn(spec).send("call look {}", run_id="r")
        said = run.result(60, check=True).text.removeprefix("offline: ")
    assert json.loads(said) == ["r/1/0", ["example.org"] if more else None, "a file" if more else None]


@pytest.mark.thorough
async def test_how_a_call_fails(module: ModuleType, workspace: Path, tmp_path: Path) -> None:
    """A tool's own refusal, any other error, the death of the process and an answer that is none are errors of the
    call."""
    refused = await call(module.end, '{"how": "refuse"}', workspace)
    assert (refused.outcome, refused.content) == ("error", "ToolError: not today")
    unseen = await call(module.end, f'{{"how": "{tmp_path}/application/.env"}}', workspace)
    assert "FileNotFoundError" in unseen.content
    died = await call(module.end, '{"how": "abort"}', workspace)
    assert "its process ended with exit code 134" in died.content
    flooded = await call(module.end, '{"how": "flood"}', workspace)
    assert flooded.outcome == "ok"
    assert 999_000 < len(flooded.content) <= 1_000_000


async def test_a_call_past_its_time_is_killed(module: ModuleType, workspace: Path) -> None:
    """It leaves no process, and the session's process goes on: no thread is stuck in it."""
    os.mkfifo(workspace / "alive")
    hung = asyncio.create_task(call(module.hang, "{}", workspace, seconds=5))
    descriptor = await asyncio.to_thread(os.open, workspace / "alive", os.O_RDONLY)
    assert await asyncio.to_thread(os.read, descriptor, 10) == b"begun"
    done = await hung
    assert (done.outcome, done.stuck_thread) == ("timeout", False)
    poll = select.poll()
    poll.register(descriptor, select.POLLHUP)
    assert poll.poll(30_000)
    os.close(descriptor)


def test_a_function_that_travels_by_value_is_refused() -> None:
    """The sandbox imports the function: one that can't be imported is refused where the agent is described."""

    @tool(sandbox=True)
    def local() -> None:
        """Nothing."""

    with pytest.raises(InvalidSpec, match="top level of a module"):
        describe(local, pickle=lambda _: b"")
