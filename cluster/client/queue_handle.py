"""`Queue`: which runs begin when, as its clients see it."""

from __future__ import annotations

from understudy.errors import InvalidInput
from understudy.queues import NewQueue, QueuePlace, Rate, name_problem
from understudy.reads import QueueInfo

from .client_connection import ClientConnection
from .method import client_method


class Queue:
    """A queue by its name; whether it exists shows when it is used."""

    def __init__(self, connection: ClientConnection, name: str) -> None:
        problem = name_problem(name)
        if problem is not None:
            raise InvalidInput(problem)
        self._connection = connection
        self.name = name

    @client_method
    async def info(self) -> QueueInfo:
        """How it stands. Raises `UnknownQueue`."""
        return await self._connection.read(QueueInfo, "queue", self.name)

    @client_method
    async def pause(self) -> bool:
        """Have none of its runs begin; those at work go on. True if it was not paused. Raises `UnknownQueue`."""
        return await self._connection.ask_once(bool, "pause_queue", self.name, True)

    @client_method
    async def resume(self) -> bool:
        """Have its runs begin again; True if it was paused. Raises `UnknownQueue`."""
        return await self._connection.ask_once(bool, "pause_queue", self.name, False)

    @client_method
    async def remove(self) -> bool:
        """Remove it; True if there was one. Raises `Conflict`: runs of it wait or are at work, or a schedule
        names it."""
        return await self._connection.ask_once(bool, "remove_queue", self.name)

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"


def wanted(name: str, concurrency: int | None, per_key: int | None, rate: Rate | None) -> NewQueue | None:
    """The queue that a client wants; None if it names no limit. Raises `InvalidInput`."""
    if concurrency is None and per_key is None and rate is None:
        return None
    for what, number in (("concurrency", concurrency), ("per_key", per_key)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise InvalidInput(f"{what} must be a whole number.")
    if rate is not None and not isinstance(rate, Rate):
        raise InvalidInput(f"rate must be a Rate, as Rate(10, seconds=60), and not {type(rate).__name__}.")
    try:
        return NewQueue(name=name, concurrency=concurrency or 0, per_key=per_key or 0, rate=rate)
    except ValueError as error:
        raise InvalidInput(str(error)) from None


def queue_place(queue: str | QueuePlace | None, key: str = "", priority: int = 0) -> QueuePlace | None:
    """Where a run waits, as a client says it. Raises `InvalidInput`."""
    if queue is None:
        if key or priority:
            raise InvalidInput("key and priority are of a queue: give queue=… as well.")
        return None
    if isinstance(queue, QueuePlace):
        return queue
    if not isinstance(key, str) or not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidInput("key must be a text, and priority a whole number.")
    try:
        return QueuePlace(queue, key, priority)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
