"""What a person looks at is read in bounded pieces, on both stores, and is what the store holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, event, func, insert, literal, select

from understudy.errors import UnknownSession
from understudy.prices import Price
from understudy.reads import Activity
from understudy.store.db.statements import EVENT, SESSION
from understudy.store.operations.presence import log_ends
from understudy.store.reads import overview

from . import kernel as k

PRICES = {"offline": Price(2_000_000, 1_000_000, 8_000_000)}


async def read(kernel: k.Kernel, what: str, *arguments: Any, **options: Any) -> Any:
    return await kernel.ask("read", what, list(arguments), options)


def asking() -> dict[str, Any]:
    return k.spec(
        k.script([("request_user_input", {"prompt": "Which?"})], "done"), ["request_user_input"], name="clerk"
    )


async def test_sessions_at_work_are_listed_and_counted_and_those_that_want_a_person_come_first(
    store: str, tmp_path: Path
) -> None:
    """Two sessions with work, one of which asks, and one without: the former are rows, all three are counted."""
    async with k.running(store, tmp_path / "spans") as kernel:
        await kernel.run("ended", k.spec("", name="other"))
        await kernel.spawn("asks", asking())
        await kernel.send("asks")
        await kernel.paused("asks")
        kernel.server.hold()
        await kernel.spawn("works", k.spec("", name="worker"))
        await kernel.send("works")
        await kernel.until("works", "model_call_started")
        found = await read(kernel, "working")
        assert [row["session_id"] for row in found["rows"]] == ["asks", "works"]
        assert found["statuses"] == {"waiting_for_input": 1, "waiting_for_model": 1}
        assert len((await read(kernel, "working", limit=1))["rows"]) == 1
        holding = await read(kernel, "holders")
        assert len(holding) == 1  # who waits for a person has no process
        assert await read(kernel, "totals") == {"sessions": 3, "latest": {"idle": 1}}
        kernel.server.release()
        await kernel.end("works")
        await kernel.ask("cancel", "asks", None, "enough")
        await kernel.end("asks")


async def test_a_process_is_shown_of_a_session_at_work_only(store: str, tmp_path: Path) -> None:
    """Given a session whose run has ended, which the store says rests in a process, then no view names that process,
    which may be gone by now; that of a session at work is named by all."""
    async with k.running(store, tmp_path / "spans") as kernel:
        await kernel.run("ended", k.spec("", name="other"))
        kernel.server.hold()
        await kernel.spawn("works", k.spec("", name="worker"))
        await kernel.send("works")
        await kernel.until("works", "model_call_started")
        with kernel.service.database.read() as connection:
            rows = connection.execute(select(SESSION.c.session_id, SESSION.c.actor_pid))
            pids = {session_id: pid for session_id, pid in rows}
        assert None not in pids.values()
        for views in (
            [await read(kernel, "info", session_id) for session_id in pids],
            await read(kernel, "sessions"),
            [row for session_id in pids for row in await read(kernel, "tree", session_id)],
            (await read(kernel, "page"))["rows"],
        ):
            shown = {row["session_id"]: row["actor_pid"] for row in views}
            assert shown == {"ended": None, "works": pids["works"]}
        assert [row["actor_pid"] for row in (await read(kernel, "working"))["rows"]] == [pids["works"]]
        kernel.server.release()
        await kernel.end("works")


async def test_each_look_at_what_happened_begins_where_the_last_one_ended(store: str, tmp_path: Path) -> None:
    """However few places one look covers, all looks together tell every event of interest once, in each log's order."""
    async with k.running(store, tmp_path / "spans") as kernel:
        begin = (await read(kernel, "activity"))["cursors"]
        await kernel.run("s", k.spec(k.script([("note", {"path": str(tmp_path / "n"), "text": "x"})], "ok"), [k.note]))
        wanted = [event["seq"] for event in await kernel.events("s") if event["type"] in overview.ACTIVITY_TYPES]
        assert len(wanted) > 3
        for limit in (1, 2, 3, 100):
            seen, cursors = [], begin
            for _ in range(60):
                found = await read(kernel, "activity", cursors, limit=limit)
                if found["cursors"] == cursors:
                    break
                cursors = found["cursors"]
                seen += found["events"]
            assert [event["seq"] for event in seen] == wanted
        first = await read(kernel, "activity", None, limit=4)
        assert len(first["events"]) <= 4


async def test_who_looks_too_slowly_is_shown_what_happens_now(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a log that grows faster than one looks at it, then what is too long ago is left out: what is shown of the
    last minute stays of the last minute."""
    monkeypatch.setattr(overview, "BEHIND", 3)
    async with k.running(store, tmp_path / "spans") as kernel:
        begin = (await read(kernel, "activity"))["cursors"]
        await kernel.run("s", k.spec(""))
        latest = (await read(kernel, "activity"))["cursors"]
        found = await read(kernel, "activity", begin, limit=3)
        assert found["cursors"] == latest
        assert found["events"][-1]["type"] == "run_finished"
        assert len(found["events"]) <= 3


async def test_journals_that_are_gone_cost_a_look_nothing(store: str, tmp_path: Path) -> None:
    """Given the logs of many services that were replaced, then one statement finds that nothing is new, a second reads
    the one log that has grown, and each log's end is right."""
    async with k.running(store, tmp_path / "spans") as kernel:
        await kernel.run("s", k.spec(""))
        of_session = EVENT.c.session_id == "s"
        with kernel.service.database.writer.begin() as connection:
            for number in range(30):
                values = {"session_id": f"gone-{number}", "writer": f"gone-{number:02}"}
                same = [literal(values[column.name]) if column.name in values else column for column in EVENT.c]
                connection.execute(insert(EVENT).from_select(list(EVENT.c.keys()), select(*same).where(of_session)))
        asked: list[str] = []
        with kernel.service.database.read() as connection:
            ends = log_ends(connection, kernel.namespace)
            grouped = select(EVENT.c.writer, func.max(EVENT.c.writer_seq)).group_by(EVENT.c.writer)
            assert ends == {writer: seq for writer, seq in connection.execute(grouped)}
            assert len(ends) == 31
            event.listen(connection, "before_cursor_execute", lambda *call: asked.append(call[2]))
            assert overview.activity(connection, kernel.namespace, ends) == Activity(ends, [])
            assert len(asked) == 1
            grown = {**ends, "gone-07": ends["gone-07"] - 1}
            found = overview.activity(connection, kernel.namespace, grown)
            assert [entry["session_id"] for entry in found.events] == ["gone-7"]
            assert (found.cursors, len(asked)) == (ends, 3)
            assert log_ends(connection, "nobody") == {}
        with kernel.service.database.writer.begin() as connection:  # no session has these
            connection.execute(delete(EVENT).where(~of_session))


async def test_pages_of_sessions_have_every_session_once(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages by cursor, of a search that looks at few rows at a time, hold each session that is like it exactly once."""
    monkeypatch.setattr(overview, "SCANNED", 3)
    async with k.running(store, tmp_path / "spans") as kernel:
        for number in range(11):
            await kernel.spawn(f"s-{number}", k.spec("", name="Even_1" if number % 2 == 0 else "odd"))

        async def pages(**options: Any) -> list[str]:
            found, cursor = [], None
            for _ in range(30):
                page = await read(kernel, "page", cursor=cursor, limit=2, **options)
                assert len(page["rows"]) <= 2
                found += [row["session_id"] for row in page["rows"]]
                cursor = page["next"]
                if cursor is None:
                    return found
            raise AssertionError("the pages don't end")

        everyone = [f"s-{number}" for number in range(10, -1, -1)]
        assert await pages() == everyone
        assert await pages(text="EVEN_") == everyone[::2]
        assert await pages(text="s-3") == ["s-3"]
        assert await pages(text="%") == []
        assert await pages(statuses=["idle"]) == everyone
        assert await pages(statuses=["failed"]) == []


async def test_budgets_are_those_a_session_is_charged_to_and_say_what_is_used(store: str, tmp_path: Path) -> None:
    """A sub-agent's own limits come before its parent's tree; a session's account is no business of those below it."""
    limits = [
        {"scope": "tree", "tokens": 100_000, "depth": 2, "cost": 90_000_000, "seconds": 3_600_000_000},
        {"scope": "session", "rounds": 9},
    ]
    child = k.spec("", name="child", budget=[{"scope": "run", "tokens": 50_000}])
    lead = k.spec(
        k.script([("spawn_agent", {"agent": "child", "task": "t"})], "done"), ["spawn_agent"], agents={"child": child},
        budget=limits,
    )  # fmt: skip
    async with k.running(store, tmp_path / "spans", prices=PRICES) as kernel:
        await kernel.run("s", lead)
        own = {(row["scope"], row["resource"]): row for row in await read(kernel, "budgets", "s")}
        assert set(own) == {
            ("tree", "tokens"),
            ("tree", "depth"),
            ("tree", "cost"),
            ("tree", "seconds"),
            ("session", "rounds"),
        }
        info = {row["agent"]: row for row in await read(kernel, "tree", "s")}
        tokens = sum(row["tokens_used"] for row in info.values())
        assert own["tree", "tokens"]["spent"] == tokens > 0
        assert own["tree", "cost"]["spent"] == sum(row["cost_used"] for row in info.values()) > 0
        assert own["session", "rounds"]["spent"] == 2
        assert 0 < own["tree", "seconds"]["spent"] < 60_000_000
        below = await read(kernel, "budgets", info["child"]["session_id"])
        assert (below[0]["session_id"] == "s", below[0]["scope"]) == (False, "run")
        assert {row["scope"] for row in below if row["session_id"] == "s"} == {"tree"}
        await kernel.spawn("free", k.spec(""))
        assert await read(kernel, "budgets", "free") == []
        with pytest.raises(UnknownSession):
            await read(kernel, "budgets", "nobody")


async def test_events_and_runs_are_read_from_their_end(store: str, tmp_path: Path) -> None:
    """The last events before a place, in order; the latest runs first, without what was said in them."""
    async with k.running(store, tmp_path / "spans") as kernel:
        await kernel.spawn("s", k.spec(""))
        for run in ("a", "b"):
            await kernel.send("s", "a secret", run)
            await kernel.end("s", run)
        events = await kernel.events("s")
        last = await read(kernel, "event_page", "s", None, 3)
        assert last == events[-3:]
        assert await read(kernel, "event_page", "s", last[0]["seq"], 3) == events[-6:-3]
        runs = await read(kernel, "latest_runs", "s", 1)
        assert [run["run_id"] for run in runs] == ["b"]
        assert "secret" not in str(runs)
        with pytest.raises(UnknownSession):
            await read(kernel, "event_page", "nobody")


@pytest.mark.parametrize(
    ("options", "index"),
    [({}, "session_created"), ({"since": 1}, "session_created"), ({"agent": "clerk"}, "session_agent"),
     ({"agent": "clerk", "since": 1}, "session_agent"), ({"agent": "clerk", "since": 1, "until": 9}, "session_agent"),
     ({"agent": "clerk", "since": 1, "until": 9, "cursor": (5, "s")}, "session_agent"),
     ({"root_id": "s", "since": 1, "until": 9, "cursor": (5, "s")}, "session_root"),
     ({"by": "ended_at"}, "session_ended"), ({"by": "ended_at", "since": 1, "until": 9}, "session_ended"),
     ({"root_id": "s"}, "session_root"),
     ({"root_id": "s", "by": "ended_at"}, "session_ended"), ({"agent": "a", "by": "ended_at"}, "session_ended")],
)  # fmt: skip
async def test_what_a_filter_looks_at_is_found_by_an_index(tmp_path: Path, options: dict[str, Any], index: str) -> None:
    """An index, in the order of the page: no scan of the table, and a sort only of one tree."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        seen: list[tuple[str, Any]] = []
        with kernel.service.database.read() as connection:
            event.listen(connection, "before_cursor_execute", lambda _c, _u, sql, given, *_: seen.append((sql, given)))
            overview.page(connection, kernel.namespace, outcomes=["failed"], text="x", **options)
            found = [(sql, given) for sql, given in seen if "FROM session" in sql]
            assert found
            for sql, given in found:
                plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", given)]
                assert any(f"USING INDEX {index} " in line or f"COVERING INDEX {index} " in line for line in plan), plan
                assert not any(line.startswith("SCAN session") for line in plan), plan
