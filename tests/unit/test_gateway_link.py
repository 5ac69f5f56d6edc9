"""A node service's way to its gateway: one attachment at a time; one that is gone, or hangs, is followed by another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from understudy.config import ModelProfile
from understudy.errors import ServiceGone
from understudy.node import gateway_link, service_link
from understudy.node.gateway_link import GatewayLink
from understudy.profiles import Profiles
from understudy.protocol import Attached

PROFILE = ModelProfile("p", "key")


class Gateway:
    """One that can be away, or hang.

    Attributes:
        received: the profiles of each attachment, and of each registration.
    """

    def __init__(self) -> None:
        self.away = 0
        self.hangs = False
        self.attachments = 0
        self.received: list[list[str]] = []
        self.third = asyncio.Event()
        self.profiles: list[ModelProfile] = []

    async def attach(self, _service: str, profiles: list[ModelProfile]) -> Attached:
        await asyncio.sleep(0.001)
        if self.away:
            self.away -= 1
            raise ServiceGone("it is starting")
        self.attachments += 1
        self.received.append([profile.name for profile in profiles])
        if self.attachments == 3:
            self.third.set()
        return Attached("g", str(self.attachments), 123, [], self.profiles)

    async def register(self, number: str, profile: ModelProfile) -> None:
        self.received.append([profile.name])
        if number != str(self.attachments):
            raise ServiceGone("another attachment")

    async def heard(self, number: str) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if number != str(self.attachments):
            raise ServiceGone("another attachment")


def link_to(gateway: Any, *profiles: ModelProfile, kill: Any = service_link.never_killed) -> GatewayLink:
    known = Profiles()
    for profile in profiles:
        known.learn(profile)
    return GatewayLink(gateway, "node", known, lambda _: None, kill)


async def test_all_wait_for_one_attachment() -> None:
    """Given a gateway that is starting, when many calls wait for it, then it is attached to once, and receives all
    profiles; when one of them finds it gone, once more."""
    gateway = Gateway()
    gateway.away = 3
    link = link_to(gateway, PROFILE)
    found = await asyncio.gather(*(link.attached() for _ in range(50)))
    assert {attached.number for attached in found} == {"1"}
    link.lost(found[0])
    link.lost(found[1])  # which has been said
    assert (await link.attached()).number == "2"
    link.lost(found[2])
    assert (await link.attached()).number == "2"
    assert gateway.received == [["p"], ["p"]]
    link.close()


async def test_a_profile_is_sent_at_once_or_with_the_next_attachment() -> None:
    """Given a gateway that is attached, then it is sent a new profile; one that is gone is not waited for."""
    gateway = Gateway()
    link = link_to(gateway)
    await link.register(PROFILE)
    assert gateway.received == []
    await link.attached()
    await link.register(PROFILE)
    assert gateway.received == [[], ["p"]]
    gateway.attachments += 1
    await link.register(PROFILE)
    assert link.current is None
    link.close()


async def test_credentials_come_back_from_the_gateway() -> None:
    """Given a service that was restarted and has no credentials, when it attaches to a gateway that received some, then
    it knows them, and the supervisor can ask for them."""
    gateway, known = Gateway(), Profiles()
    gateway.profiles = [PROFILE]
    link = GatewayLink(gateway, "node", known, lambda _: None)  # type: ignore[arg-type]
    await link.attached()
    assert known.all() == [PROFILE]
    link.close()


async def test_a_gateway_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a gateway that gives no answer for too long, then its process is killed, by its pid, and the next one is
    attached to. So is one that does not even let its service attach, whatever its pid."""
    monkeypatch.setattr(service_link, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(service_link, "SILENCE", 0.05)
    gateway, killed, again = Gateway(), list[int](), asyncio.Event()

    async def kill(pid: int) -> None:
        killed.append(pid)
        gateway.hangs = False
        gateway.attachments += 1
        again.set()

    link = link_to(gateway, kill=kill)
    await link.start()
    gateway.hangs = True
    await asyncio.wait_for(again.wait(), 10)
    assert killed == [123]
    await asyncio.wait_for(gateway.third.wait(), 10)
    assert (await link.attached()).number == "3"
    link.close()

    async def never(_service: str, _profiles: list[ModelProfile]) -> Attached:
        await asyncio.Event().wait()
        raise AssertionError

    again.clear()
    gateway.attach = never  # type: ignore[method-assign]
    deaf = link_to(gateway, kill=kill)
    waiting = asyncio.create_task(deaf.attached())
    await asyncio.wait_for(again.wait(), 10)
    assert killed == [123, 0]
    deaf.close()
    waiting.cancel()


async def test_a_service_starts_without_a_gateway(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Given a gateway that does not come, then its service waits for a while, says what that means, and starts."""
    monkeypatch.setattr(gateway_link, "START_SECONDS", 0.05)
    gateway = Gateway()
    gateway.away = 1_000
    link = link_to(gateway)
    await asyncio.wait_for(link.start(), 10)
    assert "taken for lost" in caplog.text
    link.close()


async def test_newer_credentials_are_not_overwritten() -> None:
    """Given a new key that comes while a service attaches with the old one, then both have the new one."""
    gateway, known = Gateway(), Profiles()
    old, new = ModelProfile("p", "old-key-0123"), ModelProfile("p", "new-key-0123")
    known.learn(old)
    link = GatewayLink(gateway, "node", known, lambda _: None)  # type: ignore[arg-type]
    gateway.profiles = [old]
    sent: list[ModelProfile] = []

    async def attach(_service: str, profiles: list[ModelProfile]) -> Attached:
        sent.extend(profiles)
        known.learn(new)
        return Attached("g", "0", 1, [], [old])

    async def register(_number: str, profile: ModelProfile) -> None:
        sent.append(profile)

    gateway.attach, gateway.register = attach, register  # type: ignore[method-assign]
    await link.attached()
    assert sent == [old, new]
    assert known.all() == [new]
    link.close()


async def test_one_try_without_an_answer_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a gateway that does not answer a try to attach, since all of the machine stood still, say, when it answers
    the next one, then it is not killed."""
    killed: list[int] = []

    async def kill(pid: int) -> None:
        killed.append(pid)

    gateway, tries = Gateway(), list[int]()
    attach = gateway.attach

    async def late(service: str, profiles: list[ModelProfile]) -> Attached:
        tries.append(1)
        if len(tries) == 1:
            raise TimeoutError
        return await attach(service, profiles)

    gateway.attach = late  # type: ignore[method-assign]
    link = link_to(gateway, kill=kill)
    assert (await link.attached()).number == "1"
    assert killed == []
    link.close()


async def test_an_error_that_nobody_expects_ends_no_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Given an attachment that fails in a way that nobody has thought of, then it is logged, and tried again."""
    gateway, tries = Gateway(), list[int]()
    attach = gateway.attach

    async def odd(service: str, profiles: list[ModelProfile]) -> Attached:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("odd")
        return await attach(service, profiles)

    gateway.attach = odd  # type: ignore[method-assign]
    link = link_to(gateway)
    assert (await asyncio.wait_for(link.attached(), 10)).number == "1"
    assert "can't be attached to" in caplog.text
    link.close()
