"""The job "survey a directory": tools against direct counting, the offline policy, kills, the numbers at the end."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from understudy.actors.tools import LoadedTool, ToolContext, describe, load
from understudy.actors.workspace import Workspace
from understudy.cluster.client.compiling import compile_spec
from understudy.cluster.client.results import SessionInfo
from understudy.errors import InvalidInput, ToolError, WorkspaceViolation
from understudy.events import ModelCallCompleted, SessionActivated, SessionCrashed, ToolFinished
from understudy.examples import chaos
from understudy.examples.chaos import Chaos, Count, kill_frame
from understudy.examples.survey import job
from understudy.examples.survey import policy as survey_policy
from understudy.examples.survey import report as survey_report
from understudy.examples.survey import rules as survey_rules
from understudy.examples.survey import tools as survey
from understudy.examples.survey.job import SurveyOutcome, part_of, survey_specs
from understudy.examples.survey.report import render_report, survey_directly
from understudy.examples.survey.view import SurveyView, outcome_to_json, render_tree, table_rows
from understudy.messages import Message, ToolCall
from understudy.testing.policies import default_policy

TOOLS = (survey.survey_parts, survey.measure, survey.definitions, survey.todos, survey.merge_report)
LEAD = {"survey_parts", "spawn_agent", "merge_report"}
SURVEYOR = {"measure", "definitions", "todos"}

PYTHON = b'''"""Module.

def not_code(): pass
"""
import os  # TODO: less

if os:
    def conditional(): pass

def public(a,
           b): return "class Text: pass"

async def waits(): ...

@staticmethod
def decorated(): ...

class Thing:
    def method(self): pass

def _private(): pass
async def _hidden(): pass
x = """
def inside(): TODO FIXME
"""'''

GO = b"package a\nfunc Public() {}\nfunc private() {}\nfunc (t *T) Method() {}\ntype T int\n"
TYPESCRIPT = b"export const a = 1\nexport default class Page {}\n  export function no() {}\n// FIXME TODO\n"


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with something of everything that is counted, or must not be."""
    root = write(
        tmp_path / "project",
        {
            "README.md": b"# Hello\n\nno newline at the end",
            "Makefile": b"all:\r\n\techo XXX\r\n",
            "src/module.py": PYTHON,
            "src/broken.py": b"def ok(): pass\nclass (:\n",
            "src/deep/er/a.go": GO,
            "src/empty.py": b"",
            "web/app.ts": TYPESCRIPT,
            "web/we|ird `name`.txt": b"XXXL is no marker, TODO_LATER neither\nbut TODO is | `here`\n",
            "data/blob.bin": b"\x00\x01TODO" * 100,
            "data/huge.py": b"def big(): pass  # TODO\n" * 50_000,
            "data/latin.txt": b"caf\xe9 FIXME caf\xe9\n",
            "node_modules/m.js": b"export class Dependency {}\n",
            "src/__pycache__/module.pyc": b"\x00",
            ".hidden/secret.py": b"def hidden(): pass\n",
            ".dotfile": b"visible\n",
        },
    )
    (root / "src" / "link.py").symlink_to(root / "src" / "module.py")
    (root / "linked").symlink_to(root / "src")
    (root / "dangling").symlink_to(root / "nowhere")
    os.mkfifo(root / "data" / "pipe")
    return root


def loaded() -> dict[str, LoadedTool]:
    """The tools as a frame loads them: by import path, from their stored specification."""
    specs = [spec for function in TOOLS for spec in describe(function, pickle=None)[0]]
    return {spec["name"]: load(spec, lambda _: b"", None) for spec in specs}


def context(root: Path) -> ToolContext:
    return ToolContext(session_id="s", run_id="r", round=1, call_id="r/1/0", epoch=1, agent="a", workspace=str(root))


def call(root: Path, name: str, **arguments: Any) -> Any:
    """A tool's result, parsed."""
    return json.loads(loaded()[name].function(**arguments, context=context(root)))


def converse(root: Path, offered: set[str], user: str, *, change: Callable[[str], str] = str) -> str:
    """Play a session of the job with the offline policy in this process; `change` alters what sub-agents answer."""
    tools = loaded()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "An agent." + job.OFFLINE_LINE},
        {"role": "user", "content": user},
    ]
    while True:
        body = {"messages": messages, "tools": [{"function": {"name": name}} for name in sorted(offered)]}
        reply = default_policy(body)
        if not reply.tool_calls:
            assert reply.text is not None
            return reply.text
        calls, results = [], []
        for index, (name, arguments) in enumerate(reply.tool_calls):
            assert name in offered
            assert isinstance(arguments, dict)
            text = json.dumps(arguments)
            calls.append({"id": f"call_{index}", "function": {"name": name, "arguments": text}})
            if name == "spawn_agent":
                result = change(converse(root, SURVEYOR, arguments["task"]))
            else:
                assert not list(tools[name].validator.iter_errors(arguments))
                result = tools[name].function(**arguments, context=context(root))
            results.append({"role": "tool", "tool_call_id": f"call_{index}", "content": result})
        messages += [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


def test_report_of_agents_equals_direct_counting(tree: Path) -> None:
    """The whole job, played with the offline policy, gives the report that is computed directly, byte for byte."""
    report = converse(tree, LEAD, "Survey this directory.")
    assert report == survey_directly(str(tree))
    assert report.startswith("# Survey of project\n")
    assert report == converse(tree, LEAD, "Survey this directory.")


def test_numbers(tree: Path) -> None:
    """The numbers are those that one counts by hand; links, pipes, hidden and generated directories don't count."""
    assert call(tree, "survey_parts") == {"directory": "project", "parts": [".", "data", "src", "web"]}
    top, source = call(tree, "measure", path="."), call(tree, "measure", path="src")
    assert (top["files"], top["lines"]) == (3, 3 + 2 + 1)
    assert source["languages"] == {
        "Go": {"files": 1, "bytes": 80, "lines": 5},
        "Python": {"files": 3, "bytes": len(PYTHON) + 24, "lines": PYTHON.count(b"\n") + 1 + 2},
    }
    assert source["largest"][0] == {"file": "src/module.py", "bytes": len(PYTHON)}
    data = call(tree, "measure", path="data")
    assert data["languages"]["(binary)"] == {"files": 1, "bytes": 600, "lines": 0}
    assert data["languages"]["Python"]["lines"] == 50_000
    defined = call(tree, "definitions", path="src")
    assert defined["names"] == {"Go": ["Method", "Public", "T"], "Python": ["Thing", "decorated", "public", "waits"]}
    assert (defined["count"], defined["unparsable"]) == (7, 1)
    assert call(tree, "definitions", path="web")["names"] == {"TypeScript": ["Page", "a"]}
    assert call(tree, "definitions", path="data")["too_large"] == 1
    assert call(tree, "todos", path="src")["markers"] == {"TODO": 2}
    assert [row["line"] for row in call(tree, "todos", path="src")["first"]] == [5, PYTHON.count(b"\n")]
    assert call(tree, "todos", path="web")["markers"] == {"FIXME": 1, "TODO": 1}
    assert call(tree, "todos", path=".")["first"] == [{"file": "Makefile", "line": 2, "text": "echo XXX"}]
    assert call(tree, "todos", path="data")["first"][0]["text"] == "caf\ufffd FIXME caf\ufffd"


PYTHON_LINES = [b"def f(): pass", b"class C: pass", b"async def g(): pass", b"  def m(): pass", b"async with a: pass"]
SPECIAL_LINES = [b'"""', b"x = (", b")", b"if 1:", b"@d", b"\\", b"", b"\r", b"\x0c", b"# coding: latin-1"]
MARKED_LINES = [b"# TODO", b"FIXME XXX", b"\xff TODO\xff", b"XXX\r", b"\x85TODO"]
OTHER_LINES = [b"export class A", b"func B()", b"pub fn c()", b"public class D", b"type E int"]
LINES = st.sampled_from([*PYTHON_LINES, *SPECIAL_LINES, *MARKED_LINES, *OTHER_LINES])
CONTENTS = st.builds(bytes.join, st.sampled_from([b"\n", b"\r\n", b""]), st.lists(LINES, max_size=12))
NAMES = st.sampled_from(["a.py", "b.ts", "c.go", "d/e.rs", "d/f.java", "d/g/h.py", "i/j", "i/k.md"])


@pytest.mark.thorough
@example({"a.py": b"\rdef f(): pass"})
@example({"a.py": b"\x0cdef f(): pass"})
@example({"a.py": b"# coding: latin-1\xff\ndef f(): pass"})
@settings(max_examples=60)
@given(st.dictionaries(NAMES, CONTENTS, max_size=5))
def test_tools_and_direct_counting_agree(files: dict[str, bytes]) -> None:
    """Whatever the files contain, both ways of counting come to the same report."""
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder), files)
        assert converse(root, LEAD, "Survey.") == survey_directly(folder)


def test_empty_directory(tmp_path: Path) -> None:
    """A directory without files gives a report that says so."""
    assert "0 files with 0 bytes" in converse(tmp_path, LEAD, "Survey.")
    assert converse(tmp_path, LEAD, "Survey.") == survey_directly(str(tmp_path))


def test_many_directories_share_the_top_part(tmp_path: Path) -> None:
    """Directories beyond the limit, and those whose name can't be passed on, are counted with the top."""
    for index in range(survey_rules.MAX_PARTS + 5):
        write(tmp_path, {f"d{index:03}/a.py": b"def f(): pass\n"})
    write(tmp_path, {"a\nb/c.py": b"class C: pass\n"})
    assert len(call(tmp_path, "survey_parts")["parts"]) == survey_rules.MAX_PARTS
    assert call(tmp_path, "measure", path=".")["files"] == 5 + 2
    report = converse(tmp_path, LEAD, "Survey.")
    assert f"{survey_rules.MAX_PARTS + 6} files" in report
    assert report == survey_directly(str(tmp_path))


def test_too_many_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part with too many files the first are counted, and the report says that there are more."""
    for module in (survey, survey_report):
        monkeypatch.setattr(module, "MAX_FILES", 3)
    write(tmp_path, {f"part/{name}": b"x\n" for name in ("a", "b/c", "b/d", "z")})
    assert call(tmp_path, "measure", path="part")["largest"] == [
        {"file": f"part/{name}", "bytes": 2} for name in ("a", "b/c", "z")
    ]
    report = converse(tmp_path, LEAD, "Survey.")
    assert "`part` has more than 3 files" in report
    assert report == survey_directly(str(tmp_path))


def test_unreadable_files_are_reported(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that can't be opened is counted with its size, and the report says so; nothing fails."""
    opened = Workspace.open_file

    def refuse(self: Workspace, location: Path) -> Any:
        if location.name == "module.py":
            raise ToolError("src/module.py: Permission denied")
        return opened(self, location)

    monkeypatch.setattr(Workspace, "open_file", refuse)
    measured = call(tree, "measure", path="src")
    assert measured["languages"]["(unreadable)"] == {"files": 1, "bytes": len(PYTHON), "lines": 0}
    assert "`src`: 1 files could not be read." in converse(tree, LEAD, "Survey.")


@pytest.mark.parametrize("name", sorted(SURVEYOR))
def test_tools_stay_in_the_workspace(tree: Path, name: str) -> None:
    """A part outside the workspace is refused, links included."""
    (tree / "out").symlink_to(tree.parent)
    for path in ("..", "/etc", "out"):
        with pytest.raises(WorkspaceViolation):
            call(tree, name, path=path)
    with pytest.raises(ToolError, match="not a directory"):
        call(tree, name, path="README.md")


def answers(root: Path) -> list[dict[str, Any]]:
    """What surveyors of all parts answer."""
    parts = call(root, "survey_parts")["parts"]
    return [{name: call(root, name, path=part) for name in sorted(SURVEYOR)} for part in parts]


def merge(root: Path, parts: list[Any]) -> str:
    report: str = loaded()["merge_report"].function(parts=parts, context=context(root))
    return report


def test_merging_takes_answers_as_models_write_them(tree: Path) -> None:
    """Answers may be objects or texts, in code blocks, in any order, twice, with parts that nobody asked for."""
    given_answers = answers(tree)
    foreign = {name: call(tree, name, path="src/deep") for name in sorted(SURVEYOR)}
    texts = [f"Here it is:\n```json\n{json.dumps(answer, indent=1)}\n```" for answer in reversed(given_answers)]
    assert merge(tree, [*texts, given_answers[0], foreign, "no idea", None, {}]) == survey_directly(str(tree))


def test_altered_and_missing_results_are_not_reported(tree: Path) -> None:
    """Results that a model changed, or didn't bring, are named as missing instead of being counted."""
    altered, mixed, _, *rest = answers(tree)
    altered["measure"]["files"] += 1
    mixed["todos"] = call(tree, "todos", path="src")
    report = merge(tree, [altered, mixed, *rest])
    for part in (".", "data", "src"):
        assert f"- `{part}` was not surveyed" in report
    assert "in 1 parts" in report
    lied = converse(tree, LEAD, "Survey.", change=lambda answer: answer.replace('"lines":6', '"lines":7'))
    assert "- `.` was not surveyed" in lied
    assert "- `src` was not" not in lied


def test_rendering_is_pure_and_total() -> None:
    """The same parts give the same bytes, are left as they are, and none at all is a report too."""
    parts = [{"part": "a|b`c"}]
    before = copy.deepcopy(parts)
    assert render_report("x", parts) == render_report("x", parts)
    assert parts == before
    assert "| `a\\|b'c` | – |" in render_report("x", parts)
    assert render_report("x", []).startswith("# Survey of x\n\n0 files")


def test_policy_depends_on_nothing_but_the_body() -> None:
    """The same body always gets the same reply and is not changed; part names survive any characters."""
    part = 'we "ird` \\ name'
    body = {
        "messages": [{"role": "user", "content": survey_policy.task(part)}],
        "tools": [{"function": {"name": "measure"}}],
    }
    before = copy.deepcopy(body)
    assert survey_policy.policy(body) == survey_policy.policy(body)
    assert body == before
    assert survey_policy.policy(body).tool_calls == (("measure", {"path": part}),)
    assert part_of(json.dumps({"task": survey_policy.task("src/core")})) == "src/core"


def test_policy_reports_what_it_cannot_do() -> None:
    """A failed listing, or a task without a part, ends in an answer that says so."""
    call_message = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "survey_parts"}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "ToolError: no workspace"}
    tools = [{"function": {"name": "survey_parts"}}]
    messages = [{"role": "user", "content": "go"}, call_message, result]
    assert "no workspace" in str(survey_policy.policy({"messages": messages, "tools": tools}).text)
    assert "no part" in str(survey_policy.policy({"messages": messages[:1]}).text)


def test_specs_name_the_policy_only_offline(tmp_path: Path) -> None:
    """Only the offline model's instructions say what to play; tools are referred to by import, none by value."""
    for offline in (True, False):
        spec = survey_specs(str(tmp_path), None, offline)
        compiled = compile_spec(spec, model="m", profile="p", pickle=None)
        assert not compiled.blobs
        assert not compiled.uses_own_code
        assert all(tool["on_crash"] == "rerun" for tool in compiled.spec["tools"])
        for agent in (compiled.spec, compiled.spec["agents"]["surveyor"]):
            assert ("offline-policy:" in agent["instructions"]) is offline
            assert agent["workspace"] == str(tmp_path)


def test_survey_of_no_directory(tmp_path: Path) -> None:
    """A directory that doesn't exist is refused before anything is started."""
    with pytest.raises(InvalidInput, match="not a directory"):
        job.run_survey(None, tmp_path / "none")  # type: ignore[arg-type]


@pytest.fixture
def process() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts processes that sleep, under a title of choice."""
    started: list[subprocess.Popen[bytes]] = []

    def start(title: str) -> subprocess.Popen[bytes]:
        script = "print(flush=True); import time; time.sleep(60)"
        made = subprocess.Popen([title, "-c", script], executable=sys.executable, stdout=subprocess.PIPE)
        started.append(made)
        assert made.stdout is not None
        made.stdout.readline()
        return made

    yield start
    for made in started:
        made.kill()
        made.communicate()


def test_restore_times_count_from_the_kill() -> None:
    """A crash whose kill is known lasts from then; another one from its detection, as its event says."""
    crashed = SessionCrashed(pid=7, seq=1, at=4_000)
    restored = SessionActivated(cause="resume", seq=2, at=5_000, down=500)
    killed, found = Count(), Count()
    killed.add("s", [crashed, restored], [], {7: 2_000})
    found.add("s", [crashed, restored], [], {8: 2_000})
    assert (killed.restore_ms, found.restore_ms) == ([3.0], [0.5])


def test_only_session_actors_are_killed(process: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """A process is killed only if it is titled as Ray titles a session actor; pids that are gone are no error."""
    other, service, actor = process("python"), process("ray::NodeActor.step"), process("ray::FrameActor.start")
    for pid in (0, 1, -1, os.getpid(), other.pid, service.pid):
        assert not kill_frame(pid)
    assert kill_frame(actor.pid)
    assert actor.wait() == -signal.SIGKILL
    assert not kill_frame(actor.pid)
    assert other.poll() is None
    assert service.poll() is None


def info(identifier: str, **more: Any) -> SessionInfo:
    fields: dict[str, Any] = {
        "id": identifier, "name": "surveyor", "kind": "agent", "status": "running", "parent_id": None, "root_id": "a",
        "depth": 0, "epoch": 1, "seq": 1, "actor_pid": None, "node_id": "here", "restarts": 0, "tokens_used": 0,
        "tokens_redone": 0, "created_at": 0, "updated_at": 0, "metadata": {}, "error": None,
    }  # fmt: skip
    return SessionInfo(**{**fields, **more})


def test_chaos_kills_each_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many kills as asked for, each of another process, of sessions at work on this machine; the seed decides."""
    monkeypatch.setattr(chaos, "KILL_GAP_SECONDS", 0.0)
    monkeypatch.setattr(chaos, "ACT_SECONDS", 0.0)
    monkeypatch.setattr(chaos, "kill_frame", lambda pid: pid != 13)
    tree = [info("10", actor_pid=10), *(info(str(pid), actor_pid=pid, parent_id="10") for pid in (11, 12, 13, 14))]
    tree += [info("away", actor_pid=20, node_id="there"), info("parked")]
    tree += [info("done", actor_pid=21, status="idle"), info("asks", actor_pid=22, status="waiting_for_model")]

    def kills(count: int, seed: int) -> list[int]:
        killer = Chaos(count, random.Random(seed), {"here"})
        for _ in range(20):
            killer.strike(tree)
        return list(killer.killed)

    assert sorted(kills(99, 0)) == [10, 11, 12, 14, 22]
    assert len(kills(2, 0)) == 2
    assert kills(99, 5) == kills(99, 5)
    assert len({tuple(kills(99, seed)) for seed in range(5)}) > 1
    assert kills(0, 0) == []


def test_chaos_kills_the_lead_and_sub_agents_while_they_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the seed, two kills are one of the lead and one of a sub-agent, and both acted; only where nobody acts
    for long one is killed that waits for the model."""
    monkeypatch.setattr(chaos, "KILL_GAP_SECONDS", 0.0)
    monkeypatch.setattr(chaos, "kill_frame", lambda pid: True)
    below = [info(str(pid), actor_pid=pid, parent_id="10") for pid in (11, 12)]
    waiting = info("13", actor_pid=13, parent_id="10", status="waiting_for_model")
    for seed in range(20):
        killer = Chaos(2, random.Random(seed), {"here"})
        for _ in range(5):
            killer.strike([info("10", actor_pid=10), *below, waiting])
        assert {pid == 10 for pid in killer.killed} == {True, False}
        assert 13 not in killer.killed
    killer = Chaos(1, random.Random(0), {"here"})
    killer.strike([waiting])
    assert killer.killed == {}
    monkeypatch.setattr(chaos, "ACT_SECONDS", 0.0)
    killer.strike([waiting])
    assert list(killer.killed) == [13]


def test_chaos_lets_sessions_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that was killed is left alone, whatever process it has now, until its round or its status changed."""
    monkeypatch.setattr(chaos, "KILL_GAP_SECONDS", 0.0)
    monkeypatch.setattr(chaos, "ACT_SECONDS", 0.0)
    monkeypatch.setattr(chaos, "kill_frame", lambda pid: True)
    killer = Chaos(99, random.Random(0), {"here"})
    for pid, state in enumerate(["running", "running", "waiting_for_model", "waiting_for_model", "running"], start=10):
        killer.strike([info("a", actor_pid=pid, status=state, round=1)])
    killer.strike([info("a", actor_pid=20, round=2)])
    assert list(killer.killed) == [10, 12, 20]


def test_count_of_a_calm_session() -> None:
    """A session without crashes has no repeats and no losses."""
    count = Count()
    messages = [
        Message("user", "x", seq=1),
        Message("assistant", None, (ToolCall("r/1/0", "measure", "{}"),), seq=2),
        Message("tool", "y", tool_call_id="r/1/0", seq=5),
    ]
    events = [
        ModelCallCompleted(seq=3, request_key="s/r/1/1", usage=[10, 5, 0, 0, False]),
        ToolFinished(seq=4, call_id="r/1/0"),
    ]
    count.add("s", list(events), messages)
    assert count == Count(tokens=15, tool_calls=1)


def test_count_sees_every_kind_of_loss() -> None:
    """Crashes, restore times, tokens paid twice, tools finished twice, gaps and missing results are each found."""
    count = Count()
    usage = [10, 0, 0, 0, False]
    events = [
        SessionCrashed(seq=1),
        SessionActivated(seq=2, cause="resume", down=12_500),
        SessionActivated(seq=3, cause="ready", down=99),
        ModelCallCompleted(seq=4, request_key="s/r/1/1", usage=usage),
        ModelCallCompleted(seq=5, request_key="s/r/1/2", usage=usage),
        ModelCallCompleted(seq=6, request_key="s/r/2/2", usage=usage, redone=True),
        ToolFinished(seq=7, call_id="r/1/0", executions=3),
        ToolFinished(seq=8, call_id="r/1/0"),
    ]
    messages = [Message("assistant", None, (ToolCall("r/1/0", "measure", "{}"),), seq=11)]
    count.add("s", list(events), messages)
    assert count == Count(1, [12.5], 30, 20, 1, 3, messages_lost=2 + 1)


OUTCOME = SurveyOutcome("# R\n", "completed", "survey", ["a", "b"], 2, [1.0, 9.0], 100, 0, 7, 0, 0, 2, [10, 11], 1.5)


def test_view_without_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal stdout gets the report as it is, then the table; progress goes to stderr, once a change."""
    lead = info("a", name="lead")
    with SurveyView() as view:
        for status in ("running", "waiting_for_model", "idle"):
            view.update([lead, info("b", parent_id="a", depth=1, status=status)], {"b": "src"})
        view.update([info("a", name="lead", restarts=1)], {})
    view.finish(OUTCOME)
    output, progress = capsys.readouterr()
    assert progress.splitlines() == [
        "lead: at work", "surveyor src: at work", "surveyor src: done", "lead: at work, restored once",
    ]  # fmt: skip
    assert output.startswith("# R\n\n")
    assert "5 ms median, 9 ms longest" in output


@pytest.mark.parametrize(
    ("crashes", "times", "shown"),
    [(0, [], "–"), (2, [], "none: nobody was at work"), (2, [3.0], "3 ms median, 3 ms longest")],
)
def test_table_says_why_nothing_was_restored(crashes: int, times: list[float], shown: str) -> None:
    """Crashes of sessions that only waited are followed by no restore, and the table says so."""
    outcome = dataclasses.replace(OUTCOME, crashes=crashes, restore_ms=times)
    assert dict(table_rows(outcome))["restore times"] == shown


@pytest.mark.parametrize(("wanted", "shown"), [(2, "2"), (3, "2 of 3: the work ended first")])
def test_table_says_that_fewer_were_killed(wanted: int, shown: str) -> None:
    """A survey may be over before all have been killed who were to be."""
    outcome = dataclasses.replace(OUTCOME, chaos=wanted)
    assert dict(table_rows(outcome))["actors killed on purpose"] == shown


def test_quiet_view_leaves_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json nothing of the view reaches stdout, and the outcome is plain JSON."""
    with SurveyView(quiet=True) as view:
        view.update([info("a")], {})
    assert capsys.readouterr().out == ""
    assert json.loads(json.dumps(outcome_to_json(OUTCOME)))["restore_ms"] == [1.0, 9.0]


def test_tree_shows_who_does_what() -> None:
    """Each line has status, round, tool, tokens, and after a crash the activation; names are not taken for markup."""
    lead = info("a", name="lead", status="waiting_for_child")
    child = info("b", parent_id="a", round=2, tools=("todos",), epoch=3, restarts=2, tokens_used=1234)
    shown = render_tree([lead, child], {"b": "[red]src"})
    assert "lead" in str(shown.label)
    line = str(shown.children[0].label)
    for text in ("\\[red]src", "running", "round 2", "todos", "epoch 3, restored 2 times", "1,234 tokens"):
        assert text in line


def test_the_command_of_the_example(tmp_path: Path) -> None:
    """It is a module to run, as the Makefile and the manifests do; a directory that is not there is refused at once."""
    command = [sys.executable, "-P", "-m", "understudy.examples.survey"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "--chaos" in done.stdout
    for words in ((str(tmp_path / "missing"),), (str(tmp_path), "--chaos", "-1")):
        wrong = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60, check=False)
        assert wrong.returncode == 2
