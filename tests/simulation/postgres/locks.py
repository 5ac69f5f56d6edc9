"""Locks on rows, transactions and numbers: who holds which, who waits in which order, and who waits in a circle."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from .host import Signal

SHARE, EXCLUSIVE = 1, 2


class Owner:
    """Who holds locks: a transaction."""

    def __init__(self) -> None:
        self.locks: dict[Hashable, Lock] = {}
        self.waiting: Wait | None = None


class Wait:
    """One owner that waits for one lock.

    Attributes:
        since: when it began to wait for whom it waits for now (microseconds).
        searched: it has looked whether it is in a deadlock, since then.
    """

    __slots__ = ("granted", "key", "lock", "mode", "owner", "reason", "searched", "signal", "since")

    def __init__(self, owner: Owner, key: Hashable, lock: Lock, mode: int, signal: Signal, since: int) -> None:
        self.owner = owner
        self.key = key
        self.lock = lock
        self.mode = mode
        self.signal = signal
        self.since = since
        self.searched = False
        self.granted = False
        self.reason = lock.reason(self)


class Lock:
    """Its holders, and who waits, in order. On a row, who wants to share it is let in as soon as all others share it,
    whoever waits; elsewhere only if nobody waits.
    """

    __slots__ = ("holders", "of_row", "queue")

    def __init__(self, of_row: bool) -> None:
        self.holders: dict[Owner, int] = {}
        self.queue: list[Wait] = []
        self.of_row = of_row

    def in_the_way(self, owner: Owner, mode: int) -> list[Owner]:
        """The other holders that exclude this mode."""
        return [other for other, held in self.holders.items() if other is not owner and EXCLUSIVE in (held, mode)]

    def is_free(self, owner: Owner, mode: int) -> bool:
        """Whether a newcomer gets it at once."""
        if self.in_the_way(owner, mode):
            return False
        return owner in self.holders or not self.queue or (self.of_row and mode == SHARE)

    def blockers(self, wait: Wait) -> list[Owner]:
        """Whom it waits for; those that wait before it come first."""
        ahead = self.queue[: self.queue.index(wait)] if wait in self.queue else self.queue
        first = [] if wait.owner in self.holders else [w.owner for w in ahead if EXCLUSIVE in (w.mode, wait.mode)]
        return first + self.in_the_way(wait.owner, wait.mode)

    def reason(self, wait: Wait) -> tuple[bool, Owner | None]:
        """Which single wait of PostgreSQL's own this is: for its turn, or for the end of a transaction."""
        holders = self.in_the_way(wait.owner, wait.mode)
        blockers = self.blockers(wait)
        if not self.of_row or len(blockers) > len(holders):
            return False, None
        return True, blockers[0] if blockers else None


class Locks:
    """All locks of a server.

    Args:
        now: microseconds.
        granted: called when somebody who waits has its lock.
    """

    def __init__(self, now: Callable[[], int], granted: Callable[[Wait], None]) -> None:
        self._now = now
        self._granted = granted
        self._locks: dict[Hashable, Lock] = {}

    def take(self, owner: Owner, key: Hashable, mode: int, signal: Callable[[], Signal]) -> Wait | None:
        """Take a lock, or begin to wait for it. Rows have numbers as keys."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = Lock(of_row=type(key) is int)
        elif lock.holders.get(owner, 0) >= mode:
            return None
        if lock.is_free(owner, mode):
            lock.holders[owner] = mode
            owner.locks[key] = lock
            return None
        wait = Wait(owner, key, lock, mode, signal(), self._now())
        if owner in lock.holders:  # it would wait for those that wait for it
            lock.queue.insert(0, wait)
        else:
            lock.queue.append(wait)
        owner.waiting = wait
        return wait

    def try_to_take(self, owner: Owner, key: Hashable, mode: int) -> bool:
        """Take a lock if that needs no waiting."""
        lock = self._locks.get(key)
        if lock is not None and lock.holders.get(owner, 0) < mode and not lock.is_free(owner, mode):
            return False
        self.take(owner, key, mode, signal=_never)
        return True

    def end_of(self, other: Owner, owner: Owner, signal: Callable[[], Signal]) -> Wait | None:
        """Begin to wait for the end of another owner."""
        if other not in self._locks:
            lock = self._locks[other] = other.locks[other] = Lock(of_row=True)
            lock.holders[other] = EXCLUSIVE
        return self.take(owner, other, SHARE, signal)

    def give_up(self, wait: Wait) -> None:
        """Wait no longer."""
        wait.owner.waiting = None
        wait.lock.queue.remove(wait)
        self._settle(wait.key, wait.lock)

    def release(self, owner: Owner, key: Hashable) -> None:
        """Give one lock back."""
        lock = owner.locks.pop(key)
        del lock.holders[owner]
        self._settle(key, lock)

    def release_all(self, owner: Owner) -> None:
        """Give everything back, in the order in which it was taken."""
        while owner.locks:
            self.release(owner, next(iter(owner.locks)))

    def _settle(self, key: Hashable, lock: Lock) -> None:
        """Give a lock to those whose turn it is."""
        while lock.queue and not lock.in_the_way(lock.queue[0].owner, lock.queue[0].mode):
            wait = lock.queue.pop(0)
            wait.granted, wait.owner.waiting = True, None
            lock.holders[wait.owner] = wait.mode
            wait.owner.locks[key] = lock
            self._granted(wait)
        for wait in lock.queue:
            reason = lock.reason(wait)
            if reason != wait.reason:
                wait.reason, wait.since, wait.searched = reason, self._now(), False
        if not lock.holders and not lock.queue:
            self._locks.pop(key, None)

    def is_in_deadlock(self, wait: Wait) -> bool:
        """Whether an owner waits, by way of others, for itself."""
        seen: set[int] = set()
        todo = [wait]
        while todo:
            current = todo.pop()
            for owner in current.lock.blockers(current):
                if owner is wait.owner:
                    return True
                if owner.waiting is not None and id(owner) not in seen:
                    seen.add(id(owner))
                    todo.append(owner.waiting)
        return False

    def count(self) -> int:
        """How many locks are held."""
        return sum(len(lock.holders) for lock in self._locks.values())


def _never() -> Signal:
    raise AssertionError("it does not wait")
