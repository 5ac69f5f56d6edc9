"""The collector: keeps every span that it takes, and at times takes none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from understudy.identifiers import digest, span_identifier


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


def caller_of(session_id: str, run_id: str) -> dict[str, Any]:
    """The span that an input comes from: of a caller that records its trace, of one that does not, or none."""
    picked = int(digest("caller", session_id, run_id, size=1), 16) % 3
    if not picked:
        return {}
    trace_id = digest("trace of a caller", session_id, run_id)
    return {"trace_id": trace_id, "parent_span_id": span_identifier(trace_id), "sampled": picked == 1}


def unrecorded(sent: Iterable[tuple[str, str]]) -> set[int]:
    """The traces that callers of these inputs (session, run) do not record: no service may export anything of them."""
    callers = [caller_of(*one) for one in sent]
    return {int(caller["trace_id"], 16) for caller in callers if caller and not caller["sampled"]}


def key_of(span: ReadableSpan) -> tuple[int, int]:
    """Its ids."""
    context: Any = span.context
    return context.trace_id, context.span_id


def text_of(span: ReadableSpan) -> str:
    """All that it says."""
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else "nothing"
    links = [f"{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in span.links]
    attributes = sorted((span.attributes or {}).items())
    return f"{span.name} {span.start_time} {span.end_time} below {parent}, from {links}: {attributes}"
