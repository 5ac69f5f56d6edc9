"""A goal's run as a command follows it: with its rounds and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from understudy.errors import StoreUnreachable
from understudy.events import ChildSpawned, Event
from understudy.workflows import VERDICT

from .following import Following

if TYPE_CHECKING:
    from ..client.results import RunResult


@dataclass
class GoalFollowing(Following):
    """A goal's run, followed with its verdicts: each is published before the next round begins."""

    command: ClassVar[str] = "goal"
    _shown: int = 0

    def result(self, timeout: float | None = None) -> RunResult | None:
        """See `Following`."""
        found = super().result(timeout)
        self._tell()
        return found

    def _show(self, event: Event) -> None:
        if isinstance(event, ChildSpawned):
            self._tell()
        super()._show(event)

    def _tell(self) -> None:
        """Show the verdicts that have come."""
        try:
            status = self.session.workflow_status()
        except StoreUnreachable:  # they are shown with the next ones
            return
        if status.run_id != self.run.run_id:
            return
        while (verdict := status.published.get(f"{VERDICT}{self._shown + 1}")) is not None:
            self._shown += 1
            self.screen.note(*verdict_line(self._shown, verdict))


def verdict_line(number: int, verdict: dict[str, Any]) -> tuple[str, str]:
    """What people see of a verdict, and in which style."""
    reason = " ".join(str(verdict["reason"]).split())
    held = "met" if verdict["met"] else "not met"
    return f"= round {number}: {held}{f': {reason}' if reason else ''}", "green" if verdict["met"] else "yellow"
