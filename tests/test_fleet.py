"""The cluster at a glance, and how `understudy top` draws it."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from understudy.cluster.fleet import Fleet, Rates, in_trees
from understudy.cluster.top import SORTS, View, age, chosen, draw
from understudy.errors import StoreUnreachable

from . import kernel as k
from .console_stage import KernelSource


def session(session_id: str, parent: str | None = None, root: str | None = None, **more: Any) -> dict[str, Any]:
    row = {
        "session_id": session_id, "parent_id": parent, "root_id": root or session_id, "status": "running", "stuck": 0,
        "created_at": 1, "updated_at": 1_000_000, "agent": "agent", "tokens_used": 0, "cost_used": 0, "wait": None,
        "wait_since": 0, "round": 1, "restarts": 0, "epoch": 1, "actor_pid": 17, "node_id": "node" * 8, "indent": 0,
    }  # fmt: skip
    return {**row, **more}


def snapshot(sessions: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    found = {
        "at": 5_000_000, "as_of": 5_000_000, "problem": None, "services": [], "services_problem": None, "incidents": [],
        "totals": {"sessions": len(sessions), "latest": {}}, "statuses": {}, "sessions": sessions,
        "rates": Rates().per_minute(5_000_000),
    }  # fmt: skip
    return {**found, **more}


def drawn(found: dict[str, Any], view: View, width: int, height: int | None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height or 100, highlight=False, legacy_windows=False)
    console.print(draw(found, view, width, height))
    return console.file.getvalue().splitlines()


@st.composite
def forests(draw_: Any) -> list[dict[str, Any]]:
    count = draw_(st.integers(0, 12))
    rows: list[dict[str, Any]] = []
    for number in range(count):
        parent = draw_(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        above = rows[parent] if parent is not None else None
        status = draw_(st.sampled_from(["running", "waiting_for_input", "waiting_for_model"]))
        ids = (f"s{number}", above["session_id"] if above else None, above["root_id"] if above else None)
        rows.append(session(*ids, status=status, created_at=number))
    kept = draw_(st.sets(st.integers(0, max(0, count - 1))))
    return draw_(st.permutations([row for number, row in enumerate(rows) if number not in kept]))


@given(forests())
def test_sessions_are_below_their_parents(rows: list[dict[str, Any]]) -> None:
    """Any sessions in any order, some missing: each comes once, right below its parent's tree, one step further in."""
    found = in_trees(rows)
    assert sorted(row["session_id"] for row in found) == sorted(row["session_id"] for row in rows)
    path: list[str] = []
    known = {row["session_id"] for row in rows}
    for row in found:
        del path[row["indent"] :]
        assert (path[-1] if path else None) == (row["parent_id"] if row["parent_id"] in known else None)
        path.append(row["session_id"])
    tops = [row["root_id"] for row in found if not row["indent"]]
    urgent = [any(row["status"] == "waiting_for_input" for row in rows if row["root_id"] == root) for root in tops]
    assert urgent == sorted(urgent, reverse=True)


def test_rates_are_of_the_last_minute_only() -> None:
    """A call of long ago counts no more; a crash and its recovery are told, an ordinary activation is not."""
    rates = Rates()
    base = {"session_id": "s", "agent": "a", "run_id": "r", "seq": 1}
    call = {"type": "model_call_completed", "data": {"usage": [3, 4, 0, 0, False, 7]}}
    rates.take([{**base, **call, "at": 0}, {**base, **call, "at": 100_000_000}])
    rates.take([
        {**base, "type": "session_crashed", "at": 110_000_000, "data": {}},
        {**base, "type": "session_activated", "at": 110_040_000, "data": {"cause": "resume", "down": 40_000}},
        {**base, "type": "session_activated", "at": 110_050_000, "data": {"cause": "ready", "down": 0}},
    ])  # fmt: skip
    found = rates.per_minute(120_000_000)
    assert (found["calls"], found["tokens"], found["cost"]) == (1, 7, 7)
    assert (found["crashes"], found["restores"], found["restore"]) == (1, 1, 40_000)
    assert [item["type"] for item in rates.incidents] == ["session_crashed", "session_activated"]
    assert not any(rates.per_minute(300_000_000).values())


@given(st.integers(20, 200), st.integers(8, 60), st.integers(0, 80), st.integers(0, 100))
def test_top_never_draws_more_than_the_terminal_has(width: int, height: int, sessions: int, offset: int) -> None:
    """Any size and any number of sessions: no line is too long, and not more lines than there are."""
    rows = [session(f"session-{number}", agent="a rather long name of an agent") for number in range(sessions)]
    incident = {
        "type": "input_requested",
        "at": 4_000_000,
        "session_id": "s",
        "agent": "a",
        "data": {"prompt": "x" * 300},
    }
    lines = drawn(snapshot(rows, incidents=[incident] * 9), View(offset=offset), width, height)
    assert len(lines) <= max(height, 13)
    assert all(len(line) <= width for line in lines)


def test_top_says_what_is_wrong_and_shows_what_it_knows() -> None:
    """While the store is away the problem is named, and the last known sessions stay."""
    problem = {"code": "store_unreachable", "message": "the store is away", "hint": "Wait."}
    lines = "\n".join(drawn(snapshot([session("s", agent="lead")], problem=problem), View(), 100, 30))
    assert "trouble" in lines
    assert "the store is away Wait." in lines
    assert "lead" in lines


def test_top_obeys_nobody_but_its_keys() -> None:
    """An agent's name and an error text with terminal sequences and markup are shown, never obeyed."""
    hostile = "[red]\x1b[2J\x1b]0;pwned\x07"
    incident = {
        "type": "session_quarantined",
        "at": 1,
        "session_id": "s",
        "agent": hostile,
        "data": {"reason": hostile},
    }
    found = "\n".join(drawn(snapshot([session("s", agent=hostile)], incidents=[incident]), View(), 120, 30))
    assert "\x1b" not in found
    assert "\x07" not in found
    assert "[red]" in found


def test_keys_sort_filter_and_scroll() -> None:
    """`s` changes the order, `/` filters whole trees by what one of them has, arrows move, `q` ends it."""
    small = session("a", tokens_used=1, updated_at=5)
    rows = [small, session("b", tokens_used=9, updated_at=9), session("b-1", "b", "b", agent="needle", tokens_used=1)]
    view = View()
    assert [row["session_id"] for row in chosen(rows, view)] == ["a", "b", "b-1"]
    view.key("s")
    assert view.sort == SORTS[1]
    assert [row["session_id"] for row in chosen(rows, view)] == ["b", "b-1", "a"]
    for key in ["/", *"NEEDLX", "\x7f", "e", "\r"]:
        view.key(key)
    assert (view.filter, view.typing) == ("NEEDLe", False)
    assert [row["session_id"] for row in chosen(rows, view)] == ["b", "b-1"]
    view.key("\x1b")
    view.key("down")
    view.key("pagedown")
    view.key("up")
    assert (view.filter, view.offset) == ("", 10)
    view.key("q")
    assert view.done


@pytest.mark.parametrize(
    ("microseconds", "told"),
    [(41_000, "41ms"), (3_200_000, "3.2s"), (245_000_000, "4m05s"), (-5, "0ms"), (3 * 86_400_000_000, "3d")],
)
def test_ages_are_short(microseconds: int, told: str) -> None:
    """A duration is told in the unit that fits."""
    assert age(microseconds) == told


async def test_a_snapshot_survives_a_store_that_is_away_and_a_service_that_is_replaced(tmp_path: Path) -> None:
    """The store fails, then the node service is killed: the snapshot tells of the one, and then is current again."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        await kernel.run("s", k.spec(""))
        source = KernelSource(kernel)
        fleet = Fleet(source)
        first = await fleet.once()
        assert first["problem"] is None
        assert first["totals"]["sessions"] == 1
        assert first["rates"]["runs_finished"] == 1
        source.problem = StoreUnreachable("gone fishing")
        await fleet.look()
        assert fleet.snapshot is not None
        assert fleet.snapshot["problem"]["message"] == "gone fishing"
        assert fleet.snapshot["totals"]["sessions"] == 1
        source.problem = None
        kernel.kill_node()
        async with asyncio.timeout(20):
            await fleet.look()
        assert fleet.snapshot["problem"] is None
