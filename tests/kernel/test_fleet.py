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

from understudy.cluster.cli.rendering import STATUS_STYLE, age
from understudy.cluster.cli.top import SORTS, View, chosen, draw
from understudy.cluster.cli.top_command import print_once
from understudy.cluster.client.fleet import Fleet, Rates, in_trees, service_incidents
from understudy.cluster.client.results import ServiceInfo
from understudy.errors import ClusterUnreachable, StoreUnreachable
from understudy.protocol import packed
from understudy.reads import SessionAtWork

from ..console_stage import KernelSource
from ..records import session_record
from . import kernel as k


def session(session_id: str, parent: str | None = None, root: str | None = None, **more: Any) -> dict[str, Any]:
    """A row of a snapshot."""
    indent = more.pop("indent", 0)
    row = session_record(session_id, parent_id=parent, root_id=root or session_id, **more)
    return {**packed(row), "indent": indent}


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
def forests(draw_: Any) -> list[SessionAtWork]:
    count = draw_(st.integers(0, 12))
    rows: list[SessionAtWork] = []
    for number in range(count):
        parent = draw_(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        above = rows[parent] if parent is not None else None
        status = draw_(st.sampled_from(["running", "waiting_for_input", "waiting_for_model"]))
        parent_id, root_id = (above.session_id, above.root_id) if above else (None, f"s{number}")
        rows.append(
            session_record(f"s{number}", parent_id=parent_id, root_id=root_id, status=status, created_at=number)
        )
    kept = draw_(st.sets(st.integers(0, max(0, count - 1))))
    return draw_(st.permutations([row for number, row in enumerate(rows) if number not in kept]))


@given(forests())
def test_sessions_are_below_their_parents(rows: list[SessionAtWork]) -> None:
    """Any sessions in any order, some missing: each comes once, right below its parent's tree, one step further in."""
    found = in_trees(rows)
    assert sorted(row["session_id"] for row in found) == sorted(row.session_id for row in rows)
    path: list[str] = []
    known = {row.session_id for row in rows}
    for row in found:
        del path[row["indent"] :]
        assert (path[-1] if path else None) == (row["parent_id"] if row["parent_id"] in known else None)
        path.append(row["session_id"])
    tops = [row["root_id"] for row in found if not row["indent"]]
    urgent = [any(row.status == "waiting_for_input" for row in rows if row.root_id == root) for root in tops]
    assert urgent == sorted(urgent, reverse=True)


def test_rates_are_of_the_last_minute_only() -> None:
    """A call of long ago counts no more; a crash and its recovery are reported, an ordinary activation is not."""
    rates = Rates()
    base = {"session_id": "s", "agent": "a", "run_id": "r", "seq": 1}
    call = {"type": "model_call_completed", "data": {"usage": [3, 4, 0, 0, False, 7]}}
    rates.take([{**base, **call, "at": 0}, {**base, **call, "at": 100_000_000}])
    rates.take([
        {**base, "type": "session_crashed", "at": 110_000_000, "data": {"waiting": False}},
        {**base, "type": "session_activated", "at": 110_040_000, "data": {"cause": "resume", "down": 40_000}},
        {**base, "type": "session_activated", "at": 110_050_000, "data": {"cause": "ready", "down": 0}},
    ])  # fmt: skip
    found = rates.per_minute(120_000_000)
    assert (found["calls"], found["tokens"], found["cost"]) == (1, 7, 7)
    assert (found["crashes"], found["restores"], found["restore"]) == (1, 1, 40_000)
    assert [item["type"] for item in rates.incidents] == ["session_crashed", "session_activated"]
    assert not any(rates.per_minute(300_000_000).values())


def test_crashes_are_restored_or_only_waited() -> None:
    """Of three that crashed one was at work; of two that only waited one got an actor that stood by: the header says so
    with numbers that add up, whenever these looks were."""
    rates = Rates()
    base = {"agent": "a", "run_id": "r", "seq": 1}
    crashed = {**base, "type": "session_crashed"}
    again = {**base, "type": "session_activated", "data": {"cause": "resume", "down": 1_500_000}}
    rates.take([{**crashed, "session_id": name, "at": 60_000_000, "data": {"waiting": True}} for name in "ab"])
    rates.take([{**crashed, "session_id": "c", "at": 61_000_000, "data": {"waiting": False}}])
    rates.take([{**again, "session_id": name, "at": 62_000_000} for name in "ac"])
    rates.take([{**again, "session_id": "b", "at": 63_000_000, "data": {"cause": "ready", "down": 0}}])
    found = rates.per_minute(70_000_000)
    assert (found["crashes"], found["restores"], found["only_waited"]) == (3, 2, 1)
    later = Rates()  # who only waited goes on when its wait ends, and then crashes at work
    later.take([{**crashed, "session_id": "b", "at": 60_000_000, "data": {"waiting": True}}])
    later.take([{**again, "session_id": "b", "at": 61_000_000, "data": {"cause": "ready", "down": 0}}])
    later.take([{**crashed, "session_id": "b", "at": 62_000_000, "data": {"waiting": False}}])
    later.take([{**again, "session_id": "b", "at": 63_000_000}])
    twice = later.per_minute(70_000_000)
    assert (twice["crashes"], twice["restores"], twice["only_waited"]) == (2, 1, 1)
    lines = drawn(snapshot([], rates=found), View(), 120, 30)
    assert lines[2].endswith("3 crashed, 2 restored within 1.5s, 1 only waited")


@given(st.lists(st.integers(0, 200), max_size=60), st.integers(0, 200))
def test_any_number_of_events_is_counted_by_the_second(times: list[int], now: int) -> None:
    """Any events in any order: those of the last sixty seconds count, and no more is kept than there are seconds."""
    rates = Rates()
    base = {"session_id": "s", "agent": "a", "run_id": "r", "seq": 1, "type": "run_accepted", "data": {}}
    rates.take([{**base, "at": second * 1_000_000} for second in times])
    assert rates.per_minute(now * 1_000_000)["runs_accepted"] == sum(second >= now - 60 for second in times)
    assert len(rates._seconds) <= len({second for second in times if second >= now - 60})


def service(role: str, pid: int, node_id: str = "n1") -> ServiceInfo:
    return ServiceInfo(role, pid, node_id, "")


def test_services_that_were_replaced_or_lost_are_reported() -> None:
    """A supervisor on another node and a node service with another process were restarted, a node that is missing is
    lost; session actors come and go, and who joins is no incident."""
    before = [service("supervisor", 1), service("node", 2), service("node", 3, "n2"), service("node", 4, "n3")]
    before.append(service("standby", 5))
    after = [service("supervisor", 6, "n3"), service("node", 7), service("node", 4, "n3"), service("node", 8, "n4")]
    assert len(service_incidents([service("supervisor", 1)], [service("supervisor", 1, "n2")], 9)) == 1
    assert service_incidents(before, before, 9) == service_incidents([], after, 9) == []
    found = service_incidents(before, after, 9)
    assert [(item["type"], item["agent"], item["data"]) for item in found] == [
        ("service_restarted", "supervisor", {"role": "supervisor", "node_id": "n3", "old_pid": 1, "pid": 6}),
        ("service_restarted", "node service", {"role": "node", "node_id": "n1", "old_pid": 2, "pid": 7}),
        ("service_lost", "node service", {"role": "node", "node_id": "n2", "old_pid": 3, "pid": None}),
    ]
    assert len({item["seq"] for item in found}) == len(found)
    lines = drawn(snapshot([], incidents=found), View(), 100, 30)
    assert [line[13:] for line in lines[4:7]] == [
        "supervisor n3 restarted: pid 1 is now 6",
        "node service n1 restarted: pid 2 is now 7",
        "node service n2 lost, pid 3",
    ]


class Replaced(KernelSource):
    """A kernel whose services have other processes from one look to the next, or none that answer."""

    pid: int | None = 1

    async def services(self) -> list[ServiceInfo]:
        if self.pid is None:
            raise ClusterUnreachable("no services of this store run")
        return [ServiceInfo(role, self.pid, self.kernel.node_id, "") for role in ("supervisor", "node")]


async def test_a_snapshot_reports_services_that_were_replaced_between_two_looks(tmp_path: Path) -> None:
    """The first look reports nothing; away and back with other processes, each is an incident, once."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        source = Replaced(kernel)
        fleet = Fleet(source)
        assert (await fleet.once())["incidents"] == []
        source.pid = None
        assert (await fleet.once())["incidents"] == []
        source.pid = 2
        expected = {("service_restarted", role, 1, 2) for role in ("supervisor", "node")}
        for _ in range(2):
            found = [(item["type"], item["data"]) for item in (await fleet.once())["incidents"]]
            pids = [(kind, data["role"], data["old_pid"], data["pid"]) for kind, data in found]
            assert (len(pids), set(pids)) == (2, expected)


def test_one_look_is_printed_in_whole_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets each header and incident line as one, however long, and ids whole."""
    ids = {"session_id": "session-with-a-rather-long-id-" + "x" * 20, "agent": "a" * 20}
    incident = {**ids, "type": "session_quarantined", "at": 1, "data": {"reason": "so " * 100 + "it ends"}}
    problem = {"code": "x", "message": "it is away " * 30, "hint": "Wait."}
    statuses = dict.fromkeys(STATUS_STYLE, 3)
    print_once(snapshot([session(**ids)], incidents=[incident], problem=problem, statuses=statuses))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + 2 + 2 + 1
    assert lines[1].endswith("3 waiting_for_timer")
    assert lines[3].endswith("Wait.")
    assert ids["session_id"] in lines[6]
    assert lines[7].endswith("it ends")


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
    ("microseconds", "shown"),
    [(41_000, "41ms"), (3_200_000, "3.2s"), (245_000_000, "4m05s"), (-5, "0ms"), (3 * 86_400_000_000, "3d")],
)
def test_ages_are_short(microseconds: int, shown: str) -> None:
    """A duration is shown in the unit that fits."""
    assert age(microseconds) == shown


async def test_a_snapshot_survives_a_store_that_is_away_and_a_service_that_is_replaced(tmp_path: Path) -> None:
    """The store fails, then the node service is killed: the snapshot reports the one, and then is current again."""
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
