"""A real Prometheus, for tests: Debian's `prometheus`, on a free port of its own, scraping what a test names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .postgres import free_port

PATIENCE = 30.0
SCRAPE = "200ms"


class Prometheus:
    """A Prometheus that runs; made by `prometheus`.

    Attributes:
        url: of its web page and API.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def api(self, path: str, **parameters: Any) -> Any:
        """The `data` of an API call, as `api("query", query="up")`; fails with what Prometheus says is wrong."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as refused:
            with refused:
                raise AssertionError(f"{url}: {refused.read().decode(errors='replace')}") from None

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The value of each series now, by its sorted labels, the name left out."""
        return {
            tuple(sorted((name, value) for name, value in series["metric"].items() if name != "__name__")): float(
                series["value"][1]
            )
            for series in self.api("query", query=expression)["result"]
        }

    def value(self, expression: str) -> float:
        """The value of the only series there is."""
        [found] = self.query(expression).values()
        return found

    def targets(self) -> dict[str, str]:
        """Health (`up`, `down`, `unknown`) of each target by its `scrapeUrl`."""
        return {
            target["scrapeUrl"]: target["health"] for target in self.api("targets", state="active")["activeTargets"]
        }

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """Exemplars of the last hour: `labels`, `value` and `timestamp` of each."""
        now = time.time()
        found = self.api("query_exemplars", query=expression, start=now - 3600, end=now + 60)
        return [exemplar for series in found for exemplar in series["exemplars"]]

    def until(self, condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE) -> None:
        """Wait until it holds; Prometheus tells nobody when it has scraped."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s; targets: {self.api('targets')}"
            time.sleep(0.05)


@contextmanager
def prometheus(
    directory: Path,
    *,
    discovery: str = "",
    targets: Iterable[str] = (),
    rules: Iterable[Path] = (),
    scrape: str = SCRAPE,
) -> Iterator[Prometheus]:
    """Run Prometheus for as long as the context lasts.

    Args:
        directory: for its data and configuration; made if it is missing.
        discovery: URL of HTTP service discovery (`http://…/targets`), asked every second.
        targets: `host:port` of fixed targets, under the same job, `understudy`.
        rules: files with alert and recording rules, evaluated at every scrape.
        scrape: time between two scrapes of a target.
    """
    program = shutil.which("prometheus")
    if program is None:
        assert not os.environ.get("CI"), "prometheus is missing: apt-get install prometheus"
        pytest.skip("needs prometheus: apt-get install prometheus")
    directory.mkdir(parents=True, exist_ok=True)
    job: dict[str, Any] = {"job_name": "understudy", "scrape_interval": scrape, "scrape_timeout": scrape}
    if discovery:
        job["http_sd_configs"] = [{"url": discovery, "refresh_interval": "1s"}]
    if listed := list(targets):
        job["static_configs"] = [{"targets": listed}]
    configuration = {
        "global": {"evaluation_interval": scrape},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [job],
    }
    # JSON is YAML.
    (directory / "prometheus.yml").write_text(json.dumps(configuration))
    port = free_port()
    command = [
        program, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=warn",
    ]  # fmt: skip
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _until_ready(process, f"http://127.0.0.1:{port}", directory / "log")
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, f"Prometheus is not ready:\n{log.read_text(errors='replace')}"
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=1.0):
                return
        except OSError:
            time.sleep(0.05)
