"""What reaches a session beside the course of its run: messages that steer it, and inputs that are merged into it."""

from __future__ import annotations

from collections.abc import Iterable

from understudy.messages import Message
from understudy.records import STEER, InboxItem

from .draft import Draft
from .window import Window


def steers(inbox: Iterable[InboxItem]) -> list[InboxItem]:
    """What was accepted to steer the run and the model was not sent yet, oldest first."""
    return [item for item in inbox if item.kind == STEER]


def take_steers(window: Window, draft: Draft) -> None:
    """Make messages of what steers the run. One commit has them, the model call that is sent them, and the end of their
    inbox rows."""
    for item in steers(window.inbox):
        draft.say(window, Message("user", item.payload["content"], origin=STEER))
        draft.inbox_done.append(item.id)


def inputs_of(window: Window) -> list[InboxItem]:
    """The inputs that the session's next run is made of: the first that waits, or all if the agent merges them."""
    waiting = [item for item in window.inbox if item.kind == "input"]
    return waiting if window.spec.get("follow_ups") == "merge" else waiting[:1]
