"""Commands as processes: how they end on a signal, and what they refuse."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

UNDERSTUDY = [sys.executable, "-m", "understudy.cluster"]

WAITS = """
import signal, sys, threading
import typer
from understudy.cluster.cli import command
from understudy.cluster.client import client

class Cluster:
    @classmethod
    def connect(cls, store, identity):
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
def test_a_command_ends_on_a_signal(number: signal.Signals, text: str) -> None:
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


RUNS = """
import sys
from understudy.cluster.cli.main import app
from understudy.cluster.client import client
from understudy.testing import LocalCluster

class Cluster:
    @classmethod
    def connect(cls, store, **options):
        return LocalCluster(store)

client.Cluster = Cluster
app(["run", "call wait {\\"seconds\\": 600}", "--tool", "wait", "--session", "s", "--run-id", "r",
     "--store", sys.argv[1]])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_not_waited_for_any_more(tmp_path: Path, number: signal.Signals) -> None:
    """Given a run at work, when its command is interrupted or terminated, then it says that the run goes on and how to
    wait for it or to end it; its exit code is that of the signal."""
    store = f"sqlite:///{tmp_path}/store.db"
    with subprocess.Popen(
        [sys.executable, "-c", RUNS, store], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("waits until" in line for line in lines)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert (output, process.returncode) == ("", 128 + number)
    assert "the run goes on" in errors
    assert f"understudy run --session s --run-id r --store {store}" in errors
    assert f"understudy cancel s --store {store}" in errors


AT_TERMINAL = """
import sys
from understudy.cluster.cli.main import app
from understudy.cluster.client import client
from understudy.testing import LocalCluster

class Cluster:
    @classmethod
    def connect(cls, store, **options):
        return LocalCluster(store)

client.Cluster = Cluster
app(["run", 'call request_user_input {"prompt": "Which?", "options": ["red", "blue"]}',
     "--tool", "request_user_input", "--store", sys.argv[1]])
"""


def test_a_run_at_a_terminal(tmp_path: Path) -> None:
    """Given a terminal, when the agent asks, then the question and its options are shown there, the answer is read, and
    the agent's text comes once; all in their order."""
    ours, theirs = pty.openpty()
    store = f"sqlite:///{tmp_path}/store.db"
    with subprocess.Popen(
        [sys.executable, "-c", AT_TERMINAL, store], stdin=theirs, stdout=theirs, stderr=theirs, text=True
    ) as process:
        os.close(theirs)
        shown, answered = b"", False
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # Linux: the other end was closed
                break
            shown += piece
            if b"puts the answer off)" in shown and not answered:
                os.write(ours, b"2\n")
                answered = True
        assert process.wait(60) == 0, shown
    os.close(ours)
    text = shown.decode()
    assert text.count("offline: blue") == 1
    places = [text.index(part) for part in ("Which?", "2. blue", "offline: blue", "continue: understudy run")]
    assert places == sorted(places)


@pytest.mark.thorough
def test_a_console_without_a_token_is_for_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other addresses without a token, and tokens that can be guessed, are refused before anything is connected."""
    monkeypatch.delenv("UNDERSTUDY_CONSOLE_TOKEN", raising=False)
    for environment, said in (({}, "only with a token"), ({"UNDERSTUDY_CONSOLE_TOKEN": "short"}, "fewer than 16")):
        done = subprocess.run(
            [*UNDERSTUDY, "console", "--host", "0.0.0.0"], env={**os.environ, **environment}, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert said in " ".join(done.stderr.split())


@pytest.mark.thorough
@pytest.mark.parametrize(("mode", "code"), [(None, "invalid_auth_token"), ("disabled", "cluster_unreachable")])
def test_a_token_file_that_is_not_there(tmp_path: Path, mode: str | None, code: str) -> None:
    """A file that can't be read is an error of a command, with the file's name; of no concern where no token is asked
    for."""
    variables = {**os.environ, "HOME": str(tmp_path), "RAY_ADDRESS": "127.0.0.1:1"}
    variables["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "missing")
    variables.pop("RAY_AUTH_MODE", None)
    if mode is not None:
        variables["RAY_AUTH_MODE"] = mode
    ended = subprocess.run(
        [*UNDERSTUDY, "ps", "--json"], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    error = json.loads(ended.stdout)["error"]
    assert error["code"] == code, ended.stderr
    assert mode is not None or str(tmp_path / "missing") in error["message"]
