"""The command line of the simulator."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan
    from .world import Result

REGRESSIONS = Path(__file__).with_name("regressions")


def main() -> int:
    """Simulate seeds; 1 if one of them violated an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, help="one seed, with its schedule and its record")
    parser.add_argument("--plan", type=Path, help="a plan that was kept, in the same way")
    parser.add_argument("--shrink", type=float, metavar="SECONDS", help="make the failing plan shorter first")
    parser.add_argument("--save", type=Path, help="where the shorter plan is kept")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--seconds", type=float, help="as many seeds as can be done within this time")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--backend", choices=("sqlite", "postgresql"))
    parser.add_argument("--fault", help="with this seeded fault (seeded.toml)")
    parser.add_argument("--stop", action="store_true", help="at the first violation")
    parser.add_argument("-v", "--verbose", action="store_true", help="record what the kernel logs")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is a part of a run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    if options.fault:
        from .seeded import install

        install(options.fault)
    from .plan import Plan, draw

    if options.seed is not None or options.plan is not None:
        plan = Plan.from_json(options.plan.read_text()) if options.plan else draw(options.seed, options.backend)
        return _one(plan, options)
    return _many(options)


def _simulate(plan: Plan, *, verbose: bool = False) -> Result:
    from .world import World

    return World(plan, log_level=logging.INFO if verbose else logging.WARNING).run()


def _one(plan: Plan, options: argparse.Namespace) -> int:
    if options.shrink:
        from .shrink import shrunk

        kind = _kind(_simulate(plan))
        plan = shrunk(plan, lambda other: _kind(_simulate(other)) == kind, options.shrink)
        if options.save:
            options.save.write_text(plan.to_json())
    result = _simulate(plan, verbose=options.verbose)
    print("\n".join([*plan.describe(), *result.lines]))
    print(f"{result.seconds:.1f} s simulated, {result.steps} steps, trace {result.trace:08x}, {dict(result.counts)}")
    print("\n".join(result.violations) or "no violation")
    return 1 if result.violations else 0


def _kind(result: Result) -> str:
    """What kind of violation it is: shrinking must not end at another one."""
    if not result.violations:
        return ""
    text = result.violations[0].partition(": ")[2]
    return "".join(letter for letter in text.partition("\n")[0] if not letter.isdigit())[:24]


def _many(options: argparse.Namespace) -> int:
    from .plan import draw

    failed: list[int] = []
    began, simulated, counts, seed = time.perf_counter(), 0.0, Counter[str](), options.first
    while seed < options.first + options.seeds or options.seconds:
        if options.seconds and time.perf_counter() - began > options.seconds:
            break
        result = _simulate(draw(seed, options.backend))
        simulated += result.seconds
        counts.update(result.counts)
        seed += 1
        if result.violations:
            failed.append(seed - 1)
            print(f"seed {seed - 1}: {len(result.violations)} violations; {result.violations[0][:300]}", flush=True)
            if options.stop:
                print(f"noticed after {seed - options.first} seeds: {' '.join(result.violations[0].split())}")
                break
    took, done = time.perf_counter() - began, seed - options.first
    rate = f"{60 * done / took:.0f} a minute, {simulated / 60 / took:.2f} h simulated a minute"
    print(f"{done} seeds from {options.first} in {took:.1f} s ({rate}), {simulated / 3600:.2f} h simulated")
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    print(f"{len(failed)} seeds failed: {failed[:50]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
