"""Pacing in the gateway: what headers say, who gets the next turn, and what goes out when, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.cluster.client.compiling import compile_spec
from understudy.config import ModelProfile
from understudy.gateway import admission as admitting
from understudy.gateway import course as measuring
from understudy.gateway import limits as limiting
from understudy.gateway.admission import Stopped
from understudy.gateway.course import Course
from understudy.gateway.fair_queue import FairQueue
from understudy.gateway.limits import Limits
from understudy.gateway.rate_headers import seconds_until, stated_limits
from understudy.messages import Usage
from understudy.rates import Rates, RateShare, RateShares
from understudy.records import ModelAnswer, ModelRequest
from understudy.spec import AgentSpec


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when there is nothing to do but to wait."""

    now = 1_000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def virtually(main: Coroutine[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run on the virtual clock."""
    loop = VirtualLoop()
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time)
    monkeypatch.setattr(admitting, "time", clock)
    monkeypatch.setattr(limiting, "time", clock)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


def request(priority: str = "normal", **more: Any) -> ModelRequest:
    return ModelRequest(
        wait_key="s/r/1", profile="p", model="m", messages=b"[]", priority=priority, **{"deadline": 30.0, **more}
    )


async def served(limits: Limits, tree: str, done: list[tuple[float, str]], **of: Any) -> None:
    """One call that takes no time."""
    async with limits.of("p").turn(request(**of), tree, Course()) as turn:
        done.append((asyncio.get_running_loop().time() - 1_000.0, tree))
        turn.answered(Usage(of.get("tokens", 0), 0))


def limited(**rates: Any) -> Limits:
    limits = Limits()
    limits.update(ModelProfile("p", "key", **rates))
    return limits


def test_limits_in_headers() -> None:
    """OpenAI's and Anthropic's forms are read; what is of a day, or no limit, is no limit of a minute."""
    stated = stated_limits(
        {
            "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "1s", "x-ratelimit-limit-tokens": "150000",
            "x-ratelimit-remaining-tokens": "149984", "x-ratelimit-reset-tokens": "6ms",
        },
        0.0,
    )  # fmt: skip
    assert stated.rates == Rates(60.0, 150_000.0)
    assert stated.pause == 1.0
    stated = stated_limits(
        {
            "anthropic-ratelimit-requests-limit": "50", "anthropic-ratelimit-requests-remaining": "49",
            "anthropic-ratelimit-requests-reset": "2026-01-01T00:00:01Z",
        },
        1_767_225_600.0,
    )  # fmt: skip
    assert stated.rates == Rates(50.0, None)
    assert stated.requests.reset == 1.0
    assert stated.pause is None
    daily = {"x-ratelimit-limit-requests": "200", "x-ratelimit-reset-requests": "7m12s"}
    assert not stated_limits(daily, 0.0).rates
    assert not stated_limits({"x-ratelimit-limit-tokens": "-1", "x-ratelimit-reset-tokens": "0"}, 0.0).rates
    forms = {"1h2m3.5s": 3_723.5, "12ms": 0.012, "7": 7.0, "soon": None, "": None, "1d": 86_400.0}
    assert {text: seconds_until(text, 0.0) for text in forms} == forms


@pytest.mark.parametrize("seed", range(20))
def test_trees_take_turns(seed: int) -> None:
    """Of trees that wait all the time, what each has got differs by no more than one item of each, by weight."""
    chosen = random.Random(seed)
    queue: FairQueue[tuple[str, float]] = FairQueue()
    weights = {f"t{number}": chosen.choice((1.0, 2.0, 4.0)) for number in range(chosen.randint(2, 9))}
    costs = {tree: deque(chosen.uniform(0.1, 3.0) for _ in range(200)) for tree in weights}
    for tree, weight in weights.items():
        for cost in costs[tree]:
            queue.add(tree, (tree, cost), cost / weight)
    got = Counter[str]()
    for _ in range(150):
        tree, cost = queue.pop()
        got[tree] += cost / weights[tree]  # type: ignore[assignment]
        bound = 3.0 / min(weights.values()) * 2
        assert max(got.values()) - min(got[name] for name in weights) <= bound


def test_who_leaves_the_queue_gains_nothing() -> None:
    """Given a flow whose items are taken out, then its place is as before; one that is put back comes first."""
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1"):
        queue.add(item[0], item, 1.0)
    queue.discard("b", "b1")
    assert queue.pop() == "a1"
    queue.add("b", "b2", 1.0)
    queue.add_first("a", "a1")
    assert [queue.pop() for _ in range(3)] == ["b2", "a1", "a2"]
    assert len(queue) == 0


def test_a_minute_never_has_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given 64 trees with three calls each and a limit of 60 a minute, then no minute has more, the first goes at once,
    the limit is used, and no tree gets its second turn before all have had their first."""

    async def main() -> list[tuple[float, str]]:
        limits, done = limited(requests_per_minute=60), list[tuple[float, str]]()
        await asyncio.gather(*(served(limits, f"t{n % 64}", done) for n in range(192)))
        return done

    done = virtually(main(), monkeypatch)
    times = [at for at, _ in done]
    assert times[0] == 0.0
    assert times[-1] < 192 * 1.07
    assert max(sum(start <= at < start + 60 for at in times) for start in times) <= 60
    for turn in range(3):
        assert len({tree for _, tree in done[turn * 64 : turn * 64 + 64]}) == 64


def test_a_pause_is_no_reason_for_a_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a gateway that was idle or stood still for minutes, then it sends no faster than before."""

    async def main() -> list[float]:
        limits, done = limited(requests_per_minute=600), list[tuple[float, str]]()
        await served(limits, "t", done)
        await asyncio.sleep(600)
        await asyncio.gather(*(served(limits, "t", done) for _ in range(20)))
        return [at for at, _ in done][1:]

    times = virtually(main(), monkeypatch)
    assert times[-1] - times[0] >= 19 * 0.1


def test_priorities_weigh_and_starve_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given trees of all priorities that wait, then they get turns as 4 : 2 : 1."""

    async def main() -> list[str]:
        limits, done = limited(requests_per_minute=60), list[tuple[float, str]]()
        calls = [served(limits, name, done, priority=name) for name in ("low", "normal", "high") for _ in range(60)]
        await asyncio.gather(*calls)
        return [tree for _, tree in done]

    first = Counter(virtually(main(), monkeypatch)[:70])
    assert abs(first["high"] - 40) <= 2
    assert abs(first["normal"] - 20) <= 2
    assert abs(first["low"] - 10) <= 2


def test_a_priority_is_inherited() -> None:
    """Given an agent with a priority, then those that it names have it, down to the last, unless they say another."""
    own = AgentSpec(name="own", priority="normal")
    last, other = AgentSpec(name="last"), AgentSpec(name="other")
    middle = AgentSpec(name="middle", tools=["spawn_agent"], agents=[last, own])
    top = AgentSpec(name="top", priority="high", tools=["spawn_agent"], agents=[middle], handoffs=[other])
    spec = compile_spec(top, model="offline", profile=None).spec
    below = spec["agents"]["middle"]["agents"]
    found = [one.get("priority") for one in (spec, below["last"], below["own"], spec["handoffs"]["other"])]
    assert found == ["high", "high", "normal", "high"]


def test_tokens_are_reserved_and_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a limit of tokens, then requests wait for theirs; one that is larger than what is there goes nevertheless,
    and the next one waits for it."""

    async def main() -> list[float]:
        limits, done = limited(tokens_per_minute=60_000), list[tuple[float, str]]()
        more = {"tokens": 950, "parameters": {"max_tokens": 1}}
        await asyncio.gather(*(served(limits, f"t{n}", done, **more) for n in range(10)))
        return [at for at, _ in done]

    times = virtually(main(), monkeypatch)
    assert times[-1] == pytest.approx(9 * 950 / 57_000 * 60, rel=0.05)


def test_a_refusal_stops_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a request that is refused for 20 s, then nothing goes out until then, also where no limit is known; then
    one goes first; and what can't wait so long fails at once."""

    async def main() -> tuple[list[float], int]:
        limits, done = limited(), list[tuple[float, str]]()
        async with limits.of("p").turn(request(), "t", Course()) as turn:
            assert turn.refused({}, 20.0) == 20.0
        results = await asyncio.gather(
            *(served(limits, f"t{n}", done, deadline=10.0 if n < 2 else 30.0) for n in range(6)),
            return_exceptions=True,
        )
        return [at for at, _ in done], sum(isinstance(result, Stopped) for result in results)

    times, failed = virtually(main(), monkeypatch)
    assert failed == 2
    assert len(times) == 4
    assert min(times) >= 20.0


def test_who_goes_away_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given callers that are cancelled while they wait, then they cost no turn, and no place is lost."""

    async def main() -> list[float]:
        limits, done = limited(requests_per_minute=60, max_concurrency=1), list[tuple[float, str]]()
        tasks = [asyncio.create_task(served(limits, f"t{n}", done)) for n in range(10)]
        await asyncio.sleep(0.5)
        for task in tasks[1:8]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [at for at, _ in done]

    assert virtually(main(), monkeypatch) == pytest.approx([0.0, 1.05, 2.11], abs=0.05)


def test_how_long_a_call_waits_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given one place that is taken for 40 s, then who comes meanwhile has waited for it, who gives up too, and who had
    it at once has not; while they wait, the report says how many do."""

    async def main() -> tuple[list[dict[str, int]], dict[str, int]]:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic_ns=lambda: round(loop.time() * 1e9)))
        limits, courses = limited(max_concurrency=1), [Course() for _ in range(3)]

        async def call(course: Course) -> None:
            async with limits.of("p").turn(request(), "t", course):
                await asyncio.sleep(40.0)

        tasks = [asyncio.create_task(call(course)) for course in courses]
        await asyncio.sleep(10.0)
        waiting = limits.report().waiting
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [dict(course.measured(ModelAnswer()).waited) for course in courses], waiting

    assert virtually(main(), monkeypatch) == (
        [{"p": 0}, {"p": 40_000_000}, {"p": 10_000_000}],
        {"p": 2},
    )


def test_without_a_supervisor_nodes_share_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a share whose lease ends and is not renewed, then the node uses an equal part, and no more before the grace
    is over; of a late message nothing is used."""

    async def main() -> list[float | None]:
        limits, loop = limited(requests_per_minute=60), asyncio.get_running_loop()

        def share(number: int, requests: float) -> None:
            rows = [RateShare("p", "", Rates(60.0), Rates(requests))]
            limits.share(RateShares(1, number, loop.time(), 2, rows))

        def rate() -> float | None:
            return limits.report().uses[0].share.requests

        found = []
        share(2, 5.0)
        share(1, 50.0)
        found.append(rate())
        await asyncio.sleep(16.0)
        found.append(rate())
        await asyncio.sleep(20.0)
        found.append(rate())
        share(3, 50.0)
        found.append(rate())
        await asyncio.sleep(16.0)
        return [*found, rate()]

    assert virtually(main(), monkeypatch) == [5.0, 5.0, 28.5, 50.0, 28.5]


def test_trees_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an endpoint without any known limit, when many trees have had their turns, then the gateway keeps in mind
    only those that have asked lately."""

    async def main() -> int:
        limits = Limits()
        limits.update(ModelProfile("p", "key", "http://localhost"))
        for number in range(200):
            async with limits.of("p").turn(ModelRequest("s/r/1", "p", "m", b"[]"), f"tree{number}", Course()):
                await asyncio.sleep(1.0)
            assert not limits.report().uses
        [line] = limits.of("p")._lines.values()
        return len(line.pace._trees)

    assert virtually(main(), monkeypatch) <= 31
