"""The files as Grafana and Prometheus take them."""

from __future__ import annotations

from pathlib import Path

from .alerts import RUNBOOK, rule_file
from .fleet import fleet
from .session_tree import session_tree


def built() -> dict[str, str]:
    """Each file's text by its name."""
    return {"fleet.json": fleet().text(), "session-tree.json": session_tree().text(), "alerts.yaml": rule_file()}


def write(directory: Path, runbook: str | None = None) -> list[Path]:
    """Write them into a directory, which is made if need be; files of these names are replaced.

    Args:
        runbook: URL of the page that each alert's `runbook_url` leads to a section of, instead of our docs/alerts.md.

    Raises:
        OSError: it can't be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in built().items():
        if runbook is not None:
            text = text.replace(f"runbook_url: {RUNBOOK}#", f"runbook_url: {runbook}#")
        path = directory / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
