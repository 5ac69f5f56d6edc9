"""Session actors have the code that a specification means, also where they have an older version of its module."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from understudy.actors.frame import Frame
from understudy.actors.tools import describe
from understudy.ports import Node

HEAD = "from understudy import tool\n\n"
FIRST = '@tool\ndef first() -> str:\n    """Say which."""\n    return "first"\n\n'
SECOND = '@tool\ndef second() -> str:\n    """Say which."""\n    return "second"\n\n'


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module with one tool that processes can import."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "module_that_grows.py"
    write(path, FIRST)
    yield path
    sys.modules.pop(path.stem, None)


def write(path: Path, text: str) -> None:
    """What a driver has, and a session actor not yet; its time is that of a file that was saved a moment later."""
    path.write_text(HEAD + text)
    later = time.time_ns() + 2_000_000_000 * bool(sys.modules.get(path.stem))
    os.utime(path, ns=(later, later))


def described(path: Path, name: str) -> dict[str, Any]:
    """A tool's description as a driver makes it that has the module as it is now; this process has what it had."""
    before = sys.modules.pop(path.stem, None)
    importlib.invalidate_caches()
    [found], _ = describe(getattr(importlib.import_module(path.stem), name), pickle=None)
    sys.modules.pop(path.stem)
    if before is not None:
        sys.modules[path.stem] = before
    return found


async def said(frame: Frame, description: dict[str, Any]) -> Any:
    return (await frame._load(description)).function()


async def test_a_function_that_is_new_in_a_module(module: Path) -> None:
    """Given a process that has imported a module, when a function is added to it, then that is loaded as well."""
    frame = Frame(cast(Node, None), "f", "n", "")
    assert await said(frame, described(module, "first")) == "first"
    write(module, FIRST + SECOND)
    assert await said(frame, described(module, "second")) == "second"


async def test_a_function_whose_source_has_changed(module: Path) -> None:
    """Given a process that has a function, when its source changes, then the new one is loaded, and sessions that were
    spawned with the old one keep that."""
    frame = Frame(cast(Node, None), "f", "n", "")
    old = described(module, "first")
    assert await said(frame, old) == "first"
    write(module, FIRST.replace('"first"', '"other"'))
    assert await said(frame, described(module, "first")) == "other"
    assert await said(frame, old) == "first"


async def test_a_module_that_has_not_changed_is_not_read_again(module: Path) -> None:
    """Given a module with two tools, then it is imported once."""
    write(module, FIRST + SECOND)
    frame = Frame(cast(Node, None), "f", "n", "")
    first, second = (described(module, name) for name in ("first", "second"))
    assert await said(frame, first) == "first"
    had = sys.modules[module.stem].first
    assert await said(frame, second) == "second"
    assert sys.modules[module.stem].first is had
