"""An agent as a file: what is read, what is found from its directory, and that all mistakes are reported at once."""

from __future__ import annotations

import itertools
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from understudy.access import CommandRule, Sandbox, WebPolicy
from understudy.actors.tools import tool_names
from understudy.cluster.cli.main import app
from understudy.cluster.client.agent_file import read_agent
from understudy.cluster.client.compiling import compile_spec
from understudy.errors import InvalidInput, InvalidSpec
from understudy.mcp_servers import McpServer
from understudy.spec import AgentSpec, Budget, Context, Delegation, Memory, RestartPolicy, Supervision, WorkflowLimits
from understudy.workflows import CREATE_WORKFLOW

TOOLS = """
from understudy import hook, tool

@hook("run_start")
def notes(context):
    return None

@tool(on_crash="rerun")
def look(name: str) -> str:
    return name

class Desk:
    @staticmethod
    @tool
    def ring() -> str:
        return "rang"

def plain() -> str:
    return "no tool"
"""

NUMBERS = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module beside the agent's file, of a name that no other test imports."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"agent_file_tools_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(TOOLS)
    return name


@pytest.fixture
def skills(tmp_path: Path) -> Path:
    """A folder with a skill, beside the agent's file."""
    (tmp_path / "skills" / "pdf").mkdir(parents=True)
    (tmp_path / "skills" / "pdf" / "SKILL.md").write_text("---\nname: pdf\ndescription: d\n---\nFill it.")
    return tmp_path / "skills"


def write(directory: Path, data: dict[str, Any]) -> Path:
    path = directory / "agent.json"
    path.write_text(json.dumps(data))
    return path


def test_toml_with_tools_and_sub_agents(tmp_path: Path, module: str) -> None:
    """Fields, nested tables, tools by name and import path, workspaces relative to the file: all are found."""
    (tmp_path / "desk").mkdir()
    (tmp_path / "agent.toml").write_text(
        f"""
        name = "lead"
        input = "go"
        tools = ["files", "spawn_agent", "{module}:look"]
        workspace = "desk"
        budget = {{ tokens = 1000 }}
        environment = ["DATABASE_URL"]

        [[agents]]
        name = "clerk"
        tools = ["{module}:Desk.ring"]
        """
    )
    found = read_agent(tmp_path / "agent.toml")
    look, ring = found.spec.tools[2], found.spec.agents[0].tools[0]
    assert (found.input, found.directory, found.spec.workspace) == ("go", tmp_path, str(tmp_path / "desk"))
    assert (found.spec.name, found.spec.budget) == ("lead", Budget(tokens=1000))
    assert (found.spec.environment, found.spec.agents[0].environment) == (("DATABASE_URL",), ())
    assert found.spec.tools[:2] == ("files", "spawn_agent")
    assert (look("x"), ring()) == ("x", "rang")


def test_every_problem_is_reported_at_once(tmp_path: Path, module: str) -> None:
    """Unknown fields and tools, functions that are none or can't be imported, at any depth: one error names them."""
    tools = [f"{module}:plain", f"{module}:missing", "no_such_tool", "no_such_module:tool", 3]
    child = {"name": "child", "tools": ["nothing"], "max_rounds": 0, "workspace": "nowhere", "environment": ["A=1"]}
    path = write(tmp_path, {"name": "a", "colour": "red", "tools": tools, "agents": [child], "input": ["go"]})
    with pytest.raises(InvalidSpec) as raised:
        read_agent(path)
    problems = {item["field"]: item["problem"] for item in raised.value.details["problems"]}
    assert set(problems) == {
        "input", "tools.0", "tools.1", "tools.2", "tools.3", "tools", "colour", "agents.0.tools.0",
        "agents.0.workspace", "agents.0.max_rounds", "agents.0.environment.0",
    }  # fmt: skip
    assert "is no function decorated with @tool" in problems["tools.0"]
    assert "AttributeError" in problems["tools.1"]
    assert "known: core, explore" in problems["tools.2"]
    assert "ModuleNotFoundError" in problems["tools.3"]
    assert all(field in str(raised.value) for field in problems)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("agent.toml", 'name = "a', "is not TOML"),
        ("agent.json", "{", "is not JSON"),
        ("agent.toml", b'name = "\xff"', "is not TOML"),
        ("agent.json", "[1]", "must hold an object"),
        ("missing.toml", None, "can't be read"),
        ("agent.md", "Be brief.", "must begin with fields between two lines of `---`"),
        ("agent.md", "---\nname: a\nname: b\n---", "line 3: 'name' is there twice"),
        ("agent.md", "---\nname: a\ntools: [\n---\nx", "not YAML: line 4"),
        ("agent.md", "---\nname: !!python/name:os.system\n---", "not YAML: line 2: could not determine a constructor"),
        ("agent.md", "---\nname: \x00\n---", "not YAML: special characters are not allowed"),
        ("agent.md", "---\nmax_rounds: .nan\n---", "not YAML: line 2: JSON has no number .nan"),
        ("agent.md", "---\nsince: !!timestamp 2026-12-24\n---", "line 2: could not determine a constructor"),
        ("agent.md", b"---\nname: \xff\n---", "is not markdown"),
    ],
)
def test_what_is_no_agent_at_all(tmp_path: Path, name: str, text: str | bytes | None, problem: str) -> None:
    """A file that can't be read or parsed is refused by name."""
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidInput, match=problem) as raised:
        read_agent(tmp_path / name)
    assert name in str(raised.value)


MARKDOWN = """---
name: reviewer
description: Reviews a change.
tools:
  - explore
  - no_such_tool
restart:
  backof: 1
max_rounds: 0
---
# How you work

Look first.
"""


def test_an_agent_as_markdown(tmp_path: Path) -> None:
    """Fields between lines of dashes, instructions below them; problems have the line of their field."""
    path = tmp_path / "reviewer.md"
    path.write_text(MARKDOWN.replace("  - no_such_tool\n", "").replace("backof", "backoff").replace(": 0", ": 3"))
    spec = read_agent(path).spec
    assert (spec.name, spec.description, spec.tools, spec.max_rounds) == (
        "reviewer",
        "Reviews a change.",
        ("explore",),
        3,
    )
    assert spec.instructions == "# How you work\n\nLook first."
    path.write_text(MARKDOWN)
    with pytest.raises(InvalidSpec) as raised:
        read_agent(path)
    lines = {item["field"]: item["problem"].rpartition("(")[2] for item in raised.value.details["problems"]}
    assert lines == {"tools.1": "line 6)", "restart.backof": "line 8)", "max_rounds": "line 9)"}
    path.write_text("---\nname: a\ninstructions: Be brief.\n---\nBe long.")
    with pytest.raises(InvalidSpec, match=r"instructions: they are the text below .* \(line 3\)"):
        read_agent(path)


def test_agents_by_the_paths_of_their_files(tmp_path: Path, module: str) -> None:
    """An agent may name others by their files, of whatever form; what these name is found from where they are, and
    what is wrong with them is reported with file and line."""
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "desk").mkdir()
    tools = ["spawn_agent"]
    lead = {"name": "lead", "tools": tools, "agents": ["team/reviewer.md"], "handoffs": ["team/clerk.toml", "lead"]}
    (tmp_path / f"{module}.py").rename(tmp_path / "team" / f"{module}.py")
    (tmp_path / "team" / "reviewer.md").write_text(
        f"---\nname: reviewer\ninput: ignored\ntools: ['{module}:look']\nworkspace: desk\n---\nReview."
    )
    (tmp_path / "team" / "clerk.toml").write_text('name = "clerk"\nhandoffs = ["lead"]')
    path = write(tmp_path, {**lead, "handoffs": ["team/clerk.toml"]})
    spec = read_agent(path).spec
    assert (spec.agents[0].instructions, spec.agents[0].workspace) == ("Review.", str(tmp_path / "team" / "desk"))
    assert spec.agents[0].tools[0]("x") == "x"
    assert spec.handoffs == (AgentSpec(name="clerk", handoffs=("lead",)),)
    reviewer = tmp_path / "team" / "reviewer.md"
    reviewer.write_text("---\nname: reviewer\ntools: [spawn_agent]\nagents: [../agent.json]\ncolour: red\n---\n")
    with pytest.raises(InvalidSpec) as raised:
        read_agent(write(tmp_path, {**lead, "agents": ["team/reviewer.md", "missing.md"], "handoffs": []}))
    problems = {item["field"]: item["problem"] for item in raised.value.details["problems"]}
    assert problems == {
        "agents.0.agents.0": f"../agent.json is a file that this agent is in itself ({reviewer}, line 4)",
        "agents.0.colour": f"there is no such field ({reviewer}, line 5)",
        "agents.1": f"{tmp_path / 'missing.md'} can't be read: No such file or directory",
    }


def test_a_module_that_fails_is_reported(tmp_path: Path, module: str) -> None:
    """A module that exits or raises when it is imported is a problem of that tool, not the end of the program."""
    (tmp_path / f"{module}.py").write_text("raise SystemExit(3)")
    with pytest.raises(InvalidSpec, match="SystemExit: 3"):
        read_agent(write(tmp_path, {"name": "a", "tools": [f"{module}:look"]}))


FIELDS = """
name = "clerk"
description = "Files what comes in."
skills = ["skills"]
instructions = "Be brief."
model = "m"
profile = "p"
tools = ["files", "wait", "schedule_wakeup", "jobs", "request_user_input", "spawn_agent",
         "create_workflow",
         "bash", "web_fetch", "MODULE:look"]
hooks = ["MODULE:notes"]
workspace = "."
max_rounds = 7
max_continuations = 1
repeat_limit = 3
tool_timeout = 1.5
parallel_tools = 2
max_depth = 2
deadline = 60
stall = 30
priority = "high"
parameters = { temperature = 0 }
budget = [{ tokens = 1000, cost = 0.5, children = 3, depth = 2, seconds = 60 }, { scope = "run", rounds = 4 }]
restart_type = "transient"
on_parent_end = "wait"
lifecycle = "linked"
shutdown = 5
isolation = "process"
resources = { num_cpus = 1 }
labels = { zone = "a" }
environment = ["DATABASE_URL"]
runtime_env = { env_vars = { A = "b" } }
follow_ups = "merge"
approve = ["write_file"]
approve_timeout = 60
approve_default = "approve"
answer_timeout = 60
answer_default = "go on"
on_change = "refuse"
output_mode = "tool"
output_retries = 1
metadata = { team = "t" }

[output_type]
type = "object"
properties = { city = { type = "string" } }

[sandbox]
backend = "bubblewrap"
network = true
readable = ["/opt/tools"]
memory = 1000000000
processes = 50
file_size = 1000000
temporary = 10000000
output = 2000
seconds = 60
rules = [{ command = "git push*", action = "ask" }]

[restart]
max_restarts = 1
period = 2
stuck_after = 3
backoff = 0.5
backoff_max = 4
jitter = 0.1
reset_after = 9

[context]
window = 32000
representation = "full"
fold = "notes"
fold_at = 0.5
keep = 0.1
elide = { glob = 100 }
longest_result = 1000

[memory]
scopes = ["agent"]
project = "shop"
max_tokens = 500
share = 0.05
providers = []
timeout = 2

[delegation]
tools = ["glob", "wait"]
models = ["small"]
budget = { tokens = 100 }
output = true

[workflows]
tools = ["glob"]
agents = ["child"]
models = ["small"]
steps = 10
at_once = 2
budget = { tokens = 100 }

[web]
allow = ["*.example.org"]
deny = ["x.example.org"]
private = true

[supervision]
strategy = "one_for_all"
max_restarts = 1
period = 2
backoff = 0.5
backoff_max = 4
jitter = 0.1
reset_after = 9
exceeded = "report"

[[mcp_servers]]
name = "time"
command = ["mcp-server-time"]
share = "tree"
include = ["get_*"]
exclude = ["get_secret"]
environment = ["TZ_TOKEN"]
on_crash = { "get_*" = "report" }
timeout = 5
required = true

[[mcp_servers]]
name = "web"
url = "http://localhost/mcp"
headers = { Authorization = "WEB_AUTH" }

[[agents]]
name = "child"
tools = ["wait"]

[[handoffs]]
name = "billing"
tools = ["MODULE:look"]
handoffs = ["clerk"]
"""
"""Each field of an agent, and of what is in one, with another value than its default."""


def test_the_agents_of_a_directory(tmp_path: Path) -> None:
    """Files that look like agents are listed as they are written, without importing anything; others are left out, and
    one that can't be read is listed with its problem."""
    (tmp_path / "b.md").write_text("---\nname: b\ndescription: Does b.\ntools: ['no_module:x', files]\n---\nx")
    (tmp_path / "a.toml").write_text('name = "a"\nmodel = "m"')
    (tmp_path / "c.json").write_text("{")
    (tmp_path / "README.md").write_text("# Agents")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'")
    (tmp_path / "deeper").mkdir()
    listed = CliRunner().invoke(app, ["agents", "list", str(tmp_path), "--json"])
    found = {agent["file"]: agent for agent in json.loads(listed.stdout)["agents"]}
    assert [*found] == ["a.toml", "b.md", "c.json"]
    assert (found["a.toml"]["name"], found["a.toml"]["model"]) == ("a", "m")
    assert found["b.md"]["tools"] == ["no_module:x", "files"]
    assert "is not JSON" in found["c.json"]["problem"]
    assert "Does b." in CliRunner().invoke(app, ["agents", "list", str(tmp_path)]).stdout
    empty = CliRunner().invoke(app, ["agents", "list", str(tmp_path / "deeper")])
    assert (empty.exit_code, empty.stdout, "no agents in" in empty.stderr) == (0, "", True)


def test_every_field_can_be_in_a_file(tmp_path: Path, module: str, skills: Path) -> None:
    """Each field that `AgentSpec` has, and each of the models in it, is in the file above, is accepted, and has its
    value; a field that is new must be added there."""
    data = tomllib.loads(FIELDS)
    scopes: list[set[str]] = [set(budget) for budget in data["budget"]]
    nested: list[tuple[type[BaseModel], set[str]]] = [
        (AgentSpec, set(data)),
        (RestartPolicy, set(data["restart"])),
        (Supervision, set(data["supervision"])),
        (Context, set(data["context"])),
        (Memory, set(data["memory"])),
        (Delegation, set(data["delegation"])),
        (WorkflowLimits, set(data["workflows"])),
        (WebPolicy, set(data["web"])),
        (Budget, set().union(*scopes)),
        (Sandbox, set(data["sandbox"])),
        (CommandRule, set(data["sandbox"]["rules"][0])),
        (McpServer, set().union(*map(set, data["mcp_servers"]))),
    ]
    for model, given in nested:
        assert given == set(model.model_fields), model
    (tmp_path / "agent.toml").write_text(FIELDS.replace("MODULE", module))
    spec = read_agent(tmp_path / "agent.toml").spec
    for name, field in AgentSpec.model_fields.items():
        assert getattr(spec, name) != field.get_default(call_default_factory=True), name
    assert spec.budgets == (
        Budget(tokens=1000, cost=data["budget"][0]["cost"], children=3, depth=2, seconds=60),
        Budget(scope="run", rounds=4),
    )
    fields = yaml.safe_dump(tomllib.loads(FIELDS.replace("MODULE", module).replace('instructions = "Be brief."', "")))
    (tmp_path / "agent.md").write_text(f"---\n{fields}---\n\nBe brief.\n")
    assert read_agent(tmp_path / "agent.md").spec == spec


def test_problems_of_handoffs_are_reported_with_their_places(tmp_path: Path, module: str) -> None:
    """What is wrong with an agent that another may hand off to is reported with its place, beside all else; the
    others can be named there, and one that nobody has is reported."""
    billing = {"name": "billing", "tools": [f"{module}:missing"], "max_round": 3, "handoffs": ["lead", "nobody"]}
    data = {"name": "lead", "tools": ["wait"], "handoffs": [billing, {"name": "billing"}, "a b", "lead"]}
    with pytest.raises(InvalidSpec) as raised:
        read_agent(write(tmp_path, data))
    by_field = {item["field"]: item["problem"] for item in raised.value.details["problems"]}
    assert by_field.keys() == {"handoffs.0.tools.0", "handoffs.0.max_round", "handoffs.2"}
    assert "did you mean 'max_rounds'" in by_field["handoffs.0.max_round"]
    data["handoffs"] = [{"name": "billing", "handoffs": ["lead", "nobody"]}, {"name": "billing"}, "lead"]
    with pytest.raises(InvalidSpec) as raised:
        read_agent(write(tmp_path, data))
    problems = [item["problem"] for item in raised.value.details["problems"]]
    assert [item["field"] for item in raised.value.details["problems"]] == ["handoffs"] * 4
    for wanted in ("several agents named 'billing'", "'nobody' is no agent", "there twice", "hand off to itself"):
        assert sum(wanted in problem for problem in problems) == 1, problems


def test_every_built_in_tool_can_be_in_a_file(tmp_path: Path, skills: Path) -> None:
    """Each name that `AgentSpec.tools` takes is one that a file takes, groups included."""
    for name in tool_names():
        limits = {"workflows": {}} if name in ("workflows", CREATE_WORKFLOW) else {}
        more = {"skills": ["skills"], "web": {}, **limits}
        found = read_agent(write(tmp_path, {"name": "a", "tools": [name], **more})).spec
        assert found.tools == (name,)


def test_what_a_misspelt_name_may_mean(tmp_path: Path) -> None:
    """Fields at any depth, and tools, that are not known are reported with the name that is close."""
    data = {
        "name": "a", "instruction": "x", "tools": ["schedule_wake", "spawn_agents"], "restart": {"backof": 1},
        "budget": [{"token": 5}], "agents": [{"name": "b", "model_name": "m", "max_round": 3}],
    }  # fmt: skip
    with pytest.raises(InvalidSpec) as raised:
        read_agent(write(tmp_path, data))
    problems = {item["field"]: item["problem"] for item in raised.value.details["problems"]}
    close = {
        "instruction": "instructions", "tools.0": "schedule_wakeup", "tools.1": "spawn_agent",
        "restart.backof": "backoff", "budget.0.token": "tokens", "agents.0.max_round": "max_rounds",
    }  # fmt: skip
    assert {field: name for field, name in close.items() if f"did you mean {name!r}?" in problems[field]} == close
    assert "agents" not in problems  # that they need `spawn_agent` follows from the name which is misspelt


def test_what_does_not_fit_together_is_reported_with_the_rest(tmp_path: Path, module: str) -> None:
    """Tools twice, and sub-agents of one name, are reported beside fields that can't be used."""
    twin = {"name": "twin", "tools": ["wait", "wait"]}
    data = {"tools": ["glob", "files", "wait"], "max_rounds": 0, "agents": [twin, twin], "hooks": [f"{module}:none"]}
    with pytest.raises(InvalidSpec) as raised:
        read_agent(write(tmp_path, data))
    fields = [item["field"] for item in raised.value.details["problems"]]
    assert sorted(fields) == sorted(
        ["hooks.0", "name", "max_rounds", "tools", "agents", "agents", "agents.0.tools", "agents.1.tools"]
    )


def check(*arguments: str) -> tuple[int, Any]:
    """`understudy agents check --json`: its exit code, and what it says."""
    done = CliRunner().invoke(app, ["agents", "check", *arguments, "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_who_must_be_approved_is_a_tool_of_the_agent(tmp_path: Path, module: str) -> None:
    """Given a name in `approve` that no tool has, in an agent or in one that it names, then that is reported with its
    place, from a file and from Python."""
    wrong = {"name": "other", "tools": [f"{module}:look"], "approve": ["refund"]}
    table = {
        "name": "a", "tools": ["files", "spawn_agent"], "approve": ["delete_*"], "agents": [wrong],
        "handoffs": [{**wrong, "name": "third"}],
    }  # fmt: skip
    with pytest.raises(InvalidSpec) as raised:
        read_agent(write(tmp_path, table))
    problems = {item["field"]: item["problem"] for item in raised.value.details["problems"]}
    assert set(problems) == {"approve", "agents.0.approve", "handoffs.0.approve"}
    assert "there are: look" in problems["agents.0.approve"]
    spec = AgentSpec(name="a", tools=["spawn_agent"], agents=[AgentSpec(name="other", approve=["refund"])])
    with pytest.raises(InvalidSpec, match=r"agents\.other\.approve: 'refund' is no tool"):
        compile_spec(spec, model="offline", profile=None)


def test_checking_several_files(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given files of which some can't be used, then all problems of all are reported, and the exit code is 1; modules
    of the same name beside different files are different ones."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{module}.py").write_text("from understudy import tool\n@tool\ndef there() -> str:\n    return ''\n")
    good = write(tmp_path, {"name": "a", "tools": [f"{module}:look", "files"]})
    second = write(other, {"name": "b", "tools": [f"{module}:there"]})
    assert check(str(good), str(second)) == (
        0,
        {
            "ok": True,
            "files": [
                {"file": str(good), "name": "a", "summary": "a, 2 tools", "problems": []},
                {"file": str(second), "name": "b", "summary": "b, 1 tool", "problems": []},
            ],
        },
    )
    write(other, {"name": "b", "tools": [f"{module}:look"], "max_rounds": 0})
    code, found = check(str(good), str(second), str(tmp_path / "missing.toml"))
    fields = [[problem["field"] for problem in item["problems"]] for item in found["files"]]
    assert (code, found["ok"], fields) == (1, False, [[], ["tools.0", "max_rounds"], ["(file)"]])
    shown = CliRunner().invoke(app, ["agents", "check", str(good), str(second)])
    assert shown.exit_code == 1
    assert f"{good}: ok a, 2 tools" in shown.stdout
    assert "sandbox here" not in shown.stdout
    for needs in ("bash", "start_command", "core"):
        second = write(other, {"name": "b", "tools": [needs]})
        assert "sandbox here: " in CliRunner().invoke(app, ["agents", "check", str(second)]).stdout, needs
    second = write(other, {"name": "b", "workspace": "worktree"})
    said = CliRunner().invoke(app, ["agents", "check", str(second)]).stdout
    assert "sandbox here: " in said
    assert "git here: " in said
    write(other, {"name": "b", "tools": ["bash"], "sandbox": "none"})
    assert "sandbox" not in check(str(second))[1]["files"][0]
    servers = [{"name": "sh", "command": ["/bin/sh"]}, {"name": "no", "command": ["none-such"]}]
    write(other, {"name": "b", "mcp_servers": servers})
    code, found = check(str(second))
    assert (code, found["files"][0]["missing_servers"]) == (0, ["no (none-such)"])
    assert "without a program here: no (none-such)" in CliRunner().invoke(app, ["agents", "check", str(second)]).stdout
    code, found = check(str(other))
    assert (code, [item["file"] for item in found["files"]]) == (0, [str(second)])
    assert f"{second}: 2 problems" in shown.stdout
