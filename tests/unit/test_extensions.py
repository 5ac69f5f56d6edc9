"""What other packages offer: found by name, without importing what nobody names, and broken without harm to others."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from understudy.actors.tools import TOOL_GROUPS
from understudy.cluster.cli.main import app
from understudy.cluster.client.agent_file import read_agent
from understudy.cluster.client.compiling import compile_spec
from understudy.cluster.client.extensions import extensions, offered_profiles
from understudy.errors import InvalidSpec
from understudy.spec import AgentSpec, Memory

CODE = """
from understudy import hook, memory_provider, tool
from understudy.config import ModelProfile

@tool(on_crash="rerun", approve=True)
def search(words: str) -> str:
    "Search the archive."
    return f"found {words}"

@tool(num_cpus=2, num_gpus=1)
def heavy():
    "Reckon."

@hook("run_start")
def audit(context):
    return None

@memory_provider
def vectors(context):
    return "remembered"

def plain():
    return 1

def small():
    return ModelProfile("whatever", "secret-key", "http://small")

fixed = ModelProfile("x", "k")
"""

POINTS = """
[understudy.tools]
search = MODULE:search
broken = MODULE_missing:search
plain = MODULE:plain
files = MODULE:search

[understudy.hooks]
audit = MODULE:audit

[understudy.memory]
vectors = MODULE:vectors

[understudy.models]
small = MODULE:small
fixed = MODULE:fixed
broken = MODULE:missing

[understudy.skills]
office = MODULE_skills
"""

NUMBERS = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A distribution `Acme.Tools`, as an installer leaves it; its module's name."""
    name = f"acme_tools_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / f"{name}_skills" / "pdf").mkdir(parents=True)
    (tmp_path / f"{name}_skills" / "__init__.py").write_text("")
    (tmp_path / f"{name}_skills" / "pdf" / "SKILL.md").write_text("---\nname: pdf\ndescription: d\n---\nFill it.")
    information = tmp_path / "Acme_Tools-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme.Tools\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text(POINTS.replace("MODULE", name))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return name


def compiled(**fields: Any) -> dict[str, Any]:
    return compile_spec(AgentSpec(name="a", **fields), model="offline", profile=None).spec


def test_nothing_is_imported_that_nobody_names(package: str) -> None:
    """Given a package, its names are listed by distribution, in one spelling, and its modules stay untouched."""
    assert [*extensions("tools")] == [
        "acme-tools:broken", "acme-tools:files", "acme-tools:plain", "acme-tools:search",
    ]  # fmt: skip
    assert [*extensions("hooks")] == ["acme-tools:audit"]
    assert package not in sys.modules


def test_a_specification_names_what_a_package_offers(package: str, tmp_path: Path) -> None:
    """Tools, hooks, memory providers and skills by DISTRIBUTION:NAME, or at an import path, in Python and in files:
    what is stored is the import path, by which any process has it."""
    fields: dict[str, Any] = {
        "tools": ["acme-tools:search"], "hooks": ["Acme_Tools:audit"], "skills": ["acme-tools:office"],
    }  # fmt: skip
    spec = compiled(**fields, memory=Memory(providers=("acme-tools:vectors",)))
    assert spec["tools"][0]["source"] == {"import": f"{package}:search"}
    assert spec["hooks"][0]["source"] == {"import": f"{package}:audit"}
    assert spec["memory"]["providers"][0]["source"] == {"import": f"{package}:vectors"}
    assert [skill["name"] for skill in spec["skills"]] == ["pdf"]
    at_paths = {"tools": [f"{package}:search"], "hooks": [f"{package}:audit"], "skills": ["acme-tools:office"]}
    again = compiled(**at_paths, memory=Memory(providers=(f"{package}:vectors",)))
    assert again["hash"] == spec["hash"]
    file = tmp_path / "agent.json"
    file.write_text(json.dumps({"name": "a", **fields, "memory": {"providers": ["acme-tools:vectors"]}}))
    assert compile_spec(read_agent(file).spec, model="offline", profile=None).spec["hash"] == spec["hash"]


def test_built_in_names_are_not_for_packages(package: str) -> None:
    """A package's `files` is its own: the plain name stays the group's, and no plain name means a package's tool."""
    assert compiled(tools=["acme-tools:files"])["tools"][0]["name"] == "search"
    assert len(compiled(tools=["files"])["tools"]) == len(TOOL_GROUPS["files"])
    with pytest.raises(InvalidSpec, match="installed packages have: acme-tools:search; your own: module:function"):
        compiled(tools=["search"])


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        (
            {"tools": ["acme-tools:broken"]},
            r"'acme-tools:broken' \(acme_tools_\d+_missing:search\) can't be imported",
        ),
        ({"tools": ["acme-tools:plain"]}, "'acme-tools:plain' is no function decorated with @tool"),
        ({"tools": ["acme-tools:serach"]}, "did you mean 'acme-tools:search'"),
        ({"hooks": ["acme-tools:search"]}, "the package has: acme-tools:audit"),
        ({"hooks": ["audit"]}, "nor a name of the form module:function"),
        ({"skills": ["acme-tools:nothing"]}, "can't be read: No such file"),
    ],
)
def test_what_is_broken_is_named(package: str, field: dict[str, Any], problem: str) -> None:
    """A name that leads nowhere, a package that can't be imported, a function that is none: the error says which."""
    with pytest.raises(InvalidSpec, match=problem):
        compiled(**field)


def test_model_profiles(package: str, caplog: pytest.LogCaptureFixture) -> None:
    """A profile, or a function that makes one, has the package's name for it; a broken one is logged, and the others
    are there. Keys are not logged."""
    with caplog.at_level(logging.WARNING):
        found = {profile.name: profile.base_url for profile in offered_profiles()}
    assert found == {"acme-tools:fixed": None, "acme-tools:small": "http://small"}
    assert "'acme-tools:broken'" in caplog.text
    assert "secret-key" not in caplog.text


def test_tools_are_listed(package: str) -> None:
    """Groups, built-in tools and those of packages, each with its origin; a broken one with its problem."""
    done = CliRunner().invoke(app, ["tools", "--json"])
    tools = {tool["name"]: tool for tool in json.loads(done.stdout)["tools"]}
    assert done.exit_code == 0
    assert tools["files"]["members"][0] == "read_file"
    assert tools["bash"]["origin"] == "built-in"
    session_only = {name for name in ("bash", "wait", "start_command") if tools[name]["in_session"]}
    assert session_only == {"wait", "start_command"}
    search = tools["acme-tools:search"]
    assert (search["origin"], search["on_crash"], search["approve"]) == ("Acme.Tools 1.2", "rerun", True)
    assert search["parameters"]["required"] == ["words"]
    assert "can't be imported" in tools["acme-tools:broken"]["problem"]
    assert "Acme.Tools 1.2" in CliRunner().invoke(app, ["tools"]).stdout
    shown = CliRunner().invoke(app, ["tools", "show", "acme-tools:search"]).stdout
    assert "Search the archive." in shown
    assert "words (string)" in shown
    assert CliRunner().invoke(app, ["tools", "show", "nothing"]).exit_code == 2
    heavy = CliRunner().invoke(app, ["tools", "show", f"{package}:heavy"]).stdout
    assert "a Ray task with num_cpus=2 GPU=1" in " ".join(heavy.split())


def tried(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["tools", "try", *words])
    return done.exit_code, done.output


def test_tools_are_tried(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call outside any session goes through the same checks and ends as there: with a result, as failed, or as one
    that does not fit. What needs a session is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from understudy import ToolContext, ToolError, tool\n\n@tool\n"
                                     "async def fail(context: ToolContext) -> str:\n"
                                     "    context.progress(0.5, 'half')\n    raise ToolError('no')\n")  # fmt: skip
    monkeypatch.setattr("sys.path", [*sys.path])
    assert tried("acme-tools:search", '{"words": "x"}') == (0, "found x\n")
    assert tried("read_file", '{"path": "own.py"}', "--workspace", str(tmp_path))[0] == 0
    code, said = tried("own:fail")
    assert (code, "50% half" in said, "ToolError: no" in said) == (1, True, True)
    code, said = tried("acme-tools:search", '{"word": 1}')
    assert (code, "don't fit the parameters" in said) == (2, True)
    for words, problem in [
        (("wait",), "needs a session"), (("files",), "is a group"), (("nothing",), "no tool is named"),
        (("load_skill", '{"name": "pdf"}'), "say --agent FILE"), (("read_file", "--workspace", "nowhere"), "directory"),
    ]:  # fmt: skip
        code, said = tried(*words)
        assert (code, problem in " ".join(said.split())) == (2, True), said


def test_tools_of_an_agent_are_tried(package: str, tmp_path: Path) -> None:
    """With an agent's file, its tools, workspace, skills and what it may fetch are those of the call."""
    file = tmp_path / "agent.md"
    file.write_text("---\nname: a\ntools: [read_file]\nskills: ['acme-tools:office']\nworkspace: .\n---\nx")
    assert tried("load_skill", '{"name": "pdf"}', "--agent", str(file)) == (0, "Fill it.\n")
    assert tried("read_file", '{"path": "agent.md"}', "-a", str(file))[0] == 0
    code, said = tried("glob", "{}", "-a", str(file))
    assert (code, "it has: read_file, load_skill" in " ".join(said.split())) == (2, True)


def test_the_web_is_that_of_the_agent(tmp_path: Path) -> None:
    """`web_fetch` is tried by the rules of an agent's file; without one there are none."""
    file = tmp_path / "agent.toml"
    file.write_text('name = "a"\ntools = ["web_fetch"]\n[web]\nallow = ["docs.example.org"]\n')
    arguments = '{"url": "http://example.com/"}'
    code, said = tried("web_fetch", arguments, "-a", str(file))
    assert (code, "it may from docs.example.org" in " ".join(said.split())) == (1, True)
    code, said = tried("web_fetch", arguments)
    assert (code, "say --agent FILE" in " ".join(said.split())) == (2, True)
