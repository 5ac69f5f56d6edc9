"""What reaches a session beside the course of its run: messages that steer it, and inputs that are merged into it."""

from __future__ import annotations

from collections.abc import Iterable

from understudy.agents import CHILD
from understudy.commands import COMMAND
from understudy.messages import Message
from understudy.records import STEER, InboxItem

from .draft import Draft
from .window import CONTINUATION, Window


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
    """The inputs that the session's next run is made of: the first that waits, or all if the agent merges them; and
    what tells of sub-agents' ends."""
    waiting = [item for item in window.inbox if item.kind == "input"]
    if window.spec.get("follow_ups") == "merge":
        return waiting
    return [item for number, item in enumerate(waiting) if number == 0 or tells_end(item)]


def tells_end(item: InboxItem) -> bool:
    """Whether it tells of the end of a sub-agent, or of a command, that was at work in the background."""
    return item.kind == "input" and bool(item.payload.get("child_id") or item.payload.get("command"))


def message_of(item: InboxItem) -> Message:
    """The message that an input becomes."""
    origin = (CHILD if item.payload.get("child_id") else COMMAND) if tells_end(item) else ""
    return Message("user", item.payload["content"], origin=origin)


def take_news(window: Window, draft: Draft) -> None:
    """Make what tells of sub-agents' ends a part of the run, which has begun: one commit has the messages, and the
    model call that is sent them. Not in the midst of a reply that is to be continued."""
    if any(message.origin == CONTINUATION for message in draft.messages):
        return
    for item in window.inbox:
        if tells_end(item) and item.key not in (draft.start_run, *draft.merge_runs):
            draft.say(window, message_of(item))
            draft.merge_runs += (item.key,)
