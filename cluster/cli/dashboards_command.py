"""`understudy dashboards`: the command. Needs neither Ray nor a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from understudy.errors import InvalidInput, OutputFailed

from .command import Json, command, print_json


@command
def dashboards(
    directory: Annotated[Path, typer.Argument(help="Where to write them; made if it is missing.", file_okay=False)],
    runbook: Annotated[
        str | None, typer.Option(metavar="URL", help="Where your copy of docs/alerts.md is, for the alerts' links.")
    ] = None,
    cost_per_hour: Annotated[
        float | None,
        typer.Option(metavar="AMOUNT", help="Above it UnderstudySpending fires; in the price table's currency.", min=0),
    ] = None,
    json: Json = False,
) -> int:
    """Write the Grafana dashboards and the Prometheus alert rules: fleet.json, session-tree.json, alerts.yaml.

    Files of these names are replaced. Point Grafana's dashboard provisioning and Prometheus' rule_files at them
    (docs/dashboards.md).
    """
    from understudy.observability.dashboards.alerts import COST_PER_HOUR, RUNBOOK
    from understudy.observability.dashboards.files import built, write

    if runbook is not None and not re.fullmatch(r"https?://[^\s#]+", runbook):
        raise InvalidInput(f"{runbook!r} is no URL of a page: it must be http://… or https://…, without spaces and #")
    try:
        files = built(runbook or RUNBOOK, COST_PER_HOUR if cost_per_hour is None else cost_per_hour)
        written = [str(path) for path in write(directory, files)]
    except OSError as error:
        raise OutputFailed(f"{error.filename or directory} can't be written: {error.strerror}") from None
    if json:
        print_json({"files": written})
    else:
        print("\n".join(written))
    return 0
