"""Kills on the way, and what the logs of sessions say of them afterwards: for examples that show what a crash costs."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import psutil

from understudy.cluster.client.results import SessionInfo
from understudy.events import Event, ModelCallCompleted, SessionActivated, SessionCrashed, ToolFinished
from understudy.messages import Message, Usage
from understudy.spec import RestartPolicy

ACT_SECONDS = 2.0
"""So long a kill waits for a session that acts: one that waits for the model has nothing to restore yet."""

KILL_GAP_SECONDS = 0.4
KILL_WINDOW_SECONDS = 2.0
"""Kills come this far apart on average, but all of them should fit into the window: a survey takes few seconds."""

FRAME_TITLE = "ray::FrameActor"
"""How Ray titles the process of a session actor."""

RESTART = RestartPolicy(max_restarts=1_000, stuck_after=20, backoff_max=1.0)
"""Deaths in an example are somebody's experiment: it takes more of them than an agent usually should."""


@dataclass
class Count:
    """What the logs of sessions say, summed up."""

    crashes: int = 0
    restore_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    tokens_redone: int = 0
    tool_calls: int = 0
    tool_calls_repeated: int = 0
    interrupted: int = 0
    messages_lost: int = 0

    def add(
        self, session_id: str, events: list[Event], messages: list[Message], killed: dict[int, int] | None = None
    ) -> None:
        """Add one session's whole log, running or not. `killed`: see `Chaos`."""
        answered: set[str] = set()
        finished: set[str] = set()
        since = 0
        for event in events:
            if isinstance(event, SessionCrashed):
                self.crashes += 1
                since = (killed or {}).get(event.pid, 0)
            elif isinstance(event, SessionActivated) and event.cause == "resume":
                self.restore_ms.append((event.at - since if since else event.down) / 1000)
            elif isinstance(event, ModelCallCompleted):
                used = Usage.from_wire(event.usage).total_tokens
                waited_for = event.request_key.rpartition("/")[0]  # the same for every attempt
                self.tokens += used
                self.tokens_redone += used if event.redone or waited_for in answered else 0
                answered.add(waited_for)
            elif isinstance(event, ToolFinished):
                self.tool_calls += event.call_id not in finished
                self.interrupted += event.outcome == "interrupted"
                self.tool_calls_repeated += max(0, event.executions - 1) + (event.call_id in finished)
                finished.add(event.call_id)
        places = {event.seq for event in events} | {message.seq for message in messages}
        self.messages_lost += max(places, default=0) - len(places)
        results = {message.tool_call_id for message in messages if message.role == "tool"}
        asked = [call.call_id for message in messages for call in message.tool_calls]
        self.messages_lost += sum(call_id not in results for call_id in asked)


@dataclass
class Chaos:
    """Kills session actors at random moments while their sessions work: of the lead as well as of its sub-agents, and
    rather while they act than while they wait for the model.

    A session is hit at most once while it works on a round, and once while it waits for the model: faster than it gets
    on, kills would only show that a process that is always killed does nothing.

    Attributes:
        left: kills still to do.
        nodes: ids of nodes whose processes may be killed: those of this machine.
        killed: when each process was killed (microseconds since 1970), by its pid; each at most once.
    """

    left: int
    random: random.Random
    nodes: set[str]
    killed: dict[int, int] = field(default_factory=dict)
    _hit: set[tuple[str, int, str]] = field(default_factory=set)
    _untouched: set[bool] = field(default_factory=lambda: {True, False})
    """The kinds, lead (True) and sub-agent, of which none was killed yet."""
    _due: float = 0.0
    _gap: float = 0.0

    def __post_init__(self) -> None:
        self._gap = min(KILL_GAP_SECONDS, KILL_WINDOW_SECONDS / max(1, self.left))
        self._wait()

    def _wait(self) -> None:
        self._due = time.monotonic() + self._gap * self.random.uniform(0.5, 1.5)

    def _prefers(self, info: SessionInfo) -> bool:
        """Whether it acts, and is of a kind that was not hit yet, where the kills left are no more than these kinds."""
        enough = self.left > len(self._untouched) or (info.parent_id is None) in self._untouched
        return enough and info.status == "running"

    def strike(self, tree: list[SessionInfo]) -> None:
        """Kill one of the tree's actors, if a kill is due and somebody is there to be killed."""
        late = time.monotonic() - self._due
        if self.left <= 0 or late < 0:
            return
        victims = [
            info
            for info in tree
            if info.status in ("running", "waiting_for_model")
            and info.node_id in self.nodes
            and info.actor_pid not in self.killed
            and (info.id, info.round, info.status) not in self._hit
            and (late >= ACT_SECONDS or self._prefers(info))
        ]
        self.random.shuffle(victims)
        victims.sort(key=lambda info: info.status != "running")
        for info in victims:
            now = time.time_ns() // 1000
            if info.actor_pid is not None and kill_frame(info.actor_pid):
                self.killed[info.actor_pid] = now
                self._hit.add((info.id, info.round, info.status))
                self._untouched.discard(info.parent_id is None)
                self.left -= 1
                self._wait()
                return


def kill_frame(pid: int) -> bool:
    """SIGKILL a session actor's process; False, and nothing done, if the pid is not one's."""
    if pid <= 1:
        return False
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        if not command or not command[0].startswith(FRAME_TITLE):
            return False
        process.kill()  # psutil checks that the pid was not given to another process meanwhile
    except psutil.Error:
        return False
    return True
