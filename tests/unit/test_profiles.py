"""Model profiles: from the environment, what they declare, and who is asked instead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec
from understudy.config import (
    Capabilities,
    Fallback,
    ModelProfile,
    Settings,
    model_profile_from_environment,
    model_profiles_from_environment,
)
from understudy.errors import InvalidConfiguration, ModelRefused, ModelUnavailable
from understudy.events import ReasoningDelta, StreamRestarted
from understudy.gateway.gateway import Gateway
from understudy.messages import Usage
from understudy.prices import Price
from understudy.streams import Piece
from understudy.testing import LocalCluster
from understudy.testing.offline import Faults, OfflineServer, policy_from_script

from ..endpoints import KEY, endpoint, failure_of, gateway, request

OPENAI, ANTHROPIC = {"OPENAI_API_KEY": "sk-1"}, {"ANTHROPIC_API_KEY": "sk-ant-1"}


def test_profiles_of_both_providers(tmp_path: Path) -> None:
    """Each provider with a key has a profile; the protocol that is named comes first, and says the default model. Other
    protocols and keys are other profiles."""
    assert [profile.protocol for profile in model_profiles_from_environment({**OPENAI, **ANTHROPIC})] == [
        "chat",
        "anthropic",
    ]
    chosen = {**OPENAI, **ANTHROPIC, "UNDERSTUDY_PROTOCOL": "anthropic"}
    assert [profile.protocol for profile in model_profiles_from_environment(chosen)] == ["anthropic", "chat"]
    path = tmp_path / "key"
    path.write_text("sk-ant-1\n")
    alone = model_profile_from_environment({"ANTHROPIC_API_KEY_FILE": str(path)})
    assert alone == model_profile_from_environment(ANTHROPIC)
    assert alone is not None
    assert (alone.protocol, alone.base_url, alone.name.partition("-")[0]) == ("anthropic", None, "anthropic")
    models = [Settings.from_environment(env).model for env in (OPENAI, ANTHROPIC, {**OPENAI, **ANTHROPIC}, chosen)]
    assert [model.partition("-")[0] for model in models] == ["gpt", "claude", "gpt", "claude"]
    kinds = [
        {},
        {"UNDERSTUDY_PROTOCOL": "responses"},
        {"UNDERSTUDY_PROTOCOL": "responses", "UNDERSTUDY_BACKGROUND": "1"},
    ]
    found = [model_profile_from_environment({**OPENAI, **kind}) for kind in kinds]
    assert [(one.protocol, one.background) for one in found if one] == [
        ("chat", False), ("responses", False), ("responses", True)
    ]  # fmt: skip
    assert len({one.name for one in found if one}) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"UNDERSTUDY_PROTOCOL": "grpc"},
        {"UNDERSTUDY_PROTOCOL": "anthropic"},
        {"UNDERSTUDY_BACKGROUND": "1"},
        {"UNDERSTUDY_BACKGROUND": "x"},
    ],
)
def test_settings_that_say_nothing(wrong: dict[str, str]) -> None:
    """A protocol that nobody speaks or for which there is no key, and background mode with a protocol that has none,
    are errors with the setting."""
    with pytest.raises(InvalidConfiguration, match=next(iter(wrong))):
        model_profiles_from_environment({**OPENAI, **wrong})


@pytest.mark.parametrize("wrong", [{"protocol": "grpc"}, {"background": True}])
def test_profiles_that_say_nothing(wrong: dict[str, Any]) -> None:
    """A profile of a protocol that nobody speaks, or in background mode with one that has none, is refused at once."""
    with pytest.raises(InvalidConfiguration, match="profile 'p'"):
        ModelProfile("p", KEY, **wrong)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
FILE = {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NEEDS: dict[str, dict[str, Any]] = {
    "images": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "files": {"messages": [{"role": "user", "content": [FILE]}]},
    "tools": {"tools": [TOOL]},
    "response_format": {"parameters": {"response_format": {"type": "json_object"}}},
    "reasoning": {"parameters": {"reasoning_effort": "low"}},
}


@pytest.mark.parametrize("name", NEEDS)
async def test_what_a_model_is_declared_not_to_have_is_not_asked_of_it(name: str) -> None:
    """A request that needs it fails before it is sent, and says what is missing; another model's is sent, and a text
    about it needs nothing."""
    declared = {"offline": replace(Capabilities(), **{name: False})}
    with OfflineServer() as server:
        async with gateway(server.url, capabilities=declared) as model:
            error = await failure_of(model.call(request(**NEEDS[name])), ModelRefused)
            assert server.count == 0
            await model.call(request(**NEEDS[name], model="another"))
            await model.call(request(json.dumps(NEEDS[name])))
    assert error.details["missing"] == [name]
    assert "capabilities" in error.message


# In a session


@pytest.mark.parametrize("protocol", ["chat", "responses", "anthropic"])
def test_what_a_provider_made_of_an_answer_is_in_the_log(protocol: str, tmp_path: Path) -> None:
    """Given an agent that reasons before it calls a tool, then the endpoint gets its reasoning back, in the next round
    and in a session that goes on from the store; what a follower of the run receives is void at no time."""
    made = {"text": "I look.", "tool_calls": [["current_time", {}]], "reasoning": "Hm. " * 30}
    script = policy_from_script([made, {"text": "Seen.", "reasoning": "Well."}])
    spec = AgentSpec(name="a", model="m", tools=["current_time"])
    store = f"sqlite:///{tmp_path}/s.db"
    with OfflineServer(script, chunk_delay=0.001) as server:
        profile = ModelProfile("p", KEY, server.url, protocol=protocol)
        for number in range(2):
            with LocalCluster(store, profiles=[profile]) as cluster:
                run = cluster.spawn(spec, session_id="s").send(f"go {number}")
                events = list(run)
                assert run.result(30, check=True).text == "Seen."
            assert not [event for event in events if isinstance(event, StreamRestarted)]
            deltas = sorted((e for e in events if isinstance(e, ReasoningDelta)), key=lambda delta: delta.request_key)
            thoughts = "".join(event.text for event in deltas)
            assert thoughts == "Hm. " * 30 + "Well."
        sent = [json.dumps(recorded.body) for recorded in server.requests]
    mark = {"chat": '"reasoning_content": "Hm.', "responses": "encrypted_content", "anthropic": '"signature"'}[protocol]
    assert [body.count(mark) for body in sent] == [0, 1, 1 if protocol == "chat" else 2, 2 if protocol == "chat" else 3]


# Fallbacks


async def test_a_fallback_answers_where_an_endpoint_does_not() -> None:
    """Given an endpoint of which every try fails, then the next profile is asked, with its own model and protocol; the
    answer says who gave it, and what was streamed is void."""
    script = policy_from_script([{"text": "word " * 40}])
    with OfflineServer(script, faults=Faults(cut_stream=1.0)) as bad, OfflineServer(script) as good:
        fallbacks = (Fallback("unknown"), Fallback("q", "other", on=("overflow",)), Fallback("q", "other"))
        async with gateway(bad.url, fallbacks=fallbacks) as model:
            model.register(ModelProfile("q", KEY, good.url, protocol="anthropic"))
            pieces: list[Piece] = []
            answer = await model.call(request(), pieces.append, pieces.clear)
        assert (bad.count, good.count) == (4, 1)
        assert good.requests[0].body["model"] == "other"
    assert "".join(piece.text for piece in pieces) == answer.content == "word " * 40
    assert (answer.profile, answer.model, answer.provider) == ("q", "other", "anthropic")


async def test_a_fallback_is_for_its_causes_only() -> None:
    """A request that is too long goes to a fallback for that; what none is for fails as it did, and so does a call
    whose fallbacks fail as well."""
    async with endpoint(b"") as nobody:
        pass
    with OfflineServer(window=10) as short, OfflineServer() as long:
        async with gateway(short.url, fallbacks=(Fallback("q", on=("overflow",)),)) as model:
            model.register(ModelProfile("q", KEY, long.url))
            assert (await model.call(request("long " * 100))).profile == "q"
            assert (await model.call(request("short"))).profile == ""
        async with gateway(nobody, fallbacks=(Fallback("q", on=("refused",)),)) as model:
            model.register(ModelProfile("q", KEY, long.url))
            await failure_of(model.call(request()), ModelUnavailable)
        async with gateway(nobody, fallbacks=(Fallback("q"),)) as model:
            model.register(ModelProfile("q", KEY, f"{nobody}/q"))
            error = await failure_of(model.call(request()), ModelUnavailable)
            assert "/q" not in error.message


def test_fallbacks_that_say_nothing() -> None:
    """A fallback to the profile itself, or for a cause that there is not, is refused."""
    for wrong in (Fallback("p"), Fallback("q", on=("bad luck",))):
        with pytest.raises(InvalidConfiguration, match="fallback"):
            Gateway().register(ModelProfile("p", KEY, "http://127.0.0.1:1/v1", fallbacks=(wrong,)))


def test_what_is_taken_into_a_cache_has_a_price() -> None:
    """Tokens from the cache, into it, and beside it cost what the table says; without a price for the second they cost
    what others do, and a limit reckons with the dearest."""
    usage = Usage(1_000_000, 0, 200_000, cache_write_tokens=300_000)
    price = Price.of({"input": 10, "cached_input": 1, "output": 50, "cache_write": 12.5})
    assert price.cost(usage) == 5_000_000 + 200_000 + 3_750_000
    assert Price.of({"input": 10, "output": 50}).cost(usage) == 10_000_000
    assert price.most(1_000_000, 0) == 12_500_000
    assert Usage.from_wire((usage + usage).to_wire()).cache_write_tokens == 600_000
