"""Skills in sessions: what the model is sent, what commands find, and that a session needs no file of its driver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec
from understudy.errors import SessionConflict
from understudy.events import SessionMigrated
from understudy.testing import LocalCluster

from .. import tiers
from . import kernel as k

PATIENCE = 60.0
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("load_skill", {"name": "greet"}),
    ("bash", {"command": "$UNDERSTUDY_SKILLS/greet/scripts/hello.sh you; touch $UNDERSTUDY_SKILLS/greet/x || true"}),
    ("load_skill", {"name": "greet", "file": "words.txt"}),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A skill with a script and a file; and directories of this test's own for copies and the workspace."""
    made = tmp_path / "greet"
    (made / "scripts").mkdir(parents=True)
    (made / "SKILL.md").write_text("---\nname: greet\ndescription: Greets people.\n---\nRun scripts/hello.sh NAME.")
    (made / "scripts" / "hello.sh").write_text("#!/bin/sh\necho hello $1 from $(cat $(dirname $0)/../words.txt)\n")
    (made / "scripts" / "hello.sh").chmod(0o755)
    (made / "words.txt").write_text("words")
    (tmp_path / "desk").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return made


def agent(folder: Path, *replies: Any, **more: Any) -> AgentSpec:
    replies = replies or tuple([call] for call in CALLS)
    return AgentSpec(
        name="greeter", instructions=k.script(*replies, "done"), tools=["bash"],
        skills=(str(folder),), workspace=str(folder.parent / "desk"), **more,
    )  # fmt: skip


def results(session: Any) -> list[str]:
    return [message.text for message in session.messages() if message.role == "tool"]


def test_a_model_finds_and_uses_a_skill(folder: Path) -> None:
    """The model learns of the skill, reads it, runs its script, reads its file; the folder is gone by then."""
    with LocalCluster() as cluster:
        session = cluster.spawn(agent(folder))
        shutil.rmtree(folder)
        assert session.send("go").result(PATIENCE, check=True).text == "done"
        loaded, ran, read = results(session)
        [system] = {request.body["messages"][0]["content"] for request in cluster.model_server.requests}
    assert "- greet: Greets people." in system
    assert loaded.startswith("Run scripts/hello.sh NAME.")
    assert ran.startswith("hello you from words")
    assert read == "words"


@pytest.mark.sweep
def test_a_death_at_any_point_needs_no_file_of_the_driver(folder: Path) -> None:
    """When the session's actor dies at any point, and the driver's folder is gone, the next one has the same skill."""
    spec = agent(folder, *([call] for call in CALLS if call[0] == "load_skill"))
    kept = folder.with_name("kept")
    with LocalCluster() as clean:
        session = clean.spawn(spec, session_id="s")
        folder.rename(kept)
        session.send("go").result(PATIENCE, check=True)
        expected, points = results(session), len(clean.points)
    for at in tiers.points(range(points)):
        kept.rename(folder)
        with LocalCluster() as cluster:
            cluster.kill_at(at)
            session = cluster.spawn(spec, session_id="s")
            folder.rename(kept)
            session.send("go").result(PATIENCE, check=True)
            assert results(session) == expected, at


def test_a_session_goes_on_with_a_changed_skill_or_refuses(folder: Path) -> None:
    """A driver that comes again with another text of the skill changes the agent; a session may refuse that."""
    with LocalCluster() as cluster:
        session = cluster.spawn(agent(folder), session_id="s")
        cluster.spawn(agent(folder, on_change="refuse"), session_id="strict")
        session.send("go").result(PATIENCE, check=True)
        (folder / "words.txt").write_text("other words")
        with pytest.raises(SessionConflict, match=r"skills\.greet"):
            cluster.spawn(agent(folder, on_change="refuse"), session_id="strict")
        cluster.spawn(agent(folder), session_id="s").send("again").result(PATIENCE, check=True)
        [changed] = [event.changed for event in session.events() if isinstance(event, SessionMigrated)]
        assert list(changed) == ["skills.greet"]
        assert [text.splitlines()[0] for text in results(session)[-2:]] == ["hello you from other words", "other words"]
