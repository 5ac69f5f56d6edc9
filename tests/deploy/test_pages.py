"""The README and the pages of docs/: short enough, linked, and what they show as commands and programs works."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer

from understudy import Cluster
from understudy.cluster.cli.main import app
from understudy.examples.survey.job import survey_specs
from understudy.testing import LocalCluster

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "AGENTS.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((ROOT / "k8s").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)


def named(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def anchors(page: Path) -> set[str]:
    """Where links into a page may lead: its headings, as GitHub names them, and its own anchors."""
    text = page.read_text()
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(text)]
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def prose(page: Path) -> str:
    """A page without its listings and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))


def listings(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_the_readme_is_short() -> None:
    """600 words at most, tables and listings included; the picture is no larger than 150 KB."""
    assert len(README.read_text().split()) <= 600
    assert (DOCS / "images" / "console.png").stat().st_size < 150_000


def test_the_tree_in_the_readme_is_of_its_first_example() -> None:
    """The README begins with `make demo`, and the tree below has the agents of that: a lead, and surveyors."""
    example, tree, *_ = listings(README, "console")
    assert "$ make demo " in example
    lead = survey_specs(str(ROOT), None, offline=True)
    assert re.findall(r"^([a-z]+|├── [a-z]+) ", tree, re.M) == [lead.name, *[f"├── {lead.agents[0].name}"] * 3]


@pytest.mark.parametrize("page", PAGES, ids=named(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    """Each link to a file leads to one, and each link to a place in a page to such a place."""
    for link in LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, place = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not place or place in anchors(target), link


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links each page of docs/, and the README links docs/."""
    linked = {link.partition("#")[0] for link in LINK.findall((DOCS / "README.md").read_text())}
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= linked
    assert "docs/README.md" in LINK.findall(README.read_text())


def test_every_setting_is_listed() -> None:
    """docs/settings.md has each variable `UNDERSTUDY_…` that the product reads; skills have one for commands only."""
    folders = "actors", "cluster", "core", "gateway", "node", "observability", "store", "supervisor", "tool_host"
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\bUNDERSTUDY_[A-Z_]*[A-Z]\b", text)}
    listed = set(re.findall(r"`(UNDERSTUDY_[A-Z_]+)`", (DOCS / "settings.md").read_text()))
    assert read - listed == {"UNDERSTUDY_SKILLS"}
    assert listed <= read


@pytest.mark.parametrize("page", PAGES, ids=named(PAGES))
def test_commands_exist(page: Path) -> None:
    """Each `understudy` command of a page's listings is one, and has the options; each target of `make` is there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for listing in listings(page, "console"):
        for line in re.findall(r"^\$ (.*)$", listing, re.M):
            for words in commands(line):
                if words[0] == "make":
                    assert {word for word in words[1:] if "=" not in word} <= targets, line
                elif words[0].rpartition("/")[2] == "understudy":
                    check_command(words[1:], line)


def commands(line: str) -> list[list[str]]:
    """The commands of a shell's line, as words."""
    found: list[list[str]] = [[]]
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    for word in lexer:
        found.append([]) if set(word) <= set(";|&") else found[-1].append(word)
    return [words for words in found if words]


def check_command(words: list[str], line: str) -> None:
    """Whether there are such commands and options."""
    command: Any = typer.main.get_command(app)
    for word in words:
        if word.startswith("-") and word != "-":
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert word.partition("=")[0] in known | {"--help", "-h"}, f"{word}: {line}"
        elif hasattr(command, "commands"):  # a group
            assert word in command.commands, f"{word}: {line}"
            command = command.commands[word]


@pytest.mark.parametrize("page", [README, DOCS / "getting-started.md"], ids=["README", "getting-started"])
def test_programs_run(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The programs of the README and of the first page run as they stand, here on a local cluster."""
    monkeypatch.setattr(Cluster, "connect", LocalCluster)
    for listing in listings(page, "python"):
        module = types.ModuleType("example")
        monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look for their module
        exec(compile(listing, str(page), "exec"), module.__dict__)
    assert "offline: What is the weather in Bern?" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=named(PAGES))
def test_programs_are_python(page: Path) -> None:
    """Each listing that is said to be Python is."""
    for listing in listings(page, "python"):
        compile(listing, str(page), "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
