"""How long Ray's head has not answered: asked in a thread, read without waiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from understudy.cluster.ray import head_watch
from understudy.cluster.ray.head_watch import HeadWatch
from understudy.node.service_link import NoHead

PATIENCE = 20.0


class Head:
    """A head that answers what it is asked as a test says, one question after the other."""

    def __init__(self) -> None:
        self.asked: queue.Queue[float] = queue.Queue()
        self.answers: queue.Queue[Exception | None] = queue.Queue()
        self.threads: set[str] = set()
        self.now = 100.0

    def ask(self, timeout: float) -> None:
        self.threads.add(threading.current_thread().name)
        self.asked.put(timeout)
        answer = self.answers.get(timeout=PATIENCE)
        if answer is not None:
            raise answer

    def answer(self, error: Exception | None = None) -> None:
        """Answer the question that is open, and wait until the next one is."""
        self.answers.put(error)
        self.asked.get(timeout=PATIENCE)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    """One that nobody has asked yet; its watch has the clock `head.now`."""
    found = Head()
    monkeypatch.setattr(head_watch, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


@pytest.fixture
def watch(head: Head) -> Iterator[HeadWatch]:
    """Has asked its first question, which is open."""
    found = HeadWatch(head.ask, period=0.001)
    head.asked.get(timeout=PATIENCE)
    yield found
    found.close()
    head.answers.put(None)


def test_a_head_that_answers_is_not_silent(head: Head, watch: HeadWatch) -> None:
    """Given an answer to each question, then what lies between them is no silence; it is asked in a thread."""
    for _ in range(3):
        head.answer()
        assert watch.silence() == 0
        head.now += 5
        assert watch.silence() == 5
    assert head.threads == {"understudy-head"}


@pytest.mark.parametrize("error", [TimeoutError("too late"), RuntimeError("whatever Ray raises")])
def test_silence_is_counted_from_the_first_question_without_an_answer(
    head: Head, watch: HeadWatch, error: Exception
) -> None:
    """Given questions that fail, whatever the error, then the silence goes on from the first one; with the next answer
    it is over."""
    for _ in range(3):
        head.now += 10
        head.answer(error)
    assert watch.silence() == 30
    head.answer()
    assert watch.silence() == 0


def test_without_a_cluster_nobody_is_silent() -> None:
    """Given a node service that is in no cluster of Ray's, then its head always answers."""
    assert NoHead().silence() == 0
