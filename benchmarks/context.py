"""`python benchmarks/context.py [PLOT.svg]`: what a long conversation costs in each round, with and without folds.

One run of 300 tool rounds, each with a result of 2,000 characters, at an endpoint that caches the beginnings of prompts
as OpenAI's does, in units of 128 tokens. It does not depend on the machine: tokens are counted, not time.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from understudy import AgentSpec, Context, tool
from understudy.config import ModelProfile
from understudy.testing import LocalCluster
from understudy.testing.offline import OfflineServer
from understudy.testing.policies import Reply, content_text

ROUNDS = 300
WINDOW = 16_000
"""Tokens; the whole conversation has more than ten times as many."""

CONTEXTS = {
    "everything is sent": (Context(fold="none", representation="full"), None),
    "terse results, then summaries (default)": (Context(window=WINDOW), WINDOW),
    "summaries only": (Context(window=WINDOW, representation="full"), WINDOW),
    "older messages are dropped": (Context(window=WINDOW, fold="drop"), WINDOW),
}
"""Contexts, and the window that the endpoint enforces."""


@tool(on_crash="rerun")
def step(number: int) -> str:
    """Take a step."""
    return f"did STEP {number}. " + "lorem ipsum dolor sit amet " * 75


def policy(body: dict[str, Any]) -> Reply:
    """Steps, each known from what is sent only."""
    texts = [content_text(message) for message in body["messages"]]
    done = max((int(n) for text in texts for n in re.findall(r"STEP (\d+)", text)), default=0)
    if texts[-1].startswith("Do not go on with the task now."):
        return Reply(text=f"So far I did STEP {done}. " + "There is a lot to say about it. " * 30)
    return Reply(text="done") if done >= ROUNDS else Reply(tool_calls=(("step", {"number": done + 1}),))


def measured(context: Context, window: int | None) -> list[tuple[int, int]]:
    """Input tokens of each model call, and how many of them the endpoint had cached."""
    with OfflineServer(policy, window=window, prefix_cache=True) as server:
        profile = ModelProfile("measured", "key", server.url)
        with LocalCluster(profiles=[profile], model="m") as cluster:
            agent = AgentSpec(
                name="stepper", instructions="You take steps.", tools=[step], context=context, profile="measured",
                model="m", max_rounds=2 * ROUNDS, repeat_limit=0,
            )  # fmt: skip
            session = cluster.spawn(agent)
            session.send("Take all steps.").result(600, check=True)
            usages = [event.usage for event in session.events() if event.type == "model_call_completed"]
    return [(usage[0], usage[2]) for usage in usages]


def main() -> int:
    """Measure, print a table, and draw the plot if one is wanted."""
    found = {name: measured(*given) for name, given in CONTEXTS.items()}
    table = Table("what is sent", "model calls", "input tokens", "largest request", "in the last 50 rounds", "cached")
    for name, calls in found.items():
        tokens, cached = sum(one for one, _ in calls), sum(hit for _, hit in calls)
        late = sum(one for one, _ in calls[-50:]) / 50
        row = (len(calls), tokens, max(one for one, _ in calls), round(late))
        table.add_row(name, *(f"{value:,}" for value in row), f"{cached / tokens:.0%}")
    Console(width=120).print(table)
    if len(sys.argv) > 1:
        draw({name: [one for one, _ in calls] for name, calls in found.items()}, Path(sys.argv[1]))
    print(json.dumps({name: len(calls) for name, calls in found.items()}), file=sys.stderr)
    return 0


def draw(found: dict[str, list[int]], path: Path) -> None:
    """Write the plot."""
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "understudy"})
    figure, axis = plt.subplots(figsize=(8, 4))
    for name, tokens in found.items():
        axis.plot(range(1, len(tokens) + 1), [one / 1000 for one in tokens], label=name, linewidth=1.2)
    axis.axhline(WINDOW / 1000, color="#57606a", linestyle=":", linewidth=1)
    axis.set(xlabel="model call", ylabel="input tokens, thousands", yscale="log")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
