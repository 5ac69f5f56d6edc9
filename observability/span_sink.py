"""The sink for spans: what events become, on its way to an exporter; one refused for ever holds up nobody."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from opentelemetry.sdk.trace import ReadableSpan, sampling
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Sampler

from understudy.events import Event

from .export import SinkRefused
from .sampling import is_sampled
from .span_building import Attributes
from .spans import spans_of

log = logging.getLogger(__name__)

TRIES_TOGETHER = 3
"""So often a batch must be refused before it is looked into."""

WITH_CONTENT = 32
"""So many spans at once where they have content: collectors take 4 MB by default, and a span can have 64 KB."""

Content = Callable[[list[Event]], Awaitable[Mapping[int, Attributes]]]
"""Looks up the content of some events' spans: attributes by `writer_seq`."""


class SpanSink:
    """Projects events to spans and hands them to an OpenTelemetry exporter.

    An exporter says only whether it was refused, not why. A batch that was refused `TRIES_TOGETHER` times is sent in
    parts. A span is dropped, logged and counted (`dropped`) only if it is refused alone, twice, while another one is
    accepted right before and after it: a collector that is away drops nothing, however long.

    Args:
        exporter: any exporter of the OpenTelemetry SDK.
        content: where prompts, answers and arguments shall be in the spans.
        sampler: which traces are exported; the spans of others are taken over, and left out.
    """

    def __init__(
        self, exporter: SpanExporter, content: Content | None = None, sampler: Sampler = sampling.DEFAULT_ON
    ) -> None:
        self._exporter = exporter
        self._sampler = sampler
        self._content = content
        self._found: Mapping[int, Attributes] = {}
        self._refused: tuple[int, int] = (-1, 0)
        self.dropped = 0

    async def prepare(self, events: list[Event]) -> None:
        """Read what the spans shall tell beyond their events."""
        if self._content is not None:
            self._found = await self._content([event for event in events if self._is_wanted(event)])

    def take(self, events: list[Event]) -> int:
        """Export the events' spans."""
        spans = self._project(events)
        if spans and not self._accepts(spans):
            first = events[0].writer_seq
            times = self._refused[1] + 1 if self._refused[0] == first else 1
            self._refused = (first, times)
            if times < TRIES_TOGETHER or not self._in_parts(spans, times):
                raise SinkRefused(f"{len(spans)} spans were refused, for the {times}. time")
        return len(spans)

    def close(self) -> None:
        """End the exporter's retries."""
        self._exporter.shutdown()

    def _is_wanted(self, event: Event) -> bool:
        try:
            return is_sampled(self._sampler, event)
        except ValueError:  # what it has is no trace id: it has no span either, which is reported where they are made
            return False

    def _project(self, events: Iterable[Event]) -> list[ReadableSpan]:
        spans: list[ReadableSpan] = []
        for event in events:
            try:
                if is_sampled(self._sampler, event):
                    spans += spans_of(event, self._found.get(event.writer_seq))
            except Exception:
                # One event that can't be shown must not hold up all that follow.
                log.exception("event %s %d has no span", event.type, event.writer_seq)
        return spans

    def _accepts(self, spans: list[ReadableSpan]) -> bool:
        at_once = len(spans) if self._content is None else WITH_CONTENT
        parts = (spans[start : start + at_once] for start in range(0, len(spans), at_once))
        return all(self._exporter.export(part) is SpanExportResult.SUCCESS for part in parts)

    def _in_parts(self, spans: list[ReadableSpan], times: int) -> bool:
        """Export a refused batch without the spans that are to blame; False if the collector takes nothing at all."""
        good = spans[times % len(spans)]  # another one each time: this one may be to blame itself
        if len(spans) == 1 or not self._accepts([good]):
            return False
        pending = [spans]
        while pending:
            part = pending.pop()
            if self._accepts(part):
                continue
            if len(part) > 1:
                half = len(part) // 2
                pending += [part[half:], part[:half]]  # the first half first
            elif not self._is_to_blame(part, [good]):
                return False
        return True

    def _is_to_blame(self, refused: list[ReadableSpan], good: list[ReadableSpan]) -> bool:
        """Whether a span is refused, and was not only caught by the collector's going away."""
        for _ in range(2):
            if not self._accepts(good):
                return False
            if self._accepts(refused):
                return True
        if not self._accepts(good):
            return False
        self.dropped += 1
        context = refused[0].context
        identifier = f"{context.span_id:016x}" if context is not None else "?"
        log.error("span %s (%s) is dropped: the collector refuses it and takes others", identifier, refused[0].name)
        return True
