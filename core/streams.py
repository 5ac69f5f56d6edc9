"""A model's answer as it streams: several texts that grow side by side, its parts.

Each part only grows, and parts keep the order in which they appeared. So the number of characters of each part names a
place in the answer, whoever cut it into which pieces on the way.
"""

from __future__ import annotations

from typing import Any

import msgspec

TEXT, REASONING, CALL = "text", "reasoning", "call"
"""Kinds of parts: the answer's text, the model's reasoning, the arguments of one tool call."""


REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Where endpoints send a model's reasoning; of one that sends it twice, what it sends first is streamed."""

CHUNK_BOUNDS = tuple(10_000 * 2**power for power in range(14))
"""Upper bounds, in microseconds, by which times from one streamed chunk to the next are counted: 0.01 … 81.92 s, those
that OpenTelemetry's GenAI conventions advise. Events hold counts by them: other bounds need another field there."""


def reasoning_of(data: Any) -> str:
    """The reasoning that can be read in what a provider wants back (`messages.PROVIDER_DATA`), as it was streamed."""
    found = []
    for item in data.get("items") or ():
        if item.get("type") == "thinking":
            found += _texts([item], "thinking")
        elif item.get("type") == "reasoning":
            summary = "\n\n".join(_texts(item.get("summary"), "text"))
            found += [summary] if summary else _texts(item.get("content"), "text")
    return "".join(found)


def _texts(parts: Any, name: str) -> list[str]:
    found = [part.get(name) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [text for text in found if isinstance(text, str)]


class Piece(msgspec.Struct, frozen=True):
    """What an endpoint has sent of one part.

    Attributes:
        index: of a tool call, its place among the answer's tool calls.
        name: of a tool call, its tool.
    """

    kind: str
    text: str
    index: int = 0
    name: str = ""


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new in a part.

    Attributes:
        place: of the part among all, in the order in which they appeared.
        offset: where `text` begins in it, in characters.
    """

    place: int
    kind: str
    offset: int = 0
    text: str = ""
    index: int = 0
    name: str = ""

    def after(self, length: int) -> Part:
        """The rest of it for one who has so many characters of the part."""
        cut = max(0, length - self.offset)
        return msgspec.structs.replace(self, offset=self.offset + cut, text=self.text[cut:])


class Parts:
    """The parts of an answer as far as they have come."""

    def __init__(self) -> None:
        self._heads: list[Piece] = []
        self._places: dict[tuple[str, int], int] = {}
        self._texts: list[list[str]] = []
        self.lengths: list[int] = []
        """Characters of each part: what somebody has who has all of it."""

    def add(self, piece: Piece) -> None:
        """More has come."""
        place = self._places.get((piece.kind, piece.index))
        if place is None:
            place = self._places[piece.kind, piece.index] = len(self._heads)
            self._heads.append(piece)
            self._texts.append([])
            self.lengths.append(0)
        self._texts[place].append(piece.text)
        self.lengths[place] += len(piece.text)

    def take(self, parts: list[Part]) -> None:
        """More has come, as `after` returned it."""
        for part in parts:
            known = self.lengths[part.place] if part.place < len(self.lengths) else 0
            if part.offset <= known:
                self.add(Piece(part.kind, part.after(known).text, part.index, part.name))

    def text(self, kind: str) -> str:
        """All of the parts of a kind."""
        return "".join("".join(self._texts[place]) for place, head in enumerate(self._heads) if head.kind == kind)

    def calls(self) -> list[tuple[str, str, str]]:
        """The tool calls, without ids, as `ModelAnswer` has them."""
        return [
            ("", head.name, "".join(self._texts[place])) for place, head in enumerate(self._heads) if head.kind == CALL
        ]

    def after(self, lengths: list[int]) -> list[Part]:
        """What is new for one who has so much of each part; of a part that is not among them, all."""
        found = []
        for place, head in enumerate(self._heads):
            have = lengths[place] if place < len(lengths) else -1
            if have < self.lengths[place]:
                texts = self._texts[place]
                texts[:] = ["".join(texts)]
                start = max(0, have)
                found.append(Part(place, head.kind, start, texts[0][start:], head.index, head.name))
        return found
