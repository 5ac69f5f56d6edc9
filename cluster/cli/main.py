"""The command line. The words are those of the API; `--json` prints one JSON document on stdout and nothing else.

Exit codes: 0 done, 1 the run or check failed or the store refused, 2 wrong usage or configuration, 3 the run waits for
a person's answer, 130 interrupted, 143 ended by SIGTERM.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.errors import InvalidInput

from . import (
    agents_command,
    approve_command,
    certify_command,
    console_command,
    dashboards_command,
    goal_command,
    loop_command,
    mcp_command,
    notes_command,
    queues_command,
    rendering,
    run_command,
    schedules_command,
    state_command,
    steering_commands,
    store_commands,
    tools_command,
    top_command,
    trace_command,
    triage_command,
    up_command,
    workflow_command,
    workflow_files_command,
    worktrees_command,
)
from .command import (
    Commands,
    Json,
    Key,
    Priority,
    Queue,
    RunId,
    SessionId,
    Store,
    Timeout,
    command,
    connected,
    print_json,
)
from .durations import duration

if TYPE_CHECKING:
    from understudy.reads import DrainInfo

DRAIN_SECONDS = 600.0
"""So long a drain may take, unless `--timeout` says otherwise."""

app = typer.Typer(
    name="understudy",
    help="LLM agents as supervised Ray actors: sessions that survive kill -9.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(run_command.run)
app.command()(goal_command.goal)
app.command()(mcp_command.mcp)
app.add_typer(agents_command.app, name="agents")
app.add_typer(tools_command.app, name="tools")
app.command()(loop_command.loop)
app.add_typer(schedules_command.app, name="schedules")
app.add_typer(worktrees_command.app, name="worktrees")
app.add_typer(triage_command.app, name="triage")
app.add_typer(state_command.app, name="state")
app.add_typer(queues_command.app, name="queues")
app.add_typer(store_commands.app, name="store")
app.command()(certify_command.certify)
app.command()(approve_command.approve)
app.command()(approve_command.reject)
app.command()(top_command.top)
app.command()(console_command.console)
app.command()(trace_command.trace)
app.command()(notes_command.notes)
app.command()(dashboards_command.dashboards)
app.command()(up_command.up)
app.command()(steering_commands.steer)
app.command()(steering_commands.fork)
workflow_command.app.command()(workflow_files_command.check)
workflow_command.app.command()(workflow_files_command.schema)
app.add_typer(workflow_command.app, name="workflow")
app.command()(workflow_command.signal)
app.command()(workflow_command.query)


def _print_version(wanted: bool) -> None:
    if wanted:
        import understudy

        print(understudy.__version__)
        raise typer.Exit


@app.callback()
def main_options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say on stderr what happens.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """LLM agents as supervised Ray actors: sessions that survive kill -9."""
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, stream=sys.stderr)


@app.command()
@command
def send(
    session: SessionId,
    text: Annotated[str, typer.Argument(help="The input; `-` reads it from stdin.")],
    run_id: RunId = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the answer.")] = True,
    timeout: Timeout = None,
    queue: Queue = None,
    key: Key = "",
    priority: Priority = 0,
    store: Store = None,
    json: Json = False,
) -> int:
    """Send an input to a session, and follow its run as `understudy run` does."""
    content = sys.stdin.read() if text == "-" else text
    with connected(store) as cluster:
        handle = cluster.session(session)
        sent = handle.send(content, run_id=run_id, queue=queue, key=key, priority=priority)
        if not wait:
            print_json({"session_id": session, "run_id": sent.run_id}) if json else print(sent.run_id)
            return 0
        return run_command.follow(cluster, handle, sent, timeout=timeout, reads=text != "-", store=store, json=json)


@app.command()
@command
def ps(
    all: Annotated[bool, typer.Option("--all", "-a", help="Also those that have nothing to do.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    store: Store = None,
    json: Json = False,
) -> int:
    """List sessions and the processes of the cluster."""
    with connected(store, start=False) as cluster:
        sessions = cluster.sessions(live_only=not all, limit=limit)
        services = cluster.services()
    if json:
        print_json({"sessions": sessions, "services": services})
    else:
        rendering.print_sessions(sessions, services, live_only=not all)
    return 0


@app.command()
@command
def tree(session: SessionId, store: Store = None, json: Json = False) -> int:
    """Show a session and all below it."""
    with connected(store, start=False) as cluster:
        found = cluster.session(session).tree()
    print_json(found) if json else rendering.print_tree(found)
    return 0


@app.command()
@command
def show(session: SessionId, store: Store = None, json: Json = False) -> int:
    """Show a session: its state, budgets, runs and messages, and what it and its sub-agents ask people."""
    with connected(store, start=False) as cluster:
        handle = cluster.session(session)
        info, runs, messages, pending = handle.info(), handle.runs(), handle.messages(), handle.pending()
        wakeups, budgets = handle.wakeups(), handle.budgets()
        below = {other.id: other.pending for other in handle.tree() if other.id != info.id and other.pending}
    if json:
        wire = [message.to_wire() for message in messages]
        found = {"session": info, "runs": runs, "messages": wire}
        more = {"pending": pending, "pending_below": below, "wakeups": wakeups, "budgets": budgets}
        print_json({**found, **more})
    else:
        rendering.print_session(info, runs, messages, {info.id: pending, **below}, wakeups, budgets)
    return 0


@app.command()
@command
def events(
    session: SessionId,
    after: Annotated[int, typer.Option(help="Only those after this seq.", min=0)] = 0,
    store: Store = None,
    json: Json = False,
) -> int:
    """Print a session's event log."""
    with connected(store, start=False) as cluster:
        found = cluster.session(session).events(after)
    print_json([event.to_wire() for event in found]) if json else rendering.print_events(found)
    return 0


@app.command()
@command
def cancel(
    session: SessionId,
    run_id: Annotated[str | None, typer.Option(help="A queued run; default: the current one.")] = None,
    reason: Annotated[str, typer.Option()] = "cancelled from the command line",
    store: Store = None,
    json: Json = False,
) -> int:
    """Ask a session's run to end, and all that it spawned."""
    with connected(store, start=False) as cluster:
        handle = cluster.session(session)
        done = handle.run(run_id).cancel(reason) if run_id else handle.cancel(reason)
    if json:
        print_json({"cancelled": done})
    else:
        print("it is asked to end" if done else "nothing to cancel")
    return 0


@app.command()
@command
def answer(
    session: SessionId,
    call: Annotated[str, typer.Argument(metavar="CALL", help="The call that asks; `understudy show` lists them.")],
    text: Annotated[str, typer.Argument(help="Its result, as the model will read it; `-` reads it from stdin.")] = "",
    rerun: Annotated[bool, typer.Option("--rerun", help="A call in doubt: run it again.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="It failed; the text says why.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Answer a tool call that waits for a person."""
    said = sys.stdin.read() if text == "-" else text
    with connected(store, start=False) as cluster:
        new = cluster.session(session).answer(call, said, rerun=rerun, failed=failed)
    print_json({"accepted": True, "new": new}) if json else print("answered" if new else "it was answered so before")
    return 0


@app.command("abort-pending")
@command
def abort_pending(
    session: SessionId,
    call: Annotated[str | None, typer.Argument(metavar="CALL", help="Default: all that wait.")] = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Give up the tool calls of a session that wait for a person, and let its run go on."""
    with connected(store, start=False) as cluster:
        found = cluster.session(session).abort_pending(call)
    print_json({"aborted": found}) if json else print(f"given up: {', '.join(found) or 'nothing'}")
    return 0


@app.command()
@command
def resume(
    session: SessionId,
    again: Annotated[
        bool, typer.Option("--again", help="And send the input of its last run again, if that did not complete.")
    ] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Let a quarantined session take input again; its runs stay ended."""
    with connected(store, start=False) as cluster:
        if again:
            run = cluster.session(session).run_again()
            message = f"sent again as run {run.run_id}" if run else "its last run goes on, completed, or was cancelled"
            print_json({"run_id": run.run_id if run else None}) if json else print(message)
            return 0
        done = cluster.session(session).resume()
    print_json({"resumed": done}) if json else print("it takes input again" if done else "it was not quarantined")
    return 0


@app.command()
@command
def close(session: SessionId, store: Store = None, json: Json = False) -> int:
    """Close a session: it takes no more input, and what runs is cancelled."""
    with connected(store, start=False) as cluster:
        done = cluster.session(session).close("closed from the command line")
    print_json({"closed": done}) if json else print("closed" if done else "it was closed already")
    return 0


@app.command()
@command
def drain(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Ray node id, or its beginning (`ps --json`).")
    ] = None,
    timeout: Annotated[float, duration("What is left then moves the hard way.", default=DRAIN_SECONDS)] = DRAIN_SECONDS,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until nothing is left there.")] = True,
    undo: Annotated[bool, typer.Option("--undo", help="Take it back: the node gets sessions again.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Park everything, on all nodes, and end the services.")] = False,
    here: Annotated[
        bool, typer.Option("--here", help="The node that this runs at, for all stores: for a pod's preStop hook.")
    ] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Move a node's sessions elsewhere before the node goes: each finishes its tools or its model call first.

    Until the timeout no tool is cut off and model calls in flight are waited for. Without NODE: show what is drained.
    """
    if here:
        if node is not None or undo or stop:
            raise InvalidInput("--here goes with --timeout and --no-wait only")
        from ..ray.leaving import drain_here

        return _print_drains(drain_here(timeout, wait=wait), ok=not wait, json=json)
    with connected(store, start=False) as cluster:
        if undo and node is not None:
            done = cluster.undrain(node)
            print_json({"undone": done}) if json else print("taken back" if done else "it was not drained")
            return 0 if done else 1
        listed = node is None and not stop
        drains = cluster.drains() if listed else cluster.drain(node, timeout, wait=wait, stop=stop)
    return _print_drains(drains, ok=listed or not wait, json=json)


def _print_drains(drains: list[DrainInfo], *, ok: bool, json: bool) -> int:
    """Print how drains stand; returns the exit code."""
    if json:
        print_json({"drains": drains})
    else:
        rendering.print_drains(drains)
    return 0 if ok or all(drain.finished_at for drain in drains) else 1


@app.command()
@command
def doctor(store: Store = None, json: Json = False) -> int:
    """Check what Understudy needs, without starting anything."""
    from .doctor import examine

    checks = examine(store)
    if json:
        print_json({"ok": all(c.ok for c in checks), "checks": checks})
    else:
        rendering.print_checks(checks)
    return 0 if all(check.ok for check in checks) else 1


@app.command()
@command
def down(
    keep_ray: Annotated[bool, typer.Option(help="End the services only.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """End the services of this store, and Ray if Understudy started it and it serves no other store.

    Unfinished runs go on with the next start.
    """
    from ..ray.down import bring_down

    done = bring_down(store, keep_ray=keep_ray)
    if json:
        print_json(done)
    else:
        print(f"services: {done['services']}; Ray: {done['ray']}")
    return 0
