"""What makes, merges and removes worktrees: in real repositories, with a death at every command of git."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.actors import worktree_program as program
from understudy.worktrees import branch_of, identity, name_of

from ..git_repository import branches, git, repository

MOST_CALLS = 60


class Died(BaseException):
    """The program's process was killed."""


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return repository(tmp_path / "top", {"a.txt": "a\n", "b.txt": "b\n", "sub/old.txt": "old\n"})


def request(top: Path, session: str = "child", **more: Any) -> dict[str, Any]:
    """What the program is asked about a session's worktree of a repository."""
    name = name_of(session)
    fields = {
        "common": str(top / ".git"), "path": str(top.parent / "top.worktrees" / name), "name": name,
        "branch": branch_of(name), "base": None, "into": str(top), "into_name": None,
        "identity": identity("a", session), "agent": "a", "session": session, "run": "r",
        "completed": True, "on_end": "merge", "most_files": 50,
    }  # fmt: skip
    return fields | more


def create(of: dict[str, Any]) -> Path:
    """Make the worktree."""
    assert "problem" not in program.answer({**of, "do": "create"})
    return Path(of["path"])


def end(of: dict[str, Any]) -> dict[str, Any]:
    """End it."""
    return program.answer({**of, "do": "end"})


def below(of: dict[str, Any], session: str, **more: Any) -> dict[str, Any]:
    """What is asked about the worktree of a sub-agent of a session with one."""
    top = Path(of["common"]).parent
    return request(top, session, into=of["path"], into_name=of["name"], **more)


def test_a_worktree_begins_with_what_is_committed(top: Path) -> None:
    """Given a repository, when a worktree is made twice, then it has the last commit's files on a branch of its own,
    and what was done in it in between is still there."""
    of = request(top)
    path = create(of)
    assert (path / "a.txt").read_text() == "a\n"
    assert git(path, "branch", "--show-current") == "understudy/child"
    (path / "new.txt").write_text("new\n")
    assert program.answer({**of, "do": "create"}) == {"created": False}
    assert (path / "new.txt").exists()


def test_changes_are_merged_and_the_worktree_is_removed(top: Path) -> None:
    """Given a worktree in which files were changed, added and removed, some of it committed, when its task ends, then
    the parent's workspace has all of it in one merge, and neither worktree nor branch are left."""
    of = request(top)
    path = create(of)
    (path / "a.txt").write_text("changed\n")
    git(path, "commit", "--quiet", "--all", "-m", "by the agent")
    (path / "new.txt").write_text("new\n")
    (path / "sub" / "old.txt").unlink()
    found = end(of)
    assert (found["outcome"], found["files"]) == ("merged", ["a.txt", "new.txt", "sub/old.txt"])
    assert (top / "a.txt").read_text() == "changed\n"
    assert (top / "new.txt").exists()
    assert not (top / "sub" / "old.txt").exists()
    assert git(top, "status", "--porcelain") == ""
    assert branches(top) == []
    assert not path.exists()
    assert git(top, "worktree", "list").count("\n") == 0
    assert git(top, "log", "-1", "--format=%an %s") == "a Merge a (session child)"


def test_two_that_change_different_files_are_both_merged(top: Path) -> None:
    """Given two worktrees of one workspace, then the workspace has the changes of both after their ends."""
    first, second = request(top, "one"), request(top, "two")
    (create(first) / "a.txt").write_text("one\n")
    (create(second) / "b.txt").write_text("two\n")
    assert [end(first)["outcome"], end(second)["outcome"]] == ["merged", "merged"]
    assert ((top / "a.txt").read_text(), (top / "b.txt").read_text()) == ("one\n", "two\n")


def test_a_conflict_is_reported_and_nothing_is_half_merged(top: Path) -> None:
    """Given two worktrees that change the same line, then the second one's end names the file, the workspace is as the
    first one left it, and the second one's worktree and branch are there with all that it did."""
    first, second = request(top, "one"), request(top, "two")
    (create(first) / "a.txt").write_text("one\n")
    path = create(second)
    (path / "a.txt").write_text("two\n")
    (path / "b.txt").write_text("two\n")
    end(first)
    before = git(top, "rev-parse", "HEAD")
    found = end(second)
    assert (found["outcome"], found["reason"], found["files"]) == ("conflict", "conflict", ["a.txt"])
    assert git(top, "rev-parse", "HEAD") == before
    assert git(top, "status", "--porcelain") == ""
    assert branches(top) == ["understudy/two"]
    assert git(path, "status", "--porcelain") == ""
    assert git(top, "show", "understudy/two:b.txt") == "two"


@pytest.mark.parametrize("name", ["a.txt", "new.txt"])
def test_what_the_workspace_has_not_committed_is_not_overwritten(top: Path, name: str) -> None:
    """Given a directory with changes that nobody has committed, or a file that git doesn't know, when what is merged
    has the same file, then that is reported as a conflict, and the file is as it was."""
    of = request(top)
    (create(of) / name).write_text("agent\n")
    (top / name).write_text("person\n")
    found = end(of)
    assert (found["outcome"], found["reason"], found["files"]) == ("conflict", "uncommitted", [name])
    assert (top / name).read_text() == "person\n"


def test_other_changes_of_the_workspace_stay(top: Path) -> None:
    """Given a directory with changes that nobody has committed to other files, then they are there after the merge, and
    still not committed."""
    of = request(top)
    (create(of) / "a.txt").write_text("agent\n")
    (top / "b.txt").write_text("person\n")
    assert end(of)["outcome"] == "merged"
    assert git(top, "status", "--porcelain") == "M b.txt"
    assert (top / "a.txt").read_text() == "agent\n"


def test_the_worktree_of_a_parent_is_committed_first(top: Path) -> None:
    """Given a parent with a worktree and changes that it has not committed, then its sub-agent's worktree has them, and
    another line of the same file is merged with what the parent has changed meanwhile."""
    of = request(top, "lead")
    lead = create(of)
    (lead / "plan.txt").write_text("1\n2\n3\n4\n5\n6\n7\n8\n9\n")
    inner = below(of, "inner")
    path = create(inner)
    (path / "plan.txt").write_text((path / "plan.txt").read_text().replace("9", "nine"))
    (lead / "plan.txt").write_text((lead / "plan.txt").read_text().replace("1", "one"))
    assert end(inner)["outcome"] == "merged"
    assert (lead / "plan.txt").read_text() == "one\n2\n3\n4\n5\n6\n7\n8\nnine\n"
    assert not (top / "plan.txt").exists()
    assert end(of)["files"] == ["plan.txt"]
    assert (top / "plan.txt").read_text().startswith("one")


def test_one_without_changes_leaves_nothing(top: Path) -> None:
    """Given a worktree in which nothing was changed, when its task ends, then nothing is merged and nothing is left."""
    of = request(top)
    path = create(of)
    before = git(top, "rev-parse", "HEAD")
    assert end(of) == {"outcome": "unchanged"}
    assert git(top, "rev-parse", "HEAD") == before
    assert branches(top) == []
    assert not path.exists()


@pytest.mark.parametrize(("completed", "on_end"), [(True, "keep"), (False, "merge"), (False, "remove")])
def test_what_is_kept_has_everything_committed(top: Path, completed: bool, on_end: str) -> None:
    """Given a worktree that the rule keeps, or of a task that failed, then it is there, committed, and not merged."""
    of = request(top, completed=completed, on_end=on_end)
    path = create(of)
    (path / "a.txt").write_text("agent\n")
    assert end(of) == {"outcome": "kept", "files": ["a.txt"], "count": 1}
    assert git(path, "status", "--porcelain") == ""
    assert (top / "a.txt").read_text() == "a\n"


def test_one_is_removed_by_rule(top: Path) -> None:
    """Given a worktree that the rule removes, then nothing of it is left, whatever its agent's commands did to it."""
    of = request(top, on_end="remove")
    path = create(of)
    (path / "a.txt").write_text("agent\n")
    (path / "deep" / "er").mkdir(parents=True)
    (path / "deep").chmod(0o500)
    assert end(of) == {"outcome": "removed"}
    assert branches(top) == []
    assert not path.exists()
    assert (top / "a.txt").read_text() == "a\n"


def test_an_agent_may_go_to_another_branch(top: Path) -> None:
    """Given an agent that made a branch of its own, or went where its own work is missing, then the first is merged,
    and the second is reported and kept."""
    good, bad = request(top, "good"), request(top, "bad")
    git(create(good), "checkout", "--quiet", "-b", "feature")
    (Path(good["path"]) / "new.txt").write_text("new\n")
    path = create(bad)
    (path / "a.txt").write_text("x\n")
    git(path, "commit", "--quiet", "--all", "-m", "own")
    git(path, "checkout", "--quiet", "--detach", "main")
    assert end(good)["outcome"] == "merged"
    assert (top / "new.txt").exists()
    assert "does not follow from its branch" in end(bad)["problem"]
    assert path.exists()


def test_a_repository_within_a_worktree_is_reported(top: Path) -> None:
    """Given a worktree with another repository in it, whose content no commit would have, then nothing is removed."""
    of = request(top)
    inner = repository(create(of) / "inner")
    assert "there are git repositories within" in end(of)["problem"]
    assert (inner / "a.txt").exists()


def test_hooks_and_settings_of_a_worktree_are_not_executed(top: Path, tmp_path: Path) -> None:
    """Given hooks in the repository, and a configuration that an agent wrote to its worktree's directory, then neither
    is executed."""
    seen = tmp_path / "seen"
    for hook in ("post-checkout", "pre-commit", "post-merge", "reference-transaction"):
        (top / ".git" / "hooks" / hook).write_text(f"#!/bin/sh\necho {hook} >> {seen}\n")
        (top / ".git" / "hooks" / hook).chmod(0o755)
    of = request(top)
    path = create(of)
    evil = tmp_path / "evil"
    repository(evil)
    git(evil, "config", "filter.x.clean", f"sh -c 'echo filter >> {seen}; cat'")
    (top / ".git" / "worktrees" / "child" / "commondir").write_text(f"{evil}/.git\n")
    (path / ".gitattributes").write_text("* filter=x\n")
    (path / ".git").write_text(f"gitdir: {evil}/.git\n")
    found = end(of)
    assert found.get("outcome") == "merged", found
    assert not seen.exists()


def test_what_is_in_the_way_is_reported(top: Path, tmp_path: Path) -> None:
    """Given a directory that is no worktree where one shall be, no commit, no such commit, or a workspace that is gone,
    then the answer says so, and the directory is as it was."""
    of = request(top)
    Path(of["path"]).mkdir(parents=True)
    (Path(of["path"]) / "mine.txt").write_text("mine\n")
    assert "is no worktree of" in program.answer({**of, "do": "create"})["problem"]
    assert (Path(of["path"]) / "mine.txt").exists()
    assert "no commit 'nowhere'" in program.answer({**request(top, "x"), "base": "nowhere", "do": "create"})["problem"]
    gone = request(top, "y", into=str(tmp_path / "gone"))
    assert "is not there any more" in program.answer({**gone, "do": "create"})["problem"]
    (tmp_path / "bare").mkdir()
    git(tmp_path / "bare", "init", "--quiet")
    assert "has no commit yet" in program.answer({**request(tmp_path / "bare", "z"), "do": "create"})["problem"]


def test_git_may_be_missing(top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a node without git, then the answer says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in program.answer({**request(top), "do": "create"})["problem"]


def test_a_merge_of_a_persons_is_left_alone(top: Path) -> None:
    """Given a directory in which a person is in the middle of a merge, then nothing is merged into it."""
    git(top, "checkout", "--quiet", "-b", "other")
    (top / "a.txt").write_text("other\n")
    git(top, "commit", "--quiet", "--all", "-m", "other")
    git(top, "checkout", "--quiet", "main")
    of = request(top)
    (create(of) / "b.txt").write_text("agent\n")
    git(top, "merge", "--quiet", "--no-ff", "--no-commit", "other")
    assert "in the middle of another merge" in end(of)["problem"]
    assert (top / ".git" / "MERGE_HEAD").exists()
    assert (top / "b.txt").read_text() == "b\n"


def dying(monkeypatch: pytest.MonkeyPatch, at: int, *, before: bool) -> Callable[[], int]:
    """Kill the program at a command of git, before or after it; how many there were so far."""
    run, calls = program.Git.run, 0

    def counted(self: program.Git, *arguments: str, sent: str = "") -> subprocess.CompletedProcess[str]:
        nonlocal calls
        calls += 1
        if before and calls == at:
            raise Died
        done = run(self, *arguments, sent=sent)
        if calls == at:
            raise Died
        return done

    monkeypatch.setattr(program.Git, "run", counted)
    return lambda: calls


@pytest.mark.parametrize("before", [True, False])
def test_a_death_at_every_point_changes_nothing(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Given a program that dies at any command of git, when it is asked again, then the worktree is made and merged as
    if nothing had happened: each change is there once, and nothing is left."""
    for at in range(1, MOST_CALLS):
        of = request(top, f"child{at}")
        with monkeypatch.context() as patched:
            count = dying(patched, at, before=before)
            died = 0
            for do in ("create", "end"):
                for _ in range(2):
                    try:
                        found = program.answer({**of, "do": do})
                    except Died:
                        died += 1
                        continue
                    if do == "create":
                        (Path(of["path"]) / "log.txt").write_text(f"{at}\n")
                    break
        assert "problem" not in found
        assert (found["outcome"], found["files"]) == ("merged", ["log.txt"])
        assert (top / "log.txt").read_text() == f"{at}\n"
        assert git(top, "status", "--porcelain") == ""
        assert branches(top) == []
        assert git(top, "log", "--first-parent", "--format=%s").count(f"(session child{at})") == 1
        if not died:
            assert count() < at
            return
    raise AssertionError(f"it has more than {MOST_CALLS} commands")


def test_half_a_worktree_is_made_again(top: Path) -> None:
    """Given a worktree whose making was interrupted within git, with the lock that git puts there and half of the
    files, then it is made again."""
    of = request(top)
    path = create(of)
    admin = top / ".git" / "worktrees" / "child"
    (admin / "understudy").unlink()
    (admin / "locked").write_text("initializing")
    (path / "b.txt").unlink()
    create(of)
    assert (path / "b.txt").exists()
    assert not (admin / "locked").exists()


@pytest.mark.parametrize("parent", ["directory", "worktree"])
def test_a_merge_that_died_half_way_is_undone(top: Path, parent: str) -> None:
    """Given a merge that was killed while git wrote the files, one of them half, when the next one has the lock, then
    what it had written is undone, what others have changed is not, and the merge is done in whole."""
    lead = request(top, "lead")
    into = create(lead) if parent == "worktree" else top
    of = below(lead, "child") if parent == "worktree" else request(top)
    path = create(of)
    (path / "a.txt").write_text("changed by the agent\n")
    (path / "b.txt").unlink()
    (path / "new.txt").write_text("a new file\n")
    (path / "sub" / "old.txt").write_text("a longer text\n")
    tip = program.answer({**of, "do": "end", "completed": False}) and git(path, "rev-parse", "HEAD")
    name = "lead" if parent == "worktree" else None
    left = {"into": str(into), "name": name, "from": git(into, "rev-parse", "HEAD"), "to": tip}
    (top / ".git" / "understudy" / "merging").write_text(json.dumps(left))
    (into / "a.txt").write_text("changed by the agent\n")
    (into / "b.txt").unlink()
    (into / "new.txt").write_text("a new")
    (into / "sub" / "old.txt").unlink()
    (into / "other.txt").write_text("somebody else's\n")
    directory = Path(git(into, "rev-parse", "--absolute-git-dir"))
    (directory / "index.lock").write_text("")
    assert end(of)["outcome"] == "merged"
    assert (into / "a.txt").read_text() == "changed by the agent\n"
    assert (into / "new.txt").read_text() == "a new file\n"
    assert not (into / "b.txt").exists()
    assert (into / "other.txt").read_text() == "somebody else's\n"


def test_a_file_that_was_changed_after_a_death_is_not_lost(top: Path) -> None:
    """Given a merge that was killed half way, and a file of it that somebody has changed since, then that is what the
    conflict is about, and the change is still there."""
    of = request(top)
    (create(of) / "a.txt").write_text("changed by the agent\n")
    end({**of, "completed": False})
    tip = git(Path(of["path"]), "rev-parse", "HEAD")
    left = {"into": str(top), "name": None, "from": git(top, "rev-parse", "HEAD"), "to": tip}
    (top / ".git" / "understudy" / "merging").write_text(json.dumps(left))
    (top / "a.txt").write_text("changed by a person\n")
    assert (end(of)["outcome"], (top / "a.txt").read_text()) == ("conflict", "changed by a person\n")


def test_merges_into_one_workspace_come_one_after_the_other(top: Path) -> None:
    """Given programs that end eight worktrees at the same time, then all are merged; and given a file of the lock that
    a dead process has left, then nobody waits for it."""
    (top / ".git" / "understudy").mkdir()
    (top / ".git" / "understudy" / "lock").write_text("left behind")
    asked = [request(top, f"c{number}") for number in range(8)]
    for of in asked:
        (create(of) / f"{of['name']}.txt").write_text("x\n")
    running = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", program.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in asked
    ]
    for process, of in zip(running, asked, strict=True):
        assert process.stdin is not None
        process.stdin.write(json.dumps({**of, "do": "end"}))
        process.stdin.close()
    found = [json.loads(process.stdout.read()) for process in running if process.stdout is not None]
    for process in running:
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()
    assert [one["outcome"] for one in found] == ["merged"] * 8
    assert all((top / f"c{number}.txt").exists() for number in range(8))
    assert git(top, "status", "--porcelain") == ""


def test_who_holds_the_lock_is_waited_for(top: Path) -> None:
    """Given a process that holds the repository's lock, then a program waits until that lets go."""
    of = request(top)
    create(of)
    holder = os.open(top / ".git" / "understudy" / "lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", program.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(json.dumps({**of, "do": "end"}).encode(), timeout=0.5)
    finally:
        os.close(holder)
    assert json.loads(process.communicate(timeout=30)[0])["outcome"] == "unchanged"
