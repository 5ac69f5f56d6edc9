"""The benchmarks' one command works; what it measures is not judged here."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

RUN = Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"


def started(tmp_path: Path) -> subprocess.Popen[str]:
    """`run.py --json --quick --only round`, with a directory of its own for what it leaves behind."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, RUN, "--json", "--quick", "--only", "round"],
        cwd=tmp_path,
        env={**environment, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(tmp_path: Path) -> list[psutil.Process]:
    """Processes that were started with `tmp_path` as the place of their state."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("XDG_STATE_HOME", "").startswith(str(tmp_path)):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.ray
def test_the_command_measures_beside_a_baseline_and_leaves_nothing_running(tmp_path: Path) -> None:
    """stdout is one JSON document with machine, load and rows; each row has a baseline and a ratio."""
    process = started(tmp_path)
    output, progress = process.communicate(timeout=110)
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
    assert not left_behind(tmp_path)


@pytest.mark.ray
def test_an_interrupted_run_stops_its_ray_head(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a scenario leaves no process behind."""
    process = started(tmp_path)
    try:
        while not any("raylet" in " ".join(other.cmdline()[:1]) for other in left_behind(tmp_path)):
            assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode != 0
    assert not left_behind(tmp_path)
