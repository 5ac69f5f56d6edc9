"""Locks on rows, transactions and numbers: who holds which, who waits in which order, and who waits in a circle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

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
        signal: set when it is worth to try again; another one each time.
        number: in the order in which waits began.
        since: when it began to wait for whom it waits for now (microseconds).
        searched: it has looked whether it is in a deadlock, since then.
        reason: which single wait of PostgreSQL's own this is: for its turn, or for the end of a transaction.
    """

    __slots__ = ("key", "lock", "mode", "number", "owner", "reason", "searched", "signal", "since")

    def __init__(self, owner: Owner, key: Hashable, lock: Lock, mode: int, number: int) -> None:
        self.owner = owner
        self.key = key
        self.lock = lock
        self.mode = mode
        self.number = number
        self.signal: Signal | None = None
        self.since = 0
        self.searched = False
        self.reason: tuple[bool, Owner | None] | None = None


class Lock:
    """Its holders, and who waits: a queue, and strays. These come to a row from an old version of it, which they have
    found before; PostgreSQL has them wait beside the queue.

    A row that nobody holds, or everybody shares who holds it, is taken by whoever comes first, also while others wait:
    they may not have noticed yet. Other locks are never taken past those that wait.
    """

    __slots__ = ("holders", "is_row", "queue", "strays")

    def __init__(self, is_row: bool) -> None:
        self.holders: dict[Owner, int] = {}
        self.queue: list[Wait] = []
        self.strays: list[Wait] = []
        self.is_row = is_row

    def in_the_way(self, owner: Owner, mode: int) -> list[Owner]:
        """The other holders that exclude this mode."""
        return [other for other, held in self.holders.items() if other is not owner and EXCLUSIVE in (held, mode)]

    def is_free(self, owner: Owner, mode: int) -> bool:
        """Whether a newcomer gets it at once."""
        held = self.holders.get(owner, 0)
        return held >= mode or (not self.in_the_way(owner, mode) and (self.is_row or held > 0 or not self.queue))

    def ahead(self, wait: Wait) -> list[Owner]:
        """Those whose turn is before a waiter's."""
        if wait.owner in self.holders or wait not in self.queue:  # others wait for a holder
            return []
        before = self.queue[: self.queue.index(wait)]
        return [other.owner for other in before if EXCLUSIVE in (other.mode, wait.mode)]

    def blockers(self, wait: Wait) -> list[Owner]:
        """Whom it waits for."""
        return self.ahead(wait) + self.in_the_way(wait.owner, wait.mode)


class Locks:
    """All locks of a server.

    Args:
        now: microseconds.
        woken: called when somebody who waits should try again, or find out again how long it may wait.
    """

    def __init__(self, now: Callable[[], int], woken: Callable[[Wait], None]) -> None:
        self._now = now
        self._woken = woken
        self._locks: dict[Hashable, Lock] = {}
        self.waits = 0

    def is_free(self, owner: Owner, key: Hashable, mode: int) -> bool:
        """Whether an owner has a lock, or would get it at once."""
        lock = self._locks.get(key)
        return lock is None or lock.is_free(owner, mode)

    def take(self, owner: Owner, key: Hashable, mode: int, *, strays: bool = False) -> Wait | None:
        """Take a lock, or begin to wait for it. Numbers of rows and owners are keys, and pairs for all else."""
        lock = self._lock(key)
        if lock.is_free(owner, mode):
            self._hold(owner, key, lock, mode)
            return None
        self.waits += 1
        owner.waiting = wait = Wait(owner, key, lock, mode, self.waits)
        self._enqueue(wait, strays=strays)
        return wait

    def end_of(self, other: Owner, owner: Owner) -> Wait | None:
        """Begin to wait for the end of another owner."""
        if other not in self._locks:
            self._hold(other, other, self._lock(other), EXCLUSIVE)
        return self.take(owner, other, SHARE)

    def try_again(self, wait: Wait, *, strays: bool = False) -> bool:
        """Take a lock that was waited for, if it is free and this one's turn."""
        lock = wait.lock = self._lock(wait.key)
        if lock.blockers(wait):
            if wait not in lock.queue:
                self._enqueue(wait, strays=strays)
            return False
        self._leave(wait)
        self._hold(wait.owner, wait.key, lock, wait.mode)
        self._wake(self._to_wake(wait.key, lock))
        return True

    def give_up(self, wait: Wait) -> None:
        """Wait no longer."""
        self._leave(wait)
        self._wake(self._to_wake(wait.key, wait.lock))

    def release(self, owner: Owner, key: Hashable) -> None:
        """Give one lock back."""
        self._wake(self._release(owner, key, changed=False))

    def release_all(self, owner: Owner, changed: Collection[int] = ()) -> None:
        """Give everything back.

        Args:
            changed: the rows that have a new version now, or are gone. Who waits for the old version looks for the new
                one then, and comes to that as any newcomer does.
        """
        self._wake([wait for key in list(owner.locks) for wait in self._release(owner, key, changed=key in changed)])

    def _lock(self, key: Hashable) -> Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = Lock(is_row=not isinstance(key, tuple))
        return lock

    def _hold(self, owner: Owner, key: Hashable, lock: Lock, mode: int) -> None:
        lock.holders[owner] = max(mode, lock.holders.get(owner, 0))
        owner.locks[key] = lock

    def _enqueue(self, wait: Wait, *, strays: bool) -> None:
        self._unlist(wait)
        (wait.lock.strays if strays else wait.lock.queue).append(wait)
        self._note_reason(wait)

    def _leave(self, wait: Wait) -> None:
        wait.owner.waiting = None
        self._unlist(wait)

    def _unlist(self, wait: Wait) -> None:
        for waits in (wait.lock.queue, wait.lock.strays):
            if wait in waits:
                waits.remove(wait)

    def _wake(self, waits: list[Wait]) -> None:
        for wait in sorted(waits, key=lambda wait: wait.number):
            self._woken(wait)

    def _release(self, owner: Owner, key: Hashable, *, changed: bool) -> list[Wait]:
        lock = owner.locks.pop(key)
        del lock.holders[owner]
        if changed:
            woken = [*lock.queue, *lock.strays]
            lock.queue, lock.strays = [], []
            self._forget_unused(key, lock)
            return woken
        return self._to_wake(key, lock)

    def _to_wake(self, key: Hashable, lock: Lock) -> list[Wait]:
        """Who may try again now, or waits for somebody else than before."""
        self._forget_unused(key, lock)
        waits = (*lock.queue, *lock.strays)
        return [wait for wait in waits if self._note_reason(wait) or not lock.blockers(wait)]

    def _forget_unused(self, key: Hashable, lock: Lock) -> None:
        if not lock.holders and not lock.queue and not lock.strays and self._locks.get(key) is lock:
            del self._locks[key]

    def _note_reason(self, wait: Wait) -> bool:
        """Note for whom it waits; if that is new, its limits start again, as PostgreSQL's do."""
        lock = wait.lock
        if not lock.is_row:
            reason: tuple[bool, Owner | None] = (False, None)
        elif lock.ahead(wait):
            reason = (True, None)
        else:
            reason = (False, next(iter(lock.in_the_way(wait.owner, wait.mode)), None))
        if reason == wait.reason:
            return False
        wait.reason, wait.since, wait.searched = reason, self._now(), False
        return True

    def is_in_deadlock(self, wait: Wait) -> bool:
        """Whether an owner waits, by way of others, for itself."""
        seen = {wait}
        todo = [wait]
        while todo:
            for owner in self._waits_for(todo.pop()):
                if owner is wait.owner:
                    return True
                if owner.waiting is not None and owner.waiting not in seen:
                    seen.add(owner.waiting)
                    todo.append(owner.waiting)
        return False

    def _waits_for(self, wait: Wait) -> list[Owner]:
        """Whom PostgreSQL knows that it waits for: of those that share a row it takes one after another."""
        if wait.reason is not None and wait.reason[1] is not None:
            return [wait.reason[1]]
        return wait.lock.blockers(wait)

    def count(self) -> int:
        """How many locks are held."""
        return sum(len(lock.holders) for lock in self._locks.values())
