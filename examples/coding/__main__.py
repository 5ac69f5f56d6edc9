"""`python -m understudy.examples.coding`: the example as a command."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.cluster.cli.command import Commands, Json, Store, command, connected, print_json

if TYPE_CHECKING:
    from .job import CodingOutcome

app = typer.Typer(
    cls=Commands, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


@app.command()
@command
def coding(
    directory: Annotated[Path | None, typer.Argument(help="Where the repository is made: a new or empty one.")] = None,
    kills: Annotated[int, typer.Option(help="SIGKILL so many session actors on the way.", min=0, max=100)] = 0,
    seed: Annotated[int, typer.Option(help="Of the choice of moments.")] = 0,
    model: Annotated[str | None, typer.Option(help="Default: UNDERSTUDY_MODEL, or `offline` without a key.")] = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Have a coding agent mend a git repository whose tests fail, with its shell in a sandbox."""
    from .job import mend

    # The offline model answers at once unless it is slowed down; with some latency there is time to kill somebody.
    os.environ.setdefault("UNDERSTUDY_OFFLINE_LATENCY", "0.4")
    place = (directory or Path(tempfile.mkdtemp(prefix="understudy-coding-"))).resolve()
    with connected(store, model=model) as cluster:
        outcome = mend(cluster, place, kills=kills, seed=seed, model=model)
    if json:
        print_json({**dataclasses.asdict(outcome), "directory": str(place), "good": outcome.is_good})
    else:
        print("\n".join(f"{name:<28}{value}" for name, value in rows(outcome, place)))
    return 0 if outcome.is_good else 1


def rows(outcome: CodingOutcome, place: Path) -> list[tuple[str, str]]:
    """What happened, as names and values."""
    times, judged = outcome.restore_ms, outcome.judgement
    restored = f"{median(times):.0f} ms median, {max(times):.0f} ms longest" if times else "none"
    return [
        ("repository", str(place)),
        ("answer", outcome.text),
        ("tests", "pass" if judged.passes else "FAIL"),
        ("commits", f"{judged.commits}{'' if judged.clean else ', and changes that are not committed'}"),
        ("actors killed on purpose", f"{outcome.killed} of {outcome.wanted}"),
        ("restore times", restored),
        ("tokens", f"{outcome.tokens:,}"),
        ("tokens re-billed", f"{outcome.tokens_redone:,}"),
        ("tool calls", f"{outcome.tool_calls}, of which {outcome.interrupted} were cut off"),
        ("tool calls repeated", f"{outcome.tool_calls_repeated}"),
        ("messages lost", f"{outcome.messages_lost}"),
        ("time", f"{outcome.seconds:.1f} s"),
    ]


if __name__ == "__main__":
    app(prog_name="python -m understudy.examples.coding")
