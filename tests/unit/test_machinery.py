"""The supervisor's hands on a Ray that is played: which frames it finds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.cluster.ray import machinery
from understudy.errors import ServiceGone
from understudy.supervisor.probing import frame_hangs

PID, ELSEWHERE = 4242, "n2"
CALLS = ("start", "host", "probe")


class Handle:
    """A frame's actor. Its event loop is blocked, or its process is gone; a probe has its own."""

    def __init__(self, frame_id: str, *, gone: bool = False) -> None:
        self._actor_id = SimpleNamespace(hex=lambda: frame_id)
        self.gone = gone
        self.asked: list[str] = []
        for method in CALLS:
            setattr(self, method, SimpleNamespace(remote=lambda method=method: self._called(method)))

    async def _called(self, method: str) -> Any:
        self.asked.append(method)
        if self.gone:
            raise ServiceGone("it died")
        if method != "probe":
            await asyncio.Event().wait()
        return {"silent": 12.0, "overdue": 0.0, "busy": 1.0, "pid": PID}


class Ray:
    """What Ray knows of the frames, and which of them it was asked to kill."""

    def __init__(self, **handles: Handle) -> None:
        self.killed: list[Handle] = []
        names = {f"frame/instance/{frame_id}/n1/-": handle for frame_id, handle in handles.items()}
        self.names = list(names)
        self.find_actor = names.get
        self.kill = self.killed.append


async def found(monkeypatch: pytest.MonkeyPatch, ray: Ray, *known: str) -> list[machinery.RayFrame]:
    """The frames that a supervisor finds there; nobody waits long for an answer."""

    async def result_of(call: Awaitable[Any]) -> Any:
        return await call

    monkeypatch.setattr(machinery, "ray", ray)
    monkeypatch.setattr(machinery, "actor_names", lambda: ray.names)
    monkeypatch.setattr(machinery, "find_actor", ray.find_actor)
    monkeypatch.setattr(machinery, "where", lambda _handle: (PID, ELSEWHERE))
    monkeypatch.setattr(machinery, "result_of", result_of)
    monkeypatch.setattr(machinery, "submitted", lambda call: call())
    monkeypatch.setattr(machinery, "ADOPT_SECONDS", 0.05)
    settings: Any = SimpleNamespace(instance="instance")
    return await machinery.RayMachinery(settings, "", None, None).frames("n1", *([known] if known else []))


async def test_a_frame_whose_tool_blocks_its_loop_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a frame whose async tool blocks its event loop within its deadline, when a supervisor looks for frames,
    then the frame is one of them, with its pid and where it is, is well by the rule of probes, and is not killed."""
    ray = Ray(f=Handle("f"))
    [frame] = await found(monkeypatch, ray)
    assert (frame.frame_id, frame.node_id, frame.pid, frame.host, ray.killed) == ("f", "n1", PID, ELSEWHERE, [])
    assert await frame_hangs(frame) == ""


async def test_a_frame_that_does_not_answer_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a frame that Ray can't reach, when a supervisor looks for frames, then it is one of them: it is dead once
    it was killed by its pid, which its watch sees to."""
    ray = Ray(f=Handle("f", gone=True))
    assert [frame.pid for frame in await found(monkeypatch, ray)] == [PID]
    assert ray.killed == []


async def test_a_frame_that_is_known_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given one frame that is known and another that is not, then only that one is asked to begin."""
    known, other = Handle("known"), Handle("other")
    [frame] = await found(monkeypatch, Ray(known=known, other=other), "known")
    assert (frame.frame_id, known.asked, other.asked) == ("other", [], ["start"])
