"""Worktrees: names, what becomes of a specification, what a person may write, and what is mounted in the sandbox."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy import AgentSpec, WorkflowContext, Worktree, workflow
from understudy.actors.sandbox import Bubblewrap
from understudy.cluster.client.agent_file import read_agent
from understudy.cluster.client.checking import agent_problems, git_for
from understudy.cluster.client.compiling import compile_spec, require_own_workspace
from understudy.confinement import Confinement, confinement_of
from understudy.errors import InvalidSpec
from understudy.events import WorktreeEnded
from understudy.manifest import changes
from understudy.testing import LocalCluster
from understudy.worktrees import branch_of, for_child, name_of, named, placed, worktree_text

from ..git_repository import branches, repository

IDS = st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True)
ORIGINS = st.sampled_from(["", "a1b2c3", "0f0f0f"])


def accepted_by_git(reference: str) -> bool:
    """What `git check-ref-format` says, of what these names can have."""
    parts = reference.split("/")
    wrong = any(part.startswith(".") or part.endswith(".lock") or not part for part in parts)
    return not (wrong or ".." in reference or reference.endswith(".") or re.search(r"[\s~^:?*\[\\\x7f]|@\{", reference))


@given(IDS, ORIGINS)
def test_every_session_has_a_name_that_git_takes(session_id: str, origin: str) -> None:
    """Given any session id, then its worktree's name is one directory's, and its branch one that git takes."""
    name = name_of(session_id, origin)
    assert accepted_by_git(branch_of(name))
    assert "/" not in name
    assert len(name) <= 255


@given(IDS, ORIGINS, IDS, ORIGINS)
def test_no_two_sessions_have_the_same_name(one: str, first: str, two: str, second: str) -> None:
    """Given two sessions, then their worktrees have the same name only if they are the same."""
    assert (name_of(one, first) == name_of(two, second)) == ((one, first) == (two, second))


def compiled(**fields: Any) -> dict[str, Any]:
    """A compiled specification of an agent that may start sub-agents."""
    spec = AgentSpec(name="a", tools=["spawn_agent"], **fields)
    return compile_spec(spec, model="offline", profile=None, pickle=None).spec


def test_a_worktree_by_its_name_and_by_its_fields(tmp_path: Path) -> None:
    """Given the word `worktree`, a `Worktree` or a directory, then the specification has the one or the other."""
    assert AgentSpec(name="a", workspace="worktree").workspace == Worktree()
    assert compiled(workspace="./worktree")["workspace"].endswith("/worktree")
    assert "worktree" not in compiled(workspace="./worktree")
    found = compiled(workspace=Worktree(repository=str(tmp_path), base="dev", on_end="keep"))
    assert found["workspace"] is None
    assert found["worktree"] == {
        "repository": str(tmp_path), "into": str(tmp_path), "base": "dev", "on_end": "keep",
        "directory": f"{tmp_path}.worktrees",
    }  # fmt: skip
    with pytest.raises(InvalidSpec, match=r"workspace.on_end: Input should be 'merge', 'keep' or 'remove'"):
        AgentSpec(name="a", workspace={"on_end": "burn"})  # type: ignore[arg-type]


def test_a_session_alone_needs_a_repository() -> None:
    """Given an agent whose worktree would be of a parent's workspace, then it can't be a session without a parent; nor
    a sub-agent of one without a workspace."""
    with pytest.raises(InvalidSpec, match=r"needs Worktree\(repository"):
        require_own_workspace(AgentSpec(name="a", workspace="worktree"))
    lead = AgentSpec(name="a", tools=["spawn_agent"], agents=[AgentSpec(name="b", workspace="worktree")])
    [problem] = agent_problems(lead)
    assert problem["problem"] == "'b' needs a git worktree of this agent's workspace, and it has none"


def test_a_sub_agent_has_its_parents_repository() -> None:
    """Given a parent with a directory, one with a worktree, and a copy of that, then the sub-agent's is made of it and
    merged into it, beside its parent's; one with a repository of its own has that."""
    template = compiled(workspace=Worktree(base="dev"))
    first = for_child(template, compiled(workspace="/top"), 1, copy=False)
    assert isinstance(first, dict)
    first = placed(first, "c-1")
    assert first["worktree"]["into"] == "/top"
    assert first["worktree"]["base"] == "dev"
    assert first["workspace"] == f"/top.worktrees/{first['worktree']['name']}"
    second = for_child(first, first, 2, copy=True)
    assert isinstance(second, dict)
    second = placed(second, "c-1")
    assert second["worktree"]["repository"] == "/top"
    assert (second["worktree"]["into"], second["worktree"]["base"]) == (first["workspace"], None)
    assert second["worktree"]["into_name"] == first["worktree"]["name"] != second["worktree"]["name"]
    other = for_child(compiled(workspace=Worktree(repository="/other")), first, 1, copy=False)
    assert isinstance(other, dict)
    assert (other["worktree"]["into"], other["worktree"].get("into_name")) == ("/other", None)
    assert isinstance(for_child(template, compiled(), 1, copy=False), str)


def test_a_handoff_stays_in_the_worktree() -> None:
    """Given an agent that may hand off to one with a worktree, then both have the session's."""
    target = AgentSpec(name="b", workspace="worktree")
    root = compiled(workspace=Worktree(repository="/top"), handoffs=[target])
    assert root["handoffs"]["b"]["worktree"] == root["worktree"]
    child = for_child(compiled(workspace="worktree", handoffs=[target]), compiled(workspace="/top"), 1, copy=False)
    assert isinstance(child, dict)
    assert child["handoffs"]["b"]["worktree"] == child["worktree"]


def test_an_agent_file_may_have_one(tmp_path: Path) -> None:
    """Given an agent's file with a worktree, then its repository is found from there; a missing one is a problem."""
    (tmp_path / "code").mkdir()
    (tmp_path / "a.toml").write_text('name = "a"\n[workspace]\nrepository = "code"\non_end = "keep"\n')
    assert read_agent(tmp_path / "a.toml").spec.workspace == Worktree(repository=f"{tmp_path}/code", on_end="keep")
    (tmp_path / "b.toml").write_text('name = "b"\nworkspace = "worktree"\n')
    spec = read_agent(tmp_path / "b.toml").spec
    assert spec.workspace == Worktree()
    assert git_for(spec) is not None
    (tmp_path / "c.toml").write_text('name = "c"\n[workspace]\nrepository = "nowhere"\n')
    with pytest.raises(InvalidSpec, match="is not a directory"):
        read_agent(tmp_path / "c.toml")


def test_a_session_with_another_worktree_is_another_one() -> None:
    """Given a specification with a worktree, then one without, and one with another rule, are changes of it."""
    one, other = compiled(workspace=Worktree(repository="/top")), compiled()
    assert changes(one, other) == changes(other, one) == ("worktree",)
    assert changes(one, compiled(workspace=Worktree(repository="/top", on_end="keep"))) == ("worktree",)


def test_sessions_of_a_cluster(tmp_path: Path) -> None:
    """Given a cluster in one process, and a lead and a sub-agent with worktrees, when the run has ended, then the
    repository has what the sub-agent wrote, and the log says what became of each worktree."""
    top = repository(tmp_path / "top")
    call = {"tool_calls": [["write_file", {"path": "new.txt", "content": "new"}]]}
    coder = AgentSpec(
        name="coder", instructions=f"offline-script: {json.dumps([call, {'text': 'written'}])}", model="offline",
        tools=["files"], workspace="worktree", sandbox="none",
    )  # fmt: skip
    start = {"tool_calls": [["spawn_agent", {"task": "write it"}]]}
    lead = AgentSpec(
        name="lead", instructions=f"offline-script: {json.dumps([start, {'text': 'done'}])}", model="offline",
        tools=["spawn_agent"], agents=[coder], workspace=Worktree(repository=str(top)), sandbox="none",
    )  # fmt: skip
    with LocalCluster() as cluster:
        session = cluster.spawn(lead, session_id="lead.1")
        assert session.send("go").result(timeout=60).text == "done"
        [ended] = [event for event in session.events() if isinstance(event, WorktreeEnded)]
        [child] = session.children()
        below = [event for event in cluster.session(child.id).events() if isinstance(event, WorktreeEnded)]
    assert (ended.outcome, ended.branch, ended.files) == ("merged", "understudy/lead+1", ["new.txt"])
    assert [(event.outcome, event.files) for event in below] == [("merged", ["new.txt"])]
    assert (top / "new.txt").read_text() == "new"


def _coder(name: str) -> AgentSpec:
    call = {"tool_calls": [["write_file", {"path": f"{name}.txt", "content": name}]]}
    return AgentSpec(
        name=name, instructions=f"offline-script: {json.dumps([call, {'text': f'{name} is done'}])}", model="offline",
        tools=["files"], workspace="worktree", sandbox="none",
    )  # fmt: skip


def test_a_workflow_and_its_agents(tmp_path: Path) -> None:
    """Given a workflow with a worktree, whose steps are agents with worktrees of it, when it has ended, then the
    repository has what all of them wrote, and a step's answer is the agent's alone."""
    top = repository(tmp_path / "top")
    one, two = _coder("one"), _coder("two")

    @workflow(agents=[one, two], workspace=Worktree(repository=str(top)), sandbox="none")
    async def both(ctx: WorkflowContext) -> list[str]:
        return list(await ctx.gather(ctx.agent("one", "go"), ctx.agent("two", "go")))

    with LocalCluster() as cluster:
        run = cluster.workflow(both)
        result = run.result(timeout=60)
        assert result.output == ["one is done", "two is done"]
    assert ((top / "one.txt").read_text(), (top / "two.txt").read_text()) == ("one", "two")
    assert branches(top) == []


def test_what_a_parent_reads_is_short() -> None:
    """Given many files, then a parent's model reads some and how many more; and nothing where nothing was changed."""
    assert named(["a", "b"], 12) == "a, b and 10 more"
    assert worktree_text({"outcome": "unchanged"}) == ""


def test_links_in_a_repository_lead_nowhere(tmp_path: Path) -> None:
    """Given a repository in which an agent has put a link in the place of a directory that git writes to, then that is
    not mounted; its configuration is mounted for reading alone."""
    common = tmp_path / "top" / ".git"
    (common / "worktrees" / "w").mkdir(parents=True)
    (common / "refs").mkdir()
    (common / "logs").mkdir()
    (tmp_path / "secret").mkdir()
    (common / "objects").symlink_to(tmp_path / "secret")
    worktree = {"repository": f"{tmp_path}/top", "name": "w"}
    line = Bubblewrap().command_line(["true"], None, confinement_of({"worktree": worktree}))
    mounted = {line[index + 1]: how for index, how in enumerate(line) if how in ("--bind-try", "--ro-bind-try")}
    ours = {path: how for path, how in mounted.items() if path.startswith(str(tmp_path))}
    written = dict.fromkeys((f"{common}/{name}" for name in ("refs", "logs", "worktrees/w")), "--bind-try")
    assert ours == {str(common): "--ro-bind-try", **written}
    assert confinement_of({}) == Confinement()
