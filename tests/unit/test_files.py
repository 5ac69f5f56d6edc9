"""File tools: what they do to a workspace, and that nothing leads out of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import string
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.actors import files, short_process, workspace
from understudy.actors.execution import MAX_RESULT_CHARACTERS
from understudy.actors.files import edit_file, glob, grep, read_file, write_file
from understudy.actors.tools import ToolContext
from understudy.actors.workspace import Workspace
from understudy.child_process import ChildProcess
from understudy.errors import ToolError, WorkspaceViolation

SECRET = "text from outside the workspace"


def context_of(root: Path | None) -> ToolContext:
    path = str(root) if root else None
    return ToolContext(session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a", workspace=path)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.txt").write_text(SECRET)
    return folder


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Path:
    """A workspace with every kind of entry that could lead out of it or block."""
    folder = tmp_path / "workspace"
    (folder / "src" / "deep").mkdir(parents=True)
    (folder / "src" / "main.py").write_text("print('one')\nprint('two')\n")
    (folder / "src" / "deep" / "more.py").write_text("Two = 2\n")
    (folder / "notes.txt").write_text("one\n")
    (folder / "link_out").symlink_to(outside)
    (folder / "file_out").symlink_to(outside / "secret.txt")
    (folder / "relative_out").symlink_to("../outside/secret.txt")
    (folder / "new_out").symlink_to(outside / "created.txt")
    (folder / "link_in").symlink_to("src")
    (folder / "loop").symlink_to("loop")
    (folder / "sly").symlink_to("loop/../file_out")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture
def context(root: Path) -> ToolContext:
    return context_of(root)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


LEADING_OUT = [
    "../outside/secret.txt",
    "src/../../outside/secret.txt",
    "link_out/secret.txt",
    "file_out",
    "relative_out",
    "sly",
    "loop",
    "new_out",
    "/etc/passwd",
    "//etc/passwd",
    "src/../notes.txt",
    "notes.txt\0.png",
    "\ud800",
]


PARTS = [
    *("..", ".", "", "~", "src", "deep", "main.py", "link_out", "link_in", "secret.txt", "loop", "sly", "file_out"),
    *("relative_out", "new_out", "pipe", "outside", "new", "\0", "\\", "%2e%2e"),
]


class TestConfinement:
    @pytest.mark.parametrize("path", LEADING_OUT)
    async def test_no_tool_leaves_the_workspace(
        self, path: str, context: ToolContext, outside: Path, root: Path
    ) -> None:
        """Links, `..`, absolute paths, loops of links, NUL and half surrogates: each tool refuses, nothing changes."""
        before = snapshot(outside)
        with pytest.raises(ToolError):
            read_file(path, context)
        with pytest.raises(ToolError):
            write_file(path, "overwritten", context)
        with pytest.raises(ToolError):
            edit_file(path, "text", "overwritten", context)
        with pytest.raises(ToolError):
            glob("*", context, path=path)
        with pytest.raises(ToolError):
            await grep("text", context, path=path)
        assert snapshot(outside) == before

    @pytest.mark.thorough
    @settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        path=st.one_of(
            st.text(max_size=40),
            st.lists(
                st.sampled_from(PARTS),
                max_size=7,
            ).map("/".join),
            st.text(alphabet=string.printable + "/.", max_size=400),
        ),
        absolute=st.booleans(),
    )
    def test_no_path_escapes(self, path: str, absolute: bool, root: Path, outside: Path) -> None:
        """Any text resolves to a link-free place within the root, or is refused; nothing else is raised."""
        before = snapshot(outside)
        context = context_of(root)
        place = Workspace(str(root))
        tried = f"{root}/{path}" if absolute else path
        try:
            location = place.resolve(tried)
        except ToolError:
            pass
        else:
            assert os.path.realpath(location) == str(location)
            assert location.is_relative_to(os.path.realpath(root))
        for attempt in (lambda: read_file(tried, context), lambda: write_file(tried, "x", context)):
            try:
                assert SECRET not in attempt()
            except ToolError:
                pass
        assert snapshot(outside) == before

    def test_links_and_absolute_paths_within_the_workspace_work(self, context: ToolContext, root: Path) -> None:
        """What stays inside is allowed, however it is written."""
        assert read_file("link_in/main.py", context).startswith("print")
        assert read_file(f"{root}/notes.txt", context) == "one\n"

    def test_workspace_behind_a_link_is_the_real_directory(self, root: Path, tmp_path: Path) -> None:
        """A workspace named through a link works, and confines to what it points at."""
        (tmp_path / "alias").symlink_to(root)
        aliased = context_of(tmp_path / "alias")
        assert read_file("notes.txt", aliased) == "one\n"
        assert read_file(f"{tmp_path}/alias/notes.txt", aliased) == "one\n"
        with pytest.raises(WorkspaceViolation):
            read_file(f"{tmp_path}/outside/secret.txt", aliased)

    def test_special_files_are_refused_without_blocking(self, context: ToolContext) -> None:
        """A pipe or a directory is no file to read, write or edit."""
        for path in ("pipe", "src", "."):
            with pytest.raises(ToolError):
                read_file(path, context)
            with pytest.raises(ToolError):
                write_file(path, "x", context)

    def test_devices_are_refused(self) -> None:
        """Even where the workspace holds devices they are not opened."""
        with pytest.raises(ToolError, match="not a regular file"):
            read_file("null", context_of(Path("/dev")))

    def test_without_workspace_the_error_says_what_to_set(self, tmp_path: Path) -> None:
        """No workspace, and one that does not exist, are clear errors."""
        with pytest.raises(ToolError, match="`workspace`"):
            read_file("x", context_of(None))
        with pytest.raises(ToolError, match="does not exist"):
            read_file("x", context_of(tmp_path / "missing"))

    def test_errors_do_not_tell_absolute_paths(self, context: ToolContext, root: Path) -> None:
        """A missing file is named as the model named it."""
        for attempt in (
            lambda: read_file("missing.txt", context),
            lambda: write_file("notes.txt/below", "x", context),
            lambda: write_file("x" * 300, "x", context),
        ):
            with pytest.raises(ToolError) as caught:
                attempt()
            assert str(root) not in caught.value.message


class TestReadFile:
    def test_lines_from_offset(self, context: ToolContext, root: Path) -> None:
        """`offset` skips lines; a note says where to continue, and continuing reads the rest."""
        (root / "long.txt").write_text("".join(f"line {number}\n" for number in range(10)))
        first = read_file("long.txt", context, limit=3)
        assert first == "line 0\nline 1\nline 2\n[more follows: continue with offset=3]"
        assert read_file("long.txt", context, offset=8) == "line 8\nline 9\n"

    def test_output_is_bounded_and_can_be_continued(self, context: ToolContext, root: Path) -> None:
        """Reading on and on from the offset in the note reaches the end of any file, huge lines included."""
        (root / "huge.txt").write_text("start\n" + ("x" * 3_000_000 + "\n") * 3 + "y\n" * 30_000 + "end")
        offset, calls = 0, 0
        while True:
            text = read_file("huge.txt", context, offset=offset, limit=100_000)
            assert len(text) < MAX_RESULT_CHARACTERS
            calls += 1
            following = re.search(r"continue with offset=(\d+)\]$", text)
            if not following:
                break
            assert int(following[1]) > offset
            offset = int(following[1])
        assert text.endswith("y\nend")
        assert calls < 6

    def test_binary_and_empty_files(self, context: ToolContext, root: Path) -> None:
        """Binary content is refused; emptiness is said, not shown."""
        (root / "blob").write_bytes(b"\x7fELF\0\0")
        (root / "empty").touch()
        with pytest.raises(ToolError, match="binary"):
            read_file("blob", context)
        assert read_file("empty", context) == "[the file is empty]"
        assert "fewer lines" in read_file("notes.txt", context, offset=5)
        with pytest.raises(ToolError, match="offset"):
            read_file("notes.txt", context, offset=-1)


class TestWriteFile:
    def test_creates_parents_and_is_idempotent(self, context: ToolContext, root: Path) -> None:
        """The same call twice leaves the same file, and no temporary one."""
        for _ in range(2):
            assert write_file("new/dir/a.txt", "grün\n", context) == "wrote 6 bytes to new/dir/a.txt"
        assert (root / "new/dir/a.txt").read_text() == "grün\n"
        assert os.listdir(root / "new/dir") == ["a.txt"]

    def test_keeps_mode_and_link(self, context: ToolContext, root: Path) -> None:
        """An executable stays one; a link within the workspace stays a link to the changed file."""
        (root / "src/main.py").chmod(0o750)
        write_file("link_in/main.py", "new", context)
        assert (root / "src/main.py").read_text() == "new"
        assert (root / "src/main.py").stat().st_mode & 0o777 == 0o750
        assert (root / "link_in").is_symlink()

    def test_failure_leaves_the_old_content(
        self, context: ToolContext, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A write that fails half way changes nothing and leaves nothing behind."""

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        before = sorted(os.listdir(root))
        with pytest.raises(ToolError, match="No space left"):
            write_file("notes.txt", "new", context)
        assert (root / "notes.txt").read_text() == "one\n"
        assert sorted(os.listdir(root)) == before

    def test_text_that_no_file_can_hold(self, context: ToolContext, root: Path) -> None:
        """Half a surrogate pair is refused before anything is written."""
        with pytest.raises(ToolError, match="surrogate"):
            write_file("a.txt", "\ud800", context)
        assert not (root / "a.txt").exists()


class TestEditFile:
    def test_replaces_exactly_one_occurrence(self, context: ToolContext, root: Path) -> None:
        """One match is replaced; the rest of the file stays byte for byte, line ends and odd bytes too."""
        (root / "mixed").write_bytes(b"a\r\nb\xff\nc\n")
        assert edit_file("mixed", "b", "B", context) == "replaced 1 occurrence in mixed"
        assert (root / "mixed").read_bytes() == b"a\r\nB\xff\nc\n"

    def test_ambiguous_or_missing_text_changes_nothing(self, context: ToolContext, root: Path) -> None:
        """Two matches, none, an empty or unchanged text are errors that say what to do."""
        before = snapshot(root / "src")
        for old, new, message in (
            ("print", "log", "2 times"),
            ("absent", "x", "does not occur"),
            ("absent", "one", "there already"),
            ("", "x", "empty"),
            ("one", "one", "differ"),
        ):
            with pytest.raises(ToolError, match=message):
                edit_file("src/main.py", old, new, context)
        assert snapshot(root / "src") == before

    def test_replace_all(self, context: ToolContext, root: Path) -> None:
        """Every occurrence, when asked."""
        assert edit_file("src/main.py", "print", "log", context, replace_all=True).startswith("replaced 2")
        assert (root / "src/main.py").read_text() == "log('one')\nlog('two')\n"

    def test_edits_at_the_same_time(self, context: ToolContext, root: Path) -> None:
        """Given calls of one round that edit one file, then it has all their changes, and no other file is left."""
        names = [f"line {number}" for number in range(40)]
        (root / "many").write_text("\n".join(names) + "\n")
        before = set(os.listdir(root))
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda name: edit_file("many", f"{name}\n", f"{name} is done\n", context), names))
        assert set(results) == {"replaced 1 occurrence in many"}
        assert (root / "many").read_text() == "".join(f"{name} is done\n" for name in names)
        assert set(os.listdir(root)) == before

    def test_binary_and_too_large_files(
        self, context: ToolContext, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither is edited."""
        (root / "blob").write_bytes(b"one\0")
        with pytest.raises(ToolError, match="binary"):
            edit_file("blob", "one", "two", context)
        monkeypatch.setattr(files, "MAX_EDITED_BYTES", 3)
        with pytest.raises(ToolError, match="too large"):
            edit_file("notes.txt", "one", "two", context)


class TestGlob:
    @pytest.mark.parametrize(
        ("pattern", "found"),
        [
            ("*.txt", ["notes.txt"]),
            ("*.py", []),
            ("**/*.py", ["src/deep/more.py", "src/main.py"]),
            ("src/**", ["src/deep/more.py", "src/main.py"]),
            ("**/deep/**/more.py", ["src/deep/more.py"]),
            ("src/[lm]*.py", ["src/main.py"]),
            ("./src/*.py", ["src/main.py"]),
            ("**", ["notes.txt", "src/deep/more.py", "src/main.py"]),
        ],
    )
    def test_patterns(self, pattern: str, found: list[str], context: ToolContext) -> None:
        """`*` stays in one directory, `**` crosses any number; links and special files are not listed."""
        assert sorted(glob(pattern, context).splitlines()) == (found or ["no files"])

    def test_generated_directories_are_left_out(self, context: ToolContext, root: Path) -> None:
        """`.git`, `node_modules`, caches, virtual environments and leftovers of writes are not the user's text."""
        for name in (".git", "node_modules", "__pycache__", ".venv"):
            (root / name).mkdir()
            (root / name / "x.txt").touch()
        (root / ".understudy-0123").touch()
        assert glob("**/*.txt", context) == "notes.txt"
        assert ".understudy" not in glob("**", context)

    def test_output_is_bounded(self, context: ToolContext, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Many matches are cut with a note, by number and by length; so is the walk itself."""
        for number in range(20):
            (root / f"{number:02}.md").touch()
        monkeypatch.setattr(files, "MAX_PATHS", 5)
        assert glob("*.md", context).splitlines()[5:] == ["[more files are not shown: narrow the pattern or the path]"]
        monkeypatch.setattr(files, "MAX_PATHS", 1_000)
        monkeypatch.setattr(files, "MAX_OUTPUT_CHARACTERS", 50)
        assert len(glob("*.md", context)) < 130
        monkeypatch.setattr(workspace, "MAX_WALKED", 3)
        assert len(list(Workspace(str(root)).walk(root))) <= 3

    def test_hostile_pattern_is_quick(self, context: ToolContext, root: Path) -> None:
        """Many stars take polynomial time: this ends at all only if they do."""
        (root / ("a" * 200)).touch()
        (root / "/".join(["d"] * 40)).mkdir(parents=True)
        (root / "/".join(["d"] * 40) / "f").touch()
        assert glob("*a" * 60 + "b", context) == "no files"
        assert glob("**/" * 60 + "nothing", context) == "no files"


class TestGrep:
    async def test_matches_with_path_and_line(self, context: ToolContext) -> None:
        """Each match is `path:line: text`; links are not followed."""
        assert await grep("two", context) == "src/main.py:2: print('two')"
        found = await grep("two", context, ignore_case=True)
        assert sorted(found.splitlines()) == ["src/deep/more.py:1: Two = 2", "src/main.py:2: print('two')"]
        assert await grep("from outside", context) == "no matches"

    async def test_restricted_by_path_and_glob(self, context: ToolContext) -> None:
        """A bare pattern names files anywhere, one with a slash is a path; one file can be searched too."""
        assert (await grep("one", context, glob="*.txt")) == "notes.txt:1: one"
        assert (await grep("T", context, glob="src/**/*.py")) == "src/deep/more.py:1: Two = 2"
        assert (await grep("one", context, path="notes.txt")) == "notes.txt:1: one"

    async def test_binary_files_are_left_out(self, context: ToolContext, root: Path) -> None:
        """Among many files; asked for by name it is an error that says so."""
        (root / "blob").write_bytes(b"one\0")
        assert "blob" not in await grep("one", context)
        with pytest.raises(ToolError, match="binary"):
            await grep("one", context, path="blob")

    async def test_output_is_bounded(self, context: ToolContext, root: Path) -> None:
        """Many matches and long lines are cut, and said to be."""
        (root / "many.txt").write_text(("needle " + "x" * 5_000 + "\n") * 1_000)
        found = await grep("needle", context)
        assert len(found) < MAX_RESULT_CHARACTERS
        assert found.endswith("[more matches are not shown: narrow the pattern or the path]")

    @pytest.mark.parametrize("pattern", ["(", "*", "a{1,99999999999}", "(?P<x"])
    async def test_broken_pattern_is_refused(self, pattern: str, context: ToolContext) -> None:
        """A text that is no regular expression is an error for the model to read."""
        with pytest.raises(ToolError, match="not a regular expression"):
            await grep(pattern, context)

    async def test_exponential_pattern_ends(
        self, context: ToolContext, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A pattern that would run for ever is ended by the kernel, and the event loop goes on meanwhile."""
        (root / "evil.txt").write_text("a" * 60 + "!\n")
        monkeypatch.setattr(files, "_SEARCH", files._SEARCH.replace("signal.alarm(30)", "signal.alarm(1)"))
        search = asyncio.create_task(grep("(a|a)+$", context))
        await asyncio.sleep(0)
        assert not search.done()
        with pytest.raises(ToolError, match="simpler pattern"):
            await search

    async def test_cancelled_search_leaves_no_process(
        self, context: ToolContext, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Cancelling ends the searching process before the cancellation is reported."""
        (root / "evil.txt").write_text("a" * 60 + "!\n")
        started: asyncio.Future[ChildProcess] = asyncio.get_running_loop().create_future()

        def recorded(*arguments: Any, **options: Any) -> ChildProcess:
            process = ChildProcess(*arguments, **options)
            started.set_result(process)
            return process

        monkeypatch.setattr(short_process, "ChildProcess", recorded)
        search = asyncio.create_task(grep("(a|a)+$", context))
        process = await started
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        assert process.returncode == -signal.SIGKILL

    async def test_nothing_of_the_workspace_is_imported(
        self, context: ToolContext, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A module planted in the workspace does not run in the searching process, even if PYTHONPATH names it."""
        monkeypatch.setenv("PYTHONPATH", str(root))
        (root / "json.py").write_text("raise SystemExit('planted')")
        found = await grep("two", context)
        assert found == "src/main.py:2: print('two')"


def test_crash_policies() -> None:
    """What only reads, or writes the same again, is rerun; an edit, which could apply twice, is reported."""
    policies = {item.__name__: item.__understudy_tool__.on_crash for item in (read_file, write_file, glob, grep)}
    assert set(policies.values()) == {"rerun"}
    assert edit_file.__understudy_tool__.on_crash == "report"
    assert all("context" not in item.__understudy_tool__.schema["properties"] for item in (read_file, edit_file))
