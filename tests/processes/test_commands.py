"""Commands as processes: how they end when they are told to."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WAITS = """
import signal, sys, threading
import typer
from understudy.cluster.cli import command
from understudy.cluster.client import client

class Cluster:
    @classmethod
    def connect(cls, store):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ray's own handler"))  # as Ray does
        return cls()

    def close(self):
        print("closed", flush=True)

client.Cluster = Cluster

@command.command
def wait():
    with command.connected(None):
        print("begun", flush=True)
        threading.Event().wait()

try:
    wait()
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGTERM, "ended by SIGTERM; what"), (signal.SIGINT, "interrupted; what")]
)
def test_a_command_that_is_told_to_end(number: signal.Signals, text: str) -> None:
    """Given a command at work, when it is interrupted or terminated, then it closes its connection and says so in one
    line, without a trace back; its exit code is that of the signal."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert (output, process.returncode) == ("closed\n", 128 + number)
    assert errors.startswith(text)
    assert errors.count("\n") == 1
