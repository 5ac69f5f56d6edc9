"""Agents with an output type: how the model is asked, what becomes of its answers, and what deaths leave of that."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from understudy import AgentSpec, HookContext, Replace, hook, tool
from understudy.actors.typed_output import FINAL_ANSWER, MODE_ORIGIN, ORIGIN
from understudy.cluster.client.agent_file import read_agent
from understudy.cluster.client.compiling import compile_spec
from understudy.errors import InvalidSpec
from understudy.testing import LocalCluster
from understudy.testing.offline import Policy, Refusal, Reply, default_policy
from understudy.testing.policies import content_text

from .. import tiers
from ..malformed import Case, cases
from . import kernel as k
from .deaths import Deaths
from .test_context import Stepping, step

SECONDS = 20


class Verdict(BaseModel):
    guilty: bool
    years: int


GOOD = '{"guilty": true, "years": 7}'
REJECTED = "This is not accepted"


def asked(cluster: LocalCluster) -> list[dict[str, Any]]:
    """The bodies of all requests."""
    return [request.body for request in cluster.model_server.requests]


def replies(*given: Reply | str) -> Policy:
    """One answer after the other, whatever is asked; the last one again and again."""

    def policy(body: dict[str, Any]) -> Reply:
        said = sum(message["role"] == "assistant" for message in body["messages"])
        reply = given[min(said, len(given) - 1)]
        return Reply(text=reply) if isinstance(reply, str) else reply

    return policy


def call(arguments: str, *others: tuple[str, str]) -> Reply:
    """A round in which the final answer is given, behind other calls."""
    return Reply(tool_calls=(*others, (FINAL_ANSWER, arguments)))


def no_formats(policy: Policy) -> Policy:
    """An endpoint that takes no response format."""

    def refusing(body: dict[str, Any]) -> Reply:
        if "response_format" in body:
            raise Refusal(400, "'response_format' of type 'json_schema' is not supported with this model.")
        return policy(body)

    return refusing


EXECUTED: list[str] = []


@tool(on_crash="rerun")
def touch(name: str) -> str:
    """Leave a name."""
    EXECUTED.append(name)
    return f"touched {name}"


def agent(**fields: Any) -> AgentSpec:
    return AgentSpec(**{"name": "judge", "instructions": "Judge.", "output_type": Verdict, **fields})


def test_an_answer_is_an_instance_here_and_data_elsewhere() -> None:
    """Given a run that answers with JSON, then its output is an instance for whoever spawned the session, plain data
    for others; its text is the JSON text."""
    with LocalCluster(policy=replies(GOOD)) as cluster:
        session = cluster.spawn(agent())
        result = session.send("go").result(SECONDS, check=True)
        assert (result.output, result.text, result.rounds) == (Verdict(guilty=True, years=7), GOOD, 1)
        assert session.run(result.run_id).result(SECONDS).output == result.output
        elsewhere = cluster.session(session.id).run(result.run_id).result(SECONDS)
        assert elsewhere.output == {"guilty": True, "years": 7}


@pytest.mark.parametrize("mode", ["auto", "native", "tool"])
def test_the_offline_model_answers_a_typed_agent(mode: Any) -> None:
    """Given nothing but an output type, then the offline model gives its smallest instance, in each mode that says in
    the request what it wants."""
    with LocalCluster() as cluster:
        result = cluster.spawn(agent(output_mode=mode)).send("go").result(SECONDS, check=True)
        assert result.output == Verdict(guilty=False, years=0)


@pytest.mark.parametrize("mode", ["native", "tool", "prompt"])
def test_each_mode_says_the_schema_once(mode: Any) -> None:
    """Given a mode, then the schema is the response format, a tool's parameters, or the end of the instructions, and
    nowhere else."""
    answer: Any = call(GOOD) if mode == "tool" else GOOD
    with LocalCluster(policy=replies(answer)) as cluster:
        result = cluster.spawn(agent(output_mode=mode, tools=[touch])).send("go").result(SECONDS, check=True)
        assert result.output == Verdict(guilty=True, years=7)
        assert json.loads(result.text) == {"guilty": True, "years": 7}
        (body,) = asked(cluster)
    names = [one["function"]["name"] for one in body["tools"]]
    assert names == (["touch", FINAL_ANSWER] if mode == "tool" else ["touch"])
    system = body["messages"][0]["content"]
    assert system.startswith("Judge.")
    assert ("guilty" in system) is (mode == "prompt")
    if mode == "native":
        described = body["response_format"]["json_schema"]
        assert (described["name"], described["strict"]) == ("Verdict", True)
        assert described["schema"]["additionalProperties"] is False
    assert ("response_format" in body) is (mode == "native")


def test_the_model_is_asked_again_with_what_is_wrong() -> None:
    """Given answers that don't fit, then the model gets the reason and the schema, as often as the agent says; its last
    answer is the run's."""
    with LocalCluster(policy=replies("I think so.", '{"guilty": "yes", "years": 7}', GOOD)) as cluster:
        session = cluster.spawn(agent())
        result = session.send("go").result(SECONDS, check=True)
        assert (result.output, result.rounds) == (Verdict(guilty=True, years=7), 3)
        corrections = [message for message in session.messages() if message.origin == ORIGIN]
        assert [message.role for message in corrections] == ["user", "user"]
        assert "(not_json)" in corrections[0].text
        assert "(schema):\n- $.guilty: 'yes' is not of type 'boolean'" in corrections[1].text
        assert '"additionalProperties":false' in corrections[1].text


@pytest.mark.parametrize(
    ("answer", "reason", "rounds"),
    [
        ("no JSON", "not_json", 3),
        ('{"guilty": true, "years": "7"}', "schema", 3),
        ("{} {}", "ambiguous", 3),
        ('{"guilty": true, "years": NaN}', "inexact", 3),
        (Reply(refusal="No."), "refused", 1),
        (Reply(text=GOOD, finish_reason="content_filter"), "refused", 1),
    ],
)
def test_a_run_without_an_acceptable_answer_fails(answer: Any, reason: str, rounds: int) -> None:
    """Given a model that never gives one, or refuses, then the run fails with a reason, and has no output."""
    with LocalCluster(policy=replies(answer)) as cluster:
        result = cluster.spawn(agent()).send("go").result(SECONDS)
        assert (result.status, result.output, result.rounds) == ("failed", None, rounds)
        assert result.error is not None
        assert result.error["code"] == "output_invalid"
        assert result.error["details"]["reason"] == reason
        assert result.error["details"]["problems"]


def test_a_reply_that_was_cut_off_is_continued_without_a_response_format() -> None:
    """Given an answer in pieces, then the rest is asked for as plain text, and the whole is the answer; if no piece is
    left to ask for, it is refused as cut off."""
    pieces = (Reply(text=GOOD[:9], finish_reason="length"), Reply(text=GOOD[9:16], finish_reason="length"), GOOD[16:])
    with LocalCluster(policy=replies(*pieces)) as cluster:
        result = cluster.spawn(agent()).send("go").result(SECONDS, check=True)
        assert result.output == Verdict(guilty=True, years=7)
        assert ["response_format" in body for body in asked(cluster)] == [True, False, False]
    with LocalCluster(policy=replies(Reply(text=GOOD[:-3], finish_reason="length"))) as cluster:
        result = cluster.spawn(agent(max_continuations=0, output_retries=0)).send("go").result(SECONDS)
        assert result.error is not None
        assert result.error["details"]["reason"] == "cut_off"


def test_a_rejected_piece_is_no_part_of_the_next_answer() -> None:
    """Given a reply that was cut off and is not continued, then the next answer is read by itself, and is the text."""
    with LocalCluster(policy=replies(Reply(text=GOOD[:9], finish_reason="length"), GOOD)) as cluster:
        result = cluster.spawn(agent(max_continuations=0)).send("go").result(SECONDS, check=True)
        assert (result.output, result.text) == (Verdict(guilty=True, years=7), GOOD)


def test_an_endpoint_without_response_formats_is_asked_by_a_tool() -> None:
    """Given an endpoint that refuses the format, then the session goes on with the tool, in later runs as well: a
    record in the log says so, which no model sees."""
    with LocalCluster(policy=no_formats(default_policy)) as cluster:
        session = cluster.spawn(agent())
        results = [session.send("go").result(SECONDS, check=True) for _ in range(2)]
        assert [(result.output, result.rounds) for result in results] == [
            (Verdict(guilty=False, years=0), 2),
            (Verdict(guilty=False, years=0), 1),
        ]
        assert [message.visibility for message in session.messages() if message.origin == MODE_ORIGIN] == ["never"]
        assert ["response_format" in body for body in asked(cluster)] == [True, False, False]
        assert "output_mode" not in json.dumps(asked(cluster))


@hook("before_model")
def plainly(context: HookContext) -> Replace | None:
    """Have another model asked for some inputs."""
    said = [message["content"] for message in context.messages or () if message["role"] == "user"]
    return Replace(model="plain") if said[-1].startswith("plainly") else None


def test_a_refused_format_is_the_models_that_was_asked() -> None:
    """Given a hook that has another model asked, whose endpoint refuses the format, then the session goes on with the
    tool for that model, in later runs as well, and asks its own one with the format."""

    def policy(body: dict[str, Any]) -> Reply:
        return (no_formats(default_policy) if body["model"] == "plain" else default_policy)(body)

    with LocalCluster(policy=policy) as cluster:
        session = cluster.spawn(agent(hooks=[plainly]))
        for text in ("plainly", "go", "plainly again"):
            assert session.send(text).result(SECONDS, check=True).output == Verdict(guilty=False, years=0)
        found = [(body["model"], "response_format" in body) for body in asked(cluster)]
        assert found == [("plain", True), ("plain", False), ("offline", True), ("plain", False)]


@pytest.mark.parametrize(
    ("mode", "status", "message"),
    [
        ("native", 400, "response_format is not supported"),
        ("auto", 400, "max_tokens is too large"),
        ("auto", 403, "response_format is not for you"),
    ],
)
def test_other_refusals_fail_the_run(mode: Any, status: int, message: str) -> None:
    """Given a refusal that is about something else, or an agent that insists on the format, then the run fails."""

    def policy(_body: dict[str, Any]) -> Reply:
        raise Refusal(status, message)

    with LocalCluster(policy=policy) as cluster:
        result = cluster.spawn(agent(output_mode=mode)).send("go").result(SECONDS)
        assert (result.status, (result.error or {})["code"], result.rounds) == ("failed", "model_refused", 1)


def test_a_final_answer_by_tool_ends_the_run_and_its_round() -> None:
    """Given a round with the answer and another call, then the run ends, and the other call is not executed; after an
    answer that does not fit it is, and the model reads what was wrong."""
    EXECUTED.clear()
    policy = replies(
        call('{"guilty": 1, "years": 7}', ("touch", '{"name": "a"}')), call(GOOD, ("touch", '{"name": "b"}'))
    )
    with LocalCluster(policy=policy) as cluster:
        session = cluster.spawn(agent(output_mode="tool", tools=[touch]))
        result = session.send("go").result(SECONDS, check=True)
        assert (result.output, result.text, EXECUTED) == (Verdict(guilty=True, years=7), GOOD, ["a"])
        results = [message.text for message in session.messages() if message.role == "tool"]
    assert results[0] == "touched a"
    assert results[1].startswith(f"{REJECTED} as your final answer (schema):\n- $.guilty: 1 is not of type 'boolean'")
    assert results[2:] == ["not executed: the final answer was given beside it", "accepted"]


def test_answers_by_tool_have_the_same_limit() -> None:
    """Given a model that gives the answer twice in a round, or as text, again and again, then each round counts once,
    and the run fails with the last reason."""
    twice = Reply(tool_calls=((FINAL_ANSWER, GOOD), (FINAL_ANSWER, GOOD)))
    with LocalCluster(policy=replies(twice, "Guilty!", twice)) as cluster:
        session = cluster.spawn(agent(output_mode="tool"))
        result = session.send("go").result(SECONDS)
        assert (result.status, result.rounds) == ("failed", 3)
        assert (result.error or {})["details"]["reason"] == "ambiguous"
        assert f"calling the tool {FINAL_ANSWER}" in next(
            message.text for message in session.messages() if message.origin == ORIGIN
        )


def test_a_sub_agents_output_reaches_its_parent_as_json() -> None:
    """Given a sub-agent with an output type, then the parent's model reads the JSON of its output and no words around
    it; a wrapped answer is not wrapped any more."""
    said = f"Here you are:\n```json\n{json.dumps({'value': [json.loads(GOOD)]})}\n```"
    child = agent(name="child", output_type=list[Verdict], instructions=k.script(said))
    parent = AgentSpec(name="parent", tools=["spawn_agent"], agents=[child])
    with LocalCluster() as cluster:
        session = cluster.spawn(parent)
        session.send('call spawn_agent {"task": "t"}').result(SECONDS, check=True)
        results = [message.text for message in session.messages() if message.role == "tool"]
        assert results == ['[{"guilty":true,"years":7}]']
        task = cluster.session(session.children()[0].id).run("task").result(SECONDS)
        assert (task.output, task.text) == ([{"guilty": True, "years": 7}], said)


@hook("run_end")
def see_end(context: HookContext) -> None:
    EXECUTED.append(f"{context.outcome}: {context.text}")


@hook("after_model")
def see_answer(context: HookContext) -> None:
    EXECUTED.append(context.text)


def test_hooks_see_texts() -> None:
    """Given hooks at answers and ends, then they see each answer as the model wrote it."""
    EXECUTED.clear()
    with LocalCluster(policy=replies("no", GOOD)) as cluster:
        cluster.spawn(agent(hooks=[see_answer, see_end])).send("go").result(SECONDS, check=True)
    assert ["no", GOOD, f"completed: {GOOD}"] == EXECUTED


@hook("run_end", name="rewriter")
def rewrite(context: HookContext) -> Replace:
    return Replace(text='{"guilty": false, "years": 0}' if "7" in context.text else "nothing of use")


@pytest.mark.parametrize(
    ("years", "status", "output"), [(7, "completed", Verdict(guilty=False, years=0)), (1, "failed", None)]
)
def test_an_answer_that_a_hook_replaces_must_fit_as_well(years: int, status: str, output: Any) -> None:
    """Given a hook that replaces the final text, then the output is what is in that; if nothing is, the run fails."""
    policy = replies(json.dumps({"guilty": True, "years": years}))
    with LocalCluster(policy=policy) as cluster:
        result = cluster.spawn(agent(hooks=[rewrite])).send("go").result(SECONDS)
        assert (result.status, result.output, result.rounds) == (status, output, 1)


def test_agent_files_name_a_type_or_have_a_schema(tmp_path: Path) -> None:
    """Given a file with an import path or a table, then both are compiled; a path that leads nowhere is a problem."""
    path = tmp_path / "agent.toml"
    path.write_text(f'name = "a"\noutput_type = "{__name__}:Verdict"\noutput_mode = "tool"\noutput_retries = 0\n')
    spec = compile_spec(read_agent(path).spec, model="offline", profile=None).spec
    assert (spec["output"]["name"], spec["output"]["mode"], spec["output"]["retries"]) == ("Verdict", "tool", 0)
    path.write_text('name = "a"\n[output_type]\ntype = "object"\n[output_type.properties.a]\ntype = "string"\n')
    spec = compile_spec(read_agent(path).spec, model="offline", profile=None).spec
    assert spec["output"]["schema"] == {"type": "object", "properties": {"a": {"type": "string"}}}
    path.write_text(f'name = "a"\noutput_type = "{__name__}:Nobody"\n')
    with pytest.raises(InvalidSpec, match=r"output_type: .*Nobody"):
        read_agent(path)


@pytest.mark.parametrize("mode", ["native", "tool"])
async def test_a_long_history_is_folded_as_any_text(mode: str, tmp_path: Path) -> None:
    """Given a typed agent whose history outgrows its model's window, then summaries are asked for as any text, and the
    run's answer fits."""
    stepping = Stepping(30)

    def policy(body: dict[str, Any]) -> Reply:
        reply = stepping(body)
        if not (reply.text or "").startswith("did all"):
            return reply
        return call(GOOD) if mode == "tool" else Reply(text=GOOD)

    fields = {"output_mode": mode, "tools": [step], "instructions": "You take steps.", "max_rounds": 1_000}
    spec = compile_spec(agent(**fields), model="offline", profile="offline").spec
    spec |= {"restart": k.POLICY, "context": {"window": 2_000}}
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, policy=policy) as kernel:
        ended = await kernel.run("s", spec)
        assert (ended["status"], ended["output"]) == ("completed", json.loads(GOOD))
        asked_for = [request.body for request in kernel.server.requests]
    summaries = [body for body in asked_for if body.get("tool_choice") == "none"]
    assert len(summaries) == stepping.folds > 0
    assert [("response_format" in body) for body in summaries] == [False] * len(summaries)
    rounds = [body for body in asked_for if body not in summaries]
    assert [("response_format" in body) for body in rounds] == [mode == "native"] * len(rounds)


# Malformed answers.

SECOND = {"id": 0, "price": 0, "paid": False, "note": None, "items": [{"name": "", "count": 0}]}
"""What is answered to the second question."""


def answering(found: list[Case], *, by_tool: bool) -> Policy:
    """A model that gives the answer of the case that its input names, and then the second one."""

    def policy(body: dict[str, Any]) -> Reply:
        number = next(content_text(message) for message in body["messages"] if message["role"] == "user")
        if any(REJECTED in content_text(message) for message in body["messages"]):
            return call(json.dumps(SECOND)) if by_tool else Reply(text=json.dumps(SECOND))
        reply = found[int(number)].reply
        return (
            Reply(tool_calls=((FINAL_ANSWER, reply.text or ""),), finish_reason=reply.finish_reason)
            if by_tool
            else reply
        )

    return policy


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["native", "tool"])
def test_two_hundred_malformed_answers(mode: Any) -> None:
    """Given 200 answers of an endpoint whose truth is known, then each is accepted as just that value, or refused for
    its reason and asked for again; none is accepted wrongly."""
    every = (case for case in cases(7) if mode == "native" or case.reason != "refused")
    found, wrong, counts = list(islice(every, 200)), [], Counter[str]()
    with LocalCluster(policy=answering(found, by_tool=mode == "tool")) as cluster:
        for number, case in enumerate(found):
            spec = AgentSpec(
                name="clerk", output_type=case.schema, output_mode=mode, output_retries=1, max_continuations=0
            )
            session = cluster.spawn(spec)
            result = session.send(str(number)).result(SECONDS)
            expected = case.value if not case.reason else None if case.reason == "refused" else SECOND
            texts = "\n".join(message.text for message in session.messages() if message.role in ("user", "tool"))
            reasons = re.findall(rf"^{REJECTED}.*\((\w+)\):$", texts, re.MULTILINE)
            reported = [*reasons, *([result.error["details"]["reason"]] if result.error else [])]
            good = (reported, json.dumps(result.output)) == ([case.reason] if case.reason else [], json.dumps(expected))
            wrong += [] if good else [(case, reported, result)]
            counts[case.reason or "accepted"] += 1
        assert not wrong, wrong[0]
        assert set(counts) >= {"accepted", "not_json", "ambiguous", "cut_off", "inexact", "schema"}
        assert cluster.model_server.stats.requests == sum(
            1 + (reason not in ("accepted", "refused")) for reason in counts.elements()
        )
    print(f"{mode}: {dict(counts)}")


# Deaths.


@dataclass(frozen=True)
class Clean:
    """A run in which nobody dies: its transcript, what the model was asked, and its points."""

    transcript: list[Any]
    requests: list[str]
    points: list[str]
    output: Any


def bodies(kernel: k.Kernel, session_id: str) -> list[str]:
    """All that the model was asked by a session, as it was sent."""
    texts = [json.dumps(request.body) for request in kernel.server.requests]
    return [text.replace(f"I am {session_id}.", "I am clean.") for text in texts if f"I am {session_id}." in text]


async def log_of(kernel: k.Kernel, session_id: str) -> list[Any]:
    """The whole log of messages."""
    kept = ("role", "content", "tool_calls", "tool_call_id", "run_id", "round", "origin", "visibility")
    return [
        [message.get(name) for name in kept]
        for message in json.loads(
            json.dumps(await kernel.messages(session_id)).replace(f"I am {session_id}.", "I am clean.")
        )
    ]


MODES = {
    "native": ("native", replies(Reply(tool_calls=(("touch", '{"name": "a"}'),)), '{"guilty": "yes"}', GOOD)),
    "tool": ("tool", replies(call('{"guilty": "yes"}', ("touch", '{"name": "a"}')), call(GOOD))),
    "refused": ("auto", no_formats(replies("Guilty!", call(GOOD)))),
    "prompt": ("prompt", replies(Reply(text=GOOD[:9], finish_reason="length"), "?", GOOD)),
}
"""In each the model gives an answer that is not accepted, and then one that is."""


@pytest.mark.conformance
@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
@pytest.mark.parametrize("name", sorted(MODES))
async def test_a_death_anywhere_leaves_the_answer_as_it_would_have_been(
    name: str, victim: str, tmp_path: Path
) -> None:  # fmt: skip
    """Frame or node service killed at each point of a run with an answer that is not accepted: the same messages, the
    same requests to the byte, and the same output."""
    mode, policy = MODES[name]
    compiled = compile_spec(agent(output_mode=mode, tools=[touch]), model="offline", profile="offline").spec
    compiled["restart"] = k.POLICY
    problems: list[str] = []
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, policy=policy) as kernel:
        ended = await kernel.run("clean", compiled, "I am clean.")
        assert (ended["status"], ended["output"]) == ("completed", json.loads(GOOD))
        clean = Clean(await log_of(kernel, "clean"), bodies(kernel, "clean"), list(kernel.points), ended["output"])
        for at in tiers.points(range(len(clean.points) + 4)):
            session_id = f"s{at}"
            Deaths(kernel, session_id, at, victim)
            ended = await kernel.run(session_id, compiled, f"I am {session_id}.")
            kernel.on_point = None
            await kernel.quiet()
            kernel.check(session_id)
            found = bodies(kernel, session_id)
            if ended["output"] != clean.output:
                problems.append(f"point {at}: ended as {ended['status']} with {ended['output']}: {ended['error']}")
            if (log := await log_of(kernel, session_id)) != clean.transcript:
                problems.append(f"point {at}: the log has {log}, not {clean.transcript}")
            if set(found) != set(clean.requests) or (victim == "frame" and len(found) != len(clean.requests)):
                problems.append(f"point {at}: the model was asked {found}, not {clean.requests}")
    assert not problems, "\n".join(problems)
