"""A workflow of many steps in one process with all parts (`LocalCluster`). Arguments: a directory, `take` or `go-on`,
the number of steps, and after how many results a snapshot is made (0: none is made).

`take` runs it up to where it waits for a signal. `go-on`, in another process, gives it the signal: it is run from its
log, and ends. Each prints one line: seconds, CPU seconds, and by how many MB the process grew.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from workload import many_steps

from understudy.actors import workflow_record
from understudy.testing import LocalCluster

WAIT_SECONDS = 600.0


def main(directory: Path, phase: str, steps: int, snapshot: int) -> None:
    """The program."""
    workflow_record.SNAPSHOT_STEPS = snapshot or steps + 2
    with LocalCluster(f"sqlite:///{directory}/long.db") as cluster:
        before, began, cpu = _megabytes(), time.perf_counter(), time.process_time()
        if phase == "take":
            cluster.workflow(many_steps, steps, session_id="long", run_id="r")
            session = cluster.session("long")
            while session.info().status != "waiting_for_input":
                time.sleep(0.5)
        else:
            session = cluster.session("long")
            session.signal("go")
            result = session.run("r").result(WAIT_SECONDS, check=True)
            assert result.output == steps, result
        found = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        print(json.dumps({**found, "megabytes": _megabytes() - before}), flush=True)


def _megabytes() -> float:
    """The most that this program has had in memory. Linux counts that of the parent as well in `ru_maxrss`."""
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
