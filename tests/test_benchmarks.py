"""The benchmarks' one command works; what it measures is not judged here."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

RUN = Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"


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
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode != 0
    assert not marked(mark)
