"""The `bash` tool: what a command may see, how much of it is shown, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.actors import guarded
from understudy.actors.shell import _text, bash
from understudy.actors.tools import ToolContext
from understudy.confinement import MAX_SECONDS, Confinement
from understudy.errors import ToolError

pytestmark = pytest.mark.uvloop

HALF = Confinement().output // 2
BACKENDS = ("none", "bubblewrap")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def context(tmp_path: Path, backend: str) -> ToolContext:
    return context_of(str(tmp_path), backend)


def context_of(workspace: str | None, backend: str = "none") -> ToolContext:
    confinement = Confinement(backend=backend)
    return ToolContext(
        session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a", workspace=workspace,
        confinement=confinement,
    )  # fmt: skip


class Alive:
    """Whether processes of a command live: they hold a pipe in its workspace open, whatever their ids are."""

    def __init__(self, folder: Path) -> None:
        self._pipe = folder / "alive"
        os.mkfifo(self._pipe)
        self._descriptor = -1

    def begun(self) -> None:
        """Blocks until all of them have begun."""
        self._descriptor = os.open(self._pipe, os.O_RDONLY)
        assert os.read(self._descriptor, 10) == b"begun\n"

    def assert_gone(self) -> None:
        """Every process has ended, or does within the test's own patience."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLHUP)
        assert poll.poll(30_000), "a process of the command is still alive"
        os.close(self._descriptor)


BEGIN = 'exec 9>alive; sleep 1000 & (trap "" TERM; sleep 1000; sleep 1000) & echo begun >&9; '


class TestResult:
    async def test_output_and_exit_code(self, context: ToolContext, tmp_path: Path) -> None:
        """stdout and stderr in order, then the exit code; it runs with bash, in the workspace."""
        assert await bash("echo out; echo err >&2; exit 3", context) == "out\nerr\n\n[exit code 3]"
        assert await bash("[[ -n $BASH_VERSION ]] && pwd", context) == f"{tmp_path}\n\n[exit code 0]"
        assert await bash("true", context) == "[exit code 0]"

    async def test_death_by_signal_is_reported(self, context: ToolContext) -> None:
        """A command that is killed reports it, also when it kills its whole group; a sandbox's group is its own."""
        assert "[exit code 137]" in await bash("kill -KILL $$", context)
        expected = "[exit code 137]" if context.confinement.backend == "bubblewrap" else "[killed by SIGKILL]"
        assert await bash("kill -KILL 0", context) == expected

    async def test_no_input(self, context: ToolContext) -> None:
        """Reading standard input ends at once."""
        assert await bash("cat; echo done", context) == "done\n\n[exit code 0]"

    async def test_bytes_that_are_no_text(self, context: ToolContext) -> None:
        """Output that is not UTF-8 is shown as far as it can be."""
        assert await bash(r"printf 'a\xffb'", context) == "a\ufffdb\n[exit code 0]"

    async def test_no_workspace_or_impossible_command(self, tmp_path: Path) -> None:
        """Without a workspace nothing runs, nor does a command that no process can be given."""
        with pytest.raises(ToolError, match="workspace"):
            await bash("true", context_of(None))
        with pytest.raises(ToolError, match="can't be started: Argument list too long"):
            await bash("#" * 200_000, context_of(str(tmp_path)))
        with pytest.raises(ToolError, match="NUL"):
            await bash("a\0b", context_of(str(tmp_path)))

    async def test_commands_run_at_the_same_time(self, context: ToolContext, tmp_path: Path) -> None:
        """Two commands that wait for each other both end."""
        os.mkfifo(tmp_path / "meet")
        results = await asyncio.gather(bash("echo hello > meet", context), bash("cat meet", context))
        assert results[1] == "hello\n\n[exit code 0]"


class TestEnvironment:
    async def test_a_command_has_what_tools_have(self, context: ToolContext, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a sandbox, its environment is that of its process, which has what tools get and no more
        (`understudy.environment`); in one there is nothing of that, also not in the processes that hold it together."""
        monkeypatch.setenv("NAMED_BY_THE_AGENT", "shown")
        found = await bash("cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; env", context)
        assert ("NAMED_BY_THE_AGENT=shown\n" in found) is (context.confinement.backend == "none")

    async def test_no_file_descriptor_is_inherited(self, context: ToolContext) -> None:
        """A command has its three standard streams and nothing of the frame's."""
        output = await bash("for f in 3 4 5 6 7 8 9; do [ -e /proc/$$/fd/$f ] && echo open $f; done; true", context)
        assert output == "[exit code 0]"


class TestOutput:
    async def test_endless_output_is_bounded(self, context: ToolContext) -> None:
        """`yes` can't fill memory: beginning and end are kept, and it is said how much is not."""
        output = await bash("echo first; yes", context, timeout=1)
        assert len(output) < 2 * HALF + 300
        assert output.startswith("first\ny\n")
        assert "bytes are left out" in output
        assert "[timed out after 1 s" in output

    def test_kept_output_is_exact(self) -> None:
        """Whatever the chunks, up to twice the kept size is whole, and beyond it head, tail and count are right."""

        async def fill(total: int, chunk: int) -> str:
            output = guarded.Output(2 * HALF)
            data = bytes(97 + number % 26 for number in range(total))
            for start in range(0, total, chunk):
                output.take(data[start : start + chunk])
                assert len(output._tail) <= 2 * HALF
            return _text(guarded.Ended(0, False, output.kept(), output.left_out))

        for chunk in (997, HALF, 3 * HALF):
            whole = asyncio.run(fill(2 * HALF, chunk))
            assert len(whole) == 2 * HALF
            assert "left out" not in whole
            cut = asyncio.run(fill(5 * HALF + 7, chunk))
            assert f"[… {3 * HALF + 7} bytes are left out …]" in cut
            assert cut.startswith("abc")
            assert cut.endswith(chr(97 + (5 * HALF + 6) % 26))


class TestNothingIsLeft:
    async def test_background_processes_end_with_the_command(self, context: ToolContext, tmp_path: Path) -> None:
        """A command that leaves processes behind returns at once, and they are killed."""
        alive = Alive(tmp_path)
        command = asyncio.create_task(bash(BEGIN, context))
        await asyncio.to_thread(alive.begun)
        assert await command == "[exit code 0]"
        alive.assert_gone()

    async def test_timeout_kills_the_whole_group(
        self, context: ToolContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SIGTERM first, so that a command can clean up; SIGKILL for what ignores it."""
        monkeypatch.setattr(guarded, "TERMINATE_GRACE", 0.2)
        alive = Alive(tmp_path)
        command = asyncio.create_task(bash(f"trap 'echo cleaned; exit' TERM; {BEGIN} wait", context, timeout=1))
        await asyncio.to_thread(alive.begun)
        output = await command
        assert output.startswith("cleaned\n")
        assert output.endswith("[timed out after 1 s: the command and what it started were killed]")
        alive.assert_gone()

    async def test_command_that_ignores_sigterm_is_killed(
        self, context: ToolContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing that a command does about SIGTERM keeps it alive."""
        monkeypatch.setattr(guarded, "TERMINATE_GRACE", 0.2)
        alive = Alive(tmp_path)
        command = asyncio.create_task(bash(f"trap '' TERM; {BEGIN} wait", context, timeout=1))
        await asyncio.to_thread(alive.begun)
        assert "timed out" in await command
        alive.assert_gone()

    async def test_cancelling_kills_the_whole_group(
        self, context: ToolContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cancelled call leaves no process, and is over when the cancellation is reported."""
        monkeypatch.setattr(guarded, "CANCEL_GRACE", 0.2)
        alive = Alive(tmp_path)
        command = asyncio.create_task(bash(f"{BEGIN} wait", context))
        await asyncio.to_thread(alive.begun)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        alive.assert_gone()

    def test_killed_frame_takes_its_commands_along(self, tmp_path: Path, backend: str) -> None:
        """SIGKILL of the process that runs the tool ends the command and everything it started."""
        alive = Alive(tmp_path)
        code = f"""
import asyncio
from understudy.actors.shell import _text, bash
from understudy.actors.tools import ToolContext
from understudy.confinement import Confinement
context = ToolContext(
    session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a", workspace={str(tmp_path)!r},
    confinement=Confinement(backend={backend!r}),
)
asyncio.run(bash({BEGIN + "wait"!r}, context))
"""
        frame = subprocess.Popen([sys.executable, "-c", code])
        alive.begun()
        frame.send_signal(signal.SIGKILL)
        assert frame.wait() == -signal.SIGKILL
        alive.assert_gone()

    async def test_process_that_left_the_group_does_not_hold_up_the_result(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a sandbox, a daemon with the command's output open is out of reach, and not waited for."""
        monkeypatch.setattr(guarded, "DRAIN_SECONDS", 0.05)
        alive = Alive(tmp_path)
        daemon = 'trap "" TERM; exec 9>alive; echo $$ >daemon; echo begun >&9; exec sleep 1000'
        command = asyncio.create_task(bash(f"setsid sh -c '{daemon}' & wait $!", context_of(str(tmp_path)), 1))
        await asyncio.to_thread(alive.begun)
        assert "timed out" in await command
        os.kill(int((tmp_path / "daemon").read_text()), signal.SIGKILL)
        alive.assert_gone()

    async def test_no_descriptor_or_thread_is_leaked(self, context: ToolContext) -> None:
        """Many commands, failing ones too, leave the process as it was."""
        await bash("true", context)
        before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(10):
            await bash("false", context)
        assert len(os.listdir("/proc/self/fd")) == before
        assert threading.active_count() <= threads + 1  # the event loop's own waiter may still be ending


def test_crash_policy_and_schema() -> None:
    """A command in doubt is reported, never run again; its timeout is its own."""
    definition = bash.__understudy_tool__
    assert definition.on_crash == "report"
    assert definition.timeout is not None
    assert definition.timeout > MAX_SECONDS
    assert set(definition.schema["properties"]) == {"command", "timeout"}


async def test_a_command_knows_the_span_of_its_call(tmp_path: Path, backend: str) -> None:
    """`TRACEPARENT` is in its environment, for programs that go on with the trace; without a trace there is none."""
    traced = replace(context_of(str(tmp_path), backend), traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    assert (await bash('echo "<$TRACEPARENT>"', traced)).startswith(f"<{traced.traceparent}>")
    assert (await bash('echo "<$TRACEPARENT>"', context_of(str(tmp_path), backend))).startswith("<>")
