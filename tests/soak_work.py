"""What the sessions of the soak do: tasks that say what the model shall ask for, and so what must come of them."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from understudy.identifiers import call_identifier, child_identifier
from understudy.messages import INTERRUPTED, Message
from understudy.testing.offline import Reply
from understudy.testing.policies import content_text

SPAWN = "spawn_agent"
THINKING = (0.1, 1.2)
"""Seconds that the model takes for an answer."""

TOOL_SECONDS = (0.0, 0.4)
CHILD_RUN = "task"
"""Run id of a sub-agent's one input."""


@dataclass(frozen=True)
class Call:
    """One tool call: `act` or `look` under a name that nobody else uses, or a sub-agent with a task of its own."""

    tool: str
    name: str
    seconds: float = 0.0
    task: Task | None = None

    def arguments(self) -> dict[str, Any]:
        """As the model writes them."""
        return {"task": self.task.text()} if self.task is not None else {"name": self.name, "seconds": self.seconds}


@dataclass(frozen=True)
class Task:
    """The input of a run: in each round so many calls after so much thinking, at last an answer with all results."""

    name: str
    rounds: tuple[tuple[Call, ...], ...]
    thinking: tuple[float, ...]

    def text(self) -> str:
        """The input; the model reads from it what it shall do."""
        calls = [[[call.tool, call.arguments()] for call in calls] for calls in self.rounds]
        return json.dumps({"name": self.name, "rounds": calls, "thinking": self.thinking})

    def calls(self) -> Iterator[Call]:
        """The calls of all rounds, not those of sub-agents."""
        for calls in self.rounds:
            yield from calls


def make_task(chosen: random.Random, name: str, *, may_spawn: bool = True) -> Task:
    """Two to four rounds of one to three calls; now and then a sub-agent does a part."""
    rounds = []
    for number in range(chosen.randint(2, 4) if may_spawn else chosen.randint(1, 2)):
        calls = []
        for index in range(chosen.randint(1, 3)):
            call_name = f"{name}.{number}.{index}"
            if may_spawn and chosen.random() < 0.08:
                calls.append(Call(SPAWN, call_name, task=make_task(chosen, f"{call_name}.child", may_spawn=False)))
            else:
                tool = chosen.choice(("act", "look"))
                calls.append(Call(tool, call_name, round(chosen.uniform(*TOOL_SECONDS), 3)))
        rounds.append(tuple(calls))
    thinking = tuple(round(chosen.uniform(*THINKING), 3) for _ in range(len(rounds) + 1))
    return Task(name, tuple(rounds), thinking)


class Model:
    """The endpoint's policy: does what the task in the last user message says, and counts who asks for what.

    Attributes:
        asked: requests by task and round (from 1).
    """

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> Reply:
        messages = body["messages"]
        start = max(index for index, message in enumerate(messages) if message["role"] == "user")
        task = json.loads(content_text(messages[start]))
        following = messages[start + 1 :]
        done = sum(message["role"] == "assistant" for message in following)
        with self._lock:
            self.asked[task["name"], done + 1] += 1
        delay = task["thinking"][done]
        if done < len(task["rounds"]):
            return Reply(tool_calls=tuple((tool, arguments) for tool, arguments in task["rounds"][done]), delay=delay)
        results = [content_text(message) for message in following if message["role"] == "tool"]
        return Reply(text=answer(task["name"], results), delay=delay)


def answer(name: str, results: list[str]) -> str:
    """A task's last words: the results of all its calls, those that were cut off included."""
    return f"{name}: {' | '.join(results)}"


@dataclass(frozen=True)
class Expected:
    """What a run must have led to.

    Attributes:
        messages: role and content of each of its messages; of one with tool calls also their names and arguments.
    """

    text: str
    messages: tuple[tuple[Any, ...], ...]


def expected(task: Task, session_id: str, run_id: str, interrupted: set[tuple[str, str]]) -> Expected:
    """What a computation without crashes gives, but that calls which were cut off in doubt say so.

    Args:
        interrupted: session and call id of those calls.
    """
    messages: list[tuple[Any, ...]] = [("user", task.text())]
    results = []
    for number, calls in enumerate(task.rounds, 1):
        messages.append(("assistant", "", tuple((call.tool, call.arguments()) for call in calls)))
        for index, call in enumerate(calls):
            call_id = call_identifier(run_id, number, index)
            if call.task is not None:
                result = expected(call.task, child_identifier(session_id, call_id), CHILD_RUN, interrupted).text
            elif (session_id, call_id) in interrupted:
                result = INTERRUPTED
            else:
                result = f"did {call.name}"
            results.append(result)
            messages.append(("tool", result))
    text = answer(task.name, results)
    return Expected(text, (*messages, ("assistant", text)))


def seen(message: Message) -> tuple[Any, ...]:
    """A message in the form of `Expected.messages`."""
    if message.tool_calls:
        calls = tuple((call.name, json.loads(call.arguments)) for call in message.tool_calls)
        return message.role, message.text, calls
    return message.role, message.text


def sessions_of(task: Task, session_id: str, run_id: str) -> Iterator[tuple[str, str, Task]]:
    """The session and run of a task and of all tasks below it."""
    yield session_id, run_id, task
    for number, calls in enumerate(task.rounds, 1):
        for index, call in enumerate(calls):
            if call.task is not None:
                child_id = child_identifier(session_id, call_identifier(run_id, number, index))
                yield from sessions_of(call.task, child_id, CHILD_RUN)
