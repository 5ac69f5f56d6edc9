"""What of a plan waits for a moment that is known only while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

from understudy.events import Event

from .plan import Action, Fault, Trigger

Waiting = TypeVar("Waiting", Action, Fault)


class Moments(Generic[Waiting]):
    """Counts events, in all and by tree, and gives out each part of a plan when its moment has come."""

    def __init__(self, planned: Iterable[Waiting]) -> None:
        self._waiting = [item for item in planned if item.on is not None]
        self._seen: Counter[tuple[str, str]] = Counter()

    def come(self, event: Event) -> list[Waiting]:
        """An event was committed: what shall happen now, once."""
        moments = []
        for root_id in ("", event.root_id or event.session_id):
            self._seen[event.type, root_id] += 1
            moments.append(Trigger(event.type, self._seen[event.type, root_id], root_id))
        found = [item for item in self._waiting if item.on in moments]
        self._waiting = [item for item in self._waiting if item.on not in moments]
        return found
