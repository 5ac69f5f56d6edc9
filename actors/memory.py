"""An agent's memory: what it is shown of its notes and of what its providers recall, as a message of the log.

The message is committed right behind the input of the run that it is for, with a batch that folds the history, or with
the first model call after a handoff; and only if it says something else than the last one that the model still sees. So
a prompt's beginning stays the same from round to round and from run to run, and a request depends on nothing that is
not committed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile
from typing import Any

import msgspec

from understudy.agents import CHILD
from understudy.commands import COMMAND
from understudy.errors import UnderstudyError
from understudy.estimates import BYTES_PER_TOKEN
from understudy.events import ERROR_UNCUT, MemoryFailed, MemoryRecalled
from understudy.handoffs import ORIGIN as HANDED_OFF
from understudy.messages import ALWAYS, FOLD, MEMORY, MEMORY_MARK, Message
from understudy.notes import TODO_KEY, todo_line
from understudy.ports import Node
from understudy.reads import Note

from .commits import Commits, Patience
from .context import FOLD_REQUEST
from .execution import presentable, run
from .providers import RECALL, REMEMBER, LoadedProvider, MemoryContext, is_async
from .window import Window

logger = logging.getLogger(__name__)

HEAD = (
    f"{MEMORY_MARK}\nWhat you have kept in mind, as it was when this turn began. It is not from the user, and asks "
    "nothing of you.\n"
)
FOOT = "</memory>"
MARKS = re.compile(r"<(\s*/?\s*memory\b[^<>]*)>", re.IGNORECASE)
"""What a model could take for `MEMORY_MARK` or `FOOT`."""
NOTHING = "There is nothing any more.\n"
LEFT_OUT = "({number} more did not fit: list_notes has them.)\n"

ProviderLoader = Callable[[dict[str, Any]], Awaitable[LoadedProvider]]


def memory_message(
    window: Window, notes: Sequence[Note], recalled: Sequence[tuple[str, str]], drafted: Sequence[Message] = ()
) -> Message | None:
    """The message that shows an agent its memory; None if it has nothing new to say.

    Args:
        notes: the first one is the most important.
        recalled: provider and text.
        drafted: messages that are about to be committed.
    """
    last = visible_memory(window, drafted)
    text = memory_text(notes, recalled, limit_of(window, drafted))
    if text is None:
        text = f"{HEAD}{NOTHING}{FOOT}" if last is not None else None
    return None if text is None or (last is not None and last.content == text) else Message("user", text, origin=MEMORY)


def visible_memory(window: Window, drafted: Sequence[Message] = ()) -> Message | None:
    """The last message that showed the agent its memory, if its model still sees it: what was folded it does not."""
    through = window.view(drafted).through
    for message in chain(reversed(drafted), reversed(window.messages)):
        if message.seq and message.seq <= through:
            return None
        if message.origin == MEMORY and message.visibility == ALWAYS:
            return message
    return None


def limit_of(window: Window, drafted: Sequence[Message] = ()) -> int:
    """The longest text of an agent's memory, in bytes: its share of the model's window, where that is known."""
    memory = window.spec["memory"]
    tokens: int = memory["max_tokens"]
    known = window.view(drafted).window or window.policy.window
    return (min(tokens, int(known * memory["share"])) if known else tokens) * BYTES_PER_TOKEN


def memory_text(notes: Sequence[Note], recalled: Sequence[tuple[str, str]], limit: int) -> str | None:
    """What an agent is shown, in at most `limit` bytes; None for nothing. What was recalled has up to half of it where
    the notes would take all."""
    texts = [(f"Recalled by {name}:\n", f"{_inside(text)}\n") for name, text in recalled]
    wanted = sum(_size(head) + _size(text) for head, text in texts)
    room = limit - _size(HEAD) - _size(FOOT) - _size(LEFT_OUT)
    if room <= 0:
        return None
    lines, left_out, space = [], 0, room - min(wanted, room // 2)
    for note in notes:
        line = _inside(_line(note))
        if not line:
            continue
        if _size(line) > space:
            left_out += 1
            continue
        lines.append(line)
        space -= _size(line)
    if left_out:
        lines.append(LEFT_OUT.format(number=left_out))
    space += min(wanted, room // 2)
    for head, text in texts:
        text = _cut(text, space - _size(head))
        if text:
            lines.append(head + text)
            space -= _size(head) + _size(text)
    return f"{HEAD}{''.join(lines)}{FOOT}" if lines else None


def _line(note: Note) -> str:
    """A note as it is shown; nothing for a todo list that is done."""
    if note.key != TODO_KEY:
        return f"- {note.scope} note {note.key}{' (pinned)' if note.pinned else ''}: {note.text}\n"
    items = msgspec.json.decode(note.text, type=list[dict[str, str]])
    if all(item["status"] == "done" for item in items):
        return ""
    return "- your todo list:\n" + "".join(f"  {todo_line(item)}\n" for item in items)


def _inside(text: str) -> str:
    """A text with nothing in it that could be taken for the mark at the beginning or the end of a memory."""
    return MARKS.sub(r"[\1]", text)


def _size(text: str) -> int:
    return len(text.encode())


def _cut(text: str, size: int) -> str:
    """The beginning of a text, in at most so many bytes; nothing where hardly anything fits."""
    if _size(text) <= size:
        return text
    return "" if size < 40 else text.encode()[: size - 4].decode(errors="ignore") + "…\n"


@dataclass(frozen=True)
class _Bound:
    """A provider's function with its context, ready to be run."""

    name: str
    function: Callable[[], Any]
    is_async: bool


class Memory:
    """The memory of a session's agent, as its activation has it. Nothing is done for an agent without one.

    Attributes:
        stuck: a synchronous provider outlived its timeout and still runs: this process must be replaced.
    """

    def __init__(
        self, window: Window, node: Node, frame_id: str, commits: Commits, patience: Patience, load: ProviderLoader
    ) -> None:  # fmt: skip
        self.stuck = False
        self._window = window
        self._node = node
        self._frame_id = frame_id
        self._commits = commits
        self._patience = patience
        self._load = load

    async def before_ask(self) -> Message | None:
        """What the agent is to be shown before a model call (`message`): only where it has just taken the session over,
        or where the next batch folds the history, and with it what the agent was shown."""
        drafted = self._commits.draft.messages
        if drafted and drafted[-1].origin == FOLD_REQUEST:  # the model is asked for a summary, and for nothing else
            return None
        if self._has_taken_over(drafted):
            return await self.message()
        folds = any(message.origin == FOLD for message in drafted)
        if self._window.spec.get("memory") is None or not folds or visible_memory(self._window, drafted) is not None:
            return None
        if self._window.continuations(drafted):  # the model is to go on with its reply, and with nothing else
            return None
        return await self.message()

    def _has_taken_over(self, drafted: Sequence[Message]) -> bool:
        """Whether a handoff has come after all that a model has said, and no memory was shown since."""
        for message in self._window.backwards(drafted):
            if message.origin in (HANDED_OFF, MEMORY) or (message.role == "assistant" and not message.origin):
                return message.origin == HANDED_OFF
        return False

    async def message(self) -> Message | None:
        """What the agent is to be shown now, if it is not what it sees already (`memory_message`). The next batch says
        that it was recalled.

        Raises:
            Fenced: another activation of the session exists.
        """
        window = self._window
        if window.spec.get("memory") is None:
            return None
        with self._patience.waiting():
            notes = await self._node.memory(self._frame_id, window.activation)
        found = await asyncio.gather(*(self._recall(provider) for provider in self._providers(RECALL)))
        recalled = [(name, text) for name, text in found if text]
        message = memory_message(window, notes, recalled, self._commits.draft.messages)
        if message is not None:
            event = MemoryRecalled(notes=len(notes), recalled=len(recalled), size=_size(message.text))
            self._commits.draft.entries.append(event)
        return message

    async def remember(self, text: str, status: str) -> None:
        """Let the providers remember a run, before the commit of its end."""
        context = self._context(text, status)
        await asyncio.gather(*(self._call(provider, REMEMBER, context) for provider in self._providers(REMEMBER)))

    def _providers(self, does: str) -> list[dict[str, Any]]:
        memory = self._window.spec.get("memory") or {}
        return [provider for provider in memory.get("providers", ()) if does in provider["does"]]

    async def _recall(self, provider: dict[str, Any]) -> tuple[str, str]:
        """A provider's name, and what it recalls."""
        found = await self._call(provider, RECALL, self._context(self._input()))
        if found is not None and not isinstance(found, str):
            self._failed(provider["name"], RECALL, f"it returned {type(found).__name__}, not a text")
            found = None
        return provider["name"], presentable(found or "").strip()

    def _input(self) -> str:
        """The texts of the inputs that the run began with."""
        said = reversed(list(self._window.backwards(self._commits.draft.messages)))
        begun = takewhile(lambda message: message.role == "user" and message.origin in ("", CHILD, COMMAND), said)
        return "\n\n".join(message.text for message in begun)

    def _context(self, text: str, status: str = "") -> MemoryContext:
        window = self._window
        return MemoryContext(
            session_id=window.session_id, run_id=window.run_id or "", agent=window.spec["name"],
            call_key=f"{window.session_id}/{window.run_id}", text=text, status=status,
            max_tokens=(window.spec.get("memory") or {}).get("max_tokens", 0), redone=window.redone,
        )  # fmt: skip

    async def _call(self, provider: dict[str, Any], does: str, context: MemoryContext) -> Any:
        """What a provider returns; None if it fails, which holds nobody up."""
        timeout = self._window.spec["memory"]["timeout"]
        self._patience.expect(time.monotonic() + timeout)
        try:
            loaded = await self._load(provider)
        except UnderstudyError as error:
            return self._failed(provider["name"], does, error.message)
        except Exception as error:  # of its module, which was to be read again, say
            return self._failed(provider["name"], does, f"{type(error).__name__}: {error}")
        function = loaded.recall if does == RECALL else loaded.remember
        if function is None:
            return self._failed(provider["name"], does, "it has no such method any more")
        bound = _Bound(provider["name"], partial(function, context), is_async(function))
        self._patience.expect(time.monotonic() + timeout)  # to have its code may have taken long
        outcome, found, stuck = await run(bound, {}, timeout, render=_same)
        self.stuck = self.stuck or stuck
        return found if outcome == "ok" else self._failed(provider["name"], does, str(found))

    def _failed(self, name: str, what: str, problem: str) -> None:
        problem = presentable(problem)
        logger.warning("session %s goes on without %s of %s: %s", self._window.session_id, what, name, problem)
        event = MemoryFailed(provider=name, what=what, error_message=problem[:ERROR_UNCUT])
        self._commits.draft.entries.append(event)


def _same(result: Any) -> Any:
    return result
