"""Skills: folders that are read and packed in the driver, and what a frame makes of them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.delegating import written
from understudy.actors.skills import LONGEST_PIECE, UNUSED_SECONDS, Skills, catalogue, described, load_skill
from understudy.actors.tools import ToolContext
from understudy.cluster.client.compiling import compile_spec
from understudy.cluster.client.preview import first_request
from understudy.cluster.client.skills import read_skills
from understudy.errors import InvalidSpec, ToolError
from understudy.manifest import changes
from understudy.skills import LARGEST_SKILL, read_folder, unpacked
from understudy.spec import AgentSpec, Delegation
from understudy.store.operations.code import digests
from understudy.store.operations.trust import brought

FIELDS = "name: pdf\ndescription: Fill PDF forms. Use it when a form is to be filled."
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a skill in a folder of this name."""

    def made(name: str = "pdf", fields: str = FIELDS, body: str = "Run scripts/fill.sh.", **files: str) -> Path:
        folder = tmp_path / "skills" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "SKILL.md").write_text(f"---\n{fields}\n---\n\n{body}\n")
        for path, text in files.items():
            location = folder / path
            location.parent.mkdir(exist_ok=True)
            location.write_text(text)
            location.chmod(0o755 if path.endswith(".sh") else 0o644)
        return folder

    return made


def named(name: str) -> str:
    return f"name: {name}\ndescription: What {name} is for."


def compiled(*paths: Path, **more: Any) -> Any:
    return compile_spec(AgentSpec(name="a", skills=tuple(map(str, paths)), **more), model="offline", profile=None)


def context_with(found: Any) -> ToolContext:
    """A call's context in a session of this compiled specification."""

    async def read(blob: str) -> bytes:
        data: bytes = found.blobs[blob]
        return data

    skills = Skills(described(found.spec), read)
    return ToolContext(session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a", skill_files=skills)


def test_a_folder_or_a_folder_of_folders(make: Make) -> None:
    """A skill is a folder with a SKILL.md; a folder of such stands for all of them, in the order of their names."""
    one, two = make("b-pdf", named("pdf")), make("a-xls", named("xls"))
    (one.parent / "no-skill").mkdir()
    assert [skill.name for skill in read_skills([str(one)]).skills] == ["pdf"]
    assert [skill.name for skill in read_skills([str(one.parent)]).skills] == ["xls", "pdf"]
    assert [skill.description for skill in read_skills([str(two)]).skills] == ["What xls is for."]


@pytest.mark.parametrize(
    ("fields", "body", "problem"),
    [
        ("description: d", "b", "name must be"),
        ("name: Not_This\ndescription: d", "b", "name must be"),
        ("name: a", "b", "description must be"),
        ("name: a\ndescription: " + "x" * 1025, "b", "description must be"),
        ("name: a\ndescription: Use: it", "b", "line 3: mapping values are not allowed here; a text with a colon"),
        ("name: a\nname: b\ndescription: d", "b", "line 3: 'name' is there twice"),
        ("- name", "b", "must have fields by name"),
        ("name: a\ndescription: d\nwhen: !!python/object/apply:os.getcwd []", "b", "not YAML: line 4"),
        ("name: a\ndescription: d\nmore: &m [1, 2]\nother: *m", "b", "line 5: aliases"),
        ("name: a\ndescription: d", "", "no instructions"),
        ("name: a\ndescription: d", "x" * 50_001, "move parts to files"),
    ],
)
def test_a_skill_that_is_none_is_refused(make: Make, fields: str, body: str, problem: str) -> None:
    """What is wrong is said with the file, and the line where there is one; the agent is refused."""
    folder = make(fields=fields, body=body)
    with pytest.raises(InvalidSpec, match=problem) as raised:
        compiled(folder)
    assert str(folder) in str(raised.value)


def test_fields_of_other_programs_are_left_alone(make: Make) -> None:
    """A skill may have fields that mean something elsewhere: a licence, allowed tools, metadata."""
    fields = f"{FIELDS}\nlicense: MIT\nallowed-tools: Bash(git:*) Read\nmetadata:\n  version: '1.0'\ncolour: red"
    assert read_skills([str(make(fields=fields))]).problems == []


def test_what_a_folder_may_not_have(make: Make, tmp_path: Path) -> None:
    """A link could bring any file of the driver's into the store, and a large folder does not belong there."""
    folder = make()
    (folder / "link").symlink_to("/etc/hostname")
    with pytest.raises(InvalidSpec, match="'link' is a link"):
        compiled(folder)
    (folder / "link").unlink()
    (folder / "large.bin").write_bytes(b"x" * LARGEST_SKILL)
    with pytest.raises(InvalidSpec, match="too large"):
        compiled(folder)
    (folder / "large.bin").unlink()
    other = make("other")
    with pytest.raises(InvalidSpec, match="two skills named 'pdf'"):
        compiled(folder, other)
    with pytest.raises(InvalidSpec, match=r"has no SKILL\.md"):
        compiled(tmp_path)
    with pytest.raises(InvalidSpec, match="can't be read: No such file"):
        compiled(tmp_path / "missing")


def test_the_catalogue_follows_the_instructions(make: Make, tmp_path: Path) -> None:
    """The system message has the agent's instructions, then its skills; an agent without any has no trace of them."""
    found = compiled(make(), instructions="Be brief.", tools=["read_file"])
    spec = AgentSpec(name="a", instructions="Be brief.", skills=(str(tmp_path / "skills"),))
    system, _ = first_request(spec, "go", model="offline")["messages"]
    assert system["content"] == f"Be brief.\n\n{catalogue(found.spec)}"
    assert catalogue(found.spec).splitlines()[1:] == ["- pdf: Fill PDF forms. Use it when a form is to be filled."]
    assert [tool["name"] for tool in found.spec["tools"]] == ["read_file", "load_skill"]
    plain = compile_spec(AgentSpec(name="a"), model="offline", profile=None).spec
    assert "skills" not in plain
    assert (catalogue(plain), plain["tools"]) == ("", [])
    with pytest.raises(InvalidSpec, match="load_skill needs skills"):
        compile_spec(AgentSpec(name="a", tools=["load_skill"]), model="offline", profile=None)


def test_a_copy_is_kept_with_the_session(make: Make) -> None:
    """The specification names the packed folder by its hash: the same files are the same bytes wherever they are, and
    the store knows that the session needs them and that an archive brings them."""
    folder = make(**{"scripts/fill.sh": "echo", "notes.txt": "n"})
    found = compiled(folder)
    (blob,) = digests(found.spec, "")
    assert [(file.path, file.executable) for file in unpacked(found.blobs[blob], blob).files] == [
        ("SKILL.md", False), ("notes.txt", False), ("scripts/fill.sh", True),
    ]  # fmt: skip
    moved = folder.parent / "moved"
    shutil.copytree(folder, moved)
    (moved / "__pycache__").mkdir()
    (moved / "__pycache__" / "x.pyc").write_text("x")
    (moved / ".hidden").write_text("x")
    assert compiled(moved).spec["skills"] == found.spec["skills"]
    row = {"session_id": "s", "spec": found.spec, "placement": "", "next_spec": None}
    assert brought([row], found.blobs, lambda _: None) == {"s": ["the files of the skill pdf"]}


def test_a_changed_skill_is_a_changed_agent(make: Make) -> None:
    """A file, its executable bit, a description or the set of skills: each makes another agent."""
    folder = make(**{"a.sh": "echo"})
    before = compiled(folder).spec
    assert changes(before, compiled(folder).spec) == ()
    (folder / "a.sh").chmod(0o644)
    after = compiled(folder).spec
    assert changes(before, after) == ("skills.pdf",)
    assert before["hash"] != after["hash"]
    assert changes(before, compile_spec(AgentSpec(name="a"), model="offline", profile=None).spec) == (
        "skills.pdf", "tools.load_skill",
    )  # fmt: skip


async def test_a_skill_is_read(make: Make) -> None:
    """`load_skill` returns the instructions with a list of the files, one of them, or the rest of a long one."""
    long = "é" * (LONGEST_PIECE + 5)
    folder = make(**{"notes.txt": long, "scripts/fill.sh": "echo filled"})
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    context = context_with(compiled(folder))
    said = await load_skill("pdf", context)
    assert said.startswith("Run scripts/fill.sh.\n\nFiles of this skill")
    assert "- scripts/fill.sh (11 bytes, executable)" in said
    assert "$UNDERSTUDY_SKILLS/pdf" in said
    assert "description" not in said
    assert await load_skill("pdf", context, file="./scripts/fill.sh") == "echo filled"
    first = await load_skill("pdf", context, file="notes.txt")
    assert first.endswith(f"[… 5 more characters: offset {LONGEST_PIECE} …]")
    assert await load_skill("pdf", context, file="notes.txt", offset=LONGEST_PIECE) == "é" * 5
    for arguments, problem in [
        ({"name": "pfd"}, r"no skill 'pfd' \(did you mean 'pdf'\?\); there are: pdf"),
        ({"name": "pdf", "file": "scripts/fil.sh"}, "did you mean 'scripts/fill.sh'"),
        ({"name": "pdf", "file": "../../etc/passwd"}, "has no file"),
        ({"name": "pdf", "file": "picture.png"}, "is no text"),
    ]:
        with pytest.raises(ToolError, match=problem):
            await load_skill(context=context, **arguments)


async def test_bytes_that_are_not_those_of_the_hash_are_refused(make: Make) -> None:
    """A skill that was changed in the store is not read."""
    found = compiled(make())
    found.blobs = {blob: data + b"x" for blob, data in found.blobs.items()}
    with pytest.raises(ToolError, match="does not match its hash"):
        await load_skill("pdf", context_with(found))


async def test_files_for_commands(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All skills of an agent are in one directory of the node that nobody else may enter, for reading only."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = compiled(make("x", named("x")), make("pdf", **{"scripts/fill.sh": "echo filled", "a/b.txt": "b"}))
    place = Path(str(await context_with(found).skills_directory()))
    assert sorted(os.listdir(place)) == ["pdf", "x"]
    fill = place / "pdf" / "scripts" / "fill.sh"
    assert (fill.read_text(), fill.stat().st_mode & 0o777) == ("echo filled", 0o555)
    assert (place / "pdf" / "a" / "b.txt").stat().st_mode & 0o777 == 0o444
    assert (place / "pdf" / "a").stat().st_mode & 0o777 == 0o555
    assert (tmp_path / f"understudy-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    assert await context_with(found).skills_directory() == str(place)
    bare = ToolContext(session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a")
    assert await bare.skills_directory() is None


@pytest.mark.parametrize("change", ["another text", "removed", "mode", "one more"])
async def test_what_was_changed_there_is_replaced(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    """A command, or a program that tidies up, may have changed the copy: the next call has the skill as it was kept."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = compiled(make(**{"a.sh": "echo"}))
    place = Path(str(await context_with(found).skills_directory()))
    file = place / "pdf" / "a.sh"
    (place / "pdf").chmod(0o755)
    if change == "another text":
        file.chmod(0o755)
        file.write_text("rm -rf")
    elif change == "removed":
        file.unlink()
    elif change == "mode":
        file.chmod(0o644)
    else:
        (place / "pdf" / "more.py").write_text("x")
    await context_with(found).skills_directory()
    assert sorted(os.listdir(place / "pdf")) == ["SKILL.md", "a.sh"]
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("echo", 0o555)
    assert sorted(os.listdir(place.parent)) == [place.name]


async def test_many_at_once_write_one_copy(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sessions of a node that need the same skills at the same time all get them, whole; what nobody needs goes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = compiled(make(**{f"{number}.txt": str(number) for number in range(20)}))
    old = tmp_path / f"understudy-{os.getuid()}" / "skills" / "old"
    old.mkdir(parents=True)
    old.parent.parent.chmod(0o700)
    os.utime(old, (0, 0))
    assert UNUSED_SECONDS > 86_400
    places = await asyncio.gather(*(context_with(found).skills_directory() for _ in range(8)))
    (place,) = set(places)
    assert len(read_folder(Path(str(place)) / "pdf").files) == 21
    assert os.listdir(old.parent) == [Path(str(place)).name]


def test_an_agent_that_a_model_writes_has_them_with_the_tool(make: Make) -> None:
    """A sub-agent that a model writes has its parent's skills if it has the tool that reads them, else none."""
    spec = compiled(
        make(), tools=["glob", "spawn_agent"], delegation=Delegation(tools=("glob", "load_skill"))
    ).spec  # fmt: skip
    both, without = written({"instructions": "i"}, spec), written({"instructions": "i", "tools": ["glob"]}, spec)
    assert isinstance(both, dict)
    assert isinstance(without, dict)
    assert both["skills"] == spec["skills"]
    assert "skills" not in without
    assert catalogue(without) == ""
