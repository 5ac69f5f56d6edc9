"""`python -m understudy.observability.metric_page`: print the metric table, as docs/metrics.md has it."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap
from typing import get_args

from understudy.records import RetryReason

from . import conventions as names
from .live_table import ROWS
from .metric_table import TABLE, MetricRow

COLUMNS = 120
LISTED = 12
"""Values of a label that are more than this are not listed."""

LABELS = {
    "agent": "the agent's name",
    "model": "the model's name",
    "tool": "the tool's name; `unknown` for names that a model made up",
    "reason": ", ".join(f"`{reason}`" for reason in get_args(RetryReason)),
    "queue": "the queue's name; a namespace has at most 100",
    "schedule": "the schedule's name; the 100 that have most",
    "state": "`waiting`, `behind`, `at_work`",
    "currency": "a code as `EUR`, if the price table says one",
    "type": "the event's type; `unknown` for one of a newer version",
    "outcome": "`ok`, `error`, `timeout`, `interrupted`, `cancelled`; not executed: "
    "`invalid`, `unknown_tool`, `aborted`, `repeated`, `refused`",
    "policy": "`rerun`, `report`, `ask`, `function`",
    "decision": "`ok`, `error`, `rerun`, `approve`, `reject`, `aborted`",
    "status": "how the run ended",
    "kind": "`question`, `approval`, `in_doubt`",
    "profile": "the model profile's name",
    "resource": "`requests`, `tokens`",
    "sink": "`spans`, and what else events are sent to",
    "version": "of Understudy",
}
"""What a label's values are, where the table does not list them."""

CONVENTIONS = {
    "gen_ai_operation_name": "`chat`",
    "gen_ai_provider_name": "`openai`, `anthropic`: whose protocol the endpoint speaks",
    "gen_ai_request_model": "the model that was asked for",
    "gen_ai_response_model": "the model as the answer names it; empty without one",
    "gen_ai_token_modality": "`unknown`: tokens of text, images and audio are not distinguished",
    "gen_ai_agent_name": "the agent's name",
    "gen_ai_tool_name": "the tool's name",
    "gen_ai_tool_type": "`function`",
    "understudy_run_status": "how the run ended; an attribute of ours",
    "error_type": "the error's code, a failed run's status or a tool call's outcome; empty without an error",
}
"""The same of attributes of the GenAI conventions, which are explained once below the table."""


def page() -> str:
    """Every metric as it is on the wire, and the buckets of the histograms."""
    lines = ["| metric | type | labels | from | what it says |", "|---|---|---|---|---|"]
    for row in TABLE:
        source = "events" if row.measures else "local"
        lines.append(_line(row.name, row.kind, row.unit, _labels(row), source, row.help))
    for live in ROWS:
        values = f": {_listed(live.values)}" if live.values else ""
        labels = [f"{label}{values or f': {LABELS[label]}'}" for label in live.labels]
        source = "store" if live.source == "store" else "local" if live.kind == "counter" else "live"
        lines.append(_line(live.name, live.kind, live.unit, labels, source, live.help))
    attributes = ["", "Labels that are attributes of the conventions, and what they say here:", ""]
    attributes += [f"- `{label}`: {text}" for label, text in CONVENTIONS.items()]
    buckets = ["", "Upper bounds of the histograms' buckets:", ""]
    for row in TABLE:
        if row.buckets:
            name = names.prometheus_name(row.name, row.unit)
            text = f"- `{name}`: {', '.join(f'{bound:g}' for bound in row.buckets)}"
            buckets += wrap(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([*lines, *attributes, *buckets, ""])


def _line(name: str, kind: str, unit: str, labels: Iterable[str], source: str, help: str) -> str:
    total = "_total" if kind == "counter" else ""
    return f"| `{names.prometheus_name(name, unit)}{total}` | {kind} | {'; '.join(labels)} | {source} | {help} |"


def _labels(row: MetricRow) -> list[str]:
    """Each label with its values: those that the table has from the start, or what it says of the label."""
    found = []
    for index, label in enumerate(row.labels):
        known = list(dict.fromkeys(values[index] for values in row.initial))
        meaning = _listed(known) if 0 < len(known) <= LISTED else LABELS.get(label)
        found.append(f"{label}: {meaning}" if meaning else f"`{label}`")
    return found


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


if __name__ == "__main__":
    print(page(), end="")
