"""The workflows of `understudy.examples.workflows`, with a session actor that dies at any of the points they pass."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from understudy import RunResult
from understudy.events import ModelCallReissued, SessionCrashed, ToolFinished
from understudy.examples.workflows import approval, map_reduce, research, review, saga
from understudy.testing import LocalCluster
from understudy.testing.policies import Reply, content_text

from .. import tiers

PATIENCE = 60.0
ENDING = 6
"""A session actor that is killed at one of the last points may have nothing left to do."""

QUESTIONS = ["what are posts", "what are rails", "what are gates"]


def answers(body: dict[str, Any]) -> Reply:
    """The model's part in all of them."""
    said = "\n".join(content_text(message) for message in body["messages"])
    if "Which questions" in said:
        return Reply(text=json.dumps({"questions": QUESTIONS}))
    if "You review" in said:
        mends = "attacker" in said or ("understands" in said and "bad.py" in said)
        return Reply(text=json.dumps({"verdict": "mend" if mends else "good", "reason": "so"}))
    return Reply(text=f"{len(body['messages'])} messages read")


@dataclass(frozen=True)
class Example:
    """An example at work.

    Attributes:
        begin: starts it in a directory, and does a person's part; its result.
        good: whether the result, and what is in the directory, are right.
        requests: to the model, each paid once.
        calls: of its own tools, by name, each executed once.
    """

    begin: Callable[[LocalCluster, Path], RunResult]
    good: Callable[[RunResult, Path], bool]
    requests: int
    calls: dict[str, int]


def begin_map_reduce(cluster: LocalCluster, place: Path) -> RunResult:
    for number in range(3):
        (place / f"{number}.txt").write_text("fence " * number + "gate post rail gate")
    return cluster.workflow(map_reduce.most_frequent, str(place), 2, 2, session_id="s", run_id="r").result(PATIENCE)


def begin_review(cluster: LocalCluster, place: Path) -> RunResult:
    for name in ("bad.py", "good.py"):
        (place / name).write_text("print(1)\n")
    return cluster.workflow(review.review, str(place), session_id="s", run_id="r").result(PATIENCE)


def begin_research(cluster: LocalCluster, place: Path) -> RunResult:
    (place / "fences.md").write_text("fences have posts\n\nfences have rails\n\nfences have gates")
    return cluster.workflow(research.research, "what are fences", str(place), session_id="s", run_id="r").result(
        PATIENCE
    )


def begin_approval(cluster: LocalCluster, place: Path) -> RunResult:
    run = cluster.workflow(approval.announce, "spring", str(place), session_id="s", run_id="r")
    for said in ("shorter", "publish"):
        cluster.session("s").answer(run.result(PATIENCE).pending[0], said)
    return run.result(PATIENCE)


def begin_announce(cluster: LocalCluster, place: Path) -> RunResult:
    definition = Path(approval.__file__).with_name("announce.yaml")
    given = {"subject": "spring", "directory": str(place), "tools": [approval.publish]}
    run = cluster.workflow(definition, session_id="s", run_id="r", **given)
    for said in ("another", "publish"):
        cluster.session("s").answer(run.result(PATIENCE).pending[0], said)
    return run.result(PATIENCE)


def begin_saga(cluster: LocalCluster, place: Path) -> RunResult:
    (place / "car").mkdir()
    (place / "car" / "full").touch()
    return cluster.workflow(saga.travel, "Oslo", str(place), session_id="s", run_id="r").result(PATIENCE)


def begin_trip(cluster: LocalCluster, place: Path) -> RunResult:
    return cluster.workflow(saga.travel, "Oslo", str(place), session_id="s", run_id="r").result(PATIENCE)


def judged(result: RunResult, _place: Path) -> bool:
    """The majority's verdict on each file."""
    found = {Path(file.path).name: (file.verdict, len(file.opinions)) for file in result.output.files}
    return found == {"bad.py": ("mend", 3), "good.py": ("good", 3)}


def answered(result: RunResult, place: Path) -> bool:
    """Each question in its place, with where it was found."""
    findings = [(finding.question, finding.sources) for finding in result.output.findings]
    return findings == [(question, [str(place / "fences.md")]) for question in QUESTIONS]


def published(result: RunResult, place: Path) -> bool:
    """The second draft."""
    path = place / "announcement.txt"
    said = result.output.status, result.output.drafts, result.output.path
    return said == ("published", 2, str(path)) and "messages read" in path.read_text()


def announced(result: RunResult, place: Path) -> bool:
    """The second draft, as it was shown."""
    path = place / "announcement.txt"
    return result.output == {"path": str(path)} and "messages read" in path.read_text()


def undone(result: RunResult, place: Path) -> bool:
    """Nothing is booked, and the run says why it failed."""
    left = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    return (result.status, left) == ("failed", {"car/full"}) and "no car is left" in (result.error or {})["message"]


def booked(result: RunResult, place: Path) -> bool:
    """One booking of each kind."""
    return {kind: [path.name for path in (place / kind).iterdir()] for kind in saga.KINDS} == {
        kind: [number] for kind, number in result.output.bookings.items()
    }


EXAMPLES = {
    "map_reduce": Example(
        begin_map_reduce, lambda result, _: result.output == {"gate": 6, "fence": 3}, 0,
        {"text_files": 1, "words_of": 3},
    ),
    "review": Example(begin_review, judged, 7, {"python_files": 1}),
    "research": Example(begin_research, answered, 5, {"passages": 3}),
    "approval": Example(begin_approval, published, 2, {"publish": 1}),
    "announce": Example(begin_announce, announced, 2, {"publish": 1}),
    "saga": Example(begin_saga, undone, 0, {"book": 3, "cancel": 2}),
    "trip": Example(begin_trip, booked, 0, {"book": 3}),
}  # fmt: skip


def crashes(cluster: LocalCluster) -> int:
    """How many deaths there were, in the session and below it."""
    sessions = [cluster.session(info.id) for info in cluster.session("s").tree()]
    return sum(isinstance(event, SessionCrashed) for session in sessions for event in session.events())


def check(cluster: LocalCluster, example: Example, place: Path, result: RunResult) -> None:
    """The result is right, no model call was made twice, and each tool has one result for each call."""
    assert example.good(result, place), result
    assert cluster.model_server.stats.requests == example.requests
    events = cluster.session("s").events()
    assert not [event for event in events if isinstance(event, ModelCallReissued)]
    finished = Counter(event.tool for event in events if isinstance(event, ToolFinished))
    assert {name: finished[name] for name in example.calls} == example.calls


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_does_what_it_says(name: str, tmp_path: Path) -> None:
    """Given an example, then its result is right, and each of its steps is taken once."""
    with LocalCluster(policy=answers) as cluster:
        check(cluster, EXAMPLES[name], tmp_path, EXAMPLES[name].begin(cluster, tmp_path))


@pytest.mark.sweep
@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_survives_a_death_at_any_point(name: str, tmp_path: Path) -> None:
    """Given an example, when the session actor that comes to a point first dies there, of the workflow or of an agent
    that works for it, then the result is the same, nothing is paid twice, and no step has two results."""
    example = EXAMPLES[name]
    place = tmp_path / "clean"
    place.mkdir()
    with LocalCluster(policy=answers) as clean:
        example.begin(clean, place)
        count = len(clean.points)
    tried = tiers.points(range(count))
    died = 0
    for at in tried:
        place = tmp_path / str(at)
        place.mkdir()
        with LocalCluster(policy=answers) as cluster:
            cluster.kill_at(at)
            result = example.begin(cluster, place)
            check(cluster, example, place, result)
            died += crashes(cluster)
    assert died >= len(tried) - ENDING
