"""Research: a model plans questions, an agent answers each, all at once, a model puts the answers together.

understudy workflow run understudy.examples.workflows.research:research question="What is a fence?" folder=docs
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from understudy import AgentSpec, Retry, WorkflowContext, tool, workflow

MOST_PASSAGES = 5


class Plan(BaseModel):
    """Questions whose answers together answer the first one."""

    questions: Annotated[list[str], Field(min_length=3, max_length=6)]


class Finding(BaseModel):
    """An answer, and the files that it was found in."""

    question: str
    answer: str
    sources: list[str]


class Answer(BaseModel):
    """The whole."""

    text: str
    findings: list[Finding]


@tool(on_crash="rerun")
def passages(folder: str, question: str) -> dict[str, str]:
    """The paragraphs of a folder's texts that have most words of a question, by file: one of each file."""
    words = {word for word in question.lower().split() if len(word) > 3}
    found: list[tuple[int, str, str]] = []
    for path in sorted(Path(folder).rglob("*.md")):
        paragraphs = path.read_text(errors="replace").split("\n\n")
        best = max(paragraphs, key=lambda text: len(words & set(text.lower().split())))
        found.append((-len(words & set(best.lower().split())), str(path), best))
    return {path: text for _, path, text in sorted(found)[:MOST_PASSAGES]}


researcher = AgentSpec(
    name="researcher",
    instructions="You answer a question from the passages that you are given, and from nothing else, in at most three "
    "sentences. If they do not answer it, say so.",
)


async def found(ctx: WorkflowContext, folder: str, question: str) -> Finding:
    """One question: look it up, then have it answered; a failed answer is tried again."""
    texts = await ctx.tool(passages, folder, question)
    shown = "\n\n".join(f"{path}:\n{text}" for path, text in texts.items())
    answer = await ctx.agent(researcher, f"Question: {question}\n\n{shown}", retry=Retry(attempts=3, backoff=2.0))
    return Finding(question=question, answer=answer, sources=list(texts))


@workflow
async def research(ctx: WorkflowContext, question: str, folder: str, at_once: int = 4) -> Answer:
    """Plan, answer each question, put together."""
    plan = await ctx.model(None, f"Which questions must be answered to answer this one: {question}", output_type=Plan)
    await ctx.publish("questions", plan.questions)
    findings = await ctx.foreach(plan.questions, lambda one: found(ctx, folder, one), limit=at_once)
    found_out = "\n\n".join(f"{finding.question}\n{finding.answer}" for finding in findings)
    text = await ctx.model(None, f"Answer this question: {question}\n\nWhat was found out:\n\n{found_out}")
    return Answer(text=text, findings=findings)
