"""`understudy goal`: an agent works until an independent evaluator says that a condition holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.errors import InvalidInput
from understudy.workflows import GOAL_ROUNDS, MOST_GOAL_ROUNDS

from . import run_command
from .command import AgentFile, Json, Key, Priority, Queue, RunId, Store, Timeout, command, connected, print_json
from .tools_command import known_tools

if TYPE_CHECKING:
    from understudy.spec import AgentSpec, Budget


@command
def goal(
    condition: Annotated[
        str | None, typer.Argument(metavar="CONDITION", help="What must hold; an evaluator judges by it.")
    ] = None,
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="What to do; `-` reads it from stdin. Default: the file's.")
    ] = None,
    max_rounds: Annotated[
        int, typer.Option(help="Rounds at most: each is the agent's work and a verdict.", min=1, max=MOST_GOAL_ROUNDS)
    ] = GOAL_ROUNDS,
    agent: AgentFile = None,
    tool: Annotated[
        list[str] | None,
        typer.Option(
            "--tool",
            "-t",
            help="Of the agent: a built-in tool, a group (`files`), module:function or DISTRIBUTION:NAME. Repeatable.",
            autocompletion=known_tools,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: UNDERSTUDY_MODEL, or `offline` without a key.")] = None,
    instructions: Annotated[str | None, typer.Option(help="The agent's system message.")] = None,
    allow_bash: Annotated[bool, typer.Option("--allow-bash", help="Give it `bash`, in its sandbox.")] = False,
    sandbox: Annotated[
        run_command.SandboxName | None, typer.Option(help="In what `bash` runs; `none`: it may do whatever you may.")
    ] = None,
    worktree: Annotated[
        bool, typer.Option("--worktree", help="Work in a git worktree, which is merged once the condition holds.")
    ] = False,
    evaluator: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The evaluator, as an agent's file.", exists=True, dir_okay=False),
    ] = None,
    evaluator_model: Annotated[str | None, typer.Option(help="The evaluator's model. Default: the agent's.")] = None,
    budget_tokens: Annotated[int | None, typer.Option(help="Tokens at most, for all rounds together.", min=1)] = None,
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
    """Have an agent work on a task until a condition holds, and print the answer that met it.

    After each round an evaluator, in a session of its own, says whether the condition holds; its reason begins the
    next round. Rounds and verdicts go to stderr. Without CONDITION and TASK, --session and --run-id follow a goal that
    there is.

    \b
    understudy goal "pytest passes" "Mend the tests" --tool files --allow-bash --worktree
    understudy goal "every claim has a source" - --agent writer.md --evaluator critic.md --max-rounds 3
    understudy goal --session SESSION --run-id RUN

    Exit codes: 0 the condition holds, 1 it does not after all rounds, or nobody knows (or not in time), 2 wrong usage,
    3 it waits for a person's answer, 130 interrupted: the run goes on.
    """
    from ..client.agent_options import AgentOptions
    from ..client.queue_handle import queue_place
    from .goal_following import GoalFollowing

    if run_id is not None and session is None:
        raise InvalidInput("--run-id goes with --session: each session has run ids of its own")
    options = AgentOptions(
        agent, tuple(tool or ()), model, instructions, allow_bash, sandbox.value if sandbox else None
    )  # fmt: skip
    spec, text = options.read(Path.cwd())
    content = sys.stdin.read() if task == "-" else task if task is not None else text
    follows = condition is None and task is None
    if follows and not (session and run_id):
        raise InvalidInput(
            'say when it is done, and what to do: understudy goal "CONDITION" "TASK"; to follow one: --session and '
            "--run-id"
        )
    run_command.check(session, run_id, None if follows else content)  # before there is a session
    spec = _in_worktree(spec) if worktree else spec
    judge = _evaluator(spec, evaluator, evaluator_model)
    waits_in = queue_place(queue, key, priority)
    with connected(store) as cluster:
        if follows:
            handle = cluster.session(session)
            sent = handle.run(run_id)
        else:
            sent = cluster.goal(
                condition or "", content or "", agent=spec, evaluator=judge, max_rounds=max_rounds,
                budget=_budget(budget_tokens), session_id=session, run_id=run_id, queue=waits_in,
            )  # fmt: skip
            handle = cluster.session(sent.session_id)
        if not wait:
            print_json({"session_id": handle.id, "run_id": sent.run_id}) if json else print(handle.id)
            return 0
        return run_command.follow(
            cluster, handle, sent, timeout=timeout, reads=task != "-", store=store, json=json, kind=GoalFollowing
        )  # fmt: skip


def _in_worktree(spec: AgentSpec) -> AgentSpec:
    """The agent with a worktree of the current directory, or of the one that it has."""
    from understudy.access import Worktree

    if isinstance(spec.workspace, Worktree):
        return spec
    return spec.model_copy(update={"workspace": Worktree(repository=spec.workspace or str(Path.cwd()))})


def _evaluator(agent: AgentSpec, file: Path | None, model: str | None) -> AgentSpec | None:
    from ..client.agent_options import AgentOptions
    from ..client.goals import default_evaluator

    if file is None and model is None:
        return None
    found = default_evaluator(agent) if file is None else AgentOptions(file).read(Path.cwd())[0]
    return found if model is None else found.model_copy(update={"model": model})


def _budget(tokens: int | None) -> Budget | None:
    from understudy.spec import Budget

    return Budget(tokens=tokens) if tokens is not None else None
