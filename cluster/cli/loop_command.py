"""`understudy loop`: a task that is done again and again, each time knowing what became of it before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.config import OFFLINE_MODEL
from understudy.errors import InvalidInput
from understudy.json_text import jsonable
from understudy.loops import loop_name

from .command import AgentFile, Json, Key, Priority, Queue, Store, command, connected, errors, print_json
from .durations import duration
from .rendering import escape
from .run_command import OFFLINE, follow, hint
from .schedules_command import print_schedule, schedule_wire
from .tools_command import known_tools

if TYPE_CHECKING:
    from ..client.client import Cluster
    from ..client.schedule_handle import Schedule


@command
def loop(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="What to do; `-` reads it from stdin. Default: the file's.")
    ] = None,
    every: Annotated[float | None, duration("How often: 30s, 5m, 2h, 1d.", least=1.0)] = None,
    cron: Annotated[str | None, typer.Option(help='Or five fields, or @daily: "0 3 * * 1-5".')] = None,
    zone: Annotated[str, typer.Option(help="The time zone of --cron.")] = "UTC",
    name: Annotated[str | None, typer.Option(help="Of the loop. Default: made of the task.")] = None,
    agent: AgentFile = None,
    tool: Annotated[
        list[str] | None,
        typer.Option("--tool", "-t", help="As for `understudy run`. Repeatable.", autocompletion=known_tools),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of the agent.")] = None,
    budget_tokens: Annotated[int | None, typer.Option(help="Tokens of each firing at most.", min=1)] = None,
    queue: Queue = None,
    key: Key = "",
    priority: Priority = 0,
    once: Annotated[bool, typer.Option("--once", help="Fire it now as well, and follow that run to its end.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Have a task done again and again, each time in a new session that knows what became of it before.

    A loop is a schedule: `understudy schedules` lists, pauses and deletes it. The same definition again changes
    nothing. Runs that fail go to `understudy triage`.

    \b
    understudy loop "Look at the new issues" --every 2h --agent triage.toml
    understudy loop "Are the links alive?" --cron "0 3 * * *" --zone Europe/Berlin --tool files --once

    Exit codes with --once: those of `understudy run`, and 1 if the last firing's run has not ended.
    """
    from ..client.agent_options import AgentOptions
    from ..client.queue_handle import queue_place

    options = AgentOptions(agent, tuple(tool or ()), model, budget_tokens=budget_tokens)
    spec, text = options.read(Path.cwd())
    content = sys.stdin.read() if task == "-" else task if task is not None else text
    if content is None:
        raise InvalidInput('say what to do: understudy loop "TASK" --every 5m')
    if (every is None) == (cron is None):
        raise InvalidInput("say how often, by --every 5m or by --cron: one of the two")
    with connected(store) as cluster:
        schedule = cluster.schedule(
            name or loop_name(content), content, agent=spec, every=every, cron=cron, zone=zone, memory=True,
            queue=queue_place(queue, key, priority),
        )  # fmt: skip
        if not json and (spec.model or cluster._settings.model) == OFFLINE_MODEL:
            errors.print(f"[dim]{OFFLINE}[/dim]", soft_wrap=True)
        if once:
            return _once(cluster, schedule, store, json, reads=task != "-")
        found = schedule.info()
    if json:
        print_json(schedule_wire(found))
        return 0
    print_schedule(found)
    _say_how_to_go_on(schedule, store)
    return 0


def _once(cluster: Cluster, schedule: Schedule, store: str | None, json: bool, *, reads: bool) -> int:
    done = schedule.trigger()
    if done.outcome == "fired":
        session = cluster.session(done.session_id)
        code = follow(cluster, session, session.run(done.run_id), timeout=None, reads=reads, store=store, json=json)
        if not json:
            _say_how_to_go_on(schedule, store)
        return code
    if json:
        print_json(jsonable(done))
    errors.print(f"[red]{done.outcome}[/red] {escape(done.problem)}", soft_wrap=True)
    return 1


def _say_how_to_go_on(schedule: Schedule, store: str | None) -> None:
    hint("how it stands", "schedules", "show", schedule.name, store=store)
    hint("end it", "schedules", "delete", schedule.name, store=store)
    hint("what it knows", "state", "show", schedule.name, store=store)
    hint("what has failed", "triage", store=store)
