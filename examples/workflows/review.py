"""A review panel: three reviewers judge each file of a folder, independently; a model writes the report.

understudy workflow run understudy.examples.workflows.review:review folder=src
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from understudy import AgentSpec, StepFailed, WorkflowContext, tool, workflow


class Opinion(BaseModel):
    """What one reviewer says of one file."""

    verdict: Literal["good", "mend"]
    reason: str


class Reviewed(BaseModel):
    """A file, and what the panel says of it. A reviewer who failed has no opinion."""

    path: str
    verdict: Literal["good", "mend", "undecided"]
    opinions: dict[str, Opinion]


class Report(BaseModel):
    """The files in their order, and the report."""

    files: list[Reviewed]
    text: str


PANEL = [
    AgentSpec(
        name=name,
        instructions=f"You review one file of Python code, and look at nothing but {subject}. Read it with read_file. "
        "Say `mend` only for a mistake that you can name, in one sentence.",
        tools=["read_file"],
    )
    for name, subject in (
        ("correctness", "whether it does what it says"),
        ("security", "what an attacker could do with it"),
        ("clarity", "whether a reader understands it"),
    )
]


@tool(on_crash="rerun")
def python_files(folder: str) -> list[str]:
    """The Python files of a folder, in the order of their names."""
    return sorted(str(path) for path in Path(folder).resolve().rglob("*.py"))


async def reviewed(ctx: WorkflowContext, path: str) -> Reviewed:
    """Have the panel look at a file: the majority decides. One whose reviewer fails is reviewed by the others."""
    task = f"Review this file: {path}"
    asked = [ctx.agent(reviewer, task, output_type=Opinion) for reviewer in PANEL]
    answers = await ctx.gather(*asked, return_exceptions=True)
    opinions: dict[str, Opinion] = {}
    for reviewer, answer in zip(PANEL, answers, strict=True):
        if isinstance(answer, Opinion):
            opinions[reviewer.name] = answer
        elif not isinstance(answer, StepFailed):
            raise answer
    mend = sum(opinion.verdict == "mend" for opinion in opinions.values())
    if 2 * mend == len(opinions):
        return Reviewed(path=path, verdict="undecided", opinions=opinions)
    return Reviewed(path=path, verdict="mend" if 2 * mend > len(opinions) else "good", opinions=opinions)


@workflow(agents=PANEL)
async def review(ctx: WorkflowContext, folder: str, at_once: int = 4) -> Report:
    """Review all files of a folder, so many at once."""
    paths = await ctx.tool(python_files, folder)
    files = await ctx.foreach(paths, lambda path: reviewed(ctx, path), limit=at_once)
    lines = [
        f"{file.path}: {file.verdict}. {name}: {opinion.reason}"
        for file in files
        for name, opinion in file.opinions.items()
    ]
    text = await ctx.model(None, "Write a report of at most ten sentences on this review:\n" + "\n".join(lines))
    return Report(files=files, text=text)
