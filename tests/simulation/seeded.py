"""Seeded faults: small wrong changes of the product that the simulator must notice, each within so many seeds.

    python -m tests.simulation.seeded              all of them, in two processes
    python -m tests.simulation.seeded NAME …       some

`seeded.toml` lists them. A change is made while its module is loaded, in a process of its own; no file is touched.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("seeded.toml")
ROOT = LIST.parent.parent.parent
LIBRARIES = ("openai", "aiohttp", "sqlmodel", "httpx2", "opentelemetry.sdk.trace", "prometheus_client", "jsonschema")
PYTEST = ("-q", "-x", "--timeout=60", "-p", "no:cacheprovider")
SEEDS = 150
"""A fault that survives so many seeds survives."""


@dataclass(frozen=True)
class SeededFault:
    """One wrong change.

    Attributes:
        module: which is changed.
        old, new: what is replaced, once, and by what.
        also: further pairs of the same kind; with a module before them, where it is another one.
        breaks: the promise that does not hold any more.
        backend: where it can be seen, if only there.
        first: a seed that has found it, to begin with.
        needs: features (`Plan.features`) without which it can't show, each with its alternatives (`a|b`): seeds whose
            plans lack one are passed over.
        plan: a kept plan that finds it, made shorter from what a seed had found; tried before any seed.
        test: what else notices it, where simulations do not: it needs what they never come upon, or another rule of the
            product makes up for it.
    """

    name: str
    module: str
    old: str
    new: str
    breaks: str
    backend: str = ""
    first: int = 0
    needs: tuple[str, ...] = ()
    plan: str = ""
    test: str = ""
    also: tuple[tuple[str, ...], ...] = ()

    @property
    def changes(self) -> dict[str, list[tuple[str, str]]]:
        """All that is replaced, and by what, by module."""
        found = {self.module: [(self.old, self.new)]}
        for *module, old, new in self.also:
            found.setdefault(module[0] if module else self.module, []).append((old, new))
        return found


def read() -> dict[str, SeededFault]:
    """All of the list, by name."""
    return {entry["name"]: SeededFault(**entry) for entry in tomllib.loads(LIST.read_text())["fault"]}


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with the change made."""

    fault: SeededFault

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text()
        for old, new in self.fault.changes[fullname]:
            if text.count(old) != 1:
                raise AssertionError(f"seeded fault {self.fault.name}: {text.count(old)} places match, not one")
            text = text.replace(old, new)
        return compile(text, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module of a seeded fault before anybody else does."""

    def __init__(self, fault: SeededFault) -> None:
        self._fault = fault

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname not in self._fault.changes:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.origin is not None
        loader = _Loader(fullname, spec.origin)
        loader.fault = self._fault
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


def install(name: str) -> None:
    """Make the change in this process; must come before anything of the product is imported."""
    fault = read()[name]
    assert not fault.changes.keys() & sys.modules.keys(), f"{list(fault.changes)}: some are loaded already"
    sys.meta_path.insert(0, _Finder(fault))


@dataclass(frozen=True)
class Noticed:
    """How a fault was noticed.

    Attributes:
        simulated: so many simulations it took.
        seed: the last of them; None for a kept plan.
        violation: what was violated.
    """

    simulated: int
    seed: int | None
    violation: str


def hunt(name: str, first: int, seeds: int, skip: int = 0) -> Noticed | None:
    """Simulate seeds with a fault until it is noticed; None: it survived. Only once in a process.

    Args:
        first: the first seed, unless the fault has one.
        seeds: so many are simulated at most.
        skip: so many of them are not.
    """
    fault = read()[name]
    if fault.test:
        return Noticed(0, None, f"{fault.test} fails") if fails(fault) else None
    install(name)
    if fault.plan and not skip and (violations := violated_by(fault.plan)):
        return Noticed(0, None, f"{violations[0].splitlines()[0]} (kept plan {fault.plan})")
    for number, seed in enumerate(islice(candidates(fault, first), skip, seeds), skip + 1):
        if violations := violated(seed, fault.backend):
            return Noticed(number, seed, f"{violations[0].splitlines()[0]} (seed {seed})")
    return None


def candidates(fault: SeededFault, first: int) -> Iterator[int]:
    """Seeds whose plans have all that a fault needs."""
    from .plan import draw

    needed = [set(features.split("|")) for features in fault.needs]
    for seed in count(fault.first or first):
        features = draw(seed, fault.backend or None).features() if needed else set()
        if all(features & wanted for wanted in needed):
            yield seed


def violated(seed: int, backend: str) -> list[str]:
    """What the product violates with a seed: as it is nothing, or the seed proves nothing about a fault."""
    from .plan import draw
    from .world import World

    return World(draw(seed, backend or None), log_level=logging.CRITICAL).run().violations


def fails(fault: SeededFault) -> bool:
    """Whether the test fails that notices a fault. In a process of its own: pytest wants to load everything itself."""
    test = LIST.parent.parent / fault.test
    code = (
        "import sys; from tests.simulation.seeded import install; install(sys.argv[1]); import pytest;"
        " sys.exit(pytest.main(sys.argv[2:]))"
    )
    command = [sys.executable, "-c", code, fault.name, *PYTEST, str(test)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=300).returncode == 1


def pass_without_any(tests: set[str]) -> bool:
    """Whether tests pass with the product as it is; those that fail prove nothing about a fault."""
    paths = [str(LIST.parent.parent / test) for test in sorted(tests)]
    command = [sys.executable, "-P", "-m", "pytest", *PYTEST, *paths]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    if found.returncode:
        print(found.stdout[-2000:], file=sys.stderr)
    return not found.returncode


def violated_by(name: str) -> list[str]:
    """The same with a kept plan, with which the product violates nothing (`test_simulation.py` holds that)."""
    from .plan import Plan
    from .world import World

    plan = Plan.from_json((LIST.parent / "regressions" / f"{name}.json").read_text())
    return World(plan, log_level=logging.CRITICAL).run().violations


def main() -> int:
    """Hunt faults; 1 if one survives, 2 if a test fails without any."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.seeded")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # see `tests.simulation.__main__`
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.seeded", *sys.argv[1:]])
    for library in LIBRARIES:  # once, for all processes
        importlib.import_module(library)
    listed, survived, began = read(), 0, time.perf_counter()
    names = options.names or list(listed)
    if unknown := set(names) - listed.keys():
        parser.error(f"not in {LIST.name}: {', '.join(sorted(unknown))}")
    if (tests := {listed[name].test for name in names} - {""}) and not pass_without_any(tests):
        print("a test that shall notice a fault fails without any", file=sys.stderr)
        return 2
    with (
        multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=1) as pool,
        ThreadPoolExecutor(options.processes) as hunters,
    ):
        for name, noticed, problem in hunters.map(partial(_hunted, pool, options.first, options.seeds), names):
            survived += noticed is None
            outcome = f"SURVIVED {problem}".strip()
            if noticed is not None:
                outcome = f"killed after {noticed.simulated:3} seeds: {noticed.violation[:130]}"
            print(f"{name:36} {outcome}", flush=True)
    print(f"{len(names) - survived} of {len(names)} killed, {survived} survived, {time.perf_counter() - began:.0f} s")
    return 1 if survived else 0


def _hunted(pool: Pool, first: int, seeds: int, name: str) -> tuple[str, Noticed | None, str]:
    """Hunts a fault, each try in a process of its own. A seed that the product fails as it is proves nothing."""
    fault, tried = read()[name], 0
    try:
        while True:
            noticed = pool.apply(hunt, (name, first, seeds, tried))
            if noticed is None or noticed.seed is None or not pool.apply(violated, (noticed.seed, fault.backend)):
                return name, noticed, ""
            tried = noticed.simulated
    except Exception as error:
        return name, None, f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
