"""How many nodes a cluster may have, and how soon that follows the load: settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MOST_NODES = 10_000
UP_SECONDS = 5.0
DOWN_SECONDS = 300.0

SCALED_DOWN = "the load is low"
"""The reason of a drain after which the node is given back."""

NODES, UP_AFTER, DOWN_AFTER = "UNDERSTUDY_NODES", "UNDERSTUDY_SCALE_UP_AFTER", "UNDERSTUDY_SCALE_DOWN_AFTER"


@dataclass(frozen=True)
class Scaling:
    """Limits, and times in seconds.

    Attributes:
        least, most: nodes with CPUs; Ray's autoscaler has limits of its own, which hold as well.
        up_after: a session waits so long for a session actor before a node is asked for; between two requests as well.
        down_after: so long the load was low before a node is given back; between two of these as well.
    """

    least: int
    most: int
    up_after: float = UP_SECONDS
    down_after: float = DOWN_SECONDS

    def __str__(self) -> str:
        return f"{self.least}-{self.most} (up after {self.up_after:g} s, down after {self.down_after:g} s)"


def scaling_of(env: Mapping[str, str]) -> tuple[Scaling | None, list[str]]:
    """What the environment says, and what is wrong with it; None where the number of nodes does not follow the load."""
    problems = []
    times = {}
    for name, default in ((UP_AFTER, UP_SECONDS), (DOWN_AFTER, DOWN_SECONDS)):
        text = env.get(name) or ""
        if text and not (re.fullmatch(r"\d{1,5}(\.\d+)?", text) and float(text) > 0):
            problems.append(f"{name}={text!r} must be seconds, more than 0 and less than 100000")
            text = ""
        times[name] = float(text) if text else default
    text = env.get(NODES) or ""
    if not text:
        return None, problems
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MOST_NODES:
        problems.append(f"{NODES}={text!r} must be the least and the most nodes, such as 3-10, at most {MOST_NODES}")
        return None, problems
    return Scaling(int(found[1]), int(found[2]), times[UP_AFTER], times[DOWN_AFTER]), problems
