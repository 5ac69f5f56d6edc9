"""What the documentation says of the tests is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(?:tests/(\w+/test_\w+\.py)(?:::)?)?((?:Test\w+::)?(?:test|Test)\w*)?`")


def names_in(path: Path) -> set[str]:
    """Test classes and functions of a module."""
    tree = ast.parse(path.read_text())
    return {
        node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_no_line_of_prose_is_too_long() -> None:
    """Prose has at most 120 columns; tables, headings, and what is a terminal's or a program's, have what they need."""
    found = []
    for page in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        verbatim = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            verbatim ^= line.lstrip().startswith("```")
            if len(line) > 120 and not verbatim and not line.startswith(("|", "#", "<")):
                found.append(f"{page.relative_to(ROOT)}:{number}")
    assert not found


@pytest.mark.thorough
def test_every_test_that_holds_a_rule_exists() -> None:
    """Each module, class and function that the table of docs/supervision.md names is there; every rule is in it."""
    text = (ROOT / "docs" / "supervision.md").read_text()
    rules, table = text.split("## Where each rule is held")
    for line in table.splitlines():
        module = ""
        for path, name in NAMED.findall(line):
            module = path or module
            assert (ROOT / "tests" / module).exists(), line
            if name:
                missing = set(name.split("::")) - names_in(ROOT / "tests" / module)
                assert not missing, f"{module} has no {missing}: {line}"
    held = set()
    for kind, first, last in re.findall(r"\b([RGSL])(\d+)(?:–[RGSL](\d+))?", table):
        held |= {f"{kind}{number}" for number in range(int(first), int(last or first) + 1)}
    assert set(re.findall(r"^\| ([RGSL]\d+) \|", rules, re.M)) == held


def operations() -> set[str]:
    """The public functions of store/ that are given a transaction, and the methods of its accounts."""
    found = set()
    for path in (ROOT / "store").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            functions = node.body if isinstance(node, ast.ClassDef) and node.name == "Accounts" else [node]
            for one in functions:
                if not isinstance(one, ast.FunctionDef) or one.name.startswith("_"):
                    continue
                if node is not one or (one.args.args and one.args.args[0].arg == "tx"):
                    found.add(f"{path.stem}.{one.name}")
    return found


def test_every_operation_says_what_makes_it_safe() -> None:
    """The table of docs/isolation.md has each public operation of the store once, and no other."""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "isolation.md").read_text(), re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row)]
    assert sorted(named) == sorted(operations())
