"""The simulator's command line, many times, without what each new process costs: one that has loaded everything forks.

To load everything takes longer than most simulations do. A seed is the same run in both (`test_simulation.py`). Seeded
faults need processes of their own: they change modules before these are loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""The order of sets of texts is a part of a run."""


class Forks:
    """Runs the simulator's command line in forks of one process, one after the other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it with these arguments."""
        with tempfile.TemporaryDirectory(prefix="understudy-simulation-") as directory:
            said, complained = Path(directory, "stdout"), Path(directory, "stderr")
            try:
                code = self._ask([str(said), str(complained), *arguments])
            except BaseException:  # e.g. the test's time is over: the answer would be the next one's
                self.close()
                raise
            return subprocess.CompletedProcess(arguments, code, said.read_text(), complained.read_text())

    def _ask(self, request: list[str]) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.simulation.forks"], cwd=ROOT, env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        process: Any = self._process
        process.stdin.write(f"{json.dumps(request)}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def close(self) -> None:
        """End it, and what it has forked."""
        if self._process is None:
            return
        os.killpg(self._process.pid, 9)
        with self._process:
            self._process = None


def _run(said: str, complained: str, *arguments: str) -> int:
    """The command line, in this process, which is a fork and ends then."""
    from .__main__ import main

    for path, descriptor in ((said, 1), (complained, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["tests.simulation", *arguments]
    try:
        return main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def serve() -> None:
    """For each line with arguments, the exit code of the command line; until there are no more."""
    from . import world

    assert world  # loaded before the first fork
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = _run(*json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
