"""Sub-agents with git worktrees of their own: made, merged, kept or removed once, whatever dies."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy.actors import worktree_program
from understudy.actors.sandbox import bubblewrap_problem
from understudy.identifiers import child_identifier

from .. import tiers
from ..git_repository import branches, git, repository
from . import kernel as k
from .deaths import Deaths

PLAIN = {"backend": "none"}


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as made:
        yield made


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return repository(tmp_path / "top")


def tree(on_end: str = "merge", **more: Any) -> dict[str, Any]:
    """A compiled worktree of the parent's workspace."""
    return {"repository": None, "base": None, "on_end": on_end, "directory": None, **more}


def writer(name: str, *files: tuple[str, str], worktree: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A sub-agent that writes these files, one after the other."""
    calls = [("write_file", {"path": path, "content": content}) for path, content in files]
    fields = {"name": name, "hash": name, "worktree": worktree or tree(), "sandbox": PLAIN, **more}
    return k.spec(k.script(*([call] for call in calls), f"{name} is done"), ["write_file"], **fields)


def lead(workspace: Path | None, *agents: dict[str, Any], tool: str = "spawn_agent", **more: Any) -> dict[str, Any]:
    """An agent that starts each of these once, all in one round."""
    calls = [(tool, {"task": "go", "agent": agent["name"]}) for agent in agents]
    tools = [tool, *more.pop("tools", ())]
    named = {agent["name"]: agent for agent in agents}
    path = str(workspace) if workspace is not None else None
    return k.spec(k.script(calls, "all done"), tools, agents=named, workspace=path, sandbox=PLAIN, **more)


def child(index: int = 0, parent: str = "s") -> str:
    return child_identifier(parent, f"r/1/{index}")


async def test_what_two_sub_agents_change_is_merged(kernel: k.Kernel, top: Path) -> None:
    """Given two sub-agents with a worktree each that change different files, when they have ended, then their parent's
    workspace has both changes, its model reads so, and neither worktrees nor branches are left."""
    one, two = writer("one", ("a.txt", "one\n")), writer("two", ("b.txt", "two\n"), ("new/c.txt", "new\n"))
    ended = await kernel.run("s", lead(top, one, two))
    assert (ended["status"], ended["text"]) == ("completed", "all done")
    first, second = await kernel.results()
    assert first == "one is done\n[its changes are merged into your workspace: a.txt]"
    assert second == "two is done\n[its changes are merged into your workspace: b.txt, new/c.txt]"
    assert ((top / "a.txt").read_text(), (top / "b.txt").read_text()) == ("one\n", "two\n")
    assert git(top, "status", "--porcelain") == ""
    assert branches(top) == []
    assert os.listdir(f"{top}.worktrees") == []


async def test_a_conflict_is_the_end_of_the_run(kernel: k.Kernel, top: Path) -> None:
    """Given two sub-agents that change the same line, then the one that ends last has failed with a typed error, its
    parent's model reads which file and which branch, and nothing of it is merged."""
    late = writer("late", ("a.txt", "late\n"), ("b.txt", "late\n"))
    late["instructions"] = k.script(
        [("write_file", {"path": "a.txt", "content": "late\n"})], {"text": "late is done", "delay": 2.0}
    )
    await kernel.run("s", lead(top, writer("early", ("a.txt", "early\n")), late))
    _, result = await kernel.results()
    row = await kernel.end(child(1), "task")
    branch = branches(top)[0]
    assert (row["status"], row["error"]["code"], row["text"]) == ("failed", "merge_conflict", "late is done")
    assert row["error"]["details"]["files"] == ["a.txt"]
    assert row["error"]["details"]["branch"] == branch
    assert f"these files conflict: a.txt. They are on branch {branch}" in result
    assert (top / "a.txt").read_text() == "early\n"
    assert git(top, "status", "--porcelain") == ""
    assert git(top, "show", f"{branch}:a.txt") == "late"


async def test_one_in_the_background_is_merged_before_its_end_is_reported(kernel: k.Kernel, top: Path) -> None:
    """Given a sub-agent that its parent doesn't wait for, when its end is reported, then its changes are merged."""
    await kernel.spawn("s", lead(top, writer("one", ("a.txt", "one\n")), tool="start_agent"))
    await kernel.send("s")
    await kernel.until("s", "child_finished")
    assert (top / "a.txt").read_text() == "one\n"
    await kernel.end("s", f"news.{child()}")
    [news] = [m["content"] for m in await kernel.messages("s") if m.get("origin") == "child"]
    assert "[its changes are merged into your workspace: a.txt]" in news


@pytest.mark.parametrize("on_end", ["keep", "remove"])
async def test_the_rule_says_what_becomes_of_it(kernel: k.Kernel, top: Path, on_end: str) -> None:
    """Given a rule that keeps or removes worktrees, then nothing is merged; the branch is reported, if kept."""
    await kernel.run("s", lead(top, writer("one", ("a.txt", "one\n"), worktree=tree(on_end))))
    [result] = await kernel.results()
    assert (top / "a.txt").read_text() == "a\n"
    assert len(branches(top)) == (on_end == "keep")
    assert ("its work is not merged: it changed a.txt; branch understudy/" in result) == (on_end == "keep")


@pytest.mark.parametrize("waits", [True, False])
async def test_the_worktree_of_one_that_is_cancelled_is_kept(kernel: k.Kernel, top: Path, waits: bool) -> None:
    """Given a sub-agent that is cancelled while it is at work, or while it waits and no process has it, then what it
    wrote is in its worktree, nothing is merged, and its parent's model reads the branch."""
    one = writer("one", ("a.txt", "one\n"))
    ask = [("request_user_input", {"prompt": "go on?"})]
    sleep = [("slow", {"seconds": 30})]
    one = {
        **k.spec(
            k.script([("write_file", {"path": "a.txt", "content": "one\n"})], ask if waits else sleep, "never"),
            ["write_file", "request_user_input", slow], name="one", hash="one", worktree=tree(), sandbox=PLAIN,
        )
    }  # fmt: skip
    await kernel.spawn("s", lead(top, one))
    await kernel.send("s")
    if waits:
        await kernel.until(child(), "run_started")
        await kernel.paused(child())
    else:
        await kernel.until(child(), "tool_started")
    await kernel.ask("cancel", child(), None, "enough")
    await kernel.end("s")
    [result] = await kernel.results()
    [branch] = branches(top)
    path = Path(f"{top}.worktrees") / branch.removeprefix("understudy/")
    assert "ended as cancelled" in result
    assert f"branch {branch}, directory {path}" in result
    assert (path / "a.txt").read_text() == "one\n"
    assert (top / "a.txt").read_text() == "a\n"


@k.tool(on_crash="report")
async def slow(seconds: float) -> str:
    """Take a while."""
    await asyncio.sleep(seconds)
    return "ok"


async def test_a_tree_merges_from_below(kernel: k.Kernel, top: Path) -> None:
    """Given a root session with a worktree, whose sub-agent has one of it, and that one's has one again, then each
    change arrives in the repository through all of them, and nobody works in another one's directory."""
    leaf = writer("leaf", ("leaf.txt", "leaf\n"))
    middle = lead(None, leaf, tools=["write_file"], name="middle", hash="middle", worktree=tree())
    middle["instructions"] = k.script(
        [("write_file", {"path": "middle.txt", "content": "middle\n"})],
        [("spawn_agent", {"task": "go", "agent": "leaf"})],
        "middle is done",
    )
    above = {
        "repository": str(top), "into": str(top), "base": None, "on_end": "merge", "directory": f"{top}.trees",
    }  # fmt: skip
    ended = await kernel.run("s", lead(None, middle, worktree=above))
    assert ended["status"] == "completed"
    assert (await kernel.results())[0].endswith("[its changes are merged into your workspace: leaf.txt, middle.txt]")
    assert (top / "leaf.txt").exists()
    assert (top / "middle.txt").exists()
    assert git(top, "log", "--format=%s", "--grep=Merge").count("Merge") == 3
    assert os.listdir(f"{top}.trees") == []


async def test_the_next_run_has_a_new_worktree(kernel: k.Kernel, top: Path) -> None:
    """Given a session with a worktree, when a second run follows one that was merged, then it begins with what is
    merged, and its own changes are merged, too."""
    above = {
        "repository": str(top), "into": str(top), "base": None, "on_end": "merge", "directory": f"{top}.trees",
    }  # fmt: skip
    script = k.script([("edit_file", {"path": "a.txt", "old": "a", "new": "ab"})], "done")
    await kernel.run("s", k.spec(script, ["files"], worktree=above, sandbox=PLAIN))
    assert (top / "a.txt").read_text() == "ab\n"
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"
    assert (top / "a.txt").read_text() == "abb\n"


@pytest.mark.parametrize("why", ["no repository", "no git", "no workspace"])
async def test_why_there_is_no_worktree_is_reported(
    kernel: k.Kernel, top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Given a workspace that is no repository, a node without git, or a parent without a workspace, then the parent's
    model reads what is missing, and goes on."""
    workspace: Path | None = top
    if why == "no repository":
        workspace = tmp_path
    elif why == "no git":
        programs = tmp_path / "bin"
        programs.mkdir()
        for name in ("sh", "bash", "env"):
            (programs / name).symlink_to(shutil.which(name) or "")
        monkeypatch.setenv("PATH", str(programs))
    else:
        workspace = None
    ended = await kernel.run("s", lead(workspace, writer("one", ("a.txt", "one\n"))))
    [result] = await kernel.results()
    said = {
        "no repository": "is not the top of a git repository on this node",
        "no git": "git is not installed on this node",
        "no workspace": "needs a git worktree of your workspace, and you have none",
    }
    assert ended["status"] == "completed"
    assert said[why] in result
    assert "branch" not in result


async def test_a_death_in_the_merge(
    kernel: k.Kernel, top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a sub-agent whose process dies while git merges its worktree, then its next process merges it, once."""
    programs, seen = tmp_path / "bin", tmp_path / "seen"
    programs.mkdir()
    (programs / "git").write_text(
        f'#!/bin/sh\ncase " $* " in *" merge --ff-only "*) if mkdir {seen} 2>/dev/null; then sleep 60; fi;; esac\n'
        f'exec {shutil.which("git")} "$@"\n'
    )
    (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    await kernel.spawn("s", lead(top, writer("one", ("a.txt", "one\n"))))
    await kernel.send("s")
    async with asyncio.timeout(20):
        while not seen.exists():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)
    worker = kernel.holder(child())
    assert worker is not None
    kernel.kill(worker)
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.results() == ["one is done\n[its changes are merged into your workspace: a.txt]"]
    assert git(top, "log", "--first-parent", "--format=%s").count("Merge one") == 1
    assert not (top / ".git" / "understudy" / "merging").exists()


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_at_every_point(kernel: k.Kernel, top: Path, victim: str) -> None:
    """Given two sub-agents with worktrees, when a frame or the node service dies at any point, then each worktree is
    made and merged once, and the parent's model reads what it reads without a death."""
    wanted = await _life(kernel, top, "clean")
    points = len(kernel.points)
    problems = []
    for at in tiers.points(range(0, points, 3)):
        deaths = Deaths(kernel, child(0, f"s{at}"), at, victim)
        try:
            found = await _life(kernel, top, f"s{at}")
        except k.Stuck as stuck:
            problems.append(f"{deaths.where}: {stuck}")
            continue
        finally:
            kernel.on_point = None
        await kernel.quiet()
        kernel.check(f"s{at}")
        if found != wanted:
            problems.append(f"{deaths.where}: {found} is not {wanted}")
    assert not problems, "\n".join(problems)


async def _life(kernel: k.Kernel, top: Path, session_id: str) -> tuple[Any, ...]:
    """What comes of a session with two sub-agents that write a file each."""
    agents = [writer(name, (f"{session_id}-{name}.txt", "x\n")) for name in ("one", "two")]
    ended = await kernel.run(session_id, lead(top, *agents))
    results = [text.replace(session_id, "S") for text in await kernel.results(session_id)]
    files = [name.replace(session_id, "S") for name in sorted(os.listdir(top)) if name.startswith(f"{session_id}-")]
    log = git(top, "log", "--first-parent", "--format=%s").splitlines()
    ids = [child(index, session_id) for index in range(2)]
    merged = [sum(f"(session {one})" in line for line in log) for one in ids]
    return ended["status"], results, files, merged, git(top, "status", "--porcelain"), branches(top)


COMMANDS = """
echo one > a.txt && git commit --quiet --all -m own && git log -1 --format=%an
echo two > b.txt
git config x.y z 2>/dev/null || echo no configuration
touch "$(git rev-parse --git-common-dir)/hooks/pre-commit" 2>/dev/null || echo no hook
ls {top} | wc -l
ls {top}.worktrees | wc -l
"""


@pytest.mark.skipif(bubblewrap_problem() is not None, reason="bubblewrap does not work here")
async def test_commands_in_the_sandbox(kernel: k.Kernel, top: Path) -> None:
    """Given an agent in the sandbox, then its commands can commit in its worktree, but write neither configuration nor
    hooks, and see neither the parent's files nor another worktree; and it is made and merged in the sandbox, too."""
    command = COMMANDS.format(top=top)
    one = k.spec(k.script([("bash", {"command": command})], "done"), ["bash"], name="one", hash="one", worktree=tree())
    await kernel.run("s", lead(top, one, writer("two", ("two.txt", "2\n"), sandbox={})))
    first, second = await kernel.results()
    [said] = await kernel.results(child())
    assert [line for line in said.split("\n") if line] == [
        "one",
        "no configuration",
        "no hook",
        "0",
        "1",
        "[exit code 0]",
    ]
    assert first == "done\n[its changes are merged into your workspace: a.txt, b.txt]"
    assert second.endswith("merged into your workspace: two.txt]")
    assert ((top / "a.txt").read_text(), (top / "b.txt").read_text()) == ("one\n", "two\n")
    assert git(top, "status", "--porcelain") == ""


def test_the_program_needs_nothing_of_ours() -> None:
    """Given the program's source, then it imports the standard library alone: in the sandbox there is nothing else."""
    lines = Path(worktree_program.__file__).read_text().splitlines()
    found = [line for line in lines if line.startswith(("import ", "from "))]
    assert all("understudy" not in line and not line.startswith("from .") for line in found)
