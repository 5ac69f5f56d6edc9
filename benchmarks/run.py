"""`python benchmarks/run.py`: measure the budgets of the design, as ratios against bare Ray actors of the same run.

Baseline and product are measured in turns, so what else the machine does hits both. Progress goes to stderr; the table,
or with `--json` one JSON document, to stdout. Exit status: 0 when everything was measured, whether budgets were kept or
not; 1 when a scenario failed, or `--guard` found a regression: something counted that is beyond its budget, or a ratio
of times that used twice its budget even in its best turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import understudy.cluster.ray.ray_edge  # noqa: F401 - before Ray, which learns from it how to authenticate

# isort: split
import ray
from commits import commits
from comparison import calls, peers
from creation import cold, memory, standby
from density import density
from fleet_page import fleet_page
from harness import Bench, Row
from history import history
from recovery import kill, kill_many
from rich.console import Console
from rich.table import Table
from rounds import burst, cpu, round_cost, throughput
from scrape import scrape
from stalls import stalls
from trees import budget, cancel, tree
from waiting import waiting
from workflows import long_workflow, workflows

SCENARIOS: dict[str, Callable[[Bench], list[Row]]] = {
    "memory": memory,
    "cold": cold,
    "standby": standby,
    "round": round_cost,
    "history": history,
    "kill": kill,
    "kill16": kill_many,
    "cpu": cpu,
    "throughput": throughput,
    "burst": burst,
    "density": density,
    "peers": peers,
    "calls": calls,
    "tree": tree,
    "cancel": cancel,
    "budget": budget,
    "commits": commits,
    "scrape": scrape,
    "page": fleet_page,
    "waiting": waiting,
    "stalls": stalls,
    "workflows": workflows,
    "long": long_workflow,
}


MARGIN = 2.0
"""How far beyond its budget `--guard` lets a timed ratio be in its best turn. A machine shared with others has been
seen to add half to all turns of a run; what is counted (`calls`) shows smaller regressions."""


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python benchmarks/run.py", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SCENARIOS, help=", ".join(SCENARIOS))
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that it works, no more")
    parser.add_argument("--guard", action="store_true", help="exit status 1 if a ratio is a regression")
    parser.add_argument("--full", action="store_true", help="with 1,000 sessions on 16 actors as well")
    options = parser.parse_args()
    # Ray's processes must be stopped however this ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "python": platform.python_version(),
        "ray": ray.__version__,
        "quick": options.quick,
    }
    rows: list[Row] = []
    failed: dict[str, str] = {}
    with Bench(quick=options.quick, full=options.full) as bench:
        for name in options.only or SCENARIOS:
            print(f"{name}: {(SCENARIOS[name].__doc__ or '').strip()}", file=sys.stderr, flush=True)
            began = time.monotonic()
            try:
                rows += SCENARIOS[name](bench)
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
            bench.say(f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}")
        machine["load_after"] = os.getloadavg()
        if options.json:
            print(json.dumps({"machine": machine, "rows": [row.to_json() for row in rows], "failed": failed}, indent=1))
        else:
            show(machine, rows, failed)
        sys.stdout.flush()  # before Ray is stopped, whatever that leads to
    worse = [row for row in rows if is_regression(row)]
    for row in worse if options.guard else ():
        turns = ", ".join(f"{ratio:.2f}" for ratio in row.turns or (row.ratio or 0.0,))
        print(f"regression: {row.measure}: {turns}, budget {row.budget}", file=sys.stderr)
    return 1 if failed or (options.guard and worse) else 0


def is_regression(row: Row) -> bool:
    """Whether a ratio is so far beyond its budget that the machine can't be the reason."""
    if row.limit is None or not row.limit.of_ratio:
        return False
    return row.used_at_best > (1.0 if row.limit.counted else MARGIN)


def show(machine: dict[str, Any], rows: list[Row], failed: dict[str, str]) -> None:
    """Print the table."""
    console = Console(width=max(150, Console().width), highlight=False)
    load = [f"{machine[name][0]:.1f}" for name in ("load_before", "load_after")]
    console.print(
        f"{machine['cores']} cores, load {load[0]} before and {load[1]} after, "
        f"Python {machine['python']}, Ray {machine['ray']}{', quick' if machine['quick'] else ''}"
    )
    table = Table(box=None, pad_edge=False)
    right = {"value", "baseline", "ratio", "budget"}
    for title in ("", "measure", "value", "baseline", "ratio", "against", "budget", "", ""):
        table.add_column(title, justify="right" if title in right else "left")
    previous = ""
    for row in rows:
        table.add_row(
            row.scenario if row.scenario != previous else "",
            row.measure,
            f"{row.value:.4g} {row.unit}",
            "" if row.baseline is None else f"{row.baseline:.4g} {row.unit}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            row.against,
            row.budget,
            row.verdict,
            row.note,
        )
        previous = row.scenario
    console.print(table)
    for name, problem in failed.items():
        console.print(f"{name}: failed: {problem}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
