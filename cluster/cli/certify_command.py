"""`understudy certify`: the command. Needs neither Ray nor a cluster."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from understudy.errors import InvalidInput

from .command import Json, command, errors, print_json
from .durations import duration
from .store_commands import progress

if TYPE_CHECKING:
    from ..certify.runs import Certificate, Request

RUN_SECONDS = 600.0
"""So long a run may take, unless `--timeout` says otherwise."""

DONE_OUTSIDE = (
    "What these tools do outside the agent's workspace is really done, once in every run, and again where a call is "
    "run again"
)


@command
def certify(
    file: Annotated[Path, typer.Argument(metavar="AGENT", help="agent.toml or .json.", exists=True, dir_okay=False)],
    input: Annotated[str | None, typer.Option("--input", "-i", help="What to send it; default: the file's.")] = None,
    points: Annotated[int | None, typer.Option(help="Runs with a death, evenly spread; default: all.", min=1)] = None,
    only: Annotated[str | None, typer.Option(metavar="TOOL", help="Interrupt calls of this tool only.")] = None,
    timeout: Annotated[float, duration("For each run.", least=0.1, default=RUN_SECONDS)] = RUN_SECONDS,
    keep: Annotated[Path | None, typer.Option(help="Keep stores, workspaces and the report there.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Tools may act outside the workspace, many times.")] = False,
    json: Json = False,
) -> int:
    """Kill your agent at each of its commit points, and say which of its tools are not safe to rerun.

    The first run is undisturbed and asks the model; all others replay its answers, so only the first is paid for. Each
    of them works in a fresh copy of the workspace, and one SIGKILL hits it: before a commit, after one, when a tool
    begins, or after its effect.

    What is seen are results, the transcript and the workspace. What tools do elsewhere is not seen, and really done
    each time.

    Exit codes: 0 nothing found, 1 findings, 2 wrong usage or specification, 130 interrupted.
    """
    from ..certify import report as certify_report
    from ..certify.runs import reaches_outside, requested
    from ..client.agent_file import read_agent

    request = requested(read_agent(file), input, points=points, only=only, timeout=timeout)
    outside = reaches_outside(request.spec)
    if outside and not yes and not _confirmed(outside, as_json=json):
        return 1
    try:
        found = asyncio.run(_certified(request, keep, quiet=json))
    except KeyboardInterrupt:
        errors.print("interrupted; nothing goes on")
        raise typer.Exit(130) from None
    if json:
        print_json(found.to_json())
    else:
        certify_report.show(found)
    return 0 if found.ok else 1


async def _certified(request: Request, keep: Path | None, *, quiet: bool) -> Certificate:
    from ..certify.runs import Certification, scratch

    def shown(label: str, total: int | None) -> AbstractContextManager[Any]:
        return progress(label, total, quiet=quiet)

    with scratch(keep) as directory:
        return await Certification(request, directory, keep=keep is not None, progress=shown).certify()


def _confirmed(tools: list[str], *, as_json: bool) -> bool:
    what = f"{', '.join(tools)} will be executed many times. {DONE_OUTSIDE}"
    if as_json or not sys.stdin.isatty():
        raise InvalidInput(f"{what}: say --yes if that is harmless")
    errors.print(f"{escape(what)}.", soft_wrap=True)
    return typer.confirm("Go on?", err=True)
