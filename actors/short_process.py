"""A Python program in a short process of its own: what can't be given up within a frame, since it does not let go."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE

from understudy.child_process import ChildProcess
from understudy.errors import ToolError


def import_path() -> list[str]:
    """Where such a program finds the modules of this process."""
    return [entry for entry in sys.path if Path(entry).is_absolute()]


async def output_of(
    program: str, request: bytes, *, too_long: str, failed: str, environment: Mapping[str, str] | None = None
) -> bytes:
    """What a program writes, which is sent a request. It ends with the call at the latest.

    Args:
        program: it has an alarm of its own (SIGALRM), which ends it even if this process is gone.
        too_long: what is said if that went off.
        failed: what is said before the end of its standard error if it failed.
        environment: all variables that it has; None for those of this process.

    Raises:
        ToolError: it took too long, or failed.
    """
    # -I: nothing is imported from the current directory, nor from where PYTHONPATH points.
    process = ChildProcess(
        (sys.executable, "-I", "-c", program), stdin=PIPE, stdout=PIPE, stderr=PIPE, directory="/",
        environment=environment,
    )  # fmt: skip
    try:
        output, errors = await process.communicate(request)
    finally:
        await process.end()
    if process.returncode == -signal.SIGALRM:
        raise ToolError(too_long)
    if process.returncode:
        raise ToolError(f"{failed}: {errors.decode(errors='replace').strip()[-300:]}")
    return output
