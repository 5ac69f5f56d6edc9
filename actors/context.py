"""What a model is sent of a long history: two axes, the representation of messages and folds, as functions of the log.

The log is never changed. What is left out of requests is said by records in it (`FOLD`), each of which has all of it: a
request is a function of the messages, the last record among them, and the specification, the same after any crash.
Between two records the beginning of every request stays as it is, so endpoints can keep what they made of it.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from understudy.estimates import attachment_size
from understudy.messages import FOLD, NEVER, THIS_ROUND, Content, Message, attached

FOLD_REQUEST, FOLD_ANSWER = "fold_request", "fold_answer"
"""Origins beside `FOLD`: of what a model is asked for a summary, and of its answer. The latter is also the purpose of
that model call (`ModelRequest.purpose`)."""

SUMMARISE = (
    "Do not go on with the task now. The messages above will be removed from this conversation, since it becomes too "
    "long, and you will go on with what you write here in their place. Summarise them, in at most {words} words: what "
    "you were asked, with all conditions, in the words of whoever asked; what was done and found out, with names, "
    "numbers, paths and ids as they are; what was decided, and why; what is still open, and what you were about to do. "
    "Answer with the summary only."
)
NOTES = (
    "Do not go on with the task now. The messages above will be removed from this conversation, since it becomes too "
    "long, and you will go on with what you write here in their place. Write notes, in at most {words} words, under "
    "these headings: TASK (what you were asked, with all conditions, in the words of whoever asked); FACTS (what was "
    "found out, with names, numbers, paths and ids as they are); DECISIONS (and why); DONE; OPEN (what is left, and "
    "what you were about to do). Answer with the notes only."
)
INSTRUCTIONS = {"summarise": SUMMARISE, "notes": NOTES}
"""What the model is asked, by `AgentSpec.context.fold`."""

REMOVED = "Earlier messages of this conversation were removed, since it became too long."
SUMMARY = "\n\nA summary of them:\n\n{text}"
GAP = "\n\nThe summary does not have the latest of them."
INPUT = "\n\nThe inputs among them that you are at work on:\n\n{text}"
GONE = "\n[its attachments are left out now]"
RECALL = "\n\nWith the tool recall you can look for them, with read_message read one in full."

INPUT_CHARACTERS = 4_000
"""Inputs that were folded away while their run goes on are repeated: in full, if they are no longer together."""
ANY_REPLY = 4_096
"""Tokens that are kept free for a reply of any length, unless that is more than a quarter of the window."""
LONGEST, SHORTEST = 16_000, 500
"""Characters that each message keeps where nothing else helps: at first, and at last."""
WORTH_WHILE = 0.13
"""A fold is made for this share of what may be used, or more."""
NEARLY_FULL = 0.95
"""Until this share of the context is used a fold that failed holds nothing up."""
ATTEMPTS = 3
"""So often the model is asked for a summary of less and less, where its endpoint refuses the request as too long."""


class Policy(msgspec.Struct, frozen=True):
    """`AgentSpec.context`, compiled; the defaults are those of sessions of earlier versions, which have none."""

    window: int | None = None
    representation: str = "terse"
    fold: str = "summarise"
    fold_at: float = 0.75
    keep: float = 0.25
    elide: dict[str, int] = msgspec.field(default_factory=lambda: {"*": 400})
    longest_result: int = 50_000


class View(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which part of the log a model is sent, and how.

    Attributes:
        through: messages up to this `seq` are left out; `note` stands for them.
        elided: results of tools up to this `seq` are shortened (`Policy.elide`).
        longest: characters that each message keeps; 0 for all.
        window: of the model in tokens, as a refusal of its endpoint said; 0 before there was one.
        summary: of what is left out; empty if there is none.
        gap: the latest of what is left out is not in the summary.
        input: those among what is left out of the run that was at work then.
        per_byte: tokens for each byte, as far as the endpoint's counts have shown it before; 0 if they have not.
        seq: of the record; 0 if there is none, or it is not committed yet.
    """

    through: int = 0
    elided: int = 0
    longest: int = 0
    window: int = 0
    summary: str = ""
    gap: bool = False
    input: str = ""
    per_byte: float = 0.0
    seq: int = 0

    @classmethod
    def of(cls, record: Message) -> View:
        """What a record says."""
        return msgspec.convert({**(record.extra or {}), "summary": record.text, "seq": record.seq}, cls)

    def record(self) -> Message:
        """The message that says this in the log."""
        extra = msgspec.to_builtins(self)
        summary = extra.pop("summary", None)
        extra.pop("seq", None)
        return Message("user", summary, origin=FOLD, visibility=NEVER, extra=extra)

    def note(self, *, recall: bool) -> str:
        """What a model is sent in place of what is left out; empty if nothing is.

        Args:
            recall: the agent has the tools that read the log.
        """
        if not self.through:
            return ""
        summary = SUMMARY.format(text=self.summary) + (GAP if self.gap else "") if self.summary else ""
        return REMOVED + summary + (INPUT.format(text=self.input) if self.input else "") + (RECALL if recall else "")


DEFAULT, WHOLE = Policy(), View()


def fold_request(policy: Policy, through: int, size: int, words: int) -> Message:
    """What the model is asked in order to fold the messages up to `through`.

    Args:
        size: of the context, in tokens: after a failure nobody asks again before it has grown.
    """
    text = INSTRUCTIONS[policy.fold].format(words=words)
    extra = {"through": through, "size": size}
    return Message("user", text, origin=FOLD_REQUEST, visibility=THIS_ROUND, extra=extra)


def shown(message: Message, policy: Policy, view: View, number: int) -> Content:
    """A message's content as the model is sent it.

    Args:
        number: by which the agent can read it in full; 0 if it can't.
    """
    limit = view.longest
    if message.role == "tool":
        limit = min(limit or policy.longest_result, policy.longest_result)
        if message.seq and message.seq <= view.elided:
            name = message.name or ""
            limit = min(limit, policy.elide.get(name, policy.elide.get("*", limit)))
        text = shortened(message.text, limit, number) if limit else message.text
        return text + GONE if attached(message.content) and not attachments(message, view) else text
    if not limit:
        return message.content
    if isinstance(message.content, list):
        return [_shortened_part(part, limit, number) for part in message.content]
    return shortened(message.content, limit, number) if message.content else message.content


def attachments(message: Message, view: View) -> list[dict[str, Any]]:
    """The images and documents of a tool's result that a model is sent: none once the result is shortened."""
    is_shortened = view.longest or (message.seq and message.seq <= view.elided)
    return [] if is_shortened else attached(message.content)


def saved(message: Message, policy: Policy) -> int:
    """By how much less a tool's result counts once it is elided, in characters."""
    limit = policy.elide.get(message.name or "", policy.elide.get("*", policy.longest_result))
    counted = sum(map(attachment_size, attached(message.content)))
    return max(0, min(len(message.text), policy.longest_result) - limit) + counted


def _shortened_part(part: dict[str, Any], limit: int, number: int) -> dict[str, Any]:
    text = part.get("text")
    return {**part, "text": shortened(text, limit, number)} if isinstance(text, str) else part


def shortened(text: str, limit: int, number: int = 0) -> str:
    """The beginning and the end of a text that is longer than so many characters, and that this is not all.

    Args:
        number: of the message, by which the whole text can be read; 0 if it can't.
    """
    if len(text) <= limit:
        return text
    how = f"; read_message with number {number} has them" if number else ""
    tail = limit // 4
    left_out = f"\n[… {len(text) - limit} of {len(text)} characters are left out{how} …]\n"
    return text[: limit - tail] + left_out + (text[-tail:] if tail else "")


def shortened_arguments(arguments: str, limit: int) -> str:
    """A call's arguments, which must stay JSON, no longer than so many characters or little more."""
    if not limit or len(arguments) <= limit:
        return arguments
    return json.dumps({"shortened": shortened(arguments, limit)})


class Place(NamedTuple):
    """A place where the history can be cut, so that no call is parted from its result.

    Attributes:
        seq: of the last message before it.
        size: of all that is before it, as it counts.
        saved: how much smaller that would be with its results elided.
        length: of the conversation's text before it, in bytes.
    """

    seq: int
    size: int
    saved: int
    length: int = 0


class Measure(msgspec.Struct, frozen=True):
    """How large a request would be. Sizes are bytes of text; an image counts as the text of as many tokens.

    Attributes:
        tokens: all of it, as estimated.
        per_byte: tokens for each byte of text.
        size: of all messages.
        ends: where it can be cut, in order. The first one is the present beginning of the history.
    """

    tokens: int
    per_byte: float
    size: int
    ends: list[Place]

    def cut(self, keep: float, after: int) -> int:
        """Up to which `seq` the history can go so that no more than `keep` tokens stay, or as few as possible; `after`
        if there is no place to cut behind that."""
        bound = self.size - keep / self.per_byte
        places = [place for place in self.ends if place.seq > after]
        return next((place.seq for place in places if place.size >= bound), places[-1].seq if places else after)

    def between(self, after: int, until: int) -> float:
        """Tokens of the history behind the one `seq` and up to the other."""
        return (self._at(until).size - self._at(after).size) * self.per_byte

    def saved(self, until: int) -> float:
        """Tokens that are saved where results up to there are elided."""
        return self._at(until).saved * self.per_byte

    def _at(self, seq: int) -> Place:
        return next((place for place in reversed(self.ends) if place.seq <= seq), self.ends[0])

    def largest(self, tokens: float, after: int, until: int) -> int:
        """The last place behind `after`, and not behind `until`, before which there are at most so many tokens; 0 if
        there is none."""
        among = (place for place in reversed(self.ends) if after < place.seq <= until)
        return next((place.seq for place in among if place.size * self.per_byte <= tokens), 0)


class Trouble(msgspec.Struct, frozen=True):
    """What has gone wrong since the run last got on.

    Attributes:
        refused: the endpoint refused the last model call as too long.
        asked: so often a summary was asked for since then, in vain.
        failed: the last request for a summary in the whole session, if no record has followed it.
    """

    refused: bool = False
    asked: int = 0
    failed: Message | None = None


def learned_window(said: int, known: int, tokens: int, reply: int) -> int:
    """The window of a model whose endpoint has refused a request as too long, in tokens.

    Args:
        said: by the endpoint; 0 if it did not say.
        known: before; 0 if nothing was.
        tokens: of the request, as estimated. A window in which it fits explains nothing: the estimate is wrong, and
            what is known is corrected by as much.
        reply: the longest one that was wanted; 0 for any length.
    """
    window = said or known
    return window if 0 < window < tokens + reply else max(1, round(tokens * 0.8))


def next_step(policy: Policy, view: View, measure: Measure, trouble: Trouble, reply: int) -> View | int | None:
    """What must be done before the model is asked. Pure.

    Args:
        reply: the longest reply that is wanted, in tokens: it needs its place in the window; 0 for any length.

    Returns:
        None: nothing. A view: from now on the model is sent that; to be asked again then. A number: the history up to
        this `seq` is to be summarised.

    Raises:
        Exhausted: the endpoint refuses what is left, and nothing more can be left out.
    """
    window = view.window or policy.window
    if window is None:
        return None
    limit = max(window // 4, window - (reply or min(ANY_REPLY, window // 4)))
    if not trouble.refused and measure.tokens <= policy.fold_at * limit:
        return None
    keep, least = policy.keep * limit, WORTH_WHILE * policy.fold_at * limit
    cut = measure.cut(keep, max(view.through, view.elided))
    if policy.representation == "terse" and not trouble.asked and measure.saved(cut) > 2 * least:
        return msgspec.structs.replace(view, elided=cut)
    cut = measure.cut(keep, view.through)
    worth_while = cut > view.through and (trouble.refused or measure.between(view.through, cut) > least)
    if policy.fold in INSTRUCTIONS and worth_while and _may_ask(trouble, measure, least):
        # The request for it must be accepted: of what is too long a first part is summarised.
        share = 0.5**trouble.asked if trouble.refused and trouble.asked else 0.9
        fitting = measure.largest(share * limit, view.through, cut)
        if fitting:
            return fitting
    if not trouble.refused and measure.tokens <= NEARLY_FULL * limit:
        return None
    if policy.fold != "none" and worth_while:
        return msgspec.structs.replace(view, through=cut, gap=True)
    if not trouble.refused:
        return None  # the endpoint decides
    longest = view.longest // 2 if view.longest else LONGEST
    if longest < SHORTEST or (policy.fold == "none" and policy.representation == "full"):
        raise Exhausted
    return msgspec.structs.replace(view, longest=longest)


def _may_ask(trouble: Trouble, measure: Measure, least: float) -> bool:
    """Whether the model is asked for a summary: not for ever, and after a failure not before there is more of it."""
    if trouble.refused and trouble.asked:
        return trouble.asked < ATTEMPTS
    before: int = (trouble.failed.extra or {}).get("size", 0) if trouble.failed is not None else 0
    return not before or measure.tokens > before + least


class Exhausted(Exception):
    """Nothing more can be left out of a request."""
