"""Each promise of docs/guarantees.md names the tests that hold it (docs/claims.md), and those tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from .. import claims


def test_every_promise_says_what_holds_it() -> None:
    """Each item and row of docs/guarantees.md has an id, each id has tests that exist or is said to have none, and no
    other id is claimed."""
    assert claims.without_id() == []
    assert claims.problems(claims.claims(), claims.promises()) == []


def test_the_page_is_current() -> None:
    """docs/claims.md is what `scripts/claims --write` makes."""
    made = claims.page(claims.claims(), claims.promises())
    assert claims.PAGE.read_text() == made, "scripts/claims --write"


@pytest.mark.thorough
def test_every_test_that_holds_a_promise_is_collected() -> None:
    """pytest finds each of them where CI runs it. That none is skipped there, tests/conftest.py sees to."""
    named = {test for tests in claims.claims().tests.values() for test in tests}
    named |= {
        f"simulation/test_simulation.py::{name}" for name in ("test_seeds", "test_fresh_seeds", "test_regressions")
    }
    modules = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *modules]
    listed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=claims.TESTS,
        timeout=110,
        check=False,
        env={**os.environ, "CI": "1"},
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    found = {line.removeprefix("tests/").partition("[")[0] for line in listed.stdout.splitlines() if "::" in line}
    assert {test for test in named if not any(one == test or one.startswith(f"{test}::") for one in found)} == set()


def test_a_test_that_is_removed_is_missed() -> None:
    """Given a claim whose test, module or simulated check is not there, or that has none left, then it is reported."""
    found, made = claims.claims(), claims.promises()
    without = {one: tests for one, tests in found.tests.items() if one != "fence"}
    assert claims.problems(replace(found, tests=without), made) == [
        "nothing holds the promise 'fence', and tests/claims.toml does not say so under [untested]"
    ]
    for gone in ("kernel/test_leases.py::test_gone", "kernel/test_gone.py", "kernel/kernel.py"):
        wrong = replace(found, tests={**found.tests, "fence": [gone]})
        assert claims.problems(wrong, made) == [f"fence: there is no test {gone}"]
    wrong = replace(found, simulated={**found.simulated, "sim-books": ["ending.Ending.gone"]})
    assert claims.problems(wrong, made) == ["sim-books: tests/simulation has no ending.Ending.gone"]


def test_a_promise_without_an_id_and_an_unknown_id_are_reported() -> None:
    """Given another item or row in docs/guarantees.md, an id that is there twice, or a claim of an id that is gone."""
    text = claims.GUARANTEES.read_text()
    item = "- `send` is fast."
    assert claims.without_id(text.replace("\n\n## The consistency", f"\n{item}\n\n## The consistency")) == [item]
    assert claims.without_id(text.replace('| <a id="dies-driver"></a>', "| ")) == ["| driver | runs go on | 0 | 0 |"]
    assert claims.without_id(text + "\n## More\n\nAll is well.\n") == ["More"]
    renamed = claims.promises(text.replace('<a id="fence">', '<a id="fences">'))
    assert "docs/guarantees.md has no promise 'fence'" in claims.problems(claims.claims(), renamed)
    twice = claims.promises(text.replace('<a id="one-owner">', '<a id="fence">'))
    assert "docs/guarantees.md has the id 'fence' twice" in claims.problems(claims.claims(), twice)
