"""`understudy console` and `understudy top` on a real cluster: real processes, a real browser, a real terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.async_api import expect

from understudy import AgentSpec
from understudy.cluster.ray.ray_edge import RAY_NAMESPACE

from ..console_stage import chromium
from ..faults import PATIENCE, gone, kill, staged, tools_of, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(300)]

UNDERSTUDY = [sys.executable, "-m", "understudy.cluster"]
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


@contextmanager
def console(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A console in the foreground, and what it says of itself."""
    command = [*UNDERSTUDY, "console", "--json", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        assert process.stdout is not None
        lines = ""
        while not lines.endswith("}\n"):
            line = process.stdout.readline()
            assert line, process.communicate(timeout=PATIENCE)[1]
            lines += line
        yield process, json.loads(lines)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, *command: str, columns: int = 100, rows: int = 30) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._before = termios.tcgetattr(theirs)
        self._theirs = theirs
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        launched = [sys.executable, "-c", TAKE_TERMINAL, *command]
        self.process = subprocess.Popen(
            launched, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
        )
        self.shown = b""

    def until(self, pattern: str) -> None:
        """Read until the pattern was shown, without what moves the cursor and colours."""
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, self.text()):
            assert time.monotonic() < deadline, f"{pattern} was not shown: {self.text()[-2000:]}"
            self._read(0.2)

    def text(self) -> str:
        return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self.shown).decode(errors="replace")

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def ended(self) -> int:
        """Its exit code; it has left the terminal as it was."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()[-2000:]
            self._read(0.1)
        self._read(0.1)
        assert termios.tcgetattr(self._theirs) == self._before
        assert self.shown.count(b"\x1b[?1049h") == self.shown.count(b"\x1b[?1049l") == 1
        assert self.shown.rindex(b"\x1b[?25h") > self.shown.rindex(b"\x1b[?25l")
        return int(self.process.returncode)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._ours)
        os.close(self._theirs)

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if ready:
            self.shown += os.read(self._ours, 65_536)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}healthz", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


async def test_a_crash_shows_live_in_the_browser_and_at_the_terminal(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lead with two sub-agents, one of which is killed: page and terminal show it and its recovery; both end well."""
    dsn = f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv("UNDERSTUDY_STORE", dsn)
    with staged(dsn, tmp_path / "stage", latency=0.05) as stage:
        child = {"model": "m", "profile": stage.profile, "tools": tools_of(stage.directory)}
        agents = [AgentSpec(name=name, **child) for name in ("reader", "writer")]
        lead = AgentSpec(name="lead", model="m", profile=stage.profile, tools=["spawn_agent"], agents=agents)
        session = stage.cluster.spawn(lead, session_id="survey")
        with console("--port", "0") as (process, printed):
            terminal = Terminal(*UNDERSTUDY, "top")
            try:
                await follow_a_crash(stage, session, printed["url"], terminal, tmp_path)
                # The supervisor is killed under both: they go on, and show the next one.
                (supervisor,) = stage.pids("supervisor")
                kill(supervisor)
                await asyncio.to_thread(
                    wait_until, lambda: stage.pids("supervisor") != [supervisor], "the next supervisor"
                )
                terminal.until(f"healthy · supervisor {stage.pids('supervisor')[0]}")
                terminal.until(f"supervisor .* restarted: pid {supervisor} is now {stage.pids('supervisor')[0]}")
                terminal.press("\x03")
                assert terminal.ended() == 130
            finally:
                terminal.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 130
            wait_until(lambda: gone(printed["pid"]), "the console's end")
            assert not answers(printed["url"])
        assert stage.cluster.services()
        stage.cluster.shutdown()


async def follow_a_crash(stage: Any, session: Any, url: str, terminal: Terminal, tmp_path: Path) -> None:
    async with chromium() as browser:
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        await page.goto(url)
        await expect(page.locator(".card", has_text="Cluster")).to_contain_text("healthy", timeout=30_000)
        await page.goto(f"{url}#/session/survey")
        await page.evaluate("window.loaded = 'once'")
        task = {name: f"call act {json.dumps({'name': f'slow-{name}'})}" for name in ("reader", "writer")}
        spawns = [f"call spawn_agent {json.dumps({'agent': name, 'task': task[name]})}" for name in task]
        run = session.send("\n".join(spawns), run_id="r1")
        await asyncio.to_thread(
            wait_until, lambda: sorted(stage.effects()) == ["slow-reader", "slow-writer"], "both tools"
        )
        await expect(page.locator(".row")).to_have_count(3, timeout=30_000)
        victim = next(info for info in session.children() if info.name == "reader")
        assert victim.actor_pid is not None
        kill(victim.actor_pid)
        row = page.locator(".row", has=page.get_by_text("reader", exact=True))
        await expect(row).to_contain_text("↻1", timeout=30_000)
        await expect(row.locator(".m-crash")).to_have_count(1, timeout=30_000)
        await expect(row.locator(".m-recover")).to_have_count(1, timeout=30_000)
        await asyncio.to_thread(terminal.until, r"reader .* crashed \(process_died")
        await asyncio.to_thread(terminal.until, "1 restored within")
        stage.let_go("slow-writer")
        stage.let_go("slow-reader")
        result = await asyncio.to_thread(run.result, PATIENCE)
        assert result.ok
        await expect(page.locator("h1")).to_contain_text("idle", timeout=30_000)
        await page.screenshot(path=tmp_path / "session.png", full_page=True)
        await page.get_by_role("tab", name="Trace").click()
        await expect(page.locator(".waterfall .name", has_text="recover reader")).to_be_visible(timeout=30_000)
        await page.screenshot(path=tmp_path / "trace.png", full_page=True)
        assert await page.evaluate("window.loaded") == "once"
        assert errors == []


def test_a_console_that_was_left_running_acts_with_its_token_and_ends_with_the_services(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves on after its command, its token is nowhere to be seen, its port is taken, and `down` ends it. Commands
    that look at the same services report the settings these were started with where the environment differs."""
    dsn = f"sqlite:///{tmp_path}/store.db"
    token = "a-token-of-the-tests-0123456789"
    monkeypatch.setenv("UNDERSTUDY_STORE", dsn)
    monkeypatch.setenv("UNDERSTUDY_CONSOLE_TOKEN", token)

    def together(*lines: str) -> list[subprocess.CompletedProcess[str]]:
        """What commands say that are begun at the same time."""
        begun = [
            subprocess.Popen([*UNDERSTUDY, *line.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for line in lines
        ]
        outputs = [process.communicate(timeout=PATIENCE) for process in begun]
        assert not any(token in text for texts in outputs for text in texts)
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *texts)
            for process, texts in zip(begun, outputs, strict=True)
        ]

    def command(line: str) -> subprocess.CompletedProcess[str]:
        [done] = together(line)
        return done

    with staged(dsn, tmp_path / "stage") as stage:
        session = stage.spawn(session_id="s")
        printed = None
        for port in ("8571", "8572", "8573"):  # one of them is free
            done = command(f"console --detach --json --port {port}")
            printed = json.loads(done.stdout)
            if done.returncode == 0:
                break
        assert printed is not None
        url = printed["url"]
        assert answers(url)
        assert command(f"console --detach --port {port}").returncode == 1
        environment = psutil.Process(printed["pid"]).environ()
        assert token not in " ".join([*psutil.Process(printed["pid"]).cmdline(), *environment.values()])

        def post(secret: str) -> int:
            headers = {"content-type": "application/json", "authorization": f"Bearer {secret}"}
            request = urllib.request.Request(f"{url}api/sessions/s/close", b"{}", headers)
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                error.close()
                return error.code

        assert post("a-token-of-somebody-else") == 401
        assert post(token) == 200
        assert any(event.type == "session_closed" for event in session.events())
        shown, totals, settings = together("top --once", "top --json", "up --json")
        assert shown.returncode == 0
        assert "understudy ● healthy" in shown.stdout
        assert json.loads(totals.stdout)["totals"]["sessions"] == 1
        assert json.loads(settings.stdout)["different_settings"] == []
        monkeypatch.setenv("UNDERSTUDY_METRICS_PORT", "9")  # the services have another: commands report it
        up, doctor, readable = together("up --json", "doctor", "up")
        for result in (up, doctor):
            assert result.returncode == 0
            assert "(this environment says 9)" in result.stdout
            assert "UNDERSTUDY_METRICS_PORT=0" in result.stdout
        assert "they keep theirs until" in readable.stderr
        stage.cluster.shutdown()
        wait_until(lambda: not answers(url), "the console's end")
        assert not [actor for actor in actors() if actor.startswith("console/")]


def actors() -> list[str]:
    import ray

    return [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == RAY_NAMESPACE
    ]
