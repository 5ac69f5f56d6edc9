"""`understudy workflow`, `signal` and `query`: run workflows, see what they are at, and talk to them."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from understudy.errors import InvalidInput, NotRunning
from understudy.identifiers import identifier_problem

from . import run_command
from .command import Json, Key, Priority, Queue, RunId, SessionId, Store, Timeout, command, connected, print_json
from .rendering import clean, escape, print_pending, styled, when

if TYPE_CHECKING:
    from understudy.reads import RunRecord, WorkflowStatus

    from ..client.results import SessionInfo

app = typer.Typer(help="Run workflows, see what they are at, and check their files.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As the workflow's code names it.")]


@app.callback()
def workflow() -> None:
    """Run workflows, see what they are at, and check their files."""


@app.command()
@command
def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="WORKFLOW",
            help="MODULE:FUNCTION or FILE.py:FUNCTION, with @workflow; or a definition: FILE.yaml, .yml or .json.",
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]…", help="Its inputs. A value is JSON, or a text.")
    ] = None,
    given: Annotated[
        str | None, typer.Option("--input", metavar="JSON", help="An object with its inputs; `-`: from stdin.")
    ] = None,
    agents: Annotated[
        list[Path] | None,
        typer.Option("--agents", help="Of a definition: a file, or a directory of files, of agents; repeatable."),
    ] = None,
    tools: Annotated[
        list[str] | None,
        typer.Option(
            "--tool", "-t", help="Of a definition: a built-in tool, a group, module:function or DISTRIBUTION:NAME."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: UNDERSTUDY_MODEL, or `offline` without a key.")] = None,
    session: Annotated[str | None, typer.Option(help="The id of its session: the same one is created once.")] = None,
    run_id: RunId = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the result.")] = True,
    timeout: Timeout = None,
    queue: Queue = None,
    key: Key = "",
    priority: Priority = 0,
    store: Store = None,
    json: Json = False,
) -> int:
    """Run a workflow and print what it returns; what happens on the way goes to stderr, as `understudy run` does it.

    \b
    understudy workflow run flows.py:review path=src
    understudy workflow run shop.flows:refund --input '{"order": 7}' --session refund-7 --run-id 1
    understudy workflow run review.yaml path=src --agents agents/ --tool review_tools:split

    Exit codes: 0 completed, 1 not completed (or not in time), 2 wrong usage, 3 it waits for a person's answer, 130
    interrupted: the run goes on.
    """
    from ..client.queue_handle import queue_place
    from ..client.workflow_target import arguments_from, find_workflow, input_of

    named = {"--session": session, "--run-id": run_id}
    found = [identifier_problem(value, name) for name, value in named.items() if value is not None]
    if problems := [problem for problem in found if problem is not None]:
        raise InvalidInput("; ".join(problems))
    if run_id is not None and session is None:
        raise InvalidInput("--run-id goes with --session: each session has run ids of its own")
    function = find_workflow(target, Path.cwd(), agents or (), tools or ())
    values = input_of(function, sys.stdin.read() if given == "-" else given, arguments or [])
    positional, keywords = arguments_from(function, values)
    waits_in = queue_place(queue, key, priority)
    with connected(store, model=model) as cluster:
        sent = cluster.workflow(
            function, *positional, session_id=session, run_id=run_id, queue=waits_in, **keywords
        )  # fmt: skip
        handle = cluster.session(sent.session_id)
        if not wait:
            print_json({"session_id": handle.id, "run_id": sent.run_id}) if json else print(handle.id)
            return 0
        return run_command.follow(
            cluster, handle, sent, timeout=timeout, reads=given != "-", store=store, json=json
        )  # fmt: skip


@app.command()
@command
def status(session: SessionId, store: Store = None, json: Json = False) -> int:
    """Show a workflow: its run, the steps that have no result yet, the last results, and what it has published."""
    with connected(store, start=False) as cluster:
        handle = cluster.session(session)
        found, info, runs = handle.workflow_status(), handle.info(), handle.runs()
    current = next((one for one in runs if one.run_id == found.run_id), None)
    if json:
        print_json({"session": info, "run": current, **_data(found)})
    else:
        _print(info, current, found)
    return 0


@command
def signal(
    session: SessionId,
    name: Name,
    payload: Annotated[str, typer.Argument(metavar="JSON", help="What the step returns; `-`: from stdin.")] = "null",
    store: Store = None,
    json: Json = False,
) -> int:
    """Send a workflow an event: `ctx.event(NAME)` returns its payload, now or once the workflow comes to that."""
    data = _json(sys.stdin.read() if payload == "-" else payload)
    with connected(store, start=False) as cluster:
        try:
            waited = cluster.session(session).signal(name, data)
        except NotRunning as error:
            error.hint = f"`understudy workflow status {session}` has how its last run ended."
            raise
    message = "a step waited for it" if waited else "no step waits for it yet: it is kept for the next one"
    print_json({"session_id": session, "name": name, "waited": waited}) if json else print(message)
    return 0


@command
def query(session: SessionId, name: Name, store: Store = None, json: Json = False) -> int:
    """Print the value that a workflow has published last under a name, as JSON; `null` if it has not."""
    with connected(store, start=False) as cluster:
        value = cluster.session(session).query(name)
    print_json({"session_id": session, "name": name, "value": value} if json else value)
    return 0


def _json(text: str) -> Any:
    try:
        return json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the payload is no JSON: {error}; a text is given as '\"a text\"'") from None


def _data(found: WorkflowStatus) -> dict[str, Any]:
    return {"open": found.open, "done": found.done, "published": found.published}


def _print(info: SessionInfo, run: RunRecord | None, found: WorkflowStatus) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(info.name)}[/bold] {info.id} {styled(info.status)}")
    if run is None:
        console.print("it has had no run")
        return
    error = f": {escape(run.error['message'])}" if run.error else ""
    console.print(f"[bold]run[/bold] {run.run_id} {styled(run.status)}{error}", soft_wrap=True)
    _table(
        console, ["open", "step", "state", "since", "arguments"],
        [(step.path, step.tool, step.state, when(step.since), step.arguments) for step in found.open],
    )  # fmt: skip
    print_pending(info.id, info.pending, console)
    _table(
        console, ["done", "step", "outcome", "at", "result"],
        [(step.path, step.tool, step.outcome, when(step.at), step.text) for step in found.done],
    )  # fmt: skip
    for name, value in found.published.items():
        shown = json_text.dumps(value, ensure_ascii=False)
        console.print(f"[bold]published[/bold] {escape(name)} = {escape(shown[:500])}", soft_wrap=True)


def _table(console: Console, names: list[str], rows: list[tuple[str, ...]]) -> None:
    if not rows:
        return
    cells = [[" ".join(clean(cell).split()) for cell in row] for row in [names, *rows]]
    widths = [max(len(row[number]) for row in cells) for number in range(len(names) - 1)]
    room = max(len(names[-1]), console.width - sum(widths) - 2 * len(widths))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, width in zip(names, [*widths, None], strict=True):  # what is short stays whole, paths among it
        table.add_column(name, no_wrap=True, min_width=width, max_width=None if width else room)
    for row in cells[1:]:
        table.add_row(*map(escape, row))
    console.print(table)
