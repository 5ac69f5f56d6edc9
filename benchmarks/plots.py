"""`python benchmarks/plots.py RESULT.json PLOT.svg`: draw what `run.py --json --only peers` measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from comparison import OURS, RAW
from matplotlib import pyplot as plt

COLOURS = {OURS: "#1f6feb", RAW: "#57606a"}
OTHERS = "#afb8c1"


def panels(rows: list[dict[str, Any]]) -> dict[str, dict[str, tuple[float, str]]]:
    """Per measure: value and unit of each contender; the raw loop's is the baseline of all others."""
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for row in rows:
        if row["scenario"] == "peers" and row["against"] == RAW:
            name, _, measure = row["measure"].partition(": ")
            bars = found.setdefault(measure, {RAW: (row["baseline"], row["unit"])})
            bars[name] = row["value"], row["unit"]
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot. Raises `SystemExit` if there is nothing to draw."""
    found = panels(result["rows"])
    if not found:
        sys.exit("there are no rows of the scenario `peers`: run `run.py --json --only peers`")
    # Text stays text, and the same input gives the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "understudy"})
    figure, axes = plt.subplots(len(found), 1, figsize=(8, 1.7 * len(found)), squeeze=False)
    for axis, (measure, bars) in zip(axes[:, 0], found.items(), strict=True):
        names = sorted(bars, key=lambda name: (name != OURS, name != RAW, name))[::-1]
        drawn = axis.barh(names, [bars[name][0] for name in names], color=[COLOURS.get(n, OTHERS) for n in names])
        unit = next(iter(bars.values()))[1]
        axis.bar_label(drawn, labels=[f" {bars[name][0]:.4g} {unit}" for name in names])
        better = "more is better" if unit == "/s" else "less is better"
        axis.set_title(f"{measure} ({better})", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
