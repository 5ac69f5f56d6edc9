"""The simulator: deterministic, able to notice what is wrong, and run here over some seeds and over kept plans."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from .. import tiers
from .forks import ENVIRONMENT, Forks
from .plan import Action, Fault, Plan, Task, Trigger, Work, agent, draw
from .scheduler import Exhausted, Scheduler, Signal
from .seeded import candidates, read
from .tools import TOOLS
from .world import World

ROOT = Path(__file__).parents[2]
REGRESSIONS = sorted((ROOT / "tests" / "simulation" / "regressions").glob("*.json"))
SEEDS = 8
"""Of each backend, always the same."""

FRESH, SHARES = 3, 8
"""Of each backend, so many fresh ones in so many tests: who is done with other tests helps."""

Simulate = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]


def simulate_fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The simulator's command line, in a process that has loaded nothing yet."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, **ENVIRONMENT}, timeout=800,
    )  # fmt: skip


@pytest.fixture(scope="session")
def simulate() -> Iterator[Simulate]:
    """The simulator's command line, in forks of a process that has loaded everything."""
    with Forks() as forks:
        yield forks


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_the_same_seed_is_the_same_run(simulate: Simulate, backend: str) -> None:
    """Given a seed, when it is simulated in a new process and in a fork of an older one, then both records are the same
    to the letter."""
    first, second = (run("--seed", "4", "--backend", backend, "--verbose") for run in (simulate_fresh, simulate))
    assert "simulated" in first.stdout, first.stderr
    assert first.stdout == second.stdout


@pytest.mark.thorough
def test_a_seed_is_the_same_run_whenever_garbage_is_collected() -> None:
    """Given a seed in which processes leave generators behind, then it is the same run however often Python by itself
    would collect garbage."""
    program = (
        "import gc, sys; gc.set_threshold(int(sys.argv[1]))\n"
        "from tests.simulation.plan import draw; from tests.simulation.world import World\n"
        "print(World(draw(66000005, 'sqlite')).run().trace)"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", program, threshold], cwd=ROOT, capture_output=True, text=True, check=True,
            env={**os.environ, **ENVIRONMENT}, timeout=400,
        ).stdout
        for threshold in ("60", "20000")
    ]  # fmt: skip
    assert traces[0] == traces[1]


@pytest.mark.thorough
def test_a_seed_is_the_same_run_whatever_ran_before() -> None:
    """Given a seed, when it is simulated alone and behind another one in the same process, then both runs are the same:
    nothing that a process keeps, and no address in its memory, has a part in it."""
    program = (
        "import sys; from tests.simulation.plan import draw; from tests.simulation.world import World\n"
        "run = lambda seed: World(draw(seed, sys.argv[1])).run()\n"
        "first = run(38); run(5); again = run(38)\n"
        "assert first.lines == again.lines; assert first.trace == again.trace"
    )
    for backend in ("sqlite", "postgresql"):
        done = subprocess.run(
            [sys.executable, "-c", program, backend], cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, **ENVIRONMENT}, timeout=800,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.thorough
def test_a_seed_is_the_same_run_however_long_the_machine_is_up() -> None:
    """Given a machine that has just started, and one that runs for months, then a seed is the same run on both: what is
    simulated never sees the real clock, not even in a default that was bound when its module was loaded."""
    program = (
        "import sys, time; real, by = time.monotonic, float(sys.argv[1]); time.monotonic = lambda: real() + by\n"
        "from tests.simulation.plan import draw; from tests.simulation.world import World\n"
        "time.monotonic = real; print(World(draw(3200011, 'postgresql')).run().trace)"
    )
    booted = time.monotonic()
    traces = {
        subprocess.run(
            [sys.executable, "-c", program, str(by)], cwd=ROOT, capture_output=True, text=True, check=True,
            env={**os.environ, **ENVIRONMENT}, timeout=800,
        ).stdout
        for by in (-booted, 1e7)
    }  # fmt: skip
    assert len(traces) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_seeds(simulate: Simulate, backend: str) -> None:
    """Given some seeds, then no invariant is violated."""
    done = simulate("--seeds", str(SEEDS), "--backend", backend)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.thorough
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_fresh_seeds(simulate: Simulate, backend: str, share: int) -> None:
    """Given seeds that nobody has tried, then no invariant is violated. The report's head says which they are. One that
    fails is named; it runs again with `--seed`, and its plan becomes a regression."""
    first = int(os.environ[tiers.FRESH_SEEDS]) + FRESH * share
    done = simulate("--first", str(first), "--seeds", str(FRESH), "--backend", backend)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.thorough
@pytest.mark.parametrize("plan", REGRESSIONS, ids=[path.stem for path in REGRESSIONS])
def test_regressions(simulate: Simulate, plan: Path) -> None:
    """Given a plan that failed once, then it fails no more."""
    done = simulate("--plan", str(plan))
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


def blocking(backend: str) -> Plan:
    """A tool that blocks the event loop of its process for 20 s, within its 60 s; 4 s later the supervisor dies."""
    call = ("block", {"name": "act", "seconds": 20.0, "fails": False, "kills": 0})
    spec = agent("agent", [], tools=[TOOLS["block"]], tool_timeout=60.0)
    send = {"run_id": "r0", "content": Task("task", ((call,),), (0.0, 0.0)).text()}
    work = Work("s0", spec, (Action(0.0, "spawn"), Action(0.1, "send", send)))
    fault = Fault(4.0, "kill_supervisor", on=Trigger("tool_started", 1))
    return Plan(1, backend, 2, 1, 2, (work,), (fault,))


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_a_process_whose_event_loop_is_blocked_within_a_deadline_lives(backend: str) -> None:
    """Given a tool that blocks its process's event loop within its deadline, when a new supervisor finds that process,
    then it lives on, and the call's effect and result are those of one activation."""
    world = World(blocking(backend))
    result = world.run()
    assert result.violations == []
    assert [line for line in result.lines if "SIGKILL to frame" in line] == []
    assert result.counts["fault kill_supervisor"] == 1
    assert [effect.epoch for effect in world.effects] == [1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["call-in-doubt-runs-again", "accepted-input-wakes-nobody", "replay-applied-again"])
def test_a_seeded_fault_is_noticed(name: str) -> None:
    """Given a wrong change of the product, then some seed shows it; `python -m tests.simulation.seeded` tries all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.seeded", name], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=800,
    )  # fmt: skip
    assert "1 of 1 killed" in done.stdout, f"{done.stdout}\n{done.stderr[-3000:]}"


@pytest.mark.thorough
def test_a_failing_plan_is_made_shorter(simulate: Simulate, tmp_path: Path) -> None:
    """Given a seed that fails, then what is printed and kept is a shorter plan that fails in the same way."""
    fault = ("--fault", "accepted-input-wakes-nobody")
    found = simulate_fresh(*fault, "--seeds", "20", "--stop", "--backend", "sqlite")
    seed = re.search(r"^seed (\d+):", found.stdout, re.MULTILINE)
    assert seed, f"{found.stdout}\n{found.stderr[-3000:]}"
    kept = tmp_path / "plan.json"
    options = ("--backend", "sqlite", "--shrink", "30", "--save", str(kept))
    shorter = simulate_fresh(*fault, "--seed", seed[1], *options)
    assert shorter.returncode == 1
    again = simulate_fresh(*fault, "--plan", str(kept))
    assert again.returncode == 1
    whole, short = draw(int(seed[1]), "sqlite"), Plan.from_json(kept.read_text())
    assert len(short.to_json()) < len(whole.to_json())
    assert len(short.work) <= len(whole.work)
    assert len(short.faults) <= len(whole.faults)
    assert simulate("--plan", str(kept)).returncode == 0


def test_each_seeded_fault_has_its_place() -> None:
    """Given the list of seeded faults, then what each replaces stands in its module exactly once, and names differ."""
    faults = read()
    assert len(faults) >= 60
    for fault in faults.values():
        for module, changes in fault.changes.items():
            source = inspect.getsource(importlib.import_module(module))
            for old, _ in changes:
                assert source.count(old) == 1, fault.name


def test_commands_begin(simulate: Simulate) -> None:
    """Given plans with commands in the background, then some begin: what the product refuses tests nothing."""
    seeds = islice((seed for seed in range(400) if "commands" in draw(seed, "sqlite").features()), 4)
    assert any(re.search(r"'commands': \d", simulate("--seed", str(seed)).stdout) for seed in seeds)


def test_seeds_that_can_not_show_a_fault_are_passed_over() -> None:
    """Given what a fault needs, then only seeds are simulated whose plans have one alternative of each."""
    fault = replace(read()["defect-2-kills-among-probes"], needs=("slow_kill|pause_node", "machines"), first=0)
    seeds = list(islice(candidates(fault, 0), 5))
    assert seeds == [seed for seed in range(seeds[-1] + 1) if _has_both(draw(seed, fault.backend))]
    assert len(seeds) < seeds[-1] + 1


def _has_both(plan: Plan) -> bool:
    return plan.machines > 1 and any(fault.kind in ("slow_kill", "pause_node") for fault in plan.faults)


# The scheduler.


@pytest.fixture
def scheduler() -> Scheduler:
    """A scheduler that lets nobody lose the CPU by chance."""
    return Scheduler(random.Random(1), calm=True)


def test_time_moves_only_when_nothing_can_run(scheduler: Scheduler) -> None:
    """Given processes with work, then timers fire after it, at their exact times, however long they are."""
    seen: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, scheduler.time()))

    async def work() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
        seen.append(("work", scheduler.time()))

    async def main() -> None:
        tasks = [scheduler.process(name).spawn(sleep(name, seconds)) for name, seconds in (("b", 3600.0), ("a", 1.5))]
        await asyncio.gather(*tasks, scheduler.process("c").spawn(work()))

    scheduler.run_until_complete(main())
    assert seen == [("work", 0.0), ("a", 1.5), ("b", 3600.0)]
    scheduler.end()


def test_a_paused_process_runs_nothing_and_a_dead_one_never(scheduler: Scheduler) -> None:
    """Given a process that counts seconds, then it stands still while it is paused, goes on after it, and ends for good
    when it is killed."""
    process, seen = scheduler.process("counting"), list[float]()

    async def count() -> None:
        while True:
            await asyncio.sleep(1.0)
            seen.append(scheduler.time())

    async def main() -> None:
        process.spawn(count())
        await asyncio.sleep(2.5)
        process.pause()
        await asyncio.sleep(3.0)
        process.resume()
        await asyncio.sleep(2.0)
        process.kill()
        await asyncio.sleep(5.0)

    scheduler.run_until_complete(main())
    assert seen == [1.0, 2.0, 5.5, 6.5]
    scheduler.end()


def test_a_thread_waits_while_its_process_goes_on(scheduler: Scheduler) -> None:
    """Given a thread that waits for a signal, then the event loop goes on; it sees the signal, or the time-out."""
    process, signal, seen = scheduler.process("threads"), Signal(), list[tuple[str, float]]()

    def thread() -> None:
        seen.append((f"first {scheduler.wait(signal, 10.0)}", scheduler.time()))
        seen.append((f"second {scheduler.wait(Signal(), 2.0)}", scheduler.time()))

    async def main() -> None:
        waiting = process.spawn(asyncio.to_thread(thread))
        await asyncio.sleep(4.0)
        seen.append(("loop", scheduler.time()))
        signal.set()
        await waiting

    scheduler.run_until_complete(main())
    assert seen == [("loop", 4.0), ("first True", 4.0), ("second False", 6.0)]
    scheduler.end()


def test_nothing_left_to_do_is_an_error(scheduler: Scheduler) -> None:
    """Given a wait that nothing can end, then the simulation says so instead of hanging."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Exhausted, match="nothing is left to do"):
        scheduler.run_until_complete(main())
    scheduler.end()
