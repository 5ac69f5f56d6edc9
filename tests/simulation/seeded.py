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
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("seeded.toml")
SEEDS = 150
"""A fault that survives so many seeds survives."""


@dataclass(frozen=True)
class SeededFault:
    """One wrong change.

    Attributes:
        module: which is changed.
        old, new: what is replaced, once, and by what.
        breaks: the promise that does not hold any more.
        backend: where it can be seen, if only there.
        first: a seed that has found it; those after it are tried as well.
    """

    name: str
    module: str
    old: str
    new: str
    breaks: str
    backend: str = ""
    first: int = 0


def read() -> dict[str, SeededFault]:
    """All of the list, by name."""
    return {entry["name"]: SeededFault(**entry) for entry in tomllib.loads(LIST.read_text())["fault"]}


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with the change made."""

    fault: SeededFault

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text()
        if text.count(self.fault.old) != 1:
            raise AssertionError(f"seeded fault {self.fault.name}: {text.count(self.fault.old)} places match, not one")
        return compile(text.replace(self.fault.old, self.fault.new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module of a seeded fault before anybody else does."""

    def __init__(self, fault: SeededFault) -> None:
        self._fault = fault

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != self._fault.module:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.origin is not None
        loader = _Loader(fullname, spec.origin)
        loader.fault = self._fault
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


def install(name: str) -> None:
    """Make the change in this process; must come before anything of the product is imported."""
    fault = read()[name]
    assert fault.module not in sys.modules, f"{fault.module} is loaded already"
    sys.meta_path.insert(0, _Finder(fault))


def hunt(fault: SeededFault, seeds: int) -> tuple[int | None, str]:
    """How many seeds it took to notice a fault (None: it survived), and what was noticed."""
    command = [sys.executable, "-u", "-m", "tests.simulation", "--fault", fault.name, "--seeds", str(seeds), "--stop"]
    command += ["--first", str(fault.first)] + (["--backend", fault.backend] if fault.backend else [])
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False, timeout=3600
    )
    noticed = re.search(r"^noticed after (\d+) seeds: (.*)$", done.stdout, re.MULTILINE)
    if noticed:
        return int(noticed[1]), noticed[2]
    survived = re.search(r"seeds failed: \[\]", done.stdout)
    return None, "" if survived else (done.stderr or done.stdout)[-500:]


def main() -> int:
    """Hunt faults; 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.seeded")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    faults = read()
    chosen = [faults[name] for name in options.names] if options.names else list(faults.values())
    survived, began = 0, time.monotonic()
    with ThreadPoolExecutor(options.processes) as pool:
        for fault, (seeds, what) in zip(chosen, pool.map(lambda f: hunt(f, options.seeds), chosen), strict=True):
            survived += seeds is None
            told = f"killed after {seeds:3} seeds: {what[:110]}" if seeds is not None else f"SURVIVED {what}"
            print(f"{fault.name:34} {told}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} killed, {survived} survived, {time.monotonic() - began:.0f} s")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
