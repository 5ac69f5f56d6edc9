"""`understudy worktrees` and `understudy run --worktree`, in real repositories, on the cluster in one process."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from understudy import AgentSpec, Worktree, tool
from understudy.cluster.cli import run_command, worktrees_command
from understudy.cluster.cli.main import app
from understudy.cluster.client.worktree_listing import worktrees_of
from understudy.errors import WorktreeFailed
from understudy.testing import LocalCluster

from ..git_repository import branches, git, repository

PATIENCE = 60.0
PLAIN = {"backend": "none"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster that the commands connect to."""
    with LocalCluster() as made:

        @contextlib.contextmanager
        def connected(_store: str | None, **_options: Any) -> Iterator[LocalCluster]:
            yield made

        monkeypatch.setattr(worktrees_command, "connected", connected)
        monkeypatch.setattr(run_command, "connected", connected)
        yield made


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return repository(tmp_path / "top")


def asked(*words: str, fails: int = 0) -> Any:
    """The JSON document of a command."""
    done = CliRunner().invoke(app, ["worktrees", *words, "--json"])
    assert done.exit_code == fails, done.output
    return json.loads(done.stdout)


def keeps(cluster: LocalCluster, top: Path, session_id: str, **files: str) -> None:
    """A session whose run writes these files, and leaves its worktree."""
    agent = AgentSpec(
        name="writer", tools=["write_file"], workspace=Worktree(repository=str(top), on_end="keep"), sandbox=PLAIN
    )
    session = cluster.spawn(agent, session_id=session_id)
    for name, content in files.items():
        task = f"call write_file {json.dumps({'path': f'{name}.txt', 'content': content})}"
        session.send(task).result(PATIENCE, check=True)
    if not files:
        session.send("nothing").result(PATIENCE, check=True)


def test_what_is_left_is_listed_and_shown(cluster: LocalCluster, top: Path) -> None:
    """Given worktrees that were kept, one with changes, then from any directory of the repository both are listed with
    session, files and whether they are merged; what nobody has committed is shown, and a name that is none is an
    error."""
    keeps(cluster, top, "changed", new="new\n")
    keeps(cluster, top, "same")
    (top / "sub").mkdir()
    changed, same = asked("list", "--repository", str(top / "sub"))["worktrees"]
    assert (changed["name"], changed["session_id"], changed["files"]) == ("changed", "changed", ["new.txt"])
    assert (changed["branch"], changed["merged"], same["files"], same["merged"]) == (
        "understudy/changed", False, [], True
    )  # fmt: skip
    Path(same["path"], "a.txt").write_text("by hand\n")
    shown = asked("show", "understudy/same", "--repository", str(top))
    assert (shown["uncommitted"], shown["needless"]) == (["a.txt"], False)
    assert asked("show", "none", "--repository", str(top), fails=1)["error"]["code"] == "worktree_failed"
    done = CliRunner().invoke(app, ["worktrees", "show", "changed", "--repository", str(top)])
    assert "changed: new.txt" in done.stdout
    assert f"git -C {top} merge understudy/changed" in done.stderr
    table = CliRunner().invoke(app, ["worktrees", "list", "--repository", str(top)]).stdout
    assert "not merged" in table
    assert "1 file not committed" in table


def test_nothing_is_removed_that_is_nowhere_else(cluster: LocalCluster, top: Path) -> None:
    """Given a worktree with changes, it is removed once they are merged, or by force: directory, branch and all that
    the repository knows of it; before that, it is refused."""
    for session_id in ("one", "two"):
        keeps(cluster, top, session_id, **{session_id: "new\n"})
    where = ("--repository", str(top))
    refused = asked("remove", "one", *where, fails=1)
    assert "merged nowhere: one.txt" in refused["error"]["message"]
    git(top, "merge", "--quiet", "--no-edit", "understudy/one")
    assert asked("remove", "one", *where) == {"removed": "one"}
    assert asked("remove", "two", "--force", *where) == {"removed": "two"}
    assert (branches(top), os.listdir(f"{top}.worktrees")) == ([], [])
    assert git(top, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert (top / "one.txt").exists()
    assert not (top / "two.txt").exists()


def test_prune_removes_what_is_needless(cluster: LocalCluster, top: Path) -> None:
    """Given worktrees without changes, with changes, with changes that are merged, and a branch that two others share,
    then prune removes those with which nothing is lost and says why the others stay; with `--dry-run` it only says."""
    keeps(cluster, top, "same")
    keeps(cluster, top, "changed", changed="new\n")
    keeps(cluster, top, "merged", merged="new\n")
    git(top, "merge", "--quiet", "--no-edit", "understudy/merged")
    git(top, "branch", "understudy/twin", "understudy/changed")  # each has the other's commits: one must stay
    where = ("--repository", str(top))
    before = branches(top)
    expected = {"removed": ["changed", "merged", "same"], "left": {"twin": "not merged"}}
    assert asked("prune", "--dry-run", *where) == {"dry_run": True, **expected}
    assert branches(top) == before
    assert asked("prune", *where) == {"dry_run": False, **expected}
    assert branches(top) == ["understudy/twin"]
    assert os.listdir(f"{top}.worktrees") == []


def test_what_a_session_works_in_stays(cluster: LocalCluster, top: Path) -> None:
    """Given a session that is at work in its worktree, then neither remove nor prune touch it, not even by force."""
    begun, may_end = threading.Event(), threading.Event()

    @tool(on_crash="rerun")
    def works() -> str:
        """Work until somebody says so."""
        begun.set()
        may_end.wait(PATIENCE)
        return "worked"

    agent = AgentSpec(name="a", tools=[works], workspace=Worktree(repository=str(top)), sandbox=PLAIN)
    run = cluster.spawn(agent, session_id="busy").send("call works {}")
    assert begun.wait(PATIENCE)
    where = ("--repository", str(top))
    assert "at work" in asked("remove", "busy", "--force", *where, fails=1)["error"]["message"]
    assert asked("prune", *where) == {"dry_run": False, "removed": [], "left": {"busy": "session busy is at work"}}
    may_end.set()
    assert run.result(PATIENCE, check=True).ok
    assert worktrees_of(top) == []


def test_a_run_in_a_worktree_of_its_own(cluster: LocalCluster, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given `run --worktree` within a repository, what the agent writes is merged when the run completes; outside of
    one it is refused before there is a session."""
    monkeypatch.chdir(top)
    task = 'call write_file {"path": "new.txt", "content": "new"}'
    words = ["run", task, "--worktree", "--tool", "files", "--sandbox", "none", "--session", "w", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert (top / "new.txt").read_text() == "new"
    assert [event.outcome for event in cluster.session("w").events() if event.type == "worktree_ended"] == ["merged"]
    monkeypatch.chdir(top.parent)
    outside = CliRunner().invoke(app, [*words[:-2], "x", "--json"])
    assert (outside.exit_code, json.loads(outside.stdout)["error"]["code"]) == (1, WorktreeFailed.code)
    assert [info.id for info in cluster.sessions(live_only=False)] == ["w"]
