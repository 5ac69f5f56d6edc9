"""`understudy schedules`: what begins runs at times."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from understudy.durations import written
from understudy.errors import InvalidInput
from understudy.json_text import jsonable

from .command import Json, Key, Priority, Queue, Store, command, connected, errors, print_json
from .durations import duration
from .rendering import age, escape

if TYPE_CHECKING:
    from understudy.reads import ScheduleInfo
    from understudy.schedules import Fired
    from understudy.spec import AgentSpec

app = typer.Typer(help="Have something done at times: cron, intervals, once.", no_args_is_help=True)

COLUMNS = ("name", "state", "when", "what", "next", "last", "so far")

COUNTS = ("fired", "triggered", "skipped", "missed", "failed")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The schedule's name; `understudy schedules list` lists them.")
]


class Overlap(StrEnum):
    """What becomes of a due time while the last firing's run has not ended."""

    skip = "skip"
    queue = "queue"
    cancel = "cancel"
    all = "all"


class CatchUp(StrEnum):
    """Which of the due times that passed in an outage fire."""

    latest = "latest"
    all = "all"


@app.callback()
def schedules() -> None:
    """Have something done at times: cron, intervals, once."""


@app.command("list")
@command
def list_(store: Store = None, json: Json = False) -> int:
    """List the schedules, also those that are paused or have ended."""
    with connected(store, start=False) as cluster:
        found = cluster.schedules()
    if json:
        print_json({"schedules": [schedule_wire(schedule) for schedule in found]})
        return 0
    if not found:
        errors.print('no schedules; the first one: understudy schedules create NAME "PROMPT" --cron "0 3 * * *"')
        return 0
    table, now = Table(*COLUMNS, box=None, header_style="bold", pad_edge=False), time.time_ns() // 1000
    for one in found:
        next_at = f"{spoken(one.due_at)}, {_relative(one.due_at, now)}" if one.due_at and not one.paused else ""
        so_far = ", ".join(f"{getattr(one, name)} {name}" for name in COUNTS if getattr(one, name))
        table.add_row(*map(escape, (one.name, one.state, _when(one), _what(one), next_at, _last(one, now), so_far)))
    Console(highlight=False).print(table)
    return 0


@app.command()
@command
def show(name: Name, store: Store = None, json: Json = False) -> int:
    """Show a schedule: when it is due, what it does, and what became of its due times."""
    with connected(store, start=False) as cluster:
        found = cluster.schedule(name).info()
    print_json(schedule_wire(found)) if json else print_schedule(found)
    return 0


@app.command()
@command
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the schedule.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT|NAME=VALUE…]",
            help="The input of each firing (`-`: from stdin), or a workflow's inputs: a value is JSON, or a text.",
        ),
    ] = None,
    agent: Annotated[
        Path | None,
        typer.Option(
            "--agent", "-a", metavar="FILE", help="Each firing has a session of it.", exists=True, dir_okay=False
        ),
    ] = None,
    session: Annotated[str | None, typer.Option(help="Or each is an input to this session.")] = None,
    workflow: Annotated[
        str | None,
        typer.Option(
            "--workflow",
            "-w",
            metavar="WORKFLOW",
            help="Or each runs this workflow: MODULE:FUNCTION, FILE.py:FUNCTION, or a definition's FILE.yaml or .json.",
        ),
    ] = None,
    given: Annotated[
        str | None, typer.Option("--input", metavar="JSON", help="An object with the workflow's inputs; `-`: stdin.")
    ] = None,
    agents: Annotated[
        list[Path] | None,
        typer.Option("--agents", help="Of a definition: a file, or a directory of files, of agents; repeatable."),
    ] = None,
    tools: Annotated[
        list[str] | None,
        typer.Option("--tool", "-t", help="Of a definition: a tool that its steps may name; repeatable."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of the agent, or where a workflow names none.")] = None,
    cron: Annotated[str | None, typer.Option(help='Five fields, or @daily: "0 3 * * 1-5".')] = None,
    zone: Annotated[str, typer.Option(help="The time zone of --cron, and of times without one.")] = "UTC",
    every: Annotated[float | None, duration("At intervals: 30s, 5m, 2h, 1d.")] = None,
    at: Annotated[str | None, typer.Option(help="Once: 2026-12-24T18:00, or with +01:00.")] = None,
    start: Annotated[str | None, typer.Option(help="Nothing is due before.")] = None,
    until: Annotated[str | None, typer.Option(help="Nothing is due after.")] = None,
    jitter: Annotated[float | None, duration("Each firing is late by a part of this: 30s.")] = None,
    overlap: Annotated[
        Overlap, typer.Option(help="While the last firing's run has not ended: skip it, wait, cancel that, or go on.")
    ] = Overlap.skip,
    catch_up: Annotated[
        CatchUp, typer.Option(help="Which of the times that passed in an outage fire.")
    ] = CatchUp.latest,
    window: Annotated[float | None, duration("What is later than this was missed: 1h.")] = None,
    max_firings: Annotated[int | None, typer.Option(help="Then it ends.", min=1)] = None,
    queue: Queue = None,
    key: Key = "",
    priority: Priority = 0,
    store: Store = None,
    json: Json = False,
) -> int:
    """Create a schedule, or replace the one that has the name; the same again changes nothing.

    \b
    understudy schedules create triage --agent triage.toml --cron "0 3 * * 1-5" --zone Europe/Berlin
    understudy schedules create pulse "Anything new?" --session watch-1 --every 5m
    understudy schedules create report --workflow flows.py:review path=src --cron @daily
    """
    from ..client.queue_handle import queue_place

    options: dict[str, Any] = {
        "cron": cron, "zone": zone, "every": every, "at": _moment("--at", at),
        "start": _moment("--start", start), "until": _moment("--until", until),
        "jitter": jitter or 0.0, "overlap": overlap.value, "catch_up": catch_up.value,
        "window": window, "max_firings": max_firings,
        "queue": queue_place(queue, key, priority),
    }  # fmt: skip
    if workflow is None and (given is not None or agents or tools):
        raise InvalidInput("--input, --agents and --tool are a workflow's: name one with --workflow")
    if workflow is not None:
        if agent is not None or session is not None:
            raise InvalidInput("--workflow goes without --agent and --session: each firing has a session of its own")
        what = _of_workflow(workflow, given, words or [], agents or [], tools or [])
    else:
        what = _of_prompt(name, words or [], agent, session, model)
    with connected(store, model=model if workflow is not None else None) as cluster:
        found = cluster.schedule(name, **what, **options).info()
    print_json(schedule_wire(found)) if json else print_schedule(found)
    return 0


def _of_workflow(
    target: str, given: str | None, pairs: list[str], agents: list[Path], tools: list[str]
) -> dict[str, Any]:  # fmt: skip
    """The workflow of each firing, with its input."""
    from ..client.workflow_target import find_workflow, input_of

    function = find_workflow(target, Path.cwd(), agents, tools)
    return {"workflow": function, "input": input_of(function, sys.stdin.read() if given == "-" else given, pairs)}


def _of_prompt(
    name: str, words: list[str], agent: Path | None, session: str | None, model: str | None
) -> dict[str, Any]:  # fmt: skip
    """The input of each firing, with the agent of its session or the session that gets it."""
    if len(words) > 1:
        raise InvalidInput(f"one PROMPT is taken, in quotes, and not {len(words)}; NAME=VALUE is for --workflow")
    if session is not None and (agent or model):
        raise InvalidInput("--session goes without --agent and --model: the session is of its agent")
    spec, text = _agent(agent, model) if session is None else (None, None)
    content = text if not words else sys.stdin.read() if words[0] == "-" else words[0]
    if content is None:
        raise InvalidInput(f'say what to do: understudy schedules create {name} "PROMPT"')
    return {"content": content, "agent": spec, "session": session}


@app.command()
@command
def pause(name: Name, store: Store = None, json: Json = False) -> int:
    """Let a schedule's times pass without a firing."""
    with connected(store, start=False) as cluster:
        done = cluster.schedule(name).pause()
    print_json({"paused": done}) if json else print("paused" if done else "it was paused already")
    return 0


@app.command()
@command
def resume(name: Name, store: Store = None, json: Json = False) -> int:
    """Let a paused schedule fire again, from its next time on."""
    with connected(store, start=False) as cluster:
        done = cluster.schedule(name).resume()
    print_json({"resumed": done}) if json else print("resumed" if done else "it was not paused")
    return 0


@app.command()
@command
def trigger(name: Name, store: Store = None, json: Json = False) -> int:
    """Fire a schedule now, beside its times."""
    with connected(store, start=False) as cluster:
        done = cluster.schedule(name).trigger()
    return print_fired(done, json=json)


@app.command()
@command
def delete(name: Name, store: Store = None, json: Json = False) -> int:
    """Delete a schedule; what it has begun goes on."""
    with connected(store, start=False) as cluster:
        done = cluster.schedule(name).delete()
    print_json({"deleted": done}) if json else print("deleted" if done else "there was none")
    return 0


def print_fired(done: Fired, *, json: bool) -> int:
    """Print what came of a firing that was asked for beside the due times; the exit code."""
    if json:
        print_json(jsonable(done))
    elif done.outcome == "fired":
        print(f"session {done.session_id}, run {done.run_id}")
    else:
        errors.print(f"[red]{done.outcome}[/red] {escape(done.problem)}", soft_wrap=True)
    return 0 if done.outcome == "fired" else 1


def _agent(file: Path | None, model: str | None) -> tuple[AgentSpec, str | None]:
    """The agent of each firing's session, and the input that its file has."""
    from ..client.agent_options import AgentOptions

    return AgentOptions(file, model=model).read(Path.cwd())


def _moment(option: str, given: str | None) -> datetime | None:
    if given is None:
        return None
    try:
        return datetime.fromisoformat(given)
    except ValueError:
        raise InvalidInput(f"{option} is {given!r}, and must be a time: 2026-12-24T18:00, or with +01:00") from None


def spoken(moment: int) -> str:
    """A time as it is on this machine."""
    return datetime.fromtimestamp(moment / 1e6, UTC).astimezone().isoformat(" ", "seconds")


def _relative(moment: int, now: int) -> str:
    """`in 2h10m`, `5.0s ago`."""
    return f"in {age(moment - now)}" if moment > now else f"{age(now - moment)} ago"


def _last(found: ScheduleInfo, now: int) -> str:
    """What became of the last due time, and of the last firing's run."""
    parts = []
    if found.last_at:
        parts.append(f"{'not fired' if found.problem else 'fired'} {_relative(found.last_at, now)}")
    if found.last_run:
        parts.append(f"run {found.last_status or 'removed'}")
    return ", ".join(parts)


def _when(found: ScheduleInfo) -> str:
    if found.cron:
        return f"{found.cron} {found.zone}"
    return f"every {written(found.every)}" if found.every else f"at {spoken(found.at)}"


def _what(found: ScheduleInfo) -> str:
    if found.session_id:
        return f"session {found.session_id}"
    return f"workflow {found.workflow}" if found.workflow else f"a session of {found.agent}"


def schedule_wire(found: ScheduleInfo) -> dict[str, Any]:
    """A schedule as JSON."""
    return {**jsonable(found), "state": found.state}


def print_schedule(found: ScheduleInfo) -> None:
    """A schedule for a person."""
    console = Console(highlight=False)

    def say(what: str, text: str) -> None:
        console.print(f"[bold]{what:<10}[/bold] {escape(text)}", soft_wrap=True)

    say("schedule", f"{found.name} ({found.state})")
    say("when", _when(found) + (f", within {written(found.jitter)}" if found.jitter else ""))
    now = time.time_ns() // 1000
    for what, moment in (("start", found.start), ("until", found.until), ("next", found.due_at)):
        if moment:
            say(what, f"{spoken(moment)}, {_relative(moment, now)}")
    say("input", str(found.content)[:500])
    say("what", _what(found))
    window = f", not later than {written(found.window)}" if found.window else ""
    ends = f", {found.max_firings} times" if found.max_firings else ""
    if found.memory:
        say("loop", "each firing receives what became of those before it")
    if found.queue:
        key = f", key {found.key}" if found.key else ""
        say("queue", f"{found.queue}{key}" + (f", priority {found.priority}" if found.priority else ""))
    say("rules", f"overlap {found.overlap}, catch-up {found.catch_up}{window}{ends}")
    say("so far", ", ".join(f"{getattr(found, name)} {name}" for name in COUNTS))
    if last := _last(found, now):
        say("last", last)
    if found.last_run:
        say("last run", f"session {found.last_session}, run {found.last_run}")
    if found.problem:
        say("problem", found.problem)
