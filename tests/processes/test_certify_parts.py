"""The parts of `understudy certify` that are functions: what is compared, what is said of it, where a process dies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from understudy.cluster.certify.recording import Asked, Entry, call_key, label_of, read_request
from understudy.cluster.certify.runs import reaches_outside, spread
from understudy.cluster.certify.stage import BEFORE_COMMIT, Point, Record, only_reports
from understudy.cluster.certify.turns import first_at_work
from understudy.cluster.certify.verdict import (
    DIFFERENT,
    DIFFERENT_AFTER_REPORT,
    ENDED,
    EQUAL,
    EQUAL_BUT_REPORTED,
    NOT_INTERRUPTED,
    NOT_REACHED,
    NOT_SAFE,
    REPORTED,
    SAFE,
    declared,
    judge,
)
from understudy.cluster.certify.watched_frame import TOOL_BEGINS, TOOL_DONE
from understudy.cluster.certify.workspaces import File, Workspaces, changes
from understudy.errors import InvalidInput
from understudy.events import CustomEvent, ToolFinished, ToolProgress
from understudy.json_text import to_json
from understudy.reads import SessionRecord
from understudy.records import Batch, ModelRequest

from ..unit.test_imports import loaded_by

TEXTS = st.text(max_size=5)


@pytest.mark.thorough
def test_no_ray_is_needed_and_frames_stay_lean() -> None:
    """The command loads no Ray, and a session's process under it nothing that is heavy."""
    assert loaded_by({"frame": "import understudy.cluster.certify.watched_frame"}) == {}
    assert "ray" not in loaded_by(
        {"command": "import understudy.cluster.certify.runs, understudy.cluster.certify.report"}
    )


@pytest.mark.parametrize(("limit", "kept"), [(None, 10), (20, 10), (10, 10), (3, 3), (2, 2), (1, 1)])
def test_spread_keeps_both_ends(limit: int | None, kept: int) -> None:
    """A limited plan has so many different points, in order, with the first and the last where there is room."""
    found = spread(list(range(10)), limit)
    assert (len(found), found) == (kept, sorted(set(found)))
    assert kept == 1 or (found[0], found[-1]) == (0, 9)


# Requests.


def request(calls: list[list[str]], ids: list[str], session_id: str) -> ModelRequest:
    """A conversation with rounds of tool calls, under these ids of the endpoint's."""
    left = iter(ids)
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"go {session_id}"}]
    for results in calls:
        given = [next(left) for _ in results]
        function = {"name": "look", "arguments": f"{session_id}"}
        wanted = [{"id": item, "type": "function", "function": function} for item in given]
        messages.append({"role": "assistant", "content": None, "tool_calls": wanted})
        messages += [
            {"role": "tool", "tool_call_id": item, "content": text} for item, text in zip(given, results, strict=True)
        ]
    return ModelRequest("s/r/1", "offline", "offline", to_json(messages).encode())


CALLS = st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=3)


@given(CALLS, st.randoms())
def test_requests_compare_without_what_every_run_has_of_its_own(calls: list[list[str]], random: Any) -> None:
    """The endpoint's ids of calls and the sessions' ids make no difference; a result's text does."""
    number = sum(map(len, calls))
    ids = [f"id-{index}" for index in range(number)]
    others = random.sample([f"other-{index}" for index in range(number)], number)
    asked = read_request(request(calls, ids, "s-1"), {"s-1": "agent"})
    assert asked == read_request(request(calls, others, "s-2"), {"s-2": "agent"})
    for round_number, results in enumerate(calls):
        changed = [list(item) for item in calls]
        changed[round_number][-1] = results[-1] + "!"
        assert asked != read_request(request(changed, ids, "s-1"), {"s-1": "agent"})


def test_results_are_known_by_round_and_index() -> None:
    """A result's key is that of its call, so that a result which may differ can be left out."""
    asked = read_request(request([["a"], ["b", "c"]], ["x", "y", "z"], "s"), {})
    assert [(entry.call, entry.tool, entry.text) for entry in asked.entries if entry.role == "tool"] == [
        ("1/0", "look", "a"), ("2/0", "look", "b"), ("2/1", "look", "c"),
    ]  # fmt: skip


# Files.

FILES = st.dictionaries(st.sampled_from("abcd"), TEXTS.map(lambda text: File("file", text, text)), max_size=4)


@given(FILES, FILES, st.sets(st.sampled_from("abcd")))
def test_changes_are_what_differs(before: dict[str, File], after: dict[str, File], leave_out: set[str]) -> None:
    """Every path that is not equal in both is found once, but for those left out; back and forth mirror each other."""
    found = changes(before, after, leave_out)
    names = {name for name in {*before, *after} if before.get(name) != after.get(name)} - leave_out
    assert [change.path for change in found] == sorted(names)
    mirror = {"added": "removed", "removed": "added", "changed": "changed"}
    assert [mirror[change.change] for change in found] == [c.change for c in changes(after, before, leave_out)]


def test_runs_work_in_copies(tmp_path: Path) -> None:
    """Nested workspaces are one copy, links and modes are kept, and each run begins with what was there at first."""
    desk = tmp_path / "desk"
    (desk / "drawer").mkdir(parents=True)
    (desk / "drawer" / "pen").write_text("blue\n")
    (desk / "link").symlink_to("nowhere")
    child = {"workspace": str(desk / "drawer"), "agents": {}}
    spec = {"workspace": str(desk), "agents": {"child": child}}
    workspaces = Workspaces(spec, tmp_path / "scratch")
    workspaces.save()
    (desk / "late").touch()
    workspaces.reset()
    before, copied = workspaces.snapshot(), workspaces.redirected(spec)
    assert sorted(before) == ["drawer", "drawer/pen", "link"]
    assert copied["agents"]["child"]["workspace"] == f"{copied['workspace']}/drawer"
    pen = Path(copied["workspace"], "drawer", "pen")
    pen.write_text("red\n")
    (change,) = changes(before, workspaces.snapshot())
    assert (change.path, change.change, "-blue\n+red" in change.diff) == ("drawer/pen", "changed", True)
    pen.chmod(0o755)
    workspaces.reset()
    assert workspaces.snapshot() == before
    pen.chmod(0o755)
    assert [change.path for change in changes(before, workspaces.snapshot())] == ["drawer/pen"]
    assert (desk / "drawer" / "pen").read_text() == "blue\n"


def test_worktrees_are_refused(tmp_path: Path) -> None:
    """An agent below that works in a git worktree can't have a copy of it for each run."""
    below = {"workspace": None, "agents": {}, "worktree": {"repository": None}}
    with pytest.raises(InvalidInput, match="git worktrees"):
        Workspaces({"workspace": str(tmp_path), "agents": {"b": below}}, tmp_path.parent / "scratch")


def test_scratch_inside_a_workspace_is_refused(tmp_path: Path) -> None:
    """A workspace is not copied into itself."""
    with pytest.raises(InvalidInput, match="inside a workspace"):
        Workspaces({"workspace": str(tmp_path), "agents": {}}, tmp_path / "scratch")


# Verdicts.


def spec(**policies: str) -> dict[str, Any]:
    tools = [{"name": name, "on_crash": policy, "source": {"import": "m:f"}} for name, policy in policies.items()]
    return {"tools": tools, "agents": {}}


def record(victim: Point | None = None, result: str = "ok", **fields: Any) -> Record:
    """A run with one call of `act`."""
    entries = [Entry("user", "go"), Entry("assistant", "", calls=(("1/0", "act", "{}"),))]
    entries += [Entry("tool", result, "1/0", "act"), Entry("assistant", "done")]
    asked = {("agent", 1): Asked(tuple(entries[:1]), "o"), ("agent", 2): Asked(tuple(entries[:3]), "o")}
    given: dict[str, Any] = {
        "killed": victim is not None, "status": "completed", "transcript": {"agent": entries}, "asked": asked,
        "begun": {("agent", "1/0"): 1}, "executed": fields.get("begun", {("agent", "1/0"): 1}), **fields,
    }  # fmt: skip
    return Record(victim=victim, **given)


CALL = ("agent", "1/0")
BEGINS = Point(TOOL_BEGINS, "agent", 0, "1/0", "act")
DONE = Point(TOOL_DONE, "agent", 0, "1/0", "act")
LAST = Point(BEFORE_COMMIT, "agent", 3, what="end: completed")
ONCE, TWICE = {CALL: 1}, {CALL: 2}


@pytest.mark.parametrize(
    ("policy", "run", "state", "kind", "verdict"),
    [
        ("rerun", record(DONE, begun=TWICE), EQUAL, None, SAFE),
        ("rerun", record(DONE, "again", begun=TWICE), DIFFERENT, "rerun_changed", NOT_SAFE),
        ("rerun", record(DONE, begun=TWICE, files={"a": File("file", "x")}), DIFFERENT, "rerun_changed", NOT_SAFE),
        ("rerun", record(DONE, begun=TWICE, status="timeout"), ENDED, "ended", NOT_SAFE),
        ("report", record(DONE, "interrupted", in_doubt={CALL: "report"}), EQUAL_BUT_REPORTED, None, REPORTED),
        ("report", record(DONE, "?", in_doubt={CALL: "report"}, files={"a": File("file", "x")}), DIFFERENT_AFTER_REPORT,
         None, REPORTED),
        ("report", record(DONE, begun=TWICE), EQUAL, "ran_twice", NOT_SAFE),
        ("rerun", record(BEGINS, begun=TWICE, executed=ONCE), EQUAL, None, NOT_INTERRUPTED),
        ("rerun", record(BEGINS, "other", begun=TWICE, executed=ONCE), DIFFERENT, "differs", NOT_INTERRUPTED),
        ("rerun", record(LAST, "other"), DIFFERENT, "differs", NOT_INTERRUPTED),
        ("rerun", record(LAST, status="quarantined", error="died"), ENDED, "ended", NOT_INTERRUPTED),
        ("rerun", record(DONE, killed=False), NOT_REACHED, None, NOT_INTERRUPTED),
    ],
)  # fmt: skip
def test_one_death_one_verdict(policy: str, run: Record, state: str, kind: str | None, verdict: str) -> None:
    """What a run with one death shows, and what is said of the tool that it interrupted."""
    found = judge(spec(act=policy), record(), record(), [run])
    assert [point.comparison.state for point in found.points] == [state]
    assert [finding.kind for finding in found.findings] == ([kind] if kind else [])
    assert [tool.verdict for tool in found.tools] == [verdict]


def test_what_was_seen_before_a_death_is_not_blamed_on_it() -> None:
    """A result that differed before anybody had died is left out of the comparison, and reported once."""
    confirmed = record(LAST, "other", confirmed={CALL})
    found = judge(spec(act="rerun"), record(), record(confirmed={CALL}), [confirmed, confirmed])
    assert [finding.kind for finding in found.findings] == ["not_deterministic"]
    assert {point.comparison.state for point in found.points} == {EQUAL}


def test_files_that_differ_without_a_death_are_noted() -> None:
    """A file with the time in it, say, is neither compared nor a finding."""
    clean, control = (record(files={"log": File("file", at)}) for at in ("now", "later"))
    found = judge(spec(act="rerun"), clean, control, [record(LAST, files={"log": File("file", "last")})])
    assert (found.findings, found.points[0].comparison.state) == ((), EQUAL)
    assert any("log" in note for note in found.notes)


@pytest.mark.parametrize(("result", "hint"), [("ok", "may be possible"), ("again", "rightly not declared rerun")])
def test_a_reported_tool_that_was_made_to_rerun_gives_a_hint(result: str, hint: str) -> None:
    """Runs in which a tool was forced to rerun say whether it could be declared so; they are no findings."""
    forced = record(DONE, result, begun=TWICE, forced="act")
    found = judge(spec(act="report"), record(), record(), [record(DONE, "?", in_doubt={CALL: "report"}), forced])
    assert found.findings == ()
    assert hint in found.tools[0].hint


def test_what_tools_report_is_no_point() -> None:
    """A commit of reports alone is none: how many there are is a matter of time. With anything else it is one."""
    reports = (ToolProgress(call_id="r/1/0"), CustomEvent(call_id="r/1/0", name="row"))
    assert only_reports(Batch("s", 1, 1, 4, entries=reports))
    assert not only_reports(Batch("s", 1, 1, 4, entries=(*reports, ToolFinished(call_id="r/1/0"))))
    assert not only_reports(Batch("s", 1, 1, 4, entries=reports, wait="idle"))
    assert not only_reports(Batch("s", 1, 1, 4))


# Sub-agents in the background.


def row(session_id: str, parent_id: str | None = None, *, wait: str | None = "model", active: int = 1) -> SessionRecord:
    """A session of a tree."""
    fields: dict[str, Any] = dict.fromkeys(SessionRecord.__struct_fields__, 0)
    given = {"session_id": session_id, "parent_id": parent_id, "wait": wait, "active": active}
    return SessionRecord(**{**fields, "pending": None, "tools": None, **given})


@pytest.mark.parametrize(
    ("tree", "whose", "first"),
    [
        ([row("lead"), row("a", "lead"), row("b", "lead")], "lead", "a"),
        ([row("lead"), row("a", "lead"), row("b", "lead")], "a", None),
        ([row("lead"), row("a", "lead"), row("b", "lead")], "b", "a"),
        ([row("lead"), row("a", "lead", active=0), row("b", "lead")], "b", None),
        ([row("lead", wait=None), row("a", "lead")], "a", "lead"),
        ([row("lead", wait="timer"), row("a", "lead")], "a", "lead"),
        ([row("lead", wait="child"), row("waited for", "lead"), row("b", "lead")], "waited for", None),
        ([row("lead", wait="child"), row("waited for", "lead"), row("b", "lead")], "b", None),
        ([row("lead"), row("a", "lead"), row("below", "a")], "lead", "a"),
        ([row("lead"), row("a", "lead"), row("below", "a")], "below", None),
        ([row("lead"), row("a", "lead", active=0), row("below", "a")], "b", None),
    ],
)
def test_whose_turn_it_is(tree: list[SessionRecord], whose: str, first: str | None) -> None:
    """`a` and `b` are in the background: they go before their parent, in order, while it waits; others are not held."""
    found = first_at_work(whose, tree, {"waited for": 0, "a": 1, "b": 2, "below": 3}, {"a", "b"})
    assert (found.session_id if found is not None else None) == first


def test_turns_are_an_order() -> None:
    """Of any two sessions that wait for their models at most one must wait for the other: nobody waits for ever."""
    tree = [row("r"), row("a", "r"), row("b", "r"), row("c", "r"), row("a1", "a"), row("b1", "b"), row("b2", "b")]
    started = {name: number for number, name in enumerate(("a", "a1", "b", "b1", "b2", "c"))}
    for chosen in itertools.chain.from_iterable(itertools.combinations(started, size) for size in range(7)):
        rows = {item.session_id: item for item in tree}
        while left := [name for name, item in rows.items() if item.active]:
            free = [name for name in left if first_at_work(name, rows.values(), started, chosen) is None]
            assert free, (chosen, left)
            rows[free[0]] = replace(rows[free[0]], active=0)


def test_calls_of_another_run_are_other_calls() -> None:
    """Rounds begin at 1 in each run of a session: its calls, and what its model is asked, say which run they are of."""
    names = {"c-1": "agent › reader 1/0"}
    assert (call_key("certify/2/0", names), call_key("task/2/0", names)) == ("2/0", "2/0")
    assert call_key("news.c-1/2/0", names) == "news.agent › reader 1/0: 2/0"
    assert label_of("agent", "news.c-1", names) == "agent, news.agent › reader 1/0"


def test_what_acts_outside_is_named() -> None:
    """Before it runs them many times, the command names tools and hooks of the user's, and memory providers."""
    source = {"source": {"import": "m:f"}}
    own = {
        "tools": [{"name": "mine", **source}, {"name": "notes", "source": {"builtin": "add_note"}}], "agents": {},
        "hooks": [{"name": "rules", **source}], "memory": {"providers": [{"name": "customers", **source}]},
    }  # fmt: skip
    assert reaches_outside({"tools": [], "agents": {"a": own}}) == ["customers", "mine", "rules"]


def test_what_the_store_answers_is_not_judged() -> None:
    """No process executes these tools, so that none can die in the middle; one of the user's of that name is."""
    names = ("add_note", "post_to_board", "start_agent", "spawn_agent", "wait", "request_user_input", "recall")
    tools = [{"name": name, "on_crash": "rerun", "source": {"builtin": name}} for name in (*names, "read_file")]
    mine = {"name": "wait", "on_crash": "report", "source": {"import": "m:wait"}}
    assert declared({"tools": tools, "agents": {"a": {"tools": [mine], "agents": {}}}}) == {
        "read_file": "rerun", "wait": "report",
    }  # fmt: skip
