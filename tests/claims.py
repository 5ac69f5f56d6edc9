"""The promises of docs/guarantees.md and the tests that hold them: makes docs/claims.md, `scripts/claims --write`.

A promise has an id where it is made: an anchor, `<a id="fence"></a>`, before its text. tests/claims.toml names its
tests.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
GUARANTEES, PAGE, SOURCE = ROOT / "docs" / "guarantees.md", ROOT / "docs" / "claims.md", TESTS / "claims.toml"

LIMITS = "What is not promised"
"""The section of docs/guarantees.md that promises nothing."""

ANCHOR = re.compile(r'<a id="([a-z0-9-]+)"></a>')
SENTENCE = re.compile(r"(?<=[.:])\s+(?=[A-Z`*])")

HEAD = """# Claims, and the tests that hold them

Each promise of [guarantees.md](guarantees.md), shortened, with the tests that fail if it is broken. Tests are below
`tests/`; of those named `simulation`, `test_seeds`, `test_fresh_seeds` and `test_regressions` of
`simulation/test_simulation.py` run simulated clusters, in which the named function checks the promise. `scripts/claims
--write` makes this page of `tests/claims.toml`; `tests/deploy/test_claims.py` holds that it is current, that each test
named here is one that runs, and that each promise is listed.
"""


@dataclass(frozen=True)
class Promise:
    """A promise: its id, the section in which it is made, and its first sentence."""

    id: str
    section: str
    text: str


@dataclass(frozen=True)
class Claims:
    """What tests/claims.toml says, by the promises' ids.

    Attributes:
        tests: modules, or `module::test`, below `tests/`.
        simulated: `module.function` or `module.Class.method` below `tests/simulation`.
        untested: what no test holds.
    """

    tests: dict[str, list[str]]
    simulated: dict[str, list[str]]
    untested: dict[str, str]


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """The section and the text of each paragraph, list item and table row."""
    section = ""
    for part in re.split(r"\n\n|\n(?=- |\d\. |\| )", text):
        if part.startswith("## "):
            section = part.removeprefix("## ").strip()
        elif part.strip() and not part.startswith(("# ", "|---")):
            yield section, part


def promises(text: str | None = None) -> list[Promise]:
    """All of them, in their order."""
    found = []
    for section, part in blocks(GUARANTEES.read_text() if text is None else text):
        for identifier in ANCHOR.findall(part):
            found.append(Promise(identifier, section, shortened(ANCHOR.sub("", part))))
    return found


def shortened(part: str) -> str:
    """A paragraph's or an item's first sentence; what dies and what happens, the request, the promise of a table."""
    if part.startswith("|"):
        cells = [cell.strip() for cell in part.strip("| \n").split(" | ")]
        kept = cells[:1] if len(cells) == 2 else [cells[0], cells[-1]] if len(cells) == 3 else cells[:2]
        return ": ".join(kept)
    flat = " ".join(re.sub(r"^(- |\d\. )", "", part).split())
    return SENTENCE.split(flat)[0].removesuffix(".").removesuffix(":")


def without_id(text: str | None = None) -> list[str]:
    """Items and rows that promise something and have no id, and sections without any."""
    text = GUARANTEES.read_text() if text is None else text
    sections = set(re.findall(r"^## (.*)$", text, re.M)) - {LIMITS} - {one.section for one in promises(text)}
    heads = set(re.findall(r"^(\|.*)\n\|---", text, re.M))
    found = [
        part
        for section, part in blocks(text)
        if section != LIMITS
        and part.startswith(("- ", "| ", "1. ", "2. ", "3. "))
        and part.splitlines()[0] not in heads
        and not ANCHOR.search(part)
    ]
    return [*sorted(sections), *found]


def claims(source: str | None = None) -> Claims:
    """What stands in tests/claims.toml, or in `source`."""
    data = tomllib.loads(SOURCE.read_text() if source is None else source)
    return Claims(data["tests"], data["simulated"], data["untested"])


@cache
def names_of(path: Path) -> frozenset[str]:
    """Functions of a module, and methods with their class; nothing where there is no such module."""
    if not path.exists():
        return frozenset()
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{one.name}" for one in methods}
    return frozenset(found)


def problems(found: Claims, made: list[Promise]) -> list[str]:
    """Whatever keeps the claims from being what they say."""
    known = [one.id for one in made]
    lines = [f"docs/guarantees.md has the id {one!r} twice" for one in {one for one in known if known.count(one) > 1}]
    for one in {*found.tests, *found.simulated, *found.untested} - set(known):
        lines.append(f"docs/guarantees.md has no promise {one!r}")
    for one in known:
        if not (found.tests.get(one) or found.simulated.get(one) or found.untested.get(one)):
            lines.append(f"nothing holds the promise {one!r}, and tests/claims.toml does not say so under [untested]")
    for one, tests in found.tests.items():
        for test in tests:
            path, _, name = test.partition("::")
            there = {name for name in names_of(TESTS / path) if name.startswith("test_")}
            if (name and name not in there) or not there:
                lines.append(f"{one}: there is no test {test}")
    for one, checks in found.simulated.items():
        for check in checks:
            module, _, name = check.partition(".")
            if name not in names_of(TESTS / "simulation" / f"{module}.py"):
                lines.append(f"{one}: tests/simulation has no {check}")
    return sorted(lines)


def page(found: Claims, made: list[Promise]) -> str:
    """docs/claims.md."""
    lines, section = [HEAD.rstrip()], ""
    for one in made:
        if one.section != section:
            section = one.section
            lines += ["", f"## {section}", "", "| promise | held by |", "|---|---|"]
        held = [f"`{test}`" for test in found.tests.get(one.id, ())]
        held += [f"simulation: `{check}`" for check in found.simulated.get(one.id, ())]
        held += [f"**no test:** {why}" for why in [found.untested.get(one.id)] if why]
        lines.append(f"| [{one.id}](guarantees.md#{one.id}): {one.text} | {'<br>'.join(held)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or say what is wrong."""
    found, made = claims(), promises()
    wrong = [*(f"no id: {part}" for part in without_id()), *problems(found, made)]
    if not wrong and "--write" in sys.argv[1:]:
        PAGE.write_text(page(found, made))
    elif not wrong and PAGE.read_text() != page(found, made):
        wrong.append("docs/claims.md is not current: scripts/claims --write")
    print("\n".join(wrong) or f"{len(made)} promises, {len(found.untested)} not or not wholly tested")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
