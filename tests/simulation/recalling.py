"""Memory providers in the simulation: which agents have them, and what must hold of what they are asked and say."""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.actors.memory import FOOT, HEAD, LEFT_OUT
from understudy.actors.providers import RECALL, REMEMBER, MemoryContext
from understudy.agents import CHILD
from understudy.commands import COMMAND
from understudy.estimates import BYTES_PER_TOKEN
from understudy.handoffs import ORIGIN as HANDED_OFF
from understudy.identifiers import COPIED
from understudy.messages import FOLD, MEMORY
from understudy.store.db.statements import EVENT, MESSAGE, RUN, SESSION

from .providers import FAILING, PROVIDERS, TIMEOUT, how

if TYPE_CHECKING:
    from .invariants import Invariants
    from .plan import Work
    from .world import World

SECTION = re.compile(r"Recalled by (\S+):\n(.*?)\n(?=Recalled by |</memory>)", re.DOTALL)
NO_ROOM = 150
"""So many bytes may be free where a text was left out: hardly anything is not shown."""

NEW = ("news", "long", "half", "kills")
"""What recalls a text that nobody has seen before."""

Asked = tuple[str, str, str]
"""What a provider does, its name, and the call's key."""


def some_recalling(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans it is as `recalling` says."""
    if chosen.random() >= 0.25:
        return work
    return tuple(
        replace(item, spec=recalling(chosen, item.spec)) if chosen.random() < 0.8 else item for item in work
    )  # fmt: skip


def recalling(chosen: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """The same specification; its agents have memory providers."""
    agents = {
        name: recalling(chosen, agent) if chosen.random() < 0.6 else agent for name, agent in spec["agents"].items()
    }
    names = chosen.sample(sorted(PROVIDERS), chosen.choice((1, 1, 2, 3)))
    memory = {
        "scopes": ["session"], "project": None, "share": 0.1, **spec.get("memory", {}),
        "max_tokens": chosen.choice((200, 500)), "timeout": TIMEOUT, "providers": [PROVIDERS[name] for name in names],
    }  # fmt: skip
    return {**spec, "agents": agents, "memory": memory}


@dataclass
class Call:
    """A call of a provider.

    Attributes:
        number: how often it was made by now.
        epoch: of the activation that made it; 0 for one that nobody knows.
        found: what it returned, if it has.
    """

    asked: Asked
    context: MemoryContext
    number: int
    epoch: int
    found: list[Any] = field(default_factory=list)

    @property
    def how(self) -> str:
        """What it does."""
        does, name, key = self.asked
        return how(name, does, key)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return (0.0, 0.0, 0.1, 1.0)[zlib.crc32(repr(self.asked).encode()) % 4]

    @property
    def text(self) -> str:
        """What it says, if it says something new."""
        return f"{self.asked[1]} knows of {self.asked[2]}, {self.number}"


class Recalled:
    """What providers are asked, and say."""

    def __init__(self, world: World, invariants: Invariants) -> None:
        self._world = world
        self._invariants = invariants
        self._calls: dict[Asked, list[Call]] = defaultdict(list)
        self._open: dict[Asked, int] = {}

    def forget(self, session_ids: set[str]) -> None:
        """Sessions were removed: others may have their ids. What providers have said stays known."""
        self._open = {asked: at for asked, at in self._open.items() if asked[2].partition("/")[0] not in session_ids}

    def goes_on(self, session_id: str, run_id: str) -> None:
        """A model is asked: what was recalled is committed, and a run whose end had been remembered was steered."""
        self._open = {asked: at for asked, at in self._open.items() if asked[2] != f"{session_id}/{run_id}"}

    def begin(self, name: str, does: str, context: MemoryContext) -> Call:
        """A provider is called: about what its run says, before that ends; and it learns whether it may have been
        called before, unless by a process that was replaced by then."""
        asked, process = (does, name, context.call_key), self._world.scheduler.current
        window = self._invariants.window_of(process)
        call = Call(asked, context, len(self._calls[asked]) + 1, window.epoch if window is not None else 0)
        self._calls[asked].append(call)
        self._world.counts[does] += 1
        self._world.note(f"{name} is to {does} {context.call_key}{' again' if context.redone else ''}: {call.how}")
        if window is None or not self._invariants.is_current(context.session_id):
            return call
        before = self._open.get(asked)
        # What was folded is recalled again by whoever has done so at the beginning.
        if before is not None and not context.redone and (does == REMEMBER or before != call.epoch):
            self._violated(f"{name} is to {does} {context.call_key} again, without `redone`")
        self._open[asked] = call.epoch
        self._check_run(does, context)
        return call

    def _check_run(self, does: str, context: MemoryContext) -> None:
        columns = select(RUN.c.content, RUN.c.started_at, RUN.c.finished_at)
        where = (RUN.c.session_id == context.session_id, RUN.c.run_id == context.run_id)
        with self._world.store.committed() as connection:
            run = connection.execute(columns.where(*where)).first()
        # One that waits may be cancelled while a process is about to begin it.
        if run is None or (run.finished_at and run.started_at):
            self._violated(f"a provider is to {does} {context.call_key}, which {'has ended' if run else 'is no run'}")
        elif does == RECALL and not context.text.startswith(run.content):
            self._violated(f"a provider is to recall {context.text[:60]!r} for the input {run.content[:60]!r}")

    def end(self, call: Call, found: Any) -> Any:
        """It returns: its process is at no other activation."""
        process = self._world.scheduler.current
        self._invariants.check_process(call.context.call_key, call.context.session_id, call.epoch, process)
        call.found.append(found)
        return found

    def _violated(self, text: str) -> None:
        self._invariants.violated(text)

    # At the end.

    def violations(self, connection: Any, counts: Counter[str]) -> Iterator[str]:
        """What an agent was shown its providers have said, for that run; it has its limit; what a provider has said is
        shown, and what it did wrong is reported. Each run is remembered before its end."""
        memories = {
            row.session_id: row.spec["memory"]
            for row in connection.execute(select(SESSION.c.session_id, SESSION.c.spec))
            if row.spec.get("memory", {}).get("providers")
        }
        said, logged = _by_run(connection, MESSAGE, MESSAGE.c.role), _by_run(connection, EVENT, EVENT.c.type)
        failures = {
            key: [event.body for event in events if event.type == "memory_failed"] for key, events in logged.items()
        }
        for (session_id, run_id), rows in said.items():
            if session_id not in memories or run_id.startswith(COPIED):
                continue
            key, memory, failed = f"{session_id}/{run_id}", memories[session_id], failures.get((session_id, run_id), [])
            shown = [row.body["content"] for row in rows if row.body.get("origin") == MEMORY]
            counts["shown"] += len(shown)
            rebuilt = sum(row.body.get("origin") in (FOLD, HANDED_OFF) for row in rows)
            recalls = sum(event.type == "memory_recalled" for event in logged.get((session_id, run_id), ()))
            if len(shown) != recalls or len(shown) > 1 + rebuilt:
                yield f"{key} shows its memory {len(shown)} times, the log {recalls}; it was rebuilt {rebuilt} times"
            for text in shown:
                yield from self._shown(key, text, memory)
            yield from self._begun(key, rows, shown, memory, failed)
            yield from self._failed(key, failed)
        columns = (RUN.c.session_id, RUN.c.run_id, RUN.c.text)
        for run in connection.execute(select(*columns).where(RUN.c.status == "completed", RUN.c.merged_into == "")):
            failed = [
                event.body for event in logged.get((run.session_id, run.run_id), ()) if event.type == "memory_failed"
            ]
            if run.session_id in memories:
                yield from self._remembered(run, memories[run.session_id], failed)

    def _shown(self, key: str, text: str, memory: dict[str, Any]) -> Iterator[str]:
        """A text that an agent was shown: by whom it is said to be it is, and it is no longer than it may be."""
        limit = memory["max_tokens"] * BYTES_PER_TOKEN
        if _size(text) > limit:
            yield f"{key} is shown {_size(text)} bytes, and {limit} are allowed"
        recalled, is_cut = 0, False
        for name, found in SECTION.findall(text):
            recalled += _size(f"Recalled by {name}:\n{found}\n")
            texts = [_presented(one) for call in self._calls[RECALL, name, key] for one in call.found]
            whole, is_short = found.removesuffix("…"), found.endswith("…")
            is_cut = is_cut or is_short
            if not any(one.startswith(whole) if is_short else one == found for one in texts):
                yield f"{key} is shown {found[:80]!r} of {name}, which has said {[one[:80] for one in texts]}"
        least = (limit - _size(HEAD) - _size(FOOT) - _size(LEFT_OUT)) // 2 - NO_ROOM // 2
        if is_cut and recalled < least:
            yield f"{key} is shown {recalled} bytes of what was recalled, cut, and at least {least} are for it"

    def _begun(
        self, key: str, rows: list[Any], shown: list[str], memory: dict[str, Any], failed: list[dict[str, Any]]
    ) -> Iterator[str]:
        """A run began: each provider was asked about its input, or all that were merged, and what it said is shown; or
        its failure is reported."""
        origins = ("", CHILD, COMMAND)
        inputs = list(takewhile(lambda row: row.role == "user" and row.body.get("origin", "") in origins, rows))
        if not inputs:
            return
        text = "\n\n".join(row.body["content"] for row in inputs)
        # Where nothing is shown, news of sub-agents that came while the providers were asked may be among them.
        is_all = len(rows) > len(inputs) and rows[len(inputs)].body.get("origin") == MEMORY
        for name in (one["name"] for one in memory["providers"] if RECALL in one["does"]):
            calls = self._calls[RECALL, name, key]
            done = [call.found[0] for call in calls if call.found]
            about = {call.context.text for call in calls}
            if calls and not (text in about if is_all else any(one and text.startswith(one) for one in about)):
                yield f"{key} began with {text[:60]!r}, and {name} was asked about {sorted(about)}"
            is_reported = any((one["provider"], one["what"]) == (name, RECALL) for one in failed)
            if is_reported:
                continue
            if not done:
                yield f"{key} has begun, and {name} was called {len(calls)} times, did not end, and is not said to fail"
                continue
            if calls[0].how in FAILING:
                yield f"{key}: {name} has failed ({calls[0].how}), and that is not reported"
            is_shown = any(name == one for text in shown for one, _ in SECTION.findall(text))
            is_full = any(memory["max_tokens"] * BYTES_PER_TOKEN - _size(text) < NO_ROOM for text in shown)
            if calls[0].how in NEW and not (is_shown or is_full):
                yield f"{key} is not shown what {name} recalls: {done}"

    def _failed(self, key: str, failed: list[dict[str, Any]]) -> Iterator[str]:
        """What is said to have failed has."""
        for one in failed:
            calls = self._calls[one["what"], one["provider"], key]
            late = one["error_message"].endswith("and was given up.")
            if not calls or not (late or calls[0].how in FAILING):
                yield f"{key}: {one} is reported, and its calls were {[call.how for call in calls]}"

    def _remembered(self, run: Any, memory: dict[str, Any], failed: list[dict[str, Any]]) -> Iterator[str]:
        """A completed run was remembered as it ended."""
        for name in (one["name"] for one in memory["providers"] if REMEMBER in one["does"]):
            calls = self._calls[REMEMBER, name, f"{run.session_id}/{run.run_id}"]
            of_end = [call for call in calls if (call.context.text, call.context.status) == (run.text, "completed")]
            is_reported = any((one["provider"], one["what"]) == (name, REMEMBER) for one in failed)
            if not of_end or not (is_reported or any(call.found for call in of_end)):
                texts = [(call.context.status, call.context.text[:60], call.how, call.found) for call in calls]
                yield f"{run.session_id}/{run.run_id} has ended: {run.text[:60]!r}; {name} was to remember {texts}"


def _by_run(connection: Any, table: Any, *columns: Any) -> dict[tuple[str, str], list[Any]]:
    """The rows of each run, in order."""
    statement = select(table.c.session_id, table.c.run_id, table.c.body, *columns)
    found: dict[tuple[str, str], list[Any]] = {}
    for row in connection.execute(statement.order_by(table.c.session_id, table.c.seq)):
        found.setdefault((row.session_id, row.run_id), []).append(row)
    return found


def _size(text: str) -> int:
    return len(text.encode())


def _presented(found: Any) -> str:
    """What a provider has returned, as it is shown."""
    return found.encode(errors="replace").decode().strip() if isinstance(found, str) else ""
