"""Nightly triage: each night an agent files the reports that are new in a folder, and knows what became of it before.

python -m understudy.examples.loops.nightly FOLDER --once
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy import AgentSpec, Cluster, Schedule, ToolContext, tool
from understudy.config import OFFLINE_MODEL

if TYPE_CHECKING:
    from understudy.testing.policies import Reply

KINDS = ("bug", "wish", "question")

INSTRUCTIONS = """You triage reports. Ask new_reports which there are, read all of them, and file each one, by
file_report, as a bug (something does not do what it should), a wish or a question. End with one line for each: its
name and what it is. What could not be filed in nights before is in the loop's memory: look at it once more."""

OFFLINE_LINE = "\noffline-policy: understudy.examples.loops.nightly:policy"


@tool(on_crash="rerun")
def new_reports(folder: str) -> dict[str, str]:
    """The reports of a folder that are not filed yet, by name, with their texts."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.txt"))}


def filed(context: ToolContext) -> str:
    """After a crash: the call's result. What a call that was cut off had not done is done here."""
    return move(**context.arguments)


@tool(on_crash=filed)
def file_report(folder: str, name: str, kind: str) -> str:
    """File a report.

    Args:
        name: of the report, as new_reports has it.
        kind: bug, wish or question.
    """
    return move(folder, name, kind)


def move(folder: str, name: str, kind: str) -> str:
    """Move a report into the folder of its kind; one that is there stays."""
    if kind not in KINDS or Path(name).name != name:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, and name that of a report")
    place = Path(folder) / kind
    place.mkdir(exist_ok=True)
    if not (place / name).exists():
        (Path(folder) / name).rename(place / name)
    return f"{name} is filed as {kind}"


def nightly(cluster: Cluster, folder: Path, cron: str = "0 3 * * *", model: str | None = None) -> Schedule:
    """Set the loop: the same again changes nothing."""
    chosen = model or cluster._settings.model
    agent = AgentSpec(
        name="nightly",
        instructions=INSTRUCTIONS + (OFFLINE_LINE if chosen == OFFLINE_MODEL else ""),
        tools=[new_reports, file_report],
        model=model,
        max_rounds=10,
    )
    task = f"Triage the reports in {folder.resolve()}"
    return cluster.schedule("nightly-triage", task, agent=agent, cron=cron, memory=True)


def policy(body: dict[str, Any]) -> Reply:
    """The model's part, offline: it reads the reports, files what it understands, and says what it has done."""
    from understudy.testing.policies import Reply, content_text

    messages = body["messages"]
    task = next(content_text(message) for message in messages if message["role"] == "user")
    folder = task.splitlines()[0].rpartition(" in ")[2]
    results = [content_text(message) for message in messages if message["role"] == "tool"]
    if not results:
        return Reply(tool_calls=(("new_reports", {"folder": folder}),))
    if len(results) > 1:
        return Reply(text="\n".join(results[1:]))
    found = json.loads(results[0])
    calls = [("file_report", {"folder": folder, "name": name, "kind": kind_of(text)}) for name, text in found.items()]
    return Reply(tool_calls=tuple(calls)) if calls else Reply(text="There is nothing new.")


def kind_of(text: str) -> str:
    """What a report seems to be."""
    return "question" if text.rstrip().endswith("?") else "wish" if "please" in text.lower() else "bug"


def main(
    folder: Annotated[Path, typer.Argument(help="With reports, as .txt files.", exists=True, file_okay=False)],
    cron: Annotated[str, typer.Option(help="When.")] = "0 3 * * *",
    model: Annotated[str | None, typer.Option(help="Default: UNDERSTUDY_MODEL, or `offline` without a key.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Now as well.")] = False,
    store: Annotated[str | None, typer.Option(envvar="UNDERSTUDY_STORE", help="Its DSN.")] = None,
) -> None:
    """Triage the reports of a folder each night."""
    with Cluster.connect(store) as cluster:
        loop = nightly(cluster, folder, cron, model)
        if once:
            fired = loop.trigger()
            print(cluster.session(fired.session_id).run(fired.run_id).result().text if fired.run_id else fired.problem)
        for entry in cluster.triage():
            print(f"in triage: {entry.id} {entry.schedule}, {entry.count} times: {entry.text}")


if __name__ == "__main__":
    typer.run(main)
