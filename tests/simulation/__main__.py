"""The command line of the simulator."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter

from .plan import draw
from .world import World


def main() -> int:
    """Simulate seeds; 1 if one of them violated an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, help="one seed, with its schedule")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--backend", choices=("sqlite", "postgresql"))
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets and of their texts is a part of a run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    level = logging.INFO if options.verbose else logging.WARNING
    if options.seed is not None:
        plan = draw(options.seed, options.backend)
        print("\n".join(plan.describe()))
        result = World(plan, log_level=level).run()
        print("\n".join(result.lines))
        print(f"{result.seconds:.1f} s simulated, {result.steps} steps, trace {result.trace:08x}, {dict(result.counts)}")
        print("\n".join(result.violations) or "no violation")
        return 1 if result.violations else 0
    failed, began, simulated, counts = [], time.monotonic(), 0.0, Counter[str]()
    for seed in range(options.first, options.first + options.seeds):
        result = World(draw(seed, options.backend), log_level=level).run()
        simulated += result.seconds
        counts.update(result.counts)
        if result.violations:
            failed.append(seed)
            print(f"seed {seed}: {len(result.violations)} violations; {result.violations[0][:300]}", flush=True)
    took = time.monotonic() - began
    print(f"{options.seeds} seeds in {took:.1f} s ({60 * options.seeds / took:.0f} a minute), {simulated / 3600:.2f} h simulated")
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    print(f"{len(failed)} seeds failed: {failed[:50]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
