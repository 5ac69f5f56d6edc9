"""A death at one point of a run: what sweeps over all points have in common."""

from __future__ import annotations

from . import kernel as k


class Deaths:
    """Lets `victim`, `frame` or `node`, die at point `at` of what happens from now on.

    Attributes:
        label: of the point; empty while nobody has died.
    """

    def __init__(self, kernel: k.Kernel, session_id: str, at: int, victim: str = "frame") -> None:
        self.kernel, self.session_id, self.at, self.victim = kernel, session_id, at, victim
        self.start = len(kernel.points)
        self.label = ""
        kernel.on_point = self.on_point

    @property
    def where(self) -> str:
        """The point, for messages."""
        return f"point {self.at} ({self.label})" if self.label else f"point {self.at}"

    def on_point(self, number: int, label: str, worker: k.Worker | None) -> None:
        if number - self.start != self.at:
            return
        self.label = label
        if self.victim == "node":
            self.kernel.kill_node()
            return
        worker = worker or self.kernel.holder(self.session_id) or next(iter(self.kernel.workers.values()))
        self.kernel.kill(worker)
