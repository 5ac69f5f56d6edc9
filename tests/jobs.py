"""Helpers of the tests with `ray job submit`: a head with a job server, shells that use it, jobs and their output."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from .faults import PATIENCE, Head, wait_until
from .postgres import free_port

EXAMPLE = Path(__file__).parent.parent / "examples" / "jobs"
COMMANDS = {"ray": "ray.scripts.scripts", "understudy": "understudy.cluster.__main__"}


class JobHead(Head):
    """A Ray head with its job server, as an administrator starts it: `ray start --head`.

    Args:
        token: what it lets people in with; None: no authentication.
    """

    def __init__(self, directory: Path, token: str | None) -> None:
        super().__init__(directory)
        self.jobs = ""
        self._home = directory / "home"
        self._home.mkdir()
        self._token = directory / "token" if token else None
        if self._token is not None:
            self._token.write_text(token or "")
        (directory / "bin").mkdir()
        for name, module in COMMANDS.items():
            self._write_command(name, f"-c 'from {module} import main; main()'")
        self._write_command("python", "")

    def _write_command(self, name: str, options: str) -> None:
        """A command of this very environment, by the name that people call it by."""
        path = self._state / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {options} "$@"\n')
        path.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """What a shell of this cluster's users has."""
        found = {**super().environment, "HOME": str(self._home), "RAY_AUTH_MODE": "disabled"}
        if self._token is not None:
            found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}
        if self.jobs:
            found["RAY_API_SERVER_ADDRESS"] = self.jobs
        return {**found, "PATH": f"{self._state / 'bin'}:{os.environ['PATH']}"}

    def start(self, *, jobs: bool = True) -> None:
        """Start it, and wait until it runs jobs; or without a job server."""
        ports = set[int]()
        while len(ports) < 2:  # the agent's usual port may be another head's
            ports.add(free_port())
        port, agent = ports
        self.address = self.jobs = ""
        started = self.shell(
            f"ray start --head --port=0 --include-dashboard={str(jobs).lower()} --dashboard-port={port} "
            f"--dashboard-agent-listen-port={agent} --disable-usage-stats"
        )
        assert started.returncode == 0, started.stdout
        address = re.search(r"--address='([^']+)'", started.stdout)
        assert address, started.stdout
        self.address = address.group(1)
        if not jobs:
            return
        self.jobs = f"http://127.0.0.1:{port}"
        wait_until(self._takes_jobs, "a job server with an agent that runs jobs")

    def _takes_jobs(self) -> bool:
        try:
            return bool(self.ask("/api/jobs/", {"entrypoint": "true"}))
        except OSError:  # also the answer that there is no agent
            return False

    def ask(self, path: str, body: Any = None) -> Any:
        """What the job server answers, as `ray job` asks it; with a body it is a POST. Raises `OSError` as urllib."""
        token = self._token.read_text() if self._token is not None else ""
        headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.jobs}{path}", data, headers), timeout=20) as answer:
            return json.load(answer)

    def begin(self, command: str, directory: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """Begin a shell command of somebody who uses this cluster; what it says comes in one stream."""
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OPENAI_"))}
        return subprocess.Popen(
            ["bash", "-c", command], cwd=directory or self._home, env={**bare, **self.environment, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def shell(
        self, command: str, directory: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command of somebody who uses this cluster."""
        with self.begin(command, directory, **environment) as process:
            try:
                output, _ = process.communicate(timeout=2 * PATIENCE)
            finally:
                process.kill()
        return subprocess.CompletedProcess(command, process.returncode, output)

    def client(self, source: str, **environment: str) -> Any:
        """What a short program prints as JSON, which has connected to the cluster: `cluster`."""
        start = "import json; from understudy import Cluster; cluster = Cluster.connect()\n"
        done = self.shell(f"python -c {shlex.quote(start + source)}", **environment)
        assert done.returncode == 0, done.stdout
        return json.loads(done.stdout.splitlines()[-1])


def job_directory(directory: Path, **variables: str) -> Path:
    """The example, copied, with these environment variables in its runtime.yaml."""
    shutil.copytree(EXAMPLE, directory, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "runtime.yaml").write_text(json.dumps({"env_vars": variables}))  # JSON is YAML
    return directory


def commands_of(text: str) -> list[str]:
    """The commands of a document's console blocks, in order."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
