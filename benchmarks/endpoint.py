"""The endpoint of the benchmarks: the offline model in a process of its own, telling when it received a request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from understudy.testing.policies import Reply, default_policy


def stamped(body: dict[str, Any]) -> Reply:
    """The default policy, but the text of every answer is when its request was received: nanoseconds since 1970 UTC."""
    received = time.time_ns()
    return replace(default_policy(body), text=str(received))


class Endpoint:
    """The running server. Every process of this machine sees the same clock, so its stamps compare with ours."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "understudy.testing", "--policy", "endpoint:stamped", "--parent-death"]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url: str = json.loads(self._process.stdout.readline())["url"]
        self.pid = self._process.pid

    def stats(self) -> dict[str, int]:
        """Its counters; `repeats` are requests whose messages it had seen before."""
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/stats", timeout=10) as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
