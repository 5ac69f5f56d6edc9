"""The inputs of simulated sessions as texts: what changes the tasks in them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import Work

INPUTS = ("send", "replace")
"""What a client does with an input, beside putting a session away and what comes later in plans."""


def rewritten(
    work: Work, rewrite: Callable[[str], str], *, kinds: Collection[str] = (), names: Collection[str] = ("content",)
) -> Work:
    """The same work with what `rewrite` makes of its tasks.

    Args:
        kinds: of the actions whose tasks are changed; all that have one if there are none.
        names: where an action has its task.
    """
    actions = []
    for action in work.actions:
        name = next((name for name in names if action.what.get(name, "").startswith("{")), "")
        if name and (not kinds or action.kind in kinds):
            action = replace(action, what={**action.what, name: rewrite(action.what[name])})
        actions.append(action)
    return replace(work, actions=tuple(actions))


def with_calls(chosen: random.Random, work: Work, kind: str, call: Callable[[str], list[Any]]) -> Work:
    """The same work with one to three more rounds in each input, of one or two calls.

    Args:
        kind: is a part of the calls' names.
        call: draws a call of a name.
    """

    def added(text: str) -> str:
        said = json.loads(text)
        for number in range(chosen.choice((1, 1, 2, 3))):
            at = chosen.randrange(len(said["rounds"]) + 1)
            calls = [call(f"{said['name']}.{kind}{number}.{index}") for index in range(chosen.choice((1, 1, 2)))]
            said["rounds"].insert(at, calls)
            said["thinking"].insert(at, round(0.3 * chosen.random(), 3))
        return json.dumps(said)

    return rewritten(work, added, kinds=INPUTS)
