"""`understudy run`, on a local cluster: what it prints where, how it ends, and how it goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from understudy.cluster.cli import following, run_command, tools_command
from understudy.cluster.cli.following import Screen, progress, read_answer
from understudy.cluster.cli.main import app
from understudy.cluster.client import client
from understudy.errors import InvalidInput
from understudy.events import (
    CustomEvent,
    Event,
    ModelCallStarted,
    ReasoningDelta,
    SessionActivated,
    SessionCrashed,
    StreamRestarted,
    TextDelta,
    ToolCallDelta,
    ToolFinished,
    ToolProgress,
)
from understudy.reads import PendingInput
from understudy.spec import AgentSpec
from understudy.testing import LocalCluster
from understudy.testing.offline import Faults

Run = Callable[..., Result]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


@pytest.fixture
def run(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`understudy run` with these arguments, connected to the local cluster; stdin and stdout are no terminals."""

    class Connected:
        @classmethod
        def connect(cls, store: str | None, **_options: Any) -> LocalCluster:
            return cluster

    for name in ("OPENAI_API_KEY", "OPENAI_API_KEY_FILE", "UNDERSTUDY_MODEL", "UNDERSTUDY_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "Cluster", Connected)
    monkeypatch.setattr(cluster, "close", lambda: None)
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, stdin="": CliRunner().invoke(app, ["run", *arguments], input=stdin)


def ids(cluster: LocalCluster) -> list[str]:
    return [info.id for info in cluster.sessions()]


def test_the_answer_is_all_that_stdout_has(run: Run, cluster: LocalCluster, tmp_path: Path) -> None:
    """Given a tool that reads a file of the current directory, then stdout has the answer, and stderr the call, the
    session, its tokens and how to continue."""
    (tmp_path / "note.txt").write_text("forty-two")
    done = run('call read_file {"path": "note.txt"}', "--tool", "files")
    assert done.exit_code == 0, done.output
    assert "forty-two" in done.stdout
    assert done.stdout.startswith("offline: ")
    (session,) = ids(cluster)
    assert '· read_file {"path":"note.txt"}' in done.stderr
    assert f"session {session}, 2 rounds, " in done.stderr
    assert f'understudy run --session {session} "…"' in done.stderr
    assert "`offline`, which only echoes" in done.stderr


def test_a_session_is_continued_as_it_is(run: Run, cluster: LocalCluster) -> None:
    """Given no options of an agent, then a session that exists keeps its specification, and one that does not is
    created under the id; the same run id works once."""
    cluster.spawn(AgentSpec(name="clerk", instructions="Be brief."), session_id="desk")
    assert run("one", "--session", "desk", "--run-id", "r").stdout == "offline: one\n"
    assert run("one", "--session", "desk", "--run-id", "r").stdout == "offline: one\n"
    assert run("two", "--session", "new").exit_code == 0
    assert [(info.id, info.name) for info in cluster.sessions()] == [("new", "assistant"), ("desk", "clerk")]
    assert len(cluster.session("desk").runs()) == 1
    assert cluster.model_server.stats.requests == 2
    system = cluster.model_server.requests[0].body["messages"][0]
    assert system == {"role": "system", "content": "Be brief."}


def test_a_session_goes_on_as_another_agent(run: Run, cluster: LocalCluster) -> None:
    """Given options of an agent and a session that exists, then it goes on as that agent, and what differs is shown;
    nothing is shown where nothing differs."""
    assert run("one", "--session", "s", "--instructions", "Be brief.").exit_code == 0
    assert "another agent" not in run("two", "--session", "s", "--instructions", "Be brief.").stderr
    assert "another agent: instructions" in run("three", "--session", "s", "--instructions", "Be long.").stderr


def test_an_input_to_a_session_is_followed_in_the_same_way(run: Run, cluster: LocalCluster) -> None:
    """Given `understudy send`, then its output and exit codes are those of `understudy run`."""
    session = cluster.spawn(AgentSpec(name="clerk", tools=["request_user_input"]), session_id="s")
    done = CliRunner().invoke(app, ["send", "s", "hello"])
    assert (done.exit_code, done.stdout) == (0, "offline: hello\n")
    asked = CliRunner().invoke(app, ["send", "s", 'call request_user_input {"prompt": "Which?"}', "--json"])
    assert asked.exit_code == run_command.WAITS
    (pending,) = session.pending()
    assert json.loads(asked.stdout)["pending"][0]["call_id"] == pending.call_id


def test_a_run_is_followed_again(run: Run) -> None:
    """Given a session and a run id without a prompt, then that run's result is waited for; an unknown one is an error
    of the command, not of its usage."""
    run("one", "--session", "s", "--run-id", "r")
    assert run("--session", "s", "--run-id", "r").stdout == "offline: one\n"
    assert run("--session", "s", "--run-id", "other").exit_code == 1


def test_json_is_one_document(run: Run) -> None:
    """Given `--json`, then stdout is the result as data."""
    found = json.loads(run("-", "--json", "--session", "s", stdin="from stdin").stdout)
    assert (found["text"], found["status"], found["session_id"]) == ("offline: from stdin", "completed", "s")


def test_a_run_that_does_not_complete(run: Run, tmp_path: Path) -> None:
    """Given a run that reaches its limit, then the exit code is 1 and stderr says why; so it is after `--timeout`."""
    (tmp_path / "a").write_text("a")
    done = run('call read_file {"path": "a"}', "--tool", "read_file", "--max-rounds", "1")
    assert (done.exit_code, "round_limit" in done.stderr, done.stdout) == (1, True, "")
    assert re.search(r"round_limit .*\S", done.stderr)
    assert "resume" in done.stderr
    late = run('call wait {"seconds": 60}', "--tool", "wait", "--timeout", "0.2", "--session", "s")
    assert late.exit_code == 1
    assert "deadline_exceeded" in late.stderr
    assert "it goes on" in late.stderr
    assert "wait for it" in late.stderr


def test_a_run_that_failed_says_why_once_and_how_it_is_done_again(run: Run, cluster: LocalCluster) -> None:
    """Given a model call that is refused, then its reason is on stderr once, with the run's status and the command that
    does the same again; that command is not offered where the run completed."""
    cluster.model_server.faults = Faults(fail_first=1, fail_status=400)
    failed = run("hello", "--session", "s")
    assert failed.exit_code == 1
    assert failed.stderr.count("fails with 400 as it was told to") == 1
    assert "\nfailed\n" in failed.stderr
    assert "do it again: understudy resume s --again" in failed.stderr
    again = CliRunner().invoke(app, ["resume", "s", "--again", "--json"])
    assert run("--session", "s", "--run-id", json.loads(again.stdout)["run_id"]).stdout == "offline: hello\n"
    assert "--again" not in run("more", "--session", "s").stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "say what to do"),
        ((" ",), "content"),
        (("x", "--tool", "flies", "--tool", "no:where"), "did you mean 'files'?"),
        (("x", "--tool", "flies", "--tool", "no:where"), "ModuleNotFoundError"),
        (("x", "--sandbox", "jail"), "'jail' is not one of"),
        (("x", "--run-id", "r"), "--session"),
        (("x", "--session", "s", "--run-id", "no id"), "--run-id 'no id'"),
        (("x", "--dry-run", "--session", "s"), "leave out --session"),
    ],
)
def test_what_is_refused_changes_nothing(
    run: Run, cluster: LocalCluster, arguments: tuple[str, ...], problem: str
) -> None:  # fmt: skip
    """Wrong usage is reported, all of it at once, with exit code 2 and without a session."""
    done = run(*arguments)
    assert done.exit_code == 2
    assert problem in " ".join(done.stderr.split())
    assert ids(cluster) == []


def test_a_question_that_nobody_is_there_to_answer(run: Run, cluster: LocalCluster) -> None:
    """Given an agent that asks, and no terminal, then the exit code is 3 and stderr has the command that answers;
    after the answer the run is followed to its end."""
    text = 'call request_user_input {"prompt": "Which colour?"}'
    done = run(text, "--tool", "request_user_input", "--session", "s", "--run-id", "r")
    assert done.exit_code == run_command.WAITS
    (asked,) = cluster.session("s").pending()
    assert f"understudy answer s {asked.call_id} TEXT" in done.stderr
    assert "understudy run --session s --run-id r" in done.stderr
    found = json.loads(run("--session", "s", "--run-id", "r", "--json").stdout)
    assert (found["status"], found["pending"][0]["call_id"]) == ("waiting_for_input", asked.call_id)
    cluster.session("s").answer(asked.call_id, "blue")
    again = run("--session", "s", "--run-id", "r")
    assert (again.exit_code, again.stdout) == (0, "offline: blue\n")


def test_a_question_of_a_sub_agent(run: Run, cluster: LocalCluster, tmp_path: Path) -> None:
    """Given a sub-agent that asks while its parent waits, then the command ends as with a question of its own."""
    (tmp_path / "lead.toml").write_text(
        'name = "lead"\ntools = ["spawn_agent"]\n[[agents]]\nname = "scout"\ntools = ["request_user_input"]\n'
    )
    task = 'call request_user_input {"prompt": "Where?"}'
    done = run(f"call spawn_agent {json.dumps({'task': task})}", "--agent", "lead.toml", "--session", "s")
    assert done.exit_code == run_command.WAITS
    (child,) = cluster.session("s").children()
    assert f"+ sub-agent scout ({child.id})" in done.stderr
    assert f"understudy answer {child.id} " in done.stderr


def test_a_question_at_a_terminal(run: Run, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a person at the terminal, then the question is asked there, and its answer taken, an option by number."""
    monkeypatch.setattr(run_command, "_at_terminal", lambda: True)
    text = 'call request_user_input {"prompt": "Which?", "options": ["red", "blue"]}'
    done = run(text, "--tool", "request_user_input", stdin="2\n")
    assert (done.exit_code, done.stdout) == (0, "offline: blue\n")
    assert "1. red" in done.stderr
    put_off = run(text, "--tool", "request_user_input", stdin="\n")
    assert put_off.exit_code == run_command.WAITS


def question(kind: str, options: tuple[str, ...] = ()) -> PendingInput:
    return PendingInput("r/1/0", 1, "r", kind, "?", options, 0)


def test_what_a_line_at_the_terminal_says() -> None:
    """A number is an option where there is one; a call in doubt can be run again, or has failed for a reason."""
    assert read_answer("2", question("question", ("a", "b"))) == ("b", {})
    assert read_answer("3", question("question", ("a", "b"))) == ("3", {})
    assert read_answer("/rerun", question("question")) == ("/rerun", {})
    assert read_answer("/rerun", question("in_doubt")) == ("", {"rerun": True})
    assert read_answer("/failed no paper", question("in_doubt")) == ("no paper", {"failed": True})
    with pytest.raises(InvalidInput, match="say why"):
        read_answer("/failed", question("in_doubt"))


def test_a_kind_of_question_that_is_not_known(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a person at the terminal and a kind that this version can't take an answer to, then it is shown with the
    command that answers it."""
    monkeypatch.setattr(run_command, "_at_terminal", lambda: True)
    monkeypatch.setattr(following, "ANSWERED_HERE", ())
    done = run('call request_user_input {"prompt": "Which?"}', "--tool", "request_user_input", stdin="x\n")
    assert done.exit_code == run_command.WAITS
    assert "understudy answer " in done.stderr


def test_the_first_request_is_the_one_that_is_sent(run: Run, cluster: LocalCluster, tmp_path: Path) -> None:
    """Given an agent with instructions, tools and parameters, then `--dry-run` prints what its first request is when
    it is sent, and asks nobody."""
    (tmp_path / "agent.toml").write_text(
        'name = "a"\ninstructions = "Be brief."\ntools = ["explore", "wait"]\nparameters = { temperature = 0 }\n'
    )
    arguments = ("hello", "--agent", "agent.toml", "--tool", "write_file")
    shown = json.loads(run(*arguments, "--dry-run").stdout)
    assert ids(cluster) == []
    assert run(*arguments).exit_code == 0
    sent = cluster.model_server.requests[0].body
    assert {name: sent[name] for name in ("model", "messages", "tools")} | {"parameters": {"temperature": 0}} == shown
    assert sent["temperature"] == 0


def test_options_go_over_the_file(run: Run, tmp_path: Path) -> None:
    """Given a file and options, then the options' values count, tools are added once, and other budgets stay."""
    from understudy.cluster.client.agent_options import AgentOptions

    (tmp_path / "agent.toml").write_text(
        'name = "a"\ninput = "go"\ntools = ["wait"]\nmax_rounds = 9\n'
        'budget = [{ tokens = 5, rounds = 6 }, { scope = "run", rounds = 7 }]\n'
    )
    options = AgentOptions(
        tmp_path / "agent.toml", ("wait", "glob"), "m", "Hi.", allow_bash=True, sandbox="none", max_rounds=3,
        budget_tokens=8,
    )  # fmt: skip
    spec, text = options.read(tmp_path)
    assert (text, spec.tools, spec.workspace) == ("go", ("wait", "glob", "bash"), str(tmp_path))
    assert (spec.model, spec.instructions, spec.sandbox.backend, spec.max_rounds) == ("m", "Hi.", "none", 3)
    limits = [(budget.scope, budget.tokens, budget.rounds) for budget in spec.budgets]
    assert limits == [("tree", 8, 6), ("run", None, 7)]
    assert not AgentOptions()


def test_a_tool_of_ones_own(run: Run, cluster: LocalCluster, tmp_path: Path) -> None:
    """Given `module:function` of the current directory, then the agent has that tool."""
    (tmp_path / "own_tool_of_run.py").write_text(
        "from understudy import tool\n@tool\ndef shout(text: str) -> str:\n    return text.upper()\n"
    )
    assert run('call shout {"text": "hey"}', "--tool", "own_tool_of_run:shout").stdout == "offline: HEY\n"


def test_an_answer_that_fits_a_schema(run: Run, tmp_path: Path) -> None:
    """`--output-schema FILE`: the answer is JSON that fits, and `--json` has it as data; a file that has no schema is
    refused before anything is asked."""
    (tmp_path / "city.json").write_text('{"type": "object", "properties": {"name": {"type": "string"}}}')
    done = run("Which city?", "--output-schema", "city.json", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["output"] == json.loads(found["text"])
    (tmp_path / "none.json").write_text("[1]")
    done = run("Which city?", "--output-schema", "none.json")
    assert (done.exit_code, "it must be an object" in done.stderr) == (2, True), done.output


def test_a_crash_on_the_way(run: Run, cluster: LocalCluster) -> None:
    """Given a session actor that dies, then stderr tells of the death and of the recovery, and stdout has the answer
    once."""
    cluster.kill_at(3)
    done = run("call list_jobs {}\n", "--tool", "list_jobs")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("offline: ") == 1
    assert "the agent's process is gone" in done.stderr
    assert "restored after" in done.stderr


def test_the_shell_completes_tools() -> None:
    """Groups and built-in tools are offered for `--tool`."""
    assert tools_command.known_tools("wri") == ["write_file"]
    assert {"files", "explore", "wait"} <= set(tools_command.known_tools(""))


class Terminal:
    """Both streams, in the order in which they are written."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        return False


def test_text_and_progress_do_not_share_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given text that streams, then a line of progress begins a line, a restarted stream says that the text above is
    void, and nothing that a model wrote controls the terminal."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    screen = Screen(streams=True)
    screen.text("Hel")
    screen.void()
    screen.text("Hello\x1b[2J")
    screen.note("· tool")
    screen.end_line()
    lines = terminal.written.splitlines()
    assert lines[0] == "Hel"
    assert "void" in lines[1]
    assert lines[2:] == ["Hello�[2J", "· tool"]
    quiet = Screen(streams=False)
    quiet.text("nothing")
    quiet.void()
    assert terminal.written.splitlines() == lines


class FixedRun:
    """A run whose events are these."""

    def __init__(self, *events: Event) -> None:
        self.events = events

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def result(self) -> str:
        return "ended"


def test_only_the_text_of_answers_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a call for something else, a call whose text comes before the event of its start, and one that was lost,
    then the terminal has the answers' text, in order, and a line says what is void."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    events = (
        ModelCallStarted(request_key="s/r/1/1", purpose="fold_answer"),
        TextDelta(request_key="s/r/1/1", text="a summary"),
        TextDelta(request_key="s/r/2/1", text="Hel"),
        ModelCallStarted(request_key="s/r/2/1"),
        StreamRestarted(request_key="s/r/2/2"),
        TextDelta(request_key="s/r/2/2", text="Hello"),
    )
    unused: Any = None
    run: Any = FixedRun(*events)
    assert following.Following(unused, unused, run, Screen(streams=True), False).result() == "ended"
    lines = terminal.written.splitlines()
    assert [lines[1], lines[3]] == ["Hel", "Hello"]
    assert "folded" in lines[0]
    assert "void" in lines[2]
    assert "a summary" not in terminal.written


def test_reasoning_is_shown_to_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a model that reasons before it answers and calls a tool, then the terminal has the answer; the reasoning
    only if it was asked for, on lines of its own, and pieces of the tool call's arguments never."""
    monkeypatch.setattr(following.errors, "_force_terminal", True)
    for thinks in (False, True):
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stderr", terminal)
        events = (
            ModelCallStarted(request_key="s/r/1/1"),
            ReasoningDelta(request_key="s/r/1/1", text="I won"),
            ReasoningDelta(request_key="s/r/1/1", text="der"),
            TextDelta(request_key="s/r/1/1", text="Hello"),
            ToolCallDelta(request_key="s/r/1/1", tool="secret", arguments="{}"),
        )
        unused: Any = None
        run: Any = FixedRun(*events)
        screen = Screen(streams=True, thinks=thinks)
        assert following.Following(unused, unused, run, screen, False).result() == "ended"
        lines = re.sub(r"\x1b\[\d*m", "", terminal.written).splitlines()
        assert lines == (["I wonder", "Hello"] if thinks else ["Hello"])


def test_reports_are_shown_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given what tools report, then a person at a terminal sees it, and no file gets it."""
    reports = (
        (ToolProgress(tool="count", fraction=0.5, text="half"), "  count: 50% half"),
        (ToolProgress(tool="count"), "  count:"),
        (CustomEvent(tool="count", name="file", data={"n": 1}), '  count: file {"n":1}'),
    )
    for is_terminal in (True, False):
        monkeypatch.setattr(following.errors, "_force_terminal", is_terminal)
        expected = [(line, "dim") if is_terminal else None for _, line in reports]
        assert [progress(event) for event, _ in reports] == expected


def test_which_events_are_shown() -> None:
    """Crashes, recoveries and failed tools are shown; a tool that succeeded, and a first activation, are not."""
    assert progress(SessionActivated(cause="ready")) is None
    assert progress(ToolFinished(tool="a")) is None
    restored = progress(SessionActivated(cause="resume", down=23_000, epoch=2))
    assert restored is not None
    assert "23 ms" in restored[0]
    crashed = progress(SessionCrashed(cause="process_died"))
    assert crashed is not None
    assert "process_died" in crashed[0]
    failed = progress(ToolFinished(tool="a", outcome="error", error_message="no paper"))
    assert failed is not None
    assert "no paper" in failed[0]
