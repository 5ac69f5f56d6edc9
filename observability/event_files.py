"""The event log as JSON lines, for whoever wants to keep or ship it, and how it is read back.

A document per event (`Event.to_wire()`), in the order of the journal that committed it. The disk has a batch before the
cursor moves (fsync), so nothing is missing after a power failure; after a crash some lines may come twice, and `replay`
drops those.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from understudy.events import Event
from understudy.identifiers import check_identifier
from understudy.json_text import from_json, to_json

from .export import SinkRefused
from .line_files import append_lines

log = logging.getLogger(__name__)

FILE_BYTES = 64 * 1024 * 1024
"""Size at which the next file is begun. Full ones stay: they are whoever's asked for them."""

_NAME = re.compile(r"events-(?P<writer>.+)-(?P<first>\d{16})\.jsonl")


class EventFiles:
    """Appends events to `events-WRITER-FIRST.jsonl`, FIRST being the first event's `writer_seq`; not read by others."""

    def __init__(self, directory: Path, writer: str, *, max_bytes: int = FILE_BYTES) -> None:
        self._directory = directory
        self._writer = check_identifier(writer, "event writer")
        self._max_bytes = max_bytes

    async def prepare(self, events: list[Event]) -> None:
        """The events say it all."""

    def take(self, events: list[Event]) -> int:
        """Append the events; they are on the disk when this returns."""
        lines = "".join(f"{to_json(event.to_wire())}\n" for event in events)
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            append_lines(self._file(events[0].writer_seq), lines.encode(), sync=True)
        except OSError as error:
            raise SinkRefused(f"{self._directory} can't be written: {error.strerror}") from None
        return len(events)

    def close(self) -> None:
        """Nothing is held open."""

    def _file(self, first: int) -> Path:
        files = _files(self._directory).get(self._writer)
        if files and files[-1].stat().st_size < self._max_bytes:
            return files[-1]
        return self._directory / f"events-{self._writer}-{first:016d}.jsonl"


def _files(directory: Path) -> dict[str, list[Path]]:
    """The files of a directory by writer, in their order."""
    found: dict[str, list[Path]] = {}
    for path in sorted(directory.glob("events-*.jsonl")):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(match["writer"], []).append(path)
    return found


def replay(path: Path | str) -> Iterator[Event]:
    """The events of a directory's files, or of one file, each once: writer by writer, in the order of `writer_seq`.

    Lines that can't be read, torn by a crash, are skipped with a warning: what they were to say comes again behind.
    """
    path = Path(path)
    groups = _files(path).values() if path.is_dir() else [[path]]
    for files in groups:
        last = 0
        for event in (event for file in files for event in _events(file)):
            if event.writer_seq > last:
                last = event.writer_seq
                yield event


def _events(file: Path) -> Iterator[Event]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield Event.from_wire(from_json(line))
            except (ValueError, KeyError, TypeError):
                if line.strip():
                    log.warning("%s, line %d can't be read and is skipped", file, number)
