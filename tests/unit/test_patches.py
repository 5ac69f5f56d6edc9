"""`apply_patch`: what a patch says, where it applies, and that it is applied all or nothing, also over deaths."""

from __future__ import annotations

import difflib
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.actors import patch_tool
from understudy.actors.patch_format import ADD, INSERT, KEEP, REMOVE, UPDATE, Change, Chunk, parse_patch, patched
from understudy.actors.patch_tool import JOURNAL, apply_patch, find_out
from understudy.actors.tools import ToolContext
from understudy.actors.workspace import Workspace
from understudy.errors import ToolError, WorkspaceViolation

PATCH = """*** Begin Patch
*** Update File: src/app.py
@@ def greet():
-    return "Hi"
+    return "Hello"
*** Add File: notes/new.txt
+first
+
*** Delete File: old.py
*** Update File: name.txt
*** Move to: names/other.txt
@@
 one
+two
*** End Patch
"""
APP = 'def part():\n    return "Hi"\n\n\ndef greet():\n    return "Hi"\n'
BEFORE = {"src/app.py": APP, "old.py": "gone\n", "name.txt": "one\n"}
AFTER = {
    "src/app.py": 'def part():\n    return "Hi"\n\n\ndef greet():\n    return "Hello"\n',
    "notes/new.txt": "first\n\n",
    "names/other.txt": "one\ntwo\n",
}


LINES = st.sampled_from(["a", "b", " a", "c", ""])


def context_of(root: Path, patch: str = "", call: str = "c") -> ToolContext:
    return ToolContext(
        session_id="s", run_id="r", round=1, call_id=call, epoch=1, agent="a", workspace=str(root),
        arguments={"patch": patch},
    )  # fmt: skip


def content(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in BEFORE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def update(body: str, path: str = "f") -> str:
    return f"*** Begin Patch\n*** Update File: {path}\n{body}\n*** End Patch"


def after(text: str, body: str) -> str:
    return patched(text, parse_patch(update(body))[0].chunks, "f")


class TestFormat:
    """What a patch says."""

    def test_every_kind_of_change(self) -> None:
        """Sections become changes, in order; headers, kept, removed and inserted lines are distinguished."""
        changes = parse_patch(PATCH)
        assert [(change.kind, change.path, change.move_to) for change in changes] == [
            (UPDATE, "src/app.py", None), (ADD, "notes/new.txt", None), ("*** Delete File: ", "old.py", None),
            (UPDATE, "name.txt", "names/other.txt"),
        ]  # fmt: skip
        assert changes[1].content == "first\n\n"
        (chunk,) = changes[0].chunks
        assert chunk == Chunk(
            ("def greet():",), ((REMOVE, '    return "Hi"'), (INSERT, '    return "Hello"')), False, 3
        )
        assert parse_patch(PATCH.replace("\n", "\r\n")) == changes

    @pytest.mark.parametrize(
        ("patch", "problem"),
        [
            ("", "line 1 of the patch"),
            ("hello", r"begins with the line `\*\*\* Begin Patch`"),
            ("*** Begin Patch\n*** End Patch", "changes no file"),
            ("*** Begin Patch\n*** Add File: a\n+x", r"`\*\*\* End Patch` is missing"),
            ("*** Begin Patch\n*** Add File: a\nx\n*** End Patch", r"line 3.*begins with `\+`"),
            ("*** Begin Patch\n*** Add File: \n+x\n*** End Patch", "the path is missing"),
            ("*** Begin Patch\n*** Replace File: a\n*** End Patch", r"line 2.*Update File: PATH"),
            ("*** Begin Patch\n*** Delete File: a\n*** End Patch\nmore", "nothing may follow"),
            ("*** Begin Patch\n*** Delete File: a\n*** Delete File: a\n*** End Patch", "names a twice"),
            (update("@@\n same"), "no line that is removed or inserted"),
            (update("@@\n-a\nb"), r"line 5.*begins with a space"),
            (update("").replace("\n\n", "\n"), "no changes"),
        ],
    )
    def test_what_is_no_patch_is_refused_with_its_line(self, patch: str, problem: str) -> None:
        """The error names the line and what was expected there."""
        with pytest.raises(ToolError, match=problem):
            parse_patch(patch)


class TestPlaces:
    """Where a change applies."""

    def test_white_space_at_line_ends_may_differ(self) -> None:
        """It is looked at only where the exact lines are there; kept lines stay as the file has them."""
        assert after("a  \nb\nc\n", "@@\n a\n-b\n+B") == "a  \nB\nc\n"
        assert after("a \nb\na\nb\n", "@@\n a\n-b\n+B") == "a \nb\na\nB\n"

    def test_indentation_may_not(self) -> None:
        """A line with another indentation is another line."""
        with pytest.raises(ToolError, match="Read the file and copy them exactly"):
            after("  a\n", "@@\n-a\n+b")

    def test_one_place_must_be_meant(self) -> None:
        """Lines that are there twice need more lines or a header; a header means the first place behind it."""
        with pytest.raises(ToolError, match=r"at 2 places \(lines 1, 3\)"):
            after("x\ny\nx\n", "@@\n-x\n+z")
        assert after("x\ny\nx\n", "@@ y\n-x\n+z") == "x\ny\nz\n"
        assert after("class A:\n def f\n  x\nclass B:\n def f\n  x\n", "@@ class B:\n@@ def f\n-  x\n+  y") == (
            "class A:\n def f\n  x\nclass B:\n def f\n  y\n"
        )

    def test_places_come_in_the_order_of_the_file(self) -> None:
        """Each place is behind the one before."""
        assert after("a\nb\nc\n", "@@\n-a\n+1\n@@\n-c\n+3") == "1\nb\n3\n"
        with pytest.raises(ToolError, match=r"line 6 of the patch.*not behind line 3"):
            after("a\nb\nc\n", "@@\n-c\n+3\n@@\n-a\n+1")

    def test_the_end_of_a_file(self) -> None:
        """`*** End of File` means the last lines; a missing last line break stays missing."""
        assert after("x\ny\nx\n", "@@\n-x\n+z\n*** End of File") == "x\ny\nz\n"
        assert after("x\ny", "@@\n+z\n*** End of File") == "x\ny\nz"
        assert after("", "@@\n+z") == "z\n"
        with pytest.raises(ToolError, match="does not say where"):
            after("x\n", "@@\n+z")

    def test_line_ends_stay_as_they_are(self) -> None:
        """A file with CRLF keeps it, also in what is inserted."""
        assert after("a\r\nb\r\n", "@@\n a\n-b\n+c\n+d") == "a\r\nc\r\nd\r\n"

    @settings(max_examples=150, deadline=None)
    @given(st.lists(LINES, max_size=12), st.lists(LINES, max_size=12), st.integers(0, 3))
    def test_a_difference_is_applied_or_refused(self, old: list[str], new: list[str], around: int) -> None:
        """A patch made of the difference of two texts makes the one of the other, or is refused as not clear."""
        before, wanted = ("".join(line + "\n" for line in lines) for lines in (old, new))
        chunks = []
        for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(around):
            lines = []
            for tag, i, j, k, m in group:
                lines += [(KEEP if tag == "equal" else REMOVE, line) for line in old[i:j]]
                lines += [(INSERT, line) for line in new[k:m] if tag != "equal"]
            chunks.append(Chunk((), tuple(lines), group[-1][2] == len(old), 1))
        try:
            made = patched(before, tuple(chunks), "f")
        except ToolError:
            assert not (len(chunks) == 1 and chunks[0].at_end)  # then one place only is possible
            return
        assert made == wanted

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.text("ab \t", max_size=3), unique=True, min_size=1, max_size=10), st.data())
    def test_text_and_patch_go_round(self, lines: list[str], data: st.DataObject) -> None:
        """In a file of lines that differ every edit is found, and undone by its reverse."""
        lines = list({line.rstrip(): line for line in lines}.values())
        at = data.draw(st.integers(0, len(lines) - 1))
        inserted = data.draw(st.lists(st.text("xyz", min_size=1, max_size=3), min_size=1, max_size=3))
        body = (
            [f" {line}" for line in lines[max(0, at - 2) : at]] + [f"-{lines[at]}"] + [f"+{line}" for line in inserted]
        )
        (change,) = parse_patch(update("\n".join(["@@", *body])))
        text = "".join(line + "\n" for line in lines)
        made = patched(text, change.chunks, "f")
        assert made.split("\n")[:-1] == [*lines[:at], *inserted, *lines[at + 1 :]]
        back = tuple(chunk.reversed() for chunk in change.chunks)
        assert len(set(inserted)) < len(inserted) or patched(made, back, "f") == text


class TestFiles:
    """What is done to a workspace."""

    def test_all_kinds_at_once(self, root: Path) -> None:
        """Files are changed, added with their directories, removed and moved; nothing else is left behind."""
        said = apply_patch(PATCH, context_of(root))
        assert content(root) == AFTER
        assert said.splitlines() == [
            "applied:", "M src/app.py", "A notes/new.txt", "D old.py", "M name.txt -> names/other.txt",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("old", "new", "problem"),
        [
            ("old.py", "missing.py", "missing.py: there is no such file"),
            ("notes/new.txt", "name.txt2/../x", r"`\.\.` is not allowed"),
            ("notes/new.txt", "src/app.py/x", "src/app.py/x"),
            ("Add File: notes/new.txt", "Add File: /etc/understudy", "outside the workspace"),
            ("names/other.txt", "taken.txt", "taken.txt: exists already"),
            ('return "Hi"', 'return "Ho"', "copy them exactly"),
        ],
    )
    def test_all_or_nothing(self, root: Path, old: str, new: str, problem: str) -> None:
        """Whatever is wrong with one of the changes, no file is changed."""
        (root / "taken.txt").write_text("")
        with pytest.raises((ToolError, WorkspaceViolation), match=problem):
            apply_patch(PATCH.replace(old, new), context_of(root))
        assert content(root) == {**BEFORE, "taken.txt": ""}

    def test_a_write_that_fails_undoes_those_before(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A full disk at any step leaves every file as it was, and no journal."""
        replace_file, left = Workspace.replace_file, [0]

        def fails(self: Workspace, location: Path, data: bytes) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise ToolError("No space left on device")
            replace_file(self, location, data)

        monkeypatch.setattr(Workspace, "replace_file", fails)
        for step in range(1, 5):
            left[0] = step
            with pytest.raises(ToolError, match="No space left"):
                apply_patch(PATCH, context_of(root))
            assert content(root) == BEFORE

    def test_bytes_that_are_no_text_stay(self, root: Path) -> None:
        """Bytes in another encoding are kept; a binary file is refused."""
        (root / "f").write_bytes(b"caf\xe9\nb\n")
        apply_patch(update("@@\n-b\n+c"), context_of(root))
        assert (root / "f").read_bytes() == b"caf\xe9\nc\n"
        (root / "f").write_bytes(b"\0\nb\n")
        with pytest.raises(ToolError, match="binary"):
            apply_patch(update("@@\n-b\n+c"), context_of(root))


def dies_at(root: Path, step: int) -> bool:
    """Apply the patch in a process that is killed behind so many writes; False if it did not come to that."""
    child = os.fork()
    if child == 0:
        left = [step]

        def counted(function: object) -> object:
            def call(*arguments: object) -> None:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                function(*arguments)  # type: ignore[operator]

            return call

        Workspace.replace_file = counted(Workspace.replace_file)  # type: ignore[method-assign,assignment]
        Workspace.remove_file = counted(Workspace.remove_file)  # type: ignore[method-assign,assignment]
        try:
            apply_patch(PATCH, context_of(root))
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


class TestDeaths:
    """What became of a patch whose process died is found out, and the patch completed."""

    @pytest.mark.parametrize("step", range(8))
    def test_a_death_at_every_step(self, root: Path, step: int) -> None:
        """Wherever it was killed: the files are as after the patch, once, and the model reads that."""
        died = dies_at(root, step)
        assert died == (step < 7)  # the journal, six steps of five files, and the journal's end
        said = find_out(context_of(root, PATCH))
        assert content(root) == AFTER
        assert said.startswith("applied:")
        assert find_out(context_of(root, PATCH)).startswith("applied:")  # its process may die as well

    def test_the_next_patch_completes_it(self, root: Path) -> None:
        """Nobody asked what became of it: the next patch of the workspace finds the journal."""
        assert dies_at(root, 3)
        assert (root / JOURNAL).exists()
        apply_patch("*** Begin Patch\n*** Add File: z\n+z\n*** End Patch", context_of(root, call="other"))
        assert content(root) == {**AFTER, "z": "z\n"}

    def test_what_others_changed_meanwhile_stays(self, root: Path) -> None:
        """A file that is neither as before nor as after the patch is left alone, and named."""
        assert dies_at(root, 2)
        (root / "old.py").write_text("mine\n")
        assert "Others had changed old.py" in find_out(context_of(root, PATCH))
        assert content(root) == {**AFTER, "old.py": "mine\n"}

    def test_a_step_that_cannot_be_taken_any_more_is_in_nobodys_way(self, root: Path) -> None:
        """A file is in the place of a directory meanwhile: what can't be written there is named, and later patches are
        applied."""
        assert dies_at(root, 1)
        (root / "notes").write_text("mine\n")
        assert "notes/new.txt" in find_out(context_of(root, PATCH)).partition("Others had changed")[2]
        assert not (root / JOURNAL).exists()
        apply_patch("*** Begin Patch\n*** Add File: z\n+z\n*** End Patch", context_of(root, call="other"))
        assert (root / "z").read_text() == "z\n"

    def test_where_nobody_can_tell(self, root: Path) -> None:
        """Files that fit neither state: the model is asked to read them."""
        (root / "src/app.py").write_text("other\n")
        with pytest.raises(ToolError, match="read them"):
            find_out(context_of(root, PATCH))

    def test_a_line_that_fits_again(self, root: Path) -> None:
        """A change that could be made once more is not made: whether it was is not known."""
        (root / "name.txt").write_text("x\none\n")
        patch = update("@@ x\n one\n+one", "name.txt")
        apply_patch(patch, context_of(root))
        with pytest.raises(ToolError, match="can't be told"):
            find_out(context_of(root, patch))

    @pytest.mark.parametrize(
        "written", ["{", '{"path": "x", "data": "no base64!"}', '{"path": "../x"}', '{"path": "/etc/passwd"}']
    )
    def test_the_journal_is_no_file_of_the_users(self, root: Path, written: str) -> None:
        """Tools that list files leave it out; one that is none, as a command may write it, is removed."""
        step = written.replace("{", '{"before": "", "after": "b", ')
        (root / JOURNAL).write_text(f'{{"call_key": "s/c", "summary": "", "steps": [{step}]}}')
        workspace = Workspace(str(root))
        assert JOURNAL not in {path.name for path in workspace.walk(workspace.root)}
        assert patch_tool._journal(workspace) is None
        assert not (root / JOURNAL).exists()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*PATCH.splitlines(), "x"]), max_size=14).map("\n".join))
def test_any_text_is_a_patch_or_an_error_for_the_model(text: str) -> None:
    """Nothing but `ToolError` comes of it."""
    try:
        found = parse_patch(text)
    except ToolError:
        return
    assert all(isinstance(change, Change) for change in found)
