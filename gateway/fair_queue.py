"""A queue that is fair between trees. Plain data: no clock, no tasks."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Start-time fair queueing: each flow gets of what passes in proportion to its weight, while it has items here.

    Guarantees: of two flows that both have items here all the time, the work done, divided by the weight, differs at no
    time by more than the cost of one item of each, divided by its weight. Nothing waits for ever: an item is passed by
    work of a bounded sum only. Within a flow, first come, first served.
    """

    def __init__(self) -> None:
        self._flows: dict[str, deque[tuple[Item, float]]] = {}
        self._order: list[tuple[float, int, str]] = []
        self._ends: dict[str, float] = {}
        self._now = 0.0
        self._number = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        return (item for flow in self._flows.values() for item, _ in flow)

    def add(self, flow: str, item: Item, cost: float) -> None:
        """Queue an item at the end of its flow.

        Args:
            cost: of the item, divided by the flow's weight.
        """
        self._count += 1
        if flow in self._flows:
            self._flows[flow].append((item, cost))
            return
        self._flows[flow] = deque([(item, cost)])
        self._push(flow, max(self._now, self._ends.pop(flow, 0.0)))

    def add_first(self, flow: str, item: Item) -> None:
        """Put an item back, before all others of its flow, which has paid for it already."""
        self._count += 1
        if flow in self._flows:
            self._flows[flow].appendleft((item, 0.0))
            return
        self._flows[flow] = deque([(item, 0.0)])
        self._push(flow, self._now)

    def peek(self) -> Item:
        """The item whose turn it is."""
        return self._flows[self._order[0][2]][0][0]

    def pop(self) -> Item:
        """Take it."""
        start, _, flow = heapq.heappop(self._order)
        items = self._flows[flow]
        item, cost = items.popleft()
        self._count -= 1
        self._now = max(self._now, start)
        if items:
            self._push(flow, max(start + cost, self._ends.pop(flow, 0.0)))
            return item
        del self._flows[flow]
        self._ends[flow] = max(start + cost, self._ends.get(flow, 0.0))
        if len(self._ends) > 2 * len(self._flows) + 64:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        return item

    def discard(self, flow: str, item: Item) -> None:
        """Take an item out of turn, if it is here: nobody waits for it any more."""
        items = self._flows.get(flow, deque())
        for place, (found, _) in enumerate(items):
            if found is item:
                del items[place]
                self._count -= 1
                break
        if flow in self._flows and not items:
            del self._flows[flow]
            start = next(start for start, _, name in self._order if name == flow)
            self._order = [entry for entry in self._order if entry[2] != flow]
            heapq.heapify(self._order)
            self._ends[flow] = start  # it has used nothing, and gains nothing by having left

    def _push(self, flow: str, start: float) -> None:
        self._number += 1
        heapq.heappush(self._order, (start, self._number, flow))
