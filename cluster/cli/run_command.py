"""`understudy run`: an agent and its first input, or the next one to its session."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy.config import OFFLINE_MODEL, Settings, redact
from understudy.errors import DeadlineExceeded, InvalidInput, UnderstudyError, UnknownSession
from understudy.events import SessionMigrated
from understudy.identifiers import identifier_problem
from understudy.json_text import jsonable
from understudy.protocol import content_problem
from understudy.records import FAILED_STATUSES
from understudy.workflows import WORKFLOW

from .command import (
    TERMINATED,
    AgentFile,
    Json,
    Key,
    Priority,
    Queue,
    RunId,
    Store,
    Terminated,
    Timeout,
    command,
    connected,
    errors,
    print_json,
)
from .rendering import escape
from .tools_command import known_tools

if TYPE_CHECKING:
    from understudy.queues import QueuePlace
    from understudy.spec import AgentSpec

    from ..client.client import Cluster
    from ..client.results import RunResult
    from ..client.run_handle import Run
    from ..client.session_handle import Session
    from .following import Following, Screen

WAITS = 3
"""Exit code of a command whose run waits for a person's answer."""

OFFLINE = "the model is `offline`, which only echoes: OPENAI_API_KEY, OPENAI_BASE_URL and UNDERSTUDY_MODEL name another"


class SandboxName(StrEnum):
    """The backends of `AgentSpec.sandbox`."""

    auto = "auto"
    bubblewrap = "bubblewrap"
    none = "none"


@command
def run(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to do; `-` reads it from stdin. Default: the file's.")
    ] = None,
    agent: AgentFile = None,
    tool: Annotated[
        list[str] | None,
        typer.Option(
            "--tool",
            "-t",
            help="A built-in tool, a group (`files`), module:function or DISTRIBUTION:NAME. Repeatable.",
            autocompletion=known_tools,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: UNDERSTUDY_MODEL, or `offline` without a key.")] = None,
    instructions: Annotated[str | None, typer.Option(help="The system message.")] = None,
    allow_bash: Annotated[bool, typer.Option("--allow-bash", help="Give it `bash`, in its sandbox.")] = False,
    sandbox: Annotated[
        SandboxName | None, typer.Option(help="In what `bash` runs; `none`: it may do whatever you may.")
    ] = None,
    max_rounds: Annotated[int | None, typer.Option(help="Model calls at most.", min=1, max=10_000)] = None,
    budget_tokens: Annotated[int | None, typer.Option(help="Tokens at most, sub-agents included.", min=1)] = None,
    output_schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON Schema that the answer must fit.", exists=True, dir_okay=False),
    ] = None,
    worktree: Annotated[
        bool, typer.Option("--worktree", help="Work in a git worktree of its own, merged when the run completes.")
    ] = False,
    session: Annotated[str | None, typer.Option(help="Continue this session, or create it under this id.")] = None,
    run_id: RunId = None,
    timeout: Timeout = None,
    queue: Queue = None,
    key: Key = "",
    priority: Priority = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the first request instead of sending it.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Send a prompt to an agent and print its answer.

    The answer goes to stdout, as it comes if that is a terminal; what happens on the way goes to stderr. The session
    stays: --session continues it. A session that exists goes on as what it is, or as the agent that the options
    describe, if there are any. Tools work in the current directory, unless the agent's file names another.

    \b
    understudy run "Summarise README.md" --tool files
    git diff | understudy run - --agent reviewer.toml --timeout 10m
    understudy run "And what is missing?" --session SESSION

    Exit codes: 0 completed, 1 not completed (or not in time), 2 wrong usage, 3 it waits for a person's answer, 130
    interrupted: the run goes on.
    """
    from ..client.agent_options import AgentOptions
    from ..client.queue_handle import queue_place

    options = AgentOptions(
        agent, tuple(tool or ()), model, instructions, allow_bash,
        sandbox.value if sandbox else None, max_rounds, budget_tokens, output_schema, worktree,
    )  # fmt: skip
    spec, text = options.read(Path.cwd())
    content = sys.stdin.read() if prompt == "-" else prompt if prompt is not None else text
    if content is None and not (session and run_id and not dry_run and not options):
        raise InvalidInput('say what to do: understudy run "PROMPT"; to wait for a run: --session and --run-id')
    if run_id is not None and session is None:
        raise InvalidInput("--run-id goes with --session: each session has run ids of its own")
    check(session, run_id, content)  # before there is a session
    if dry_run:
        if session is not None:
            raise InvalidInput("--dry-run shows a new session's first request, without a store: leave out --session")
        from ..client.preview import first_request

        if spec.mcp_servers:
            errors.print("[dim]The tools of MCP servers are not shown: a run asks for them when it begins.[/dim]")
        print_json(first_request(spec, content or "", model=Settings.from_environment(store=store).model))
        return 0
    with connected(store) as cluster:
        waits_in = queue_place(queue, key, priority)
        if waits_in is not None:  # before there is a session
            cluster.queue(waits_in.queue).info()
        handle, sent = _begin(cluster, spec, bool(options), session, content, run_id, waits_in)
        return follow(cluster, handle, sent, timeout=timeout, reads=prompt != "-", store=store, json=json)


def check(session: str | None, run_id: str | None, content: str | None) -> None:
    """Refuse ids and an input that can't be. Raises `InvalidInput`."""
    named = {"--session": session, "--run-id": run_id}
    problems = [identifier_problem(value, name) for name, value in named.items() if value is not None]
    problems += [content_problem(content)] if content is not None else []
    found = [problem for problem in problems if problem is not None]
    if found:
        raise InvalidInput("; ".join(found))


def _begin(
    cluster: Cluster, spec: AgentSpec, described: bool, session: str | None, content: str | None, run_id: str | None,
    waits_in: QueuePlace | None,
) -> tuple[Session, Run]:  # fmt: skip
    """Send the input to the session, which is created if there is none.

    Args:
        described: the options describe the agent; else a session that exists goes on as what it is.
        content: None to follow a run that there is.
    """
    if not described and session is not None:
        handle = cluster.session(session)
        if content is None:
            return handle, handle.run(str(run_id))
        try:
            return handle, handle.send(content, run_id=run_id, queue=waits_in)
        except UnknownSession:
            pass
    seq = _seq(cluster, session)
    handle = cluster.spawn(spec, session_id=session)
    for event in handle.events(seq) if seq is not None else ():
        if isinstance(event, SessionMigrated):
            changed = ", ".join(event.changed or ())
            errors.print(f"[yellow]the session goes on as another agent: {escape(changed)}[/yellow]", soft_wrap=True)
    if (spec.model or cluster._settings.model) == OFFLINE_MODEL:
        errors.print(f"[dim]{OFFLINE}[/dim]", soft_wrap=True)
    return handle, handle.send(content or "", run_id=run_id, queue=waits_in)


def _seq(cluster: Cluster, session: str | None) -> int | None:
    """Where the log of a session ends; None if there is none."""
    try:
        return cluster.session(session).info().seq if session is not None else None
    except UnknownSession:
        return None


def follow(
    cluster: Cluster, session: Session, run: Run, *, timeout: float | None, reads: bool, store: str | None, json: bool,
    kind: type[Following] | None = None,
) -> int:  # fmt: skip
    """Follow a run to its end, or until it waits for people; returns the exit code.

    Args:
        timeout: seconds to wait; the run goes on.
        reads: stdin is not read for something else.
        store: the command's option, for the commands that are suggested.
        kind: what is shown of it; None: what is of any run.
    """
    from .following import Following

    kind = kind or Following
    try:
        return _follow(cluster, session, run, timeout=timeout, reads=reads, store=store, json=json, kind=kind)
    except DeadlineExceeded:
        _say_how_to_go_on(session, run, store, kind)
        raise
    except KeyboardInterrupt as interruption:
        terminated = isinstance(interruption, Terminated)
        said = TERMINATED if terminated else "interrupted"
        errors.print(f"{said}; the run goes on", style="yellow", soft_wrap=True)
        _say_how_to_go_on(session, run, store, kind)
        raise typer.Exit(143 if terminated else 130) from None


def _say_how_to_go_on(session: Session, run: Run, store: str | None, kind: type[Following]) -> None:
    hint("wait for it", kind.command, "--session", session.id, "--run-id", run.run_id, store=store)
    hint("end it", "cancel", session.id, store=store)


def _follow(
    cluster: Cluster, session: Session, run: Run, *, timeout: float | None, reads: bool, store: str | None, json: bool,
    kind: type[Following],
) -> int:  # fmt: skip
    from .following import Screen

    verbose = logging.getLogger().isEnabledFor(logging.INFO)
    screen = Screen(streams=not json and sys.stdout.isatty(), thinks=not json and verbose and errors.is_terminal)
    following = kind(cluster, session, run, screen, interactive=reads and not json and _at_terminal())
    result = following.result(timeout)
    if json:
        print_json(jsonable(result) if result is not None else _waiting(following))
    elif result is not None:
        _end(result, screen)
    if not json:
        if result is None:
            errors.print("[yellow]it waits for an answer[/yellow]; then:", soft_wrap=True)
            hint("go on", kind.command, "--session", session.id, "--run-id", run.run_id, store=store)
        else:
            if result.status in FAILED_STATUSES:
                hint("do it again", "resume", session.id, "--again", store=store)
            hint(*_next(session), store=store)
    return WAITS if result is None or result.pending else 0 if result.ok else 1


def _next(session: Session) -> tuple[str, ...]:
    """What can be done with a session whose run has ended: what for, and the command's words."""
    try:
        if session.info().kind == WORKFLOW:
            return "its steps", "workflow", "status", session.id
    except UnderstudyError:  # the result is there all the same
        pass
    return "continue", "run", "--session", session.id, '"…"'


def _at_terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _waiting(following: Following) -> dict[str, Any]:
    """In the form of a `RunResult`, each question with the session that asks."""
    pending = [{**jsonable(item), "session_id": session_id} for session_id, item in following.left]
    ids = {"run_id": following.run.run_id, "session_id": following.session.id}
    return {"text": "", "status": "waiting_for_input", **ids, "pending": pending}


def _end(result: RunResult, screen: Screen) -> None:
    """The answer, unless it was streamed, and how the run ended."""
    from .following import tokens

    if result.text and not (screen.streams and result.rounds):  # no round: a workflow's, which no model has written
        print(result.text, flush=True)
    if not result.ok:
        reason = (result.error or {}).get("message", "")
        why = "" if reason in screen.last else f" {escape(reason)}"  # a failed model call has just said the same
        errors.print(f"[red]{result.status}[/red]{why}", soft_wrap=True)
    took = f", {tokens(result)}" if result.rounds else ""
    errors.print(f"[dim]session {result.session_id}{took}[/dim]", soft_wrap=True)


def hint(what: str, *words: str, store: str | None) -> None:
    """A command to go on with, as it can be copied."""
    if store is not None and store != os.environ.get("UNDERSTUDY_STORE"):
        words = (*words, "--store", redact(store))
    line = " ".join(word if word == '"…"' else shlex.quote(word) for word in ("understudy", *words))
    errors.print(f"[dim]{what}: {escape(line)}[/dim]", soft_wrap=True)
