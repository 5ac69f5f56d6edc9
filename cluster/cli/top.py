"""How `understudy top` draws the cluster: a function of a snapshot (`Fleet`), the terminal's size and what is typed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from understudy.prices import money

from ..client.fleet import Wire
from .command import counted
from .rendering import STATUS_STYLE, age, clean, when

SORTS = ("attention", "tokens", "waiting")
BLINK_SECONDS = 3.0
INCIDENT_LINES = 4
LEAST_ROWS = 3
LEAST_NAME = 8

COLUMNS: tuple[tuple[str, int, bool], ...] = (
    # heading, the width of the terminal from which on it is shown, whether it is a number
    ("AGENT", 0, False),
    ("STATUS", 0, False),
    ("SINCE", 50, True),
    ("ROUND", 70, True),
    ("TOKENS", 40, True),
    ("COST", 110, True),
    ("RESTARTS", 60, True),
    ("EPOCH", 120, True),
    ("PID", 90, True),
    ("NODE", 130, False),
    ("SESSION", 80, False),
)


@dataclass
class View:
    """What the person at the terminal has chosen."""

    sort: str = SORTS[0]
    filter: str = ""
    typing: bool = False
    offset: int = 0
    done: bool = False

    def key(self, key: str) -> None:
        """A key was pressed."""
        if self.typing:
            self._typed(key)
        elif key in ("q", "Q"):
            self.done = True
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "/":
            self.typing, self.filter = True, ""
        elif key in ("\x1b", "\x7f"):
            self.filter = ""
        else:
            steps = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": 10, "pageup": -10, "home": -(10**9)}
            self.offset = max(0, self.offset + steps.get(key, 0))

    def _typed(self, key: str) -> None:
        if key in ("\r", "\n", "\x1b"):
            self.typing = False
        elif key in ("\x7f", "\b"):
            self.filter = self.filter[:-1]
        elif len(key) == 1 and key.isprintable():
            self.filter += key
        self.offset = 0


def chosen(sessions: list[Wire], view: View) -> list[Wire]:
    """The sessions to show: trees that have a session with the filter in its id, agent or status, sorted."""
    trees = [list(tree) for _, tree in groupby(sessions, lambda row: row["root_id"])]
    wanted = view.filter.lower()
    trees = [tree for tree in trees if not wanted or any(wanted in _searched(row) for row in tree)]
    if view.sort == "tokens":
        trees.sort(key=lambda tree: -sum(row["tokens_used"] for row in tree))
    elif view.sort == "waiting":
        trees.sort(key=lambda tree: min(row["updated_at"] for row in tree))
    return [row for tree in trees for row in tree]


def _searched(row: Wire) -> str:
    return f"{row['session_id']} {row['agent']} {row['status']}".lower()


def short(number: int) -> str:
    """`950`, `12.3k`, `4.1M`."""
    if number < 10_000:
        return str(number)
    return f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.1f}M"


def draw(snapshot: Wire, view: View, width: int, height: int | None) -> RenderableType:
    """The whole screen; without a `height` all rows, and nothing about keys."""
    lines = [*header(snapshot), *problems(snapshot)]
    rows = chosen(snapshot["sessions"], view)
    incidents = [incident(item) for item in snapshot["incidents"][:INCIDENT_LINES]]
    if height is None:  # lines are whole, for whoever prints them
        return Group(*lines, _table(rows, snapshot, width), *incidents)
    measure = Console(width=width)
    lines = [part for line in lines for part in line.wrap(measure, width)]
    incidents = incidents[: max(0, height - len(lines) - LEAST_ROWS - 2)]
    room = max(1, height - len(lines) - len(incidents) - 2)
    view.offset = min(view.offset, max(0, len(rows) - room))
    for line in incidents:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(
        *lines,
        _table(rows[view.offset : view.offset + room], snapshot, width),
        *incidents,
        _keys(view, len(rows), room),
    )


def header(snapshot: Wire) -> list[Text]:
    """Health, processes, statuses and rates."""
    roles: dict[str, int] = {}
    for service in snapshot["services"]:
        roles[service["role"]] = roles.get(service["role"], 0) + 1
    supervisor = next((row for row in snapshot["services"] if row["role"] == "supervisor"), None)
    ok = snapshot["problem"] is None and snapshot["services_problem"] is None
    first = Text("understudy ", style="bold")
    first.append("● healthy" if ok else "● trouble", style="green" if ok else "bold red")
    first.append(f" · supervisor {supervisor['pid'] if supervisor else '–'} · {counted(roles.get('node', 0), 'node')}")
    first.append(f" · {roles.get('frame', 0)} at work + {roles.get('standby', 0)} standby")
    second = Text(f"{counted(snapshot['totals']['sessions'], 'session')}: ")
    counts = sorted(snapshot["statuses"].items())
    second.append(", ".join(f"{count} {status}" for status, count in counts) or "none has work")
    for status in ("failed", "quarantined"):
        if snapshot["totals"]["latest"].get(status):
            second.append(f", {snapshot['totals']['latest'][status]} {status}", style="red")
    rates = snapshot["rates"]
    third = Text(f"last minute: {short(rates['tokens'])} tokens, {counted(rates['calls'], 'call')}, ")
    third.append(f"{counted(rates['runs_finished'], 'run')} ended, ")
    if rates["cost"]:
        third.append(f"cost {money(rates['cost']):.4f}, ")
    third.append(f"{rates['crashes']} crashed", style="bold red" if rates["crashes"] else "")
    if rates["restores"]:
        third.append(f", {rates['restores']} restored within {age(rates['restore'])}")
    if rates["only_waited"]:
        third.append(f", {rates['only_waited']} only waited")
    return [first, second, third]


def problems(snapshot: Wire) -> list[Text]:
    """What keeps the rest from being current."""
    found = []
    for problem in (snapshot["problem"], snapshot["services_problem"]):
        if problem is not None:
            found.append(Text(clean(f"{problem['message']} {problem['hint']}".strip()), style="red"))
    if snapshot["problem"] is not None and snapshot["as_of"]:
        found.append(Text(f"shown as of {when(snapshot['as_of'])}", style="red"))
    return found


def _table(rows: list[Wire], snapshot: Wire, width: int) -> RenderableType:
    if not rows:
        return Text("no session has work to do", style="dim")
    cells = [_cells(row, snapshot["at"]) for row in rows]
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    shown = _widths(cells, width)
    for name, space, number in shown:
        table.add_column(name, width=space, justify="right" if number else "left", no_wrap=True, overflow="ellipsis")
    crashed = {
        item["session_id"] for item in snapshot["incidents"]
        if item["type"] == "session_crashed" and snapshot["at"] - item["at"] < BLINK_SECONDS * 1e6
    }  # fmt: skip
    for row, texts in zip(rows, cells, strict=True):
        style = "bold white on red" if row["session_id"] in crashed else ""
        table.add_row(*(texts[name] for name, _, _ in shown), style=style)
    return table


def _widths(cells: list[dict[str, Text]], width: int) -> list[tuple[str, int, bool]]:
    """The columns that there is room for, and how wide each is: names and ids get what numbers leave."""
    columns = [(name, number) for name, least, number in COLUMNS if width >= least]
    found = {name: max(len(name), *(texts[name].cell_len for texts in cells)) for name, _ in columns}
    spare = width - sum(space + 1 for name, space in found.items() if name not in ("AGENT", "SESSION"))
    with_id = "SESSION" in found and spare >= 2 * LEAST_NAME
    found["AGENT"] = max(LEAST_NAME, min(found["AGENT"], spare - 1 - (LEAST_NAME + 1 if with_id else 0)))
    if with_id:
        found["SESSION"] = min(found["SESSION"], spare - found["AGENT"] - 2)
    return [(name, found[name], number) for name, number in columns if name != "SESSION" or with_id]


def _cells(row: Wire, at: int) -> dict[str, Text]:
    branch = f"{'  ' * (row['indent'] - 1)}└ " if row["indent"] else ""
    since = row["wait_since"] if row["wait"] and row["wait_since"] else row["updated_at"]
    plain = {
        "AGENT": f"{branch}{clean(row['agent'])}",
        "SINCE": age(at - since),
        "ROUND": str(row["round"]),
        "TOKENS": short(row["tokens_used"]),
        "COST": f"{money(row['cost_used']):.4f}" if row["cost_used"] else "-",
        "EPOCH": str(row["epoch"]),
        "PID": str(row["actor_pid"] or "-"),
        "NODE": row["node_id"][:8],
        "SESSION": row["session_id"],
    }
    return {
        **{name: Text(value) for name, value in plain.items()},
        "STATUS": Text(row["status"], style=STATUS_STYLE.get(row["status"], "")),
        "RESTARTS": Text(str(row["restarts"]), style="red" if row["restarts"] else ""),
    }


def incident(item: Wire) -> Text:
    """One line of what went wrong, or was mended."""
    data, kind = item["data"], item["type"]
    lines: dict[str, Callable[[], str]] = {
        "session_crashed": lambda: (
            f"crashed ({data['cause']}, pid {data['pid']}){', while it waited' if data['waiting'] else ''}:"
            f" {data['decision']}"
        ),
        "session_activated": lambda: f"{data['cause']} after {age(data['down'])}, pid {data['pid']}",
        "session_quarantined": lambda: f"quarantined: {data['reason']}",
        "run_finished": lambda: f"run {data['status']}: {data['error_message'] or data['error_code']}",
        "model_call_reissued": lambda: (
            f"model call {'fetched' if data.get('response_id') else 'asked'} again, attempt {data['attempt']}"
        ),
        "tool_in_doubt": lambda: f"{data['tool']} in doubt: {data['policy']}",
        "input_requested": lambda: f"asks: {data['prompt']}",
        "child_restarted": lambda: f"starts a sub-agent again ({data['status']})",
        "service_restarted": lambda: f"{data['node_id'][:8]} restarted: pid {data['old_pid']} is now {data['pid']}",
        "service_lost": lambda: f"{data['node_id'][:8]} lost, pid {data['old_pid']}",
    }
    what = lines[kind]() if kind in lines else kind.replace("_", " ")
    bad = kind in ("session_crashed", "session_quarantined", "run_finished", "service_restarted", "service_lost")
    line = Text(f"{when(item['at'])} ", style="dim")
    whose = " ".join(filter(None, (item["agent"], item["session_id"])))
    return line.append(clean(f"{whose} {what}"), style="red" if bad else "default")


def _keys(view: View, total: int, room: int) -> Text:
    if view.typing:
        return Text(f"filter: {clean(view.filter)}▏ (Enter)", no_wrap=True)
    place = f"{view.offset + 1}–{min(total, view.offset + room)} of {total}, " if total > room else ""
    kept = f"filter {clean(view.filter)!r}, " if view.filter else ""
    return Text(f"{place}{kept}sorted by {view.sort} · q quit  ↑↓ scroll  s sort  / filter", style="dim", no_wrap=True)
