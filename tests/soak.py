"""The soak: many sessions work while processes die at random; at the end everything must have ended right.

`python -m tests.soak --kills 200 --sessions 50 --store postgresql`, from the root of the repository.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import understudy.cluster.ray.ray_edge  # noqa: F401 - before Ray, which learns from it how to authenticate

# isort: split
import ray
from rich.console import Console
from rich.table import Table

from understudy import Cluster, RestartPolicy, Session
from understudy.cluster.client import background
from understudy.cluster.client.results import RunResult
from understudy.cluster.client.run_handle import Run
from understudy.errors import DeadlineExceeded, StoreUnreachable

from .faults import PATIENCE, Head, Stage, staged, tools_of, wait_until
from .postgres import PostgresServer
from .soak_facts import Facts, Judge, Log
from .soak_kills import FRAME, SERVER, SUPERVISOR, WEIGHTS, Kill, Killer, Watch, microseconds
from .soak_work import Model, Task, make_task

RUNS_PER_SESSION = 8
"""Then another session takes its place: the history is sent whole with each call."""

LOOK_SECONDS = 45.0
STUCK_SECONDS = 120.0
"""A run that has not ended is stuck when nothing was committed in its tree for so long."""

RUN_SECONDS = 600.0
"""A run that has not ended after so long is stuck in any case: it takes about ten seconds where nobody dies."""

NEVER_GIVEN_UP = RestartPolicy(max_restarts=10_000, stuck_after=1_000, backoff_max=0.5)
"""Bad luck can hit a session three times in a row; that it would be given up for that is tested elsewhere."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Options:
    """What is asked of a soak.

    Attributes:
        sessions: at work at the same time, sub-agents not counted.
        pause: seconds between two kills, on average.
        minutes: after so many it is a failure that kills are left.
    """

    kills: int = 200
    sessions: int = 50
    seed: int = 1
    pause: float = 2.0
    minutes: float = 20.0
    weights: dict[str, int] = field(default_factory=lambda: dict(WEIGHTS))

    @property
    def actors(self) -> int:
        """How many session actors there are at most: several sessions share one."""
        return max(4, self.sessions // 5)


@dataclass
class Soak:
    """What is shared by all that works in a soak.

    Attributes:
        work: for each session what was sent to it, by run id, in order.
        ended: runs whose client has the result.
        patience: how often a call of a client failed because the store was away.
        failures: what ended a worker.
        waits: what the client waited for when the first of them was stuck.
    """

    options: Options
    stage: Stage
    model: Model
    work: dict[str, dict[str, Task]] = field(default_factory=dict)
    ended: int = 0
    patience: int = 0
    twice: int = 0
    waits: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def worker(self, number: int) -> None:
        """Keep one session at work, and after it the next one, until told to stop."""
        chosen = random.Random(f"{self.options.seed}/{number}")
        serial = 0
        try:
            while not self.stopped.is_set():
                self._one_session(chosen, f"soak-{number}-{serial}")
                serial += 1
        except Exception as error:
            self.failures.append(f"worker {number}, session {serial}: {type(error).__name__}: {error}")
            self.stopped.set()

    def _one_session(self, chosen: random.Random, session_id: str) -> None:
        session = self._patiently(lambda: self._spawn(session_id))
        sent = self.work[session_id] = {}
        while len(sent) < RUNS_PER_SESSION and not self.stopped.is_set():
            runs = []
            for _ in range(chosen.choice((1, 1, 1, 2, 3))):
                run_id = f"run-{len(sent)}"
                task = sent[run_id] = make_task(chosen, f"{session_id}.{len(sent)}")
                runs.append(self._send(session, run_id, task, twice=chosen.random() < 0.2))
            for run in runs:
                result = self._result(session, run)
                with self.lock:
                    self.ended += 1
                stored = self._patiently(lambda run=run: session.run(run.run_id).result(PATIENCE))  # type: ignore[misc]
                if (result.text, result.status) != (stored.text, stored.status):
                    raise AssertionError(f"{session_id} {run.run_id}: received {result!r}, stored {stored!r}")

    def _result(self, session: Session, run: Run) -> RunResult:
        """The run's result; fails when nothing more comes of it."""
        deadline = time.monotonic() + RUN_SECONDS
        while True:
            try:
                return run.result(LOOK_SECONDS)
            except DeadlineExceeded:
                latest = max(info.updated_at for info in self._patiently(session.tree))
                if time.monotonic() > deadline or microseconds() - latest > STUCK_SECONDS * 1e6:
                    with self.lock:
                        self.waits = self.waits or client_waits()
                    raise

    def _spawn(self, session_id: str) -> Session:
        tools = [*tools_of(self.stage.directory), "spawn_agent"]
        return self.stage.spawn(session_id=session_id, tools=tools, restart=NEVER_GIVEN_UP)

    def _send(self, session: Session, run_id: str, task: Task, *, twice: bool) -> Run:
        run = self._patiently(lambda: session.send(task.text(), run_id=run_id))
        if twice:
            self._patiently(lambda: session.send(task.text(), run_id=run_id))
            with self.lock:
                self.twice += 1
        return run

    def _patiently(self, call: Callable[[], Value]) -> Value:
        """What a client must do when the store is away: send it again, under the same id."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return call()
            except StoreUnreachable:
                if time.monotonic() > deadline:
                    raise
                with self.lock:
                    self.patience += 1
                time.sleep(0.2)


@dataclass
class Report:
    """What came of a soak."""

    options: Options
    kills: list[Kill]
    facts: Facts
    seconds: float
    load: tuple[float, float]

    @property
    def right(self) -> bool:
        """Whether everything ended as it must."""
        return not self.facts.wrong

    def rows(self) -> list[dict[str, Any]]:
        """A row per kind of kill and what the victim was doing; times in seconds."""
        groups: dict[str, list[Kill]] = {}
        for kill in self.kills:
            groups.setdefault(f"{kill.kind}, {kill.note}" if kill.kind == FRAME else kill.kind, []).append(kill)
        rows = []
        for name, kills in sorted(groups.items(), key=lambda item: (list(WEIGHTS).index(item[1][0].kind), item[0])):
            server = kills[0].kind.startswith(SERVER)
            times = sorted((kill.back - (kill.gone if server else kill.at)) / 1e6 for kill in kills if kill.back)
            away = sorted((kill.gone - kill.at) / 1e6 for kill in kills) if server else []
            row = {"killed": name, "kills": len(kills), "recover": summary(times), "away": summary(away)}
            rows.append(row)
        return rows

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "right": self.right, "seconds": self.seconds, "load_before": self.load[0], "load_after": self.load[1],
            "sessions_at_once": self.options.sessions, "seed": self.options.seed, "rows": self.rows(),
            "totals": self.facts.totals, "kills": list(map(vars, self.kills)),
            "wrong": dict(self.facts.wrong), "problems": self.facts.problems,
        }  # fmt: skip


def summary(times: list[float]) -> dict[str, float] | None:
    """Of a sorted list: the smallest values that half and 99 per cent of all don't exceed, and the largest."""
    if not times:
        return None
    return {
        name: times[max(0, -(-len(times) * share // 100) - 1)]
        for name, share in (("p50", 50), ("p99", 99), ("max", 100))
    }


def soak(
    options: Options,
    stage: Stage,
    model: Model,
    postgres: PostgresServer | None,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Let sessions work and processes die, then judge what is there. Everything it waits for is bounded."""
    began, load = time.monotonic(), os.getloadavg()[0]
    shared = Soak(options, stage, model)
    watch = Watch(stage)
    watch.start()
    workers = [
        threading.Thread(target=shared.worker, args=(number,), name=f"soak-{number}", daemon=True)
        for number in range(options.sessions)
    ]
    for worker in workers:
        worker.start()
    killer = Killer(stage, watch, postgres, options.weights, options.seed, max(2, options.actors // 3))

    def going_on() -> bool:
        if tell is not None:
            tell(f"{len(killer.kills)} of {options.kills} kills, {shared.ended} runs ended, "
                 f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}")  # fmt: skip
        return not shared.stopped.is_set()

    try:
        wait_until(lambda: shared.ended or shared.stopped.is_set(), "the first run's end")
        killer.run(options.kills, options.pause, began + 60 * options.minutes, going_on)
        killer.finish()
    except AssertionError as error:
        shared.failures.append(str(error))
    finally:
        shared.stopped.set()
        deadline = time.monotonic() + RUN_SECONDS
        for worker in workers:
            worker.join(max(0.1, deadline - time.monotonic()))
        watch.stop()
    facts = _judge(shared, watch, killer, [worker.name for worker in workers if worker.is_alive()])
    return Report(options, killer.kills, facts, time.monotonic() - began, (load, os.getloadavg()[0]))


def _judge(shared: Soak, watch: Watch, killer: Killer, alive: list[str]) -> Facts:
    stuck = stuck_sessions(shared)
    for kill in killer.kills:
        if kill.kind == SUPERVISOR:
            later = [began for generation, began in sorted(watch.began.items()) if generation > int(kill.note)]
            kill.back = later[0] if later else 0
    facts = Judge(shared.stage, shared.model, shared.work, killer.kills).judge()
    for failure in shared.failures:
        facts.complain("clients failed", failure)
    for wait in shared.waits:
        facts.complain("the client waited", wait)
    for name in alive:
        facts.complain("clients stuck", name)
    for description in stuck:
        facts.complain("stuck", description)
    if len(killer.kills) < shared.options.kills:
        facts.complain("kills left", f"{len(killer.kills)} of {shared.options.kills}")
    facts.totals.update(
        {"inputs sent twice": shared.twice, "calls of clients that failed because the store was away": shared.patience}
    )
    return facts


def stuck_sessions(shared: Soak) -> list[str]:
    """Wait until no session is at work; for those that still are, return all that is known of them."""
    deadline = time.monotonic() + PATIENCE
    statement = (
        "SELECT session_id, status, wait, epoch, frame_id, actor_pid, run_id, round FROM session WHERE active = 1"
    )
    while (rows := shared.stage.query(statement)) and time.monotonic() < deadline:
        time.sleep(0.1)
    log = Log(shared.stage.dsn) if rows else None
    found = []
    for row in rows:
        assert log is not None
        last = [f"{event.seq} {event.at} {event.type} {event.body()}" for event in log.events[row[0]][-12:]]
        found.append(f"{tuple(row)}, now {microseconds()}\n    " + "\n    ".join(last))
    return found


def client_waits() -> list[str]:
    """Where each task of the client's event loop is, and how many are there."""
    found: Counter[str] = Counter()
    for task in asyncio.all_tasks(background.loop()):
        place, inner = [], task.get_coro()
        while inner is not None and (frame := getattr(inner, "cr_frame", getattr(inner, "ag_frame", None))) is not None:
            place.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            inner = getattr(inner, "cr_await", getattr(inner, "ag_await", None))
        found[" > ".join(place)] += 1
    return [f"{count} at {place}" for place, count in found.most_common()]


def show(report: Report) -> None:
    """Print the tables."""
    console = Console(width=max(120, Console().width), highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("killed", "kills", "recovered: p50", "p99", "max", "away: p50", "max"):
        table.add_column(title, justify="left" if title == "killed" else "right")
    for row in report.rows():
        recover, away = row["recover"] or {}, row["away"] or {}
        cells = [recover.get("p50"), recover.get("p99"), recover.get("max"), away.get("p50"), away.get("max")]
        table.add_row(row["killed"], str(row["kills"]), *("" if cell is None else f"{cell:.3f} s" for cell in cells))
    console.print(table)
    console.print()
    totals = Table(box=None, pad_edge=False, show_header=False)
    for name, value in report.facts.totals.items():
        totals.add_row(name, f"{value:,}")
    must = ("runs lost", "wrong answers", "side effects repeated", "messages lost", "messages doubled or unexpected")
    for name in (*must, *sorted(report.facts.wrong.keys() - set(must))):
        totals.add_row(name, f"{report.facts.wrong[name]:,}")
    totals.add_row("seconds", f"{report.seconds:.0f}")
    totals.add_row("load before, after", f"{report.load[0]:.1f}, {report.load[1]:.1f}")
    console.print(totals)
    for problem in report.facts.problems:
        console.print(f"NOT RIGHT: {problem}", markup=False, soft_wrap=True)
    console.print("everything ended right" if report.right else "NOT everything ended right", markup=False)


@contextmanager
def ready(options: Options, store: str, directory: Path) -> Iterator[tuple[Stage, Model]]:
    """The services on a running Ray cluster, and a stage on them."""
    model = Model()
    with Cluster.connect(store, max_actors=options.actors, standby=2) as cluster:
        try:
            with staged(store, directory, policy=model) as stage:
                yield stage, model
        finally:
            cluster.shutdown()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").split("\n")[0])
    defaults = Options()
    parser.add_argument("--kills", type=int, default=defaults.kills)
    parser.add_argument("--sessions", type=int, default=defaults.sessions, help="at work at the same time")
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--pause", type=float, default=defaults.pause, help="seconds between two kills, on average")
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="all kills must be done by then")
    names = {kind.lower().replace(" ", "-"): kind for kind in WEIGHTS}
    parser.add_argument(
        "--mix", nargs="+", metavar="KIND=WEIGHT", default=[],
        help="which kinds to kill, by weight: " + " ".join(f"{name}={WEIGHTS[kind]}" for name, kind in names.items()),
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument("--keep", type=Path, help="a directory for all events and the logs of all processes")
    given = parser.parse_args()
    weights = dict(WEIGHTS)
    if given.mix:
        weights = {}
        for part in given.mix:
            name, _, weight = part.partition("=")
            if name not in names or not weight.isdecimal():
                parser.error(f"--mix: {part!r} is not one of {', '.join(names)} with a weight")
            weights[names[name]] = int(weight)
    options = Options(given.kills, given.sessions, given.seed, given.pause, given.minutes, weights)
    report = on_a_cluster_of_its_own(options, given.store, given.keep)
    if given.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        show(report)
    return 0 if report.right else 1


def on_a_cluster_of_its_own(options: Options, store: str, keep: Path | None) -> Report:
    """Start Ray, and PostgreSQL where it is needed; soak; end them again."""
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="understudy-soak-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        postgres = stack.enter_context(PostgresServer()) if store == "postgresql" else None
        dsn = postgres.database() if postgres is not None else f"sqlite:///{directory}/store.db"
        head = Head(directory)
        stack.callback(head.close)
        if keep is not None:
            stack.callback(_keep, keep, directory, head, postgres)
        head.start()
        os.environ.update(head.environment, RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
        stack.callback(ray.shutdown)
        stage, model = stack.enter_context(ready(options, dsn, directory / "stage"))
        report = soak(options, stage, model, postgres, Progress().tell)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / "report.json").write_text(json.dumps(report.to_json(), indent=1))
            events = sorted(Log(dsn).every(), key=lambda event: (event.at, event.session_id, event.seq))
            (keep / "events.jsonl").write_text("".join(json.dumps(event.to_wire()) + "\n" for event in events))
        return report


def _keep(target: Path, directory: Path, head: Head, postgres: PostgresServer | None) -> None:
    target.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target / "logs", ignore_errors=True)
    if postgres is not None:
        (target / "postgres.log").write_text(postgres.log())
    shutil.copytree(head.logs(), target / "logs", dirs_exist_ok=True)


class Progress:
    """One line on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown_at = 0.0

    def tell(self, text: str) -> None:
        """Show how far it is."""
        if self._terminal:
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._shown_at > 20:
            self._shown_at = time.monotonic()
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
