"""`python -m understudy.examples.survey`: the example as a command, which `make demo` calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from understudy.cluster.cli.command import Commands, Json, Store, command, connected, print_json

app = typer.Typer(
    cls=Commands, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


@app.command()
@command
def survey(
    directory: Annotated[Path, typer.Argument(help="What to survey.", exists=True, file_okay=False)] = Path("."),
    chaos: Annotated[int, typer.Option(help="SIGKILL so many session actors on the way.", min=0, max=100)] = 0,
    seed: Annotated[int, typer.Option(help="Of the choice of victims.")] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the report with one computed directly.")] = False,
    model: Annotated[str | None, typer.Option(help="Default: UNDERSTUDY_MODEL, or `offline` without a key.")] = None,
    session: Annotated[str | None, typer.Option(help="Session id: the same one is not surveyed twice.")] = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Survey a directory with a tree of agents: a lead, and a surveyor for each part."""
    from .job import run_survey
    from .view import SurveyView, outcome_to_json

    # The offline model answers at once unless configured otherwise; with some latency there is a tree to watch.
    os.environ.setdefault("UNDERSTUDY_OFFLINE_LATENCY", "0.4")
    with connected(store, model=model) as cluster, SurveyView(quiet=json) as view:
        outcome = run_survey(
            cluster, directory.resolve(), chaos=chaos, seed=seed, session_id=session, on_update=view.update
        )
    matches = None
    if verify:
        from .tools import survey_directly

        matches = survey_directly(str(directory.resolve())) == outcome.report
    if json:
        print_json({**outcome_to_json(outcome), **({"verified": matches} if verify else {})})
    else:
        view.finish(outcome)
        if verify:
            print(f"report equals a direct computation: {'yes' if matches else 'NO'}")
    return 0 if outcome.status == "completed" and matches is not False else 1


if __name__ == "__main__":
    app(prog_name="python -m understudy.examples.survey")
