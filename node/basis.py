"""What every part of a node service works with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from understudy.errors import StaleGeneration
from understudy.observability.metrics import Metrics
from understudy.prices import Price
from understudy.profiles import Profiles
from understudy.store.db.engine import Database, now
from understudy.store.journal import Committed, Journal
from understudy.supervisor.groups import decide_end
from understudy.tasks import Tasks

from .homes import Homes
from .reading import Reading

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeConfig:
    """What a node service is started with.

    Attributes:
        host: the node's address, for whoever wants its metrics from elsewhere.
        serves_metrics: whether there is an HTTP server for them.
        prices: of models, for profiles that have none of their own.
        command_directory: of commands in the background; empty where there can be none.
    """

    store: str
    namespace: str
    node_id: str
    writer: str
    metrics_port: int = 0
    span_directory: str = ""
    schema_policy: str = "auto"
    host: str = "127.0.0.1"
    telemetry: Mapping[str, str] = field(default_factory=dict)
    serves_metrics: bool = True
    prices: Mapping[str, Price] = field(default_factory=dict)
    command_directory: str = ""


class NodeBasis:
    """A node service as its parts see it: its store, whom it acts for, and what it does in the background.

    Args:
        committed: called with each commit.

    Attributes:
        holder: what names this service in the store while it lives.
        homes: where sessions are at home.
        profiles: the model profiles that are known here.
        metrics: of the events committed here.
        supervisor_heard: when a supervisor last called (monotonic); None before the first time.
    """

    def __init__(self, config: NodeConfig, committed: Callable[[Committed], None]) -> None:
        self.config = config
        self.database = Database(config.store)
        self.journal = Journal(self.database, config.namespace, config.writer, committed, decide_end=decide_end)
        self.reading = Reading(self.database, config.namespace)
        self.holder = f"{config.writer}#{now()}"
        self.homes = Homes(config.node_id, lambda: bool(self.generation))
        self.profiles = Profiles(config.prices)
        self.metrics = Metrics()
        self.supervisor_heard: float | None = None
        self._tasks = Tasks(log)

    @property
    def generation(self) -> int:
        """The supervisor's generation that this service acts for; 0: it activates nothing."""
        return self.journal.generation

    @property
    def activates(self) -> bool:
        """Whether sessions are given to frames here: not without a generation, and not while the node is drained."""
        return self.homes.drain is None and bool(self.generation)

    def stale(self, error: StaleGeneration) -> None:
        """Another supervisor owns the store: activate nothing more, unless it has called here already."""
        if self.generation and error.details.get("generation") == self.generation:
            log.warning("generation %d lost the store", self.generation)
            self.journal.generation = 0

    def spawn_task(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run something in the background until the service is closed."""
        self._tasks.spawn(coroutine)
