"""Human approval: a model writes a text, a person publishes it, has it changed, or lets it be.

understudy workflow run understudy.examples.workflows.approval:announce subject="the new release" directory=/tmp
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from understudy import StepTimeout, ToolContext, WorkflowContext, tool, workflow

MOST_DRAFTS = 5
TWO_DAYS = 2 * 86_400.0


class Announced(BaseModel):
    """What became of the text. `path` is empty if it was not published."""

    status: str
    drafts: int
    path: str = ""


def published(context: ToolContext) -> str:
    """After a crash: the call's result. What a call that was cut off had not done is done here."""
    arguments = context.arguments
    path = Path(arguments["directory"]) / "announcement.txt"
    if not path.exists() or path.read_text() != arguments["text"]:
        path.write_text(arguments["text"])
    return str(path)


@tool(on_crash=published)
def publish(directory: str, text: str) -> str:
    """Publish a text: it is a file here, and could be a mail to everybody."""
    path = Path(directory) / "announcement.txt"
    path.write_text(text)
    return str(path)


@workflow
async def announce(ctx: WorkflowContext, subject: str, directory: str, timeout: float = TWO_DAYS) -> Announced:
    """Write, ask, publish. While a person is asked no process is held, for days if need be."""
    wish = ""
    for number in range(1, MOST_DRAFTS + 1):
        text = await ctx.model(None, f"Announce {subject} in three sentences. {wish}".strip())
        await ctx.publish("draft", text)
        try:
            said = await ctx.ask(f"Publish this?\n\n{text}", options=["publish", "discard"], timeout=timeout)
        except StepTimeout:
            return Announced(status="nobody answered", drafts=number)
        if said == "publish":
            path = await ctx.tool(publish, directory, text)
            return Announced(status="published", drafts=number, path=path)
        if said == "discard":
            return Announced(status="discarded", drafts=number)
        wish = f"Change what this asks for: {said}"
    return Announced(status="not agreed", drafts=MOST_DRAFTS)
