"""`understudy certify` over agents that fold, remember, start sub-agents in the background, answer by a schema, and are
acted upon by hooks: no false alarm where they are right, and no silence where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy.cluster.certify.verdict import (
    DIFFERENT_AFTER_REPORT,
    EQUAL,
    EQUAL_BUT_REPORTED,
    NOT_SAFE,
    REPORTED,
    SAFE,
)
from understudy.testing.policies import Reply, register_policy

from ..kernel import kernel as k
from .test_certify import Agent, kinds, states, verdicts
from .test_certify import environment as environment

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]

LOOK = ("look", {"name": "facts.txt"})

HOOKS = '''
from understudy import Continue, HookContext, Inject, MemoryContext, Replace, hook, memory_provider

@hook("before_model")
def more(context: HookContext) -> list:
    """Adds to each request."""
    return [Inject("mind the rules", visibility="this_round"), Replace(parameters={"temperature": 0})]

@hook("after_tool")
def redact(context: HookContext) -> Replace:
    """Changes each result."""
    return Replace(text=f"redacted {len(context.text)}")

@hook("run_end")
def once_more(context: HookContext) -> Continue | None:
    """Lets the first answer not be the last."""
    return Continue("once more, please") if context.text == "said 1" else None

@hook("after_tool")
def count(context: HookContext) -> None:
    """Is not safe to be called again."""
    with open(Path(__file__).parent / "work-counted.txt", "a") as file:
        file.write("called\\n")
    return Replace(text=(Path(__file__).parent / "work-counted.txt").read_text())

@memory_provider
async def customers(context: MemoryContext) -> str:
    """What is known of whoever writes."""
    return f"nothing is known of {context.text}"
'''


def said(body: dict[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in body["messages"])


def looks_then_answers(body: dict[str, Any]) -> Reply:
    """A call of `look`, then answers, however many are wanted."""
    return Reply(tool_calls=(LOOK,)) if said(body) == 0 else Reply(text=f"said {said(body)}")


def answers_wrongly_first(body: dict[str, Any]) -> Reply:
    """A call of `look`, an answer that does not fit, one that does."""
    return (Reply(tool_calls=(LOOK,)), Reply(text='{"n": "x"}'), Reply(text='{"n": 3}'))[min(said(body), 2)]


def leads(body: dict[str, Any]) -> Reply:
    """Starts two sub-agents, uses two tools, answers; and answers each later message."""
    if said(body) == 0:
        work = ({"task": f"go {number}", "agent": "reader"} for number in range(2))
        return Reply(tool_calls=tuple(("start_agent", task) for task in work))
    return Reply(tool_calls=(LOOK, ("put", {"text": "x"}))) if said(body) == 1 else Reply(text=f"said {said(body)}")


def reads_on(body: dict[str, Any]) -> Reply:
    """Reads one file after the other, as far as what it is sent says that it has come."""
    known = str(body["messages"])
    unread = next((number for number in range(6) if f"WORD{number}" not in known), None)
    last = body["messages"][-1]
    if last["role"] == "user" and body.get("tool_choice") == "none":
        return Reply(text=" ".join(f"WORD{number}" for number in range(6) if f"WORD{number}" in known))
    return Reply(text="read all") if unread is None else Reply(tool_calls=(("look", {"name": f"big{unread}.txt"}),))


def reads_then_answers(body: dict[str, Any]) -> Reply:
    """A skill is read, then there is an answer."""
    return Reply(tool_calls=(("load_skill", {"name": "shelf"}),)) if said(body) == 0 else Reply(text="read")


for policy in (looks_then_answers, answers_wrongly_first, leads, reads_on, reads_then_answers):
    register_policy(f"certify-{policy.__name__}", policy)


def agent_of(directory: Path, policy: Any, *tools: str, own: tuple[str, ...] = ("look",), **fields: Any) -> Agent:
    """An agent whose model is a policy."""
    agent = Agent(directory, tools=own, **fields)
    agent.data["instructions"] = f"offline-policy: certify-{policy.__name__}"
    agent.data["tools"] += tools
    with (directory / f"{agent.module}.py").open("a") as file:
        file.write(HOOKS)
    return agent


def test_typed_output(tmp_path: Path) -> None:
    """An answer that is refused once by the output's schema, and its correction, are the same after each death."""
    schema = {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False,
    }  # fmt: skip
    found = agent_of(tmp_path, answers_wrongly_first, output_type=schema).certified("--points", "8", exit_code=0)
    assert (found["rounds"], found["status"], states(found)) == (3, "completed", {EQUAL})


def test_skills(tmp_path: Path) -> None:
    """A skill that is read is the same after each death."""
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "SKILL.md").write_text("---\nname: shelf\ndescription: d\n---\nLook there.")
    found = agent_of(tmp_path, reads_then_answers, skills=["shelf"]).certified("--points", "6", exit_code=0)
    assert (found["rounds"], found["status"], states(found)) == (2, "completed", {EQUAL})
    assert verdicts(found)["load_skill"] == SAFE


def test_hooks_that_act_and_memory(tmp_path: Path) -> None:
    """What hooks add, replace and veto, and what memory shows, is the same after each death."""
    agent = agent_of(tmp_path, looks_then_answers, "notes", memory={"scopes": ["session", "agent"]})
    agent.data["hooks"] = [f"{agent.module}:{name}" for name in ("more", "redact", "once_more")]
    agent.data["memory"]["providers"] = [f"{agent.module}:customers"]
    found = agent.certified("--points", "8", exit_code=0)
    assert (found["rounds"], states(found)) == (3, {EQUAL})
    assert set(verdicts(found)) == {"look"}


def test_a_hook_that_is_not_safe_to_be_called_again(tmp_path: Path) -> None:
    """A hook counts its calls outside and shows the count: the difference is reported, with the question about it."""
    agent = agent_of(tmp_path, looks_then_answers)
    agent.data["hooks"] = [f"{agent.module}:count"]
    found = agent.certified("--points", "6", exit_code=1)
    assert "not_deterministic" in kinds(found)


def test_sub_agents_in_the_background(tmp_path: Path) -> None:
    """Two sub-agents whose ends begin further runs: each point of theirs and of these runs is tried, their parent
    receives the same, in the same rounds, and no call of another run is taken for the same one."""
    agent = agent_of(tmp_path, leads, "agents", own=("look", "put"))
    reader = {"name": "reader", "tools": [f"{agent.module}:look"], "workspace": "workspace"}
    agent.data["agents"] = [{**reader, "instructions": k.script([LOOK], "read")}]
    found = agent.certified("--points", "14", exit_code=0)
    assert found["sessions"] == ["agent", "agent › reader 1/0", "agent › reader 1/1"]
    assert states(found) <= {EQUAL, EQUAL_BUT_REPORTED, DIFFERENT_AFTER_REPORT}
    assert verdicts(found) == {"look": SAFE, "put": REPORTED}


def test_a_sub_agent_in_the_background_whose_tool_is_not_safe(tmp_path: Path) -> None:
    """Its tool appends, and is declared rerun: that is found, at the sub-agent's point, and nothing else is."""
    agent = agent_of(tmp_path, leads, "agents", own=("look", "put"))
    reader = {"name": "reader", "tools": [f"{agent.module}:append"], "workspace": "workspace"}
    agent.data["agents"] = [{**reader, "instructions": k.script([("append", {"text": "x"})], "written")}]
    found = agent.certified("--only", "append", exit_code=1)
    assert verdicts(found)["append"] == NOT_SAFE
    assert {(finding["kind"], finding["point"].partition(":")[0]) for finding in found["verdict"]["findings"]} == {
        ("rerun_changed", "agent › reader 1/0"), ("rerun_changed", "agent › reader 1/1"),
    }  # fmt: skip


def test_a_folded_history(tmp_path: Path) -> None:
    """Summaries that the model writes are recorded and replayed as any answer; requests are the same after each
    death, those of folded histories as well."""
    context = {"window": 2_000, "fold": "summarise", "representation": "full"}
    agent = agent_of(tmp_path, reads_on, "history", context=context)
    for number in range(6):
        (agent.workspace / f"big{number}.txt").write_text(f"WORD{number} " + "lorem ipsum " * 150)
    found = agent.certified("--points", "8", exit_code=0)
    assert found["status"] == "completed"
    assert found["rounds"] > 7, "it was not folded"
    assert (states(found), verdicts(found)) == ({EQUAL}, {"look": SAFE})


def test_notes_boards_and_approvals(tmp_path: Path) -> None:
    """What the store answers has its effect once, so that its tools are not in the table; calls that need approval are
    executed as if they had it."""
    agent = Agent(
        tmp_path,
        [("add_note", {"text": "mine", "key": "a"}), ("post_to_board", {"key": "b", "text": "ours"}),
         ("todo", {"items": [{"text": "buy", "status": "pending"}]})],
        [("put", {"text": "x"}), ("list_notes", {}), ("read_board", {})],
        "done", tools=("put",), approve=["put", "add_note"], memory={"scopes": ["session", "agent"]},
    )  # fmt: skip
    agent.data["tools"] += ["notes", "board", "todo"]
    found = agent.certified("--points", "8", exit_code=0)
    assert verdicts(found) == {"put": REPORTED}
    assert states(found) <= {EQUAL, EQUAL_BUT_REPORTED, DIFFERENT_AFTER_REPORT}
