"""The files as Grafana and Prometheus take them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .alerts import COST_PER_HOUR, RUNBOOK, rule_file
from .fleet import fleet
from .session_tree import session_tree


def built(runbook: str = RUNBOOK, cost_per_hour: float = COST_PER_HOUR) -> dict[str, str]:
    """Each file's text by its name; the arguments are those of `rule_file`."""
    rules = rule_file(runbook, cost_per_hour)
    return {"fleet.json": fleet().text(), "session-tree.json": session_tree().text(), "alerts.yaml": rules}


def write(directory: Path, files: Mapping[str, str]) -> list[Path]:
    """Write them into a directory, which is made if need be; files of these names are replaced.

    Raises:
        OSError: it can't be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files.items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
