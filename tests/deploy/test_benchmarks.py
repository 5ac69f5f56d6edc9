"""The benchmarks' one command works; what it measures is not judged here."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"


MARK = "BENCHMARK_TEST"


def started(mark: str) -> subprocess.Popen[str]:
    """`run.py --json --quick --only round`; whatever it starts has `mark` in its environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "XDG_STATE_HOME")}
    return subprocess.Popen(
        [sys.executable, RUN, "--json", "--quick", "--only", "round"],
        env={**environment, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def marked(mark: str) -> list[str]:
    """Live processes that `started` led to. Read raw: psutil loses what follows the titles that Ray's processes set."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if f"{MARK}={mark}".encode() in environment and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()).strip())
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_command_measures_beside_a_baseline_and_leaves_nothing_running() -> None:
    """stdout is one JSON document with machine, load and rows; each row has a baseline and a ratio."""
    mark = uuid.uuid4().hex
    process = started(mark)
    output, progress = process.communicate(timeout=280)
    assert process.returncode == 0, progress
    report: dict[str, Any] = json.loads(output)
    assert report["machine"]["cores"] >= 1
    assert len(report["machine"]["load_before"]) == 3
    assert not report["failed"]
    assert {row["scenario"] for row in report["rows"]} == {"round"}
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["value"] / row["baseline"])
    [judged] = [row for row in report["rows"] if row["budget"]]
    assert (judged["budget"], judged["verdict"]) in [("≤ 6 ms", "ok"), ("≤ 6 ms", "short")]
    assert not marked(mark)


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_an_interrupted_run_stops_its_ray_head() -> None:
    """Ctrl-C in the middle of a scenario leaves no process behind."""
    mark = uuid.uuid4().hex
    process = started(mark)
    try:
        while not any("/raylet/raylet" in line for line in marked(mark)):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode != 0
    assert not marked(mark)


def test_what_is_used_of_a_budget() -> None:
    """A ratio's share of its budget, whether it may be no more or no less; without a baseline more than there is."""
    code = (
        "from harness import Limit, Row\n"
        "most, least = Limit(1.4, of_ratio=True), Limit(1.2, of_ratio=True, at_least=True)\n"
        "measured = ((10.0, most), (5.0, least), (None, most))\n"
        "rows = [Row('s', 'm', 7.0, 'ms', base, '', limit) for base, limit in measured]\n"
        "rows += [Row('s', 'm', value, '', limit=Limit(0)) for value in (0, 2)]\n"
        "print([(round(row.used, 2), row.verdict) for row in rows])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=RUN.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "[(0.5, 'ok'), (0.86, 'ok'), (inf, 'short'), (0.0, 'ok'), (inf, 'short')]\n"


def test_what_is_a_regression() -> None:
    """Given times in turns, one is a regression if even the best turn used twice the budget; of what is counted, all
    that is beyond it; a value without a ratio is none."""
    code = (
        "from harness import Limit, Row\n"
        "from run import is_regression\n"
        "timed, rate = Limit(1.5, of_ratio=True), Limit(1.2, of_ratio=True, at_least=True)\n"
        "rows = [Row('s', 'm', 9.0, 'ms', 2.0, '', timed, turns=turns) for turns in ((9.0, 2.9), (9.0, 3.1))]\n"
        "rows += [Row('s', 'm', 1.0, '/s', 2.0, '', rate, turns=turns) for turns in ((0.1, 0.7), (0.1, 0.5))]\n"
        "rows += [Row('s', 'm', value, '', 2.0, '', Limit(1, of_ratio=True, counted=True)) for value in (1.9, 2.1)]\n"
        "print([is_regression(row) for row in [*rows, Row('s', 'm', 9.0, 'ms', limit=Limit(1))]])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=RUN.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "[False, True, False, True, False, True, False]\n"


@pytest.mark.thorough
def test_the_plot_has_what_was_measured(tmp_path: Path) -> None:
    """A report's rows become bars with their values, the same file from the same report; without such rows it is said
    what to run."""
    row = {"scenario": "peers", "value": 33.7, "unit": "ms", "baseline": 37.4, "against": "a raw asyncio loop"}
    rows = [{**row, "measure": "understudy: CPU per session"}, {**row, "measure": "LangGraph: CPU per session"}]
    result = tmp_path / "result.json"
    drawn = []
    for name in ("one.svg", "two.svg"):
        result.write_text(json.dumps({"rows": rows}))
        subprocess.run([sys.executable, RUN.with_name("plots.py"), result, tmp_path / name], check=True, timeout=100)
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1]
    assert all(text in drawn[0] for text in ("CPU per session (less is better)", "33.7 ms", "37.4 ms", "LangGraph"))
    result.write_text(json.dumps({"rows": []}))
    refused = subprocess.run(
        [sys.executable, RUN.with_name("plots.py"), result, tmp_path / "none.svg"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (refused.returncode, "run `run.py --json --only peers`" in refused.stderr) == (1, True)
