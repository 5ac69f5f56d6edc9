"""Workflow files: every mistake is named, all at once, with its place; what is right is read as it was written."""

from __future__ import annotations

import ast
import json
import math
import re
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from understudy import testing
from understudy.cluster.cli.main import app
from understudy.errors import InvalidSpec
from understudy.testing.policies import Reply, content_text
from understudy.workflow_definition.checking import definition_problems, read_definition, to_data
from understudy.workflow_definition.json_schema import json_schema
from understudy.workflow_definition.problems import MOST_PROBLEMS
from understudy.workflow_definition.steps import DEEPEST_STEP, MOST_STEPS
from understudy.workflow_definition.text import FORMS, LONGEST_TEXT, NoDefinition, read_text, written

FILES = Path(__file__).parents[1] / "workflows"

AGENTS, TOOLS = ("reviewer", "judge", "a"), ("split", "note", "discard", "now", "t")

MALFORMED: dict[str, list[str]] = {
    "aliases.yaml": [
        "(file): is not YAML: line 4: aliases (`*name`) can't be used: write the value out",
    ],
    "bad_durations.yaml": [
        "steps[0].timeout: '5 minutes' is no duration: write seconds as a number, or a text as 30s, 5m, 1h30m or",
        "steps[1].timeout: is 0, and must be more than 0 and at most 31622400 seconds (366 days)",
        "steps[2].timeout: '1:30' is no duration: write seconds as a number, or a text as 30s, 5m, 1h30m or 2d",
        "steps[3].timeout: must be written out: no variables can be used here",
        "steps[4].retry.max_attempts: is 0, and must be 1 to 100",
        "steps[4].retry.backoff: is -1, and must be more than 0 and at most 31622400 seconds (366 days)",
        "steps[4].retry.backoff_max: is 2000d, and must be more than 0 and at most 31622400 seconds (366 days)",
        "steps[5].wait.seconds: must be one {{…}} and nothing else, where it has a variable",
        "steps[6].wait.seconds: 'soon' is no duration: write seconds as a number, or a text as 30s, 5m, 1h30m or",
        "steps[7].wait.until: '2026-12-24' is no time with a zone: write it as 2026-12-24T18:00:00+01:00",
        "steps[8].wait: has seconds and until: it can have one of them",
    ],
    "bad_expressions.yaml": [
        "steps[0].when: column 3: '=' is not expected here (write '==')",
        "steps[1].when: column 8: '&&' is not expected here (write 'and')",
        "steps[2].when: column 1: within an expression, variables stand without braces",
        "steps[3].when: column 11: __import__ can't be called: there are no functions",
        "steps[4].when: must not be empty",
        "steps[5].ask.question: column 5: there is no arithmetic",
        "steps[5].ask.question: column 14: }} is missing",
        "steps[6].loop.until: column 8: a value is missing",
        "steps[7].branch.cases[0].when: column 6: the text that begins here has no closing '",
        "steps[8].when: must be a text, not true",
        "output: column 5: '|' can't be used here",
    ],
    "bad_names.yaml": [
        "name: is 'two words', and must be a name of 1 to 64 characters of A-Z a-z 0-9 . _ -",
        "inputs.my-path: its name must be letters, digits and underscores, must not begin with a digit, and has",
        "inputs.item: 'item' means something else: choose another name",
        "steps[0].id: is 'find-bugs', and must be a name of letters, digits and underscores that does not begin",
        "steps[1].id: is '2nd', and must be a name of letters, digits and underscores that does not begin with a",
        "steps[2].id: 'last' means something else: choose another name",
        "steps[3].id: is '', and must be a name of letters, digits and underscores that does not begin with a",
        "steps[4].agent.name: is '{{who}}', and must be a name of 1 to 64 characters of A-Z a-z 0-9 . _ -",
        "steps[5].tool.name: is 'my tool', and must be a name without spaces and braces, at most 256 characters",
        "steps[6].foreach.as: 'index' means something else: choose another name",
        "steps[7].wait.event: the name of an event 'no spaces please' must be 1 to 128 characters",
    ],
    "bad_schemas.yaml": [
        "inputs.a: is no JSON Schema that can be used: $.type: 'strng' is not valid under any of the given schemas",
        "inputs.b: has a default that does not fit: 'many' is not of type 'integer'",
        "inputs.c: must be an object, not the text 'string'",
        "inputs.d: is no JSON Schema that can be used: #: $ref 'https://example.org/schema' leads to nothing in",
        "steps[0].output_schema: is no JSON Schema that can be used: $.type: ['object', 'nothing'] is not valid",
        "steps[1].output_schema: is no JSON Schema that can be used: $.properties.x: 3 is not of type 'object',",
        "steps[2].output_schema: is no JSON Schema that can be used: #: $ref '#/$defs/gone' leads to nothing in",
        "steps[3].output_schema: is no JSON Schema that can be used: #: the pattern '(' is no regular expression",
        "steps[4].output_schema: must be an object, not the text 'string'",
        "steps[5].output_schema: is no JSON Schema that can be used: what must fit one value is too much, or",
        "steps[6].output_schema: is for agent, tool, model only, and not for ask",
    ],
    "cut_off.json": [
        "(file): is not JSON: Expecting value: line 2 column 1 (char 27)",
    ],
    "cycles.yaml": [
        "steps[0].model.prompt: column 3: 'c' is not defined here: steps[2] is done later, and needs this one: a",
        "steps[3].model.prompt: column 3: 'd' is not defined here: it is the result of the step that this is in",
        "steps[3].when: column 1: 'd' is not defined here: it is the result of the step that this is in",
    ],
    "doubled_ids.yaml": [
        "steps[1].id: 'a' is the id of steps[0], too",
        "steps[2].id: 'path' is the name of an input: a step needs another one",
        "steps[3].foreach.do.id: 'a' is the id of steps[0], too",
        "steps[4].fallback.id: 'a' is the id of steps[0], too",
    ],
    "doubled_keys.yaml": [
        "name: is there twice in one object",
        "steps[0].id: is there twice in one object",
        "steps[1].tool.arguments.x: is there twice in one object",
        "steps[1].when: column 5: a value is missing",
    ],
    "empty.yaml": [
        "steps: must not be empty",
    ],
    "empty_parts.yaml": [
        "steps[0].sequence: must not be empty",
        "steps[1].parallel: must not be empty",
        "steps[2].branch.cases: must not be empty",
        "steps[3].agent.task: must not be empty",
        "steps[4].ask.question: must not be empty",
    ],
    "limits.yaml": [
        "steps[0].max_concurrency: is 0, and must be 1 to 1000",
        "steps[1].max_concurrency: is 5000, and must be 1 to 1000",
        "steps[2].retry.max_attempts: is 1000, and must be 1 to 100",
        "steps[3].on_error: must be 'continue' or 'fail', not 'stop'",
        "format: is 2, and must be 1",
    ],
    "missing_fields.yaml": [
        "name: is missing: what it is called: a label of metrics and spans",
        "steps[0].agent.name: is missing: the agent's name, one of those that the workflow has",
        "steps[0].agent.task: is missing: what the agent has to do: a text with templates",
        "steps[1].foreach.items: is missing: a list, in which texts may have templates, or a template that is a",
        "steps[1].foreach.do.tool.name: is missing: the tool's name, one of those that the workflow has",
        "steps[2].branch.cases: is missing: the cases, in the order in which they are tried",
        "steps[3].branch.cases[0].do: is missing: the step that is done if the condition holds, and none of the",
        "steps[3].branch.cases[1].when: is missing: the condition of the case",
        "steps[3].branch.cases[1].do.ask.question: is missing: what is asked: a text with templates",
        "steps[4].loop.do: is missing: the step that is done in each round",
        "steps[5].wait: must have one of seconds, until, event",
        "steps[6]: must have one of agent, tool, model, sequence, parallel, foreach, branch, loop, wait, ask",
        "steps[7].retry.max_attempts: is missing: tries altogether, the first one among them",
    ],
    "nan.json": [
        "(file): is not JSON: JSON has no number NaN",
    ],
    "no_lists.yaml": [
        "steps[0].foreach.items: {{path}} is a text, and must be a list",
        "steps[1].foreach.items: {{report}} is an object, and must be a list",
        "steps[2].foreach.items: {{report.title}} is a text, and must be a list",
        "steps[3].foreach.do.ask.question: column 3: item has no 'nmae' (did you mean 'name'?); there are: name",
        "steps[4].foreach.items: is a text, and must be a list, or one {{…}} that is a list",
        "steps[5].foreach.items: {{path == 'x'}} is true or false, and must be a list",
        "steps[7].foreach.items: {{answer}} is a text, and must be a list",
        "steps[8].foreach.items: column 3: report has no 'flies' (did you mean 'files'?); there are: files, title",
        "steps[9].foreach.do.foreach.items: {{item}} is a text, and must be a list",
    ],
    "not_a_number.yaml": [
        "(file): is not YAML: line 3: JSON has no number .nan",
    ],
    "not_an_object.yaml": [
        "(whole): must be an object with name, steps, not a list",
    ],
    "null_fields.yaml": [
        "steps[0].timeout: must be a number or a text, not null (leave out what is not needed)",
        "steps[0].when: must be a text, not null (leave out what is not needed)",
        "steps[0].on_error: must be 'continue' or 'fail' or an object with one of agent, tool, model, sequence,",
        "inputs: must be an object, not null (leave out what is not needed)",
    ],
    "numbers_as_names.yaml": [
        "steps[0].tool.arguments: has the name 1, which is no text: put it in quotes",
        "steps[1].tool.arguments.big: is a number beyond 64 bits",
        "steps[2]: has the name 1, which is no text: put it in quotes",
        "steps[2]: must have one of agent, tool, model, sequence, parallel, foreach, branch, loop, wait, ask",
    ],
    "objects.yaml": [
        "(file): is not YAML: line 3: could not determine a constructor for the tag",
    ],
    "out_of_sight.yaml": [
        "steps[0].foreach.do.ask.question: column 3: 'each' is not defined here: it is the result of the step",
        "steps[1].model.prompt: column 3: 'inner' is not defined here: it is the result of steps[0].foreach.do,",
        "steps[1].model.prompt: column 13: 'item' is not defined here",
        "steps[2].parallel[0].ask.question: column 3: 'right' is not defined here: steps[2].parallel[1] is done",
        "steps[2].parallel[1].ask.question: column 3: 'left' is not defined here: steps[2].parallel[0] is done at",
        "steps[3].branch.cases[1].when: column 1: 'one' is not defined here: steps[3].branch.cases[0].do is in",
        "steps[3].branch.cases[1].do.ask.question: column 3: 'one' is not defined here:",
        "steps[3].branch.else.ask.question: column 3: 'two' is not defined here: steps[3].branch.cases[1].do is",
        "steps[4].ask.question: column 3: 'one' is not defined here: it is the result of",
        "steps[4].ask.question: column 11: 'later' is not defined here: steps[5] is done later",
    ],
    "several_kinds.yaml": [
        "steps[0]: has agent and tool: it can have one of them",
        "steps[0].agent.task: column 3: 'x' is not defined here",
        "steps[1]: must have one of agent, tool, model, sequence, parallel, foreach, branch, loop, wait, ask",
        "steps[2].wait: has seconds and event: it can have one of them",
        "steps[3].max_concurrency: is for parallel, foreach only, and not for ask",
        "steps[4].output_schema: is for agent, tool, model only, and not for parallel",
        "steps[5].max_concurrency: is for parallel, foreach only, and not for tool",
        "steps[6].timeout: is not for a wait for a time: this one ends by itself",
    ],
    "several_mistakes.json": [
        "steps[0].id: is there twice in one object",
        "inputs.a: is there twice in one object",
        "steps[0].agent.task: column 3: 'b' is not defined here",
        "steps[1].foreach.do.wait.seconds: 'soon' is no duration: write seconds as a number, or a text as 30s,",
        "steps[2].lop: there is no such field (did you mean 'loop'?)",
    ],
    "two_documents.yaml": [
        "(file): is not YAML: line 2: a second document begins here, and there can be only one",
    ],
    "unbounded_loops.yaml": [
        "steps[0].loop.max: is missing: rounds after which the loop ends in any case",
        "steps[1].loop.max: is 0, and must be 1 to 10000",
        "steps[2].loop.max: is 1000000, and must be 1 to 10000",
        "steps[3].loop.max: must be a whole number, not the number 2.5",
        "steps[4].loop.do.loop.max: is missing: rounds after which the loop ends in any case",
    ],
    "undo.yaml": [
        "steps[0].undo.tool.arguments.number: column 3: 'bookd' is not defined here (did you mean 'booked'?)",
        "steps[0].undo.undo: is within an undo: what is done to undo something is not undone",
        "steps[1].undo: must be an object with one of agent, tool, model, sequence, parallel, foreach, branch,",
        "steps[2].foreach.do.undo.tool.name: no tool is named 'nothing'; there are: discard, note, now,",
        "steps[2].undo.tool.arguments.item: column 3: 'item' is not defined here",
        "steps[2].undo.tool.arguments.item: column 12: 'inner' is not defined here: it is the result of",
    ],
    "undefined_variables.yaml": [
        "steps[0].tool.arguments.path: column 3: 'pat' is not defined here (did you mean 'path'?)",
        "steps[0].tool.arguments.deep[0].more: column 3: 'nobody' is not defined here",
        "steps[0].tool.arguments.deep[0].more: column 18: 'no_one' is not defined here",
        "steps[0].when: column 1: 'prats' is not defined here (did you mean 'parts'?)",
        "steps[1].model.prompt: column 3: 'item' is not defined here",
        "steps[1].model.prompt: column 12: 'index' is not defined here",
        "steps[1].model.prompt: column 22: 'last' is not defined here",
        "steps[1].model.prompt: column 31: 'error' is not defined here",
        "steps[2].wait.seconds: column 3: 'delay' is not defined here",
        "steps[3].fallback.ask.question: column 3: error has no 'cod' (did you mean 'code'?); there are: code,",
        "output.all: column 3: 'party' is not defined here (did you mean 'parts'?)",
    ],
    "unknown_fields.yaml": [
        "descripton: there is no such field (did you mean 'description'?)",
        "steps[0].tool.argumets: there is no such field (did you mean 'arguments'?)",
        "steps[0].max_conurrency: there is no such field (did you mean 'max_concurrency'?)",
        "steps[1].foreach.items: is missing: a list, in which texts may have templates, or a template that is a",
        "steps[1].foreach.item: there is no such field (did you mean 'items'?)",
        "steps[1].foreach.do.agnet: there is no such field (did you mean 'agent'?)",
        "steps[2].agent.timeout: there is no such field here: it belongs into the step",
        "steps[2].prompt: there is no such field",
        "steps[3].name: there is no such field here: it belongs into agent",
        "steps[3].agent.name: is missing: the agent's name, one of those that the workflow has",
    ],
    "unknown_names.yaml": [
        "steps[0].agent.name: no agent is named 'reviwer' (did you mean 'reviewer'?); there are: a, judge,",
        "steps[1].tool.name: no tool is named 'splitt' (did you mean 'split'?); there are: discard, note, now,",
        "steps[2].foreach.do.agent.name: no agent is named 'nobody'; there are: a, judge, reviewer",
        "steps[3].fallback.tool.name: no tool is named 'rm'; there are: discard, note, now, split, t",
    ],
    "wrong_paths.yaml": [
        "steps[1].model.prompt: column 3: found is a list: an index or * must follow, as in found.0.title",
        "steps[2].model.prompt: column 3: found.0 has no 'titel' (did you mean 'title'?); there are: title",
        "steps[3].when: column 1: found.0.title is a text, and has no part 'first'",
        "steps[3].when: column 31: found.* has no 'name'; there are: title",
        "steps[4].foreach.do.agent.task: column 3: item has no 'titles' (did you mean 'title'?); there are: title",
        "steps[5].model.prompt: column 3: each is a list: an index or * must follow, as in each.0.first",
    ],
    "wrong_types.yaml": [
        "name: must be a text, not the number 7",
        "steps[0].agent: must be an object with name, task, not the text 'reviewer'",
        "steps[1].tool.arguments: must be an object, not a list",
        "steps[2].sequence: must be a list, not an object",
        "steps[3].foreach.items: must be a list or a text, not the number 3",
        "steps[4].loop.max: must be a whole number, not the text '3'",
        "steps[5].wait.seconds: must be a number or a text, not true",
        "steps[6].timeout: must be a number or a text, not a list",
        "steps[6].on_error: must be 'continue' or 'fail' or an object with one of agent, tool, model, sequence,",
        "steps[6].retry: must be an object with max_attempts, not the number 3",
        "steps[7]: must be an object with one of agent, tool, model, sequence, parallel, foreach, branch, loop,",
        "steps[8]: must be an object with one of agent, tool, model, sequence, parallel, foreach, branch, loop,",
    ],
}
"""The files, and how each of their problems begins."""

ASK = {"ask": {"question": "q"}}


def problems_of(path: Path) -> list[str]:
    """Every problem of a file."""
    try:
        text = read_text(path.read_text(encoding="utf-8"), FORMS[path.suffix])
    except NoDefinition as error:
        return [f"(file): {error}"]
    return [f"{item['field']}: {item['problem']}" for item in text.problems(agents=AGENTS, tools=TOOLS)]


def problems(*steps: Any, **fields: Any) -> dict[str, str]:
    """The problems of a definition with these steps, by their places."""
    data = {"name": "n", "steps": [*steps], **fields}
    return {item["field"]: item["problem"] for item in definition_problems(data)}


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_every_mistake_of_a_file_is_named_with_its_place(name: str) -> None:
    """Given a file with mistakes, then each of them is reported at once, in the order of the file, and nothing else."""
    found = problems_of(FILES / "malformed" / name)
    assert [one[: len(wanted)] for one, wanted in zip(found, MALFORMED[name], strict=False)] == MALFORMED[name]
    assert len(found) == len(MALFORMED[name])


def test_all_files_are_looked_at() -> None:
    """Given the folder of malformed files, then each is in the table, and there are more than twenty."""
    assert {path.name for path in (FILES / "malformed").iterdir()} == {*MALFORMED}
    assert len(MALFORMED) > 20


@pytest.mark.parametrize("path", sorted((FILES / "good").iterdir()), ids=lambda path: path.name)
def test_what_is_right(path: Path) -> None:
    """Given a file without mistakes, then none is reported, and it is the same when it is written and read again."""
    assert problems_of(path) == []
    definition = read_definition(read_text(path.read_text(encoding="utf-8"), FORMS[path.suffix]).data)
    for form in ("JSON", "YAML"):
        assert read_definition(read_text(written(definition, form), form).data) == definition


def test_the_documentation_is_right() -> None:
    """Given the examples of the page, then they have no problems, and its output is what the command prints."""
    page = (FILES.parents[1] / "docs" / "workflow-files.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n(.*?)```", page, re.S)
    assert read_text(example, "YAML").problems(agents=AGENTS, tools=TOOLS) == []
    wrong = example.replace("arguments", "argumets").replace("{{parts}}", "{{prats}}").replace("reviewer", "reviwer")
    found = [f"  {item['field']}: {item['problem']}" for item in read_text(wrong, "YAML").problems(agents=["reviewer"])]
    [printed, _] = re.findall(r"```console\n(.*?)```", page, re.S)
    assert printed.splitlines()[2:] == found
    [built, _] = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(built, names)
    assert definition_problems(to_data(names["review"])) == []


def test_the_documented_file_is_run_as_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given the page's file, then its program runs it; its agent answers with what fits, and nothing is severe."""
    page = (FILES.parents[1] / "docs" / "workflow-files.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n(.*?)```", page, re.S)
    [_, program] = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "review.yaml").write_text(example, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def answers(body: dict[str, Any]) -> Reply:
        said = content_text(body["messages"][-1])
        return Reply(text=json.dumps({"title": said, "severe": False}) if said.startswith("Review") else said)

    monkeypatch.setattr(testing, "LocalCluster", partial(testing.LocalCluster, policy=answers))
    exec(program, {"__name__": "__main__"})
    found = [{"title": f"Review src/{part}", "severe": False} for part in ("one", "two")]
    output = ast.literal_eval(capsys.readouterr().out)
    assert output["answer"] is None
    assert output["summary"].removeprefix("Sum up: ") == json.dumps(found, separators=(",", ":"))


def test_problems_have_their_lines() -> None:
    """Given YAML, then each problem has its line; what is missing has that of what it is missing from."""
    text = "name: n\nsteps:\n  - agent:\n      name: a\n  - ask: {question: q}\n    timeout: soon\n"
    found = {item["field"]: item["problem"].rpartition(" (")[2] for item in read_text(text, "YAML").problems()}
    assert found == {"steps[0].agent.task": "line 3)", "steps[1].timeout": "line 6)"}


def test_names_are_looked_at_where_they_are_known() -> None:
    """Given no names of agents and tools, then any may be used; given none at all, then that is said."""
    data = {"name": "n", "steps": [{"agent": {"name": "who", "task": "t"}}, {"tool": {"name": "what:ever"}}]}
    assert definition_problems(data) == []
    found = definition_problems(data, agents=(), tools=("what:ever",))
    assert found == [{"field": "steps[0].agent.name", "problem": "no agent is named 'who'; there is none"}]


def test_an_error_has_all_problems() -> None:
    """Given a definition with mistakes, then the error that refuses it has all of them, as data and as text."""
    with pytest.raises(
        InvalidSpec, match=r"the workflow has 2 problems: name: .*; steps\[0\]\.ask\.question: .*"
    ) as raised:
        read_definition({"name": "", "steps": [{"ask": {}}]})
    assert [item["field"] for item in raised.value.details["problems"]] == ["name", "steps[0].ask.question"]


def test_a_cycle_is_reported_as_a_whole() -> None:
    """Given steps that need each other's results, then the problem names all of them, each before what it needs."""
    found = problems_of(FILES / "malformed" / "cycles.yaml")
    assert "steps[2] is done later, and needs this one: a cycle, a → c → b → a" in found[0]


def test_results_of_steps_are_seen_where_they_are_known() -> None:
    """Given results within sequences and parallel steps, then what follows sees them; a step that may be left out has
    a result as well; a foreach hides what is in it, and its own index hides an outer one."""
    inner = {
        "foreach": {"items": "{{item}}", "do": {"tool": {"name": "t", "arguments": {"x": ["{{item}} {{index}}"]}}}}
    }
    assert (
        problems(
            {"sequence": [{**ASK, "id": "a", "when": "false"}, {"parallel": [{**ASK, "id": "b"}, {**ASK, "id": "c"}]}]},
            {"foreach": {"items": ["{{a}}", "{{b}}"], "do": inner}, "id": "all"},
            {"loop": {"do": {**ASK, "id": "d"}, "max": 3, "until": "d == last and a == b"}},
            output={"{{not looked at}}": "{{all.0.0}} {{c}}"},
        )
        == {}
    )


def test_what_is_known_of_results() -> None:
    """Given results without a schema, then a model's and a person's are texts; nothing is known of an agent's, which
    may have an output type, of a tool's, of a branch's, or of one with a fallback."""
    ways = {
        "model": {"model": {"prompt": "p"}}, "ask": ASK, "agent": {"agent": {"name": "a", "task": "t"}},
        "tool": {"tool": {"name": "t"}}, "fallback": {**ASK, "fallback": ASK},
        "branch": {"branch": {"cases": [{"when": "true", "do": ASK}]}}, "loop": {"loop": {"do": ASK, "max": 2}},
        "foreach": {"foreach": {"items": [1], "do": ASK}}, "sequence": {"sequence": [ASK]},
        "parallel": {"parallel": [ASK]}, "wait": {"wait": {"seconds": 1}}, "event": {"wait": {"event": "e"}},
    }  # fmt: skip
    wrong = {}
    for name, step in ways.items():
        found = problems({**step, "id": "x"}, {"foreach": {"items": "{{x}}", "do": ASK}}).values()
        wrong[name] = next((problem.removeprefix("{{x}} is ").partition(",")[0] for problem in found), "")
    texts = dict.fromkeys(["model", "ask", "loop", "sequence"], "a text")
    assert {name: problem for name, problem in wrong.items() if problem} == {**texts, "wait": "null"}


def test_what_is_too_large() -> None:
    """Given too many steps, steps or data too deep, or too many values, then that is said at once, and quickly."""
    began = time.process_time()
    assert problems(*[ASK] * MOST_STEPS) == {}
    assert "there are 5001 steps" in problems(*[ASK] * (MOST_STEPS + 1))["steps"]
    many = [{**ASK, "id": "s0"}]
    for number in range(1, MOST_STEPS):
        many.append({"ask": {"question": f"{{{{s{number - 1}}}}}"}, "id": f"s{number}"})
    assert problems(*many) == {}
    assert len(problems(*reversed(many))) > MOST_PROBLEMS / 2
    step: Any = ASK
    for _ in range(DEEPEST_STEP - 1):
        step = {"foreach": {"items": [1], "do": step}}
    assert problems(step) == {}
    assert list(problems({"sequence": [step]}).values()) == ["steps are nested more than 50 deep"]
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert "is nested more than 200 levels deep" in str(problems({"tool": {"name": "t", "arguments": {"x": deep}}}))
    assert "more than 200,000 values" in str(problems({"tool": {"name": "t", "arguments": {"x": [0] * 200_000}}}))
    assert "longer than 200,000" in str(problems({"ask": {"question": "q" * 200_001}}))
    assert time.process_time() - began < 30
    with pytest.raises(NoDefinition, match="more than 1,000,000 characters"):
        read_text(" " * (LONGEST_TEXT + 1), "JSON")
    with pytest.raises(NoDefinition, match="nested too deeply"):
        read_text("[" * 100_000, "JSON")


def check(*arguments: object) -> tuple[int, Any]:
    """`understudy workflow check --json`: its exit code, and what it says."""
    done = CliRunner().invoke(app, ["workflow", "check", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_checking_files_from_the_command_line(tmp_path: Path) -> None:
    """Given files of which some can't be used, then all problems of all are reported, and the exit code is 1; 2 is
    wrong usage."""
    good, malformed = FILES / "good" / "review.yaml", FILES / "malformed"
    assert check(good) == (
        0,
        {"ok": True, "files": [{"file": str(good), "name": "review", "summary": "review, 8 steps", "problems": []}]},
    )
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    (tmp_path / "long.json").write_text(" " * (LONGEST_TEXT + 1))
    files = [malformed / "nan.json", tmp_path / "none.yaml", tmp_path / "x.toml", tmp_path / "latin.yaml"]
    code, found = check(good, malformed / "empty.yaml", *files, tmp_path / "long.json")
    assert (code, found["ok"], [item["summary"] for item in found["files"]]) == (
        1,
        False,
        ["review, 8 steps", *[""] * 6],
    )
    problems = [item["problems"][0] for item in found["files"][1:]]
    assert problems[0] == {"field": "steps", "problem": "must not be empty (line 2)"}
    assert [item["field"] for item in problems[1:]] == ["(file)"] * 5
    said = [
        "is not JSON: JSON has no number NaN", "can't be read: No such file", "must be named as what it is",
        "is not UTF-8", "has more than 1,000,000 characters",
    ]  # fmt: skip
    assert [text in item["problem"] for text, item in zip(said, problems[1:], strict=True)] == [True] * 5
    shown = CliRunner().invoke(app, ["workflow", "check", str(good), str(malformed / "limits.yaml")])
    assert (shown.exit_code, f"{good}: ok review, 8 steps" in shown.stdout) == (1, True)
    assert "limits.yaml: 5 problems" in shown.stdout
    assert "  steps[0].max_concurrency: is 0, and must be 1 to 1000 (line 4)" in shown.stdout
    assert CliRunner().invoke(app, ["workflow", "check"]).exit_code == 2


def test_names_that_the_command_line_knows(tmp_path: Path) -> None:
    """Given agents by their files, and tools by their names, then a step can name no others."""
    (tmp_path / "reviewer.md").write_text("---\nname: reviewer\ntools: ['no_module:x']\n---\nReview.")
    review = FILES / "good" / "review.yaml"
    assert check(review, "--agents", tmp_path, "--tool", "split", "--tool", "discard")[0] == 0
    (tmp_path / "judge.toml").write_text('name = "judge"')
    code, found = check(review, "--agents", tmp_path / "judge.toml", "--tool", "split")
    assert (code, [item["field"] for item in found["files"][0]["problems"]]) == (
        1,
        [
            "steps[1].foreach.do.agent.name",
            "steps[3].branch.cases[0].do.fallback.agent.name",
            "steps[3].branch.else.tool.name",
        ],
    )
    (tmp_path / "none").mkdir()
    code, found = check(review, "--agents", tmp_path / "none")
    assert (code, "there are no agents in" in found["error"]["message"]) == (2, True)


def test_the_schema_from_the_command_line() -> None:
    """Given no arguments, then the JSON Schema is printed."""
    done = CliRunner().invoke(app, ["workflow", "schema"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, json_schema())


def test_a_schema_that_is_too_much() -> None:
    """Given a schema that is too deep or too long to be looked at, then that is said of it."""
    deep: Any = {"type": "string"}
    for _ in range(190):
        deep = {"items": deep}
    assert problems(ASK, inputs={"x": deep}) == {
        "inputs.x": "is no JSON Schema that can be used: it is nested too deeply"
    }
    found = problems(ASK, inputs={"x": {"enum": ["x" * 20_000]}, "y": {"default": "x", "pattern": "(x+x+)+y"}})
    assert found == {"inputs.x": "has more than 20000 characters, as JSON"}


def test_only_the_first_problems_are_reported() -> None:
    """Given more mistakes than anybody reads, then the first ones are reported, and how many more there are."""
    found = definition_problems({"name": "n", "steps": [{"lop": {}}] * 1000})
    assert len(found) == MOST_PROBLEMS + 1
    assert found[-1] == {"field": "(whole)", "problem": "there are 800 more problems"}


def test_objects_of_python_are_no_data() -> None:
    """Given what JSON does not have, then it is said where; what is within itself has no end, and is refused."""
    itself: dict[str, Any] = {"name": "t", "arguments": {}}
    itself["arguments"]["x"] = [itself]
    arguments = {"a": date(2026, 12, 24), "b": {1, 2}, "c": math.nan, "d": b"x", "e": 2**63, "f": "\x00", "g": "\ud800"}
    found = problems({"tool": {"name": "t", "arguments": {**arguments, 5: "x", (1,): 2}}})
    assert {place.rpartition(".")[2] for place in found} == {*arguments, "arguments"}
    assert "is within itself" in str(problems({"tool": itself}))
    assert problems({"tool": {"name": "t", "arguments": {"x": object()}}}) == {
        "steps[0].tool.arguments.x": "is nothing that JSON has: object"
    }


def test_definitions_leave_out_what_is_as_by_default() -> None:
    """Given a definition, then its data is as short as it was written; numbers of seconds are numbers."""
    data = {"name": "n", "steps": [{"ask": {"question": "q"}, "timeout": 5, "on_error": "fail"}], "description": ""}
    assert json.dumps(to_data(read_definition(data))) == (
        '{"name": "n", "steps": [{"ask": {"question": "q"}, "timeout": 5.0}]}'
    )
