"""The collector: keeps every span that it takes, and at times takes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult


class Collector:
    """What all node services export their spans to.

    Attributes:
        spans: what was taken, by its ids; one that comes again must be the same, unless its session was removed and is
            another: a service that stood still exports what it has of the removed one when it goes on.
        failing: nothing is taken now.
        problems: what was wrong with spans.
    """

    def __init__(self) -> None:
        self.spans: dict[tuple[int, int], list[str]] = {}
        self._removed: list[str] = []
        self.failing = False
        self.problems: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Take spans."""
        if self.failing:
            return SpanExportResult.FAILURE
        for span in spans:
            text = text_of(span)
            before = self.spans.setdefault(key_of(span), [])
            if text in before:
                continue
            if before and not self.of_removed([text]):
                self.problems.append(f"span {span.name} came again and was another: {before}, {text}")
            before.append(text)
        return SpanExportResult.SUCCESS

    def forget(self, session_ids: list[str]) -> None:
        """Sessions were removed: spans of others that have their ids now have the same ids."""
        gone = [f"('gen_ai.conversation.id', '{session_id}')" for session_id in session_ids]
        self.spans = {key: texts for key, texts in self.spans.items() if not any(name in texts[0] for name in gone)}
        self._removed += gone

    def of_removed(self, texts: list[str]) -> bool:
        """Whether these are a span of a session that was removed, or of one that has its id now."""
        return any(name in text for name in self._removed for text in texts)

    def recover(self) -> None:
        """Take spans again."""
        self.failing = False

    def shutdown(self) -> None:
        """Nothing has to be ended."""

    def force_flush(self, _timeout: int = 0) -> bool:
        """Nothing is kept back."""
        return True


def key_of(span: ReadableSpan) -> tuple[int, int]:
    """Its ids."""
    context: Any = span.context
    return context.trace_id, context.span_id


def text_of(span: ReadableSpan) -> str:
    """All that it says."""
    return f"{span.name} {span.start_time} {span.end_time} {sorted((span.attributes or {}).items())}"
