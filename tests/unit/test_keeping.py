"""Services ask each other for the secrets of their settings (`cluster/ray/keeping.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.cluster.ray import keeping
from understudy.cluster.ray.keeping import ASKED_AT_ONCE, SecretKeeper
from understudy.config import Settings
from understudy.errors import ServiceGone, StorePasswordMissing
from understudy.secrets import Secrets, part

WHOLE = Settings("postgresql://me:hunter22@db/x", "m", telemetry={"OTEL_EXPORTER_OTLP_HEADERS": "a=hunter33"})
SHOWN, SECRETS = part(WHOLE)
OLD = Secrets("postgresql://me:hunter11@db/x")

Answers = dict[str, Secrets | Exception | None]
Asked = list[str]


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], Asked]:
    """Services by role and node, with what they answer; returns the list of those that are asked."""

    def make(answers: Answers) -> Asked:
        asked: Asked = []
        named = {name.replace("/", f"/{WHOLE.instance}/", 1): answer for name, answer in answers.items()}

        def find(name: str) -> Any:
            async def secrets() -> Secrets | None:
                asked.append(name.replace(f"/{WHOLE.instance}", ""))
                answer = named[name]
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return SimpleNamespace(secrets=SimpleNamespace(remote=secrets))

        monkeypatch.setattr(keeping, "actor_names", lambda: [*named, "frame/other", "node/other-1/n"])
        monkeypatch.setattr(keeping, "find_actor", find)
        monkeypatch.setattr(keeping, "submitted", lambda call: call())
        monkeypatch.setattr(keeping, "SEEK_SECONDS", 1.0)
        monkeypatch.setattr(keeping, "PAUSES", (60.0, 60.0))  # one round of questions
        return asked

    return make


def keeper(settings: Settings = SHOWN) -> SecretKeeper:
    return SecretKeeper(settings, f"node/{WHOLE.instance}/here", "here")


async def test_who_is_near_is_asked_before_others(services: Callable[[Answers], Asked]) -> None:
    """The gateway of the same node is enough; the secrets complete the settings, and nobody is asked twice."""
    asked = services({"node/here": SECRETS, "gateway/here": SECRETS, "node/there": ServiceGone("dead")})
    one = keeper()
    assert await one.whole(False) == WHOLE
    assert await one.whole(False) == WHOLE
    assert asked == ["gateway/here"]


async def test_of_many_some_are_asked_at_a_time(services: Callable[[Answers], Asked]) -> None:
    """Given a hundred nodes whose services know nothing yet, then each question goes to a few of them."""
    asked = services({f"node/{number}": None for number in range(100)})
    with pytest.raises(StorePasswordMissing, match="postgresql://me@db/x"):
        await keeper().whole(False)
    assert len(asked) == ASKED_AT_ONCE


async def test_what_the_store_refused_is_asked_for_again(services: Callable[[Answers], Asked]) -> None:
    """Given a password that was refused, then another one is looked for; where nobody has one it is tried again."""
    services({"gateway/here": OLD})
    one = keeper()
    assert (await one.whole(False)).store == OLD.store
    assert (await one.whole(True)).store == OLD.store
    services({"gateway/here": OLD, "node/there": SECRETS})
    assert (await one.whole(True)) == WHOLE


async def test_only_the_password_of_the_store_is_waited_for(services: Callable[[Answers], Asked]) -> None:
    """A service without a collector's headers begins nevertheless, and one without secrets asks nobody."""
    sqlite = Settings("sqlite:////a.db", "m", telemetry=WHOLE.telemetry)
    services({})
    assert (await keeper(part(sqlite)[0]).whole(False)).telemetry == {}
    asked = services({"gateway/here": SECRETS})
    plain = Settings("postgresql://me@db/x?passfile=/run/pass", "m")
    assert await keeper(part(plain)[0]).whole(True) == plain
    assert asked == []


async def test_one_that_hangs_holds_up_nobody(
    services: Callable[[Answers], Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among those that are asked at the same time the first answer counts."""
    services({"node/there": SECRETS, "gateway/there": None})
    find = keeping.find_actor

    def found(name: str) -> Any:
        hangs = SimpleNamespace(secrets=SimpleNamespace(remote=asyncio.Event().wait))
        return hangs if name.startswith("gateway") else find(name)

    monkeypatch.setattr(keeping, "find_actor", found)
    monkeypatch.setattr(keeping, "SEEK_SECONDS", 60.0)
    monkeypatch.setattr(keeping, "ANSWER_SECONDS", 1e6)
    assert await keeper().whole(False) == WHOLE
