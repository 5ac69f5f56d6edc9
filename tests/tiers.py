"""Which tests run when: `make test` is the quick tier, `.ci/run` runs the rest of them behind it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable

import pytest

QUICK, REST, ALL = "quick", "rest", "all"
SHARES = {QUICK: 10, REST: 4}
"""The quick tier dies at every tenth point of a sweep and the rest tier at every fourth one, drawn again each time."""

FRESH_SEEDS = "UNDERSTUDY_FRESH_SEEDS"
"""The environment variable with the first of the seeds that this test session simulates and nobody has tried."""

_share = 1
_seed = 0


def options(parser: pytest.Parser) -> None:
    """The command line's options."""
    parser.addoption("--tier", choices=(QUICK, REST, ALL), default=ALL, help="quick: minutes; rest: all that it leaves")
    parser.addoption("--share-seed", type=int, default=int(time.time()), help="which points of a sweep are drawn")


def configure(config: pytest.Config) -> None:
    """Prepare what `points` draws from."""
    global _share, _seed
    _share, _seed = SHARES.get(config.getoption("--tier"), 1), config.getoption("--share-seed")
    os.environ.setdefault(FRESH_SEEDS, str(int(time.time()) % 1_000_000 * 1_000))  # workers inherit it


def header() -> str:
    """A line for the report's head."""
    drawn = f"points of sweeps: one in {_share}; the same ones again: --share-seed {_seed}"
    return f"{drawn}; fresh seeds: from {os.environ[FRESH_SEEDS]} on; the same ones again: {FRESH_SEEDS}=…"


def points(every: Iterable[int], *, is_sqlite: bool = True) -> list[int]:
    """Those points of a sweep that are tried: all of them, or the tier's share. Both backends run the same
    transactions: on the slower one a third is enough."""
    found = list(every)[:: 1 if is_sqlite else 3]
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0].partition("@")[0]
    share = min(_share, len(found)) or 1  # one point at least
    return found[random.Random(f"{_seed}/{test}").randrange(share) :: share]


def select(items: list[pytest.Item], tier: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of a tier, and the others."""
    if tier == ALL:
        return items, []
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        quick = _is_quick(item)
        wanted = quick if tier == QUICK else not quick or item.get_closest_marker("sweep") is not None
        (chosen if wanted else others).append(item)
    return chosen, others


def _is_quick(item: pytest.Item) -> bool:
    return item.get_closest_marker("thorough") is None and "postgresql" not in _parameters(item)


def _parameters(item: pytest.Item) -> list[object]:
    specification = getattr(item, "callspec", None)
    return list(specification.params.values()) if specification is not None else []


def in_order(items: list[pytest.Item]) -> None:
    """One Ray cluster at a time on a machine: what needs one runs in one process, first where others have the rest,
    last where there are no others. Elsewhere a file's tests stay together, for what they share."""
    shared = "PYTEST_XDIST_WORKER" in os.environ
    for item in items:
        ray, alone = (item.get_closest_marker(name) is not None for name in ("ray", "alone"))
        if not alone:
            item.add_marker(pytest.mark.xdist_group("ray" if ray else item.path.name))
    items.sort(key=lambda item: (item.get_closest_marker("ray") is None) == shared)
