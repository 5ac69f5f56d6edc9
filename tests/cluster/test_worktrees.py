"""Worktrees on a real cluster: session actors that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy import Worktree
from understudy.events import WorktreeEnded

from ..faults import PATIENCE, Stage, call, kill, of, staged, tools_of, wait_until
from ..git_repository import branches, git, repository

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.fixture
def stage(ray_cluster: str, tmp_path: Path) -> Iterator[Stage]:
    with staged(f"sqlite:///{tmp_path}/store.db", tmp_path / "stage") as made:
        try:
            yield made
        finally:
            made.cluster.shutdown()


def test_killed_at_work_in_a_worktree(stage: Stage, tmp_path: Path) -> None:
    """Given a session that has written to its worktree, when its actor is killed, then the next one goes on in the same
    worktree, and its changes arrive in the repository, once."""
    top = repository(tmp_path / "top")
    tools = ["files", *tools_of(stage.directory)]
    session = stage.spawn(tools=tools, parallel_tools=1, workspace=Worktree(repository=str(top)))
    asked = call("write_file", path="new.txt", content="new"), 'call act {"name": "slow"}'
    run = session.send("\n".join(asked))
    wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
    assert not (top / "new.txt").exists()
    kill(session.info().actor_pid or 0)
    result = run.result(PATIENCE)
    assert result.ok
    assert "interrupted" in result.text
    assert (top / "new.txt").read_text() == "new"
    assert git(top, "status", "--porcelain") == ""
    assert branches(top) == []
    assert [event.outcome for event in of(session.events(), WorktreeEnded)] == ["merged"]
    stage.check()
