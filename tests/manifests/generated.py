"""The manifests that are made of files which others use, too: alert rules and dashboards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from .objects import KUBERNETES

SOURCES = KUBERNETES.parent / "observability" / "dashboards"
LABELS = {"app.kubernetes.io/part-of": "understudy"}
HEADER = "# Generated: scripts/manifests --write\n"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, so that a change of a dashboard is one of its lines."""


def _text(dumper: _Dumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def generated() -> dict[Path, str]:
    """What each generated file must hold."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "understudy", "labels": LABELS},
        "spec": yaml.safe_load((SOURCES / "alerts.yaml").read_text()),
    }
    dashboards = [_dashboard(path) for path in sorted(SOURCES.glob("*.json"))]
    return {
        KUBERNETES / "base" / "prometheusrule.yaml": HEADER + _dumped([rule]),
        KUBERNETES / "base" / "dashboards.yaml": HEADER + _dumped(dashboards),
    }


def _dashboard(path: Path) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"understudy-{path.stem}", "labels": {**LABELS, "grafana_dashboard": "1"}},
        "data": {path.name: json.dumps(json.loads(path.read_text()), indent=1, ensure_ascii=False) + "\n"},
    }


def _dumped(documents: list[dict[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
