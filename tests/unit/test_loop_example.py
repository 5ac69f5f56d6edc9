"""The loop of `understudy.examples.loops`, with a session actor that dies at any of the points that it passes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from understudy import RunResult
from understudy.events import SessionCrashed, ToolFinished
from understudy.examples.loops.nightly import KINDS, nightly
from understudy.testing import LocalCluster

from .. import tiers

PATIENCE = 60.0
REPORTS = {"a.txt": "It falls over.", "b.txt": "Please let it fly.", "c.txt": "How does one stop it?"}
ENDING = 6
"""A session actor that is killed at one of the last points may have nothing left to do."""


def night(cluster: LocalCluster, place: Path) -> RunResult:
    """One firing, with reports that are new."""
    place.mkdir(exist_ok=True)
    for name, text in REPORTS.items():
        (place / name).write_text(text)
    fired = nightly(cluster, place).trigger()
    return cluster.session(fired.session_id).run(fired.run_id).result(PATIENCE)


def check(cluster: LocalCluster, place: Path, result: RunResult) -> None:
    """Each report is filed, by one call, no model call was made twice, and the loop knows of one run that passed."""
    assert result.status == "completed", result
    there = {kind: [path.name for path in sorted((place / kind).glob("*"))] for kind in KINDS}
    assert there == {"bug": ["a.txt"], "wish": ["b.txt"], "question": ["c.txt"]}
    assert not list(place.glob("*.txt"))
    assert cluster.model_server.stats.requests == 3
    events = cluster.session(result.session_id).events()
    finished = Counter(event.tool for event in events if isinstance(event, ToolFinished))
    assert finished == {"new_reports": 1, "file_report": 3}
    memory = cluster.schedule("nightly-triage").memory()
    assert (memory.attempted, memory.passed, memory.pending, cluster.triage()) == (1, 1, (), [])


def test_it_files_what_is_new_and_tells_the_next_night(tmp_path: Path) -> None:
    """Given reports, then the first night files each; the next one has nothing to do, and reads what the first did."""
    with LocalCluster() as cluster:
        check(cluster, tmp_path, night(cluster, tmp_path))
        fired = nightly(cluster, tmp_path).trigger()
        run = cluster.session(fired.session_id).run(fired.run_id)
        assert run.result(PATIENCE, check=True).text == "There is nothing new."
        [prompt] = [message for message in cluster.session(fired.session_id).messages() if message.role == "user"]
        assert "passed: a.txt is filed as bug b.txt is filed as wish" in str(prompt.content)


@pytest.mark.sweep
@pytest.mark.thorough
def test_it_survives_a_death_at_any_point(tmp_path: Path) -> None:
    """Given a night in which the session actor dies at a point, then each report is filed once, nothing is paid twice,
    and the loop knows of one run."""
    with LocalCluster() as clean:
        check(clean, tmp_path / "clean", night(clean, tmp_path / "clean"))
        count = len(clean.points)
    tried, died = tiers.points(range(count)), 0
    for at in tried:
        with LocalCluster() as cluster:
            cluster.kill_at(at)
            result = night(cluster, tmp_path / str(at))
            check(cluster, tmp_path / str(at), result)
            died += sum(isinstance(event, SessionCrashed) for event in cluster.session(result.session_id).events())
    assert died >= len(tried) - ENDING
