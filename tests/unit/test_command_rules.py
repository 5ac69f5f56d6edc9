"""Rules for the commands of `bash`."""

from __future__ import annotations

import json

import pytest

from understudy.access import Sandbox
from understudy.actors.command_rules import judge, simple_commands
from understudy.cluster.client.compiling import compile_spec
from understudy.confinement import CommandRule, Confinement, confinement_of
from understudy.errors import InvalidSpec
from understudy.spec import AgentSpec

RULES = [
    CommandRule("git push --dry-run*", "allow"),
    CommandRule("git push*", "ask"),
    CommandRule("rm -rf /*", "deny"),
]


@pytest.mark.parametrize(
    ("command", "action"),
    [
        ("ls", None),
        ("git push", "ask"),
        ("git  push origin main", "ask"),
        ("git push --dry-run", None),
        ("cd x && git push; ls", "ask"),
        ("git push & rm -rf /tmp", "deny"),
        ("A=1 B=2 'rm' -rf \"/usr\"", "deny"),
        ("echo `git push`", "ask"),
        ('echo "$(git push)"', "ask"),
        ("cat <(git push)", "ask"),
        ("git \\\n push", "ask"),
        ("ls\ngit push", "ask"),
        ("echo 'git push'", None),
        ('x="not closed; git push', "ask"),
        ("true " + "$(" * 1_000 + "git push", "ask"),
    ],
)
def test_the_strictest_of_the_simple_commands_counts(command: str, action: str | None) -> None:
    """The first rule that matches a simple command is that command's; quotes, assignments and spaces don't matter, nor
    whether it is in a list, a pipe or a substitution (of which the first ones are looked into)."""
    found = judge(command, RULES)
    assert (found.action if found else None) == action


def test_the_parts_of_a_command_line() -> None:
    """A command line is taken apart at its operators, not within quotes."""
    assert simple_commands("a 'b;c' | d>e && (f)") == ["a b;c", "d>e", "f"]
    assert simple_commands("") == []


def test_what_a_sandbox_can_be() -> None:
    """All that is wrong with it is reported at once; a path that would be the whole root is refused."""
    with pytest.raises(InvalidSpec) as raised:
        Sandbox(memory=1, readable=("relative", "/.", "/opt"), rules=({"command": "x", "action": "maybe"},), disk=1)
    problems = {item["field"]: item["problem"] for item in raised.value.details["problems"]}
    assert problems.keys() == {"memory", "readable", "rules.0.action", "disk"}
    assert "'relative', '/'" in problems["readable"]


def test_what_an_agent_says_is_what_its_commands_get() -> None:
    """Every field of a sandbox reaches the session's process; an agent that says nothing has all defaults, and its
    specification nothing of it, as in older versions."""
    given = {"backend": "none", "network": True, "readable": ("/opt",), "memory": 1 << 30, "processes": 9,
             "file_size": 5000, "temporary": 2 << 20, "output": 2000, "seconds": 5}  # fmt: skip
    assert {*given, "rules"} == {*Sandbox.model_fields} == {*Confinement.__struct_fields__} - OF_WORKTREES
    spec = AgentSpec(name="a", sandbox=Sandbox(**given, rules=[{"command": "x*", "action": "deny"}]))
    stored = json.loads(json.dumps(compile_spec(spec, model="offline", profile=None).spec))
    assert confinement_of(stored) == Confinement(**given, rules=(CommandRule("x*", "deny"),))
    plain = compile_spec(AgentSpec(name="a"), model="offline", profile=None).spec
    assert "sandbox" not in plain
    assert confinement_of(plain) == Confinement()
    assert {name: getattr(Sandbox(), name) for name in Sandbox.model_fields} == fields_of(Confinement())


OF_WORKTREES = {"repository", "worktree", "writable"}
"""What the agent's workspace says, not its sandbox."""


def fields_of(confinement: Confinement) -> dict[str, object]:
    return {name: getattr(confinement, name) for name in {*Confinement.__struct_fields__} - OF_WORKTREES}
