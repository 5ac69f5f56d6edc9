"""Jobs: how a list of them reads, and which arguments make sense."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.jobs import MOST_SHOWN, SHOWN_TEXT, Job, described, job_problem

NOW = 1_000_000_000


def test_what_goes_on_comes_first_and_the_newest_of_it() -> None:
    """What has ended is behind it, in the same order; each line says since when."""
    jobs = [
        Job("a", "wakeup", NOW - 5_400_000, "due in 1 second", "look\n again"),
        Job("b", "sub-agent scout", NOW - 1_000_000, "completed, open", "", ended=True),
        Job("c", "sub-agent scout", NOW + 9, "at work (running)", "dig"),
    ]
    assert described(jobs, NOW).splitlines() == [
        "c (sub-agent scout): at work (running), started 0 seconds ago: dig",
        "a (wakeup): due in 1 second, started 5 seconds ago: look again",
        "b (sub-agent scout): completed, open, ended 1 second ago",
    ]
    assert described([], NOW) == "You have no jobs."


def test_a_list_is_bounded() -> None:
    """So many lines, the last of which says that there are more, and so many characters of each text."""
    jobs = [Job(str(number), "wakeup", number, "due", "x" * 9_999) for number in range(200)]
    lines = described(jobs, NOW).splitlines()
    assert len(lines) == MOST_SHOWN + 1
    assert lines[0].startswith("199 ")
    assert lines[0].endswith(f" {'x' * SHOWN_TEXT}…")
    assert lines[-1] == "Older ones are not listed."
    [spaced] = described([Job("a", "wakeup", 0, "due", "x" + " " * 9_999 + "y")], NOW).splitlines()
    assert spaced.endswith(": x…")


@pytest.mark.parametrize(
    ("job", "grace", "part"),
    [
        (None, None, "job"), ("", None, "job"), (" ", None, "job"), (5, None, "job"), ("x" * 129, None, "job"),
        ("a\x00", None, "job"),
        ("a", "1", "grace"), ("a", True, "grace"), ("a", -0.1, "grace"), ("a", float("nan"), "grace"),
        ("a", 86_401, "grace"), ("a", 0, None), ("a", 86_400.0, None), ("a", None, None),
    ],
)  # fmt: skip
def test_arguments_of_a_stop(job: Any, grace: Any, part: str | None) -> None:
    """An id, and a number of seconds, 0 to a day, or none."""
    problem = job_problem("stop_job", job, grace)
    assert (problem is None) if part is None else f'"{part}"' in str(problem)
    assert job_problem("list_jobs", job, grace) is None
