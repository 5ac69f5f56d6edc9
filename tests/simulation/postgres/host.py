"""What the simulated server needs of the simulation around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Signal(Protocol):
    """Something that happens once."""

    def set(self) -> None:
        """It has happened; whoever waits for it goes on."""


class Host(Protocol):
    """Time, waiting and faults. `client` names the simulated process that calls."""

    def now(self) -> int:
        """Virtual microseconds."""

    def signal(self) -> Signal:
        """A new signal, which is not set."""

    def wait(self, signal: Signal, seconds: float | None) -> bool:
        """Suspend the calling greenlet until the signal is set; False: the time is over.

        Raises something that is no `Exception`, such as `GreenletExit`, when the calling process was killed.
        """

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call on the server's side, where nobody is suspended."""

    def round_trip(self, client: str, what: str) -> str:
        """Called for each message to the server: connect, begin, execute, commit, rollback.

        May suspend the caller for the time that the message takes. Returns what goes wrong:

        - "": nothing.
        - "lost_before": the connection breaks before the server has the message.
        - "lost_after": it breaks when the server has done what the message says, before the reply.
        - "hang": the server is silent; a commit may take effect later, see `hanging`.
        - "refused": nobody listens (connect only).
        """

    def hanging(self, client: str) -> tuple[float, bool]:
        """For how many seconds a commit hangs, and whether it takes effect then or is rolled back."""
