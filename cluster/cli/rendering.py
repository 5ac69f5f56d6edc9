"""How the command line prints: tables for people, JSON for programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich import markup
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from understudy.approvals import APPROVAL, IN_DOUBT
from understudy.events import Event
from understudy.json_text import to_json
from understudy.messages import Message, Usage
from understudy.prices import money
from understudy.reads import BudgetUse, DrainInfo, PendingInput, RunRecord, Wakeup
from understudy.workflows import ORIGIN, SNAPSHOT, WORKFLOW, step_path

from ..client.results import ServiceInfo, SessionInfo
from .command import counted, print_json

STATUS_STYLE = {
    "running": "green",
    "waiting_for_model": "cyan",
    "waiting_for_child": "blue",
    "waiting_for_timer": "yellow",
    "waiting_for_input": "yellow",
    "waiting_for_queue": "blue",
    "failed": "red",
    "quarantined": "red",
    "cancelled": "yellow",
}


TIMES = frozenset({"started_at", "due_at"})
DURATIONS = frozenset({"duration", "queued", "waited", "first_chunk", "down", "delay", "unseen"})
"""Fields of events in microseconds, and what people are shown instead."""

FOR_MACHINES = frozenset({"chunk_times"})
"""Fields of events that say nothing to people: counts of a histogram."""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal obeys, but for tabs and the ends of lines."""

WIDE = 110
"""Columns of a terminal that has room for all of `understudy ps`."""


def clean(text: str) -> str:
    """A name, or a text within a line, without what can't be seen."""
    return "".join(character if character.isprintable() else "�" for character in text)


def escape(text: str) -> str:
    """Text that people or models wrote, for a console that takes markup: it shows what it is and does nothing."""
    return markup.escape(CONTROLS.sub("�", text))


def when(microseconds: int) -> str:
    """Local time of day, to the millisecond."""
    local = datetime.fromtimestamp(microseconds / 1e6, UTC).astimezone()
    return local.strftime("%H:%M:%S.%f")[:-3]


def age(microseconds: int) -> str:
    """`41ms`, `3.2s`, `4m05s`, `2h10m`, `3d`."""
    seconds = max(0, microseconds) / 1e6
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours >= 48:
        return f"{hours // 24}d"
    return f"{hours}h{minutes % 60:02}m" if hours else f"{minutes}m{int(seconds) % 60:02}s"


def styled(status: str) -> str:
    """A status in its colour."""
    style = STATUS_STYLE.get(status)
    return f"[{style}]{status}[/{style}]" if style else status


def print_sessions(sessions: list[SessionInfo], services: list[ServiceInfo], *, live_only: bool) -> None:
    """The table of `understudy ps`."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    table = Table(box=None, header_style="bold")
    numbers, others = ["EPOCH", "RESTARTS", "PID", "TOKENS"], ["UPDATED"]
    if console.width < WIDE:  # ids stay whole, so that they can be copied; `show` has the rest
        numbers, others = ["TOKENS"], []
    for column in ("SESSION", "AGENT", "STATUS", *numbers, *others):
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=column != "AGENT")
    for info in sessions:
        cells = {
            "SESSION": info.id, "AGENT": escape(info.name), "STATUS": styled(info.status), "EPOCH": str(info.epoch),
            "RESTARTS": str(info.restarts), "PID": str(info.actor_pid or "-"), "TOKENS": str(info.tokens_used),
            "UPDATED": when(info.updated_at),
        }  # fmt: skip
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    if sessions:
        console.print(table)
        for info in sessions:
            print_pending(info.id, info.pending, console)
            if info.error is not None:
                console.print(f"[red]{info.id}: {escape(info.error['message'])}[/red]", soft_wrap=True)
    else:
        console.print("no session has work to do (--all lists every one)" if live_only else "no sessions yet")
    counts: dict[str, int] = {}
    for service in services:
        counts[service.role] = counts.get(service.role, 0) + 1
    roles = ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))
    console.print(f"[dim]{roles} at {services[0].address if services else '-'}[/dim]")


def print_tree(found: list[SessionInfo]) -> None:
    """Sessions below each other."""
    nodes: dict[str, Tree] = {}
    root: Tree | None = None
    for info in found:
        times = Counter(info.tools)
        tools = ", ".join(f"{name} ×{times[name]}" if times[name] > 1 else name for name in times)
        doing = f" · {tools}" if tools else ""
        crashes = f" · restarts {info.restarts}" if info.restarts else ""
        label = f"{escape(info.name)} [dim]{info.id}[/dim] {styled(info.status)}{doing}{crashes}"
        parent = nodes.get(info.parent_id or "")
        nodes[info.id] = parent.add(label) if parent is not None else Tree(label)
        root = root or nodes[info.id]
    if root is not None:
        Console().print(root)


def print_pending(session_id: str, pending: Sequence[PendingInput], console: Console) -> None:
    """What a session waits for, and how to answer."""
    for item in pending:
        call = f"{item.session_id or session_id} {item.call_id}"
        console.print(f"[yellow]waits for input[/yellow] {call} [dim]{item.kind}[/dim]")
        console.print(f"  {escape(item.prompt)}", soft_wrap=True)
        if item.options:
            console.print(f"  options: {escape(', '.join(item.options))}")
        again = "; or --rerun instead of TEXT" if item.kind == IN_DOUBT else ""
        how = f"understudy answer {call} {'TEXT' if item.form is None else 'JSON'}{again}"
        if item.kind == APPROVAL:
            how = f"understudy approve {call}; or: understudy reject {call} --reason TEXT"
        console.print(f"  [dim]{how}[/dim]", soft_wrap=True)


def print_wakeups(wakeups: Sequence[Wakeup], console: Console) -> None:
    """What a session will get as an input, and when."""
    for item in wakeups:
        due = datetime.fromtimestamp(item.due_at / 1e6, UTC).astimezone().isoformat(" ", "seconds")
        again = f", then every {item.every:g} s" if item.every else ""
        console.print(f"[bold]wakeup[/bold] {item.name} due {due}{again}: {escape(item.prompt[:500])}", soft_wrap=True)


def amount(resource: str, value: int) -> str:
    """What a budget counts, in the unit that people limit it by."""
    if resource == "cost":
        return f"{money(value):.4f}".rstrip("0").rstrip(".")
    return f"{value / 1e6:.0f}" if resource == "seconds" else f"{value:,}"


def print_budgets(session_id: str, budgets: Sequence[BudgetUse], console: Console) -> None:
    """What a session may use, and what of that is used."""
    for use in budgets:
        whose = "" if use.session_id == session_id else f" of {use.session_id}"
        reserved = f" + {amount(use.resource, use.reserved)} reserved" if use.reserved else ""
        spent = "" if use.resource == "depth" else f"{amount(use.resource, use.spent)}{reserved} of "
        allowed = amount(use.resource, use.allowed)
        console.print(f"[bold]budget[/bold] {use.scope}{whose}: {spent}{allowed} {use.resource}")


def print_session(
    info: SessionInfo,
    runs: list[RunRecord],
    messages: list[Message],
    pending: Mapping[str, Sequence[PendingInput]],
    wakeups: Sequence[Wakeup] = (),
    budgets: Sequence[BudgetUse] = (),
) -> None:
    """The page of `understudy show`; `pending` is by session, its sub-agents' included."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(info.name)}[/bold] {info.id} {styled(info.status)}")
    console.print(
        f"epoch {info.epoch}, restarts {info.restarts}, tokens {info.tokens_used}, redone {info.tokens_redone}"
    )
    if info.error:
        console.print(f"[red]{escape(str(info.error.get('message', info.error)))}[/red]")
    print_budgets(info.id, budgets, console)
    for run in runs:
        error = f": {escape(run.error['message'])}" if run.error else ""
        rounds = f", {run.rounds} rounds" if info.kind != WORKFLOW else ""
        console.print(f"[bold]run[/bold] {run.run_id} {styled(run.status)}{rounds}{error}")
    for session_id, asked in pending.items():
        print_pending(session_id, asked, console)
    print_wakeups(wakeups, console)
    for message in messages:
        if message.origin == ORIGIN:
            _print_steps(message, console)
            continue
        console.print(f"[dim]{message.seq:>4} {message.role}[/dim] {escape(message.text[:2000])}")
        for call in message.tool_calls:
            console.print(f"[dim]     calls[/dim] {escape(call.name)} {escape(call.arguments[:500])}")


def _print_steps(message: Message, console: Console) -> None:
    """What a workflow's code has asked for, or the value that it has taken."""
    for call in message.tool_calls:
        path = step_path(message.run_id or "", call.call_id)
        console.print(f"[dim]{message.seq:>4} step {path}[/dim] {escape(call.name)} {escape(call.arguments[:500])}")
    if message.role == "system":
        taken = message.extra or {}
        name = str(taken.get("name"))
        value = "" if name == SNAPSHOT else f" = {to_json(taken.get('value'))[:500]}"  # of what stands above it
        console.print(f"[dim]{message.seq:>4} value[/dim] {escape(name + value)}")


def print_events(found: list[Event]) -> None:
    """One line each."""
    console = Console(highlight=False)
    for event in found:
        fields = {name: value for name, value in event.body().items() if name not in FOR_MACHINES}
        body = " ".join(_said(name, value) for name, value in fields.items() if value not in (None, "", 0, False))
        console.print(
            f"[dim]{event.seq:>5} {when(event.at)}[/dim] [bold]{event.type}[/bold] {escape(body)}", soft_wrap=True
        )


def _said(name: str, value: Any) -> str:
    """A field of an event for people: tokens by their kinds, times of day and seconds instead of microseconds."""
    if name == "usage":
        usage = Usage.from_wire(value)
        tokens = {"in": usage.input_tokens, "out": usage.output_tokens, "cached": usage.cached_tokens}
        return f"tokens={','.join(f'{kind}:{count}' for kind, count in tokens.items() if count)}"
    if name == "waited" and isinstance(value, dict):  # of a model call: by profile
        return f"{name}={','.join(f'{profile}:{time / 1e6:.3f}s' for profile, time in value.items())}"
    if name == "retried":
        return f"{name}={','.join(f'{reason}:{count}' for reason, count in value.items())}"
    if name in TIMES:
        return f"{name}={when(value)}"
    return f"{name}={value / 1e6:.3f}s" if name in DURATIONS else f"{name}={value}"


def print_drains(drains: list[DrainInfo]) -> None:
    """How drains stand."""
    for drain in drains:
        state = f"drained {when(drain.finished_at)}" if drain.finished_at else f"{drain.left} sessions left"
        print(f"{drain.node_id}: {state} ({drain.reason})")
    if not drains:
        print("no node is drained")


def print_checks(checks: list[Any]) -> None:
    """The page of `understudy doctor`."""
    console = Console(highlight=False)
    for check in checks:
        well = "[yellow]warn[/yellow]" if check.warning else "[green]ok[/green]  "
        mark = well if check.ok else "[red]FAIL[/red]"
        console.print(f"{mark} {check.name}: {escape(check.found)}", soft_wrap=True)
        if check.advice and (check.warning or not check.ok):
            console.print(f"     {escape(check.advice)}", soft_wrap=True)


def tell_checked(checked: list[dict[str, Any]], *, json: bool) -> int:
    """Print what was found in files that were checked: their problems, and what of this machine they need; the exit
    code."""
    ok = not any(item["problems"] for item in checked)
    if json:
        print_json({"ok": ok, "files": checked})
        return 0 if ok else 1
    console = Console(highlight=False)
    for item in checked:
        problems = item["problems"]
        state = f"[red]{counted(len(problems), 'problem')}[/red]" if problems else "[green]ok[/green]"
        console.print(f"{escape(item['file'])}: {state} {escape(item['summary'])}".rstrip(), soft_wrap=True)
        for name in ("sandbox", "git"):
            if name in item:
                console.print(f"  {name} here: {escape(item[name])}", soft_wrap=True)
        if item.get("missing_servers"):
            missing = ", ".join(item["missing_servers"])
            console.print(f"  MCP servers without a program here: {escape(missing)}", soft_wrap=True)
        for problem in problems:
            console.print(f"  [bold]{escape(problem['field'])}[/bold]: {escape(problem['problem'])}", soft_wrap=True)
    return 0 if ok else 1
