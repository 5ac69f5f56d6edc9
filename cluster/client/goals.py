"""From a goal to the workflow that its session does, and that one's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from understudy.access import Worktree
from understudy.actors.goal import EVALUATOR_INSTRUCTIONS, VERDICT_SCHEMA, goal
from understudy.actors.workflow import WorkflowDefinition
from understudy.errors import InvalidInput, InvalidSpec
from understudy.problem_texts import listed
from understudy.spec import AgentSpec, Budget
from understudy.workflows import GOAL, MOST_GOAL_ROUNDS

from .compiling import require_own_workspace

EVALUATOR = "evaluator"
"""The name of the evaluator where none is given."""


@dataclass(frozen=True)
class Goal:
    """A goal, as its session is made of it.

    Attributes:
        workflow: with its agents.
        input: the arguments of its function.
    """

    workflow: WorkflowDefinition
    input: dict[str, str | int]


def goal_of(
    condition: str, task: str, agent: AgentSpec, evaluator: AgentSpec | None, max_rounds: int,
    budget: Budget | tuple[Budget, ...] | None,
) -> Goal:  # fmt: skip
    """The workflow of a goal, and its input.

    Raises:
        InvalidInput: a text is empty, an agent no `AgentSpec`, or there are too few or too many rounds.
        InvalidSpec: these can't be the agents of a goal.
    """
    for name, text in (("condition", condition), ("task", task)):
        if not isinstance(text, str) or not text.strip():
            raise InvalidInput(f"the {name} of a goal must be a text")
    if isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or not 1 <= max_rounds <= MOST_GOAL_ROUNDS:
        raise InvalidInput(f"a goal has 1 to {MOST_GOAL_ROUNDS} rounds, not {max_rounds!r}")
    for name, given in (("agent", agent), ("evaluator", evaluator)):
        if not isinstance(given, AgentSpec) and (name == "agent" or given is not None):
            raise InvalidInput(f"{name} must be an AgentSpec, not {type(given).__name__}")
    judge = evaluator if evaluator is not None else default_evaluator(agent)
    _check(agent, judge)
    worker, judge, options = _at_work(agent, judge.model_copy(update={"output_type": VERDICT_SCHEMA}))
    options |= {"budget": budget} if budget is not None else {}
    names = {"worker": agent.name, "evaluator": judge.name}
    return Goal(
        WorkflowDefinition(GOAL, goal, agents=(worker, judge), options=options),
        {"condition": condition, "task": task, **names, "max_rounds": max_rounds},
    )


def default_evaluator(agent: AgentSpec) -> AgentSpec:
    """The evaluator where none is given: one that has the worker's model, and reads where that works."""
    return AgentSpec(
        name=EVALUATOR, instructions=EVALUATOR_INSTRUCTIONS, model=agent.model, profile=agent.profile,
        tools=("explore",) if agent.workspace is not None else (),
    )  # fmt: skip


def _check(agent: AgentSpec, evaluator: AgentSpec) -> None:
    problems = []
    if evaluator.output_type is not None:
        problems.append({"field": "evaluator.output_type", "problem": "is the verdict: leave it out"})
    if evaluator.handoffs:
        problem = "would have an agent answer that gives no verdict: leave it out, and use agents for what it may ask"
        problems.append({"field": "evaluator.handoffs", "problem": problem})
    if evaluator.name == agent.name:
        problems.append({"field": "evaluator.name", "problem": f"is the agent's as well, {agent.name!r}"})
    if isinstance(evaluator.workspace, Worktree):
        problems.append({"field": "evaluator.workspace", "problem": "is a copy of the agent's worktree: leave it out"})
    if problems:
        raise InvalidSpec(f"the goal can't be used: {listed(problems)}.", details={"problems": problems})
    require_own_workspace(agent)


def _at_work(agent: AgentSpec, evaluator: AgentSpec) -> tuple[AgentSpec, AgentSpec, dict[str, Any]]:
    """The agents where they work, and what the workflow's options say of it.

    A worktree is the goal's. Each round's worker has one of it, whose changes are merged into it, and each evaluator a
    copy, which is removed: so the repository gets what has met the condition, and nothing else.
    """
    options: dict[str, Any] = {}
    seen: str | Worktree | None = agent.workspace
    if isinstance(agent.workspace, Worktree):
        options, seen = {"workspace": agent.workspace}, Worktree(on_end="remove")
        agent = agent.model_copy(update={"workspace": Worktree()})
    if evaluator.workspace is None and seen is not None:
        evaluator = evaluator.model_copy(update={"workspace": seen})
    return agent, evaluator, options
